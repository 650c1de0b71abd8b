// A fake libcuda.so.1 with two devices and the functions that Strobe calls. Device pointers are host pointers.
#include "fake_cuda.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

using namespace strobe::cuda;
using namespace strobe::cuda::test;

namespace {

FakeCuda fake;
int initialised_by = 0;
thread_local std::vector<CUcontext> stack;
thread_local CUstreamCaptureMode mode{};

CUcontext primary(CUdevice device) { return reinterpret_cast<CUcontext>(0x1000L + device); }
bool usable() { return initialised_by == getpid(); }

} // namespace

extern "C" {

FakeCuda *fake_cuda() { return &fake; }

CUresult cuInit(unsigned) {
  fake.inits++;
  if (fake.init_forks) {
    const pid_t helper = fork();
    if (helper == 0) _exit(0);
    waitpid(helper, nullptr, 0);
  }
  if (initialised_by && !usable()) return CUDA_ERROR_NOT_INITIALIZED;
  if (!fake.init) initialised_by = getpid();
  return fake.init;
}
CUresult cuDriverGetVersion(int *version) { return *version = fake.version, 0; }
CUresult cuGetErrorName(CUresult, const char **name) { return *name = "CUDA_ERROR_PRETENDED", 0; }
CUresult cuGetErrorString(CUresult, const char **words) { return *words = "a pretended error", 0; }
CUresult cuDeviceGetCount(int *count) { return *count = kFakeDevices, 0; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { return *device = ordinal + 10, 0; } // a handle is not an ordinal
CUresult cuDeviceGetName(char *name, int length, CUdevice device) { return std::snprintf(name, length, "Fake %d", device - 10), 0; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
    *value = 8 + device - 10;
    break;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
    *value = 0;
    break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
    *value = 163 * 1024;
    break;
  default:
    *value = 1000 + attribute;
  }
  return 0;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { return fake.retains++, *context = primary(device), 0; }
CUresult cuCtxGetCurrent(CUcontext *context) {
  if (!usable()) return CUDA_ERROR_NOT_INITIALIZED;
  return *context = stack.empty() ? nullptr : stack.back(), 0;
}
CUresult cuCtxPushCurrent_v2(CUcontext context) { return fake.pushes++, stack.push_back(context), 0; }
CUresult cuCtxPopCurrent_v2(CUcontext *context) { return *context = stack.back(), stack.pop_back(), 0; }

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, void *, void **, unsigned, void *, void **, unsigned) {
  if (!usable()) return CUDA_ERROR_NOT_INITIALIZED;
  fake.loads++;
  const std::lock_guard lock(fake.mutex);
  fake.code = static_cast<const char *>(code);
  *library = reinterpret_cast<CUlibrary>(&fake);
  if (!fake.refused.empty() && fake.code.find(fake.refused) != fake.code.npos) return CUDA_ERROR_INVALID_IMAGE;
  return fake.load;
}
CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary, const char *name) {
  *kernel = reinterpret_cast<CUkernel>(&fake.code);
  return std::strcmp(name, "kernel") ? 500 : 0;
}
CUresult cuKernelGetFunction(CUfunction *function, CUkernel) { return *function = nullptr, stack.empty(); }
CUresult cuKernelGetAttribute(int *value, CUfunction_attribute, CUkernel, CUdevice) { return *value = fake.static_shared, 0; }
CUresult cuKernelSetAttribute(CUfunction_attribute, int value, CUkernel, CUdevice device) {
  fake.most_shared = value, fake.most_shared_device = device;
  return 0;
}
CUresult cuKernelGetParamInfo(CUkernel, size_t, size_t *offset, size_t *size) {
  return *offset = 0, *size = fake.tells_bytes ? fake.argument_bytes.load() : 0, 0;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction, void **parameters, void **) {
  if (!usable()) return CUDA_ERROR_NOT_INITIALIZED;
  fake.launches++;
  const std::lock_guard lock(fake.mutex);
  fake.config = *config;
  fake.early.push_back(config->numAttrs == 1 && config->attrs->id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
                       config->attrs->value.programmaticStreamSerializationAllowed == 1);
  const char *arguments = static_cast<const char *>(parameters[0]);
  fake.arguments.assign(arguments, arguments + fake.argument_bytes);
  return fake.launch;
}

// A fake map begins with the tensor's address; the sizes follow.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, int, uint32_t rank, void *address, const uint64_t *sizes, const uint64_t *,
                                const uint32_t *, const uint32_t *, int, int, int, int) {
  *map = {};
  map->opaque[0] = reinterpret_cast<uint64_t>(address);
  std::copy(sizes, sizes + rank, map->opaque + 1);
  return 0;
}

CUresult cuMemsetD8Async(CUdeviceptr memory, unsigned char value, size_t bytes, CUstream) {
  return std::memset(reinterpret_cast<void *>(memory), value, bytes), 0;
}
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream) {
  return std::memcpy(to, reinterpret_cast<void *>(from), bytes), 0;
}
CUresult cuMemAllocAsync(CUdeviceptr *memory, size_t bytes, CUstream) {
  return *memory = reinterpret_cast<CUdeviceptr>(std::malloc(bytes)), *memory ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemFreeAsync(CUdeviceptr memory, CUstream) { return std::free(reinterpret_cast<void *>(memory)), 0; }
CUresult cuStreamSynchronize(CUstream) { return fake.synchronised++, 0; }
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus *status) {
  return *status = static_cast<CUstreamCaptureStatus>(fake.capturing.load()), 0;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *wanted) {
  std::swap(*wanted, mode);
  fake.relaxed += mode == CU_STREAM_CAPTURE_MODE_RELAXED ? 1 : -1;
  return 0;
}
}
