// dQ, dK and dV of attention on Hopper (FlashAttention-2's backward). A block of threads owns 128 keys, each of its two warpgroups that
// compute 64 of them; two threads have the copy engine bring K, V and, tile by tile, Q and dO. Of each tile of queries a warpgroup computes
//
//   S^T = K Q^T, P^T = exp(S^T - LSE)        dP^T = V dO^T, dS^T = P^T (dP^T - D)
//   dV += P^T dO                             dK += dS^T Q                             dQ^T = K^T dS^T, added up in global memory
//
// S is transposed, so that P and dS are operands where they lie, in registers; dS goes to shared memory for dQ, which needs both
// warpgroups'. dQ is one iteration late and S one early: the warpgroups do not wait for one another, and one multiplies while the other
// exponentiates.
#pragma once
#include "../../device/hopper_dq.h"
#include "run.h"
#include "scores.h"

namespace strobe::sm90 {

template <BackwardConfig C> struct Backward {
  using Arguments = HopperBackwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  static constexpr bool kWaitsItself = true; // for the launch before: load.h
  static constexpr int kThreads = C.kThreads, kBlocksPerSm = 1;
  static constexpr int kD = C.head_dim, kDv = C.head_dim_v, kM = C.tile_q, kTileK = C.tile_k();
  static constexpr int kComputing = 128 * C.kWarpgroups;

  static_assert(!C.wide && kD <= 128 && kDv <= 128);
  static_assert(!C.keys_in_registers || (kD <= 64 && kDv <= 64));
  static_assert(!(F.dropout || F.function) || C.exact_p, "dS is made of what S becomes");

  // Tiles of queries that see none of a warpgroup's keys are few: where registers are short they are computed all the same.
  static constexpr bool kSkips = F.band && !F.function;
  // Named barrier: the first warpgroup has its first scores. The second one begins then, so that they are out of step.
  static constexpr int kStagger = 1;

  struct Compute {
    const Arguments &a;
    const BackwardShared<C> &shared;
    const int w, lane, warp; // warpgroup; warp within it
    const BackwardScores<C> scores;
    float dK[kD / 2], dV[kDv / 2];
    float S[kM / 2], dP[kM / 2], dQ[C.dq_queries() / 2];
    u32 P[kM / 4], dS[kM / 4];
    u32 K[C.keys_in_registers ? kD / 4 : 1], V[C.keys_in_registers ? kDv / 4 : 1]; // of this warpgroup's keys

    __device__ __forceinline__ Compute(const Arguments &a, const BackwardShared<C> &shared, const KeyBlock &keys, int w)
        : a(a), shared(shared), w(w), lane(this_thread<C>() % 32), warp(__shfl_sync(0xFFFFFFFFu, this_thread<C>() / 32 % 4, 0)),
          scores(shared, a.in, keys, w) {}

    // n: the first iteration's number. Returns that of the one after the last.
    __device__ __forceinline__ u32 all(u32 n) {
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) dK[i] = 0;
#pragma unroll
      for (int i = 0; i < kDv / 2; ++i) dV[i] = 0;
      registers_changed(dK);
      registers_changed(dV);
      wait_full(shared.q_full(n), n);
      const QueryStep step = read<QueryStep>(shared.step(n));
      const bool nothing = step.flags & kNothing;
      i32 last = 0;
      if (!nothing)
        last = walk(step, n);
      else if constexpr (C.deterministic)
        scores.release(shared.dq_full(w));
      const KeyBlock keys = read<KeyBlock>(shared.keys());
      if constexpr (C.owns_dq) {
        __syncwarp();
        for (u32 read : {shared.q_empty(n), shared.ds_empty(n), shared.keys_empty()}) scores.release(read);
      }
      if (!nothing) add_dq(n, last, keys.begin);
      finish(keys);
      return n + 1;
    }

    // All tiles of queries, but for the last one's dQ, which is there and not added yet. Returns its number.
    __device__ __forceinline__ i32 walk(QueryStep step, u32 &n) {
      mbarrier_wait(shared.k_full(), n >> 31);
      if (w == 1) barrier_sync(kStagger, kComputing);
      multiply_first_s(n);
      mbarrier_wait(shared.v_full(), n >> 31);
      clear_nonfinite_keys();
      if constexpr (C.keys_in_registers) load_rows(K, shared.k), load_rows(V, shared.v);
      i32 before = C.owns_dq ? -1 : 0; // the number of the tile of the iteration before, if there was one
#pragma unroll 1
      for (;; ++n) {
        u32 more, next;
        if (!kSkips || !(step.flags & kUnseen << w)) {
          const u32 allowed = scores.allowed(step);
          wgmma_wait<0>();
          registers_changed(S);
          if (!later(n, before) && w == 0) barrier_arrive(kStagger, kComputing);
          scores.exponentiate(S, P, n, step, allowed);
          scores.round(P, S);
          wait_full(shared.dout_full(n), n);
          multiply_dp(n);
          multiply_dv(n);
          wgmma_wait<1>();
          registers_changed(dP);
          differentiate(n);
          scores.hand_on(dS, n);
          multiply_dk(n);
          wgmma_wait<1>();
          registers_changed(dV);
          registers_changed(P);
          scores.release(shared.dout_empty(n));
          more = !(step.flags & kLast), next = n + more;
          if (later(n, before)) {
            wait_full(shared.ds_full(n - 1), n - 1);
            multiply_dq(n - 1);
            wgmma_wait<1>();
            registers_changed(dK);
            registers_changed(dS);
            go_on(n, more, before);
          } else {
            wgmma_wait<0>();
            registers_changed(dK);
            registers_changed(dS);
            if (more) scores.release(shared.q_empty(n));
            wait_full(shared.q_full(next), next);
            multiply_s(next);
          }
        } else { // no product of these keys but dQ, of which the other warpgroup has made dS
          wgmma_wait<0>();
          registers_changed(S);
          if (!later(n, before) && w == 0) barrier_arrive(kStagger, kComputing);
          scores.hand_on_nothing(n);
          scores.release(shared.dout_empty(n));
          more = !(step.flags & kLast), next = n + more;
          if (later(n, before)) {
            wait_full(shared.ds_full(n - 1), n - 1);
            multiply_dq(n - 1);
            go_on(n, more, before);
          } else {
            if (more) scores.release(shared.q_empty(n));
            wait_full(shared.q_full(next), next);
            multiply_s(next);
          }
        }
        before = step.number;
        if (!more) break;
        step = read<QueryStep>(shared.step(next));
      }
      wgmma_wait<0>();
      registers_changed(S);
      wait_full(shared.ds_full(n), n);
      multiply_dq(n);
      wgmma_wait<0>();
      registers_changed(dQ);
      return before;
    }

    // Has there been an iteration with these keys?
    static __device__ __forceinline__ bool later(u32 n, i32 before) { return C.owns_dq ? before >= 0 : n > 0; }
    // Under way, alone: dQ of the iteration before n. Then S of the next one, in vain after the last tile.
    __device__ __forceinline__ void go_on(u32 n, u32 more, i32 before) {
      const u32 next = n + more;
      if (more) scores.release(shared.q_empty(n));
      wait_full(shared.q_full(next), next);
      multiply_s(next);
      wgmma_wait<1>();
      registers_changed(dQ);
      scores.release(shared.ds_empty(n - 1));
      add_dq(n - 1, before, C.owns_dq ? (i32)load_shared(shared.keys() + 8) : 0);
    }

    // K may yet hold what is no number, and is not in registers.
    __device__ __forceinline__ void multiply_first_s(u32 n) {
      multiply_transposed<T, kD, kTileK, kM>(S, shared.k + 64 * kRowBytes * w, shared.q_of(n));
    }
    __device__ __forceinline__ void multiply_s(u32 n) {
      if constexpr (C.keys_in_registers)
        multiply_transposed<T, kD, kM>(S, K, shared.q_of(n));
      else
        multiply_first_s(n);
    }
    __device__ __forceinline__ void multiply_dp(u32 n) {
      if constexpr (C.keys_in_registers)
        multiply_transposed<T, kDv, kM>(dP, V, shared.dout_of(n));
      else
        multiply_transposed<T, kDv, kTileK, kM>(dP, shared.v + 64 * kRowBytes * w, shared.dout_of(n));
    }
    // This warp's 16 rows of up to 64 columns of the keys, as a left operand.
    template <int kWords> __device__ __forceinline__ void load_rows(u32 (&x)[kWords], u32 base) const {
      const int row = 64 * w + 16 * warp + lane % 16;
#pragma unroll
      for (int c = 0; c < kWords / 4; ++c)
        ldmatrix(reinterpret_cast<u32(&)[4]>(x[4 * c]), base + row * kRowBytes + (((2 * c + lane / 16) ^ row % 8) << 4));
    }
    __device__ __forceinline__ void multiply_dv(u32 n) { multiply_add<T, kM, kDv>(dV, P, shared.dout_of(n)); }
    __device__ __forceinline__ void multiply_dk(u32 n) { multiply_add<T, kM, kD>(dK, dS, shared.q_of(n)); }
    // This warpgroup's part of dQ.
    static constexpr bool kByColumns = C.columns() > 64;
    __device__ __forceinline__ u32 columns_of_k() const { return shared.k + (kByColumns ? w * kTileK * kRowBytes : 0); }
    __device__ __forceinline__ void multiply_dq(u32 n) {
      sm90::multiply_dq<T, kTileK, kM, C.dq_queries()>(dQ, columns_of_k(),
                                                       shared.ds_of(n) + (kByColumns ? 0 : w * C.dq_queries() * kRowBytes));
    }
    __device__ __forceinline__ void clear_nonfinite_keys() const {
      scores.template clear_nonfinite_keys<true>(columns_of_k(), kTileK * kRowBytes);
#pragma unroll
      for (int block = 0; block < C.columns_v() / 64; ++block)
        scores.template clear_nonfinite_keys<false>(shared.v + (block * kTileK + 64 * w) * kRowBytes, 64 * kRowBytes, 64 * w);
      scores.together();
    }

    // dP -> dS. What is hidden stays 0, though D may be no number: of a row that sees a V which is none.
    __device__ __forceinline__ void differentiate(u32 n) {
      constexpr bool kHidden = F.band || BackwardScores<C>::kHides;
      const u32 delta = shared.delta_of(n) + lane % 4 * 8;
      const float factor = scores.dropout.dropout.factor();
#pragma unroll
      for (int i = 0; i < kM / 8; ++i) {
        float D[2];
        load_shared(D, delta + 32 * i);
        auto dS_of = [&](int k) {
          const int at = 4 * i + k;
          const float p = C.exact_p ? S[at] : tile::unpacked<T>(P[at / 2], k % 2);
          if (kHidden && C.exact_p && p == 0) return 0.0f;
          if constexpr (F.dropout) return fabsf(p) * ((__float_as_uint(p) >> 31 ? 0.0f : dP[at] * factor) - D[k % 2]);
          return p * (dP[at] - D[k % 2]);
        };
        dS[2 * i] = pack<T>(dS_of(0), dS_of(1)), dS[2 * i + 1] = pack<T>(dS_of(2), dS_of(3));
        if constexpr (kHidden && !C.exact_p) dS[2 * i] &= nonzero_pairs<T>(P[2 * i]), dS[2 * i + 1] &= nonzero_pairs<T>(P[2 * i + 1]);
      }
    }
    // Where blocks own dQ, this one's part.
    __device__ __forceinline__ float *part_of_dq_sum() const {
      return a.dq_sum + (C.owns_dq ? (i64)blockIdx.x * (a.in.group * a.query_tiles) * (kM * C.columns()) : 0);
    }
    // dQ of iteration n, of keys from `begin` on, to the sum over key tiles, which holds a tile of queries as the warps' lanes do: 512
    // bytes for each eight queries of a warp.
    __device__ __forceinline__ void add_dq(u32 n, i32 number, i32 begin) {
      if (!a.dq_sum) return;
      const bool first = C.owns_dq && begin == 0; // which all queries see: nobody has added yet
      constexpr int kN = C.dq_queries();
      float *target = part_of_dq_sum() + (i64)number * (kM * C.columns()) + (w * 4 + warp) * (16 * kN);
      if constexpr (C.dq_shared) {
        const u32 place = shared.dq + (w * 4 + warp) * (64 * kN);
        if constexpr (C.deterministic) {
          mbarrier_wait(shared.dq_empty(w), n % 2 ^ 1);
        } else {
          if (lane == 0) bulk_wait_read();
          __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < kN / 8; ++i) store_shared(place + 512 * i + 16 * lane, reinterpret_cast<const float (&)[4]>(dQ[4 * i]));
        async_proxy_fence();
        __syncwarp();
        if constexpr (C.deterministic) {
          scores.release(shared.dq_full(w));
        } else if (lane == 0) {
          if (first)
            bulk_store(target, place, 64 * kN);
          else
            bulk_add(target, place, 64 * kN);
          bulk_commit();
        }
      } else if (first) {
#pragma unroll
        for (int i = 0; i < kN / 8; ++i) store_global(target + 128 * i + 4 * lane, reinterpret_cast<const u32(&)[4]>(dQ[4 * i]));
      } else {
#pragma unroll
        for (int i = 0; i < kN / 8; ++i) add_quad(target + 128 * i, reinterpret_cast<const float (&)[4]>(dQ[4 * i]));
      }
    }
    // dK and dV to memory; after the last keys dQ, too.
    __device__ __forceinline__ void finish(const KeyBlock &keys) const {
      const Inputs &in = a.in;
      scores.template store<kDv>(a.dv, in, keys, in.head_dim_v, dV, scores.dropout.dropout.factor());
      scores.template store<kD>(a.dk, in, keys, in.head_dim, dK, (float)in.scale);
      if constexpr (C.owns_dq) {
        if (!a.dq_sum) return;
        if (C.dq_shared && lane == 0) bulk_wait();
        if (keys.begin + kTileK >= keys.seqlen_k) finish_dq(keys);
      } else {
        if (C.dq_shared && !C.deterministic && lane == 0) bulk_wait_read();
      }
    }
    __device__ __forceinline__ void finish_dq(const KeyBlock &keys) const {
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

  static __device__ __forceinline__ void run(const Arguments &a) { run_backward<C, Compute>(a); }
};

} // namespace strobe::sm90
