// The graph of a function: the results and derivatives of each operation, the built-in forms, the digest, the text.
#include <cmath>
#include <functional>
#include <numbers>
#include <set>

#include "call.h"
#include "reference/function.h"
#include "score/build.h"

// Several files are compiled together, so each has its own names.
namespace strobe::score_test {

using namespace strobe::test;
using score::Graph;
using score::Kind;
using score::Node;
using score::Op;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
using Long = long double;

struct Evaluated {
  double value, slope;
};
Evaluated evaluated(const oracle::Function &function, const oracle::Pair &at) {
  const oracle::Dual found = function.real(at);
  return {found.value.value, found.slope.value};
}
Evaluated evaluated(const Graph &graph, int32_t root, double x, oracle::Pair at = {}, const Captured *captured = nullptr) {
  at.x = x;
  return evaluated(oracle::Function(graph.nodes(), root, captured), at);
}
int64_t evaluated_whole(const Graph &graph, int32_t root) {
  Graph copy = graph; // the result as a real, exact if it is an integer
  const int32_t real = copy.add(Op::TO_REAL, {root});
  return int64_t(evaluated(copy, real, 0).value);
}

// The derivative by the score that the graph itself computes.
double slope(Graph graph, int32_t root, double x, const oracle::Pair &at = {}, const Captured *captured = nullptr) {
  const int32_t by = graph.add(Op::SCORE), of = score::derivative(graph, root, by);
  return of < 0 ? 0 : evaluated(graph, of, x, at, captured).value;
}

bool close(double a, double b, double tolerance) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return a == b || std::abs(a - b) <= tolerance * std::max({1.0, std::abs(a), std::abs(b)});
}

double finite_difference(const std::function<Long(Long)> &f, double x) {
  const Long h = 1e-4L * std::max(1.0, std::abs(x));
  return double((8 * (f(x + h) - f(x - h)) - (f(x + 2 * h) - f(x - 2 * h))) / (12 * h));
}

// A function of reals, with points at which it is smooth.
struct RealOp {
  std::function<Long(Long, Long)> value;
  std::vector<double> points;
  double other = 0; // the second input
};
Long sigmoid(Long x) { return 1 / (1 + std::exp(-x)); }
Long rest(Long x, Long y) { return x - y * std::floor(x / y); }
const std::map<Op, RealOp> kReals = {
    {Op::ADD, {[](Long x, Long y) { return x + y; }, {-2, 0.5}, 1.5}},
    {Op::SUBTRACT, {[](Long x, Long y) { return x - y; }, {-2, 0.5}, 1.5}},
    {Op::MULTIPLY, {[](Long x, Long y) { return x * y; }, {-2, 0.5}, 1.5}},
    {Op::DIVIDE, {[](Long x, Long y) { return x / y; }, {-2, 0.5}, 1.5}},
    {Op::FLOOR_DIVIDE, {[](Long x, Long y) { return std::floor(x / y); }, {-2, 0.4, 7}, 1.5}},
    {Op::REMAINDER, {rest, {-2, 0.4, 7, -7.25}, 1.5}},
    {Op::TRUNC_REMAINDER, {[](Long x, Long y) { return std::fmod(x, y); }, {-2, 0.4, 7, -7.25}, 1.5}},
    {Op::MINIMUM, {[](Long x, Long y) { return std::min(x, y); }, {-2, 0.5, 7}, 1.5}},
    {Op::MAXIMUM, {[](Long x, Long y) { return std::max(x, y); }, {-2, 0.5, 7}, 1.5}},
    {Op::NEGATE, {[](Long x, Long) { return -x; }, {-2, 0.5}}},
    {Op::ABSOLUTE, {[](Long x, Long) { return std::abs(x); }, {-2, 0.5}}},
    {Op::SIGN, {[](Long x, Long) { return Long((x > 0) - (x < 0)); }, {-2, 0.5}}},
    {Op::POWER, {[](Long x, Long y) { return std::pow(x, y); }, {0.3, 1, 4.5}, 1.5}},
    {Op::TO_REAL, {[](Long x, Long) { return x; }, {-2, 0.5}}},
    {Op::EXP, {[](Long x, Long) { return std::exp(x); }, {-3, 0, 2}}},
    {Op::EXP2, {[](Long x, Long) { return std::exp2(x); }, {-3, 0, 2}}},
    {Op::EXPM1, {[](Long x, Long) { return std::expm1(x); }, {-3, 0, 2}}},
    {Op::LOG, {[](Long x, Long) { return std::log(x); }, {0.1, 1, 7}}},
    {Op::LOG2, {[](Long x, Long) { return std::log2(x); }, {0.1, 1, 7}}},
    {Op::LOG1P, {[](Long x, Long) { return std::log1p(x); }, {-0.5, 0, 7}}},
    {Op::SQRT, {[](Long x, Long) { return std::sqrt(x); }, {0.1, 1, 7}}},
    {Op::RSQRT, {[](Long x, Long) { return 1 / std::sqrt(x); }, {0.1, 1, 7}}},
    {Op::SIN, {[](Long x, Long) { return std::sin(x); }, {-3, 0, 2}}},
    {Op::COS, {[](Long x, Long) { return std::cos(x); }, {-3, 0, 2}}},
    {Op::TAN, {[](Long x, Long) { return std::tan(x); }, {-1, 0, 0.5}}},
    {Op::ASIN, {[](Long x, Long) { return std::asin(x); }, {-0.9, 0, 0.5}}},
    {Op::ACOS, {[](Long x, Long) { return std::acos(x); }, {-0.9, 0, 0.5}}},
    {Op::ATAN, {[](Long x, Long) { return std::atan(x); }, {-3, 0, 2}}},
    {Op::ATAN2, {[](Long x, Long y) { return std::atan2(x, y); }, {-3, 0.5, 2}, 1.5}},
    {Op::SINH, {[](Long x, Long) { return std::sinh(x); }, {-3, 0, 2}}},
    {Op::COSH, {[](Long x, Long) { return std::cosh(x); }, {-3, 0, 2}}},
    {Op::TANH, {[](Long x, Long) { return std::tanh(x); }, {-3, 0, 2}}},
    {Op::ASINH, {[](Long x, Long) { return std::asinh(x); }, {-3, 0, 2}}},
    {Op::ACOSH, {[](Long x, Long) { return std::acosh(x); }, {1.1, 2, 9}}},
    {Op::ATANH, {[](Long x, Long) { return std::atanh(x); }, {-0.9, 0, 0.5}}},
    {Op::ERF, {[](Long x, Long) { return std::erf(x); }, {-2, 0, 0.5}}},
    {Op::ERFC, {[](Long x, Long) { return std::erfc(x); }, {-2, 0, 0.5}}},
    {Op::SIGMOID, {[](Long x, Long) { return sigmoid(x); }, {-3, 0, 2}}},
    {Op::FLOOR, {[](Long x, Long) { return std::floor(x); }, {-2.5, 0.5}}},
    {Op::CEIL, {[](Long x, Long) { return std::ceil(x); }, {-2.5, 0.5}}},
    {Op::TRUNC, {[](Long x, Long) { return std::trunc(x); }, {-2.7, 0.5}}},
    {Op::ROUND, {[](Long x, Long) { return std::nearbyint(x); }, {-2.7, 0.4}}},
    {Op::ARCCOSH_FROM_1, {[](Long x, Long) { return x > 1 ? std::acosh(x) : 0; }, {-3, 0.5, 1.1, 2, 9}}},
};

