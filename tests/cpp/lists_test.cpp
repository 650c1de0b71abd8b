// Lists in host memory that another thread changes while a call runs. The checked values must be used, and nothing else may be read or
// written.
#include <atomic>
#include <thread>

#include "attention/contents.h"
#include "call.h"

using namespace strobe;
using namespace strobe::test;

namespace {

constexpr const char *kLists[] = {"cu_seqlens_q", "cu_seqlens_k", "block_rows", "block_cols", "block_rows_t",
                                  "block_cols_t", "rng",          "seqused_k",  "page_table"};

// Writes numbers that every check refuses. (Such a number as a seed is only another seed.)
void spoil(Call &c) {
  for (const char *name : kLists)
    if (c.has(name)) std::memset(c.data<char>(name), 0x3F, c.memory_bytes(name));
}

// A caller's pool that spoils the lists when its work begins.
void spoiling(void *pool, int32_t n, void (*body)(void *, int32_t), void *arg) {
  spoil(*static_cast<Call *>(pool));
  for (int32_t i = 0; i < n; i++) body(arg, i);
}

void make_padded(Call &c, Operation operation) { // three tokens of q and two of k belong to no sequence
  make_varlen(c, operation);
  c.add_values<int32_t>("cu_seqlens_q", DType::i32, {0, 13, Sq - 3});
  c.add_values<int32_t>("cu_seqlens_k", DType::i32, {0, 0, Sk - 2});
  c.add_values<int64_t>("rng", DType::i64, {1, 2});
  c.add_values<int32_t>("seqused_k", DType::i32, {0, 20});
  c.attention.dropout = 0.25;
}

using Make = void (*)(Call &, Operation);
void make_in_pages(Call &c, Operation operation) { // calls with pages have no backward
  operation == Operation::forward ? make_paged(c, true) : make_dense(c, operation);
}
constexpr Make kCalls[] = {make_padded, make_sparse, make_dense, make_in_pages};
constexpr const char *kResults[] = {"out", "lse", "max_logit", "column_sums", "dq", "dk", "dv", "dbias", "dsinks"};
constexpr const char *kEngines[] = {"cpu-baseline", "cpu-avx2", "cpu-avx512", "cpu-amx", "cpu-avx512bf16", "cpu-neon"};

void make(Call &c, Make make, Operation operation) {
  make(c, operation);
  for (const char *name : {"q", "k", "v", "dout", "bias", "sinks", "alibi_slopes", "dlse"})
    if (c.has(name)) c.fill<float>(name, 0.3, 0.7);
  if (c.has("mask")) std::memset(c.data<char>("mask"), 1, c.memory_bytes("mask"));
  if (operation == Operation::backward) {
    c.fill<float>("out", 0.1, 0.2);
    std::fill_n(c.data<float>("lse"), c.memory_bytes("lse") / sizeof(float), 1.5f);
  }
  c.execution.threads = 4;
}

std::map<std::string, std::vector<unsigned char>> results(Call &c) {
  std::map<std::string, std::vector<unsigned char>> all;
  for (const char *name : kResults)
    if (c.has(name)) all[name].assign(c.data<unsigned char>(name), c.data<unsigned char>(name) + c.memory_bytes(name));
  return all;
}

bool runs_here(const char *engine) {
  Call c;
  make_dense(c, Operation::forward);
  c.attention.engine = engine;
  return c.run() == STROBE_OK;
}

} // namespace

TEST_CASE("lists: changed in the midst of a call") {
  for (const char *engine : kEngines) {
    if (!runs_here(engine)) continue;
    for (Make made : kCalls)
      for (Operation operation : {Operation::forward, Operation::backward}) {
        Call calm, disturbed;
        for (Call *c : {&calm, &disturbed}) make(*c, made, operation), c->attention.engine = engine;
        disturbed.execution.parallel = spoiling, disturbed.execution.pool = &disturbed;
        REQUIRE(calm.run() == STROBE_OK);
        REQUIRE(disturbed.run() == STROBE_OK);
        CHECK((results(calm) == results(disturbed)));
      }
  }
}

