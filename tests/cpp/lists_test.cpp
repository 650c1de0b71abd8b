// Lists in host memory that another thread changes while a call runs: what was checked is what counts, and nothing else is read or written.
#include <atomic>
#include <thread>

#include "attention/contents.h"
#include "call.h"

using namespace strobe;
using namespace strobe::test;

namespace {

constexpr const char *kLists[] = {"cu_seqlens_q", "cu_seqlens_k", "block_rows", "block_cols", "block_rows_t",
                                  "block_cols_t", "rng",          "seqused_k",  "page_table"};

// Numbers that no check would let through; as a seed, another one.
void spoil(Call &c) {
  for (const char *name : kLists)
    if (c.has(name)) std::memset(c.data<char>(name), 0x3F, c.memory_bytes(name));
}

// A caller's pool that spoils the lists as soon as it is asked to work.
void spoiling(void *pool, int32_t n, void (*body)(void *, int32_t), void *arg) {
  spoil(*static_cast<Call *>(pool));
  for (int32_t i = 0; i < n; i++) body(arg, i);
}

void make_padded(Call &c, Direction direction) { // three tokens of q and two of k belong to no sequence
  make_varlen(c, direction);
  c.add_values<int32_t>("cu_seqlens_q", DType::i32, {0, 13, Sq - 3});
  c.add_values<int32_t>("cu_seqlens_k", DType::i32, {0, 0, Sk - 2});
  c.add_values<int64_t>("rng", DType::i64, {1, 2});
  c.add_values<int32_t>("seqused_k", DType::i32, {0, 20});
  c.attention.dropout = 0.25;
}

using Make = void (*)(Call &, Direction);
void make_in_pages(Call &c, Direction direction) { // which have no backward
  direction == Direction::forward ? make_paged(c, true) : make_dense(c, direction);
}
constexpr Make kCalls[] = {make_padded, make_sparse, make_dense, make_in_pages};
constexpr const char *kResults[] = {"out", "lse", "max_logit", "column_sums", "dq", "dk", "dv", "dbias", "dsinks"};
constexpr const char *kEngines[] = {"cpu-baseline", "cpu-avx2", "cpu-avx512", "cpu-amx", "cpu-avx512bf16", "cpu-neon"};

void make(Call &c, Make make, Direction direction) {
  make(c, direction);
  for (const char *name : {"q", "k", "v", "dout", "bias", "sinks", "alibi_slopes", "dlse"})
    if (c.has(name)) c.fill<float>(name, 0.3, 0.7);
  if (c.has("mask")) std::memset(c.data<char>("mask"), 1, c.memory_bytes("mask"));
  if (direction == Direction::backward) {
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
  make_dense(c, Direction::forward);
  c.attention.engine = engine;
  return c.run() == STROBE_OK;
}

} // namespace

TEST_CASE("lists: changed in the midst of a call") {
  for (const char *engine : kEngines) {
    if (!runs_here(engine)) continue;
    for (Make made : kCalls)
      for (Direction direction : {Direction::forward, Direction::backward}) {
        Call calm, disturbed;
        for (Call *c : {&calm, &disturbed}) make(*c, made, direction), c->attention.engine = engine;
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
    for (Call *c : {&calm, &disturbed}) make(*c, made, Direction::forward);
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
  constexpr int64_t last = H * Sq - 4; // of the last head, before the padding
  for (bool selected : {false, true})
    for (Direction direction : {Direction::forward, Direction::backward}) {
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
        make_varlen(c, direction);
        c.add_values<int32_t>("cu_seqlens_q", DType::i32, {0, 13, Sq - 3});
        c.add_values<int32_t>("cu_seqlens_k", DType::i32, {0, 0, Sk - 2});
        c.execution.threads = 4;
        const std::vector<std::pair<const char *, std::vector<int64_t>>> wide = {
            {"out", {Sq, H, Dv}}, {"lse", {H, Sq}},     {"dout", {Sq, H, Dv}}, {"dlse", {H, Sq}},
            {"dq", {Sq, H, D}},   {"dk", {Sk, Hkv, D}}, {"dv", {Sk, Hkv, Dv}}};
        for (const auto &[name, shape] : wide)
          if (c.has(name)) c.add(name, DType::f64, shape);
        for (const char *name : {"max_logit", "column_sums"}) c.drop(name); // which want all rows
        for (const char *name : {"q", "k", "v"}) c.fill<float>(name, 0.3, 0.7);
        for (const char *name : {"dout", "dlse", "out", "lse"})
          if (c.has(name)) c.fill<double>(name, 0.2, 0.3);
        strobe_selection s{};
        s.size = sizeof s, s.rows = both->chosen.data(), s.n_rows = 3;
        if (both == &disturbed) c.execution.parallel = spoil_both, c.execution.pool = both;
        const auto reference = direction == Direction::forward ? strobe_reference_forward : strobe_reference_backward;
        const int32_t status = reference(&c.attention, &c.tensors, &c.execution, selected ? &s : nullptr);
        INFO(strobe_last_error());
        REQUIRE(status == STROBE_OK);
      }
      CHECK((results(calm.call) == results(disturbed.call)));
    }
}

// Between any two reads of a check: for sanitizers to watch. The call runs or says what is wrong.
TEST_CASE("lists: changed by another thread all the time") {
  Call c;
  make(c, make_sparse, Direction::forward);
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
  int refused = 0; // whatever the lists hold when they are copied, they are taken or refused, and never read outside of what there is
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
  const int32_t *copy = own.copy<int32_t>(t);
  CHECK(copy != list);
  CHECK(std::equal(list, list + 3, copy));
  CHECK(own.copy<int32_t>(t) == copy);
  t.shape[0] = 2;
  CHECK(own.copy<int32_t>(t) != copy);
  t.strides[0] = 2;
  CHECK(own.copy<int32_t>(t)[1] == 9);
}

TEST_CASE("lists: of any strides, in a whole call, in one that was prepared, and in the reference") {
  for (Make made : {make_padded, make_sparse, make_dense, make_in_pages})
    for (Direction direction : {Direction::forward, Direction::backward})
      for (const auto &[stride, backwards] : {std::pair{1, false}, {3, false}, {2, true}})
        for (const char *engine : {"", "reference"}) {
          Call plain, strided;
          for (Call *c : {&plain, &strided}) {
            make(*c, made, direction);
            if (*engine) make_for_reference(*c);
            if (*engine && direction == Direction::backward) c->drop("out"), c->drop("lse");
          }
          for (const char *name : kLists)
            if (strided.has(name)) strided.spread(name, stride, backwards);
          REQUIRE_MESSAGE(plain.run() == STROBE_OK, strobe_last_error());
          strobe_prepared *prepared = nullptr;
          REQUIRE_MESSAGE(strobe_prepare(&strided.attention, &strided.tensors, &strided.execution, int32_t(direction), &prepared) ==
                              STROBE_OK,
                          strobe_last_error());
          REQUIRE_MESSAGE(strided.run() == STROBE_OK, strobe_last_error());
          CHECK((results(plain) == results(strided)));
          for (const char *name : {"max_logit", "column_sums", "dq", "dk", "dv", "dbias", "dsinks"})
            if (strided.has(name)) std::memset(strided.data<char>(name), 0, strided.memory_bytes(name));
          const strobe_addresses at = addresses(strided);
          REQUIRE_MESSAGE(strobe_run(prepared, &at, &strided.execution) == STROBE_OK, strobe_last_error());
          CHECK((results(plain) == results(strided)));
          strobe_release(prepared);
        }
}

TEST_CASE("lists: one length for all sequences") {
  Call plain, strided;
  for (Call *c : {&plain, &strided}) make(*c, make_dense, Direction::forward);
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
