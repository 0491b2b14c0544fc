# SPDX-License-Identifier: Apache-2.0
"""The benchmark's own arithmetic, tables and documents, and small runs of it from end to end.

No test looks at how long anything took.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import (
    goals,
    leaks,
    limit,
    machine,
    measure,
    peers,
    report,
    rounds,
    save,
    states,
    statistics,
)
from bench.results import FirstSave, Measurement, StateResult

REPOSITORY = Path(__file__).resolve().parents[2]
SMALL_RUN = ["--size", "0.005", "--rounds", "2"]


def sample(seconds: float, *, size: int = 1_000_000_000, cpu: float = 1.0) -> measure.Sample:
    return measure.Sample(seconds=seconds, bytes=size, cpu_seconds=cpu)


def state_result(name: str, entries: list[tuple[int, str, str, measure.Sample]]) -> StateResult:
    return StateResult(
        name=name,
        title=name,
        bytes=1_000_000_000,
        tensors=592,
        titles={contender: contender for _, _, contender, _ in entries},
        rounds=max(number for number, _, _, _ in entries),
        measurements=[Measurement(*entry) for entry in entries],
    )


# --- Statistics ---


def test_interval_contains_the_median_and_shrinks_with_more_values() -> None:
    seed = 7
    print(f"seed {seed}")
    noise = random.Random(seed)
    values = [noise.gauss(1.0, 0.05) for _ in range(400)]
    few, many = statistics.estimate(values[:15]), statistics.estimate(values)
    for found in (few, many):
        assert found.low <= found.median <= found.high
    assert many.high - many.low < few.high - few.low


def test_interval_covers_the_true_median_about_as_often_as_it_says() -> None:
    seed = 11
    print(f"seed {seed}")
    noise = random.Random(seed)
    covered = 0
    for _ in range(100):
        found = statistics.estimate([noise.gauss(2.0, 0.1) for _ in range(25)])
        covered += found.low <= 2.0 <= found.high
    assert 85 <= covered <= 100


def test_equal_values_have_an_interval_without_width() -> None:
    found = statistics.estimate([0.5] * 20)
    assert (found.low, found.median, found.high) == (0.5, 0.5, 0.5)
    assert found.doubt is None


def test_same_seed_gives_the_same_interval() -> None:
    values = [1.0, 1.1, 0.9, 1.3, 1.05]
    assert statistics.estimate(values, seed=3) == statistics.estimate(values, seed=3)


def test_paired_ratio_cancels_drift_that_both_sides_share() -> None:
    drifting = [1.0 + 0.2 * step for step in range(20)]
    found = statistics.paired_ratio([(0.9 * speed, speed) for speed in drifting])
    assert found.median == pytest.approx(0.9)
    assert found.relative_half_width < 1e-9


def test_no_values_are_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        statistics.estimate([])


@pytest.mark.parametrize(
    ("values", "doubt"),
    [([1.0] * 15, None), ([1.0] * 14, "only 14 of 15 pairs"), ([0.5, 1.5] * 10, "interval ±50%")],
)
def test_too_few_pairs_or_a_wide_interval_are_no_measurement(
    values: list[float], doubt: str | None
) -> None:
    assert statistics.estimate(values).doubt == doubt


@pytest.mark.parametrize(
    ("number", "text"), [(0.012345, "0.0123"), (99.96, "100"), (999.4, "999"), (16_800.4, "16,800")]
)
def test_numbers_are_shown_with_three_digits_and_no_exponent(number: float, text: str) -> None:
    assert statistics.three_digits(number) == text


# --- States ---


def test_gpt2_state_has_the_published_sizes() -> None:
    shapes = states.gpt2_shapes()
    assert len(shapes) == 148
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 124_439_808


@pytest.mark.parametrize(("name", "tensors"), [("gpt2", 592), ("tensor", 1), ("small", 16)])
def test_size_shrinks_bytes_but_not_the_number_of_tensors(name: str, tensors: int) -> None:
    state = states.build(name, size=0.01)
    assert state.tensors == tensors
    assert state.bytes == pytest.approx(states.approximate_bytes(name, 0.01), rel=0.1)


def test_size_shrinks_the_number_of_tiny_tensors() -> None:
    state = states.build("tiny", size=0.001)
    assert (state.tensors, state.bytes) == (100, 400)


def test_same_seed_gives_the_same_state_and_another_seed_another() -> None:
    first, again, other = (states.build("small", seed=seed).value for seed in (1, 1, 2))
    name = next(iter(first))
    bits = [entry[name].view(torch.int32) for entry in (first, again, other)]
    assert torch.equal(bits[0], bits[1])
    assert not torch.equal(bits[0], bits[2])


def test_values_do_not_compress() -> None:
    import zlib

    data = states.build("tensor", size=0.001).value["weight"].numpy().tobytes()
    assert len(zlib.compress(data)) > 0.98 * len(data)


def test_flat_tensors_store_each_view_once_and_never_share_memory() -> None:
    base = torch.arange(12.0)
    flat = states.flat_tensors({"a": base, "b": {"same": base, "part": [base[3:6]]}, "step": 3})
    assert sorted(flat) == ["a", "b.part.0"]
    assert flat["b.part.0"].untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
    assert torch.equal(flat["b.part.0"], base[3:6])


@pytest.mark.parametrize("size", [0, -1, float("nan")])
def test_sizes_that_are_not_positive_are_refused(size: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        states.build("small", size=size)


# --- The limit ---


def fio_output(**changes: object) -> str:
    job = {"error": 0, "usr_cpu": 5.0, "sys_cpu": 15.0, "write": {"io_bytes": 100, "runtime": 50}}
    return "fio: a note\n" + json.dumps({"jobs": [job | changes]})


def test_fio_output_becomes_a_sample() -> None:
    found = limit.parse(fio_output(), 100)
    assert (found.seconds, found.bytes) == (0.05, 100)
    assert found.cpu_seconds == pytest.approx(0.01)


@pytest.mark.parametrize(
    "output",
    [
        "",
        "{}",
        fio_output(error=5),
        fio_output(write={"io_bytes": 99, "runtime": 50}),
        fio_output(write={"io_bytes": 100, "runtime": 0}),
    ],
    ids=["empty", "no job", "job failed", "too few bytes", "no time"],
)
def test_fio_output_that_is_no_measurement_is_refused(output: str) -> None:
    with pytest.raises(limit.LimitError):
        limit.parse(output, 100)


# --- Rounds ---


def test_fastpersist_runs_next_to_every_setting_of_the_limit() -> None:
    names = save.PROGRAMMES["gpt2"].contenders
    groups = rounds.plan_groups(names)
    members = [set(group.members) for group in groups]
    for setting in rounds.LIMIT_NAMES:
        assert {peers.FASTPERSIST, setting} in members
    assert {f"fastpersist-{engine}" for engine in peers.ENGINES} in members
    assert set().union(*members) == set(names)


def test_a_contender_alone_is_a_group_of_its_own() -> None:
    assert [group.members for group in rounds.plan_groups(["torch"])] == [("torch",)]


def test_a_failing_contender_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    calls = {"good": 0, "bad": 0}

    def good(directory: Path) -> measure.Sample:
        assert list(directory.iterdir()) == []
        (directory / "file").write_bytes(b"x")
        calls["good"] += 1
        return sample(1.0)

    def bad(directory: Path) -> measure.Sample:
        (directory / "half").mkdir()
        calls["bad"] += 1
        if calls["bad"] == 3:
            raise OSError("no space")
        return sample(2.0)

    lines: list[str] = []
    result = rounds.run_rounds(
        states.build("small"),
        [rounds.Contender("good", "Good", good), rounds.Contender("bad", "Bad", bad)],
        4,
        tmp_path,
        seed=1,
        progress=lines.append,
    )
    assert calls == {"good": 5, "bad": 3}  # One of each is untimed.
    assert (len(result.samples("good")), len(result.samples("bad"))) == (4, 1)
    assert result.absent == {"bad": "failed: OSError: no space"}
    assert list(tmp_path.iterdir()) == []
    assert any("round 4/4" in line for line in lines)


def test_ratio_is_taken_from_neighbours_when_there_are_any() -> None:
    result = state_result(
        "gpt2",
        [
            (1, "pair", "a", sample(1.0)),
            (1, "pair", "b", sample(2.0)),
            (1, "alone", "a", sample(50.0)),
            (1, "c", "c", sample(4.0)),
        ],
    )
    assert result.pairs("a", "b", lambda found: found.seconds) == [(1.0, 2.0)]
    assert result.pairs("a", "c", lambda found: found.seconds) == [(25.5, 4.0)]
    assert result.ratio("a", "nobody", lambda found: found.seconds) is None


def test_the_setting_with_the_best_median_is_the_limit() -> None:
    first, second, _ = rounds.LIMIT_NAMES
    result = state_result(
        "gpt2",
        [(number, first, first, sample(seconds)) for number, seconds in enumerate((0.1, 3, 3), 1)]
        + [(number, second, second, sample(2.0)) for number in range(1, 4)],
    )
    assert result.fastest(rounds.LIMIT_NAMES) == second


# --- Measuring ---


def test_measure_sees_memory_that_was_freed_before_the_end() -> None:
    def save_with_a_copy() -> dict[str, str]:
        torch.ones(50_000_000, dtype=torch.uint8)
        return {"engine": "none"}

    found = measure.measure(save_with_a_copy, 10)
    if found.rss_growth is None:
        pytest.skip("skipped: /proc/self/clear_refs cannot be written here")
    assert found.rss_growth > 40_000_000
    assert found.detail == {"engine": "none"}
    assert (found.bytes, found.seconds > 0) == (10, True)


# --- Goals and tables ---


def gpt2_result(fastpersist_seconds: float, *, pairs: int = 15) -> StateResult:
    """A run where the limit takes 1 s, torch.save 3 s, uring 1 s, libaio 1.1 s, threads 1.2 s."""
    entries = []
    for number in range(1, pairs + 1):
        for setting in rounds.LIMIT_NAMES:
            entries.append(
                (number, setting, peers.FASTPERSIST, sample(fastpersist_seconds, cpu=0.2))
            )
            entries.append((number, setting, setting, sample(1.0, cpu=0.1)))
        for engine, seconds in (("uring", 1.0), ("libaio", 1.1), ("threads", 1.2)):
            entries.append((number, "engines", f"fastpersist-{engine}", sample(seconds)))
        entries.append((number, "torch", peers.TORCH, sample(3.0, cpu=1.0)))
    return state_result("gpt2", entries)


def verdicts(result: StateResult, *, on_ram: bool = False) -> dict[str, str]:
    found = goals.evaluate({"gpt2": result}, None, on_ram=on_ram, seed=0)
    return {goal.name: goal.verdict for goal in found}


def test_every_goal_has_a_line_even_when_nothing_was_measured() -> None:
    found = goals.evaluate({}, None, on_ram=False, seed=0)
    assert len(found) == 9
    assert all(goal.verdict.startswith("not measured") for goal in found)


@pytest.mark.parametrize(
    ("seconds", "on_ram", "verdict"),
    [(1.04, False, "met"), (1.08, False, "missed"), (1.08, True, "met"), (1.2, True, "missed")],
)
def test_the_limit_is_nearer_on_disk_than_on_ram(
    seconds: float, on_ram: bool, verdict: str
) -> None:
    found = verdicts(gpt2_result(seconds), on_ram=on_ram)
    assert next(value for name, value in found.items() if "against the limit" in name) == verdict


def test_each_engine_is_judged_against_the_best_one() -> None:
    found = verdicts(gpt2_result(1.0))
    engines = [found[f"engine {engine} against the best engine"] for engine in peers.ENGINES]
    assert engines == ["met", "met", "missed"]


def test_cpu_time_counts_for_each_byte() -> None:
    assert verdicts(gpt2_result(1.0))["CPU seconds per GB against torch.save, GPT-2 state"] == "met"


def test_few_pairs_are_reported_as_no_measurement() -> None:
    name, verdict = next(iter(verdicts(gpt2_result(1.0, pairs=3)).items()))
    assert "against the limit" in name
    assert verdict == "not measured, repeat: only 3 of 15 pairs (so far met)"


@pytest.mark.parametrize(("growth", "verdict"), [(131_108_864, "met"), (131_108_865, "missed")])
def test_peak_memory_may_reach_the_pool_and_64_mb(growth: int, verdict: str) -> None:
    result = gpt2_result(1.0)
    result.first_saves[peers.FASTPERSIST] = FirstSave(rss_growth=growth, seconds=1.0)
    found = verdicts(result)
    assert next(value for name, value in found.items() if "peak RSS" in name) == verdict


@pytest.mark.parametrize(
    ("change", "unchanged"),
    [
        ({}, True),
        ({"descriptors": 6}, False),
        ({"threads": 3}, False),
        ({"files": 1}, False),
        ({"rss": 100_000_000 + leaks.RSS_TOLERANCE + 1}, False),
        ({"rss": 90_000_000}, True),
    ],
)
def test_leaks_are_told_from_noise(change: dict[str, int], unchanged: bool) -> None:
    before = {"descriptors": 5, "threads": 2, "rss": 100_000_000, "files": 0}
    found = leaks.LeakResult(50, 25, leaks.Holdings(**before), leaks.Holdings(**(before | change)))
    assert found.unchanged is unchanged
    assert leaks.LeakResult.from_json(json.loads(json.dumps(found.as_json()))) == found


def test_tables_align_their_columns() -> None:
    lines = report.table(("name", "GB/s"), [("a", "1.5"), ("long name", "12.25")]).splitlines()
    assert lines == ["name        GB/s", "---------  -----", "a            1.5", "long name  12.25"]


def test_report_names_the_limit_and_who_is_missing() -> None:
    result = gpt2_result(1.0)
    result.absent["dcp"] = "is not installed"
    text = report.state_report(result, seed=0)
    assert text.count("(the limit)") == 1
    assert "without dcp: is not installed" in text
    assert "1 GB in 592 tensors, 15 rounds" in text


def test_a_differing_file_is_told_in_the_report() -> None:
    result = gpt2_result(1.0)
    result.equals_torch_save = False
    assert "WRONG" in report.state_report(result, seed=0)


def test_the_file_system_of_proc_is_found() -> None:
    assert machine.file_system(Path("/proc/self"))["type"] == "proc"


@pytest.mark.parametrize(("load", "warned"), [(0.2, False), (1.0, False), (1.1, True)])
def test_a_busy_machine_is_told(load: float, warned: bool) -> None:
    assert (machine.busy_warning({"load_average": load, "cpus": 2}) is not None) is warned


# --- From end to end ---


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench.save", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_a_small_run_leaves_a_table_a_document_and_no_files(tmp_path: Path) -> None:
    target, results = tmp_path / "target", tmp_path / "results" / "run.json"
    target.mkdir()
    arguments = ["--dir", str(target), "--json", str(results), *SMALL_RUN]
    finished = run_bench(
        "--state", "gpt2", "small", "--only", "torch", "safetensors", "limit", *arguments
    )
    assert finished.returncode == 0, finished.stderr
    assert "torch.save + fsync" in finished.stdout
    assert "round 2/2" in finished.stderr
    assert list(target.iterdir()) == []
    document = json.loads(results.read_text(encoding="utf-8"))
    assert document["schema"] == 1
    assert document["machine"]["file_system"]["type"]
    assert len(document["goals"]) == 9
    gpt2, small = document["states"]
    assert (gpt2["name"], gpt2["tensors"], gpt2["rounds"]) == ("gpt2", 592, 2)
    assert (small["name"], small["rounds"]) == ("small", 40)
    measured = {entry["name"]: entry for entry in gpt2["contenders"]}
    assert {"torch", "safetensors"} <= set(measured)
    assert len(measured["torch"]["samples"]) == 2
    assert measured["torch"]["first_save"]["rss_growth"] >= 0
    for name, entry in measured.items():
        assert entry["rate_quartiles"] == sorted(entry["rate_quartiles"])
        assert (entry["of_the_limit"] is None) == (name.startswith("limit-") or not gpt2["limit"])
        for found in entry["samples"]:
            assert found["seconds"] > 0
            # fio writes whole blocks.
            assert found["bytes"] == gpt2["bytes"] or name.startswith("limit-")


def test_fastpersist_itself_is_measured(tmp_path: Path) -> None:
    fastpersist = pytest.importorskip("fastpersist", reason="skipped: fastpersist is not built")
    if not hasattr(fastpersist, "save"):
        pytest.skip("skipped: fastpersist has no save")
    results = tmp_path / "run.json"
    arguments = ["--dir", str(tmp_path), "--json", str(results), *SMALL_RUN]
    finished = run_bench("--state", "gpt2", "--only", "fastpersist", "torch", *arguments)
    assert finished.returncode == 0, finished.stderr
    document = json.loads(results.read_text(encoding="utf-8"))
    (state,) = document["states"]
    assert state["equals_torch_save"] is True
    assert state["absent"] == {}
    (ours,) = (entry for entry in state["contenders"] if entry["name"] == "fastpersist")
    assert ours["stage_seconds"]["total"] > 0
    assert ours["samples"][0]["detail"]["engine_reason"]
    assert document["leaks"]["failed"] == 25


def test_a_chart_is_drawn_from_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="skipped: matplotlib is not installed")
    from bench import chart

    document = {
        "arguments": {"ram": False},
        "machine": {"file_system": {"type": "ext4", "device": "/dev/x"}},
        "states": [
            {
                "name": "gpt2",
                "title": "GPT-2",
                "limit": None,
                "contenders": [
                    {"name": "torch", "title": "torch", "rate_quartiles": [1e9, 2e9, 3e9]}
                ],
            }
        ],
    }
    picture = tmp_path / "chart.png"
    chart.draw([document, document], picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no results"):
        chart.draw([document], picture, state="tiny")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "0"], "must be positive"),
        (["--rounds", "0"], "must be at least 1"),
        (["--only", "nobody"], "invalid choice"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        save.parse_arguments(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--dir", "/nowhere/at/all"], "is not a directory"), (["--size", "1e9"], "free")],
)
def test_what_cannot_be_measured_is_told_in_a_sentence(arguments: list[str], message: str) -> None:
    finished = run_bench(*arguments)
    assert finished.returncode == 2
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr


# --- The RAM-backed file system ---

RAM_DISK_PROGRAM = """
import os, sys
from bench.ramdisk import RamDiskError, ram_disk
try:
    with ram_disk(64 << 20) as mount_point:
        device = os.stat(mount_point).st_dev
        print(mount_point, f"{os.major(device)}:{os.minor(device)}", flush=True)
        sys.stdin.read()
