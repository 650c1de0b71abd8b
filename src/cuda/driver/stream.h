// Small operations on a stream. The stream's device is current (DeviceGuard).
#pragma once
#include <cstddef>

#include "cuda/driver/driver.h"

namespace strobe::cuda {

void fill(void *memory, unsigned char value, size_t bytes, CUstream);
// Copies a few bytes for `check` to the host, and waits for the stream.
void read(void *host, const void *memory, size_t bytes, CUstream);
bool capturing(CUstream);
// From the device's pool, in the stream's order.
void *allocate(size_t bytes, CUstream);
void free(void *memory, CUstream) noexcept;

// Lets this thread do what a stream capture forbids by default (loading a kernel), during its lifetime; captured streams are not affected.
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
