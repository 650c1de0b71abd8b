// The code that CUDA engines generate for each operation of a function of the score, on an emulated GPU, against the reference; and what
// the code's key and arguments depend on. tests/nvrtc checks what ptxas generates.
#include "call.h"

#include <bit>
#include <cmath>
#include <cstdlib>
#include <ctime>

#include "cuda/program/ahead.h"
#include "score/cuda_source.h"

using namespace strobe;
using namespace strobe::test;

namespace {

bool emulated() { return std::getenv("STROBE_EMULATOR_NVRTC"); }

// A call with kValues queries and one key in each of two sequences, so that LSE is the score. In head h, the score is the result of
// operation h for the numbers of each query.
constexpr int64_t kValues = 16, kSequences = 2;

class Operations {
public:
  // Groups of operations. reals: operations on reals. reals_without_calls: the operations on reals for which NVRTC generates no calls in
  // FP64, because the emulator has no calls. quotients: divisions of reals; they are a group of their own because their code is long.
  // others: integers, booleans and the rest. approximated: operations that 16-bit kernels approximate. decided: operations that no kernel
  // approximates, because an integer, a comparison or an index depends on them. Sine, cosine and tangent are left out, because they read
  // tables and the emulator has none.
  enum class Which { reals, reals_without_calls, quotients, others, approximated, decided };
  Nodes f;
  int32_t count = 0;

  explicit Operations(Which which) {
    const int32_t i = f.add(STROBE_OP_QUERY);
    head_ = f.add(STROBE_OP_HEAD), x_ = f.add(STROBE_OP_SCORE);
    u_ = f.load(0, {i}), v_ = f.load(1, {i}), m_ = f.load(2, {i}), n_ = f.load(3, {i}), narrow_ = f.load(4, {i}), flag_ = f.load(5, {i});
    if (which == Which::approximated)
      approximated();
    else if (which == Which::decided)
      decided();
    else if (which == Which::quotients)
      quotients();
    else if (which == Which::others)
      integers(), booleans(), others();
    else
      reals(which == Which::reals);
  }
  int32_t result() const { return result_; }

private:
  // The nodes of the head, the score, and loads: u_ and v_ are reals from 0.1 to 0.9, m_ and n_ int64, narrow_ int32, flag_ bool.
  int32_t head_, x_, u_, v_, m_, n_, narrow_, flag_;
  int32_t result_ = -1;

  void is(int32_t value) {
    const int32_t own = f.add(STROBE_OP_EQUAL, {head_, f.integer(count++)});
    result_ = result_ < 0 ? value : f.add(STROBE_OP_WHERE, {own, value, result_});
  }
  void is_integer(int32_t value) { // value must be small enough for FP32
    is(f.add(STROBE_OP_TO_REAL, {f.add(STROBE_OP_REMAINDER, {value, f.integer(1009)})}));
  }
  void is_boolean(int32_t value) { is(f.add(STROBE_OP_TO_REAL, {value})); }
  int32_t op(strobe_operation o, const std::vector<int32_t> &in) { return f.add(o, in); }

