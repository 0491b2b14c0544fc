// SPDX-License-Identifier: Apache-2.0
#include "layout/safetensors_header.h"

#include <fmt/format.h>

#include <cstddef>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "layout/short_text.h"

namespace fastpersist::layout {
namespace {

constexpr std::string_view kMetadataKey = "__metadata__";
constexpr std::size_t kNameLimit = 200;
// Unknown members may hold anything, but nothing that is nested deeper.
constexpr int kMaxIgnoredDepth = 16;

// Receives the header token by token. Each member function is called for one token and returns
// false, with error_ set, to stop.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  [[nodiscard]] SafetensorsHeader& header() { return header_; }
  [[nodiscard]] Error& error() { return error_; }

  bool null() override {
    if (place_ == Place::kIgnored) return EndIgnoredScalar();
    if (place_ == Place::kTop && key_ == kMetadataKey) return true;
    return Misplaced("null");
  }
  bool boolean(bool /*value*/) override {
    return place_ == Place::kIgnored ? EndIgnoredScalar() : Misplaced("a truth value");
  }
  bool number_integer(number_integer_t value) override {
    if (place_ == Place::kIgnored) return EndIgnoredScalar();
    return Misplaced(fmt::format("the negative number {}", value));
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::kIgnored) return EndIgnoredScalar();
    if (value > std::numeric_limits<std::int64_t>::max()) {
      return Misplaced(fmt::format("the number {}", value));
    }
    if (place_ == Place::kShape) {
      entry().shape.push_back(static_cast<std::int64_t>(value));
      return true;
    }
    if (place_ == Place::kOffsets && offsets_ < 2) {
      (offsets_++ == 0 ? entry().begin : entry().end) = value;
      return true;
    }
    return Misplaced(fmt::format("the number {}", value));
  }
  bool number_float(number_float_t /*value*/, const string_t& text) override {
    if (place_ == Place::kIgnored) return EndIgnoredScalar();
    return Misplaced(fmt::format("the number {}", Shortened(text, kNameLimit)));
  }
  bool string(string_t& value) override {
    if (place_ == Place::kIgnored) return EndIgnoredScalar();
    if (place_ == Place::kMetadata) {
      const auto [at, added] = header_.metadata.emplace(std::move(key_), std::move(value));
      return added || FailTwice("metadata entry", at->first);
    }
    if (place_ == Place::kEntry && key_ == "dtype") {
      entry().dtype = std::move(value);
      return true;
    }
    return Misplaced("a text");
  }
  bool binary(binary_t& /*value*/) override { return Misplaced("binary data"); }

  bool start_object(std::size_t /*elements*/) override {
    if (place_ == Place::kIgnored) return BeginIgnored();
    if (place_ == Place::kStart) {
      place_ = Place::kTop;
    } else if (place_ == Place::kTop) {
      place_ = key_ == kMetadataKey ? Place::kMetadata : Place::kEntry;
      if (place_ == Place::kEntry) header_.entries.push_back({.name = std::move(key_)});
      fields_ = 0;
    } else {
      return Misplaced("an object");
    }
    return true;
  }
  bool key(string_t& value) override {
    if (place_ == Place::kIgnored) return true;
    key_ = std::move(value);
    if (place_ == Place::kTop) return names_.insert(key_).second || FailTwice("tensor", key_);
    if (place_ == Place::kEntry) return BeginField();
    return true;
  }
  bool end_object() override {
    if (place_ == Place::kIgnored) return EndIgnored();
    if (place_ == Place::kEntry && fields_ != kAllFields) {
      return Fail("lacks dtype, shape or data_offsets");
    }
    place_ = place_ == Place::kTop ? Place::kStart : Place::kTop;
    return true;
  }
  bool start_array(std::size_t /*elements*/) override {
    if (place_ == Place::kIgnored) return BeginIgnored();
    if (place_ == Place::kEntry && key_ == "shape") {
      place_ = Place::kShape;
    } else if (place_ == Place::kEntry && key_ == "data_offsets") {
      place_ = Place::kOffsets;
      offsets_ = 0;
    } else {
      return Misplaced("a list");
    }
    return true;
  }
  bool end_array() override {
    if (place_ == Place::kIgnored) return EndIgnored();
    if (place_ == Place::kOffsets && offsets_ != 2) return Fail("has one data offset, not two");
    place_ = Place::kEntry;
    return true;
  }
  bool parse_error(std::size_t position, const std::string& /*token*/,
                   const nlohmann::json::exception& /*error*/) override {
    error_.offset = position;
    error_.detail = "its header is not JSON (RFC 8259)";
    return false;
  }

