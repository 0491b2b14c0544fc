# SPDX-License-Identifier: Apache-2.0
"""Saves the states of the zoo that can be described, each beside its description.

    python write_for_old_torch.py FOLDER

Writes NAME.pt, NAME.json and NAME.storages (their bytes, one after the other) for every state, and
removes what was in the folder. read_with_old_torch.py reads them, under other versions of torch.
"""

from __future__ import annotations

import json
import pickletools
import shutil
import sys
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import torch
from description import Description, NotDescribedError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import zoo

import fastpersist as fp

MANY = "records_70000"


def names_in_pickle(path: Path) -> list[str]:
    """The classes and functions that reading the file calls for, as "module name"."""
    with zipfile.ZipFile(path) as archive:
        data = archive.read(f"{path.stem}/data.pkl")
    found = {arg for opcode, arg, _ in pickletools.genops(data) if opcode.name == "GLOBAL"}
    return sorted(str(name) for name in found)


def write(entry: zoo.Entry, folder: Path) -> str:
    """Saves one state; returns why not when it has no description."""
    state = entry.build()
    try:
        description = Description(state)
    except (NotDescribedError, RecursionError) as error:
        return str(error)
    path = folder / f"{entry.name}.pt"
    fp.save(state, path)
    text = {
        "tree": description.tree,
        "dtypes": sorted(description.dtypes),
        "names": names_in_pickle(path),
        "storages": [len(storage) for storage in description.storages],
    }
    path.with_suffix(".json").write_text(json.dumps(text))
    path.with_suffix(".storages").write_bytes(b"".join(description.storages))
    return ""


def main() -> None:
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    warnings.simplefilter("ignore")
    sys.setrecursionlimit(5000)
    # What torch itself cannot read back is no use; one file with very many records is enough.
    entries = [e for e in zoo.savable() if not e.unloadable and (not e.slow or e.name == MANY)]
    left_out = Counter(write(entry, folder) for entry in entries)
    print(
        f"torch {torch.__version__}: wrote {left_out.pop('')} files; without a description, and so "
        f"left out: {left_out.total()} states with {', '.join(sorted(left_out))}"
    )


if __name__ == "__main__":
    main()
