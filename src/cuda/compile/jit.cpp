// Loaded kernels: an open-addressed table that only grows. Readers take no lock.
#include "cuda/compile/jit.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <unordered_set>
#include <vector>

#include "attention/text.h"
#include "cuda/compile/cache.h"
#include "cuda/driver/stream.h"

namespace strobe::cuda {
namespace {

struct Entry {
  const KernelSource *source;
  int ordinal;
  std::vector<int32_t> config;
  Functions functions;
  uint64_t hash;
  Kernel kernel;

  bool is(const KernelSource &s, std::span<const int32_t> c, int o, const Functions &f) const {
    return source == &s && ordinal == o && std::ranges::equal(config, c) && (functions == f || (functions && f && *functions == *f));
  }
};

uint64_t hash_of(const KernelSource &source, std::span<const int32_t> config, int ordinal) {
  uint64_t hash = reinterpret_cast<uintptr_t>(&source) ^ static_cast<uint64_t>(ordinal) << 48;
  for (int32_t value : config) hash = (hash ^ static_cast<uint32_t>(value)) * 0x9E3779B97F4A7C15, hash ^= hash >> 29;
  return hash;
}

class Table {
public:
  explicit Table(size_t size) : slots_(size) {} // size: a power of two

  const Entry *find(uint64_t hash, const KernelSource &source, std::span<const int32_t> config, int ordinal,
                    const Functions &functions) const {
    for (uint64_t i = hash;; i++) {
      const Entry *entry = slots_[i & (slots_.size() - 1)].load(std::memory_order_acquire);
      if (!entry || (entry->hash == hash && entry->is(source, config, ordinal, functions))) return entry;
    }
  }
  void insert(const Entry *entry) {
    for (uint64_t i = entry->hash;; i++)
      if (auto &slot = slots_[i & (slots_.size() - 1)]; !slot.load(std::memory_order_relaxed))
        return slot.store(entry, std::memory_order_release);
  }
  size_t size() const { return slots_.size(); }

private:
  std::vector<std::atomic<const Entry *>> slots_;
};

// Hashes of the kernels that threads are loading. Each kernel is loaded once, but different kernels may load at the same time.
class Loading {
public:
  class Turn {
  public:
    Turn(Loading &all, uint64_t hash) : all_(all), hash_(hash) {
      std::unique_lock lock(all_.mutex_);
      all_.ended_.wait(lock, [&] { return !all_.hashes_.contains(hash); });
      all_.hashes_.insert(hash);
    }
    ~Turn() {
      {
        const std::lock_guard lock(all_.mutex_);
        all_.hashes_.erase(hash_);
      }
      all_.ended_.notify_all();
    }
    Turn(const Turn &) = delete;
    Turn &operator=(const Turn &) = delete;

  private:
    Loading &all_;
    uint64_t hash_;
  };

private:
  std::mutex mutex_;
  std::condition_variable ended_;
  std::unordered_set<uint64_t> hashes_;
};

// Never destroyed: other threads may still run at exit.
struct Kernels {
  std::atomic<Table *> table = new Table(256);
  Loading loading;

  std::mutex growing;
  std::vector<std::unique_ptr<const Entry>> entries;
  std::vector<std::unique_ptr<Table>> outgrown; // some thread may still read these tables

  void insert(std::unique_ptr<const Entry> entry) {
    const std::lock_guard lock(growing);
    Table *now = table.load(std::memory_order_relaxed);
    if (2 * (entries.size() + 1) > now->size()) {
      auto *larger = new Table(2 * now->size());
      for (const auto &old : entries) larger->insert(old.get());
      outgrown.emplace_back(now);
      table.store(now = larger, std::memory_order_release);
    }
    now->insert(entry.get());
    entries.push_back(std::move(entry));
  }
};

Kernels &kernels() {
  static Kernels *const only = new Kernels;
  return *only;
}

// Code on a device, or the driver call that refused the code.
struct OnDevice {
  CUkernel handle = nullptr;
  CUresult result = CUDA_SUCCESS;
  const char *call = nullptr;

