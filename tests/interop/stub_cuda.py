# SPDX-License-Identifier: Apache-2.0
"""Lets a CUDA build of torch be imported without the gigabytes of CUDA libraries that it links to.

PyPI has CUDA builds of torch only. The format tests never touch a GPU, but the dynamic loader insists
on every library that torch was linked with. For each one that is missing this makes a small shared
library beside torch's own, with the functions that torch refers to; called, they answer "no device".

    python stub_cuda.py SITE_PACKAGES      needs gcc, nm and readelf
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice and CUDA_ERROR_NO_DEVICE


def needed(library: Path) -> list[str]:
    """The libraries that the loader opens along with this one."""
    lines = _output("readelf", "--wide", "--dynamic", str(library))
    return re.findall(r"\(NEEDED\).*\[(.+)\]", lines)


def symbols(library: Path, kind: str) -> list[tuple[str, str]]:
    """(name, version or "") of the dynamic symbols; kind: "undefined" or "defined"."""
    found = []
    for line in _output("nm", "--dynamic", f"--{kind}-only", str(library)).splitlines():
        fields = line.split()
        if fields[-2] not in "wv":  # weak ones may stay undefined
            name, _, version = fields[-1].replace("@@", "@").partition("@")
            found.append((name, version))
    return found


def version_owners(library: Path) -> dict[str, str]:
    """Symbol version to the library that defines it, as noted when this one was linked."""
    owners, owner = {}, ""
    for line in _output("readelf", "--wide", "--version-info", str(library)).splitlines():
        if found := re.search(r"\bFile: (\S+)", line):
            owner = found[1]
        elif (found := re.search(r"\bName: (\S+) +Flags:.* Version:", line)) and owner:
            owners[found[1]] = owner
    return owners


def missing_symbols(torch: Path) -> dict[str, set[tuple[str, str]]]:
    """Library that is nowhere on this machine to the (name, version) of what torch takes from it."""
    libraries = [path for path in torch.rglob("*.so*") if path.is_file()]
    own = {path.name for path in libraries}
    wanted = {path: needed(path) for path in libraries}
    absent = {name for names in wanted.values() for name in names if name not in own and not _loads(name)}
    defined = {name for path in libraries for name, _ in symbols(path, "defined")}
    missing: dict[str, set[tuple[str, str]]] = {name: set() for name in sorted(absent)}
    for path in libraries:
        candidates = [name for name in wanted[path] if name in absent]
        owners = version_owners(path)
        for name, version in symbols(path, "undefined"):
            if owners.get(version) in absent:
                missing[owners[version]].add((name, version))
            elif not version and name not in defined and candidates:
                missing[candidates[0]].add((name, ""))
    return missing


def make_stub(path: Path, wanted: set[tuple[str, str]]) -> None:
    """Compiles a library whose functions all return NO_DEVICE."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, version in sorted(wanted):
        names[version].append(name)
    lines = [f"int fastpersist_no_device(void) {{ return {NO_DEVICE}; }}"]
    lines += [
        f'int {name}(void) __attribute__((alias("fastpersist_no_device")));'
        for group in names.values()
        for name in group
    ]
    command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-x", "c", "-", "-o", str(path)]
    command.append(f"-Wl,-soname,{path.name}")
    script = path.with_name(path.name + ".map")
    versions = [version for version in names if version]
    if versions:
        script.write_text("".join(f"{v} {{ global: {'; '.join(names[v])}; }};\n" for v in versions))
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(command, input="\n".join(lines), text=True, check=True)
    script.unlink(missing_ok=True)


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _output(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> None:
    torch = Path(sys.argv[1]) / "torch"
    missing = missing_symbols(torch)
    for name, wanted in missing.items():
        make_stub(torch / "lib" / name, wanted)
    print(f"stand-ins for {len(missing)} CUDA libraries: {' '.join(missing) or 'none needed'}")


if __name__ == "__main__":
    main()