// An operation of integers and booleans, or a comparison, with inputs and results.
struct WholeOp {
  std::vector<std::array<int64_t, 3>> cases; // a, b, result
};
constexpr int64_t kLeast = std::numeric_limits<int64_t>::min(), kGreatest = std::numeric_limits<int64_t>::max();
const std::map<Op, WholeOp> kIntegers = {
    {Op::ADD, {{{3, -5, -2}, {kGreatest, 1, kLeast}}}},
    {Op::SUBTRACT, {{{3, -5, 8}, {kLeast, 1, kGreatest}}}},
    {Op::MULTIPLY, {{{3, -5, -15}, {kLeast, -1, kLeast}}}},
    {Op::FLOOR_DIVIDE, {{{7, 2, 3}, {-7, 2, -4}, {7, -2, -4}, {-7, -2, 3}, {6, -2, -3}, {7, 0, 0}, {kLeast, -1, kLeast}}}},
    {Op::REMAINDER, {{{7, 3, 1}, {-7, 3, 2}, {7, -3, -2}, {-7, -3, -1}, {6, 3, 0}, {7, 0, 0}, {kLeast, -1, 0}}}},
    {Op::TRUNC_REMAINDER, {{{7, 3, 1}, {-7, 3, -1}, {7, -3, 1}, {7, 0, 0}, {kLeast, -1, 0}}}},
    {Op::MINIMUM, {{{3, -5, -5}}}},
    {Op::MAXIMUM, {{{3, -5, 3}}}},
    {Op::NEGATE, {{{3, 0, -3}, {kLeast, 0, kLeast}}}},
    {Op::ABSOLUTE, {{{-3, 0, 3}, {kLeast, 0, kLeast}}}},
    {Op::SIGN, {{{-3, 0, -1}, {0, 0, 0}, {9, 0, 1}}}},
    {Op::AND, {{{12, 10, 8}, {-1, 5, 5}}}},
    {Op::OR, {{{12, 10, 14}}}},
    {Op::XOR, {{{12, 10, 6}}}},
    {Op::NOT, {{{12, 0, -13}}}},
    {Op::SHIFT_LEFT, {{{3, 4, 48}, {3, 63, kLeast}, {3, 64, 0}, {3, -1, 0}}}},
    {Op::SHIFT_RIGHT, {{{48, 4, 3}, {-48, 4, -3}, {-1, 63, -1}, {7, 64, 0}, {-7, 64, -1}, {-7, -1, -1}}}},
    {Op::TO_INT32, {{{-3, 0, -3}, {1ll << 31, 0, -(1ll << 31)}, {(5ll << 32) - 7, 0, -7}, {kLeast, 0, 0}}}},
    {Op::EQUAL, {{{3, 3, 1}, {3, 4, 0}}}},
    {Op::NOT_EQUAL, {{{3, 3, 0}, {3, 4, 1}}}},
    {Op::LESS, {{{3, 3, 0}, {3, 4, 1}, {4, 3, 0}}}},
    {Op::LESS_EQUAL, {{{3, 3, 1}, {3, 4, 1}, {4, 3, 0}}}},
    {Op::GREATER, {{{3, 3, 0}, {3, 4, 0}, {4, 3, 1}}}},
    {Op::GREATER_EQUAL, {{{3, 3, 1}, {3, 4, 0}, {4, 3, 1}}}},
    {Op::TO_REAL, {{{-3, 0, -3}}}},
    {Op::TO_INTEGER, {{{-3, 0, -3}}}},
    {Op::TO_BOOLEAN, {{{-3, 0, 1}, {0, 0, 0}}}},
};

std::set<Op> all_operations() {
  std::set<Op> all;
#define STROBE_OPERATION(name, number, inputs, takes, gives) all.insert(Op::name);
#include "strobe/operations.inc"
  return all;
}
bool takes(Op op, char kind) { return std::string(score::find_operation(int32_t(op))->takes).find(kind) != std::string::npos; }

int32_t add(Graph &graph, Op op, int32_t a, int32_t b) {
  return score::find_operation(int32_t(op))->inputs == 1 ? graph.add(op, {a}) : graph.add(op, {a, b});
}

