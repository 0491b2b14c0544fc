# SPDX-License-Identifier: Apache-2.0
"""C++ programs outside this tree: built against an installed library, their files read by torch.

Configures, builds and runs examples/cpp as its own project, and a program that saves the same dict
of tensors as torch.save here, byte for byte.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from conftest import REPOSITORY, first_difference, read

import fastpersist as fp

BUILD = REPOSITORY / "build" / "release"
EXAMPLE = REPOSITORY / "examples" / "cpp"


def cmake_command() -> str:
    """The first CMake that is new enough; one from pip may be broken."""
    for command in ("cmake", "/usr/bin/cmake"):
        if found := shutil.which(command):
            done = subprocess.run([found, "--version"], capture_output=True, text=True)
            words = done.stdout.split()
            if done.returncode == 0 and len(words) > 2:
                version = tuple(int(part) for part in words[2].split(".")[:2])
                if version >= (3, 25):
                    return found
    pytest.skip("skipped: no CMake 3.25 or newer here")


def run(command: Sequence[str | Path], **environment: str) -> str:
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the library is installed."""
    if not (BUILD / "cmake_install.cmake").exists() or not list(BUILD.glob("libfastpersist.*")):
        pytest.skip("skipped: the library is not built in build/release (make build)")
    folder = tmp_path_factory.mktemp("prefix")
    run([cmake_command(), "--install", BUILD, "--prefix", folder])
    return folder


def build(source: Path, prefix: Path, folder: Path) -> Path:
    """Builds the project in source with find_package(fastpersist); returns its build folder."""
    cmake = cmake_command()
    run([cmake, "-S", source, "-B", folder, f"-DCMAKE_PREFIX_PATH={prefix}"])
    run([cmake, "--build", folder])
    return folder


# --- What is installed ---


def test_the_install_has_the_public_headers_the_library_and_the_cmake_files(prefix: Path) -> None:
    headers = {path.name for path in (REPOSITORY / "include/fastpersist").iterdir()}
    assert {path.name for path in (prefix / "include/fastpersist").iterdir()} == headers
    installed = {path.name for path in prefix.rglob("*") if not path.is_dir()}
    assert {"fastpersist-config.cmake", "fastpersist-config-version.cmake"} <= installed
    assert any(name.startswith("libfastpersist.so.") for name in installed)


def test_the_install_has_the_program_with_its_manual_and_completion(prefix: Path) -> None:
    assert (prefix / "share/man/man1/fastpersist.1").is_file()
    assert (prefix / "share/bash-completion/completions/fastpersist").is_file()
    answer = subprocess.run([prefix / "bin/fastpersist", "--version"], capture_output=True, env={})
    assert answer.returncode == 0 and fp.__version__.encode() in answer.stdout


def test_installed_cmake_files_name_no_folder_of_this_machine(prefix: Path) -> None:
    for path in prefix.rglob("*.cmake"):
        assert str(REPOSITORY) not in path.read_text()


def test_the_library_needs_neither_python_nor_torch(prefix: Path) -> None:
    if not shutil.which("ldd"):
        pytest.skip("skipped: no ldd here")
    library = next(prefix.rglob("libfastpersist.so"))
    assert not {
        word for word in ("libpython", "libtorch", "libc10") if word in run(["ldd", library])
    }


# --- The example ---


