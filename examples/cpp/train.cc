// SPDX-License-Identifier: Apache-2.0
// "Trains" for twenty steps with a checkpoint after each, and goes on where it was the next time
// it is started, however it ended.
//
//   train DIRECTORY
#include <fastpersist/fastpersist.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace fp = fastpersist;

namespace {

constexpr std::uint64_t kSteps = 20;

struct Model {
  std::vector<float> weight = std::vector<float>(std::size_t{1024} * 1024);
  float rate = 0.5F;
};

fp::Result<fp::State> Describe(const Model& model) {
  fp::State state;
  if (auto added = state.Add("weight", {.data = model.weight.data(), .shape = {1024, 1024}});
      !added) {
    return std::unexpected(added.error());
  }
  if (auto added = state.Add("rate", {.data = &model.rate}); !added) {
    return std::unexpected(added.error());
  }
  return state;
}

// Every failure is a value that says what happened and what to do about it.
int Failed(const fp::Error& error) {
  std::fprintf(stderr, "%s\n", error.Message().c_str());
  return 1;
}

// The next step, 0 when there is no checkpoint yet.
fp::Result<std::uint64_t> Resume(const fp::Checkpointer& run, Model& model) {
  const auto found = run.Load();
  if (!found && found.error().code == fp::ErrorCode::kNotFound) return 0;
  if (!found) return std::unexpected(found.error());
  for (const std::string& skipped : found->skipped) std::printf("%s\n", skipped.c_str());
  const fp::ReadTarget targets[] = {
      {.name = "weight", .destination = std::as_writable_bytes(std::span(model.weight))},
      {.name = "rate", .destination = std::as_writable_bytes(std::span(&model.rate, 1))}};
  if (auto read = found->file.Read(targets); !read) return std::unexpected(read.error());
  return found->step + 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s DIRECTORY\n", argv[0]);
    return 2;
  }
  auto run = fp::Checkpointer::Open(argv[1], {.keep_last = 3});
  if (!run) return Failed(run.error());
  Model model;
  const auto first = Resume(*run, model);
  if (!first) return Failed(first.error());
  const auto state = Describe(model);
  if (!state) return Failed(state.error());

  std::optional<fp::Ticket> last;
  for (std::uint64_t step = *first; step < *first + kSteps; ++step) {
    // ... forward and backward pass: they only read the weight, as the last save may still do ...
    if (last) (void)last->WaitReleased();
    model.rate *= 0.99F;
    for (float& value : model.weight) value += model.rate;
    // The weight is read where it lies; the rate is copied, and may change at once.
    auto ticket = run->Save(step, *state, {.live = {"weight"}});
    if (!ticket) return Failed(ticket.error());
    last = *std::move(ticket);
  }
  // The last save may still be under way; what went wrong with any of them is told here.
  if (auto closed = run->Close(); !closed) return Failed(closed.error());
  std::printf("steps %llu to %llu saved\n", static_cast<unsigned long long>(*first),
              static_cast<unsigned long long>(*first + kSteps - 1));
  return 0;
}
