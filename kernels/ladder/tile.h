// Tiles of the FP32 rungs: in global memory ("HBM" in the papers), in shared memory ("SRAM"), in registers. The 256 threads of a CTA form a
// 16 x 16 grid. Of a tile in registers, thread (y, x) holds the elements (y + 16 r, x + 16 c), so 16 adjacent lanes of a warp share a row.
#pragma once
#include "../ptx/math.h" // included first: softmax.h finds exp2 and select there

#include "../attention/softmax.h"
#include "arguments.h"
#include "config.h"

namespace strobe::ladder {

inline constexpr i32 kTileThreads = 256;
inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

// One head's matrix in global memory.
template <class T> struct Matrix {
  T *data;
  i64 row_stride, column_stride;
  i64 rows, columns;

  __device__ Matrix(const Operand &x, i64 b, i64 h, i64 rows, i64 columns)
      : data(x.at<T>(b, h, 0, 0)), row_stride(x.stride[2]), column_stride(x.stride[3]), rows(rows), columns(columns) {}
  __device__ Matrix(T *data, i64 rows, i64 columns) : data(data), row_stride(columns), column_stride(1), rows(rows), columns(columns) {}
  __device__ bool holds(i64 i, i64 c) const { return i < rows && c < columns; }
  __device__ T &operator()(i64 i, i64 c) const { return data[i * row_stride + c * column_stride]; }
};

template <class Tile> struct Transposed {
  Tile tile;
  __device__ float operator()(i32 i, i32 c) const { return tile(c, i); }
};

// A tile in shared memory. The odd pitch puts the elements of a column into different banks.
template <i32 Rows, i32 Columns> struct Shared {
  static constexpr i32 kPitch = Columns + 1;
  float *data;

  __device__ explicit Shared(void *begin) : data(static_cast<float *>(begin)) {}
  __device__ void *end() const { return data + Rows * kPitch; }
  __device__ float &operator()(i32 i, i32 c) const { return data[i * kPitch + c]; }
  __device__ Transposed<Shared> transposed() const { return {*this}; }
};

// A tile in registers.
template <i32 Rows, i32 Columns> struct Registers {
  static constexpr i32 kRows = Rows / 16, kColumns = Columns / 16; // per thread
  float x[kRows][kColumns] = {};

  static __device__ i32 row(i32 r) { return threadIdx.x / 16 + 16 * r; }
  static __device__ i32 column(i32 c) { return threadIdx.x % 16 + 16 * c; }
  // Calls f(element, r, row in the tile, column in the tile) for each element.
  template <class F> __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (i32 r = 0; r < kRows; r++)
#pragma unroll
      for (i32 c = 0; c < kColumns; c++) f(x[r][c], r, row(r), column(c));
  }
  __device__ float row_max(i32 r) const {
    float y = -kInfinity;
#pragma unroll
    for (i32 c = 0; c < kColumns; c++) y = max(y, x[r][c]);
    for (i32 lanes = 8; lanes; lanes /= 2) y = max(y, __shfl_xor_sync(~0u, y, lanes));
    return y;
  }
  __device__ float row_sum(i32 r) const {
    float y = 0;
#pragma unroll
    for (i32 c = 0; c < kColumns; c++) y += x[r][c];
    for (i32 lanes = 8; lanes; lanes /= 2) y += __shfl_xor_sync(~0u, y, lanes);
    return y;
  }
};

// C += A B, with A and B in shared memory. K: the length of the inner axis.
template <i32 K, i32 M, i32 N, class A, class B> __device__ __forceinline__ void multiply(Registers<M, N> &C, A a, B b) {
  constexpr i32 kUnroll = M * N > 64 * 64 ? 2 : 4;
#pragma unroll kUnroll
  for (i32 k = 0; k < K; k++) {
    float column[M / 16], row[N / 16];
#pragma unroll
    for (i32 r = 0; r < M / 16; r++) column[r] = a(C.row(r), k);
#pragma unroll
    for (i32 c = 0; c < N / 16; c++) row[c] = b(k, C.column(c));
#pragma unroll
    for (i32 r = 0; r < M / 16; r++)
#pragma unroll
      for (i32 c = 0; c < N / 16; c++) C.x[r][c] += column[r] * row[c];
  }
}

// Copies global to shared memory, from row i0 and column c0 on; zeros beyond the matrix.
template <i32 Rows, i32 Columns, class T>
__device__ __forceinline__ void load(Shared<Rows, Columns> tile, const Matrix<T> &matrix, i64 i0, i64 c0 = 0) {
  for (i32 n = threadIdx.x; n < Rows * Columns; n += kTileThreads) {
    const i32 i = n / Columns, c = n % Columns;
    tile(i, c) = matrix.holds(i0 + i, c0 + c) ? matrix(i0 + i, c0 + c) : 0;
  }
}
// Copies registers to shared memory.
template <i32 Rows, i32 Columns> __device__ __forceinline__ void store(Shared<Rows, Columns> tile, Registers<Rows, Columns> &x) {
  x.each([&](float &x, i32, i32 i, i32 c) { tile(i, c) = x; });
}
// Copies registers to global memory.
template <i32 Rows, i32 Columns>
__device__ __forceinline__ void store(const Matrix<float> &matrix, i64 i0, i64 c0, Registers<Rows, Columns> &x, float factor = 1) {
  x.each([&](float &x, i32, i32 i, i32 c) {
    if (matrix.holds(i0 + i, c0 + c)) matrix(i0 + i, c0 + c) = x * factor;
  });
}

// Sets S to -inf where query i0 + row does not see key j0 + column.
template <class Tile> __device__ __forceinline__ void hide(Tile &S, const Band &band, i64 i0, i64 j0) {
  S.each([&](float &s, i32, i32 i, i32 j) {
    if (!band.visible(i0 + i, j0 + j)) s = -kInfinity;
  });
}

// LSE of query i times log2(e), for the backward: exp(s - LSE) = exp2(s log2(e) - log2_sum). For a row that sees no key and for a row
// beyond the sequence the result is +inf, so that P is 0.
__device__ __forceinline__ float log2_sum(const Operand &lse, i64 b, i64 h, i64 i, i64 seqlen_q) {
  const float L = i < seqlen_q ? *lse.at<const float>(b, h, i, 0) : -kInfinity;
  return L == -kInfinity ? kInfinity : L * kLog2e<float>;
}

} // namespace strobe::ladder
