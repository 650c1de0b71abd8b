// The bytecode of functions of the score, on each instruction set of this machine, against an evaluator of one pair at a time.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cpu/engine.h"
#include "cpu/isa.h"
#include "cpu/sets.h"
#include "engine.h"
#include "score/bytecode.h"

using namespace strobe;
using namespace strobe::score;

namespace {

using Kernels = const CpuKernels *(*)(DType);
struct Set {
  const char *engine;
  Kernels kernels;
};
const Set kSets[] = {
#if defined(__x86_64__)
    {"cpu-baseline", baseline::kernels},
#if !defined(STROBE_WITHOUT_AVX2)
    {"cpu-avx2", avx2::kernels},
#endif
#if !defined(STROBE_UP_TO_AVX2)
    {"cpu-avx512", avx512::kernels},
#endif
#elif defined(__aarch64__)
    {"cpu-neon", neon::kernels},
#else
    {"cpu-baseline", baseline::kernels},
#endif
};
const std::vector<Set> &sets_here() {
  static const std::vector<Set> all = [] {
    std::vector<Set> here;
    for (const Set &set : kSets)
      for (const Engine *engine : cpu_engines())
        if (engine->name() == std::string(set.engine) && engine->missing().empty()) here.push_back(set);
    return here;
  }();
  return all;
}

// A value of a node for one pair.
template <class T> struct Value {
  T real = 0;
  int64_t integer = 0; // a boolean is 0 or 1
};

struct Pair {
  int64_t b, h, i, j, offset;
};

int64_t wrap(uint64_t x) { return int64_t(x); }

// The definitions in operations.inc, each computed in double and rounded once.
template <class T> class Evaluator {
public:
  Evaluator(const Graph &graph, const Problem &p) : graph_(graph), p_(p) {}

  // The values of all nodes.
  const std::vector<Value<T>> &operator()(T x, const Pair &at) {
    all_.clear();
    for (const Node &node : graph_.nodes()) all_.push_back(value(node, x, at, all_));
    return all_;
  }

private:
  Value<T> value(const Node &node, T x, const Pair &at, const std::vector<Value<T>> &all) const {
    const auto in = [&](size_t n) { return all[size_t(node.inputs[n])]; };
    const Kind kind = node.count > 0 ? graph_[node.inputs[0]].kind : node.kind;
    const auto integer = [](int64_t i) { return Value<T>{0, i}; };
    switch (node.op) {
    case Op::SCORE:
      return {x, 0};
    case Op::BATCH:
      return integer(at.b);
    case Op::HEAD:
      return integer(at.h);
    case Op::QUERY:
      return integer(at.i);
    case Op::KEY:
      return integer(at.j);
    case Op::OFFSET:
      return integer(at.offset);
    case Op::REAL:
      return {T(node.real), 0};
    case Op::INTEGER:
    case Op::BOOLEAN:
      return integer(node.integer);
    case Op::LOAD:
      return load(node, all);
    case Op::WHERE:
      return in(0).integer ? in(1) : in(2);
    case Op::TO_REAL:
      return kind == Kind::real ? in(0) : Value<T>{T(in(0).integer), 0};
    case Op::TO_INTEGER:
      return kind == Kind::real ? integer(int64_t(in(0).real)) : in(0);
    case Op::TO_BOOLEAN:
      return integer(kind == Kind::real ? in(0).real != 0 : in(0).integer != 0);
    default:
      break;
    }
    const Value<T> a = in(0), b = node.count > 1 ? in(1) : Value<T>{};
    if (node.op >= Op::EQUAL && node.op <= Op::GREATER_EQUAL)
      return integer(kind == Kind::real ? compare(node.op, a.real, b.real) : compare(node.op, a.integer, b.integer));
    if (kind == Kind::real) return {T(real(node.op, double(a.real), double(b.real))), 0};
    const int64_t result = of_integers(node.op, a.integer, b.integer);
    return integer(kind == Kind::boolean ? result & 1 : result);
  }

  Value<T> load(const Node &node, const std::vector<Value<T>> &all) const {
    const Captured &c = p_.captured[node.captured];
    int64_t at = 0;
    for (int32_t axis = 0; axis < node.count; ++axis) {
      int64_t index = all[size_t(node.inputs[size_t(axis)])].integer;
      if (index < 0) index += c.size[axis];
      at += std::clamp<int64_t>(index, 0, c.size[axis] - 1) * c.stride[axis];
    }
    switch (c.dtype) {
    case DType::boolean:
      return {0, reinterpret_cast<const uint8_t *>(c.data)[at] != 0};
    case DType::i32:
      return {0, reinterpret_cast<const int32_t *>(c.data)[at]};
    case DType::i64:
      return {0, reinterpret_cast<const int64_t *>(c.data)[at]};
    case DType::f32:
      return {T(reinterpret_cast<const float *>(c.data)[at]), 0};
    default:
      return {T(reinterpret_cast<const double *>(c.data)[at]), 0};
    }
  }

  template <class X> static bool compare(Op op, X a, X b) {
    return op == Op::EQUAL        ? a == b
           : op == Op::NOT_EQUAL  ? a != b
           : op == Op::LESS       ? a < b
           : op == Op::LESS_EQUAL ? a <= b
           : op == Op::GREATER    ? a > b
                                  : a >= b;
  }

  static int64_t of_integers(Op op, int64_t a, int64_t b) {
    const bool overflows = b == 0 || b == -1;
    switch (op) {
    case Op::ADD:
      return wrap(uint64_t(a) + uint64_t(b));
    case Op::SUBTRACT:
      return wrap(uint64_t(a) - uint64_t(b));
    case Op::MULTIPLY:
      return wrap(uint64_t(a) * uint64_t(b));
    case Op::FLOOR_DIVIDE: {
      if (overflows) return b == 0 ? 0 : wrap(-uint64_t(a));
      const int64_t q = a / b;
      return q * b != a && (a < 0) != (b < 0) ? q - 1 : q;
    }
    case Op::REMAINDER:
      return overflows || a % b == 0 ? 0 : (a % b < 0) != (b < 0) ? a % b + b : a % b;
    case Op::TRUNC_REMAINDER:
      return overflows ? 0 : a % b;
    case Op::MINIMUM:
      return std::min(a, b);
    case Op::MAXIMUM:
      return std::max(a, b);
    case Op::NEGATE:
      return wrap(-uint64_t(a));
    case Op::ABSOLUTE:
      return a < 0 ? wrap(-uint64_t(a)) : a;
    case Op::SIGN:
      return a > 0 ? 1 : a < 0 ? -1 : 0;
    case Op::AND:
      return a & b;
    case Op::OR:
      return a | b;
    case Op::XOR:
      return a ^ b;
    case Op::NOT:
      return ~a;
    case Op::SHIFT_LEFT:
      return b < 0 || b > 63 ? 0 : wrap(uint64_t(a) << b);
    case Op::SHIFT_RIGHT:
      return b < 0 || b > 63 ? (a < 0 ? -1 : 0) : a >> b;
    case Op::TO_INT32:
      return int32_t(uint32_t(uint64_t(a)));
    default:
      FAIL("an operation without integers");
      return 0;
    }
  }

  static double real(Op op, double a, double b) {
    const bool nan = std::isnan(a) || std::isnan(b);
    switch (op) {
    case Op::ADD:
      return a + b;
    case Op::SUBTRACT:
      return a - b;
    case Op::MULTIPLY:
      return a * b;
    case Op::DIVIDE:
      return a / b;
    case Op::FLOOR_DIVIDE:
      if (b == 0 || std::isinf(a)) return b == 0 ? a / b : NAN;
      return T(std::nearbyint(((long double)a - real(Op::REMAINDER, a, b)) / b));
    case Op::REMAINDER: {
      const double r = std::fmod(a, b);
      return r != 0 && (r < 0) != (b < 0) ? r + b : r;
    }
    case Op::TRUNC_REMAINDER:
      return std::fmod(a, b);
    case Op::MINIMUM:
      return nan ? NAN : std::min(a, b);
    case Op::MAXIMUM:
      return nan ? NAN : std::max(a, b);
    case Op::NEGATE:
      return -a;
    case Op::ABSOLUTE:
      return std::fabs(a);
    case Op::SIGN:
      return a > 0 ? 1 : a < 0 ? -1 : 0;
    case Op::POWER:
      return std::pow(a, b);
    case Op::EXP:
      return std::exp(a);
    case Op::EXP2:
      return std::exp2(a);
    case Op::EXPM1:
      return std::expm1(a);
    case Op::LOG:
      return std::log(a);
    case Op::LOG2:
      return std::log2(a);
    case Op::LOG1P:
      return std::log1p(a);
    case Op::SQRT:
      return std::sqrt(a);
    case Op::RSQRT:
      return 1 / std::sqrt(a);
    case Op::SIN:
      return std::sin(a);
    case Op::COS:
      return std::cos(a);
    case Op::TAN:
      return std::tan(a);
    case Op::ASIN:
      return std::asin(a);
    case Op::ACOS:
      return std::acos(a);
    case Op::ATAN:
      return std::atan(a);
    case Op::ATAN2:
      return std::atan2(a, b);
    case Op::SINH:
      return std::sinh(a);
    case Op::COSH:
      return std::cosh(a);
    case Op::TANH:
      return std::tanh(a);
    case Op::ASINH:
      return std::asinh(a);
    case Op::ACOSH:
      return std::acosh(a);
    case Op::ATANH:
      return std::atanh(a);
    case Op::ERF:
      return std::erf(a);
    case Op::ERFC:
      return std::erfc(a);
    case Op::SIGMOID:
      return 1 / (1 + std::exp(-a));
    case Op::FLOOR:
      return std::floor(a);
    case Op::CEIL:
      return std::ceil(a);
    case Op::TRUNC:
      return std::trunc(a);
    case Op::ROUND:
      return std::nearbyint(a);
    case Op::ARCCOSH_FROM_1:
      return std::acosh(std::fmax(a, 1.0));
    default:
      FAIL("an operation without reals");
      return 0;
    }
  }

  const Graph &graph_;
  const Problem &p_;
  std::vector<Value<T>> all_;
};

// Captured tensors of reals and integers, which include critical values.
struct Tables {
  std::vector<float> reals;
  std::vector<int32_t> small;
  std::vector<int64_t> large;
  std::vector<uint8_t> flags;
  std::vector<double> matrix; // 5 x 7
  Tables() {
    for (const double x :
         {0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, -2.5, 3.5, 1e-3, -7.25, 10.0, 33.0, -80.0, 88.5, -1e-30, 1e30, 0.7, 0.999, 1.001})
      reals.push_back(float(x));
    std::mt19937 random(7);
    while (reals.size() < 96) reals.push_back(float((double(random()) / 4294967296.0 - 0.5) * std::exp(double(random() % 8))));
    for (const int64_t x :
         {0l, 1l, -1l, 2l, -3l, 7l, -8l, 31l, 32l, 33l, 62l, 63l, 64l, -64l, 1l << 31, -(1l << 31), 1l << 40, INT64_MAX, INT64_MIN})
      large.push_back(x);
    reals.back() = 0.1f; // 1 / 0.1f is rounded up to 10
    while (large.size() < 96) large.push_back(int64_t(uint64_t(random()) * random()) >> random() % 60);
    for (const int64_t x : large) small.push_back(int32_t(x));
    for (size_t n = 0; n < 96; ++n) flags.push_back(random() % 2);
    for (size_t n = 0; n < 35; ++n) matrix.push_back(std::sin(double(n)));
  }
  // Captured tensor 0: reals; 1: int32; 2: int64; 3: bool; 4: a matrix, transposed.
  void give(Problem &p) {
    const auto one = [](auto &v, DType dtype) {
      Captured c;
      c.data = reinterpret_cast<char *>(v.data()), c.dtype = dtype, c.rank = 1, c.size[0] = int64_t(v.size()), c.stride[0] = 1;
      return c;
    };
    p.captured[0] = one(reals, DType::f32), p.captured[1] = one(small, DType::i32), p.captured[2] = one(large, DType::i64);
    p.captured[3] = one(flags, DType::boolean);
    p.captured[4] = one(matrix, DType::f64);
    p.captured[4].rank = 2, p.captured[4].size[0] = 7, p.captured[4].size[1] = 5, p.captured[4].stride[0] = 1, p.captured[4].stride[1] = 7;
  }
};

constexpr Pair kFirst{3, 5, 37, 130, -11};
constexpr int64_t kRows = 35, kLanes = 16, kStride = 32; // more than one block of the bytecode

Problem problem_of(Program program, DType dtype, Tables &tables) {
  Problem p;
  p.batch = 4, p.heads = 8, p.heads_kv = 8, p.seqlen_q = 300, p.seqlen_k = 400, p.total_q = 1200, p.total_k = 1600;
  p.dtype = dtype;
  tables.give(p);
  p.program = std::make_shared<const Program>(std::move(program));
  return p;
}

template <class T> T score_of(int64_t row, int64_t lane) {
  if ((row + lane) % 97 == 13) return 0;
  return T(float(std::sin(double(row * 53 + lane)) * std::exp(double((row + 3 * lane) % 7) - 3)));
}

// Runs score and seen on a tile in both layouts, and compares each pair. exact: bit by bit (NaN equals NaN).
template <class T> void check(const Graph &graph, int32_t score, int32_t seen, Tables &tables, double tolerance, const std::string &what) {
  Program program;
  program.graph = graph, program.score = score, program.slope = score, program.seen = seen, program.form = Form::general;
  const Problem p = problem_of(program, sizeof(T) == 8 ? DType::f64 : DType::f32, tables);
  const auto code = compile(p);
  std::vector<char> scratch(size_t(code->scratch_bytes));
  Evaluator<T> evaluate(p.program->graph, p);
  for (const bool keys_are_rows : {true, false}) {
    std::vector<T> before(size_t(kRows * kStride)), expected(before.size()), slopes(before.size());
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t l = 0; l < kLanes; ++l) {
        const T x = before[size_t(r * kStride + l)] = score_of<T>(r, l);
        Pair at = kFirst;
        at.i += keys_are_rows ? l : r, at.j += keys_are_rows ? r : l;
        const auto &all = evaluate(x, at);
        expected[size_t(r * kStride + l)] = seen >= 0 && !all[size_t(seen)].integer ? -std::numeric_limits<T>::infinity()
                                            : score >= 0                            ? all[size_t(score)].real
                                                                                    : x;
      }
    for (const Set &set : sets_here()) {
      std::vector<T> s = before;
      const Scores scores{kFirst.i, kFirst.j, kRows, kLanes, kStride, keys_are_rows, kFirst.b, kFirst.h, kFirst.offset, 1};
      set.kernels(p.dtype)->run_program(code->backward, scores, scratch.data(), s.data(), slopes.data());
      int64_t wrong = 0;
      std::string first;
      for (int64_t r = 0; r < kRows; ++r)
        for (int64_t l = 0; l < kLanes; ++l) {
          const T got = s[size_t(r * kStride + l)], want = expected[size_t(r * kStride + l)];
          const bool same = got == want || (std::isnan(got) && std::isnan(want)) ||
                            std::fabs(double(got) - double(want)) <= tolerance * std::fabs(double(want)) + (tolerance > 0 ? 1e-37 : 0);
          if (!same && wrong++ == 0)
            first = std::to_string(got) + " for " + std::to_string(want) + " at row " + std::to_string(r) + ", lane " + std::to_string(l) +
                    ", score " + std::to_string(before[size_t(r * kStride + l)]);
          if (score >= 0 && seen < 0 && !(slopes[size_t(r * kStride + l)] == got || std::isnan(got))) ++wrong;
        }
      INFO(std::string(set.engine) << ", " << sizeof(T) * 8 << " bits, " << std::string(keys_are_rows ? "keys as rows" : "queries as rows")
                                   << ": " << what << ": " << first);
      CHECK(wrong == 0);
    }
  }
}

