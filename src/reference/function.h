// The oracle's functions of the score: a graph's nodes one after another, in double, with dual numbers for the derivative by the score, or
// by what one LOAD reads.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <span>
#include <vector>

#include "reference/numbers.h"
#include "score/program.h"

namespace strobe::oracle {

using score::Kind;
using score::Node;
using score::Op;

struct Dual {
  double value = 0, slope = 0;
  bool varies = false; // whether the graph leads from the score to it, by other ways than steps; otherwise its slope is 0
};

// The arguments of a function.
struct Pair {
  double x = 0;
  int64_t b = 0, h = 0, i = 0, j = 0, offset = 0;
};

class Function {
public:
  // root: the node of the result; -1: there is no function. by: the node by which it is differentiated, a LOAD; -1: SCORE.
  Function(std::span<const Node> all, int32_t root, const Captured *captured, int32_t by = -1) : captured(captured), by(by) {
    if (root < 0) return;
    nodes.assign(all.begin(), all.begin() + root + 1), values.resize(nodes.size());
    std::vector<char> needed(nodes.size());
    needed.back() = true;
    for (size_t n = nodes.size(); n-- > 0;)
      for (int32_t k = 0; needed[n] && k < nodes[n].count; k++) needed[size_t(nodes[n].inputs[size_t(k)])] = true;
    for (size_t n = 0; n < nodes.size(); n++)
      if (needed[n]) order.push_back(n);
  }
  explicit operator bool() const { return !nodes.empty(); }

  Dual real(const Pair &at) const { return result(at).real; }
  bool boolean(const Pair &at) const { return result(at).integer; }
  // Whether the result depends on the node by which it is differentiated.
  bool uses_load() const { return std::find(order.begin(), order.end(), size_t(by)) != order.end(); }
  // The place of the element that `by` read for the last pair, among the captured tensor's elements in the order of its axes.
  int64_t place() const {
    const Node &load = nodes[size_t(by)];
    int64_t at = 0;
    for (int32_t axis = 0; axis < load.count; axis++) at = at * captured[load.captured].size[axis] + index(load, axis);
    return at;
  }

private:
  struct Value {
    int64_t integer = 0; // also of a boolean
    Dual real;
  };

  const Value &result(const Pair &at) const {
    for (const size_t n : order) {
      values[n] = value(nodes[n], at);
      if (int32_t(n) == by) values[n].real.slope = 1, values[n].real.varies = true;
    }
    return values.back();
  }

  Value value(const Node &n, const Pair &at) const {
    auto in = [&](int k) -> const Value & { return values[size_t(n.inputs[size_t(k)])]; };
    switch (n.op) {
    case Op::SCORE:
      return {0, {at.x, by < 0 ? 1.0 : 0.0, by < 0}};
    case Op::BATCH:
      return {at.b, {}};
    case Op::HEAD:
      return {at.h, {}};
    case Op::QUERY:
      return {at.i, {}};
    case Op::KEY:
      return {at.j, {}};
    case Op::OFFSET:
      return {at.offset, {}};
    case Op::REAL:
      return {0, {n.real}};
    case Op::INTEGER:
    case Op::BOOLEAN:
      return {n.integer, {}};
    case Op::LOAD:
      return element(n);
    case Op::WHERE: {
      Value chosen = in(0).integer ? in(1) : in(2);
      chosen.real.varies = in(1).real.varies || in(2).real.varies;
      return chosen;
    }
    default:
      break;
    }
    if (!n.count) throw Error(STROBE_INTERNAL, text("the oracle does not know operation ", int32_t(n.op)));
    const Node &first = nodes[size_t(n.inputs[0])];
    const bool two = n.count > 1;
    if (first.kind != Kind::real) return {of_integers(n.op, first.kind, in(0).integer, two ? in(1).integer : 0), {double(in(0).integer)}};
    const Dual a = in(0).real, b = two ? in(1).real : Dual{};
    if (n.kind == Kind::real) return {0, two ? of_reals(n.op, a, b) : of_real(n.op, a)};
    return {from_reals(n.op, a.value, b.value), {}};
  }

  // An index of a LOAD: a negative one counts from the end, and others are limited to the axis.
  int64_t index(const Node &n, int32_t axis) const {
    const int64_t size = captured[n.captured].size[axis];
    int64_t at = values[size_t(n.inputs[size_t(axis)])].integer;
    if (at < 0) at += size;
    return std::clamp<int64_t>(at, 0, size - 1);
  }

  // An element of a captured tensor.
  Value element(const Node &n) const {
    const Captured &c = captured[n.captured];
    View one; // of the element alone
    int64_t place = 0;
    for (int32_t axis = 0; axis < n.count; axis++) place += index(n, axis) * c.stride[axis];
    one.data = c.data + place * bytes(c.dtype), one.dtype = c.dtype;
    if (c.dtype == DType::boolean) return {*one.at<uint8_t>(0, 0, 0, 0) != 0, {}};
    if (c.dtype == DType::i32) return {*one.at<int32_t>(0, 0, 0, 0), {}};
    if (c.dtype == DType::i64) return {*one.at<int64_t>(0, 0, 0, 0), {}};
    return {0, {load(one, 0, 0, 0, 0)}};
  }

