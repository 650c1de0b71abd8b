// Scores of the backward, transposed: rows are keys, columns are queries.
#pragma once
#include "../attention/scores.h"
#include "../tile/shared.h"

namespace strobe::mma {

using tile::Accumulator;
using tile::Blocks;
using tile::Left;
using tile::Right;

// s += rows * transpose(columns), both kInner wide; their addresses in shared memory. kShort: as a loop, for code that seldom runs.
template <class T, int kInner, bool kShort, int kM, int kN>
__device__ __forceinline__ void multiply(Accumulator (&s)[kM][kN], u32 rows, u32 columns) {
  auto step = [&](const Blocks<Left, kInner> &A, const Blocks<Right, kInner> &B, int column) {
    Left x[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) x[m] = A.load(16 * m, column);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      Right y = B.load(16 * n, column);
#pragma unroll
      for (int m = 0; m < kM; ++m) tile::multiply_add<T>(s[m][n], x[m], y);
    }
  };
  if constexpr (kShort) {
#pragma unroll 1
    for (int k = 0; k < kInner / 16; ++k) step(Blocks<Left, kInner>(rows, 16 * k), Blocks<Right, kInner>(columns, 16 * k), 0);
  } else {
    Blocks<Left, kInner> A(rows);
    Blocks<Right, kInner> B(columns);
#pragma unroll
    for (int k = 0; k < kInner / 16; ++k) step(A, B, 16 * k);
  }
}

// What `probabilities` makes of a function's slope.
enum class Slope { none, times_p, apart };

// S^T -> P^T, of keys from j on and queries from i on; lse(n): what has lse(c, e), the LSE of the query in this
// lane's column (c, e) of block n, in exp2's unit. kExact: natural, and excess(c, e): what rounding took from it (settle_row.h), in exp2's
// unit. kSlope (for a function of q.k): P goes into `P`, and s becomes P times the function's slope, or the slope alone; else s becomes P.
template <Features F, bool kMasked, Slope kSlope, bool kExact, int kM, int kN, class Lse>
__device__ __forceinline__ void probabilities(Accumulator (&s)[kM][kN], Accumulator (&P)[kM][kN], const Scores<F, float> &scores, i32 head,
                                              i32 i, i32 j, i32 limit, const Lse &lse) {
  constexpr float kLog2e = 1.44269504088896340736f;
  const float natural = F.additive() ? 1.0f : scores.scale;
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    const auto l = lse(n);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        auto row = scores.row(i + 16 * n + tile::lane_column(c, e), head);
        const float own = l.lse(c, e), excess = kExact ? l.excess(c, e) : 0.0f;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float &x = s[m][n].x[c][2 * r + e], slope = 1;
            i32 key = j + 16 * m + tile::lane_row(r);
            float p = kSlope != Slope::none ? scores.score(x, row, key, kMasked, limit, slope) : scores.score(x, row, key, kMasked, limit);
            bool hidden = (kMasked || F.mask || F.bias) && p == minus_infinity<float>();
            p = exp2(kExact ? fmaf(fmaf(p, natural, -own), kLog2e, -excess) : fmaf(p, scores.unit, -own));
            if (hidden) p = 0; // LSE may be no number
            if constexpr (kSlope != Slope::none) P[m][n].x[c][2 * r + e] = p;
            x = kSlope == Slope::apart ? slope : kSlope == Slope::times_p ? p * slope : p;
          }
        }
      }
    }
  }
}

} // namespace strobe::mma
