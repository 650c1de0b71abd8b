// The same sums of dQ on every run: tiles of keys add to a tile of queries in ascending order. For each warpgroup that computes, a thread
// of the loading one waits for its turn and for the addition, which takes a while.
#pragma once
#include "../ptx/tma.h"
#include "backward_shared.h"

namespace strobe::sm90 {

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
      u32 *const turn = a.a.turns + 1 + 2 * (i64)step.number + w;
      const u32 before = tiles_before(keys, step.begin);
      while (load_acquire(turn) != before) {}
      async_proxy_fence_global();
      constexpr i64 kPart = 64 * C.dq_queries(); // of dQ, a warpgroup's
      bulk_add(a.a.dq_sum + (2 * (i64)step.number + w) * kPart, shared.dq + 4 * w * (u32)kPart, 4 * kPart);
      bulk_commit();
      bulk_wait();
      async_proxy_fence_global();
      store_release(turn, before + 1);
      if (step.flags & kLast) return;
      mbarrier_arrive(shared.dq_empty(w));
    }
  }

private:
  // Tiles of smaller keys that add to dQ of the queries from q on.
  __device__ __forceinline__ u32 tiles_before(const KeyBlock &keys, i32 q) const {
    const Reach reach = read<Reach>(shared.reach());
    const i32 first = C.features.band ? max(0, reach.low + q) / C.tile_k() : 0;
    return (u32)(keys.begin / C.tile_k() - first);
  }
};

} // namespace strobe::sm90
