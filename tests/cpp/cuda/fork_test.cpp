// Children that are forked before the first use, after it, and in the middle of it.
#include <thread>

#include "surroundings.h"

using namespace strobe;
using namespace strobe::cuda;
using namespace strobe::cuda::test;

namespace {

std::string built_in_child(int add) {
  return in_child([=] { return build(plain(add), 90).compiled ? "compiled" : "read"; });
}

// A child inherits AddressSanitizer's allocator. If another thread was in the allocator, it stays locked, and the child waits for ever
// (seen with GCC 12).
#ifdef __SANITIZE_ADDRESS__
constexpr bool kAllocatorForks = false;
#else
constexpr bool kAllocatorForks = true;
#endif

} // namespace

// Must be the first test: nothing is loaded yet.
TEST_CASE("fork: before and after the first compilation") {
  const Compiling c;
  CHECK(built_in_child(1) == "compiled");
  CHECK(built_in_child(1) == "read");
  CHECK_FALSE(build(plain(1), 90).compiled);
  CHECK(build(plain(2), 90).compiled);
  CHECK(built_in_child(2) == "read");
  CHECK(built_in_child(3) == "compiled");
  CHECK_FALSE(build(plain(3), 90).compiled);
  CHECK(c.compiled() == 3);
}

TEST_CASE("fork: while other threads compile" * doctest::skip(!kAllocatorForks)) {
  const Compiling c;
  std::atomic<bool> stop = false;
  std::vector<std::thread> busy;
  for (int t = 0; t < 2; t++)
    busy.emplace_back([&, t] {
      for (int i = 0; !stop; i++) build(plain(1000 * (t + 1) + i), 90);
    });
  for (int i = 0; i < 10; i++) {
    CHECK(built_in_child(i) == "compiled");
    CHECK(in_child([] { return build(plain(1000), 90).nvrtc; }) == "13.7"); // another thread may be compiling
  }
  stop = true;
  for (std::thread &thread : busy) thread.join();
}

// Must come before this process initialises the driver.
TEST_CASE("fork: by the driver itself, in a thread that is within") {
  const Compiling c;
  fake_cuda().init_forks = true;
  CHECK(in_child([] { return std::to_string(device_count()); }) == "2");
  CHECK(in_child([] { return std::to_string(load(plain(1), device(1)).registers); }) == "42");
  fake_cuda().init_forks = false;
}

TEST_CASE("fork: the driver works in a child if it was not initialised before, else the error says why it does not") {
  const Compiling c;
  fake_cuda();
  auto use = [] { return std::to_string(load(plain(1), device(1)).registers); };
  CHECK(in_child(use) == "42");
  CHECK(use() == "42");
  const std::string forked = "the CUDA driver was initialised before this process was forked, and does not work in the child";
  CHECK(has(in_child([] { return devices_missing(); }), forked));
  CHECK(in_child([] { return std::to_string(device_count()); }) == "0");
  CHECK(has(in_child([] { return load(plain(2), device(1)).name; }), forked));
  const Device &here = device(1);
  CHECK(has(in_child([&] { return load(plain(2), here).name; }), forked));
  const Kernel &kernel = load(plain(1), here); // the child launches this kernel without looking it up again
  CHECK(has(in_child([&] {
              const char arguments[16] = {};
              launch(kernel, {}, 128, 0, nullptr, arguments, sizeof arguments);
              return std::string("launched");
            }),
            forked));
  CHECK(use() == "42");
}
