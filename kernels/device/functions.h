// Device code of the operations that the caller's functions consist of. src/score/cuda_source.cpp writes a function's code as calls of
// these. docs/functions.md says what each operation computes.
#pragma once
#include "../ptx/math.h"

#include "../attention/arguments.h"

namespace strobe {

// How exactly functions of the score are computed. rough: the tanh of kCapped is one instruction, with a relative error of 2^-11;
// everything else as with half. half: enough for 16-bit elements, with an error of 2^-22 in arccosh, and in tanh if its derivative is
// needed. half_rounded: the same, and every product and sum is rounded by itself, so that a score has the same bits whatever code surrounds
// it. (Otherwise the compiler might fuse a product and a sum in the code for unmasked tiles, and not in that for masked tiles.) full: to a
// few units in the last place of T, and rounded likewise.
// In every kernel, Functions::full computes whatever decides a comparison, an index, a mask or a step function such as floor.
enum class Functions { rough, half, half_rounded, full };
STROBE_FN constexpr bool rounds_each(Functions f) { return f == Functions::half_rounded || f == Functions::full; }

// A position of a tile's row or column, as a lane reads values there that were computed ahead: a number that is the same for several of the
// lane's elements, and a step that the compiler knows. It may lie past the end of its sequence, by less than a tile.
struct Stepped {
  i32 first, step;
};
// A query and a key as the caller's functions see them.
struct PlaceOfPair {
  i32 b, h, i, j;
  i32 offset; // of the alignment
  Stepped query, key;
  const float *fetched = nullptr; // the lane's values of the first of what is computed ahead, if registers hold them: place_fetched()