  void reals(bool all) {
    const int32_t more = op(STROBE_OP_ADD, {u_, f.real(1)}),
                  both_signs = op(STROBE_OP_SUBTRACT, {op(STROBE_OP_MULTIPLY, {u_, f.real(9)}), f.real(4)});
    for (const strobe_operation o :
         {STROBE_OP_ADD, STROBE_OP_SUBTRACT, STROBE_OP_MULTIPLY, STROBE_OP_DIVIDE, STROBE_OP_MINIMUM, STROBE_OP_MAXIMUM, STROBE_OP_ATAN2})
      is(op(o, {both_signs, v_}));
    for (const strobe_operation o : {STROBE_OP_NEGATE, STROBE_OP_ABSOLUTE, STROBE_OP_SIGN, STROBE_OP_EXP, STROBE_OP_EXP2, STROBE_OP_EXPM1,
                                     STROBE_OP_ATAN, STROBE_OP_SINH, STROBE_OP_COSH, STROBE_OP_TANH, STROBE_OP_ASINH, STROBE_OP_ERF,
                                     STROBE_OP_ERFC, STROBE_OP_SIGMOID, STROBE_OP_FLOOR, STROBE_OP_CEIL, STROBE_OP_TRUNC, STROBE_OP_ROUND})
      is(op(o, {both_signs}));
    for (const strobe_operation o :
         {STROBE_OP_LOG, STROBE_OP_LOG2, STROBE_OP_LOG1P, STROBE_OP_SQRT, STROBE_OP_RSQRT, STROBE_OP_ASIN, STROBE_OP_ACOS, STROBE_OP_ATANH})
      is(op(o, {u_}));
    for (const strobe_operation o : {STROBE_OP_ACOSH, STROBE_OP_ARCCOSH_FROM_1}) is(op(o, {more}));
    is(op(STROBE_OP_ARCCOSH_FROM_1, {u_}));
    is(op(STROBE_OP_MULTIPLY, {x_, x_}));
    if (!all) return;
    is(op(STROBE_OP_POWER, {u_, both_signs}));
  }
  void approximated() {
    const int32_t more = op(STROBE_OP_ADD, {u_, f.real(1)}), x = op(STROBE_OP_MULTIPLY, {f.real(3), op(STROBE_OP_SUBTRACT, {u_, v_})});
    for (const strobe_operation o : {STROBE_OP_DIVIDE, STROBE_OP_MINIMUM, STROBE_OP_MAXIMUM}) is(op(o, {x, v_}));
    for (const strobe_operation o : {STROBE_OP_EXP2, STROBE_OP_TANH, STROBE_OP_SIGMOID}) is(op(o, {x}));
    for (const strobe_operation o : {STROBE_OP_LOG, STROBE_OP_LOG2, STROBE_OP_SQRT, STROBE_OP_RSQRT}) is(op(o, {u_}));
    is(op(STROBE_OP_ARCCOSH_FROM_1, {more}));
  }
  void quotients() {
    is(op(STROBE_OP_FLOOR_DIVIDE, {f.real(1), u_})); // 1 / 0.1f is rounded up to 10
    is(op(STROBE_OP_FLOOR_DIVIDE, {f.real(-3), u_}));
    is(op(STROBE_OP_REMAINDER, {f.real(-3), u_}));
    is(op(STROBE_OP_TRUNC_REMAINDER, {f.real(-3), u_}));
  }
  void decided() { // the quotients are integers, and approximate divisions would give a little less
    const int32_t whole = op(STROBE_OP_TO_REAL, {narrow_}), part = op(STROBE_OP_DIVIDE, {whole, f.real(37)});
    for (const strobe_operation o : {STROBE_OP_FLOOR, STROBE_OP_CEIL, STROBE_OP_TRUNC}) is(op(o, {part}));
    is(op(STROBE_OP_ROUND, {op(STROBE_OP_MULTIPLY, {part, f.real(0.5)})}));
    is(op(STROBE_OP_SIGN, {op(STROBE_OP_SUBTRACT, {part, f.real(2)})}));
    is(op(STROBE_OP_FLOOR_DIVIDE, {part, f.real(2)}));
    is(op(STROBE_OP_REMAINDER, {part, f.real(2)}));
    is(op(STROBE_OP_TRUNC_REMAINDER, {part, f.real(2)}));
    is_integer(op(STROBE_OP_TO_INTEGER, {part}));
    is(f.load(0, {op(STROBE_OP_TO_INTEGER, {op(STROBE_OP_ABSOLUTE, {part})})}));
    is_boolean(op(STROBE_OP_GREATER_EQUAL, {part, f.real(2)}));
    is_boolean(op(STROBE_OP_TO_BOOLEAN, {op(STROBE_OP_SUBTRACT, {part, f.real(2)})}));
    is(op(STROBE_OP_WHERE, {op(STROBE_OP_EQUAL, {op(STROBE_OP_MINIMUM, {part, f.real(2)}), f.real(2)}), f.real(1), u_}));
  }
  void integers() {
    const int32_t wide = op(STROBE_OP_MULTIPLY, {m_, op(STROBE_OP_MULTIPLY, {m_, f.integer(1 << 20)})}); // beyond 32 bits
    for (const int32_t left : {m_, narrow_, wide})
      for (const strobe_operation o :
           {STROBE_OP_ADD, STROBE_OP_SUBTRACT, STROBE_OP_MULTIPLY, STROBE_OP_FLOOR_DIVIDE, STROBE_OP_REMAINDER, STROBE_OP_TRUNC_REMAINDER,
            STROBE_OP_MINIMUM, STROBE_OP_MAXIMUM, STROBE_OP_AND, STROBE_OP_OR, STROBE_OP_XOR})
        is_integer(op(o, {left, n_}));
    for (const int32_t by :
         {f.integer(7), f.integer(-7), f.integer(0), f.integer(1), f.integer(8), f.integer(1 << 20), f.integer(1ll << 40)})
      for (const int32_t left : {narrow_, op(STROBE_OP_SUBTRACT, {f.add(STROBE_OP_KEY), f.integer(5)}), f.add(STROBE_OP_HEAD)}) {
        is_integer(op(STROBE_OP_FLOOR_DIVIDE, {left, by}));
        is_integer(op(STROBE_OP_REMAINDER, {left, by}));
      }
    for (const strobe_operation o : {STROBE_OP_NEGATE, STROBE_OP_ABSOLUTE, STROBE_OP_SIGN, STROBE_OP_NOT})
      is_integer(op(o, {m_})), is_integer(op(o, {narrow_}));
    is_integer(op(STROBE_OP_TO_INT32, {wide})), is_integer(op(STROBE_OP_TO_INT32, {narrow_}));
    for (const int64_t by : {0, 3, 63, 64, -1})
      is_integer(op(STROBE_OP_SHIFT_LEFT, {narrow_, f.integer(by)})), is_integer(op(STROBE_OP_SHIFT_RIGHT, {narrow_, f.integer(by)}));
  }
  void booleans() {
    for (const strobe_operation o :
         {STROBE_OP_EQUAL, STROBE_OP_NOT_EQUAL, STROBE_OP_LESS, STROBE_OP_LESS_EQUAL, STROBE_OP_GREATER, STROBE_OP_GREATER_EQUAL})
      is_boolean(op(o, {m_, n_})), is_boolean(op(o, {narrow_, n_})), is_boolean(op(o, {u_, v_}));
    const int32_t less = op(STROBE_OP_LESS, {u_, v_});
    for (const strobe_operation o : {STROBE_OP_AND, STROBE_OP_OR, STROBE_OP_XOR, STROBE_OP_EQUAL, STROBE_OP_NOT_EQUAL})
      is_boolean(op(o, {less, flag_}));
    is_boolean(op(STROBE_OP_NOT, {flag_}));
    for (const int32_t x : {m_, op(STROBE_OP_FLOOR, {u_}), flag_}) is_boolean(op(STROBE_OP_TO_BOOLEAN, {x}));
  }
  void others() {
    const int32_t scaled = op(STROBE_OP_MULTIPLY, {op(STROBE_OP_SUBTRACT, {u_, v_}), f.real(997.3)});
    is_integer(op(STROBE_OP_TO_INTEGER, {scaled}));
    is_integer(op(STROBE_OP_TO_INTEGER, {flag_}));
    is_integer(op(STROBE_OP_WHERE, {flag_, m_, narrow_}));
    // Kernels may limit `rounded` to 2^30, because load() clamps the index.
    const int32_t rounded = op(STROBE_OP_TO_INTEGER, {op(STROBE_OP_MULTIPLY, {scaled, f.real(1e12)})});
    is(f.load(0, {op(STROBE_OP_MINIMUM, {op(STROBE_OP_ADD, {rounded, f.integer(3)}), f.integer(100)})}));
    is(f.load(0, {narrow_}));
    is(f.load(0, {m_}));
    is(f.load(6, {narrow_, n_}));
    for (const strobe_operation o : {STROBE_OP_QUERY, STROBE_OP_KEY, STROBE_OP_OFFSET, STROBE_OP_BATCH}) is_integer(f.add(o));
    for (int n = 0; n < 3; n++) is(op(STROBE_OP_ADD, {u_, f.real(n)})); // from here on there are more numbers than arguments
  }
};

void make(Call &c, const Operations &operations, DType dtype, DType results) {
  const int64_t heads = operations.count;
  c.operation = Operation::forward;
  for (const char *name : {"q", "k", "v"}) {
    c.add(name, dtype, {kSequences, heads, *name == 'q' ? kValues : 1, 16});
    const size_t bytes_of_one = size_t(bytes(dtype));
    for (size_t n = 0; n < c.memory_bytes(name) / bytes_of_one; n++) {
      const double x = double(n % 16 % 4) / 4;
      if (dtype == DType::f64)
        c.data<double>(name)[n] = x;
      else if (dtype == DType::f32)
        c.data<float>(name)[n] = float(x);
      else
        c.data<uint16_t>(name)[n] = uint16_t(std::bit_cast<uint32_t>(float(x)) >> 16); // BF16
    }
  }
  std::vector<float> u, v;
  std::vector<int64_t> m, n;
  std::vector<int32_t> narrow;
  for (int b = 0; b < kValues; b++) {
    u.push_back(0.1f + 0.05f * float(b)), v.push_back(0.9f - 0.037f * float(b));
    m.push_back(int64_t(b - 7) * 99991), n.push_back(b % 5 - 2), narrow.push_back((b - 8) * 37);
  }
  c.add_values("captured_0", DType::f32, u);
  c.add_values("captured_1", DType::f32, v);
  c.add_values("captured_2", DType::i64, m);
  c.add_values("captured_3", DType::i64, n);
  c.add_values("captured_4", DType::i32, narrow);
  c.add("captured_5", DType::boolean, {kValues});
  for (int b = 0; b < kValues; b++) c.data<bool>("captured_5")[b] = b % 3 == 0;
  if (std::ranges::any_of(operations.f.all, [](const strobe_node &node) { return node.captured == 6; })) {
    c.add("captured_6", DType::f64, {9, 3});
    for (int at = 0; at < 27; at++) c.data<double>("captured_6")[at] = 0.25 * at;
  }
  std::vector<strobe_node> nodes = operations.f.all;
  strobe_node last{}; // the result must be the last node
  last.operation = STROBE_OP_ADD, last.inputs[0] = operations.result();
  strobe_node zero{};
  zero.operation = STROBE_OP_REAL;
  nodes.push_back(zero);
  last.inputs[1] = int32_t(nodes.size()) - 1;
  nodes.push_back(last);
  c.attention.score_function = c.function(nodes);
  c.add("out", results == DType::f64 ? DType::f64 : dtype, {kSequences, heads, kValues, 16});
  c.add("lse", results, {kSequences, heads, kValues});
}

double number(Call &c, const char *name, size_t n) {
  return DType(c[name].dtype) == DType::f64 ? c.data<double>(name)[n] : double(c.data<float>(name)[n]);
}

void each_operation_agrees(const char *engine, Operations::Which which, DType dtype, double tolerance) {
  CAPTURE(std::string(engine));
  const Operations operations(which);
  Call found, expected;
  make(found, operations, dtype, dtype == DType::f64 ? DType::f64 : DType::f32);
  make(expected, operations, dtype, DType::f64);
  found.attention.engine = engine, expected.attention.engine = "reference";
  REQUIRE_MESSAGE(expected.run() == STROBE_OK, std::string(strobe_last_error()));
  found.move_to_gpu();
  REQUIRE_MESSAGE(found.run() == STROBE_OK, std::string(strobe_last_error()));
  for (size_t row = 0; row < size_t(kSequences * operations.count); row++)
    for (size_t i = 0; i < size_t(kValues); i++) {
      const size_t at = row * size_t(kValues) + i;
      const double x = number(found, "lse", at), ref = number(expected, "lse", at);
      CAPTURE(row % size_t(operations.count));
      CAPTURE(i);
      CAPTURE(x);
      CAPTURE(ref);
      CHECK((x == ref || std::fabs(x - ref) <= tolerance * std::max(1.0, std::fabs(ref))));
    }
}

} // namespace