TEST_CASE("lists: changed in the midst of a prepared call") {
  for (Make made : {make_padded, make_sparse}) {
    Call calm, disturbed;
    for (Call *c : {&calm, &disturbed}) make(*c, made, Operation::forward);
    disturbed.execution.parallel = spoiling, disturbed.execution.pool = &disturbed;
    strobe_prepared *prepared = nullptr;
    REQUIRE(strobe_prepare(&disturbed.attention, &disturbed.tensors, &disturbed.execution, STROBE_FORWARD, &prepared) == STROBE_OK);
    const strobe_addresses at = addresses(disturbed);
    REQUIRE(calm.run() == STROBE_OK);
    const int32_t status = strobe_run(prepared, &at, &disturbed.execution);
    INFO(strobe_last_error());
    REQUIRE(status == STROBE_OK);
    CHECK((results(calm) == results(disturbed)));
    CHECK(strobe_run(prepared, &at, &disturbed.execution) == STROBE_INVALID_ARGUMENT);
    strobe_release(prepared);
  }
}

TEST_CASE("lists: changed in the midst of the reference") {
  constexpr int64_t last = H * Sq - 4; // in the last head, before the padding
  for (bool selected : {false, true})
    for (Operation operation : {Operation::forward, Operation::backward}) {
      struct Both {
        Call call;
        std::vector<int64_t> chosen = {0, 20, last};
      } calm, disturbed;
      auto spoil_both = [](void *pool, int32_t n, void (*body)(void *, int32_t), void *arg) {
        Both &both = *static_cast<Both *>(pool);
        spoil(both.call);
        std::ranges::fill(both.chosen, int64_t{1} << 40);
        for (int32_t i = 0; i < n; i++) body(arg, i);
      };
      for (Both *both : {&calm, &disturbed}) {
        Call &c = both->call;
        make_varlen(c, operation);
        c.add_values<int32_t>("cu_seqlens_q", DType::i32, {0, 13, Sq - 3});
        c.add_values<int32_t>("cu_seqlens_k", DType::i32, {0, 0, Sk - 2});
        c.execution.threads = 4;
        const std::vector<std::pair<const char *, std::vector<int64_t>>> wide = {
            {"out", {Sq, H, Dv}}, {"lse", {H, Sq}},     {"dout", {Sq, H, Dv}}, {"dlse", {H, Sq}},
            {"dq", {Sq, H, D}},   {"dk", {Sk, Hkv, D}}, {"dv", {Sk, Hkv, Dv}}};
        for (const auto &[name, shape] : wide)
          if (c.has(name)) c.add(name, DType::f64, shape);
        for (const char *name : {"max_logit", "column_sums"}) c.drop(name); // these results need all rows
        for (const char *name : {"q", "k", "v"}) c.fill<float>(name, 0.3, 0.7);
        for (const char *name : {"dout", "dlse", "out", "lse"})
          if (c.has(name)) c.fill<double>(name, 0.2, 0.3);
        strobe_selection s{};
        s.size = sizeof s, s.rows = both->chosen.data(), s.n_rows = 3;
        if (both == &disturbed) c.execution.parallel = spoil_both, c.execution.pool = both;
        const auto reference = operation == Operation::forward ? strobe_reference_forward : strobe_reference_backward;
        const int32_t status = reference(&c.attention, &c.tensors, &c.execution, selected ? &s : nullptr);
        INFO(strobe_last_error());
        REQUIRE(status == STROBE_OK);
      }
      CHECK((results(calm.call) == results(disturbed.call)));
    }
}

// Another thread changes the lists all the time, so that sanitizers see a bad access between any two reads of a check. The call runs or
// reports an error.
TEST_CASE("lists: changed by another thread all the time") {
  Call c;
  make(c, make_sparse, Operation::forward);
  c.execution.threads = 1;
  std::map<std::string, std::vector<char>> good;
  for (const char *name : kLists)
    if (c.has(name)) good[name].assign(c.data<char>(name), c.data<char>(name) + c.memory_bytes(name));
  std::atomic<bool> done = false;
  std::thread other([&] {
    while (!done)
      for (auto &[name, bytes] : good) {
        volatile char *at = c.data<char>(name);
        for (size_t n = 0; n < bytes.size(); n++) at[n] = 0x3F;
        for (size_t n = 0; n < bytes.size(); n++) at[n] = bytes[n];
      }
  });
  int refused = 0; // whatever the lists hold when they are copied, they are accepted or refused, and nothing is read out of bounds
  for (int n = 0; n < 2000; n++) {
    const int32_t status = c.run();
    CHECK((status == STROBE_OK || status == STROBE_INVALID_ARGUMENT));
    refused += status != STROBE_OK;
  }
  done = true;
  other.join();
  MESSAGE(refused << " of 2000 refused");
  CHECK(c.run() == STROBE_OK);
}

