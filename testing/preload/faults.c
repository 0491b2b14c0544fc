// SPDX-License-Identifier: Apache-2.0
// Loaded with LD_PRELOAD, this library makes chosen file-system calls of a real process fail, fall
// short, raise a signal or kill it, and records them all. What io_uring and libaio do passes by:
// they do not go through the C library.
//
// Rules are read from the environment variable FASTPERSIST_FAULTS, separated by semicolons:
//
//   CALL FIRST LAST ACTION VALUE [PATH]
//
// The rule strikes at calls number FIRST to LAST (from 1, of this CALL, among the files whose path
// contains PATH). CALL is openat, pwrite, fallocate, ftruncate, fdatasync, fsync, close, renameat,
// mkdirat, unlinkat, pread, or direct, which is fcntl(2) turning O_DIRECT on; or pwrite-at or
// pread-at, for which FIRST and LAST are not numbers of calls but offsets in the file: it strikes
// at every pwrite(2) or pread(2) of one of those bytes. ACTION is one of
//
//   errno N    fail with errno N; close still closes
//   short N    pwrite, pread: really move only N bytes (not more than asked); 0 moves nothing
//   half, less pwrite, pread: really move half of the bytes, or one byte less
//   random N   pwrite, pread: really move a random part, at least one byte; N is the seed
//   signal N   send signal N to the process, then do the call
//   fork       fork a child that sleeps until it is killed, then do the call
//   hold       make the file $FASTPERSIST_HOLD.reached, wait while the file $FASTPERSIST_HOLD is
//              there, then do the call: a device that does not answer
//   once N     as errno, but at the first call only that is struck
//
// Missing values are 0. Without the variable nothing is touched or recorded. The recording is a
// text, one call per line: CALL RESULT OFFSET LENGTH PATH. Reads are recorded only while a rule is
// for them. Not for more than one configuring thread.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { kMaxRules = 16, kTraceBytes = 1 << 20 };

struct Rule {
  char call[16];
  long first, last;
  char action[16];
  long value;
  char path[128];
  long seen;
  int struck;
};

static struct Rule rules[kMaxRules];
static int rule_count;
static int active;
static int reads;  // whether a rule is for reads
static char trace[kTraceBytes];
static size_t trace_length;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

// Reads the rules again, starts counting from the first call, and forgets the recording.
void fastpersist_faults_reset(void) {
  pthread_mutex_lock(&mutex);
  rule_count = 0;
  trace_length = 0;
  trace[0] = '\0';
  const char* text = getenv("FASTPERSIST_FAULTS");
  active = text != NULL;
  reads = text != NULL && strstr(text, "pread") != NULL;
  while (text != NULL && *text != '\0' && rule_count < kMaxRules) {
    struct Rule* rule = &rules[rule_count];
    memset(rule, 0, sizeof *rule);
    if (sscanf(text, " %15s %ld %ld %15s %ld %127[^; ]", rule->call, &rule->first, &rule->last,
               rule->action, &rule->value, rule->path) >= 4) {
      ++rule_count;
    }
    text = strchr(text, ';');
    if (text != NULL) ++text;
  }
  pthread_mutex_unlock(&mutex);
}

const char* fastpersist_faults_trace(void) { return trace; }

// The child that the action "fork" made last.
int fastpersist_faults_child = 0;

__attribute__((constructor)) static void Start(void) { fastpersist_faults_reset(); }

// The path behind a descriptor, with name appended unless it is NULL.
static void PathOf(int fd, const char* name, char path[PATH_MAX]) {
  char link[64];
  path[0] = '\0';
  if (name == NULL || (name[0] != '/' && fd != AT_FDCWD)) {
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = '\0';
  }
  if (name == NULL) return;
  const size_t length = strlen(path);
  snprintf(path + length, PATH_MAX - length, "%s%s", length > 0 ? "/" : "", name);
}

// Whether the rule is for this call; counts it.
static int Meets(struct Rule* rule, const char* call, long offset, long length) {
  const size_t name = strlen(call);
  if (strncmp(rule->call, call, name) == 0 && strcmp(rule->call + name, "-at") == 0) {
    return offset <= rule->last && offset + length > rule->first;
  }
  if (strcmp(rule->call, call) != 0) return 0;
  ++rule->seen;
  return rule->seen >= rule->first && rule->seen <= rule->last;
}