template <class T> double ulps(double n) { return n * double(std::numeric_limits<T>::epsilon()); }

struct Listed {
  const char *name;
  Op op;
  int inputs;
  std::string takes, gives;
};
const Listed kListed[] = {
#define STROBE_OPERATION(name, number, inputs, takes, gives) {#name, Op::name, inputs, takes, gives},
#include "strobe/operations.inc"
};

// Integers of each stage and width.
std::vector<int32_t> integers(Graph &g) {
  const int32_t i = g.add(Op::QUERY), j = g.add(Op::KEY), distance = g.add(Op::SUBTRACT, {i, j});
  return {distance,
          g.add(Op::REMAINDER, {g.add(Op::MULTIPLY, {i, j}), g.integer(7)}),
          g.load(1, Kind::integer, {i}),
          g.load(2, Kind::integer, {distance}),
          g.load(2, Kind::integer, {j}),
          g.add(Op::HEAD),
          g.integer(-5),
          g.integer(0),
          g.integer(33)};
}

} // namespace

TEST_CASE("bytecode: kept for calls of one shape, and reads the memory of each") {
  Program program;
  Graph &g = program.graph;
  program.score = g.add(Op::MULTIPLY, {g.add(Op::SCORE), g.load(0, Kind::real, {g.add(Op::HEAD)})});
  program.slope = program.score, program.form = Form::general;
  Tables tables, others;
  Problem p = problem_of(program, DType::f32, tables);
  const Bytecode *const first = compile(p).get();
  others.give(p);
  const auto again = compile(p);
  CHECK(again.get() == first);
  const Code::List list = again->forward.lists[int(Stage::head)];
  const auto element = std::find_if(list.at, list.at + list.count, [](const Instruction &x) { return x.op == kElement; });
  REQUIRE(element != list.at + list.count);
  CHECK(element->data == p.captured[0].data);
  CHECK(compile(p).get() != first); // which is in use
  p.captured[0].stride[0] = 2;
  CHECK(compile(p).get() != first);
  CHECK(again->forward.lists[int(Stage::head)].at == list.at);
}

