#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the fuzz targets that the preset "fuzz" built (`make fuzz` does both).
#
#   fuzz/run.sh SECONDS TARGET...      share SECONDS among the targets; 1 if one found something
#   fuzz/run.sh --canary SECONDS       0 only if the planted fault is found within SECONDS
#
# The corpus in build/fuzz/corpus starts with the seeds and grows from run to run; the seeds in
# fuzz/corpus stay as they are. What makes a target fail is left in build/fuzz/findings.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly BUILD=build/fuzz
readonly FINDINGS=$BUILD/findings

# fuzz_target NAME SEEDS SECONDS PREFIX: one target, with the seeds of SEEDS; its log is PREFIXlog.
fuzz_target() {
  local name=$1 seeds=$2 seconds=$3 prefix=$4
  local corpus=$BUILD/corpus/$name options=()
  mkdir -p "$corpus"
  cp -n "fuzz/corpus/$seeds/"* "$corpus/"
  if [[ -f fuzz/$seeds.dict ]]; then options+=("-dict=fuzz/$seeds.dict"); fi
  "$BUILD/fuzz/${name}_fuzz" -max_total_time="$seconds" -max_len=65536 -rss_limit_mb=2048 \
    -timeout=10 -print_final_stats=1 -artifact_prefix="$prefix" "${options[@]}" "$corpus" \
    >"${prefix}log" 2>&1
}

run_targets() {
  local seconds=$1 failed=0 target prefix each
  shift
  each=$(((seconds + $# - 1) / $#))
  for target in "$@"; do
    prefix=$FINDINGS/$target-
    rm -f "$prefix"*
    if fuzz_target "$target" "$target" "$each" "$prefix"; then
      echo "fuzz: $target found nothing in $each s:" \
        "$(sed -n 's/^stat::number_of_executed_units: *//p' "${prefix}log") inputs"
      continue
    fi
    failed=1
    tail -n 40 "${prefix}log"
    echo "fuzz: $target FAILED; log ${prefix}log; to see it again:" >&2
    printf "  $BUILD/fuzz/${target}_fuzz %s\n" "$FINDINGS/$target"-*-* >&2
  done
  return "$failed"
}

# Without what earlier runs found, and with the few seeds of safetensors: those of contents make the
# fuzzer busy with archives first.
run_canary() {
  local seconds=$1 prefix=$FINDINGS/canary-
  rm -rf "$BUILD/corpus/canary" "$prefix"*
  if fuzz_target canary safetensors "$seconds" "$prefix"; then
    echo "fuzz: the canary's fault was NOT found in $seconds s" >&2
    return 1
  fi
  if ! grep -q 'heap-buffer-overflow' "${prefix}log"; then
    tail -n 40 "${prefix}log"
    echo "fuzz: the canary failed, but not by its planted fault; log ${prefix}log" >&2
    return 1
  fi
  echo "fuzz: the canary's fault was found, as it should be"
}

mkdir -p "$FINDINGS"
if [[ ${1:-} == --canary ]]; then
  run_canary "${2:-60}"
else
  if [[ $# -lt 2 ]]; then
    echo "usage: fuzz/run.sh SECONDS TARGET... | --canary SECONDS" >&2
    exit 2
  fi
  run_targets "$@"
fi