  explicit OnDevice(const Build &built) {
    const Driver &d = *driver();
    CUlibrary library = nullptr;
    CUfunction loaded = nullptr; // loads the code now and not in the first launch
    call = "cuLibraryLoadData", result = d.cuLibraryLoadData(&library, built.cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
    if (!result) call = "cuLibraryGetKernel", result = d.cuLibraryGetKernel(&handle, library, "kernel");
    if (!result) call = "cuKernelGetFunction", result = d.cuKernelGetFunction(&loaded, handle);
  }
  // Whether loading failed because of the code itself, so that compiling it again may help.
  bool code_is_wrong() const {
    constexpr CUresult such[] = {CUDA_ERROR_INVALID_IMAGE,           CUDA_ERROR_NO_BINARY_FOR_GPU, CUDA_ERROR_INVALID_PTX,
                                 CUDA_ERROR_UNSUPPORTED_PTX_VERSION, CUDA_ERROR_INVALID_SOURCE,    CUDA_ERROR_NOT_FOUND};
    return std::ranges::find(such, result) != std::end(such);
  }
};

Kernel load_now(const KernelSource &source, std::span<const int32_t> config, const Device &device, const Functions &functions) {
  Build built = build(source, config, device.cc, From::anywhere, functions);
  const Driver &d = *driver();
  Kernel kernel;
  kernel.name = kernel_name(source, config);
  kernel.cc = device.cc;
  auto checked = [&](CUresult result, const char *what) {
    if (result)
      fail(result, text(what, " of ", kernel.name, ", compiled for sm_", device.cc, " by NVRTC ", built.nvrtc,
                        built.file.empty() ? "" : " and found in ", built.file));
  };

  const DeviceGuard current(device);
  const RelaxedCapture relaxed; // the kernel's first call may come within a stream capture
  OnDevice code(built);
  for (From from : {From::own_folder, From::source}) { // the entry may be of any process or package
    if (!code.code_is_wrong() || built.file.empty() || !can_build(device.cc)) break;
    note_refused_code(built.file);
    cache_discard(built);
    built = build(source, config, device.cc, from, functions);
    code = OnDevice(built);
  }
  checked(code.result, code.call);
  const CUkernel handle = code.handle;
  kernel.registers = built.registers, kernel.spill_bytes = built.spill_bytes;
  kernel.function = reinterpret_cast<CUfunction>(handle);

  int fixed = 0;
  checked(d.cuKernelGetAttribute(&fixed, CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, handle, device.handle), "cuKernelGetAttribute");
  kernel.most_shared = std::max<int64_t>(0, device.shared_per_block - fixed);
  checked(
      d.cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(kernel.most_shared), handle, device.handle),
      "cuKernelSetAttribute");
  if (size_t offset = 0; d.cuKernelGetParamInfo)
    checked(d.cuKernelGetParamInfo(handle, 0, &offset, &kernel.argument_bytes), "cuKernelGetParamInfo");
  return kernel;
}

} // namespace

const Kernel *find_loaded(const KernelSource &source, std::span<const int32_t> config, const Device &device, const Functions &functions) {
  const Table *table = kernels().table.load(std::memory_order_acquire);
  const Entry *known = table->find(hash_of(source, config, device.ordinal), source, config, device.ordinal, functions);
  return known ? &known->kernel : nullptr;
}

const Kernel &load(const KernelSource &source, std::span<const int32_t> config, const Device &device, const Functions &functions) {
  if (const Kernel *known = find_loaded(source, config, device, functions)) return *known;
  Kernels &all = kernels();
  const uint64_t hash = hash_of(source, config, device.ordinal);
  cuda::device(device.ordinal); // throws in a forked child: there a thread of the parent may have left a lock locked for ever
  const Loading::Turn turn(all.loading, hash);
  if (const Kernel *known = find_loaded(source, config, device, functions)) return *known;
  std::unique_ptr<const Entry> entry(
      new Entry{&source, device.ordinal, {config.begin(), config.end()}, functions, hash, load_now(source, config, device, functions)});
  const Kernel &kernel = entry->kernel;
  all.insert(std::move(entry));
  return kernel;
}

void load_together(std::span<const KernelName> names, const Device &device) {
  std::vector<std::exception_ptr> errors(names.size());
  auto load_one = [&](size_t i) noexcept {
    try {
      load(*names[i].source, names[i].config, device, names[i].functions);
    } catch (...) {
      errors[i] = std::current_exception();
    }
  };
  std::vector<std::thread> team;
  size_t started = 1; // this thread loads the first kernel
  try {
    for (team.reserve(names.size()); started < names.size(); started++) team.emplace_back(load_one, started);
  } catch (const std::system_error &) {
    // The system has no more threads.
  } catch (const std::bad_alloc &) {}
  if (!names.empty()) load_one(0);
  for (size_t i = started; i < names.size(); i++) load_one(i);
  for (std::thread &thread : team) thread.join();
  for (const std::exception_ptr &error : errors)
    if (error) std::rethrow_exception(error);
}

} // namespace strobe::cuda
