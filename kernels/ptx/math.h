// Numbers on the GPU: conversions and special functions, each one instruction where such an instruction exists. No CUDA header is needed.
#pragma once
#include "../attention/base.h"

namespace strobe {

struct f16 {
  unsigned short bits;
};
struct e4m3 { // FP8: its numbers are only multiplied by tensor cores
  unsigned char bits;
};
struct bf16 {
  unsigned short bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float to_float(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

template <class T> struct Convert;
template <> struct Convert<float> {
  static __device__ __forceinline__ float from(float x) { return x; }
};
template <> struct Convert<double> {
  static __device__ __forceinline__ double from(double x) { return x; }
};
template <> struct Convert<f16> {
  static __device__ __forceinline__ f16 from(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
  }
};
template <> struct Convert<bf16> { // rounds to nearest even; NaN stays NaN
  static __device__ __forceinline__ bf16 from(float x) {
#if __CUDA_ARCH__ >= 800
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
#else
    u32 u = __float_as_uint(x);
    return {(unsigned short)(x != x ? 0x7FFF : (u + 0x7FFF + (u >> 16 & 1)) >> 16)};
#endif
  }
};

// a * b + c of packed pairs, with one rounding.
template <class T> __device__ __forceinline__ u32 multiply_add_pairs(u32 a, u32 b, u32 c);
template <> __device__ __forceinline__ u32 multiply_add_pairs<bf16>(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
template <> __device__ __forceinline__ u32 multiply_add_pairs<f16>(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Converts four E4M3 numbers to two pairs of FP16. Each pair holds adjacent numbers (sm_89).
__device__ __forceinline__ void pairs_of_e4m3(u32 x, u32 &first, u32 &second) {
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
      : "=r"(first), "=r"(second)
      : "r"(x));
}

// x & mask ^ y as one instruction, of which ptxas would make two if it knew mask and y.
__device__ __forceinline__ u32 and_xor(u32 x, u32 mask, u32 y) {
  u32 z;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(z) : "r"(x), "r"(mask), "r"(y));
  return z;
}

// A mask with all bits set in the halves that are not 0. Halves that are NaN give 0.
template <class T> __device__ __forceinline__ u32 nonzero_pairs(u32 x);
template <> __device__ __forceinline__ u32 nonzero_pairs<bf16>(u32 x) {
  u32 y;
  asm("set.neu.u32.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(0u));
  return y;
}
template <> __device__ __forceinline__ u32 nonzero_pairs<f16>(u32 x) {
  u32 y;
  asm("set.neu.u32.f16x2 %0, %1, %2;" : "=r"(y) : "r"(x), "r"(0u));
  return y;
}

// A mask with all bits set in the halves whose sign bit is set.
__device__ __forceinline__ u32 negative_pairs(u32 x) {
  u32 y;
  asm("prmt.b32 %0, %1, 0, 0xBB99;" : "=r"(y) : "r"(x));
  return y;
}

// A mask with all bits set in the halves where a < b. Both are at most 0x7C00 (infinity): FP16 orders such numbers like integers.
__device__ __forceinline__ u32 less_pairs(u32 a, u32 b) {
  u32 y;
  asm("set.lt.u32.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// Converts an element to the kernel's real type.
template <class T, class E> __device__ __forceinline__ T to_real(E x) {
  if constexpr (sizeof(E) == 8)
    return x;
  else
    return T(to_float(x));
}

// Element<DType>: the type of a strobe_dtype, and the type of its arithmetic.
template <i32 DType> struct Element;
template <> struct Element<1> {
  using type = float;
  using real = float;
};
template <> struct Element<2> {
  using type = f16;
  using real = float;
};
template <> struct Element<3> {
  using type = bf16;
  using real = float;
};
template <> struct Element<4> {
  using type = double;
  using real = double;
};

// The type in which results are stored: that of the dtype or, if kUnrounded, that of sums.
template <i32 DType, bool kUnrounded> struct ResultType {
  using type = typename Element<DType>::type;
};
template <i32 DType> struct ResultType<DType, true> {
  using type = typename Element<DType>::real;
};
template <i32 DType, bool kUnrounded> using Result = typename ResultType<DType, kUnrounded>::type;

template <class T> __device__ __forceinline__ T minus_infinity();
template <> __device__ __forceinline__ float minus_infinity<float>() { return __int_as_float(0xff800000); }
template <> __device__ __forceinline__ double minus_infinity<double>() { return __longlong_as_double(0xfff0000000000000ll); }

__device__ __forceinline__ float exp2(float x) { // ex2: an error of 2 ulp; results below 2^-126 are 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double exp2(double x) { return ::exp2(x); }
// 2^x with an error of 3 ulp in FP32, for an x that needs more digits than FP32 has.
__device__ __forceinline__ float exp2_in_fp32(double x) {
  const float high = (float)x, low = (float)(x - high);
  return exp2(high) * fmaf(fabsf(low) < 1 ? low : 0.0f, kLn2<float>, 1.0f); // low counts only if x is finite and within FP32's range
}
__device__ __forceinline__ float log2(float x) { return ::log2f(x); }
__device__ __forceinline__ double log2(double x) { return ::log2(x); }
__device__ __forceinline__ float abs(float x) { return fabsf(x); }
__device__ __forceinline__ double abs(double x) { return fabs(x); }
__device__ __forceinline__ float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
__device__ __forceinline__ double fma(double a, double b, double c) { return ::fma(a, b, c); }
// Returns x, but hides its value from the compiler. Values derived from it are then computed where they are used, and do not occupy
// registers earlier.
__device__ __forceinline__ i32 computed_here(i32 x) {
  asm volatile("" : "+r"(x));
  return x;
}
// Returns x, which must be the same in all lanes of the warp. The compiler then knows that it is, and may keep it in a uniform register.
__device__ __forceinline__ u32 uniform(u32 x) {
#if __CUDA_ARCH__ >= 800
  asm("redux.sync.max.u32 %0, %0, 0xFFFFFFFF;" : "+r"(x));
#endif
  return x;
}
// x * y and x + y, each rounded. The compiler may not fuse them into one operation.
__device__ __forceinline__ float rounded_product(float x, float y) { return __fmul_rn(x, y); }
__device__ __forceinline__ double rounded_product(double x, double y) { return __dmul_rn(x, y); }
__device__ __forceinline__ float rounded_sum(float x, float y) { return __fadd_rn(x, y); }
__device__ __forceinline__ double rounded_sum(double x, double y) { return __dadd_rn(x, y); }
// The exponent s * factor - (LSE + n ln 2), for P = exp(s * factor - LSE) = 2^n exp(exponent). The difference of two large numbers would be
// rounded to their last bits, so a power of two is first taken out of P [Cody & Waite 1980]. The high part of ln 2 has 9 bits, so that LSE
// + n ln 2 is exact, or rounded to the last bit of s.
__device__ __forceinline__ float without_power(float s, float factor, float lse, float n) {
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  return fmaf(n, -kLn2Low, fmaf(s, factor, -fmaf(n, kLn2High, lse)));
}
// P = exp(s * factor - LSE) * 2^-correction (kernels/device/settle_row.h).
__device__ __forceinline__ double probability(double s, double factor, double lse, double correction) {
  return exp2(fma(fma(s, factor, -lse), kLog2e<double>, -correction));
}
__device__ __forceinline__ float probability(float s, float factor, float lse, float correction) {
  constexpr float kMagic = 0x1.8p23f;
  const float x = fminf(fmaxf(fmaf(s, factor, -lse), -88.0f), 88.0f), shifted = fmaf(x, kLog2e<float>, kMagic), n = shifted - kMagic;
  const float of_rest = exp2(fmaf(without_power(s, factor, lse, n), kLog2e<float>, -correction));
  return of_rest * __uint_as_float((__float_as_uint(shifted) << 23) + 0x3F800000); // n >= -127
}
// x times probability(), also if P is below 2^-126, where FP32's exp2() is 0.
__device__ __forceinline__ double times_probability(double x, double s, double lse, double correction) {
  return x * probability(s, 1.0, lse, correction);
}
__device__ __forceinline__ float times_probability(float x, float s, float lse, float correction) {
  const float n = ::rintf(fminf(fmaxf((s - lse) * kLog2e<float>, -400.0f), 400.0f));
  return ::ldexpf(x * exp2(fmaf(without_power(s, 1.0f, lse, n), kLog2e<float>, -correction)), (i32)n);
}
// A row's LSE, m * factor + ln(l). An error of LSE becomes an error of the whole row of P. So in FP32 LSE is rounded only once: m * factor
// and the power of two in l are added together with their own rounding errors. The __f..._rn functions keep the compiler from making an
// fma, because an fma would make these errors wrong.
__device__ __forceinline__ double row_lse(double m, double factor, double l) { return m * factor + log2(l) * kLn2<double>; }
__device__ __forceinline__ float row_lse(float m, float factor, float l) {
  const float x = __fmul_rn(m, factor);
  if (!(l >= 0x1p-126f && l < -minus_infinity<float>() && abs(x) < -minus_infinity<float>())) return x + log2(l) * kLn2<float>;
  const i32 exponent = (i32)(__float_as_uint(l) - 0x3F3504F3) >> 23; // l = 2^exponent * rest, rest in [1/sqrt(2), sqrt(2))
  const float rest = __uint_as_float(__float_as_uint(l) - ((u32)exponent << 23)), y = __fmul_rn((float)exponent, kLn2<float>);
  const float sum = __fadd_rn(x, y), of_y = __fsub_rn(sum, x);
  const float lost = __fadd_rn(__fsub_rn(x, __fsub_rn(sum, of_y)), __fsub_rn(y, of_y));
  return sum + (log2(rest) * kLn2<float> + (lost + __fmaf_rn(m, factor, -x) + __fmaf_rn((float)exponent, kLn2<float>, -y)));
}
// What row_lse() rounded away: the exact LSE minus lse.
__device__ __forceinline__ double rest_of_lse(double m, double factor, double l, double lse) {
  const double x = __dmul_rn(m, factor), y = __dmul_rn(log2(l), kLn2<double>), sum = __dadd_rn(x, y), of_y = __dsub_rn(sum, x);
  const double lost = __dadd_rn(__dsub_rn(x, __dsub_rn(sum, of_y)), __dsub_rn(y, of_y));
  return __dadd_rn(__dsub_rn(sum, lse), __dadd_rn(lost, __fma_rn(m, factor, -x)));
}
__device__ __forceinline__ float rest_of_lse(float m, float factor, float l, float lse) {
  const float x = __fmul_rn(m, factor), y = log2(l) * kLn2<float>, sum = __fadd_rn(x, y), of_y = __fsub_rn(sum, x);
  const float lost = __fadd_rn(__fsub_rn(x, __fsub_rn(sum, of_y)), __fsub_rn(y, of_y));
  return __fadd_rn(__fsub_rn(sum, lse), __fadd_rn(lost, __fmaf_rn(m, factor, -x)));
}
// Adds x to `sum`; `lost` accumulates the rounding errors (Kahan 1965).
template <class T> __device__ __forceinline__ void add(T &sum, T &lost, T x) {
  const T y = x - lost, t = sum + y;
  lost = (t - sum) - y;
  sum = t;
}
// Joins the sums of two runs of keys: returns y * factor + x. x becomes the error of the two roundings (Knuth 1969, 4.2.2, theorem B), or 0
// if that error is not finite. last: x becomes the sum instead.
template <class T> __device__ __forceinline__ T join(T y, T factor, T &x, bool last) {
  const T scaled = rounded_product(y, factor), sum = rounded_sum(scaled, x), of_x = rounded_sum(sum, -scaled);
  const T lost = rounded_sum(rounded_sum(scaled, -rounded_sum(sum, -of_x)), rounded_sum(x, -of_x)) + fma(y, factor, -scaled);
  x = last ? sum : abs(lost) < -minus_infinity<T>() ? lost : T(0);
  return sum;
}
template <class T> __device__ __forceinline__ T select(bool condition, T a, T b) { return condition ? a : b; }

__device__ __forceinline__ float tanh(float x) { return ::tanhf(x); }
__device__ __forceinline__ double tanh(double x) { return ::tanh(x); }
__device__ __forceinline__ float tanh_approximate(float x) { // relative error 2^-11
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// tanh and its derivative, computed as 4 e / (1 + e)^2, e = exp(-2|x|), because 1 - tanh^2 would cancel where tanh saturates.
template <class T> __device__ __forceinline__ T tanh(T x, T &slope) {
  T e = exp2(T(-2.88539008177792681472) * abs(x)), inverse = T(1) / (T(1) + e);
  slope = T(4) * e * inverse * inverse;
  return tanh(x);
}
// tanh and its derivative for scores of 16-bit elements, with an absolute error of 2^-22.
template <bool kSmall = true> __device__ __forceinline__ float tanh_approximate(float x, float &slope) {
  const float e = exp2(-2.88539008177792681472f * fabsf(x));
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1 + e));
  slope = 4 * (e * inverse) * inverse;
  if constexpr (!kSmall) return copysignf((1 - e) * inverse, x);
  // 1 - e would cancel, so a series is used; its next term is 3e-7 of the sum.
  const float u = x * x, series = fmaf(u, fmaf(u, fmaf(u, -17.0f / 315, 2.0f / 15), -1.0f / 3), 1.0f) * x;
  return fabsf(x) < 0.25f ? series : copysignf((1 - e) * inverse, x);
}

// arccosh(max(y, 1)), and its derivative: 1 / sqrt(y^2 - 1), or 0 where y <= 1. NaN stays NaN. y^2 - 1 is rounded once; where it overflows,
// its root is y.
__device__ __forceinline__ float arccosh(float y, float &slope) {
  y = y < 1 ? 1 : y;
  const float sinh = fminf(__fsqrt_rn(fmaf(y, y, -1.0f)), y);
  slope = sinh > 0 ? __frcp_rn(sinh) : 0.0f;
  return ::log1pf((y - 1) + sinh);
}
// arccosh / ln 2, and the derivative of arccosh, by special-function instructions, for scores of 16-bit elements.
__device__ __forceinline__ float arccosh2_approximate(float y, float &slope) {
#if __CUDA_ARCH__ >= 800
  asm("max.NaN.f32 %0, %0, 0f3F800000;" : "+f"(y));
#else
  y = y < 1 ? 1 : y;
#endif
  float sinh, inverse, log2;
  asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(sinh) : "f"(fmaf(y, y, -1.0f)));
  sinh = fminf(sinh, y);
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(sinh));
  slope = sinh > 0 ? inverse : 0.0f;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(y + sinh)); // error 2^-22: absolute for results up to 2, relative beyond
  return log2;
}
__device__ __forceinline__ double arccosh(double y, double &slope) {
  double t = y < 1 ? 0.0 : y - 1, sinh = ::fmin(::sqrt(t * (t + 2)), t + 1);
  slope = sinh > 0 ? 1 / sinh : 0.0;
  return ::log1p(t + sinh);
}

} // namespace strobe
