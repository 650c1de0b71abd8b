// Prepared calls on the fake driver: their launches, their addresses, and their cost.
#include <chrono>
#include <cstring>
#include <thread>

#include "../../../kernels/attention/arguments.h"
#include "../call.h"
#include "surroundings.h"

using namespace strobe;
using namespace strobe::cuda;
using namespace strobe::cuda::test;
using Call = strobe::test::Call;

namespace {

constexpr int kDevice = 1;

// A bf16 call on the GPU, whose memory this test does not read. Addresses are multiples of 256.
struct CallOnGpu : Call {
  std::vector<std::vector<char>> memory;

  explicit CallOnGpu(int64_t queries = 128, int64_t keys = 128) {
    fake_cuda().argument_bytes = sizeof(ForwardArguments);
    for (const char *name : {"q", "out"}) place(name, DType::bf16, {2, 4, queries, 64});
    for (const char *name : {"k", "v"}) place(name, DType::bf16, {2, 4, keys, 64});
    place("lse", DType::f32, {2, 4, queries});
    attention.engine = "cuda-mma";
    execution.threads = 0, execution.stream = reinterpret_cast<void *>(0x55);
  }
  void place(const char *name, DType dtype, const std::vector<int64_t> &shape) {
    strobe_tensor &t = add(name, dtype, shape);
    t.device_type = STROBE_CUDA, t.device_index = kDevice;
    t.data = fresh(memory_bytes(name));
  }
  void *fresh(size_t bytes) {
    memory.emplace_back(bytes + 256);
    return reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(memory.back().data()) + 255) / 256 * 256);
  }
  strobe_prepared *prepare() {
    strobe_prepared *made = nullptr;
    REQUIRE_MESSAGE(strobe_prepare(&attention, &tensors, &execution, STROBE_FORWARD, &made) == STROBE_OK, strobe_last_error());
    return made;
  }
  strobe_addresses addresses() {
    strobe_addresses at{};
    at.size = sizeof at;
    at.q = tensors.q->data, at.k = tensors.k->data, at.v = tensors.v->data, at.out = tensors.out->data, at.lse = tensors.lse->data;
    return at;
  }
};

// A call's kernels have arguments of several types, but the fake driver would report one size for all. So it reports none.
struct WithoutBytes {
  WithoutBytes() { fake_cuda().tells_bytes = false; }
  ~WithoutBytes() { fake_cuda().tells_bytes = true; }
};

ForwardArguments launched() {
  const std::lock_guard lock(fake_cuda().mutex);
  ForwardArguments a;
  REQUIRE(fake_cuda().arguments.size() == sizeof a);
  std::memcpy(&a, fake_cuda().arguments.data(), sizeof a);
  return a;
}

} // namespace

TEST_CASE("prepared on a GPU: the engine is the one that explain() chooses, which asks all of them") {
  const Compiling c;
  for (int64_t queries : {1, 40, 1024, 6000})
    for (int64_t keys : {128, 5000})
      for (int mode = 0; mode < 4; mode++) {
        CallOnGpu call(queries, keys);
        call.attention.engine = mode == 3 ? "cuda-simt" : nullptr;
        call.attention.causal = mode == 1, call.attention.invariant = mode == 2;
        strobe_plan plan{};
        plan.size = sizeof plan;
        REQUIRE(strobe_make_plan(&call.attention, &call.tensors, &call.execution, STROBE_FORWARD, &plan) == STROBE_OK);
        char words[1 << 14];
        REQUIRE(strobe_explain(&call.attention, &call.tensors, &call.execution, STROBE_FORWARD, words, sizeof words, nullptr) == STROBE_OK);
        CHECK(has(words, std::string("\nchoice\n  ") + plan.engine + " "));
      }
}

