# SPDX-License-Identifier: Apache-2.0
"""Saves every state of the zoo with torch.save and with fastpersist.save, compares the files, and
loads torch's with both: the objects must be the same.

    python compare.py [--quick] [--json FILE]

Prints one line with the counts, and one for each state that differs. Exit status: 0 when all files
are identical and the same states are refused, 1 otherwise. --quick leaves out the slow states.
Needs torch, NumPy, and fastpersist on the path.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import platform
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import zoo
from load_support import mismatch, outcome

import fastpersist as fp

NAME = "state.pt"


def torch_refuses(state: Any, path: Path) -> bool:
    """Saves with torch; whether that fails."""
    try:
        torch.save(state, path)
    except Exception:
        return True
    return False


def difference(entry: zoo.Entry, state: Any, ours: Path, theirs: Path) -> str:
    """Why our file of a state is not `theirs`, or we load that otherwise; "" if neither."""
    try:
        info = fp.save(state, ours)
    except Exception as error:
        return f"raised {error!r}"
    if info.engine == "torch":
        return f"written by torch.save: {info.engine_reason}"
    if not filecmp.cmp(ours, theirs, shallow=False):
        return first_difference(ours.read_bytes(), theirs.read_bytes())
    if entry.unloadable:  # older versions of torch bring back a part in silence
        error = outcome(fp.load, theirs).error
        return "" if isinstance(error, fp.CorruptCheckpointError) else f"loaded: {error!r}"
    for weights_only in (True, False):
        wanted = outcome(torch.load, theirs, weights_only=weights_only)
        found = mismatch(wanted, outcome(fp.load, theirs, weights_only=weights_only))
        if found:
            return f"loaded with weights_only={weights_only}: {found}"
    return ""


def first_difference(ours: bytes, theirs: bytes) -> str:
    """Where two unequal files part."""
    pairs = zip(ours, theirs, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    return f"{len(ours)} bytes in place of {len(theirs)}; the first that differs is at {at}"


def not_refused(state: Any, target: Path) -> str:
    """What is wrong when torch refuses a state: "" when we do so too and leave nothing behind."""
    try:
        fp.save(state, target)
    except fp.Error:
        return "left a file behind" if any(target.parent.iterdir()) else ""
    return "saved what torch refuses to save"


def compare(quick: bool) -> dict[str, Any]:
    """The counts, and name and reason of each state that differs."""
    refused = identical = 0
    different: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        ours, theirs, nothing = (Path(name) / part / NAME for part in ("ours", "theirs", "nothing"))
        for path in (ours, theirs, nothing):
            path.parent.mkdir()
        for entry in zoo.ENTRIES:
            if quick and entry.slow:
                continue
            state = entry.build()
            if torch_refuses(state, theirs):
                refused += 1
                why = not_refused(state, nothing)
            else:
                why = difference(entry, state, ours, theirs)
                identical += not why
            if why:
                different[entry.name] = why
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "identical": identical,
        "different": different,
        "refused": refused,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="compare our files with those of torch.save")
    parser.add_argument("--quick", action="store_true", help="leave out the slow states")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # torch warns about experimental dtypes and layouts
    result = compare(arguments.quick)
    print(
        f"torch {result['torch']}: {result['identical']} files identical, "
        f"{len(result['different'])} different; {result['refused']} states refused by torch"
    )
    for name, why in result["different"].items():
        print(f"  {name}: {why}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))
    return 1 if result["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
