# SPDX-License-Identifier: Apache-2.0
"""From the records of a PyTorch file to Python objects, without copying storages.

Two ways, both over an arena that mirrors the file. `torch.serialization._load`, which is what
torch.load uses, reads from a stand-in for torch's own file reader: whatever it makes, it makes as
ever. For plain states a compiled unpickler takes over. Both depend on what is private to torch, so
self-tests compare their objects with torch.load's, once per process, unless that release of torch
was compared before.
"""

from __future__ import annotations

import functools
import gc
import io
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from fastpersist import _capture, _core, _torch_release
from fastpersist._errors import CorruptCheckpointError
from fastpersist._log import logger

_TORCH_ALIGNMENT = 64
"""What torch aligns CPU memory to."""


class ArchiveReader:
    """Stands in for `torch._C.PyTorchFileReader`. Reads the data when the first storage is met."""

    def __init__(self, file: _core.File, read_all: Callable[[], _core.Arena]) -> None:
        self._file = file
        self._read_all = read_all
        self._arena: _core.Arena | None = None
        self._records: dict[str, tuple[int, int]] = {}
        self._tensors: dict[str, torch.Tensor] = {}

    @property
    def arena(self) -> _core.Arena | None:
        """The data, if any was needed."""
        return self._arena

    def _places(self) -> dict[str, tuple[int, int]]:
        if not self._records:
            self._records = {name: (at, size) for name, at, size in self._file.records()}
        return self._records

    def has_record(self, name: str) -> bool:
        return name in self._places()

    def get_all_records(self) -> list[str]:
        return list(self._places())

    def get_record(self, name: str) -> bytes:
        return self._file.pickle if name == "data.pkl" else self._file.record(name)

    def serialization_id(self) -> str:
        name = ".data/serialization_id"
        return self.get_record(name).decode() if self.has_record(name) else ""

    def get_record_offset(self, name: str) -> int:
        return self._places()[name][0]

    def get_record_header_offset(self, name: str) -> int:
        return self._places()[name][0]

    def get_record_offset_no_read(self, _cursor: int, name: str, _size: int, _align: int) -> int:
        return self._places()[name][0]

    def get_storage_from_record(self, name: str, size: int, _dtype: Any) -> torch.Tensor:
        if self._arena is None:
            self._arena = self._read_all()
            self._records = {}  # the headers may have told other offsets
        if name not in self._places() or self._places()[name][1] != size:
            raise CorruptCheckpointError(
                f"load failed: the pickle says that record '{name}' has {size} bytes; "
                f"{'there are others' if name in self._places() else 'there is no such record'}",
                tensor=name,
            )
        if name not in self._tensors:
            self._tensors[name] = _tensor_of(self._arena, *self._places()[name])
        return self._tensors[name]


def _tensor_of(arena: _core.Arena, offset: int, size: int) -> torch.Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")  # whatever the default device is
    tensor = torch.frombuffer(arena.view(offset, size), dtype=torch.uint8)
    return tensor if offset % _TORCH_ALIGNMENT == 0 else tensor.clone()


def plainly(
    file: _core.File, read_all: Callable[[], _core.Arena], map_location: Any
) -> tuple[Any] | None:
    """The object in the file, by the compiled unpickler; None where torch's own is needed.

    read_all may have been called then. Where the unpickler has to be tested first, the data is
    read meanwhile.
    """
    any_location = _is_cpu(map_location)
    if not _nothing_unusual(file, map_location) or not file.looks_plain(any_location):
        return None
    works = _plain_path_works()
    arena = read_all()
    if not works.result():
        return None
    try:
        made = _unpickle_plain(file, arena, any_location)
    except Exception as error:  # torch's own says better what is wrong, or makes it all the same
        made = repr(error)
    if isinstance(made, str):
        logger.debug("torch's unpickler takes over: %s", made)
        return None
    arena.let_go()
    return made


def through_torch(
    file: _core.File,
    read_all: Callable[[], _core.Arena],
    map_location: Any,
    pickle_module: Any,
    pickle_load_args: dict[str, Any],
) -> Any:
    """The object in the file, as torch.load would make it.

    Args:
        file: an open PyTorch file.
        read_all: reads its data.
        map_location, pickle_load_args: as in torch.load.
        pickle_module: what unpickles; torch's own module for weights only.

    Raises: whatever torch raises. Precondition: `self_test()`.
    """
    reader = ArchiveReader(file, read_all)
    try:
        made = torch.serialization._load(reader, map_location, pickle_module, **pickle_load_args)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if pickle_module is not torch._weights_only_unpickler or not _refuses_by_runtime_error():
            raise
        raise pickle.UnpicklingError(str(error)) from error
    if reader.arena is not None:
        reader.arena.let_go()
    return made


@functools.cache
def _refuses_by_runtime_error() -> bool:
    """Before torch 2.5 torch.load turned any RuntimeError of this unpickler into a refusal."""
    unpickler: Any = torch._weights_only_unpickler
    try:
        unpickler.load(io.BytesIO(b"cos\nsystem\n."))
    except pickle.UnpicklingError:
        return False
    except RuntimeError:
        return True
    return False


def _unpickle_plain(file: _core.File, arena: _core.Arena, any_location: bool) -> tuple[Any] | str:
    # Unpickling makes many objects and no garbage; see _capture.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return file.unpickle_plain(arena, _torch_makers(), any_location)
    finally:
        if collecting:
            gc.enable()


def _is_cpu(map_location: Any) -> bool:
    if isinstance(map_location, torch.device):
        return map_location.type == "cpu"
    return isinstance(map_location, str) and map_location == "cpu"