  // An operation on booleans and integers. The result is an integer or a boolean; the caller makes that of TO_REAL.
  static int64_t of_integers(Op op, Kind kind, int64_t a, int64_t b) {
    auto wrapped = [](uint64_t x) { return int64_t(x); };
    const uint64_t ua = uint64_t(a), ub = uint64_t(b);
    switch (op) {
    case Op::ADD:
      return wrapped(ua + ub);
    case Op::SUBTRACT:
      return wrapped(ua - ub);
    case Op::MULTIPLY:
      return wrapped(ua * ub);
    case Op::NEGATE:
      return wrapped(0 - ua);
    case Op::ABSOLUTE:
      return a < 0 ? wrapped(0 - ua) : a;
    case Op::SIGN:
      return (a > 0) - (a < 0);
    case Op::FLOOR_DIVIDE:
      if (b == 0 || b == -1) return b ? wrapped(0 - ua) : 0;
      return a / b - (a % b != 0 && (a < 0) != (b < 0));
    case Op::REMAINDER:
      if (b == 0 || b == -1) return 0;
      return a % b + (a % b != 0 && (a < 0) != (b < 0) ? b : 0);
    case Op::TRUNC_REMAINDER:
      return b == 0 || b == -1 ? 0 : a % b;
    case Op::MINIMUM:
      return std::min(a, b);
    case Op::MAXIMUM:
      return std::max(a, b);
    case Op::AND:
      return a & b;
    case Op::OR:
      return a | b;
    case Op::XOR:
      return a ^ b;
    case Op::NOT:
      return kind == Kind::boolean ? !a : ~a;
    case Op::SHIFT_LEFT:
      return b < 0 || b > 63 ? 0 : wrapped(ua << b);
    case Op::SHIFT_RIGHT:
      return b < 0 || b > 63 ? -(a < 0) : a >> b;
    case Op::TO_BOOLEAN:
      return a != 0;
    case Op::TO_INTEGER:
    case Op::TO_REAL:
      return a;
    default:
      return compared(op, a, b);
    }
  }

  static int64_t from_reals(Op op, double a, double b) {
    if (op == Op::TO_BOOLEAN) return a != 0;
    if (op == Op::TO_INTEGER) return std::abs(a) < 0x1p63 ? int64_t(a) : 0;
    return compared(op, a, b);
  }

  template <class T> static bool compared(Op op, T a, T b) {
    switch (op) {
    case Op::EQUAL:
      return a == b;
    case Op::NOT_EQUAL:
      return a != b;
    case Op::LESS:
      return a < b;
    case Op::LESS_EQUAL:
      return a <= b;
    case Op::GREATER:
      return a > b;
    case Op::GREATER_EQUAL:
      return a >= b;
    default:
      throw Error(STROBE_INTERNAL, text("the oracle does not know operation ", int32_t(op)));
    }
  }

  // The value, and what the inputs' slopes are multiplied by.
  static Dual made(double value, Dual a, double by_a, Dual b = {}, double by_b = 0) {
    return {value, (a.varies ? a.slope * by_a : 0) + (b.varies ? b.slope * by_b : 0), a.varies || b.varies};
  }

  static Dual of_reals(Op op, Dual a, Dual b) {
    const double x = a.value, y = b.value, nan = std::numeric_limits<double>::quiet_NaN();
    switch (op) {
    case Op::ADD:
      return made(x + y, a, 1, b, 1);
    case Op::SUBTRACT:
      return made(x - y, a, 1, b, -1);
    case Op::MULTIPLY:
      return made(x * y, a, y, b, x);
    case Op::DIVIDE:
      return made(x / y, a, 1 / y, b, -(x / y) / y);
    case Op::FLOOR_DIVIDE:
      return {floor_of_quotient(x, y)};
    case Op::REMAINDER: {
      double rest = std::fmod(x, y);
      if (rest != 0 && (rest < 0) != (y < 0)) rest += y;
      return made(rest, a, 1, b, -floor_of_quotient(x, y));
    }
    case Op::TRUNC_REMAINDER:
      return made(std::fmod(x, y), a, 1, b, -std::trunc(x / y));
    case Op::MINIMUM:
    case Op::MAXIMUM: {
      if (std::isnan(x) || std::isnan(y)) return made(nan, a, nan, b, nan);
      const double of_a = x == y ? 0.5 : (op == Op::MAXIMUM) == (x > y);
      Dual larger = made(of_a == 1 || x == y ? x : y, of_a > 0 ? a : Dual{}, of_a, of_a < 1 ? b : Dual{}, 1 - of_a);
      larger.varies = a.varies || b.varies;
      return larger;
    }
    case Op::POWER: {
      const double power = std::pow(x, y);
      const double by_base = y == 0 ? 0 : y * std::pow(x, y - 1), by_exponent = x == 0 && y >= 0 ? 0 : power * std::log(x);
      return made(power, a, by_base, b, by_exponent);
    }
    case Op::ATAN2: {
      const double square = x * x + y * y;
      return made(std::atan2(x, y), a, y / square, b, -x / square);
    }
    default:
      throw Error(STROBE_INTERNAL, text("the oracle does not know operation ", int32_t(op)));
    }
  }

