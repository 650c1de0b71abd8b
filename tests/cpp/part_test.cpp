// Parts of a larger problem: refusals, and randomly drawn ranges, which must be valid if and only if no error is reported.
// STROBE_PART_ROUNDS sets the number of these.
#include <cstddef>
#include <cstdlib>
#include <random>

#include "call.h"

using namespace strobe;
using namespace strobe::test;

namespace {

std::string refusal(Call &call) {
  const int32_t status = call.run();
  CHECK(call.untouched());
  return status == STROBE_OK ? "" : strobe_last_error();
}

} // namespace

TEST_CASE("part: what is refused") {
  struct Wrong {
    const char *reason;
    void (*make)(Call &, PartOf &);
  };
  const Wrong wrongs[] = {
      {"part: size is 4", [](Call &, PartOf &p) { p.part.size = 4; }},
      {"part.q_ranges: missing; accepted is a list in host memory", [](Call &, PartOf &p) { p.part.q_ranges = nullptr; }},
      {"part.k_ranges: missing; accepted is a list in host memory", [](Call &, PartOf &p) { p.part.k_ranges = nullptr; }},
      {"part.seqlens_q: missing", [](Call &, PartOf &p) { p.part.seqlens_q = nullptr; }},
      {"part.seqlens_k: missing", [](Call &, PartOf &p) { p.part.seqlens_k = nullptr; }},
      {"part.q_ranges: (20, 9) at [0, 1] begins before 21, where the range before ends; accepted are ascending and disjoint ranges",
       [](Call &, PartOf &p) { p.q_ranges.values[1] = 16; }},
      {"part.q_ranges: (5, 12) at [0, 1] begins before 29",
       [](Call &, PartOf &p) { p.q_ranges.values = {20, 9, 5, 12}, p.q_ranges.shape({1, 2, 2}); }},
      {"part.q_ranges: (20, 11) at [0, 1]; accepted are a start and a length within the 30 positions that seqlens_q says",
       [](Call &, PartOf &p) { p.q_ranges.values[3] = 11; }},
      {"part.k_ranges: (-1, 38) at [0, 0]", [](Call &, PartOf &p) { p.k_ranges.values[0] = -1; }},
      {"part.k_ranges: (0, -1) at [0, 0]", [](Call &, PartOf &p) { p.k_ranges.values[1] = -1; }},
      {"part.k_ranges: (9223372036854775807, 1) at [0, 0]",
       [](Call &, PartOf &p) { p.k_ranges.values = {INT64_MAX, 1}, p.k_ranges.shape({1, 1, 2}); }},
      {"part.q_ranges: hold 20 rows of sequence 0; accepted is 21, as many as it has here",
       [](Call &, PartOf &p) { p.q_ranges.values[3] = 8; }},
      {"part.q_ranges: shape (1, 4, 1); accepted is (B|1, n, start and length)", [](Call &, PartOf &p) { p.q_ranges.shape({1, 4, 1}); }},
      {"part.q_ranges: rank 2", [](Call &, PartOf &p) { p.q_ranges.shape({2, 2}); }},
      {"part.q_ranges: dtype int32; accepted is int64", [](Call &, PartOf &p) { p.q_ranges.tensor.dtype = STROBE_INT32; }},
      {"part.k_ranges: lies on a CUDA device; accepted is a list in host memory",
       [](Call &, PartOf &p) { p.k_ranges.tensor.device_type = STROBE_CUDA; }},
      {"part.seqlens_q: -1 at [0]; accepted are 0 to 2147483647", [](Call &, PartOf &p) { p.seqlens_q.values[0] = -1; }},
      {"part.seqlens_k: 2147483648 at [0]", [](Call &, PartOf &p) { p.seqlens_k.values[0] = int64_t{1} << 31; }},
      {"part.first_head: -1", [](Call &, PartOf &p) { p.part.first_head = -1; }},
      {"part.first_batch: 2147483648", [](Call &, PartOf &p) { p.part.first_batch = int64_t{1} << 31; }},
      {"part.heads: 5 with first_head 2 and 4 heads of q; accepted are 6 or more, or 0 for that many",
       [](Call &, PartOf &p) { p.part.heads = 5, p.part.first_head = 2; }},
      {"part.partial: 2; accepted is 0 or 1", [](Call &, PartOf &p) { p.part.partial = 2; }},
      {"part.reserved: 1; accepted is 0", [](Call &, PartOf &p) { p.part.reserved = 1; }},
      {"seqused_k: given beside part", [](Call &c, PartOf &) { c.add_values<int32_t>("seqused_k", DType::i32, {30, Sk}); }},
      {"invariant: given beside part", [](Call &c, PartOf &) { c.attention.invariant = 1; }},
      {"sinks: given with a partial part; accepted are none", [](Call &, PartOf &p) { p.part.partial = 1; }},
      {"lse: rank 3; accepted is rank 4, (two numbers, B, H, Sq)", [](Call &, PartOf &p) { p.part.partial = 1; }},
      {"delta: given without a partial part", [](Call &c, PartOf &) { c.add("delta", DType::f32, {B, H, Sq}); }},
      {"accumulate: 2; accepted is 0 or 1", [](Call &c, PartOf &) { c.attention.accumulate = 2; }},
      {"mask: shape (2, 1, 21, 38); accepted is (B|1, H|1, Sq|1, Sk of the whole problem|1) = (2|1, 4|1, 21|1, 40|1)",
       [](Call &c, PartOf &) { c.add("mask", DType::boolean, {B, 1, Sq, Sk}); }},
  };
  for (const Wrong &wrong : wrongs) {
    Call call;
    PartOf of;
    make_part(call, of, Operation::backward);
    wrong.make(call, of);
    const std::string all = refusal(call);
    CHECK_MESSAGE(std::ranges::any_of(lines(all), [&](const std::string &line) { return line.starts_with(wrong.reason); }), wrong.reason,
                  " is not in\n", all);
  }
}

