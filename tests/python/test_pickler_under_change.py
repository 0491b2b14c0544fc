# SPDX-License-Identifier: Apache-2.0
"""What happens when a state is not what it seems, or changes while it is pickled."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpersist as fp

# A torch function mode runs Python code at each access to a tensor, as a signal handler may.
CHANGING_STATE = """
import sys
import torch, fastpersist as fp
from torch.overrides import TorchFunctionMode

state = {str(i): torch.full((4,), float(i)) for i in range(50)}
fp.save({"warm": torch.ones(1)}, sys.argv[1])

class Change(TorchFunctionMode):
    calls = 0
    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls += 1
        if self.calls % 7 == 0 and state:
            state.popitem()
        return function(*args, **(kwargs or {}))

with Change() as mode:
    try:
        fp.save(state, sys.argv[1])
    except (RuntimeError, ValueError) as error:
        print("refused", type(error).__name__)
print("alive", mode.calls > 0)
"""


def test_a_state_that_changes_while_it_is_pickled_does_not_crash(tmp_path: Path) -> None:
    program = [sys.executable, "-c", CHANGING_STATE, str(tmp_path / "model.pt")]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "alive" in done.stdout
    torch.load(tmp_path / "model.pt")  # the older file or a whole new one


def shrunk() -> torch.Tensor:
    """A tensor whose storage was freed under it, as FSDP does between uses."""
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_compact_refuses_a_tensor_beyond_its_storage(tmp_path: Path) -> None:
    with pytest.raises(fp.UnsupportedStateError, match="beyond its storage"):
        fp.save({"w": shrunk()}, tmp_path / "model.pt", compact=True)
    assert os.listdir(tmp_path) == []


def test_a_tensor_beyond_its_storage_is_saved_as_torch_saves_it() -> None:
    ours, theirs = io.BytesIO(), io.BytesIO()
    state = {"w": shrunk(), "x": torch.ones(3)}
    fp.save(state, ours)
    torch.save(state, theirs)
    assert ours.getvalue() == theirs.getvalue()


@pytest.mark.filterwarnings("ignore:Named tensors")
def test_named_tensors_get_torchs_verdict(tmp_path: Path) -> None:
    if not hasattr(torch.Tensor, "has_names"):
        pytest.skip("skipped: this torch has no named tensors")
    state = {"w": torch.zeros(2, 3, names=("N", "C"))}

    def verdict(save: Any) -> bytes | None:
        buffer = io.BytesIO()
        try:
            save(state, buffer)
        except Exception:
            return None
        return buffer.getvalue()

    assert verdict(fp.save) == verdict(torch.save)


def test_attributes_of_an_ordered_dict_keep_their_identity() -> None:
    module = torch.nn.Linear(2, 2).state_dict()
    state = {"state": module, "attributes": module.__dict__}
    ours, theirs = io.BytesIO(), io.BytesIO()
    fp.save(state, ours)
    torch.save(state, theirs)
    assert ours.getvalue() == theirs.getvalue()


def test_a_delegated_save_to_a_pipe_lets_its_reader_run(tmp_path: Path) -> None:
    pipe = tmp_path / "model.pt"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    fp.save({"x": torch.ones(3)}, pipe, _use_new_zipfile_serialization=False)
    reader.join()
    loaded = torch.load(io.BytesIO(received[0]), weights_only=True)
    assert torch.equal(loaded["x"], torch.ones(3))
