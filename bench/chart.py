# SPDX-License-Identifier: Apache-2.0
"""Draws the rates of writers or loaders from JSON results, one panel for each result.

`python -m bench.chart disk.json ram.json --output save.png`
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OUR_NAME = "fastpersist"
OUR_NAMES = (OUR_NAME, "fp.load", "fp.load_into")
OUR_COLOUR = "#1b6ca8"
OTHER_COLOUR = "#9aa5b1"
LIMIT_COLOUR = "#c0392b"
PANEL_INCHES = (5.5, 3.4)


def draw(documents: Sequence[dict[str, Any]], output: Path, *, state: str = "gpt2") -> None:
    """Writes a PNG (or what the suffix says) with one panel for each document.

    Raises ValueError if none of the documents holds the state, ImportError without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [
        (document, found)
        for document in documents
        for found in document["states"]
        if found["name"] == state and found["contenders"]
    ]
    if not panels:
        raise ValueError(f"nothing to draw: no results for the state {state!r}")
    figure = Figure(figsize=(PANEL_INCHES[0] * len(panels), PANEL_INCHES[1]), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (document, found) in enumerate(panels):
        _draw_panel(figure.add_subplot(1, len(panels), index + 1), document, found)
    figure.savefig(output, dpi=150)


def _draw_panel(axes: Any, document: dict[str, Any], state: dict[str, Any]) -> None:
    # The engines one by one answer another question; their differences would only distract.
    bars = [
        entry
        for entry in state["contenders"]
        if not entry["name"].startswith(("limit-", f"{OUR_NAME}-"))
    ]
    bars.sort(key=lambda entry: entry["rate_quartiles"][1])
    rates = [[rate / 1e9 for rate in entry["rate_quartiles"]] for entry in bars]
    axes.barh(
        [entry["title"] for entry in bars],
        [middle for _, middle, _ in rates],
        xerr=[
            [middle - low for low, middle, _ in rates],
            [high - middle for _, middle, high in rates],
        ],
        color=[OUR_COLOUR if entry["name"] in OUR_NAMES else OTHER_COLOUR for entry in bars],
        error_kw={"elinewidth": 1, "ecolor": "#444444"},
    )
    for entry in state["contenders"]:
        if entry["name"] == state["limit"]:
            axes.axvline(
                entry["rate_quartiles"][1] / 1e9,
                color=LIMIT_COLOUR,
                linestyle="--",
                linewidth=1,
                label=f"the limit: {entry['title']}",
            )
            axes.legend(loc="lower right", fontsize=7)
    storage = document["machine"]["file_system"].get("type", "?")
    axes.set_title(f"{state['title']}\n{storage} on {_device(document)}", fontsize=9)
    how = "read cold" if document.get("program") == "bench.load" else "synced to the device"
    axes.set_xlabel(f"GB/s, {how} (median, middle half)", fontsize=8)
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _device(document: dict[str, Any]) -> str:
    if document["arguments"].get("ram"):
        return "a RAM-backed loop device"
    return str(document["machine"]["file_system"].get("device", "?"))


def main() -> int:
    """Draws what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.chart", description=__doc__)
    parser.add_argument(
        "results", nargs="+", type=Path, help="what bench.save or bench.load wrote with --json"
    )
    parser.add_argument("--output", type=Path, required=True, help="the picture, for example a PNG")
    parser.add_argument("--state", default="gpt2", help="which state (default: %(default)s)")
    arguments = parser.parse_args()
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.results]
    try:
        draw(documents, arguments.output, state=arguments.state)
    except (ValueError, ImportError) as error:
        print(f"bench.chart: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
