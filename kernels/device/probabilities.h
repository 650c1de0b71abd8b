// P in the backward, from S transposed: rows are keys, columns are queries.
#pragma once
#include "../tile/registers.h"
#include "scores.h"

namespace strobe {

// What `probabilities` does with the derivative of the function of q.k.
enum class Slope { none, times_p, apart };

// Turns S^T into P^T, for keys from j on and queries from i on. Without a function of q.k, s becomes P. With one (kSlope), P is written to
// `P`, and s becomes P times the function's derivative, or the derivative alone. lse(n) returns an object; its lse(c, e) is the LSE, in
// exp2's unit, of the query in this lane's column (c, e) of block n. kExact: LSE is natural, and correction(c, e) is its rounding error
// (settle_row.h), in exp2's unit. kLseIsNumber: LSE is no NaN, so that what is hidden needs no look: exp2(-inf) is 0. kAsks: the function
// of the mask has to be asked.
template <Features F, bool kMasked, Slope kSlope, bool kExact, bool kLseIsNumber = false, bool kAsks = true, int kM, int kN,
          Functions kFunctions, class Lse>
__device__ __forceinline__ void probabilities(tile::Accumulator (&s)[kM][kN], tile::Accumulator (&P)[kM][kN],
                                              const Scores<F, float, kFunctions> &scores, i32 head, i32 i, i32 j, i32 limit,
                                              const Lse &lse) {
  const float natural = natural_factor<F>(scores.scale);
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const auto l = lse(n);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        auto row = scores.row(i + 16 * n + tile::lane_column(c, e), head);
        const float own = l.lse(c, e), correction = kExact ? l.correction(c, e) : 0.0f;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float &x = s[m][n].x[c][2 * r + e], slope = 1;
            i32 key = j + 16 * m + tile::lane_row(r);
            float p;
            if constexpr (kAsks) {
              p = kSlope != Slope::none ? scores.score(x, row, key, kMasked, limit, slope) : scores.score(x, row, key, kMasked, limit);
            } else {
              const typename Scores<F, float, kFunctions>::InMemory given{scores, row, key};
              p = kSlope != Slope::none ? scores.score(x, row, key, given, kMasked, limit, slope, false)
                                        : scores.score(x, row, key, (float)scores.distance(row.i, key), given, kMasked, limit, false);
            }
            bool hidden = !kLseIsNumber && (kMasked || F.hides()) && p == minus_infinity<float>();
            if constexpr (kExact && kFunctions == Functions::full)
              p = probability(p, natural, own, correction);
            else
              p = exp2(kExact ? fmaf(fmaf(p, natural, -own), kLog2e<float>, -correction) : fmaf(p, scores.unit, -own));
            if (hidden) p = 0; // LSE may be NaN
            if constexpr (kSlope != Slope::none) P[m][n].x[c][2 * r + e] = p;
            x = kSlope == Slope::apart ? slope : kSlope == Slope::times_p ? p * slope : p;
          }
        }
      }
    }
  }
}

} // namespace strobe
