// SPDX-License-Identifier: Apache-2.0
// Names files that are often mistaken for checkpoints, by their first bytes (see zip_reader.h).
// Sources: the formats' own specifications; for torch's older files, torch/serialization.py.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/utf8.h"
#include "layout/zip_parse.h"
#include "layout/zip_reader.h"

namespace fastpersist::layout {
namespace {

using std::string_view_literals::operator""sv;

struct Signature {
  std::string_view begin;
  std::string_view description;
};

constexpr std::string_view kOldTorch =
    "is a pickle (PyTorch before 1.6, or _use_new_zipfile_serialization=False)";

constexpr std::array kSignatures{
    Signature{"PK\x03\x04"sv, "begins like a ZIP archive"},
    Signature{"PK\x05\x06"sv, "is an empty ZIP archive, or the rest of one"},
    Signature{"PK\x07\x08"sv, "is one volume of a ZIP archive that was split"},
    // The magic number 0x1950a86a20f9469cfc6c, pickled by each protocol.
    Signature{"L119547037146038801333356L\n."sv, kOldTorch},
    Signature{"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"sv, kOldTorch},
    Signature{"\x80\x03\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"sv, kOldTorch},
    Signature{"\x80\x04\x95\x0d\0\0\0\0\0\0\0\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"sv,
              kOldTorch},
    Signature{"\x80\x05\x95\x0d\0\0\0\0\0\0\0\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"sv,
              kOldTorch},
    Signature{"\x1f\x8b"sv, "is compressed with gzip"},
    Signature{"BZh"sv, "is compressed with bzip2"},
    Signature{"\xFD"
              "7zXZ\0"sv,
              "is compressed with xz"},
    Signature{"\x28\xB5\x2F\xFD"sv, "is compressed with zstd"},
    Signature{"\x04\x22\x4D\x18"sv, "is compressed with lz4"},
    Signature{"7z\xBC\xAF\x27\x1C"sv, "is a 7-Zip archive"},
    Signature{"Rar!\x1A\x07"sv, "is a RAR archive"},
    Signature{"\x89HDF\r\n\x1A\n"sv, "is an HDF5 file (Keras, for example)"},
    Signature{"\x93NUMPY"sv, "is a NumPy array (.npy)"},
    Signature{"GGUF"sv, "is a GGUF model"},
    Signature{"\x7F"
              "ELF"sv,
              "is an ELF program or library"},
    Signature{"\x89PNG\r\n\x1A\n"sv, "is a PNG image"},
    Signature{"\xFF\xD8\xFF"sv, "is a JPEG image"},
    Signature{"%PDF-"sv, "is a PDF document"},
    Signature{"PAR1"sv, "is a Parquet file"},
    Signature{"version https://git-lfs"sv,
              "is a Git LFS pointer: the file itself was not fetched (git lfs pull)"},
};

bool IsTar(std::string_view head) { return head.size() >= 262 && head.substr(257, 5) == "ustar"; }

bool IsPickle(std::string_view head) {
  return head.size() >= 2 && head[0] == '\x80' && head[1] >= 2 && head[1] <= 5;
}

bool IsSafetensors(std::span<const std::byte> head, std::uint64_t size) {
  constexpr std::uint64_t kPrefix = sizeof(std::uint64_t);
  if (head.size() <= kPrefix || size < head.size() || head[kPrefix] != std::byte{'{'}) return false;
  return FieldAt<std::uint64_t>(head, 0) <= size - kPrefix;
}

// The head may end within a character.
bool IsText(std::string_view head, std::uint64_t size) {
  const auto is_control = [](char c) {
    return static_cast<unsigned char>(c) < 0x20 && !"\t\n\f\r\x1b"sv.contains(c);
  };
  if (std::ranges::any_of(head, is_control)) return false;
  const std::size_t most_cut = head.size() < size ? 3 : 0;
  for (std::size_t cut = 0; cut <= std::min(most_cut, head.size()); ++cut) {
    if (base::IsUtf8(head.substr(0, head.size() - cut))) return true;
  }
  return false;
}

std::string DescribeText(std::string_view text) {
  std::string begin(text.substr(0, std::min(text.find_first_not_of(" \t\r\n"), text.size())));
  text.remove_prefix(begin.size());
  std::string low(text.substr(0, 14));
  std::ranges::transform(low, low.begin(), [](char c) {
    return 'A' <= c && c <= 'Z' ? static_cast<char>(c + 32) : c;
  });
  if (low == "<!doctype html" || low.starts_with("<html")) {
    return "is an HTML page: perhaps a download that went wrong";
  }
  if (low.starts_with("<?xml")) return "is XML text: perhaps a download that went wrong";
  if (low.starts_with('{') || low.starts_with('[')) return "is text (JSON?)";
  return fmt::format("is text that begins with {}",
                     Quoted(text.substr(0, text.find('\n')).substr(0, 40)));
}

}  // namespace

std::string DescribeForeign(std::span<const std::byte> head, std::uint64_t size) {
  if (size == 0 || head.empty()) return "is empty";
  if (std::ranges::all_of(head, [](std::byte byte) { return byte == std::byte{0}; })) {
    return head.size() >= size ? "is all zeros"
                               : fmt::format("begins with {} zero bytes", head.size());
  }
  const std::string_view text(reinterpret_cast<const char*>(head.data()), head.size());
  for (const Signature& signature : kSignatures) {
    if (text.starts_with(signature.begin)) return std::string(signature.description);
  }
  if (IsPickle(text)) return "is a pickle (PyTorch before 1.6, or pickle.dump)";
  if (IsTar(text)) return "is a tar archive";
  if (IsSafetensors(head, size)) return "looks like a safetensors file";
  if (IsText(text, size)) return DescribeText(text);
  std::string hex;
  for (const std::byte byte : head.first(std::min<std::size_t>(head.size(), 8))) {
    hex += fmt::format(" {:02x}", std::to_integer<unsigned>(byte));
  }
  return "begins with the bytes" + hex;
}

}  // namespace fastpersist::layout
