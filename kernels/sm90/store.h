// Sums in registers to rows in global memory.
#pragma once
#include "../ptx/ldmatrix.h"

namespace strobe::sm90 {

// Sixteen columns of eight rows (8 more for another call): lane 4g+t holds of row g the pairs of columns 2t and 8 + 2t, packed. Two lanes
// exchange halves, so that each stores 8 bytes and all of them whole sectors. row: lane's row, at the first of the columns; inside(c): column
// c of the sixteen is to be stored.
template <class T, class Inside> __device__ __forceinline__ void store_sixteen(T *row, u32 left, u32 right, const Inside &inside) {
  const int lane = (int)threadIdx.x % 32, odd = lane % 2, column = 8 * odd + lane % 4 / 2 * 4;
  const u32 other = __shfl_xor_sync(0xFFFFFFFFu, odd ? left : right, 1);
  if (inside(column)) store_global(row + column, odd ? other : left, odd ? right : other);
}

} // namespace strobe::sm90
