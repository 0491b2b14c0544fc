# SPDX-License-Identifier: Apache-2.0
"""Whether the installed torch is one whose private functions were compared with ours before.

Saving and loading depend on what is private to torch, so self-tests compare small files and
objects with torch's own, once per process: tens of milliseconds, most of it for code of torch that
nothing else touches. For the releases in COMPARED, `make interop` has compared whole collections.
"""

from __future__ import annotations

import copyreg
import functools
import os
import re
from collections.abc import Callable
from typing import Any

import torch

COMPARED = frozenset({"2.4.1", "2.6.0", "2.13.0", "2.14.1"})
"""The table in docs/compatibility.md."""
_OFFICIAL_BUILD = re.compile(r"cpu|cu\d+|rocm\d+(\.\d+)*|xpu")


@functools.cache
def was_compared() -> bool:
    """True for an unchanged release of COMPARED, for whatever hardware it was built."""
    release, plus, build = str(torch.__version__).partition("+")
    known = release in COMPARED and (not plus or _OFFICIAL_BUILD.fullmatch(build) is not None)
    return known and not _is_reduced_anew() and all(map(_is_torchs_own, _depended_on()))


def _is_reduced_anew() -> bool:
    """Whether a package told pickle how to take apart what the compiled pickler takes apart."""
    kinds = (torch.Tensor, torch.nn.Parameter, torch.Size, torch.UntypedStorage)
    return any(kind in copyreg.dispatch_table for kind in kinds)


def _depended_on() -> tuple[Callable[..., Any], ...]:
    """What other packages are known to replace, and what we would then no longer know."""
    unpickler: Any = torch._weights_only_unpickler
    return (
        torch.serialization.save,
        torch.serialization.load,
        torch.serialization._save,
        torch.serialization._load,
        torch.Tensor.__reduce_ex__,
        torch.Tensor._reduce_ex_internal,
        torch.nn.Parameter.__reduce_ex__,
        torch._utils._rebuild_tensor,
        torch._utils._rebuild_tensor_v2,
        torch._utils._rebuild_parameter,
        unpickler.load,
        unpickler.Unpickler.load,
        unpickler.Unpickler.persistent_load,
    )


def _is_torchs_own(function: Callable[..., Any]) -> bool:
    """By where its code stands: a wrapper may carry the names of what it wraps."""
    code = getattr(function, "__code__", None)
    home = os.path.dirname(str(torch.__file__)) + os.sep
    return code is not None and str(code.co_filename).startswith(home)
