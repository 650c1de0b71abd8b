// Refusals as data: the records of a failure, and how long they live. fuzz_test.cpp and validate_test.cpp compare each failure's text with
// them.
#include <thread>

#include "attention/refusal.h"
#include "call.h"
#include "refusals.h"

using namespace strobe;
using namespace strobe::test;

namespace {

// The refusal of a call that is valid before `change` changes it.
template <class Change> const strobe_refusal &refusal_of(Change &&change) {
  test::Call call;
  make_dense(call, Operation::forward);
  change(call);
  REQUIRE(call.run() == STROBE_INVALID_ARGUMENT);
  const strobe_refusal *first = strobe_last_refusal(0);
  REQUIRE(first != nullptr);
  REQUIRE(strobe_last_refusal(1) == nullptr);
  return *first;
}

std::vector<int64_t> sizes(const strobe_value &v) { return {v.sizes, v.sizes + v.count}; }

} // namespace

TEST_CASE("refusals: a thread that has not failed has none, and past the last one there is none") {
  std::thread([] {
    for (size_t n : {size_t{0}, size_t{1}, ~size_t{0}}) CHECK(strobe_last_refusal(n) == nullptr);
    test::Call call;
    make_dense(call, Operation::forward);
    CHECK(call.run() == STROBE_OK);
    CHECK(strobe_last_refusal(0) == nullptr);
    call.attention.softcap = -1, call.attention.tile_q = -2;
    CHECK(call.run() == STROBE_INVALID_ARGUMENT);
    CHECK(std::string(strobe_last_refusal(0)->argument) == "softcap");
    CHECK(std::string(strobe_last_refusal(1)->argument) == "tile_q");
    for (size_t n : {size_t{2}, size_t{3}, ~size_t{0}}) CHECK(strobe_last_refusal(n) == nullptr);
  }).join();
}

TEST_CASE("refusals: the values of a record") {
  const strobe_refusal &of_shape = refusal_of([](test::Call &c) { c["mask"].shape[1] = 2; });
  CHECK(of_shape.code == STROBE_CODE_SHAPE);
  CHECK(std::string(of_shape.words) == "shape {0}; accepted is {1}");
  REQUIRE(of_shape.n_values == 2);
  const strobe_value &given = *of_shape.values[0], &accepted = *of_shape.values[1];
  CHECK(given.kind == STROBE_VALUE_SIZES);
  CHECK(sizes(given) == std::vector<int64_t>{2, 2, 21, 38});
  CHECK(accepted.kind == STROBE_VALUE_AXES);
  CHECK(sizes(accepted) == std::vector<int64_t>{2, 4, 21, 38});
  CHECK(std::string(accepted.roles[2]) == "Sq");
  CHECK(accepted.or_one == 15);

  const strobe_refusal &of_dtype = refusal_of([](test::Call &c) { c["k"].dtype = 42; });
  CHECK(of_dtype.code == STROBE_CODE_DTYPE);
  CHECK(sizes(*of_dtype.values[0]) == std::vector<int64_t>{42});
  CHECK(sizes(*of_dtype.values[1]) == std::vector<int64_t>{STROBE_FLOAT32});

  const strobe_refusal &of_heads = refusal_of([](test::Call &c) {
    c.add("k", DType::f32, {test::B, 3, test::Sk, test::D}), c.add("v", DType::f32, {test::B, 3, test::Sk, test::Dv});
  });
  CHECK(of_heads.code == STROBE_CODE_HEADS);
  CHECK(of_heads.values[0]->integer == 3);
  CHECK(of_heads.values[2]->kind == STROBE_VALUE_ARGUMENT);
  CHECK(std::string(of_heads.values[2]->text) == "q");

  const strobe_refusal &beside = refusal_of([](test::Call &c) { c.attention.max_seqlen_q = 5; });
  CHECK(beside.code == STROBE_CODE_EXCLUDED);
  CHECK(beside.values[1]->kind == STROBE_VALUE_ABSENT);
  CHECK(std::string(beside.values[1]->text) == "0");

  const strobe_refusal &of_engine = refusal_of([](test::Call &c) { c.attention.engine = "no-such"; });
  CHECK(of_engine.code == STROBE_CODE_UNKNOWN);
  CHECK(std::string(of_engine.values[0]->text) == "no-such");
}

