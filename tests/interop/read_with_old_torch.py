# SPDX-License-Identifier: Apache-2.0
"""Reads the files of write_for_old_torch.py with this torch and compares every value.

    python read_with_old_torch.py FOLDER [--json FILE]

A file may be left out only if this version cannot read it from whoever wrote it: it holds a dtype
that the version does not have, its pickle calls for a class or function that does not exist there,
or it is one of BEFORE_2_0. Every other file has to be read, by torch.load as it is and with mmap
where there is such a thing, and to match its description: structure, sharing, the bytes of all
storages, and NumPy's view of the elements. Exit status: 0 when all do, 1 otherwise.
Needs torch (1.13 or later) and NumPy, and neither fastpersist nor the zoo.
"""

from __future__ import annotations

import argparse
import inspect
import io
import json
import pickle
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from description import Description, numpy_values

HAS_MMAP = "mmap" in inspect.signature(torch.load).parameters

# What torch itself changed in 2.0, by the beginning of the states' names.
BEFORE_2_0 = {
    "sparse_": "sparse tensors, which are rebuilt from other parts since torch 2.0",
    "view_conj": "lazy conjugate views",
    "view_neg": "lazy negative views",
    "buffer": "attributes of a plain tensor, which are dropped",
}


def unknown(expected: dict[str, Any]) -> str:
    """What the file has that this torch does not know; "" when it knows everything."""
    for dtype in expected["dtypes"]:
        if not hasattr(torch, dtype.removeprefix("torch.")):
            return str(dtype)
    for name in expected["names"]:
        try:
            # Python 2's names, which the protocol uses, are translated too.
            pickle.Unpickler(io.BytesIO()).find_class(*name.split(" "))
        except (ImportError, AttributeError):
            return str(name).replace(" ", ".")
    return ""


def known_limit(name: str) -> str:
    """Why this torch cannot read that state although it has all that the pickle names."""
    if int(torch.__version__.split(".")[0]) >= 2:
        return ""
    return next((why for prefix, why in BEFORE_2_0.items() if name.startswith(prefix)), "")


def load(path: Path, **arguments: Any) -> Any:
    """torch.load with every class allowed: the files are our own."""
    return torch.load(path, map_location="cpu", weights_only=False, **arguments)


def difference(state: Any, expected: dict[str, Any], storages: list[bytes]) -> str:
    """Where a state that was read is not what was described; "" when it is."""
    found = Description(state)
    if found.tree != expected["tree"]:
        return "its structure differs"
    for number, (ours, theirs) in enumerate(zip(found.storages, storages, strict=True)):
        if ours != theirs:
            return f"storage {number} differs"
    for number, (facts, tensor) in enumerate(zip(found.strided_facts, found.strided, strict=True)):
        values = numpy_values(facts, storages)
        if values is not None and values.tobytes() != tensor.detach().numpy().tobytes():
            return f"the elements of tensor {number} differ"
    return ""


def check(path: Path, expected: dict[str, Any]) -> str:
    """Reads one file in every way there is; returns what is wrong."""
    data, storages, at = path.with_suffix(".storages").read_bytes(), [], 0
    for size in expected["storages"]:
        storages.append(data[at : at + size])
        at += size
    for arguments in [{}, {"mmap": True}] if HAS_MMAP else [{}]:
        try:
            found = difference(load(path, **arguments), expected, storages)
        except Exception as error:
            found = repr(error)
        if found:
            return f"with mmap: {found}" if arguments else found
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description="read described files with this torch")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    equal, wrong, left_out = 0, {}, {}
    for path in sorted(arguments.folder.glob("*.pt")):
        expected = json.loads(path.with_suffix(".json").read_text())
        if lacking := unknown(expected):
            left_out[path.stem] = lacking
        elif not (problem := check(path, expected)):
            equal += 1
        elif limit := known_limit(path.stem):
            left_out[path.stem] = limit
        else:
            wrong[path.stem] = problem
    print(
        f"torch {torch.__version__}: {equal} files read and equal, {len(wrong)} wrong, "
        f"{len(left_out)} that this version cannot read from anybody"
    )
    for name, problem in wrong.items():
        print(f"  {name}: {problem}")
    if arguments.json:
        result = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "equal": equal,
            "wrong": wrong,
            "left_out": left_out,
        }
        arguments.json.write_text(json.dumps(result, indent=1))
    return 1 if wrong or not equal else 0


if __name__ == "__main__":
    sys.exit(main())
