# SPDX-License-Identifier: Apache-2.0
"""Types of the compiled core (python/bindings); private to the package.

The interpreter's lock is free while `save`, `Reader.read` and `Publication.publish` move bytes. A
failure raises what the registered factory makes of it: the exceptions of `fastpersist._errors`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__version__: str

ErrorFactory = Callable[[str, str, bytes, int | None, int, bytes], Exception]
"""code, operation, path, offset, errno, message"""

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
