// A libnvrtc.so and a libcuda.so.1 in one that compile and run nothing: programs to be compiled go to a folder, launches go to a function.
// compare.py and launches.py build it and read its output.
//   STROBE_RECORD     folder: programs/<hash> is the source, its options and its headers; `order` has a hash a line, one per compilation
//   STROBE_RECORD_CC  compute capability times ten of the one GPU
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

struct Program {
  std::string text, name;
};
struct Function { // a kernel, given by its name and Config
  std::string name;
};

void keep(const std::string &text) {
  const char *folder = std::getenv("STROBE_RECORD");
  if (!folder) return;
  char hash[17];
  std::snprintf(hash, sizeof hash, "%016zx", std::hash<std::string>{}(text));
  std::ofstream(std::filesystem::path(folder) / "programs" / hash) << text;
  std::ofstream(std::filesystem::path(folder) / "order", std::ios::app) << hash << "\n";
}

int cc() {
  const char *given = std::getenv("STROBE_RECORD_CC");
  return given ? std::atoi(given) : 90;
}

// The allocated memory. With it an address in a kernel's arguments can be written as allocation and offset.
std::mutex growing;
std::map<uintptr_t, size_t> *const allocated = new std::map<uintptr_t, size_t>;
std::set<void *> *const tensors = new std::set<void *>;
std::vector<void *> *const later = new std::vector<void *>; // freed, but kept, so that within one call an address belongs to one tensor
thread_local bool within = false;                           // set while the maps themselves allocate

template <class F> void noted(F change) {
  if (within || !later) return; // memory may be allocated before the maps exist
  within = true;
  {
    const std::lock_guard lock(growing);
    change();
  }
  within = false;
}
void *remember(void *memory, size_t bytes) {
  if (memory) noted([&] { (*allocated)[reinterpret_cast<uintptr_t>(memory)] = bytes; });
  return memory;
}
void *forget(void *memory) {
  if (memory) noted([&] { allocated->erase(reinterpret_cast<uintptr_t>(memory)); });
  return memory;
}

// Whether this is the memory of a tensor.
bool kept(void *memory) {
  bool tensor = false;
  noted([&] {
    tensor = tensors->erase(memory) > 0;
    if (tensor) later->push_back(memory);
  });
  return tensor;
}

using Launched = void (*)(const char *kernel, const unsigned *grid_and_block, unsigned shared, int early, const void *arguments);
using Cleared = void (*)(const void *memory, int value, size_t bytes);
Launched launched = nullptr;
Cleared cleared = nullptr;

} // namespace

