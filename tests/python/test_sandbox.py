# SPDX-License-Identifier: Apache-2.0
"""Sandboxes that refuse system calls: the next engine saves the same file, and one line of the log
says which and why (axboe/liburing#1078, moby/moby#39396)."""

from __future__ import annotations

import errno
import threading
from typing import Any

import faults_support as faults
import pytest
from faults_support import Target

import fastpersist as fp

# System calls by number on x86-64; the io_uring ones are the same everywhere.
URING_SETUP, URING_ENTER, URING_REGISTER = 425, 426, 427
AIO_SETUP, AIO_GETEVENTS, AIO_SUBMIT = 206, 208, 209
PWRITE, FALLOCATE, STATX, GETRANDOM = 18, 285, 332, 318
MLOCK, MADVISE = 149, 28

# What is refused → the engine that saves, and what its reason names.
REFUSALS: dict[str, tuple[list[int], str, list[str]]] = {
    "io_uring_setup": ([URING_SETUP], "libaio", ["uring", "io_uring_setup"]),
    "io_uring_enter": ([URING_ENTER], "libaio", ["uring", "io_uring_enter"]),
    "io_setup too": ([URING_SETUP, AIO_SETUP], "threads", ["uring", "libaio", "io_setup"]),
    "io_submit too": ([URING_ENTER, AIO_SUBMIT], "threads", ["uring", "libaio", "io_submit"]),
    "io_getevents too": ([URING_SETUP, AIO_GETEVENTS], "threads", ["uring", "libaio"]),
}


def save_in_a_sandbox(
    folder: str, refused: list[int], error: int, options: dict[str, Any]
) -> tuple[fp.SaveInfo, list[str]]:
    target = Target(folder)
    faults.refuse_system_calls(refused, error)
    with faults.warnings_logged() as said:
        for _ in range(3):
            target.put_old()
            info = target.succeeds(options.get("engine", "auto"), retries=0)
    return info, said


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS], ids=errno.errorcode.get)
@pytest.mark.parametrize("refused", REFUSALS)
def test_a_refused_engine_is_replaced_by_the_next(refused: str, error: int, tmp_path: Any) -> None:
    numbers, engine, named = REFUSALS[refused]
    info, said = faults.run(save_in_a_sandbox, str(tmp_path), numbers, error, {})
    assert info.engine == engine and info.direct
    for word in [*named, str(error)]:
        assert word in info.engine_reason, info.engine_reason
    assert len(said) == 1, said
    assert engine in said[0] and all(word in said[0] for word in named)


def test_used_up_asynchronous_requests_of_the_machine_cost_speed_only(tmp_path: Any) -> None:
    refused = [URING_SETUP, AIO_SETUP]  # io_setup(2): EAGAIN when fs.aio-max-nr is reached
    info, said = faults.run(save_in_a_sandbox, str(tmp_path), refused, errno.EAGAIN, {})
    assert info.engine == "threads" and "aio-max-nr" in info.engine_reason
    assert len(said) == 1, said


def test_refused_buffer_registration_costs_nothing_but_speed(tmp_path: Any) -> None:
    info, said = faults.run(save_in_a_sandbox, str(tmp_path), [URING_REGISTER], errno.EPERM, {})
    assert info.engine == "uring" and said == []


def save_a_large_state_in_a_sandbox(folder: str) -> fp.SaveInfo:
    """Large enough for registered buffers."""
    state = faults.state_of(40 << 20)
    faults.refuse_system_calls([URING_REGISTER])
    info = fp.save(state, f"{folder}/model.pt")
    assert faults.content(f"{folder}/model.pt") == faults.torch_bytes(state, "model.pt")
    return info


def test_buffers_that_would_be_registered_need_not_be(tmp_path: Any) -> None:
    info = faults.run(save_a_large_state_in_a_sandbox, str(tmp_path))
    assert info.engine == "uring" and info.direct


@pytest.mark.parametrize(
    "numbers", [[STATX], [GETRANDOM], [MLOCK], [MADVISE], [FALLOCATE]], ids=str
)
def test_a_save_does_without_this_system_call(numbers: list[int], tmp_path: Any) -> None:
    faults.run(save_in_a_sandbox, str(tmp_path), numbers, errno.ENOSYS, {})


def save_once_in_a_sandbox(folder: str, refused: list[int], error: int) -> str:
    target = Target(folder)
    faults.refuse_system_calls(refused, error)
    return target.succeeds("auto", retries=0).engine


def test_refusals_that_look_as_if_they_would_pass_do_not_hang(tmp_path: Any) -> None:
    refused = [URING_ENTER, AIO_SUBMIT]
    engine = faults.run(save_once_in_a_sandbox, str(tmp_path), refused, errno.EAGAIN, timeout=50)
    assert engine in ("threads", "buffered")


def refuse_every_engine(folder: str) -> None:
    """pwrite(2) is what is left; without it there is an error, and the old file."""
    target = Target(folder)
    faults.refuse_system_calls([URING_SETUP, AIO_SETUP, PWRITE])
    error = target.fails("auto")
    assert (error.operation, error.errno, error.offset) == ("write", errno.EPERM, 0)


def test_a_sandbox_without_any_way_to_write_gives_an_error(tmp_path: Any) -> None:
    faults.run(refuse_every_engine, str(tmp_path))


def close_the_sandbox_while_saving(folder: str, numbers: list[int]) -> list[str]:
    """All threads lose the system calls at some moment of a save."""
    engines = []
    target = Target(folder, 8 << 20)
    timer = threading.Timer(0.01, faults.refuse_system_calls, [numbers, errno.EPERM, True])
    timer.start()
    for _ in range(4):
        target.put_old()
        engines.append(target.succeeds("auto", retries=0).engine)
    timer.join()
    return engines


def test_an_engine_refused_in_the_middle_of_a_save_is_replaced(tmp_path: Any) -> None:
    engines = faults.run(close_the_sandbox_while_saving, str(tmp_path), [URING_ENTER, AIO_SUBMIT])
    assert engines[-1] == "threads", engines
