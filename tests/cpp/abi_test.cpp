// The C ABI: versions by size, statuses, texts, workspaces and threads; and that results are correct.
#include "call.h"

#include <cmath>
#include <cstddef>
#include <thread>

#include "engines.h"

using namespace strobe;
using namespace strobe::test;

namespace {

// A dense call filled with numbers.
void make_filled(Call &c, Operation operation) {
  make_dense(c, operation);
  int n = 1;
  for (const char *name : {"q", "k", "v", "bias", "alibi_slopes", "sinks", "dout", "dlse"})
    if (c.has(name)) c.fill<float>(name, n, 0.37 * n), n++;
  for (size_t i = 0; i < c.memory_bytes("mask"); i++) c.data<uint8_t>("mask")[i] = i % 7 != 0;
}

// Turns a call into one of the reference. Its results are float64.
void as_reference(Call &c) {
  c.attention.engine = "reference";
  for (const char *name : {"out", "lse", "max_logit", "column_sums", "dq", "dk", "dv", "dbias", "dsinks"})
    if (c.has(name)) c.add(name, DType::f64, std::vector<int64_t>(c[name].shape, c[name].shape + c[name].rank));
  if (c.operation == Operation::backward) c.drop("out"), c.drop("lse");
}

double worst(Call &got, Call &expected, const char *name) {
  double worst = 0;
  const size_t n = got.memory_bytes(name) / sizeof(float);
  REQUIRE(n == expected.memory_bytes(name) / sizeof(double));
  for (size_t i = 0; i < n; i++) worst = std::max(worst, std::abs(got.data<float>(name)[i] - expected.data<double>(name)[i]));
  return worst;
}

} // namespace

TEST_CASE("abi: version and names") {
  CHECK(std::string(strobe_version()) ==
        std::to_string(STROBE_VERSION_MAJOR) + "." + std::to_string(STROBE_VERSION_MINOR) + "." + std::to_string(STROBE_VERSION_PATCH));
  for (int32_t status = STROBE_OK; status <= STROBE_INTERNAL; status++) CHECK(strobe_status_name(status) != strobe_status_name(status + 1));
  CHECK(std::string(strobe_status_name(99)) == "unknown status");
  CHECK(std::string(strobe_engine_name(0)) == engines()[0]->name());
  const int32_t count = static_cast<int32_t>(engines().size());
  CHECK(std::string(strobe_engine_name(count - 1)) == "reference");
  CHECK(strobe_engine_missing(count - 1) == nullptr);
  for (int32_t past : {-1, count}) {
    CHECK(strobe_engine_name(past) == nullptr);
    CHECK(strobe_engine_missing(past) == nullptr);
  }
}

