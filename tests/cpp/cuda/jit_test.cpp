// Loaded kernels and launches, with the fake driver and compiler.
#include "cuda/compile/jit.h"

#include <chrono>
#include <cstring>
#include <thread>

#include "cuda/compile/cache.h"
#include "surroundings.h"

using namespace strobe;
using namespace strobe::cuda;
using namespace strobe::cuda::test;

namespace {

const char kArguments[16] = "fifteen letters";

// The one cache entry of plain(n), which has other code from then on.
struct Overwritten {
  std::string good, file, whole; // the code, the file, and the contents that it had

  Overwritten(const Compiling &c, int n, const std::string &code) {
    Build built = build(plain(n), 90);
    good = built.cubin, file = c.files().at(0), whole = contents(file);
    Sha256::Digest key;
    std::memcpy(key.data(), whole.data() + 40, key.size());
    built.cubin = code;
    REQUIRE(cache_write(file, key, built));
  }
};
void refuse(FakeCuda &fake, const std::string &code) {
  const std::lock_guard lock(fake.mutex);
  fake.refused = code;
}

} // namespace

TEST_CASE("jit: loaded once for each kernel, config and device") {
  const Compiling c;
  FakeCuda &fake = fake_cuda();
  const int loads = fake.loads;
  const Kernel &first = load(plain(1), device(1));
  CHECK(&load(plain(1), device(1)) == &first);
  CHECK(fake.loads == loads + 1);
  CHECK(has(fake.code, "--gpu-architecture=sm_90"));
  CHECK(first.name == "test::Plain<test::Config{1,2}>");
  CHECK(first.cc == 90);
  CHECK(first.registers == 42);
  CHECK(first.spill_bytes == 20);
  CHECK(first.argument_bytes == 16);

  CHECK(&load(plain(2), device(1)) != &first);
  const KernelSource twin = kPlain; // a template's address is its identity
  CHECK(&load(twin, plain(1).integers(), device(1)) != &first);
  CHECK(fake.loads == loads + 3);
  CHECK(load(plain(1), device(0)).cc == 80);
  CHECK(has(fake.code, "--gpu-architecture=sm_80"));
}

TEST_CASE("jit: all the shared memory that the static leaves may be asked for, on its own device") {
  const Compiling c;
  FakeCuda &fake = fake_cuda();
  CHECK(load(plain(10), device(1)).most_shared == 162 * 1024);
  CHECK(fake.most_shared == 162 * 1024);
  CHECK(fake.most_shared_device == 11);
  load(plain(10), device(0));
  CHECK(fake.most_shared_device == 10);
}

