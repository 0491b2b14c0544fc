# SPDX-License-Identifier: Apache-2.0
"""What a save tells: tickets, callbacks, progress, the log; and what a long run costs."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import tempfile
import threading
from typing import Any

import checkpoint_support as support
import faults_support as faults
import pytest
import torch
from checkpoint_support import Training, held

import fastpersist as fp


def follow_a_ticket(folder: str) -> None:
    training = Training()
    with support.open_run(folder) as ckpt, held(folder, 200_000) as hold:
        ticket = ckpt.save(7, training.state())
        hold.reached()
        assert ticket.step == 7 and not ticket.done()
        for wait in (ticket.result, ticket.exception, ckpt.wait_until_finished, ckpt.close):
            with pytest.raises(TimeoutError):
                wait(0.01)
        written, total = ticket.progress()
        assert 0 <= written < total
        assert f"step 7: {written} of {total} bytes" in repr(ticket)
        hold.release()
        info = ticket.result(60)
        assert ticket.done() and ticket.exception() is None and ticket.result() is info
        assert ticket.progress() == (total, total) == (info.bytes, info.bytes)
        assert info.step == 7 and "step-00000007" in repr(ticket)
        assert str(info.path).endswith("run/step-00000007")
        names = {"capture", "plan", "fill", "write", "sync", "commit", "stall", "total"}
        assert set(info.seconds) == names and min(info.seconds.values()) >= 0


def test_a_ticket_behaves_like_a_future(tmp_path: Any) -> None:
    faults.run(follow_a_ticket, str(tmp_path), shim=True)


def refuse_a_second(folder: str) -> None:
    training = Training()
    with support.open_run(folder, in_flight="refuse") as ckpt:
        with held(folder) as hold:
            ticket = ckpt.save(1, training.state())
            hold.reached()
            with pytest.raises(fp.SaveInFlightError, match="step 1 is still in flight"):
                ckpt.save(2, training.state())
            hold.release()
            ticket.result(60)
        ckpt.save(3, training.state()).result(60)
        assert ckpt.all_steps() == [1, 3]


def test_a_second_save_can_be_refused(tmp_path: Any) -> None:
    faults.run(refuse_a_second, str(tmp_path), shim=True)


def call_back(folder: str) -> None:
    training = Training()
    calls: list[tuple[str, Any]] = []

    def note(name: str) -> Any:
        return lambda *rest: calls.append((name, (threading.current_thread().name, rest)))

    def complain(_: Any) -> None:
        raise KeyError("in a callback")

    with support.open_run(folder, progress=note("progress")) as ckpt:
        with held(folder) as hold:
            ticket = ckpt.save(1, training.state())
            ticket.add_done_callback(complain)
            ticket.add_done_callback(note("done"))
            hold.release()
            ticket.result(60)
        again = ckpt.save(2, training.state())
        again.result(60)
        with pytest.raises(fp.Error, match="a callback cannot wait"):
            wait_in_a_callback(folder, ckpt, training)
        ckpt.wait_until_finished(60)
        ckpt._saver._follower.stop()  # so that all callbacks have run
    assert {thread for _, (thread, _) in calls} == {"fastpersist"}
    assert [rest for name, (_, rest) in calls if name == "done"] == [(ticket,)]
    told = [rest for name, (_, rest) in calls if name == "progress"]
    total = ticket.progress()[1]
    assert told[0][0] <= total and (total, total) in told
    assert [t.name for t in threading.enumerate()].count("fastpersist") == 0


def hear_of_a_slow_save(folder: str, where: str) -> None:
    """The device is held until progress was told of several times, and the commit was late."""
    told: list[tuple[int, int]] = []
    often = threading.Event()
    late = threading.Event()

    def progress(*numbers: int) -> None:
        told.append(numbers)  # type: ignore[arg-type]
        if len(told) >= 5:
            often.set()

    class Late(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "the commit of step 1 takes longer than" in record.getMessage():
                late.set()

    handler = Late(logging.WARNING)
    logging.getLogger("fastpersist").addHandler(handler)
    manifest = {"path": "manifest", "call": "openat"} if where == "commit" else {}
    with support.open_run(folder, progress=progress, commit_timeout=0.05) as ckpt:
        with held(folder, **manifest) as hold:  # type: ignore[arg-type]
            ticket = ckpt.save(1, Training().state())
            hold.reached()
            assert often.wait(60)
            if where == "commit":
                assert late.wait(60)
            assert late.is_set() is (where == "commit"), "only the commit has that limit"
            hold.release()
            ticket.result(60)
    written = [done for done, _ in told]
    assert written == sorted(written) and told[-1][0] == told[-1][1] == ticket.progress()[1]


@pytest.mark.parametrize("where", ["write", "commit"])
def test_progress_goes_on_while_the_device_does_not_and_a_late_commit_is_a_warning(
    where: str, tmp_path: Any
) -> None:
    faults.run(hear_of_a_slow_save, str(tmp_path), where, shim=True)


def wait_in_a_callback(folder: str, ckpt: fp.Checkpointer, training: Training) -> None:
    """A callback that waits for a save that comes after its own."""
    caught: list[BaseException] = []
    started, noted = threading.Event(), threading.Event()

    def callback(_: fp.Ticket) -> None:
        started.wait(60)
        try:
            ckpt.wait_until_finished()
        except fp.Error as error:
            caught.append(error)
        noted.set()

    with held(folder) as hold:
        first = ckpt.save(3, training.state())
        first.add_done_callback(callback)
        hold.release()
        first.result(60)
    with held(folder) as hold:
        ckpt.save(4, training.state())
        started.set()
        noted.wait(60)
        hold.release()
    raise caught[0]


def test_callbacks_run_on_the_one_named_thread(tmp_path: Any) -> None:
    faults.run(call_back, str(tmp_path), shim=True)


def write_a_log(folder: str) -> None:
    training = Training()
    log = pathlib.Path(folder, "saves.jsonl")
    with support.open_run(folder, log=log) as ckpt:
        ckpt.save(1, training.state()).result(60)
        with faults.failing("pwrite-at 0 0 errno 28 step-00000002/state.pt"):
            support.failure(ckpt.save(2, training.state()))
        info = ckpt.save(3, training.state()).result(60)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["step"], line["ok"]) for line in lines] == [(1, True), (2, False), (3, True)]
    assert "No space left" in lines[1]["error"]
    assert lines[2]["bytes"] == info.bytes and lines[2]["seconds"].keys() == info.seconds.keys()
    totals = lines[2]["totals"]
    assert totals["saves"] == 3 and totals["failed"] == 1
    assert totals["bytes"] == lines[0]["bytes"] + lines[2]["bytes"]
    assert totals["stall_seconds"] == pytest.approx(sum(line["stall_seconds"] for line in lines))
    assert [line["totals"]["saves"] for line in lines] == [1, 2, 3]


def test_the_log_has_a_line_for_each_save(tmp_path: Any) -> None:
    faults.run(write_a_log, str(tmp_path), shim=True)


def test_a_log_that_cannot_be_written_is_a_warning(tmp_path: Any, warned: Any) -> None:
    with support.open_run(tmp_path, log=tmp_path / "missing" / "log") as ckpt:
        ckpt.save(1, {"x": 1}).result(60)
    assert any("the log of saves cannot be written" in message for message in warned())


def test_two_steps_that_are_equal_byte_for_byte_are_a_warning(tmp_path: Any, warned: Any) -> None:
    state = {"x": torch.ones(100_000)}
    with support.open_run(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state).result(60)
        assert any("step 2 equals that of step 1" in message for message in warned())
        state["x"].add_(1)
        before = len(warned())
        ckpt.save(3, state).result(60)
        assert len(warned()) == before


def test_threads_that_save_at_once_take_turns(tmp_path: Any) -> None:
    tickets: list[fp.Ticket] = []
    with support.open_run(tmp_path) as ckpt:

        def save(first: int) -> None:
            for step in range(first, first + 5):
                tickets.append(ckpt.save(step, {"step": step, "x": torch.full((9999,), step)}))

        threads = [threading.Thread(target=save, args=(10 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for ticket in tickets:
            assert ticket.result(60).step == ticket.step
        assert ckpt.all_steps() == sorted(ticket.step for ticket in tickets)
        for step in ckpt.all_steps():
            state = ckpt.load(step).state
            assert state["step"] == step and bool((state["x"] == step).all())


def _threads() -> list[str]:
    """Names; those of the kernel's io_uring workers, which come and go, begin with "iou-"."""
    found = []
    for path in pathlib.Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found.append((path / "comm").read_text())
    return found