TEST_CASE_TEMPLATE("bytecode: every operation of reals", T, float, double) {
  Tables tables;
  for (const Listed &row : kListed) {
    if (row.inputs < 1 || row.takes.find('R') == std::string::npos || row.op == Op::TO_INTEGER) continue;
    Graph g;
    const int32_t x = g.add(Op::SCORE), i = g.add(Op::QUERY), j = g.add(Op::KEY);
    const int32_t operands[] = {x, g.load(0, Kind::real, {g.add(Op::SUBTRACT, {i, j})}), g.load(0, Kind::real, {j}),
                                g.load(0, Kind::real, {i}), g.real(0.75)};
    // Functions computed by vectors have errors of a few ulps.
    const double tolerance = row.op >= Op::EXP || row.op == Op::POWER ? ulps<T>(8) : ulps<T>(2);
    for (const int32_t a : operands)
      for (const int32_t b : operands) {
        if (row.inputs == 1 && b != x) continue;
        Graph own = g;
        int32_t result = row.inputs == 1 ? own.add(row.op, {a}) : own.add(row.op, {a, b});
        if (row.gives == "B") result = own.add(Op::TO_REAL, {result});
        check<T>(own, result, -1, tables, tolerance, row.name);
      }
  }
}

TEST_CASE_TEMPLATE("bytecode: every operation of integers and booleans", T, float, double) {
  Tables tables;
  for (const Listed &row : kListed) {
    if (row.inputs < 1 || row.takes.find_first_of("IB") == std::string::npos) continue;
    for (const bool boolean : {false, true}) {
      if (row.takes.find(boolean ? 'B' : 'I') == std::string::npos) continue;
      Graph g;
      std::vector<int32_t> operands = integers(g);
      if (boolean) {
        const int32_t i = g.add(Op::QUERY), j = g.add(Op::KEY);
        operands = {g.add(Op::LESS, {g.add(Op::REMAINDER, {g.add(Op::ADD, {i, j}), g.integer(5)}), g.integer(2)}),
                    g.load(3, Kind::boolean, {i}), g.load(3, Kind::boolean, {j}), g.boolean(true)};
      }
      for (const int32_t a : operands)
        for (const int32_t b : operands) {
          if (row.inputs == 1 && b != operands[0]) continue;
          Graph own = g;
          int32_t result = row.inputs == 1 ? own.add(row.op, {a}) : own.add(row.op, {a, b});
          if (own[result].kind != Kind::real) result = own.add(Op::TO_REAL, {result});
          check<T>(own, result, -1, tables, 0, std::string(row.name) + " of nodes " + std::to_string(a) + ", " + std::to_string(b));
        }
    }
  }
}

