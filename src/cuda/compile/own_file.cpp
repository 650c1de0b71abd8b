#include "cuda/compile/own_file.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "attention/text.h"

namespace strobe::cuda {
namespace fs = std::filesystem;
namespace {

constexpr mode_t kOthersWrite = S_IWGRP | S_IWOTH;

// The reason why a file or folder must not be used; null if it may.
const char *wrong_with(const struct stat &s, mode_t kind) {
  if ((s.st_mode & S_IFMT) != kind) return kind == S_IFDIR ? "no folder" : "no regular file";
  if (s.st_uid != geteuid() && s.st_uid != 0) return "another user's";
  if (s.st_mode & kOthersWrite) return "others can write to it";
  return nullptr;
}

Descriptor if_own(Descriptor file, mode_t kind) {
  struct stat s;
  if (file && fstat(*file, &s) == 0 && !wrong_with(s, kind)) return file;
  return Descriptor();
}

std::string refused(const std::string &path, mode_t kind) {
  struct stat s;
  // A cache folder may be a link, for example to a larger disk. A file in it may not be a link.
  if ((kind == S_IFDIR ? stat : lstat)(path.c_str(), &s) != 0) return {};
  const char *why = wrong_with(s, kind);
  return why ? text(path, ": ", why) : std::string();
}

void make_folders(const fs::path &folder) {
  std::error_code ignored;
  if (folder.empty() || fs::exists(folder, ignored)) return;
  make_folders(folder.parent_path());
  mkdir(folder.c_str(), 0755);
}

std::string name_of(const std::string &file) { return fs::path(file).filename().string(); }

bool write_all(int fd, const std::string &bytes) {
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t n = ::write(fd, bytes.data() + at, bytes.size() - at);
    if (n < 0 && errno != EINTR) return false;
    if (n > 0) at += static_cast<size_t>(n);
  }
  return true;
}

} // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}
Descriptor &Descriptor::operator=(Descriptor &&from) noexcept {
  std::swap(fd_, from.fd_);
  return *this;
}

std::string folder_refused(const std::string &path) { return refused(path, S_IFDIR); }
std::string file_refused(const std::string &path) { return refused(path, S_IFREG); }

Descriptor open_folder_of(const std::string &file, bool make) {
  const fs::path folder = fs::path(file).parent_path();
  if (make) make_folders(folder);
  return if_own(Descriptor(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)), S_IFDIR);
}

static Descriptor open_in_folder(const std::string &file, bool make, int flags) {
  const Descriptor folder = open_folder_of(file, make);
  if (!folder) return Descriptor();
  // Without O_NONBLOCK, a FIFO would block a reader.
  return if_own(Descriptor(openat(*folder, name_of(file).c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, 0600)), S_IFREG);
}
Descriptor open_own_file(const std::string &file) { return open_in_folder(file, false, O_RDONLY); }
Descriptor open_own_lock(const std::string &file) { return open_in_folder(file, true, O_RDWR | O_CREAT); }

std::optional<std::string> read_own_file(const std::string &file, size_t most) {
  const Descriptor in = open_own_file(file);
  struct stat s;
  if (!in || fstat(*in, &s) != 0 || s.st_size < 0 || static_cast<size_t>(s.st_size) > most) return {};
  std::string bytes(static_cast<size_t>(s.st_size), 0);
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t n = ::read(*in, bytes.data() + at, bytes.size() - at);
    if (n == 0 || (n < 0 && errno != EINTR)) return {};
    if (n > 0) at += static_cast<size_t>(n);
  }
  return bytes;
}

bool write_own_file(const std::string &file, const std::string &bytes) {
  const Descriptor folder = open_folder_of(file, true);
  uint64_t random = 0;
  if (!folder || getrandom(&random, sizeof random, GRND_NONBLOCK) != sizeof random) return false;
  const std::string name = name_of(file), temporary = text(name, ".", random, ".part");
  const Descriptor out(openat(*folder, temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644));
  if (!out) return false;
  if (write_all(*out, bytes) && renameat(*folder, temporary.c_str(), *folder, name.c_str()) == 0) return true;
  unlinkat(*folder, temporary.c_str(), 0);
  return false;
}

void remove_own_file(const std::string &file) {
  if (const Descriptor folder = open_folder_of(file, false)) unlinkat(*folder, name_of(file).c_str(), 0);
}

} // namespace strobe::cuda
