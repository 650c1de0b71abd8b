// FP32 products from TF32 products: x = hi + lo, x y = hi hi + (hi lo + lo hi); lo lo is below FP32's precision. Tensor cores truncate as
// they add, so they add at most 32 products, the small ones first. The sums of these are then added in FP32.
//
// The order of the inner axis is free. Both operands are read such that 16-byte loads are whole fragments, and an accumulator becomes a
// left operand without a change of layout.
#pragma once
#include "tf32.h"

namespace strobe::tile::tf32 {

using tile::Accumulator;

// Operands of mma.m16n8k8.
template <int n> struct Split {
  u32 hi[n], lo[n];
  template <int kProducts> __device__ __forceinline__ void set(int i, float x) {
    if constexpr (kProducts == 1) {
      hi[i] = round_to_tf32(x);
    } else {
      hi[i] = __float_as_uint(x) + 0x1000 & 0xFFFFE000;    // rounds like round_to_tf32, in half of its instructions; NaN makes lo NaN
      lo[i] = __float_as_uint(x - __uint_as_float(hi[i])); // exact
    }
  }
};
using Left = Split<4>;  // 16x8
using Right = Split<2>; // 8x8

// How q.k is summed. Each sum takes 8 products at a time, because truncation of longer sums would show in the exponential. The sums have
// the same bits in the forward, where Q is the left operand, and in the backward, where K is the left operand and its low part is therefore
// multiplied last. All other sums take 32 products at a time.
enum class Sum { of_32, of_scores, of_scores_transposed };

// d += a b over an inner axis of 8 kSteps.
template <int kProducts, Sum kSum = Sum::of_32, int kSteps>
__device__ __forceinline__ void multiply_add(float (&d)[4], const Left (&a)[kSteps], const Right (&b)[kSteps]) {
  constexpr int kRun = kSum == Sum::of_32 ? kSteps : 1;
#pragma unroll
  for (int first = 0; first < kSteps; first += kRun) {
    float sum[4] = {};
    if constexpr (kProducts == 3) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int k = first; k < first + kRun; ++k) {
          if ((i == 0) == (kSum == Sum::of_scores_transposed))
            mma_m16n8k8_tf32(sum, a[k].hi, b[k].lo);
          else
            mma_m16n8k8_tf32(sum, a[k].lo, b[k].hi);
        }
      }
    }
#pragma unroll
    for (int k = first; k < first + kRun; ++k) mma_m16n8k8_tf32(sum, a[k].hi, b[k].hi);
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] += sum[i];
  }
}

// s += A transpose(B). Both are kInner wide and given by their addresses in shared memory.
template <int kInner, int kProducts, Sum kSum = Sum::of_32, int kM, int kN>
__device__ __forceinline__ void multiply_rows(Accumulator (&s)[kM][kN], u32 a, u32 b) {
  // kWidth: columns at a time. The backward (transposed scores) has few registers.
  constexpr int kWidth = kSum == Sum::of_scores_transposed ? 16 : 32, kLoads = kWidth / 16;
  Rows<kInner> A(a), B(b);
#pragma unroll 1
  for (int c = 0; c < kInner; c += kWidth) {
    Left x[kM][2 * kLoads];
#pragma unroll
    for (int k = 0; k < kLoads * kM; ++k) {
      float top[4], bottom[4];
      A.load(top, 16 * (k / kLoads), c + 16 * (k % kLoads));
      A.load(bottom, 16 * (k / kLoads) + 8, c + 16 * (k % kLoads));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Left &f = x[k / kLoads][2 * (k % kLoads) + i / 2];
        f.set<kProducts>(2 * (i % 2), top[i]);
        f.set<kProducts>(2 * (i % 2) + 1, bottom[i]);
      }
    }
#pragma unroll
    for (int n = 0; n < 2 * kN; ++n) {
      Right y[2 * kLoads];
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        float row[4];
        B.load(row, 8 * n, c + 16 * k);
#pragma unroll
        for (int i = 0; i < 4; ++i) y[2 * k + i / 2].set<kProducts>(i % 2, row[i]);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) multiply_add<kProducts, kSum>(s[m][n / 2].x[n % 2], x[m], y);
    }
  }
}