 private:
  enum class Place : std::uint8_t {
    kStart,
    kTop,
    kMetadata,
    kEntry,
    kShape,
    kOffsets,
    kIgnored,  // the value of an unknown member of an entry
  };
  enum Field : unsigned { kDtypeField = 1, kShapeField = 2, kOffsetsField = 4, kAllFields = 7 };

  [[nodiscard]] SafetensorsHeader::Entry& entry() { return header_.entries.back(); }

  bool BeginField() {
    unsigned field = 0;
    if (key_ == "dtype") field = kDtypeField;
    if (key_ == "shape") field = kShapeField;
    if (key_ == "data_offsets") field = kOffsetsField;
    if (field == 0) {
      place_ = Place::kIgnored;
      ignored_depth_ = 0;
      return true;
    }
    if ((fields_ & field) != 0) return Fail(fmt::format("has {} twice", key_));
    fields_ |= field;
    return true;
  }

  bool BeginIgnored() {
    if (++ignored_depth_ > kMaxIgnoredDepth) return Fail("has an unknown member nested too deeply");
    return true;
  }
  bool EndIgnored() {
    --ignored_depth_;
    return EndIgnoredScalar();
  }
  bool EndIgnoredScalar() {
    if (ignored_depth_ == 0) place_ = Place::kEntry;
    return true;
  }

  // The sentence is about the current tensor.
  bool Fail(std::string_view what) {
    error_.entry = Shortened(entry().name, kNameLimit);
    error_.detail = fmt::format("in its header tensor '{}' {}", error_.entry, what);
    return false;
  }
  bool FailTwice(std::string_view what, std::string_view name) {
    error_.entry = Shortened(name, kNameLimit);
    error_.detail = fmt::format("its header names {} '{}' twice", what, error_.entry);
    return false;
  }
  bool Misplaced(std::string_view found) {
    switch (place_) {
      case Place::kTop:
        error_.detail = fmt::format("its header has {} for '{}', where an object belongs", found,
                                    Shortened(key_, kNameLimit));
        return false;
      case Place::kMetadata:
        error_.detail = fmt::format("its metadata entry '{}' is {}, not a text",
                                    Shortened(key_, kNameLimit), found);
        return false;
      case Place::kEntry:
        return Fail(fmt::format("has {} as {}", found, key_));
      case Place::kShape:
        return Fail(fmt::format("has {} in its shape", found));
      case Place::kOffsets:
        return Fail(fmt::format("has {} in its data_offsets, where two offsets belong", found));
      default:
        error_.detail = fmt::format("its header is {}, not an object", found);
        return false;
    }
  }

  SafetensorsHeader header_;
  Error error_{.code = ErrorCode::kCorrupt, .operation = "read"};
  std::set<std::string> names_;  // no hash table: a file could choose names that make it slow
  std::string key_;
  Place place_ = Place::kStart;
  unsigned fields_ = 0;
  unsigned offsets_ = 0;
  int ignored_depth_ = 0;
};

}  // namespace

Result<SafetensorsHeader> ParseSafetensorsHeader(std::string_view text) {
  HeaderReader reader;
  // The parser takes a zero byte for the end of the text.
  if (const auto zero = text.find('\0'); zero != std::string_view::npos) {
    return std::unexpected(Error{.code = ErrorCode::kCorrupt,
                                 .operation = "read",
                                 .offset = zero,
                                 .detail = "its header has a zero byte, which JSON has not"});
  }
  if (!nlohmann::json::sax_parse(text, &reader)) return std::unexpected(std::move(reader.error()));
  return std::move(reader.header());
}

}  // namespace fastpersist::layout