TEST_CASE("refusals: a value has as many entries as it takes") {
  const int64_t shape[] = {1, 2, 3, 4, 5, 6};
  const Refusal refusal("q", Code::shape, "{0}, {1}; accepted is {2}", Numbers{shape, 6},
                        Types{DType::f32, DType::f16, DType::bf16, DType::f64, DType::i8},
                        Axes{{"B", 1}, {"H", 2}, {"S", 3}, {"D", 4}, {"E", 5}, {"F", 6, true}});
  CHECK(line(refusal) == "q: (1, 2, 3, 4, 5, 6), float32, float16, bfloat16, float64, int8; accepted is (B, H, S, D, E, F|1) = "
                         "(1, 2, 3, 4, 5, 6|1)");
  const strobe_value given = refusal.values[0].shown(), types = refusal.values[1].shown(), axes = refusal.values[2].shown();
  CHECK(sizes(given) == std::vector<int64_t>{1, 2, 3, 4, 5, 6});
  CHECK(given.roles == nullptr);
  CHECK(sizes(types).size() == 5);
  CHECK(sizes(axes) == sizes(given));
  CHECK(std::string(axes.roles[5]) == "F");
  CHECK(axes.or_one == 1 << 5);
  CHECK(value_of(7).shown().count == 0);
}

TEST_CASE("refusals: those of every check of a call stand together, and a failure without any has none") {
  test::Call call;
  make_dense(call, Operation::forward);
  call.attention.softcap = -1, call.attention.engine = "no-such", call.execution.threads = -1;
  REQUIRE(call.run() == STROBE_INVALID_ARGUMENT);
  const std::string text = strobe_last_error();
  CHECK(rendered() == text);
  CHECK(lines(text).size() == 3);
  call.attention.engine = "ladder-naive", call.attention.softcap = 2, call.execution.threads = 0;
  REQUIRE(call.run() == STROBE_UNSUPPORTED);
  CHECK(strobe_last_refusal(0) == nullptr);
  CHECK(std::string(strobe_last_error()).size() > 0);
}

TEST_CASE("refusals: words that look like places stay as the caller wrote them") {
  test::Call call;
  make_dense(call, Operation::forward);
  call.attention.engine = "{1}{0}";
  REQUIRE(call.run() == STROBE_INVALID_ARGUMENT);
  CHECK(std::string(strobe_last_error()).starts_with("engine: \"{1}{0}\" is unknown; accepted are "));
}

TEST_CASE("refusals: they are the thread's own") {
  const strobe_refusal &mine = refusal_of([](test::Call &c) { c.attention.tile_k = -7; });
  std::vector<std::thread> team;
  std::vector<int> wrong(8);
  for (int n = 0; n < 8; n++)
    team.emplace_back([&wrong, n] {
      wrong[n] += strobe_last_refusal(0) != nullptr;
      for (int round = 0; round < 200; round++) {
        test::Call call;
        make_dense(call, Operation::forward);
        call.attention.tile_q = -1 - n;
        wrong[n] += call.run() != STROBE_INVALID_ARGUMENT;
        const strobe_refusal *r = strobe_last_refusal(0);
        wrong[n] += !r || std::string(r->argument) != "tile_q" || r->values[0]->integer != -1 - n;
      }
    });
  for (std::thread &t : team) t.join();
  for (int w : wrong) CHECK(w == 0);
  CHECK(strobe_last_refusal(0) == &mine);
  CHECK(mine.values[0]->integer == -7);
}
