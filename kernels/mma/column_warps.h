// A group of warps that share rows: all have the same rows of S, P, M and l, and each has its own columns of O. To compute S, each warp
// sums over its own columns of Q and K.
#pragma once
#include "../ptx/barrier.h"
#include "../tile/shared.h"
#include "config.h"

namespace strobe::mma {

// Warp n belongs to group n % groups() and takes the (n / groups())-th range of columns.
template <Config C> struct ColumnWarps {
  static __device__ constexpr bool alone() { return C.column_warps == 1; }
  static __device__ constexpr int columns() { return C.head_dim_v / C.column_warps / 16; } // 16-column blocks of O per warp
  static __device__ constexpr int inner() { return C.head_dim / C.column_warps; }          // columns of Q and K over which a warp sums S
  static_assert(C.head_dim_v % (16 * C.column_warps) == 0 && C.head_dim % (16 * C.column_warps) == 0);
  static_assert(C.warps % C.column_warps == 0 && C.groups() < 16);

  static __device__ __forceinline__ int group(int thread) { return alone() ? thread / 32 : thread / 32 % C.groups(); }
  static __device__ __forceinline__ int column(int thread) { return alone() ? 0 : thread / 32 / C.groups(); }
  // Waits for all warps of the group.
  static __device__ __forceinline__ void meet(int thread) {
    if constexpr (alone())
      __syncwarp();
    else
      barrier_sync(1 + group(thread), 32 * C.column_warps);
  }
  // Adds up the group's sums S, each over one warp's columns. All warps get the same bits. They must meet again before the next exchange.
  template <int kM, int kN> static __device__ __forceinline__ void exchange(tile::Accumulator (&S)[kM][kN], u32 places, int thread) {
    if constexpr (!alone()) {
      constexpr u32 kBytes = 1024 * kM * kN; // per warp
      const u32 at = places + (u32)group(thread) * C.column_warps * kBytes + tile::lane_id() * 16, own = at + (u32)column(thread) * kBytes;
#pragma unroll
      for (int i = 0; i < 2 * kM * kN; ++i) store_shared(own + 512 * i, S[i / 2 / kN][i / 2 % kN].x[i % 2]);
      meet(thread);
#pragma unroll
      for (int i = 0; i < 2 * kM * kN; ++i) {
        float (&sum)[4] = S[i / 2 / kN][i / 2 % kN].x[i % 2];
        load_shared<0>(sum, at + 512 * i);
#pragma unroll
        for (int w = 1; w < C.column_warps; ++w) {
          float x[4];
          load_shared<0>(x, at + w * kBytes + 512 * i);
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[e] += x[e];
        }
      }
    }
  }
};

} // namespace strobe::mma
