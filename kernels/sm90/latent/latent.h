// The forward of latent attention (DeepSeek-V2, Liu et al. 2024) on Hopper: V is the first 512 columns of K, which has up to 576, so that a
// tile of K is loaded once and serves both products. O of 64 rows takes half of an SM's registers; two warpgroups divide its columns. The
// warpgroups compute S of alternate tiles of keys, and exchange P through shared memory: while one multiplies, the other exponentiates, as
// FlashMLA's "seesaw" does (DeepSeek 2025). Rows are (query head, query) pairs, since all query heads of a key head share its keys.
#pragma once
#include "epilogue.h"
#include "load.h"

namespace strobe::sm90::latent {

template <Config C> struct Latent {
  using Arguments = LatentArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 1;
  static constexpr int kRegistersLoad = 40, kRegistersCompute = 232; // of a thread that loads, and of one that computes
  static_assert(!C.features.blocks && !C.features.mask && !C.features.bias && !C.features.penalty && !C.features.dropout &&
                !C.features.part && !C.features.quant && !C.features.program && !(C.invariant && C.uneven));

  static __device__ __forceinline__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    const Shared shared(shared_address(dynamic));
    const Item item = item_of<C>(a);
    if (item.b < 0) return;
    if (threadIdx.x == 0) shared.begin();
    __syncthreads();
    const int warpgroup = __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 128, 0);
    if (warpgroup == 0) {
      registers_lower<kRegistersLoad>();
      if (threadIdx.x < 32) Load<C>{a, shared, item}.all();
    } else {
      registers_raise<kRegistersCompute>();
      warpgroup == 1 ? compute<0>(a, shared, item) : compute<1>(a, shared, item);
    }
  }

private:
  template <int kW> static __device__ __forceinline__ void compute(const Arguments &a, const Shared &shared, const Item &item) {
    Warpgroup<C, kW> group(a, shared, item);
    clear_spare_rows(a, shared);
    mbarrier_wait(shared.q_full(), 0);
    group.restart();
    const i32 pairs = item.pairs();
    bool first = true;
    if (pairs) group.begin(0);
#pragma unroll 1
    for (i32 n = 0; n < pairs; ++n) {
      const bool more = n + 1 < pairs, ends = C.walks_chunks() && more && item.key(n + 1, 0) % C.chunk() == 0;
      group.step(n, more, more && !ends);
      if (C.walks_chunks() && ends) {
        Epilogue<C, kW>{group, a, item}.store(first, false);
        group.restart();
        group.begin(n + 1);
        first = false;
      }
    }
    Epilogue<C, kW>{group, a, item}.store(first, true);
  }

  // Clears the rows of Q that belong to no head. What they held could make them rescale for nothing.
  static __device__ __forceinline__ void clear_spare_rows(const Arguments &a, const Shared &shared) {
    const u32 used = a.queries.by * (u32)a.packed, zeros[4] = {};
#pragma unroll 1
    for (int c = 0; c < kColumns / 64; ++c)
#pragma unroll 1
      for (u32 at = used * kRowBytes + 16 * (threadIdx.x - 128); at < kBlockBytes; at += 16 * 256)
        store_shared(shared.q + kBlockBytes * c + at, zeros);
    async_proxy_fence();
    barrier_sync(kConsumers, 256);
  }
};

} // namespace strobe::sm90::latent