except RamDiskError as error:
    print("refused", error, flush=True)
"""


def backing_file(device: str) -> str | None:
    """The file behind a loop device; None when the device is free."""
    try:
        return (
            Path(f"/sys/dev/block/{device}/loop/backing_file").read_text(encoding="utf-8").strip()
        )
    except OSError:
        return None


@pytest.mark.parametrize("end", ["close", "kill"])
def test_the_ram_disk_vanishes_however_its_process_ends(end: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", RAM_DISK_PROGRAM],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        told = process.stdout.readline().split(maxsplit=1)
        if told[0] == "refused":
            process.stdin.close()
            pytest.skip(f"skipped: {told[1].strip()}")
        mount_point, device = Path(told[0]), told[1].strip()
        image = backing_file(device)
        assert image is not None
        assert not os.path.ismount(mount_point)  # It is mounted only for that process.
        if end == "kill":
            process.kill()
        else:
            process.stdin.close()
    deadline = time.monotonic() + 60
    while backing_file(device) == image and time.monotonic() < deadline:
        time.sleep(0.05)  # The kernel frees the device a moment after the last unmount.
    assert backing_file(device) != image
    assert not Path(image.removesuffix(" (deleted)")).exists()
    if end == "kill":
        mount_point.rmdir()
    assert not mount_point.exists()


def test_the_ram_disk_asks_for_root_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import ramdisk

    monkeypatch.setattr(ramdisk, "os", types.SimpleNamespace(geteuid=lambda: 1000))
    with pytest.raises(ramdisk.RamDiskError, match="needs root"), ramdisk.ram_disk(1 << 26):
        pass
