# SPDX-License-Identifier: Apache-2.0
"""Messages go to the logger "fastpersist"; nothing prints by itself."""

from __future__ import annotations

import logging
import os
import re

logger = logging.getLogger("fastpersist")
logger.addHandler(logging.NullHandler())

_said: set[str] = set()


def warn_once(message: str) -> None:
    """Logs a warning that concerns the machine rather than one save; the same one only once.

    Numbers (offsets, sizes) do not make it another one.
    """
    key = re.sub(r"\d+", "#", message)
    if key not in _said:
        _said.add(key)
        logger.warning(message)


def configure_from_environment() -> None:
    """FASTPERSIST_LOG=debug|info|warning|error shows the messages on stderr."""
    word = os.environ.get("FASTPERSIST_LOG", "").upper()
    if not word:
        return
    level = (
        logging.getLevelNamesMapping().get(word)
        if hasattr(logging, "getLevelNamesMapping")
        else getattr(logging, word, None)
    )
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level if isinstance(level, int) else logging.INFO)
    if not isinstance(level, int):
        logger.warning("FASTPERSIST_LOG=%s is not a level; taking INFO", word)
