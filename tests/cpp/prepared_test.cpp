// Prepared calls: they give the same bits on other addresses, check everything at every run, and run in many threads at a time.
#include <cstring>
#include <memory>
#include <thread>
#if defined(__GLIBC__)
#include <malloc.h>
#endif

#include "call.h"

using namespace strobe;
using namespace strobe::test;

namespace {

using Held = std::unique_ptr<strobe_prepared, decltype(&strobe_release)>;

Held prepared(Call &call) {
  strobe_prepared *made = nullptr;
  REQUIRE_MESSAGE(strobe_prepare(&call.attention, &call.tensors, &call.execution, static_cast<int32_t>(call.operation), &made) == STROBE_OK,
                  error());
  return {made, strobe_release};
}

using Make = void (*)(Call &, Operation);

// Fills the call with numbers that depend on `seed`.
void make_filled(Call &c, Make make, Operation operation, int seed) {
  make(c, operation);
  for (const char *name : {"q", "k", "v", "bias", "alibi_slopes", "sinks", "dout", "dlse"})
    if (c.has(name)) c.fill<float>(name, seed, 0.37 * (seed + 1)), seed++;
  for (const char *name : {"out", "lse"})
    if (operation == Operation::backward) c.fill<float>(name, seed, 0.37);
}

std::vector<unsigned char> bytes_of_results(Call &call) {
  std::vector<unsigned char> all;
  for (const char *name : {"out", "lse", "max_logit", "column_sums", "dq", "dk", "dv", "dbias", "dsinks"})
    if (call.has(name)) all.insert(all.end(), call.data<unsigned char>(name), call.data<unsigned char>(name) + call.memory_bytes(name));
  return all;
}

} // namespace

TEST_CASE("prepared: on other addresses, the bits of the whole call") {
  const Make in_pages = [](Call &c, Operation) { make_paged(c, true); };
  const Make quantised = [](Call &c, Operation) { make_quantised(c, DType::i8, true, make_varlen), make_for_reference(c); };
  for (Make make : {Make(make_dense), Make(make_varlen), Make(make_sparse), in_pages, quantised})
    for (Operation operation : {Operation::forward, Operation::backward}) {
      if (operation == Operation::backward && (make == in_pages || make == quantised)) continue;
      Call first;
      make_filled(first, make, operation, 1);
      const Held held = prepared(first);
      CHECK(first.untouched()); // the failed run has written nothing
      for (int seed : {2, 3}) {
        Call whole, again;
        make_filled(whole, make, operation, seed), make_filled(again, make, operation, seed);
        REQUIRE_MESSAGE(whole.run() == STROBE_OK, error());
        const strobe_addresses at = addresses(again);
        REQUIRE_MESSAGE(strobe_run(held.get(), &at, nullptr) == STROBE_OK, error());
        CHECK(bytes_of_results(whole) == bytes_of_results(again));
      }
    }
}

TEST_CASE("prepared: its plan is the call's") {
  Call call;
  make_dense(call, Operation::backward);
  const Held held = prepared(call);
  strobe_plan whole{}, of_prepared{};
  whole.size = of_prepared.size = sizeof whole;
  REQUIRE(strobe_make_plan(&call.attention, &call.tensors, &call.execution, STROBE_BACKWARD, &whole) == STROBE_OK);
  REQUIRE(strobe_prepared_plan(held.get(), &of_prepared) == STROBE_OK);
  CHECK(std::memcmp(&whole, &of_prepared, sizeof whole) == 0);
  CHECK(strobe_prepared_plan(held.get(), nullptr) == STROBE_INVALID_ARGUMENT);
}

#if defined(__GLIBC__) && __GLIBC_MINOR__ >= 33 && !defined(__SANITIZE_ADDRESS__) // ASan finds leaks itself
TEST_CASE("prepared: what is released leaves no memory behind, whether it ran or not") {
  Call call;
  make_filled(call, make_sparse, Operation::forward, 1);
  const strobe_addresses at = addresses(call);
  auto many = [&] {
    for (int n = 0; n < 50; n++) {
      const Held held = prepared(call), unused = prepared(call);
      REQUIRE_MESSAGE(strobe_run(held.get(), &at, nullptr) == STROBE_OK, error());
    }
  };
  many(); // allocates everything that is allocated only once
  const size_t before = mallinfo2().uordblks;
  many();
  CHECK(mallinfo2().uordblks <= before + 50 * 64); // a prepared call is several hundred bytes
}
#endif

