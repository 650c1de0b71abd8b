// The fake driver's state, which a test reads and sets.
#pragma once
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/driver/driver.h"

namespace strobe::cuda::test {

struct FakeCuda {
  // The driver's answers.
  std::atomic<CUresult> init = 0, load = 0, launch = 0;
  std::atomic<int> version = 13020, argument_bytes = 16, static_shared = 1024;
  std::atomic<bool> tells_bytes = true;                    // whether it reports argument_bytes, the size of a kernel's arguments
  std::atomic<bool> capturing = false, init_forks = false; // init_forks: cuInit forks, as it does to run nvidia-modprobe
  // The calls that the driver has got.
  std::atomic<int> inits = 0, loads = 0, retains = 0, pushes = 0, launches = 0, relaxed = 0, synchronised = 0;
  std::atomic<int> most_shared = -1, most_shared_device = -1;
  std::mutex mutex;    // guards all members below
  std::string code;    // the last library that was loaded
  std::string refused; // code that contains this is rejected
  CUlaunchConfig config{};
  std::vector<bool> early; // one flag per launch
  std::vector<char> arguments;
};

constexpr int kFakeDevices = 2; // one of sm_80 and one of sm_90

} // namespace strobe::cuda::test
