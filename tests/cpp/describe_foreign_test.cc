// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <span>
#include <string>
#include <string_view>

#include "layout/zip_reader.h"
#include "testing/memory_source.h"

namespace fastpersist::layout {
namespace {

using std::string_literals::operator""s;
using ::testing::HasSubstr;

std::string Describe(std::string_view head) {
  return DescribeForeign(std::as_bytes(std::span(head)), head.size());
}

TEST(DescribeForeign, KnowsWhatIsMistakenForACheckpoint) {
  EXPECT_EQ(Describe(""), "is empty");
  EXPECT_EQ(Describe("\0"s), "is all zeros");
  EXPECT_EQ(Describe(std::string(512, '\0')), "is all zeros");
  EXPECT_EQ(Describe("PK\x07\x08PK\x03\x04"), "is one volume of a ZIP archive that was split");
  EXPECT_THAT(Describe("PK\x05\x06"), HasSubstr("ZIP"));
  // torch.save(..., _use_new_zipfile_serialization=False), and pickle.dump.
  EXPECT_THAT(Describe("\x80\x02\x8a\nl\xfc\x9c"
                       "F\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."),
              HasSubstr("PyTorch before 1.6, or _use_new"));
  EXPECT_THAT(Describe("\x80\x04\x95"), HasSubstr("a pickle (PyTorch before 1.6, or pickle.dump)"));
  EXPECT_EQ(Describe(std::string(257, 'n') + "ustar\0"s), "is a tar archive");
  EXPECT_EQ(Describe("\x1f\x8b\x08"), "is compressed with gzip");
  EXPECT_EQ(Describe("BZh9"), "is compressed with bzip2");
  EXPECT_EQ(Describe("\xFD"
                     "7zXZ\0\0"s),
            "is compressed with xz");
  EXPECT_EQ(Describe("\x28\xB5\x2F\xFD\0"s), "is compressed with zstd");
  EXPECT_THAT(Describe("\x89HDF\r\n\x1a\n"), HasSubstr("HDF5"));
  EXPECT_THAT(Describe("\x93NUMPY\x01\0"s), HasSubstr("NumPy"));
  EXPECT_THAT(Describe("GGUF\3\0"s), HasSubstr("GGUF"));
  EXPECT_THAT(Describe("\x7f"
                       "ELF\2"),
              HasSubstr("ELF"));
  EXPECT_THAT(Describe("\x89PNG\r\n\x1a\n"), HasSubstr("PNG"));
  EXPECT_EQ(Describe("\2\0\0\0\0\0\0\0{}"s), "looks like a safetensors file");
  EXPECT_THAT(Describe("version https://git-lfs.github.com/spec/v1\n"), HasSubstr("git lfs pull"));
}

TEST(DescribeForeign, KnowsText) {
  for (const char* page : {"<!DOCTYPE html>", "<!doctype HTML PUBLIC", "\n <HTML lang=en>"}) {
    EXPECT_THAT(Describe(page), HasSubstr("HTML page")) << page;
  }
  EXPECT_THAT(Describe("<?xml version"), HasSubstr("XML"));
  EXPECT_EQ(Describe(" {\"a\": 1}"), "is text (JSON?)");
  EXPECT_EQ(Describe("import torch\n\n"), "is text that begins with 'import torch'");
  EXPECT_EQ(Describe("\n"), "is text that begins with ''");
  // The first bytes of a longer file may end within a character.
  const std::string umlauts = "\xC3\xA4\xC3";
  EXPECT_THAT(DescribeForeign(std::as_bytes(std::span(umlauts)), 100), HasSubstr("is text"));
  EXPECT_EQ(Describe(umlauts), "begins with the bytes c3 a4 c3");
}

TEST(DescribeForeign, ShowsTheBytesOfWhatItDoesNotKnow) {
  EXPECT_EQ(Describe("\1\2\xFF"), "begins with the bytes 01 02 ff");
  EXPECT_EQ(Describe("\x80\x09"), "begins with the bytes 80 09");
  EXPECT_EQ(Describe(std::string(20, '\1')), "begins with the bytes 01 01 01 01 01 01 01 01");
  // A safetensors header longer than its file.
  EXPECT_EQ(Describe("\3\0\0\0\0\0\0\0{}"s), "begins with the bytes 03 00 00 00 00 00 00 00");
  const std::string zeros(512, '\0');
  EXPECT_EQ(DescribeForeign(std::as_bytes(std::span(zeros)), 513), "begins with 512 zero bytes");
}

TEST(DescribeForeign, IsWhatTheReaderSaysOfAFileThatIsNoArchive) {
  const auto read = ReadZipDirectory(testing::MemorySource("\x1f\x8b\x08", "model.pt"));
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().Message(),
            "read failed on model.pt: the file is no checkpoint: it is compressed with gzip");
}

}  // namespace
}  // namespace fastpersist::layout
