#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Shows that our files are those of other versions of PyTorch: under each version the zoo of states is
# saved by torch.save and by us and compared byte for byte, the tests of the format and of loading run,
# and the files that we write under the torch of .venv are read and compared value by value, as are
# that version's files by us.
#
#   scripts/interop.sh                  all versions; writes the table in docs/compatibility.md
#   scripts/interop.sh 2.6.0 newest     these only; the document stays as it is
#   OPTIONAL='debian' scripts/interop.sh    a version that may be missing without failing the run
#
# A version is a number for pip, or one of
#   installed   the torch of .venv
#   newest      the newest that pip offers
#   debian      Debian's python3-torch with Debian's python3, which does without us. The packages are
#               unpacked into build/, nothing is installed.
#
# Environments are made once, below build/interop/: some 2 GB each, most of it torch. A version that
# cannot be had is reported as "not tested". Exit status: 0 when every version passed, 1 otherwise.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly ALL=(2.4.1 2.6.0 installed newest debian)
readonly OPTIONAL=" ${OPTIONAL:-} "
readonly VENV_PYTHON=$PWD/.venv/bin/python
readonly WORK=$PWD/build/interop
readonly RESULTS=$WORK/results
readonly FILES=$WORK/files # what we write under the installed torch, with descriptions
readonly DEBIAN=$WORK/debian
readonly TESTS=(tests/python/test_{torch_format,torch_release,zoo,load,load_zoo,load_into,open,restore_into}.py)

say() { echo "interop: $*"; }

# The interpreter of a version, and variables for its environment. Set by prepare_*.
PYTHON=
ENVIRONMENT=()

# Says why a version is not tested; the sentence goes into the table.
not_tested() {
  local label=$1 why=$2
  mkdir -p "$RESULTS/$label"
  echo "$why" >"$RESULTS/$label/not-tested"
  say "$label: not tested: $why"
  return 1
}

# The first line of a log that tells what went wrong, else the last of all.
reason_in() {
  sed -nE 's/^(ERROR|E|error): *//p' "$1" | head -n 1 | grep . || tail -n 1 "$1"
}

pip() { # pip ENVIRONMENT ARGUMENTS...: everything it says goes to pip.log
  "$1/bin/python" -m pip --disable-pip-version-check --no-cache-dir "${@:2}" >>"$1/pip.log" 2>&1
}

imports_torch() { "$1" -c 'import torch' &>/dev/null; }

# Makes a virtual environment with one version of torch, on the interpreter of .venv.
make_environment() {
  local label=$1 environment=$WORK/$1 base
  base=$("$VENV_PYTHON" -c 'import sys; print(sys._base_executable)')
  say "$label: making $environment (a download of up to 1 GB)"
  "$base" -m venv --clear "$environment" || {
    not_tested "$label" "$base cannot make a virtual environment"
    return
  }
  # PyPI's torch is a CUDA build for most versions; see tests/interop/without_cuda.py.
  local requirements=$environment/requirements.txt python=$environment/bin/python
  if ! { pip "$environment" install --no-deps "torch==$label" &&
    "$python" tests/interop/without_cuda.py requirements >"$requirements" &&
    pip "$environment" install -r "$requirements" numpy pytest pytest-timeout; }; then
    not_tested "$label" "pip: $(reason_in "$environment/pip.log")"
    return
  fi
  if ! imports_torch "$python"; then
    "$python" tests/interop/without_cuda.py libraries >>"$environment/pip.log" 2>&1 || true
  fi
  if ! imports_torch "$python"; then
    not_tested "$label" "it cannot be imported without CUDA's libraries; '$python -m pip install\
 torch==$label' adds them ($("$python" -c 'import torch' 2>&1 | tail -n 1))"
    return
  fi
}

prepare_pip() {
  local environment=$WORK/$1
  PYTHON=$environment/bin/python
  ENVIRONMENT=()
  # What was made, or completed by hand, is used again.
  if imports_torch "$PYTHON" && "$PYTHON" -c 'import pytest' &>/dev/null; then return; fi
  make_environment "$1"
}

