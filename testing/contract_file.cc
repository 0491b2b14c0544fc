// SPDX-License-Identifier: Apache-2.0
#include "testing/contract_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace fastpersist::testing {

std::optional<ContractFile> ContractFile::Create(bool direct) {
  std::string name = "engine-contract-XXXXXX";
  base::UniqueFd fd(::mkostemp(name.data(), O_CLOEXEC));
  if (!fd.valid()) throw std::runtime_error("no file can be made in the working directory");
  ::unlink(name.c_str());
  ContractFile file(std::move(fd));
  if (!direct) return file;
  base::UniqueFd direct_fd = file.Reopen(O_RDWR | O_DIRECT);
  if (!direct_fd.valid()) return std::nullopt;
  return ContractFile(std::move(direct_fd));
}

base::UniqueFd ContractFile::Reopen(int flags) const {
  return base::UniqueFd(::open(fmt::format("/proc/self/fd/{}", fd()).c_str(), flags | O_CLOEXEC));
}

std::vector<std::byte> ContractFile::Bytes() const {
  const base::UniqueFd buffered = Reopen(O_RDONLY);
  struct stat status{};
  if (::fstat(buffered.get(), &status) != 0) throw std::runtime_error("fstat failed");
  std::vector<std::byte> bytes(static_cast<std::size_t>(status.st_size));
  if (::pread(buffered.get(), bytes.data(), bytes.size(), 0) != status.st_size) {
    throw std::runtime_error("pread failed");
  }
  return bytes;
}

void ContractFile::SetBytes(std::span<const std::byte> bytes) const {
  const base::UniqueFd buffered = Reopen(O_WRONLY);
  if (::ftruncate(buffered.get(), 0) != 0 ||
      ::pwrite(buffered.get(), bytes.data(), bytes.size(), 0) !=
          static_cast<ssize_t>(bytes.size()) ||
      ::fdatasync(buffered.get()) != 0) {
    throw std::runtime_error("pwrite failed");
  }
}

}  // namespace fastpersist::testing