TEST_CASE("part: results that belong to whole rows and columns are refused") {
  Call call;
  PartOf of;
  make_part(call, of, Operation::forward);
  call.add("max_logit", DType::f32, {B, H});
  CHECK(refusal(call).starts_with("max_logit: given beside part"));
  call.drop("max_logit"), call.add("column_sums", DType::f32, {B, H, Sk});
  CHECK(refusal(call).starts_with("column_sums: given beside part"));
}

TEST_CASE("part: a batch of any size is refused at once") {
  for (const bool partial : {false, true}) {
    Call call;
    PartOf of;
    make_part(call, of, Operation::forward, partial);
    of.set(of.q_ranges, {5, 12}, {1, 1, 2});
    call["q"].shape[0] = int64_t{1} << 62, call["q"].strides[0] = 0;
    CHECK(refusal(call).find("k: shape") != std::string::npos);
  }
}

TEST_CASE("part: what is legal although it looks odd") {
  auto runs = [](void (*change)(Call &, PartOf &)) {
    for (Operation operation : {Operation::forward, Operation::backward}) {
      Call call;
      PartOf of;
      make_part(call, of, operation);
      change(call, of);
      CHECK_MESSAGE(call.run() == STROBE_OK, strobe_last_error());
    }
  };
  runs([](Call &, PartOf &) {});
  runs([](Call &, PartOf &p) { // an empty range may stand anywhere
    p.q_ranges.values = {5, 12, 0, 0, 20, 9, 30, 0}, p.q_ranges.shape({1, 4, 2});
  });
  runs([](Call &, PartOf &p) { // each sequence has ranges of its own
    p.q_ranges.values = {5, 12, 20, 9, 0, 0, 9, 21}, p.q_ranges.shape({2, 2, 2});
    p.seqlens_q.values = {29, 30}, p.seqlens_q.shape({2});
  });
  runs([](Call &, PartOf &p) { // a tensor that stores all starts first, and then all lengths
    p.q_ranges.values = {5, 20, 12, 9}, p.q_ranges.tensor.strides[1] = 1, p.q_ranges.tensor.strides[2] = 2;
    p.seqlens_k.tensor.shape[0] = B, p.seqlens_k.tensor.strides[0] = 0;
  });
  runs([](Call &, PartOf &p) { p.part.first_head = 5, p.part.heads = 9, p.part.first_batch = INT32_MAX; });
  runs([](Call &c, PartOf &) { c.add("mask", DType::boolean, {B, 1, Sq, 40}); });
}