TEST_CASE("prepared: what the caller lent while preparing is not needed later") {
  auto call = std::make_unique<Call>();
  make_filled(*call, make_dense, Operation::forward, 1);
  auto engine = std::make_unique<std::string>("reference-");
  engine->pop_back();
  for (const char *name : {"out", "lse", "max_logit", "column_sums"})
    call->add(name, DType::f64, std::vector<int64_t>((*call)[name].shape, (*call)[name].shape + (*call)[name].rank));
  call->attention.engine = engine->c_str();
  const Held held = prepared(*call);
  call.reset();
  engine.reset();
  Call other;
  make_filled(other, make_dense, Operation::forward, 2);
  for (const char *name : {"out", "lse", "max_logit", "column_sums"})
    other.add(name, DType::f64, std::vector<int64_t>(other[name].shape, other[name].shape + other[name].rank));
  const strobe_addresses at = addresses(other);
  REQUIRE_MESSAGE(strobe_run(held.get(), &at, nullptr) == STROBE_OK, error());
  strobe_plan plan{};
  plan.size = sizeof plan;
  REQUIRE(strobe_prepared_plan(held.get(), &plan) == STROBE_OK);
  CHECK(std::string(plan.engine) == "reference");
}

TEST_CASE("prepared: addresses that cannot be") {
  Call call;
  make_dense(call, Operation::forward);
  call.drop("bias");
  const Held held = prepared(call);
  const strobe_addresses good = addresses(call);
  auto refused = [&](auto &&change) {
    strobe_addresses at = good;
    change(at);
    CHECK(strobe_run(held.get(), &at, nullptr) == STROBE_INVALID_ARGUMENT);
    CHECK(call.untouched());
    return error();
  };
  CHECK(refused([](auto &at) { at.q = nullptr; }).starts_with("q: null; accepted is null only for"));
  CHECK(refused([&](auto &at) { at.bias = at.q; }) == "bias: given, where the call was prepared without one; accepted is null");
  CHECK(refused([](auto &at) {
          at.k = static_cast<char *>(at.k) + 4, at.lse = static_cast<char *>(at.lse) + 4;
        }).find("; accepted are multiples of 16, for it was one when the call was prepared\nlse: address 0x") != std::string::npos);
  CHECK(refused([](auto &at) { at.out = at.q; }).starts_with("out: shares memory with q"));
  CHECK(refused([](auto &at) { at.size = 4; }).starts_with("addresses: size is 4"));
  CHECK(strobe_run(held.get(), nullptr, nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(strobe_run(nullptr, &good, nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(error() == "prepared: null; accepted is what strobe_prepare wrote");
  CHECK(strobe_run(held.get(), &good, nullptr) == STROBE_OK);
}

TEST_CASE("prepared: an address that was off 16 bytes has to be so again") {
  Call call;
  make_dense(call, Operation::forward);
  call["q"].data = static_cast<char *>(call["q"].data) + 4;
  call["q"].shape[2]--, call["out"].shape[2]--, call["lse"].shape[2]--, call["mask"].shape[2]--; // the shapes still fit their memory
  const Held held = prepared(call);
  strobe_addresses at = addresses(call);
  CHECK(strobe_run(held.get(), &at, nullptr) == STROBE_OK);
  at.q = static_cast<char *>(at.q) - 4;
  CHECK(strobe_run(held.get(), &at, nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(error().ends_with("; accepted is none that is a multiple of 16, for it was none when the call was prepared"));
}

TEST_CASE("prepared: host memory is checked at every run") {
  Call call;
  make_varlen(call, Operation::forward);
  const Held held = prepared(call);
  const strobe_addresses at = addresses(call);
  call.data<int32_t>("cu_seqlens_q")[1] = 14; // more than max_seqlen_q
  CHECK(strobe_run(held.get(), &at, nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(error().starts_with("cu_seqlens_q: "));
  CHECK(call.untouched());
}

TEST_CASE("prepared: a length that is refused at a run is refused in the words of the whole call") {
  struct Case {
    bool part;
    int64_t max_q, max_k;
    const char *list;
    int32_t second; // the list's second number during the run
    const char *says;
  };
  const Case cases[] = {
      {false, 0, 0, "cu_seqlens_q", 22, "cu_seqlens_q: sequence 0 has 22 tokens; accepted is at most Tq = 21"},
      {false, 13, 0, "cu_seqlens_q", 14, "cu_seqlens_q: sequence 0 has 14 tokens; accepted is at most max_seqlen_q = 13"},
      {false, Sq, 0, "cu_seqlens_q", 22, "cu_seqlens_q: sequence 0 has 22 tokens; accepted is at most max_seqlen_q = 21"},
      {false, Sq, Sk, "cu_seqlens_k", 39, "cu_seqlens_k: sequence 0 has 39 tokens; accepted is at most max_seqlen_k = 38"},
      {true, 0, 0, "cu_seqlens_q", 14, "part.q_ranges: hold 13 rows of sequence 0; accepted is 14, as many as it has here"},
      {true, 0, 0, "cu_seqlens_q", 22, "cu_seqlens_q: sequence 0 has 22 tokens; accepted is at most Tq = 21"},
      {true, 0, 0, "cu_seqlens_k", 39, "cu_seqlens_k: sequence 0 has 39 tokens; accepted is at most Tk = 38"},
      {true, 13, 0, "cu_seqlens_q", 14, "cu_seqlens_q: sequence 0 has 14 tokens; accepted is at most max_seqlen_q = 13"},
      {true, 20, 0, "cu_seqlens_q", 21, "cu_seqlens_q: sequence 0 has 21 tokens; accepted is at most max_seqlen_q = 20"},
  };
  for (const Case &c : cases) {
    CAPTURE(c.says);
    Call call;
    make_varlen(call, Operation::forward);
    call.attention.max_seqlen_q = c.max_q, call.attention.max_seqlen_k = c.max_k;
    PartOf of;
    PartOf::set(of.q_ranges, {0, 13, 0, 8}, {2, 1, 2}), PartOf::set(of.seqlens_q, {13, 8}, {2});
    PartOf::set(of.k_ranges, {0, 0, 0, Sk}, {2, 1, 2}), PartOf::set(of.seqlens_k, {0, Sk}, {2});
    if (c.part) call.drop("max_logit"), call.drop("column_sums"), call.attention.part = &of.part;
    const Held held = prepared(call);
    const strobe_addresses at = addresses(call);
    call.data<int32_t>(c.list)[1] = c.second;
    CHECK(strobe_run(held.get(), &at, nullptr) == STROBE_INVALID_ARGUMENT);
    CHECK(error() == c.says);
    CHECK(call.run() == STROBE_INVALID_ARGUMENT);
    CHECK(lines(error()).front() == c.says);
    CHECK(call.untouched());
  }
}

TEST_CASE("prepared: how many keys count is read, and checked, at every run") {
  for (Operation operation : {Operation::forward, Operation::backward}) {
    Call first, whole;
    make_filled(first, make_dense, operation, 1), make_filled(whole, make_dense, operation, 1);
    const Held held = prepared(first);
    const strobe_addresses at = addresses(first);
    for (Call *call : {&first, &whole}) call->data<int32_t>("seqused_k")[0] = 7;
    REQUIRE_MESSAGE(whole.run() == STROBE_OK, error());
    REQUIRE_MESSAGE(strobe_run(held.get(), &at, nullptr) == STROBE_OK, error());
    CHECK(bytes_of_results(first) == bytes_of_results(whole));
    first.data<int32_t>("seqused_k")[0] = -1;
    CHECK(strobe_run(held.get(), &at, nullptr) == STROBE_INVALID_ARGUMENT);
    CHECK(error() == "seqused_k: -1 at [0]; accepted are 0 to 38, the length of k");
  }
}

TEST_CASE("prepared: pages are read, and checked, at every run") {
  Call first, whole;
  for (Call *call : {&first, &whole}) {
    make_paged(*call, true);
    for (const char *name : {"q", "k", "v"}) call->fill<float>(name, 0.3, 0.7);
    std::memset(call->data<char>("mask"), 1, call->memory_bytes("mask"));
  }
  const Held held = prepared(first);
  const strobe_addresses at = addresses(first);
  for (int32_t page : {8, 12}) {
    for (Call *call : {&first, &whole}) call->data<int32_t>("page_table")[1] = page;
    REQUIRE_MESSAGE(whole.run() == STROBE_OK, error());
    REQUIRE_MESSAGE(strobe_run(held.get(), &at, nullptr) == STROBE_OK, error());
    CHECK(bytes_of_results(first) == bytes_of_results(whole));
  }
  first.data<int32_t>("page_table")[1] = 16;
  CHECK(strobe_run(held.get(), &at, nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(error() == "page_table: page 16 at [0, 1]; accepted are 0 to 15, the pages of k and v, where keys count");
}

TEST_CASE("prepared: a program built before there was seqused_k") {
  Call call;
  make_filled(call, make_dense, Operation::backward, 1);
  call.drop("seqused_k");
  call.tensors.size = offsetof(strobe_tensors, seqused_k);
  call.tensors.seqused_k = reinterpret_cast<const strobe_tensor *>(1); // `seqused_k` is the word after the end of the older struct
  const Held held = prepared(call);
  call.tensors.seqused_k = nullptr;
  strobe_addresses at = addresses(call);
  at.size = offsetof(strobe_addresses, seqused_k), at.seqused_k = &call;
  REQUIRE_MESSAGE(strobe_run(held.get(), &at, nullptr) == STROBE_OK, error());
  const std::vector<unsigned char> found = bytes_of_results(call);
  REQUIRE_MESSAGE(call.run() == STROBE_OK, error());
  CHECK(bytes_of_results(call) == found);
  at.size = sizeof at;
  CHECK(strobe_run(held.get(), &at, nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(error() == "seqused_k: given, where the call was prepared without one; accepted is null");
}

TEST_CASE("prepared: without a maximum, other lengths are other plans") {
  for (Operation operation : {Operation::forward, Operation::backward})
    for (auto [prepared_for, run_on] : {std::pair{13, 20}, {20, 13}, {1, Sq}}) {
      auto make = [&, operation = operation](Call &call, int32_t length, int seed) {
        make_filled(call, make_varlen, operation, seed);
        call.attention.max_seqlen_q = call.attention.max_seqlen_k = 0;
        call.data<int32_t>("cu_seqlens_q")[1] = length;
      };
      Call first, whole, again;
      make(first, prepared_for, 1), make(whole, int32_t(run_on), 2), make(again, int32_t(run_on), 2);
      const Held held = prepared(first);
      REQUIRE_MESSAGE(whole.run() == STROBE_OK, error());
      const strobe_addresses at = addresses(again);
      REQUIRE_MESSAGE(strobe_run(held.get(), &at, nullptr) == STROBE_OK, error());
      CHECK(bytes_of_results(whole) == bytes_of_results(again));
    }
}

TEST_CASE("prepared: threads and workspace") {
  Call call;
  make_filled(call, make_dense, Operation::forward, 1);
  call.execution.threads = 2;
  const Held held = prepared(call);
  const strobe_addresses at = addresses(call);
  strobe_execution how{};
  how.size = sizeof how, how.threads = 3;
  CHECK(strobe_run(held.get(), &at, &how) == STROBE_INVALID_ARGUMENT);
  CHECK(error() == "execution.threads: 3; accepted is 2, as prepared, or 0 for the same");
  for (int32_t threads : {0, 2}) {
    how.threads = threads;
    CHECK(strobe_run(held.get(), &at, &how) == STROBE_OK);
  }
  strobe_plan plan{};
  plan.size = sizeof plan;
  REQUIRE(strobe_prepared_plan(held.get(), &plan) == STROBE_OK);
  std::vector<unsigned char> memory(plan.workspace_bytes + 256);
  how.workspace = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
  how.workspace_bytes = plan.workspace_bytes - 1;
  CHECK(strobe_run(held.get(), &at, &how) == STROBE_INVALID_ARGUMENT);
  CHECK(error().starts_with("execution.workspace_bytes: "));
  how.workspace_bytes = plan.workspace_bytes;
  CHECK(strobe_run(held.get(), &at, &how) == STROBE_OK);
}

TEST_CASE("prepared: what cannot run cannot be prepared") {
  Call call;
  make_dense(call, Operation::forward);
  strobe_prepared *made = nullptr;
  CHECK(strobe_prepare(&call.attention, &call.tensors, nullptr, 7, &made) == STROBE_INVALID_ARGUMENT);
  CHECK(strobe_prepare(&call.attention, &call.tensors, nullptr, STROBE_FORWARD, nullptr) == STROBE_INVALID_ARGUMENT);
  call.attention.engine = "reference"; // its results are float64
  CHECK(strobe_prepare(&call.attention, &call.tensors, nullptr, STROBE_FORWARD, &made) == STROBE_INVALID_ARGUMENT);
  CHECK(error().starts_with("out: dtype float32"));
  CHECK(made == nullptr);
  strobe_release(nullptr);
}

TEST_CASE("prepared: many threads run one call at a time") {
  Call first;
  make_filled(first, make_dense, Operation::forward, 1);
  const Held held = prepared(first);
  constexpr int kThreads = 4, kRounds = 20;
  std::vector<int> wrong(kThreads);
  std::vector<std::thread> team;
  for (int n = 0; n < kThreads; n++)
    team.emplace_back([&, n] {
      for (int round = 0; round < kRounds; round++) {
        Call whole, again;
        make_filled(whole, make_dense, Operation::forward, 10 * n + round),
            make_filled(again, make_dense, Operation::forward, 10 * n + round);
        const strobe_addresses at = addresses(again);
        wrong[n] += whole.run() != STROBE_OK || strobe_run(held.get(), &at, nullptr) != STROBE_OK ||
                    bytes_of_results(whole) != bytes_of_results(again);
      }
    });
  for (std::thread &t : team) t.join();
  for (int w : wrong) CHECK(w == 0);
}