// Counts the call for every rule; stores a copy of the first that strikes.
static int StrikesAt(const char* call, const char* path, long offset, long length,
                     struct Rule* out) {
  int found = 0;
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < rule_count; ++i) {
    struct Rule* rule = &rules[i];
    if (strstr(path, rule->path) == NULL || !Meets(rule, call, offset, length) || found) continue;
    if (strcmp(rule->action, "once") == 0 && rule->struck++ > 0) continue;
    *out = *rule;
    found = 1;
  }
  pthread_mutex_unlock(&mutex);
  return found;
}

static int Strikes(const char* call, const char* path, struct Rule* out) {
  return StrikesAt(call, path, 0, 0, out);
}

static void Record(const char* call, long result, long offset, long length, const char* path) {
  pthread_mutex_lock(&mutex);
  const int written = snprintf(trace + trace_length, kTraceBytes - trace_length,
                               "%s %ld %ld %ld %s\n", call, result, offset, length, path);
  // What no longer fits is forgotten.
  if (written > 0 && trace_length + (size_t)written < kTraceBytes) trace_length += (size_t)written;
  trace[trace_length] = '\0';
  pthread_mutex_unlock(&mutex);
}

// Forks a child that sleeps until it is killed. Returns once the child's fork() has returned too,
// so that its handlers (pthread_atfork) have run before anybody looks at what it has open.
static int ForkSleeper(void) {
  int ends[2];
  if (pipe(ends) != 0) return -1;
  const int child = fork();
  if (child == 0) {
    close(ends[0]);
    close(ends[1]);  // tells the parent
    for (;;) pause();
  }
  close(ends[1]);
  char nothing;
  while (child > 0 && read(ends[0], &nothing, 1) < 0 && errno == EINTR) continue;
  close(ends[0]);
  return child;
}

// Waits while the file $FASTPERSIST_HOLD is there.
static void Hold(void) {
  const char* path = getenv("FASTPERSIST_HOLD");
  if (path == NULL || access(path, F_OK) != 0) return;
  char reached[PATH_MAX];
  snprintf(reached, sizeof reached, "%s.reached", path);
  const int fd = (int)syscall(SYS_openat, AT_FDCWD, reached, O_WRONLY | O_CREAT, 0666);
  if (fd >= 0) syscall(SYS_close, fd);
  while (access(path, F_OK) == 0) usleep(1000);
}

// True if the call must fail: errno is set.
static int Fails(const struct Rule* rule) {
  if (strcmp(rule->action, "hold") == 0) Hold();
  if (strcmp(rule->action, "signal") == 0) kill(getpid(), (int)rule->value);
  if (strcmp(rule->action, "fork") == 0) fastpersist_faults_child = ForkSleeper();
  if (strcmp(rule->action, "errno") != 0 && strcmp(rule->action, "once") != 0) return 0;
  errno = (int)rule->value;
  return 1;
}

static size_t ShortCount(const struct Rule* rule, size_t count) {
  if (strcmp(rule->action, "half") == 0) return (count + 1) / 2;
  if (strcmp(rule->action, "less") == 0) return count > 1 ? count - 1 : count;
  if (strcmp(rule->action, "random") == 0) {
    unsigned seed = (unsigned)(rule->value * 7919 + rule->seen);
    return 1 + (size_t)rand_r(&seed) % count;
  }
  if (strcmp(rule->action, "short") == 0) {
    return (size_t)rule->value < count ? (size_t)rule->value : count;
  }
  return count;
}

// The call itself, as a system call: SYS_pwrite64 or SYS_pread64.
static ssize_t Move(long call, int fd, void* data, size_t count, off_t offset) {
  return syscall(call, fd, data, count, offset);
}

// A direct descriptor would refuse an odd count, so another one without O_DIRECT moves it.
static ssize_t MovePart(long call, int fd, void* data, size_t count, off_t offset) {
  char link[64];
  if (count == 0) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const int access = call == SYS_pwrite64 ? O_WRONLY : O_RDONLY;
  const int other = (int)syscall(SYS_openat, AT_FDCWD, link, access | O_CLOEXEC, 0);
  if (other < 0) return -1;
  const ssize_t result = Move(call, other, data, count, offset);
  syscall(SYS_close, other);
  return result;
}

static ssize_t FaultyMove(const char* name, long call, int fd, void* data, size_t count,
                          off_t offset) {
  char path[PATH_MAX];
  struct Rule rule;
  PathOf(fd, NULL, path);
  ssize_t result = -1;
  if (!StrikesAt(name, path, offset, (long)count, &rule)) {
    result = Move(call, fd, data, count, offset);
  } else if (!Fails(&rule)) {
    const size_t part = ShortCount(&rule, count);
    result = part == count ? Move(call, fd, data, count, offset)
                           : MovePart(call, fd, data, part, offset);
  }
  const int error = errno;
  Record(name, result < 0 ? -error : result, offset, (long)count, path);
  errno = error;
  return result;
}