TEST_CASE("part: ranges drawn at random") {
  std::mt19937 generator(16);
  auto draw = [&](int64_t n) { return static_cast<int64_t>(generator() % static_cast<uint32_t>(n)); };
  const char *wanted = std::getenv("STROBE_PART_ROUNDS");
  const int rounds = wanted ? std::atoi(wanted) : 4000;
  int accepted = 0;
  for (int number = 0; number < rounds; number++) {
    Call call;
    PartOf of;
    make_part(call, of, draw(2) ? Operation::forward : Operation::backward, draw(2));
    for (const char *name : {"rng", "alibi_slopes"})
      if (draw(2)) call.drop(name);
    const int64_t batch = draw(3) ? 1 : B, count = 1 + draw(4), whole = Sq + draw(12);
    std::vector<int64_t> values;
    for (int64_t b = 0; b < batch; b++) { // draws the ranges' lengths, and the gaps before them
      int64_t at = 0, rows = Sq, room = whole - Sq;
      for (int64_t n = 0; n < count; n++) {
        const int64_t gap = draw(room + 1), length = n + 1 < count ? draw(rows + 1) : rows;
        values.insert(values.end(), {at + gap, length});
        at += gap + length, rows -= length, room -= gap;
      }
    }
    // In half of the cases, one number is changed by up to 3.
    if (draw(2)) values[static_cast<size_t>(draw(static_cast<int64_t>(values.size())))] += draw(7) - 3;
    of.set(of.q_ranges, values, {batch, count, 2}), of.set(of.seqlens_q, {whole}, {1});
    bool good = true;
    for (int64_t b = 0; b < batch; b++) {
      std::vector<bool> held(static_cast<size_t>(whole));
      int64_t rows = 0, last = -1;
      for (int64_t n = 0; n < count; n++) {
        const int64_t start = values[2 * (b * count + n)], length = values[2 * (b * count + n) + 1];
        good &= start >= 0 && length >= 0 && start + length <= whole;
        if (!good) break;
        for (int64_t i = start; i < start + length; i++) good &= i > last, last = i, rows++;
      }
      good &= rows == Sq;
      if (!good) break;
    }
    const int32_t status = call.run();
    CHECK_MESSAGE((status == STROBE_OK) == good, strobe_last_error());
    if (status != STROBE_OK) CHECK(call.untouched());
    accepted += good;
  }
  CHECK(accepted > rounds / 4);
  CHECK(accepted < rounds * 7 / 8);
}

TEST_CASE("part: a prepared call keeps its ranges") {
  for (bool partial : {false, true})
    for (Operation operation : {Operation::forward, Operation::backward}) {
      Call call;
      PartOf of;
      make_part(call, of, operation, partial);
      for (const char *name : {"q", "k", "v"}) call.fill<float>(name, 1, 0.37);
      strobe_prepared *held = nullptr;
      REQUIRE_MESSAGE(strobe_prepare(&call.attention, &call.tensors, &call.execution, int32_t(operation), &held) == STROBE_OK,
                      strobe_last_error());
      const char *result = operation == Operation::forward ? "lse" : "dk";
      REQUIRE(call.run() == STROBE_OK);
      const std::vector<float> wanted(call.data<float>(result), call.data<float>(result) + call.memory_bytes(result) / 4);
      std::fill_n(call.data<float>(result), wanted.size(), 0.0f);
      of.q_ranges.values = {0, 21, 0, 0}, of.part = {}; // a run does not read the lists again
      strobe_addresses at{};
      at.size = sizeof at;
      const std::pair<const char *, void *strobe_addresses::*> fields[] = {{"q", &strobe_addresses::q},
                                                                           {"k", &strobe_addresses::k},
                                                                           {"v", &strobe_addresses::v},
                                                                           {"out", &strobe_addresses::out},
                                                                           {"lse", &strobe_addresses::lse},
                                                                           {"dout", &strobe_addresses::dout},
                                                                           {"dlse", &strobe_addresses::dlse},
                                                                           {"dq", &strobe_addresses::dq},
                                                                           {"dk", &strobe_addresses::dk},
                                                                           {"dv", &strobe_addresses::dv},
                                                                           {"delta", &strobe_addresses::delta},
                                                                           {"rng", &strobe_addresses::rng},
                                                                           {"alibi_slopes", &strobe_addresses::alibi_slopes},
                                                                           {"sinks", &strobe_addresses::sinks},
                                                                           {"dsinks", &strobe_addresses::dsinks}};
      for (const auto &[name, field] : fields)
        for (const NamedSlot &slot : kSlots)
          if (std::string(slot.name) == name && call.tensors.*slot.slot) at.*field = (call.tensors.*slot.slot)->data;
      CHECK_MESSAGE(strobe_run(held, &at, nullptr) == STROBE_OK, strobe_last_error());
      strobe_release(held);
      CHECK(std::equal(wanted.begin(), wanted.end(), call.data<float>(result)));
    }
}

