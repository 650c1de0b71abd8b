// Adds a block's part of dQ to the sum over key tiles. The sum stores a tile of queries in the order in which the lanes of a warp hold it:
// 512 bytes for each eight queries of a warp. The sum lies in global memory. If one block owns dQ and heads have up to 64 columns, it lies
// in shared memory.
#pragma once
#include "../../device/hopper_dq.h"
#include "../../ptx/atomic.h"
#include "../../ptx/tma.h"
#include "../accumulator.h"
#include "shared.h"

namespace strobe::sm90 {

// The additions of one warpgroup, whose part of dQ is in registers. Where blocks own dQ, the warpgroup also rounds the complete sum.
template <BackwardConfig C> struct DqSum {
  using T = typename Element<C.dtype>::type;
  static constexpr int kM = C.tile_q, kN = C.dq_queries(), kOfThird = C.dq_queries_of_third();
  static_assert(!C.dq_sum_in_shared() || !C.dq_shared);
  static_assert(!C.third() || (!C.owns_dq && C.dq_shared == C.deterministic));
  const HopperBackwardArguments &a;
  const BackwardShared<C> &shared;
  const int w, lane, warp; // warpgroup; warp within it

  // The number of the first tile of queries in this block's part of dq_sum. (Where blocks own dQ, one (batch, key head) pair after the
  // other uses that part.)
  __device__ __forceinline__ i64 first_tile() const { return C.owns_dq ? (i64)blockIdx.x * (a.heads_of_keys * a.query_tiles) : 0; }

  // Adds dQ of iteration n to query tile `number`. The keys are those from `begin` on.
  __device__ __forceinline__ void add(const Accumulator<T, kN> &dQ, u32 n, i32 number, i32 begin) const {
    const bool first = C.owns_dq && begin == 0; // these keys come first and all queries see them, so the sum is still empty
    if constexpr (C.dq_sum_in_shared()) return add_in_shared(dQ, number, first);
    if (!a.dq_sum) return;
    float *const target = a.dq_sum + first_tile() * (kM * C.columns()) + (i64)number * (kM * C.columns()) + (w * 4 + warp) * (16 * kN);
    if constexpr (C.dq_shared) {
      add_from_shared(dQ, n, target, first);
    } else if (pads_dq<C>(w, warp)) {
    } else if (first) {
#pragma unroll
      for (int i = 0; i < kN / 8; ++i) store_global(target + 128 * i + 4 * lane, reinterpret_cast<const u32(&)[4]>(dQ.x[4 * i]));
    } else {
      add_quads(dQ, target);
    }
  }
  // Adds this warpgroup's half of the queries of dQ's third block of columns. Called before add().
  __device__ __forceinline__ void add_third(const Accumulator<T, kOfThird> &dQ, u32 n, i32 number) const {
    if (!a.dq_sum) return;
    if constexpr (C.dq_shared) wait_for_room(n);
    if (pads_dq<C>(2, warp)) return;
    if constexpr (C.dq_shared)
      stage(dQ, shared.dq + 4 * begin_of_third(kM, w, warp));
    else
      add_quads(dQ, a.dq_sum + (i64)number * (kM * C.columns()) + begin_of_third(kM, w, warp));
  }
  // Called after the last tile of queries of these keys.
  __device__ __forceinline__ void finish(const KeyBlock &keys) const {
    if constexpr (C.owns_dq) {
      if (!C.dq_sum_in_shared() && !a.dq_sum) return;
      if (C.dq_shared && lane == 0) bulk_wait();
      if (keys.begin + C.tile_k() >= keys.seqlen_k) round(keys);
    } else {
      if (C.dq_shared && !C.deterministic && lane == 0) bulk_wait_read();
    }
  }

private:
  // Waits until this warp may overwrite the shared memory in which it has staged dQ.
  __device__ __forceinline__ void wait_for_room(u32 n) const {
    if constexpr (C.deterministic) {
      mbarrier_wait(shared.dq_empty(w), n % 2 ^ 1);
    } else {
      if (lane == 0) bulk_wait_read();
      __syncwarp();
    }
  }
  template <int kQueries> __device__ __forceinline__ void stage(const Accumulator<T, kQueries> &dQ, u32 place) const {
#pragma unroll
    for (int i = 0; i < kQueries / 8; ++i) store_shared(place + 512 * i + 16 * lane, reinterpret_cast<const float (&)[4]>(dQ.x[4 * i]));
  }
  template <int kQueries> static __device__ __forceinline__ void add_quads(const Accumulator<T, kQueries> &dQ, float *target) {
#pragma unroll
    for (int i = 0; i < kQueries / 8; ++i) add_quad(target + 128 * i, reinterpret_cast<const float (&)[4]>(dQ.x[4 * i]));
  }
  __device__ __forceinline__ void add_from_shared(const Accumulator<T, kN> &dQ, u32 n, float *target, bool first) const {
    const u32 place = shared.dq + (w * 4 + warp) * (64 * kN);
    if constexpr (!C.third()) wait_for_room(n); // otherwise add_third has waited
    if (!pads_dq<C>(w, warp)) stage(dQ, place);
    async_proxy_fence();
    __syncwarp();
    if constexpr (C.deterministic) { // order.h adds it when its turn comes
      if (lane == 0) mbarrier_arrive(shared.dq_full(w));
    } else if (lane == 0 && !pads_dq<C>(w, warp)) {
      if (first)
        bulk_store(target, place, 64 * kN);
      else
        bulk_add(target, place, 64 * kN);
      bulk_commit();
    }
  }
  // The address of a lane's part of a tile's sum in shared memory. Only this lane adds to the part and reads it, so no barrier is needed.
  __device__ __forceinline__ u32 in_shared(i32 number) const {
    return shared.dq_sum() + number * C.dq_sum_bytes() + (w * C.dq_warps(0) + warp) * (64 * kN) + 16 * lane;
  }
  __device__ __forceinline__ void add_in_shared(const Accumulator<T, kN> &dQ, i32 number, bool first) const {
    if (pads_dq<C>(w, warp)) return;
    const u32 sum = in_shared(number);
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
      float x[4] = {0, 0, 0, 0};
      if (!first) load_shared<0>(x, sum + 512 * i);
#pragma unroll
      for (int k = 0; k < 4; ++k) x[k] += dQ.x[4 * i + k];
      store_shared(sum + 512 * i, x);
    }
  }
  // Rounds dQ of a (batch, key head) pair after all of the pair's keys have been added.
  __device__ __forceinline__ void round(const KeyBlock &keys) const {
    if constexpr (C.dq_sum_in_shared()) {
      if (pads_dq<C>(w, warp)) return;
    } else {
      async_proxy_fence_global();
      __syncwarp();
    }
    const Inputs &in = a.in;
    i64 number = C.dq_sum_in_shared() ? 0 : (i64)blockIdx.x * a.heads_of_keys * a.query_tiles;
#pragma unroll 1
    for (i32 h = 0; h < a.heads_of_keys; ++h) {
#pragma unroll 1
      for (i32 q = 0; q < in.seqlen_q; q += kM) round(keys.batch, keys.head_kv * a.heads_of_keys + h, q, number++);
    }
  }
  __device__ __forceinline__ void round(i32 batch, i32 head, i32 q, i64 number) const {
    const i32 rows = (i32)a.in.seqlen_q - q;
    if constexpr (C.dq_sum_in_shared()) {
      float4 sum[kN / 8];
#pragma unroll
      for (int i = 0; i < kN / 8; ++i) load_shared<0>(reinterpret_cast<float (&)[4]>(sum[i]), in_shared((i32)number) + 512 * i);
      store_dq<T, C.columns(), kM>(a, batch, head, q, rows, w, sum);
    } else {
      store_dq<T, C.columns(), kM>(a, batch, head, q, rows, number, w, false);
    }
  }
};

} // namespace strobe::sm90
