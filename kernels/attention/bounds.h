// Bounds of the values that the operations of functions take, from bounds of their inputs, for host and device alike. Reals are rounded
// outwards to float32, so that bounds hold for every engine.
#pragma once
#include "base.h"

// The functions of double that M, the host's and the device's, has under these names.
#define STROBE_BOUNDS_FUNCTIONS(F)                                                                                                         \
  F(exp)                                                                                                                                   \
  F(exp2)                                                                                                                                  \
  F(expm1)                                                                                                                                 \
  F(log)                                                                                                                                   \
  F(log2)                                                                                                                                  \
  F(log1p)                                                                                                                                 \
  F(sqrt)                                                                                                                                  \
  F(asin)                                                                                                                                  \
  F(acos)                                                                                                                                  \
  F(atan)                                                                                                                                  \
  F(sinh)                                                                                                                                  \
  F(cosh)                                                                                                                                  \
  F(tanh)                                                                                                                                  \
  F(asinh)                                                                                                                                 \
  F(acosh)                                                                                                                                 \
  F(atanh)                                                                                                                                 \
  F(erf)                                                                                                                                   \
  F(erfc)                                                                                                                                  \
  F(floor)                                                                                                                                 \
  F(ceil)                                                                                                                                  \
  F(trunc)                                                                                                                                 \
  F(nearbyint)