extern "C" {
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void __libc_free(void *);

// Called by launches.py.
void recorder_listen(Launched launch, Cleared clear) { launched = launch, cleared = clear; }
// The beginning of the allocation that contains an address; 0 if no allocation does.
uintptr_t recorder_allocation(uintptr_t address) {
  const std::lock_guard lock(growing);
  auto next = allocated->upper_bound(address);
  if (next == allocated->begin() || address >= std::prev(next)->first + std::prev(next)->second) return 0;
  return std::prev(next)->first;
}
// Called when a call has ended.
void recorder_release() {
  noted([] {
    for (void *memory : *later) allocated->erase(reinterpret_cast<uintptr_t>(memory)), __libc_free(memory);
    later->clear();
  });
}
int recorder_is_static(uintptr_t address) {
  Dl_info library;
  return dladdr(reinterpret_cast<void *>(address), &library) != 0;
}

// If this library is preloaded, these functions replace those of the C library. Tensors begin at multiples of 256, as on a GPU.
void *malloc(size_t bytes) { return remember(__libc_malloc(bytes), bytes); }
void *calloc(size_t count, size_t bytes) { return remember(__libc_calloc(count, bytes), count * bytes); }
void *realloc(void *memory, size_t bytes) { return remember(__libc_realloc(forget(memory), bytes), bytes); }
void free(void *memory) {
  if (!kept(memory)) __libc_free(forget(memory));
}
void *aligned_alloc(size_t alignment, size_t bytes) {
  void *memory = remember(__libc_memalign(std::max<size_t>(alignment, 256), bytes), bytes);
  noted([&] { tensors->insert(memory); });
  return memory;
}
void *memalign(size_t alignment, size_t bytes) { return aligned_alloc(alignment, bytes); }
int posix_memalign(void **memory, size_t alignment, size_t bytes) {
  *memory = aligned_alloc(alignment, bytes);
  return *memory ? 0 : 12; // ENOMEM
}

int nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, 0; }
int nvrtcGetNumSupportedArchs(int *count) { return *count = 4, 0; }
int nvrtcGetSupportedArchs(int *all) { return all[0] = 75, all[1] = 80, all[2] = 90, all[3] = 120, 0; }
const char *nvrtcGetErrorString(int) { return "an error of the recorder"; }
int nvrtcCreateProgram(Program **out, const char *source, const char *, int count, const char *const *texts, const char *const *names) {
  auto *p = *out = new Program{std::string(source), {}};
  const size_t at = p->text.find("using Kernel = ");
  if (at != std::string::npos) p->name = p->text.substr(at + 15, p->text.find(";\n", at) - at - 15);
  for (int i = 0; i < count; i++) p->text += std::string("\n== header ") + names[i] + "\n" + texts[i];
  return 0;
}
int nvrtcCompileProgram(Program *p, int count, const char *const *options) {
  std::string all;
  for (int i = 0; i < count; i++) all += std::string(i ? " " : "") + options[i];
  return keep(all + "\n" + p->text), 0;
}
// In place of code, the kernel's name.
int nvrtcGetCUBINSize(Program *p, size_t *size) { return *size = p->name.size() + 1, 0; }
int nvrtcGetCUBIN(Program *p, char *to) { return std::memcpy(to, p->name.c_str(), p->name.size() + 1), 0; }
int nvrtcGetProgramLogSize(Program *, size_t *size) { return *size = 1, 0; }
int nvrtcGetProgramLog(Program *, char *to) { return *to = 0, 0; }
int nvrtcDestroyProgram(Program **p) { return delete *p, *p = nullptr, 0; }

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuGetErrorName(int, const char **name) { return *name = "an error of the recorder", 0; }
int cuGetErrorString(int, const char **text) { return *text = "", 0; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGet(int *device, int) { return *device = 0, 0; }
int cuDeviceGetName(char *name, int length, int) { return std::snprintf(name, static_cast<size_t>(length), "recorder"), 0; }
int cuDeviceGetAttribute(int *value, int attribute, int) {
  const int kib = cc() < 80 ? 64 : cc() == 80 ? 164 : cc() == 90 ? 228 : 100;
  switch (attribute) {
  case 13:
    return *value = 1'755'000, 0; // clock rate
  case 16:
    return *value = 132, 0; // multiprocessors
  case 38:
    return *value = 50 << 20, 0; // L2
  case 75:
    return *value = cc() / 10, 0; // compute capability
  case 76:
    return *value = cc() % 10, 0;
  case 81:
    return *value = kib * 1024, 0; // shared memory of a multiprocessor
  case 97:
    return *value = cc() < 80 ? kib * 1024 : kib * 1024 - 1024, 0; // shared memory of a block
  }
  return 1;
}
int cuDevicePrimaryCtxRetain(void **context, int) { return *context = allocated, 0; }
int cuCtxGetCurrent(void **context) { return *context = allocated, 0; }
int cuCtxPushCurrent_v2(void *) { return 0; }
int cuCtxPopCurrent_v2(void **context) { return *context = allocated, 0; }
int cuLibraryLoadData(Function **library, const void *code, void *, void **, unsigned, void *, void **, unsigned) {
  return *library = new Function{static_cast<const char *>(code)}, 0;
}
int cuLibraryUnload(Function *library) { return delete library, 0; }
int cuLibraryGetKernel(Function **kernel, Function *library, const char *) { return *kernel = library, 0; }
int cuKernelGetFunction(Function **function, Function *kernel) { return *function = kernel, 0; }
int cuKernelGetAttribute(int *value, int, Function *, int) { return *value = 0, 0; }
int cuKernelSetAttribute(int, int, Function *, int) { return 0; }
int cuLaunchKernelEx(const void *config, Function *function, void **parameters, void **) {
  struct { // CUlaunchConfig
    unsigned grid_and_block[6], shared;
    void *stream, *attributes;
    unsigned count;
  } c;
  std::memcpy(&c, config, sizeof c);
  if (launched) launched(function->name.c_str(), c.grid_and_block, c.shared, c.count > 0, parameters[0]);
  return 0;
}
int cuMemsetD8Async(unsigned long long memory, unsigned char value, size_t bytes, void *) {
  if (cleared) cleared(reinterpret_cast<void *>(memory), value, bytes);
  return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t bytes, void *) {
  return std::memcpy(to, reinterpret_cast<const void *>(from), bytes), 0;
}
int cuMemAllocAsync(unsigned long long *memory, size_t bytes, void *) {
  void *found = nullptr;
  const int result = posix_memalign(&found, 256, bytes);
  return *memory = reinterpret_cast<unsigned long long>(found), result;
}
int cuMemFreeAsync(unsigned long long memory, void *) { return std::free(reinterpret_cast<void *>(memory)), 0; }
int cuStreamSynchronize(void *) { return 0; }
int cuStreamIsCapturing(void *, int *status) { return *status = 0, 0; }
int cuThreadExchangeStreamCaptureMode(int *) { return 0; }
// In place of a map, the inputs of its encoding.
int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *sizes, const uint64_t *strides,
                           const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
  uint64_t words[16] = {reinterpret_cast<uint64_t>(address)};
  uint64_t n = 1;
  for (uint32_t i = 0; i < rank; i++) words[n++] = sizes[i];
  for (uint32_t i = 1; i < rank; i++) words[n++] = strides[i - 1];
  for (uint32_t i = 0; i < rank; i++) words[n++] = box[i] | uint64_t{steps[i]} << 32;
  words[15] = uint64_t(type) | uint64_t(interleave) << 8 | uint64_t(swizzle) << 16 | uint64_t(promotion) << 24 | uint64_t(fill) << 32;
  return std::memcpy(map, words, sizeof words), 0;
}
}
