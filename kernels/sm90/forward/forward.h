// FlashAttention-2's forward on Hopper. A producer thread of the block (two warps where K and V are paged) has the copy engine load Q and,
// tile by tile, K and V into shared memory. Each of the other warpgroups, the consumers, owns 64 rows, and keeps their S, P, O, m and l in
// its registers. While the tensor cores compute P V of a tile, the warpgroup computes the softmax of the next tile (FlashAttention-3, Shah
// et al. 2024). The warpgroups issue products alternately (ping-pong). query_tile.h has the loop.
#pragma once
#include "assign.h"
#include "control.h"
#include "load.h"
#include "query_tile.h"

namespace strobe::sm90 {

template <Config C> struct Forward {
  using Arguments = ArgumentsOf<typename ForwardArgumentsOf<C.packed>::type, C.features.quant != 0>::type;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  static __device__ __forceinline__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    const SharedMemory<C> shared(shared_address(dynamic));
    if (threadIdx.x == 0) shared.begin();
    __syncthreads();
    const int warpgroup = __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 128, 0);
    if (warpgroup == 0) {
      registers_lower<C.registers_load>();
      if constexpr (C.features.quant) {
        if (threadIdx.x < 32)
          Control<C>{{a, a.in, shared}, {a, a.in, shared}}.all();
        else if constexpr (C.eight_bits)
          Transpose<C>{shared}.all();
        else
          Dequantise<C>{shared}.all();
        return;
      }
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

  // Clears the rows of Q that belong to no head, once. Whatever these rows held might overflow their sums, so that the whole tile would
  // follow the maxima.
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

  // Computes the query tiles, one after another, that assign.h assigns.
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
