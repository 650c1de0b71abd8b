// Memory between two pages that nothing may access. An element that is read beyond an end causes a SIGSEGV, with any instruction set.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <new>

namespace strobe::test {

class Guarded {
public:
  // `bytes` bytes, which end where the second page begins, or begin where the first page ends.
  Guarded(size_t bytes, bool at_end) : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    const size_t inner = (bytes + page_ - 1) / page_ * page_;
    size_ = inner + 2 * page_;
    void *const mapped = mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    first_ = static_cast<unsigned char *>(mapped);
    if (inner && mprotect(first_ + page_, inner, PROT_READ | PROT_WRITE)) throw std::bad_alloc();
    data_ = first_ + page_ + (at_end ? inner - bytes : 0);
  }
  ~Guarded() { munmap(first_, size_); }
  Guarded(const Guarded &) = delete;

  unsigned char *data() const { return data_; }

private:
  size_t page_, size_ = 0;
  unsigned char *first_ = nullptr, *data_ = nullptr;
};

} // namespace strobe::test