namespace strobe::inline STROBE_ISA::bounds {

// The numbers of include/strobe/operations.inc, with which src/score/interval.cpp compares them.
enum Operation : i32 {
  SCORE = 1,
  BATCH = 2,
  HEAD = 3,
  QUERY = 4,
  KEY = 5,
  OFFSET = 6,
  REAL = 7,
  INTEGER = 8,
  BOOLEAN = 9,
  LOAD = 10,
  ADD = 20,
  SUBTRACT = 21,
  MULTIPLY = 22,
  DIVIDE = 23,
  FLOOR_DIVIDE = 24,
  REMAINDER = 25,
  TRUNC_REMAINDER = 26,
  MINIMUM = 27,
  MAXIMUM = 28,
  NEGATE = 29,
  ABSOLUTE = 30,
  SIGN = 31,
  POWER = 32,
  AND = 40,
  OR = 41,
  XOR = 42,
  NOT = 43,
  SHIFT_LEFT = 44,
  SHIFT_RIGHT = 45,
  EQUAL = 50,
  NOT_EQUAL = 51,
  LESS = 52,
  LESS_EQUAL = 53,
  GREATER = 54,
  GREATER_EQUAL = 55,
  WHERE = 56,
  TO_REAL = 60,
  TO_INTEGER = 61,
  TO_BOOLEAN = 62,
  EXP = 70,
  EXP2 = 71,
  EXPM1 = 72,
  LOG = 73,
  LOG2 = 74,
  LOG1P = 75,
  SQRT = 76,
  RSQRT = 77,
  SIN = 78,
  COS = 79,
  TAN = 80,
  ASIN = 81,
  ACOS = 82,
  ATAN = 83,
  ATAN2 = 84,
  SINH = 85,
  COSH = 86,
  TANH = 87,
  ASINH = 88,
  ACOSH = 89,
  ATANH = 90,
  ERF = 91,
  ERFC = 92,
  SIGMOID = 93,
  FLOOR = 94,
  CEIL = 95,
  TRUNC = 96,
  ROUND = 97,
  ARCCOSH_FROM_1 = 98,
  TO_INT32 = 99,
};
enum Kind : i32 { kBoolean = 0, kInteger = 1, kReal = 2 };

// Integers from low to high, both included.
struct Range {
  i64 low, high;
  STROBE_FN bool within(i64 most) const { return low >= -most && high <= most; }
  STROBE_FN bool narrow() const { return low >= -(1ll << 31) && high < 1ll << 31; } // of 32 bits
};

// Booleans are the integers 0 and 1. Of reals, may_be_nan says whether NaN is possible beside those from least to most.
struct Bounds {
  union {
    Range whole;
    struct {
      double least, most;
    } real;
  };
  bool may_be_nan;
};

STROBE_FN Bounds integers(i64 low, i64 high) {
  Bounds b;
  b.whole = {low, high}, b.may_be_nan = false;
  return b;
}
STROBE_FN Bounds reals(double least, double most, bool may_be_nan) {
  Bounds b;
  b.real = {least, most}, b.may_be_nan = may_be_nan;
  return b;
}

inline constexpr i64 kMost = 0x7fffffffffffffffll, kLeast = -kMost - 1;
inline constexpr double kLeastNormal = 0x1p-126, kInfinite = __builtin_bit_cast(double, 0x7ff0000000000000ull), kPi = 3.141592653589793;

STROBE_FN Bounds any_integer() { return integers(kLeast, kMost); }
STROBE_FN Bounds any_real() { return reals(-kInfinite, kInfinite, true); }
STROBE_FN Bounds either() { return integers(0, 1); }
STROBE_FN Bounds any(i32 kind) { return kind == kReal ? any_real() : kind == kInteger ? any_integer() : either(); }
STROBE_FN bool is_one(const Range &a) { return a.low == a.high; }
STROBE_FN Bounds hull(const Bounds &a, const Bounds &b) { return integers(min(a.whole.low, b.whole.low), max(a.whole.high, b.whole.high)); }

// An integer of 128 bits. NVRTC has none without an option.
struct Wide {
  i64 high;
  u64 low;
};
STROBE_FN Wide wide(i64 x) { return {x < 0 ? -1 : 0, (u64)x}; }
STROBE_FN Wide operator+(Wide a, Wide b) {
  const u64 low = a.low + b.low;
  return {(i64)((u64)a.high + (u64)b.high + (low < a.low)), low};
}
STROBE_FN Wide operator-(Wide a) { return Wide{(i64) ~(u64)a.high, ~a.low} + Wide{0, 1}; }
STROBE_FN bool operator<(Wide a, Wide b) { return a.high < b.high || (a.high == b.high && a.low < b.low); }
STROBE_FN Wide product(i64 a, i64 b) {
  constexpr u64 mask = 0xffffffff;
  const u64 x = (u64)a, y = (u64)b, x0 = x & mask, x1 = x >> 32, y0 = y & mask, y1 = y >> 32;
  const u64 low = x0 * y0, first = x1 * y0 + (low >> 32), second = x0 * y1 + (first & mask);
  const u64 high = x1 * y1 + (first >> 32) + (second >> 32) - (a < 0 ? y : 0) - (b < 0 ? x : 0);
  return {(i64)high, x * y};
}
STROBE_FN Wide shifted(i64 x, i64 by) { return {by ? x >> (64 - by) : x < 0 ? -1 : 0, (u64)x << by}; } // by: 0 to 63
STROBE_FN bool fits(Wide x) { return x.high == ((i64)x.low < 0 ? -1 : 0); }
STROBE_FN Wide magnitude(const Range &a) { return max(a.low < 0 ? -wide(a.low) : wide(a.low), a.high < 0 ? -wide(a.high) : wide(a.high)); }

// What 64 bits cannot hold wraps around: if all values do so equally often, they are still a range.
STROBE_FN Bounds within(Wide low, Wide high) {
  const i64 laps_of_low = low.high + (i64)(low.low >> 63), laps_of_high = high.high + (i64)(high.low >> 63);
  return laps_of_low == laps_of_high ? integers((i64)low.low, (i64)high.low) : any_integer();
}
STROBE_FN Bounds within_32(const Range &a) {
  const auto laps = [](i64 x) { return (x >> 32) + (x >> 31 & 1); };
  constexpr i64 half = 0x80000000;
  return laps(a.low) == laps(a.high) ? integers((i32)a.low, (i32)a.high) : integers(-half, half - 1);
}
template <class F> STROBE_FN Bounds at_corners(const Range &a, const Range &b, F f) {
  Wide low = f(a.low, b.low), high = low;
#pragma unroll 1
  for (int corner = 1; corner < 4; corner++) {
    const Wide c = f(corner & 2 ? a.high : a.low, corner & 1 ? b.high : b.low);
    low = min(low, c), high = max(high, c);
  }
  return within(low, high);
}

STROBE_FN i64 floored_remainder(i64 a, i64 b) {
  const i64 rest = b == 0 || b == -1 ? 0 : a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
STROBE_FN Wide floor_divided(i64 a, i64 b) { // b is not 0
  if (b == -1) return -wide(a);
  const i64 quotient = a / b;
  return wide(quotient - (quotient * b != a && (a < 0) != (b < 0)));
}
STROBE_FN Bounds quotient(const Range &a, const Range &b) {
  const bool by_zero = b.low <= 0 && b.high >= 0;
  Bounds all = integers(0, 0); // by 0 it is 0
#pragma unroll 1
  for (int sign = 0; sign < 2; sign++) {
    const Range by = {sign ? b.low : max(b.low, i64(1)), sign ? min(b.high, i64(-1)) : b.high};
    if (by.low > by.high) continue;
    const Bounds part = at_corners(a, by, [](i64 x, i64 y) { return floor_divided(x, y); });
    if (!by_zero) return part;
    all = hull(all, part);
  }
  return all;
}

// The remainder of a floored division.
STROBE_FN Bounds remainder(const Range &a, const Range &b) {
  if (is_one(a) && is_one(b)) {
    const i64 rest = floored_remainder(a.low, b.low);
    return integers(rest, rest);
  }
  if (b.low > 0) {
    if (is_one(b)) {
      const i64 first = floored_remainder(a.low, b.low), last = floored_remainder(a.high, b.low);
      if (wide(a.high) < wide(a.low) + wide(b.low - first)) return integers(first, last); // one multiple lies below all
    }
    if (a.low >= 0) return a.high < b.low ? integers(a.low, a.high) : integers(0, min(a.high, b.high - 1));
    return integers(0, b.high - 1);
  }
  if (b.high < 0) return integers(b.low + 1, 0);
  return integers(min(b.low < 0 ? b.low + 1 : i64(0), i64(0)), max(b.high - 1, i64(0))); // by 0 it is 0
}

STROBE_FN Bounds truncated_remainder(const Range &a, const Range &b) {
  if (is_one(a) && is_one(b)) {
    const i64 rest = b.low == 0 || b.low == -1 ? 0 : a.low % b.low;
    return integers(rest, rest);
  }
  if (a.low >= 0 && b.low > 0) return remainder(a, b);
  const Wide least = max(magnitude(b) + wide(-1), wide(0));
  const i64 most = (i64)min(magnitude(a), least).low; // the least of them fits
  return integers(a.low < 0 ? -most : 0, a.high > 0 ? most : 0);
}

// All bits up to the highest one that is set.
STROBE_FN u64 filled(u64 x) {
  for (int by = 1; by < 64; by *= 2) x |= x >> by;
  return x;
}
// The bits that the values of a range do not share are all among these.
STROBE_FN u64 open_bits(const Range &a) { return filled((u64)a.low ^ (u64)a.high); }

STROBE_FN Bounds of_bits(i32 op, const Range &a, const Range &b) {
  const u64 open = open_bits(a) | open_bits(b), x = (u64)a.low, y = (u64)b.low;
  if (open >> 63) { // numbers of both signs
    if (op == AND && a.low >= 0) return integers(0, a.high);
    if (op == AND && b.low >= 0) return integers(0, b.high);
    // The bits in which some number differs from its sign.
    const u64 below =
        (u64)(a.low ^ (a.low >> 63)) | (u64)(a.high ^ (a.high >> 63)) | (u64)(b.low ^ (b.low >> 63)) | (u64)(b.high ^ (b.high >> 63));
    const i64 most = (i64)filled(below);
    return integers(~most, most);
  }
  const u64 shared = (op == AND ? x & y : op == OR ? x | y : x ^ y) & ~open;
  Range made = {(i64)shared, (i64)(shared | open)};
  if (op == AND && a.low >= 0 && b.low >= 0) made.high = min(made.high, min(a.high, b.high));
  if (op == OR && a.low >= 0 && b.low >= 0) made.low = max(made.low, max(a.low, b.low));
  return integers(made.low, made.high);
}

STROBE_FN Bounds shifted_left(const Range &a, const Range &by) {
  if (by.low >= 0 && by.high <= 63) return at_corners(a, by, [](i64 x, i64 y) { return shifted(x, y); });
  if (by.high < 0 || by.low > 63) return integers(0, 0);
  return any_integer();
}
STROBE_FN Bounds shifted_right(const Range &a, const Range &by) {
  if (by.low >= 0 && by.high <= 63) return at_corners(a, by, [](i64 x, i64 y) { return wide(x >> y); });
  if (by.high < 0 || by.low > 63) return integers(-(a.low < 0), -(a.high < 0));
  return integers(min(a.low, i64(0)), max(a.high, i64(0)));
}

// Reals. M has the functions of <cmath>, and float_below(x): the largest float that does not exceed x.
template <class M> STROBE_FN double rounded_down(double x) {
  const double f = M::float_below(x);
  if (f < kLeastNormal && f > -kLeastNormal) return f < 0 ? -kLeastNormal : 0;
  return f;
}
template <class M> STROBE_FN Bounds rounded(double least, double most, bool may_be_nan) {
  if (!(least <= most)) return any_real(); // NaN alone
  return reals(rounded_down<M>(least), -rounded_down<M>(-most), may_be_nan);
}
STROBE_FN bool is_finite(double x) { return x < kInfinite && x > -kInfinite; }
STROBE_FN bool is_finite(const Bounds &a) { return is_finite(a.real.least) && is_finite(a.real.most); }
STROBE_FN double magnitude(double x) { return x < 0 ? -x : x; }
// The same where engines compute approximately.
template <class M>
STROBE_FN Bounds approximate(double least, double most, bool may_be_nan, double relative = 0x1p-10, double absolute = 0x1p-10) {
  if (least != least || most != most) return any_real();
  if (is_finite(least)) least -= magnitude(least) * relative + absolute;
  if (is_finite(most)) most += magnitude(most) * relative + absolute;
  return rounded<M>(least, most, may_be_nan);
}
inline constexpr double kFewUlps = 0x1p-21;

template <class M, class F> STROBE_FN Bounds corners_of_reals(const Bounds &a, const Bounds &b, F f, double relative = 0) {
  if (!is_finite(a) || !is_finite(b)) return any_real();
  double least = kInfinite, most = -kInfinite;
#pragma unroll 1
  for (int corner = 0; corner < 4; corner++) {
    const double c = f(corner & 2 ? a.real.most : a.real.least, corner & 1 ? b.real.most : b.real.least);
    if (c != c) return any_real();
    least = min(least, c), most = max(most, c);
  }
  return approximate<M>(least, most, a.may_be_nan || b.may_be_nan, relative, 0);
}
template <class M> STROBE_FN Bounds divided(const Bounds &a, const Bounds &b) {
  if (b.real.least <= 0 && b.real.most >= 0) return any_real();
  return corners_of_reals<M>(a, b, [](double x, double y) { return x / y; }, kFewUlps);
}
template <class M> STROBE_FN Bounds real_remainder(i32 op, const Bounds &a, const Bounds &b) {
  const bool nan = a.may_be_nan || b.may_be_nan, by_zero = b.real.least <= 0 && b.real.most >= 0;
  if (!is_finite(a) || !is_finite(b) || by_zero) return any_real();
  const double error = max(magnitude(a.real.least), magnitude(a.real.most)) * 0x1p-20;
  if (op == REMAINDER) return rounded<M>(min(b.real.least, 0.0) - error, max(b.real.most, 0.0) + error, nan);
  const double most = max(magnitude(b.real.least), magnitude(b.real.most));
  return rounded<M>((a.real.least < 0 ? -most : 0) - error, (a.real.most > 0 ? most : 0) + error, nan);
}

// The functions that ascend or descend, and POWER. Code for doubles is long: M::kFunctions says which are there, a bit for each.
#define STROBE_MONOTONE(each)                                                                                                              \
  each(EXP, 0, M::exp(x)) each(EXP2, 1, M::exp2(x)) each(EXPM1, 2, M::expm1(x)) each(LOG, 3, M::log(x)) each(LOG2, 4, M::log2(x))          \
      each(LOG1P, 5, M::log1p(x)) each(ASIN, 6, M::asin(x)) each(ACOS, 7, M::acos(x)) each(ATAN, 8, M::atan(x)) each(SINH, 9, M::sinh(x))  \
          each(COSH, 10, M::cosh(x)) each(TANH, 11, M::tanh(x)) each(ASINH, 12, M::asinh(x)) each(ACOSH, 13, M::acosh(x))                  \
              each(ATANH, 14, M::atanh(x)) each(ERF, 15, M::erf(x)) each(ERFC, 16, M::erfc(x)) each(SIGMOID, 17, 1 / (1 + M::exp(-x)))     \
                  each(ARCCOSH_FROM_1, 18, M::acosh(max(x, 1.0)))
inline constexpr i32 kPowerBit = 1 << 19, kAllFunctions = (1 << 20) - 1;
STROBE_FN constexpr i32 bit_of_function(i32 op) { // 0: it is none of them
  if (op == POWER) return kPowerBit;
#define STROBE_BIT(name, n, value)                                                                                                         \
  if (op == name) return 1 << n;
  STROBE_MONOTONE(STROBE_BIT)
#undef STROBE_BIT
  return 0;
}
template <class M> STROBE_FN double function(i32 op, double x) {
  switch (op) {
#define STROBE_CASE(name, n, value)                                                                                                        \
  case name:                                                                                                                               \
    if constexpr (M::kFunctions >> n & 1) return value;                                                                                    \
    break;
    STROBE_MONOTONE(STROBE_CASE)
#undef STROBE_CASE
  default:
    break;
  }
  return x;
}
#undef STROBE_MONOTONE
// A function that ascends, or descends, from `from` to `to`, and is NaN elsewhere. Of NaN alone the bounds are those of the nearest end,
// which lie within the bounds over every larger range.
template <class M>
STROBE_FN Bounds monotone(i32 op, const Bounds &a, bool ascends = true, double from = -kInfinite, double to = kInfinite) {
  if (!(M::kFunctions & bit_of_function(op))) return any_real();
  double ends[2] = {min(max(a.real.least, from), to), min(max(a.real.most, from), to)};
#pragma unroll 1
  for (double &x : ends) x = function<M>(op, x);
  const bool nan = a.may_be_nan || a.real.least < from || a.real.most > to;
  return approximate<M>(ascends ? ends[0] : ends[1], ascends ? ends[1] : ends[0], nan);
}
STROBE_FN Bounds absolute(const Bounds &a) {
  const auto [least, most] = a.real;
  if (least >= 0) return a;
  return reals(most <= 0 ? -most : 0, max(-least, most), a.may_be_nan);
}

template <class M> STROBE_FN Bounds of_one_real(i32 op, const Bounds &a) {
  const double least = a.real.least, most = a.real.most;
  const bool nan = a.may_be_nan;
  switch (op) {
  case NEGATE:
    return reals(-most, -least, nan);
  case ABSOLUTE:
    return absolute(a);
  case SIGN:
    if (nan) return reals(-1, 1, true);
    return reals((least > 0) - (least < 0), (most > 0) - (most < 0), false);
  case FLOOR:
    return reals(M::floor(least), M::floor(most), nan);
  case CEIL:
    return reals(M::ceil(least), M::ceil(most), nan);
  case TRUNC:
    return reals(M::trunc(least), M::trunc(most), nan);
  case ROUND:
    return reals(M::nearbyint(least), M::nearbyint(most), nan);
  case SQRT:
    return approximate<M>(M::sqrt(max(least, 0.0)), M::sqrt(max(most, 0.0)), nan || least < 0, kFewUlps, 0);
  case RSQRT:
    if (least <= 0) return any_real();
    return approximate<M>(1 / M::sqrt(most), 1 / M::sqrt(least), nan, kFewUlps, 0);
  case SIN:
  case COS:
    return approximate<M>(-1, 1, nan || !is_finite(a));
  case EXP:
  case EXP2:
  case EXPM1:
  case ATAN:
  case SINH:
  case COSH:
  case TANH:
  case ASINH:
  case ACOSH:
  case ATANH:
  case ASIN:
  case ACOS:
  case LOG:
  case LOG2:
  case LOG1P:
  case ERF:
  case ERFC:
  case SIGMOID:
  case ARCCOSH_FROM_1: {
    const bool of_unit = op == ASIN || op == ACOS || op == ATANH;
    const double from = of_unit || op == LOG1P ? -1 : op == LOG || op == LOG2 ? 0 : op == ACOSH ? 1 : -kInfinite;
    return monotone<M>(op, op == COSH ? absolute(a) : a, op != ACOS && op != ERFC, from, of_unit ? 1 : kInfinite);
  }
  default:
    return any_real();
  }
}

template <class M> STROBE_FN Bounds of_two_reals(i32 op, const Bounds &a, const Bounds &b) {
  const bool nan = a.may_be_nan || b.may_be_nan;
  switch (op) {
  case ADD:
    return corners_of_reals<M>(a, b, [](double x, double y) { return x + y; });
  case SUBTRACT:
    return corners_of_reals<M>(a, b, [](double x, double y) { return x - y; });
  case MULTIPLY:
    return corners_of_reals<M>(a, b, [](double x, double y) { return x * y; });
  case DIVIDE:
    return divided<M>(a, b);
  case FLOOR_DIVIDE: {
    const Bounds q = divided<M>(a, b);
    return is_finite(q) ? rounded<M>(M::floor(q.real.least), M::floor(q.real.most), nan) : any_real();
  }
  case REMAINDER:
  case TRUNC_REMAINDER:
    return real_remainder<M>(op, a, b);
  case MINIMUM:
    return reals(min(a.real.least, b.real.least), min(a.real.most, b.real.most), nan);
  case MAXIMUM:
    return reals(max(a.real.least, b.real.least), max(a.real.most, b.real.most), nan);
  case POWER:
    if constexpr (M::kFunctions & kPowerBit)
      if (a.real.least > 0) return corners_of_reals<M>(a, b, [](double x, double y) { return M::exp(y * M::log(x)); }, 0x1p-10);
    return any_real();
  case ATAN2:
    return approximate<M>(-kPi, kPi, nan);
  default:
    return any_real();
  }
}

// The result of a < b, a <= b and so on, where each of a's values may meet each of b's: 1, 0 or both.
template <class T> STROBE_FN Bounds order(i32 op, T a_low, T a_high, T b_low, T b_high) {
  const auto decided = [](bool always, bool never) { return integers(always, !never); };
  switch (op) {
  case LESS:
    return decided(a_high < b_low, a_low >= b_high);
  case LESS_EQUAL:
    return decided(a_high <= b_low, a_low > b_high);
  case GREATER:
    return decided(a_low > b_high, a_high <= b_low);
  case GREATER_EQUAL:
    return decided(a_low >= b_high, a_high < b_low);
  default: {
    const bool same = a_low == a_high && b_low == b_high && a_low == b_low, apart = a_high < b_low || b_high < a_low;
    return op == EQUAL ? decided(same, apart) : decided(apart, same);
  }
  }
}

STROBE_FN Bounds of_booleans(i32 op, const Range &a, const Range &b, bool same) {
  switch (op) {
  case AND:
    return integers(a.low & b.low, a.high & b.high);
  case OR:
    return integers(a.low | b.low, a.high | b.high);
  case NOT:
    return integers(1 - a.high, 1 - a.low);
  case XOR:
  case NOT_EQUAL:
    if (same) return integers(0, 0);
    return is_one(a) && is_one(b) ? integers(a.low ^ b.low, a.low ^ b.low) : either();
  default: // EQUAL
    if (same) return integers(1, 1);
    return is_one(a) && is_one(b) ? integers(a.low == b.low, a.low == b.low) : either();
  }
}

template <class M> STROBE_FN Bounds of_integers(i32 op, const Range &a, const Range &b, bool same) {
  switch (op) {
  case ADD:
    return within(wide(a.low) + wide(b.low), wide(a.high) + wide(b.high));
  case SUBTRACT:
    return within(wide(a.low) + -wide(b.high), wide(a.high) + -wide(b.low));
  case MULTIPLY:
    if (same) {
      const Wide low = product(a.low, a.low), high = product(a.high, a.high);
      return within(a.low > 0 ? low : a.high < 0 ? high : wide(0), max(low, high));
    }
    return at_corners(a, b, [](i64 x, i64 y) { return product(x, y); });
  case FLOOR_DIVIDE:
    return quotient(a, b);
  case REMAINDER:
    return remainder(a, b);
  case TRUNC_REMAINDER:
    return truncated_remainder(a, b);
  case MINIMUM:
    return integers(min(a.low, b.low), min(a.high, b.high));
  case MAXIMUM:
    return integers(max(a.low, b.low), max(a.high, b.high));
  case NEGATE:
    return within(-wide(a.high), -wide(a.low));
  case ABSOLUTE:
    if (a.low >= 0) return integers(a.low, a.high);
    return within(a.high <= 0 ? -wide(a.high) : wide(0), magnitude(a));
  case SIGN:
    return integers((a.low > 0) - (a.low < 0), (a.high > 0) - (a.high < 0));
  case XOR:
    if (same) return integers(0, 0);
    return of_bits(op, a, b);
  case AND:
  case OR:
    return of_bits(op, a, b);
  case NOT:
    return integers(~a.high, ~a.low);
  case SHIFT_LEFT:
    return shifted_left(a, b);
  case SHIFT_RIGHT:
    return shifted_right(a, b);
  case TO_REAL:
    return rounded<M>((double)a.low, (double)a.high, false);
  case TO_INTEGER:
    return integers(a.low, a.high);
  case TO_INT32:
    return within_32(a);
  case TO_BOOLEAN:
    return integers(a.low > 0 || a.high < 0, a.low != 0 || a.high != 0);
  default:
    return order(op, a.low, a.high, b.low, b.high);
  }
}

// What is no real, of reals.
STROBE_FN Bounds from_reals(i32 op, const Bounds &a, const Bounds &b, bool same) {
  if (op == TO_BOOLEAN) return integers(a.real.least > 0 || a.real.most < 0, a.real.least != 0 || a.real.most != 0 || a.may_be_nan);
  if (op == TO_INTEGER) {
    constexpr double most = 0x1p62;
    if (a.may_be_nan || a.real.least < -most || a.real.most > most) return any_integer();
    return integers((i64)a.real.least, (i64)a.real.most);
  }
  Bounds made = same ? order(op, 0.0, 0.0, 0.0, 0.0) : order(op, a.real.least, a.real.most, b.real.least, b.real.most);
  if (a.may_be_nan || b.may_be_nan) { // NaN differs from every number, and is neither less nor greater
    if (op == NOT_EQUAL)
      made.whole.high = 1;
    else
      made.whole.low = 0;
  }
  return made;
}

STROBE_FN Bounds chosen(i32 kind, const Range &condition, const Bounds &a, const Bounds &b) {
  if (is_one(condition)) return condition.low ? a : b;
  if (kind != kReal) return hull(a, b);
  return reals(min(a.real.least, b.real.least), max(a.real.most, b.real.most), a.may_be_nan || b.may_be_nan);
}

// The bounds of an operation's result of a kind, from those of its inputs, which are of kind `of`. binary: it takes two. same: they are one
// node. It is no constant, no argument and no LOAD.
template <class M>
STROBE_FN Bounds result(i32 op, i32 kind, i32 of, bool binary, bool same, const Bounds &a, const Bounds &b, const Bounds &c) {
  if (op == WHERE) return chosen(kind, a.whole, b, c);
  if (of != kReal) {
    const bool logical = of == kBoolean && (binary || op == NOT);
    return logical ? of_booleans(op, a.whole, b.whole, same) : of_integers<M>(op, a.whole, b.whole, same);
  }
  if (kind != kReal) return from_reals(op, a, b, same);
  return binary ? of_two_reals<M>(op, a, b) : of_one_real<M>(op, a);
}

} // namespace strobe::inline STROBE_ISA::bounds
