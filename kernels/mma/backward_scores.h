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

// LSE of the queries in this lane's columns of a block: in exp2's unit; with a bias, where it may be as large as numbers go, natural, and what
// rounding took from it (kernels/simt/settle.h) in exp2's unit.
struct RowLse {
  float lse[4], excess[4];
};

// S^T -> P^T, of keys from j on and queries from i on; lse(x, n): a RowLse of block n.
// kSlope (for a function of q.k): P goes into `P`, and s becomes P times the function's slope; else s becomes P.
template <Features F, bool kMasked, bool kSlope, int kM, int kN, class Lse>
__device__ __forceinline__ void probabilities(Accumulator (&s)[kM][kN], Accumulator (&P)[kM][kN], const Scores<F, float> &scores, i32 head,
                                              i32 i, i32 j, i32 limit, const Lse &lse) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    RowLse l;
    lse(l, n);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        auto row = scores.row(i + 16 * n + tile::lane_column(c, e), head);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float &x = s[m][n].x[c][2 * r + e], slope = 1;
            i32 key = j + 16 * m + tile::lane_row(r);
            float p = kSlope ? scores.score(x, row, key, kMasked, limit, slope) : scores.score(x, row, key, kMasked, limit);
            bool hidden = (kMasked || F.mask || F.bias) && p == minus_infinity<float>();
            p = exp2(F.bias ? fmaf(p - l.lse[2 * c + e], scores.unit, -l.excess[2 * c + e]) : fmaf(p, scores.unit, -l.lse[2 * c + e]));
            if (hidden) p = 0; // LSE may be no number
            if constexpr (kSlope) P[m][n].x[c][2 * r + e] = p;
            x = kSlope ? p * slope : p;
          }
        }
      }
    }
  }
}

} // namespace strobe::mma
