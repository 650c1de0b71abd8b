// Files of the cache folders. Their contents run on the GPU, so a file is used only if no other user can have written it: file and folder
// must belong to this user or root and not be writable by others, and the file must be a regular file. An error of the system gives an
// empty result, no exception.
#pragma once
#include <optional>
#include <string>

namespace strobe::cuda {

// An open file; closed at the end of the scope.
class Descriptor {
public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor();
  Descriptor(Descriptor &&from) noexcept : fd_(from.fd_) { from.fd_ = -1; }
  Descriptor &operator=(Descriptor &&from) noexcept;
  explicit operator bool() const { return fd_ >= 0; }
  int operator*() const { return fd_; }

private:
  int fd_;
};

// The reason why a path is not used, as "PATH: reason"; empty if it is used, or if it does not exist.
std::string folder_refused(const std::string &path);
std::string file_refused(const std::string &path);

// The folder of a file; empty if the folder is not used. make: creates it with its parents, readable by others and not writable.
Descriptor open_folder_of(const std::string &file, bool make);
// Opens a file without following a link and without waiting; empty if the file is not used.
Descriptor open_own_file(const std::string &file);
Descriptor open_own_lock(const std::string &file);

// The file's bytes; null unless the file is used and has at most `most` bytes.
std::optional<std::string> read_own_file(const std::string &file, size_t most);
// Written under a temporary name, then renamed: readers never see half a file.
bool write_own_file(const std::string &file, const std::string &bytes);
void remove_own_file(const std::string &file);

} // namespace strobe::cuda
