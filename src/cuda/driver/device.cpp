#include "cuda/driver/device.h"

#include <atomic>
#include <iterator>
#include <vector>

#include "attention/refusal.h"
#include "attention/text.h"
#include "cuda/driver/fork.h"

namespace strobe::cuda {
namespace {

struct Devices {
  std::string missing;
  std::vector<Device> list;
  mutable std::vector<std::atomic<CUcontext>> contexts; // primary contexts, retained at first use and kept
  int forks = cuda::forks();

  Devices() {
    if (!driver()) {
      missing = driver_missing();
      return;
    }
    const Driver &d = *driver();
    try {
      check(d.cuInit(0), "cuInit");
      int count = 0;
      check(d.cuDeviceGetCount(&count), "cuDeviceGetCount");
      for (int i = 0; i < count; i++) list.push_back(describe(d, i));
      if (list.empty()) missing = "the NVIDIA driver sees no GPU";
    } catch (const Error &e) {
      missing = e.what();
      list.clear();
    }
    contexts = std::vector<std::atomic<CUcontext>>(list.size());
  }

  static Device describe(const Driver &d, int ordinal) {
    CUdevice handle = 0;
    check(d.cuDeviceGet(&handle, ordinal), "cuDeviceGet");
    auto get = [&](CUdevice_attribute attribute) {
      int value = 0;
      check(d.cuDeviceGetAttribute(&value, attribute, handle), "cuDeviceGetAttribute");
      return value;
    };
    char name[256] = "";
    check(d.cuDeviceGetName(name, sizeof name, handle), "cuDeviceGetName");
    return {.ordinal = ordinal,
            .handle = handle,
            .cc = 10 * get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) + get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
            .sms = get(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
            .shared_per_block = get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
            .shared_per_sm = get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR),
            .l2 = get(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
            .clock_hz = 1e3 * get(CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
            .name = name};
  }
};

const Devices &devices() {
  static std::atomic<const Devices *> known = nullptr;
  if (const Devices *done = known.load(std::memory_order_acquire)) return *done;
  driver(); // enters the fork gate itself
  const ForkGate gate;
  static const Devices *const once = new Devices; // never destroyed: other threads may still run at exit
  known.store(once, std::memory_order_release);
  return *once;
}

bool forked(const Devices &all) { return !all.list.empty() && all.forks != forks(); }

} // namespace

std::string devices_missing() {
  const Devices &all = devices();
  if (forked(all))
    return "the CUDA driver was initialised before this process was forked, and does not work in the child: start it with spawn";
  return all.missing;
}

int device_count() { return devices_missing().empty() ? static_cast<int>(devices().list.size()) : 0; }

const Device &device(int ordinal) {
  const Devices &all = devices();
  if (all.list.empty() || forked(all)) throw Error(STROBE_DEVICE_ERROR, devices_missing());
  if (ordinal < 0 || static_cast<size_t>(ordinal) >= all.list.size())
    refuse("device_index", Code::value, "{0}; accepted is 0 to {1}", ordinal, all.list.size() - 1);
  return all.list[ordinal];
}

Device described(int cc) {
  constexpr int64_t KiB = 1024, MiB = KiB * KiB;
  static const Device known[] = {
      // cc, SMs, shared memory per block and per SM, L2, clock, the GPU of the row
      {-1, -1, 50, 5, 48 * KiB, 64 * KiB, 2 * MiB, 1.08e9, "GTX 750 Ti"},
      {-1, -1, 52, 24, 48 * KiB, 96 * KiB, 3 * MiB, 1.08e9, "GTX Titan X"},
      {-1, -1, 60, 56, 48 * KiB, 64 * KiB, 4 * MiB, 1.48e9, "P100"},
      {-1, -1, 61, 28, 48 * KiB, 96 * KiB, 2816 * KiB, 1.58e9, "GTX 1080 Ti"},
      {-1, -1, 62, 2, 48 * KiB, 64 * KiB, 512 * KiB, 1.3e9, "Jetson TX2"},
      {-1, -1, 70, 80, 96 * KiB, 96 * KiB, 6 * MiB, 1.53e9, "V100"},
      {-1, -1, 72, 8, 96 * KiB, 96 * KiB, 512 * KiB, 1.38e9, "Jetson Xavier"},
      {-1, -1, 75, 40, 64 * KiB, 64 * KiB, 4 * MiB, 1.59e9, "T4"},
      {-1, -1, 80, 108, 163 * KiB, 164 * KiB, 40 * MiB, 1.41e9, "A100"},
      {-1, -1, 86, 82, 99 * KiB, 100 * KiB, 6 * MiB, 1.7e9, "RTX 3090"},
      {-1, -1, 87, 16, 163 * KiB, 164 * KiB, 4 * MiB, 1.3e9, "Jetson Orin"},
      {-1, -1, 89, 128, 99 * KiB, 100 * KiB, 72 * MiB, 2.52e9, "RTX 4090"},
      {-1, -1, 90, 132, 227 * KiB, 228 * KiB, 50 * MiB, 1.98e9, "H200"},
      {-1, -1, 100, 148, 227 * KiB, 228 * KiB, 126 * MiB, 1.97e9, "B200"},
      {-1, -1, 103, 148, 227 * KiB, 228 * KiB, 126 * MiB, 1.97e9, "B300"},
      {-1, -1, 110, 20, 227 * KiB, 228 * KiB, 32 * MiB, 1.57e9, "Jetson Thor"},
      {-1, -1, 120, 170, 99 * KiB, 100 * KiB, 96 * MiB, 2.41e9, "RTX 5090"},
      {-1, -1, 121, 48, 99 * KiB, 100 * KiB, 24 * MiB, 2.4e9, "GB10"},
  };
  const Device *nearest = nullptr; // the newest device that is not newer than cc, so that it has nothing which cc may lack
  for (const Device &one : known)
    if (one.cc <= cc) nearest = &one;
  if (!nearest) throw Error(STROBE_UNSUPPORTED, text("compute capability ", cc / 10, ".", cc % 10, "; accepted is 5.0 or newer"));
  Device result = *nearest;
  result.name = text(nearest->cc == cc ? "typical sm_" : "assumed sm_", cc, " (", nearest->name, ")");
  result.cc = cc;
  return result;
}

DeviceGuard::DeviceGuard(const Device &device) {
  const Driver &d = *driver();
  std::atomic<CUcontext> &kept = devices().contexts.at(device.ordinal);
  CUcontext primary = kept.load(std::memory_order_acquire), current = nullptr;
  if (!primary) {
    check(d.cuDevicePrimaryCtxRetain(&primary, device.handle), "cuDevicePrimaryCtxRetain");
    kept.store(primary, std::memory_order_release);
  }
  check(d.cuCtxGetCurrent(&current), "cuCtxGetCurrent");
  if (current == primary) return;
  check(d.cuCtxPushCurrent(primary), "cuCtxPushCurrent");
  pushed_ = true;
}

DeviceGuard::~DeviceGuard() {
  CUcontext popped;
  if (pushed_) driver()->cuCtxPopCurrent(&popped);
}

} // namespace strobe::cuda
