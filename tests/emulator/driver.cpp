// A libcuda.so.1 with one emulated GPU and the functions that Strobe calls. Device pointers are host pointers, and a call returns when its
// work is done. Newly allocated memory holds NaN. Environment variables, read once:
//   STROBE_EMULATOR_CC     compute capability times ten; 90 if not set
//   STROBE_EMULATOR_SMS    streaming multiprocessors; 4
//   STROBE_EMULATOR_FEW_BITS   1: sums of FP8 products are truncated as Hopper's are
//   STROBE_EMULATOR_LATE   1: asynchronous copies and products happen as late as the program's waits permit
//   STROBE_EMULATOR_RACES  1: look for races in shared memory
//   STROBE_EMULATOR_EDIT   a change of a kernel's source, in controls/ (nvrtc.cpp)
//   STROBE_EMULATOR_SEED   not 0: the seed of the order in which warps run
//   STROBE_EMULATOR_IDLE   1: an H200 that accepts any code and runs none, so that kernels are compiled for a GPU without one
#include "cuda/driver/driver.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <span>
#include <unordered_map>
#include <utility>

#include "emulator.h"
#include "tensor_map.h"

using namespace strobe::cuda;
using namespace strobe::emulator;

namespace {

enum : CUresult {
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_LAUNCH_FAILED = 719,
};

int setting(const char *name, int otherwise) {
  const char *value = std::getenv(name);
  return value && *value ? std::atoi(value) : otherwise;
}

struct Gpu {
  bool idle = setting("STROBE_EMULATOR_IDLE", 0);
  int cc = setting("STROBE_EMULATOR_CC", 90), sms = setting("STROBE_EMULATOR_SMS", idle ? 132 : 4);
  bool late = setting("STROBE_EMULATOR_LATE", 0), races = setting("STROBE_EMULATOR_RACES", 0);
  bool few_bits = setting("STROBE_EMULATOR_FEW_BITS", 0);
  uint32_t seed = static_cast<uint32_t>(setting("STROBE_EMULATOR_SEED", 0));

  size_t shared_per_multiprocessor() const {
    const size_t kib = cc < 75 ? 96 : cc < 80 ? 64 : cc == 80 || cc == 87 ? 164 : cc < 90 || cc >= 120 ? 100 : 228;
    return kib * 1024;
  }
  size_t shared_per_block() const {
    return cc < 70 ? 48 * 1024 : cc < 80 ? shared_per_multiprocessor() : shared_per_multiprocessor() - 1024;
  }
};
const Gpu &gpu() {
  static const Gpu only;
  return only;
}

thread_local std::string words; // the text of the last error
thread_local int pushed = 0;
thread_local CUstreamCaptureMode mode{};
std::mutex one_at_a_time;

// Memory ends at an unmapped page, so that a kernel that exceeds its workspace faults.
constexpr size_t kPage = 4096, kBeyond = 64 << 20;
std::unordered_map<CUdeviceptr, std::span<std::byte>> allocated;

CUresult error(CUresult result, std::string what) { return words = std::move(what), result; }
CUcontext context() { return reinterpret_cast<CUcontext>(&words); }

struct Library;
struct Function {
  Library &library;
  std::string name;
  KernelInfo info;
  size_t most_dynamic = 48 * 1024;
};
struct Library {
  std::shared_ptr<const Module> module;
  std::deque<Function> functions;
};
Function &function(CUkernel kernel) { return *reinterpret_cast<Function *>(kernel); }

void launch(const CUlaunchConfig &c, const Function &f, void **parameters) {
  if (gpu().idle) return;
  std::vector<std::byte> arguments(f.info.argument_bytes);
  for (size_t n = 0; n < f.info.parameters.size(); n++)
    std::memcpy(arguments.data() + f.info.parameters[n].offset, parameters[n], f.info.parameters[n].bytes);
  const size_t shared = f.info.static_shared + c.sharedMemBytes + 1024, threads = size_t{c.blockDimX} * c.blockDimY * c.blockDimZ;
  const size_t resident = std::clamp<size_t>(std::min(gpu().shared_per_multiprocessor() / shared, 2048 / threads), 1, 2);
  const Launch work = {.grid = {c.gridDimX, c.gridDimY, c.gridDimZ},
                       .block = {c.blockDimX, c.blockDimY, c.blockDimZ},
                       .dynamic_shared = c.sharedMemBytes,
                       .arguments = arguments.data()};
  const Machine machine = {.multiprocessors = static_cast<uint32_t>(gpu().sms),
                           .blocks_per_multiprocessor = static_cast<uint32_t>(resident),
                           .late = gpu().late,
                           .few_bits = gpu().few_bits,
                           .races = gpu().races,
                           .seed = gpu().seed};
  const std::lock_guard lock(one_at_a_time);
  run(*f.library.module, f.name, work, machine);
}

} // namespace

