# SPDX-License-Identifier: Apache-2.0
"""FastPersist: checkpoints of deep-learning training at the speed of the storage.

`save` writes the file that `torch.save` writes (or a safetensors file), through direct asynchronous
I/O, complete or not at all. Needs torch only for what is torch's.
"""

from fastpersist._core import __version__
from fastpersist._errors import (
    ArgumentError,
    Error,
    ForkedError,
    StorageError,
    UnsupportedStateError,
)
from fastpersist._info import SaveInfo
from fastpersist._log import configure_from_environment as _configure_log
from fastpersist._options import Options
from fastpersist._save import save

__all__ = [
    "ArgumentError",
    "Error",
    "ForkedError",
    "Options",
    "SaveInfo",
    "StorageError",
    "UnsupportedStateError",
    "__version__",
    "save",
]

_configure_log()
