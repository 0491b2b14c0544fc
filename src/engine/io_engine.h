// SPDX-License-Identifier: Apache-2.0
// An IoEngine moves aligned blocks between memory and an open file, several at a time. It reports
// what the kernel said and nothing more: short counts, EINTR and the rest are the business of its
// one caller, pipeline/checked_queue.h. One file per engine; testing/engine_contract.h is what all
// of them promise.
//
// Made and used by one thread. Sources: io_uring(7), io_submit(2), pwrite(2).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "fastpersist/error.h"
#include "fastpersist/options.h"

namespace fastpersist::engine {

/// One operation. The memory must stay valid until its completion was reaped.
struct IoRequest {
  enum class Kind : std::uint8_t { kWrite, kRead };
  Kind kind = Kind::kWrite;
  int fd = -1;
  std::byte* data = nullptr;  ///< Only read from by kWrite.
  std::uint64_t length = 0;   ///< At most 1 GiB.
  std::uint64_t offset = 0;
  /// Comes back with the completion. Any number but 2^64 - 1, which liburing keeps for itself on
  /// kernels before 5.11.
  std::uint64_t tag = 0;
};

struct IoCompletion {
  std::uint64_t tag = 0;
  std::int64_t result = 0;  ///< Bytes moved, or -errno.
};

enum class Submitted : std::uint8_t {
  kQueued,     ///< In flight; Reap will return its completion.
  kBusy,       ///< depth() operations are in flight; reap first. Nothing was submitted.
  kCompleted,  ///< Done already; the completion was stored. Reap will not return it.
};

class IoEngine {
 public:
  virtual ~IoEngine() = default;

  [[nodiscard]] virtual Engine kind() const = 0;
  /// Most operations in flight.
  [[nodiscard]] virtual unsigned depth() const = 0;
  /// Offers long-lived memory that most requests will point into. A refusal costs speed only; the
  /// answer says whether it was taken.
  virtual bool RegisterMemory(std::span<std::byte> /*memory*/) { return false; }

  /// Starts one operation. An Error means that the engine itself is unusable from now on (refused
  /// by a sandbox, say): nothing was submitted by this call.
  [[nodiscard]] virtual Result<Submitted> Submit(const IoRequest& request,
                                                 IoCompletion* completed) = 0;
  /// Returns finished operations, at least one; blocks if needed. Precondition: something is in
  /// flight. May return 0 when interrupted by a signal.
  [[nodiscard]] virtual Result<std::size_t> Reap(std::span<IoCompletion> out) = 0;
};

}  // namespace fastpersist::engine