TEST_CASE("part: a program built before there were parts") {
  Call call;
  PartOf of;
  make_part(call, of, Operation::forward);
  call.attention.size = offsetof(strobe_attention, part);
  call.attention.part = reinterpret_cast<const strobe_part *>(1); // `part` is the word after the end of the older struct
  CHECK_MESSAGE(call.run() == STROBE_OK, strobe_last_error());
}

TEST_CASE("part: GPU engines that compute none say so") {
  for (bool accumulate : {false, true}) {
    Call call;
    PartOf of;
    make_part(call, of, Operation::backward);
    if (accumulate) call.attention.part = nullptr, call.attention.accumulate = 1;
    call.attention.engine = "cuda-tf32";
    call.move_to_gpu();
    CHECK(strobe_kernels(&call.attention, &call.tensors, STROBE_BACKWARD, 90, nullptr, 0, nullptr) == STROBE_UNSUPPORTED);
    const std::string said = strobe_last_error(),
                      reason = accumulate ? "no accumulate: it writes gradients" : "computes no parts of a larger problem";
    CHECK_MESSAGE(said.find("cuda-tf32: " + reason) != std::string::npos, said);
  }
}

TEST_CASE("part: accumulate adds to what is there") {
  Call call, plain;
  for (Call *each : {&call, &plain}) {
    make_dense(*each, Operation::backward);
    for (const char *name : {"q", "k", "v", "dout"}) each->fill<float>(name, 1, 0.37);
    for (const char *name : {"dq", "dk", "dv"}) each->fill<float>(name, 3, 0.1);
  }
  const std::vector<float> before(call.data<float>("dk"), call.data<float>("dk") + call.memory_bytes("dk") / 4);
  call.attention.accumulate = 1;
  REQUIRE_MESSAGE(call.run() == STROBE_OK, strobe_last_error());
  REQUIRE(plain.run() == STROBE_OK);
  for (size_t n = 0; n < before.size(); n++) CHECK(call.data<float>("dk")[n] == before[n] + plain.data<float>("dk")[n]);
}

TEST_CASE("part: the reference adds to float32, as other engines do, and to float64") {
  for (DType type : {DType::f32, DType::f64}) {
    Call call, plain;
    for (Call *each : {&call, &plain}) {
      make_dense(*each, Operation::backward);
      for (const char *name : {"q", "k", "v", "dout"}) each->fill<float>(name, 1, 0.37);
      make_for_reference(*each);
      for (const char *name : {"out", "lse"}) each->drop(name);
    }
    REQUIRE_MESSAGE(plain.run() == STROBE_OK, std::string(strobe_last_error()));
    const auto shape = [&](const char *name) { return std::vector<int64_t>(call[name].shape, call[name].shape + call[name].rank); };
    for (const char *name : {"dq", "dk", "dv"}) call.add(name, type, shape(name));
    call.attention.accumulate = 1;
    for (const char *name : {"dq", "dk", "dv"}) std::memset(call.data<char>(name), 0, call.memory_bytes(name));
    for (int n = 0; n < 2; n++) REQUIRE_MESSAGE(call.run() == STROBE_OK, std::string(strobe_last_error()));
    for (const char *name : {"dq", "dk", "dv"})
      for (size_t i = 0; i < plain.memory_bytes(name) / sizeof(double); i++) {
        const double once = plain.data<double>(name)[i];
        if (type == DType::f32)
          CHECK(call.data<float>(name)[i] == float(float(once) + once));
        else
          CHECK(call.data<double>(name)[i] == once + once);
      }
  }
  Call call;
  make_dense(call, Operation::backward);
  call.attention.engine = "reference", call.attention.accumulate = 1;
  for (const char *name : {"out", "lse", "bias", "dbias", "sinks", "dsinks"}) call.drop(name);
  call.add("dk", DType::f16, {B, Hkv, Sk, D});
  CHECK(refusal(call) == "dk: dtype float16; accepted is float32, float64");
}
