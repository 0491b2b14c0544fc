// SPDX-License-Identifier: Apache-2.0
// Reads what save_model wrote, or any other checkpoint file: lists what it holds, reads all tensors
// into memory of its own, and compares every checksum.
//
//   load_model FILE
#include <fastpersist/fastpersist.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

namespace fp = fastpersist;

namespace {

// Every failure is a value that says what happened and what to do about it.
int Failed(const fp::Error& error) {
  std::fprintf(stderr, "%s\n", error.Message().c_str());
  return 1;
}

void Print(const fp::TensorInfo& tensor) {
  std::string shape;
  for (const std::int64_t size : tensor.shape) {
    shape += (shape.empty() ? "" : ", ") + std::to_string(size);
  }
  std::printf("%s: %s [%s], %llu bytes\n", tensor.name.c_str(), tensor.dtype_name.c_str(),
              shape.c_str(), static_cast<unsigned long long>(tensor.bytes));
}

// The program owns its memory; a target only points to it. Elements arrive in row-major order,
// whatever the strides in the file. Memory that begins where a page does, as the file's data may,
// is read into without a copy.
fp::Result<fp::ReadInfo> ReadAll(const fp::File& file,
                                 std::vector<std::vector<std::byte>>& memory) {
  std::vector<fp::ReadTarget> targets;
  memory.reserve(file.tensors().size());
  for (const fp::TensorInfo& tensor : file.tensors()) {
    memory.emplace_back(tensor.bytes);
    targets.push_back({.name = tensor.name, .destination = memory.back()});
  }
  return file.Read(targets);  // one pass over the file
}

// A name that the program knows, into a variable of its own.
void PrintStep(const fp::File& file) {
  const fp::TensorInfo* const step = file.Find("step");
  if (step == nullptr || step->dtype != fp::DType::kInt64 || !step->shape.empty()) return;
  std::int64_t value = 0;
  if (file.Read("step", std::as_writable_bytes(std::span(&value, 1)))) {
    std::printf("step %lld\n", static_cast<long long>(value));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s FILE\n", argv[0]);
    return 2;
  }
  const auto file = fp::Open(argv[1]);  // names, types and shapes; no data yet
  if (!file) return Failed(file.error());
  for (const fp::TensorInfo& tensor : file->tensors()) Print(tensor);

  std::vector<std::vector<std::byte>> memory;
  const auto info = ReadAll(*file, memory);
  if (!info) return Failed(info.error());
  std::printf("%llu bytes read in %.4f s\n", static_cast<unsigned long long>(info->bytes),
              info->seconds);
  std::printf("  engine %s (%s), direct I/O: %s\n",
              std::string(fp::EngineName(info->engine)).c_str(), info->engine_reason.c_str(),
              info->direct ? "yes" : "no");
  PrintStep(*file);

  const auto verified = file->Verify();  // also what no tensor uses
  if (!verified) return Failed(verified.error());
  for (const fp::Error& damage : verified->damages) {
    std::printf("DAMAGED: %s\n", damage.Message().c_str());
  }
  std::printf("%llu records compared with their checksums, %llu have none\n",
              static_cast<unsigned long long>(verified->checked_records),
              static_cast<unsigned long long>(verified->unchecked_records));
  return verified->damages.empty() ? 0 : 1;
}
