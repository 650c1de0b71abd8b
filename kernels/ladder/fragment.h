// Tiles of the tensor-core rung. mma.sync multiplies A (16 x 16) by B (16 x 8), 16-bit numbers, and adds to C (16 x 8) in FP32; all three
// are spread over a warp. Of C, lane 4g + t holds columns 2t and 2t + 1 of rows g and g + 8. The left and the right half of A have the same
// layout, so a C rounded to 16 bits is half of an A, and no number moves between lanes: P = exp(S) goes straight into P V.
#pragma once
#include "../ptx/cp_async.h"
#include "../ptx/ldmatrix.h"
#include "../ptx/mma.h"
#include "tile.h"

namespace strobe::ladder {

// A tile in shared memory. The pitch is an odd number of 16-byte units: the eight rows that ldmatrix reads at once lie in different banks.
template <class T, i32 Rows, i32 Columns> struct SharedHalf {
  static constexpr i32 kPitch = Columns + 8;
  T *data;

  __device__ explicit SharedHalf(void *begin) : data(static_cast<T *>(begin)) {}
  __device__ void *end() const { return data + Rows * kPitch; }
  __device__ T *at(i32 i, i32 c) const { return data + i * kPitch + c; }

  // Loads 16 x 16 elements from row i and column c on as an operand, in four 8 x 8 matrices. With `across` the matrices come in the order
  // left, right, below left, below right; otherwise column by column.
  __device__ void read(u32 (&x)[4], i32 i, i32 c, bool across, bool transposed) const {
    const i32 lane = threadIdx.x % 32, part = lane / 8, first = part % 2 * 8, second = part / 2 * 8;
    const u32 address = shared_address(at(i + lane % 8 + (across ? second : first), c + (across ? first : second)));
    transposed ? ldmatrix_transposed(x, address) : ldmatrix(x, address);
  }
  // Operands from tiles that store A, A^T (`transposed`: read by A's columns), B or B^T.
  __device__ void read_a(u32 (&x)[4], i32 i, i32 k) const { read(x, i, k, false, false); }
  __device__ void read_a_transposed(u32 (&x)[4], i32 k, i32 i) const { read(x, k, i, true, true); }
  __device__ void read_b(u32 (&x)[4], i32 k, i32 n) const { read(x, k, n, false, true); }
  __device__ void read_b_transposed(u32 (&x)[4], i32 n, i32 k) const { read(x, n, k, true, false); }
};

// 16 rows of a tile in a warp's registers: [column / 8], then (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
template <i32 Columns> struct Sums {
  float x[Columns / 8][4] = {};

  static __device__ i32 row(i32 r) { return threadIdx.x % 32 / 4 + 8 * r; } // r: 0 or 1
  // Calls f(element, r, row, column) for each element.
  template <class F> __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (i32 n = 0; n < Columns / 8; n++)
#pragma unroll
      for (i32 e = 0; e < 4; e++) f(x[n][e], e / 2, row(e / 2), 8 * n + threadIdx.x % 4 * 2 + e % 2);
  }
  __device__ float row_max(i32 r) const { // four lanes share a row
    float y = -kInfinity;
#pragma unroll
    for (i32 n = 0; n < Columns / 8; n++) y = max(y, max(x[n][2 * r], x[n][2 * r + 1]));
    y = max(y, __shfl_xor_sync(~0u, y, 1));
    return max(y, __shfl_xor_sync(~0u, y, 2));
  }
  __device__ float row_sum(i32 r) const {
    float y = 0;
#pragma unroll
    for (i32 n = 0; n < Columns / 8; n++) y += x[n][2 * r] + x[n][2 * r + 1];
    y += __shfl_xor_sync(~0u, y, 1);
    return y + __shfl_xor_sync(~0u, y, 2);
  }
  // Columns 16 k to 16 k + 15, rounded, as an operand A.
  template <class T> __device__ void as_a(u32 (&a)[4], i32 k) const {
    a[0] = pack<T>(x[2 * k][0], x[2 * k][1]), a[1] = pack<T>(x[2 * k][2], x[2 * k][3]);
    a[2] = pack<T>(x[2 * k + 1][0], x[2 * k + 1][1]), a[3] = pack<T>(x[2 * k + 1][2], x[2 * k + 1][3]);
  }
  // Columns 16 n to 16 n + 15 += A B.
  template <class T> __device__ void multiply(i32 n, const u32 (&a)[4], const u32 (&b)[4]) {
    mma_m16n8k16<T>(x[2 * n], a, b[0], b[1]);
    mma_m16n8k16<T>(x[2 * n + 1], a, b[2], b[3]);
  }
};

// Copies global to shared memory, from row i0 on; zeros beyond the matrix. Aligned: 16 bytes at a time, asynchronously until arrived().
template <i32 Threads, bool Aligned, class T, i32 Rows, i32 Columns>
__device__ __forceinline__ void load(SharedHalf<T, Rows, Columns> tile, const Matrix<const T> &matrix, i64 i0) {
  constexpr i32 kUnit = Aligned ? 8 : 1;
#pragma unroll 2
  for (i32 n = threadIdx.x; n < Rows * Columns / kUnit; n += Threads) {
    const i32 i = n / (Columns / kUnit), c = n % (Columns / kUnit) * kUnit;
    const bool holds = matrix.holds(i0 + i, c);
    if constexpr (Aligned)
      cp_async(shared_address(tile.at(i, c)), holds ? &matrix(i0 + i, c) : matrix.data, holds);
    else
      *tile.at(i, c) = holds ? matrix(i0 + i, c) : T{};
  }
}
// Waits until the copies of all the CTA's threads are in shared memory.
__device__ __forceinline__ void arrived() {
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
}

} // namespace strobe::ladder