extern "C" {

CUresult cuInit(unsigned) {
  if (gpu().cc < 50 || gpu().sms < 1) return error(CUDA_ERROR_INVALID_VALUE, "STROBE_EMULATOR_CC or STROBE_EMULATOR_SMS: no such GPU");
  return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int *version) { return *version = 13000, CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult result, const char **name) {
  *name = result == CUDA_ERROR_LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : "error of the emulator";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char **text) { return *text = words.c_str(), CUDA_SUCCESS; }

CUresult cuDeviceGetCount(int *count) { return *count = 1, CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int) { return *device = 0, CUDA_SUCCESS; }
CUresult cuDeviceGetName(char *name, int length, CUdevice) {
  return std::snprintf(name, static_cast<size_t>(length), "emulated sm_%d", gpu().cc), CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
    return *value = gpu().idle ? 1'980'000 : 1'000'000, CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
    return *value = gpu().sms, CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE:
    return *value = gpu().idle ? 60 << 20 : 1 << 20, CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
    return *value = gpu().cc / 10, CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
    return *value = gpu().cc % 10, CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR:
    return *value = static_cast<int>(gpu().shared_per_multiprocessor()), CUDA_SUCCESS;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
    return *value = static_cast<int>(gpu().shared_per_block()), CUDA_SUCCESS;
  }
  return error(CUDA_ERROR_INVALID_VALUE, "an attribute that the emulator does not know");
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *primary, CUdevice) { return *primary = context(), CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *current) { return *current = pushed ? context() : nullptr, CUDA_SUCCESS; }
CUresult cuCtxPushCurrent_v2(CUcontext) { return pushed++, CUDA_SUCCESS; }
CUresult cuCtxPopCurrent_v2(CUcontext *popped) { return pushed--, *popped = context(), CUDA_SUCCESS; }

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, void *, void **, unsigned, void *, void **, unsigned) {
  try {
    auto loaded = std::make_unique<Library>(gpu().idle ? nullptr : parse(static_cast<const char *>(code)));
    return *library = reinterpret_cast<CUlibrary>(loaded.release()), CUDA_SUCCESS;
  } catch (const Fault &fault) {
    return error(CUDA_ERROR_INVALID_PTX, fault.what());
  }
}
CUresult cuLibraryUnload(CUlibrary library) { return delete reinterpret_cast<Library *>(library), CUDA_SUCCESS; }
CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary handle, const char *name) {
  Library &library = *reinterpret_cast<Library *>(handle);
  try {
    library.functions.push_back({library, name, gpu().idle ? KernelInfo{} : kernel_info(*library.module, name)});
    return *kernel = reinterpret_cast<CUkernel>(&library.functions.back()), CUDA_SUCCESS;
  } catch (const Fault &fault) {
    return error(CUDA_ERROR_NOT_FOUND, fault.what());
  }
}
CUresult cuKernelGetFunction(CUfunction *loaded, CUkernel kernel) { return *loaded = reinterpret_cast<CUfunction>(kernel), CUDA_SUCCESS; }
CUresult cuKernelGetAttribute(int *value, CUfunction_attribute, CUkernel kernel, CUdevice) {
  return *value = static_cast<int>(function(kernel).info.static_shared), CUDA_SUCCESS;
}
CUresult cuKernelSetAttribute(CUfunction_attribute, int value, CUkernel kernel, CUdevice) {
  if (value < 0 || static_cast<size_t>(value) + function(kernel).info.static_shared > gpu().shared_per_block())
    return error(CUDA_ERROR_INVALID_VALUE, "more shared memory than the GPU has");
  return function(kernel).most_dynamic = static_cast<size_t>(value), CUDA_SUCCESS;
}
CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *size) {
  if (gpu().idle) return *offset = *size = 0, CUDA_SUCCESS; // an idle GPU knows no parameters of code
  const std::vector<Parameter> &all = function(kernel).info.parameters;
  if (index >= all.size()) return error(CUDA_ERROR_INVALID_VALUE, "no parameter of this index");
  return *offset = all[index].offset, *size = all[index].bytes, CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction launched, void **parameters, void **) {
  const Function &f = function(reinterpret_cast<CUkernel>(launched));
  if (config->sharedMemBytes > f.most_dynamic)
    return error(CUDA_ERROR_INVALID_VALUE, "more dynamic shared memory than the kernel may have");
  try {
    return launch(*config, f, parameters), CUDA_SUCCESS;
  } catch (const Fault &fault) {
    return error(CUDA_ERROR_LAUNCH_FAILED, fault.what());
  }
}

