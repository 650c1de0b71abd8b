// dQ, dK and dV on Hopper with 64 keys a block of threads (see backward.h for the formulas): where head dimensions exceed 128, so that dK
// and dV of 64 keys fill a warpgroup's registers each, and where blocks of 128 keys would leave SMs idle. Of each tile of queries one
// warpgroup makes S, P and dV, the other one dP, dS and dK; P goes from one to the other through shared memory, in the order of lanes. dQ
// is made in parts, 64 columns or, where there are no more, half of the queries: by a third warpgroup, or, an iteration late, some by each
// of the two.
#pragma once
#include "run.h"
#include "scores.h"

namespace strobe::sm90 {

template <BackwardConfig C> struct BackwardRoles {
  using Arguments = HopperBackwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  static constexpr bool kWaitsItself = true; // for the launch before: load.h
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 1;
  static constexpr int kD = C.head_dim, kDv = C.head_dim_v, kM = C.tile_q, kKeys = 64;
  static constexpr int kBlockBytes = kKeys * kRowBytes, kBlocks = C.columns() / 64; // of K
  // Parts of dQ: blocks of columns, or halves of the queries where there is one block. The right ones begin at kRight.
  static constexpr bool kByColumns = kBlocks > 1;
  static constexpr int kParts = kByColumns ? kBlocks : 2, kRight = kParts / 2;
  // 512 threads begin with 128 registers each, and no instruction may have more operands: one that adds 208 columns has too many.
  template <int kColumns> static constexpr int kAtOnce = C.dq_apart && kColumns > 192 ? 128 : kColumns;
  // Of keys, where they are held in registers.
  template <int kColumns> using KeyOperand = LeftOperand<C.keys_in_registers ? kColumns : 4>;
  static_assert(C.roles && !C.persistent && !C.exact_p && !C.dq_shared);
  static_assert(C.registers_load + 2 * C.registers_compute + C.dq_apart * C.registers_dq <= 65536 / 128, "else they wait for ever");

  struct Compute {
    const Arguments &a;
    const Inputs &in;
    const BackwardShared<C> &shared;
    const int w, lane, warp; // warpgroup; warp within it
    const BackwardScores<C> scores;

    __device__ __forceinline__ Compute(const Arguments &a, const BackwardShared<C> &shared, const KeyBlock &keys, int w)
        : a(a), in(a.in), shared(shared), w(w), lane((int)threadIdx.x % 32), warp(__shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 32 % 4, 0)),
          scores(shared, a, keys, w) {}

    __device__ __forceinline__ u32 all(u32) {
      if (w == 0) {
        Left left{*this};
        walk<0, kRight>(left);
        scores.template store<kDv>(a.dv, in, read<KeyBlock>(shared.keys()), in.head_dim_v, left.dV, scores.dropout.dropout.factor());
      } else {
        Right right{*this};
        walk<kRight, kParts>(right);
        scores.template store<kD>(a.dk, in, read<KeyBlock>(shared.keys()), in.head_dim, right.dK, (float)in.scale);
      }
      return 0;
    }

    // All tiles of queries, as the left or the right warpgroup sees them, whose are the parts [kBegin, kEnd) of dQ unless it is made apart.
    template <int kBegin, int kEnd, class Side> __device__ __forceinline__ void walk(Side &side) const {
      side.clear();
      wait_full(shared.q_full(0), 0);
      QueryStep step = read<QueryStep>(shared.step(0));
      if (!(step.flags & kNothing)) {
        mbarrier_wait(shared.k_full(), 0);
        side.begin();
        u32 n = 0;
        i32 before = 0; // the number of the tile of the iteration before
#pragma unroll 1
        for (;; ++n) {
          side.step(step, n);
          const u32 next = n + !(step.flags & kLast);
          auto then = [&] { side.end(n), side.begin_next(next); };
          if constexpr (C.dq_apart) {
            side.begin_next(next);
            wgmma_wait<1>();
            side.end(n);
          } else if (n > 0) {
            add_dq<kBegin, kEnd>(n - 1, before, then);
          } else {
            wgmma_wait<0>();
            then();
          }
          before = step.number;
          if (next == n) break;
          side.wait_queries(next);
          step = read<QueryStep>(shared.step(next));
        }
        side.wait_last();
        if constexpr (!C.dq_apart) add_dq<kBegin, kEnd>(n, before);
      } else if constexpr (C.deterministic && !C.dq_apart) {
        scores.release(shared.dq_full(w));
      }
    }

    // S, P and dV.
    struct Left {
      const Compute &my;
      Accumulator<T, kDv> dV;
      Accumulator<T, kM> S;
      LeftOperand<kM> P;
      KeyOperand<kD> K;
      __device__ __forceinline__ void clear() { dV.clear(); }
      __device__ __forceinline__ void begin() {
        begin_s_of_shared(0);
        my.clear_nonfinite_k(S);
        if constexpr (C.keys_in_registers) my.load_keys(K, my.shared.k);
      }
      // P = exp(S - LSE), for both; dV += P^T dO begins.
      __device__ __forceinline__ void step(const QueryStep &step, u32 n) {
        const u32 allowed = my.scores.allowed(step);
        wait_for<0>(S);
        my.scores.clear_nonfinite_queries(step, n);
        my.scores.template exponentiate<false>(S, P, n, step, allowed);
        my.give_p(S, n);
        my.scores.round(P, S);
        my.scores.release(my.shared.q_empty(n));
        wait_full(my.shared.dout_full(n), n);
        dV.template begin_adding<kAtOnce<kDv>>(P, my.shared.dout_of(n));
      }
      // dV has ended.
      __device__ __forceinline__ void end(u32 n) {
        dV.done();
        P.done();
        my.scores.release(my.shared.dout_empty(n));
      }
      // S of the next tile; after the last one a product that nobody reads.
      __device__ __forceinline__ void begin_next(u32 next) {
        wait_full(my.shared.q_full(next), next);
        begin_s(next);
      }
      __device__ __forceinline__ void begin_s(u32 n) {
        if constexpr (C.keys_in_registers)
          S.template begin_product<Place::free>(K, my.shared.q_of(n));
        else
          begin_s_of_shared(n);
      }
      __device__ __forceinline__ void begin_s_of_shared(u32 n) {
        S.template begin_product<kD, kKeys, Place::free>(my.shared.k, my.shared.q_of(n));
      }
      __device__ __forceinline__ void wait_queries(u32) const {}
      __device__ __forceinline__ void wait_last() { wait_for<0>(S); }
    };

    // dP, dS and dK.
    struct Right {
      const Compute &my;
      Accumulator<T, kD> dK;
      Accumulator<T, kM> dP;
      LeftOperand<kM> dS;
      KeyOperand<kDv> V;
      __device__ __forceinline__ void clear() { dK.clear(); }
      __device__ __forceinline__ void begin() {
        mbarrier_wait(my.shared.v_full(), 0);
        if constexpr (C.keys_in_registers) my.load_keys(V, my.shared.v);
        begin_dp(0);
      }
      // dS = P (dP - D), for both; dK += dS^T Q begins.
      __device__ __forceinline__ void step(const QueryStep &step, u32 n) {
        wait_for<0>(dP);
        my.scores.clear_nonfinite_queries(step, n);
        mbarrier_wait(my.shared.p_full(), n % 2);
        if (my.scores.masked(step) || BackwardScores<C>::kHides)
          my.template differentiate<true>(dS, dP, n);
        else
          my.template differentiate<false>(dS, dP, n);
        __syncwarp();
        my.scores.release(my.shared.p_empty());
        my.scores.release(my.shared.dout_empty(n));
        my.scores.hand_on(dS, n);
        dK.template begin_adding<kAtOnce<kD>>(dS, my.shared.q_of(n));
      }
      // dK has ended.
      __device__ __forceinline__ void end(u32 n) {
        dK.done();
        dS.done();
        my.scores.release(my.shared.q_empty(n));
      }
      // dP of the next tile; after the last one a product that nobody reads.
      __device__ __forceinline__ void begin_next(u32 next) { begin_dp(next); }
      __device__ __forceinline__ void begin_dp(u32 n) {
        wait_full(my.shared.dout_full(n), n);
        if constexpr (C.keys_in_registers)
          dP.template begin_product<Place::free>(V, my.shared.dout_of(n));
        else
          dP.template begin_product<kDv, kKeys, Place::free>(my.shared.v, my.shared.dout_of(n));
      }
      __device__ __forceinline__ void wait_queries(u32 n) const { wait_full(my.shared.q_full(n), n); }
      __device__ __forceinline__ void wait_last() { wait_for<0>(dP); }
    };

    template <int kColumns> __device__ __forceinline__ void load_keys(LeftOperand<kColumns> &x, u32 base) const {
      load_left<C.tile_k()>(x, base, 16 * warp, lane);
    }
    // Once S of the first tile has been made of K. Elsewhere K is read for dQ alone, by those who have waited for P by then, or for what is
    // made of it. V stays as it is, for dP of a hidden key is not looked at.
    __device__ __forceinline__ void clear_nonfinite_k(Accumulator<T, kM> &S) const {
      wait_for<0>(S);
      if (!scores.hides()) return;
      if (scores.shows_nonfinite(S)) scores.template clear_nonfinite_keys<true>(shared.k, kBlocks);
      scores.together();
    }
    // P to the other warpgroup, what is dropped with a sign.
    __device__ __forceinline__ u32 place_of_p(int i) const { return shared.p + (i * 128 + 32 * warp + lane) * 16; }
    __device__ __forceinline__ void give_p(const Accumulator<T, kM> &S, u32 n) const {
      mbarrier_wait(shared.p_empty(), n % 2 ^ 1);
#pragma unroll
      for (int i = 0; i < kM / 16; ++i) {
        const float *s = S.x + 8 * i;
        const u32 x[4] = {pack<T>(s[0], s[1]), pack<T>(s[2], s[3]), pack<T>(s[4], s[5]), pack<T>(s[6], s[7])};
        store_shared(place_of_p(i), x);
      }
      __syncwarp();
      scores.release(shared.p_full());
    }

    // dP -> dS. kHidden: dP of what is hidden may be no number.
    template <bool kHidden> __device__ __forceinline__ void differentiate(LeftOperand<kM> &dS, const Accumulator<T, kM> &dP, u32 n) const {
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
              float p = tile::unpacked<T>(P[2 * c + r], e), x = dP.x[8 * i + 4 * c + 2 * r + e];
              if constexpr (F.dropout) {
                x = __float_as_uint(p) >> 31 ? 0.0f : x * factor;
                p = fabsf(p);
              }
              return kHidden && p == 0 ? 0.0f : p * (x - D[e]);
            };
            dS.x[4 * i + 2 * c + r] = pack<T>(dS_of(0), dS_of(1));
          }
        }
      }
    }

    // All tiles of queries, as the warpgroup sees them that makes dQ alone.
    __device__ __forceinline__ void dq() const {
      wait_full(shared.q_full(0), 0);
      QueryStep step = read_step(0);
      if (step.flags & kNothing) {
        if constexpr (C.deterministic) ask_for_turns();
        return;
      }
      mbarrier_wait(shared.k_full(), 0);
#pragma unroll 1
      for (u32 n = 0;; ++n) {
        const i32 number = step.number;
        const bool last = step.flags & kLast;
        auto read_ahead = [&] {
          if (last) return;
          wait_full(shared.q_full(n + 1), n + 1);
          step = read_step(n + 1);
        };
        if constexpr (C.deterministic) { // who orders the additions will look at the next step while this one's are made
          read_ahead();
          ask_for_turns();
        }
        wait_full(shared.ds_full(n), n);
        if constexpr (!C.deterministic) read_ahead();
        add_parts<0, 0, kParts>(n, number);
        if (last) return;
      }
    }
    // Of all that comes with a tile of queries, dQ alone needs no more than this.
    __device__ __forceinline__ QueryStep read_step(u32 n) const {
      const QueryStep step = read<QueryStep>(shared.step(n));
      __syncwarp();
      scores.release(shared.q_empty(n));
      return step;
    }
    __device__ __forceinline__ void ask_for_turns() const { scores.release(shared.dq_full(0)), scores.release(shared.dq_full(1)); }

    // This warpgroup's parts of dQ. then(): what follows the products under way before them; it begins another one. Without it none are
    // under way.
    template <int kBegin, int kEnd, class... Then> __device__ __forceinline__ void add_dq(u32 n, i32 number, const Then &...then) const {
      if constexpr (C.deterministic) scores.release(shared.dq_full(w));
      wait_full(shared.ds_full(n), n);
      add_parts<kBegin, kBegin, kEnd>(n, number, then...);
    }
    // kBegin: the first part; kPart: the first of those that are left.
    template <int kPart, int kBegin, int kEnd, class... Then>
    __device__ __forceinline__ void add_parts(u32 n, i32 number, const Then &...then) const {
      Accumulator<T, C.dq_queries()> dQ;
      begin_dq<kPart>(dQ, n);
      if constexpr (sizeof...(Then) && kPart == kBegin) {
        wgmma_wait<1>();
        (then(), ...);
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      dQ.done();
      if constexpr (kPart + 1 == kEnd) scores.release(shared.ds_empty(n));
      leave<kPart>(dQ, n, number);
      if constexpr (kPart + 1 < kEnd) add_parts<kPart + 1, kBegin, kEnd>(n, number, then...);
    }
    template <int kPart> __device__ __forceinline__ void begin_dq(Accumulator<T, C.dq_queries()> &dQ, u32 n) const {
      const u32 K = shared.k + (kByColumns ? kPart * kBlockBytes : 0),
                dS = shared.ds_of(n) + (kByColumns ? 0 : kPart * C.dq_queries() * kRowBytes);
      dQ.template begin_product_of_columns<kKeys, kM>(K, dS);
    }
    // To the sum over key tiles, which holds a tile of queries as the warps' lanes do: 512 bytes for each eight queries of a warp. Where
    // there are turns, the parts on the left have one, and those on the right another.
    template <int kPart> __device__ __forceinline__ void leave(const Accumulator<T, C.dq_queries()> &dQ, u32 n, i32 number) const {
      constexpr int kSide = kPart >= kRight;
      constexpr bool kFirst = kPart == 0 || kPart == kRight, kLastOfSide = kPart + 1 == kRight || kPart + 1 == kParts;
      if (!a.dq_sum) return;
      float *target = a.dq_sum + (i64)number * (kM * C.columns()) + (kPart * 4 + warp) * (16 * C.dq_queries());
      if (C.deterministic && kFirst) mbarrier_wait(shared.dq_empty(kSide), n % 2);
#pragma unroll
      for (int i = 0; i < C.dq_queries() / 8; ++i) add_quad(target + 128 * i, reinterpret_cast<const float (&)[4]>(dQ.x[4 * i]));
      if (C.deterministic && kLastOfSide) {
        __syncwarp();
        if (lane == 0) end_turn(turn_of(a, number, kSide));
      }
    }
  };

  static __device__ __forceinline__ void run(const Arguments &a) { run_backward<C, Compute>(a); }
};

} // namespace strobe::sm90