  // i - j. For a query past its sequence's end this is not the clamped i minus j, and the function may be NaN there: kernels mask such
  // rows.
  __device__ __forceinline__ i32 difference() const { return query.first - key.first + (query.step - key.step); }
};

// What a value that is computed ahead (passes/ahead.h) depends on, beside b and h.
enum class Along { query, key, difference };

// The place of a pair's value among those that a lane fetches for its elements of a tile, which have two rows, 8 apart, and the columns 8 n
// and 8 n + 1. Columns are keys, or up to 64 queries. By differences the places are from 14 on if columns are keys.
template <Along kAlong> __device__ __forceinline__ int place_fetched(const PlaceOfPair &at) {
  const int steps = kAlong == Along::key ? at.key.step : at.key.step - at.query.step + 64;
  return steps / 8 * 2 + (steps % 8 != 0);
}

// The functions of the call. A specialisation is generated for the hash of their code (Features::program). It has
//   score<kFunctions, kSlope>(a, place, x, slope)   f(x, b, h, i, j); with kSlope, slope becomes its derivative by x
//   seen<kFunctions, T>(a, place)                   g(b, h, i, j)
//   hidden<T>(a, place)                             0 where g is true, else -inf, if all of g is computed ahead
//   penalty<kFunctions, T>(a, place)                the penalty's slope, which b and h decide
//   fetchable<T>(a, place)                          where the first value computed ahead lies, for kFetched = its Along, if it has 32 bits
// Only those that Features declare are defined. T: the type of x and of all other reals.
template <i32 kLow, i32 kHigh> struct CallersFunctions;
template <Features F>
constexpr bool kSeenAhead = requires(const FunctionArguments &a, const PlaceOfPair &at) {
  CallersFunctions<F.program, F.program_high>::template hidden<float>(a, at);
};

// The functions' n-th constant that is passed as an argument.
template <class T> __device__ __forceinline__ T number(const FunctionArguments &a, int n) {
  return reinterpret_cast<const T &>(a.numbers[n]);
}

// Integers. Int: i32 where no result can exceed it, else i64, which wraps around.
template <class Int> struct Integers {
  static constexpr bool kWraps = sizeof(Int) == 8;
  static __device__ __forceinline__ Int add(Int x, Int y) { return kWraps ? (Int)((u64)x + (u64)y) : x + y; }
  static __device__ __forceinline__ Int subtract(Int x, Int y) { return kWraps ? (Int)((u64)x - (u64)y) : x - y; }
  static __device__ __forceinline__ Int multiply(Int x, Int y) { return kWraps ? (Int)((u64)x * (u64)y) : x * y; }
  static __device__ __forceinline__ Int negate(Int x) { return subtract(0, x); }
  static __device__ __forceinline__ Int absolute(Int x) { return x < 0 ? negate(x) : x; }
  static __device__ __forceinline__ Int sign(Int x) { return (x > 0) - (x < 0); }
  static __device__ __forceinline__ Int trunc_remainder(Int x, Int y) { return y == 0 || y == -1 ? 0 : x % y; }
  static __device__ __forceinline__ Int remainder(Int x, Int y) {
    const Int r = trunc_remainder(x, y);
    return r != 0 && (r < 0) != (y < 0) ? r + y : r;
  }
  static __device__ __forceinline__ Int floor_divide(Int x, Int y) {
    if (y == 0) return 0;
    if (y == -1) return negate(x);
    const Int q = x / y;
    return q * y != x && (x < 0) != (y < 0) ? q - 1 : q;
  }
  static __device__ __forceinline__ Int minimum(Int x, Int y) { return y < x ? y : x; }
  static __device__ __forceinline__ Int maximum(Int x, Int y) { return x < y ? y : x; }
  static __device__ __forceinline__ Int both(Int x, Int y) { return x & y; }
  static __device__ __forceinline__ Int either(Int x, Int y) { return x | y; }
  static __device__ __forceinline__ Int one_of(Int x, Int y) { return x ^ y; }
  static __device__ __forceinline__ Int invert(Int x) { return ~x; }
  static __device__ __forceinline__ Int shift_left(Int x, Int by) { return by >= 0 && by < 64 ? (Int)((u64)x << (u32)by) : 0; }
  static __device__ __forceinline__ Int shift_right(Int x, Int by) {
    constexpr Int kMost = 8 * sizeof(Int) - 1;
    return x >> (u32)(by >= 0 && by < kMost ? by : kMost);
  }
};
// The same divisions of x by a positive number that the host knows: floor(x / y) = ~floor(~x / y).
template <bool kNotNegative> __device__ __forceinline__ i32 floor_divide(i32 x, const Divisor &by) {
  const Divisor y = by;
  __builtin_assume(y.by != 1); // 1 is a power of two. A branch would keep the compiler from sharing quotients between pairs
  const i32 sign = kNotNegative ? 0 : x >> 31;
  return (i32)y.divide((u32)(x ^ sign)) ^ sign;
}
template <bool kNotNegative> __device__ __forceinline__ i32 remainder(i32 x, const Divisor &y) {
  return x - floor_divide<kNotNegative>(x, y) * (i32)y.by;
}
__device__ __forceinline__ i32 floor_divide_by_power_of_two(i32 x, const Divisor &y) { return x >> (31 - __clz((i32)y.by)); }
__device__ __forceinline__ i32 remainder_by_power_of_two(i32 x, const Divisor &y) { return x & (i32)(y.by - 1); }
// A number whose making the compiler does not mix into the sums that use it: it would compute again for each pair what pairs share.
__device__ __forceinline__ i32 as_one_number(i32 x) {
  asm("" : "+r"(x));
  return x;
}
// |a - b| <= most, of numbers of up to 2^29 in size, most not negative.
__device__ __forceinline__ bool within(i32 a, i32 b, i32 most) {
  return (u32)(as_one_number(a + most) - as_one_number(b)) <= (u32)(2 * most);
}
// The integer towards 0, limited to +-2^30.
__device__ __forceinline__ i32 limited_integer(float x) { return (i32)fminf(fmaxf(x, -0x1p30f), 0x1p30f); }
__device__ __forceinline__ i32 limited_integer(double x) { return (i32)fmin(fmax(x, -0x1p30), 0x1p30); }

// The place of an index on an axis of this size. An index below 0 counts from the axis's end; an index beyond the axis means the axis's
// nearest element. At: i32 if all places fit. kNotNegative: the index is not below 0.
template <class At, bool kNotNegative, class Index> __device__ __forceinline__ At place_on_axis(Index index, i64 axis) {
  using Int = typename Either<(sizeof(At) > sizeof(Index)), At, Index>::type;
  const Int size = (Int)axis;
  Int place = index;
  if constexpr (!kNotNegative) place = max(place < 0 ? place + size : place, Int(0));
  return (At)min(place, size - 1);
}
// One axis's step towards an element of a captured tensor. The sum of the steps of all axes is the element's distance, which load() takes.
template <class At, bool kNotNegative, class Index> __device__ __forceinline__ At step(Index index, const CapturedOperand &x, int axis) {
  return place_on_axis<At, kNotNegative>(index, x.size[axis]) * (At)x.stride[axis];
}
template <class T, class E> __device__ __forceinline__ T load(const CapturedOperand &x, i64 distance) {
  if constexpr (sizeof(E) == 2) // f16, bf16
    return T(to_float(E{__ldg((const unsigned short *)x.data + distance)}));
  else
    return (T)__ldg((const E *)x.data + distance);
}

// The values of a sequence and a head that were computed ahead, from position or difference 0 on.
template <class E, bool kBatch, bool kHead>
__device__ __forceinline__ const E *values_ahead(const CapturedOperand &x, const PlaceOfPair &at) {
  const E *values = (const E *)x.data;
  if constexpr (kBatch) values += at.b * x.stride[0];
  if constexpr (kHead) values += at.h * x.stride[1];
  return values;
}
// A value that was computed ahead. It is in range by construction, and elements of a tile lie at distances from one another that the
// compiler knows, so that it finds those that several pairs share. kFetchable: registers may hold the lane's values.
template <class E, Along kAlong, bool kBatch, bool kHead, bool kFetchable = false>
__device__ __forceinline__ E ahead(const CapturedOperand &x, const PlaceOfPair &at) {
  if constexpr (kFetchable) {
    if (at.fetched) {
      const float value = at.fetched[place_fetched<kAlong>(at)];
      if constexpr (E(0.5f) == E(0)) return (E)__float_as_int(value); // an integer of 32 bits
      return E(value);
    }
  }
  const E *values = values_ahead<E, kBatch, kHead>(x, at);
  if constexpr (kAlong == Along::query) return __ldg(values + (i64)at.query.first + at.query.step);
  if constexpr (kAlong == Along::key) return __ldg(values + (i64)at.key.first + at.key.step);
  return __ldg(values + ((i64)at.query.first - at.key.first) + (at.query.step - at.key.step));
}

// Reals.
// x // y is PyTorch's, from the exact remainder: where x / y is rounded up to an integer, its floor would be one too large.
template <Functions kFunctions, class T> struct Reals;
template <Functions kFunctions> struct Reals<kFunctions, double> {
  using T = double;
  static __device__ __forceinline__ T add(T x, T y) { return rounded_sum(x, y); }
  static __device__ __forceinline__ T subtract(T x, T y) { return rounded_sum(x, -y); }
  static __device__ __forceinline__ T multiply(T x, T y) { return rounded_product(x, y); }
  static __device__ __forceinline__ T divide(T x, T y) { return x / y; }
  static __device__ __forceinline__ T floor_divide(T x, T y) {
    if (y == 0) return x / y;
    const T rest = ::fmod(x, y), quotient = subtract(subtract(x, rest) / y, T(rest != 0 && (rest < 0) != (y < 0)));
    return quotient == 0 ? ::copysign(T(0), x / y) : ::floor(quotient) + T(quotient - ::floor(quotient) > T(0.5));
  }
  static __device__ __forceinline__ T trunc_remainder(T x, T y) { return ::fmod(x, y); }
  static __device__ __forceinline__ T remainder(T x, T y) {
    const T r = ::fmod(x, y);
    return r != 0 && (r < 0) != (y < 0) ? r + y : r;
  }
  static __device__ __forceinline__ T minimum(T x, T y) { return x != x || x < y ? x : y; }
  static __device__ __forceinline__ T maximum(T x, T y) { return x != x || x > y ? x : y; }
  static __device__ __forceinline__ T negate(T x) { return -x; }
  static __device__ __forceinline__ T absolute(T x) { return ::fabs(x); }
  static __device__ __forceinline__ T sign(T x) { return T((x > 0) - (x < 0)); }
  static __device__ __forceinline__ T power(T x, T y) { return ::pow(x, y); }
  static __device__ __forceinline__ T exp(T x) { return ::exp(x); }
  static __device__ __forceinline__ T exp2(T x) { return ::exp2(x); }
  static __device__ __forceinline__ T expm1(T x) { return ::expm1(x); }
  static __device__ __forceinline__ T log(T x) { return ::log(x); }
  static __device__ __forceinline__ T log2(T x) { return ::log2(x); }
  static __device__ __forceinline__ T log1p(T x) { return ::log1p(x); }
  static __device__ __forceinline__ T sqrt(T x) { return ::sqrt(x); }
  static __device__ __forceinline__ T rsqrt(T x) { return 1 / ::sqrt(x); }
  static __device__ __forceinline__ T sin(T x) { return ::sin(x); }
  static __device__ __forceinline__ T cos(T x) { return ::cos(x); }
  static __device__ __forceinline__ T tan(T x) { return ::tan(x); }
  static __device__ __forceinline__ T asin(T x) { return ::asin(x); }
  static __device__ __forceinline__ T acos(T x) { return ::acos(x); }
  static __device__ __forceinline__ T atan(T x) { return ::atan(x); }
  static __device__ __forceinline__ T atan2(T x, T y) { return ::atan2(x, y); }
  static __device__ __forceinline__ T sinh(T x) { return ::sinh(x); }
  static __device__ __forceinline__ T cosh(T x) { return ::cosh(x); }
  static __device__ __forceinline__ T tanh(T x) { return ::tanh(x); }
  static __device__ __forceinline__ T asinh(T x) { return ::asinh(x); }
  static __device__ __forceinline__ T acosh(T x) { return ::acosh(x); }
  static __device__ __forceinline__ T atanh(T x) { return ::atanh(x); }
  static __device__ __forceinline__ T erf(T x) { return ::erf(x); }
  static __device__ __forceinline__ T erfc(T x) { return ::erfc(x); }
  static __device__ __forceinline__ T sigmoid(T x) { return 1 / (1 + ::exp(-x)); }
  static __device__ __forceinline__ T floor(T x) { return ::floor(x); }
  static __device__ __forceinline__ T ceil(T x) { return ::ceil(x); }
  static __device__ __forceinline__ T trunc(T x) { return ::trunc(x); }
  static __device__ __forceinline__ T round(T x) { return ::rint(x); }
  static __device__ __forceinline__ T arccosh_from_1(T x) {
    T unused;
    return arccosh(x, unused);
  }
};
template <Functions kFunctions> struct Reals<kFunctions, float> {
  using T = float;
  static constexpr bool kFull = kFunctions == Functions::full; // otherwise special-function instructions serve, with errors below 2^-21
  static __device__ __forceinline__ T add(T x, T y) { return rounds_each(kFunctions) ? rounded_sum(x, y) : x + y; }
  static __device__ __forceinline__ T subtract(T x, T y) { return rounds_each(kFunctions) ? rounded_sum(x, -y) : x - y; }
  static __device__ __forceinline__ T multiply(T x, T y) { return rounds_each(kFunctions) ? rounded_product(x, y) : x * y; }
  static __device__ __forceinline__ T divide(T x, T y) {
    if constexpr (kFull) return __fdiv_rn(x, y);
    T z;
    asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
  }
  static __device__ __forceinline__ T floor_divide(T x, T y) {
    if (y == 0) return __fdiv_rn(x, y);
    const T rest = ::fmodf(x, y), quotient = rounded_sum(__fdiv_rn(rounded_sum(x, -rest), y), -T(rest != 0 && (rest < 0) != (y < 0)));
    return quotient == 0 ? ::copysignf(T(0), __fdiv_rn(x, y)) : ::floorf(quotient) + T(quotient - ::floorf(quotient) > T(0.5));
  }
  static __device__ __forceinline__ T trunc_remainder(T x, T y) { return ::fmodf(x, y); }
  static __device__ __forceinline__ T remainder(T x, T y) {
    const T r = ::fmodf(x, y);
    return r != 0 && (r < 0) != (y < 0) ? r + y : r;
  }
  static __device__ __forceinline__ T minimum(T x, T y) {
#if __CUDA_ARCH__ >= 800
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
    return x;
#else
    return x != x || x < y ? x : y;
#endif
  }
  static __device__ __forceinline__ T maximum(T x, T y) {
#if __CUDA_ARCH__ >= 800
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
    return x;
#else
    return x != x || x > y ? x : y;
#endif
  }
  static __device__ __forceinline__ T negate(T x) { return -x; }
  static __device__ __forceinline__ T absolute(T x) { return ::fabsf(x); }
  static __device__ __forceinline__ T sign(T x) { return T((x > 0) - (x < 0)); }
  static __device__ __forceinline__ T power(T x, T y) { return ::powf(x, y); }
  static __device__ __forceinline__ T exp(T x) { return ::expf(x); }
  static __device__ __forceinline__ T exp2(T x) { return kFull ? ::exp2f(x) : strobe::exp2(x); }
  static __device__ __forceinline__ T expm1(T x) { return ::expm1f(x); }
  static __device__ __forceinline__ T log(T x) { return kFull ? ::logf(x) : __log2f(x) * kLn2<float>; }
  static __device__ __forceinline__ T log2(T x) { return kFull ? ::log2f(x) : __log2f(x); }
  static __device__ __forceinline__ T log1p(T x) { return ::log1pf(x); }
  static __device__ __forceinline__ T sqrt(T x) {
    if constexpr (kFull) return __fsqrt_rn(x);
    asm("sqrt.approx.f32 %0, %0;" : "+f"(x));
    return x;
  }
  static __device__ __forceinline__ T rsqrt(T x) { return kFull ? __fdiv_rn(1, __fsqrt_rn(x)) : ::rsqrtf(x); }
  static __device__ __forceinline__ T sin(T x) { return ::sinf(x); }
  static __device__ __forceinline__ T cos(T x) { return ::cosf(x); }
  static __device__ __forceinline__ T tan(T x) { return ::tanf(x); }
  static __device__ __forceinline__ T asin(T x) { return ::asinf(x); }
  static __device__ __forceinline__ T acos(T x) { return ::acosf(x); }
  static __device__ __forceinline__ T atan(T x) { return ::atanf(x); }
  static __device__ __forceinline__ T atan2(T x, T y) { return ::atan2f(x, y); }
  static __device__ __forceinline__ T sinh(T x) { return ::sinhf(x); }
  static __device__ __forceinline__ T cosh(T x) { return ::coshf(x); }
  static __device__ __forceinline__ T tanh(T x) {
    if constexpr (kFull) return ::tanhf(x);
    T y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1 + strobe::exp2(2.88539008177792681472f * x)));
    const T u = x * x, series = fmaf(u, fmaf(u, T(2.0 / 15), T(-1.0 / 3)), T(1)) * x; // below 1/8, where 1 - 2 y would cancel
    return fabsf(x) < T(0.125) ? series : fmaf(T(-2), y, T(1));
  }
  static __device__ __forceinline__ T asinh(T x) { return ::asinhf(x); }
  static __device__ __forceinline__ T acosh(T x) { return ::acoshf(x); }
  static __device__ __forceinline__ T atanh(T x) { return ::atanhf(x); }
  static __device__ __forceinline__ T erf(T x) { return ::erff(x); }
  static __device__ __forceinline__ T erfc(T x) { return ::erfcf(x); }
  static __device__ __forceinline__ T sigmoid(T x) {
    if constexpr (kFull) return __fdiv_rn(1, 1 + ::expf(-x));
    T y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1 + strobe::exp2(-kLog2e<float> * x)));
    return y;
  }
  static __device__ __forceinline__ T floor(T x) { return ::floorf(x); }
  static __device__ __forceinline__ T ceil(T x) { return ::ceilf(x); }
  static __device__ __forceinline__ T trunc(T x) { return ::truncf(x); }
  static __device__ __forceinline__ T round(T x) { return ::rintf(x); }
  static __device__ __forceinline__ T arccosh_from_1(T x) {
    T unused;
    if constexpr (kFull) return arccosh(x, unused);
    return arccosh2_approximate(x, unused) * kLn2<float>;
  }
};

} // namespace strobe