// make_program() of nodes, with captured tensors.
struct Made {
  Made(const std::vector<strobe_node> &score, const std::vector<strobe_node> &mask = {}, const score::CapturedTensors &captured = {}) {
    const strobe_function f = {sizeof f, score.data(), int64_t(score.size())}, g = {sizeof g, mask.data(), int64_t(mask.size())};
    strobe_attention a{};
    if (!score.empty()) a.score_function = &f;
    if (!mask.empty()) a.mask_function = &g;
    Reasons reasons;
    program = score::make_program(a, captured, reasons);
    reasons.raise_if_any();
  }
  std::shared_ptr<const score::Program> program;
};

} // namespace

TEST_CASE("the quotient of reals is PyTorch's") {
  const std::tuple<double, double, double> cases[] = {
      {1, 0.1, 9},  {-1, 0.1, -10},      {1, -0.1, -10},  {-1, -0.1, 9},   {0.3, 0.1, 2}, {7, 2, 3},
      {-7, 2, -4},  {1e30, 3, 1e30 / 3}, {5, kInf, 0},    {-5, kInf, -1},  {1, 0, kInf},  {-1, 0, -kInf},
      {0, 0, kNan}, {kInf, 2, kNan},     {kNan, 2, kNan}, {2, kNan, kNan}, {4.5, 1.5, 3}, {1e-300, 1e300, 0}};
  for (const auto &[x, y, quotient] : cases) {
    Graph g;
    const int32_t a = g.add(Op::SCORE), b = g.real(y);
    CAPTURE(x);
    CAPTURE(y);
    CHECK(close(evaluated(g, g.add(Op::FLOOR_DIVIDE, {a, b}), x).value, quotient, 1e-15));
    if (std::isfinite(quotient) && std::isfinite(x)) {
      Graph of_divisor; // the derivative of x % y by y is -(x // y)
      const int32_t by = of_divisor.add(Op::SCORE), remainder = of_divisor.add(Op::REMAINDER, {of_divisor.real(x), by});
      CHECK(close(slope(of_divisor, remainder, y), -quotient, 1e-15));
      CHECK(close(evaluated(of_divisor, remainder, y).slope, -quotient, 1e-15));
    }
  }
}

TEST_CASE("score: each operation on reals, its derivative in the graph and by the oracle's duals") {
  for (const Op op : all_operations()) {
    if (!takes(op, 'R') || score::find_operation(int32_t(op))->gives[0] == 'B' || op == Op::TO_INTEGER) continue;
    CAPTURE(std::string(score::find_operation(int32_t(op))->name));
    REQUIRE_MESSAGE(kReals.contains(op), "a new operation needs a line in kReals");
    const RealOp &known = kReals.at(op);
    const bool two = score::find_operation(int32_t(op))->inputs == 2;
    for (const double x : known.points)
      for (const int form : two ? std::vector{0, 1, 2} : std::vector{0}) { // the forms (x, c), (c, x), (x, 1.1 x + c)
        CAPTURE(x);
        CAPTURE(form);
        if (form && op == Op::POWER && x < 0) continue;
        const double c = known.other;
        Graph graph;
        const int32_t score = graph.add(Op::SCORE), number = graph.real(c);
        const int32_t line = graph.add(Op::ADD, {graph.add(Op::MULTIPLY, {score, graph.real(1.1)}), number});
        const int32_t root = form == 0   ? add(graph, op, score, number)
                             : form == 1 ? add(graph, op, number, score)
                                         : add(graph, op, score, line);
        const std::function<Long(Long)> value = [&](Long t) {
          return form == 0 ? known.value(t, c) : form == 1 ? known.value(c, t) : known.value(t, 1.1 * t + c);
        };
        const Evaluated found = evaluated(graph, root, x);
        const double expected = finite_difference(value, x);
        CHECK(close(found.value, double(value(x)), 1e-14));
        CHECK_MESSAGE(close(found.slope, expected, 1e-9), found.slope << " for " << expected);
        CHECK_MESSAGE(close(slope(graph, root, x), expected, 1e-9), slope(graph, root, x) << " for " << expected);
      }
  }
}

TEST_CASE("score: each operation on integers, booleans and comparisons") {
  for (const Op op : all_operations()) {
    const score::Operation &row = *score::find_operation(int32_t(op));
    CAPTURE(std::string(row.name));
    if (op == Op::LOAD || row.inputs < 1 || op == Op::WHERE || (!takes(op, 'I') && !takes(op, 'B'))) continue;
    REQUIRE_MESSAGE(kIntegers.contains(op), "a new operation needs a line in kIntegers");
    for (const auto &[a, b, result] : kIntegers.at(op).cases) {
      CAPTURE(a);
      CAPTURE(b);
      Graph graph;
      const int32_t root = add(graph, op, graph.integer(a), graph.integer(b));
      CHECK(evaluated_whole(graph, root) == int64_t(double(result)));
    }
    if (takes(op, 'B'))
      for (int64_t a : {0, 1})
        for (int64_t b : {0, 1}) {
          Graph graph;
          const int32_t root = add(graph, op, graph.boolean(a), graph.boolean(b));
          const int64_t expected = op == Op::AND         ? a & b
                                   : op == Op::OR        ? a | b
                                   : op == Op::XOR       ? a ^ b
                                   : op == Op::NOT       ? !a
                                   : op == Op::EQUAL     ? a == b
                                   : op == Op::NOT_EQUAL ? a != b
                                                         : a;
          CHECK(evaluated_whole(graph, root) == expected);
        }
    if (row.gives[0] == 'B' && takes(op, 'R') && row.inputs == 2) {
      const auto &[a, b, result] = kIntegers.at(op).cases[0];
      Graph graph;
      CHECK(evaluated_whole(graph, graph.add(op, {graph.real(double(a)), graph.real(double(b))})) == result);
      CHECK(evaluated_whole(graph, graph.add(op, {graph.real(kNan), graph.real(1)})) == (op == Op::NOT_EQUAL));
    }
  }
  Graph graph;
  CHECK(evaluated_whole(graph, graph.add(Op::TO_INTEGER, {graph.real(-2.7)})) == -2);
  CHECK(evaluated_whole(graph, graph.add(Op::TO_BOOLEAN, {graph.real(-0.1)})) == 1);
  CHECK(evaluated_whole(graph, graph.add(Op::TO_BOOLEAN, {graph.real(-0.0)})) == 0);
}

