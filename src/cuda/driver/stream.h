// Small operations on a stream, whose device must be current (DeviceGuard).
#pragma once
#include <cstddef>

#include "cuda/driver/driver.h"

namespace strobe::cuda {

void fill(void *memory, unsigned char value, size_t bytes, CUstream);
// Copies a few bytes to the host, for a check, and waits for the stream.
void read(void *host, const void *memory, size_t bytes, CUstream);
bool capturing(CUstream);
// Allocates from the device's memory pool, in stream order.
void *allocate(size_t bytes, CUstream);
void free(void *memory, CUstream) noexcept;

// During its lifetime, this thread may do what a stream capture forbids by default, such as loading a kernel. Captured streams are not
// affected.
class RelaxedCapture {
public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture &) = delete;
  RelaxedCapture &operator=(const RelaxedCapture &) = delete;

private:
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

} // namespace strobe::cuda
