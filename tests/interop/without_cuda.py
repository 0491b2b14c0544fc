# SPDX-License-Identifier: Apache-2.0
"""Makes a CUDA build of torch importable without the gigabytes of CUDA packages that it asks for.

For most versions PyPI has CUDA builds only. The format tests never touch a GPU, but the dynamic
loader insists on every library that torch was linked with. Run by the interpreter of a virtual
environment into which torch was installed with `pip install --no-deps`:

    python without_cuda.py requirements    prints torch's other requirements, one a line, for pip
    python without_cuda.py libraries       makes, beside torch's own libraries, a stand-in for each
        that is missing: the functions that torch takes from it, which all answer "no device".
        Does nothing for a CPU build. Needs gcc, nm and readelf.

Nothing but the tests in that environment ever loads the stand-ins.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import subprocess
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path

CUDA_PACKAGES = ("nvidia-", "cuda-", "triton")
NO_DEVICE = 100  # cudaErrorNoDevice and CUDA_ERROR_NO_DEVICE


def requirements() -> list[str]:
    """What the installed torch requires, in pip's words, less optional extras and CUDA."""
    every = importlib.metadata.requires("torch") or []
    return [r for r in every if not r.startswith(CUDA_PACKAGES) and "extra ==" not in r]


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
    """Each library that this machine lacks, to (name, version) of what torch takes from it."""
    libraries = [path for path in torch.rglob("*.so*") if path.is_file()]
    own = {path.name for path in libraries}
    wanted = {path: needed(path) for path in libraries}
    named = {name for names in wanted.values() for name in names}
    absent = {name for name in named - own if not _loads(name)}
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


def make_stand_in(path: Path, wanted: set[tuple[str, str]]) -> None:
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
    if sys.argv[1:] == ["requirements"]:
        print("\n".join(requirements()))
    elif sys.argv[1:] == ["libraries"]:
        torch = Path(sysconfig.get_path("platlib")) / "torch"
        for name, wanted in missing_symbols(torch).items():
            make_stand_in(torch / "lib" / name, wanted)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
