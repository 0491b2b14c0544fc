#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Checks everything that can be checked without running the program. All steps run even if one
# fails; the exit status is 0 only if all passed.
#
#   scripts/lint.sh               all steps
#   scripts/lint.sh ruff mypy     these steps
#   scripts/lint.sh --fix         format C++ and Python in place instead
#
# The step "tidy" needs build/lint/compile_commands.json, which `make lint` provides.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

readonly STEPS=(format tidy ruff mypy shell style)
readonly PYTHON=.venv/bin/python
readonly CLANG=19

# Prints the files that git tracks or would track and that match the patterns, separated by NUL.
files() {
  git ls-files -z --cached --others --exclude-standard -- "$@" |
    while IFS= read -r -d '' file; do
      if [[ -f $file ]]; then printf '%s\0' "$file"; fi
    done
}

clang_format() {
  files '*.h' '*.cc' '*.cpp' '*.c' | xargs -0 -r "clang-format-$CLANG" "$@"
}

# Fails with a sentence if a command is not there.
need() {
  command -v "$1" >/dev/null && return
  echo "lint: $1 is not installed; 'make setup' as root installs it" >&2
  return 1
}

step_format() {
  need "clang-format-$CLANG" || return
  clang_format --dry-run -Werror 2>&1 |
    sed -nE 's/^([^:]+:[0-9]+):[0-9]+: error: .*/\1: not formatted (make format)/p' | uniq
  return "${PIPESTATUS[0]}"
}

step_tidy() {
  need "run-clang-tidy-$CLANG" || return
  # Only our own sources: the database also holds nanobind's and the like.
  "run-clang-tidy-$CLANG" -quiet -p build/lint -j "$(nproc)" \
    "^$PWD/(src|python|testing|tests|bench|examples|fuzz)/" 2>&1 |
    grep -vE '^\[ *[0-9]+/[0-9]+\]|^clang-tidy-|^Running clang-tidy|^[0-9]+ warnings? |^$'
  return "${PIPESTATUS[0]}"
}

step_ruff() {
  local status=0
  "$PYTHON" -m ruff check --quiet . || status=1
  "$PYTHON" -m ruff format --check --quiet . || status=1
  return "$status"
}

step_mypy() {
  "$PYTHON" -m mypy --no-error-summary python/fastpersist
}

step_shell() {
  need shellcheck || return
  files '*.sh' '.ci/run' | xargs -0 -r shellcheck
}

step_style() {
  "$PYTHON" scripts/style_rules.py --canary && "$PYTHON" scripts/style_rules.py
}

fix() {
  clang_format -i
  "$PYTHON" -m ruff check --quiet --fix-only --select I .
  "$PYTHON" -m ruff format --quiet .
}

main() {
  local step failed=()
  if [[ ${1:-} == --fix ]]; then
    fix
    return
  fi
  for step in "${@:-${STEPS[@]}}"; do
    if [[ " ${STEPS[*]} " != *" $step "* ]]; then
      echo "lint: no step '$step'; there are: ${STEPS[*]}" >&2
      return 2
    fi
    if "step_$step"; then
      echo "lint: $step passed"
    else
      echo "lint: $step FAILED"
      failed+=("$step")
    fi
  done
  [[ ${#failed[@]} -eq 0 ]]
}

main "$@"