TEST_CASE("score: derivatives at kinks and at infinities are PyTorch's") {
  struct Case {
    const char *what;
    std::function<int32_t(Graph &, int32_t)> make;
    double x, slope;
  };
  const Case cases[] = {
      {"|0|", [](Graph &g, int32_t x) { return g.add(Op::ABSOLUTE, {x}); }, 0, 0},
      {"max of equal ones", [](Graph &g, int32_t x) { return g.add(Op::MAXIMUM, {x, g.real(2)}); }, 2, 0.5},
      {"min of equal ones", [](Graph &g, int32_t x) { return g.add(Op::MINIMUM, {g.real(2), x}); }, 2, 0.5},
      {"max of equal ones that both move", [](Graph &g, int32_t x) { return g.add(Op::MAXIMUM, {x, g.add(Op::NEGATE, {x})}); }, 0, 0},
      {"0 ^ 0", [](Graph &g, int32_t x) { return g.add(Op::POWER, {x, g.real(0)}); }, 0, 0},
      {"0 ^ 1", [](Graph &g, int32_t x) { return g.add(Op::POWER, {x, g.real(1)}); }, 0, 1},
      {"0 ^ 2", [](Graph &g, int32_t x) { return g.add(Op::POWER, {x, g.real(2)}); }, 0, 0},
      {"0 ^ x", [](Graph &g, int32_t x) { return g.add(Op::POWER, {g.real(0), x}); }, 2, 0},
      {"(-2) ^ 3", [](Graph &g, int32_t x) { return g.add(Op::POWER, {x, g.real(3)}); }, -2, 12},
      {"the hidden branch is log 0",
       [](Graph &g, int32_t x) {
         return g.add(Op::WHERE, {g.add(Op::GREATER, {x, g.real(0)}), g.add(Op::LOG, {x}), g.add(Op::MULTIPLY, {x, g.real(3)})});
       },
       0, 3},
      {"the hidden branch is inf * x",
       [](Graph &g, int32_t x) { return g.add(Op::WHERE, {g.boolean(false), g.add(Op::MULTIPLY, {x, g.real(kInf)}), x}); }, 0, 1},
      {"sqrt 0", [](Graph &g, int32_t x) { return g.add(Op::SQRT, {x}); }, 0, kInf},
      {"arccosh from 1, at 1", [](Graph &g, int32_t x) { return g.add(Op::ARCCOSH_FROM_1, {x}); }, 1, 0},
      {"sign 0", [](Graph &g, int32_t x) { return g.add(Op::SIGN, {x}); }, 0, 0},
      {"a step below a root", [](Graph &g, int32_t x) { return g.add(Op::SQRT, {g.add(Op::FLOOR, {x})}); }, 0.5, 0},
      {"no score", [](Graph &g, int32_t) { return g.add(Op::TO_REAL, {g.add(Op::KEY)}); }, 0.5, 0},
      {"through an integer", [](Graph &g, int32_t x) { return g.add(Op::TO_REAL, {g.add(Op::TO_INTEGER, {x})}); }, 0.5, 0},
  };
  for (const Case &c : cases) {
    CAPTURE(std::string(c.what));
    Graph graph;
    const int32_t root = c.make(graph, graph.add(Op::SCORE));
    CHECK(slope(graph, root, c.x) == c.slope);
    CHECK(evaluated(graph, root, c.x).slope == c.slope);
  }
}

TEST_CASE("score: the derivative by an element of a captured tensor") {
  Graph g;
  const int32_t x = g.add(Op::SCORE), w = g.load(0, Kind::real, {g.add(Op::HEAD)}), other = g.load(0, Kind::real, {g.add(Op::KEY)});
  // sin(x) w[h] + max(w[h], w[j]) + exp(w[h] x) / 2
  const int32_t exp = g.add(Op::MULTIPLY, {g.add(Op::EXP, {g.add(Op::MULTIPLY, {w, x})}), g.real(0.5)});
  const int32_t sum = g.add(Op::ADD, {g.add(Op::MULTIPLY, {g.add(Op::SIN, {x}), w}), g.add(Op::MAXIMUM, {w, other})});
  const int32_t f = g.add(Op::ADD, {sum, exp});
  const int32_t by_w = score::derivative(g, f, w), by_other = score::derivative(g, f, other), size = g.size();
  CHECK(score::derivative(g, exp, other) == -1);
  CHECK(score::derivative(g, f, w) == by_w); // the derivative is made only once
  CHECK(g.size() - size <= 1);               // except for constants
  double table[] = {0.3, -0.7, 0.9, 0.2};
  Captured captured[STROBE_MOST_CAPTURED];
  captured[0] = {reinterpret_cast<char *>(table), DType::f64, 1, {4, 1, 1, 1}, {1, 0, 0, 0}};
  for (const int64_t h : {0, 1})
    for (const int64_t j : {2, 3}) {
      const oracle::Pair at = {.x = 0.8, .h = h, .j = j};
      auto moved = [&](int64_t n, double by) {
        const double before = table[n];
        table[n] += by;
        const double value = evaluated(g, f, 0.8, at, captured).value;
        table[n] = before;
        return value;
      };
      auto difference = [&](int64_t n) { return (moved(n, 1e-5) - moved(n, -1e-5)) / 2e-5; };
      CHECK(close(evaluated(g, by_w, 0.8, at, captured).value, difference(h), 1e-8));
      CHECK(close(evaluated(g, by_other, 0.8, at, captured).value, difference(j), 1e-8));
    }
}

