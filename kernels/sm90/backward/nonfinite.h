// How the Hopper backward keeps infinities and NaN out of elements that must not see them. The P of such elements is 0, but 0 times
// infinity is NaN, so infinities and NaN are replaced in the tiles.
#pragma once
#include "../../device/nonfinite.h"
#include "../../ptx/tma.h"
#include "../../tile/registers.h"
#include "../accumulator.h"
#include "shared.h"

namespace strobe::sm90 {

template <BackwardConfig C> struct BackwardNonfinite {
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  static constexpr int kM = C.tile_q;
  // Whether any tile may hide elements, and not only tiles that are masked by position. Invariant kernels treat all tiles as if it did.
  static constexpr bool kHides = F.hides() || C.invariant;
  // Named barriers: at kTogether + w the threads of warpgroup w meet, at kBoth those of both warpgroups.
  static constexpr int kTogether = 2, kBoth = kTogether + C.kWarpgroups;

  const BackwardShared<C> &shared;
  const int w, half, lane, warp; // the warpgroup; and which 64 of the block's keys

  __device__ __forceinline__ BackwardNonfinite(const BackwardShared<C> &shared, int w)
      : shared(shared), w(w), half(C.roles ? 0 : w), lane(this_thread<C>() % 32),
        warp(__shfl_sync(0xFFFFFFFFu, this_thread<C>() / 32 % 4, 0)) {}

  static __device__ __forceinline__ bool masked(const QueryStep &step) { return step.flags & kMasked; }

  // Clears rows of Q and dO: those of queries whose LSE or D is not finite, which see nothing, or which do not exist. A hidden element must
  // add 0 whatever its row holds. A visible element of such a row adds NaN in any case, because its P is NaN. One warpgroup clears Q and
  // the other one dO, after both have finished their products of this tile so far (S; with `roles` S and dP).
  __device__ __forceinline__ void clear_nonfinite_queries(const QueryStep &step, u32 n) const {
    if (!kHides && !masked(step)) return; // nothing is hidden
    bool found = false;
#pragma unroll
    for (int i = 0; i < (kM + 31) / 32; ++i) found |= !finite(n, min(32 * i + lane, kM - 1));
    if (!__any_sync(0xFFFFFFFFu, found)) return;
    wait_full(shared.dout_full(n), n);
    barrier_sync(kBoth, 128 * C.kWarpgroups);
    const int row = 32 * warp + lane, blocks = w ? C.columns_v() / 64 : C.columns() / 64;
    if (row < kM && !finite(n, row)) {
      const u32 zero[4] = {0, 0, 0, 0}, begin = (w ? shared.dout_of(n) : shared.q_of(n)) + row * kRowBytes;
#pragma unroll 1
      for (int block = 0; block < blocks; ++block) {
#pragma unroll 1
        for (u32 c = 0; c < kRowBytes; c += 16) store_shared(begin + block * kM * kRowBytes + c, zero);
      }
    }
    both();
    // Only ptxas needs this second barrier: before a barrier whose number is constant it computes the arguments of all exponentials at once
    // (docs/lab/hopper-backward.md, step 25; not measured again since step 33).
    together();
  }
  // Whether some of these keys may be hidden from a query.
  __device__ __forceinline__ bool hides() const { return F.band || kHides || absent(); }
  // Whether this tile reaches past the sequence's last key.
  __device__ __forceinline__ bool absent() const {
    const KeyBlock keys = read<KeyBlock>(shared.keys());
    return keys.begin + C.tile_k() > keys.seqlen_k;
  }
  // Whether this warp's rows of K have to be cleared. The first scores tell: if a row of K is not finite, no score of that key is finite.
  __device__ __forceinline__ bool shows_nonfinite(const Accumulator<T, kM> &S) const {
    const bool one_of_each_key = finite(__float_as_uint(S.x[0])) && finite(__float_as_uint(S.x[2]));
    return __any_sync(0xFFFFFFFFu, absent() || !one_of_each_key);
  }
  // Replaces numbers of this warp's 16 keys that are not finite: in V by 0, in K (kLargest) by the largest finite number, because a score
  // may have to overflow to -inf as before. Queries that see such a key still get NaN, because their LSE (for K) or D (for V) is not
  // finite. Keys past the sequence become 0, because they may be so large that dP overflows. No barrier is needed: this warp has computed
  // its first scores, and no other warp's scores depend on these keys.
  template <bool kLargest> __device__ __forceinline__ void clear_nonfinite_keys(u32 tile, int blocks) const {
    const KeyBlock keys = read<KeyBlock>(shared.keys());
    const int first = 64 * half + 16 * warp, there = keys.seqlen_k - keys.begin - first;
#pragma unroll 1
    for (int i = lane; i < 128 * blocks; i += 32) { // 16 bytes at a time: 8 chunks in a row, 16 rows in a block of columns
      const int row = i / 8 % 16;
      const u32 place = tile + (i / 128 * C.tile_k() + first + row) * kRowBytes + i % 8 * 16;
      u32 x[4], bad[4];
      load_shared(x, place);
#pragma unroll
      for (int k = 0; k < 4; ++k) bad[k] = nonfinite<T>(x[k]);
      if (!(bad[0] | bad[1] | bad[2] | bad[3] | (row >= there))) continue;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (row >= there) x[k] = 0, bad[k] = 0;
        const u32 all = spread(bad[k]);
        x[k] = (x[k] & (~all | 0x80008000u)) | (kLargest ? all & (0x7FFF7FFFu - ExponentBits<T>::kUnit) : 0);
      }
      store_shared(place, x);
    }
    async_proxy_fence();
    __syncwarp();
  }
  // Makes what both warpgroups have written visible to wgmma.
  __device__ __forceinline__ void both() const {
    async_proxy_fence();
    barrier_sync(kBoth, 128 * C.kWarpgroups);
  }
  // Makes what this warpgroup has written visible to wgmma.
  __device__ __forceinline__ void together() const {
    async_proxy_fence();
    barrier_sync(kTogether + w, 128);
  }

private:
  static __device__ __forceinline__ bool finite(u32 bits) { return (bits & 0x7F800000) != 0x7F800000; }
  __device__ __forceinline__ bool finite(u32 n, int row) const { return finite(load_shared(shared.lse_of(n) + 4 * row)); }
};

} // namespace strobe::sm90
