// Tiles of 16-bit elements in shared memory. Rows lie one after another. Within a row the 16-byte chunks are permuted by the row's number
// (swizzled), so that the same chunk of eight consecutive rows falls on 32 different banks. So ldmatrix, cp.async and fragment stores have
// no bank conflicts, without padding.
#pragma once
#include "../ptx/cp_async.h"
#include "../ptx/ldmatrix.h"
#include "registers.h"

namespace strobe::tile {

// The layout of a tile with kColumns columns (a multiple of 16).
template <int kColumns> struct Layout {
  static constexpr int kPitch = 2 * kColumns; // bytes
  static constexpr int kChunks = kColumns / 8;
  static constexpr int kPower = kChunks & -kChunks;                  // the largest power of two that divides kChunks
  static constexpr int kGroup = kPower < 8 ? kPower : 8;             // chunks that are permuted among themselves
  static __device__ __forceinline__ u32 offset(int row, int chunk) { // bytes
    return (u32)(row * kPitch + (chunk ^ (row * kGroup / 8 & (kGroup - 1))) * 16);
  }
};

// Reads blocks of a tile as Left or Right operands. row, column: where the block begins, multiples of 16. If row and column are known at
// compile time, they become immediate offsets to one of a few addresses that a lane keeps.
template <class Operand, int kColumns, bool kTransposed = false> class Blocks {
  using L = Layout<kColumns>;
  static constexpr int kPhases = L::kGroup / 2;
  // Which of the four 8x8 matrices go to adjacent registers: those above one another in shared memory, or those side by side.
  static constexpr bool kDown = Operand::kLeft != kTransposed;
  u32 lane_[kPhases];

public:
  // base: a multiple of 128; column: the column from which load() counts, a multiple of 16.
  __device__ __forceinline__ explicit Blocks(u32 base, int column = 0, int lane = lane_id()) {
    int low = lane >> 3 & 1, high = lane >> 4;
    int row = (lane & 7) + 8 * (kDown ? low : high), chunk = kDown ? high : low;
#pragma unroll
    for (int i = 0; i < kPhases; ++i) lane_[i] = base + L::offset(row, column / 8 + 2 * i + chunk);
  }
  // The block at (row, column), or its transpose.
  __device__ __forceinline__ Operand load(int row, int column) const {
    int chunk = column / 8;
    u32 address = lane_[chunk % L::kGroup / 2] + (u32)(row * L::kPitch + chunk / L::kGroup * L::kGroup * 16);
    Operand f;
    if constexpr (kTransposed)
      ldmatrix_transposed(f.x, address);
    else
      ldmatrix(f.x, address);
    return f;
  }
};

template <int kColumns> __device__ __forceinline__ void store(u32 base, int row, int column, const Left &f) {
  using L = Layout<kColumns>;
#pragma unroll
  for (int i = 0; i < 4; ++i) store_shared(base + L::offset(row + lane_row(i & 1), column / 8 + (i >> 1)) + 4 * (lane_id() & 3), f.x[i]);
}

} // namespace strobe::tile
