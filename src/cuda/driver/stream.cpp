#include "cuda/driver/stream.h"

namespace strobe::cuda {

static CUdeviceptr address(const void *memory) { return reinterpret_cast<CUdeviceptr>(memory); }

void fill(void *memory, unsigned char value, size_t bytes, CUstream stream) {
  if (bytes) check(driver()->cuMemsetD8Async(address(memory), value, bytes, stream), "cuMemsetD8Async");
}

void read(void *host, const void *memory, size_t bytes, CUstream stream) {
  if (bytes) check(driver()->cuMemcpyDtoHAsync(host, address(memory), bytes, stream), "cuMemcpyDtoHAsync");
  check(driver()->cuStreamSynchronize(stream), "cuStreamSynchronize");
}

bool capturing(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  check(driver()->cuStreamIsCapturing(stream, &status), "cuStreamIsCapturing");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

void *allocate(size_t bytes, CUstream stream) {
  CUdeviceptr memory = 0;
  const CUresult result = driver()->cuMemAllocAsync(&memory, bytes, stream);
  if (result == CUDA_ERROR_OUT_OF_MEMORY)
    throw Error(STROBE_OUT_OF_MEMORY, "no device memory for a workspace of " + std::to_string(bytes) + " bytes");
  check(result, "cuMemAllocAsync");
  return reinterpret_cast<void *>(memory);
}

void free(void *memory, CUstream stream) noexcept { driver()->cuMemFreeAsync(reinterpret_cast<CUdeviceptr>(memory), stream); }

RelaxedCapture::RelaxedCapture() { check(driver()->cuThreadExchangeStreamCaptureMode(&mode_), "cuThreadExchangeStreamCaptureMode"); }
RelaxedCapture::~RelaxedCapture() { driver()->cuThreadExchangeStreamCaptureMode(&mode_); }

} // namespace strobe::cuda
