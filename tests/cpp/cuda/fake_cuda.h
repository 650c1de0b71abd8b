// The pretended driver's memory, which a test reads and sets.
#pragma once
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/driver/driver.h"

namespace strobe::cuda::test {

struct FakeCuda {
  // what it answers
  std::atomic<CUresult> init = 0, load = 0, launch = 0;
  std::atomic<int> version = 13020, argument_bytes = 16, static_shared = 1024;
  std::atomic<bool> tells_bytes = true;                    // of a kernel's arguments; argument_bytes of each
  std::atomic<bool> capturing = false, init_forks = false; // the latter: as cuInit runs nvidia-modprobe
  // what it was asked
  std::atomic<int> inits = 0, loads = 0, retains = 0, pushes = 0, launches = 0, relaxed = 0, synchronised = 0;
  std::atomic<int> most_shared = -1, most_shared_device = -1;
  std::mutex mutex;    // of all below
  std::string code;    // of the last library
  std::string refused; // code that holds this is no image
  CUlaunchConfig config{};
  std::vector<bool> early; // of each launch
  std::vector<char> arguments;
};

constexpr int kFakeDevices = 2; // sm_80 and sm_90

} // namespace strobe::cuda::test