  static double floor_of_quotient(double x, double y) {
    const double rest = std::fmod(x, y);
    if (std::isnan(rest)) return std::floor(x / y);
    return std::round((x - rest) / y) - (rest != 0 && (rest < 0) != (y < 0));
  }

  static Dual of_real(Op op, Dual a) {
    const double x = a.value;
    switch (op) {
    case Op::NEGATE:
      return made(-x, a, -1);
    case Op::ABSOLUTE:
      return made(std::abs(x), a, x > 0 ? 1 : x < 0 ? -1 : 0);
    case Op::SIGN:
      return {double(x > 0) - double(x < 0)};
    case Op::TO_REAL:
      return a;
    case Op::EXP:
      return made(std::exp(x), a, std::exp(x));
    case Op::EXP2:
      return made(std::exp2(x), a, std::exp2(x) * std::numbers::ln2);
    case Op::EXPM1:
      return made(std::expm1(x), a, std::exp(x));
    case Op::LOG:
      return made(std::log(x), a, 1 / x);
    case Op::LOG2:
      return made(std::log2(x), a, 1 / (x * std::numbers::ln2));
    case Op::LOG1P:
      return made(std::log1p(x), a, 1 / (1 + x));
    case Op::SQRT:
      return made(std::sqrt(x), a, 0.5 / std::sqrt(x));
    case Op::RSQRT:
      return made(1 / std::sqrt(x), a, -0.5 / (x * std::sqrt(x)));
    case Op::SIN:
      return made(std::sin(x), a, std::cos(x));
    case Op::COS:
      return made(std::cos(x), a, -std::sin(x));
    case Op::TAN:
      return made(std::tan(x), a, 1 / (std::cos(x) * std::cos(x)));
    case Op::ASIN:
      return made(std::asin(x), a, 1 / std::sqrt((1 - x) * (1 + x)));
    case Op::ACOS:
      return made(std::acos(x), a, -1 / std::sqrt((1 - x) * (1 + x)));
    case Op::ATAN:
      return made(std::atan(x), a, 1 / (1 + x * x));
    case Op::SINH:
      return made(std::sinh(x), a, std::cosh(x));
    case Op::COSH:
      return made(std::cosh(x), a, std::sinh(x));
    case Op::TANH:
      return made(std::tanh(x), a, 1 - std::tanh(x) * std::tanh(x));
    case Op::ASINH:
      return made(std::asinh(x), a, 1 / std::hypot(x, 1));
    case Op::ACOSH:
      return made(std::acosh(x), a, 1 / (std::sqrt(x - 1) * std::sqrt(x + 1)));
    case Op::ATANH:
      return made(std::atanh(x), a, 1 / ((1 - x) * (1 + x)));
    case Op::ERF:
      return made(std::erf(x), a, 2 * std::numbers::inv_sqrtpi * std::exp(-x * x));
    case Op::ERFC:
      return made(std::erfc(x), a, -2 * std::numbers::inv_sqrtpi * std::exp(-x * x));
    case Op::SIGMOID: {
      const double e = std::exp(-std::abs(x)), small = e / (1 + e);
      return made(x < 0 ? small : 1 / (1 + e), a, small / (1 + e));
    }
    case Op::FLOOR:
      return {std::floor(x)};
    case Op::CEIL:
      return {std::ceil(x)};
    case Op::TRUNC:
      return {std::trunc(x)};
    case Op::ROUND:
      return {std::nearbyint(x)};
    case Op::ARCCOSH_FROM_1: {
      const double t = std::max(x - 1, 0.0), sinh = std::sqrt(t) * std::sqrt(t + 2);
      Dual distance = made(std::log1p(t + sinh), t == 0 ? Dual{} : a, 1 / sinh);
      distance.varies = a.varies;
      return distance;
    }
    default:
      throw Error(STROBE_INTERNAL, text("the oracle does not know operation ", int32_t(op)));
    }
  }

  const Captured *captured;
  int32_t by;
  std::vector<Node> nodes;
  std::vector<size_t> order;         // those that the result needs
  mutable std::vector<Value> values; // a thread has a Function of its own
};

} // namespace strobe::oracle
