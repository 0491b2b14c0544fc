# SPDX-License-Identifier: Apache-2.0
"""Saves states with this torch's torch.save, in both of its formats, each beside a description.

    python write_with_old_torch.py FOLDER

Writes NAME.pt and NAME.json for every state, and removes what was in the folder. read_theirs.py
reads them with fastpersist. Needs torch (1.13 or later) and NumPy, and neither fastpersist nor the
zoo, which later versions can build only.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from description import Description

DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
    "complex64", "complex128",
)  # fmt: skip


def dtypes() -> Any:
    return {name: torch.arange(7).to(getattr(torch, name)) for name in DTYPES}


def views() -> Any:
    base = torch.arange(60.0).reshape(5, 12)
    return {
        "base": base,
        "row": base[2],
        "column": base[:, 3],
        "transposed": base.t(),
        "steps": base[::2, 1::3],
        "expanded": base[0, :1].expand(4),
        "again": base,
    }


def shapes() -> Any:
    return [torch.tensor(3), torch.empty(0), torch.empty(2, 0, 4), torch.ones(1, 1, 1, 1, 1)]


def channels_last() -> Any:
    return torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)


def training() -> Any:
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(9, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 9)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    scheduler_state = {k: v for k, v in scheduler.state_dict().items() if k != "verbose"}
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "s": scheduler_state}


def parameters() -> Any:
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    return OrderedDict(weight=torch.nn.Parameter(torch.ones(2, 2)), frozen=frozen)


def containers() -> Any:
    loop: list[Any] = [1]
    loop.append(loop)
    counts: Any = defaultdict(int)
    counts["a"] += 2
    return {"loop": loop, "counts": counts, 7: (1, 2.5, None, True), "big": 1 << 90, "e": b"\xff"}


def many() -> Any:
    return {f"layer.{number}.weight": torch.full((3,), float(number)) for number in range(3000)}


def sparse() -> Any:
    return torch.eye(4).to_sparse()


STATES: tuple[Callable[[], Any], ...] = (
    dtypes, views, shapes, channels_last, training, parameters, containers, many,
)  # fmt: skip
if int(torch.__version__.split(".")[0]) >= 2:  # which rebuilds sparse tensors from other parts
    STATES += (sparse,)


def main() -> None:
    folder = Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    warnings.simplefilter("ignore")
    for build in STATES:
        state = build()
        description = Description(state)
        digests = [hashlib.sha256(storage).hexdigest() for storage in description.storages]
        text = json.dumps({"tree": description.tree, "storages": digests})
        for suffix, zipped in (("", True), ("_legacy", False)):
            path = folder / f"{build.__name__}{suffix}.pt"
            torch.save(state, path, _use_new_zipfile_serialization=zipped)
            path.with_suffix(".json").write_text(text)
    print(f"torch {torch.__version__}: wrote {2 * len(STATES)} files")


if __name__ == "__main__":
    main()
