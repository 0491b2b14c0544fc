# SPDX-License-Identifier: Apache-2.0
"""The models of the demo by name, and a training that has not begun."""

from __future__ import annotations

from corpus import VOCABULARY, standard_library_text
from gpt import Config
from training import Training

SIZES = {
    "tiny": Config(2, 2, 64, context=32, vocabulary=VOCABULARY),
    "small": Config(7, 6, 384, context=128, vocabulary=VOCABULARY),
    "medium": Config(8, 8, 512, context=128, vocabulary=VOCABULARY),
}


def new_training(size: str) -> Training:
    """Always begins with the same weights and draws the same batches."""
    return Training(SIZES[size], standard_library_text())
