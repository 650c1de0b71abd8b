// FlashAttention-2's forward on Hopper. One thread of a block (where K and V lie in pages, two warps) has the copy engine bring Q and, tile
// by tile, K and V into shared memory; each of the other warpgroups owns 64 rows: S, P, O, m and l of them in its registers. While the
// tensor cores compute P V of one tile and Q K^T of the next, the warpgroup takes the softmax of the one between (FlashAttention-3, Shah et
// al. 2024); the warpgroups take turns at issuing. query_tile.h has the loop.
#pragma once
#include "assign.h"
#include "load.h"
#include "query_tile.h"

namespace strobe::sm90 {

template <Config C> struct Forward {
  using Arguments = ForwardArgumentsOf<C.packed>::type;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  static __device__ __forceinline__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    const SharedMemory<C> shared(shared_address(dynamic));
    if (threadIdx.x == 0) shared.begin();
    __syncthreads();
    const int warpgroup = __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 128, 0);
    if (warpgroup == 0) {
      registers_lower<C.registers_load>();
      if (Load<C>::kPaged ? threadIdx.x < 32 : threadIdx.x == 0) Load<C>{a, a.in, shared}.all();
      if (threadIdx.x == 64) LoadQ<C>{a, shared}.all();
      if (threadIdx.x == 32) Assign<C>{a, a.in, shared}.all();
      if constexpr (Load<C>::kPaged) {
        if (threadIdx.x >= 96) LoadV<C>{a, a.in, shared}.all();
      }
    } else {
      registers_raise<C.registers_compute>();
      compute(Warpgroup<C>(a, shared, warpgroup - 1));
    }
  }

  // Rows of Q that are no head's become 0, once. Of what happens to lie there sums may overflow, and the tile would follow its maxima.
  static __device__ __forceinline__ void clear_spare_rows(const Warpgroup<C> &group) {
    const u32 first = (u32)packed(group.a).packed * packed(group.a).queries.by, zeros[4] = {};
#pragma unroll 1
    for (i32 c = 0; c < C.columns(); c += 64) {
      const u32 block = group.q_address() + 64 * kRowBytes * (c / 64);
#pragma unroll 1
      for (u32 at = first * kRowBytes + threadIdx.x % 128 * 16; at < 64 * kRowBytes; at += 128 * 16) store_shared(block + at, zeros);
    }
    async_proxy_fence();
    group.together();
  }

  // Tile of queries by tile of queries, as they are assigned.
  static __device__ __forceinline__ void compute(Warpgroup<C> group) {
    if constexpr (C.packed && !C.invariant) clear_spare_rows(group);
    group.first_turn();
    for (;; ++group.items) {
      mbarrier_wait(group.shared.item_full(), group.items % 2);
      const Item item = read<Item>(group.shared.item());
      __syncwarp();
      group.release(group.shared.item_empty());
      if (item.kind() == kNone) break;
      mbarrier_wait(group.shared.q_full(group.w), group.items % 2);
      if constexpr (C.q_in_registers) group.load_q();
      if (C.repeats_chunks() && item.kind() != kFast)
        QueryTile<C>(group, item).compute_safely();
      else
        QueryTile<C>(group, item).compute();
    }
  }
};

} // namespace strobe::sm90
