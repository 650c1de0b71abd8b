// Kernels: compiled for a GPU when first needed, kept on disk and in memory, launched.
// A kernel is a template over one Config in a header of kernels/, with
//   struct Arguments                          passed by value (__grid_constant__)
//   static constexpr int kThreads, kBlocksPerSm
//   __device__ static void run(const Arguments &)
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>

#include "cuda/driver/device.h"

namespace strobe::cuda {

// A kernel's template. Each KernelSource lies in static storage, so that its address identifies it.
struct KernelSource {
  const char *header;    // below kernels/: "simt/forward.h"
  const char *entry;     // the template: "strobe::simt::Forward"
  const char *config;    // the type of its parameter: "strobe::simt::Config"
  bool specific = false; // the kernel uses instructions of one architecture only, e.g. sm_90a and not sm_90
};

// A Config is a struct of int32_t. It prints as a list of its integers; its bytes are the key.
template <class Config> struct KernelKey {
  static_assert(std::is_trivially_copyable_v<Config> && std::has_unique_object_representations_v<Config> && alignof(Config) == 4);
  const KernelSource *source;
  Config config;

  std::span<const int32_t> integers() const { return {reinterpret_cast<const int32_t *>(&config), sizeof(Config) / 4}; }
};

struct Build {
  std::string cubin, log; // log: the output of NVRTC and ptxas
  int32_t registers = 0, spill_bytes = 0;
  std::string nvrtc;     // the version of NVRTC
  bool compiled = false; // compiled now, not found in a cache
  std::string file;      // the cache file, if the build came from one
};
enum class From { anywhere, own_folder, source }; // own_folder: not from folders that are only read; source: compiled now
// The source of the caller's functions, which a kernel includes as "score/program.h"; null: the kernel calls none. The source's hash is in
// the Config; another source may share it, so a kernel is known by the source itself.
using Functions = std::shared_ptr<const std::string>;
// Compiles a kernel, or reads it from the disk cache. Needs no GPU.
Build build(const KernelSource &, std::span<const int32_t> config, int cc, From = From::anywhere, const Functions & = nullptr);
// Whether build() would find the kernel in a cache.
bool is_kept(const KernelSource &, std::span<const int32_t> config, int cc, const Functions & = nullptr);
// Whether there is a compiler for this compute capability, and STROBE_OFFLINE permits its use.
bool can_build(int cc);
template <class Config> Build build(const KernelKey<Config> &key, int cc) { return build(*key.source, key.integers(), cc); }
// "strobe::simt::Forward<strobe::simt::Config{1,2,3}>"
std::string kernel_name(const KernelSource &, std::span<const int32_t> config);

// A kernel on one device. It exists as long as the process.
struct Kernel {
  std::string name;
  CUfunction function = nullptr; // a CUkernel, which belongs to no context
  int cc = 0;
  int registers = 0, spill_bytes = 0;
  int64_t most_shared = 0;   // bytes of dynamic shared memory that a launch may request
  size_t argument_bytes = 0; // 0: the driver is too old to report it
};
// Loads a kernel, once per device. Later calls look it up without a lock.
const Kernel &load(const KernelSource &, std::span<const int32_t> config, const Device &, const Functions & = nullptr);
template <class Config> const Kernel &load(const KernelKey<Config> &key, const Device &device) {
  return load(*key.source, key.integers(), device);
}
// The kernel if it has been loaded, else null. Takes no lock.
const Kernel *find_loaded(const KernelSource &, std::span<const int32_t> config, const Device &, const Functions & = nullptr);
struct KernelName {
  const KernelSource *source;
  std::span<const int32_t> config;
  Functions functions{};
};
// Loads kernels, each in its own thread, because a compilation occupies a core for a second or two. Throws the exception of the first
// kernel that fails.
void load_together(std::span<const KernelName>, const Device &);

struct Grid {
  int64_t x = 1, y = 1, z = 1;
};
// Launches in the current context (DeviceGuard). An empty grid launches nothing. early, from compute capability 9.0 on: thread blocks may
// begin as soon as all blocks of the previous kernel have begun; they wait for that kernel's end before they use its results (build.cpp).
void launch(const Kernel &, Grid, int threads, int64_t shared_bytes, CUstream, const void *arguments, size_t argument_bytes,
            bool early = false);

} // namespace strobe::cuda