TEST_CASE("score: a derivative is only as long as it has to be") {
  auto slope_of = [](auto make) {
    Nodes f;
    make(f, f.add(STROBE_OP_SCORE));
    const auto program = Made(f.all).program;
    return program->slope < 0 ? std::string("one") : score::formula(program->graph, program->slope);
  };
  CHECK(slope_of([](Nodes &f, int32_t x) { f.add(STROBE_OP_ADD, {x, f.add(STROBE_OP_TO_REAL, {f.add(STROBE_OP_KEY)})}); }) == "one");
  CHECK(slope_of([](Nodes &f, int32_t) { f.add(STROBE_OP_TO_REAL, {f.add(STROBE_OP_KEY)}); }) == "0");
  CHECK(slope_of([](Nodes &f, int32_t x) { f.add(STROBE_OP_MULTIPLY, {x, f.real(3)}); }) == "3");
  CHECK(slope_of([](Nodes &f, int32_t x) { f.add(STROBE_OP_MULTIPLY, {x, x}); }) == "x * 2");
  CHECK(slope_of([](Nodes &f, int32_t x) {
          const int32_t cap = f.real(20), tanh = f.add(STROBE_OP_TANH, {f.add(STROBE_OP_DIVIDE, {x, cap})});
          f.add(STROBE_OP_ADD, {f.add(STROBE_OP_MULTIPLY, {tanh, cap}), f.add(STROBE_OP_TO_REAL, {f.add(STROBE_OP_KEY)})});
        }) == "t0 = tanh(x / 20); (1 - t0 * t0) * 1");
}

TEST_CASE("score: nodes that are equal are one, constants excepted, and what is not needed is dropped") {
  Nodes f;
  const int32_t x = f.add(STROBE_OP_SCORE), again = f.add(STROBE_OP_SCORE);
  f.add(STROBE_OP_TAN, {x});
  const int32_t sin = f.add(STROBE_OP_SIN, {x}), same = f.add(STROBE_OP_SIN, {again});
  f.add(STROBE_OP_ADD, {f.add(STROBE_OP_MULTIPLY, {sin, f.real(3)}), f.add(STROBE_OP_MULTIPLY, {same, f.real(3)})});
  const auto program = Made(f.all).program;
  CHECK(score::formula(program->graph, program->score) == "t0 = sin(x); t0 * 3 + t0 * 3");
  CHECK(score::formula(program->graph, program->slope) == "cos(x) * 6");
}

TEST_CASE("score: formulas") {
  Graph g;
  const int32_t i = g.add(Op::QUERY), j = g.add(Op::KEY), h = g.add(Op::HEAD), x = g.add(Op::SCORE);
  const int32_t apart = g.add(Op::SUBTRACT, {i, g.add(Op::SUBTRACT, {j, g.add(Op::OFFSET)})});
  CHECK(score::formula(g, apart) == "i - (j - offset)");
  CHECK(score::formula(g, g.add(Op::ADD, {x, g.load(3, Kind::real, {h, apart})})) == "x + captured_3[h, i - (j - offset)]");
  CHECK(score::formula(g, g.load(0, Kind::real, {})) == "captured_0");
  CHECK(score::formula(g, g.add(Op::WHERE, {g.add(Op::LESS, {i, j}), x, g.real(-kInf)})) == "where(i < j, x, -inf)");
  CHECK(score::formula(g, g.add(Op::NEGATE, {g.add(Op::MULTIPLY, {x, g.real(-0.5)})})) == "-(x * -0.5)");
  const int32_t squared = g.add(Op::MULTIPLY, {apart, apart});
  CHECK(score::formula(g, g.add(Op::TO_REAL, {squared})) == "t0 = i - (j - offset); real(t0 * t0)");
}

