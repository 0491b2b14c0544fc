# SPDX-License-Identifier: Apache-2.0
"""fp.open lists what torch.load would make, and reads single tensors and rows of them."""

from __future__ import annotations

import difflib
import io
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import read
from test_save_api import WITHOUT_TORCH

import fastpersist as fp

# Torch warns about experimental dtypes.
pytestmark = pytest.mark.filterwarnings("ignore")

DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype) and "torch.q" not in str(d)},
    key=str,
)


def model() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": {
            "wte": torch.randn(1000, 17),
            "bias": torch.arange(5),
            "scale": torch.tensor(2.5),
        },
        "epoch": 3,
        "name": "gpt",
        "empty": torch.zeros(0, 4, dtype=torch.float16),
    }


@pytest.fixture(params=["ours", "torch", "object"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    path = tmp_path / "model.pt"
    (torch.save if request.param == "torch" else fp.save)(model(), path)
    if request.param == "object":
        return fp.open(io.BytesIO(read(path)))
    return fp.open(path)


# --- The list ---


def test_names_are_a_collection(opened: Any) -> None:
    names = ["model.wte", "model.bias", "model.scale", "empty"]
    with opened as file:
        assert file.keys() == list(file) == names
        assert len(file) == 4
        assert "model.wte" in file and "epoch" not in file and 3 not in file
        assert file.values() == {"epoch": "3", "name": "'gpt'"}
        assert file.kind == "torch" and file.metadata == {}


def test_info_tells_what_is_known_before_reading(tmp_path: Path) -> None:
    base = torch.zeros(10, 6, dtype=torch.bfloat16)
    fp.save({"part": base[2:5, 1::2], "base": base}, tmp_path / "model.pt")
    with fp.open(str(tmp_path / "model.pt")) as file:
        assert file.info("part") == fp.TensorInfo(
            name="part", dtype=torch.bfloat16, shape=(3, 3), strides=(6, 2), bytes=18,
            device="cpu", storage="data/0", offset=26,
        )  # fmt: skip
        assert file.info("base").storage == "data/0"


def test_a_name_that_is_not_there_gets_similar_ones(opened: Any) -> None:
    for call in (opened.info, opened.tensor):
        with pytest.raises(KeyError, match=r"no tensor 'model\.wtf' .*similar: .*model\.wte"):
            call("model.wtf")


def test_a_wrong_name_is_compared_with_few_of_many_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero = torch.zeros(1)
    names = [f"model.layers.{i}.{part}" for i in range(5000) for part in ("weight", "bias")]
    fp.save(dict.fromkeys(names, zero), tmp_path / "model.pt")
    compared = []
    find = difflib.get_close_matches

    def count(name: str, possibilities: list[str], **named: Any) -> list[str]:
        compared.append(len(possibilities))
        return find(name, possibilities, **named)

    monkeypatch.setattr(difflib, "get_close_matches", count)
    with fp.open(tmp_path / "model.pt") as file:
        for wrong, right in {
            "model.layers.4321.wieght": "model.layers.4321.weight",
            "model.layer.4321.weight": "model.layers.4321.weight",
            "layers.77.bias": "model.layers.77.bias",
        }.items():
            with pytest.raises(KeyError) as caught:
                file.tensor(wrong)
            assert right in str(caught.value).split("similar: ")[1], caught.value
        with pytest.raises(KeyError, match="no tensor"):
            file.tensor("x" * 100_000)
    assert len(compared) == 3 and max(compared) <= 1000


def test_a_closed_file_says_so(opened: Any) -> None:
    with opened as file:
        pass
    file.close()
    for call in (file.values, lambda: file.info("empty"), lambda: file.tensor("empty")):
        with pytest.raises(fp.ArgumentError, match="is closed"):
            call()
    assert "closed" in repr(file)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(b"not a checkpoint at all" * 100)
    with pytest.raises(fp.Error):
        fp.open(tmp_path / "a.pt")
    with pytest.raises(fp.NotFoundError):
        fp.open(tmp_path / "none.pt")
    with pytest.raises(fp.ArgumentError):
        fp.open(3)


# --- Whole tensors ---


def test_tensors_equal_those_of_torch_load(opened: Any) -> None:
    state = model()
    expected = {**{f"model.{k}": v for k, v in state["model"].items()}, "empty": state["empty"]}
    for name in opened:
        tensor = opened.tensor(name)
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])
        tensor.resize_(2000, 20)  # memory of its own


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, (4 << 20) - 1, 4 << 20, (4 << 20) + 1])
def test_every_size_around_a_block_arrives(size: int, tmp_path: Path) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    torch.save([torch.ones(3), data], tmp_path / "model.pt")
    with fp.open(tmp_path / "model.pt") as file:
        assert torch.equal(file.tensor("1"), data)
        assert torch.equal(file.tensor("1", slice(size // 3, None)), data[size // 3 :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_arrives_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    data = torch.arange(256, dtype=torch.uint8)
    state = {"w": (data % 2 if dtype == torch.bool else data).view(dtype)}
    try:
        torch.save(state, tmp_path / "model.pt")
    except Exception as error:
        pytest.skip(f"skipped: torch cannot save it: {error!r}")
    with fp.open(tmp_path / "model.pt") as file:
        assert file.info("w").dtype == dtype
        whole, part = file.tensor("w"), file.tensor("w", slice(1, 3))
    expected = torch.load(tmp_path / "model.pt")["w"]
    assert whole.dtype == part.dtype == dtype
    assert torch.equal(whole.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(part.view(torch.uint8), expected[1:3].clone().view(torch.uint8))


def test_strided_and_lazy_tensors_come_contiguous_with_true_values(tmp_path: Path) -> None:
    z = torch.randn(6, 4, dtype=torch.complex64)
    state = {"t": z.t(), "steps": z[::2, 1:], "one": z[:1].expand(5, 4), "conj": z.conj(),
             "neg": z.clone().conj().imag}  # fmt: skip
    fp.save(state, tmp_path / "model.pt")
    with fp.open(tmp_path / "model.pt") as file:
        for name, expected in state.items():
            for index in ((), (slice(1, 3),), (2, slice(None, 2))):
                tensor = file.tensor(name, *index)
                assert torch.equal(tensor, expected[index])
                assert tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def test_meta_and_quantized_tensors_are_what_they_can_be(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    torch.save({"m": torch.empty(3, 2, device="meta"), "q": quantized}, tmp_path / "model.pt")
    with fp.open(tmp_path / "model.pt") as file:
        if "m" in file:
            assert file.tensor("m").is_meta and file.tensor("m", slice(0, 2)).shape == (2, 2)
        if "q" in file:
            with pytest.raises(fp.UnsupportedFileError, match="quantized"):
                file.tensor("q")


# --- Parts ---

INDICES: list[Any] = [
    (slice(0, 100),), (slice(0, 100), slice(None, 10)), ((slice(5, 900, 7), 3),), (17,), (-1,),
    (-1000, slice(2, 5)), (..., 4), (None, slice(3, 5)), (slice(3, 5), None, slice(0, 2)),
    (slice(None),), (slice(-3, None),), (slice(8, 2),), (slice(2000, 3000),), (slice(1, 2), ..., 0),
    (5, 6), (...,), (torch.tensor(3),),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_an_index_gives_what_it_gives_in_brackets(index: Any, opened: Any) -> None:
    expected = model()["model"]["wte"][index[0] if isinstance(index[0], tuple) else index]
    for verify in (False, True):
        part = opened.tensor("model.wte", *index, verify=verify)
        assert torch.equal(part, expected)
        assert part.untyped_storage().nbytes() == part.numel() * 4


def test_an_index_that_selects_nothing_basic_is_refused(opened: Any) -> None:
    for item in (True, [1, 2], torch.tensor([1, 2]), "a", 1.5):
        with pytest.raises(fp.ArgumentError):
            opened.tensor("model.wte", item)
    with pytest.raises(fp.ArgumentError, match="negative"):
        opened.tensor("model.wte", slice(None, None, -1))
    indices: list[Any] = [(1000,), (-1001,), (0, 17), (0, 0, 0)]
    for index in indices:
        with pytest.raises(IndexError):
            opened.tensor("model.wte", *index)
    with pytest.raises(IndexError):
        opened.tensor("model.scale", 0)


def test_a_part_reads_its_rows_only_and_verify_reads_all(tmp_path: Path) -> None:
    data = torch.randint(0, 256, (1000, 1000), dtype=torch.uint8)
    path = tmp_path / "model.pt"
    fp.save({"w": data}, path)
    content = bytearray(read(path))
    at = content.index(bytes(data[500].tolist()))
    content[at] ^= 0xFF
    path.write_bytes(content)
    with fp.open(path) as file:
        assert torch.equal(file.tensor("w", slice(0, 100)), data[:100])  # no damage there
        for arguments in ((), (slice(0, 100),)):
            with pytest.raises(fp.CorruptCheckpointError, match="w") as caught:
                file.tensor("w", *arguments, verify=True)
            assert not caught.value.partially_restored
        with pytest.raises(fp.CorruptCheckpointError):
            file.tensor("w")
        assert torch.equal(file.tensor("w", verify=False)[501:], data[501:])
    with pytest.raises(fp.CorruptCheckpointError):
        fp.open(io.BytesIO(read(path)))


# --- Other files, threads, no torch ---


def test_safetensors_files_are_read(tmp_path: Path) -> None:
    state = {"b": torch.randn(10, 3), "a": torch.arange(7, dtype=torch.uint8)}
    fp.save(state, tmp_path / "m.safetensors", metadata={"by": "me"})
    with fp.open(tmp_path / "m.safetensors") as file:
        assert file.kind == "safetensors" and file.metadata == {"by": "me"}
        assert sorted(file.keys()) == ["a", "b"] and file.values() == {}
        assert torch.equal(file.tensor("b"), state["b"])
        assert torch.equal(file.tensor("b", slice(2, 9, 3)), state["b"][2:9:3])
        assert file.info("a").storage == "a"


def test_big_endian_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.arange(6.0).reshape(2, 3), "z": torch.tensor([1 + 2j])}
    swapped = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in swapped.values():
        tensor.untyped_storage().byteswap(tensor.dtype)  # type: ignore[no-untyped-call]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "byteorder", "big")
        torch.save(swapped, tmp_path / "model.pt")
    with fp.open(tmp_path / "model.pt") as file:
        for name, expected in state.items():
            assert torch.equal(file.tensor(name), expected)
        assert torch.equal(file.tensor("w", 1), state["w"][1])


def test_many_threads_read_one_file(opened: Any) -> None:
    expected = model()["model"]["wte"]
    wrong: list[int] = []

    def work(start: int) -> None:
        for row in range(start, 1000, 50):
            if not torch.equal(opened.tensor("model.wte", row), expected[row]):
                wrong.append(row)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_without_torch_numpy_arrays_are_read(run_python: Any, tmp_path: Path) -> None:
    z = torch.tensor([[1 + 2j, 3 - 1j]])
    fp.save({"w": torch.arange(60.0).reshape(20, 3), "t": torch.arange(6).reshape(2, 3).t(),
             "bf": torch.ones(2, dtype=torch.bfloat16), "c": z.conj(),
             "n": z.clone().conj().imag}, tmp_path / "a.pt")  # fmt: skip
    fp.save({"w": torch.arange(60.0).reshape(20, 3)}, tmp_path / "a.safetensors")
    program = f"""{WITHOUT_TORCH}
import numpy as np, fastpersist as fp
w = np.arange(60, dtype=np.float32).reshape(20, 3)
for name in ("a.pt", "a.safetensors"):
    with fp.open(name) as f:
        assert f.info("w").dtype == "float32"
        for index in ((), (slice(2, 9, 3),), (4, 1), (slice(3, None), slice(0, 2)), (-1,)):
            part = f.tensor("w", *index)
            assert np.array_equal(part, w[index]), index
            assert part.flags.c_contiguous and part.flags.writeable
        assert np.array_equal(f.tensor("w", slice(None, None, -1)), w[::-1])
with fp.open("a.pt") as f:
    assert f.tensor("t").tolist() == [[0, 3], [1, 4], [2, 5]]
    assert f.tensor("c").tolist() == [[1 - 2j, 3 + 1j]]
    assert f.tensor("n").tolist() == [[-2, 1]]
    try:
        f.tensor("bf")
    except fp.UnsupportedFileError as error:
        print(error)
"""
    assert "bfloat16, which NumPy lacks" in run_python(program).stdout
