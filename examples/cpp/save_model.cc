// SPDX-License-Identifier: Apache-2.0
// Saves a small model twice: as a PyTorch file and as a safetensors file.
//
//   save_model DIRECTORY
//
//   torch.load("DIRECTORY/model.pt", weights_only=True)
//   safetensors.torch.load_file("DIRECTORY/model.safetensors")
#include <fastpersist/fastpersist.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

namespace fp = fastpersist;

namespace {

// The program owns its memory; a State only points to it.
struct Model {
  std::vector<float> weight = std::vector<float>(std::size_t{1024} * 512);
  std::vector<float> bias = std::vector<float>(512, 0.5F);
  std::int64_t step = 1000;

  Model() { std::iota(weight.begin(), weight.end(), 0.0F); }
};

// Names, shapes and types of what is saved, in the order of the file.
fp::Result<fp::State> Describe(const Model& model) {
  const struct {
    const char* name;
    fp::TensorView view;
  } tensors[] = {
      {"linear.weight", {.data = model.weight.data(), .shape = {1024, 512}}},
      {"linear.bias", {.data = model.bias.data(), .shape = {512}}},
      {"step", {.data = &model.step, .dtype = fp::DType::kInt64}},  // no shape: a scalar
  };
  fp::State state;
  for (const auto& tensor : tensors) {
    if (auto added = state.Add(tensor.name, tensor.view); !added) {
      return std::unexpected(added.error());
    }
  }
  return state;
}

// Every failure is a value that says what happened and what to do about it.
int Failed(const fp::Error& error) {
  std::fprintf(stderr, "%s\n", error.Message().c_str());
  return 1;
}

void Print(const fp::SaveInfo& info) {
  std::printf("%s: %llu bytes in %.4f s (fill %.4f, write %.4f, sync %.4f, commit %.4f)\n",
              info.path.c_str(), static_cast<unsigned long long>(info.bytes), info.seconds.total,
              info.seconds.fill, info.seconds.write, info.seconds.sync, info.seconds.commit);
  std::printf("  engine %s (%s), direct I/O: %s\n",
              std::string(fp::EngineName(info.engine)).c_str(), info.engine_reason.c_str(),
              info.direct ? "yes" : "no");
  if (!info.warning.empty()) std::printf("  %s\n", info.warning.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s DIRECTORY\n", argv[0]);
    return 2;
  }
  const std::filesystem::path directory = argv[1];
  const Model model;
  const auto state = Describe(model);
  if (!state) return Failed(state.error());

  // The suffix chooses the format. The file appears complete and on stable storage, or not at all.
  for (const char* const name : {"model.pt", "model.safetensors"}) {
    const auto saved = fp::Save(*state, directory / name);
    if (!saved) return Failed(saved.error());
    Print(*saved);
  }
  return 0;
}
