// Files of the cache folders. What lies there is run on the GPU, so a file counts only where nobody but its owner can have written it: a
// regular file of this user's or of root's, in a folder of theirs, neither of them open to others for writing. What the system refuses is
// an empty answer, no exception.
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

// Why what lies at a path is not used, as "PATH: reason"; empty if it is, or if there is nothing.
std::string folder_refused(const std::string &path);
std::string file_refused(const std::string &path);

// The folder of a file, if it is used; make: created with those above it, for others to read and not to write.
Descriptor open_folder_of(const std::string &file, bool make);
// Never a link's target, never waits; nothing if it is not used.
Descriptor open_own_file(const std::string &file);
Descriptor open_own_lock(const std::string &file);

// Nothing unless the file is used and has at most so many bytes.
std::optional<std::string> read_own_file(const std::string &file, size_t most);
// Under another name first, so that nobody sees half a file.
bool write_own_file(const std::string &file, const std::string &bytes);
void remove_own_file(const std::string &file);

} // namespace strobe::cuda