CUresult cuMemsetD8Async(CUdeviceptr memory, unsigned char value, size_t bytes, CUstream) {
  return std::memset(reinterpret_cast<void *>(memory), value, bytes), CUDA_SUCCESS;
}
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream) {
  return std::memcpy(to, reinterpret_cast<const void *>(from), bytes), CUDA_SUCCESS;
}
CUresult cuMemAllocAsync(CUdeviceptr *memory, size_t bytes, CUstream) {
  const size_t pages = (bytes + kPage - 1) / kPage * kPage, before = (pages - bytes) / 256 * 256;
  void *mapped = mmap(nullptr, pages + kBeyond, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return error(CUDA_ERROR_OUT_OF_MEMORY, "no memory");
  std::byte *begin = static_cast<std::byte *>(mapped);
  munmap(begin + pages, kBeyond);
  std::memset(begin, 0xFF, pages);
  *memory = reinterpret_cast<CUdeviceptr>(begin + before);
  const std::lock_guard lock(one_at_a_time);
  return allocated[*memory] = {begin, pages}, CUDA_SUCCESS;
}
CUresult cuMemFreeAsync(CUdeviceptr memory, CUstream) {
  const std::lock_guard lock(one_at_a_time);
  const auto found = allocated.find(memory);
  if (found == allocated.end()) return error(CUDA_ERROR_INVALID_VALUE, "memory that was not allocated");
  munmap(found->second.data(), found->second.size());
  return allocated.erase(found), CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus *status) { return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS; }
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *wanted) { return std::swap(*wanted, mode), CUDA_SUCCESS; }

// Refuses those requests of Strobe that the driver's documentation forbids.
CUresult cuTensorMapEncodeTiled(CUtensorMap *encoded, int type, uint32_t rank, void *address, const uint64_t *sizes,
                                const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int,
                                int fill) {
  constexpr int kFloat16 = 6, kBfloat16 = 9, kNoSwizzle = 0, kSwizzle128 = 3;
  auto refuse = [](const char *what) { return error(CUDA_ERROR_INVALID_VALUE, std::string("a tensor map of ") + what); };
  TensorMap map{};
  map.magic = TensorMap::kMagic, map.element_bytes = 2, map.swizzled = swizzle == kSwizzle128;
  map.address = reinterpret_cast<uint64_t>(address);
  if (type != kFloat16 && type != kBfloat16) return refuse("an element type that the emulator does not know");
  if (interleave || fill || (swizzle != kNoSwizzle && swizzle != kSwizzle128)) return refuse("a layout that the emulator does not know");
  if (rank < 1 || rank > TensorMap::kMostRank) return refuse("more than 5 axes or none");
  if (map.address % 16) return refuse("an address that is no multiple of 16");
  map.rank = static_cast<uint8_t>(rank);
  for (uint32_t axis = 0; axis < rank; axis++) {
    map.sizes[axis] = sizes[axis], map.box[axis] = box[axis];
    if (!sizes[axis] || sizes[axis] > uint64_t{1} << 32) return refuse("an axis of no or of more than 2^32 elements");
    if (!box[axis] || box[axis] > 256 || steps[axis] != 1) return refuse("a box of no or more than 256 elements, or with steps");
    if (axis == 0) continue;
    map.strides[axis] = strides[axis - 1];
    if (strides[axis - 1] % 16 || strides[axis - 1] >= uint64_t{1} << 40) return refuse("a stride that is no multiple of 16 below 2^40");
  }
  const uint32_t row = box[0] * map.element_bytes;
  if (row % 16 || (map.swizzled && row > 128)) return refuse("a box whose rows are no multiple of 16 bytes, or wider than its swizzle");
  return std::memcpy(encoded, &map, sizeof map), CUDA_SUCCESS;
}
}