TEST_CASE("score: built-in forms, in their spellings") {
  using score::Form;
  struct Case {
    std::function<void(Nodes &, int32_t)> make;
    Form form;
    double cap = 0, beta = 0, shift = 0;
  };
  const auto two = [](Nodes &f, strobe_operation op, int32_t a, int32_t b) { return f.add(op, {a, b}); };
  const auto tanh = [](Nodes &f, int32_t x) { return f.add(STROBE_OP_TANH, {x}); };
  const auto distance = [](Nodes &f, int32_t x) { return f.add(STROBE_OP_ARCCOSH_FROM_1, {f.add(STROBE_OP_NEGATE, {x})}); };
  constexpr auto kTimes = STROBE_OP_MULTIPLY, kOver = STROBE_OP_DIVIDE, kPlus = STROBE_OP_ADD, kMinus = STROBE_OP_SUBTRACT;
  const Case cases[] = {
      {[&](Nodes &f, int32_t x) { two(f, kTimes, f.real(20), tanh(f, two(f, kOver, x, f.real(20)))); }, Form::softcap, 20},
      {[&](Nodes &f, int32_t x) { two(f, kTimes, tanh(f, two(f, kOver, x, f.real(30))), f.real(30)); }, Form::softcap, 30},
      {[&](Nodes &f, int32_t x) { two(f, kTimes, tanh(f, two(f, kTimes, x, f.real(1 / 30.0))), f.real(30)); }, Form::softcap, 30},
      {[&](Nodes &f, int32_t x) { two(f, kTimes, tanh(f, two(f, kTimes, f.real(1 / 7.0), x)), f.real(7)); }, Form::softcap, 7},
      {[&](Nodes &f, int32_t x) { two(f, kTimes, tanh(f, two(f, kOver, x, f.real(-9))), f.real(-9)); }, Form::softcap, 9},
      {[&](Nodes &f, int32_t x) { two(f, kTimes, tanh(f, x), f.real(1)); }, Form::softcap, 1},
      {[&](Nodes &f, int32_t x) { two(f, kTimes, tanh(f, two(f, kTimes, x, two(f, kOver, f.real(1), f.real(5)))), f.real(5)); },
       Form::softcap, 5},
      {[&](Nodes &f, int32_t x) { two(f, kTimes, tanh(f, two(f, kOver, x, f.real(20))), f.real(21)); }, Form::general},
      {[&](Nodes &f, int32_t x) { two(f, kTimes, tanh(f, two(f, kOver, x, f.real(-20))), f.real(20)); }, Form::general},
      {[&](Nodes &f, int32_t x) { two(f, kTimes, tanh(f, two(f, kOver, x, f.real(kNan))), f.real(kNan)); }, Form::general},
      {[&](Nodes &f, int32_t x) { two(f, kTimes, tanh(f, two(f, kOver, x, f.real(3e38))), f.real(3e38)); }, Form::general},
      {[&](Nodes &f, int32_t x) { tanh(f, x); }, Form::general},
      {[&](Nodes &f, int32_t x) { two(f, kPlus, x, f.real(0)); }, Form::general},
      {[&](Nodes &f, int32_t x) { two(f, kMinus, two(f, kTimes, f.real(-2), distance(f, x)), f.real(3)); }, Form::hyperbolic, 0, 2, 3},
      {[&](Nodes &f, int32_t x) { two(f, kPlus, f.real(-3), two(f, kTimes, distance(f, x), f.real(-2))); }, Form::hyperbolic, 0, 2, -(-3)},
      {[&](Nodes &f, int32_t x) { two(f, kMinus, f.real(-3), two(f, kTimes, f.real(2), distance(f, x))); }, Form::hyperbolic, 0, 2, 3},
      {[&](Nodes &f, int32_t x) { f.add(STROBE_OP_NEGATE, {distance(f, x)}); }, Form::hyperbolic, 0, 1, 0},
      {[&](Nodes &f, int32_t x) { f.add(STROBE_OP_NEGATE, {two(f, kTimes, f.real(4), distance(f, x))}); }, Form::hyperbolic, 0, 4, 0},
      {[&](Nodes &f, int32_t x) {
         const int32_t clamped = f.add(STROBE_OP_MAXIMUM, {two(f, kTimes, x, f.real(-1)), f.real(1)});
         two(f, kTimes, f.real(-2), f.add(STROBE_OP_ACOSH, {clamped}));
       },
       Form::hyperbolic, 0, 2, 0},
      {[&](Nodes &f, int32_t x) { distance(f, x); }, Form::general}, // attracts what is far away
      {[&](Nodes &f, int32_t x) { f.add(STROBE_OP_NEGATE, {f.add(STROBE_OP_ARCCOSH_FROM_1, {x})}); }, Form::general},
  };
  for (const Case &c : cases) {
    Nodes f;
    c.make(f, f.add(STROBE_OP_SCORE));
    const auto program = Made(f.all).program;
    CAPTURE(score::formula(program->graph, program->score));
    CHECK(program->form == c.form);
    CHECK(program->cap == doctest::Approx(c.cap));
    CHECK(program->beta == c.beta);
    CHECK(program->shift == c.shift);
    Graph plain; // the caller's own nodes must give the same values
    std::vector<Node> own;
    for (const strobe_node &n : f.all)
      own.push_back({Op(n.operation), Kind::real, 0, score::find_operation(n.operation)->inputs, {n.inputs[0], n.inputs[1]}, n.real, 0});
    const oracle::Function given(own, int32_t(own.size()) - 1, nullptr);
    for (double x : {-40.0, -3.0, -1.5, 0.25, 12.0}) {
      const Evaluated a = evaluated(given, oracle::Pair{.x = x}), b = evaluated(program->graph, program->score, x);
      CHECK(close(a.value, b.value, 1e-14));
      if (!std::isnan(a.slope)) CHECK(close(a.slope, b.slope, 1e-12)); // at 1: arccosh's infinite slope times max's 0
    }
  }
  Nodes same;
  same.add(STROBE_OP_SCORE);
  CHECK(Made(same.all).program == nullptr);
}

