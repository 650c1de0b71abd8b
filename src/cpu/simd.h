// A vector of lanes, made from the compiler's vector extension, and the few functions of vectors that attention needs. One definition
// serves SSE2, AVX2, AVX-512 and NEON: the translation unit sets STROBE_VECTOR_BYTES and the target flags.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../../kernels/attention/base.h"

#define STROBE_INLINE inline __attribute__((always_inline))

namespace strobe::inline STROBE_ISA {

// Calls f(Index<0>) ... f(Index<n - 1>), so that arrays indexed by the argument live in registers.
template <int i> struct Index {
  STROBE_INLINE constexpr operator int() const { return i; }
};
template <class F, int... i> STROBE_INLINE void unroll(F &&f, std::integer_sequence<int, i...>) { (f(Index<i>{}), ...); }
template <int n, class F> STROBE_INLINE void unroll(F &&f) { unroll(f, std::make_integer_sequence<int, n>{}); }
#define STROBE_UNROLL(i) [&](auto i) __attribute__((always_inline))

#define STROBE_VECTOR(T) T __attribute__((vector_size(STROBE_VECTOR_BYTES)))
#define STROBE_VECTOR_UNALIGNED(T) T __attribute__((vector_size(STROBE_VECTOR_BYTES), aligned(sizeof(T)), may_alias))

template <class T> struct Bits;
template <> struct Bits<float> {
  using Int = int32_t;
  typedef STROBE_VECTOR(float) Raw;
  typedef STROBE_VECTOR(int32_t) RawInt;
  typedef STROBE_VECTOR_UNALIGNED(float) Unaligned;
  static constexpr int kMantissa = 23, kBias = 127;
};
template <> struct Bits<double> {
  using Int = int64_t;
  typedef STROBE_VECTOR(double) Raw;
  typedef STROBE_VECTOR(int64_t) RawInt;
  typedef STROBE_VECTOR_UNALIGNED(double) Unaligned;
  static constexpr int kMantissa = 52, kBias = 1023;
};

template <class T> struct Vec {
  static constexpr int kLanes = STROBE_VECTOR_BYTES / sizeof(T);
  using Int = typename Bits<T>::Int;
  using Raw = typename Bits<T>::Raw;
  using RawInt = typename Bits<T>::RawInt;

  Raw v;

  Vec() = default;
  STROBE_INLINE explicit Vec(Raw raw) : v(raw) {}
  STROBE_INLINE Vec(T x) : v(x - Raw{}) {} // compilers recognise this as a broadcast
  STROBE_INLINE static Vec load(const T *p) { return Vec(Raw(*reinterpret_cast<const typename Bits<T>::Unaligned *>(p))); }
  STROBE_INLINE void store(T *p) const { *reinterpret_cast<typename Bits<T>::Unaligned *>(p) = v; }
  STROBE_INLINE static Vec iota() {
    Vec r;
    for (int i = 0; i < kLanes; ++i) r.v[i] = T(i);
    return r;
  }

  friend STROBE_INLINE Vec operator+(Vec a, Vec b) { return Vec(a.v + b.v); }
  friend STROBE_INLINE Vec operator-(Vec a, Vec b) { return Vec(a.v - b.v); }
  friend STROBE_INLINE Vec operator*(Vec a, Vec b) { return Vec(a.v * b.v); }
  friend STROBE_INLINE Vec operator/(Vec a, Vec b) { return Vec(a.v / b.v); }
  friend STROBE_INLINE Vec operator-(Vec a) { return Vec(-a.v); }
  STROBE_INLINE Vec &operator+=(Vec b) { return v += b.v, *this; }
  STROBE_INLINE Vec &operator*=(Vec b) { return v *= b.v, *this; }

  using Mask = RawInt; // all ones or all zeros per lane
  friend STROBE_INLINE Mask operator==(Vec a, Vec b) { return a.v == b.v; }
  friend STROBE_INLINE Mask operator<(Vec a, Vec b) { return a.v < b.v; }
  friend STROBE_INLINE Mask operator>=(Vec a, Vec b) { return a.v >= b.v; }
  friend STROBE_INLINE Mask operator<=(Vec a, Vec b) { return a.v <= b.v; }
  friend STROBE_INLINE Vec select(Mask m, Vec a, Vec b) { return Vec(m ? a.v : b.v); }
  friend STROBE_INLINE Vec max(Vec a, Vec b) { return Vec(a.v < b.v ? b.v : a.v); }
  friend STROBE_INLINE Vec abs(Vec a) { return Vec((Raw)((RawInt)a.v & ~((RawInt){} + (Int(1) << (8 * sizeof(T) - 1))))); }
};

// a b + c, with one rounding if the CPU has such an instruction. For a * b + c the compiler itself chooses one rounding or two. In two
// places that must have the same bits, it might choose differently, because a product has other uses or was moved out of a branch.
template <class T> STROBE_INLINE Vec<T> fma(Vec<T> a, Vec<T> b, Vec<T> c) {
  using Raw [[maybe_unused]] = typename Vec<T>::Raw; // for types without such an instruction
  [[maybe_unused]] constexpr bool kSingle = sizeof(T) == 4;
#if defined(__AVX512F__)
  if constexpr (kSingle) return Vec<T>((Raw)_mm512_fmadd_ps((__m512)a.v, (__m512)b.v, (__m512)c.v));
  return Vec<T>((Raw)_mm512_fmadd_pd((__m512d)a.v, (__m512d)b.v, (__m512d)c.v));
#elif defined(__FMA__)
  if constexpr (kSingle) return Vec<T>((Raw)_mm256_fmadd_ps((__m256)a.v, (__m256)b.v, (__m256)c.v));
  return Vec<T>((Raw)_mm256_fmadd_pd((__m256d)a.v, (__m256d)b.v, (__m256d)c.v));
#elif defined(__aarch64__)
  if constexpr (kSingle) return Vec<T>((Raw)vfmaq_f32((float32x4_t)c.v, (float32x4_t)a.v, (float32x4_t)b.v));
  return Vec<T>((Raw)vfmaq_f64((float64x2_t)c.v, (float64x2_t)a.v, (float64x2_t)b.v));
#else
  return a * b + c; // two roundings
#endif
}

template <class T> STROBE_INLINE T sum_of_lanes(Vec<T> x) {
  T lanes[Vec<T>::kLanes];
  x.store(lanes);
  for (int n = Vec<T>::kLanes / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) lanes[i] += lanes[i + n];
  return lanes[0];
}

// Whether any lane of a mask is set. (The mask is copied to a vector.)
template <class M> STROBE_INLINE bool any(M mask) {
#if defined(__AVX512DQ__)
  if constexpr (sizeof(mask[0]) == 4) return _mm512_movepi32_mask((__m512i)mask) != 0;
  if constexpr (sizeof(mask[0]) == 8) return _mm512_movepi64_mask((__m512i)mask) != 0;
#endif
  auto bits = mask[0];
  for (size_t i = 1; i < sizeof(mask) / sizeof(mask[0]); ++i) bits |= mask[i];
  return bits != 0;
}

// 2^r for r in [0, 1]: the minimax polynomial with p(0) = 1. The relative error is 8e-8 in float (3e-6 with degree 4) and 3e-18 in double.
template <int kDegree> STROBE_INLINE Vec<float> exp2_fraction(Vec<float> r) {
  if constexpr (kDegree == 4) {
    Vec<float> p = 0.013426684250649921047f;
    p = p * r + 0.052242474269121572457f;
    p = p * r + 0.24128020472272363696f;
    p = p * r + 0.69304484490814969104f;
    return p * r + 1.0f;
  }
  Vec<float> p = 0.0018671300819070081778f;
  p = p * r + 0.0090170302844367490406f;
  p = p * r + 0.055799913145968066977f;
  p = p * r + 0.24016445013606755314f;
  p = p * r + 0.69315131180752295536f;
  return p * r + 1.0f;
}
template <int kDegree> STROBE_INLINE Vec<double> exp2_fraction(Vec<double> r) {
  Vec<double> p = 6.2634652734225902742e-10;
  p = p * r + 6.5595298355172712178e-9;
  p = p * r + 1.025321230405209001e-7;
  p = p * r + 1.3208367308220049348e-6;
  p = p * r + 0.00001525317505379524616;
  p = p * r + 0.00015403512309733948746;
  p = p * r + 0.0013333558629562675936;
  p = p * r + 0.0096181290995508956128;
  p = p * r + 0.055504108665602238723;
  p = p * r + 0.24022650695906330315;
  p = p * r + 0.69314718055994592839;
  return p * r + 1.0;
}

// 2^x for x up to slightly above 0 (attention needs no more). 0 if 2^x is not a normal number, because many CPUs take a hundred cycles for
// a vector with a subnormal number. NaN stays NaN.
#if defined(__AVX512DQ__)
template <int kDegree = 5> STROBE_INLINE Vec<float> exp2(Vec<float> x) {
  constexpr int kFloor = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  Vec<float> r(Vec<float>::Raw(_mm512_reduce_ps((__m512)x.v, kFloor)));
  const __mmask16 normal = _mm512_cmp_ps_mask((__m512)x.v, _mm512_set1_ps(-126), _CMP_NLT_UQ);
  return Vec<float>(Vec<float>::Raw(_mm512_maskz_scalef_ps(normal, (__m512)exp2_fraction<kDegree>(r).v, (__m512)x.v)));
}
template <int kDegree = 11> STROBE_INLINE Vec<double> exp2(Vec<double> x) {
  constexpr int kFloor = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
  Vec<double> r(Vec<double>::Raw(_mm512_reduce_pd((__m512d)x.v, kFloor)));
  const __mmask8 normal = _mm512_cmp_pd_mask((__m512d)x.v, _mm512_set1_pd(-1022), _CMP_NLT_UQ);
  return Vec<double>(Vec<double>::Raw(_mm512_maskz_scalef_pd(normal, (__m512d)exp2_fraction<kDegree>(r).v, (__m512d)x.v)));
}
#else
template <int kDegree = 5, class T> STROBE_INLINE Vec<T> exp2(Vec<T> x) {
  using V = Vec<T>;
  using B = Bits<T>;
  const T magic = T(typename B::Int(3) << (B::kMantissa - 1)); // rounds to an integer in the low bits when added
  const T lowest = T(1) / 2 - B::kBias;                        // for x from here down, the exponent's bits are 0
  x = select(x < V(lowest), V(lowest), x);
  typename V::Raw shifted = (x.v - T(0.5)) + magic;
  V r = x - V(shifted - magic);
  typename V::RawInt exponent = ((typename V::RawInt)shifted + B::kBias) << B::kMantissa;
  return exp2_fraction<kDegree>(r) * V((typename V::Raw)exponent);
}
#endif

// e^r for |r| <= ln(2) / 2: the minimax polynomial with p(0) = p'(0) = 1. The relative error is 3e-9; with rounding 6e-8.
STROBE_INLINE Vec<float> exp_fraction(Vec<float> r) {
  Vec<float> p = 0.0013813144591881456f;
  p = p * r + 0.008369418826811692f;
  p = p * r + 0.04166845678553441f;
  p = p * r + 0.1666651479149428f;
  p = p * r + 0.4999999305073412f;
  return p * (r * r) + r + 1.0f; // 1 is added last, so that only that addition's rounding counts
}

// x 2^n, where shifted = n + kIntegers. n must be at least kLeastExponent / ln 2.
inline constexpr float kIntegers = 0x1.8p23f;   // rounds to an integer in the low bits when added
inline constexpr float kLeastExponent = -87.3f; // natural logarithm of the least normal number
#if defined(__AVX512DQ__)
STROBE_INLINE Vec<float> times_power_of_2(Vec<float> x, Vec<float> n, Vec<float>) {
  return Vec<float>(Vec<float>::Raw(_mm512_scalef_ps((__m512)x.v, (__m512)n.v)));
}
#else
STROBE_INLINE Vec<float> times_power_of_2(Vec<float> x, Vec<float>, Vec<float> shifted) {
  using V = Vec<float>;
  return x * V((V::Raw)(((V::RawInt)shifted.v + Bits<float>::kBias) << Bits<float>::kMantissa));
}
#endif

// tanh and its derivative, both without a difference that cancels: Cephes' rational form below 0.625, e^-2|x| above.
template <class T> STROBE_INLINE Vec<T> tanh(Vec<T> x, Vec<T> &slope) {
  using V = Vec<T>;
  V a = abs(x), z = x * x;
  V p = (V(T(-9.64399179425052238628e-1)) * z + T(-9.92877231001918586564e1)) * z + T(-1.61468768441708447952e3);
  V q = ((z + T(1.12811678491632931402e2)) * z + T(2.23548839060100448583e3)) * z + T(4.84406305325125486048e3);
  V small = x + x * z * p / q;
  V e = exp2(a * T(-2.88539008177792681472)), inverse = V(1) / (V(1) + e); // e = exp(-2 a)
  V large = V(1) - e * T(2) * inverse;
  large = select(x < V(0), -large, large);
  slope = select(a < V(T(0.625)), V(1) - small * small, e * T(4) * inverse * inverse);
  return select(a < V(T(0.625)), small, large);
}

template <class T> STROBE_INLINE Vec<T> sqrt(Vec<T> x) {
  T lanes[Vec<T>::kLanes]; // an array that the compiler turns into vectors
  x.store(lanes);
  for (T &lane : lanes) lane = sizeof(T) == 4 ? __builtin_sqrtf(lane) : __builtin_sqrt(lane);
  return Vec<T>::load(lanes);
}

// log(1 + f) for 1 + f in [sqrt(1/2), sqrt(2)): Cephes' polynomial in float; in double 2 artanh(f / (2 + f)) as a power series.
STROBE_INLINE Vec<float> log_fraction(Vec<float> f) {
  Vec<float> p = 7.0376836292e-2f;
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  return (p * f - 0.5f) * (f * f) + f;
}
STROBE_INLINE Vec<double> log_fraction(Vec<double> f) {
  const Vec<double> z = f / (f + 2.0), square = z * z;
  constexpr int kTerms = 12;
  Vec<double> p = 0.0;
  unroll<kTerms>(STROBE_UNROLL(i) { p = p * square + 2.0 / (2 * (kTerms - 1 - i) + 1); });
  return z * p;
}

// log2 of x >= 1, inf or NaN.
template <class T> STROBE_INLINE Vec<T> log2(Vec<T> x) {
  using V = Vec<T>;
  using B = Bits<T>;
  using RawInt = typename V::RawInt;
  const RawInt exponent = ((RawInt)x.v - (RawInt)V(T(0.70710678118654752440)).v) >> B::kMantissa;
  const V m((typename V::Raw)((RawInt)x.v - (exponent << B::kMantissa)));
  const V y = log_fraction(m - V(1)) * V(kLog2e<T>) + V(__builtin_convertvector(exponent, typename V::Raw));
  return select(x < V(T(__builtin_inf())), y, x);
}

// arccosh(max(y, 1)) / ln 2, and arccosh's derivative: 1 / sqrt(y^2 - 1), or 0 where y <= 1. Where y^2 overflows, the root is y.
template <class T> STROBE_INLINE Vec<T> arccosh2(Vec<T> y, Vec<T> &slope) {
  using V = Vec<T>;
  y = max(y, V(1));
  const V t = y - V(1), root = sqrt(t * (t + V(2))), sinh = select(root < y, root, y);
  slope = select(V(0) < sinh, V(1) / sinh, V(0));
  return log2(y + sinh);
}

} // namespace strobe::inline STROBE_ISA
