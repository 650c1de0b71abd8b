// Gives dQ the same bits in every run: key tiles add to a query tile in ascending order. For each computing warpgroup one thread of the
// producer warpgroup waits for the key tile's turn, adds from shared memory, and ends the turn when the addition is complete. With `roles`
// the thread only waits; the computing warps then add from their registers and end the turn.
#pragma once
#include "../../device/turns.h"
#include "../../ptx/tma.h"
#include "part.h"

namespace strobe::sm90 {

// The counter of turns for one warpgroup's part of a tile of queries.
__device__ __forceinline__ u32 *turn_of(const HopperBackwardArguments &a, i32 number, int w) { return a.turns + 2 * (i64)number + w; }

template <BackwardConfig C> struct BackwardOrder {
  const HopperBackwardArguments &a;
  const BackwardShared<C> &shared;
  const int w;

  __device__ __forceinline__ void all() const {
    u32 n = 0;
    do n = all(n);
    while (other_keys<C>(shared, n));
  }

private:
  // Returns the number of the iteration after the last one with these keys.
  __device__ __forceinline__ u32 all(u32 n) const {
    const KeyBlock keys = read<KeyBlock>(shared.keys());
    mbarrier_wait(shared.dq_full(w), n % 2);
    if (read<QueryStep>(shared.dq_step(n)).flags & kNothing) {
      if constexpr (C.persistent) mbarrier_arrive(shared.keys_empty()), mbarrier_arrive(shared.dq_empty(w));
      return n + 1;
    }
    Turn next = turn(keys, n);
#pragma unroll 1
    for (;; ++n) {
      const Turn own = next;
      await_turn<C.features.blocks != 0>(own.at, own.seen, own.before);
      if constexpr (C.roles) {
        mbarrier_arrive(shared.dq_empty(w));
        if (own.last) return n + 1;
        next = turn(keys, n + 1);
      } else {
        add(own);
        if (C.persistent || !own.last) {
          bulk_wait_read();
          mbarrier_arrive(shared.dq_empty(w));
        }
        if (!own.last) next = turn(keys, n + 1);
        bulk_wait();
        async_proxy_fence_global();
        end_turn(own.at);
        if (own.last) return n + 1;
      }
      mbarrier_wait(shared.dq_full(w), (n + 1) % 2);
    }
  }

  static constexpr u32 kAdders = C.roles ? 4 : 1; // warps or threads that end the turn of one key tile

  struct Turn {
    u32 *at, before, seen;
    i32 number;
    bool last;
  };
  // The turn of iteration n. It is read while the addition of the previous iteration is in flight. The step of iteration n is already
  // written: the warpgroup that handed over the previous dQ had read that step before.
  __device__ __forceinline__ Turn turn(const KeyBlock &keys, u32 n) const {
    const QueryStep step = read<QueryStep>(shared.dq_step(n));
    const Reach reach = read<Reach>(shared.reach());
    if (C.persistent && (step.flags & kLast)) mbarrier_arrive(shared.keys_empty()); // the messages about these keys have been read
    const BasicBand<i32> band{reach.seqlen_q, keys.seqlen_k, reach.low, reach.high, 0};
    u32 *at = turn_of(a, step.number, w);
    const u32 seen = load_relaxed(at);
    if constexpr (C.features.part)
      return {at, kAdders * held_tiles_before(a.in, shared, step), seen, step.number, (step.flags & kLast) != 0};
    const u32 before = key_tiles_before<C.features.blocks != 0, C.tile_k()>(a.in, band, keys.batch, step.head, step.begin, keys.begin);
    return {at, kAdders * before, seen, step.number, (step.flags & kLast) != 0};
  }
  // Adds a warpgroup's part of dQ, except for columns of padding.
  __device__ __forceinline__ void add(const Turn &turn) const {
    async_proxy_fence_global();
    constexpr i64 kPart = 64 * C.dq_queries(); // numbers in a warpgroup's part of dQ
    float *const tile = a.dq_sum + (i64)turn.number * (C.tile_q * C.columns());
    constexpr int kLeft = C.dq_warps(0), kRight = C.dq_warps(1), kThird = C.third() ? C.dq_warps(2) : 0;
    const int warps = kLeft == kRight || w == 0 ? kLeft : kRight;
    add(turn, tile + w * kPart, shared.dq + 4 * w * (u32)kPart, (u32)kPart * warps);
#pragma unroll
    for (int warp = 0; warp < kThird; ++warp) {
      const i32 at = begin_of_third(C.tile_q, w, warp);
      add(turn, tile + at, shared.dq + 4 * at, 64 * C.dq_queries_of_third());
    }
    bulk_commit();
  }
  __device__ __forceinline__ void add(const Turn &turn, float *sum, u32 dQ, u32 bytes) const {
    if (turn.before == 0)
      bulk_store(sum, dQ, bytes);
    else
      bulk_add(sum, dQ, bytes);
  }
};

} // namespace strobe::sm90