TEST_CASE("score: a penalty by the distance, in its spellings") {
  using score::Form;
  constexpr auto kTimes = STROBE_OP_MULTIPLY, kPlus = STROBE_OP_ADD, kMinus = STROBE_OP_SUBTRACT, kAbs = STROBE_OP_ABSOLUTE;
  std::vector<float> slopes = {0.25f, 0.5f, 0.75f};
  strobe_tensor table{};
  table.data = slopes.data(), table.dtype = STROBE_FLOAT32, table.rank = 1, table.shape[0] = 3, table.strides[0] = 1;
  struct Place {
    Nodes f;
    int32_t x = f.add(STROBE_OP_SCORE), i = f.add(STROBE_OP_QUERY), j = f.add(STROBE_OP_KEY), h = f.add(STROBE_OP_HEAD);
    int32_t slope = f.load(0, {h}), offset = f.add(STROBE_OP_OFFSET);
    int32_t two(strobe_operation op, int32_t a, int32_t b) { return f.add(op, {a, b}); }
    int32_t one(strobe_operation op, int32_t a) { return f.add(op, {a}); }
    int32_t real(int32_t a) { return one(STROBE_OP_TO_REAL, a); }
    int32_t behind() { return two(kMinus, i, j); }
    int32_t ahead() { return two(kMinus, j, i); }
    int32_t with_offset() { return two(kMinus, two(kPlus, i, offset), j); }
    int32_t capped() { return two(kTimes, f.real(2), one(STROBE_OP_TANH, two(STROBE_OP_DIVIDE, x, f.real(2)))); }
  };
  struct Case {
    std::function<void(Place &)> make;
    bool found = true, has_sign = false, counts_offset = false;
    Form rest = Form::identity;
  };
  const Case cases[] = {
      {[](Place &p) { p.two(kMinus, p.x, p.two(kTimes, p.slope, p.real(p.one(kAbs, p.behind())))); }},
      {[](Place &p) { p.two(kMinus, p.x, p.two(kTimes, p.one(kAbs, p.real(p.ahead())), p.slope)); }},
      {[](Place &p) { p.two(kPlus, p.two(kTimes, p.one(STROBE_OP_NEGATE, p.slope), p.real(p.one(kAbs, p.ahead()))), p.x); }},
      {[](Place &p) { p.two(kPlus, p.x, p.one(STROBE_OP_NEGATE, p.two(kTimes, p.slope, p.real(p.one(kAbs, p.ahead()))))); }},
      {[](Place &p) { p.two(kPlus, p.x, p.two(kTimes, p.slope, p.real(p.ahead()))); }, true, true},
      {[](Place &p) { p.two(kPlus, p.x, p.two(kTimes, p.f.real(-3), p.two(kTimes, p.slope, p.real(p.behind())))); }, false}, // 2 factors
      {[](Place &p) { p.two(kMinus, p.x, p.two(kTimes, p.two(kTimes, p.slope, p.f.real(2)), p.real(p.behind()))); }, true, true},
      {[](Place &p) { p.two(kMinus, p.x, p.real(p.one(STROBE_OP_NEGATE, p.behind()))); }, true, true},
      {[](Place &p) { p.two(kMinus, p.x, p.two(kTimes, p.one(STROBE_OP_EXP, p.slope), p.real(p.one(kAbs, p.with_offset())))); }, true,
       false, true},
      {[](Place &p) { p.two(kMinus, p.x, p.two(kTimes, p.slope, p.real(p.two(kPlus, p.offset, p.behind())))); }, true, true, true},
      {[](Place &p) { p.two(kMinus, p.capped(), p.two(kTimes, p.slope, p.real(p.one(kAbs, p.behind())))); }, true, false, false,
       Form::softcap},
      {[](Place &p) { p.two(kMinus, p.two(kTimes, p.slope, p.real(p.behind())), p.x); }, false},            // minus x
      {[](Place &p) { p.two(kPlus, p.x, p.two(kTimes, p.slope, p.real(p.two(kPlus, p.i, p.j)))); }, false}, // no distance
      {[](Place &p) { p.two(kPlus, p.x, p.two(kTimes, p.real(p.behind()), p.real(p.behind()))); }, false},  // a square
      {[](Place &p) { p.two(kPlus, p.x, p.two(kTimes, p.f.load(0, {p.i}), p.real(p.behind()))); }, false},  // a slope by query
      {[](Place &p) { p.two(kPlus, p.one(STROBE_OP_SIN, p.x), p.two(kTimes, p.slope, p.real(p.behind()))); }, false},
  };
  for (const Case &c : cases) {
    Place place;
    c.make(place);
    score::CapturedTensors all{};
    all[0] = &table;
    const auto program = Made(place.f.all, {}, all).program;
    CAPTURE(score::formula(program->graph, program->score));
    const score::Penalty &penalty = program->penalty;
    CHECK(program->form == Form::general);
    CHECK((penalty.slope >= 0) == c.found);
    if (penalty.slope < 0) continue;
    CHECK(penalty.has_sign == c.has_sign);
    CHECK(penalty.counts_offset == c.counts_offset);
    CHECK(penalty.rest.form == c.rest);
    const Captured captured[] = {score::captured_of(&table)};
    for (const auto &[i, j] : {std::pair{7, 3}, {2, 6}, {5, 5}}) {
      oracle::Pair at{};
      at.h = 1, at.i = i, at.j = j, at.offset = 4;
      const double x = 0.75, distance = i + (c.counts_offset ? 4 : 0) - j;
      const double slope = evaluated(program->graph, penalty.slope, x, at, captured).value;
      const double rest = c.rest == Form::softcap ? 2 * std::tanh(x / 2) : x;
      const double made = rest - slope * (c.has_sign ? distance : std::abs(distance));
      CHECK(close(made, evaluated(program->graph, program->score, x, at, captured).value, 1e-14));
    }
  }
}

TEST_CASE("score: the digest knows everything but the values of constants") {
  strobe_tensor table{};
  table.dtype = STROBE_FLOAT32, table.rank = 1, table.shape[0] = 8, table.strides[0] = 1, table.data = &table;
  auto digest = [](std::function<void(Nodes &, int32_t)> make, const strobe_tensor *captured = nullptr, bool as_mask = false) {
    Nodes f;
    make(f, as_mask ? -1 : f.add(STROBE_OP_SCORE));
    score::CapturedTensors all{};
    all[0] = captured;
    return (as_mask ? Made({}, f.all, all) : Made(f.all, {}, all)).program->digest;
  };
  auto capped = [](double cap) {
    return [=](Nodes &f, int32_t x) {
      f.add(STROBE_OP_MULTIPLY, {f.real(cap), f.add(STROBE_OP_TANH, {f.add(STROBE_OP_DIVIDE, {x, f.real(cap)})})});
    };
  };
  CHECK(digest(capped(20)) == digest(capped(30)));
  const auto times = [](double by) {
    return [=](Nodes &f, int32_t x) { f.add(STROBE_OP_MULTIPLY, {f.add(STROBE_OP_SIN, {x}), f.real(by)}); };
  };
  CHECK(digest(times(1)) == digest(times(0)));
  CHECK(digest(times(1)) == digest(times(kNan)));
  std::set<std::array<uint32_t, 2>> all = {
      digest(capped(20)),
      digest(times(1)),
      digest([](Nodes &f, int32_t x) { f.add(STROBE_OP_MULTIPLY, {f.real(2), f.add(STROBE_OP_SIN, {x})}); }),
      digest([](Nodes &f, int32_t x) { f.add(STROBE_OP_MULTIPLY, {f.add(STROBE_OP_COS, {x}), f.real(2)}); }),
      digest([](Nodes &f, int32_t x) { f.add(STROBE_OP_MULTIPLY, {f.add(STROBE_OP_SIN, {x}), x}); }),
      digest([](Nodes &f, int32_t) { f.add(STROBE_OP_TO_REAL, {f.add(STROBE_OP_QUERY)}); }),
      digest([](Nodes &f, int32_t) { f.add(STROBE_OP_TO_REAL, {f.add(STROBE_OP_KEY)}); }),
      digest([](Nodes &f, int32_t) { f.add(STROBE_OP_LESS, {f.add(STROBE_OP_KEY), f.add(STROBE_OP_QUERY)}); }, nullptr, true),
      digest([](Nodes &f, int32_t) { f.add(STROBE_OP_LESS, {f.add(STROBE_OP_QUERY), f.add(STROBE_OP_KEY)}); }, nullptr, true)};
  CHECK(all.size() == 9);
  const auto read = [](Nodes &f, int32_t x) { f.add(STROBE_OP_ADD, {x, f.load(0, {f.add(STROBE_OP_HEAD)})}); };
  const auto in_float = digest(read, &table);
  table.shape[0] = 9, table.strides[0] = 3;
  CHECK(digest(read, &table) == in_float);
  table.dtype = STROBE_FLOAT16;
  CHECK(digest(read, &table) != in_float);
}

