// dQ, dK and dV of attention on Hopper (FlashAttention-2's backward). A block of threads owns 128 keys, each of its two warpgroups that compute
// 64 of them; two threads have the copy engine bring K, V and, tile by tile, Q and dO. Of each tile of queries a warpgroup computes
//
//   S^T = K Q^T, P^T = exp(S^T - LSE)        dP^T = V dO^T, dS^T = P^T (dP^T - D)
//   dV += P^T dO                             dK += dS^T Q                             dQ^T = K^T dS^T, added up in global memory
//
// S is transposed, so that P and dS are operands where they lie, in registers; dS goes to shared memory for dQ, which needs both warpgroups'.
// dQ is one iteration late and S one early: the warpgroups do not wait for one another, and one multiplies while the other exponentiates.
#pragma once
#include "../mma/backward_dropout.h"
#include "../ptx/tma.h"
#include "../ptx/wgmma.h"
#include "../tile/exchange.h"
#include "backward_load.h"
#include "store.h"

namespace strobe::sm90 {

template <BackwardConfig C> struct Backward {
  using Arguments = HopperBackwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  static constexpr int kThreads = C.kThreads, kBlocksPerSm = 1;
  static constexpr int kD = C.head_dim, kDv = C.head_dim_v, kM = C.tile_q, kTileK = C.kTileK;
  static constexpr int kComputing = 128 * C.kWarpgroups;

  // Named barrier: the first warpgroup has its first scores. The second one begins then, so that they are out of step.
  static constexpr int kStagger = 1;

  static __device__ __forceinline__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char dynamic[];
    const BackwardShared<C> shared(shared_address(dynamic));
    if (threadIdx.x == 0) {
      shared.begin();
      BackwardLoad<C>::choose_keys(a, shared);
    }
    __syncthreads();
    const KeyBlock keys = read<KeyBlock>(shared.keys());
    if (keys.begin >= keys.seqlen_k) return;
    const int warpgroup = __shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 128, 0);
    if (warpgroup == 0) {
      registers_lower<C.registers_load>();
      if (threadIdx.x == 0) BackwardLoad<C>{a, shared}.q();
      if (threadIdx.x == 32) BackwardLoad<C>{a, shared}.dout();
    } else {
      registers_raise<C.registers_compute>();
      Compute(a, shared, warpgroup - 1).all();
    }
  }

  struct Compute {
    const Arguments &a;
    const BackwardShared<C> &shared;
    const int w, lane, warp; // warpgroup; warp within it
    const float unit;        // exp2's argument = score * unit - LSE
    float dK[kD / 2], dV[kDv / 2];
    float S[kM / 2], dP[kM / 2], dQ[C.dq_queries() / 2];
    u32 P[kM / 4], dS[kM / 4];

    __device__ __forceinline__ Compute(const Arguments &a, const BackwardShared<C> &shared, int w)
        : a(a), shared(shared), w(w), lane((int)threadIdx.x % 32), warp(__shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 32 % 4, 0)),
          unit((float)(a.a.in.scale * 1.4426950408889634074)) {}

    __device__ __forceinline__ void all() {
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) dK[i] = 0;
#pragma unroll
      for (int i = 0; i < kDv / 2; ++i) dV[i] = 0;
      registers_changed(dK);
      registers_changed(dV);
      wait_full(shared.q_full(0), 0);
      QueryStep step = read<QueryStep>(shared.step(0));
      if (!(step.flags & kNothing)) walk(step);
      finish();
    }

    __device__ __forceinline__ void walk(QueryStep step) {
      mbarrier_wait(shared.k_full(), 0);
      if (w == 1) barrier_sync(kStagger, kComputing);
      multiply_s(0);
      mbarrier_wait(shared.v_full(), 0);
      u32 n = 0;
      i32 before = 0; // the number of the tile of the iteration before
#pragma unroll 1
      for (;; ++n) {
        wgmma_wait<0>();
        registers_changed(S);
        if (n == 0 && w == 0) barrier_arrive(kStagger, kComputing);
        exponentiate(n, step);
        wait_full(shared.dout_full(n), n);
        multiply_dp(n);
        multiply_dv(n);
        wgmma_wait<1>();
        registers_changed(dP);
        differentiate(n);
        hand_on(n);
        multiply_dk(n);
        wgmma_wait<1>();
        registers_changed(dV);
        registers_changed(P);
        release(shared.dout_empty(n));
        const u32 more = !(step.flags & kLast), next = n + more;
        if (n > 0) {
          wait_full(shared.ds_full(n - 1), n - 1);
          multiply_dq(n - 1);
          wgmma_wait<1>();
          registers_changed(dK);
          registers_changed(dS);
          if (more) release(shared.q_empty(n));
          wait_full(shared.q_full(next), next);
          multiply_s(next); // once in vain, after the last tile
          wgmma_wait<1>();
          registers_changed(dQ);
          release(shared.ds_empty(n - 1));
          add_dq(before);
        } else {
          wgmma_wait<0>();
          registers_changed(dK);
          registers_changed(dS);
          if (more) release(shared.q_empty(n));
          wait_full(shared.q_full(next), next);
          multiply_s(next);
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
      add_dq(before);
    }

    __device__ __forceinline__ void release(u32 empty) const {
      if (lane == 0) mbarrier_arrive(empty);
    }

    // d = rows * columns^T, both kInner wide
    template <int kInner> __device__ __forceinline__ void multiply_transposed(float (&d)[kM / 2], u32 rows, u32 columns) {
      const u64 x = descriptor_k_major(rows), y = descriptor_k_major(columns);
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < kInner / 16; ++c) {
        const u64 left = advance(x, kTileK * kRowBytes * (c / 4) + 32 * (c % 4)),
                  right = advance(y, kM * kRowBytes * (c / 4) + 32 * (c % 4));
        if (c == 0)
          Wgmma<T, kM>::template shared_anew<0>(d, left, right);
        else
          Wgmma<T, kM>::template shared<true>(d, left, right);
      }
      wgmma_commit();
    }
    // sum += x (keys x queries, in registers) * rows (queries x kColumns)
    template <int kColumns> __device__ __forceinline__ void multiply_add(float (&sum)[kColumns / 2], u32 (&x)[kM / 4], u32 rows) {
      const u64 y = descriptor_mn_major(rows, kM * kRowBytes);
      registers_changed(x);
      registers_changed(sum);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kM / 16; ++i) Wgmma<T, kColumns>::template registers<true, 1>(sum, x + 4 * i, advance(y, 16 * kRowBytes * i));
      wgmma_commit();
    }
    __device__ __forceinline__ void multiply_s(u32 n) { multiply_transposed<kD>(S, shared.k + 64 * kRowBytes * w, shared.q_of(n)); }
    __device__ __forceinline__ void multiply_dp(u32 n) { multiply_transposed<kDv>(dP, shared.v + 64 * kRowBytes * w, shared.dout_of(n)); }
    __device__ __forceinline__ void multiply_dv(u32 n) { multiply_add<kDv>(dV, P, shared.dout_of(n)); }
    __device__ __forceinline__ void multiply_dk(u32 n) { multiply_add<kD>(dK, dS, shared.q_of(n)); }
    // dQ^T = K^T dS^T: this warpgroup's part
    __device__ __forceinline__ void multiply_dq(u32 n) {
      constexpr bool kByColumns = C.columns() > 64;
      const u64 x = descriptor_mn_major(shared.k + (kByColumns ? w * kTileK * kRowBytes : 0), 16);
      const u64 y = descriptor_k_major(shared.ds_of(n) + (kByColumns ? 0 : w * C.dq_queries() * kRowBytes));
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kTileK / 16; ++k) {
        const u64 left = advance(x, 16 * kRowBytes * k), right = advance(y, kM * kRowBytes * (k / 4) + 32 * (k % 4));
        if (k == 0)
          Wgmma<T, C.dq_queries()>::template shared_anew<1>(dQ, left, right);
        else
          Wgmma<T, C.dq_queries()>::template shared<true, 1>(dQ, left, right);
      }
      wgmma_commit();
    }

    // S -> P, in S and, rounded, in P. Dropout: what is dropped has a sign in S and is 0 in P.
    __device__ __forceinline__ void exponentiate(u32 n, const QueryStep &step) {
      const u32 lse = shared.lse_of(n) + lane % 4 * 8;
#pragma unroll
      for (int i = 0; i < kM / 8; ++i) {
        float negative[2];
        load_shared(negative, lse + 32 * i);
#pragma unroll
        for (int k = 0; k < 4; ++k) S[4 * i + k] = exp2(__fmaf_rn(S[4 * i + k], unit, negative[k % 2]));
      }
      if (step.flags & kMasked << w) hide(step.begin);
#pragma unroll
      for (int i = 0; i < kM / 4; ++i) P[i] = pack<T>(S[2 * i], S[2 * i + 1]);
    }
    // P of what is not seen by position: 0.
    __device__ __forceinline__ void hide(i32 q) {
      const KeyBlock keys = read<KeyBlock>(shared.keys());
      const Reach reach = read<Reach>(shared.reach());
      const i32 column = q + tile::lane_column(0, 0);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const i32 j = keys.begin + 64 * w + 16 * warp + tile::lane_row(r);
        const i32 begin = F.band ? j - reach.high - column : 0, end = j >= keys.seqlen_k ? begin : F.band ? j - reach.low + 1 - column : kM;
#pragma unroll
        for (int i = 2 * r; i < kM / 2; i += i % 2 ? 3 : 1) {
          const i32 at = i / 4 * 8 + i % 2;
          if (F.band ? at < begin || at >= end : end == begin) S[i] = 0;
        }
      }
    }
    // dP -> dS
    __device__ __forceinline__ void differentiate(u32 n) {
      const u32 delta = shared.delta_of(n) + lane % 4 * 8;
#pragma unroll
      for (int i = 0; i < kM / 8; ++i) {
        float D[2];
        load_shared(D, delta + 32 * i);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const u32 p = P[2 * i + r];
          const float x = C.exact_p ? S[4 * i + 2 * r] : tile::unpacked<T>(p, 0),
                      y = C.exact_p ? S[4 * i + 2 * r + 1] : tile::unpacked<T>(p, 1);
          dS[2 * i + r] = pack<T>(x * (dP[4 * i + 2 * r] - D[0]), y * (dP[4 * i + 2 * r + 1] - D[1]));
        }
      }
    }
    // dS to shared memory, for dQ: rows are queries, columns keys.
    __device__ __forceinline__ void hand_on(u32 n) {
      const int row = lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
      const u32 target = shared.ds_of(n) + w * kM * kRowBytes + row * kRowBytes + ((chunk ^ row % 8) << 4);
      wait_empty(shared.ds_empty(n), n);
#pragma unroll
      for (int i = 0; i < kM / 16; ++i) stmatrix_transposed(target + 16 * kRowBytes * i, dS + 4 * i);
      async_proxy_fence();
      __syncwarp();
      release(shared.ds_full(n));
    }

    // dQ to the sum over key tiles, which holds a tile of queries as the warps' lanes do: 512 bytes for each eight queries of a warp.
    __device__ __forceinline__ void add_dq(i32 number) {
      if (!a.a.dq_sum) return;
      constexpr int kN = C.dq_queries();
      float *target = a.a.dq_sum + (i64)number * (kM * C.columns()) + (w * 4 + warp) * (16 * kN);
      if constexpr (C.dq_shared) {
        const u32 place = shared.dq + (w * 4 + warp) * (64 * kN);
        if (lane == 0) bulk_wait_read();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kN / 8; ++i) store_shared(place + 512 * i + 16 * lane, dQ + 4 * i);
        async_proxy_fence();
        __syncwarp();
        if (lane == 0) {
          bulk_add(target, place, 64 * kN);
          bulk_commit();
        }
      } else {
#pragma unroll
        for (int i = 0; i < kN / 8; ++i) add_quad(target + 128 * i, reinterpret_cast<const float (&)[4]>(dQ[4 * i]));
      }
    }

    // dK and dV to memory.
    __device__ __forceinline__ void finish() {
      const KeyBlock keys = read<KeyBlock>(shared.keys());
      const i64 k0 = a.a.in.sequence(keys.batch).k0;
      store<kDv>(a.a.dv, dV, 1.0f, keys, k0, a.a.in.head_dim_v);
      store<kD>(a.a.dk, dK, (float)a.a.in.scale, keys, k0, a.a.in.head_dim);
      if (C.dq_shared && lane == 0) bulk_wait();
    }
    template <int kColumns>
    __device__ __forceinline__ void store(const Operand &out, const float (&x)[kColumns / 2], float factor, const KeyBlock &keys, i64 k0,
                                          i32 columns) {
      if (!out) return;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const i32 j = keys.begin + 64 * w + 16 * warp + tile::lane_row(r);
        T *row = out.at<T>(keys.batch, keys.head_kv, k0 + j, 0);
#pragma unroll
        for (int c = 0; c < kColumns; c += 16) {
          const float *y = x + c / 2 + 2 * r;
          store_sixteen(row + c, pack<T>(y[0] * factor, y[1] * factor), pack<T>(y[4] * factor, y[5] * factor),
                        [&](int column) { return j < keys.seqlen_k && c + column < columns; });
        }
      }
    }
  };
};

} // namespace strobe::sm90