TEST_CASE_TEMPLATE("bytecode: conversions, choices and captured tensors", T, float, double) {
  Tables tables;
  Graph g;
  const int32_t x = g.add(Op::SCORE), i = g.add(Op::QUERY), j = g.add(Op::KEY), h = g.add(Op::HEAD), distance = g.add(Op::SUBTRACT, {i, j});
  const auto whole = [&](int32_t n) { return g.add(Op::TO_REAL, {n}); };
  const int32_t odd = g.add(Op::EQUAL, {g.add(Op::REMAINDER, {distance, g.integer(2)}), g.integer(1)});
  const int32_t wide = g.load(2, Kind::integer, {distance}), narrow = g.add(Op::MINIMUM, {g.add(Op::MAXIMUM, {wide, g.integer(-9)}), h});
  const std::pair<const char *, int32_t> all[] = {
      {"to integer", whole(g.add(Op::TO_INTEGER, {g.add(Op::MULTIPLY, {x, g.real(100)})}))},
      {"to integer, bounded", whole(g.add(Op::TO_INTEGER, {g.add(Op::MULTIPLY, {g.add(Op::TANH, {x}), g.real(100)})}))},
      {"where of reals", g.add(Op::WHERE, {odd, x, g.real(2)})},
      {"where of narrow integers", whole(g.add(Op::WHERE, {odd, distance, h}))},
      {"where of wide integers", whole(g.add(Op::WHERE, {odd, wide, h}))},
      {"where of booleans", whole(g.add(Op::WHERE, {odd, g.load(3, Kind::boolean, {i}), g.load(3, Kind::boolean, {j})}))},
      {"batch, head and offset", whole(g.add(Op::ADD, {g.add(Op::BATCH), g.add(Op::MULTIPLY, {h, g.add(Op::OFFSET)})}))},
      {"a matrix", g.load(4, Kind::real, {g.add(Op::REMAINDER, {distance, g.integer(9)}), h})},
      {"an index beyond the axis", g.load(0, Kind::real, {g.add(Op::MULTIPLY, {distance, g.integer(3)})})},
      {"an index of 64 bits", g.load(0, Kind::real, {wide})},
      {"a gather of a gather", g.load(0, Kind::real, {g.load(1, Kind::integer, {g.load(2, Kind::integer, {j})})})},
      {"wide and narrow", whole(g.add(Op::ADD, {narrow, g.add(Op::SUBTRACT, {wide, distance})}))},
      {"squared", g.add(Op::POWER, {x, g.real(2)})},
      {"a constant", g.real(-3)},
      {"of keys alone", g.load(0, Kind::real, {j})},
      {"of queries alone", g.load(0, Kind::real, {i})}};
  for (const auto &[what, result] : all) check<T>(g, result, -1, tables, ulps<T>(4), what);
  for (const int32_t seen :
       {odd, g.add(Op::LESS, {g.load(2, Kind::integer, {i}), wide}), g.load(3, Kind::boolean, {j}), g.boolean(false)}) {
    check<T>(g, -1, seen, tables, 0, "seen alone");
    check<T>(g, g.add(Op::DIVIDE, {x, g.real(0)}), seen, tables, 0, "a hidden pair's score may be NaN");
  }
}

