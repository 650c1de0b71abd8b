// dQ, dK and dV of attention on Hopper (FlashAttention-2's backward). A block of threads owns 128 keys, each of its two warpgroups that compute
// 64 of them; two threads have the copy engine bring K, V and, tile by tile, Q and dO. Of each tile of queries a warpgroup computes
//
//   S^T = K Q^T, P^T = exp(S^T - LSE)        dP^T = V dO^T, dS^T = P^T (dP^T - D)
//   dV += P^T dO                             dK += dS^T Q                             dQ^T = K^T dS^T, added up in global memory
//
// S is transposed, so that P and dS are operands where they lie, in registers; dS goes to shared memory for dQ, which needs both warpgroups'.
// dQ is one iteration late and S one early: the warpgroups do not wait for one another, and one multiplies while the other exponentiates.
#pragma once
#include "../attention/scores.h"
#include "../mma/backward_dropout.h"
#include "../ptx/tma.h"
#include "../ptx/wgmma.h"
#include "../tile/exchange.h"
#include "../tile/finite.h"
#include "backward_load.h"
#include "backward_order.h"
#include "store.h"

namespace strobe::sm90 {

using tile::Accumulator;

template <BackwardConfig C> struct Backward {
  using Arguments = HopperBackwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  static constexpr int kThreads = C.kThreads, kBlocksPerSm = 1;
  static constexpr int kD = C.head_dim, kDv = C.head_dim_v, kM = C.tile_q, kTileK = C.kTileK;
  static constexpr int kComputing = 128 * C.kWarpgroups;

  // Named barriers. The first warpgroup has its first scores: the second one begins then, so that they are out of step. All of a warpgroup
  // have come, + its number.
  static constexpr int kStagger = 1, kTogether = 2;
  // Elements may be hidden in any tile, not in those alone that position masks.
  static constexpr bool kHides = F.mask || F.bias;
  static_assert(!(F.dropout || F.function) || C.exact_p, "dS is made of what S becomes");
  static_assert(!(F.dropout && F.function), "S cannot hold what is dropped and the slope");

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
      if constexpr (C.deterministic) {
        if (threadIdx.x == 64) BackwardOrder<C>{a, shared, 0}.all();
        if (threadIdx.x == 96) BackwardOrder<C>{a, shared, 1}.all();
      }
    } else {
      registers_raise<C.registers_compute>();
      Compute(a, shared, keys, warpgroup - 1).all();
    }
  }

  struct Compute {
    const Arguments &a;
    const BackwardShared<C> &shared;
    const int w, lane, warp; // warpgroup; warp within it
    const Scores<F, float> scores;
    const mma::BlockDropout<F> dropout;
    float dK[kD / 2], dV[kDv / 2];
    float S[kM / 2], dP[kM / 2], dQ[C.dq_queries() / 2];
    u32 P[kM / 4], dS[kM / 4];

    __device__ __forceinline__ Compute(const Arguments &a, const BackwardShared<C> &shared, const KeyBlock &keys, int w)
        : a(a), shared(shared), w(w), lane((int)threadIdx.x % 32), warp(__shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 32 % 4, 0)),
          scores(a.a.in, a.a.in.sequence(keys.batch), keys.batch), dropout{Dropout<F>(a.a.in)} {}

    __device__ __forceinline__ void all() {
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) dK[i] = 0;
#pragma unroll
      for (int i = 0; i < kDv / 2; ++i) dV[i] = 0;
      registers_changed(dK);
      registers_changed(dV);
      wait_full(shared.q_full(0), 0);
      QueryStep step = read<QueryStep>(shared.step(0));
      if (!(step.flags & kNothing))
        walk(step);
      else if constexpr (C.deterministic)
        order(step);
      finish();
    }

    __device__ __forceinline__ void walk(QueryStep step) {
      mbarrier_wait(shared.k_full(), 0);
      if (w == 1) barrier_sync(kStagger, kComputing);
      multiply_s(0);
      mbarrier_wait(shared.v_full(), 0);
      if (F.band || kHides || partial()) clean_keys();
      u32 n = 0;
      QueryStep before{}; // the tile of the iteration before
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
          add_dq(n - 1, before);
        } else {
          wgmma_wait<0>();
          registers_changed(dK);
          registers_changed(dS);
          if (more) release(shared.q_empty(n));
          wait_full(shared.q_full(next), next);
          multiply_s(next);
        }
        before = step;
        if (!more) break;
        step = read<QueryStep>(shared.step(next));
      }
      wgmma_wait<0>();
      registers_changed(S);
      wait_full(shared.ds_full(n), n);
      multiply_dq(n);
      wgmma_wait<0>();
      registers_changed(dQ);
      add_dq(n, before);
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

    // S -> P, in S and, rounded, in P. With a softcap S becomes P times its slope; with dropout what is dropped has a sign in S and is 0 in P.
    __device__ __forceinline__ void exponentiate(u32 n, const QueryStep &step) {
      const bool masked = step.flags & kMasked << w;
      if constexpr (F.additive() || F.mask) {
        if (masked)
          score<true>(n, step);
        else
          score<false>(n, step);
      } else {
        const u32 lse = shared.lse_of(n) + lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < kM / 8; ++i) {
          float negative[2];
          load_shared(negative, lse + 32 * i);
#pragma unroll
          for (int k = 0; k < 4; ++k) S[4 * i + k] = exp2(__fmaf_rn(S[4 * i + k], scores.unit, negative[k % 2]));
        }
        if (masked) hide(step.begin);
      }
      if (masked || kHides) clean_queries(n);
      if constexpr (F.dropout) {
        const KeyBlock keys = read<KeyBlock>(shared.keys());
        dropout.mark(reinterpret_cast<Accumulator(&)[1][kM / 16]>(S), step.begin, keys.begin + 64 * w + 16 * warp, step.head, keys.batch);
      }
      if constexpr (!F.function) {
#pragma unroll
        for (int i = 0; i < kM / 4; ++i) {
          const float x = S[2 * i], y = S[2 * i + 1];
          P[i] = F.dropout ? pack<T>(fmaxf(x, 0), fmaxf(y, 0)) : pack<T>(x, y);
        }
      }
    }
    // The same for scores that are more than products.
    template <bool kByPosition> __device__ __forceinline__ void score(u32 n, const QueryStep &step) {
      const u32 lse = shared.lse_of(n) + lane % 4 * 8;
      const i32 q = step.begin + tile::lane_column(0, 0), j = key();
      const auto first = scores.row(q, step.head);
#pragma unroll
      for (int i = 0; i < kM / 8; ++i) {
        float negative[2];
        load_shared(negative, lse + 32 * i);
        float p[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          auto row = first;
          row.i = min(q + 8 * i + k % 2, scores.seqlen_q - 1);
          if constexpr (F.band) row.begin = max(0, row.i + scores.low), row.end = min(scores.seqlen_k, row.i + scores.high + 1);
          float &x = S[4 * i + k], slope = 1;
          x = F.function ? scores.score(x, row, j + k / 2 * 8, kByPosition, scores.seqlen_k, slope)
                        : scores.score(x, row, j + k / 2 * 8, kByPosition, scores.seqlen_k);
          const bool hidden = (kByPosition || kHides) && x == minus_infinity<float>();
          p[k] = hidden ? 0 : exp2(__fmaf_rn(x, scores.unit, negative[k % 2])); // LSE may be no number
          x = F.function ? p[k] * slope : p[k];
        }
        if constexpr (F.function) P[2 * i] = pack<T>(p[0], p[1]), P[2 * i + 1] = pack<T>(p[2], p[3]);
      }
    }
    // This lane's first key; the other one is 8 further.
    __device__ __forceinline__ i32 key() const { return (i32)load_shared(shared.keys() + 8) + 64 * w + 16 * warp + tile::lane_row(0); }
    __device__ __forceinline__ bool partial() const {
      const KeyBlock keys = read<KeyBlock>(shared.keys());
      return keys.begin + kTileK > keys.seqlen_k;
    }
    // P of what is not seen by position: 0.
    __device__ __forceinline__ void hide(i32 q) {
      const i32 column = q + tile::lane_column(0, 0);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const i32 j = key() + 8 * r;
        const i32 begin = F.band ? j - scores.high - column : 0;
        const i32 end = j >= scores.seqlen_k ? begin : min(F.band ? j - scores.low + 1 : kM + column, scores.seqlen_q) - column;
#pragma unroll
        for (int i = 2 * r; i < kM / 2; i += i % 2 ? 3 : 1) {
          const i32 at = i / 4 * 8 + i % 2;
          if ((F.band && at < begin) || at >= end) S[i] = 0;
        }
      }
    }

    // What is hidden may be no number, but times 0 it is to be 0. Queries whose LSE or D is none, or that see nothing or are not there: P is no
    // number where they are seen, 0 elsewhere, and so are all products with P, whatever Q and dO: they become 0.
    __device__ __forceinline__ void clean_queries(u32 n) const {
      bool found = false;
#pragma unroll
      for (int i = 0; i < (kM + 31) / 32; ++i) found |= !finite(n, min(32 * i + lane, kM - 1));
      if (!__any_sync(0xFFFFFFFFu, found)) return;
      wait_full(shared.dout_full(n), n);
      const int row = 32 * warp + lane;
      if (row < kM && !finite(n, row)) {
        const u32 zero[4] = {0, 0, 0, 0};
#pragma unroll 1
        for (int c = 0; c < kRowBytes; c += 16) {
#pragma unroll
          for (int block = 0; block < C.columns() / 64; ++block) store_shared(shared.q_of(n) + (block * kM + row) * kRowBytes + c, zero);
#pragma unroll
          for (int block = 0; block < C.columns_v() / 64; ++block)
            store_shared(shared.dout_of(n) + (block * kM + row) * kRowBytes + c, zero);
        }
      }
      async_proxy_fence();
      barrier_sync(kTogether + w, 128);
    }
    __device__ __forceinline__ bool finite(u32 n, int row) const {
      return (load_shared(shared.lse_of(n) + 4 * row) & 0x7F800000) != 0x7F800000;
    }
    // V of keys that someone sees shows in O, and so in D; K in LSE. What is not finite becomes 0 in V, and in K (which may yet make a score of
    // -inf) the largest number.
    __device__ __forceinline__ void clean_keys() const {
      constexpr int kBlock = kTileK * kRowBytes;
      clean<true>(shared.k + (C.columns() > 64 ? w * kBlock : 0), kBlock); // what multiply_dq takes
#pragma unroll
      for (int block = 0; block < C.columns_v() / 64; ++block) clean<false>(shared.v + block * kBlock + 64 * kRowBytes * w, 64 * kRowBytes);
      async_proxy_fence();
      barrier_sync(kTogether + w, 128);
    }
    template <bool kLargest> __device__ __forceinline__ void clean(u32 base, int bytes) const {
#pragma unroll 4
      for (int i = 16 * (32 * warp + lane); i < bytes; i += 16 * 128) {
        u32 x[4], bad[4];
        load_shared(x, base + i);
#pragma unroll
        for (int k = 0; k < 4; ++k) bad[k] = tile::not_finite<T>(x[k]);
        if (!(bad[0] | bad[1] | bad[2] | bad[3])) continue;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const u32 all = tile::spread(bad[k]);
          x[k] = (x[k] & (~all | 0x80008000u)) | (kLargest ? all & (0x7FFF7FFFu - tile::Exponent<T>::kUnit) : 0);
        }
        store_shared(base + i, x);
      }
    }

    // dP -> dS
    __device__ __forceinline__ void differentiate(u32 n) {
      const u32 delta = shared.delta_of(n) + lane % 4 * 8;
      const float factor = dropout.dropout.factor();
#pragma unroll
      for (int i = 0; i < kM / 8; ++i) {
        float D[2];
        load_shared(D, delta + 32 * i);
        auto dS_of = [&](int k) {
          const int at = 4 * i + k;
          const float p = C.exact_p ? S[at] : tile::unpacked<T>(P[at / 2], k % 2);
          if constexpr (F.dropout) return fabsf(p) * ((__float_as_uint(p) >> 31 ? 0.0f : dP[at] * factor) - D[k % 2]);
          return p * (dP[at] - D[k % 2]);
        };
        dS[2 * i] = pack<T>(dS_of(0), dS_of(1)), dS[2 * i + 1] = pack<T>(dS_of(2), dS_of(3));
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

    // dQ of iteration n to the sum over key tiles, which holds a tile of queries as the warps' lanes do: 512 bytes for each eight queries of a
    // warp.
    __device__ __forceinline__ void add_dq(u32 n, const QueryStep &step) {
      if (!a.a.dq_sum) return;
      constexpr int kN = C.dq_queries();
      float *target = a.a.dq_sum + (i64)step.number * (kM * C.columns()) + (w * 4 + warp) * (16 * kN);
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
        if constexpr (C.deterministic) {
          order(step);
        } else {
          __syncwarp();
          if (lane == 0) {
            bulk_add(target, place, 64 * kN);
            bulk_commit();
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < kN / 8; ++i) add_quad(target + 128 * i, reinterpret_cast<const float (&)[4]>(dQ[4 * i]));
      }
    }
    // Has this warp's part of dQ added in order.
    __device__ __forceinline__ void order(const QueryStep &step) const {
      if (warp == 0 && lane == 0) write(shared.dq_step(w), step.begin, 0, step.number, step.flags);
      __syncwarp();
      release(shared.dq_full(w));
    }

    // dK and dV to memory.
    __device__ __forceinline__ void finish() {
      const KeyBlock keys = read<KeyBlock>(shared.keys());
      const i64 k0 = a.a.in.sequence(keys.batch).k0;
      store<kDv>(a.a.dv, dV, dropout.dropout.factor(), keys, k0, a.a.in.head_dim_v);
      store<kD>(a.a.dk, dK, (float)a.a.in.scale, keys, k0, a.a.in.head_dim);
      if (C.dq_shared && !C.deterministic && lane == 0) bulk_wait();
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
