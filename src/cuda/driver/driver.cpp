#include "cuda/driver/driver.h"

#include <dlfcn.h>

#include <atomic>

#include "attention/text.h"
#include "cuda/driver/fork.h"

namespace strobe::cuda {
namespace {

struct LoadedDriver {
  Driver driver{};
  std::string missing;

  LoadedDriver() {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      missing = text("no NVIDIA driver: ", dlerror());
      return;
    }
    std::string absent;
    auto find = [&](auto &function, const char *name, bool needed = true) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (!function && needed && absent.empty()) absent = name;
    };
    Driver &d = driver;
    find(d.cuInit, "cuInit");
    find(d.cuDriverGetVersion, "cuDriverGetVersion");
    find(d.cuGetErrorName, "cuGetErrorName");
    find(d.cuGetErrorString, "cuGetErrorString");
    find(d.cuDeviceGetCount, "cuDeviceGetCount");
    find(d.cuDeviceGet, "cuDeviceGet");
    find(d.cuDeviceGetName, "cuDeviceGetName");
    find(d.cuDeviceGetAttribute, "cuDeviceGetAttribute");
    find(d.cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    find(d.cuCtxGetCurrent, "cuCtxGetCurrent");
    find(d.cuCtxPopCurrent, "cuCtxPopCurrent_v2");
    find(d.cuCtxPushCurrent, "cuCtxPushCurrent_v2");
    find(d.cuLibraryLoadData, "cuLibraryLoadData");
    find(d.cuLibraryGetKernel, "cuLibraryGetKernel");
    find(d.cuKernelGetFunction, "cuKernelGetFunction");
    find(d.cuKernelGetAttribute, "cuKernelGetAttribute");
    find(d.cuKernelSetAttribute, "cuKernelSetAttribute");
    find(d.cuLaunchKernelEx, "cuLaunchKernelEx");
    find(d.cuMemsetD8Async, "cuMemsetD8Async");
    find(d.cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2");
    find(d.cuMemAllocAsync, "cuMemAllocAsync");
    find(d.cuMemFreeAsync, "cuMemFreeAsync");
    find(d.cuStreamSynchronize, "cuStreamSynchronize");
    find(d.cuStreamIsCapturing, "cuStreamIsCapturing");
    find(d.cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
    find(d.cuKernelGetParamInfo, "cuKernelGetParamInfo", false);
    find(d.cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled", false);

    if (d.cuDriverGetVersion) d.cuDriverGetVersion(&d.version);
    Dl_info where;
    d.path = d.cuInit && dladdr(reinterpret_cast<void *>(d.cuInit), &where) ? where.dli_fname : "libcuda.so.1";
    if (!absent.empty())
      missing = text("the NVIDIA driver is too old: ", d.path, " has no ", absent, "; accepted is a driver of CUDA 12.0 or newer");
  }
};

const LoadedDriver &loaded() {
  static std::atomic<const LoadedDriver *> known = nullptr;
  if (const LoadedDriver *done = known.load(std::memory_order_acquire)) return *done;
  const ForkGate gate;
  static const LoadedDriver *const once = new LoadedDriver; // never destroyed: other threads may still run at exit
  known.store(once, std::memory_order_release);
  return *once;
}

} // namespace

const Driver *driver() { return loaded().missing.empty() ? &loaded().driver : nullptr; }
const std::string &driver_missing() { return loaded().missing; }

void fail(CUresult result, const std::string &what) {
  const char *name = nullptr, *words = nullptr;
  if (const Driver *d = driver()) {
    d->cuGetErrorName(result, &name);
    d->cuGetErrorString(result, &words);
  }
  std::string message = text(what, ": ", name ? name : "CUDA error", " (", result, words ? ", " : "", words ? words : "", ")");
  if (result == CUDA_ERROR_NOT_INITIALIZED && forks() > 0)
    message += "; the CUDA driver was initialised before this process was forked, and does not work in the child: start it with spawn";
  throw Error(result == CUDA_ERROR_OUT_OF_MEMORY ? STROBE_OUT_OF_MEMORY : STROBE_DEVICE_ERROR, message);
}

} // namespace strobe::cuda