TEST_CASE_TEMPLATE("bytecode: random graphs of 12 nodes", T, float, double) {
  std::mt19937 random(11);
  Tables tables;
  const Op of_reals[] = {Op::ADD, Op::SUBTRACT, Op::MULTIPLY, Op::MINIMUM, Op::MAXIMUM, Op::NEGATE, Op::ABSOLUTE};
  const Op of_integers[] = {Op::ADD,         Op::SUBTRACT, Op::MULTIPLY, Op::FLOOR_DIVIDE, Op::REMAINDER, Op::TRUNC_REMAINDER,
                            Op::MINIMUM,     Op::MAXIMUM,  Op::AND,      Op::OR,           Op::XOR,       Op::SHIFT_LEFT,
                            Op::SHIFT_RIGHT, Op::NEGATE,   Op::ABSOLUTE, Op::NOT,          Op::SIGN};
  const Op compare[] = {Op::EQUAL, Op::NOT_EQUAL, Op::LESS, Op::LESS_EQUAL, Op::GREATER, Op::GREATER_EQUAL};
  for (int round = 0; round < 150; ++round) {
    Graph g;
    std::vector<int32_t> of[3] = {{g.boolean(true)}, {g.add(Op::QUERY), g.add(Op::KEY), g.add(Op::HEAD)}, {g.add(Op::SCORE)}};
    const auto any = [&](Kind kind) {
      const auto &all = of[int(kind)];
      return all[random() % all.size()];
    };
    const auto pick = [&](const auto &list) { return list[random() % std::size(list)]; };
    for (int n = 0; n < 12; ++n) {
      int32_t made = -1;
      const auto operation = [&](Op op, Kind kind) {
        const bool one = op == Op::NEGATE || op == Op::ABSOLUTE || op == Op::NOT || op == Op::SIGN;
        return one ? g.add(op, {any(kind)}) : g.add(op, {any(kind), any(kind)});
      };
      switch (random() % 9) {
      case 0:
        made = g.integer(int64_t(random() % 40) - 20);
        break;
      case 1:
        made = g.load(0, Kind::real, {any(Kind::integer)});
        break;
      case 2:
        made = g.load(random() % 2 ? 1 : 2, Kind::integer, {any(Kind::integer)});
        break;
      case 3:
      case 4:
        made = operation(pick(of_integers), Kind::integer);
        break;
      case 5:
        made = operation(pick(of_reals), Kind::real);
        break;
      case 6:
        made = g.add(pick(compare), {any(Kind::integer), any(Kind::integer)});
        break;
      case 7:
        made = random() % 2 ? g.add(Op::WHERE, {any(Kind::boolean), any(Kind::real), any(Kind::real)})
                            : g.add(Op::WHERE, {any(Kind::boolean), any(Kind::integer), any(Kind::integer)});
        break;
      default:
        made = g.add(Op::TO_REAL, {any(Kind::integer)});
      }
      of[int(g[made].kind)].push_back(made);
    }
    int32_t sum = of[2].back();
    for (const int32_t n : of[1]) sum = g.add(Op::ADD, {sum, g.add(Op::TO_REAL, {n})});
    check<T>(g, sum, of[0].back(), tables, ulps<T>(1), "round " + std::to_string(round));
  }
}
