// Gradients of captured tensors: along which lines they are summed, their checks, and the CPU's against the reference's.

#include <cmath>

#include "attention/text.h"
#include "call.h"
#include "score/build.h"

namespace strobe::captured_gradients_test {
namespace {

using namespace strobe::test;
using score::Graph;
using score::Kind;
using score::Lines;
using score::Op;

// A graph with the positions that indices are made of.
struct Positions {
  Graph g;
  int32_t x = g.add(Op::SCORE), b = g.add(Op::BATCH), h = g.add(Op::HEAD), i = g.add(Op::QUERY), j = g.add(Op::KEY);
  int32_t offset = g.add(Op::OFFSET), one = g.integer(1), two = g.integer(2);
  int32_t sum(int32_t a, int32_t c) { return g.add(Op::ADD, {a, c}); }
  int32_t difference(int32_t a, int32_t c) { return g.add(Op::SUBTRACT, {a, c}); }
  int32_t product(int32_t a, int32_t c) { return g.add(Op::MULTIPLY, {a, c}); }
  int32_t real(int32_t a) { return g.add(Op::TO_REAL, {a}); }
  int32_t ids(const std::vector<int32_t> &at) { return g.load(1, Kind::integer, at); }
};

Lines lines_by(std::vector<int32_t> (*indices)(Positions &)) {
  Positions p;
  const std::vector<int32_t> at = indices(p);
  return score::lines_of(p.g, p.g.load(0, Kind::real, at));
}

using P = Positions;

TEST_CASE("captured gradients: elements that are one along rows") {
  CHECK(lines_by([](P &) { return std::vector<int32_t>{}; }) == Lines::rows);
  CHECK(lines_by([](P &p) { return std::vector{p.b, p.h, p.one}; }) == Lines::rows);
  CHECK(lines_by([](P &p) { return std::vector{p.h, p.i}; }) == Lines::rows);
  CHECK(lines_by([](P &p) { return std::vector{p.ids({p.b, p.i})}; }) == Lines::rows);
  CHECK(lines_by([](P &p) { return std::vector{p.sum(p.difference(p.i, p.j), p.j)}; }) == Lines::rows); // j cancels
  CHECK(lines_by([](P &p) { return std::vector{p.difference(p.j, p.j)}; }) == Lines::rows);
  CHECK(lines_by([](P &p) { return std::vector{p.product(p.j, p.g.integer(0))}; }) == Lines::rows);
}

TEST_CASE("captured gradients: elements that are one along columns") {
  CHECK(lines_by([](P &p) { return std::vector{p.j}; }) == Lines::columns);
  CHECK(lines_by([](P &p) { return std::vector{p.h, p.ids({p.ids({p.j})})}; }) == Lines::columns);
  CHECK(lines_by([](P &p) { return std::vector{p.product(p.h, p.j), p.sum(p.offset, p.j)}; }) == Lines::columns);
  CHECK(lines_by([](P &p) { return std::vector{p.g.add(Op::FLOOR_DIVIDE, {p.j, p.two})}; }) == Lines::columns);
}

TEST_CASE("captured gradients: elements that are one along diagonals") {
  CHECK(lines_by([](P &p) { return std::vector{p.difference(p.i, p.j)}; }) == Lines::diagonals);
  CHECK(lines_by([](P &p) { return std::vector{p.h, p.difference(p.j, p.i)}; }) == Lines::diagonals);
  CHECK(lines_by([](P &p) { return std::vector{p.sum(p.difference(p.sum(p.i, p.offset), p.j), p.one)}; }) == Lines::diagonals);
  CHECK(lines_by([](P &p) { return std::vector{p.difference(p.i, p.difference(p.j, p.h))}; }) == Lines::diagonals);
  CHECK(lines_by([](P &p) { return std::vector{p.sum(p.i, p.g.add(Op::NEGATE, {p.j}))}; }) == Lines::diagonals);
  CHECK(lines_by([](P &p) { return std::vector{p.difference(p.product(p.i, p.two), p.product(p.two, p.j))}; }) == Lines::diagonals);
  CHECK(lines_by([](P &p) { return std::vector{p.difference(p.i, p.j), p.g.add(Op::ABSOLUTE, {p.difference(p.j, p.i)})}; }) ==
        Lines::diagonals);
  // T5's buckets: steps of the logarithm of the distance
  CHECK(lines_by([](P &p) {
          const int32_t distance = p.g.add(Op::MAXIMUM, {p.difference(p.i, p.j), p.one}), log = p.g.add(Op::LOG, {p.real(distance)});
          const int32_t far = p.g.add(Op::TO_INTEGER, {log}), near = p.g.add(Op::LESS, {distance, p.two});
          return std::vector{p.g.add(Op::WHERE, {near, distance, far}), p.h};
        }) == Lines::diagonals);
}

TEST_CASE("captured gradients: elements of single pairs") {
  CHECK(lines_by([](P &p) { return std::vector{p.i, p.j}; }) == Lines::general);
  CHECK(lines_by([](P &p) { return std::vector{p.sum(p.i, p.j)}; }) == Lines::general);
  CHECK(lines_by([](P &p) { return std::vector{p.difference(p.product(p.i, p.two), p.j)}; }) == Lines::general);
  CHECK(lines_by([](P &p) { return std::vector{p.i, p.difference(p.i, p.j)}; }) == Lines::general);
  CHECK(lines_by([](P &p) { return std::vector{p.difference(p.product(p.h, p.i), p.product(p.h, p.j))}; }) ==
        Lines::general); // lines_of() does not recognise h (i - j)
  CHECK(lines_by([](P &p) { return std::vector{p.ids({p.i, p.j})}; }) == Lines::general);
  CHECK(lines_by([](P &p) { return std::vector{p.g.add(Op::WHERE, {p.g.add(Op::LESS, {p.i, p.j}), p.i, p.j})}; }) == Lines::general);
  CHECK(lines_by([](P &p) { return std::vector{p.g.add(Op::TO_INTEGER, {p.x})}; }) == Lines::general);
  // float32 rounds positions, so this is no function of i - j
  CHECK(lines_by([](P &p) { return std::vector{p.g.add(Op::TO_INTEGER, {p.difference(p.real(p.i), p.real(p.j))})}; }) == Lines::general);
}

TEST_CASE("captured gradients: the program has a row for each LOAD on which the score depends smoothly") {
  Nodes f;
  const int32_t x = f.add(STROBE_OP_SCORE), i = f.add(STROBE_OP_QUERY), j = f.add(STROBE_OP_KEY);
  const int32_t of_row = f.load(0, {i}), of_column = f.load(0, {j}), step = f.add(STROBE_OP_FLOOR, {f.load(1, {i})});
  const int32_t ids = f.add(STROBE_OP_TO_REAL, {f.load(2, {i})});
  f.add(STROBE_OP_ADD, {f.add(STROBE_OP_ADD, {x, ids}), f.add(STROBE_OP_ADD, {step, f.add(STROBE_OP_MULTIPLY, {of_row, of_column})})});
  strobe_tensor reals{}, integers{};
  reals.dtype = STROBE_FLOAT32, integers.dtype = STROBE_INT64, reals.rank = integers.rank = 1;
  const strobe_function function = {sizeof function, f.all.data(), int64_t(f.all.size())};
  strobe_attention a{};
  a.score_function = &function;
  Reasons reasons;
  const score::CapturedTensors given = {&reals, &reals, &integers}, wanted = {&reals, &reals};
  const score::Programs made = score::make_programs(a, given, {wanted}, reasons), without = score::make_programs(a, given, {}, reasons);
  REQUIRE(reasons.size() == 0);
  CHECK(without.gradients == nullptr);
  CHECK(made.program->digest == without.program->digest); // kernels of the other gradients are the same
  CHECK(made.program->graph.size() == without.program->graph.size());
  const score::GradientProgram &gradients = *made.gradients;
  REQUIRE(gradients.loads.size() == 2);
  for (const auto &[n, lines, slope] : {std::tuple{0u, Lines::rows, "captured_0[j]"}, {1u, Lines::columns, "captured_0[i]"}}) {
    CHECK(gradients.loads[n].lines == lines);
    CHECK(score::formula(gradients.graph, gradients.loads[n].slope) == slope);
  }
  const score::CapturedTensors first = {&reals};
  CHECK(score::make_programs(a, given, {first}, reasons).gradients->digest == gradients.digest); // captured_1 has no row
}

TEST_CASE("captured gradients: each reason against one") {
  struct Wrong {
    const char *message;
    void (*how)(Call &);
  };
  const Wrong all[] = {
      {"dcaptured_1: shape (5); accepted is (4), that of captured_1", [](Call &c) { c.add("dcaptured_1", DType::f32, {5}); }},
      {"dcaptured_1: rank 2; accepted is 1, that of captured_1", [](Call &c) { c.add("dcaptured_1", DType::f32, {H, 1}); }},
      {"dcaptured_3: dtype bfloat16; accepted is float16, float32, float64",
       [](Call &c) { c.add("dcaptured_3", DType::bf16, {B, H, Sq}); }},
      {"dcaptured_1: dtype float16; accepted is float32, float64", [](Call &c) { c.add("dcaptured_1", DType::f16, {H}); }},
      {"dq: shares memory with dcaptured_1; accepted is memory of its own where the tensor is written",
       [](Call &c) { c["dcaptured_1"].data = c["dq"].data; }},
      {"dcaptured_1: shares memory with captured_1; accepted is memory of its own where the tensor is written",
       [](Call &c) { c["dcaptured_1"].data = c["captured_1"].data; }},
      {"dcaptured_1: strides (0); accepted are positive strides where the tensor is written",
       [](Call &c) { c["dcaptured_1"].strides[0] = 0; }},
      {"dcaptured_1: data is null, shape (4); accepted is null only for a tensor without elements",
       [](Call &c) { c["dcaptured_1"].data = nullptr; }},
      {"dcaptured_1: lies on CUDA device 0; accepted is the CPU, where q lies",
       [](Call &c) { c["dcaptured_1"].device_type = STROBE_CUDA; }},
      {"dcaptured_7: given for captured_7 of dtype bool; accepted is none: only floats have a gradient",
       [](Call &c) { c.add("captured_7", DType::boolean, {2, 3}); }},
      {"dcaptured_7: given without captured_7; accepted is both, or captured_7 alone", [](Call &c) { c.drop("captured_7"); }},
      {"dcaptured_0: shape (2147483648); accepted are fewer than 2^31 elements",
       [](Call &c) {
         for (const char *name : {"captured_0", "dcaptured_0"})
           c[name].rank = 1, c[name].shape[0] = int64_t{1} << 31, c[name].strides[0] = name[0] == 'd';
       }},
      {"dcaptured_0: given without score_function; accepted is none",
       [](Call &c) {
         for (int n = 1; n < 8; n++) c.drop(text("captured_", n)), c.drop(text("dcaptured_", n));
         Nodes g;
         g.add(STROBE_OP_TO_BOOLEAN, {g.load(0, {})});
         c.attention.score_function = nullptr, c.attention.mask_function = c.function(g.all);
       }},
      {"dcaptured_0: given, and the result of score_function does not depend on captured_0; accepted is none",
       [](Call &c) {
         for (int n = 1; n < 8; n++) c.drop(text("captured_", n)), c.drop(text("dcaptured_", n));
         Nodes f, g;
         f.add(STROBE_OP_SCORE), g.add(STROBE_OP_TO_BOOLEAN, {g.load(0, {})});
         c.attention.score_function = c.function(f.all), c.attention.mask_function = c.function(g.all);
       }},
      {"dcaptured_0: given, and the result of score_function does not depend on captured_0; accepted is none",
       [](Call &c) { // only a node that the result does not need reads captured_0
         for (int n = 1; n < 8; n++) c.drop(text("captured_", n)), c.drop(text("dcaptured_", n));
         Nodes f;
         f.load(0, {}), f.add(STROBE_OP_SCORE);
         c.attention.score_function = c.function(f.all), c.attention.mask_function = nullptr;
       }},
  };
  for (const Wrong &wrong : all) {
    CAPTURE(std::string(wrong.message));
    Call call;
    make_captured_gradients(call);
    wrong.how(call);
    CHECK(call.run() == STROBE_INVALID_ARGUMENT);
    CHECK(lines(error()).front() == wrong.message);
    CHECK(call.untouched());
  }
  Call forward; // a forward ignores dcaptured_n, as it ignores dq
  make_captured_gradients(forward);
  forward.operation = Operation::forward;
  forward["dcaptured_1"].shape[0] = 100;
  CHECK(forward.run() == STROBE_OK);
}

void fill(Call &c) {
  for (const char *name : {"q", "k", "v", "dout", "dlse"}) c.fill<float>(name, double(name[1]), 0.7);
  for (const char *name : {"captured_0", "captured_1", "captured_5", "captured_7"}) c.fill<float>(name, 2, 0.37);
  for (const char *name : {"captured_2", "captured_6"}) c.fill<double>(name, 3, 0.41);
  for (const char *name : {"captured_3", "captured_4"})
    for (size_t n = 0; n < c.memory_bytes(name) / 2; n++)
      c.data<uint16_t>(name)[n] = static_cast<uint16_t>((name[9] == '3' ? 0x3400 : 0x3E80) + n % 7); // near 0.25
}

double element(Call &c, const std::string &name, int64_t n) {
  const strobe_tensor &t = c[name];
  int64_t at = 0;
  for (int32_t axis = t.rank; axis-- > 0; n /= t.shape[axis]) at += n % t.shape[axis] * t.strides[axis];
  switch (t.dtype) {
  case STROBE_FLOAT64:
    return static_cast<double *>(t.data)[at];
  case STROBE_FLOAT32:
    return static_cast<float *>(t.data)[at];
  default: {
    const uint32_t bits = static_cast<uint16_t *>(t.data)[at], fraction = t.dtype == STROBE_FLOAT16 ? 10 : 7;
    const int exponent = int(bits >> fraction & ((1u << (15 - fraction)) - 1)), bias = t.dtype == STROBE_FLOAT16 ? 15 : 127;
    const double value = std::ldexp(1 + double(bits & ((1u << fraction) - 1)) / double(1u << fraction), exponent - bias);
    return bits >> 15 ? -value : value;
  }
  }
}

TEST_CASE("captured gradients: those of the CPU are those of the reference, for any strides and number of threads") {
  Call oracle;
  make_captured_gradients(oracle), make_for_reference(oracle), fill(oracle);
  oracle.drop("out"), oracle.drop("lse");
  REQUIRE_MESSAGE(oracle.run() == STROBE_OK, error());
  for (const int32_t threads : {1, 3}) {
    Call call;
    make_captured_gradients(call), fill(call);
    call.operation = Operation::forward, call.execution.threads = threads;
    REQUIRE_MESSAGE(call.run() == STROBE_OK, error());
    call.operation = Operation::backward;
    call.spread("dcaptured_1", 3, false), call.spread("dcaptured_6", 2, false);
    REQUIRE_MESSAGE(call.run() == STROBE_OK, error());
    for (int n = 0; n < STROBE_MOST_CAPTURED; n++) {
      const std::string name = text("dcaptured_", n);
      CAPTURE(name);
      int64_t count = 1;
      for (int32_t axis = 0; axis < call[name].rank; axis++) count *= call[name].shape[axis];
      double most = 0;
      for (int64_t e = 0; e < count; e++) most = std::max(most, std::fabs(element(oracle, name, e)));
      CHECK(most > 0.01);
      const double bound = call[name].dtype == STROBE_BFLOAT16 ? 4e-3 : call[name].dtype == STROBE_FLOAT16 ? 5e-4 : 1e-5;
      for (int64_t e = 0; e < count; e++) CHECK(std::fabs(element(call, name, e) - element(oracle, name, e)) <= bound * most);
    }
  }
}

TEST_CASE("captured gradients: without any the other gradients have the same bits, and the explanation names the lines") {
  Call with, without;
  for (Call *c : {&with, &without}) {
    make_captured_gradients(*c), fill(*c);
    c->operation = Operation::forward;
    REQUIRE(c->run() == STROBE_OK);
    c->operation = Operation::backward;
  }
  for (int n = 0; n < STROBE_MOST_CAPTURED; n++) without.drop(text("dcaptured_", n));
  REQUIRE(with.run() == STROBE_OK);
  REQUIRE(without.run() == STROBE_OK);
  for (const char *name : {"dq", "dk", "dv"}) CHECK(std::memcmp(with[name].data, without[name].data, with.memory_bytes(name)) == 0);
  std::string page(1 << 14, '\0');
  REQUIRE(strobe_explain(&with.attention, &with.tensors, &with.execution, STROBE_BACKWARD, page.data(), page.size(), nullptr) == STROBE_OK);
  for (const char *words : {"float32 (), summed along rows", "float64 (4, 38), summed along columns",
                            "float32 (59), summed along diagonals", "float64 (21, 38), summed along nothing: pair by pair"})
    CHECK_MESSAGE(page.find(words) != std::string::npos, page);
}

} // namespace
} // namespace strobe::captured_gradients_test
