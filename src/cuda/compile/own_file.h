// Files of the cache folders. Their contents run on the GPU, so a file is used only if no other user can have written it: file and folder
// must belong to this user or root, others may not write to them, and the file must be a regular file. A system error gives an empty
// result, not an exception.
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

// The reason why a path is not used, as "PATH: reason". Empty if it is used, or does not exist.
std::string folder_refused(const std::string &path);
std::string file_refused(const std::string &path);

// The folder of a file; empty if the folder may not be used. make: creates the folder and its parents, readable by others, but not
// writable.
Descriptor open_folder_of(const std::string &file, bool make);
// Opens a file without following a link and without waiting; empty if the file may not be used.
Descriptor open_own_file(const std::string &file);
Descriptor open_own_lock(const std::string &file);

// The file's bytes; null if the file may not be used or has more than `most` bytes.
std::optional<std::string> read_own_file(const std::string &file, size_t most);
// Writes under a temporary name and then renames the file, so that readers never see half a file.
bool write_own_file(const std::string &file, const std::string &bytes);
void remove_own_file(const std::string &file);

} // namespace strobe::cuda
