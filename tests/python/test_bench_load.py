# SPDX-License-Identifier: Apache-2.0
"""The benchmark of loading: its groups, checks, goals and documents, and a small run of it.

No test looks at how long anything took.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import (
    cold,
    equality,
    limit,
    load,
    load_goals,
    load_peers,
    load_process,
    load_rounds,
    measure,
    report,
    states,
)
from bench.results import Measurement, StateResult
from bench.rounds import LIMIT_NAMES

REPOSITORY = Path(__file__).resolve().parents[2]
DATA_BYTES = 1_000_000_000


def sample(seconds: float, *, rss: int | None = None) -> measure.Sample:
    return measure.Sample(seconds=seconds, bytes=DATA_BYTES, cpu_seconds=0.1, rss_growth=rss)


def gpt2_result(seconds: dict[str, float], *, pairs: int = 15, rss: int = 0) -> StateResult:
    """A run in which each loader takes as long as `seconds` says, and all settings 1 s."""
    times = dict.fromkeys(LIMIT_NAMES, 1.0) | seconds
    groups = load_rounds.plan_groups(list(times))
    return StateResult(
        name="gpt2",
        title="GPT-2",
        bytes=DATA_BYTES,
        tensors=592,
        titles={name: load_rounds.title(name) for name in times},
        rounds=pairs,
        measurements=[
            Measurement(number, group.name, name, sample(times[name], rss=rss))
            for number in range(1, pairs + 1)
            for group in groups
            for name in group.members
        ],
        fresh_processes=True,
    )


def verdict(result: StateResult, *words: str) -> str:
    found = load_goals.evaluate({"gpt2": result}, [], seed=0)
    (line,) = (goal for goal in found if all(word in goal.name for word in words))
    return line.verdict


# --- Groups ---


def test_ours_run_next_to_every_setting_of_the_limit_and_to_every_peer() -> None:
    names = load.PROGRAMMES["gpt2"]
    members = [set(group.members) for group in load_rounds.plan_groups(names)]
    for setting in LIMIT_NAMES:
        assert {*load_rounds.OURS, setting} in members
    for peer in load_goals.PEERS_OF_LOAD:
        assert any({load_peers.FP_LOAD, peer} <= group for group in members)
    assert any({load_peers.FP_LOAD_INTO, load_peers.DCP} <= group for group in members)
    assert set().union(*members) == set(names)


def test_nobody_is_forgotten_when_few_are_asked_for() -> None:
    names = [load_peers.VERIFY, load_peers.RUNAI]
    assert [group.members for group in load_rounds.plan_groups(names)] == [("verify",), ("runai",)]
    both = load_rounds.plan_groups([load_peers.FP_LOAD, load_peers.TORCH])
    assert [set(group.members) for group in both] == [{"fp.load", "torch"}]


def test_limit_stands_for_all_its_settings() -> None:
    assert load.wanted("gpt2", ["limit", "torch"]) == ["torch", *LIMIT_NAMES]
    assert load.wanted("tiny", ["runai"]) == []


# --- Checks ---


def test_checksums_tell_a_single_bit_a_shape_and_a_name() -> None:
    state = {"a": torch.arange(6.0), "b": [{"c": torch.ones(2, dtype=torch.bfloat16)}]}
    expected = equality.checksums(state)
    assert set(expected) == {"a", "b.0.c"}
    assert equality.difference(expected, equality.checksums(state)) is None
    flipped = {**state, "a": state["a"].clone()}
    flipped["a"].view(torch.int32)[3] ^= 1
    found = equality.difference(expected, equality.checksums(flipped))
    assert found is not None
    assert found.startswith("a is torch.float32 [6]")
    reshaped = {**state, "a": state["a"].view(2, 3)}
    assert equality.difference(expected, equality.checksums(reshaped)) is not None
    assert equality.difference(expected, equality.checksums({"a": state["a"]})) == (
        "b.0.c is missing"
    )
    assert equality.difference(expected, {**expected, "d": "x"}) == "d was never saved"


def test_an_existing_state_has_the_structure_and_other_values(tmp_path: Path) -> None:
    state = states.build("gpt2", size=0.001)
    torch.save(state.value, tmp_path / "model.pt")
    existing = load_peers.existing_state(tmp_path / "model.pt")
    expected, found = equality.checksums(state.value), equality.checksums(existing)
    assert list(expected) == list(found)
    assert all(
        a.rsplit(" ", 1)[0] == b.rsplit(" ", 1)[0]
        for a, b in zip(expected.values(), found.values(), strict=True)
    )
    assert expected != found
    assert existing["step"] == 1000
    assert existing["optimizer"]["param_groups"] == state.value["optimizer"]["param_groups"]


def test_a_dropped_file_is_no_longer_cached(tmp_path: Path) -> None:
    file = tmp_path / "data.bin"
    limit.lay_out(file, 1, seed=0)
    assert file.stat().st_size == max(setting.block_bytes for setting in limit.SETTINGS)
    file.read_bytes()
    assert cold.cached_share(file) == 1.0
    cold.drop(tmp_path)
    if cold.cached_share(file) == 1.0:
        pytest.skip("skipped: this file system keeps its files in memory")
    assert cold.cached_share(tmp_path) < load_rounds.WARM_SHARE


def test_empty_files_are_not_cached(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert cold.cached_share(tmp_path) == 0.0


def test_fio_is_read_for_the_operation_that_was_asked_for() -> None:
    job = {"error": 0, "usr_cpu": 5.0, "sys_cpu": 15.0, "read": {"io_bytes": 100, "runtime": 50}}
    output = json.dumps({"jobs": [job]})
    found = limit.parse(output, 100, "read")
    assert (found.seconds, found.bytes) == (0.05, 100)
    with pytest.raises(limit.LimitError):
        limit.parse(output, 100, "write")


def test_what_fastpersist_logs_of_a_read_is_kept() -> None:
    handler = load_peers.LastRead()
    logger = logging.Logger("test", logging.DEBUG)
    logger.addHandler(handler)
    logger.debug("nothing of interest: %s", {"a": 1})
    assert handler.detail == {}
    info = {"engine": "uring", "engine_reason": "fast", "direct": True, "seconds": 0.5}
    logger.debug("loaded %r: %s", "model.pt", info)
    logger.warning("plain")
    assert handler.detail == {
        "engine": "uring",
        "engine_reason": "fast",
        "direct": True,
        "stages": {"read": 0.5},
    }


def test_a_loader_that_is_not_installed_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nobody = load_peers.Loader("x", "X", "no_such_module", "f", None)
    assert nobody.missing() == (
        "no_such_module is not installed: pip install -r requirements/bench.txt"
    )
    lacking = load_peers.Loader("x", "X", "json", "f", None, attribute="load_into")
    assert lacking.missing() == "json.load_into is not available in this version"
    assert load_peers.LOADERS[load_peers.TORCH].missing() is None
    monkeypatch.setattr(load_peers, "PROGRAM", tmp_path / "fastpersist")
    assert load_peers.LOADERS[load_peers.VERIFY].missing() == (
        "fastpersist is not built: make build"
    )


# --- Processes ---


def test_a_process_waits_until_it_may_load(tmp_path: Path) -> None:
    state = states.build("small")
    torch.save(state.value, tmp_path / load_peers.TORCH_FILE)
    with load_process.WaitingLoad("torch", tmp_path, state.bytes, check=False) as waiting:
        waiting.wait_until_ready()
        found = load_process.sample_from_json(waiting.go())
    assert found.bytes == state.bytes
    assert found.seconds > 0
    with load_process.WaitingLoad("torch", tmp_path, state.bytes, check=True) as waiting:
        waiting.wait_until_ready()
        assert waiting.go() == equality.checksums(state.value)


def test_a_failing_loader_is_left_out_with_its_reason(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / load_peers.TORCH_FILE)
    (tmp_path / load_peers.TORCH_FILE).write_bytes(b"no checkpoint")
    result = StateResult("small", "small", 1, 1, titles={"torch": "torch.load"})
    lines: list[str] = []
    load_rounds.check_loads(result, {}, tmp_path, lines.append)
    assert result.absent["torch"].startswith("failed: LoadError: ")
    assert len(lines) == 1
    load_rounds.run_rounds(result, 1, tmp_path, seed=0, progress=lines.append)
    assert result.measurements == []


# --- Goals and tables ---


def test_every_goal_has_a_line_even_when_nothing_was_measured() -> None:
    found = load_goals.evaluate({}, [], seed=0)
    assert len(found) == 14
    assert all(goal.verdict.startswith("not measured") for goal in found)


@pytest.mark.parametrize(("seconds", "expected"), [(1.1, "met"), (1.12, "missed")])
def test_loading_must_reach_nine_tenths_of_the_limit(seconds: float, expected: str) -> None:
    result = gpt2_result(dict.fromkeys(load_rounds.OURS, seconds))
    assert verdict(result, "fp.load,", "against the limit") == expected
    assert verdict(result, "fp.load_into", "against the limit") == expected
    assert verdict(result, "fastpersist verify", "against the limit") == expected


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, "met"), (0.99, "missed")])
def test_loading_must_be_as_fast_as_every_peer(seconds: float, expected: str) -> None:
    result = gpt2_result({"fp.load": 1.0, "fp.load_into": 1.0, "runai": seconds, "dcp": seconds})
    assert verdict(result, "run:ai") == expected
    assert verdict(result, "fp.load,", "DCP") == expected
    assert verdict(result, "fp.load_into", "DCP") == expected


def test_few_pairs_are_reported_as_no_measurement() -> None:
    result = gpt2_result({"fp.load": 1.0}, pairs=3)
    assert verdict(result, "fp.load,", "the limit") == (
        "not measured, repeat: only 3 of 15 pairs (so far met)"
    )


def test_peak_memory_is_bounded_by_data_and_pool() -> None:
    pool = (64 << 20) + 64_000_000
    into = gpt2_result({"fp.load_into": 1.0}, rss=pool)
    assert verdict(into, "peak RSS", "load_into") == "met"
    assert verdict(gpt2_result({"fp.load_into": 1.0}, rss=pool + 1), "RSS", "_into") == "missed"
    most = round(1.05 * DATA_BYTES) + pool
    assert verdict(gpt2_result({"fp.load": 1.0}, rss=most), "RSS", "fp.load,") == "met"
    assert verdict(gpt2_result({"fp.load": 1.0}, rss=most + 1), "RSS", "fp.load,") == "missed"


def test_the_highest_peak_of_all_rounds_counts() -> None:
    result = gpt2_result({"fp.load": 1.0}, rss=5)
    result.measurements.append(Measurement(16, "x", "fp.load", sample(1.0, rss=7)))
    assert result.peak_rss("fp.load") == 7
    result.fresh_processes = False
    assert result.peak_rss("fp.load") is None


@pytest.mark.parametrize(("seconds", "expected"), [(0.049, "met"), (0.051, "missed")])
def test_inspect_must_take_less_than_fifty_milliseconds(seconds: float, expected: str) -> None:
    found = load_goals.evaluate({}, [seconds] * 20, seed=0)
    assert found[-1].verdict == expected


def test_the_report_tells_what_was_wrong_and_what_was_not_cold() -> None:
    result = gpt2_result({"fp.load": 1.0, "torch": 2.0})
    result.equals_original = {"fp.load": True, "torch": True}
    text = report.state_report(result, seed=0, who="loader")
    assert text.splitlines()[1].startswith("loader ")
    assert "every tensor equals the original's, bit for bit: fp.load; torch.load" in text
    assert "WRONG" not in text
    assert "NOT COLD" not in text
    result.equals_original["torch"] = False
    result.warm_share = 0.5
    text = report.state_report(result, seed=0, who="loader")
    assert "WRONG: torch.load did not load what was saved" in text
    assert "NOT COLD: 50%" in text


# --- From end to end ---


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.load", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def test_a_small_run_leaves_a_table_a_document_and_no_files(tmp_path: Path) -> None:
    target, results = tmp_path / "target", tmp_path / "results" / "run.json"
    target.mkdir()
    finished = run_bench(
        *("--state", "gpt2", "--only", "fp.load", "torch", "--size", "0.003", "--rounds", "1"),
        *("--dir", str(target), "--json", str(results)),
    )
    assert finished.returncode == 0, finished.stderr
    assert "torch.load" in finished.stdout
    assert "every tensor equals the original's" in finished.stdout
    assert "round 1/1" in finished.stderr
    assert list(target.iterdir()) == []
    document = json.loads(results.read_text(encoding="utf-8"))
    assert (document["schema"], document["program"]) == (1, "bench.load")
    assert len(document["goals"]) == 14
    assert document["inspect_seconds"] == []
    (gpt2,) = document["states"]
    assert (gpt2["name"], gpt2["tensors"], gpt2["rounds"]) == ("gpt2", 592, 1)
    measured = {entry["name"]: entry for entry in gpt2["contenders"]}
    assert "torch" in measured
    assert gpt2["equals_original"] == dict.fromkeys(measured, True)
    for entry in measured.values():
        (found,) = entry["samples"]
        assert found["seconds"] > 0
        assert found["bytes"] == gpt2["bytes"]
        assert entry["peak_rss"] == found["rss_growth"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "0"], "must be positive"),
        (["--only", "nobody"], "invalid choice"),
        (["--state", "small"], "invalid choice"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load.parse_arguments(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_quick_is_a_look() -> None:
    quick = load.parse_arguments(["--quick"])
    assert (quick.rounds, quick.size, quick.state) == (3, 0.1, ["gpt2", "tiny"])
