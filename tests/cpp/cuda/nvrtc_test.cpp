// The choice of NVRTC, the message if there is none, and the report of a failed compilation.
#include "cuda/compile/nvrtc.h"

#include "surroundings.h"

using namespace strobe;
using namespace strobe::cuda;
using namespace strobe::cuda::test;

namespace {

std::string folder_of(int major) { return fs::path(nvrtc_file(major)).parent_path().string(); }
int chosen(int cc) { return nvrtc(cc) ? nvrtc(cc)->major : 0; }

} // namespace

// Must be the first test: the driver is not loaded yet.
TEST_CASE("nvrtc: none newer than the driver can follow") {
  const Variable both("STROBE_NVRTC", folder_of(12) + ":" + folder_of(13));
  CHECK(in_child([] {
          fake_cuda().version = 12080;
          return std::to_string(chosen(90)) + " " + std::to_string(driver_follows(13));
        }) == "12 0");
  const Variable one("STROBE_NVRTC", nvrtc_file(13));
  CHECK(has(in_child([] {
              fake_cuda().version = 12080;
              return nvrtc_missing(90);
            }),
            nvrtc_file(13) + " is NVRTC 13.7, newer than the driver (CUDA 12)"));
  CHECK(chosen(90) == 13);
}

TEST_CASE("nvrtc: the newest that compiles for the GPU") {
  const Variable both("STROBE_NVRTC", folder_of(12) + ":" + folder_of(13));
  CHECK(chosen(90) == 13);
  CHECK(chosen(75) == 13);
  CHECK(chosen(70) == 12);
  CHECK(chosen(61) == 12);
  CHECK(chosen(100) == 0);
  CHECK(nvrtc(90) == nvrtc(80)); // the library is loaded once
  CHECK(nvrtc(90)->path == nvrtc_file(13));
  const Variable one("STROBE_NVRTC", nvrtc_file(12));
  CHECK(chosen(90) == 12);
}

TEST_CASE("nvrtc: as wheels lay it out") {
  const Folder folder;
  const Variable named("STROBE_NVRTC", folder.path());
  CHECK(chosen(90) == 0);
  fs::create_directories(folder / "nvidia/cuda_nvrtc/lib");
  fs::copy(nvrtc_file(12), folder / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12");
  CHECK(chosen(90) == 12);
  fs::create_directories(folder / "nvidia/cu13/lib");
  fs::copy(nvrtc_file(13), folder / "nvidia/cu13/lib/libnvrtc.so.13");
  CHECK(chosen(90) == 13);
}

TEST_CASE("nvrtc: beside a library of the process, and in CUDA_HOME") {
  const Folder folder;
  const Variable unnamed("STROBE_NVRTC", nullptr), home("CUDA_HOME", folder / "toolkit");
  fs::create_directories(folder / "toolkit/lib64");
  fs::copy(nvrtc_file(13), folder / "toolkit/lib64/libnvrtc.so.13");
  REQUIRE(nvrtc(90));
  CHECK(nvrtc(90)->path == folder / "toolkit/lib64/libnvrtc.so.13");

  fs::create_directories(folder / "site-packages/torch/lib");
  fs::create_directories(folder / "site-packages/nvidia/cu13/lib");
  fs::copy(nvrtc_file(13), folder / "site-packages/nvidia/cu13/lib/libnvrtc.so.13");
  fs::copy(BINARY_FOLDER "/old/libcuda.so.1", folder / "site-packages/torch/lib/libtorch.so");
  void *torch = dlopen((folder / "site-packages/torch/lib/libtorch.so").c_str(), RTLD_NOW | RTLD_LOCAL);
  REQUIRE(torch);
  CHECK(nvrtc(90)->path == folder / "site-packages/nvidia/cu13/lib/libnvrtc.so.13");
  dlclose(torch);
}

TEST_CASE("nvrtc: none, and what was looked for and where") {
  const Folder folder;
  write(folder / "libnvrtc.so.13", "not a library");
  const Variable named("STROBE_NVRTC", folder.path() + ":" + folder / "missing.so:" + folder_of(13));
  const std::string message = nvrtc_missing(61);
  CHECK(has(message, "no NVRTC that compiles for sm_61 (looked in STROBE_NVRTC=" + folder.path()));
  CHECK(has(message, "accepted is NVRTC 12: pip install \"nvidia-cuda-nvrtc-cu12==12.9.*\", or name the library in STROBE_NVRTC"));
  CHECK(has(message, folder / "libnvrtc.so.13: "));
  CHECK(has(message, folder / "missing.so: "));
  CHECK(has(message, nvrtc_file(13) + " is NVRTC 13.7, for sm_75 to sm_120"));
  CHECK(nvrtc_missing(90) == "");
  CHECK(thrown(STROBE_UNSUPPORTED, [] { build(plain(1), 999); }).find("no NVRTC that compiles for sm_999") != std::string::npos);
}

TEST_CASE("nvrtc: a kernel that does not compile is named, with the compiler's log") {
  const Compiling c;
  const KernelSource broken{"test/broken.h", "test::Broken", "test::Config"};
  CHECK(thrown(STROBE_DEVICE_ERROR, [&] { build(broken, plain(1).integers(), 90); }) ==
        "test::Broken<test::Config{1,2}> for sm_90: nvrtcCompileProgram of NVRTC 13.7 (" + nvrtc_file(13) +
            "): NVRTC_ERROR_COMPILATION\nkernel.cu(1): error: does_not_compile is undefined");
  CHECK(c.files().empty());
}
