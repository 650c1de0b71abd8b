// Checks that need the real NVRTC, which STROBE_TEST_NVRTC names.
#include <chrono>

#include "cuda/compile/nvrtc.h"
#include "surroundings.h"

using namespace strobe;
using namespace strobe::cuda;
using namespace strobe::cuda::test;

namespace {

struct Real : Compiling {
  Variable real{"STROBE_NVRTC", std::getenv("STROBE_TEST_NVRTC")};
};

double milliseconds(const std::function<void()> &f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

} // namespace

// Must be the first test: NVRTC is not loaded yet.
TEST_CASE("real NVRTC: first use and disk hit") {
  const Real r;
  MESSAGE("first use, of " << std::string(std::getenv("STROBE_TEST_NVRTC")) << ": "
                           << milliseconds([] { CHECK(build(plain(1), 90).compiled); }) << " ms");
  MESSAGE("another kernel: " << milliseconds([] { CHECK(build(plain(2), 90).compiled); }) << " ms");
  MESSAGE("disk hit: " << milliseconds([] { CHECK_FALSE(build(plain(1), 90).compiled); }) << " ms");
}

TEST_CASE("real NVRTC: cubins of each architecture, and their facts") {
  const Real r;
  for (int cc : nvrtc(90)->archs) {
    CAPTURE(cc);
    const Build b = build(plain(1), cc);
    CHECK(b.cubin.starts_with("\x7f"
                              "ELF"));
    CHECK(b.registers > 0);
    CHECK(b.registers < 64);
    CHECK(b.spill_bytes == 0);
    CHECK_FALSE(has(b.log, "error"));
  }
}

TEST_CASE("real NVRTC: an error names kernel, file and line") {
  const Real r;
  const KernelSource broken{"test/broken.h", "test::Broken", "test::Config"};
  const std::string message = thrown(STROBE_DEVICE_ERROR, [&] { build(broken, plain(1).integers(), 90); });
  CHECK(has(message, "test::Broken<test::Config{1,2}> for sm_90: nvrtcCompileProgram of NVRTC "));
  CHECK(has(message, "test/broken.h(11): error: "));
  CHECK(has(message, "does_not_compile"));
}

TEST_CASE("real NVRTC: in a child forked after the first use") {
  const Real r;
  build(plain(1), 90);
  CHECK(in_child([] { return build(plain(3), 90).compiled ? "compiled" : "read"; }) == "compiled");
}
