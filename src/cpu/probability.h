// P = e^(score - LSE), computed again from a row's LSE, in the backward and for the sums of P's columns.
#pragma once
#include "scores.h"

namespace strobe::inline STROBE_ISA {

// A row's LSE (natural) as two numbers: LSE = lse * unit + excess.
template <class T> struct RowLse {
  T lse, excess;
};

// Whether LSE's rounding error, half its last bit, is large enough to matter in P: 1e-6 or more (FP64: 1e-12; 16 bits: 6e-5).
template <class T> STROBE_INLINE bool is_large(const Problem &p, T lse) {
  const double large = p.dtype == DType::f64 ? 1e4 : p.dtype == DType::f32 ? 16 : 1024;
  return __builtin_fabs(double(lse)) > large && __builtin_isfinite(lse);
}

// In FP32, the difference of a score and LSE, if both are of the order of tens, is rounded to their last bit. If scores are nearly the
// same, P has the same error in all rows. So a power of two is taken out first [Cody & Waite 1980]: P = 2^n e^(s - (lse + n ln 2) -
// excess). Here lse and the high part of ln 2 are multiples of 2^-9, so that lse + n ln 2 is exact. If LSE is too large for that, s - lse
// is computed first, which is exact for scores of the same size. CPUs without fused multiply-adds compute the exponent in FP64. Arithmetics
// in FP64, and those that round P to 16 bits, need none of this.
template <class Math> struct Probability {
  using T = typename Math::Real;
  using V = Vec<T>;
  static constexpr bool kExact = sizeof(T) == 4 && Math::kExactPower;
  static constexpr double kSteps = 512, kLarge = 16384; // lse has steps of 2^-9; from kLarge on s - lse comes first

  V factor, unit, lse, excess, high, low; // P = e^((s * factor - lse) * unit - excess); ln 2 = high + low

  // both: the natural LSE, returned as two parts. With a partial part, 16 bits and FP64 keep `lse` in the unit of the scores.
  static STROBE_INLINE RowLse<T> row(const Head<T> &head, double both) {
    if (!__builtin_isfinite(both)) return {T(both), T(0)};
    const double unit = own_unit(head) ? double(head.measure()) : 1;
    const T lse = kExact && __builtin_fabs(both) < kLarge ? T(__builtin_rint(both * kSteps) / kSteps) : T(both / unit);
    return {lse, T(both - double(lse) * unit)};
  }

  STROBE_INLINE Probability(const Head<T> &head, const T *row_lse, const T *row_excess)
      : factor(own_unit(head) ? T(1) : head.measure()), unit(own_unit(head) ? head.unit : kLog2e<T>), lse(V::load(row_lse)),
        excess(V::load(row_excess)) {
    if constexpr (kExact) {
      const auto large = abs(lse) >= V(T(kLarge));
      high = select(large, V(T(0)), V(T(0.693359375)));
      low = select(large, V(kLn2<T>), V(T(-2.12194440e-4)));
    } else {
      excess *= V(kLog2e<T>);
    }
  }

  STROBE_INLINE V operator()(V score) const {
    if constexpr (!kExact) {
      return Math::power(fma(score, factor, -lse) * unit - excess);
    } else {
      const V x = fma(score, factor, -lse) - excess;
#if defined(__FP_FAST_FMAF)
      const V shifted = x * unit + V(kIntegers), n = shifted - V(kIntegers);
      const V rest = fma(score, factor, -(n * high + lse)) - n * low - excess;
#else
      typedef double Doubles __attribute__((vector_size(2 * STROBE_VECTOR_BYTES)));
      const auto doubles = [](V x) __attribute__((always_inline)) { return __builtin_convertvector(x.v, Doubles); };
      const Doubles exact = doubles(score) * doubles(factor) - doubles(lse) - doubles(excess);
      const V shifted = V(__builtin_convertvector(exact * kLog2e<double>, typename V::Raw)) + V(kIntegers), n = shifted - V(kIntegers);
      const V rest(__builtin_convertvector(exact - doubles(n) * kLn2<double>, typename V::Raw));
#endif
      return select(x < V(kLeastExponent), V(T(0)), times_power_of_2(exp_fraction(rest), n, shifted)); // a smaller x may be infinite
    }
  }

private:
  static STROBE_INLINE bool own_unit(const Head<T> &head) { return !kExact && head.p->part.partial; }
};

} // namespace strobe::inline STROBE_ISA