TEST_CASE("prepared on a GPU: the launch of the whole call, but for addresses and stream") {
  const Compiling c;
  FakeCuda &fake = fake_cuda();
  CallOnGpu call;
  REQUIRE_MESSAGE(call.run() == STROBE_OK, strobe_last_error());
  const ForwardArguments whole = launched();
  const CUlaunchConfig config = fake.config;
  const int compiled = c.compiled();

  strobe_prepared *prepared = call.prepare();
  strobe_addresses at = call.addresses();
  at.q = call.fresh(call.memory_bytes("q")), at.out = call.fresh(call.memory_bytes("out"));
  strobe_execution other = call.execution;
  other.stream = reinterpret_cast<void *>(0x66);
  const int launches = fake.launches;
  REQUIRE_MESSAGE(strobe_run(prepared, &at, &other) == STROBE_OK, strobe_last_error());
  CHECK(fake.launches == launches + 1);
  CHECK(c.compiled() == compiled);
  CHECK(fake.config.gridDimX == config.gridDimX);
  CHECK(fake.config.sharedMemBytes == config.sharedMemBytes);
  CHECK(fake.config.hStream == reinterpret_cast<CUstream>(0x66));
  ForwardArguments again = launched();
  CHECK(again.in.q.data == at.q);
  CHECK(again.in.k.data == whole.in.k.data);
  CHECK(again.out.data == at.out);
  again.in.q.data = whole.in.q.data, again.out.data = whole.out.data;
  CHECK(std::memcmp(&again, &whole, sizeof whole) == 0);
  strobe_release(prepared);
}

TEST_CASE("a call's second launch may come early, the next call's first one may not") {
  const Compiling c;
  CallOnGpu call(1, 4096); // keys are split, and the splits merged
  const size_t before = fake_cuda().early.size();
  for (int n = 0; n < 2; n++) REQUIRE_MESSAGE(call.run() == STROBE_OK, strobe_last_error());
  const std::vector<bool> early(fake_cuda().early.begin() + ptrdiff_t(before), fake_cuda().early.end());
  CHECK(early == std::vector{false, true, false, true});
}

TEST_CASE("lists with gaps are copied first, by a launch after which none comes early") {
  const Compiling c;
  const WithoutBytes untold;
  std::vector<std::vector<bool>> early;
  for (int64_t stride : {1, 3, 0, -1}) {
    CallOnGpu call(1, 4096);
    call.place("seqused_k", DType::i32, {2});
    call["seqused_k"].strides[0] = stride;
    const size_t before = fake_cuda().early.size();
    for (int n = 0; n < 2; n++) REQUIRE_MESSAGE(call.run() == STROBE_OK, std::string(strobe_last_error()));
    early.emplace_back(fake_cuda().early.begin() + ptrdiff_t(before), fake_cuda().early.end());
  }
  CHECK(early[0] == std::vector{false, true, false, true});
  for (size_t n = 1; n < early.size(); n++) CHECK(early[n] == std::vector{false, false, true, false, false, true});
}

TEST_CASE("a page table whose rows are apart is read where it lies") {
  const Compiling c;
  const WithoutBytes untold;
  for (auto [row, column, copied] : {std::tuple{8, 1, false}, {13, 1, false}, {0, 1, false}, {16, 2, true}, {-8, 1, true}}) {
    CallOnGpu call;
    for (const char *name : {"k", "v"}) call.place(name, DType::bf16, {40, 4, 16, 64});
    call.place("page_table", DType::i32, {2, 8});
    call["page_table"].strides[0] = row, call["page_table"].strides[1] = column;
    const int launches = fake_cuda().launches;
    REQUIRE_MESSAGE(call.run() == STROBE_OK, std::string(strobe_last_error()));
    CHECK(fake_cuda().launches == launches + 1 + copied);
    const Inputs in = launched().in;
    CHECK(i64{in.pages.row} == (copied ? 8 : row));
    CHECK((in.pages.table == call["page_table"].data) == !copied);
  }
}

