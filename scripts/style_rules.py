#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the rules of style that no other tool knows; prints each breach as PATH:LINE: sentence.

The rules are the functions named in FILE_RULES. Run without arguments to check the repository;
with --canary to show that each rule still finds the fault it is made for. Exit status: 0 when all
is well, 1 otherwise.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MIN_INTRODUCTION_WORDS = 6

# Folders whose files and functions must stay short. Tests, scripts and benchmarks may be longer.
SHORT_FOLDERS = ("include", "python", "src", "testing")
CPP_SUFFIXES = (".h", ".cc", ".cpp", ".c")
PYTHON_SUFFIXES = (".py", ".pyi")
SHELL_SUFFIXES = (".sh",)
SOURCE_SUFFIXES = CPP_SUFFIXES + PYTHON_SUFFIXES + SHELL_SUFFIXES

# They say nothing about what is inside.
EMPTY_WORDS = frozenset(
    ("helper", "helpers", "impl2", "manager", "misc", "stuff", "todo", "util", "utils")
)

# Composed, so that this file does not break the rule itself.
WORK_PATH = re.compile(r"(?<![\w.~/-])/" + r"work(?![\w.-])")
# Between keyword and name there may be attributes and an export macro.
CPP_DEFINITION = re.compile(
    r"^\s*(?:class|struct|union|enum(?: class)?|namespace)\s+"
    r"(?:\[\[.*?\]\]\s*|[A-Z_]+\s+)*([A-Za-z_]\w*)"
)
WORD = re.compile(r"[A-Z]?[a-z]+\d*|[A-Z]+(?![a-z])\d*")

Breach = tuple[int, str]


@dataclass(frozen=True)
class TextFile:
    """One file of the repository; path is relative to its root."""

    path: PurePosixPath
    text: str

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module | None:
        """The syntax tree of a Python file; None for others and for what does not parse."""
        if self.path.suffix not in PYTHON_SUFFIXES:
            return None
        try:
            return ast.parse(self.text)
        except SyntaxError:
            return None  # ruff reports it.

    @property
    def is_short_by_rule(self) -> bool:
        return self.path.parts[0] in SHORT_FOLDERS and self.path.suffix in SOURCE_SUFFIXES


def words_of(name: str) -> list[str]:
    """Splits snake_case, kebab-case and CamelCase: "TodoList_v2" -> ["todo", "list", "v2"]."""
    return [word.lower() for word in WORD.findall(name)]


def file_is_short(file: TextFile) -> Iterator[Breach]:
    if file.is_short_by_rule and len(file.lines) >= MAX_FILE_LINES:
        yield (
            len(file.lines),
            f"{len(file.lines)} lines; a file stays under {MAX_FILE_LINES}: is it two ideas?",
        )


def python_function_is_short(file: TextFile) -> Iterator[Breach]:
    """C++ functions are measured by clang-tidy (readability-function-size)."""
    if file.tree is None or not file.is_short_by_rule:
        return
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        if not body:
            continue
        length = (body[-1].end_lineno or 0) - body[0].lineno + 1
        if length >= MAX_FUNCTION_LINES:
            yield (
                node.lineno,
                f"{node.name} has a body of {length} lines; it stays under {MAX_FUNCTION_LINES}",
            )


def path_says_something(file: TextFile) -> Iterator[Breach]:
    for part in file.path.parts:
        for word in words_of(part):
            if word in EMPTY_WORDS:
                yield 1, f"'{word}' in the path says nothing: name what is inside"


def defined_name_says_something(file: TextFile) -> Iterator[Breach]:
    """Types, namespaces and, in Python, functions; names of other projects may be used."""
    for line, name in defined_names(file):
        for word in words_of(name):
            if word in EMPTY_WORDS:
                yield line, f"'{word}' in the name {name} says nothing: name what it does"


def defined_names(file: TextFile) -> Iterator[tuple[int, str]]:
    if file.tree is not None:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.lineno, node.name
    elif file.path.suffix in CPP_SUFFIXES:
        for number, line in enumerate(file.lines, 1):
            if match := CPP_DEFINITION.match(line):
                yield number, match[1]


def no_path_of_one_machine(file: TextFile) -> Iterator[Breach]:
    for number, line in enumerate(file.lines, 1):
        if match := WORK_PATH.search(line):
            yield number, f"'{match[0]}' exists on one machine only: use a relative path"


