# SPDX-License-Identifier: Apache-2.0
"""Types of the compiled core (python/bindings); private to the package.

The interpreter's lock is free while `save`, `Reader.read` and `Publication.publish` move bytes. A
failure raises what the registered factory makes of it: the exceptions of `fastpersist._errors`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__version__: str

ErrorFactory = Callable[
    [str, str, bytes, int | None, int, bytes, bytes, int | None, int | None], Exception
]
"""code, operation, path, offset, errno, message, entry, expected and found CRC-32"""

def set_error_factory(factory: ErrorFactory) -> None:
    """Registers what makes exceptions of the core's errors."""

class Stream:
    """One file, described as extents in file order. Does not own the memory that it refers to."""

    @property
    def size(self) -> int:
        """Bytes of the file."""

    def extents(self) -> list[tuple[int, int, str, int | None]]:
        """(offset, bytes, "memory" | "generated" | "late", record whose body it is or None)."""

    def render(self, index: int, crcs: Sequence[int]) -> bytes:
        """The bytes of extent number index, which is not memory, for these checksums of records."""

class Reader:
    """Streams from the first byte to the last; for one thread."""

    def __init__(self, stream: Stream, /) -> None: ...
    def read(self, size: int) -> bytes:
        """At most size bytes; empty at the end."""

class Options:
    """Made by `options`."""

class SaveInfo:
    """What `save` did."""

    @property
    def bytes(self) -> int: ...
    @property
    def staged_bytes(self) -> int: ...
    @property
    def in_place_bytes(self) -> int: ...
    @property
    def seconds(self) -> dict[str, float]: ...
    @property
    def engine(self) -> str: ...
    @property
    def engine_reason(self) -> str: ...
    @property
    def direct(self) -> bool: ...
    @property
    def warning(self) -> str: ...

class Publication:
    """A file beside its target, which somebody else writes through `fileno`."""

    def __init__(self, path: bytes, options: Options, /) -> None: ...
    def fileno(self) -> int: ...
    def publish(self, size: int) -> None:
        """Cuts the file to size, syncs it, and renames it over the target."""

    def close(self) -> None:
        """Removes the file unless it was published."""

class TorchTypes:
    """What `pickle_state` must know of the installed torch."""

    def __init__(
        self,
        tensor: type[Any],
        parameter: type[Any],
        rebuild_tensor: Callable[..., Any],
        rebuild_parameter: Callable[..., Any],
        strided: object,
        storage_kinds: dict[Any, tuple[Any, int]],
    ) -> None: ...

def options(
    engine: str,
    block_bytes: int | None,
    queue_depth: int | None,
    staging_bytes: int | None,
    direct: bool,
    sync: bool,
    atomic: bool,
    retries: int,
) -> Options: ...
def torch_stream(
    records: list[tuple[str, bytes | tuple[int, int]]], prefix: str, alignment: int
) -> Stream:
    """A PyTorch file. A body is bytes, or address and size of memory that the caller keeps."""

def safetensors_stream(
    tensors: Sequence[tuple[str, str, Sequence[int], int, int]], metadata: Mapping[str, str]
) -> Stream:
    """A safetensors file of (name, type, shape, address, bytes), in any order."""

def pickle_state(
    state: object, types: TorchTypes, compact: bool
) -> tuple[bytes, list[tuple[str, bytes | tuple[int, int]]], list[Any], int] | str:
    """(pickle, records, owners of the memory, referenced bytes), or the reason why it cannot."""

def archive_prefix(path: bytes) -> str:
    """What torch calls the archive in a file of this name; empty where it refuses the name."""

def save(stream: Stream, path: bytes, options: Options) -> SaveInfo: ...

class ArenaView:
    """Memory of one storage, with the buffer protocol. Its pages go when it goes."""

class Arena:
    """Memory that mirrors a file."""

    @property
    def size(self) -> int: ...
    def view(self, offset: int, size: int) -> ArenaView:
        """A piece that no other view has a part in."""

    def memoryview(self) -> memoryview:
        """All of it, writable; to be dropped before the arena is."""

    def let_go(self) -> None:
        """From now on views give their pages back when they go."""

def arena(size: int) -> Arena: ...

class TorchMakers:
    """What `File.unpickle_plain` must know of the installed torch."""

    def __init__(
        self,
        frombuffer: Callable[..., Any],
        empty: Callable[..., Any],
        untyped_storage: Callable[..., Any],
        rebuild_parameter: Callable[..., Any],
        size: type[Any],
        ordered_dict: type[Any],
        storage_dtypes: dict[str, Any],
        torch: Any,
    ) -> None: ...

StoredTensor = tuple[
    str, str, tuple[int, ...], tuple[int, ...], int | None, int, int, str, bool, bool
]
"""name, type, shape, strides, storage, offset in it in bytes, bytes, device, conjugate, negative"""

