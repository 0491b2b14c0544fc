# SPDX-License-Identifier: Apache-2.0
"""Real file systems, made for the test on loop devices: each gets the bytes that torch.save makes,
and `direct` says how they got there."""

from __future__ import annotations

import errno
import os
from typing import Any

import faults_support as faults
import pytest
from faults_support import ENGINES, Target

import fastpersist as fp

# (kind, MiB, bytes of a sector)
FILE_SYSTEMS = [
    ("ext4", 32, 512),
    ("ext4", 32, 4096),
    ("xfs", 320, 512),
    ("xfs", 320, 4096),
    ("btrfs", 128, 512),
    ("btrfs", 128, 4096),
    ("ext2", 32, 512),
    ("tmpfs", 32, 512),
    ("overlay", 32, 512),
]
DIRECT = {"ext2", "ext4", "xfs", "btrfs"}  # since long before the kernels that this needs
SIZES = (0, 1, 100_001, 3_000_000)


def save_on(kind: str, mib: int, sector: int) -> dict[str, tuple[str, bool, str]]:
    """Saves with every engine; how the largest file was written."""
    found = {}
    with faults.mounted(kind, mib, sector) as folder:
        for engine in ("auto", *ENGINES):
            for size in SIZES:
                target = Target(folder, size, f"model{size}.pt")
                with faults.warnings_logged() as said:
                    info = target.succeeds(engine, block_bytes=64 << 10)
                # An own reader of the same bytes, after they have left the page cache.
                faults.drop_from_page_cache(target.path)
                assert faults.content(target.path) == target.new
                assert len(said) <= 1, said
            found[engine] = (info.engine, info.direct, info.engine_reason)
        for name in ("model.safetensors", "auto.pt"):
            fp.save(faults.state_of(50_000)["model"], f"{folder}/{name}")
        assert faults.temporaries(folder) == []
    return found


@pytest.mark.parametrize(("kind", "mib", "sector"), FILE_SYSTEMS)
def test_a_file_system_gets_the_bytes_of_torch_save(
    kind: str, mib: int, sector: int, record_property: Any
) -> None:
    found = faults.run(save_on, kind, mib, sector, mounts=True)
    for engine, how in found.items():
        record_property(f"{kind} {sector} {engine}", str(how))
        print(kind, sector, engine, *how)
    assert found["buffered"][:2] == ("buffered", False)
    if kind in DIRECT:
        for engine in ("uring", "libaio", "threads"):
            assert found[engine][:2] == (engine, True), found[engine]
        assert found["auto"][:2] == ("uring", True), found["auto"]


def save_across(kind: str) -> None:
    """A link on one file system to a file on another: the temporary file is beside the latter."""
    with faults.mounted(kind) as there, faults.mounted("tmpfs") as here:
        target = Target(here)
        path = target.path
        target.path = f"{there}/model.pt"
        target.put_old()
        os.unlink(path)
        os.symlink(target.path, path)
        info = fp.save(target.state, path)
        assert info.path == path and os.path.islink(path)
        assert faults.content(target.path) == target.new
        assert faults.temporaries(here) == faults.temporaries(there) == []


def test_a_link_to_another_file_system_is_followed() -> None:
    faults.run(save_across, "ext4", mounts=True)


def save_with_a_quota_of_names(kind: str) -> None:
    """Inodes may run out while bytes are free."""
    with faults.mounted(kind, 16) as folder:
        target = Target(folder)
        names: list[str] = []
        try:
            while True:
                names.append(f"{folder}/n{len(names)}")
                open(names[-1], "wb").close()
        except OSError as error:
            assert error.errno == errno.ENOSPC
        found = target.fails("auto", retries=1)
        assert (found.operation, found.errno) == ("create a temporary file", errno.ENOSPC)
        os.unlink(names[0])
        target.succeeds("auto")


def test_a_file_system_without_inodes_left_is_an_error() -> None:
    faults.run(save_with_a_quota_of_names, "ext4", mounts=True)
