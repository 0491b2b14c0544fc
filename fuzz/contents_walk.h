// SPDX-License-Identifier: Apache-2.0
// What the fuzz targets do with a file that was read: everything that the rest of the library would
// do without reading tensor data, and a check of each promise that contents.h and zip_reader.h
// make. A broken promise aborts, which the fuzzer reports.
#pragma once

#include <string_view>

#include "layout/contents.h"
#include "testing/memory_source.h"

namespace fastpersist::fuzz {

/// Aborts with the sentence unless holds.
void Require(bool holds, std::string_view promise);

/// Compares each record with its local header and descriptor; errors are fine.
void WalkArchive(const testing::MemorySource& source, const layout::ZipDirectory& archive);

void WalkContents(const testing::MemorySource& source, layout::Contents contents);

/// The sentences of an error, whatever they say, must be printable.
void WalkError(const Error& error);

}  // namespace fastpersist::fuzz