def _in_use() -> dict[str, int]:
    """What this process has."""
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return {
        "bytes": int(pages) * os.sysconf("SC_PAGE_SIZE"),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len([name for name in _threads() if not name.startswith("iou-")]),
    }


def save_often(number: int) -> dict[str, int]:
    """What the process has more of after that many saves than after the first few."""
    training = Training(layers=16)
    with tempfile.TemporaryDirectory(dir=faults.image_folder()) as folder:
        with support.open_run(folder, keep_last=2, memory=4 << 20, options=fp.Options()) as ckpt:
            ckpt.attach(training.optimizer)
            before: dict[str, int] = {}
            for step in range(number):
                ckpt.save(step, training.state(), per_rank={"rng": torch.get_rng_state()})
                training.step()
                if step % 7 == 0:  # one that fails
                    with pytest.raises(fp.UnsupportedStateError):
                        ckpt.save(step, {"fn": lambda: 1})
                if step == number // 4:
                    ckpt.wait_until_finished(60)
                    before = _in_use()
            ckpt.wait_until_finished(60)
            now = _in_use()
            assert ckpt.all_steps() == [number - 2, number - 1]
    return {name: now[name] - before[name] for name in now}


def test_memory_files_and_threads_stay_as_they_are_over_two_hundred_saves() -> None:
    more = faults.run(save_often, 200, timeout=120)
    assert more["bytes"] < 8 << 20, more  # a state has 2 MB
    assert more["files"] <= 1 and more["threads"] <= 0, more


def test_a_checkpointer_that_is_dropped_finishes_and_leaves_nothing_behind(tmp_path: Any) -> None:
    ticket = support.open_run(tmp_path).save(1, {"x": torch.ones(100_000)})
    assert ticket.result(60).step == 1
    with_name = [t for t in threading.enumerate() if t.name == "fastpersist"]
    for thread in with_name:
        thread.join(60)
        assert not thread.is_alive()
    with support.open_run(tmp_path) as ckpt:  # its lock is free
        assert ckpt.all_steps() == [1]
