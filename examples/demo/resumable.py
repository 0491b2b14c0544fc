# SPDX-License-Identifier: Apache-2.0
"""A training program that may be killed at any moment: it saves after every iteration, and goes on
from the newest checkpoint when it is started again. The demo runs it as a process of its own.

It prints a line of JSON for each iteration: its number and its loss, exact to the last bit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sizes import SIZES, new_training

import fastpersist as fp


def train(folder: Path, size: str, iterations: int) -> None:
    """Trains up to iteration number `iterations`, from wherever the checkpoints in folder are."""
    run = new_training(size)
    with fp.Checkpointer(folder, keep_last=2) as ckpt:
        ckpt.attach(run.optimizer)
        targets = {"model": run.model, "optimizer": run.optimizer}
        start = ckpt.restore(targets, per_rank={"batches": run.batches.set_state}, default=0)
        tell({"start": start})
        for iteration, (loss, _) in enumerate(run.run(iterations - start), start + 1):
            state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
            ckpt.save(iteration, state, per_rank={"batches": run.batches.get_state()})
            tell({"iteration": iteration, "loss": loss.hex()})


def tell(line: dict[str, object]) -> None:
    """To whoever started the program."""
    print(json.dumps(line), flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the checkpoints")
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--iterations", type=int, default=16)
    arguments = parser.parse_args()
    train(arguments.folder, arguments.size, arguments.iterations)


if __name__ == "__main__":
    main()