def _nothing_unusual(file: _core.File, map_location: Any) -> bool:
    """Whether nothing that torch.load looks at asks for more than plain CPU tensors."""
    return (
        (map_location is None or _is_cpu(map_location))
        and file.byteorder == "little"
        and torch.serialization.get_default_load_endianness() is None
        and torch._guards.detect_fake_mode(None) is None
        and not _capture.skips_data()
        and not torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        and _restores_cpu_as_ever()
    )


def _restores_cpu_as_ever() -> bool:
    """Whether no package registered a way of its own to restore storages before torch's for CPU."""
    first = torch.serialization._package_registry[0]
    return getattr(first[2], "__module__", "") == "torch.serialization"


@functools.cache
def _torch_makers() -> _core.TorchMakers:
    """What the compiled unpickler must know of the installed torch, asked at run time."""
    dtypes = {name: dtype for dtype, name in torch.storage._dtype_to_storage_type_map().items()}
    return _core.TorchMakers(
        torch.frombuffer,
        torch.empty,
        torch.UntypedStorage,
        torch._utils._rebuild_parameter,
        torch.Size,
        OrderedDict,
        {**dtypes, "UntypedStorage": torch.uint8},
        torch,
    )


_T = TypeVar("_T")


def _apart(function: Callable[[], _T]) -> Future[_T]:
    """Calls it in a thread of its own: what surrounds our caller (torch.device, fake tensors,
    skip_data, inference mode) is a matter of threads, and must not decide a test whose result is
    kept."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, name="fastpersist-test").start()
    except RuntimeError:  # none to be had, as when the interpreter is about to exit
        run()
    return future


@functools.cache
def _small_file() -> bytes:
    buffer = io.BytesIO()
    torch.serialization.save(_capture._small_state(many=2), buffer)
    return buffer.getvalue()


def _open_small() -> tuple[_core.File, _core.Arena]:
    data = _small_file()
    arena = _core.arena(len(data))
    arena.memoryview()[:] = data
    return _core.open_arena(arena, "self-test"), arena


@functools.cache
def self_test() -> str:
    """Why torch's `_load` may not work with our reader. Empty: it does. Cached."""
    return "" if _torch_release.was_compared() else compare_readers()


def compare_readers() -> str:
    """Compares what torch's `_load` makes of our reader with torch.load. Empty: equal."""

    def compare() -> bool:
        file, arena = _open_small()
        unpickler = torch._weights_only_unpickler
        ours = through_torch(file, lambda: arena, None, unpickler, {"encoding": "utf-8"})
        return _same(ours, _small_state_of_torch())

    try:
        same = _apart(compare).result()
    except Exception as error:  # a private function changed: whatever it raises means "delegate"
        return f"torch {torch.__version__} does not work as known: {error!r}"
    return "" if same else f"torch {torch.__version__} makes objects that we do not know"


@functools.cache
def _plain_path_works() -> Future[bool]:
    if not _torch_release.was_compared():
        return compare_unpicklers()
    known: Future[bool] = Future()
    known.set_result(True)
    return known


def compare_unpicklers() -> Future[bool]:
    """Whether the compiled unpickler's objects are torch's."""

    def compare() -> bool:
        try:
            file, arena = _open_small()
            made = _unpickle_plain(file, arena, any_location=False)
            if isinstance(made, str):
                raise ValueError(made)
            works = _same(made[0], _small_state_of_torch())
        except Exception as error:  # any surprise means "take torch's own unpickler"
            logger.debug("compiled unpickler not used: %r", error)
            return False
        if not works:
            logger.debug("compiled unpickler differs from torch %s; not used", torch.__version__)
        return works

    return _apart(compare)


def _small_state_of_torch() -> Any:
    # mmap=False: mapping may be the default, and a buffer cannot be mapped.
    return torch.serialization.load(io.BytesIO(_small_file()), weights_only=True, mmap=False)


def _same(ours: Any, theirs: Any) -> bool:
    """Whether two states are equal in everything that torch.load decides, aliasing included."""
    pairs: dict[int, int] = {}
    storages: dict[int, int] = {}

    def same(a: Any, b: Any) -> bool:
        if type(a) is not type(b):
            return False
        if isinstance(a, dict | list | tuple | torch.Tensor):
            if id(a) in pairs:
                return pairs[id(a)] == id(b)
            pairs[id(a)] = id(b)
        if isinstance(a, torch.Tensor):
            return _same_tensor(a, b, storages)
        if isinstance(a, dict):
            # Not through lists of items: the address of a temporary object is soon another's.
            keys = len(a) == len(b) and all(map(same, a.keys(), b.keys()))
            values = keys and all(map(same, a.values(), b.values()))
            return values and same(getattr(a, "__dict__", None), getattr(b, "__dict__", None))
        if isinstance(a, list | tuple):
            return len(a) == len(b) and all(map(same, a, b))
        return bool(a == b)

    return same(ours, theirs)


def _same_tensor(a: torch.Tensor, b: torch.Tensor, storages: dict[int, int]) -> bool:
    def form(t: torch.Tensor) -> tuple[Any, ...]:
        hooks = t._backward_hooks
        layout = (t.dtype, t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes())
        return (*layout, t.requires_grad, t.is_leaf, t._is_view(), type(hooks), t.device)

    if form(a) != form(b) or not torch.equal(a, b):
        return False
    if a.untyped_storage().nbytes() == 0:
        return True
    pointers = (a.untyped_storage().data_ptr(), b.untyped_storage().data_ptr())
    return storages.setdefault(pointers[0], pointers[1]) == pointers[1]
