// The bytecode's operations of any kind, element by element: what instruction sets have no vector form of.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "score/bytecode.h"
#include "score/small_floats.h"

namespace strobe::score {
namespace {

constexpr int64_t kLeast = -(int64_t(1) << 30); // what a narrow integer is of -inf

// Integers of 64 bits wrap around.
int64_t wrap(uint64_t x) { return int64_t(x); }
template <class I> I floor_divide(I x, I y) {
  if (y == 0) return 0;
  if (y == -1) return I(wrap(-uint64_t(int64_t(x))));
  return I(x / y - (x % y != 0 && (x % y < 0) != (y < 0)));
}
template <class I> I remainder(I x, I y) {
  if (y == 0 || y == -1) return 0;
  const I r = x % y;
  return r != 0 && (r < 0) != (y < 0) ? r + y : r;
}

template <class I> I integer_of(Op op, I x, I y) {
  const uint64_t a = uint64_t(int64_t(x)), b = uint64_t(int64_t(y));
  switch (op) {
  case Op::ADD:
    return I(wrap(a + b));
  case Op::SUBTRACT:
    return I(wrap(a - b));
  case Op::MULTIPLY:
    return I(wrap(a * b));
  case Op::FLOOR_DIVIDE:
    return floor_divide(x, y);
  case Op::REMAINDER:
    return remainder(x, y);
  case Op::TRUNC_REMAINDER:
    return y == 0 || y == -1 ? 0 : x % y;
  case Op::MINIMUM:
    return std::min(x, y);
  case Op::MAXIMUM:
    return std::max(x, y);
  case Op::NEGATE:
    return I(wrap(-a));
  case Op::ABSOLUTE:
    return I(x < 0 ? wrap(-a) : x);
  case Op::SIGN:
    return (x > 0) - (x < 0);
  case Op::AND:
    return x & y;
  case Op::OR:
    return x | y;
  case Op::XOR:
    return x ^ y;
  case Op::NOT:
    return ~x;
  case Op::SHIFT_LEFT:
    return y >= 0 && y < 64 ? I(wrap(a << b)) : 0;
  case Op::SHIFT_RIGHT:
    return y >= 0 && y < int64_t(8 * sizeof(I)) ? x >> y : x < 0 ? -1 : 0;
  case Op::TO_INT32:
    return int32_t(uint32_t(a));
  default:
    return x;
  }
}

// PyTorch's and Python's x // y, from the exact remainder: where x / y is rounded up to an integer, its floor would be one too large.
template <class T> T floor_of_quotient(T x, T y) {
  if (y == 0) return x / y;
  const T rest = std::fmod(x, y);
  const T quotient = (x - rest) / y - T(rest != 0 && (rest < 0) != (y < 0)); // an integer, but for rounding
  if (quotient == 0) return std::copysign(T(0), x / y);
  const T whole = std::floor(quotient);
  return quotient - whole > T(0.5) ? whole + 1 : whole;
}

template <class T> T real_of(Op op, T x, T y) {
  switch (op) {
  case Op::ADD:
    return x + y;
  case Op::SUBTRACT:
    return x - y;
  case Op::MULTIPLY:
    return x * y;
  case Op::DIVIDE:
    return x / y;
  case Op::FLOOR_DIVIDE:
    return floor_of_quotient(x, y);
  case Op::REMAINDER: {
    const T r = std::fmod(x, y);
    return r != 0 && (r < 0) != (y < 0) ? r + y : r;
  }
  case Op::TRUNC_REMAINDER:
    return std::fmod(x, y);
  case Op::MINIMUM:
    return x != x || x < y ? x : y;
  case Op::MAXIMUM:
    return x != x || x > y ? x : y;
  case Op::NEGATE:
    return -x;
  case Op::ABSOLUTE:
    return std::fabs(x);
  case Op::SIGN:
    return T((x > 0) - (x < 0));
  case Op::POWER:
    return std::pow(x, y);
  case Op::EXP:
    return std::exp(x);
  case Op::EXP2:
    return std::exp2(x);
  case Op::EXPM1:
    return std::expm1(x);
  case Op::LOG:
    return std::log(x);
  case Op::LOG2:
    return std::log2(x);
  case Op::LOG1P:
    return std::log1p(x);
  case Op::SQRT:
    return std::sqrt(x);
  case Op::RSQRT:
    return 1 / std::sqrt(x);
  case Op::SIN:
    return std::sin(x);
  case Op::COS:
    return std::cos(x);
  case Op::TAN:
    return std::tan(x);
  case Op::ASIN:
    return std::asin(x);
  case Op::ACOS:
    return std::acos(x);
  case Op::ATAN:
    return std::atan(x);
  case Op::ATAN2:
    return std::atan2(x, y);
  case Op::SINH:
    return std::sinh(x);
  case Op::COSH:
    return std::cosh(x);
  case Op::TANH:
    return std::tanh(x);
  case Op::ASINH:
    return std::asinh(x);
  case Op::ACOSH:
    return std::acosh(x);
  case Op::ATANH:
    return std::atanh(x);
  case Op::ERF:
    return std::erf(x);
  case Op::ERFC:
    return std::erfc(x);
  case Op::SIGMOID:
    return 1 / (1 + std::exp(-x));
  case Op::FLOOR:
    return std::floor(x);
  case Op::CEIL:
    return std::ceil(x);
  case Op::TRUNC:
    return std::trunc(x);
  case Op::ROUND:
    return std::nearbyint(x);
  case Op::ARCCOSH_FROM_1:
    return x > 1 ? std::acosh(x) : x != x ? x : 0;
  default:
    return x;
  }
}

template <class X> bool compare(Op op, X x, X y) {
  switch (op) {
  case Op::EQUAL:
    return x == y;
  case Op::NOT_EQUAL:
    return x != y;
  case Op::LESS:
    return x < y;
  case Op::LESS_EQUAL:
    return x <= y;
  case Op::GREATER:
    return x > y;
  case Op::GREATER_EQUAL:
    return x >= y;
  default:
    return x != 0; // TO_BOOLEAN
  }
}
constexpr bool compares(Op op) { return (op >= Op::EQUAL && op <= Op::GREATER_EQUAL) || op == Op::TO_BOOLEAN; }

// NaN and what 64 bits cannot hold: any number.
int64_t integer_from(double x) { return x > -0x1p63 && x < 0x1p63 ? int64_t(x) : x < 0 ? INT64_MIN : INT64_MAX; }

// Calls f with each element of the inputs and the output.
template <class Out, class In, class F> void each(const Vectors &n, const Operand &out, const Operand *in, int count, F &&f) {
  for (int64_t r = 0; r < n.rows; ++r)
    for (int64_t v = 0; v < n.vectors; ++v) {
      Out *const to = reinterpret_cast<Out *>(out.at + r * out.row + v * out.step);
      const In *from[3] = {};
      for (int i = 0; i < count; ++i) from[i] = reinterpret_cast<const In *>(in[i].at + r * in[i].row + v * in[i].step);
      for (int i = count; i < 3; ++i) from[i] = from[0]; // read, but not used
      for (int64_t l = 0; l < n.lanes; ++l) to[l] = f(from[0][l], from[1][l], from[2][l]);
    }
}

template <Op op> using Constant = std::integral_constant<Op, op>;

// Calls f with an integer operation as a constant: a loop over one operation is faster.
template <class F> void with_integer(Op op, F &&f) {
  switch (op) {
#define STROBE_CASE(name)                                                                                                                  \
  case Op::name:                                                                                                                           \
    return f(Constant<Op::name>{});
    STROBE_CASE(ADD)
    STROBE_CASE(SUBTRACT)
    STROBE_CASE(MULTIPLY)
    STROBE_CASE(FLOOR_DIVIDE)
    STROBE_CASE(REMAINDER)
    STROBE_CASE(TRUNC_REMAINDER)
    STROBE_CASE(MINIMUM)
    STROBE_CASE(MAXIMUM)
    STROBE_CASE(NEGATE)
    STROBE_CASE(ABSOLUTE)
    STROBE_CASE(SIGN)
    STROBE_CASE(AND)
    STROBE_CASE(OR)
    STROBE_CASE(XOR)
    STROBE_CASE(NOT)
    STROBE_CASE(SHIFT_LEFT)
    STROBE_CASE(SHIFT_RIGHT)
    STROBE_CASE(TO_INT32)
    STROBE_CASE(EQUAL)
    STROBE_CASE(NOT_EQUAL)
    STROBE_CASE(LESS)
    STROBE_CASE(LESS_EQUAL)
    STROBE_CASE(GREATER)
    STROBE_CASE(GREATER_EQUAL)
    STROBE_CASE(TO_BOOLEAN)
#undef STROBE_CASE
  default:
    throw std::logic_error("an operation that integers do not have");
  }
}

template <class T> using IntegerOf = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

// Operations of integers and masks, T's the size of a mask's elements.
template <class T, class In> void of_integers(const Instruction &x, const Vectors &n, const Operand &out, const Operand *in) {
  using Mask = IntegerOf<T>;
  const int count = x.in[1].slot >= 0 ? 2 : 1;
  with_integer(Op(x.op), [&](auto constant) {
    constexpr Op op = decltype(constant)::value;
    if constexpr (compares(op))
      each<Mask, In>(n, out, in, count, [](In a, In b, In) { return Mask(-compare<In>(op, a, b)); });
    else
      each<In, In>(n, out, in, count, [](In a, In b, In) { return integer_of<In>(op, a, b); });
  });
}

// mask ? in[1] : in[2]
template <class T, class Value> void choose(const Vectors &n, const Operand &out, const Operand *in) {
  for (int64_t r = 0; r < n.rows; ++r)
    for (int64_t v = 0; v < n.vectors; ++v) {
      const auto at = [&](const Operand &x) { return x.at + r * x.row + v * x.step; };
      const auto *mask = reinterpret_cast<const IntegerOf<T> *>(at(in[0]));
      const auto *yes = reinterpret_cast<const Value *>(at(in[1])), *no = reinterpret_cast<const Value *>(at(in[2]));
      auto *const to = reinterpret_cast<Value *>(at(out));
      for (int64_t l = 0; l < n.lanes; ++l) to[l] = mask[l] ? yes[l] : no[l];
    }
}

template <class T, class Index> void load_elements(const Instruction &x, const Vectors &n, const Operand &out, const Operand *in) {
  using Mask = IntegerOf<T>;
  const auto elements = [&](auto stored, auto convert) {
    using Stored = decltype(stored);
    using To = decltype(convert(stored));
    each<To, Index>(n, out, in, 1, [&](Index i, Index, Index) { return convert(reinterpret_cast<const Stored *>(x.data)[i]); });
  };
  switch (x.dtype) {
  case DType::boolean:
    return elements(uint8_t{}, [](uint8_t e) { return Mask(e ? -1 : 0); });
  case DType::i32:
    return elements(int32_t{}, [](int32_t e) { return Mask(e); });
  case DType::i64:
    return elements(int64_t{}, [](int64_t e) { return e; });
  case DType::f16:
    return elements(uint16_t{}, [](uint16_t e) { return from_half<T>(e); });
  case DType::bf16:
    return elements(uint16_t{}, [](uint16_t e) { return from_bfloat<T>(e); });
  case DType::f32:
    return elements(float{}, [](float e) { return T(e); });
  case DType::f64:
    return elements(double{}, [](double e) { return T(e); });
  default:
    throw std::logic_error("a captured tensor of a dtype that functions do not read");
  }
}

// The index of an axis: a negative one counts from the end, and one beyond the axis is that of its nearest end.
template <class I> void add_index(const Instruction &x, const Vectors &n, const Operand &out, const Operand *in) {
  each<I, I>(n, out, in, 2, [&](I index, I sum, I) {
    const int64_t i = int64_t(index) < 0 ? int64_t(index) + x.integer : int64_t(index);
    return I(int64_t(sum) + std::clamp<int64_t>(i, 0, x.integer - 1) * x.stride);
  });
}

template <class X> void positions(const Vectors &n, const Operand &out, int64_t first) {
  for (int64_t v = 0; v < n.vectors; ++v)
    for (int64_t l = 0; l < n.lanes; ++l) reinterpret_cast<X *>(out.at + v * out.step)[l] = X(first + v * n.lanes + l);
}

} // namespace

template <class T> void compute_each(const Instruction &x, const Vectors &n, int64_t first, const Operand &out, const Operand *in) {
  using Narrow = IntegerOf<T>;
  const bool wide = x.type == Type::wide;
  const auto constant = [&](auto value) {
    each<decltype(value), decltype(value)>(n, out, &out, 1, [&](auto, auto, auto) { return value; });
  };
  const auto integer = [&](int64_t value) { wide ? constant(value) : constant(Narrow(value)); };
  switch (x.op) {
  case kWiden:
    return each<int64_t, Narrow>(n, out, in, 1, [](Narrow a, Narrow, Narrow) { return int64_t(a); });
  case kNarrow:
    return each<Narrow, int64_t>(n, out, in, 1, [](int64_t a, int64_t, int64_t) { return Narrow(a); });
  case kIndex:
    return wide ? add_index<int64_t>(x, n, out, in) : add_index<Narrow>(x, n, out, in);
  case kElement:
    return wide ? load_elements<T, int64_t>(x, n, out, in) : load_elements<T, Narrow>(x, n, out, in);
  case int32_t(Op::BATCH):
  case int32_t(Op::HEAD):
  case int32_t(Op::OFFSET):
    return integer(first);
  case int32_t(Op::QUERY):
  case int32_t(Op::KEY):
    return wide ? positions<int64_t>(n, out, first) : positions<Narrow>(n, out, first);
  case int32_t(Op::REAL):
    return constant(T(x.real));
  case int32_t(Op::INTEGER):
    return integer(x.integer);
  case int32_t(Op::BOOLEAN):
    return constant(Narrow(x.integer ? -1 : 0));
  case int32_t(Op::WHERE):
    return wide ? choose<T, int64_t>(n, out, in) : choose<T, Narrow>(n, out, in);
  case int32_t(Op::TO_REAL):
    if (x.type == Type::mask) return each<T, Narrow>(n, out, in, 1, [](Narrow a, Narrow, Narrow) { return T(a ? 1 : 0); });
    if (wide) return each<T, int64_t>(n, out, in, 1, [](int64_t a, int64_t, int64_t) { return T(a); });
    return each<T, Narrow>(n, out, in, 1, [](Narrow a, Narrow, Narrow) { return T(a); });
  case int32_t(Op::TO_INTEGER):
    if (x.type == Type::mask) return each<Narrow, Narrow>(n, out, in, 1, [](Narrow a, Narrow, Narrow) { return Narrow(a ? 1 : 0); });
    if (x.gives == Type::wide) return each<int64_t, T>(n, out, in, 1, [](T a, T, T) { return integer_from(double(a)); });
    return each<Narrow, T>(n, out, in, 1, [](T a, T, T) { return Narrow(std::clamp(integer_from(double(a)), kLeast, -kLeast)); });
  default:
    break;
  }
  const Op op = Op(x.op);
  if (x.type == Type::wide) return of_integers<T, int64_t>(x, n, out, in);
  if (x.type != Type::real) return of_integers<T, Narrow>(x, n, out, in);
  const int count = x.in[1].slot >= 0 ? 2 : 1;
  if (compares(op))
    each<Narrow, T>(n, out, in, count, [&](T a, T b, T) { return Narrow(-compare<T>(op, a, b)); });
  else
    each<T, T>(n, out, in, count, [&](T a, T b, T) { return real_of<T>(op, a, b); });
}
template void compute_each<float>(const Instruction &, const Vectors &, int64_t, const Operand &, const Operand *);
template void compute_each<double>(const Instruction &, const Vectors &, int64_t, const Operand &, const Operand *);

} // namespace strobe::score
