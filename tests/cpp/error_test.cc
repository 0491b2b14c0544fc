// SPDX-License-Identifier: Apache-2.0
#include "fastpersist/error.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "base/advice.h"

namespace fastpersist {
namespace {

TEST(Error, TheMessageSaysWhatWhereWhyAndWhatToDo) {
  const Error error{.operation = "write",
                    .path = "/x/model.pt",
                    .offset = 4096,
                    .system_errno = ENOSPC,
                    .detail = "2 of 3 blocks are written",
                    .advice = "free 2 GiB and save again"};
  EXPECT_EQ(
      error.Message(),
      "write failed on /x/model.pt at offset 4096: No space left on device (errno 28): 2 of 3 "
      "blocks are written; free 2 GiB and save again");
}

TEST(Error, TheMessageLeavesOutWhatIsNotKnown) {
  EXPECT_EQ(Error{}.Message(), "save failed");
  EXPECT_EQ((Error{.operation = "rename", .system_errno = EBUSY}.Message()),
            "rename failed: Device or resource busy (errno 16)");
  EXPECT_EQ((Error{.operation = "options", .detail = "queue_depth 0 is too small"}.Message()),
            "options failed: queue_depth 0 is too small");
  EXPECT_EQ((Error{.operation = "open", .path = "m.pt", .advice = "create it"}.Message()),
            "open failed on m.pt; create it");
}

TEST(Error, OffsetZeroIsAnOffset) {
  EXPECT_EQ((Error{.operation = "write", .offset = 0}.Message()), "write failed at offset 0");
}

TEST(Advice, EveryErrnoThatASaveMeetsHasSome) {
  for (const int system_errno : {ENOSPC, EDQUOT, EFBIG, EIO, EROFS, EACCES, EPERM, ENOENT, ENOTDIR,
                                 EISDIR, ENAMETOOLONG, ELOOP, EMFILE, ENFILE, ENOMEM, EBUSY}) {
    const std::string advice = base::AdviceFor(system_errno);
    EXPECT_NE(advice, "") << system_errno;
    EXPECT_FALSE(advice.ends_with('.')) << advice;
  }
  EXPECT_EQ(base::AdviceFor(EDOM), "");
}

}  // namespace
}  // namespace fastpersist
