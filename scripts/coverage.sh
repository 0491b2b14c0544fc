#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the C++ tests of the preset "coverage", built before by `make coverage`, prints the share of
# lines, functions and branches that they reach, and writes the details to build/coverage/index.html.
# CTEST names the ctest to use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly BUILD=build/coverage

if ! command -v gcovr >/dev/null; then
  echo "coverage: gcovr is not installed (Debian: apt-get install gcovr)" >&2
  exit 1
fi

# Counts of earlier runs would be added.
find "$BUILD" -name '*.gcda' -delete
"${CTEST:-ctest}" --preset coverage --output-on-failure

# Branches that only an exception out of a called function takes are left out: they drown the rest.
gcovr --root . --object-directory "$BUILD" --filter 'src/' --filter 'include/' \
  --exclude-throw-branches --exclude-unreachable-branches -j "$(nproc)" \
  --html-details "$BUILD/index.html" --html-title 'FastPersist: coverage of the C++ tests' \
  --print-summary "$BUILD"
echo "coverage: details in $BUILD/index.html"
