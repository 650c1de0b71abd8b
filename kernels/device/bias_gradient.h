// dbias = dS, summed over the axes on which bias was broadcast. A thread block owns a tile of dbias, walks over all tiles of scores that
// add to it, in a fixed order, and recomputes them. Blocks share nothing, so this takes no workspace and gives the same bits in every run.
#pragma once
#include "../attention/part.h"
#include "../ptx/math.h"

namespace strobe {

// Tile computes dS of a tile of scores, in each family's own way. It has kTileQ, kTileK, kThreads, of_part() and T, and:
//   Sum                     a thread's elements of a tile
//   take_queries(b, h, q0)  moves to a tile of queries; returns whether there are any. In a part q0 counts the held rows
//   add(sum, lost, k0)      adds dS of these queries and the keys from k0 on (in a part positions of the whole sequence); lost: the
//                           rounding errors
//   put(sum)                stores the sum to shared memory, where at(query, key) is an element
//   add(x, lost, y)         the same addition for two numbers
template <bool kPart> __device__ __forceinline__ i64 columns_of(const Inputs &in) {
  if constexpr (kPart) return in.part->columns;
  return in.seqlen_k;
}
template <i32 kBias, class Tile> __device__ __forceinline__ void bias_gradient(const BackwardArguments &a) {
  extern __shared__ __align__(128) unsigned char shared[];
  using T = typename Tile::T;
  using B = typename Element<kBias>::type;
  const Inputs &in = a.in;
  // The tiles that this block takes along one axis: one, or all if bias was broadcast along the axis.
  struct TilesAlong {
    i32 begin, end;
    __device__ __forceinline__ TilesAlong(u32 &item, i64 stride, i64 count) {
      begin = stride ? (i32)(item % (u32)count) : 0;
      end = stride ? begin + 1 : (i32)count;
      if (stride) item /= (u32)count;
    }
  };
  const i64 *stride = a.dbias.stride;
  u32 item = blockIdx.x;
  const TilesAlong keys(item, stride[3], div_up(columns_of<Tile::of_part()>(in), Tile::kTileK)),
      queries(item, stride[2], div_up(in.seqlen_q, Tile::kTileQ)), heads(item, stride[1], in.heads), batches(item, stride[0], in.batch);

  Tile tile(a, shared);
  typename Tile::Sum sum = {}, lost = {};
  for (i32 b = batches.begin; b < batches.end; ++b) {
    for (i32 h = heads.begin; h < heads.end; ++h) {
      for (i32 q = queries.begin; q < queries.end; ++q) {
        if (!tile.take_queries(b, h, q * Tile::kTileQ)) continue;
        for (i32 k = keys.begin; k < keys.end; ++k) tile.add(sum, lost, k * Tile::kTileK);
      }
    }
  }

  __syncthreads();
  tile.put(sum);
  __syncthreads();
  const i32 t = (i32)threadIdx.x;
  if (!stride[2]) {
    for (i32 j = t; j < Tile::kTileK; j += Tile::kThreads) {
      T x = T(0), lost = T(0);
#pragma unroll 2
      for (i32 i = 0; i < Tile::kTileQ; ++i) Tile::add(x, lost, tile.at(i, j));
      tile.at(0, j) = x;
    }
    __syncthreads();
  }
  if (!stride[3]) {
    for (i32 i = t; i < (stride[2] ? Tile::kTileQ : 1); i += Tile::kThreads) {
      T x = T(0), lost = T(0);
#pragma unroll 2
      for (i32 j = 0; j < Tile::kTileK; ++j) Tile::add(x, lost, tile.at(i, j));
      tile.at(i, 0) = x;
    }
    __syncthreads();
  }
  const i32 q0 = queries.begin * Tile::kTileQ, k0 = keys.begin * Tile::kTileK;
  const i32 rows = stride[2] ? (i32)min((i64)Tile::kTileQ, in.seqlen_q - q0) : 1;
  const i32 columns = stride[3] ? (i32)min((i64)Tile::kTileK, columns_of<Tile::of_part()>(in) - k0) : 1;
  for (i32 n = t; n < rows * Tile::kTileK; n += Tile::kThreads) {
    const i32 i = n / Tile::kTileK, j = n % Tile::kTileK;
    if (j < columns) *a.dbias.template at<B>(batches.begin, heads.begin, q0 + i, k0 + j) = Convert<B>::from(tile.at(i, j));
  }
}

} // namespace strobe
