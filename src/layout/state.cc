// SPDX-License-Identifier: Apache-2.0
#include "fastpersist/state.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/utf8.h"

namespace fastpersist {
inline namespace v0 {
namespace {

std::unexpected<Error> Refuse(std::string_view name, std::string_view why) {
  return std::unexpected(Error{.code = ErrorCode::kInvalidArgument,
                               .operation = "State::Add",
                               .detail = fmt::format("'{}' {}", name, why)});
}

// nullopt on overflow of 63 bits or a negative size.
std::optional<std::uint64_t> CheckedByteSize(const TensorView& view) {
  std::int64_t bytes = static_cast<std::int64_t>(ItemSize(view.dtype));
  for (const std::int64_t size : view.shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, std::max<std::int64_t>(size, 1), &bytes)) {
      return std::nullopt;
    }
  }
  return std::ranges::find(view.shape, 0) == view.shape.end() ? bytes : 0;
}

bool IsContiguous(const TensorView& view) {
  if (view.strides.empty()) return true;
  if (view.strides.size() != view.shape.size()) return false;
  std::int64_t expected = 1;
  for (std::size_t i = view.shape.size(); i-- > 0;) {
    if (view.shape[i] != 1 && view.strides[i] != expected) return false;
    expected *= std::max<std::int64_t>(view.shape[i], 1);
  }
  return true;
}

}  // namespace

Result<void> State::Add(std::string_view name, TensorView view) {
  if (!base::IsUtf8(name)) return Refuse(name, "is not UTF-8; neither format can name it");
  const auto size = CheckedByteSize(view);
  if (!size) return Refuse(name, "has a negative or an impossibly large shape");
  if (*size > 0 && view.data == nullptr) return Refuse(name, "has a null address");
  if (*size > 0 && !IsContiguous(view)) {
    return Refuse(name, "is not contiguous; copy it into row-major memory first");
  }
  if (!names_.insert(std::string(name)).second) return Refuse(name, "is there already");
  entries_.push_back({.name = std::string(name), .view = std::move(view)});
  return {};
}

std::uint64_t ByteSize(const TensorView& view) { return CheckedByteSize(view).value_or(0); }

}  // namespace v0
}  // namespace fastpersist
