# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one writer's first save, in a fresh process where nothing of it is allocated yet.

In a process that has saved before, buffers that were kept would hide in the starting point.
`python -m bench.memory` is that process; it prints one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import peers, states
from bench.measure import measure
from bench.results import FirstSave

REPOSITORY = Path(__file__).resolve().parent.parent


def first_save(peer: str, state: str, *, size: float, seed: int, directory: Path) -> FirstSave:
    """Runs the measurement in a process of its own, saving below `directory`.

    Raises RuntimeError with the last line of what the process wrote on stderr.
    """
    command = [sys.executable, "-m", "bench.memory", "--peer", peer, "--state", state]
    command += ["--size", str(size), "--seed", str(seed), "--dir", str(directory)]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        lines = finished.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"exit status {finished.returncode}")
    found = json.loads(finished.stdout.strip().splitlines()[-1])
    return FirstSave(rss_growth=found["rss_growth"], seconds=found["seconds"])


def main() -> int:
    """Measures one first save in this process and prints it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--peer", required=True, choices=peers.PEERS)
    parser.add_argument("--state", default="gpt2", choices=states.STATES)
    parser.add_argument("--size", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path.cwd())
    arguments = parser.parse_args()
    state = states.build(arguments.state, size=arguments.size, seed=arguments.seed)
    save = peers.PEERS[arguments.peer].prepare(state)
    gc.collect()
    with tempfile.TemporaryDirectory(prefix="fastpersist-bench-", dir=arguments.dir) as folder:
        sample = measure(lambda: save(Path(folder)), state.bytes)
    if sample.rss_growth is None:
        print("peak memory cannot be reset: /proc is read-only", file=sys.stderr)
        return 1
    print(json.dumps({"rss_growth": sample.rss_growth, "seconds": sample.seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
