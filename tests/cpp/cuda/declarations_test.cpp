// Compares driver.h with NVIDIA's cuda.h: each constant, struct and call is binary compatible.
#include <cuda.h>
#include <doctest/doctest.h>

#include <cstddef>
#include <type_traits>

#include "cuda/driver/driver.h"

namespace {

namespace own = strobe::cuda;

// Arguments must have the same sizes, and integers must match integers.
template <class A, class B> struct Same : std::false_type {};
template <class R, class S, class... A, class... B>
  requires(sizeof...(A) == sizeof...(B))
struct Same<R (*)(A...), S (*)(B...)>
    : std::bool_constant<sizeof(R) == sizeof(S) && ((sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>) && ...)> {};

} // namespace

#define STROBE_SAME_CALL(name) CHECK(Same<decltype(own::Driver::name), decltype(&::name)>::value)
#define STROBE_SAME_VALUE(name) CHECK(int(own::name) == int(::name))

TEST_CASE("declarations: calls") {
  STROBE_SAME_CALL(cuInit);
  STROBE_SAME_CALL(cuDriverGetVersion);
  STROBE_SAME_CALL(cuGetErrorName);
  STROBE_SAME_CALL(cuGetErrorString);
  STROBE_SAME_CALL(cuDeviceGetCount);
  STROBE_SAME_CALL(cuDeviceGet);
  STROBE_SAME_CALL(cuDeviceGetName);
  STROBE_SAME_CALL(cuDeviceGetAttribute);
  STROBE_SAME_CALL(cuDevicePrimaryCtxRetain);
  STROBE_SAME_CALL(cuCtxGetCurrent);
  STROBE_SAME_CALL(cuCtxPopCurrent);
  STROBE_SAME_CALL(cuCtxPushCurrent);
  STROBE_SAME_CALL(cuLibraryGetKernel);
  STROBE_SAME_CALL(cuLibraryLoadData);
  STROBE_SAME_CALL(cuKernelGetFunction);
  STROBE_SAME_CALL(cuKernelGetAttribute);
  STROBE_SAME_CALL(cuKernelSetAttribute);
  STROBE_SAME_CALL(cuKernelGetParamInfo);
  STROBE_SAME_CALL(cuLaunchKernelEx);
  STROBE_SAME_CALL(cuMemsetD8Async);
  STROBE_SAME_CALL(cuMemcpyDtoHAsync);
  STROBE_SAME_CALL(cuMemAllocAsync);
  STROBE_SAME_CALL(cuMemFreeAsync);
  STROBE_SAME_CALL(cuStreamSynchronize);
  STROBE_SAME_CALL(cuStreamIsCapturing);
  STROBE_SAME_CALL(cuThreadExchangeStreamCaptureMode);
  STROBE_SAME_CALL(cuTensorMapEncodeTiled);
}

TEST_CASE("declarations: values") {
  STROBE_SAME_VALUE(CUDA_SUCCESS);
  STROBE_SAME_VALUE(CUDA_ERROR_OUT_OF_MEMORY);
  STROBE_SAME_VALUE(CUDA_ERROR_NOT_INITIALIZED);
  STROBE_SAME_VALUE(CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
  STROBE_SAME_VALUE(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  STROBE_SAME_VALUE(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
  STROBE_SAME_VALUE(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  STROBE_SAME_VALUE(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  STROBE_SAME_VALUE(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
  STROBE_SAME_VALUE(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  STROBE_SAME_VALUE(CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES);
  STROBE_SAME_VALUE(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);
  STROBE_SAME_VALUE(CU_STREAM_CAPTURE_STATUS_NONE);
  STROBE_SAME_VALUE(CU_STREAM_CAPTURE_MODE_RELAXED);
  STROBE_SAME_VALUE(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
}

TEST_CASE("declarations: structs") {
  CHECK(sizeof(own::CUlaunchConfig) == sizeof(::CUlaunchConfig));
  CHECK(offsetof(own::CUlaunchConfig, sharedMemBytes) == offsetof(::CUlaunchConfig, sharedMemBytes));
  CHECK(offsetof(own::CUlaunchConfig, hStream) == offsetof(::CUlaunchConfig, hStream));
  CHECK(offsetof(own::CUlaunchConfig, attrs) == offsetof(::CUlaunchConfig, attrs));
  CHECK(offsetof(own::CUlaunchConfig, numAttrs) == offsetof(::CUlaunchConfig, numAttrs));
  CHECK(sizeof(own::CUlaunchAttribute) == sizeof(::CUlaunchAttribute));
  CHECK(offsetof(own::CUlaunchAttribute, value) == offsetof(::CUlaunchAttribute, value));
  CHECK(sizeof(own::CUtensorMap) == sizeof(::CUtensorMap));
  CHECK(alignof(own::CUtensorMap) % alignof(::CUtensorMap) == 0); // 64 in CUDA 12, 128 in 13
}
