// Tiles in a warp's registers, as 16x16 blocks: the operands and the sums of mma.sync. Lane 4g+t holds rows g and g + 8, and in each half
// of the columns 2t and 2t+1. A left and a right operand hold the same elements, in the order in which the instruction takes adjacent
// registers.
#pragma once
#include "../ptx/mma.h"

namespace strobe::tile {

// 16x16 16-bit elements, as a left operand. x[r + 2c]: rows 8r ... 8r+7, columns 8c ... 8c+7.
struct Left {
  static constexpr bool kLeft = true;
  u32 x[4];
};
// 16x16 16-bit elements, as a right operand. x[c + 2r]: rows 8r ... 8r+7, columns 8c ... 8c+7.
struct Right {
  static constexpr bool kLeft = false;
  u32 x[4];
};

// 16x16 fp32 sums. x[c][2r + e]: row g + 8r, column 8c + 2t + e.
struct Accumulator {
  float x[2][4];
};

__device__ __forceinline__ int lane_id() { return (int)(threadIdx.x & 31); }
// The rows (r = 0, 1) and the columns (c = 0, 1; e = 0, 1) of a block that this lane holds.
__device__ __forceinline__ int lane_row(int r) { return (lane_id() >> 2) + 8 * r; }
__device__ __forceinline__ int lane_column(int c, int e) { return 8 * c + 2 * (lane_id() & 3) + e; }

// elements_of_row: how many elements of one row a lane holds. row_element: element i of the lane's row `row`, of which each row of 16x16
// blocks has two. In a warpgroup's flat array, x[4j + 2r + e] is the lane's row r, column 8j + 2t + e.
template <int kM, int kN> __device__ __forceinline__ constexpr int elements_of_row(const Accumulator (&)[kM][kN]) { return 4 * kN; }
template <int kM, int kN> __device__ __forceinline__ float &row_element(Accumulator (&x)[kM][kN], int row, int i) {
  return x[row / 2][i / 4].x[i / 2 % 2][2 * (row % 2) + i % 2];
}
template <int kM, int kN> __device__ __forceinline__ float row_element(const Accumulator (&x)[kM][kN], int row, int i) {
  return x[row / 2][i / 4].x[i / 2 % 2][2 * (row % 2) + i % 2];
}
template <int N> __device__ __forceinline__ constexpr int elements_of_row(const float (&)[N]) { return N / 2; }
template <int N> __device__ __forceinline__ float &row_element(float (&x)[N], int row, int i) { return x[i / 2 * 4 + 2 * row + i % 2]; }
template <int N> __device__ __forceinline__ float row_element(const float (&x)[N], int row, int i) {
  return x[i / 2 * 4 + 2 * row + i % 2];
}

// d += a * transpose(b)
template <class T> __device__ __forceinline__ void multiply_add(Accumulator &d, const Left &a, const Right &b) {
  mma_m16n8k16<T>(d.x[0], a.x, b.x[0], b.x[1]);
  mma_m16n8k16<T>(d.x[1], a.x, b.x[2], b.x[3]);
}

template <class T> __device__ __forceinline__ Left rounded(const Accumulator &s) {
  return {{pack<T>(s.x[0][0], s.x[0][1]), pack<T>(s.x[0][2], s.x[0][3]), pack<T>(s.x[1][0], s.x[1][1]), pack<T>(s.x[1][2], s.x[1][3])}};
}

// Reductions over the four lanes that share a row.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

} // namespace strobe::tile
