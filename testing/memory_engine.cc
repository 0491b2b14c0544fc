// SPDX-License-Identifier: Apache-2.0
#include "testing/memory_engine.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

#include "base/align.h"
#include "engine/buffered_engine.h"

namespace fastpersist::testing {
namespace {

using engine::IoCompletion;
using engine::IoRequest;
using engine::Submitted;

bool IsAlignedRequest(const IoRequest& request, const plan::DeviceLimits& limits) {
  return base::IsAligned(request.offset, limits.offset_align) &&
         base::IsAligned(request.length, limits.offset_align) &&
         base::IsAlignedAddress(request.data, limits.memory_align);
}

}  // namespace

MemoryFile::MemoryFile(std::uint64_t size) : fd_(::memfd_create("memory-file", MFD_CLOEXEC)) {
  if (!fd_.valid()) throw std::runtime_error("memfd_create failed");
  Truncate(size);
}

void MemoryFile::Truncate(std::uint64_t size) const {
  if (::ftruncate(fd(), static_cast<off_t>(size)) != 0) {
    throw std::runtime_error("ftruncate failed");
  }
}

std::vector<std::byte> MemoryFile::Bytes() const {
  std::vector<std::byte> bytes(static_cast<std::size_t>(::lseek(fd(), 0, SEEK_END)));
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t count =
        ::pread(fd(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
    if (count <= 0) throw std::runtime_error("pread failed");
    done += static_cast<std::size_t>(count);
  }
  return bytes;
}

MemoryEngine::MemoryEngine(const MemoryEngineOptions& options)
    : options_(options), random_(options.seed) {}

Result<Submitted> MemoryEngine::Submit(const IoRequest& request, IoCompletion* /*completed*/) {
  if (in_flight_.size() == options_.depth) return Submitted::kBusy;
  Operation operation{.request = request,
                      .due = clock_ + Between(random_, 0, std::uint64_t{2} * options_.depth)};
  if (OnceIn(random_, 2)) {
    operation.result = Move(request);
    operation.moved = true;
  }
  ++clock_;
  in_flight_.push_back(operation);
  return Submitted::kQueued;
}

Result<std::size_t> MemoryEngine::Reap(std::span<IoCompletion> out) {
  if (in_flight_.empty()) {
    return std::unexpected(Error{.operation = "reap",
                                 .system_errno = EDEADLK,
                                 .detail = "nothing is in flight, so this would wait for ever"});
  }
  std::ranges::sort(in_flight_, {}, &Operation::due);
  const std::size_t count = Between(random_, 1, std::min(out.size(), in_flight_.size()));
  for (std::size_t i = 0; i < count; ++i) {
    Operation& operation = in_flight_[i];
    if (!operation.moved) operation.result = Move(operation.request);
    out[i] = {.tag = operation.request.tag, .result = operation.result};
  }
  in_flight_.erase(in_flight_.begin(), in_flight_.begin() + static_cast<std::ptrdiff_t>(count));
  return count;
}

std::int64_t MemoryEngine::Move(const IoRequest& request) const {
  if (options_.limits.direct && !IsAlignedRequest(request, options_.limits)) {
    if (!options_.misalignment_is_expected) {
      ADD_FAILURE() << fmt::format(
          "misaligned: {} bytes at offset {}, address {}; memory {}, offset {} are needed",
          request.length, request.offset, fmt::ptr(request.data), options_.limits.memory_align,
          options_.limits.offset_align);
    }
    return -EINVAL;
  }
  return engine::MoveBytes(request);
}

}  // namespace fastpersist::testing
