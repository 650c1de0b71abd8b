// Tiles of FP32 in shared memory. Rows lie one after another, with their 16-byte chunks permuted by the row's number. Both ways of reading
// below have no bank conflicts: four adjacent chunks of two adjacent rows, and two chunks of every other row of eight.
#pragma once
#include "../ptx/barrier.h"
#include "../ptx/cp_async.h"
#include "copy.h"

namespace strobe::tile::tf32 {

// The thread block's shared memory. Its address is a constant and takes no register.
__device__ __forceinline__ unsigned char *shared_memory() {
  extern __shared__ __align__(128) unsigned char shared[];
  return shared;
}

template <int kColumns> struct Layout {
  static_assert(kColumns % 32 == 0);
  static constexpr int kPitch = 4 * kColumns, kChunks = kColumns / 4;
  static __device__ __forceinline__ u32 offset(int row, int chunk) { // bytes
    return (u32)(row * kPitch + (chunk ^ (((row ^ row >> 2) & 1) * 4 + (row & 2))) * 16);
  }
};

// Reads rows: lane 4g+t gets columns 4t ... 4t+3 of row g.
template <int kColumns> class Rows {
  u32 lane_[2];

public:
  __device__ __forceinline__ explicit Rows(u32 base) {
    int lane = thread_index() & 31;
#pragma unroll
    for (int i = 0; i < 2; ++i) lane_[i] = base + Layout<kColumns>::offset(lane >> 2, 4 * i + (lane & 3));
  }
  // row: a multiple of 8; column: a multiple of 16
  __device__ __forceinline__ void load(float (&x)[4], int row, int column) const {
    u32 bits[4];
    load_shared(bits, lane_[column / 16 % 2] + (u32)(row * Layout<kColumns>::kPitch + column / 32 * 128));
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(bits[i]);
  }
};

// Reads pairs of rows: lane 4g+t gets columns 4g ... 4g+3 of rows 2t and 2t+1.
template <int kColumns> class Pairs {
  u32 lane_[2];

public:
  __device__ __forceinline__ explicit Pairs(u32 base) {
    int lane = thread_index() & 31;
#pragma unroll
    for (int e = 0; e < 2; ++e) lane_[e] = base + Layout<kColumns>::offset(2 * (lane & 3) + e, lane >> 2);
  }
  // row: a multiple of 8; column: a multiple of 32
  __device__ __forceinline__ void load(float (&x)[2][4], int row, int column) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      u32 bits[4];
      load_shared(bits, lane_[e] + (u32)(row * Layout<kColumns>::kPitch + column / 32 * 128));
#pragma unroll
      for (int i = 0; i < 4; ++i) x[e][i] = __uint_as_float(bits[i]);
    }
  }
};

// Loads a tile from global to shared memory, like tile::load. Elements beyond the matrix become zero.
template <int kRows, int kColumns, int kThreads, bool kAligned, class Rows = tile::Matrix<const float>>
__device__ __forceinline__ void load(u32 base, const Rows &m, int thread) {
  using S = tile::Share<kRows, 2 * kColumns, kThreads>;
  S s(thread);
#pragma unroll
  for (int k = 0; k < S::kAlong; ++k) {
    int chunk = s.chunk + k * S::kAcross;
    i32 columns = m.columns - 4 * chunk, rows = columns > 0 ? m.rows - s.row : 0;
    i64 column = 4 * chunk * (kAligned ? 1 : m.column_stride);
#pragma unroll
    for (int i = 0; i < S::kSteps; ++i) {
      if (!s.inside(i)) continue;
      const float *source = m.row(s.row + i * S::kDown) + column;
      u32 target = base + Layout<kColumns>::offset(s.row + i * S::kDown, chunk);
      bool valid = i * S::kDown < rows;
      if constexpr (kAligned) {
        cp_async(target, source, valid);
      } else {
        u32 x[4] = {0, 0, 0, 0};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (valid && e < columns) x[e] = __float_as_uint(source[e * m.column_stride]);
        }
        store_shared(target, x);
      }
    }
  }
}

} // namespace strobe::tile::tf32
