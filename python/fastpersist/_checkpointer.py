# SPDX-License-Identifier: Apache-2.0
"""`Checkpointer`: checkpoints of a training run, written while training goes on.

This is the public face. Saving is in _saver.py, restoring in _recovery.py, and what happens when
the process ends in _life.py.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastpersist import _arguments, _core, _life, _log, _recovery
from fastpersist._errors import Error, ForkedError
from fastpersist._options import Options

if TYPE_CHECKING:
    import torch

    from fastpersist._recovery import Saved
    from fastpersist._ticket import Ticket

DEFAULT_MEMORY = 512 << 20
_NOTHING: Any = object()


class Checkpointer:
    """Saves and restores the checkpoints of one run, in one directory.

    `save` returns in milliseconds; the bytes are written beside the next forward and backward pass,
    and only an optimizer's step may have to wait for them. A checkpoint counts once it is complete
    on stable storage: a run that ends at any moment, however it ends, resumes from the newest one
    that does.

        ckpt = fastpersist.Checkpointer("runs/gpt", keep_last=3)
        ckpt.attach(optimizer)
        start = ckpt.restore({"model": model, "optim": optimizer}, default=0)
        for step in range(start + 1, steps + 1):
            ...
            optimizer.step()
            ckpt.save(step, {"model": model.state_dict(), "optim": optimizer.state_dict()})
        ckpt.close()

    Args:
        root: the directory; it is made if it is not there. One process writes to it at a time.
        keep_last: how many checkpoints stay; None keeps all.
        keep_every: steps divisible by it stay besides.
        memory: bytes of host memory for everything: staging buffers, and copies of what is not
            attached. At least 1 MiB; default 512 MiB. It is touched as it is needed, and kept.
        in_flight: "wait" for an earlier save, or "refuse" (SaveInFlightError).
        wait_timeout: seconds that training waits for the storage at most; then the save is given up
            and training goes on. While the storage still holds it later ones fail: their tickets
            do (SaveInFlightError), or with on_error="raise" their `save`.
        commit_timeout: seconds from the last byte to the commit, after which a warning is logged.
        drain_timeout: seconds that a signal or the interpreter's exit waits for a save in flight;
            the exit for its callbacks, too.
        handle_signals: SIGTERM and SIGINT wait for the save in flight; then whoever handled them
            before does, or the default action.
        log: path of a file that gets a line of JSON for each save.
        progress: called with (bytes on storage, bytes in all), on FastPersist's thread.
        verify_source: "off", "sample" (a sixteenth of what is read in place, all of it within
            sixteen saves) or "full": read again after the last write of a save, and compared.
        on_error: "warn" logs what made a background save fail and sets `last_error`; the third
            failure in a row is raised by the next `save`. "raise": the next `save` raises, after it
            was started (`error.ticket`).
        options: how files are written. `atomic` and `sync` are always on.

    Thread-safe. In a forked child every use raises ForkedError. Needs torch.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        memory: int | None = None,
        in_flight: str = "wait",
        wait_timeout: float = 300,
        commit_timeout: float = 120,
        drain_timeout: float = 30,
        handle_signals: bool = True,
        log: str | os.PathLike[str] | None = None,
        progress: Callable[[int, int], Any] | None = None,
        verify_source: str = "sample",
        on_error: str = "warn",
        options: Options | None = None,
    ) -> None:
        from fastpersist import _saver

        _arguments.check_word("in_flight", in_flight, ("wait", "refuse"))
        _arguments.check_word("verify_source", verify_source, ("off", "sample", "full"))
        _arguments.check_word("on_error", on_error, ("warn", "raise"))
        _arguments.check_count("keep_last", keep_last, 1)
        _arguments.check_count("keep_every", keep_every, 1)
        _arguments.check_count("memory", memory, _saver.LEAST_MEMORY)
        _arguments.check_seconds("wait_timeout", wait_timeout)
        _arguments.check_seconds("commit_timeout", commit_timeout)
        _arguments.check_seconds("drain_timeout", drain_timeout)
        memory = DEFAULT_MEMORY if memory is None else memory
        options = _saver.settled_options(Options() if options is None else options, memory)
        self.directory = Path(root)
        self.drain_timeout = float(drain_timeout)
        self.handles_signals = handle_signals
        self._pid = os.getpid()
        self._closed = False
        self._root = _core.Root(os.fsencode(root), True)
        if self._root.lock_warning:
            _log.warn_once(self._root.lock_warning)
        self._tidy()
        self._saver = _saver.Saver(
            self._root,
            options,
            keep_last=keep_last,
            keep_every=keep_every,
            memory=memory,
            refuse=in_flight == "refuse",
            wait_timeout=float(wait_timeout),
            commit_timeout=float(commit_timeout),
            log=log,
            progress=progress,
            verify_source=verify_source,
            on_error=on_error,
        )
        _life.opened(self)

    # --- Saving ---

    def attach(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        model: torch.nn.Module | None = None,
        frozen: torch.nn.Module | None = None,
    ) -> None:
        """Says what may be read where it lies.

        Args:
            optimizer: its parameters and state. Its `step` waits if it must, and so does its
                `load_state_dict`. Wrappers are looked through. Raises ArgumentError for one whose
                step cannot be made to wait.
            model: its `load_state_dict` waits for the save in flight.
            frozen: a module whose parameters and buffers nobody changes.

        May be called several times. Nothing is kept alive by it.
        """
        from fastpersist import _wait_point

        self._check_usable("attach")
        _wait_point.install()
        saver = weakref.ref(self._saver)

        def before_loading(*_: Any) -> None:
            if (alive := saver()) is not None:
                alive.before_loading()

        if optimizer is not None:
            inner = self._saver.attached.add_optimizer(optimizer)
            if inner is not None:
                inner.register_load_state_dict_pre_hook(before_loading)
        if model is not None:
            hook: Any = model._register_load_state_dict_pre_hook  # public from torch 2.5 on
            hook(before_loading)
        if frozen is not None:
            self._saver.attached.add_frozen(frozen)

    def save(
        self,
        step: int,
        state: Any,
        *,
        per_rank: Any = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Ticket:
        """Starts to save, and returns when the state may be changed as far as it is not attached.

        Args:
            step: number of the step, an integer from 0 on. Saving a step again replaces it.
            state: anything that torch.save takes, mostly a dict of state_dicts.
            per_rank: what belongs to this process, such as `rng_state()`.
            metadata: values that JSON can hold, for people and programs that look at checkpoints.

        Attached memory must not change but by the optimizers' steps until the ticket is done: then
        the file has its values of now, or the save fails with StateChangedError.

        Raises: UnsupportedStateError when the state cannot be saved; SaveInFlightError when called
            in itself (by a signal handler), with in_flight="refuse", or as wait_timeout says; with
            on_error="raise", or after three failures in a row, what made an earlier save fail:
            this one was started all the same, its ticket is the error's attribute `ticket`.
        """
        self._check_usable("save")
        return self._saver.save(_arguments.step_number(step), state, per_rank, metadata, self)

    def wait_until_finished(self, timeout: float | None = None) -> None:
        """Waits for the save in flight. Raises what made it fail, and TimeoutError."""
        self._check_usable("wait")
        self._saver.finish(timeout)
        self._saver.raise_undelivered()

    def close(self, timeout: float | None = None) -> None:
        """Waits for the save in flight and lets go of the directory. May be called again.

        Raises what made a save fail, if nobody was told yet; TimeoutError; SaveInFlightError in a
        signal handler that interrupted `save`. It waits for a `save` in another thread.
        """
        self._check_process("close")
        if self._closed:
            return
        self._saver.close(timeout, self._let_go)
        self._saver.raise_undelivered()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if os.getpid() != self._pid:  # leaving the block is no use of it
            return
        if kind is None:
            self.close()
            return
        try:
            self.close(max(0.0, self.drain_deadline() - time.monotonic()))
        except Exception:  # the exception that is on its way says more
            _log.logger.exception("closing the checkpointer failed")

    @property
    def last_error(self) -> BaseException | None:
        """What made the last save fail; None if it did not."""
        self._check_process("last_error")
        return self._saver.last_error

    # --- Looking and restoring ---

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint; None if there is none.

        Raises CorruptCheckpointError when two claim to be the newest, as `restore` does.
        """
        self._check_usable("list")
        found = _recovery.complete_ones(self._root, self.directory)
        if not found:
            return None
        _recovery.check_order(found[0], "latest_step")
        return found[0].step

    def all_steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        self._check_usable("list")
        found = _recovery.complete_ones(self._root, self.directory)
        return sorted({candidate.step for candidate in found})

    def delete(self, step: int) -> None:
        """Removes the checkpoints of a step. Raises NotFoundError."""
        self._check_usable("delete")
        names = [entry["name"] for entry in self._complete() if entry["step"] == step]
        if not names:
            what = f"there is no complete checkpoint of step {step}"
            raise _recovery.not_found(self.directory, what, "delete")
        for name in names:
            self._root.retire(name)

    def restore(
        self,
        targets: MutableMapping[str, Any],
        *,
        per_rank: MutableMapping[str, Any] | None = None,
        step: int | None = None,
        generation: str | None = None,
        strict: bool = True,
        map_location: Any = None,
        weights_only: bool | None = None,
        default: Any = _NOTHING,
    ) -> Any:
        """Fills objects in place from the newest complete checkpoint, or from that of a step.

        Args:
            targets: from the names in the saved state to modules, optimizers, anything else with
                state_dict and load_state_dict, tensors, or callables that are handed the value.
                Plain values are replaced in it.
            per_rank: the same for what was saved as per_rank; often {"rng": set_rng_state}.
            step: None: the newest; if it turns out damaged the next older one, and what was skipped
                is logged. A number: that one, or an error.
            generation: name of a checkpoint's directory, where two claim to be the newest.
            strict: False fills what fits.
            map_location: where tensors are put that callables are handed.
            weights_only: as in `load`.
            default: returned when there is no checkpoint at all; for the first run.

        Returns: the step that was restored, or default.

        Raises: NotFoundError when there is nothing; CorruptCheckpointError when there is something
            and none of it is good (`partially_restored`: tensors were overwritten already), or two
            claim to be the newest; StorageError when the newest cannot be read now (permission,
            too many open files), as no older one stands in for it; MismatchError with nothing
            touched.
        """
        self._check_usable("restore")
        self._saver.settle()
        restored = _recovery.restore_first(
            lambda: _recovery.candidates(self._root, self.directory, step, generation),
            targets,
            per_rank,
            strict,
            map_location,
            weights_only,
        )
        if restored is not None:
            return restored
        if default is _NOTHING:
            what = "there is no checkpoint; check the path, or pass default= for a first run"
            raise _recovery.not_found(self.directory, what)
        return default

    def load(
        self,
        step: int | None = None,
        *,
        generation: str | None = None,
        map_location: Any = None,
        weights_only: bool | None = None,
    ) -> Saved:
        """Loads the newest complete checkpoint, or that of a step, as new objects.

        Args and what it raises: as of `restore`.
        """
        self._check_usable("load")
        self._saver.settle()
        saved = _recovery.load_first(
            lambda: _recovery.candidates(self._root, self.directory, step, generation),
            map_location,
            weights_only,
        )
        if saved is None:
            what = "there is no checkpoint; check the path"
            raise _recovery.not_found(self.directory, what, "load")
        return saved

    # --- Inside ---

    def _tidy(self) -> None:
        removed, kept = self._root.remove_leftovers()
        if removed:
            _log.logger.info("removed unfinished checkpoints: %s", ", ".join(removed))
        if kept:
            _log.logger.warning("unfinished checkpoints could not be removed: %s", ", ".join(kept))

    def _complete(self) -> list[dict[str, Any]]:
        self._check_usable("list")
        return [entry for entry in self._root.catalog() if entry["state"] == "complete"]

    def _check_usable(self, what: str) -> None:
        self._check_process(what)
        if self._closed:
            raise Error(f"{what} failed: the checkpointer is closed")

    def _check_process(self, what: str) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                f"{what} failed: this process was forked from the one that made the checkpointer; "
                "make a checkpointer of its own, with another directory"
            )

    def _let_go(self) -> None:
        self._closed = True
        self._root.close()
        _life.closed(self)

    # --- The end of the process (_life.py) ---

    def in_flight(self) -> bool:
        """A save is on its way."""
        return self._saver.in_flight()

    def follow_in_handler(self) -> None:
        self._saver.follow_in_handler()

    def drain_deadline(self) -> float:
        """When (time.monotonic) whoever ends the process no longer waits for it."""
        return self._saver.drain_deadline(self.drain_timeout)

    def close_at_exit(self) -> list[Any]:
        """Waits until the deadline. What must never be destroyed, as a thread may still use it."""
        finished = self._saver.close_at_exit(self.drain_timeout, self._let_go)
        error = self._saver.undelivered()
        if error is not None:
            _log.logger.error("the last checkpoint before the exit was not saved: %s", error)
        return [] if finished else [self, self._root, *self._saver.never_destroy()]

    def forget_in_child(self) -> list[Any]:
        return [self, self._root, *self._saver.forget_in_child()]
