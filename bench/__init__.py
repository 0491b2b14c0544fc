# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of fastpersist against other writers and against what the storage itself can do.

Run from the root of the repository: `python -m bench.save --help`.
"""
