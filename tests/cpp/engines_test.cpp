// The choice among engines. The test sets the answers of the engines.
#include "engines.h"
#include "score/build.h"
#include <algorithm>

#include <doctest/doctest.h>

#include "call.h"

using namespace strobe;

namespace {

class Fake final : public Engine {
public:
  Fake(const char *name, const char *missing = "", bool only_by_name = false)
      : name_(name), missing_(missing), only_by_name_(only_by_name) {}
  const char *name() const override { return name_; }
  std::string missing() const override { return missing_; }
  bool only_by_name() const override { return only_by_name_; }
  Answer plan(const Problem &p, const Execution &, Operation) const override { // supports float32 and adjacent columns, but no softcap
    if (p.dtype != DType::f32) return "float32 only";
    if (p.program) return "no softcap";
    if (p.q && p.q.stride[3] != 1) return "columns apart";
    return Plan{name_, "", 1, 1, 0, 1, {}, {}};
  }
  void run(const Problem &, const Execution &, Operation, const Plan &, void *) const override {}

private:
  const char *name_, *missing_;
  bool only_by_name_;
};

const Fake best("best"), absent("absent", "this CPU lacks it"), plain("plain"), oracle("oracle", "", true);

Plan plan(const Engine &engine, double seconds) {
  Plan p;
  p.engine = engine.name(), p.predicted_seconds = seconds;
  return p;
}

Decision decide(const Problem &p, const Choice &choice) { return strobe::decide(p, {}, Operation::forward, choice); }

} // namespace

TEST_CASE("decide: nobody takes it") {
  const Choice choice = {{{&best, "no softcap"}, {&absent, "this CPU lacks it"}, {&plain, "no masks"}}, -1};
  Problem p;
  CHECK_THROWS_WITH_AS(decide(p, choice), "no engine takes this problem:\nbest: no softcap\nabsent: this CPU lacks it\nplain: no masks",
                       Error);
  p.wishes.engine = "plain"; // then only the requested engine gives a reason
  CHECK_THROWS_WITH_AS(decide(p, choice), "the engine that was asked for cannot take this problem:\nplain: no masks", Error);
}

TEST_CASE("decide: strict refuses a slower engine where a faster one, here and for this dtype, refused an option or the storage") {
  Problem p;
  p.dtype = DType::f32, p.program = score::built_in({.form = score::Form::softcap, .cap = 20});
  const Choice refused = {{{&best, "no softcap"}, {&plain, plan(plain, 2)}}, 1};
  CHECK(decide(p, refused).engine == &plain);
  p.strict = true;
  CHECK_THROWS_WITH_AS(decide(p, refused), "strict: plain would run, for the faster best refuses: no softcap", Error);
  const Choice missing = {{{&absent, "this CPU lacks it"}, {&oracle, "by name only"}, {&plain, plan(plain, 2)}}, 2};
  CHECK(decide(p, missing).engine == &plain);
  const Choice predicted_slower = {{{&best, plan(best, 3)}, {&plain, plan(plain, 2)}}, 1};
  CHECK(decide(p, predicted_slower).engine == &plain);
  p.program = nullptr, p.q.dtype = DType::f32, p.q.stride[3] = 2;
  const Choice apart = {{{&best, "columns apart"}, {&plain, plan(plain, 2)}}, 1};
  CHECK_THROWS_WITH_AS(decide(p, apart), "strict: plain would run, for the faster best refuses: columns apart", Error);
  p.dtype = DType::f64;
  const Choice other_dtype = {{{&best, "float32 only"}, {&plain, plan(plain, 2)}}, 1};
  CHECK(decide(p, other_dtype).engine == &plain);
}

TEST_CASE("choose: every engine of the list answers, the least predicted time wins") {
  test::Call call;
  test::make_dense(call, Operation::forward);
  const Problem p = call.validated();
  Execution e;
  const Choice choice = choose(p, e, Operation::forward);
  REQUIRE(choice.rows.size() == engines().size());
  REQUIRE(choice.chosen >= 0);
  const double least = std::get<Plan>(choice.rows[choice.chosen].answer).predicted_seconds;
  for (const Choice::Row &row : choice.rows) {
    if (row.engine->device_type() != STROBE_CPU) {
      CHECK(std::get<std::string>(row.answer) == "the tensors are on the CPU");
      continue;
    }
    if (const Plan *other = std::get_if<Plan>(&row.answer)) {
      CHECK(other->predicted_seconds >= least);
      CHECK(row.engine->missing().empty());
    }
    if (!row.engine->missing().empty()) CHECK(std::get<std::string>(row.answer) == row.engine->missing());
    if (row.engine->only_by_name()) CHECK(std::get<std::string>(row.answer) == "runs only when asked for by name");
  }
}

