# SPDX-License-Identifier: Apache-2.0
"""Writes the results of scripts/interop.sh as a table into docs/compatibility.md.

    python report.py RESULTS LABEL... > TABLE            the table alone
    python report.py --into DOCUMENT RESULTS LABEL...    replaces what is between its markers

RESULTS/LABEL holds what one version left: compare.json, tests.xml and read.json, or a sentence in
not-tested. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

BEGIN, END = "<!-- begin: written by scripts/interop.sh -->", "<!-- end -->"
HEAD = (
    "| torch | Python, NumPy | files identical | tests "
    "| it reads of our files | we read of its files |\n"
    "|---|---|---|---|---|---|\n"
)


class Result:
    """What one version of torch left behind in its folder."""

    def __init__(self, folder: Path) -> None:
        self.label = folder.name
        self.compare = _json(folder / "compare.json")
        self.read = _json(folder / "read.json")
        self.theirs = _json(folder / "theirs.json")
        self.tests = _tests(folder / "tests.xml")
        self.not_tested = _text(folder / "not-tested")

    @property
    def name(self) -> str:
        """The version, without the label of the build."""
        version = (self.compare or self.read or {}).get("torch", self.label).split("+")[0]
        return f"{version} (Debian)" if self.label == "debian" and self.read else version

    def row(self) -> str:
        """One line of the table."""
        if self.not_tested:
            return f"| {self.name} | not tested: {self.not_tested} | | | | |"
        about = self.compare or self.read or {"python": "?", "numpy": "?"}
        identical = "does not run us" if self.label == "debian" else "failed"
        if self.compare:
            count, different = self.compare["identical"], len(self.compare["different"])
            identical = f"{count} of {count + different}"
        read, theirs = _share(self.read), _share(self.theirs)
        versions = f"{about['python']}, {about['numpy']}"
        cells = [self.name, versions, identical, self.tests, read, theirs]
        return f"| {' | '.join(cells)} |"

    def notes(self) -> list[str]:
        """What differs, what is read wrongly, and what the version cannot read from anybody."""
        lines = []
        for name, why in (self.compare or {}).get("different", {}).items():
            lines.append(f"- {self.name}: `{name}` differs: {' '.join(why.split())}")
        for name, why in (self.read or {}).get("wrong", {}).items():
            lines.append(f"- {self.name}: `{name}` is read wrongly: {' '.join(why.split())}")
        for name, why in (self.theirs or {}).get("wrong", {}).items():
            lines.append(f"- {self.name}: we read its `{name}` wrongly: {' '.join(why.split())}")
        reasons: dict[str, int] = defaultdict(int)
        for why in (self.read or {}).get("left_out", {}).values():
            reasons[why] += 1
        if reasons:
            known = "; ".join(
                f"{f'`{why}`' if re.fullmatch('[.a-zA-Z0-9_]+', why) else why} ({count})"
                for why, count in sorted(reasons.items())
            )
            lines.append(f"- {self.name} does not have, and so cannot read from anybody: {known}.")
        return lines


def _share(found: dict[str, Any] | None) -> str:
    """How many files were read and equal, of how many."""
    return f"{found['equal']} of {found['equal'] + len(found['wrong'])}" if found else "failed"


def _json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _tests(path: Path) -> str:
    if not path.exists():
        return ""
    suite = next(ElementTree.parse(path).getroot().iter("testsuite"))
    total, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    counts = {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}
    return ", ".join(
        f"{count} {what}" for what, count in counts.items() if count or what == "passed"
    )


def table(results: list[Result]) -> str:
    """The table, and below it what needs a word."""
    rows = "".join(result.row() + "\n" for result in results)
    notes = "".join(note + "\n" for result in results for note in result.notes())
    return f"{HEAD}{rows}\n{notes}".rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="a table of the results of scripts/interop.sh")
    parser.add_argument("--into", type=Path, metavar="DOCUMENT")
    parser.add_argument("results", type=Path)
    parser.add_argument("labels", nargs="+")
    arguments = parser.parse_args()
    text = table([Result(arguments.results / label) for label in arguments.labels])
    if arguments.into is None:
        sys.stdout.write(text)
        return
    document = arguments.into.read_text()
    if document.count(BEGIN) != 1 or document.count(END) != 1:
        sys.exit(f"{arguments.into}: the markers '{BEGIN}' and '{END}' must be there once each")
    before, rest = document.split(BEGIN)
    arguments.into.write_text(f"{before}{BEGIN}\n{text}{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
