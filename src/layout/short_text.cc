// SPDX-License-Identifier: Apache-2.0
#include "layout/short_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/utf8.h"

namespace fastpersist::layout {
namespace {

constexpr std::string_view kEllipsis = "\u2026";
// Containers within containers are written down to this depth.
constexpr int kMaxDepth = 3;

using Kind = PickleNode::Kind;

// Bytes of the UTF-8 sequence that text begins with; 0 if it begins with none.
std::size_t SequenceLength(std::string_view text) {
  for (std::size_t length = 1; length <= std::min<std::size_t>(4, text.size()); ++length) {
    if (base::IsUtf8(text.substr(0, length))) return length;
  }
  return 0;
}

bool IsControl(char c) {
  const auto byte = static_cast<unsigned char>(c);
  return byte < 0x20 || byte == 0x7F;
}

// Takes one character off the front of text and returns it, escaped if it is not UTF-8.
std::string TakeCharacter(std::string_view& text) {
  const std::size_t length = SequenceLength(text);
  std::string taken = length > 0 ? std::string(text.substr(0, length))
                                 : fmt::format("\\x{:02x}", static_cast<unsigned char>(text[0]));
  text.remove_prefix(std::max<std::size_t>(length, 1));
  return taken;
}

// Writes up to a limit; whatever is written after that is lost, and full() says so.
class Writer {
 public:
  explicit Writer(std::size_t limit) : limit_(std::max(limit, kEllipsis.size())) {}

  [[nodiscard]] bool full() const { return full_; }

  void Write(std::string_view text) {
    while (!text.empty() && !full_) WriteCharacter(TakeCharacter(text));
  }

  void WriteQuoted(std::string_view text, bool bytes) {
    Write(bytes ? "b'" : "'");
    while (!text.empty() && !full_) {
      const char c = text[0];
      if (c == '\'' || c == '\\') {
        WriteCharacter({'\\', c});
        text.remove_prefix(1);
      } else if (IsControl(c) || (bytes && static_cast<unsigned char>(c) >= 0x80)) {
        WriteCharacter(fmt::format("\\x{:02x}", static_cast<unsigned char>(c)));
        text.remove_prefix(1);
      } else {
        WriteCharacter(TakeCharacter(text));
      }
    }
    Write("'");
  }

  [[nodiscard]] std::string Take() && {
    if (full_) {
      out_.resize(fits_);
      out_ += kEllipsis;
    }
    return std::move(out_);
  }

 private:
  void WriteCharacter(const std::string& character) {
    if (out_.size() + character.size() > limit_) {
      full_ = true;
      return;
    }
    out_ += character;
    // Up to here there is room for the ellipsis.
    if (out_.size() + kEllipsis.size() <= limit_) fits_ = out_.size();
  }

  std::string out_;
  std::size_t limit_;
  std::size_t fits_ = 0;
  bool full_ = false;
};

std::string FloatText(double value) {
  std::string text = fmt::format("{}", value);
  const bool looks_whole = text.find_first_not_of("-0123456789") == std::string::npos;
  if (std::isfinite(value) && looks_whole) text += ".0";
  return text;
}

struct Brackets {
  std::string_view open;
  std::string_view close;
};

Brackets BracketsOf(Kind kind) {
  switch (kind) {
    case Kind::kList:
      return {"[", "]"};
    case Kind::kSet:
      return {"{", "}"};
    case Kind::kFrozenSet:
      return {"frozenset({", "})"};
    case Kind::kDict:
      return {"{", "}"};
    case Kind::kOrderedDict:
      return {"OrderedDict({", "})"};
    case Kind::kSize:
      return {"torch.Size([", "])"};
    case Kind::kComplex:
      return {"complex(", ")"};
    default:
      return {"(", ")"};
  }
}

class ValueWriter {
 public:
  ValueWriter(const PickleTree& tree, Writer& out) : tree_(tree), out_(out) {}

  // Recursion ends at kMaxDepth, and a container's loop when the text is full.
  void Write(NodeId id, int depth) {  // NOLINT(misc-no-recursion): bounded
    if (id >= tree_.nodes.size()) return out_.Write("?");
    const PickleNode& node = tree_.at(id);
    switch (node.kind) {
      case Kind::kNone:
        return out_.Write("None");
      case Kind::kBool:
        return out_.Write(node.integer != 0 ? "True" : "False");
      case Kind::kInt:
        return out_.Write(fmt::format("{}", node.integer));
      case Kind::kFloat:
        return out_.Write(FloatText(node.real));
      case Kind::kText:
        return out_.WriteQuoted(node.text, false);
      case Kind::kBytes:
        return out_.WriteQuoted(node.text, true);
      case Kind::kByteArray:
        out_.Write("bytearray(");
        out_.WriteQuoted(node.text, true);
        return out_.Write(")");
      case Kind::kBigInt:
      case Kind::kGlobal:
      case Kind::kOpaque:
        return out_.Write(node.text);
      case Kind::kStorage:
        out_.Write("storage data/");
        return out_.Write(node.text);
      case Kind::kTensor:
        return out_.Write("tensor");
      case Kind::kParameter:
        return out_.Write("parameter");
      default:
        return WriteContainer(node, depth);
    }
  }

 private:
  void WriteContainer(const PickleNode& node, int depth) {  // NOLINT(misc-no-recursion): bounded
    const Brackets brackets = BracketsOf(node.kind);
    const bool dict = node.kind == Kind::kDict || node.kind == Kind::kOrderedDict;
    if (node.kind == Kind::kSet && node.items.empty()) return out_.Write("set()");
    out_.Write(brackets.open);
    if (depth >= kMaxDepth && !node.items.empty()) {
      out_.Write(kEllipsis);
    } else {
      for (std::size_t i = 0; i < node.items.size() && !out_.full(); ++i) {
        if (i > 0) out_.Write(dict && i % 2 == 1 ? ": " : ", ");
        Write(node.items[i], depth + 1);
      }
      if (node.kind == Kind::kTuple && node.items.size() == 1) out_.Write(",");
    }
    out_.Write(brackets.close);
  }

  const PickleTree& tree_;
  Writer& out_;
};

}  // namespace

std::string Shortened(std::string_view text, std::size_t limit) {
  if (text.size() <= limit && base::IsUtf8(text)) return std::string(text);
  Writer out(limit);
  out.Write(text);
  return std::move(out).Take();
}

std::string ShortText(const PickleTree& tree, NodeId id, std::size_t limit) {
  Writer out(limit);
  ValueWriter(tree, out).Write(id, 0);
  return std::move(out).Take();
}

}  // namespace fastpersist::layout
