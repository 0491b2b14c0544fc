#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that relative links in the repository's Markdown files lead somewhere.

A target must exist inside the repository, in the same spelling, and a #fragment must be a heading
of the Markdown file that it names. Links to other sites are not followed. Prints each dead link as
PATH:LINE: sentence; exit status 1 if there is any.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

FENCE = re.compile(r"^\s{0,3}(`{3,}|~{3,})")
INLINE_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
HEADING = re.compile(r"^ {0,3}#{1,6}\s+(.*?)\s*#*\s*$")
# [text](target "title"), ![text](target), [label]: target, <a href="target">, <img src="target">
TARGETS = (
    re.compile(r"\]\(\s*<?([^\s<>)]+)>?(?:\s+[\"'][^)]*)?\s*\)"),
    re.compile(r"^\s{0,3}\[[^\]]+\]:\s*<?([^\s<>]+)>?"),
    re.compile(r"<(?:a|img)\b[^>]*?\b(?:href|src)=[\"']([^\"']+)[\"']"),
)
ANCHOR = re.compile(r"<[^>]+\b(?:id|name)=[\"']([^\"']+)[\"']")
SCHEME = re.compile(r"^(?:[a-z][a-z0-9+.-]*:|//)", re.IGNORECASE)


def prose_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and lines outside code fences."""
    fence = ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = FENCE.match(line)
        if match and not fence:
            fence = match[1]
        elif match and match[1].startswith(fence):
            fence = ""
        elif not fence:
            yield number, line


def slug(heading: str) -> str:
    """The fragment under which a heading is reached on the usual forges."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # A link counts by its text.
    text = re.sub(r"[^\w\s-]", "", text.lower())
    return re.sub(r"\s", "-", text.strip())


@cache
def fragments(path: Path) -> frozenset[str]:
    """All fragments of a Markdown file; a repeated heading gets -1, -2, ... appended."""
    found: set[str] = set()
    seen: dict[str, int] = {}
    for _, line in prose_lines(path):
        found.update(ANCHOR.findall(line))
        if match := HEADING.match(line):
            name = slug(match[1])
            count = seen.get(name, 0)
            seen[name] = count + 1
            found.add(f"{name}-{count}" if count else name)
    return frozenset(found)


def exists_as_spelled(path: Path, root: Path) -> bool:
    """Whether the path is inside root and exists there, upper and lower case respected."""
    if not path.is_relative_to(root) or not path.exists():
        return False
    while path != root:
        if path.name not in {entry.name for entry in path.parent.iterdir()}:
            return False
        path = path.parent
    return True


def fault_of(target: str, source: Path, root: Path) -> str | None:
    """What is wrong with a link found in source; None if it leads somewhere."""
    if SCHEME.match(target):
        return None
    name, _, fragment = unquote(target).partition("#")
    if name.startswith("/"):
        return f"{target}: not a relative path"
    path = Path(root, source.parent, name).resolve() if name else source
    if not exists_as_spelled(path, root):
        return f"{target}: no such file in the repository"
    if fragment and path.suffix == ".md" and fragment not in fragments(path):
        return f"{target}: no heading has this fragment"
    return None


def markdown_files(root: Path) -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.md"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [root / name for name in sorted(filter(None, listing.split("\0")))]


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    links = dead = 0
    files = [path for path in markdown_files(root) if path.is_file()]
    for source in files:
        for number, line in prose_lines(source):
            prose = INLINE_CODE.sub("", line)
            for target in (found for pattern in TARGETS for found in pattern.findall(prose)):
                links += 1
                if fault := fault_of(target, source, root):
                    print(f"{source.relative_to(root)}:{number}: {fault}")
                    dead += 1
    print(f"{links} links in {len(files)} Markdown files, {dead} dead")
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