TEST_CASE("functions: each operation, emulated, is what the reference computes") {
  if (!emulated()) return;
  each_operation_agrees("cuda-simt", Operations::Which::reals_without_calls, DType::f64, 1e-13);
  each_operation_agrees("cuda-simt", Operations::Which::others, DType::f64, 1e-13);
  each_operation_agrees("cuda-simt", Operations::Which::reals, DType::f32, 4e-6);
  each_operation_agrees("cuda-simt", Operations::Which::others, DType::f32, 4e-6);
  for (const DType dtype : {DType::f64, DType::f32}) each_operation_agrees("cuda-simt", Operations::Which::quotients, dtype, 1e-6);
  each_operation_agrees("cuda-mma", Operations::Which::approximated, DType::bf16, 4e-6);
  each_operation_agrees("cuda-mma", Operations::Which::decided, DType::bf16, 4e-6);
}

namespace {

// A program that adds table[h, i - j + number] * factor to x.
Problem with_table(int64_t number, double factor, int64_t length = 100, DType dtype = DType::f32) {
  using namespace score;
  Program f;
  Graph &g = f.graph;
  const int32_t distance = g.add(Op::SUBTRACT, {g.add(Op::QUERY), g.add(Op::KEY)});
  const int32_t at = g.add(Op::ADD, {distance, g.integer(number)}), term = g.load(0, Kind::real, {g.add(Op::HEAD), at});
  f.score = g.add(Op::ADD, {g.add(Op::SCORE), g.add(Op::MULTIPLY, {term, g.real(factor)})});
  f.form = Form::general;
  differentiate(f);
  Problem p;
  p.batch = 1, p.heads = p.heads_kv = 2, p.seqlen_q = p.seqlen_k = 64, p.dtype = DType::bf16;
  p.captured[0] = {.data = reinterpret_cast<char *>(64), .dtype = dtype, .rank = 2, .size = {2, length, 1, 1}, .stride = {length, 1, 0, 0}};
  p.program = std::make_shared<const Program>(f);
  return p;
}
score::CudaFunctions made(const Problem &p) { return {p, true, false}; }

} // namespace