TEST_CASE("choose: a name forces its engine") {
  for (const Engine *engine : engines()) {
    test::Call call;
    test::make_dense(call, Operation::forward);
    for (const char *name : {"max_logit", "column_sums"}) call.drop(name);
    call.attention.engine = engine->name();
    if (engine->name() == std::string("reference"))
      call.add("out", DType::f64, {test::B, test::H, test::Sq, test::Dv}), call.add("lse", DType::f64, {test::B, test::H, test::Sq});
    const Problem p = call.validated();
    const Choice choice = choose(p, {}, Operation::forward);
    const auto row = std::find_if(choice.rows.begin(), choice.rows.end(), [&](const Choice::Row &r) { return r.engine == engine; });
    REQUIRE(row != choice.rows.end());
    if (stands_elsewhere(*row, choice, p)) continue;                        // the CPU's engine of this name comes later
    if (const std::string *reason = std::get_if<std::string>(&row->answer)) // the engine is missing here, or has no float32
      CHECK_THROWS_WITH_AS(decide(p, choice), doctest::Contains(reason->c_str()), Error);
    else
      CHECK(decide(p, choice).engine == engine);
  }
}

namespace {

Problem self_attention(DType dtype, int64_t heads, int64_t queries, int64_t keys, int64_t dim) {
  Problem p;
  p.batch = 1, p.heads = heads, p.heads_kv = 2, p.head_dim = p.head_dim_v = dim;
  p.seqlen_q = p.total_q = queries, p.seqlen_k = p.total_k = keys;
  p.dtype = dtype;
  return p;
}

double predicted(const Problem &p, const char *name, Operation operation = Operation::forward) {
  for (const Choice::Row &row : choose(p, {}, operation).rows)
    if (const Plan *plan = std::get_if<Plan>(&row.answer); plan && row.engine->name() == std::string(name)) return plan->predicted_seconds;
  return 0;
}

} // namespace

TEST_CASE("choose: both directions and any number of threads run on one CPU engine") {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64})
    for (int64_t heads : {2, 8})
      for (int64_t queries : {1, 16, 17, 40, 64, 100, 128, 160, 200, 256, 1000})
        for (int64_t keys : {16, 512, 8192}) {
          const Problem p = self_attention(dtype, heads, queries, keys, 64);
          const int chosen = choose(p, {}, Operation::forward).chosen;
          CAPTURE(queries);
          CAPTURE(keys);
          CHECK(choose(p, {}, Operation::backward).chosen == chosen);
          for (int32_t threads : {2, 7, 64}) {
            Execution e;
            e.threads = threads;
            CHECK(choose(p, e, Operation::forward).chosen == chosen);
          }
        }
}

TEST_CASE("predict: padded lanes and packed keys count") {
  const Choice any = choose(self_attention(DType::f32, 2, 1, 4096, 64), {}, Operation::forward);
  const char *name = any.rows[any.chosen].engine->name();
  const auto of = [&](int64_t queries) { return predicted(self_attention(DType::f32, 2, queries, 4096, 64), name); };
  CHECK(of(2) > of(1)); // keys lie across lanes, so a second query costs more
  CHECK(1e6 * (of(8) - of(4)) == doctest::Approx(4e6 * (of(2) - of(1))));
  CHECK(of(17) > of(16));
  CHECK(of(18) == doctest::Approx(of(32)));
  if (predicted(self_attention(DType::f32, 2, 1, 4096, 64), "cpu-amx") == 0) return; // cpu-amx is not available here
  CHECK(std::string(name) == "cpu-avx512");
  for (int64_t keys : {512, 8192}) { // more queries share the packed keys, so that the products dominate
    const Problem few = self_attention(DType::f32, 2, 16, keys, 64), many = self_attention(DType::f32, 2, 4096, keys, 64);
    CHECK(predicted(few, "cpu-amx") > predicted(few, "cpu-avx512"));
    CHECK(predicted(many, "cpu-amx") < predicted(many, "cpu-avx512"));
  }
}
