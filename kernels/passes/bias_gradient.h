// dbias on tensor cores; device/bias_gradient.h has the loop.
#pragma once
#include "../device/bias_gradient.h"
#include "../device/tile_gradient.h"

namespace strobe::passes {

template <TileConfig C> struct BiasGradient {
  using Arguments = BackwardArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  static __device__ __forceinline__ void run(const Arguments &a) { bias_gradient<C.features.bias, Tile>(a); }

private:
  using Gradient = TileGradient<C>;
  static constexpr int kKeys = Gradient::kKeys, kQueries = Gradient::kQueries;

  struct Tile {
    using T = float;
    using Sum = typename Gradient::Tile;
    static constexpr int kTileQ = C.tile_q, kTileK = C.tile_k, kThreads = C.threads();
    static __device__ constexpr bool of_part() { return false; }
    const Gradient gradient;
    float *const sums; // the tile's sums, transposed; they replace the inputs
    typename Gradient::Place place;

    __device__ __forceinline__ Tile(const Arguments &a, unsigned char *shared) : gradient(a, shared), sums((float *)shared) {}

    // fp32 keeps the rounding error of a sum over thousands of tiles; for 16 bits the rounding of dS is larger.
    static __device__ __forceinline__ void add(float &sum, float &lost, float x) {
      if constexpr (C.dtype == kF32)
        strobe::add(sum, lost, x);
      else
        sum += x;
    }
    __device__ __forceinline__ bool take_queries(i32 b, i32 h, i32 q0) {
      place = {b, h, q0, 0};
      return true;
    }
    __device__ __forceinline__ void add(Sum &sum, Sum &lost, i32 k0) {
      Sum P, dS;
      place.k0 = k0;
      if (!gradient.compute(P, dS, place)) return;
#pragma unroll
      for (int i = 0; i < 8 * kKeys * kQueries; ++i) {
        const int m = i / (8 * kQueries), n = i / 8 % kQueries, c = i / 4 % 2, e = i % 4;
        add(sum[m][n].x[c][e], lost[m][n].x[c][e], dS[m][n].x[c][e]);
      }
    }
    __device__ __forceinline__ float &at(i32 query, i32 key) const { return sums[key * C.sums_pitch() + query]; }
    __device__ __forceinline__ void put(const Sum &sum) const {
#pragma unroll
      for (int m = 0; m < kKeys; ++m) {
#pragma unroll
        for (int n = 0; n < kQueries; ++n) {
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            const int c = k / 4, r = k / 2 % 2, e = k % 2;
            at((gradient.query_warp * kQueries + n) * 16 + tile::lane_column(c, e),
               (gradient.key_warp * kKeys + m) * 16 + tile::lane_row(r)) = sum[m][n].x[c][2 * r + e];
          }
        }
      }
    }
  };
};

} // namespace strobe::passes
