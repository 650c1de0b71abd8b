// libcuda.so.1, loaded at run time: the functions that Strobe uses, under CUDA's names. Their declarations are here, so no CUDA header is
// needed.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "attention/attention.h"

namespace strobe::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st *;
using CUstream = struct CUstream_st *;
using CUlibrary = struct CUlib_st *;
using CUkernel = struct CUkern_st *;
using CUfunction = struct CUfunc_st *;

enum : CUresult {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_INVALID_IMAGE = 200,
  CUDA_ERROR_NO_BINARY_FOR_GPU = 209,
  CUDA_ERROR_INVALID_PTX = 218,
  CUDA_ERROR_UNSUPPORTED_PTX_VERSION = 222,
  CUDA_ERROR_INVALID_SOURCE = 300,
  CUDA_ERROR_NOT_FOUND = 500,
};
enum CUdevice_attribute : int {
  CU_DEVICE_ATTRIBUTE_CLOCK_RATE = 13,
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE = 38,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
  CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81,
  CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
};
enum CUfunction_attribute : int { CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };
enum CUstreamCaptureStatus : int { CU_STREAM_CAPTURE_STATUS_NONE = 0 };
enum CUstreamCaptureMode : int { CU_STREAM_CAPTURE_MODE_RELAXED = 2 };

enum CUlaunchAttributeID : int { CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
struct CUlaunchAttribute {
  CUlaunchAttributeID id;
  union alignas(8) {
    int programmaticStreamSerializationAllowed;
    char pad[64];
  } value;
};
struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute *attrs;
  unsigned numAttrs;
};
struct alignas(128) CUtensorMap {
  uint64_t opaque[16];
};

struct Driver {
  template <class... Arguments> using Call = CUresult (*)(Arguments...);

  Call<unsigned> cuInit;
  Call<int *> cuDriverGetVersion;
  Call<CUresult, const char **> cuGetErrorName, cuGetErrorString;

  Call<int *> cuDeviceGetCount;
  Call<CUdevice *, int> cuDeviceGet;
  Call<char *, int, CUdevice> cuDeviceGetName;
  Call<int *, CUdevice_attribute, CUdevice> cuDeviceGetAttribute;
  Call<CUcontext *, CUdevice> cuDevicePrimaryCtxRetain;
  Call<CUcontext *> cuCtxGetCurrent, cuCtxPopCurrent;
  Call<CUcontext> cuCtxPushCurrent;

  Call<CUlibrary *, const void *, void *, void **, unsigned, void *, void **, unsigned> cuLibraryLoadData;
  Call<CUkernel *, CUlibrary, const char *> cuLibraryGetKernel;
  Call<CUfunction *, CUkernel> cuKernelGetFunction;
  Call<int *, CUfunction_attribute, CUkernel, CUdevice> cuKernelGetAttribute;
  Call<CUfunction_attribute, int, CUkernel, CUdevice> cuKernelSetAttribute;
  Call<const CUlaunchConfig *, CUfunction, void **, void **> cuLaunchKernelEx;

  Call<CUdeviceptr, unsigned char, size_t, CUstream> cuMemsetD8Async;
  Call<void *, CUdeviceptr, size_t, CUstream> cuMemcpyDtoHAsync;
  Call<CUdeviceptr *, size_t, CUstream> cuMemAllocAsync;
  Call<CUdeviceptr, CUstream> cuMemFreeAsync;
  Call<CUstream> cuStreamSynchronize;
  Call<CUstream, CUstreamCaptureStatus *> cuStreamIsCapturing;
  Call<CUstreamCaptureMode *> cuThreadExchangeStreamCaptureMode;

  // The following functions are null if the driver is too old.
  Call<CUkernel, size_t, size_t *, size_t *> cuKernelGetParamInfo; // CUDA 12.4
  // Arguments: tensor map, element type, rank, address, sizes, strides (bytes, from axis 1 on), box, element strides, interleave, swizzle,
  // L2 promotion, fill.
  Call<CUtensorMap *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *, const uint32_t *, int, int, int, int>
      cuTensorMapEncodeTiled;

  int version = 0;  // 13000 for CUDA 13.0
  std::string path; // path of the library
};

// The driver; null if there is none, for the reason of driver_missing(). The library is loaded but not initialised; device.h initialises
// it.
const Driver *driver();
const std::string &driver_missing();

[[noreturn]] void fail(CUresult, const std::string &what);
// Throws with the driver's own name and text of the error. what: the name of the operation.
inline void check(CUresult result, const char *what) {
  if (result != CUDA_SUCCESS) fail(result, what);
}

} // namespace strobe::cuda
