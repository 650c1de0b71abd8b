// dQ, dK and dV on Hopper where head dimensions exceed 128, and dK and dV of 64 keys fill a warpgroup's registers each (see backward.h for
// the formulas). A block of threads owns 64 keys. Of each tile of queries one warpgroup makes S, P and dV, the other one dP, dS and dK; P
// goes from one to the other through shared memory, in the order of lanes; dQ, an iteration late, is divided by columns.
#pragma once
#include "run.h"
#include "scores.h"

namespace strobe::sm90 {

template <BackwardConfig C> struct BackwardWide {
  using Arguments = HopperBackwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  static constexpr bool kWaitsItself = true; // for the launch before: load.h
  static constexpr int kThreads = C.kThreads, kBlocksPerSm = 1;
  static constexpr int kD = C.head_dim, kDv = C.head_dim_v, kM = C.tile_q, kKeys = 64;
  static constexpr int kBlockBytes = kKeys * kRowBytes, kBlocks = C.columns() / 64, kFirst = kBlocks / 2; // of K; of the first warpgroup
  static_assert(C.wide && !C.exact_p && !C.dq_shared && kBlocks >= 2);

  struct Compute {
    const Arguments &a;
    const Inputs &in;
    const BackwardShared<C> &shared;
    const int w, lane, warp; // warpgroup; warp within it
    const BackwardScores<C> scores;

    __device__ __forceinline__ Compute(const Arguments &a, const BackwardShared<C> &shared, const KeyBlock &keys, int w)
        : a(a), in(a.in), shared(shared), w(w), lane((int)threadIdx.x % 32), warp(__shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 32 % 4, 0)),
          scores(shared, a.in, keys, w) {}

    __device__ __forceinline__ u32 all(u32) {
      if (w == 0)
        left();
      else
        right();
      return 0;
    }

    // P and dV.
    __device__ __forceinline__ void left() {
      float dV[kDv / 2], S[kM / 2];
      u32 P[kM / 4];
      clear(dV);
      wait_full(shared.q_full(0), 0);
      QueryStep step = read<QueryStep>(shared.step(0));
      if (!(step.flags & kNothing)) {
        mbarrier_wait(shared.k_full(), 0);
        multiply_s(S, 0);
        scores.template clear_nonfinite_keys<true>(shared.k, kFirst * kBlockBytes);
        scores.together();
        u32 n = 0;
        i32 before = 0; // the number of the tile of the iteration before
#pragma unroll 1
        for (;; ++n) {
          const u32 allowed = scores.allowed(step);
          wgmma_wait<0>();
          registers_changed(S);
          scores.exponentiate(S, P, n, step, allowed);
          hand_over(S, n);
          scores.round(P, S);
          scores.release(shared.q_empty(n));
          wait_full(shared.dout_full(n), n);
          multiply_add<T, kM, kDv>(dV, P, shared.dout_of(n));
          const u32 more = !(step.flags & kLast), next = n + more;
          auto then = [&] {
            registers_changed(dV);
            registers_changed(P);
            scores.release(shared.dout_empty(n));
            wait_full(shared.q_full(next), next);
            multiply_s(S, next); // once in vain, after the last tile
          };
          if (n > 0) {
            add_dq<0, kFirst>(n - 1, before, then);
          } else {
            wgmma_wait<0>();
            then();
          }
          before = step.number;
          if (!more) break;
          step = read<QueryStep>(shared.step(next));
        }
        wgmma_wait<0>();
        registers_changed(S);
        add_dq<0, kFirst>(n, before);
      } else if constexpr (C.deterministic) {
        scores.release(shared.dq_full(w));
      }
      scores.template store<kDv>(a.dv, in, read<KeyBlock>(shared.keys()), in.head_dim_v, dV, scores.dropout.dropout.factor());
    }

    // dS and dK.
    __device__ __forceinline__ void right() {
      float dK[kD / 2], dP[kM / 2];
      u32 dS[kM / 4];
      clear(dK);
      wait_full(shared.q_full(0), 0);
      QueryStep step = read<QueryStep>(shared.step(0));
      if (!(step.flags & kNothing)) {
        mbarrier_wait(shared.k_full(), 0);
        scores.template clear_nonfinite_keys<true>(shared.k + kFirst * kBlockBytes, (kBlocks - kFirst) * kBlockBytes);
        mbarrier_wait(shared.v_full(), 0);
        scores.template clear_nonfinite_keys<false>(shared.v, C.v_bytes());
        scores.together();
        wait_full(shared.dout_full(0), 0);
        multiply_dp(dP, 0);
        u32 n = 0;
        i32 before = 0;
#pragma unroll 1
        for (;; ++n) {
          wgmma_wait<0>();
          registers_changed(dP);
          mbarrier_wait(shared.p_full(), n % 2);
          if (scores.masked(step) || BackwardScores<C>::kHides)
            differentiate<true>(dS, dP, n);
          else
            differentiate<false>(dS, dP, n);
          __syncwarp();
          scores.release(shared.p_empty());
          scores.release(shared.dout_empty(n));
          scores.hand_on(dS, n);
          multiply_add<T, kM, kD>(dK, dS, shared.q_of(n));
          const u32 more = !(step.flags & kLast), next = n + more;
          auto then = [&] {
            registers_changed(dK);
            registers_changed(dS);
            scores.release(shared.q_empty(n));
            wait_full(shared.dout_full(next), next);
            multiply_dp(dP, next); // once in vain, after the last tile
          };
          if (n > 0) {
            add_dq<kFirst, kBlocks>(n - 1, before, then);
          } else {
            wgmma_wait<0>();
            then();
          }
          before = step.number;
          if (!more) break;
          wait_full(shared.q_full(next), next);
          step = read<QueryStep>(shared.step(next));
        }
        wgmma_wait<0>();
        registers_changed(dP);
        add_dq<kFirst, kBlocks>(n, before);
      } else if constexpr (C.deterministic) {
        scores.release(shared.dq_full(w));
      }
      scores.template store<kD>(a.dk, in, read<KeyBlock>(shared.keys()), in.head_dim, dK, (float)in.scale);
    }

    template <int N> static __device__ __forceinline__ void clear(float (&x)[N]) {
#pragma unroll
      for (int i = 0; i < N; ++i) x[i] = 0;
      registers_changed(x);
    }
    __device__ __forceinline__ void multiply_s(float (&S)[kM / 2], u32 n) const {
      multiply_transposed<T, kD, kKeys, kM>(S, shared.k, shared.q_of(n));
    }
    __device__ __forceinline__ void multiply_dp(float (&dP)[kM / 2], u32 n) const {
      multiply_transposed<T, kDv, kKeys, kM>(dP, shared.v, shared.dout_of(n));
    }

    // P to the other warpgroup, what is dropped with a sign.
    __device__ __forceinline__ u32 place_of_p(int i) const { return shared.p + (i * 128 + 32 * warp + lane) * 16; }
    __device__ __forceinline__ void hand_over(const float (&S)[kM / 2], u32 n) const {
      mbarrier_wait(shared.p_empty(), n % 2 ^ 1);
#pragma unroll
      for (int i = 0; i < kM / 16; ++i) {
        const float *s = S + 8 * i;
        const u32 x[4] = {pack<T>(s[0], s[1]), pack<T>(s[2], s[3]), pack<T>(s[4], s[5]), pack<T>(s[6], s[7])};
        store_shared(place_of_p(i), x);
      }
      __syncwarp();
      scores.release(shared.p_full());
    }
    // dP -> dS. kHidden: dP of what is hidden may be no number.
    template <bool kHidden> __device__ __forceinline__ void differentiate(u32 (&dS)[kM / 4], const float (&dP)[kM / 2], u32 n) const {
      const u32 delta = shared.delta_of(n) + lane % 4 * 8;
      const float factor = scores.dropout.dropout.factor();
#pragma unroll
      for (int i = 0; i < kM / 16; ++i) {
        u32 P[4];
        load_shared(P, place_of_p(i));
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float D[2];
          load_shared(D, delta + 64 * i + 32 * c);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            auto dS_of = [&](int e) {
              float p = tile::unpacked<T>(P[2 * c + r], e), x = dP[8 * i + 4 * c + 2 * r + e];
              if constexpr (F.dropout) {
                x = __float_as_uint(p) >> 31 ? 0.0f : x * factor;
                p = fabsf(p);
              }
              return kHidden && p == 0 ? 0.0f : p * (x - D[e]);
            };
            dS[4 * i + 2 * c + r] = pack<T>(dS_of(0), dS_of(1));
          }
        }
      }
    }

    // This warpgroup's blocks of columns of dQ. then(): what follows the products under way before them; it begins another one.
    template <int kBegin, int kEnd, class Then> __device__ __forceinline__ void add_dq(u32 n, i32 number, const Then &then) const {
      float dQ[kM / 2];
      if constexpr (C.deterministic) scores.release(shared.dq_full(w));
      wait_full(shared.ds_full(n), n);
#pragma unroll
      for (int block = kBegin; block < kEnd; ++block) {
        multiply_dq<T, kKeys, kM, kM>(dQ, shared.k + block * kBlockBytes, shared.ds_of(n));
        if (block == kBegin) {
          wgmma_wait<1>();
          then();
          wgmma_wait<1>();
        } else {
          wgmma_wait<0>();
        }
        leave(dQ, n, number, block, block == kBegin, block == kEnd - 1);
      }
    }
    template <int kBegin, int kEnd> __device__ __forceinline__ void add_dq(u32 n, i32 number) const {
      float dQ[kM / 2];
      if constexpr (C.deterministic) scores.release(shared.dq_full(w));
      wait_full(shared.ds_full(n), n);
#pragma unroll
      for (int block = kBegin; block < kEnd; ++block) {
        multiply_dq<T, kKeys, kM, kM>(dQ, shared.k + block * kBlockBytes, shared.ds_of(n));
        wgmma_wait<0>();
        leave(dQ, n, number, block, block == kBegin, block == kEnd - 1);
      }
    }
    // To the sum over key tiles, which holds a tile of queries as the warps' lanes do: 512 bytes for each eight queries of a warp.
    __device__ __forceinline__ void leave(float (&dQ)[kM / 2], u32 n, i32 number, int block, bool first, bool last) const {
      registers_changed(dQ);
      if (last) scores.release(shared.ds_empty(n));
      if (!a.dq_sum) return;
      float *target = a.dq_sum + (i64)number * (kM * C.columns()) + (block * 4 + warp) * (16 * kM);
      if (C.deterministic && first) mbarrier_wait(shared.dq_empty(w), n % 2);
#pragma unroll
      for (int i = 0; i < kM / 8; ++i) add_quad(target + 128 * i, reinterpret_cast<const float (&)[4]>(dQ[4 * i]));
      if (C.deterministic && last) {
        __syncwarp();
        if (lane == 0) end_turn(turn_of(a, number, w));
      }
    }
  };

  static __device__ __forceinline__ void run(const Arguments &a) { run_backward<C, Compute>(a); }
};

} // namespace strobe::sm90
