// SPDX-License-Identifier: Apache-2.0
// The RangeChecker is the sink of every read: it compares the checksums of ranges of the file with
// what the file says, shows other ranges (headers) to whoever understands them, and copies bytes to
// where they belong unless they landed there by themselves; all of it in one pass over the cache.
//
// Used by one thread. Memory: one buffer as long as the longest shown range that was cut in two.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "fastpersist/error.h"
#include "pipeline/byte_sink.h"
#include "plan/read_plan.h"

namespace fastpersist::pipeline {

/// One range of the file with a meaning.
struct CheckedRange {
  enum class Kind : std::uint8_t {
    kBody,        ///< Its CRC-32 is computed and compared with crc, if there is one.
    kHeader,      ///< Shown whole.
    kDescriptor,  ///< Shown whole.
  };
  plan::Range range;
  Kind kind = Kind::kBody;
  std::optional<std::uint32_t> crc;
  std::uint32_t record = 0;  ///< The caller's number for it.
};

/// What a check came to.
struct Checked {
  std::optional<Error> damage;
  bool give_up = false;  ///< Nothing that follows makes sense: stop reading.
};

class RangeChecker final : public ByteSink {
 public:
  /// Shows the bytes of a kHeader or kDescriptor.
  using Show = std::function<Checked(const CheckedRange& range, std::span<const std::byte> bytes)>;
  /// Says that a body's checksum is wrong.
  using Differs = std::function<Error(const CheckedRange& range, std::uint32_t found)>;
  /// Bytes that have been accepted so far; called once a block.
  using Advance = std::function<void(std::uint64_t bytes)>;

  struct Plan {
    std::vector<CheckedRange> ranges;  ///< Ascending, not empty, without overlaps.
    std::vector<plan::Delivery>
        deliveries;  ///< Ascending by begin; those within kBody ranges are made.
    Show show;       ///< May be empty: headers are not looked at.
    Differs differs;
    Advance advance;               ///< May be empty.
    std::size_t most_damages = 1;  ///< Stops after that many.
    bool may_give_up = true;       ///< False: Checked::give_up means nothing, the damage counts.
  };
  /// The plan must outlive the checker.
  explicit RangeChecker(const Plan& plan) : plan_(&plan) {}

  void Restart() override;
  [[nodiscard]] bool Accept(std::uint64_t offset, std::span<const std::byte> bytes) override;

  [[nodiscard]] const std::vector<Error>& damages() const { return damages_; }
  [[nodiscard]] bool gave_up() const { return gave_up_; }
  /// Bodies whose checksum was compared, and those that have none, both completed.
  [[nodiscard]] std::uint64_t compared() const { return compared_; }
  [[nodiscard]] std::uint64_t uncompared() const { return uncompared_; }

 private:
  void Body(const CheckedRange& range, std::uint64_t offset, std::span<const std::byte> bytes);
  void Frame(const CheckedRange& range, std::span<const std::byte> bytes, bool last);
  void FinishBody(const CheckedRange& range);
  [[nodiscard]] std::size_t PieceAt(std::uint64_t offset, std::size_t bytes);
  void Activate(std::uint64_t offset, std::uint64_t end);
  void CopyOut(std::uint64_t offset, std::span<const std::byte> bytes);

  const Plan* plan_;
  std::size_t range_ = 0;            // the first that is not complete
  std::size_t delivery_ = 0;         // the first that has not begun
  std::vector<std::size_t> active_;  // those that have begun and are not complete
  std::uint32_t crc_ = 0;            // of ranges[range_] so far
  std::vector<std::byte> partial_;   // a kHeader or kDescriptor of which not all has arrived
  std::vector<Error> damages_;
  bool gave_up_ = false;
  std::uint64_t accepted_ = 0;
  std::uint64_t compared_ = 0;
  std::uint64_t uncompared_ = 0;
};

}  // namespace fastpersist::pipeline
