# SPDX-License-Identifier: Apache-2.0
"""The wheel is complete and works where it is installed; the type stub lists what the core has."""

from __future__ import annotations

import ast
import email.parser
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY

import fastpersist as fp
from fastpersist import _core


def version_in_the_header() -> str:
    text = (REPOSITORY / "include/fastpersist/version.h").read_text()
    found = re.search(r'FASTPERSIST_VERSION_STRING "(.+)"', text)
    assert found
    return found[1]


def test_the_version_is_the_headers() -> None:
    assert fp.__version__ == version_in_the_header()


# --- The wheel ---


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as a user builds it. Slow the first time; build/wheel keeps the objects."""
    for module in ("scikit_build_core", "nanobind", "pip"):
        pytest.importorskip(module, reason=f"skipped: {module} is not installed")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-build-isolation", "--no-deps"]
    done = subprocess.run(
        [*command, "--disable-pip-version-check", "-w", folder],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds nothing but the installed wheel."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target"]
    subprocess.run(
        [*command, folder, wheel, "--disable-pip-version-check"], check=True, capture_output=True
    )
    return folder


@pytest.fixture
def run_installed(installed: Path, tmp_path: Path) -> Callable[[str], str]:
    def run(program: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    folders = {name.split("/")[0] for name in names}
    information = f"fastpersist-{version_in_the_header()}.dist-info"
    data = f"fastpersist-{version_in_the_header()}.data"
    assert folders == {"fastpersist", information, data}
    assert [n for n in names if n.startswith(data)] == [f"{data}/scripts/fastpersist"]
    modules = {path.name for path in (REPOSITORY / "python/fastpersist").glob("*.py*")}
    inside = {name.split("/", 1)[1] for name in names if name.startswith("fastpersist/")}
    core = {name for name in inside if name.startswith("_core.") and name.endswith(".so")}
    assert len(core) == 1
    assert inside - core == modules | {"py.typed"}
    licenses = {name.rsplit("/", 1)[1] for name in names if "/licenses/" in name}
    assert licenses == {"LICENSE", "NOTICE"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_metadata_says_what_is_needed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.parser.Parser().parsestr(archive.read(name).decode())
    assert metadata["Name"] == "fastpersist"
    assert metadata["Version"] == version_in_the_header()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra" not in line]
    assert needed == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_installed_package_saves(
    run_installed: Callable[[str], str], installed: Path, tmp_path: Path
) -> None:
    program = """
import fastpersist as fp, numpy
from importlib import metadata
info = fp.save({"a": numpy.arange(6.0)}, "a.safetensors")
print(fp.__file__)
print(metadata.version("fastpersist"), fp.__version__, info.bytes)
"""
    where, facts = run_installed(program).splitlines()
    assert Path(where).parents[1] == installed
    size = os.path.getsize(tmp_path / "a.safetensors")
    assert facts.split() == [version_in_the_header()] * 2 + [str(size)]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", ["torch", "fastpersist"])
def test_the_installed_package_and_torch_get_along_in_either_order(
    first: str, run_installed: Callable[[str], str]
) -> None:
    second = "fastpersist" if first == "torch" else "torch"
    program = f"""
import {first}
import {second}
fastpersist.save({{"w": torch.arange(1000.0)}}, "a.pt")
print(torch.load("a.pt")["w"].sum().item())
"""
    assert run_installed(program) == "499500.0\n"


# --- Shared libraries ---


def test_the_core_exports_no_internals() -> None:
    if not (nm := shutil.which("nm")):
        pytest.skip("skipped: no nm here")
    done = subprocess.run(
        [nm, "--dynamic", "--defined-only", "--extern-only", str(_core.__file__)],
        capture_output=True,
        text=True,
        check=True,
    )
    symbols = [line.split()[-1] for line in done.stdout.splitlines()]
    assert "PyInit__core" in symbols
    # Anything else of ours carries the version, or it would clash with another one's.
    assert not [name for name in symbols if "fastpersist" in name and "v0" not in name]


# --- The stub ---

STUB = REPOSITORY / "python/fastpersist/_core.pyi"


def members(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def public(thing: Any) -> set[str]:
    return {name for name in vars(thing) if not name.startswith("_")}


def test_the_stub_lists_what_the_core_has() -> None:
    stub = members(ast.parse(STUB.read_text()).body)
    listed = {name for name in stub if not name.startswith("_")}
    assert listed == public(_core)
    for name, node in stub.items():
        if isinstance(node, ast.ClassDef):
            methods = {m for m in members(node.body) if not m.startswith("_")}
            assert methods == public(getattr(_core, name)), name


def test_the_stub_names_the_arguments_that_the_core_takes() -> None:
    for name, node in members(ast.parse(STUB.read_text()).body).items():
        if isinstance(node, ast.FunctionDef):
            signature = (getattr(_core, name).__doc__ or "").split(" -> ")[0]
            for argument in node.args.posonlyargs + node.args.args:
                assert re.search(rf"\b{argument.arg}: |\barg: ", signature), (name, argument.arg)
