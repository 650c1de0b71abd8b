// dbias = dS, summed over what bias was broadcast over. A block of threads owns a tile of dbias, walks over all tiles of scores that add to
// it, in a fixed order, and computes them anew: nothing is shared, so it takes no workspace and is the same over runs.
#pragma once
#include "../device/tile_gradient.h"

namespace strobe::passes {

template <TileConfig C> struct BiasGradient {
  using Arguments = BackwardArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  static __device__ __forceinline__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    BiasGradient(a, shared).run();
  }

private:
  using Gradient = TileGradient<C>;
  using Part = typename Gradient::Part;
  using Tile = typename Gradient::Tile;
  static constexpr Features F = C.features;
  static constexpr int kTileQ = C.tile_q, kTileK = C.tile_k, kKeys = Gradient::kKeys, kQueries = Gradient::kQueries;

  const Arguments &a;
  const Inputs &in;
  Gradient gradient;
  float *sums; // the tile of dbias, transposed, where the inputs were
  int thread;

  __device__ __forceinline__ BiasGradient(const Arguments &a, unsigned char *memory)
      : a(a), in(a.in), gradient(a, memory), sums((float *)memory), thread((int)threadIdx.x) {}

  // fp32 keeps what a sum of thousands of tiles loses; of 16 bits dS has lost more.
  static constexpr bool kCompensated = C.dtype == kF32;
  static __device__ __forceinline__ void add(float &sum, float &lost, float x) {
    if constexpr (kCompensated)
      strobe::add(sum, lost, x);
    else
      sum += x;
  }
  // sum += dS^T of a tile
  __device__ __forceinline__ void add(Tile &sum, Tile &lost, const Part &p) const {
    Tile P, dS;
    if (!gradient.compute(P, dS, p)) return;
#pragma unroll
    for (int i = 0; i < 8 * kKeys * kQueries; ++i) {
      const int m = i / (8 * kQueries), n = i / 8 % kQueries, c = i / 4 % 2, e = i % 4;
      add(sum[m][n].x[c][e], lost[m][n].x[c][e], dS[m][n].x[c][e]);
    }
  }
  __device__ __forceinline__ void write(i32 b, i32 h, i64 i, i64 j, float x) const {
    using B = typename Element<F.bias>::type;
    *a.dbias.at<B>(b, h, i, j) = Convert<B>::from(x);
  }

  __device__ __forceinline__ void run() {
    // What dbias has an axis for is this block's share; the rest is summed.
    bool batches = a.dbias.stride[0] != 0, heads = a.dbias.stride[1] != 0, rows = a.dbias.stride[2] != 0, columns = a.dbias.stride[3] != 0;
    u32 index = blockIdx.x, tiles_q = (u32)div_up(in.seqlen_q, kTileQ), tiles_k = (u32)div_up(in.seqlen_k, kTileK);
    i32 own_k = columns ? (i32)(index % tiles_k) : 0;
    index = columns ? index / tiles_k : index;
    i32 own_q = rows ? (i32)(index % tiles_q) : 0;
    index = rows ? index / tiles_q : index;
    i32 own_h = heads ? (i32)(index % in.heads) : 0, own_b = batches ? (i32)(heads ? index / in.heads : index) : 0;

    Tile sum = {}, lost = {};
    for (i32 b = own_b; b < (batches ? own_b + 1 : in.batch); ++b) {
      for (i32 h = own_h; h < (heads ? own_h + 1 : in.heads); ++h) {
        for (i32 q = own_q; q < (rows ? own_q + 1 : (i32)tiles_q); ++q) {
          for (i32 k = own_k; k < (columns ? own_k + 1 : (i32)tiles_k); ++k) add(sum, lost, {b, h, q * kTileQ, k * kTileK});
        }
      }
    }

    __syncthreads();
    constexpr int kPitch = C.sums_pitch();
#pragma unroll
    for (int m = 0; m < kKeys; ++m) {
#pragma unroll
      for (int n = 0; n < kQueries; ++n) {
#pragma unroll
        for (int k = 0; k < 8; ++k) {
          int c = k / 4, r = k / 2 % 2, e = k % 2;
          sums[((gradient.key_warp * kKeys + m) * 16 + tile::lane_row(r)) * kPitch + (gradient.query_warp * kQueries + n) * 16 +
               tile::lane_column(c, e)] = sum[m][n].x[c][2 * r + e];
        }
      }
    }
    __syncthreads();
    i64 i0 = (i64)own_q * kTileQ, j0 = (i64)own_k * kTileK;
    if (rows && columns) {
      for (int n = thread; n < kTileQ * kTileK; n += kThreads) {
        int i = n / kTileK, j = n % kTileK;
        if (i0 + i < in.seqlen_q && j0 + j < in.seqlen_k) write(own_b, own_h, i0 + i, j0 + j, sums[j * kPitch + i]);
      }
    } else { // a sum over queries, keys or both
      for (int n = thread; n < (rows ? kTileQ : kTileK); n += kThreads) {
        float x = 0, lost = 0;
        for (int k = 0; k < (rows ? kTileK : kTileQ); ++k) add(x, lost, rows ? sums[k * kPitch + n] : sums[n * kPitch + k]);
        if (rows && i0 + n < in.seqlen_q) write(own_b, own_h, i0 + n, 0, x);
        if (columns && j0 + n < in.seqlen_k) write(own_b, own_h, 0, j0 + n, x);
        if (!rows) sums[n * kPitch] = x;
      }
      __syncthreads();
      if (!rows && !columns && thread == 0) {
        float x = 0, lost = 0;
        for (int n = 0; n < kTileK; ++n) add(x, lost, sums[n * kPitch]);
        write(own_b, own_h, 0, 0, x);
      }
    }
  }
};

} // namespace strobe::passes
