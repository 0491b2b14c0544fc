#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the seeds of the fuzz targets, fuzz/corpus/TARGET/*, with torch and safetensors.

The files are committed, so that fuzzing needs no Python; run this again after adding a seed. Every
file stays under 4 KB. The canary needs that tensors in safetensors seeds are called a, b or c, and
that metadata is {"format": "pt"}.
"""

from __future__ import annotations

import collections
import io
import json
import pickle
import struct
import warnings
import zipfile
from pathlib import Path

import safetensors.torch
import torch

CORPUS = Path(__file__).parent / "corpus"
MAX_SEED = 4096


def states() -> dict[str, object]:
    """Small states that differ in which parts of the readers they reach."""
    base = torch.arange(6, dtype=torch.float32)
    linear = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(linear.parameters())
    linear(torch.ones(2)).backward()
    optimizer.step()
    complex_values = torch.zeros(2, dtype=torch.complex64)
    return {
        "tensor": base,
        "views": {"all": base, "some": base[1:3], "grid": base.view(2, 3).t(), "none": base[:0]},
        "module": linear.state_dict(),
        "optimizer": optimizer.state_dict(),
        "parameter": [linear.weight, (linear.bias,)],
        "types": [torch.zeros(2, dtype=t) for t in (torch.uint16, torch.float8_e4m3fn, torch.bool)],
        "lazy": {
            "conj": complex_values.conj(),
            "neg": torch.zeros(2, dtype=torch.complex64).conj().imag,
        },
        "plain": {"a": [1, 2.5, None, True, "text", b"bytes", {1, 2}, (1, (2,))], 3: 10**30},
        "ordered": collections.OrderedDict(a=1, b=collections.Counter("ab")),
        "sparse": torch.eye(2).to_sparse(),
        "meta": {"m": torch.empty(3, device="meta")},
        "size": torch.Size([1, 2, 3]),
        "storage": base.untyped_storage(),
        "opaque": {"device": torch.device("cpu"), "dtype": torch.float16, "path": Path("x")},
        "empty": {},
    }


def torch_file(state: object, **options: object) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(state, buffer, **options)
    return buffer.getvalue()


def pickle_of(file: bytes) -> bytes:
    """The record data.pkl of a file of torch."""
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        name = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
        return archive.read(name)


def repacked(file: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """The same records as another program would pack them: no alignment, no descriptors."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(file)) as source, zipfile.ZipFile(buffer, "w") as target:
        for name in source.namelist():
            target.writestr(zipfile.ZipInfo(name), source.read(name), compression)
    return buffer.getvalue()


def torch_seeds() -> dict[str, bytes]:
    """Archives as torch writes them, and as it does not."""
    seeds = {f"{name}.pt": torch_file(state) for name, state in states().items()}
    views = states()["views"]
    seeds["repacked.pt"] = repacked(seeds["tensor.pt"])
    seeds["deflated.pt"] = repacked(seeds["tensor.pt"], zipfile.ZIP_DEFLATED)
    seeds["comment.pt"] = seeds["empty.pt"][:-2] + b"\x02\x00hi"
    seeds["cut.pt"] = seeds["empty.pt"][:-30]
    seeds["protocol4.pt"] = torch_file(views, pickle_protocol=4)
    seeds["legacy.pt"] = torch_file(1, _use_new_zipfile_serialization=False)
    return seeds


def safetensors_file(header: object, data: bytes = b"") -> bytes:
    """A file with that header, which may be wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def safetensors_seeds() -> dict[str, bytes]:
    """Files as the package writes them, and others that it reads or refuses."""

    def entry(dtype: str, shape: list[int], begin: int, end: int, **more: object) -> object:
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}

    two = {"a": torch.ones(2, 3), "b": torch.zeros(2, dtype=torch.uint8)}
    return {
        "two.safetensors": safetensors.torch.save(two, {"format": "pt"}),
        "empty.safetensors": safetensors.torch.save({}),
        "bits.safetensors": safetensors_file({"a": entry("F4", [2, 8], 0, 8)}, bytes(8)),
        "zero.safetensors": safetensors_file(
            {"a": entry("F64", [0, 2], 0, 0), "b": entry("BF16", [], 0, 2)}, bytes(2)
        ),
        "more.safetensors": safetensors_file({"a": entry("U8", [1], 0, 1, x=[{"y": 1}])}, b"x"),
        "null.safetensors": safetensors_file({"__metadata__": None}),
        "twice.safetensors": safetensors_file(b'{"__metadata__":{"a":"1","a":"2"}}'),
    }


def pickle_seeds() -> dict[str, bytes]:
    """The pickles of the states, and one of each protocol."""
    seeds = {f"{name}.pkl": pickle_of(torch_file(state)) for name, state in states().items()}
    plain = {"a": [1, -2, 10**30, 2.5, None, True, "text\u00e9", b"bytes"], "b": ({1}, (), 1j)}
    for protocol in range(6):
        seeds[f"protocol{protocol}.pkl"] = pickle.dumps(plain, protocol)
    cycle: list[object] = [bytearray(b"x"), frozenset([1])]
    cycle.append(cycle)
    seeds["cycle.pkl"] = pickle.dumps(cycle, 5)
    return seeds


def write(target: str, seeds: dict[str, bytes]) -> None:
    """Replaces the seeds of a target."""
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for name, seed in seeds.items():
        if len(seed) > MAX_SEED:
            print(f"{target}/{name} has {len(seed)} bytes and is left out")
            continue
        (folder / name).write_bytes(seed)


def main() -> None:
    """Writes all of them."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    files = torch_seeds()
    tensors = safetensors_seeds()
    write("zip_directory", files)
    write("contents", files | tensors)
    write("safetensors", tensors)
    write("pickle", pickle_seeds())


if __name__ == "__main__":
    main()
