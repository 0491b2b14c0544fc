# SPDX-License-Identifier: Apache-2.0
"""What is looked at apart from the overhead of a step: how long `save` holds its caller, memory,
and how fast other Python code runs beside a save. Each is run in a fresh process.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.measure import measure, process_cpu_seconds, rss_bytes
from bench.overlap_arms import Arm, FastpersistArm
from bench.overlap_training import state_size, timed_steps

CHUNK = 1000  # Iterations between two looks at the clock: a fraction of a millisecond.
BASELINE_SECONDS = 0.5


def block(arm: Arm, steps: int) -> dict[str, Any]:
    """One untimed step with its save, and `steps` timed ones: each has a save in flight.

    The last save is waited for outside of the measured time, as the first one was begun.
    """
    timed_steps(arm.workload, arm.save, 1)
    found: list[Any] = []
    sample = measure(
        lambda: found.extend(timed_steps(arm.workload, arm.save, steps)),
        steps * state_size(arm.workload)[0],
    )
    arm.finish()
    told = arm.tell()
    arm.clean()
    start = found[0][0]
    detail = told | {
        "steps": [[moment - start for moment in step] for step in found],
        "writes": [[begin - start, end - start] for begin, end in told["writes"]],
    }
    return sample.as_json() | {"detail": detail}


def peak_memory(arm: Arm, steps: int) -> dict[str, Any]:
    """Growth of resident memory to its peak over a few steps, the first save included; bytes."""
    gc.collect()
    rss = measure(lambda: _train_and_finish(arm, steps), 1).rss_growth
    return {"rss_growth": rss}


def _train_and_finish(arm: Arm, steps: int) -> None:
    timed_steps(arm.workload, arm.save, steps)
    arm.finish()


def many_saves(arm: Arm, saves: int) -> dict[str, Any]:
    """Resident memory after each of many saves, each finished before the next step; bytes."""
    found = []
    for _ in range(saves):
        _train_and_finish(arm, 1)
        arm.tell()
        arm.clean()
        found.append(rss_bytes())
    return {"rss": found}


def returns(arm: Arm, saves: int) -> dict[str, Any]:
    """Seconds until `save` returns, the first one first, none of them waiting for another."""
    found = []
    for _ in range(saves):
        ((_, _, _, changed, saved),) = timed_steps(arm.workload, arm.save, 1)
        found.append(saved - changed)
        arm.finish()
    return {"seconds": found, "tensors": state_size(arm.workload)[1]}


def python_beside_saves(arm: Arm, saves: int) -> dict[str, Any]:
    """A loop of pure Python while saves are in flight, and while none is.

    For each save: iterations a second with and without it, the share of a CPU that all other
    threads took, and the longest time for which the loop stood still without waiting for a CPU.
    """
    assert isinstance(arm, FastpersistArm)
    alone_rate, alone_hold, _ = _loop_until(_after(BASELINE_SECONDS))
    found = []
    for _ in range(saves):
        timed_steps(arm.workload, lambda: None, 1)
        arm.save()
        rate, hold, others = _loop_until(lambda: not arm.checkpointer.in_flight())
        arm.finish()
        found.append({"ratio": rate / alone_rate, "hold": hold, "others_cpu": others})
    return {"saves": found, "alone_hold": alone_hold}


def _after(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() >= end


def _loop_until(ended: Callable[[], bool]) -> tuple[float, float, float]:
    """Iterations a second; the longest time without progress, less what the scheduler explains;
    CPU seconds of other threads for each second."""
    iterations, longest = 0, 0.0
    start = moment = time.perf_counter()
    cpu = process_cpu_seconds() - time.thread_time()
    waited = _seconds_waited_for_a_cpu()
    while True:
        for _ in range(CHUNK):
            iterations += 1
        now, waited_now = time.perf_counter(), _seconds_waited_for_a_cpu()
        longest = max(longest, now - moment - (waited_now - waited))
        moment, waited = now, waited_now
        if ended():
            break
    seconds = time.perf_counter() - start
    others = (process_cpu_seconds() - time.thread_time() - cpu) / seconds
    return iterations / seconds, longest, max(0.0, others)


def _seconds_waited_for_a_cpu() -> float:
    """Of this thread, so far: it could have run, and another ran. 0 where the kernel keeps none."""
    try:
        text = Path("/proc/thread-self/schedstat").read_text(encoding="ascii")
        return int(text.split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


CHECKS: dict[str, Callable[[Arm, int], dict[str, Any]]] = {
    "block": block,
    "peak_memory": peak_memory,
    "many_saves": many_saves,
    "returns": returns,
    "python_beside_saves": python_beside_saves,
}
