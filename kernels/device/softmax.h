// Online softmax of the rows of S that a lane holds. M is the reference of a row's exponents: P = exp2(exponent - M). M is the running
// maximum, or lags behind it by at most 8 (a factor of 2^8 in P), so that most tiles need no rescaling. S is an array of a warp's 16x16
// blocks, or a warpgroup's array.
#pragma once
#include "../ptx/math.h"
#include "../tile/registers.h"

namespace strobe {

// Forms of the exponent, the argument of exp2. The exponent is at(s, i, c), where c = constant(-M) and i is the element's index in a
// warpgroup's array. A row's M follows top(x), where x is the row's largest comparable(s, i). difference(x) converts the difference of two
// values of M to exp2's unit. Linear: M is in exp2's unit, which saves an instruction.
struct Linear {
  float unit;
  __device__ __forceinline__ float at(float s, int, float c) const { return __fmaf_rn(s, unit, c); }
  __device__ __forceinline__ float constant(float c) const { return c; }
  __device__ __forceinline__ float comparable(float s, int) const { return s; }
  __device__ __forceinline__ float top(float x) const { return x * unit; }
  __device__ __forceinline__ float difference(float x) const { return x; }
  __device__ __forceinline__ float from_natural(float x) const { return x / kLn2<float>; }
};
// Natural: M is in the unit of the scores. Scores may then be as large as FP32 allows.
struct Natural {
  __device__ __forceinline__ float at(float s, int, float c) const { return (s + c) * kLog2e<float>; }
  __device__ __forceinline__ float constant(float c) const { return c; }
  __device__ __forceinline__ float comparable(float s, int) const { return s; }
  __device__ __forceinline__ float top(float x) const { return x; }
  __device__ __forceinline__ float difference(float x) const { return x * kLog2e<float>; }
  __device__ __forceinline__ float from_natural(float x) const { return x; }
};
template <bool kNatural> __device__ __forceinline__ auto exponent_of(float unit) {
  if constexpr (kNatural)
    return Natural{};
  else
    return Linear{unit};
}

// Says where a row's sum is kept from tile to tile. OneSum keeps it in l. Over many keys the rounding error of one running sum would exceed
// FP32's bound, so other classes (kJoins) keep the sum and its rounding error in memory; l is then the current tile's sum, until join().
struct OneSum {
  static constexpr bool kJoins = false;
};

template <int kRows, class Totals = OneSum> struct RowSoftmax {
  static constexpr bool kJoins = Totals::kJoins;
  float M[kRows], l[kRows]; // l: the sum over the columns that this lane has seen
  float alpha[kRows];       // the last factor of l; O still has to be multiplied by it

  __device__ __forceinline__ RowSoftmax() {
#pragma unroll
    for (int row = 0; row < kRows; ++row) M[row] = minus_infinity<float>(), l[row] = 0, alpha[row] = 1;
  }

  // Updates M and l by a tile's maxima. There is no branch. O may still be in flight; it is rescaled later.
  template <bool kExact, class Tile, class Exponent> __device__ __forceinline__ void follow(const Tile &S, const Exponent &exponent) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float top = exponent.top(tile::row_max(largest(S, row, exponent))), before = M[row];
      const float now = kExact ? fmaxf(before, top) : top > before + 8.0f ? top : before;
      alpha[row] = now == before ? 1.0f : exp2(exponent.difference(before - now));
      M[row] = now;
      l[row] *= alpha[row];
    }
  }
  // Updates M and l of some rows only.
  template <class Tile, class Exponent>
  __device__ __forceinline__ void follow(const Tile &S, const Exponent &exponent, const bool (&rows)[kRows]) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float top = exponent.top(tile::row_max(largest(S, row, exponent))), before = M[row];
      const float now = rows[row] && top > before + 8.0f ? top : before;
      alpha[row] = now == before ? 1.0f : exp2(exponent.difference(before - now));
      M[row] = now;
      l[row] *= alpha[row];
    }
  }
  __device__ __forceinline__ bool moved() const {
    bool any = false;
#pragma unroll
    for (int row = 0; row < kRows; ++row) any = any || alpha[row] != 1.0f;
    return __any_sync(0xFFFFFFFFu, any);
  }
  template <class Sum> __device__ __forceinline__ void rescale(Sum &O) const {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int i = 0; i < tile::elements_of_row(O); ++i) tile::row_element(O, row, i) *= alpha[row];
    }
  }
  // Updates M and l once O is complete in registers, and rescales O. Nothing changes unless a row of the warp exceeds its M by too much.
  // Then all rows are updated, or with kOwn only the rows that exceed their M.
  template <bool kExact, bool kOwn = false, class Tile, class Exponent, class Sum>
  __device__ __forceinline__ void follow(const Tile &S, const Exponent &exponent, Sum &O) {
    float top[kRows];
    bool far = false;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      top[row] = exponent.top(largest(S, row, exponent));
      far |= top[row] > M[row] + (kExact ? 0.0f : 8 / exponent.difference(1));
    }
    if (!__any_sync(0xFFFFFFFFu, far)) return;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float before = M[row];
      float now = fmaxf(before, tile::row_max(top[row]));
      if constexpr (kOwn && !kExact) now = now > before + 8 / exponent.difference(1) ? now : before;
      alpha[row] = now == minus_infinity<float>() ? 1.0f : exp2(exponent.difference(before - now));
      M[row] = now;
      l[row] *= alpha[row];
      if constexpr (kJoins) {
        float x[2]; // the sum, and its rounding error
        Totals::load(row, x);
        x[0] *= alpha[row], x[1] *= alpha[row];
        Totals::store(row, x);
      }
    }
    rescale(O);
  }
  __device__ __forceinline__ void join() {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      float x[2];
      Totals::load(row, x);
      add(x[0], x[1], l[row]);
      Totals::store(row, x);
      l[row] = 0;
    }
  }
  // own_sum(): a row's sum over all tiles, of this lane's columns only. sum(): the same, of all lanes' columns.
  __device__ __forceinline__ float own_sum(int row) const {
    if constexpr (!kJoins) return l[row];
    float x[2];
    Totals::load(row, x);
    return x[0] - x[1];
  }
  __device__ __forceinline__ float sum(int row) const { return tile::row_sum(own_sum(row)); }

  // Replaces S by P in a warpgroup's array. Each row is added up in two sums.
  template <int N, class Exponent> __device__ __forceinline__ void exponentiate(float (&S)[N], const Exponent &exponent) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float c = exponent.constant(-reference(r));
      float x = l[r], y = 0;
