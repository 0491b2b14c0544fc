# SPDX-License-Identifier: Apache-2.0
"""What the documents tell their readers to type works.

In README.md and docs/ every fenced block of `python`, `sh` or `console` runs, unless the line
before it says <!-- not run: reason -->. Python blocks are programs of their own and run in an empty
folder; shell blocks run in the repository's root, with `make` only as far as `make -n` goes. In a
`console` block the lines that begin with "$ " are the commands, or all lines if none does.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY

PYTHON, SHELL = ("python",), ("sh", "console", "bash", "shell")
FENCE = re.compile(r"^ {0,3}(`{3,})\s*([\w+-]*)")
NOT_RUN = re.compile(r"^<!-- not run: (.*?)\s*-->$")
MAKE = re.compile(r"^make(?=\s)")
TARGET = re.compile(r"`make ((?:[a-z][a-z0-9-]*[ `])+)")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block; line is that of its opening fence."""

    line: int
    language: str
    text: str
    not_run: str | None

    @property
    def runs(self) -> bool:
        return self.language in PYTHON + SHELL and self.not_run is None


def blocks_of(text: str) -> list[Block]:
    found: list[Block] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        if match := FENCE.match(lines[at]):
            fence, language = match.groups()
            closing = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == fence)
            before = NOT_RUN.match(lines[at - 1].strip()) if at else None
            body = "\n".join(lines[at + 1 : closing]) + "\n"
            found.append(Block(at + 1, language, body, before[1] if before else None))
            at = closing
        at += 1
    return found


def documents() -> list[Path]:
    folders = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    return [path for path in folders if path.is_file()]


def documents_with_blocks(languages: tuple[str, ...]) -> list[Path]:
    """Those that have blocks of these languages to run."""
    return [
        path
        for path in documents()
        if any(block.runs and block.language in languages for block in blocks_of(path.read_text()))
    ]


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def commands_of(block: Block) -> str:
    """The script of a shell block."""
    lines = block.text.splitlines()
    if block.language == "console" and any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    return "\n".join(MAKE.sub("make -n", line) for line in lines)


# Runs one block after the other, each in a folder of its own. Starting one interpreter for each
# would spend nearly all time on importing torch.
RUNNER = """
import os, runpy, sys, traceback
failed = []
for number, argument in enumerate(sys.argv[1:]):
    name, program = argument.split("=", 1)
    os.makedirs(f"folder-{number}")
    os.chdir(f"folder-{number}")
    try:
        runpy.run_path(program, run_name="__main__")
    except BaseException:
        print(f"--- {name} ---", file=sys.stderr)
        traceback.print_exc()
        failed.append(name)
    os.chdir("..")
sys.exit(f"failed: {failed}" if failed else 0)
"""


@pytest.mark.parametrize("path", documents_with_blocks(PYTHON), ids=name_of)
def test_python_in_a_document_runs(path: Path, run_python: Any, tmp_path: Path) -> None:
    programs = []
    for block in blocks_of(path.read_text()):
        if block.runs and block.language in PYTHON:
            program = tmp_path / f"block_{block.line}.py"
            program.write_text(block.text)
            programs.append(f"{name_of(path)}:{block.line}={program}")
    run_python(RUNNER, *programs)


def test_commands_in_the_documents_run() -> None:
    if not (paths := documents_with_blocks(SHELL)):
        pytest.skip("skipped: all commands in the documents are marked as not run here")
    for path in paths:
        for block in blocks_of(path.read_text()):
            if block.runs and block.language in SHELL:
                done = subprocess.run(
                    ["bash", "-eu", "-c", commands_of(block)],
                    cwd=REPOSITORY,
                    capture_output=True,
                    text=True,
                    timeout=120,
                )
                assert done.returncode == 0, f"{path}:{block.line}: {done.stderr}"


@pytest.mark.parametrize("path", documents(), ids=name_of)
def test_what_is_said_not_to_run_is_a_block_that_would(path: Path) -> None:
    text = path.read_text()
    said = sum(bool(NOT_RUN.match(line.strip())) for line in text.splitlines())
    assert said == sum(
        block.not_run is not None and block.language in PYTHON + SHELL for block in blocks_of(text)
    )


def named_targets() -> set[str]:
    """The targets of make that any document names, in its text or in its blocks."""
    found: set[str] = set()
    for path in [*documents(), REPOSITORY / "CONTRIBUTING.md"]:
        if not path.is_file():
            continue
        text = path.read_text()
        for match in TARGET.finditer(text):
            found.update(match[1].replace("`", " ").split())
        for block in blocks_of(text):
            if block.language in SHELL:
                lines = (line.removeprefix("$ ") for line in block.text.splitlines())
                targets = (re.match(r"make ([a-z][a-z0-9-]*)", line) for line in lines)
                found.update(match[1] for match in targets if match)
    return found


def test_every_target_of_make_that_a_document_names_is_there() -> None:
    targets = sorted(named_targets())
    done = subprocess.run(
        ["make", "-n", *targets], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


# --- The reading of the documents ---

SAMPLE = """
Text `make help`, `make bench bench-ram` and `make lint LINT_STEPS=ruff`.

```python
first
```

<!-- not run: takes long -->
```sh
make demo
```

<!-- not run: says nothing, for a line is between -->

```console
$ echo "$HOME"
/root
$ make test  # both
```

````text
```python
not a block
```
````

```console
make build
```
"""


def test_blocks_are_found_with_their_lines_and_reasons() -> None:
    found = blocks_of(SAMPLE)
    assert [(b.line, b.language, b.not_run) for b in found] == [
        (4, "python", None),
        (9, "sh", "takes long"),
        (15, "console", None),
        (21, "text", None),
        (27, "console", None),
    ]
    assert [b.runs for b in found] == [True, False, True, False, True]
    assert found[0].text == "first\n"


def test_commands_of_a_console_block_are_those_after_the_prompt() -> None:
    found = blocks_of(SAMPLE)
    assert commands_of(found[2]) == 'echo "$HOME"\nmake -n test  # both'
    assert commands_of(found[4]) == "make -n build"


def test_targets_are_found_in_the_text() -> None:
    words = [match[1].replace("`", " ").split() for match in TARGET.finditer(SAMPLE)]
    assert words == [["help"], ["bench", "bench-ram"], ["lint"]]
