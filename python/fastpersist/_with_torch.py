# SPDX-License-Identifier: Apache-2.0
"""Imports what saving and loading use as soon as torch is there.

Where torch is imported before this package, so are these, rather than in the first call.
"""

import contextlib

from fastpersist import _attached as _attached
from fastpersist import _capture as _capture
from fastpersist import _delegate as _delegate
from fastpersist import _fill as _fill
from fastpersist import _match as _match
from fastpersist import _outline as _outline
from fastpersist import _rebuild as _rebuild
from fastpersist import _restore as _restore
from fastpersist import _snapshot as _snapshot
from fastpersist import _wait_point as _wait_point

with contextlib.suppress(ImportError):  # torch before 2.6
    from torch.utils.serialization import config as _config  # noqa: F401
