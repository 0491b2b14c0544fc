# SPDX-License-Identifier: Apache-2.0
"""The state of the random number generators of a training process, as values that load safely.

`rng_state` takes plain numbers, strings, lists, tuples and tensors, which `weights_only=True`
makes. `set_rng_state` tries every part on a generator that nobody uses before it changes one that
somebody does. Needs neither torch nor NumPy; what is not imported has no state.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

from fastpersist._errors import ArgumentError, MismatchError

_ADVICE = (
    "; no generator was changed. To go on with other random numbers, remove these entries from the "
    "value first"
)


class _Unfit(Exception):
    """Why a part cannot be restored here."""


def rng_state() -> dict[str, Any]:
    """The state of the generators that a training process draws from without naming one.

    Returns: a dict that any file format of `save` but safetensors holds and `weights_only=True`
        loads. Its entries:

        - `"python"`: the module `random`, a tuple as of `random.getstate`;
        - `"numpy"`: NumPy's global generator (`numpy.random.seed`, `numpy.random.rand`), a dict of
          numbers and lists; only where NumPy was imported;
        - `"torch"`: torch's generator for the CPU, a uint8 tensor; only where torch was imported;
        - `"cuda"`: a list with one uint8 tensor for each device that is visible; only where CUDA
          was initialized, since it has drawn nothing before.

    Generators that a program made itself (`torch.Generator` of a DataLoader,
    `numpy.random.default_rng`) are not among them: save their own state beside this one.

    Thread-safe as far as the generators are: a thread that draws meanwhile may come in between the
    parts. Waits for no device.
    """
    state: dict[str, Any] = {"python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = _plain(numpy.random.get_state(legacy=False))
    if (torch := sys.modules.get("torch")) is not None:
        state["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(value: Mapping[str, Any]) -> None:
    """Puts back what `rng_state` gave: each generator goes on with the numbers that came next then.

    Args:
        value: as `rng_state` gave it, or as it came back from a file. Its tensors may lie on any
            device. NumPy and torch are imported where it has their state. Generators that it has no
            state of stay as they are, CUDA devices beyond those in it among them.

    Raises, before anything is changed: `MismatchError` naming, in `different`, each part that
        cannot be restored here and why (no NumPy, no CUDA, fewer devices, another generator behind
        NumPy's global functions, a state that is damaged). `ArgumentError` if it is no such value.

    Not thread-safe: nothing should draw meanwhile.
    """
    unknown = [key for key in value if key not in _PARTS] if isinstance(value, Mapping) else [value]
    if unknown or not value:
        what = f"{unknown[0]!r:.60} is none" if unknown else "the value has none"
        raise ArgumentError(
            f"set_rng_state failed: {what} of the states of random number generators that "
            "rng_state() gives"
        )
    settled: list[Callable[[], None]] = []
    unfit: list[tuple[str, str]] = []
    for name, settle in _PARTS.items():
        if name in value:
            try:
                settled.append(settle(value[name]))
            except _Unfit as problem:
                unfit.append((name, str(problem)))
    if unfit:
        listed = "; ".join(f"'{name}': {why}" for name, why in unfit)
        raise MismatchError(f"set_rng_state failed: {listed}{_ADVICE}", different=unfit)
    for restore in settled:
        restore()


# --- Each takes a part of the value and gives what restores it. Nothing is changed yet. ---


def _settle_python(part: Any) -> Callable[[], None]:
    try:
        version, numbers, gauss = part
        state = (version, tuple(numbers), gauss)
        random.Random().setstate(state)
        if not isinstance(gauss, float | None):  # which Python believes
            raise TypeError(f"{gauss!r} is no number drawn in advance")
    except (TypeError, ValueError, OverflowError) as error:
        raise _Unfit(f"no state of Python's random: {error}") from error
    return lambda: random.setstate(state)


def _settle_numpy(part: Any) -> Callable[[], None]:
    numpy = _module("numpy")
    here = numpy.random.get_state(legacy=False)
    kind = part.get("bit_generator") if isinstance(part, Mapping) else type(part).__name__
    if kind != here["bit_generator"]:
        raise _Unfit(
            f"of {kind}, while {here['bit_generator']} is NumPy's global generator here "
            "(numpy.random.set_bit_generator changes it)"
        )
    try:
        state = _in_the_form_of(here, part, numpy)
        numpy.random.RandomState(getattr(numpy.random, kind)(0)).set_state(state)
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise _Unfit(f"no state of NumPy's {kind}: {error}") from error
    return lambda: numpy.random.set_state(state)


def _settle_torch(part: Any) -> Callable[[], None]:
    torch = _module("torch")
    state = _tried(torch, part, "cpu")
    return lambda: torch.set_rng_state(state)


def _settle_cuda(part: Any) -> Callable[[], None]:
    torch = _module("torch")
    if not isinstance(part, list | tuple):
        raise _Unfit(f"{type(part).__name__} in place of a list of tensors")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if len(part) > devices:
        found = f"{devices} here" if devices else "no CUDA device here"
        raise _Unfit(f"of {len(part)} CUDA device{'s' * (len(part) != 1)}, {found}")
    states = [_tried(torch, state, f"cuda:{index}") for index, state in enumerate(part)]

    def restore() -> None:
        for index, state in enumerate(states):
            torch.cuda.set_rng_state(state, index)

    return restore


_PARTS: dict[str, Callable[[Any], Callable[[], None]]] = {
    "python": _settle_python,
    "numpy": _settle_numpy,
    "torch": _settle_torch,
    "cuda": _settle_cuda,
}


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _Unfit(f"{name} cannot be imported here: {error}") from error


def _tried(torch: Any, state: Any, device: str) -> Any:
    """The state on the CPU, after a generator of the device took it."""
    if not isinstance(state, torch.Tensor):
        raise _Unfit(f"{type(state).__name__} in place of a tensor for {device}")
    state = state.detach().cpu()  # a map_location may have sent it elsewhere
    try:
        torch.Generator(device=device).set_state(state)
    except (RuntimeError, TypeError) as error:
        raise _Unfit(f"no state of torch's generator for {device}: {error}") from error
    return state


# --- NumPy's states, which are dicts of numbers and arrays ---


def _plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    # Arrays as lists, and NumPy's numbers as Python's.
    return state.tolist() if hasattr(state, "tolist") else state


def _in_the_form_of(here: Any, part: Any, numpy: Any) -> Any:
    """The part with arrays where the state of the generator here has them.

    NumPy believes positions in arrays and would read beyond their ends, so they are checked.
    """
    if isinstance(here, dict):
        made = {key: _in_the_form_of(value, part[key], numpy) for key, value in here.items()}
        for position, numbers in (("pos", "key"), ("buffer_pos", "buffer")):
            if position in made and not 0 <= made[position] <= len(made[numbers]):
                raise ValueError(f"'{position}' is {made[position]}")
        return made
    if not isinstance(here, numpy.ndarray):
        if type(part) is not type(_plain(here)):
            raise TypeError(f"{type(part).__name__} in place of {type(_plain(here)).__name__}")
        return part
    array = numpy.array(part, dtype=here.dtype)
    if array.shape != here.shape:
        raise ValueError(f"{array.shape} numbers in place of {here.shape}")
    return array
