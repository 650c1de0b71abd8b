// The GPUs of this machine, and which of them is current.
#pragma once
#include <cstdint>
#include <string>

#include "cuda/driver/driver.h"

namespace strobe::cuda {

struct Device {
  int ordinal;
  CUdevice handle;          // the driver's own number for it
  int cc;                   // compute capability, 90 for 9.0
  int sms;                  // streaming multiprocessors
  int64_t shared_per_block; // bytes, by opt-in
  int64_t shared_per_sm, l2;
  double clock_hz;
  std::string name;
};

// Why no GPU can be used; empty if one can. This and all below initialises the driver, after which a forked child cannot use CUDA, so ask
// driver_missing() first where that is enough.
std::string devices_missing();
int device_count();
const Device &device(int ordinal); // throws if there is none such
// A stand-in for planning and compiling where there is no GPU: what is typical of this compute capability. Its ordinal is -1.
Device described(int cc);

// Makes the device's primary context current for its lifetime, then the caller's again.
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
