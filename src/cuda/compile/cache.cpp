#include "cuda/compile/cache.h"

#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "attention/text.h"
#include "cuda/compile/nvrtc.h"
#include "cuda/compile/own_file.h"
#include "cuda/driver/environment.h"
#include "strobe/strobe.h"

namespace strobe::cuda {
namespace fs = std::filesystem;
namespace {

// A file consists of this header, the log and the cubin.
struct Head {
  char magic[8];
  Sha256::Digest digest; // digest of all bytes that follow
  Sha256::Digest key;
  int32_t registers, spill_bytes;
  uint64_t log_bytes, cubin_bytes;
};
static_assert(std::has_unique_object_representations_v<Head>);
constexpr char kMagic[8] = {'S', 'T', 'R', 'O', 'B', 'E', '0', '1'};
constexpr size_t kDigested = offsetof(Head, key);
constexpr std::string_view kFolderPrefix = "nvrtc-";
constexpr size_t kMostBytes = 64 << 20; // largest entry that is accepted; today's entries have less than a hundredth of this

// What this process has learned of folders. Never destroyed: other threads may still run at exit.
struct Learned {
  std::mutex mutex;
  std::vector<std::string> added;
  std::map<std::string, std::set<std::string>> refused_code; // folder: files
};
Learned &learned() {
  static Learned *const only = new Learned;
  return *only;
}

// The versions of NVRTC for which a folder has one of its own, nvrtc-13.0.
std::vector<std::pair<int, int>> versions_in(const std::string &folder) {
  std::vector<std::pair<int, int>> found;
  std::error_code none;
  for (const auto &entry : fs::directory_iterator(folder, none)) {
    int major = 0, minor = 0;
    if (std::sscanf(entry.path().filename().c_str(), "nvrtc-%d.%d", &major, &minor) == 2) found.push_back({major, minor});
  }
  return found;
}
bool is_for_driver(std::pair<int, int> version) { return driver_follows(version.first); }

} // namespace

void cache_add(const std::string &folder) {
  std::error_code none;
  fs::path absolute = fs::absolute(folder, none).lexically_normal(); // whatever folder the process goes to later
  const std::lock_guard lock(learned().mutex);
  std::vector<std::string> &added = learned().added;
  if (!none && std::ranges::find(added, absolute.string()) == added.end()) added.push_back(absolute.string());
}

void note_refused_code(const std::string &file) {
  const std::lock_guard lock(learned().mutex);
  learned().refused_code[fs::path(file).parent_path()].insert(file);
}

std::vector<std::string> refused_code() {
  std::vector<std::string> all;
  const std::lock_guard lock(learned().mutex);
  for (const auto &[folder, files] : learned().refused_code)
    all.push_back(text(folder, ": the driver refused the code of ", files.size(), files.size() == 1 ? " kernel" : " kernels"));
  return all;
}

CacheSettings CacheSettings::from_environment() {
  CacheSettings s;
  if (const std::string folder = environment("STROBE_CACHE_DIR"); !folder.empty())
    s.folder = folder;
  else if (const std::string caches = environment("XDG_CACHE_HOME"); !caches.empty())
    s.folder = caches + "/strobe";
  else if (const std::string home = environment("HOME"); !home.empty())
    s.folder = home + "/.cache/strobe";
  s.further = environment_list("STROBE_CACHE_PATH");
  {
    const std::lock_guard lock(learned().mutex);
    s.further.insert(s.further.end(), learned().added.begin(), learned().added.end());
  }
  auto used = [&](const std::string &folder) {
    const std::string why = folder_refused(folder);
    if (!why.empty()) s.refused.push_back(why);
    return why.empty();
  };
  if (!s.folder.empty() && !used(s.folder)) s.folder.clear();
  std::erase_if(s.further, [&](const std::string &folder) { return !used(folder); });
  s.readonly = environment_flag("STROBE_CACHE_READONLY");
  s.offline = environment_flag("STROBE_OFFLINE");
  return s;
}

// The reason why a folder's kernels are of no use if it is a package of another version (packages/kernels/pack.py); else empty.
static std::string of_other_version(const std::string &folder) {
  const std::optional<std::string> manifest = read_own_file(folder + "/manifest.txt", 1 << 16);
  const std::string ours = text("strobe-attention ", strobe_version());
  const std::string made_of = manifest ? manifest->substr(0, manifest->find('\n')) : ours;
  return made_of == ours ? "" : text(folder, ": its kernels are those of ", made_of, ", and this is ", ours);
}

static std::vector<std::string> all_refused() {
  CacheSettings s = CacheSettings::from_environment();
  for (const std::string &folder : s.further)
    if (std::string why = of_other_version(folder); !why.empty()) s.refused.push_back(std::move(why));
  for (const std::string &folder : s.further) { // a folder in which every kernel is too new for the driver
    const std::vector<std::pair<int, int>> versions = versions_in(folder);
    if (versions.empty() || std::ranges::any_of(versions, is_for_driver)) continue;
    const auto [major, minor] = versions.back();
    s.refused.push_back(text(folder, "/", kFolderPrefix, major, ".", minor, ": an NVRTC that is newer than the driver compiled it"));
  }
  s.further.push_back(s.folder);
  for (const std::string &folder : s.further) { // each of them has a folder for each NVRTC
    std::error_code none;
    for (const auto &entry : std::filesystem::directory_iterator(folder, none))
      if (entry.path().filename().string().starts_with(kFolderPrefix))
        if (std::string why = folder_refused(entry.path()); !why.empty()) s.refused.push_back(std::move(why));
  }
  return s.refused;
}
const std::vector<std::string> &refused_folders() {
  static const auto *const refused = new std::vector<std::string>(all_refused());
  return *refused;
}

std::string cache_file(const std::string &folder, const std::string &nvrtc, const Sha256::Digest &key) {
  return text(folder, "/", kFolderPrefix, nvrtc, "/", hex(key), ".kernel");
}

std::optional<Build> cache_read(const std::string &file, const Sha256::Digest &key) {
  const std::optional<std::string> read = read_own_file(file, kMostBytes);
  Head head;
  if (!read || read->size() < sizeof head) return {};
  const std::string &bytes = *read;
  std::memcpy(&head, bytes.data(), sizeof head);
  if (std::memcmp(head.magic, kMagic, sizeof kMagic) || head.key != key) return {};
  const uint64_t rest = bytes.size() - sizeof head;
  if (head.log_bytes > rest || head.cubin_bytes != rest - head.log_bytes) return {};
  if (Sha256().add(std::string_view(bytes).substr(kDigested)).digest() != head.digest) return {};
  Build b;
  b.log = bytes.substr(sizeof head, head.log_bytes);
  b.cubin = bytes.substr(sizeof head + head.log_bytes, head.cubin_bytes);
  b.registers = head.registers, b.spill_bytes = head.spill_bytes;
  b.nvrtc = fs::path(file).parent_path().filename().string().substr(kFolderPrefix.size());
  b.file = file;
  return b;
}

std::optional<Build> cache_read_any(const std::string &folder, const Sha256::Digest &key) {
  std::vector<std::pair<int, int>> versions = versions_in(folder);
  std::erase_if(versions, std::not_fn(is_for_driver));
  std::ranges::sort(versions, std::greater());
  for (auto [major, minor] : versions)
    if (auto found = cache_read(cache_file(folder, text(major, ".", minor), key), key)) return found;
  return {};
}

bool cache_write(const std::string &file, const Sha256::Digest &key, const Build &b) {
  Head head{};
  std::memcpy(head.magic, kMagic, sizeof kMagic);
  head.key = key;
  head.registers = b.registers, head.spill_bytes = b.spill_bytes;
  head.log_bytes = b.log.size(), head.cubin_bytes = b.cubin.size();
  std::string bytes(reinterpret_cast<const char *>(&head), sizeof head);
  bytes += b.log + b.cubin;
  const Sha256::Digest digest = Sha256().add(std::string_view(bytes).substr(kDigested)).digest();
  std::memcpy(bytes.data() + offsetof(Head, digest), digest.data(), digest.size());

  return bytes.size() <= kMostBytes && write_own_file(file, bytes);
}

void cache_discard(const Build &b) {
  const CacheSettings settings = CacheSettings::from_environment();
  if (!settings.readonly && !settings.folder.empty() && b.file.starts_with(settings.folder + "/")) remove_own_file(b.file);
}

CacheLock::CacheLock(const std::string &file) : path_(file + ".lock") {
  using namespace std::chrono;
  for (const auto give_up = steady_clock::now() + 1min; steady_clock::now() < give_up; std::this_thread::sleep_for(2ms)) {
    if (!lock_) lock_ = open_own_lock(path_);
    if (!lock_) return;
    if (flock(*lock_, LOCK_EX | LOCK_NB) == 0) {
      // The last holder of a lock removes the file. So a lock counts only if the locked file still has this name.
      struct stat held, named;
      if (fstat(*lock_, &held) == 0 && lstat(path_.c_str(), &named) == 0 && held.st_ino == named.st_ino && held.st_dev == named.st_dev)
        return;
    } else if (errno == EWOULDBLOCK || errno == EINTR) {
      continue;
    } else {
      break; // this file system has no locks
    }
    lock_ = Descriptor();
  }
  lock_ = Descriptor();
}

CacheLock::~CacheLock() {
  if (!lock_) return;
  remove_own_file(path_);
  flock(*lock_, LOCK_UN); // a forked child may hold the file open too
}

} // namespace strobe::cuda
