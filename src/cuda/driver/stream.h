// Small operations on a stream. The stream's device is current (DeviceGuard).
#pragma once
#include <cstddef>

#include "cuda/driver/driver.h"

namespace strobe::cuda {

void fill(void *memory, unsigned char value, size_t bytes, CUstream);
// Copies a few bytes for `check` to the host, and waits for the stream.
void read(void *host, const void *memory, size_t bytes, CUstream);
bool capturing(CUstream);
// Allocates from the device's memory pool, in the stream's order.
void *allocate(size_t bytes, CUstream);
void free(void *memory, CUstream) noexcept;

// During its lifetime this thread may do what a stream capture forbids by default (loading a kernel); captured streams are not affected.
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