# Unpacks Debian's python3-torch, and those of its dependencies that are not installed.
unpack_debian() {
  local log=$DEBIAN/apt.log package
  rm -rf "$DEBIAN"
  mkdir -p "$DEBIAN/archives/partial" "$DEBIAN/root"
  if ! command -v apt-get >/dev/null; then
    not_tested debian "this is not a Debian system"
    return
  fi
  if [[ $EUID -eq 0 && -z $(apt-cache show python3-torch 2>/dev/null) ]]; then
    apt-get update -qq >"$log" 2>&1 || true
  fi
  say "debian: downloading python3-torch (150 MB)"
  if ! apt-get install -y --no-install-recommends --download-only -o Debug::NoLocking=1 \
    -o "Dir::Cache::archives=$DEBIAN/archives" python3-torch >>"$log" 2>&1; then
    not_tested debian "apt-get: $(reason_in "$log")"
    return
  fi
  for package in "$DEBIAN"/archives/*.deb; do
    [[ ! -e $package ]] || dpkg-deb --extract "$package" "$DEBIAN/root"
  done
  rm -rf "$DEBIAN/archives"
}

prepare_debian() {
  local libraries=$DEBIAN/root/usr/lib machine
  PYTHON=/usr/bin/python3
  machine=$libraries/$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("MULTIARCH"))')
  ENVIRONMENT=(
    PYTHONNOUSERSITE=1 "PYTHONPATH=$libraries/python3/dist-packages"
    "LD_LIBRARY_PATH=$machine:$libraries:$machine/blas:$machine/lapack"
  )
  if env "${ENVIRONMENT[@]}" "$PYTHON" -c 'import torch' &>/dev/null; then return; fi
  unpack_debian || return
  if ! env "${ENVIRONMENT[@]}" "$PYTHON" -c 'import torch' &>"$DEBIAN/import.log"; then
    not_tested debian "it cannot be imported: $(tail -n 1 "$DEBIAN/import.log")"
  fi
}

prepare() {
  case $1 in
    installed)
      PYTHON=$VENV_PYTHON
      ENVIRONMENT=()
      ;;
    debian) prepare_debian ;;
    *) prepare_pip "$1" ;;
  esac
}

# Reads our files, and unless it is Debian's also writes and tests. All steps run even if one fails.
check() {
  local label=$1 folder=$RESULTS/$1 status=0 ours=(env "PYTHONPATH=$PWD/python" "$PYTHON")
  mkdir -p "$folder"
  if [[ $label != debian ]]; then
    "${ours[@]}" tests/interop/compare.py --json "$folder/compare.json" || status=1
    "${ours[@]}" -m pytest -q -p no:cacheprovider --tb=short --junitxml="$folder/tests.xml" \
      "${TESTS[@]}" >"$folder/tests.log" 2>&1 || {
      status=1
      grep -E '^(FAILED|ERROR)' "$folder/tests.log" || true
    }
    tail -n 1 "$folder/tests.log"
  fi
  env "${ENVIRONMENT[@]}" "$PYTHON" tests/interop/read_with_old_torch.py "$FILES" \
    --json "$folder/read.json" || status=1
  if env "${ENVIRONMENT[@]}" "$PYTHON" tests/interop/write_with_old_torch.py "$folder/files"; then
    PYTHONPATH=$PWD/python "$VENV_PYTHON" tests/interop/read_theirs.py "$folder/files" \
      build/release/fastpersist --json "$folder/theirs.json" || status=1
  else
    status=1
  fi
  return "$status"
}

# Prints the version number that "newest" stands for now.
newest() {
  "$VENV_PYTHON" -m pip install --disable-pip-version-check --quiet --dry-run --no-deps \
    --ignore-installed --report - torch 2>"$WORK/newest.log" |
    "$VENV_PYTHON" -c 'import json, sys
print(json.load(sys.stdin)["install"][0]["metadata"]["version"].split("+")[0])'
}

# Sets LABELS: the versions to test, each once, "newest" replaced by its number.
resolve() {
  local version number installed
  installed=$("$VENV_PYTHON" -c 'import torch; print(torch.__version__.split("+")[0])')
  LABELS=()
  for version in "$@"; do
    number=$version
    if [[ $version == newest ]] && ! number=$(newest 2>/dev/null); then
      not_tested newest "pip: $(reason_in "$WORK/newest.log")" || true
      number=newest
    fi
    [[ $number == "$installed" ]] && number=installed
    [[ " ${LABELS[*]} " == *" $number "* ]] || LABELS+=("$number")
  done
}

main() {
  local label failed=() left_out=()
  if ! "$VENV_PYTHON" -c 'import fastpersist._core, torch' 2>/dev/null; then
    say "fastpersist is not built: run 'make build' first" >&2
    return 2
  fi
  rm -rf "$RESULTS"
  mkdir -p "$RESULTS"
  resolve "${@:-${ALL[@]}}"
  PYTHONPATH=$PWD/python "$VENV_PYTHON" tests/interop/write_for_old_torch.py "$FILES"
  for label in "${LABELS[@]}"; do
    if [[ -f $RESULTS/$label/not-tested ]] || ! prepare "$label"; then
      if [[ $OPTIONAL == *" $label "* ]]; then left_out+=("$label"); else failed+=("$label"); fi
    elif ! check "$label"; then
      failed+=("$label")
    fi
  done
  if [[ $# -eq 0 ]]; then
    "$VENV_PYTHON" tests/interop/report.py --into docs/compatibility.md "$RESULTS" "${LABELS[@]}"
  fi
  echo
  "$VENV_PYTHON" tests/interop/report.py "$RESULTS" "${LABELS[@]}"
  if [[ ${#failed[@]} -gt 0 ]]; then
    say "FAILED: ${failed[*]}"
    return 1
  fi
  say "passed${left_out[*]:+, without ${left_out[*]}}"
}

main "$@"
