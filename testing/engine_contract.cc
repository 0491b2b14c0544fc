// SPDX-License-Identifier: Apache-2.0
#include "testing/engine_contract.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "base/unique_fd.h"
#include "testing/aligned_memory.h"
#include "testing/engine_driver.h"
#include "testing/process_state.h"
#include "testing/seed.h"
#include "testing/signal_storm.h"

namespace fastpersist::testing {
namespace {

using engine::IoRequest;
using engine::Submitted;
using ::testing::AssertionFailure;
using ::testing::AssertionResult;
using ::testing::AssertionSuccess;

constexpr std::uint64_t kBlock = 4096;

IoRequest Write(const ContractFile& file, std::span<std::byte> data, std::uint64_t offset,
                std::uint64_t tag) {
  return {.kind = IoRequest::Kind::kWrite,
          .fd = file.fd(),
          .data = data.data(),
          .length = data.size(),
          .offset = offset,
          .tag = tag};
}

void ExpectBytes(EngineDriver& driver, const ContractFile& file,
                 std::span<const std::byte> expected) {
  const auto found = file.Bytes();
  const auto differ = std::ranges::mismatch(found, expected);
  if (found.size() != expected.size() || differ.in1 != found.end()) {
    driver.Break(fmt::format("the file differs at byte {} ({} bytes, {} expected)",
                             differ.in1 - found.begin(), found.size(), expected.size()));
  }
}

// Pieces of whole blocks that cover [0, blocks), in random order.
std::vector<std::pair<std::uint64_t, std::uint64_t>> RandomPieces(Random& random,
                                                                  std::uint64_t blocks) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> pieces;
  for (std::uint64_t at = 0; at < blocks;) {
    const std::uint64_t count = Between(random, 1, std::min<std::uint64_t>(blocks - at, 33));
    pieces.emplace_back(at * kBlock, count * kBlock);
    at += count;
  }
  std::ranges::shuffle(pieces, random);
  return pieces;
}

AssertionResult EveryByteArrivesAtItsOffset(const EngineUnderTest& subject,
                                            const ContractFile& file, std::uint64_t seed) {
  Random random(seed);
  constexpr std::uint64_t kBlocks = 300;
  const AlignedMemory source(kBlocks * kBlock);
  source.FillWithNoise(random);
  std::vector<std::byte> expected(kBlocks * kBlock);
  const auto engine = *subject.make(static_cast<unsigned>(Between(random, 1, 8)));
  EngineDriver driver(*engine);
  std::uint64_t tag = 0;
  std::uint64_t from = 0;
  const auto pieces = RandomPieces(random, kBlocks);
  for (const auto& [offset, length] : pieces) {
    const auto data = source.bytes().subspan(from, length);
    std::ranges::copy(data, expected.begin() + static_cast<std::ptrdiff_t>(offset));
    driver.Submit(Write(file, data, offset, tag++));
    from += length;
  }
  driver.Finish();
  for (tag = 0; tag < pieces.size(); ++tag) {
    driver.Expect(tag, static_cast<std::int64_t>(pieces[tag].second), "write");
  }
  ExpectBytes(driver, file, expected);
  return driver.Verdict();
}

AssertionResult ReadsReturnWhatTheFileHolds(const EngineUnderTest& subject,
                                            const ContractFile& file, std::uint64_t seed) {
  Random random(seed);
  constexpr std::uint64_t kBlocks = 100;
  const AlignedMemory content(kBlocks * kBlock);
  content.FillWithNoise(random);
  file.SetBytes(content.bytes());
  const AlignedMemory target((kBlocks + 2) * kBlock);
  const auto engine = *subject.make(4);
  EngineDriver driver(*engine);
  const auto read = [&](std::uint64_t offset, std::uint64_t length, std::uint64_t tag) {
    driver.Submit({.kind = IoRequest::Kind::kRead,
                   .fd = file.fd(),
                   .data = target.data() + offset,
                   .length = length,
                   .offset = offset,
                   .tag = tag});
  };
  std::uint64_t tag = 2;
  for (const auto& [offset, length] : RandomPieces(random, kBlocks - 1))
    read(offset, length, tag++);
  read((kBlocks - 1) * kBlock, 2 * kBlock, 0);  // ends beyond the file
  read((kBlocks + 1) * kBlock, kBlock, 1);      // lies beyond it
  driver.Finish();
  driver.Expect(0, kBlock, "read across the end");
  driver.Expect(1, 0, "read beyond the end");
  if (!std::ranges::equal(target.bytes().first(kBlocks * kBlock), content.bytes())) {
    driver.Break("the bytes read are not those of the file");
  }
  return driver.Verdict();
}

AssertionResult TagsComeBackExactlyOnce(const EngineUnderTest& subject, const ContractFile& file,
                                        std::uint64_t seed) {
  Random random(seed);
  const AlignedMemory source(kBlock);
  const auto engine = *subject.make(5);
  EngineDriver driver(*engine);
  std::set<std::uint64_t> tags{0, 1, ~std::uint64_t{0} - 1};
  while (tags.size() < 100) tags.insert(random());
  std::uint64_t offset = 0;
  for (const std::uint64_t tag : tags) {
    driver.Submit(Write(file, source.bytes(), offset, tag));
    offset += kBlock;
  }
  driver.Finish();
  if (driver.results().size() != tags.size()) driver.Break("not every tag came back");
  return driver.Verdict();
}

AssertionResult TheDepthIsTheMostInFlight(const EngineUnderTest& subject, const ContractFile& file,
                                          std::uint64_t /*seed*/) {
  for (const unsigned wanted : {1U, 3U, 8U}) {
    const auto engine = *subject.make(wanted);
    EngineDriver driver(*engine);
    if (engine->depth() == 0 || engine->depth() > wanted) driver.Break("the depth is odd");
    const AlignedMemory zeros(kBlock);
    const AlignedMemory ones(kBlock);
    std::ranges::fill(ones.bytes(), std::byte{1});
    std::uint64_t tag = 0;
    std::optional<Submitted> answer;
    do {
      answer = driver.TrySubmit(Write(file, zeros.bytes(), tag * kBlock, tag));
      ++tag;
    } while (answer == Submitted::kQueued);
    // Engines that finish everything in Submit are never busy.
    if (answer == Submitted::kBusy) {
      const std::uint64_t refused = tag - 1;
      if (refused != engine->depth()) driver.Break("not the depth, but less or more was taken");
      const IoRequest spare = Write(file, ones.bytes(), (refused + 1) * kBlock, refused);
      if (driver.TrySubmit(spare) != Submitted::kBusy) {
        driver.Break("busy, then not, and nothing was reaped");
      }
      while (driver.in_flight() == engine->depth() && !driver.Broken()) driver.ReapOnce();
      driver.Submit(Write(file, zeros.bytes(), refused * kBlock, tag));
    }
    driver.Finish();
    ExpectBytes(driver, file, std::vector<std::byte>(file.Bytes().size()));
    if (driver.Broken()) return driver.Verdict();
  }
  return AssertionSuccess();
}

AssertionResult ErrorsAreNegativeErrnos(const EngineUnderTest& subject, const ContractFile& file,
                                        std::uint64_t /*seed*/) {
  const AlignedMemory source(kBlock);
  const base::UniqueFd read_only = file.Reopen(O_RDONLY);
  const base::UniqueFd write_only = file.Reopen(O_WRONLY);
  const IoRequest good = Write(file, source.bytes(), 0, 0);
  std::vector<IoRequest> requests(6, good);
  requests[0].fd = -1;
  requests[2].fd = read_only.get();
  requests[3].fd = write_only.get();
  requests[3].kind = IoRequest::Kind::kRead;
  requests[4].offset = std::uint64_t{1} << 62;
  const auto engine = *subject.make(3);
  // Only now, or the engine would get the number.
  requests[1].fd = file.Reopen(O_RDWR).get();
  EngineDriver driver(*engine);
  for (std::uint64_t tag = 0; tag < requests.size(); ++tag) {
    requests[tag].tag = tag;
    driver.Submit(requests[tag]);
  }
  driver.Finish();
  driver.Expect(0, -EBADF, "no descriptor");
  driver.Expect(1, -EBADF, "closed descriptor");
  driver.Expect(2, -EBADF, "write to a read-only descriptor");
  driver.Expect(3, -EBADF, "read from a write-only descriptor");
  driver.Expect(4, -EFBIG, "write at 2^62");
  driver.Expect(5, kBlock, "a good write after failed ones");
  return driver.Verdict();
}

AssertionResult ReapingOneByOneLosesNothing(const EngineUnderTest& subject,
                                            const ContractFile& file, std::uint64_t /*seed*/) {
  const AlignedMemory source(kBlock);
  const auto engine = *subject.make(8);
  EngineDriver driver(*engine, /*room=*/1);
  for (std::uint64_t tag = 0; tag < 50; ++tag) {
    driver.Submit(Write(file, source.bytes(), tag * kBlock, tag));
  }
  driver.Finish();
  return driver.Verdict();
}

AssertionResult RegisteredMemoryIsUsedLikeAnyOther(const EngineUnderTest& subject,
                                                   const ContractFile& file, std::uint64_t seed) {
  Random random(seed);
  const AlignedMemory source(6 * kBlock);
  source.FillWithNoise(random);
  const auto engine = *subject.make(2);
  // Blocks 1 to 3 of 6; the answer is a matter of speed.
  (void)engine->RegisterMemory(source.bytes().subspan(kBlock, 3 * kBlock));
  EngineDriver driver(*engine);
  const std::vector<std::pair<std::uint64_t, std::uint64_t>> pieces{{0, 1}, {0, 2}, {1, 1}, {1, 3},
                                                                    {3, 1}, {3, 2}, {4, 2}, {0, 6}};
  std::vector<std::byte> expected;
  std::uint64_t tag = 0;
  for (const auto& [first, count] : pieces) {
    const auto data = source.bytes().subspan(first * kBlock, count * kBlock);
    driver.Submit(Write(file, data, expected.size(), tag++));
    expected.insert(expected.end(), data.begin(), data.end());
  }
  driver.Finish();
  ExpectBytes(driver, file, expected);
  return driver.Verdict();
}

void StartChildThatExits() {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  if (child < 0) return;
  while (::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
}

AssertionResult SignalsAndExitsLoseNothing(const EngineUnderTest& subject, const ContractFile& file,
                                           std::uint64_t seed) {
  Random random(seed);
  const AlignedMemory source(8 * kBlock);
  source.FillWithNoise(random);
  const auto engine = *subject.make(3);
  EngineDriver driver(*engine);
  const SignalStorm storm;
  std::uint64_t tag = 0;
  for (; SignalStorm::Count() < 30 && !driver.Broken(); ++tag) {
    driver.Submit(Write(file, source.bytes(), (tag % 64) * 8 * kBlock, tag));
    if (tag % 64 == 10) std::thread([] {}).join();
    if (tag % 64 == 20) StartChildThatExits();
    if (tag % 64 == 63) driver.Finish();  // so that no two writes to one place overlap
  }
  driver.Finish();
  for (const auto& [done, result] : driver.results()) {
    driver.Expect(done, 8 * kBlock, "a write in a storm of signals");
  }
  std::vector<std::byte> expected;
  for (std::uint64_t i = 0; i < std::min<std::uint64_t>(tag, 64); ++i) {
    expected.insert(expected.end(), source.bytes().begin(), source.bytes().end());
  }
  ExpectBytes(driver, file, expected);
  return driver.Verdict();
}

AssertionResult NothingIsLeftBehind(const EngineUnderTest& subject, const ContractFile& file,
                                    std::uint64_t /*seed*/) {
  const AlignedMemory source(kBlock);
  const auto files = OpenFiles();
  const unsigned threads = ThreadCount();
  for (int i = 0; i < 3; ++i) {
    const auto engine = *subject.make(4);
    (void)engine->RegisterMemory(source.bytes());
    EngineDriver driver(*engine);
    for (std::uint64_t tag = 0; tag < 4; ++tag) {
      driver.Submit(Write(file, source.bytes(), tag * kBlock, tag));
    }
    driver.Finish();
    if (driver.Broken()) return driver.Verdict();
  }
  if (OpenFiles() != files) return AssertionFailure() << "a descriptor was left open";
  // A thread that was joined, and a worker of the kernel, are listed for a moment longer, which is
  // also why there may have been more before.
  for (int i = 0; i < 1000 && ThreadCount() > threads; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (const unsigned now = ThreadCount(); now > threads) {
    return AssertionFailure() << fmt::format("{} threads before, {} after", threads, now);
  }
  return AssertionSuccess();
}

}  // namespace

const std::vector<ContractRule>& EngineContract() {
  static const std::vector<ContractRule> rules{
      {"EveryByteArrivesAtItsOffset", EveryByteArrivesAtItsOffset},
      {"ReadsReturnWhatTheFileHolds", ReadsReturnWhatTheFileHolds},
      {"TagsComeBackExactlyOnce", TagsComeBackExactlyOnce},
      {"TheDepthIsTheMostInFlight", TheDepthIsTheMostInFlight},
      {"ErrorsAreNegativeErrnos", ErrorsAreNegativeErrnos},
      {"ReapingOneByOneLosesNothing", ReapingOneByOneLosesNothing},
      {"RegisteredMemoryIsUsedLikeAnyOther", RegisteredMemoryIsUsedLikeAnyOther},
      {"SignalsAndExitsLoseNothing", SignalsAndExitsLoseNothing},
      {"NothingIsLeftBehind", NothingIsLeftBehind},
  };
  return rules;
}

}  // namespace fastpersist::testing
