// SPDX-License-Identifier: Apache-2.0
// The version of the library, and the inline namespace that carries it in every symbol.
#pragma once

#define FASTPERSIST_VERSION_MAJOR 0
#define FASTPERSIST_VERSION_MINOR 1
#define FASTPERSIST_VERSION_PATCH 0
#define FASTPERSIST_VERSION_STRING "0.1.0"

#if defined(_WIN32)
#error "FastPersist supports Linux only"
#endif

/// Marks a public symbol; everything else is hidden in the shared library.
#define FASTPERSIST_EXPORT __attribute__((visibility("default")))
