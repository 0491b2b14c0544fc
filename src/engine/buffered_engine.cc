// SPDX-License-Identifier: Apache-2.0
#include "engine/buffered_engine.h"

#include <unistd.h>

#include <cassert>
#include <cerrno>

namespace fastpersist::engine {

std::int64_t MoveBytes(const IoRequest& request) {
  const auto offset = static_cast<off_t>(request.offset);
  ssize_t moved = request.kind == IoRequest::Kind::kWrite
                      ? ::pwrite(request.fd, request.data, request.length, offset)
                      : ::pread(request.fd, request.data, request.length, offset);
  // Pipes and terminals have no offsets; their bytes arrive in order because there is one writer.
  if (moved < 0 && errno == ESPIPE) {
    moved = request.kind == IoRequest::Kind::kWrite
                ? ::write(request.fd, request.data, request.length)
                : ::read(request.fd, request.data, request.length);
  }
  return moved >= 0 ? moved : -static_cast<std::int64_t>(errno);
}

Result<Submitted> BufferedEngine::Submit(const IoRequest& request, IoCompletion* completed) {
  *completed = {.tag = request.tag, .result = MoveBytes(request)};
  return Submitted::kCompleted;
}

Result<std::size_t> BufferedEngine::Reap(std::span<IoCompletion> /*out*/) {
  assert(false && "nothing is ever in flight");
  return 0;
}

}  // namespace fastpersist::engine