// What all calls without special actions share: RAW is the call itself, as a system call.
#define INTERCEPT(CALL, FD, NAME, OFFSET, LENGTH, RAW)                              \
  if (!active) return RAW;                                                          \
  char path[PATH_MAX];                                                              \
  struct Rule rule;                                                                 \
  PathOf(FD, NAME, path);                                                           \
  const int strikes = Strikes(CALL, path, &rule);                                   \
  const int result = strikes && Fails(&rule) ? -1 : (int)(RAW);                     \
  const int error = errno;                                                          \
  Record(CALL, result < 0 ? -error : result, (long)(OFFSET), (long)(LENGTH), path); \
  errno = error;                                                                    \
  return result

ssize_t pwrite(int fd, const void* data, size_t count, off_t offset) {
  void* from = (void*)data;  // which a write leaves as it is
  if (!active) return Move(SYS_pwrite64, fd, from, count, offset);
  return FaultyMove("pwrite", SYS_pwrite64, fd, from, count, offset);
}

ssize_t pwrite64(int fd, const void* data, size_t count, off_t offset) {
  return pwrite(fd, data, count, offset);
}

ssize_t pread(int fd, void* data, size_t count, off_t offset) {
  if (!reads) return Move(SYS_pread64, fd, data, count, offset);
  return FaultyMove("pread", SYS_pread64, fd, data, count, offset);
}

ssize_t pread64(int fd, void* data, size_t count, off_t offset) {
  return pread(fd, data, count, offset);
}

int openat(int directory, const char* name, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  INTERCEPT("openat", directory, name, flags, mode,
            syscall(SYS_openat, directory, name, flags, mode));
}

int fallocate(int fd, int mode, off_t offset, off_t length) {
  INTERCEPT("fallocate", fd, NULL, offset, length,
            syscall(SYS_fallocate, fd, mode, offset, length));
}

int ftruncate(int fd, off_t length) {
  INTERCEPT("ftruncate", fd, NULL, 0, length, syscall(SYS_ftruncate, fd, length));
}

int fdatasync(int fd) { INTERCEPT("fdatasync", fd, NULL, 0, 0, syscall(SYS_fdatasync, fd)); }

int fsync(int fd) { INTERCEPT("fsync", fd, NULL, 0, 0, syscall(SYS_fsync, fd)); }

int renameat(int from_directory, const char* from, int to_directory, const char* to) {
  INTERCEPT("renameat", from_directory, from, 0, 0,
            syscall(SYS_renameat2, from_directory, from, to_directory, to, 0));
}

int mkdirat(int directory, const char* name, mode_t mode) {
  INTERCEPT("mkdirat", directory, name, 0, 0, syscall(SYS_mkdirat, directory, name, mode));
}

int unlinkat(int directory, const char* name, int flags) {
  INTERCEPT("unlinkat", directory, name, 0, 0, syscall(SYS_unlinkat, directory, name, flags));
}

// Linux has released the descriptor whatever close(2) answers.
int close(int fd) {
  if (!active) return (int)syscall(SYS_close, fd);
  char path[PATH_MAX];
  struct Rule rule;
  PathOf(fd, NULL, path);
  const int strikes = Strikes("close", path, &rule);
  int result = (int)syscall(SYS_close, fd);
  if (strikes && Fails(&rule)) result = -1;
  const int error = errno;
  Record("close", result < 0 ? -error : result, 0, 0, path);
  errno = error;
  return result;
}

static int Control(int fd, int command, void* argument) {
  const int turns_direct_on = command == F_SETFL && ((long)argument & O_DIRECT) != 0;
  if (!active || !turns_direct_on) return (int)syscall(SYS_fcntl, fd, command, argument);
  INTERCEPT("direct", fd, NULL, 0, 0, syscall(SYS_fcntl, fd, command, argument));
}

int fcntl(int fd, int command, ...) {
  va_list arguments;
  va_start(arguments, command);
  void* argument = va_arg(arguments, void*);
  va_end(arguments);
  return Control(fd, command, argument);
}

int fcntl64(int fd, int command, ...) {
  va_list arguments;
  va_start(arguments, command);
  void* argument = va_arg(arguments, void*);
  va_end(arguments);
  return Control(fd, command, argument);
}
