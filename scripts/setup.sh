#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Prepares this machine: Debian packages, and a virtual environment in .venv with the Python
# packages of requirements/dev.txt. What is there already is left alone, so that a second call takes
# a moment; every `make` target calls it first.
#
#   scripts/setup.sh          everything to build, test and check
#   scripts/setup.sh bench    also requirements/bench.txt (any requirements/NAME.txt)
#   PYTHON=python3.12 scripts/setup.sh    a particular interpreter (3.10 or newer)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly VENV=.venv

# To build, test and run the demo. A failure to get these ends the set-up.
readonly REQUIRED=(
  g++ cmake ninja-build pkg-config make git python3-dev python3-venv
  libisal-dev zlib1g-dev liburing-dev libaio-dev libfmt-dev nlohmann-json3-dev libcli11-dev
  libgtest-dev libgmock-dev
  e2fsprogs xfsprogs util-linux zip unzip
)
# To measure, lint, sanitize and document. Without them the other targets still work.
readonly TOOLS=(
  fio libtcmalloc-minimal4 clang-19 clang-tidy-19 clang-format-19 clang-tools-19 libclang-rt-19-dev
  gcovr strace doxygen graphviz shellcheck
)
# A package whose command works is not missing, wherever the command came from.
declare -rA COMMAND_OF=(
  [g++]=g++ [cmake]=cmake [ninja-build]=ninja [pkg-config]=pkg-config [make]=make [git]=git
)

say() { echo "setup: $*" >&2; }
fail() {
  say "$*"
  exit 1
}

# Prints those of the given Debian packages that are not installed.
missing_packages() {
  local package installed
  installed=" $(dpkg-query -W -f='${Package}=${db:Status-Status} ' "$@" 2>/dev/null || true)"
  for package in "$@"; do
    [[ $installed == *" $package=installed "* ]] && continue
    [[ -v COMMAND_OF[$package] ]] && "${COMMAND_OF[$package]}" --version &>/dev/null && continue
    echo "$package"
  done
}

# Runs a command as root: directly, or with sudo if it does not ask for a password.
as_root() {
  if [[ $EUID -eq 0 ]]; then "$@"; else sudo -n -- "$@"; fi
}

can_be_root() {
  [[ $EUID -eq 0 ]] || { command -v sudo && sudo -n true; } &>/dev/null
}

apt_install() {
  say "installing Debian packages: $*"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
    -o DPkg::Lock::Timeout=300 "$@" >"$LOG" 2>&1 && return
  tail -n 20 "$LOG" >&2
  return 1
}

install_packages() {
  local required tools
  if ! command -v dpkg-query >/dev/null; then
    say "not a Debian system: install what corresponds to: ${REQUIRED[*]} ${TOOLS[*]}"
    return
  fi
  mapfile -t required < <(missing_packages "${REQUIRED[@]}")
  mapfile -t tools < <(missing_packages "${TOOLS[@]}")
  [[ ${#required[@]} -eq 0 && ${#tools[@]} -eq 0 ]] && return

  if ! can_be_root; then
    # What only some targets need is worth saying once.
    [[ ${#required[@]} -eq 0 && -f $VENV/.installed-dev ]] && return
    local both=("${required[@]}" "${tools[@]}")
    say "some Debian packages are not installed. Run as root:"
    say "  apt-get update && apt-get install -y --no-install-recommends ${both[*]}"
    [[ ${#required[@]} -eq 0 ]] || fail "cannot go on without: ${required[*]}"
    say "going on: only lint, sanitizers, coverage, bench or docs need them"
    return
  fi

  # A third-party source that is down must not stop us: apt-get install decides.
  as_root apt-get update -qq >"$LOG" 2>&1 || say "apt-get update had errors; going on"
  if [[ ${#required[@]} -gt 0 ]]; then
    apt_install "${required[@]}" || fail "could not install: ${required[*]}"
  fi
  if [[ ${#tools[@]} -gt 0 ]]; then
    apt_install "${tools[@]}" || say "could not install: ${tools[*]}; the build does not need them"
  fi
}

# Succeeds if the interpreter is new enough, can make virtual environments and has C headers.
python_is_usable() {
  "$1" - <<'PY' 2>/dev/null
import os, sys, sysconfig
import ensurepip, venv
header = os.path.join(sysconfig.get_path("include"), "Python.h")
sys.exit(not (sys.version_info >= (3, 10) and os.path.exists(header)))
PY
}

# Prints the path of the interpreter to use; below a virtual environment, the one it was made with.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 /usr/bin/python3 python3.13 python3.12 python3.11 python3.10}; do
    if python_is_usable "$candidate"; then
      "$candidate" -c 'import sys; print(sys._base_executable)'
      return
    fi
  done
  fail "${PYTHON:-python3} is not a Python 3.10 or newer with venv and C headers" \
    "(Debian: apt-get install python3-venv python3-dev; or set PYTHON)"
}

# Prints the interpreter that .venv was made with; fails if there is none that runs.
venv_python() {
  "$VENV/bin/python" -m pip --version &>/dev/null || return 1
  "$VENV/bin/python" -c 'import sys; print(sys._base_executable)'
}

make_venv() {
  local wanted present
  if [[ -f $VENV/.made && -z ${PYTHON:-} && -x $VENV/bin/python ]]; then return; fi
  present=$(venv_python || true)
  if [[ -n ${PYTHON:-} || -z $present ]]; then
    wanted=$(find_python)
    if [[ $(realpath -m -- "${present:-none}") != $(realpath -- "$wanted") ]]; then
      say "making $VENV with $wanted"
      "$wanted" -m venv --clear "$VENV"
    fi
  fi
  touch "$VENV/.made"
}

# Makes `import fastpersist` find the sources and the extension that CMake puts beside them.
link_sources() {
  local site
  site=$(echo "$VENV"/lib/python3.*/site-packages)
  [[ $(cat "$site/fastpersist-development.pth" 2>/dev/null) == "$PWD/python" ]] ||
    echo "$PWD/python" >"$site/fastpersist-development.pth"
}

# Installs requirements/NAME.txt unless exactly that was done before.
install_requirements() {
  local file=requirements/$1.txt stamp=$VENV/.installed-$1 key
  [[ -f $file ]] || fail "no such file: $file"
  key=$(cat scripts/setup.sh "$file" "$VENV/pyvenv.cfg" | sha256sum)
  [[ $(cat "$stamp" 2>/dev/null) == "$key" ]] && return
  say "installing the Python packages of $file (minutes the first time)"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -r "$file" ||
    fail "pip could not install $file"
  echo "$key" >"$stamp"
}

main() {
  local name
  mkdir -p build
  readonly LOG=build/setup.log
  if command -v flock >/dev/null; then # Two calls at once would install over each other.
    exec 9>build/.setup.lock
    flock 9
  fi
  install_packages
  make_venv
  link_sources
  install_requirements dev
  for name in "$@"; do install_requirements "$name"; done
}

main "$@"
