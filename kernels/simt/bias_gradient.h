// dbias with plain FMA; device/bias_gradient.h has the loop.
#pragma once
#include "../device/bias_gradient.h"
#include "tile_gradient.h"

namespace strobe::simt {

template <Config C> struct BiasGradient {
  using Arguments = BackwardArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  static __device__ void run(const Arguments &a) { bias_gradient<C.features.bias, Tile>(a); }

private:
  struct Tile : TileGradient<C> {
    using Gradient = TileGradient<C>;
    using T = typename Gradient::T;
    using Gradient::P, Gradient::dS, Gradient::kRows, Gradient::kKeys;
    struct Sum {
      T x[kRows][kKeys];
    };
    static constexpr int kTileQ = C.tile_q, kTileK = C.tile_k, kThreads = C.threads();

    using Gradient::Gradient;
    static __device__ __forceinline__ void add(T &sum, T &lost, T x) { strobe::add(sum, lost, x); }
    __device__ __forceinline__ void add(Sum &sum, Sum &lost, i32 k0) {
      this->compute(k0, [&](const Scores<C.features, T> &, i32) {
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
          for (int j = 0; j < kKeys; ++j) add(sum.x[i][j], lost.x[i][j], dS[this->place(i, j)]);
      });
    }
    __device__ __forceinline__ T &at(i32 query, i32 key) const { return P[query * C.p_stride() + key]; }
    __device__ __forceinline__ void put(const Sum &sum) const {
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kKeys; ++j) P[this->place(i, j)] = sum.x[i][j];
    }
  };
};

} // namespace strobe::simt