def license_is_named(file: TextFile) -> Iterator[Breach]:
    if file.path.suffix not in SOURCE_SUFFIXES or not file.text.strip():
        return
    comment = "//" if file.path.suffix in CPP_SUFFIXES else "#"
    expected = f"{comment} SPDX-License-Identifier: Apache-2.0"
    first = 1 if file.lines[0].startswith("#!") else 0
    if len(file.lines) <= first or file.lines[first] != expected:
        yield first + 1, f"the file must begin with '{expected}'"


def introduction_exists(file: TextFile) -> Iterator[Breach]:
    """A header and a Python module say first what they are for; __init__.py may be empty."""
    if file.path.suffix == ".h":
        introduction = leading_comment(file.lines)
    elif file.path.suffix == ".py" and file.tree is not None and file.tree.body:
        introduction = ast.get_docstring(file.tree) or ""
    else:
        return
    if len(introduction.split()) < MIN_INTRODUCTION_WORDS:
        yield 1, "no introduction: say in a paragraph at the top what this file does and assumes"


def leading_comment(lines: Iterable[str]) -> str:
    """The text of a C++ file's comments before its first code, the licence line left out."""
    text: list[str] = []
    in_block = False
    for line in map(str.strip, lines):
        if line.startswith("/*"):
            in_block = True
        if line and not in_block and not line.startswith("//"):
            break
        if "SPDX-License-Identifier" not in line:
            text.append(line.strip("/* "))
        if "*/" in line:
            in_block = False
    return " ".join(text)


FileRule = Callable[[TextFile], Iterator[Breach]]
FILE_RULES: tuple[FileRule, ...] = (
    file_is_short,
    python_function_is_short,
    path_says_something,
    defined_name_says_something,
    no_path_of_one_machine,
    license_is_named,
    introduction_exists,
)

# For each rule a file that breaks it, and only it.
SPDX_CPP = "// SPDX-License-Identifier: Apache-2.0\n"
SPDX_PYTHON = "# SPDX-License-Identifier: Apache-2.0\n"
DOCSTRING = '"""A module that only serves to break a single rule."""\n'
CANARIES: dict[FileRule, TextFile] = {
    file_is_short: TextFile(PurePosixPath("src/a.cc"), SPDX_CPP + "int x;\n" * 399),
    python_function_is_short: TextFile(
        PurePosixPath("python/a.py"),
        SPDX_PYTHON + DOCSTRING + "def long() -> None:\n" + "    pass\n" * 60,
    ),
    path_says_something: TextFile(PurePosixPath("docs/io_utils.md"), "# Text\n"),
    defined_name_says_something: TextFile(
        PurePosixPath("src/a.cc"), SPDX_CPP + "class FASTPERSIST_EXPORT BufferManager;\n"
    ),
    no_path_of_one_machine: TextFile(PurePosixPath("docs/a.md"), "See /" + "work/shared.\n"),
    license_is_named: TextFile(PurePosixPath("src/a.cc"), "int x;\n"),
    introduction_exists: TextFile(PurePosixPath("src/a.h"), SPDX_CPP + "#pragma once\n"),
}


def breaches_of(file: TextFile) -> Iterator[tuple[FileRule, Breach]]:
    for rule in FILE_RULES:
        for breach in rule(file):
            yield rule, breach


def repository_files(root: Path) -> Iterator[TextFile]:
    """Every text file that git tracks or would track, deleted ones left out."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in sorted(filter(None, listing.split("\0"))):
        path = root / name
        if not path.is_file():
            continue
        try:
            yield TextFile(PurePosixPath(name), path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue  # An image or other data.


def check_canaries() -> int:
    """Returns how many rules miss their canary, or find fault with another rule's."""
    wrong = 0
    for rule in FILE_RULES:
        found = {broken for broken, _ in breaches_of(CANARIES[rule])}
        if found != {rule}:
            names = ", ".join(sorted(broken.__name__ for broken in found)) or "nothing"
            print(f"canary of {rule.__name__}: found {names}")
            wrong += 1
    return wrong


def check_repository(root: Path) -> int:
    """Prints and counts the breaches in all files."""
    count = 0
    for file in repository_files(root):
        for _, (line, sentence) in breaches_of(file):
            print(f"{file.path}:{line}: {sentence}")
            count += 1
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--canary", action="store_true", help="check the rules themselves")
    if parser.parse_args().canary:
        return 1 if check_canaries() else 0
    return 1 if check_repository(Path(__file__).resolve().parent.parent) else 0


if __name__ == "__main__":
    sys.exit(main())