// Turns adjacent blocks, from `first` on, into left operands. In each 8 columns, columns 2t and 2t+1 become t and t+4 of the inner axis.
template <int kProducts, int kSteps> __device__ __forceinline__ void set_left(Left (&x)[kSteps], const Accumulator *first) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[k].set<kProducts>(2 * (i % 2) + i / 2, first[k / 2].x[k % 2][i]);
  }
}

// The layout of a sum of multiply_pairs. A lane holds the 8 adjacent columns 8t ... 8t+7 of the c-th 32 columns. element() returns the k-th
// of these, which is element e = k / 4 of accumulator k % 4.
__device__ __forceinline__ int first_column() { return 8 * (tile::lane_id() & 3); }
template <int kM, int kC> __device__ __forceinline__ float &element(Accumulator (&d)[kM][kC], int m, int r, int c, int k) {
  return d[m][2 * c + k % 4 / 2].x[k % 2][2 * r + k / 4];
}

// Sets y = f(y, there, x) for each y of a row in memory, where x is the element of d in row r of block m. `there` is true if f may read y:
// `reads` is set and the column exists. Only f reads y: if y were read earlier, it would not stay in registers. kAligned: columns are
// adjacent at 16-byte addresses, and their number is a multiple of 4.
template <bool kAligned, int kM, int kC, class F>
__device__ __forceinline__ void update_row(Accumulator (&d)[kM][kC], int m, int r, float *row, i64 stride, i32 columns, bool reads, F &&f) {
#pragma unroll
  for (int k = 0; k < kC; ++k) {
    const i32 column = 32 * (k / 2) + first_column() + 4 * (k % 2);
    u32 x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float &y = row[(column + e) * (kAligned ? 1 : stride)];
      x[e] = __float_as_uint(f(y, reads && column + e < columns, element(d, m, r, k / 2, 4 * (k % 2) + e)));
    }
    if constexpr (kAligned) {
      if (column < columns) store_global(row + column, x);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (column + e < columns) row[(column + e) * stride] = __uint_as_float(x[e]);
      }
    }
  }
}

// Stores row r of block m, times factor, to memory. add: adds it to the row in memory instead.
template <bool kAligned, int kM, int kC>
__device__ __forceinline__ void store_row(Accumulator (&d)[kM][kC], int m, int r, float factor, float *row, i64 stride, i32 columns,
                                          bool add = false) {
  update_row<kAligned>(d, m, r, row, stride, columns, add,
                       [&](const float &y, bool there, float x) { return there ? fmaf(x, factor, y) : x * factor; });
}

// d += x times the 8 kSteps rows of B that begin at `row`.
template <int kColumns, int kProducts, int kSteps, int kM, int kC>
__device__ __forceinline__ void multiply_pairs(Accumulator (&d)[kM][kC], const Left (&x)[kM][kSteps], const Pairs<kColumns> &B, int row,
                                               int column = 0) {
#pragma unroll
  for (int c = 0; c < kC / 2; ++c) {
    float rows[kSteps][2][4];
#pragma unroll
    for (int k = 0; k < kSteps; ++k) B.load(rows[k], row + 8 * k, column + 32 * c);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      Right y[kSteps];
#pragma unroll
      for (int k = 0; k < 2 * kSteps; ++k) y[k / 2].set<kProducts>(k % 2, rows[k / 2][k % 2][j]);
#pragma unroll
      for (int m = 0; m < kM; ++m) multiply_add<kProducts>(d[m][2 * c + j / 2].x[j % 2], x[m], y);
    }
  }
}

} // namespace strobe::tile::tf32