#pragma unroll
      for (int j = 0; j < N / 4; ++j) {
        const int i = 4 * j + 2 * r;
        float &p = S[i], &q = S[i + 1];
        x += p = exp2(exponent.at(p, i, c));
        q = exp2(exponent.at(q, i + 1, c));
        y = j ? y + q : q;
      }
      l[r] = x + y;
    }
  }
  // Replaces S by P in the rows first and first + 1 of one block.
  template <class Exponent> __device__ __forceinline__ void exponentiate(tile::Accumulator &S, int first, const Exponent &exponent) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float c = exponent.constant(-reference(first + r));
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float &p = S.x[k / 2][2 * r + k % 2];
        p = exp2(exponent.at(p, 4 * (k / 2) + 2 * r + k % 2, c));
        l[first + r] += p;
      }
    }
  }

  // The value that is subtracted from scores: M, or 0 in a row that has seen no key yet, because -inf - -inf is NaN.
  __device__ __forceinline__ float reference(int row) const { return M[row] == minus_infinity<float>() ? 0.0f : M[row]; }

  // Whether all numbers of O and l are finite.
  template <class Sum> __device__ __forceinline__ bool finite(Sum &O) const {
    float zero = 0; // becomes NaN if a number is not finite
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int i = 0; i < tile::elements_of_row(O); ++i) zero = __fmaf_rn(tile::row_element(O, row, i), 0.0f, zero);
      zero += own_sum(row) * 0.0f;
    }
    return zero == 0;
  }

private:
  template <class Tile, class Exponent> static __device__ __forceinline__ float largest(const Tile &S, int row, const Exponent &exponent) {
    const auto of = [&](int i) { return exponent.comparable(tile::row_element(S, row, i), 4 * (i / 2) + 2 * row + i % 2); };
    float x = of(0), y = of(1);
#pragma unroll
    for (int i = 2; i < tile::elements_of_row(S); i += 2) x = fmaxf(x, of(i)), y = fmaxf(y, of(i + 1));
    return fmaxf(x, y);
  }
};

// The results of a row: the factor by which O must be multiplied, and the natural LSE, exact to 2 ulp. sink (in M's unit): one more term of
// the denominator; -inf if there is none.
struct RowEnd {
  float factor, lse;
};
__device__ __forceinline__ RowEnd row_end(float M, float l, float sink, bool natural = false) {
  const float unit = natural ? kLog2e<float> : 1.0f, top = fmaxf(M, sink);
  const float alpha = top == minus_infinity<float>() ? 0.0f : exp2((M - top) * unit);
  l *= alpha;
  if (sink != minus_infinity<float>()) l += exp2((sink - top) * unit);
  if (l == 0) return {0.0f, minus_infinity<float>()};
  const float log2_l = __log2f(l); // l is far below 2^126
  return {__fdividef(alpha, l), natural ? top + log2_l * kLn2<float> : (top + log2_l) * kLn2<float>};
}
// row_end() with FP32's full precision; here the sink is natural. If a sink is far above all scores, the whole row has the error of exp(M -
// sink), so the difference is taken in FP64.
__device__ __forceinline__ RowEnd precise_row_end(float M, float l, float sink, bool natural) {
  const double m = natural ? M * kLog2e<double> : (double)M, s = sink * kLog2e<double>;
  const bool sink_is_top = s > m;
  const double top = sink_is_top ? s : m;
  const float alpha = top == minus_infinity<double>() ? 0.0f : exp2_in_fp32(m - top);
  l *= alpha;
  if (sink != minus_infinity<float>()) l += exp2_in_fp32(s - top);
  if (l == 0) return {0.0f, minus_infinity<float>()};
  return {alpha / l, sink_is_top ? row_lse(sink, 1.0f, l) : row_lse(M, natural ? 1.0f : kLn2<float>, l)};
}

} // namespace strobe