TEST_CASE("jit: loading leaves context and capture mode as they were") {
  const Compiling c;
  FakeCuda &fake = fake_cuda();
  load(plain(20), device(1));
  CUcontext context = nullptr;
  check(driver()->cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  CHECK(context == nullptr);
  fake.load = 200;
  const std::string message = thrown(STROBE_DEVICE_ERROR, [] { load(plain(21), device(1)); });
  fake.load = 0;
  CHECK(message == "cuLibraryLoadData of test::Plain<test::Config{21,2}>, compiled for sm_90 by NVRTC 13.7: "
                   "CUDA_ERROR_PRETENDED (200, a pretended error)");
  check(driver()->cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  CHECK(context == nullptr);
  CUstreamCaptureMode mode{};
  check(driver()->cuThreadExchangeStreamCaptureMode(&mode), "cuThreadExchangeStreamCaptureMode");
  CHECK(mode == CUstreamCaptureMode{});
  CHECK(load(plain(21), device(1)).cc == 90); // failures are not kept
}

TEST_CASE("jit: an entry that the driver refuses is compiled anew, once") {
  const Compiling c;
  FakeCuda &fake = fake_cuda();
  const Overwritten entry(c, 40, "of another age");
  refuse(fake, "of another age");
  CHECK(c.compiled() == 1);
  CHECK(load(plain(40), device(1)).cc == 90);
  CHECK(fake.code == entry.good);
  CHECK(c.compiled() == 2);
  CHECK((contents(entry.file) == entry.whole));

  build(plain(41), 90);
  refuse(fake, "Config{41,2}"); // also if it is compiled again
  const int loads = fake.loads;
  CHECK(has(thrown(STROBE_DEVICE_ERROR, [] { load(plain(41), device(1)); }), "cuLibraryLoadData of test::Plain<test::Config{41,2}>"));
  CHECK(fake.loads == loads + 2);
  CHECK(c.compiled() == 4);
  {
    const Variable offline("STROBE_OFFLINE", "1"); // no better code can be compiled
    CHECK(has(thrown(STROBE_DEVICE_ERROR, [] { load(plain(41), device(1)); }), "by NVRTC 13.7 and found in " + c.folder / "cache"));
  }
  refuse(fake, "");
  CHECK(c.files().size() == 2);
  fake.load = CUDA_ERROR_OUT_OF_MEMORY; // an error that the code has not caused
  CHECK(has(thrown(STROBE_OUT_OF_MEMORY, [] { load(plain(41), device(1)); }), "cuLibraryLoadData"));
  fake.load = CUDA_SUCCESS;
  CHECK(c.compiled() == 4);
}

TEST_CASE("jit: code of a folder that is only read is compiled anew once, however many processes the driver refuses it") {
  const Compiling c;
  FakeCuda &fake = fake_cuda();
  const Overwritten entry(c, 45, "of another driver");
  fs::rename(c.folder / "cache", c.folder / "package");
  const Variable further("STROBE_CACHE_PATH", c.folder / "package");
  refuse(fake, "of another driver");
  CHECK(load(plain(45), device(1)).cc == 90);
  CHECK(fake.code == entry.good);
  CHECK(c.compiled() == 2);
  CHECK(std::ranges::count(refused_code(), c.folder / "package/nvrtc-13.7" + ": the driver refused the code of 1 kernel") == 1);
  // What another process finds after it, too, was refused
  CHECK(build(kPlain, plain(45).integers(), 90, From::own_folder).cubin == entry.good);
  CHECK(c.compiled() == 2);
  refuse(fake, "");
}

TEST_CASE("jit: many threads, many kernels, each loaded once and found again") {
  const Compiling c;
  FakeCuda &fake = fake_cuda();
  constexpr int threads = 8, kernels = 400; // enough to make the table grow twice
  const Variable no_disk("STROBE_CACHE_READONLY", "1");
  std::vector<std::vector<const Kernel *>> found(threads, std::vector<const Kernel *>(kernels));
  const int loads = fake.loads;
  std::vector<std::thread> all;
  for (int t = 0; t < threads; t++)
    all.emplace_back([&, t] {
      for (int k = 0; k < kernels; k++) {
        const int mine = (k + 50 * t) % kernels;
        found[t][mine] = &load(plain(1000 + mine), device(1));
      }
    });
  for (std::thread &thread : all) thread.join();
  CHECK(fake.loads == loads + kernels);
  CHECK(c.compiled() == kernels);
  for (int k = 0; k < kernels; k++) {
    CHECK(found[0][k]->name == "test::Plain<test::Config{" + std::to_string(1000 + k) + ",2}>");
    for (int t = 1; t < threads; t++) CHECK(found[t][k] == found[0][k]);
  }
}

TEST_CASE("jit: sources of functions that share a hash are two kernels, in memory and in the cache's folder") {
  const Compiling c;
  FakeCuda &fake = fake_cuda();
  const int loads = fake.loads;
  const KernelKey<Config> key = plain(700); // its numbers stand for the hash
  const auto source = [](const char *text) { return std::make_shared<const std::string>(text); };
  const Functions one = source("// x + 1"), other = source("// x + 2");
  const Kernel &first = load(kPlain, key.integers(), device(1), one), &second = load(kPlain, key.integers(), device(1), other);
  CHECK(&first != &second);
  CHECK(fake.loads == loads + 2);
  CHECK(c.files().size() == 2);
  CHECK(&load(kPlain, key.integers(), device(1), source("// x + 1")) == &first); // the text counts, not its address
  CHECK(find_loaded(kPlain, key.integers(), device(1), other) == &second);
  CHECK(find_loaded(kPlain, key.integers(), device(1), source("// x + 3")) == nullptr);
  CHECK(find_loaded(kPlain, key.integers(), device(1)) == nullptr);
  CHECK(fake.loads == loads + 2);
}

TEST_CASE("jit: kernels of one call are compiled at the same time") {
  const Compiling c;
  const Variable meet("FAKE_NVRTC_MEET", "12"); // compilations one after another would never finish
  FakeCuda &fake = fake_cuda();
  const int loads = fake.loads;
  std::vector<KernelKey<Config>> keys;
  for (int i = 0; i < 12; i++) keys.push_back(plain(500 + i));
  std::vector<KernelName> names;
  for (const auto &key : keys) names.push_back({key.source, key.integers()});
  CHECK(find_loaded(*names[0].source, names[0].config, device(1)) == nullptr);
  load_together(names, device(1));
  CHECK(fake.loads == loads + 12);
  CHECK(c.compiled() == 12);
  for (const KernelName &name : names) {
    const Kernel *kernel = find_loaded(*name.source, name.config, device(1));
    REQUIRE(kernel);
    CHECK(kernel->name == kernel_name(*name.source, name.config));
    CHECK(kernel == &load(*name.source, name.config, device(1)));
    CHECK(find_loaded(*name.source, name.config, device(0)) == nullptr);
  }
  load_together(names, device(1));
  load_together({}, device(1));
  CHECK(fake.loads == loads + 12);
}

TEST_CASE("jit: of kernels of one call that do not compile, the first one says why, and the others are loaded") {
  const Compiling c;
  const KernelSource broken{"test/broken.h", "test::Broken", "test::Config"};
  const KernelKey<Config> good = plain(60), second = plain(61);
  const Config first_config{1, 2}, second_config{2, 2};
  const KernelKey<Config> bad{&broken, first_config}, worse{&broken, second_config};
  const KernelName names[] = {
      {good.source, good.integers()}, {bad.source, bad.integers()}, {worse.source, worse.integers()}, {second.source, second.integers()}};
  CHECK(has(thrown(STROBE_DEVICE_ERROR, [&] { load_together(names, device(1)); }), "test::Broken<test::Config{1,2}>"));
  CHECK(find_loaded(*good.source, good.integers(), device(1)));
  CHECK(find_loaded(*second.source, second.integers(), device(1)));
  CHECK(c.compiled() == 4);
}

TEST_CASE("jit: a loaded kernel is found each time; how fast is printed") {
  const Compiling c;
  fake_cuda();
  const Device &here = device(1);
  const auto key = plain(30);
  const Kernel *kernel = &load(key, here);
  constexpr int n = 1000000;
  double least = 1;
  for (int repeat = 0; repeat < 5; repeat++) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < n; i++)
      if (&load(key, here) != kernel) FAIL("another kernel");
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / n);
  }
  MESSAGE("load() of a loaded kernel: " << least * 1e9 << " ns");
}

