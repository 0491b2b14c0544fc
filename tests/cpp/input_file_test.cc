// SPDX-License-Identifier: Apache-2.0
#include "file/input_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "testing/child_process.h"
#include "testing/faulty_files.h"
#include "testing/generation_file.h"
#include "testing/process_state.h"
#include "testing/temporary_directory.h"

namespace fastpersist::file {
namespace {

using testing::FaultyFiles;
using testing::GenerationFile;
using ::testing::HasSubstr;
using testing::Operation;
using testing::TemporaryDirectory;
using testing::WriteFile;

Error RefusalOf(const std::string& path, const FileOps& files = RealFileOps()) {
  const auto before = testing::OpenFiles();
  auto file = InputFile::Open(path, files);
  EXPECT_FALSE(file) << path << " was opened";
  if (file) return {};
  EXPECT_EQ(file.error().operation, "open");
  EXPECT_EQ(testing::OpenFiles(), before) << "a descriptor is left";
  return file.error();
}

std::string TextOf(const InputFile& file, std::uint64_t offset, std::size_t length) {
  std::string text(length, '?');
  const auto read = file.Read(offset, std::as_writable_bytes(std::span(text)));
  EXPECT_TRUE(read) << read.error().Message();
  return text;
}

class InputFileTest : public ::testing::Test {
 protected:
  const TemporaryDirectory directory_;
};

TEST_F(InputFileTest, ItGivesAnyPartOfTheFile) {
  const std::string content = GenerationFile(3, 20'000);
  WriteFile(directory_ / "model.pt", content);
  auto opened = InputFile::Open(directory_ / "model.pt", RealFileOps());
  ASSERT_TRUE(opened);
  const InputFile file = *std::move(opened);
  EXPECT_EQ(file.name(), directory_ / "model.pt");
  EXPECT_EQ(file.size(), content.size());
  for (const std::size_t at :
       {std::size_t{0}, std::size_t{1}, std::size_t{4095}, std::size_t{9999}, content.size() - 1}) {
    EXPECT_EQ(TextOf(file, at, content.size() - at), content.substr(at));
  }
  EXPECT_TRUE(file.Read(content.size(), {})) << "nothing, from the end";
}

TEST_F(InputFileTest, WhatIsNotThereIsNotFound) {
  WriteFile(directory_ / "file", "x");
  for (const char* const name : {"missing", "no/such/folder", "file/below"}) {
    const Error error = RefusalOf(directory_ / name);
    EXPECT_EQ(error.code, ErrorCode::kNotFound) << name;
    EXPECT_EQ(error.path, directory_ / name);
    EXPECT_NE(error.system_errno, 0);
    EXPECT_THAT(error.advice, HasSubstr("check the path"));
  }
  std::filesystem::create_symlink("nowhere", directory_ / "dangling");
  EXPECT_EQ(RefusalOf(directory_ / "dangling").code, ErrorCode::kNotFound);
}

TEST_F(InputFileTest, ALinkIsFollowed) {
  WriteFile(directory_ / "model.pt", "content");
  std::filesystem::create_symlink("model.pt", directory_ / "latest");
  const auto file = InputFile::Open(directory_ / "latest", RealFileOps());
  ASSERT_TRUE(file);
  EXPECT_EQ(TextOf(*file, 0, 7), "content");
}

TEST_F(InputFileTest, ADirectoryIsNoCheckpoint) {
  const Error error = RefusalOf(directory_.path());
  EXPECT_EQ(error.code, ErrorCode::kUnsupportedFile);
  EXPECT_THAT(error.detail, HasSubstr("it is a directory"));
}

TEST_F(InputFileTest, APipeIsRefusedWithoutWaitingForItsWriter) {
  ASSERT_EQ(::mkfifo((directory_ / "pipe").c_str(), 0600), 0);
  const Error error = RefusalOf(directory_ / "pipe");
  EXPECT_EQ(error.code, ErrorCode::kUnsupportedFile);
  EXPECT_THAT(error.detail, HasSubstr("it is a pipe"));
}

TEST_F(InputFileTest, ASocketIsRefusedAsOne) {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  ASSERT_GE(fd, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string path = directory_ / "socket";
  if (path.size() >= sizeof address.sun_path) GTEST_SKIP() << "skipped: the path is too long";
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  ASSERT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  const Error error = RefusalOf(path);
  EXPECT_EQ(error.code, ErrorCode::kUnsupportedFile);
  EXPECT_THAT(error.detail, HasSubstr("it is a socket"));
  ::close(fd);
}

TEST_F(InputFileTest, ADeviceIsNoCheckpoint) {
  for (const char* const device : {"/dev/null", "/dev/zero"}) {
    const Error error = RefusalOf(device);
    EXPECT_EQ(error.code, ErrorCode::kUnsupportedFile);
    EXPECT_THAT(error.detail, HasSubstr("it is a character device"));
  }
}

TEST_F(InputFileTest, APathThatNoFileHasIsTheCallersMistake) {
  EXPECT_EQ(RefusalOf("").code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(RefusalOf(std::string("a\0b", 3)).code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(RefusalOf(std::string(10'000, 'a')).system_errno, ENAMETOOLONG);
}

const testing::RegisterRole kNobodyReads(
    "nobody opens a file", [](const testing::Arguments& arguments) {
      testing::GiveUpPrivileges();
      const auto file = InputFile::Open(arguments.at(0), RealFileOps());
      if (file) return 1;
      testing::Report(file.error().Message());
      return file.error().code == ErrorCode::kStorage && file.error().system_errno == EACCES ? 0
                                                                                             : 2;
    });

TEST_F(InputFileTest, AFileThatOnlyOthersMayReadSaysWhatToCheck) {
  WriteFile(directory_ / "secret.pt", "content", 0200);
  const auto child = testing::RunRole("nobody opens a file", {directory_ / "secret.pt"});
  EXPECT_EQ(child.exit_code, 0);
  EXPECT_THAT(child.report, HasSubstr("Permission denied"));
  EXPECT_THAT(child.report, HasSubstr("who may read"));
}

TEST_F(InputFileTest, TooManyOpenFilesSayWhatToDo) {
  WriteFile(directory_ / "model.pt", "content");
  for (const int system_errno : {EMFILE, ENFILE}) {
    const FaultyFiles files(
        {{.kind = Operation::Kind::kOpenInPlace, .system_errno = system_errno}});
    const Error error = RefusalOf(directory_ / "model.pt", files);
    EXPECT_EQ(error.code, ErrorCode::kStorage);
    EXPECT_EQ(error.system_errno, system_errno);
    EXPECT_THAT(error.advice, HasSubstr("ulimit -n"));
  }
}

TEST_F(InputFileTest, AFileThatShrinksIsToldWithThePlace) {
  WriteFile(directory_ / "model.pt", GenerationFile(1, 10'000));
  const auto file = InputFile::Open(directory_ / "model.pt", RealFileOps());
  ASSERT_TRUE(file);
  std::filesystem::resize_file(directory_ / "model.pt", 5000);
  std::vector<std::byte> out(2000);
  EXPECT_TRUE(file->Read(3000, out));
  const auto read = file->Read(4000, out);
  ASSERT_FALSE(read);
  EXPECT_EQ(read.error().code, ErrorCode::kCorrupt);
  EXPECT_EQ(read.error().offset, 5000U);
  EXPECT_THAT(read.error().detail, HasSubstr("it was longer"));
}

TEST_F(InputFileTest, AFileThatIsReplacedStaysReadable) {
  WriteFile(directory_ / "model.pt", "the old one");
  WriteFile(directory_ / "new", "the new one");
  const auto file = InputFile::Open(directory_ / "model.pt", RealFileOps());
  ASSERT_TRUE(file);
  std::filesystem::rename(directory_ / "new", directory_ / "model.pt");
  EXPECT_EQ(TextOf(*file, 0, 11), "the old one");
  std::filesystem::remove(directory_ / "model.pt");
  EXPECT_EQ(TextOf(*file, 4, 7), "old one");
}

}  // namespace
}  // namespace fastpersist::file
