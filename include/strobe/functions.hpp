// Functions of the score and of the mask in C++: an ordinary lambda is called once, and the operations that it makes are recorded.
//
//   attention.score_function = strobe::score_function([](strobe::Real x, auto b, auto h, auto i, auto j) {
//     return 30 * tanh(x / 30) + strobe::captured<strobe::Real>(0)(h, j - i);
//   });
//   attention.mask_function = strobe::mask_function([](auto b, auto h, auto i, auto j) { return j <= i; });
//
// Numbers in the lambda become constants, which may change without a new compilation. docs/functions.md has the rules.
#pragma once
#include <algorithm>
#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "strobe/strobe.hpp"

namespace strobe {
inline namespace api {
namespace detail {

// The function that this thread records.
inline thread_local Function *recorded = nullptr;

inline int32_t record(strobe_operation operation, std::initializer_list<int32_t> inputs = {}, double real = 0, int64_t integer = 0,
                      int32_t captured = 0) {
  if (!recorded) throw refused("score_function", STROBE_CODE_VALUE, "its arguments are used outside of it; accepted is inside it");
  strobe_node node{};
  node.operation = operation, node.real = real, node.integer = integer, node.captured = captured;
  std::ranges::copy(inputs, node.inputs);
  recorded->nodes.push_back(node);
  return static_cast<int32_t>(recorded->nodes.size()) - 1;
}

struct Node {
  int32_t node;
};
struct Made {}; // selects the constructors that take a node

} // namespace detail

#define STROBE_BINARY(Result, Type, name, operation)                                                                                       \
  friend Result name(Type a, Type b) { return Result(detail::Made{}, detail::record(STROBE_OP_##operation, {a.node, b.node})); }
#define STROBE_UNARY(Result, Type, name, operation)                                                                                        \
  friend Result name(Type a) { return Result(detail::Made{}, detail::record(STROBE_OP_##operation, {a.node})); }

class Boolean : public detail::Node {
public:
  Boolean(detail::Made, int32_t n) : Node{n} {}
  template <std::same_as<bool> T> Boolean(T value) : Node{detail::record(STROBE_OP_BOOLEAN, {}, 0, value)} {}

  STROBE_BINARY(Boolean, Boolean, operator&, AND)
  STROBE_BINARY(Boolean, Boolean, operator|, OR)
  STROBE_BINARY(Boolean, Boolean, operator^, XOR)
  STROBE_BINARY(Boolean, Boolean, operator==, EQUAL)
  STROBE_BINARY(Boolean, Boolean, operator!=, NOT_EQUAL)
  STROBE_UNARY(Boolean, Boolean, operator!, NOT)
};

class Integer : public detail::Node {
public:
  Integer(detail::Made, int32_t n) : Node{n} {}
  template <std::integral T>
    requires(!std::same_as<T, bool>)
  Integer(T value) : Node{detail::record(STROBE_OP_INTEGER, {}, 0, static_cast<int64_t>(value))} {}
  explicit Integer(Boolean x) : Node{detail::record(STROBE_OP_TO_INTEGER, {x.node})} {}

  STROBE_BINARY(Integer, Integer, operator+, ADD)
  STROBE_BINARY(Integer, Integer, operator-, SUBTRACT)
  STROBE_BINARY(Integer, Integer, operator*, MULTIPLY)
  STROBE_BINARY(Integer, Integer, floor_divide, FLOOR_DIVIDE) // rounded down, unlike C++'s own division
  STROBE_BINARY(Integer, Integer, remainder, REMAINDER)       // the result has the divisor's sign
  STROBE_BINARY(Integer, Integer, operator&, AND)
  STROBE_BINARY(Integer, Integer, operator|, OR)
  STROBE_BINARY(Integer, Integer, operator^, XOR)
  STROBE_BINARY(Integer, Integer, operator<<, SHIFT_LEFT)
  STROBE_BINARY(Integer, Integer, operator>>, SHIFT_RIGHT)
  STROBE_BINARY(Integer, Integer, min, MINIMUM)
  STROBE_BINARY(Integer, Integer, max, MAXIMUM)
  STROBE_UNARY(Integer, Integer, operator-, NEGATE)
  STROBE_UNARY(Integer, Integer, operator~, NOT)
  STROBE_UNARY(Integer, Integer, abs, ABSOLUTE)
  STROBE_UNARY(Integer, Integer, sign, SIGN)
  STROBE_UNARY(Integer, Integer, to_int32, TO_INT32) // wraps around
  STROBE_BINARY(Boolean, Integer, operator==, EQUAL)
  STROBE_BINARY(Boolean, Integer, operator!=, NOT_EQUAL)
  STROBE_BINARY(Boolean, Integer, operator<, LESS)
  STROBE_BINARY(Boolean, Integer, operator<=, LESS_EQUAL)
  STROBE_BINARY(Boolean, Integer, operator>, GREATER)
  STROBE_BINARY(Boolean, Integer, operator>=, GREATER_EQUAL)
};

class Real : public detail::Node {
public:
  Real(detail::Made, int32_t n) : Node{n} {}
  template <class T>
    requires(std::is_arithmetic_v<T> && !std::same_as<T, bool>)
  Real(T value) : Node{detail::record(STROBE_OP_REAL, {}, static_cast<double>(value))} {}
  Real(Integer x) : Node{detail::record(STROBE_OP_TO_REAL, {x.node})} {}
  explicit Real(Boolean x) : Node{detail::record(STROBE_OP_TO_REAL, {x.node})} {}

  STROBE_BINARY(Real, Real, operator+, ADD)
  STROBE_BINARY(Real, Real, operator-, SUBTRACT)
  STROBE_BINARY(Real, Real, operator*, MULTIPLY)
  STROBE_BINARY(Real, Real, operator/, DIVIDE)
  STROBE_BINARY(Real, Real, floor_divide, FLOOR_DIVIDE)
  STROBE_BINARY(Real, Real, remainder, REMAINDER)
  STROBE_BINARY(Real, Real, fmod, TRUNC_REMAINDER)
  STROBE_BINARY(Real, Real, min, MINIMUM)
  STROBE_BINARY(Real, Real, max, MAXIMUM)
  STROBE_BINARY(Real, Real, pow, POWER)
  STROBE_BINARY(Real, Real, atan2, ATAN2)
  STROBE_UNARY(Real, Real, operator-, NEGATE)
  STROBE_UNARY(Real, Real, abs, ABSOLUTE)
  STROBE_UNARY(Real, Real, sign, SIGN)
  STROBE_UNARY(Real, Real, exp, EXP)
  STROBE_UNARY(Real, Real, exp2, EXP2)
  STROBE_UNARY(Real, Real, expm1, EXPM1)
  STROBE_UNARY(Real, Real, log, LOG)
  STROBE_UNARY(Real, Real, log2, LOG2)
  STROBE_UNARY(Real, Real, log1p, LOG1P)
  STROBE_UNARY(Real, Real, sqrt, SQRT)
  STROBE_UNARY(Real, Real, rsqrt, RSQRT)
  STROBE_UNARY(Real, Real, sin, SIN)
  STROBE_UNARY(Real, Real, cos, COS)
  STROBE_UNARY(Real, Real, tan, TAN)
  STROBE_UNARY(Real, Real, asin, ASIN)
  STROBE_UNARY(Real, Real, acos, ACOS)
  STROBE_UNARY(Real, Real, atan, ATAN)
  STROBE_UNARY(Real, Real, sinh, SINH)
  STROBE_UNARY(Real, Real, cosh, COSH)
  STROBE_UNARY(Real, Real, tanh, TANH)
  STROBE_UNARY(Real, Real, asinh, ASINH)
  STROBE_UNARY(Real, Real, acosh, ACOSH)
  STROBE_UNARY(Real, Real, atanh, ATANH)
  STROBE_UNARY(Real, Real, erf, ERF)
  STROBE_UNARY(Real, Real, erfc, ERFC)
  STROBE_UNARY(Real, Real, sigmoid, SIGMOID)
  STROBE_UNARY(Real, Real, floor, FLOOR)
  STROBE_UNARY(Real, Real, ceil, CEIL)
  STROBE_UNARY(Real, Real, trunc, TRUNC)
  STROBE_UNARY(Real, Real, round, ROUND)
  STROBE_UNARY(Real, Real, arccosh_from_1, ARCCOSH_FROM_1)
  STROBE_UNARY(Integer, Real, to_integer, TO_INTEGER)
  STROBE_BINARY(Boolean, Real, operator==, EQUAL)
  STROBE_BINARY(Boolean, Real, operator!=, NOT_EQUAL)
  STROBE_BINARY(Boolean, Real, operator<, LESS)
  STROBE_BINARY(Boolean, Real, operator<=, LESS_EQUAL)
  STROBE_BINARY(Boolean, Real, operator>, GREATER)
  STROBE_BINARY(Boolean, Real, operator>=, GREATER_EQUAL)
};

// An Integer and a number with a fraction give a Real.
#define STROBE_MIXED(name)                                                                                                                 \
  template <std::floating_point T> Real name(Integer a, T b) { return name(Real(a), Real(b)); }                                            \
  template <std::floating_point T> Real name(T a, Integer b) { return name(Real(a), Real(b)); }
STROBE_MIXED(operator+)
STROBE_MIXED(operator-)
STROBE_MIXED(operator*)
STROBE_MIXED(operator/)

#undef STROBE_BINARY
#undef STROBE_UNARY
#undef STROBE_MIXED

// The branch that is not taken has no effect, and neither has its derivative.
inline Real where(Boolean condition, Real a, Real b) {
  return Real(detail::Made{}, detail::record(STROBE_OP_WHERE, {condition.node, a.node, b.node}));
}
inline Integer where(Boolean condition, Integer a, Integer b) {
  return Integer(detail::Made{}, detail::record(STROBE_OP_WHERE, {condition.node, a.node, b.node}));
}
inline Boolean where(Boolean condition, Boolean a, Boolean b) {
  return Boolean(detail::Made{}, detail::record(STROBE_OP_WHERE, {condition.node, a.node, b.node}));
}

// The call's tensor captured_n. An element is read by captured<Real>(0)(h, j). Kind is that of the tensor's dtype.
template <class Kind> class captured {
public:
  explicit captured(int32_t number) : n(number) {}
  template <class... Indices> Kind operator()(Indices... indices) const {
    static_assert(sizeof...(indices) <= 4, "a tensor has at most 4 axes");
    return Kind(detail::Made{}, detail::record(STROBE_OP_LOAD, {Integer(indices).node...}, 0, 0, n));
  }

private:
  int32_t n;
};

// The offset of causal masks, windows and ALiBi: Sk - Sq of the sequence if they are aligned at bottom right, 0 at top left.
inline Integer offset() { return Integer(detail::Made{}, detail::record(STROBE_OP_OFFSET)); }

namespace detail {

template <class Result, class F> Function recorded_function(F &&make) {
  struct Recording {
    Function function;
    Function *const before = recorded;
    Recording() { recorded = &function; }
    ~Recording() { recorded = before; }
  } recording;
  const Result result = make();
  recording.function.nodes.resize(static_cast<size_t>(result.node) + 1);
  return recording.function;
}
inline Integer argument(strobe_operation which) { return Integer(Made{}, record(which)); }

} // namespace detail

// f(x, b, h, i, j) returns a Real, or a number.
template <class F> Function score_function(F &&f) {
  return detail::recorded_function<Real>([&]() -> Real {
    const Real x(detail::Made{}, detail::record(STROBE_OP_SCORE));
    const Integer b = detail::argument(STROBE_OP_BATCH), h = detail::argument(STROBE_OP_HEAD), i = detail::argument(STROBE_OP_QUERY),
                  j = detail::argument(STROBE_OP_KEY);
    return f(x, b, h, i, j);
  });
}
// g(b, h, i, j) returns a Boolean, or a bool.
template <class F> Function mask_function(F &&g) {
  return detail::recorded_function<Boolean>([&]() -> Boolean {
    const Integer b = detail::argument(STROBE_OP_BATCH), h = detail::argument(STROBE_OP_HEAD), i = detail::argument(STROBE_OP_QUERY),
                  j = detail::argument(STROBE_OP_KEY);
    return g(b, h, i, j);
  });
}

} // namespace api
} // namespace strobe