TEST_CASE("jit: a launch is what was asked for") {
  const Compiling c;
  FakeCuda &fake = fake_cuda();
  const Kernel &kernel = load(plain(40), device(1));
  const auto stream = reinterpret_cast<CUstream>(0x77);
  launch(kernel, {70000, 2, 3}, 256, 100 * 1024, stream, kArguments, sizeof kArguments);
  CHECK(fake.launches == 1);
  CHECK(fake.config.gridDimX == 70000);
  CHECK(fake.config.gridDimY == 2);
  CHECK(fake.config.gridDimZ == 3);
  CHECK(fake.config.blockDimX == 256);
  CHECK(fake.config.blockDimY * fake.config.blockDimZ == 1);
  CHECK(fake.config.sharedMemBytes == 100 * 1024);
  CHECK(fake.config.hStream == stream);
  CHECK(fake.config.numAttrs == 0);
  CHECK(std::memcmp(fake.arguments.data(), kArguments, sizeof kArguments) == 0);
}

TEST_CASE("jit: a launch may come early") {
  const Compiling c;
  const Kernel &kernel = load(plain(41), device(1));
  for (bool early : {true, false}) {
    launch(kernel, {1, 1, 1}, 32, 0, nullptr, kArguments, sizeof kArguments, early);
    CHECK(fake_cuda().config.numAttrs == early);
    CHECK(fake_cuda().early.back() == early);
  }
}

TEST_CASE("jit: launches that cannot be") {
  const Compiling c;
  FakeCuda &fake = fake_cuda();
  const Kernel &kernel = load(plain(50), device(1));
  const int launches = fake.launches;
  auto with = [&](Grid grid, int64_t shared = 0, size_t bytes = sizeof kArguments) {
    return thrown(STROBE_INTERNAL, [&] { launch(kernel, grid, 128, shared, nullptr, kArguments, bytes); });
  };
  CHECK(with({0, 1, 1}) == ""); // an empty grid launches nothing
  CHECK(with({1, 1, 0}) == "");
  CHECK(with({1, 65536, 1}) ==
        "launch of test::Plain<test::Config{50,2}>: grid 1 x 65536 x 1; accepted is up to 2147483647 x 65535 x 65535");
  CHECK(has(with({1, 1, 65536}), "grid 1 x 1 x 65536"));
  CHECK(has(with({int64_t(1) << 31, 1, 1}), "grid 2147483648 x 1 x 1"));
  CHECK(has(with({-1, 1, 1}), "grid -1 x 1 x 1"));
  CHECK(has(with({1}, kernel.most_shared + 1), "165889 bytes of dynamic shared memory; accepted is up to 165888"));
  CHECK(has(with({1}, 0, 12), "12 bytes of arguments; the kernel takes 16"));
  CHECK(fake.launches == launches);

  fake.launch = 701;
  CHECK(thrown(STROBE_DEVICE_ERROR, [&] { launch(kernel, {1}, 128, 0, nullptr, kArguments, sizeof kArguments); }) ==
        "launch of test::Plain<test::Config{50,2}>: CUDA_ERROR_PRETENDED (701, a pretended error)");
  fake.launch = 0;
}

TEST_CASE("jit: no kernel on a device that is only described") {
  fake_cuda();
  CHECK(thrown(STROBE_INVALID_ARGUMENT, [] { load(plain(1), described(90)); }) == "device_index: -1; accepted is 0 to 1");
}
