// The state of the fake driver. Tests read and set it.
#pragma once
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/driver/driver.h"

namespace strobe::cuda::test {

struct FakeCuda {
  // What the driver's calls return.
  std::atomic<CUresult> init = 0, load = 0, launch = 0;
  std::atomic<int> version = 13020, argument_bytes = 16, static_shared = 1024;
  std::atomic<bool> tells_bytes = true;                    // whether the driver reports argument_bytes, the size of a kernel's arguments
  std::atomic<bool> capturing = false, init_forks = false; // init_forks: cuInit forks, as it does to run nvidia-modprobe
  // How many calls the driver has received.
  std::atomic<int> inits = 0, loads = 0, retains = 0, pushes = 0, launches = 0, relaxed = 0, synchronised = 0;
  std::atomic<int> most_shared = -1, most_shared_device = -1;
  std::mutex mutex;    // guards the members below
  std::string code;    // the library that was loaded last
  std::string refused; // code that contains this text is rejected
  CUlaunchConfig config{};
  std::vector<bool> early; // one flag per launch
  std::vector<char> arguments;
};

constexpr int kFakeDevices = 2; // one of sm_80 and one of sm_90

} // namespace strobe::cuda::test
