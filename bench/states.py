# SPDX-License-Identifier: Apache-2.0
"""The states that the benchmark saves: nested dicts of CPU tensors filled with random bits.

Random bits cannot be compressed or deduplicated, so thin or compressing storage gains nothing from
them. The same name, size and seed give the same bytes on every machine.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

GPT2_VOCABULARY = 50257
GPT2_POSITIONS = 1024
GPT2_WIDTH = 768
GPT2_LAYERS = 12

ONE_TENSOR_BYTES = 1 << 30
TINY_TENSORS = 100_000
SMALL_TENSORS = 16
SMALL_BYTES = 1_000_000
FLOAT_BYTES = 4


@dataclass(frozen=True)
class State:
    """A state to save: `value` is what a writer gets, `bytes` the sum of its tensors' bytes."""

    name: str
    title: str
    value: dict[str, Any]
    bytes: int
    tensors: int


def build(name: str, *, size: float = 1.0, seed: int = 0) -> State:
    """Builds the state `name`, one of STATES.

    size: factor on the number of bytes; the number of tensors stays, except for "tiny".
    Raises KeyError for an unknown name, ValueError if size is not positive.
    """
    if not size > 0:
        raise ValueError(f"size must be positive, got {size}")
    title, make = STATES[name]
    value = make(size, torch.Generator().manual_seed(seed))
    tensors = list(tensors_in(value))
    return State(
        name=name,
        title=title if size == 1 else f"{title}, size {size:g}",
        value=value,
        bytes=sum(tensor.nbytes for _, tensor in tensors),
        tensors=len(tensors),
    )


def approximate_bytes(name: str, size: float) -> int:
    """About how large a file of the state will be, without building it."""
    gpt2 = 3 * FLOAT_BYTES * sum(math.prod(shape) for shape in gpt2_shapes().values())
    # A torch file spends hundreds of bytes on each record, whatever its size.
    full = {
        "gpt2": gpt2,
        "tensor": ONE_TENSOR_BYTES,
        "tiny": TINY_TENSORS * 400,
        "small": SMALL_BYTES,
    }
    return round(full[name] * size)


def flat_tensors(value: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a nested state under dotted names, each view once, other entries left out.

    This is what a format that holds only named tensors and refuses aliases can store of it.
    """
    flat: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    views: set[tuple[object, ...]] = set()
    for name, tensor in tensors_in(value):
        storage = tensor.untyped_storage().data_ptr()
        view = (storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.nbytes and view in views:
            continue
        flat[name] = tensor.clone() if storage in storages else tensor.contiguous()
        views.add(view)
        storages.add(storage)
    return flat


def tensors_in(value: object, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a nested state with their dotted names, aliases included."""
    if isinstance(value, torch.Tensor):
        yield prefix, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from tensors_in(entry, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from tensors_in(entry, f"{prefix}.{index}" if prefix else str(index))


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A float32 tensor of random bits, in a storage of its own as a training run would have it."""
    tensor = torch.empty(shape)
    bits = tensor.view(-1).view(torch.int32)
    even = bits.numel() // 2 * 2
    bits[:even].view(torch.int64).random_(generator=generator)  # Twice as fast as int32.
    bits[even:].random_(generator=generator)
    return tensor


def gpt2_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the 148 parameters of GPT-2-small, the tied output layer counted once."""
    width = GPT2_WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (GPT2_VOCABULARY, width),
        "transformer.wpe.weight": (GPT2_POSITIONS, width),
    }
    for layer in range(GPT2_LAYERS):
        block = f"transformer.h.{layer}"
        for norm in ("ln_1", "ln_2"):
            shapes[f"{block}.{norm}.weight"] = (width,)
            shapes[f"{block}.{norm}.bias"] = (width,)
        for linear, inputs, outputs in (
            ("attn.c_attn", width, 3 * width),
            ("attn.c_proj", width, width),
            ("mlp.c_fc", width, 4 * width),
            ("mlp.c_proj", 4 * width, width),
        ):
            shapes[f"{block}.{linear}.weight"] = (inputs, outputs)
            shapes[f"{block}.{linear}.bias"] = (outputs,)
    shapes["transformer.ln_f.weight"] = (width,)
    shapes["transformer.ln_f.bias"] = (width,)
    return shapes


def _gpt2_with_adam(size: float, generator: torch.Generator) -> dict[str, Any]:
    shapes = [
        (name, (max(1, round(shape[0] * size)), *shape[1:]))
        for name, shape in gpt2_shapes().items()
    ]
    model = OrderedDict((name, _random(shape, generator)) for name, shape in shapes)
    moments = {
        index: {
            "step": torch.tensor(1000.0),
            "exp_avg": _random(shape, generator),
            "exp_avg_sq": _random(shape, generator),
        }
        for index, (_, shape) in enumerate(shapes)
    }
    group = {
        "lr": 6e-4,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "amsgrad": False,
        "params": list(range(len(shapes))),
    }
    return {
        "model": model,
        "optimizer": {"state": moments, "param_groups": [group]},
        "step": 1000,
    }


def _one_tensor(size: float, generator: torch.Generator) -> dict[str, Any]:
    return {"weight": _random((max(1, round(ONE_TENSOR_BYTES * size) // FLOAT_BYTES),), generator)}


def _tiny_tensors(size: float, generator: torch.Generator) -> dict[str, Any]:
    count = max(1, round(TINY_TENSORS * size))
    return {f"tensor.{index}": _random((1,), generator) for index in range(count)}


def _small_tensors(size: float, generator: torch.Generator) -> dict[str, Any]:
    elements = max(1, round(SMALL_BYTES * size) // (SMALL_TENSORS * FLOAT_BYTES))
    return {
        f"layer.{index}.weight": _random((elements,), generator) for index in range(SMALL_TENSORS)
    }


# Name on the command line → (title in tables, how to make it).
STATES: dict[str, tuple[str, Callable[[float, torch.Generator], dict[str, Any]]]] = {
    "gpt2": ("GPT-2-small with Adam", _gpt2_with_adam),
    "tensor": ("one tensor of 1 GiB", _one_tensor),
    "tiny": ("100,000 one-element tensors", _tiny_tensors),
    "small": ("1 MB in all", _small_tensors),
}
