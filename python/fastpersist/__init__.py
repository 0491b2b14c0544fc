# SPDX-License-Identifier: Apache-2.0
"""FastPersist: checkpoints of deep-learning training at the speed of the storage.

`save` writes the file that `torch.save` writes (or a safetensors file), through direct asynchronous
I/O, complete or not at all. Needs torch only for what is torch's.
"""

import sys as _sys

from fastpersist._checkpointer import Checkpointer
from fastpersist._core import __version__
from fastpersist._errors import (
    ArgumentError,
    CorruptCheckpointError,
    Error,
    ForkedError,
    MismatchError,
    NotFoundError,
    SaveAbandonedError,
    SaveInFlightError,
    StateChangedError,
    StorageError,
    UnsupportedFileError,
    UnsupportedStateError,
    WeightsOnlyError,
)
from fastpersist._info import SaveInfo
from fastpersist._load import load
from fastpersist._load_into import LoadReport, load_into
from fastpersist._log import configure_from_environment as _configure_log
from fastpersist._open import CheckpointFile, TensorInfo, open
from fastpersist._options import Options
from fastpersist._recovery import Saved
from fastpersist._rng import rng_state, set_rng_state
from fastpersist._save import save
from fastpersist._ticket import Ticket

__all__ = [
    "ArgumentError",
    "CheckpointFile",
    "Checkpointer",
    "CorruptCheckpointError",
    "Error",
    "ForkedError",
    "LoadReport",
    "MismatchError",
    "NotFoundError",
    "Options",
    "SaveAbandonedError",
    "SaveInFlightError",
    "SaveInfo",
    "Saved",
    "StateChangedError",
    "StorageError",
    "TensorInfo",
    "Ticket",
    "UnsupportedFileError",
    "UnsupportedStateError",
    "WeightsOnlyError",
    "__version__",
    "load",
    "load_into",
    "open",
    "rng_state",
    "save",
    "set_rng_state",
]

_configure_log()
if _sys.modules.get("torch"):  # else the first call that needs torch imports it
    from fastpersist import _with_torch as _with_torch
