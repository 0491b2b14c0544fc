# SPDX-License-Identifier: Apache-2.0
"""Turns measurements into the demo's table: medians over the rounds, and how the two compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from saving import FASTPERSIST, TORCH, Measurement

GB = 1e9
MB = 1e6
HEADINGS = ("median of the rounds", "seconds", "GB/s", "CPU seconds", "CPU s/GB", "peak extra RSS")


def table(measurements: Sequence[Measurement]) -> str:
    """One row for each writer, and one that says how much better fastpersist did."""
    ours = [m for m in measurements if m.writer == FASTPERSIST]
    others = [m for m in measurements if m.writer == TORCH]
    speed = median(m.seconds for m in others) / median(m.seconds for m in ours)
    cpu = median(m.cpu_seconds for m in ours) / median(m.cpu_seconds for m in others)
    rows = [
        HEADINGS,
        row(TORCH, others),
        row(FASTPERSIST, ours),
        ("fastpersist / torch", f"{1 / speed:.2f}", f"{speed:.2f}", f"{cpu:.2f}", f"{cpu:.2f}", ""),
    ]
    return aligned(rows)


def row(writer: str, measurements: Sequence[Measurement]) -> tuple[str, ...]:
    """Medians for one writer, and the highest peak of its rounds."""
    seconds = median(m.seconds for m in measurements)
    cpu_seconds = median(m.cpu_seconds for m in measurements)
    gigabytes = measurements[0].file_bytes / GB
    peaks = [m.extra_rss for m in measurements if m.extra_rss is not None]
    return (
        writer,
        f"{seconds:.3f}",
        f"{gigabytes / seconds:.2f}",
        f"{cpu_seconds:.3f}",
        f"{cpu_seconds / gigabytes:.2f}",
        f"{max(peaks) / MB:.0f} MB" if peaks else "unknown",
    )


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell: the first flush left, the others flush right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        for cells in rows
    )
    return "\n".join(line.rstrip() for line in lines)
