// The driver: absent, too old, present; devices; contexts; small operations on streams.
#include "cuda/driver/driver.h"

#include <cstdio>

#include "cuda/driver/stream.h"
#include "surroundings.h"

using namespace strobe;
using namespace strobe::cuda;
using namespace strobe::cuda::test;

namespace {

// The output of another program that runs with this libcuda.so.1.
std::string info_with(const std::string &libcuda) {
  const std::string command = "LD_LIBRARY_PATH=" BINARY_FOLDER "/" + libcuda + " " BINARY_FOLDER "/cuda_info";
  FILE *out = popen(command.c_str(), "r");
  REQUIRE(out);
  std::string text;
  char buffer[4096];
  for (size_t n; (n = fread(buffer, 1, sizeof buffer, out)) > 0;) text.append(buffer, n);
  CHECK(pclose(out) == 0);
  return text;
}

CUcontext current() {
  CUcontext context = nullptr;
  check(driver()->cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  return context;
}

} // namespace

TEST_CASE("driver: strobe_cuda_info says what is there, or why it is not") {
  const Compiling c;
  const std::string broken = info_with("broken"), old = info_with("old"), good = info_with("driver");
  CHECK(has(broken, "driver: no NVIDIA driver: "));
  CHECK(has(broken, "libcuda.so.1"));
  CHECK(has(old, "driver: the NVIDIA driver is too old: "));
  CHECK(has(old, "accepted is a driver of CUDA 12.0 or newer"));
  CHECK(has(good, "driver: CUDA 13.2, " BINARY_FOLDER "/driver/libcuda.so.1\n"));
  CHECK(has(good, "device 0: Fake 0, sm_80, 1016 SMs at 1.013 MHz, 163 KiB shared memory per block"));
  CHECK(has(good, "device 1: Fake 1, sm_90, "));
  CHECK(has(good, "NVRTC: 13.7 for sm_80, " + nvrtc_file(13) + "\nNVRTC: 13.7 for sm_90, " + nvrtc_file(13) + "\n"));
  CHECK(has(good, "\ncompiles for: 75, 80, 90, 120\n"));
  CHECK(has(good, "cache: " + c.folder / "cache" + "\n"));
  CHECK(has(broken, "NVRTC: 13.7 for sm_90, "));
  const Variable offline("STROBE_OFFLINE", "1"), none("STROBE_NVRTC", c.folder / "nothing");
  CHECK(has(info_with("driver"), "offline"));
  CHECK(has(info_with("driver"), "no NVRTC that compiles for sm_80"));
  CHECK(has(info_with("driver"), "\ncompiles for: none\n"));
}

TEST_CASE("driver: strobe_cuda_info writes what fits") {
  const Compiling c;
  CHECK(in_child([] { // this initialises the driver
          size_t needed = 0;
          char cut[10];
          if (strobe_cuda_info(cut, sizeof cut, &needed) != STROBE_OK) return std::string("failed");
          return std::string(cut) + "|" + (needed > sizeof cut ? "more" : "all");
        }) == "driver: C|more");
  CHECK(strobe_cuda_info(nullptr, 5, nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(has(strobe_last_error(), "text: null; accepted is memory"));
}

TEST_CASE("driver: a failing cuInit is told") {
  CHECK(in_child([] {
          fake_cuda().init = 100;
          return devices_missing() + "|" + thrown(STROBE_DEVICE_ERROR, [] { device(0); }) + "|" + std::to_string(device_count());
        }) == "cuInit: CUDA_ERROR_PRETENDED (100, a pretended error)|cuInit: CUDA_ERROR_PRETENDED (100, a pretended error)|0");
}

TEST_CASE("driver: what it finds, it does not initialise") {
  CHECK(in_child([] {
          FakeCuda &fake = fake_cuda();
          return std::string(driver() ? "" : driver_missing()) + std::to_string(driver()->version) + " " + std::to_string(fake.inits);
        }) == "13020 0");
}

TEST_CASE("driver: devices") {
  FakeCuda &fake = fake_cuda();
  REQUIRE(device_count() == kFakeDevices);
  CHECK(devices_missing() == "");
  CHECK(device(0).cc == 80);
  const Device &d = device(1);
  CHECK(&d == &device(1));
  CHECK(d.ordinal == 1);
  CHECK(d.handle == 11);
  CHECK(d.cc == 90);
  CHECK(d.name == "Fake 1");
  CHECK(d.sms == 1016);
  CHECK(d.shared_per_block == 163 * 1024);
  CHECK(d.shared_per_sm == 1081);
  CHECK(d.l2 == 1038);
  CHECK(d.clock_hz == 1013e3);
  CHECK(thrown(STROBE_INVALID_ARGUMENT, [] { device(2); }) == "device_index: 2; accepted is 0 to 1");
  CHECK(thrown(STROBE_INVALID_ARGUMENT, [] { device(-1); }) == "device_index: -1; accepted is 0 to 1");
  CHECK(fake.inits == 1);
}

TEST_CASE("driver: a guard makes its device current and gives the caller's back") {
  FakeCuda &fake = fake_cuda();
  const Device &zero = device(0), &one = device(1);
  CHECK(current() == nullptr);
  {
    const DeviceGuard guard(one);
    const CUcontext first = current();
    CHECK(first != nullptr);
    {
      const DeviceGuard other(zero);
      CHECK(current() != first);
      const DeviceGuard again(one);
      CHECK(current() == first);
    }
    CHECK(current() == first);
    const int pushes = fake.pushes;
    const DeviceGuard same(one); // guards the same device and changes nothing
    CHECK(fake.pushes == pushes);
  }
  CHECK(current() == nullptr);
  CHECK(fake.retains == 2); // each device is retained once
}

TEST_CASE("driver: errors carry the driver's words") {
  fake_cuda();
  CHECK(thrown(STROBE_DEVICE_ERROR, [] { check(700, "a launch"); }) == "a launch: CUDA_ERROR_PRETENDED (700, a pretended error)");
  CHECK(thrown(STROBE_OUT_OF_MEMORY, [] { check(CUDA_ERROR_OUT_OF_MEMORY, "x"); }) == "x: CUDA_ERROR_PRETENDED (2, a pretended error)");
  check(CUDA_SUCCESS, "nothing");
}

TEST_CASE("driver: small work on a stream") {
  FakeCuda &fake = fake_cuda();
  char memory[8] = "1234567", read_back[8] = {};
  fill(memory, 0, 3, nullptr);
  fill(nullptr, 0, 0, nullptr);
  const int before = fake.synchronised;
  read(read_back, memory, 8, nullptr);
  CHECK(fake.synchronised == before + 1);
  CHECK(std::string(read_back + 3) == "4567");
  CHECK(read_back[2] == 0);
  CHECK_FALSE(capturing(nullptr));
  fake.capturing = true;
  CHECK(capturing(nullptr));
  fake.capturing = false;
}

TEST_CASE("driver: stand-ins for a compute capability") {
  CHECK(described(90).cc == 90);
  CHECK(described(90).sms == 132);
  CHECK(described(90).shared_per_block == 227 * 1024);
  CHECK(described(120).shared_per_block == 99 * 1024);
  CHECK(described(61).shared_per_block == 48 * 1024);
  CHECK(described(88).cc == 88); // an unknown GPU, described like the newest known GPU before it
  CHECK(described(88).shared_per_block == described(87).shared_per_block);
  CHECK(described(90).ordinal == -1);
  CHECK(thrown(STROBE_UNSUPPORTED, [] { described(37); }) == "compute capability 3.7; accepted is 5.0 or newer");
}
