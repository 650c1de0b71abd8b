// The oracle's functions of the score: a graph's nodes one after another, with dual numbers for the derivative by the score, or by what one
// LOAD reads. Both the value and that derivative have derivatives in the direction of the call's tangents.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <span>
#include <vector>

#include "reference/numbers.h"
#include "reference/tangent.h"
#include "score/program.h"

namespace strobe::oracle {

using score::Kind;
using score::Node;
using score::Op;

struct Dual {
  Tangent value, slope;
  bool varies = false; // whether the graph leads from the score to it, by other ways than steps; otherwise its slope is 0
};

// The arguments of a function.
struct Pair {
  Tangent x;
  int64_t b = 0, h = 0, i = 0, j = 0, offset = 0;
};

class Function {
public:
  // root: the node of the result; -1: there is no function. by: the node by which it is differentiated, a LOAD; -1: SCORE.
  // tangents: of the captured tensors; null: they have none.
  Function(std::span<const Node> all, int32_t root, const Captured *captured, const Captured *tangents = nullptr, int32_t by = -1)
      : captured(captured), tangents(tangents), by(by) {
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
      if (int32_t(n) == by) values[n].real.slope = 1.0, values[n].real.varies = true;
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
    return {from_reals(n.op, a.value.value, b.value.value), {}};
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
    if (!tangents || !tangents[n.captured]) return {0, {load(one, 0, 0, 0, 0)}};
    const Captured &t = tangents[n.captured];
    View tangent;
    place = 0;
    for (int32_t axis = 0; axis < n.count; axis++) place += index(n, axis) * t.stride[axis];
    tangent.data = t.data + place * bytes(t.dtype), tangent.dtype = t.dtype;
    return {0, {Tangent(load(one, 0, 0, 0, 0), load(tangent, 0, 0, 0, 0))}};
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
    case Op::TO_INT32:
      return int32_t(uint32_t(ua));
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
  static Dual made(Tangent value, Dual a, Tangent by_a, Dual b = {}, Tangent by_b = 0) {
    return {value, (a.varies ? a.slope * by_a : 0) + (b.varies ? b.slope * by_b : 0), a.varies || b.varies};
  }

  static Dual of_reals(Op op, Dual a, Dual b) {
    const Tangent x = a.value, y = b.value;
    const double nan = std::numeric_limits<double>::quiet_NaN();
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
      return {floor_of_quotient(x.value, y.value)};
    case Op::REMAINDER: {
      double rest = std::fmod(x.value, y.value);
      if (rest != 0 && (rest < 0) != (y.value < 0)) rest += y.value;
      const double whole = floor_of_quotient(x.value, y.value);
      return made(of(rest, x, 1, y, -whole), a, 1, b, -whole);
    }
    case Op::TRUNC_REMAINDER: {
      const double whole = std::trunc(x.value / y.value);
      return made(of(std::fmod(x.value, y.value), x, 1, y, -whole), a, 1, b, -whole);
    }
    case Op::MINIMUM:
    case Op::MAXIMUM: {
      if (std::isnan(x.value) || std::isnan(y.value)) return made(Tangent(nan, nan), a, nan, b, nan);
      const double of_a = x.value == y.value ? 0.5 : (op == Op::MAXIMUM) == (x.value > y.value);
      const Tangent larger = of(of_a == 1 || x.value == y.value ? x.value : y.value, x, of_a, y, 1 - of_a);
      Dual chosen = made(larger, of_a > 0 ? a : Dual{}, of_a, of_a < 1 ? b : Dual{}, 1 - of_a);
      chosen.varies = a.varies || b.varies;
      return chosen;
    }
    case Op::POWER: {
      const Tangent by_base = y.value == 0 ? 0 : y * pow(x, y - 1);
      const Tangent by_exponent = x.value == 0 && y.value >= 0 ? 0 : pow(x, y) * log(x);
      return made(pow(x, y), a, by_base, b, by_exponent);
    }
    case Op::ATAN2: {
      const Tangent square = x * x + y * y;
      return made(atan2(x, y), a, y / square, b, -x / square);
    }
    default:
      throw Error(STROBE_INTERNAL, text("the oracle does not know operation ", int32_t(op)));
    }
  }

