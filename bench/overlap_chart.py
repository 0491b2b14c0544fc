# SPDX-License-Identifier: Apache-2.0
"""Draws what bench.overlap measured: the extra time of a step, and a timeline of a few steps.

`python -m bench.overlap_chart overlap.json --output cost.png --timeline timeline.png`
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.chart import OTHER_COLOUR, OUR_COLOUR
from bench.overlap_arms import OURS

COMPUTE_COLOUR = "#7fb069"
UPDATE_COLOUR = "#d9a441"
STALL_COLOUR = "#c0392b"
TIMELINE_STEPS = 4
TITLES = {
    "gpt": "GPT, all cores computing",
    "sleep": "host idle during the step",
    "slow": "device slower than the step",
}


def draw_costs(document: dict[str, Any], output: Path) -> None:
    """One panel for each setting, one bar for each arm: extra time of a step in percent.

    Raises ValueError if nothing was measured, ImportError without matplotlib.
    """
    panels = {
        name: bars
        for name, arms in document["summaries"].items()
        if (bars := [arm for arm in arms if arm["cost"] is not None])
    }
    if not panels:
        raise ValueError("nothing to draw: no arm was measured beside its baseline")
    figure = _figure(5.0 * len(panels), 2.4)
    for index, (name, bars) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), index + 1)
        values = [100 * arm["cost"] for arm in bars]
        low = [100 * (arm["cost"] - arm["cost_interval"][0]) for arm in bars]
        high = [100 * (arm["cost_interval"][1] - arm["cost"]) for arm in bars]
        axes.barh(
            [arm["title"] for arm in bars],
            values,
            xerr=[low, high],
            color=[OUR_COLOUR if arm["name"] in OURS else OTHER_COLOUR for arm in bars],
            error_kw={"elinewidth": 1, "ecolor": "#444444"},
        )
        axes.invert_yaxis()
        axes.axvline(0, color="#444444", linewidth=0.8)
        axes.set_title(TITLES.get(name, name), fontsize=9)
        axes.set_xlabel("extra time of a step, % (median, 95 % interval)", fontsize=8)
        _plain(axes)
    figure.savefig(output, dpi=150)


def draw_timeline(document: dict[str, Any], output: Path, setting: str = "gpt") -> None:
    """A few steps of each arm: compute, update, stall above, the writing below.

    The block with the median time is shown. Raises ValueError if the setting was not measured,
    ImportError without matplotlib.
    """
    state = next((s for s in document["states"] if s["name"] == setting), None)
    arms = [arm for arm in state["contenders"] if arm["name"] != "none-aligned"] if state else []
    if not arms:
        raise ValueError(f"nothing to draw: no results for the setting {setting!r}")
    figure = _figure(9.0, 0.75 * len(arms) + 1.0)
    axes = figure.add_subplot(1, 1, 1)
    end = 0.0
    for row, arm in enumerate(arms):
        samples = sorted(arm["samples"], key=lambda sample: sample["seconds"])
        end = max(end, _draw_arm(axes, row, samples[len(samples) // 2]["detail"]))
    axes.set_xlim(0, end)
    axes.set_yticks(range(len(arms)), [arm["title"] for arm in arms])
    axes.invert_yaxis()
    axes.set_xlabel("seconds", fontsize=8)
    _legend(axes)
    _plain(axes)
    figure.savefig(output, dpi=150)


def _draw_arm(axes: Any, row: int, detail: dict[str, Any]) -> float:
    """Returns the time of the last step's end."""
    steps = detail["steps"][:TIMELINE_STEPS]
    spans: dict[str, list[tuple[float, float]]] = {}
    for begin, computed, may_change, changed, saved in steps:
        for colour, start, stop in (
            (COMPUTE_COLOUR, begin, computed),
            (STALL_COLOUR, computed, may_change),
            (UPDATE_COLOUR, may_change, changed),
            (STALL_COLOUR, changed, saved),
        ):
            spans.setdefault(colour, []).append((start, stop - start))
    for colour, found in spans.items():
        axes.broken_barh(found, (row - 0.36, 0.36), facecolors=colour)
    end = float(steps[-1][-1])
    writes = [
        (max(0.0, begin), min(stop, end) - max(0.0, begin))
        for begin, stop in detail["writes"]
        if begin < end and stop > 0
    ]
    axes.broken_barh(writes, (row + 0.04, 0.26), facecolors=OUR_COLOUR)
    return end


def _legend(axes: Any) -> None:
    from matplotlib.patches import Patch

    entries = {
        "forward and backward": COMPUTE_COLOUR,
        "optimizer": UPDATE_COLOUR,
        "training stands still": STALL_COLOUR,
        "a checkpoint is on its way": OUR_COLOUR,
    }
    axes.legend(
        handles=[Patch(color=colour, label=label) for label, colour in entries.items()],
        loc="lower center",
        bbox_to_anchor=(0.45, 1.0),
        ncol=4,
        fontsize=8,
        frameon=False,
    )


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _plain(axes: Any) -> None:
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main(argv: Sequence[str] | None = None) -> int:
    """Draws what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.overlap_chart", description=__doc__)
    parser.add_argument("results", type=Path, help="what bench.overlap wrote with --json")
    parser.add_argument("--output", type=Path, metavar="PNG", help="extra time of a step")
    parser.add_argument("--timeline", type=Path, metavar="PNG", help="a few steps of each arm")
    parser.add_argument("--setting", default="gpt", help="of the timeline (default: %(default)s)")
    arguments = parser.parse_args(argv)
    document = json.loads(arguments.results.read_text(encoding="utf-8"))
    try:
        if arguments.output:
            draw_costs(document, arguments.output)
        if arguments.timeline:
            draw_timeline(document, arguments.timeline, arguments.setting)
    except (ValueError, ImportError) as error:
        print(f"bench.overlap_chart: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
