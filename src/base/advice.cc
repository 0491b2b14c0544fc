// SPDX-License-Identifier: Apache-2.0
#include "base/advice.h"

#include <cerrno>

namespace fastpersist::base {

std::string AdviceFor(int system_errno) {
  switch (system_errno) {
    case ENOSPC:
      return "free space on this file system (a save needs room for the old and the new file, and "
             "some file systems fill up before df shows it) or save elsewhere";
    case EDQUOT:
      return "the quota is used up: free space, raise the quota, or save elsewhere";
    case EFBIG:
      return "the file is larger than the file system or the limit allows; check 'ulimit -f'";
    case EIO:
      return "the device or the server failed; check the kernel log and save to another device";
    case EROFS:
      return "the file system is read-only; remount it or save elsewhere";
    case EACCES:
    case EPERM:
      return "check the permissions of the file and of its directory";
    case ENOENT:
      return "create the directory first";
    case ENOTDIR:
      return "a part of the path is a file, not a directory";
    case EISDIR:
      return "name a file inside the directory";
    case ENAMETOOLONG:
      return "choose a shorter name";
    case ELOOP:
      return "the symbolic links lead in a circle";
    case EMFILE:
    case ENFILE:
      return "too many files are open; close some or raise 'ulimit -n'";
    case ENOMEM:
      return "free memory or set a smaller staging_bytes";
    case EBUSY:
      return "the target cannot be replaced by a rename (a mounted file?); atomic=False writes in "
             "place";
    default:
      return "";
  }
}

}  // namespace fastpersist::base