TEST_CASE("score: random graphs keep their values, and their derivatives are those of the oracle") {
  std::mt19937 random(7);
  auto draw = [&](int n) { return std::uniform_int_distribution<int>(0, n - 1)(random); };
  const std::set<Op> all = all_operations();
  const std::vector<Op> operations(all.begin(), all.end());
  std::vector<float> table(15);
  for (size_t n = 0; n < table.size(); n++) table[n] = float(std::sin(double(n)));
  strobe_tensor tensor{};
  tensor.data = table.data(), tensor.dtype = STROBE_FLOAT32, tensor.rank = 2;
  tensor.shape[0] = 3, tensor.shape[1] = 5, tensor.strides[0] = 5, tensor.strides[1] = 1;
  Captured captured[STROBE_MOST_CAPTURED];
  captured[0] = {reinterpret_cast<char *>(table.data()), DType::f32, 2, {3, 5, 1, 1}, {5, 1, 0, 0}};
  int finite = 0, moving = 0;
  for (int round = 0; round < 3000; round++) {
    Nodes f;
    std::vector<Node> own;
    auto put = [&](Op op, std::vector<int32_t> inputs, Kind kind) {
      const int32_t n = f.add(strobe_operation(op), inputs);
      Node node{.op = op, .kind = kind, .count = int32_t(inputs.size())};
      std::ranges::copy(inputs, node.inputs.begin());
      if (op == Op::REAL) node.real = f.all.back().real = std::array{0.0, 1.0, -1.0, 0.5, 2.0, 3.7}[size_t(draw(6))];
      if (op == Op::INTEGER) node.integer = f.all.back().integer = draw(9) - 4;
      if (op == Op::BOOLEAN) node.integer = f.all.back().integer = draw(2);
      own.push_back(node);
      return n;
    };
    put(Op::SCORE, {}, Kind::real), put(Op::QUERY, {}, Kind::integer), put(Op::KEY, {}, Kind::integer), put(Op::REAL, {}, Kind::real);
    bool reads = false;
    auto of_kind = [&](Kind kind) {
      std::vector<int32_t> found;
      for (size_t n = 0; n < own.size(); n++)
        if (own[n].kind == kind) found.push_back(int32_t(n));
      return found.empty() ? -1 : draw(3) ? found.back() : found[size_t(draw(int(found.size())))];
    };
    while (own.size() < 4 + size_t(1 + draw(12)) || own.back().kind != Kind::real) {
      if (own.size() > 40) break;
      const Op op = operations[size_t(draw(int(operations.size())))];
      const score::Operation &row = *score::find_operation(int32_t(op));
      const std::string letters = op == Op::WHERE ? "BIR" : row.takes;
      const char letter = letters.empty() ? ' ' : letters[size_t(draw(int(letters.size())))];
      const Kind kind = letter == 'B' ? Kind::boolean : letter == 'I' ? Kind::integer : Kind::real;
      std::vector<int32_t> inputs;
      if (op == Op::WHERE) inputs.push_back(of_kind(Kind::boolean));
      for (int32_t n = int32_t(inputs.size()); n < (op == Op::LOAD ? 2 : row.inputs); n++) inputs.push_back(of_kind(kind));
      if (std::ranges::count(inputs, -1)) continue;
      const char gives = row.gives[0];
      reads |= op == Op::LOAD;
      put(op, inputs,
          op == Op::LOAD                    ? Kind::real
          : op == Op::WHERE || gives == 'S' ? kind
          : gives == 'B'                    ? Kind::boolean
          : gives == 'I'                    ? Kind::integer
                                            : Kind::real);
    }
    if (own.back().kind != Kind::real) continue;
    score::CapturedTensors tensors{};
    if (reads) tensors[0] = &tensor;
    const auto program = Made(f.all, {}, tensors).program;
    const oracle::Function given(own, int32_t(own.size()) - 1, captured);
    for (double x : {-2.25, -0.3, 0.7, 1.9}) {
      const oracle::Pair at = {x, 1, 2, draw(9), draw(9), 3};
      const Evaluated expected = evaluated(given, at);
      if (!program) { // the score is x itself
        CHECK(expected.value == x);
        continue;
      }
      CAPTURE(score::formula(program->graph, program->score));
      CAPTURE(at.i);
      CAPTURE(at.j);
      CAPTURE(x);
      const Evaluated found = program->score < 0 ? Evaluated{x, 1} : evaluated(program->graph, program->score, x, at, captured);
      if (program->form == score::Form::general)
        CHECK((found.value == expected.value || (std::isnan(found.value) && std::isnan(expected.value))));
      else
        CHECK(close(found.value, expected.value, 1e-12));
      const double slope = program->slope < 0 ? 1 : evaluated(program->graph, program->slope, x, at, captured).value;
      if (!std::isfinite(expected.slope) || std::abs(expected.slope) > 1e100) continue;
      CAPTURE(program->slope < 0 ? "1" : score::formula(program->graph, program->slope));
      CHECK_MESSAGE(close(slope, expected.slope, 1e-9), slope << " for " << expected.slope);
      finite++, moving += expected.slope != 0 && expected.slope != 1;
    }
  }
  CHECK(finite > 6000);
  CHECK(moving > 1500);
}

} // namespace strobe::score_test
