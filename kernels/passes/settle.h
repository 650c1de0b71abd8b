// Rows whose LSE is large (settle_row.h), on tensor cores.
#pragma once
#include "../device/settle_row.h"
#include "../device/tile_gradient.h"

namespace strobe::passes {

// A block of threads takes a tile of queries, and leaves at once where no LSE is large. After D.
template <TileConfig C> struct Settle {
  using Arguments = BackwardArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;
  static_assert(C.query_warps == 1 && C.tile_q <= kThreads);

  static __device__ __forceinline__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Inputs &in = a.in;
    const u32 tiles = (u32)div_up(in.seqlen_q, C.tile_q), pair = blockIdx.x / tiles;
    const i32 b = (i32)(pair / in.heads), h = (i32)(pair % in.heads), q0 = (i32)(blockIdx.x % tiles) * C.tile_q, t = (i32)threadIdx.x;
    const Sequence sequence = in.sequence(b);
    const bool mine = t < C.tile_q && q0 + t < sequence.band.seqlen_q;
    const i64 row = sequence.q0 + q0 + t;
    const float lse = mine ? *a.lse.at<const float>(b, h, row, 0) : 0.0f;
    if (!__syncthreads_or(large_lse<C.dtype>(lse))) return;

    using Gradient = TileGradient<C>;
    constexpr int kKeys = Gradient::kKeys, kQueries = Gradient::kQueries;
    const Gradient gradient(a, shared);
    Sum sums[4 * kQueries], rests[4 * kQueries]; // of this lane's keys
    for (i32 k0 = 0; k0 < sequence.band.seqlen_k; k0 += C.tile_k) {
      typename Gradient::Tile P, dS;
      if (!gradient.compute(P, dS, {b, h, q0, k0})) continue;
#pragma unroll
      for (int k = 0; k < 4 * kQueries; ++k) {
        float p = 0, ds = 0;
#pragma unroll
        for (int m = 0; m < 2 * kKeys; ++m) {
          p += fabsf(P[m / 2][k / 4].x[k / 2 % 2][2 * (m % 2) + k % 2]);
          ds += dS[m / 2][k / 4].x[k / 2 % 2][2 * (m % 2) + k % 2];
        }
        sums[k].add(p), rests[k].add(ds);
      }
    }

    __syncthreads(); // the tiles' place is the sums' now: (key warp, which, query)
    float *const totals = (float *)shared;
#pragma unroll
    for (int k = 0; k < 4 * kQueries; ++k) {
      const float p = over_keys(sums[k].sum), ds = over_keys(rests[k].sum);
      float *const total = totals + gradient.key_warp * 2 * C.tile_q + 16 * (k / 4) + tile::lane_column(k / 2 % 2, k % 2);
      if (tile::lane_row(0) == 0) total[0] = p, total[C.tile_q] = ds;
    }
    __syncthreads();
    if (!mine) return;
    float sum = 0, rest = 0;
    for (int w = 0; w < C.key_warps; ++w) sum += totals[2 * w * C.tile_q + t], rest += totals[(2 * w + 1) * C.tile_q + t];
    settle_row(a, b, h, row, lse, sum, rest);
  }

private:
  struct Sum { // with what its roundings lost (Kahan)
    float sum = 0, lost = 0;
    __device__ __forceinline__ void add(float x) { strobe::add(sum, lost, x); }
  };
  // Of the lanes with the same queries.
  static __device__ __forceinline__ float over_keys(float x) {
#pragma unroll
    for (int n = 4; n < 32; n *= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, n);
    return x;
  }
};

} // namespace strobe::passes