TEST_CASE("prepared on a GPU: the caller's device stays current, whatever the outcome") {
  const Compiling c;
  FakeCuda &fake = fake_cuda();
  CallOnGpu call;
  strobe_prepared *prepared = call.prepare();
  const strobe_addresses at = call.addresses();
  auto current = [] {
    CUcontext context = nullptr;
    check(driver()->cuCtxGetCurrent(&context), "cuCtxGetCurrent");
    return context;
  };
  const DeviceGuard theirs(device(0));
  const CUcontext before = current();
  for (CUresult result : {0, 700}) {
    fake.launch = result;
    CHECK(strobe_run(prepared, &at, &call.execution) == (result ? STROBE_DEVICE_ERROR : STROBE_OK));
    CHECK(current() == before);
  }
  fake.launch = 0;
  strobe_release(prepared);
}

TEST_CASE("prepared on a GPU: an address off 16 bytes would be read by another kernel, and is refused") {
  const Compiling c;
  CallOnGpu call;
  strobe_prepared *prepared = call.prepare();
  strobe_addresses at = call.addresses();
  at.k = static_cast<char *>(at.k) + 2;
  const int launches = fake_cuda().launches;
  CHECK(strobe_run(prepared, &at, nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(std::string(strobe_last_error()).starts_with("k: address 0x"));
  CHECK(fake_cuda().launches == launches);
  strobe_release(prepared);
}

TEST_CASE("prepared on a GPU: reserved_sms is kept, and at least one is left") {
  const Compiling c;
  CallOnGpu call;
  const int sms = device(kDevice).sms;
  call.execution.reserved_sms = sms;
  CHECK(call.run() == STROBE_INVALID_ARGUMENT);
  CHECK(std::string(strobe_last_error()) == "execution.reserved_sms: " + std::to_string(sms) + "; accepted is 0 to " +
                                                std::to_string(sms - 1) + ", one fewer than the GPU has");
  call.execution.reserved_sms = sms - 1;
  char text[8192];
  REQUIRE(strobe_explain(&call.attention, &call.tensors, &call.execution, STROBE_FORWARD, text, sizeof text, nullptr) == STROBE_OK);
  CHECK(std::string(text).find("reserved_sms: this kernel's blocks go to every SM that is free") != std::string::npos);
  strobe_prepared *prepared = call.prepare();
  const strobe_addresses at = call.addresses();
  for (int32_t reserved : {0, sms - 1}) {
    call.execution.reserved_sms = reserved;
    CHECK(strobe_run(prepared, &at, &call.execution) == STROBE_OK);
  }
  call.execution.reserved_sms = 1;
  CHECK(strobe_run(prepared, &at, &call.execution) == STROBE_INVALID_ARGUMENT);
  CHECK(std::string(strobe_last_error()) ==
        "execution.reserved_sms: 1; accepted is " + std::to_string(sms - 1) + ", as prepared, or 0 for the same");
  strobe_release(prepared);
}

TEST_CASE("prepared on a GPU: many threads, one call; what it costs the host is printed") {
  const Compiling c;
  FakeCuda &fake = fake_cuda();
  CallOnGpu call;
  strobe_prepared *prepared = call.prepare();
  const strobe_addresses at = call.addresses();
  REQUIRE(strobe_run(prepared, &at, &call.execution) == STROBE_OK);
  constexpr int kThreads = 4, kRuns = 500;
  const int launches = fake.launches;
  std::vector<std::thread> team;
  std::atomic<int> wrong = 0;
  for (int n = 0; n < kThreads; n++)
    team.emplace_back([&] {
      for (int i = 0; i < kRuns; i++) wrong += strobe_run(prepared, &at, &call.execution) != STROBE_OK;
    });
  for (std::thread &t : team) t.join();
  CHECK(wrong == 0);
  CHECK(fake.launches == launches + kThreads * kRuns);

  auto microseconds = [](auto &&run) {
    double least = 1;
    for (int repeat = 0; repeat < 5; repeat++) {
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < 1000; i++) run();
      least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / 1000);
    }
    return least * 1e6;
  };
  MESSAGE("a call without the driver's part: " << microseconds([&] { call.run(); }) << " us; prepared: "
                                               << microseconds([&] { strobe_run(prepared, &at, &call.execution); }) << " us");
  strobe_release(prepared);
}