TEST_CASE("functions: other numbers, lengths and sizes have the same code") {
  const Problem one = with_table(63, 0.5), other = with_table(-5, -3.25, 77);
  CHECK(made(one).digest() == made(other).digest());
  CHECK(made(one).source() == made(other).source());
  const FunctionArguments a = made(one).arguments(), b = made(other).arguments();
  CHECK(std::bit_cast<float>(uint32_t(a.numbers[1])) == 0.5f);
  CHECK(std::bit_cast<float>(uint32_t(b.numbers[1])) == -3.25f);
  CHECK(int64_t(a.numbers[0]) == 63);
  CHECK(b.captured[0].size[1] == 77);
}
TEST_CASE("functions: what i - j and the head decide is computed ahead, where that pays") {
  Problem p = with_table(63, 0.5);
  CHECK(made(p).ahead().empty()); // a launch takes longer
  p.seqlen_q = 8192, p.seqlen_k = 4096;
  const score::CudaFunctions f = made(p);
  REQUIRE(f.ahead().size() == 1);
  const score::Ahead &x = f.ahead().front();
  CHECK(x.by == score::kOfDifference);
  CHECK(x.of_head);
  CHECK_FALSE(x.of_batch);
  CHECK(f.formula_ahead(x) == "captured_0[h, i - j + 63] * 0.5");
  const std::string source = f.source();
  CHECK(source.find("ahead<T, Along::difference, false, true, true>(a.captured[7], at)") != source.npos);
  CHECK(f.fetchable());
  CHECK(source.find("kFetched = Along::difference") != source.npos);
  CHECK(source.find("value_ahead") != source.npos);
  CHECK(f.instructions() < made(with_table(63, 0.5)).instructions());
  const CapturedOperand operand = f.arguments(nullptr).captured[7];
  CHECK(operand.size[0] == 1);
  CHECK(operand.size[1] == 2);
  CHECK(operand.size[2] >= 8192 + 4095);
  CHECK(-operand.size[3] >= 4095); // the first difference
  CHECK(f.bytes_ahead() >= 2 * operand.size[2] * 4);
  CHECK(f.digest() != made(with_table(63, 0.5)).digest());
  p.invariant = true; // bits may not depend on lengths
  CHECK(made(p).ahead().empty());
}
TEST_CASE("functions: the launch that computes ahead takes time") {
  cuda::Device device;
  device.sms = 100, device.clock_hz = 1e9;
  const auto seconds = [&](int64_t length) {
    Problem p = with_table(63, 0.5);
    p.seqlen_q = p.seqlen_k = length;
    p.cuda_functions = std::make_shared<const score::CudaFunctions>(p, true, false);
    return cuda::ahead_seconds(p, device);
  };
  CHECK(seconds(64) == 0); // nothing is computed ahead
  const double some = seconds(8192), more = seconds(16384), most = seconds(32768);
  CHECK(some > 2e-6);
  CHECK(most - more == doctest::Approx(2 * (more - some)).epsilon(0.01)); // a start, and the values
}
TEST_CASE("functions: what is computed ahead depends on one position or on one difference") {
  using namespace score;
  const auto found = [](auto build, int32_t cost = 8) {
    Graph g;
    const int32_t root = build(g);
    std::string all;
    for (const Ahead &x : found_ahead(g, {root}, [cost](int32_t) { return cost; }))
      all += text(all.empty() ? "" : "; ", int(x.by), x.of_batch ? "b " : " ", formula(g, x.node));
    return all;
  };
  const auto cosine = [](Graph &g, int32_t of) { return g.add(Op::COS, {g.add(Op::TO_REAL, {of})}); };
  CHECK(found([&](Graph &g) { return g.add(Op::MULTIPLY, {cosine(g, g.add(Op::QUERY)), cosine(g, g.add(Op::KEY))}); }) ==
        "2 cos(real(j)); 1 cos(real(i))");
  CHECK(found([&](Graph &g) { // (2 i + 3) - 2 j
          const int32_t two = g.integer(2), i = g.add(Op::MULTIPLY, {two, g.add(Op::QUERY)});
          return cosine(g, g.add(Op::SUBTRACT, {g.add(Op::ADD, {i, g.integer(3)}), g.add(Op::MULTIPLY, {g.add(Op::KEY), two})}));
        }) == "4 cos(real(2 * i + 3 - j * 2))");
  CHECK(found([&](Graph &g) { return cosine(g, g.add(Op::ADD, {g.add(Op::QUERY), g.add(Op::KEY)})); }) == "");
  CHECK(found([&](Graph &g) {
          return cosine(g, g.add(Op::SUBTRACT, {g.add(Op::ADD, {g.add(Op::QUERY), g.add(Op::OFFSET)}), g.add(Op::KEY)}));
        }) == "4b cos(real(i + offset - j))"); // sequences may have other offsets
  CHECK(found([&](Graph &g) { return g.add(Op::MULTIPLY, {g.add(Op::SCORE), cosine(g, g.add(Op::HEAD))}); }) == "");
  const auto every = [](Graph &g, int64_t n) { // (i - j) % n == 0
    const int32_t rest = g.add(Op::REMAINDER, {g.add(Op::SUBTRACT, {g.add(Op::QUERY), g.add(Op::KEY)}), g.integer(n)});
    return g.add(Op::EQUAL, {rest, g.integer(0)});
  };
  CHECK(found([&](Graph &g) { return every(g, 4); }, 5) == ""); // such a mask is computed as fast as it is read
  CHECK(found([&](Graph &g) { return g.add(Op::OR, {every(g, 5), every(g, 7)}); }, 5).starts_with("4 "));
}
TEST_CASE("functions: what makes other code has another hash") {
  const Problem usual = with_table(63, 0.5);
  Problem long_sequence = usual;
  long_sequence.seqlen_k = int64_t(1) << 25;
  for (const Problem &other :
       {with_table(int64_t(1) << 40, 0.5), with_table(63, 0.5, int64_t(1) << 33), with_table(63, 0.5, 100, DType::bf16), long_sequence}) {
    CHECK(made(usual).digest() != made(other).digest());
    CHECK(made(usual).source() != made(other).source());
  }
}
TEST_CASE("functions: what decides something is computed exactly, and what only scales a score is not") {
  using namespace score;
  for (const bool decides : {false, true}) {
    Program f;
    Graph &g = f.graph;
    const int32_t x = g.add(Op::SCORE), part = g.add(Op::DIVIDE, {x, g.real(3)}), log = g.add(Op::LOG, {part});
    f.score = decides ? g.add(Op::WHERE, {g.add(Op::LESS, {log, g.real(1)}), x, g.real(0)}) : g.add(Op::ADD, {x, log});
    f.form = Form::general;
    Problem p;
    p.dtype = DType::bf16, p.program = std::make_shared<const Program>(f);
    const std::string source = made(p).source();
    for (const char *operation : {"divide", "log"}) {
      CHECK((source.find(std::string(" R::") + operation) == source.npos) == decides);
      CHECK((source.find(std::string(" Exact::") + operation) == source.npos) != decides);
    }
  }
}
TEST_CASE("functions: a hostile graph is planned at once") {
  using namespace score;
  Program f;
  Graph &g = f.graph;
  const int32_t x = g.add(Op::SCORE), i = g.add(Op::QUERY);
  std::vector<int32_t> layer = {g.add(Op::TO_INTEGER, {x})};
  while (g.size() < 900) { // each node is an input of many nodes in the next layer
    std::vector<int32_t> next;
    for (int n = 0; n < 60; n++)
      next.push_back(g.add(n % 2 ? Op::ADD : Op::SUBTRACT, {layer[size_t(n) % layer.size()], layer[size_t(7 * n + 3) % layer.size()]}));
    for (int n = 0; n < 60; n++) next.push_back(g.add(Op::MINIMUM, {next[size_t(n)], n % 3 ? i : g.integer(n)}));
    layer = next;
  }
  int32_t sum = layer[0];
  for (const int32_t n : layer) sum = g.add(Op::MAXIMUM, {sum, n});
  f.score = g.add(Op::MULTIPLY, {x, g.load(0, Kind::real, {sum})}), f.form = Form::general;
  differentiate(f);
  Problem p = with_table(0, 1);
  p.captured[0].rank = 1, p.program = std::make_shared<const Program>(f);
  const std::clock_t before = std::clock();
  for (int n = 0; n < 10; n++) CHECK(made(p).digest() == made(p).digest());
  CHECK(double(std::clock() - before) / CLOCKS_PER_SEC < 1); // for 20 programs
}
TEST_CASE("functions: shifts by a number take 32 bits") {
  using namespace score;
  const auto source = [](int64_t by) {
    Program f;
    Graph &g = f.graph;
    const int32_t product = g.add(Op::MULTIPLY, {g.load(0, Kind::integer, {g.add(Op::QUERY)}), g.load(0, Kind::integer, {g.add(Op::KEY)})});
    const int32_t bits = g.integer(by), wrapped = g.add(Op::SHIFT_RIGHT, {g.add(Op::SHIFT_LEFT, {product, bits}), bits});
    f.score = g.add(Op::ADD, {g.add(Op::SCORE), g.add(Op::TO_REAL, {wrapped})}), f.form = Form::general;
    differentiate(f);
    Problem p = with_table(0, 1, 100, DType::i32);
    p.captured[0].rank = 1, p.program = std::make_shared<const Program>(f);
    return made(p).source();
  };
  CHECK(source(32).find("= (i32)Integers<i64>::shift_right(") != std::string::npos);
  CHECK(source(31).find("= (i32)Integers<i64>::shift_right(") == std::string::npos);
}
TEST_CASE("functions: a function that adds, or hides, needs no derivative") {
  using namespace score;
  const auto program = [](auto build) {
    Program f;
    f.score = build(f.graph, f.graph.add(Op::SCORE)), f.form = Form::general;
    differentiate(f);
    return only_adds(f, false);
  };
  CHECK(program([](Graph &g, int32_t x) { return g.add(Op::ADD, {x, g.real(2)}); }));
  CHECK_FALSE(program([](Graph &g, int32_t x) { return g.add(Op::MULTIPLY, {x, g.real(2)}); }));
  const auto where = [&](double otherwise) {
    return program(
        [=](Graph &g, int32_t x) { return g.add(Op::WHERE, {g.add(Op::LESS, {g.add(Op::QUERY), g.add(Op::KEY)}), x, g.real(otherwise)}); });
  };
  CHECK(where(-HUGE_VAL));
  CHECK_FALSE(where(0));
}
