# SPDX-License-Identifier: Apache-2.0
"""Reads the files of write_with_old_torch.py with fastpersist and compares every value.

    python read_theirs.py FOLDER PROGRAM [--json FILE]

Every file has to be read by fastpersist.load and to match its description: structure, sharing and
the bytes of all storages. Those in the zip format have to be found good by PROGRAM, `fastpersist`,
as well. Exit status: 0 when all are, 1 otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import warnings
from pathlib import Path

from description import Description

import fastpersist as fp


def problem(path: Path, program: Path) -> str:
    """What is wrong with what we make of a file; "" when nothing is."""
    expected = json.loads(path.with_suffix(".json").read_text())
    try:
        found = Description(fp.load(path, weights_only=False))
    except Exception as error:
        return repr(error)
    if found.tree != expected["tree"]:
        return "its structure differs"
    if [hashlib.sha256(storage).hexdigest() for storage in found.storages] != expected["storages"]:
        return "the bytes of a storage differ"
    if path.stem.endswith("_legacy"):  # without checksums, and for torch to read
        return ""
    done = subprocess.run([program, "verify", path], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description="read described files with fastpersist")
    parser.add_argument("folder", type=Path)
    parser.add_argument("program", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    problems = {
        p.stem: problem(p, arguments.program) for p in sorted(arguments.folder.glob("*.pt"))
    }
    wrong = {name: what for name, what in problems.items() if what}
    print(f"fastpersist: {len(problems) - len(wrong)} files of that torch read, {len(wrong)} wrong")
    for name, what in wrong.items():
        print(f"  {name}: {what}")
    if arguments.json:
        found = {"equal": len(problems) - len(wrong), "wrong": wrong}
        arguments.json.write_text(json.dumps(found, indent=1))
    return 1 if wrong or not problems else 0


if __name__ == "__main__":
    sys.exit(main())
