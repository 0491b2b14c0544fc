# SPDX-License-Identifier: Apache-2.0
"""What `fastpersist verify` and `convert` look at and what they tell, beyond their examples."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_cli import PROGRAM

pytestmark = pytest.mark.skipif(
    not PROGRAM.is_file(), reason=f"skipped: {PROGRAM} is not built (make build)"
)


def _takes_direct_reads(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def test_a_file_in_the_page_cache_is_verified_on_the_device(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(1 << 20)}, path)
    if not _takes_direct_reads(path):
        pytest.skip(f"skipped: {tmp_path} takes no direct reads")
    path.read_bytes()  # all of it is in the page cache
    done = subprocess.run([PROGRAM, "verify", "--json", path], capture_output=True, check=True)
    assert json.loads(done.stdout)["read"]["direct"] is True


def test_convert_names_what_it_had_to_number(tmp_path: Path) -> None:
    state = {"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}, "c#2": torch.ones(1)}
    torch.save(state, tmp_path / "x.pt")
    out = tmp_path / "x.safetensors"
    done = subprocess.run(
        [PROGRAM, "convert", tmp_path / "x.pt", out], capture_output=True, text=True, check=True
    )
    assert "another entry has the same name: 'a.b#2'" in done.stderr
    assert "c#2'" not in done.stderr
    assert load_file(out)["a.b#2"].tolist() == [1, 1]