TEST_CASE("abi: null structs") {
  Call call;
  make_dense(call, Operation::forward);
  CHECK(strobe_forward(nullptr, &call.tensors, nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(error() == "attention: missing; accepted is a pointer to a strobe_attention");
  CHECK(strobe_forward(&call.attention, nullptr, nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(error() == "tensors: missing; accepted is a pointer to a strobe_tensors");
  CHECK(strobe_make_plan(&call.attention, &call.tensors, nullptr, STROBE_FORWARD, nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(error().starts_with("plan: missing"));
  CHECK(strobe_workspace_size(&call.attention, &call.tensors, nullptr, STROBE_FORWARD, nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(error().starts_with("bytes: null"));
  CHECK(strobe_explain(&call.attention, &call.tensors, nullptr, STROBE_FORWARD, nullptr, 10, nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(error().starts_with("text: null"));
  uint64_t bytes = 0;
  CHECK(strobe_workspace_size(&call.attention, &call.tensors, nullptr, 4, &bytes) == STROBE_INVALID_ARGUMENT);
  CHECK(error() == "direction: 4; accepted is 0 (forward), 1 (backward), 2 (jvp) or 3 (backward_jvp)");
  CHECK(call.untouched());
  CHECK(call.run() == STROBE_OK); // a null execution is the default one
}

TEST_CASE("abi: sizes that no version has") {
  for (uint64_t size : {uint64_t{0}, uint64_t{4}, uint64_t{60}, uint64_t{1} << 20, ~uint64_t{7}}) {
    Call call;
    make_dense(call, Operation::forward);
    auto refused = [&](const char *name) {
      CHECK(call.run() == STROBE_INVALID_ARGUMENT);
      CHECK(error().starts_with(std::string(name) + ": size is " + std::to_string(size) + "; accepted is sizeof(strobe_" + name +
                                "), here "));
      CHECK(lines(error()).size() == 1);
      call.attention.size = sizeof call.attention, call.tensors.size = sizeof call.tensors, call.execution.size = sizeof call.execution;
    };
    call.attention.size = size;
    refused("attention");
    call.tensors.size = size;
    refused("tensors");
    call.execution.size = size;
    refused("execution");
    strobe_plan plan{};
    plan.size = size;
    CHECK(strobe_make_plan(&call.attention, &call.tensors, nullptr, STROBE_FORWARD, &plan) == STROBE_INVALID_ARGUMENT);
    CHECK(error().starts_with("plan: size is "));
    CHECK(call.untouched());
  }
}

TEST_CASE("abi: an older caller's missing tail is zero") {
  Call call;
  make_dense(call, Operation::forward);
  call.attention.size = offsetof(strobe_attention, max_seqlen_q); // this caller does not have the later fields
  call.attention.max_seqlen_q = call.attention.tile_q = -1;
  call.attention.tile_q = 0;
  call.attention.engine = reinterpret_cast<const char *>(1);
  call.tensors.size = offsetof(strobe_tensors, dout);
  call.tensors.dout = reinterpret_cast<const strobe_tensor *>(1);
  call.execution.size = offsetof(strobe_execution, parallel);
  call.execution.parallel = reinterpret_cast<strobe_parallel>(1), call.execution.threads = 2;
  CHECK(call.run() == STROBE_OK);

  struct {
    strobe_plan plan;
    char guard[8];
  } old;
  std::memset(&old, 0x11, sizeof old);
  old.plan.size = offsetof(strobe_plan, workspace_bytes);
  REQUIRE(strobe_make_plan(&call.attention, &call.tensors, nullptr, STROBE_FORWARD, &old.plan) == STROBE_OK);
  CHECK(old.plan.size == offsetof(strobe_plan, workspace_bytes));
  CHECK(old.plan.tile_k > 0);
  CHECK(old.plan.workspace_bytes == 0x1111111111111111);
}

TEST_CASE("abi: a newer caller's additions must be zero") {
  Call call;
  make_dense(call, Operation::forward);
  struct {
    strobe_attention attention;
    uint64_t added;
  } newer = {call.attention, 0};
  newer.attention.size = sizeof newer;
  CHECK(strobe_forward(&newer.attention, &call.tensors, nullptr) == STROBE_OK);
  newer.added = 1;
  CHECK(strobe_forward(&newer.attention, &call.tensors, nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(error().starts_with("attention: a field at byte " + std::to_string(sizeof(strobe_attention)) + ", newer than this library"));
}

TEST_CASE("abi: every engine here computes what the reference does, forward and backward") {
  Call forward;
  make_filled(forward, Operation::forward);
  as_reference(forward);
  REQUIRE_MESSAGE(forward.run() == STROBE_OK, error());
  Call backward;
  make_filled(backward, Operation::backward);
  as_reference(backward);
  REQUIRE_MESSAGE(backward.run() == STROBE_OK, error());

  int engines_run = 0;
  for (const Engine *engine : engines()) {
    if (engine->only_by_name() || !engine->missing().empty()) continue;
    CAPTURE(engine->name());
    Call f;
    make_filled(f, Operation::forward);
    f.attention.engine = engine->name();
    uint64_t bytes = 0;
    if (strobe_workspace_size(&f.attention, &f.tensors, &f.execution, STROBE_FORWARD, &bytes) == STROBE_UNSUPPORTED) continue; // no float32
    REQUIRE_MESSAGE(f.run() == STROBE_OK, error());
    for (const char *name : {"out", "lse", "max_logit", "column_sums"}) CHECK(worst(f, forward, name) < 1e-5);

    Call b;
    make_filled(b, Operation::backward);
    b.attention.engine = engine->name();
    for (const char *name : {"out", "lse"}) std::memcpy(b[name].data, f[name].data, f.memory_bytes(name));
    REQUIRE_MESSAGE(b.run() == STROBE_OK, error());
    for (const char *name : {"dq", "dk", "dv", "dbias", "dsinks"}) {
      CAPTURE(name);
      CHECK(worst(b, backward, name) < 1e-4);
    }
    engines_run++;
  }
  CHECK(engines_run >= 1);
}

TEST_CASE("abi: a workspace of the caller's") {
  Call call;
  make_filled(call, Operation::forward);
  REQUIRE(call.run() == STROBE_OK);
  const std::vector<float> expected(call.data<float>("out"), call.data<float>("out") + call.memory_bytes("out") / sizeof(float));
  uint64_t bytes = 0;
  REQUIRE(strobe_workspace_size(&call.attention, &call.tensors, &call.execution, STROBE_FORWARD, &bytes) == STROBE_OK);
  REQUIRE(bytes > 0);
  strobe_plan plan{};
  plan.size = sizeof plan;
  REQUIRE(strobe_make_plan(&call.attention, &call.tensors, &call.execution, STROBE_FORWARD, &plan) == STROBE_OK);
  CHECK(plan.workspace_bytes == bytes);
  CHECK(plan.predicted_seconds > 0);

  constexpr size_t kGuard = 256;
  std::vector<unsigned char> memory(bytes + 2 * kGuard, 0xAB);
  const size_t shift = (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
  call.execution.workspace = memory.data() + shift;
  call.execution.workspace_bytes = bytes;
  std::memset(call["out"].data, 0, call.memory_bytes("out"));
  REQUIRE(call.run() == STROBE_OK);
  CHECK(std::memcmp(expected.data(), call["out"].data, call.memory_bytes("out")) == 0);
  for (size_t n = shift + bytes; n < memory.size(); n++) REQUIRE(memory[n] == 0xAB);

  Call small;
  make_filled(small, Operation::forward);
  small.execution.workspace = call.execution.workspace, small.execution.workspace_bytes = bytes - 1;
  CHECK(small.run() == STROBE_INVALID_ARGUMENT);
  CHECK(error() == "execution.workspace_bytes: " + std::to_string(bytes - 1) + "; accepted is " + std::to_string(bytes) +
                       " or more, as strobe_workspace_size() says");
  CHECK(small.untouched());
}

TEST_CASE("abi: the same bits for any number of threads, theirs or the caller's") {
  auto pool = [](void *, int32_t n, void (*body)(void *, int32_t), void *arg) {
    for (int32_t i = n - 1; i >= 0; i--) body(arg, i);
  };
  for (Operation operation : {Operation::forward, Operation::backward}) {
    std::vector<unsigned char> expected;
    for (int32_t threads : {1, 2, 3, 7, -3}) { // negative: threads of the caller's pool
      Call call;
      make_filled(call, operation);
      call.execution.threads = std::abs(threads), call.execution.parallel = threads < 0 ? +pool : nullptr;
      REQUIRE(call.run() == STROBE_OK);
      std::vector<unsigned char> got;
      for (const char *name : {"out", "lse", "max_logit", "column_sums", "dq", "dk", "dv", "dbias", "dsinks"})
        if (call.has(name)) got.insert(got.end(), call.data<unsigned char>(name), call.data<unsigned char>(name) + call.memory_bytes(name));
      if (expected.empty()) expected = got;
      CHECK(got == expected);
    }
  }
}

TEST_CASE("abi: a block-sparse mask that keeps nothing, its columns null") {
  Call call;
  make_sparse(call, Operation::forward);
  call.drop("block_rows_t"), call.drop("block_cols_t");
  std::memset(call["block_rows"].data, 0, call.memory_bytes("block_rows"));
  call["block_cols"].shape[0] = 0, call["block_cols"].data = nullptr;
  REQUIRE_MESSAGE(call.run() == STROBE_OK, error());
  for (size_t n = 0; n < call.memory_bytes("out") / sizeof(float); n++) REQUIRE(call.data<float>("out")[n] == 0);
  for (size_t n = 0; n < call.memory_bytes("lse") / sizeof(float); n++) REQUIRE(call.data<float>("lse")[n] == -INFINITY);
}

TEST_CASE("abi: explain says what was asked and what would run, and fits any buffer") {
  Call call;
  make_dense(call, Operation::backward);
  call.attention.causal = call.attention.deterministic = 1, call.attention.tile_q = 50, call.attention.softcap = 20;
  size_t needed = 0;
  REQUIRE(strobe_explain(&call.attention, &call.tensors, &call.execution, STROBE_BACKWARD, nullptr, 0, &needed) == STROBE_OK);
  std::string text(needed, '?');
  REQUIRE(strobe_explain(&call.attention, &call.tensors, &call.execution, STROBE_BACKWARD, text.data(), text.size(), nullptr) == STROBE_OK);
  REQUIRE(text.back() == '\0');
  text.pop_back();
  for (const char *part :
       {"attention, backward\n", "B 2, H 4, Hkv 2, Sq 21, Sk 38, D 8, Dv 6\n", "float32 on the CPU, 1 thread\n", "softcap", "(causal)",
        "bottom right", "mask, bias, ALiBi, sinks, seqused_k\n", "0.25, quantised to 0.25 (keeps 192/256); from rng\n", "50 x any\n",
        "deterministic\n", "no: runs only when asked for by name\n", "the least predicted time\n", "tile_q 50 rounded to"}) {
    CAPTURE(part);
    CHECK(text.find(part) != std::string::npos);
  }
  for (const Engine *engine : engines()) CHECK(text.find(std::string("\n  ") + engine->name()) != std::string::npos);

  std::string cut(20, '?');
  REQUIRE(strobe_explain(&call.attention, &call.tensors, &call.execution, STROBE_BACKWARD, cut.data(), 10, &needed) == STROBE_OK);
  CHECK(cut == text.substr(0, 9) + '\0' + std::string(10, '?'));
  CHECK(needed == text.size() + 1);
}

TEST_CASE("abi: explain answers where nothing would run") {
  Call call;
  make_dense(call, Operation::forward);
  for (const NamedSlot &s : kSlots)
    if (call.has(s.name)) call[s.name].device_type = STROBE_CUDA; // described, but never accessed
  CHECK(call.run() == STROBE_UNSUPPORTED);
  CHECK(error().starts_with("no engine takes this problem:\n"));
  CHECK(call.untouched());
  std::string text(4096, '\0');
  REQUIRE(strobe_explain(&call.attention, &call.tensors, nullptr, STROBE_FORWARD, text.data(), text.size(), nullptr) == STROBE_OK);
  CHECK(text.find("none") != std::string::npos);
}

TEST_CASE("abi: the reference follows no pointer of a device") {
  Call call;
  make_dense(call, Operation::forward);
  int64_t address = int64_t{1} << 40; // points to no memory
  for (const NamedSlot &s : kSlots) {
    if (!call.has(s.name)) continue;
    call[s.name].device_type = STROBE_CUDA, call[s.name].data = reinterpret_cast<void *>(address += int64_t{1} << 32);
  }
  for (const char *name : {"out", "lse", "max_logit", "column_sums"}) call[name].dtype = STROBE_FLOAT64; // the reference's dtype
  CHECK(strobe_reference_forward(&call.attention, &call.tensors, &call.execution, nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(error() == "q: on a CUDA device; accepted are tensors on the CPU, where the reference computes");
}

TEST_CASE("abi: no exception leaves, not even one of the caller's pool") {
  const std::pair<strobe_parallel, int32_t> pools[] = {
      {[](void *, int32_t, void (*)(void *, int32_t), void *) { throw std::bad_alloc(); }, STROBE_OUT_OF_MEMORY},
      {[](void *, int32_t, void (*)(void *, int32_t), void *) { throw std::runtime_error("the pool is closed"); }, STROBE_INTERNAL},
      {[](void *, int32_t, void (*)(void *, int32_t), void *) { throw 7; }, STROBE_INTERNAL},
      {[](void *, int32_t, void (*)(void *, int32_t), void *) {}, STROBE_INVALID_ARGUMENT}};
  std::vector<std::string> texts;
  for (auto [pool, status] : pools) {
    Call call;
    make_filled(call, Operation::forward);
    call.execution.threads = 2, call.execution.parallel = pool;
    CHECK(call.run() == status);
    texts.push_back(error());
  }
  CHECK(texts[0] == "out of host memory");
  CHECK(texts[1] == "the pool is closed");
  CHECK(texts[2] == "unknown exception");
  CHECK(texts[3].starts_with("execution.parallel: ran 0 bodies of "));
}

TEST_CASE("abi: the last error is the thread's own") {
  CHECK(strobe_forward(nullptr, nullptr, nullptr) == STROBE_INVALID_ARGUMENT);
  const std::string mine = error();
  std::vector<std::thread> team;
  std::vector<int> wrong(8);
  for (int n = 0; n < 8; n++)
    team.emplace_back([&wrong, n] {
      wrong[n] += !error().empty();
      for (int round = 0; round < 200; round++) {
        Call call;
        make_dense(call, Operation::forward);
        call.attention.tile_q = -1 - n;
        wrong[n] += call.run() != STROBE_INVALID_ARGUMENT;
        wrong[n] += !error().starts_with("tile_q: " + std::to_string(-1 - n) + ";");
      }
    });
  for (std::thread &t : team) t.join();
  for (int w : wrong) CHECK(w == 0);
  CHECK(error() == mine);
}