TEST_CASE("lists: one copy of a list that is given twice") {
  int32_t list[] = {0, 5, 9};
  strobe_tensor t{};
  t.data = list, t.dtype = STROBE_INT32, t.rank = 1, t.shape[0] = 3, t.strides[0] = 1;
  OwnLists own;
  const int32_t *copy = own.ints(t).narrow();
  CHECK(copy != list);
  CHECK(std::equal(list, list + 3, copy));
  CHECK(own.ints(t).narrow() == copy);
  t.shape[0] = 2;
  CHECK(own.ints(t).narrow() != copy);
  t.strides[0] = 2;
  CHECK(own.ints(t).narrow()[1] == 9);
}

namespace {

constexpr const char *kOfEitherWidth[] = {"cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table"};

// Turns a list of int32 into a list of int64.
void widen(Call &c, const std::string &name) {
  const std::vector<int32_t> values(c.data<int32_t>(name), c.data<int32_t>(name) + c.memory_bytes(name) / sizeof(int32_t));
  const std::vector<int64_t> shape(c[name].shape, c[name].shape + c[name].rank);
  c.add(name, DType::i64, shape);
  std::copy(values.begin(), values.end(), c.data<int64_t>(name));
}

// Compares `other` with `plain`: the results of a full call and of a prepared one.
void check_same(Call &plain, Call &other) {
  REQUIRE_MESSAGE(plain.run() == STROBE_OK, std::string(strobe_last_error()));
  strobe_prepared *prepared = nullptr;
  REQUIRE_MESSAGE(strobe_prepare(&other.attention, &other.tensors, &other.execution, int32_t(other.operation), &prepared) == STROBE_OK,
                  std::string(strobe_last_error()));
  REQUIRE_MESSAGE(other.run() == STROBE_OK, std::string(strobe_last_error()));
  CHECK((results(plain) == results(other)));
  for (const char *name : {"max_logit", "column_sums", "dq", "dk", "dv", "dbias", "dsinks"})
    if (other.has(name)) std::memset(other.data<char>(name), 0, other.memory_bytes(name));
  const strobe_addresses at = addresses(other);
  REQUIRE_MESSAGE(strobe_run(prepared, &at, &other.execution) == STROBE_OK, std::string(strobe_last_error()));
  CHECK((results(plain) == results(other)));
  strobe_release(prepared);
}

// For each kind of call and each engine, makes two equal calls and lets `change` change the second one.
template <class Change> void with_each(Change change) {
  for (Make made : {make_padded, make_sparse, make_dense, make_in_pages})
    for (Operation operation : {Operation::forward, Operation::backward})
      for (const char *engine : {"", "reference"}) {
        Call plain, other;
        for (Call *c : {&plain, &other}) {
          make(*c, made, operation);
          if (*engine) make_for_reference(*c);
          if (*engine && operation == Operation::backward) c->drop("out"), c->drop("lse");
        }
        change(other);
        check_same(plain, other);
      }
}

} // namespace

TEST_CASE("lists: of any strides, in a whole call, in one that was prepared, and in the reference") {
  for (const auto &[stride, backwards] : {std::pair{1, false}, {3, false}, {2, true}})
    with_each([&](Call &c) {
      for (const char *name : kLists)
        if (c.has(name)) c.spread(name, stride, backwards);
    });
}

TEST_CASE("lists: of 64 bits") {
  for (bool spread : {false, true})
    with_each([&](Call &c) {
      for (const char *name : kOfEitherWidth)
        if (c.has(name)) {
          widen(c, name);
          if (spread) c.spread(name, 2, true);
        }
    });
}

