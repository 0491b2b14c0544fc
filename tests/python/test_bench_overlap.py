# SPDX-License-Identifier: Apache-2.0
"""The benchmark of saving beside training: its blocks, figures, goals, charts, and a small run.

No test looks at how long anything took.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import (
    document,
    measure,
    overlap,
    overlap_arms,
    overlap_chart,
    overlap_checks,
    overlap_figures,
    overlap_goals,
    overlap_process,
    overlap_report,
    overlap_rounds,
    overlap_training,
    throttle,
)
from bench.results import Measurement, StateResult

REPOSITORY = Path(__file__).resolve().parents[2]
STATE_BYTES = 300_000_000
BASE = 0.5


def sample(step: float, steps: int = 10, in_place: float | None = None) -> measure.Sample:
    """A block in which each step computes BASE seconds, updates for none, and stalls the rest."""
    times = []
    for number in range(steps):
        begin = number * step
        times.append([begin, begin + BASE, begin + BASE, begin + BASE, begin + step])
    detail: dict[str, Any] = {"steps": times, "writes": [[0.1, 0.3]]}
    if in_place is not None:
        detail["in_place"] = in_place
    return measure.Sample(steps * step, steps * STATE_BYTES, 1.0, detail=detail)


def setting(name: str, step: dict[str, float], *, blocks: int = 20) -> StateResult:
    """A run of a setting in which a step of each arm takes as long as `step` says."""
    share = {overlap_arms.STAGING: 0.0, overlap_arms.ZERO_COPY: 0.99}
    groups = {
        arm: group.name for group in overlap_rounds.plan_groups(list(step)) for arm in group.members
    }
    return StateResult(
        name=name,
        title=overlap_rounds.SETTINGS[name].title,
        bytes=STATE_BYTES,
        tensors=400,
        titles={arm: overlap_arms.TITLES[arm] for arm in step},
        rounds=blocks,
        measurements=[
            Measurement(number, groups[arm], arm, sample(seconds, in_place=share.get(arm)))
            for number in range(1, blocks + 1)
            for arm, seconds in step.items()
        ],
    )


def verdict(
    results: dict[str, StateResult], *words: str, facts: Any = None, checks: Any = None
) -> str:
    found = overlap_goals.evaluate(results, facts or {}, checks or {}, seed=0)
    (line,) = (goal for goal in found if all(word in goal.name for word in words))
    return line.verdict


# --- Who runs beside whom ---


def test_each_arm_of_ours_runs_next_to_its_baseline() -> None:
    for name in overlap_rounds.SETTINGS:
        names = overlap_rounds.wanted(name, None)
        groups = [set(group.members) for group in overlap_rounds.plan_groups(names)]
        assert set().union(*groups) == set(names)
        assert sum(map(len, groups)) == len(names)
        for arm in overlap_arms.OURS:
            if arm in names:
                assert {arm, overlap_arms.BASELINE[arm]} in groups


def test_baselines_come_with_those_who_need_them() -> None:
    assert overlap_rounds.wanted("gpt", ["zero-copy"]) == ["none-aligned", "zero-copy"]
    assert overlap_rounds.wanted("gpt", ["dcp"]) == ["none", "dcp"]
    assert overlap_rounds.wanted("sleep", ["zero-copy"]) == []


# --- What is trained and saved ---


def test_attached_tensors_are_those_of_gpt2() -> None:
    workload = overlap_training.make("gpt2", size=0.001, seed=0)
    assert overlap_training.state_size(workload)[1] == 592


@pytest.mark.parametrize("kind", ["gpt", "sleep"])
def test_every_step_changes_every_tensor(kind: str) -> None:
    workload = overlap_training.make(kind, size=0.001, seed=0)
    before = [parameter.detach().clone() for parameter in workload.model.parameters()]
    workload.compute()
    workload.optimizer.step()
    for old, new in zip(before, workload.model.parameters(), strict=True):
        assert not torch.equal(old, new)


def test_mapped_memory_is_page_aligned_and_holds_the_same_values() -> None:
    workload = overlap_training.make("sleep", size=0.05, seed=0)
    before = [parameter.detach().clone() for parameter in workload.model.parameters()]
    overlap_training.move_to_pages(workload)
    assert overlap_training.aligned_share(workload) > 0.9
    for old, new in zip(before, workload.model.parameters(), strict=True):
        assert torch.equal(old, new)
    workload.optimizer.step()  # the optimizer still finds its state
    assert overlap_training.aligned_share(workload) > 0.9


def test_moments_of_a_step_come_in_order_and_save_is_called_after_each() -> None:
    workload = overlap_training.make("sleep", size=0.001, seed=0)
    saved: list[int] = []
    steps = overlap_training.timed_steps(workload, lambda: saved.append(1), 3)
    assert len(saved) == len(steps) == 3
    moments = [moment for step in steps for moment in step]
    assert moments == sorted(moments)


@pytest.mark.parametrize("name", overlap_arms.TITLES)
def test_a_block_of_each_arm_tells_of_its_saves(name: str, tmp_path: Path) -> None:
    if reason := overlap_arms.missing(name):
        pytest.skip(f"skipped: {reason}")
    workload = overlap_training.make("sleep", size=0.001, seed=0)
    arm = overlap_arms.make(name, workload, tmp_path / name)
    try:
        found = measure.Sample(**overlap_checks.block(arm, 2))
    finally:
        arm.close()
    assert len(found.detail["steps"]) == 2
    assert len(found.detail["writes"]) == (0 if name in overlap_arms.BASELINE.values() else 3)
    assert ("stages" in found.detail) == (name in overlap_arms.OURS)
    assert found.bytes == 2 * overlap_training.state_size(workload)[0]
    json.dumps(found.as_json())


def test_what_our_arm_saves_is_what_torch_loads(tmp_path: Path) -> None:
    workload = overlap_training.make("sleep", size=0.001, seed=0)
    arm = overlap_arms.make(overlap_arms.STAGING, workload, tmp_path)
    overlap_checks.block(arm, 1)
    (_, newest) = sorted((tmp_path / "run").glob("step-*/state.pt"))
    arm.close()
    loaded = torch.load(newest)
    for name, tensor in workload.model.state_dict().items():
        assert torch.equal(loaded["model"][name], tensor)


def test_a_process_answers_and_tells_what_fails(tmp_path: Path) -> None:
    with overlap_process.TrainingProcess("sleep", tmp_path, size=0.001, seed=0) as process:
        assert process.facts()["tensors"] == 200
        assert len(process.ask("returns", "staging", 3)["seconds"]) == 3
        assert len(process.ask("many_saves", "staging", 2)["rss"]) == 2
        beside = process.ask("python_beside_saves", "staging", 2)
        assert len(beside["saves"]) == 2
        with pytest.raises(overlap_process.TrainingError, match="KeyError"):
            process.ask("block", "nobody", 1)
    with overlap_process.TrainingProcess("nothing", tmp_path, size=1, seed=0) as process:
        with pytest.raises(overlap_process.TrainingError, match="KeyError"):
            process.facts()


# --- Figures ---


def test_cost_is_the_ratio_to_the_baseline_of_the_same_round() -> None:
    result = setting("gpt", {"none": 0.5, "staging": 0.55, "none-aligned": 0.4, "zero-copy": 0.42})
    staging = overlap_figures.cost(result, "staging", 0)
    assert staging is not None
    assert staging.median == pytest.approx(0.1)
    assert staging.steps == 200
    aligned = overlap_figures.cost(result, "zero-copy", 0)
    assert aligned is not None
    assert aligned.median == pytest.approx(0.05)
    assert overlap_figures.cost(setting("gpt", {"staging": 1.0}), "staging", 0) is None


@pytest.mark.parametrize(
    ("interval", "steps", "doubt"),
    [((0.08, 0.12), 200, None), ((0.04, 0.12), 200, "interval ±4.0%"), ((0.1, 0.1), 199, "only")],
)
def test_few_steps_and_wide_intervals_are_no_measurement(
    interval: tuple[float, float], steps: int, doubt: str | None
) -> None:
    found = overlap_figures.Cost(0.1, *interval, steps).doubt(0.11)
    assert found is None if doubt is None else (found or "").startswith(doubt)


def test_a_stall_is_the_wait_before_the_update_and_the_call_of_save() -> None:
    step = [0.0, 1.0, 1.25, 1.5, 1.75]
    assert overlap_figures.stall(step) == 0.5
    assert overlap_figures.update(step) == 0.25
    assert overlap_figures.compute(step) == 1.0
    assert overlap_figures.save_call(step) == 0.25


# --- Goals ---


def test_every_goal_has_a_line_even_when_nothing_was_measured() -> None:
    found = overlap_goals.evaluate({}, {}, {}, seed=0)
    assert len(found) == 10
    assert all(goal.verdict.startswith("not measured") for goal in found)


@pytest.mark.parametrize(
    ("name", "arm", "base", "goal", "word"),
    [
        ("sleep", "staging", "none", 0.01, "host idle"),
        ("gpt", "staging", "none", 0.11, "staging"),
        ("gpt", "zero-copy", "none-aligned", 0.09, "zero-copy"),
    ],
)
def test_overheads_are_judged_by_their_goals(
    name: str, arm: str, base: str, goal: float, word: str
) -> None:
    for extra, expected in ((goal - 0.001, "met"), (goal + 0.001, "missed")):
        result = setting(name, {base: 0.5, arm: 0.5 * (1 + extra)})
        assert verdict({name: result}, "extra time", word) == expected
    few = setting(name, {base: 0.5, arm: 0.5}, blocks=3)
    assert verdict({name: few}, "extra time", word) == (
        "not measured, repeat: only 30 of 200 steps (so far met)"
    )


def test_zero_copy_that_copied_is_no_zero_copy() -> None:
    result = setting("gpt", {"none-aligned": 0.5, "zero-copy": 0.5})
    result.measurements = [
        dataclasses.replace(entry, sample=sample(0.5, in_place=0.1))
        if entry.contender == "zero-copy"
        else entry
        for entry in result.measurements
    ]
    assert verdict({"gpt": result}, "zero-copy") == (
        "not measured: only 10% of the bytes went without a copy"
    )


def test_a_slow_device_may_cost_five_percent_more_than_it_must() -> None:
    facts = {"slow": {"direct_rate": 300e6, "buffered_rate": 300e6}}
    for seconds, expected in ((1.04, "met"), (1.06, "missed")):
        result = setting("slow", {"none": BASE, "staging": seconds})
        assert verdict({"slow": result}, "slower", facts=facts) == expected
    faster = setting("slow", {"none": BASE, "staging": 0.9})
    assert "void" in verdict({"slow": faster}, "slower", facts=facts)
    assert overlap_goals.is_void(faster, facts["slow"], "staging")
    skipped = {"slow": {"skipped": "skipped: no root"}}
    assert verdict({}, "slower", facts=skipped) == "not measured: skipped: no root"


@pytest.mark.parametrize(
    ("first", "later", "expected"), [(0.03, 0.005, "met"), (0.031, 0.006, "missed")]
)
def test_save_must_return_soon(first: float, later: float, expected: str) -> None:
    process = {"seconds": [first, *[later] * 20], "tensors": 592}
    checks = {"returns": {"processes": [process] * 5}}
    assert verdict({}, "the first time", checks=checks) == expected
    assert verdict({}, "from the second on", checks=checks) == expected


def test_memory_is_bounded_by_the_budget_and_flat() -> None:
    most = 128_000_000 + 64_000_000
    growth = {"none": 50_000_000, "staging": 50_000_000 + most}
    checks: dict[str, Any] = {"peak_memory": {"memory": 128_000_000, "growth": growth}}
    assert verdict({}, "peak memory", checks=checks) == "met"
    growth["staging"] += 1
    assert verdict({}, "peak memory", checks=checks) == "missed"
    flat = [100_000_000 + 10_000_000 * min(number, 15) for number in range(200)]
    assert verdict({}, "flat", checks={"many_saves": {"rss": flat}}) == "met"
    leaking = [100_000_000 + 50_000 * number for number in range(200)]
    assert verdict({}, "flat", checks={"many_saves": {"rss": leaking}}) == "missed"
    assert verdict({}, "flat", checks={"many_saves": {"rss": flat[:40]}}).startswith("not measured")


def test_python_beside_a_save_is_held_against_what_the_writer_takes() -> None:
    def checks(ratio: float, hold: float, alone: float = 0.0) -> dict[str, Any]:
        save = {"ratio": ratio, "hold": hold, "others_cpu": 0.2}
        return {"python_beside_saves": {"saves": [save] * 3, "alone_hold": alone}}

    assert verdict({}, "pure Python beside", checks=checks(0.77, 0.001)) == "met"
    assert verdict({}, "pure Python beside", checks=checks(0.75, 0.001)) == "missed"
    assert verdict({}, "standstill", checks=checks(1.0, 0.004)) == "met"
    assert verdict({}, "standstill", checks=checks(1.0, 0.006)) == "missed"
    assert "without a save" in verdict({}, "standstill", checks=checks(1.0, 0.006, alone=0.02))


# --- Report, document, charts ---


def whole_run() -> tuple[dict[str, StateResult], dict[str, dict[str, Any]]]:
    gpt = setting("gpt", {"none": 0.5, "staging": 0.53, "torch": 0.9})
    gpt.absent["dcp"] = "failed: reasons"
    slow = setting("slow", {"none": 0.5, "staging": 0.9})
    known = {
        "gpt": {"threads": 2},
        "sleep": {"skipped": "skipped: no time"},
        "slow": {"threads": 2, "direct_rate": 300e6, "buffered_rate": 290e6},
    }
    return {"gpt": gpt, "slow": slow}, known


def test_the_report_tells_who_is_missing_what_was_skipped_and_what_is_void() -> None:
    results, known = whole_run()
    facts = {
        "cpu": "a CPU",
        "cpus": 2,
        "memory_bytes": 2**34,
        "kernel": "6",
        "load_average": 0.0,
        "file_system": {"type": "ext4", "device": "/dev/x"},
        "packages": {"fastpersist": "0", "torch": "2"},
        "fio": None,
        "time": "now",
    }
    goals = overlap_goals.evaluate(results, known, {}, seed=0)
    text = overlap_report.text(facts, results, known, goals, {}, 0)
    assert "without dcp: failed: reasons" in text
    assert "sleep: skipped: no time" in text
    assert "VOID: Checkpointer, staging wrote more than the limit allows" in text
    assert "+6.0%" in text
    assert "device held to 300 MB/s" in text


def test_charts_are_drawn_from_a_document(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results, known = whole_run()
    summaries = {name: overlap_figures.summary(found, 0) for name, found in results.items()}
    written = document.document(
        {}, {"seed": 0}, results, [], {"settings": known, "summaries": summaries}
    )
    written = json.loads(json.dumps(written))
    overlap_chart.draw_costs(written, tmp_path / "cost.png")
    overlap_chart.draw_timeline(written, tmp_path / "timeline.png")
    for name in ("cost.png", "timeline.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to draw"):
        overlap_chart.draw_timeline(written, tmp_path / "no.png", "sleep")
    with pytest.raises(ValueError, match="nothing to draw"):
        overlap_chart.draw_costs({"summaries": {}}, tmp_path / "no.png")


def test_nothing_to_draw_is_told_and_costs_no_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    arguments = overlap.parse_arguments(["--timeline", str(tmp_path / "timeline.png")])
    overlap.draw(arguments, {"states": [], "summaries": {}}, [])
    assert "no chart: nothing to draw" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_setting_without_the_arms_asked_for_is_skipped(tmp_path: Path) -> None:
    run = overlap_rounds.Run(0.001, 0, 1, 1, None, only=["zero-copy"])
    result, known = overlap_rounds.measure("sleep", run, tmp_path, print)
    assert result is None
    assert known["skipped"].startswith("skipped: none of the arms")


# --- The limit on the device ---


def test_a_limit_holds_inside_and_goes_with_its_block(tmp_path: Path) -> None:
    try:
        with throttle.throttled(tmp_path, 20_000_000) as limited:
            group = limited.group
            assert "20000000" in (group / throttle.LIMIT_FILE).read_text()
    except throttle.ThrottleError as error:
        pytest.skip(f"skipped: {error}")
    assert not group.exists()


def test_without_root_the_limit_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(throttle.ThrottleError, match="needs root"):
        with throttle.throttled(tmp_path, 1):
            pass


# --- From end to end ---


def test_a_small_run_leaves_tables_a_document_charts_and_no_files(tmp_path: Path) -> None:
    target, results = tmp_path / "target", tmp_path / "results"
    target.mkdir()
    command = [sys.executable, "-m", "bench.overlap", "--quick", "--size", "0.002", "--rounds", "1"]
    command += ["--setting", "gpt", "--only", "staging", "torch", "--check", "returns"]
    command += ["--dir", str(target), "--json", str(results / "run.json")]
    command += ["--chart", str(results / "cost.png"), "--timeline", str(results / "timeline.png")]
    finished = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=280
    )
    assert finished.returncode == 0, finished.stderr
    assert "Checkpointer, staging" in finished.stdout
    assert "round 1/1" in finished.stderr
    assert list(target.iterdir()) == []
    written = json.loads((results / "run.json").read_text(encoding="utf-8"))
    assert (written["schema"], written["program"]) == (1, "bench.overlap")
    assert len(written["goals"]) == 10
    assert [arm["name"] for arm in written["summaries"]["gpt"]] == ["none", "staging", "torch"]
    assert written["checks"]["returns"]["processes"][0]["tensors"] == 592
    assert (results / "cost.png").is_file()
    assert (results / "timeline.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "0"], "must be positive"),
        (["--only", "nobody"], "invalid choice"),
        (["--setting", "dream"], "invalid choice"),
        (["--check", "nothing"], "invalid choice"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        overlap.parse_arguments(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_full_run_has_as_many_steps_as_its_goals_ask_for() -> None:
    full = overlap.parse_arguments([])
    assert full.rounds * overlap_rounds.STEPS_PER_BLOCK >= overlap_figures.MIN_STEPS
    assert (full.size, full.memory) == (1.0, None)
    quick = overlap.parse_arguments(["--quick"])
    assert (quick.rounds, quick.size) == (3, 0.1)
