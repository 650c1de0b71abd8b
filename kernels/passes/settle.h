// Settles rows whose LSE is large (device/settle_row.h), on tensor cores.
#pragma once
#include "../device/settle_row.h"
#include "../device/tile_gradient.h"

namespace strobe::passes {

template <TileConfig C> struct Settle {
  using Arguments = BackwardArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;
  static_assert(C.query_warps == 1);

  static __device__ __forceinline__ void run(const Arguments &a) { settle_rows<Tile>(a); }

private:
  using Gradient = TileGradient<C>;
  static constexpr int kKeys = Gradient::kKeys, kQueries = Gradient::kQueries;

  struct Tile {
    using T = float;
    static constexpr i32 kDType = C.dtype, kThreads = C.threads(), kTileQ = C.tile_q;
    static constexpr i32 kOwn = 0;
    static __device__ constexpr Features features() { return C.features; }
    const Gradient gradient;
    float *const totals; // (key warp, P or dS, query); takes the tiles' place in shared memory

    __device__ __forceinline__ Tile(const Arguments &a, unsigned char *shared) : gradient(a, shared), totals((float *)shared) {}

    __device__ __forceinline__ RowSums<float> row_sums(i32 b, i32 h, const Sequence &sequence, i32 q0) const {
      Sum P_sums[4 * kQueries], dS_sums[4 * kQueries]; // over this lane's keys
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
          P_sums[k].add(p), dS_sums[k].add(ds);
        }
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < 4 * kQueries; ++k) {
        const float p = over_keys(P_sums[k].sum), ds = over_keys(dS_sums[k].sum);
        float *const total = totals + gradient.key_warp * 2 * C.tile_q + 16 * (k / 4) + tile::lane_column(k / 2 % 2, k % 2);
        if (tile::lane_row(0) == 0) total[0] = p, total[C.tile_q] = ds;
      }
      __syncthreads();
      RowSums<float> sums = {0, 0};
      if (const i32 t = (i32)threadIdx.x; t < C.tile_q)
        for (int w = 0; w < C.key_warps; ++w) sums.P += totals[2 * w * C.tile_q + t], sums.dS += totals[(2 * w + 1) * C.tile_q + t];
      return sums;
    }
  };
  struct Sum { // a sum and its rounding error (Kahan)
    float sum = 0, lost = 0;
    __device__ __forceinline__ void add(float x) { strobe::add(sum, lost, x); }
  };
  // The sum over the lanes with the same queries.
  static __device__ __forceinline__ float over_keys(float x) {
#pragma unroll
    for (int n = 4; n < 32; n *= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, n);
    return x;
  }
};

} // namespace strobe::passes
