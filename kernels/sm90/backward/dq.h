// Where a block's part of dQ goes: to the sum over key tiles in global memory, which holds a tile of queries as the warps' lanes do, 512
// bytes for each eight queries of a warp.
#pragma once
#include "../../device/hopper_dq.h"
#include "../../ptx/atomic.h"
#include "../../ptx/tma.h"
#include "../accumulator.h"
#include "shared.h"

namespace strobe::sm90 {

// A warpgroup's part, in its registers; where blocks own dQ, its rounding as well.
template <BackwardConfig C> struct DqSum {
  using T = typename Element<C.dtype>::type;
  static constexpr int kM = C.tile_q, kN = C.dq_queries(), kThird = C.dq_queries_of_third();
  const HopperBackwardArguments &a;
  const BackwardShared<C> &shared;
  const int w, lane, warp; // warpgroup; warp within it

  // The tiles of queries of this block's (first) pair, where blocks own dQ.
  __device__ __forceinline__ i64 first_tile() const { return C.owns_dq ? (i64)blockIdx.x * (a.in.group * a.query_tiles) : 0; }

  // Of iteration n, of tile `number` of the queries and of keys from `begin` on: what begins, of a third block of columns; and the rest.
  __device__ __forceinline__ void begin(const Accumulator<T, kThird> &third, u32 n, i32 number, i32 begin) const {
    if (!C.third() || !a.dq_sum) return;
    if constexpr (C.dq_shared) wait_for_room(n);
    leave(third, target(number, of_third()), place_of_third(), adds_first(begin));
  }
  __device__ __forceinline__ void add(const Accumulator<T, kN> &dQ, u32 n, i32 number, i32 begin) const {
    if (!a.dq_sum) return;
    const bool first = adds_first(begin);
    float *const target = this->target(number, (w * 4 + warp) * (16 * kN));
    const u32 place = shared.dq + (w * 4 + warp) * (64 * kN);
    if constexpr (C.dq_shared && !C.third()) wait_for_room(n);
    leave(dQ, target, place, first);
    if constexpr (C.dq_shared) {
      async_proxy_fence();
      __syncwarp();
      if constexpr (C.deterministic) { // order.h adds it, in its turn
        if (lane == 0) mbarrier_arrive(shared.dq_full(w));
      } else if (lane == 0) {
        send<kN>(target, place, first);
        if constexpr (C.third()) send<kThird>(this->target(number, of_third()), place_of_third(), first);
        bulk_commit();
      }
    }
  }
  // Behind the last tile of queries.
  __device__ __forceinline__ void finish(const KeyBlock &keys) const {
    if constexpr (C.owns_dq) {
      if (!a.dq_sum) return;
      if (C.dq_shared && lane == 0) bulk_wait();
      if (keys.begin + C.tile_k() >= keys.seqlen_k) round(keys);
    } else {
      if (C.dq_shared && !C.deterministic && lane == 0) bulk_wait_read();
    }
  }

private:
  // Where this warp's part of the third block begins, in a tile.
  __device__ __forceinline__ int of_third() const { return begin_of_third(kM, w, warp); }
  __device__ __forceinline__ float *target(i32 number, int at) const {
    return a.dq_sum + first_tile() * (kM * C.columns()) + (i64)number * (kM * C.columns()) + at;
  }
  __device__ __forceinline__ u32 place_of_third() const { return shared.dq + 4 * of_third(); }
  // All queries see a pair's first keys, so that nobody has added yet.
  __device__ __forceinline__ bool adds_first(i32 begin) const { return C.owns_dq && begin == 0; }
  // Until what this warp has staged before has left.
  __device__ __forceinline__ void wait_for_room(u32 n) const {
    if constexpr (C.deterministic) {
      mbarrier_wait(shared.dq_empty(w), n % 2 ^ 1);
    } else {
      if (lane == 0) bulk_wait_read();
      __syncwarp();
    }
  }
  // From registers to the sum, or to shared memory.
  template <int kQueries>
  __device__ __forceinline__ void leave(const Accumulator<T, kQueries> &dQ, float *target, u32 place, bool first) const {
    if constexpr (C.dq_shared) {
#pragma unroll
      for (int i = 0; i < kQueries / 8; ++i) store_shared(place + 512 * i + 16 * lane, reinterpret_cast<const float (&)[4]>(dQ.x[4 * i]));
    } else if (first) {
#pragma unroll
      for (int i = 0; i < kQueries / 8; ++i) store_global(target + 128 * i + 4 * lane, reinterpret_cast<const u32(&)[4]>(dQ.x[4 * i]));
    } else {
#pragma unroll
      for (int i = 0; i < kQueries / 8; ++i) add_quad(target + 128 * i, reinterpret_cast<const float (&)[4]>(dQ.x[4 * i]));
    }
  }
  template <int kQueries> __device__ __forceinline__ void send(float *target, u32 place, bool first) const {
    if (first)
      bulk_store(target, place, 64 * kQueries);
    else
      bulk_add(target, place, 64 * kQueries);
  }
  // All keys of the pair are done.
  __device__ __forceinline__ void round(const KeyBlock &keys) const {
    async_proxy_fence_global();
    __syncwarp();
    const Inputs &in = a.in;
    i64 number = (i64)blockIdx.x * in.group * a.query_tiles;
#pragma unroll 1
    for (i32 h = 0; h < in.group; ++h) {
#pragma unroll 1
      for (i32 q = 0; q < in.seqlen_q; q += kM)
        store_dq<T, C.columns(), kM>(a, keys.batch, keys.head_kv * in.group + h, q, in.seqlen_q - q, number++, w, false);
    }
  }
};

} // namespace strobe::sm90
