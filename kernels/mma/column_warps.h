// A group of warps side by side. They have the same rows of S, P, M and l, and each has its own columns of O. They divide the sum over the
// columns of Q and K that makes S.
#pragma once
#include "../ptx/barrier.h"
#include "../tile/shared.h"
#include "config.h"

namespace strobe::mma {

// The warp's place among the block's: groups follow one another, then come their next warps.
template <Config C> struct ColumnWarps {
  static __device__ constexpr bool alone() { return C.column_warps == 1; }
  static __device__ constexpr int columns() { return C.head_dim_v / C.column_warps / 16; } // blocks of O that a warp has
  static __device__ constexpr int inner() { return C.head_dim / C.column_warps; }          // columns of Q and K over which it sums S
  static_assert(C.head_dim_v % (16 * C.column_warps) == 0 && C.head_dim % (16 * C.column_warps) == 0);
  static_assert(C.warps % C.column_warps == 0 && C.groups() < 16);

  static __device__ __forceinline__ int group(int thread) { return alone() ? thread / 32 : thread / 32 % C.groups(); }
  static __device__ __forceinline__ int column(int thread) { return alone() ? 0 : thread / 32 / C.groups(); }
  // All of the group have come.
  static __device__ __forceinline__ void meet(int thread) {
    if constexpr (alone())
      __syncwarp();
    else
      barrier_sync(1 + group(thread), 32 * C.column_warps);
  }
  // S becomes the sum over all of its warps' columns, the same bits in each. Before the next exchange all must have met once more.
  template <int kM, int kN> static __device__ __forceinline__ void exchange(tile::Accumulator (&S)[kM][kN], u32 places, int thread) {
    if constexpr (!alone()) {
      constexpr u32 kBytes = 1024 * kM * kN; // of a warp
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
