// Rounds dQ from the sum to which the backward's blocks have added.
#pragma once
#include "../attention/features.h"
#include "../device/hopper_dq.h"
#include "../ptx/barrier.h"
#include "row_tile.h"

namespace strobe::passes {

template <RowsConfig C> struct ConvertDq {
  using Arguments = BackwardArguments;
  using E = typename Element<C.dtype>::type;
  using T = typename Element<C.dtype>::real;
  using Out = Result<C.dtype, C.unrounded()>;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.form == kRowAfterRow ? 1 : 2;

  static __device__ __forceinline__ void run(const Arguments &a) {
    const RowTile<C> tile(a.in);
    if (tile.rows == 0) return; // the sequence is shorter than the longest: dq_sum may have no such tile
    if constexpr (C.form == kFragments) from_fragments(a, tile);
    if constexpr (C.form == kWarpgroups) from_warpgroups(a, tile);
    if constexpr (C.form == kRowAfterRow) from_rows(a, tile);
  }

private:
  // A thread takes rows g and g + 8 of a 16x16 block, which four lanes of the backward have added.
  static __device__ __forceinline__ void from_fragments(const Arguments &a, const RowTile<C> &tile) {
    const float scale = (float)a.in.scale, *sum = a.dq_sum + tile.number * (C.tile_q * C.head_dim);
    for (int n = (int)threadIdx.x; n < C.tile_q / 2 * (C.head_dim / 16); n += kThreads) {
      int block = n % (C.head_dim / 16), g = n / (C.head_dim / 16) % 8, i = n / (C.head_dim / 16) / 8 * 16 + g;
      if (i >= tile.rows) continue;
      if constexpr (C.unrounded()) {
        add_fragments(a, tile, sum + (i / 16 * (C.head_dim / 16) + block) * 256, i, g, 16 * block);
        continue;
      }
      const float *from = sum + (i / 16 * (C.head_dim / 16) + block) * 256;
      alignas(16) E y[2][16];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
#pragma unroll
        for (int t = 0; t < 4; ++t) {
#pragma unroll
          for (int k = 0; k < 4; ++k) y[k / 2][8 * c + 2 * t + k % 2] = Convert<E>::from(scale * from[c * 128 + quad(4 * g + t, k)]);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (i + 8 * r < tile.rows) store_sixteen_columns(a.dq, tile, i + 8 * r, 16 * block, a.in.head_dim, y[r]);
      }
    }
  }
  // Writes a dQ in fp32, or with C.adds adds to it: rows i and i + 8 of a block.
  static __device__ __forceinline__ void add_fragments(const Arguments &a, const RowTile<C> &tile, const float *from, int i, int g,
                                                       i32 c0) {
#pragma unroll 4
    for (int n = 0; n < 32; ++n) {
      const int r = n / 16, c = n / 8 % 2, t = n / 2 % 4, e = n % 2;
      if (i + 8 * r >= tile.rows || c0 + 8 * c + 2 * t + e >= a.in.head_dim) continue;
      float *const to = a.dq.at<float>(tile.batch, tile.head, tile.row + i + 8 * r, c0 + 8 * c + 2 * t + e);
      const float x = (float)a.in.scale * from[c * 128 + quad(4 * g + t, 2 * r + e)];
      *to = C.adds ? *to + x : x;
    }
  }
  static __device__ __forceinline__ void store_sixteen_columns(const Operand &o, const RowTile<C> &tile, int i, i32 c, i32 columns,
                                                               const E (&y)[16]) {
    E *p = o.at<E>(tile.batch, tile.head, tile.row + i, c);
    if constexpr (C.aligned) {
      if (c < columns) *(uint4 *)p = *(const uint4 *)y;
      if (c + 8 < columns) *(uint4 *)(p + 8) = *(const uint4 *)(y + 8);
    } else {
#pragma unroll
      for (int e = 0; e < 16; ++e) {
        if (c + e < columns) p[e * o.stride[3]] = y[e];
      }
    }
  }

  // A warp takes what one warp of the backward has added.
  static __device__ __forceinline__ void from_warpgroups(const Arguments &a, const RowTile<C> &tile) {
    static_assert(kThreads == 256);
#pragma unroll 1
    for (int part = (int)threadIdx.x / 128; part < C.tile_q / dq_queries(C.head_dim, C.tile_q) * (C.head_dim / 64); part += 2) {
      const int turn = part % 2; // a third piece has additions of both warpgroups, so either turn serves; with `roles` there is none
      if constexpr (C.unrounded()) {
        store_dq_unrounded<C.adds != 0, C.head_dim, C.tile_q>(a, tile.batch, tile.head, tile.row, tile.rows, tile.number, part,
                                                              a.first_stores && a.turns[2 * tile.number + turn] == 0);
        continue;
      }
      store_dq<E, C.head_dim, C.tile_q>(a, tile.batch, tile.head, tile.row, tile.rows, tile.number, part,
                                        a.first_stores && a.turns[2 * tile.number + turn] == 0);
    }
  }

  static __device__ __forceinline__ void from_rows(const Arguments &a, const RowTile<C> &tile) {
    const T *sum = reinterpret_cast<const T *>(a.dq_sum) + tile.index * C.head_dim;
    for (i32 i = (i32)threadIdx.x; i < tile.rows * C.head_dim; i += kThreads) {
      const i32 r = i / C.head_dim, c = i % C.head_dim;
      T total = sum[i];
      if constexpr (C.dtype == kF32)
        for (i32 n = 1; n < a.dq_sums; ++n) total += sum[n * a.in.rows() * C.head_dim + i];
      if (c >= a.in.head_dim) continue;
      Out *const to = a.dq.at<Out>(tile.batch, tile.head, tile.row + r, c);
      if constexpr (C.adds) total += *to;
      *to = Convert<Out>::from(total);
    }
  }
};

} // namespace strobe::passes