class File:
    """An open checkpoint file."""

    @property
    def kind(self) -> str:
        """ "torch" or "safetensors"."""

    @property
    def checksums(self) -> bool:
        """Whether the file has any: not safetensors, nor torch with checksums switched off."""

    @property
    def metadata(self) -> dict[str, str]: ...
    @property
    def pickle(self) -> bytes: ...
    @property
    def byteorder(self) -> str: ...
    @property
    def info(self) -> dict[str, Any]:
        """How the last read went."""

    def storages(self) -> list[tuple[str, int, int]]:
        """(name, offset in the file, bytes)"""

    def tensors(self) -> list[StoredTensor]: ...
    def values(self) -> list[tuple[str, str, bool]]:
        """(name, text, opaque)"""

    def records(self) -> list[tuple[str, int, int]]:
        """(name without the prefix, offset of the body in the file, bytes)"""

    def record(self, name: str) -> bytes:
        """A body, compared with its checksum."""

    def read_all(self, options: Options) -> Arena:
        """All of the file, every checksum compared."""

    def read_pieces(
        self, pieces: Sequence[tuple[int, int, int, int]], checked: bool, options: Options
    ) -> None:
        """(storage, offset in it, bytes, address). checked: storages are read whole and compared
        with their checksums."""

    def looks_plain(self, any_location: bool) -> bool: ...
    def unpickle_plain(
        self, arena: Arena, makers: TorchMakers, any_location: bool
    ) -> tuple[Any] | str: ...

def open(path: bytes) -> File: ...
def open_arena(arena: Arena, name: str) -> File: ...
def record_checksums(path: bytes) -> list[tuple[str, int]]:
    """(name, CRC-32) of a torch file's records, in file order, as its central directory states."""

class Root:
    """A directory of checkpoints. Open for writing it holds the lock until it is closed."""

    def __init__(self, path: bytes, write: bool) -> None: ...
    @property
    def path(self) -> bytes: ...
    @property
    def id(self) -> str:
        """32 hexadecimal digits; empty for a directory that is only read and has none."""

    @property
    def lock_warning(self) -> str:
        """Why there is no lock; mostly empty."""

    def catalog(self) -> list[dict[str, Any]]:
        """Newest first: name, step, state ("complete", "unfinished", "retired", "damaged", "newer",
        "foreign"), reason, bytes, sequence (or None); and from the manifest, None without one:
        metadata (JSON text), created, job, world_size, streams (dicts of name, format, size, crc,
        record_crcs, parts; empty without a manifest)."""

    def retire(self, name: str) -> None:
        """Removes a checkpoint, by the name of its directory."""

    def remove_leftovers(self) -> tuple[list[str], list[str]]:
        """Removes what did not come to its end: names that are gone; those that stay, with why if
        they could not be removed ("name: reason")."""

    def prune(self, keep_last: int | None, keep_every: int | None, dry_run: bool) -> list[str]:
        """Retires what the policy gives up, oldest first; with dry_run only names it."""

    def close(self) -> None: ...

# --- Saving beside the training ---

class CapturePool:
    def __init__(self, bytes: int) -> None: ...
    def reset(self) -> None: ...
    def copy(self, pieces: list[tuple[int, int]]) -> list[int]: ...
    @property
    def size(self) -> int: ...
    @property
    def used(self) -> int: ...

class CheckpointTicket:
    @property
    def step(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def written(self) -> int: ...
    @property
    def released(self) -> bool: ...
    @property
    def done(self) -> bool: ...
    def wait_released(self, seconds: float | None, capture: bool) -> bool: ...
    def wait_written(self, seconds: float | None) -> bool: ...
    def wait_done(self, seconds: float | None) -> bool: ...
    def approve(self) -> None: ...
    def reject(self, code: str, detail: str, advice: str) -> None: ...
    def abandon(self, detail: str, advice: str) -> None: ...
    def still_the_same(self, live: list[int]) -> bool: ...
    def result(self) -> dict[str, Any]: ...

class CheckpointWriter:
    def __init__(
        self, root: Root, options: Options, keep_last: int | None, keep_every: int | None
    ) -> None: ...
    def submit(
        self,
        step: int,
        streams: list[tuple[str, Stream, list[tuple[int, str, int]]]],
        metadata: str,
        verify: str,
        turn: int,
        spare: CapturePool,
    ) -> CheckpointTicket: ...
    def close(self) -> None: ...

def owned_tensors(
    tensors: list[Any], least_bytes: int, is_dense: Any
) -> list[tuple[Any, Any, int, int, int | None]]: ...
def learn_storage_layout(storages: list[tuple[int, int, int]]) -> bool: ...
def peek_storage(identity: int) -> tuple[int, int]: ...
def memory_align(root: Root) -> int: ...
def keep_forever(object: Any) -> None: ...