TEST_CASE("lists: of 64 bits, with numbers that 32 bits would take for others") {
  constexpr int64_t wrap = int64_t{1} << 32;
  struct Wrong {
    Make make;
    const char *name;
    int index;
    int64_t value;
    const char *message;
  };
  const Wrong wrongs[] = {
      {make_padded, "cu_seqlens_q", 2, wrap + Sq - 3,
       "cu_seqlens_q: sequence 1 has 4294967301 tokens; accepted is at most max_seqlen_q = 13"},
      {make_padded, "cu_seqlens_q", 1, INT64_MAX, "cu_seqlens_q: sequence 0 has 9223372036854775807 tokens"},
      {make_padded, "cu_seqlens_q", 1, INT64_MIN, "cu_seqlens_q: falls from 0 at [0] to -9223372036854775808"},
      {make_padded, "cu_seqlens_q", 0, wrap, "cu_seqlens_q: starts at 4294967296; accepted is 0"},
      {make_dense, "seqused_k", 1, wrap + 5, "seqused_k: 4294967301 at [1]; accepted are 0 to 38, the length of k"},
      {make_in_pages, "page_table", 1, wrap + 3, "page_table: page 4294967299 at [0, 1]; accepted are 0 to 15"},
  };
  for (const Wrong &wrong : wrongs) {
    Call c;
    make(c, wrong.make, Operation::forward);
    widen(c, wrong.name);
    strobe_prepared *prepared = nullptr;
    REQUIRE_MESSAGE(strobe_prepare(&c.attention, &c.tensors, &c.execution, STROBE_FORWARD, &prepared) == STROBE_OK,
                    std::string(strobe_last_error()));
    c.data<int64_t>(wrong.name)[wrong.index] = wrong.value;
    const auto refused = [&](int32_t status) {
      CHECK(status == STROBE_INVALID_ARGUMENT);
      const std::string said = strobe_last_error();
      CHECK_MESSAGE(said.starts_with(wrong.message), said);
      CHECK(c.untouched());
    };
    refused(c.run());
    const strobe_addresses at = addresses(c);
    refused(strobe_run(prepared, &at, nullptr));
    strobe_release(prepared);
  }
  Call plain, wide; // entries of a page table past the last key that counts may be anything
  for (Call *c : {&plain, &wide}) make(*c, make_in_pages, Operation::forward);
  widen(wide, "page_table");
  wide.data<int64_t>("page_table")[6] = INT64_MAX, wide.data<int64_t>("page_table")[7] = wrap;
  check_same(plain, wide);
}

TEST_CASE("lists: of 64 bits in device memory are refused") {
  for (const char *name : kOfEitherWidth) {
    Call c;
    make(c, std::strcmp(name, "page_table") == 0 ? make_in_pages : make_padded, Operation::forward);
    widen(c, name);
    c.move_to_gpu();
    CHECK(strobe_kernels(&c.attention, &c.tensors, STROBE_FORWARD, 90, nullptr, 0, nullptr) == STROBE_INVALID_ARGUMENT);
    CHECK(std::string(strobe_last_error()) == std::string(name) + ": dtype int64; accepted is int32");
  }
}

TEST_CASE("lists: one length for all sequences") {
  Call plain, strided;
  for (Call *c : {&plain, &strided}) make(*c, make_dense, Operation::forward);
  std::ranges::fill_n(plain.data<int32_t>("seqused_k"), B, 17);
  strided.data<int32_t>("seqused_k")[0] = 17, strided.data<int32_t>("seqused_k")[1] = -1;
  strided["seqused_k"].strides[0] = 0;
  REQUIRE(plain.run() == STROBE_OK);
  REQUIRE_MESSAGE(strided.run() == STROBE_OK, strobe_last_error());
  CHECK((results(plain) == results(strided)));
  strided.data<int32_t>("seqused_k")[0] = Sk + 1;
  CHECK(strided.run() == STROBE_INVALID_ARGUMENT);
  CHECK(std::string(strobe_last_error()) == "seqused_k: 39 at [0]; accepted are 0 to 38, the length of k");
}
