// The same sums of dQ on every run: tiles of keys add to a tile of queries in ascending order. For each warpgroup that computes, a thread
// of the loading one waits for its turn, and for the addition, which takes a while, unless the warps that compute add from registers (wide).
#pragma once
#include "../attention/turns.h"
#include "../ptx/tma.h"
#include "backward_shared.h"

namespace strobe::sm90 {

// Of a warpgroup's part of a tile of queries.
__device__ __forceinline__ u32 *turn_of(const HopperBackwardArguments &a, i32 number, int w) { return a.a.turns + 1 + 2 * (i64)number + w; }

template <BackwardConfig C> struct BackwardOrder {
  const HopperBackwardArguments &a;
  const BackwardShared<C> &shared;
  const int w;

  __device__ __forceinline__ void all() const {
    if (!a.a.dq_sum) return;
    const KeyBlock keys = read<KeyBlock>(shared.keys());
#pragma unroll 1
    for (u32 n = 0;; ++n) {
      mbarrier_wait(shared.dq_full(w), n % 2);
      const QueryStep step = read<QueryStep>(shared.dq_step(n));
      if (step.flags & kNothing) return;
      await_turn(keys, step);
      if constexpr (!C.wide) add(step.number);
      if (C.wide || !(step.flags & kLast)) mbarrier_arrive(shared.dq_empty(w));
      if (step.flags & kLast) return;
    }
  }

private:
  static constexpr u32 kAdders = C.wide ? 4 : 1; // each of whom ends a turn

  __device__ __forceinline__ void await_turn(const KeyBlock &keys, const QueryStep &step) const {
    constexpr bool kBlocks = C.features.blocks != 0;
    const Reach reach = read<Reach>(shared.reach());
    const BasicBand<i32> band{reach.seqlen_q, keys.seqlen_k, reach.low, reach.high, 0};
    const u32 before = key_tiles_before<kBlocks, C.tile_k()>(a.a.in, band, keys.batch, step.head, step.begin, keys.begin);
    const u32 *turn = turn_of(a, step.number, w);
    strobe::await_turn<kBlocks>(turn, load_acquire(turn), kAdders * before);
  }
  __device__ __forceinline__ void add(i32 number) const {
    async_proxy_fence_global();
    constexpr i64 kPart = 64 * C.dq_queries(); // of dQ, a warpgroup's
    bulk_add(a.a.dq_sum + (2 * (i64)number + w) * kPart, shared.dq + 4 * w * (u32)kPart, 4 * kPart);
    bulk_commit();
    bulk_wait();
    async_proxy_fence_global();
    end_turn(turn_of(a, number, w));
  }
};

} // namespace strobe::sm90
