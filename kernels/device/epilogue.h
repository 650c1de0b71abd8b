// Stores results to global memory.
#pragma once
#include "../attention/arguments.h"
#include "../ptx/ldmatrix.h"
#include "../ptx/mma.h"

namespace strobe {

template <class T> __device__ __forceinline__ void add_to(T &o, float x) { o = Convert<T>::from(to_float(o) + x); }

// Adds x to an element of `out`. If the keys are split, adds it to the same element of the partial result of split number `split`.
template <class T> __device__ __forceinline__ void add_to_out(const ForwardArguments &a, i32 split, i32 b, i32 h, i64 row, i32 c, float x) {
  if (a.splits > 1)
    a.partial_out[(split * a.in.rows() + a.in.row_index(b, h, row)) * a.in.head_dim_v + c] += x;
  else
    add_to(*a.out.at<T>(b, h, row, c), x);
}

// A warp stores sixteen columns of eight rows. Of row g, lane 4g+t holds the pair of columns from 2t on (left) and the pair from 8 + 2t on
// (right). Two lanes exchange halves, so that each stores 8 bytes, and together they fill whole sectors. row: the address of the lane's row
// at the first of these columns. there: how many of the columns exist; 0 if the row does not exist.
template <class T> __device__ __forceinline__ void store_sixteen(T *row, i32 there, u32 left, u32 right) {
  const int lane = (int)threadIdx.x % 32, odd = lane % 2, column = 8 * odd + lane % 4 / 2 * 4;
  const u32 other = __shfl_xor_sync(0xFFFFFFFFu, odd ? left : right, 1);
  store_global_below(column, there, row + column, odd ? other : left, odd ? right : other);
}

// Stores a warp's rows of a warpgroup's sums x, times a factor. row: the warp's first row in the tensor; `rows` rows exist from there on.
template <class T, int kColumns>
__device__ __forceinline__ void store_rows(const Operand &out, i32 b, i32 h, i64 row, i32 rows, i32 columns, const float (&x)[kColumns / 2],
                                           float factor) {
  if (!out) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const i32 i = (i32)threadIdx.x % 32 / 4 + 8 * r;
    T *target = out.at<T>(b, h, row + i, 0);
    const i32 there = i < rows ? columns : 0;
#pragma unroll
    for (int c = 0; c < kColumns; c += 16) {
      const float *y = x + c / 2 + 2 * r;
      store_sixteen(target + c, there - c, pack<T>(y[0] * factor, y[1] * factor), pack<T>(y[4] * factor, y[5] * factor));
    }
  }
}

// store_rows() in FP32, without an exchange between lanes. kAdds: adds to what the tensor holds.
template <bool kAdds, int kColumns>
__device__ __forceinline__ void store_rows_unrounded(const Operand &out, i32 b, i32 h, i64 row, i32 rows, i32 columns,
                                                     const float (&x)[kColumns / 2], float factor) {
  if (!out) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const i32 i = (i32)threadIdx.x % 32 / 4 + 8 * r, first = (i32)threadIdx.x % 4 * 2;
    if (i >= rows) continue;
    float *const target = out.at<float>(b, h, row + i, first);
#pragma unroll
    for (int c = 0; c < kColumns; c += 8) {
      if (c + first >= columns) continue;
      float2 y{x[c / 2 + 2 * r] * factor, x[c / 2 + 2 * r + 1] * factor};
      float2 *const to = (float2 *)(target + c);
      if constexpr (kAdds) y.x += to->x, y.y += to->y;
      *to = y;
    }
  }
}

} // namespace strobe
