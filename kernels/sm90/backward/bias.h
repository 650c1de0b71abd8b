// A 16-bit bias that the copy engine loads together with Q. In shared memory its rows are queries. A lane reads it transposed, in the order
// in which the lane holds S^T.
#pragma once
#include "../../ptx/ldmatrix.h"
#include "../../ptx/math.h"
#include "shared.h"

namespace strobe::sm90 {

// Kernels without such a bias have nothing to load.
template <BackwardConfig C, bool = C.bias_by_tma != 0> struct BackwardBias {
  template <class... Whatever> __device__ __forceinline__ explicit BackwardBias(const Whatever &...) {}
  __device__ __forceinline__ void take(int) {}
};

// The bias of 64 keys and a tile's queries. A bias that is broadcast over queries has a single row.
template <BackwardConfig C> struct BackwardBias<C, true> {
  using E = typename Element<C.features.bias>::type;
  u32 address, step; // the address of this lane's 16 bytes for the first 16 queries, and the distance to those for the next 16
  u32 x[4];

  // half: which 64 of the block's keys; warp: the warp's number within its warpgroup.
  __device__ __forceinline__ BackwardBias(const BackwardShared<C> &shared, u32 n, bool rows, int half, int warp, int lane) {
    const int row = rows ? lane / 16 * 8 + lane % 8 : 0, chunk = 2 * warp + lane / 8 % 2;
    address = shared.bias_of(n) + half * C.tile_q * kRowBytes + row * kRowBytes + ((chunk ^ row % 8) << 4);
    step = rows ? 16 * kRowBytes : 0;
  }
  // Loads the bias of the lane's eight scores from score 8 i on.
  __device__ __forceinline__ void take(int i) { ldmatrix_transposed(x, address + i * step); }
  // The bias of score i, which take() has loaded.
  __device__ __forceinline__ float at(int i) const { return to_float(E{(unsigned short)(x[i / 2 % 4] >> 16 * (i % 2))}); }
};

} // namespace strobe::sm90