  // PyTorch's: x // 0 is x / 0, and an infinite x has no quotient, as it has no remainder.
  static double floor_of_quotient(double x, double y) {
    if (y == 0) return x / y;
    const double rest = std::fmod(x, y);
    return std::round((x - rest) / y) - (rest != 0 && (rest < 0) != (y < 0));
  }

  static Dual of_real(Op op, Dual a) {
    const Tangent x = a.value;
    const double sign = double(x.value > 0) - double(x.value < 0);
    switch (op) {
    case Op::NEGATE:
      return made(-x, a, -1);
    case Op::ABSOLUTE:
      return made(abs(x), a, sign);
    case Op::SIGN:
      return {sign};
    case Op::TO_REAL:
      return a;
    case Op::EXP:
      return made(exp(x), a, exp(x));
    case Op::EXP2:
      return made(exp2(x), a, exp2(x) * std::numbers::ln2);
    case Op::EXPM1:
      return made(expm1(x), a, exp(x));
    case Op::LOG:
      return made(log(x), a, 1 / x);
    case Op::LOG2:
      return made(log2(x), a, 1 / (x * std::numbers::ln2));
    case Op::LOG1P:
      return made(log1p(x), a, 1 / (1 + x));
    case Op::SQRT:
      return made(sqrt(x), a, 0.5 / sqrt(x));
    case Op::RSQRT:
      return made(1 / sqrt(x), a, -0.5 / (x * sqrt(x)));
    case Op::SIN:
      return made(sin(x), a, cos(x));
    case Op::COS:
      return made(cos(x), a, -sin(x));
    case Op::TAN:
      return made(tan(x), a, 1 / (cos(x) * cos(x)));
    case Op::ASIN:
      return made(asin(x), a, 1 / sqrt((1 - x) * (1 + x)));
    case Op::ACOS:
      return made(acos(x), a, -1 / sqrt((1 - x) * (1 + x)));
    case Op::ATAN:
      return made(atan(x), a, 1 / (1 + x * x));
    case Op::SINH:
      return made(sinh(x), a, cosh(x));
    case Op::COSH:
      return made(cosh(x), a, sinh(x));
    case Op::TANH:
      return made(tanh(x), a, 1 - tanh(x) * tanh(x));
    case Op::ASINH:
      return made(asinh(x), a, 1 / sqrt(x * x + 1));
    case Op::ACOSH:
      return made(acosh(x), a, 1 / (sqrt(x - 1) * sqrt(x + 1)));
    case Op::ATANH:
      return made(atanh(x), a, 1 / ((1 - x) * (1 + x)));
    case Op::ERF:
      return made(erf(x), a, 2 * std::numbers::inv_sqrtpi * exp(-x * x));
    case Op::ERFC:
      return made(erfc(x), a, -2 * std::numbers::inv_sqrtpi * exp(-x * x));
    case Op::SIGMOID: {
      const Tangent e = exp(-abs(x)), small = e / (1 + e), large = 1 / (1 + e);
      const double slope = (small * large).value; // 1 - 2 sigmoid is its own derivative's factor, of either sign
      return made(of(x.value < 0 ? small.value : large.value, x, slope), a, of(slope, x, slope * -std::tanh(x.value / 2)));
    }
    case Op::FLOOR:
      return {std::floor(x.value)};
    case Op::CEIL:
      return {std::ceil(x.value)};
    case Op::TRUNC:
      return {std::trunc(x.value)};
    case Op::ROUND:
      return {std::nearbyint(x.value)};
    case Op::ARCCOSH_FROM_1: {
      const Tangent t = x.value <= 1 ? 0 : x - 1, sinh = sqrt(t) * sqrt(t + 2);
      Dual distance = made(log1p(t + sinh), t.value == 0 ? Dual{} : a, 1 / sinh);
      distance.varies = a.varies;
      return distance;
    }
    default:
      throw Error(STROBE_INTERNAL, text("the oracle does not know operation ", int32_t(op)));
    }
  }

  const Captured *captured, *tangents;
  int32_t by;
  std::vector<Node> nodes;
  std::vector<size_t> order;         // those that the result needs
  mutable std::vector<Value> values; // a thread has a Function of its own
};

} // namespace strobe::oracle
