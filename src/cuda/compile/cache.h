// Compiled kernels on disk: <folder>/nvrtc-13.0/<digest>.kernel, where the digest covers the source and all options of the compilation. A
// process that compiles a kernel locks the file, so that other processes wait and then read it. Entries carry their own digest, and a
// damaged entry is ignored. Nothing here throws: without a usable folder nothing is found and nothing is stored. A digest proves that an
// entry is whole, not which user made it; own_file.h checks the user.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "cuda/compile/jit.h"
#include "cuda/compile/own_file.h"
#include "cuda/compile/sha256.h"

namespace strobe::cuda {

struct CacheSettings {
  std::string folder;               // STROBE_CACHE_DIR, else $XDG_CACHE_HOME/strobe, else ~/.cache/strobe; empty: none
  std::vector<std::string> further; // STROBE_CACHE_PATH, then added folders: they are only read, and any NVRTC may have made them
  std::vector<std::string> refused; // folders that are not used, each with the reason; they are not in `folder` or `further`
  bool readonly = false;            // STROBE_CACHE_READONLY: write nothing
  bool offline = false;             // STROBE_OFFLINE: compile nothing

  static CacheSettings from_environment();
};
// Adds a folder to `further` for the rest of the process: the kernels of an installed package.
void cache_add(const std::string &folder);
// The folders that were refused when this process first read the settings. Every plan's notes list them.
const std::vector<std::string> &refused_folders();
// Notes that the driver refuses the code of a cache file; a line for each folder with such files. Every plan's notes list them, too.
void note_refused_code(const std::string &file);
std::vector<std::string> refused_code();

std::string cache_file(const std::string &folder, const std::string &nvrtc, const Sha256::Digest &key);
std::optional<Build> cache_read(const std::string &file, const Sha256::Digest &key);
// Reads an entry of any NVRTC whose code the driver supports; newer NVRTCs come first.
std::optional<Build> cache_read_any(const std::string &folder, const Sha256::Digest &key);
// Writes an entry; false if it could not be written.
bool cache_write(const std::string &file, const Sha256::Digest &key, const Build &);
// Removes the entry that a build was read from, if it lies in the folder that may be written.
void cache_discard(const Build &);

// The lock of a file among all processes and threads. It is not held if the folder cannot be written, or if another holder keeps it for
// more than a minute. Each process then compiles for itself, which is slower but not wrong.
class CacheLock {
public:
  explicit CacheLock(const std::string &file);
  ~CacheLock();
  CacheLock(const CacheLock &) = delete;
  CacheLock &operator=(const CacheLock &) = delete;

private:
  std::string path_;
  Descriptor lock_;
};

} // namespace strobe::cuda