@pytest.fixture(scope="module")
def example(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the example wrote; its output is in output.txt."""
    if not (EXAMPLE / "CMakeLists.txt").exists():
        pytest.skip("skipped: there is no examples/cpp here")
    folder = build(EXAMPLE, prefix, tmp_path_factory.mktemp("example"))
    written = tmp_path_factory.mktemp("written")
    (written / "output.txt").write_text(run([folder / "save_model", written]))
    return written


def expected() -> dict[str, torch.Tensor]:
    return {
        "linear.weight": torch.arange(1024 * 512, dtype=torch.float32).view(1024, 512),
        "linear.bias": torch.full((512,), 0.5),
        "step": torch.tensor(1000),
    }


def same_tensors(loaded: dict[str, torch.Tensor]) -> None:
    assert {name: (t.dtype, t.shape) for name, t in loaded.items()} == {
        name: (t.dtype, t.shape) for name, t in expected().items()
    }
    assert all(torch.equal(loaded[name], t) for name, t in expected().items())


def test_torch_loads_what_the_example_wrote(example: Path) -> None:
    for mmap in (False, True):
        loaded = torch.load(example / "model.pt", weights_only=True, mmap=mmap)
        assert list(loaded) == list(expected())
        same_tensors(loaded)


def test_safetensors_loads_what_the_example_wrote(example: Path) -> None:
    package = pytest.importorskip("safetensors.torch", reason="skipped: no safetensors here")
    same_tensors(package.load_file(example / "model.safetensors"))


def test_the_examples_safetensors_file_is_the_packages(example: Path, tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch", reason="skipped: no safetensors here")
    package.save_file(expected(), tmp_path / "theirs.safetensors")
    ours, theirs = read(example / "model.safetensors"), read(tmp_path / "theirs.safetensors")
    assert first_difference(ours, theirs) is None


def test_the_examples_torch_file_is_torchs(example: Path, tmp_path: Path) -> None:
    torch.save(expected(), tmp_path / "model.pt")
    ours, theirs = read(example / "model.pt"), read(tmp_path / "model.pt")
    assert first_difference(ours, theirs) is None


def test_the_example_says_what_it_did(example: Path) -> None:
    text = (example / "output.txt").read_text()
    assert f"{os.path.getsize(example / 'model.pt')} bytes" in text
    assert "engine" in text


def test_the_example_fails_with_a_sentence(example: Path, prefix: Path) -> None:
    program = next(path for path in example.parent.rglob("save_model") if os.access(path, os.X_OK))
    done = subprocess.run([program, "/nowhere/at/all"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "No such file or directory" in done.stderr
    assert "create the directory" in done.stderr


# --- The example that reads ---


@pytest.fixture(scope="module")
def load_model(example: Path) -> Path:
    """The program that reads."""
    return next(path for path in example.parent.rglob("load_model") if os.access(path, os.X_OK))


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_the_example_reads_what_it_wrote(example: Path, load_model: Path, name: str) -> None:
    text = run([load_model, example / name])
    assert "linear.weight: float32 [1024, 512], 2097152 bytes" in text
    assert "linear.bias: float32 [512], 2048 bytes" in text
    assert "step: int64 [], 8 bytes" in text
    assert "step 1000\n" in text
    assert "DAMAGED" not in text
    assert ("3 have none" in text) == name.endswith(".safetensors")


def test_the_example_reads_what_torch_wrote(load_model: Path, tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(12.0).view(3, 4).t()}, "step": torch.tensor(7)}
    torch.save(state, tmp_path / "theirs.pt")
    text = run([load_model, tmp_path / "theirs.pt"])
    assert "model.w: float32 [4, 3], 48 bytes" in text
    assert "step 7\n" in text


def test_the_example_names_a_damaged_tensor(
    example: Path, load_model: Path, tmp_path: Path
) -> None:
    damaged = bytearray((example / "model.pt").read_bytes())
    at = damaged.index(torch.full((512,), 0.5).numpy().tobytes())
    damaged[at + 100] ^= 1
    (tmp_path / "model.pt").write_bytes(damaged)
    done = subprocess.run([load_model, tmp_path / "model.pt"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "tensor 'linear.bias'" in done.stderr
    assert f"at offset {at}" in done.stderr


def test_the_example_says_why_it_cannot_read(load_model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no checkpoint at all")
    for path, why in ((tmp_path / "missing", "No such file"), (tmp_path / "text", "text")):
        done = subprocess.run([load_model, path], capture_output=True, text=True)
        assert done.returncode == 1
        assert why in done.stderr


# --- The example that trains ---


def test_the_example_that_trains_goes_on_where_it_was(example: Path, tmp_path: Path) -> None:
    train = next(path for path in example.parent.rglob("train") if os.access(path, os.X_OK))
    assert run([train, tmp_path / "run"]) == "steps 0 to 19 saved\n"
    (tmp_path / "run" / "step-00000019" / "manifest.json").unlink()  # as if it had been killed
    assert run([train, tmp_path / "run"]) == "steps 19 to 38 saved\n"
    kept = sorted(path.name for path in (tmp_path / "run").glob("step-*"))
    assert kept == ["step-00000036", "step-00000037", "step-00000038"]
    state = torch.load(tmp_path / "run" / kept[-1] / "state.pt", weights_only=True)
    rates = [0.5 * 0.99**step for step in range(1, 40)]
    assert state["rate"].item() == pytest.approx(rates[-1])
    assert state["weight"][5, 5].item() == pytest.approx(sum(rates))


# --- More than the example: every type, many entries ---

PROGRAM = """
#include <fastpersist/fastpersist.h>

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace fp = fastpersist;

int main(int argc, char** argv) {
  static std::vector<unsigned char> bytes(1 << 16);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i % 251);
  static unsigned char flags[] = {1, 0, 1};
  fp::State state;
  const auto add = [&](const std::string& name, fp::TensorView view) {
    if (auto added = state.Add(name, std::move(view)); !added) {
      std::fprintf(stderr, "%s\\n", added.error().Message().c_str());
      std::exit(1);
    }
  };
  using enum fp::DType;
  const std::pair<const char*, fp::DType> types[] = {
      {"uint8", kUint8}, {"int8", kInt8}, {"int16", kInt16}, {"int32", kInt32},
      {"int64", kInt64}, {"float16", kFloat16}, {"bfloat16", kBfloat16}, {"float32", kFloat32},
      {"float64", kFloat64}, {"complex64", kComplex64}, {"complex128", kComplex128}};
  std::size_t at = 0;
  for (const auto& [name, dtype] : types) {
    add(name, {.data = bytes.data() + at, .dtype = dtype, .shape = {2, 3}});
    at += 256;
  }
  add("bool", {.data = flags, .dtype = kBool, .shape = {3}});
  add("empty", {.dtype = kFloat32, .shape = {0, 3}});
  add("scalar", {.data = bytes.data() + at, .dtype = kInt64});
  add("five dimensions", {.data = bytes.data() + at + 8, .shape = {1, 2, 1, 2, 1}});
  add("cpu", {.data = bytes.data() + at + 64, .shape = {1}});
  add("storage", {.data = bytes.data() + at + 128, .shape = {300}});
  add("0", {.data = bytes.data() + at + 2048, .shape = {1, 1}});
  add("\\xc3\\xa9", {.data = bytes.data() + at + 2052, .shape = {1}});
  add("", {.data = bytes.data() + at + 2056, .shape = {1}});
  for (int i = 0; i < 2500; ++i) {
    add("layer." + std::to_string(i), {.data = bytes.data() + 8192 + 4 * i, .shape = {1}});
  }
  for (int i = 1; i < argc; ++i) {
    if (auto saved = fp::Save(state, argv[i]); !saved) {
      std::fprintf(stderr, "%s\\n", saved.error().Message().c_str());
      return 1;
    }
  }
}
"""

CMAKE_LISTS = """
cmake_minimum_required(VERSION 3.25)
project(outside LANGUAGES CXX)
find_package(fastpersist 0.1 REQUIRED)
add_executable(outside outside.cc)
target_link_libraries(outside PRIVATE fastpersist::fastpersist)
"""


def state_of_the_program() -> dict[str, torch.Tensor]:
    """The same as PROGRAM's, each tensor with a storage of its own.

    Names that are also words of torch's are made at run time: as literals they would be the same
    Python objects as torch's own, which the pickle shows and C++ cannot know.
    """
    data = torch.arange(1 << 16).remainder(251).to(torch.uint8)

    def take(at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        return data[at : at + size].clone().view(dtype).reshape(shape)

    names = ["uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"]
    names += ["float64", "complex64", "complex128"]
    state = {name: take(256 * i, getattr(torch, name), (2, 3)) for i, name in enumerate(names)}
    at = 256 * len(names)
    f32 = torch.float32
    state["bool"] = torch.tensor([True, False, True])
    state["empty"] = torch.empty(0, 3)
    state["scalar"] = take(at, torch.int64, ())
    state["five dimensions"] = take(at + 8, f32, (1, 2, 1, 2, 1))
    state["".join("cpu")] = take(at + 64, f32, (1,))
    state["".join("storage")] = take(at + 128, f32, (300,))
    state["0"] = take(at + 2048, f32, (1, 1))
    state["é"] = take(at + 2052, f32, (1,))
    state[""] = take(at + 2056, f32, (1,))
    for i in range(2500):
        state[f"layer.{i}"] = take(8192 + 4 * i, f32, (1,))
    return state


@pytest.fixture(scope="module")
def outside(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built program."""
    source = tmp_path_factory.mktemp("outside")
    (source / "outside.cc").write_text(PROGRAM)
    (source / "CMakeLists.txt").write_text(CMAKE_LISTS)
    return build(source, prefix, source / "build") / "outside"


def test_every_type_and_many_names_make_torchs_file(outside: Path, tmp_path: Path) -> None:
    (tmp_path / "cpp").mkdir()
    for name in ("model.pt", "a.b.pt", "noext", "modèle.pt"):
        run([outside, tmp_path / "cpp" / name])
        torch.save(state_of_the_program(), tmp_path / name)
        ours, theirs = read(tmp_path / "cpp" / name), read(tmp_path / name)
        assert first_difference(ours, theirs) is None, name


def test_cpp_and_python_write_the_same_file(outside: Path, tmp_path: Path) -> None:
    run([outside, tmp_path / "model.pt"])
    ours = read(tmp_path / "model.pt")
    fp.save(state_of_the_program(), tmp_path / "model.pt")
    assert first_difference(ours, read(tmp_path / "model.pt")) is None


def test_weights_only_loading_takes_every_type_and_many_names(
    outside: Path, tmp_path: Path
) -> None:
    run([outside, tmp_path / "model.pt"])
    loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    expected = state_of_the_program()
    assert list(loaded) == list(expected)
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        raw = [t.contiguous().flatten().view(torch.uint8) for t in (loaded[name], tensor)]
        assert torch.equal(*raw), name
