# SPDX-License-Identifier: Apache-2.0
"""Forks while a save is in flight: the child's use is a clear error, it ends without waiting for
threads that it does not have, and the parent goes on."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import checkpoint_support as support
import faults_support as faults
import pytest
import torch
from checkpoint_support import Training, held
from test_checkpointer_life import ended, steps_in

import fastpersist as fp


def uses(ckpt: fp.Checkpointer, ticket: fp.Ticket, training: Training) -> dict[str, Any]:
    return {
        "save": lambda: ckpt.save(3, training.state()),
        "attach": lambda: ckpt.attach(training.optimizer),
        "restore": lambda: ckpt.restore({}, default=0),
        "load": ckpt.load,
        "latest_step": ckpt.latest_step,
        "all_steps": ckpt.all_steps,
        "delete": lambda: ckpt.delete(1),
        "wait_until_finished": ckpt.wait_until_finished,
        "close": ckpt.close,
        "last_error": lambda: ckpt.last_error,
        "done": ticket.done,
        "result": ticket.result,
        "exception": ticket.exception,
        "progress": ticket.progress,
        "add_done_callback": lambda: ticket.add_done_callback(print),
    }


def what_raised(actions: dict[str, Callable[[], Any]]) -> dict[str, str]:
    """The name of each action's exception."""
    found = {}
    for name, action in actions.items():
        try:
            action()
            found[name] = "nothing"
        except Exception as error:
            found[name] = type(error).__name__
    return found


def fork_and_use(folder: str) -> None:
    training = Training()
    with support.open_run(folder) as ckpt, held(folder) as hold:
        ckpt.attach(training.optimizer, model=training.model)
        ticket = ckpt.save(2, training.state())
        hold.reached()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                found = what_raised(uses(ckpt, ticket, training))
                training.step()  # waits for nobody, though the device is held
                training.model.load_state_dict(training.model.state_dict())
                with ckpt:  # leaving it is no use
                    pass
                repr(ticket)
                wrong = {name: kind for name, kind in found.items() if kind != "ForkedError"}
                pathlib.Path(folder, "found").write_text(f"{wrong}")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert pathlib.Path(folder, "found").read_text() == "{}"
        hold.release()
        ticket.result(60)
        training.step()
        ckpt.save(3, training.state()).result(60)
    assert steps_in(folder) == [2, 3]


def test_every_use_in_a_forked_child_is_an_error_and_the_parent_goes_on(tmp_path: Any) -> None:
    faults.run(fork_and_use, str(tmp_path), shim=True)


def fork_and_leave(folder: str, how: str) -> None:
    training = Training()
    before = signal.getsignal(signal.SIGTERM)
    ckpt = support.open_run(folder)
    ckpt.attach(training.optimizer)
    with held(folder) as hold:
        ticket = ckpt.save(2, training.state())
        hold.reached()
        if how == "multiprocessing":
            process = multiprocessing.get_context("fork").Process(target=training.step)
            process.start()
            process.join()
            assert process.exitcode == 0
        else:
            child = os.fork()
            if child == 0:
                assert signal.getsignal(signal.SIGTERM) is before
                if how == "dropped":
                    del ckpt, ticket
                if how == "exception":
                    raise KeyError("in the child")
                sys.exit(5)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code == (1 if how == "exception" else 5), code
        hold.release()
        ticket.result(60)
    ckpt.close()


@pytest.mark.parametrize("how", ["sys.exit", "exception", "dropped", "multiprocessing"])
def test_a_forked_child_ends_at_once_however_it_ends(how: str, tmp_path: Any) -> None:
    code, errors = ended(fork_and_leave, str(tmp_path), how, folder=tmp_path)
    assert code == 0, errors
    assert ("KeyError" in errors) is (how == "exception")
    assert steps_in(tmp_path) == [2]


def fork_all_the_time(folder: str) -> None:
    training = Training()
    over = threading.Event()

    def fork() -> None:
        while not over.is_set():
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)

    with fp.Checkpointer(os.path.join(folder, "run"), verify_source="full") as ckpt:
        ckpt.attach(training.optimizer)
        thread = threading.Thread(target=fork)
        thread.start()
        try:
            for step in range(20):
                before = training.values()
                ckpt.save(step, training.state())
                training.step()
                assert support.difference(ckpt.load(step).state, before) == ""
        finally:
            over.set()
            thread.join()


def test_saves_are_right_while_another_thread_forks_all_the_time(tmp_path: Any) -> None:
    faults.run(fork_all_the_time, str(tmp_path))


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


def load_data_meanwhile(folder: str) -> None:
    training = Training()
    with support.open_run(folder) as ckpt:
        ckpt.attach(training.optimizer)
        for epoch in range(3):
            loader: Any = torch.utils.data.DataLoader(Numbers(), num_workers=2, batch_size=2)
            for batch, numbers in enumerate(loader):
                assert len(numbers) == 2
                ckpt.save(4 * epoch + batch, training.state())
                training.step()
        ckpt.wait_until_finished(60)
        assert ckpt.all_steps() == list(range(12)) and ckpt.last_error is None


def test_workers_of_a_data_loader_come_and_go_while_saves_are_in_flight(tmp_path: Any) -> None:
    faults.run(load_data_meanwhile, str(tmp_path))
