// The GPUs of this machine, and which of them is current.
#pragma once
#include <cstdint>
#include <string>

#include "cuda/driver/driver.h"

namespace strobe::cuda {

struct Device {
  int ordinal;
  CUdevice handle;          // the driver's handle
  int cc;                   // compute capability, 90 for 9.0
  int sms;                  // streaming multiprocessors
  int64_t shared_per_block; // the largest that a launch can opt in to, in bytes
  int64_t shared_per_sm, l2;
  double clock_hz;
  std::string name;
};

// The reason why no GPU can be used; empty if one can. This function and those below initialise the driver, after which a forked child
// cannot use CUDA. Where the answer of driver_missing() is enough, call that first.
std::string devices_missing();
int device_count();
const Device &device(int ordinal); // throws if it does not exist
// A stand-in for planning and compiling without a GPU, with typical values of this compute capability. Its ordinal is -1.
Device described(int cc);

// Makes the device's primary context current during its lifetime. At its end, the caller's context is current again.
class DeviceGuard {
public:
  explicit DeviceGuard(const Device &);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard &) = delete;
  DeviceGuard &operator=(const DeviceGuard &) = delete;

private:
  bool pushed_ = false;
};

} // namespace strobe::cuda
