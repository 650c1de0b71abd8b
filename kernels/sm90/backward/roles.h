// dQ, dK and dV on Hopper with 64 keys per thread block (backward.h has the formulas). This form serves heads so wide that dK of 64 keys
// fills one warpgroup's registers and dV another's, and calls in which blocks of 128 keys would leave SMs idle. For each tile of queries
// the left warpgroup makes S, P and dV, and the right one dP, dS and dK. The left one passes P through shared memory, in the order of
// lanes. dQ of a tile is computed one iteration later; the warpgroups divide dQ by columns, or by queries if there are only 64 columns.
#pragma once
#include "differentiate.h"
#include "run.h"
#include "scores.h"

namespace strobe::sm90 {

template <BackwardConfig C> struct BackwardRoles {
  using Arguments = HopperBackwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  static constexpr bool kWaitsItself = true; // load.h waits for the previous launch
  static constexpr int kThreads = C.kThreads, kBlocksPerSm = 1;
  static constexpr int kD = C.head_dim, kDv = C.head_dim_v, kM = C.tile_q, kKeys = 64;
  static constexpr int kBlockBytes = kKeys * kRowBytes, kBlocks = C.columns() / 64; // blocks of 64 columns of K
  // A warpgroup computes some blocks of columns of dQ. If there is only one block, it computes half of the queries.
  static constexpr bool kByColumns = kBlocks > 1;
  static constexpr int kEndLeft = kByColumns ? kBlocks / 2 : 1, kBeginRight = kByColumns ? kEndLeft : 0;
  // K or V as a left operand, where they are held in registers; otherwise unused.
  template <int kColumns> using KeyOperand = LeftOperand<C.keys_in_registers ? kColumns : 4>;
  static_assert(C.roles && !C.exact_p && !C.dq_shared);

  struct Compute {
    const Arguments &a;
    const Inputs &in;
    const BackwardShared<C> &shared;
    const int w, lane, warp; // the warpgroup, and the warp within the warpgroup
    const BackwardScores<C> scores;

    __device__ __forceinline__ Compute(const Arguments &a, const BackwardShared<C> &shared, const KeyBlock &keys, int w)
        : a(a), in(a.in), shared(shared), w(w), lane((int)threadIdx.x % 32), warp(__shfl_sync(0xFFFFFFFFu, (int)threadIdx.x / 32 % 4, 0)),
          scores(shared, a, keys, w) {}

    __device__ __forceinline__ u32 all(u32) {
      if (w == 0) {
        Left left{*this};
        walk<0, kEndLeft>(left);
        scores.template store<kDv>(a.dv_of(C.split_group), in, read<KeyBlock>(shared.keys()), in.head_dim_v, left.dV,
                                   scores.dropout.dropout.factor());
      } else {
        Right right{*this};
        walk<kBeginRight, kBlocks>(right);
        scores.template store<kD>(a.dk_of(C.split_group), in, read<KeyBlock>(shared.keys()), in.head_dim, right.dK, (float)in.scale);
      }
      return 0;
    }

    // Walks over all tiles of queries. The calling warpgroup, left or right, computes the blocks [kBegin, kEnd) of dQ's columns.
    template <int kBegin, int kEnd, class Side> __device__ __forceinline__ void walk(Side &side) const {
      side.clear();
      wait_full(shared.q_full(0), 0);
      QueryStep step = read<QueryStep>(shared.step(0));
      if (!(step.flags & kNothing)) {
        mbarrier_wait(shared.k_full(), 0);
        side.begin();
        u32 n = 0;
        i32 before = 0; // the number of the tile of the previous iteration
#pragma unroll 1
        for (;; ++n) {
          side.step(step, n);
          const u32 next = n + !(step.flags & kLast);
          auto then = [&] { side.end(n, next); };
          if (n > 0) {
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
        add_dq<kBegin, kEnd>(n, before);
      } else if constexpr (C.deterministic) {
        scores.release(shared.dq_full(w));
      }
    }

    // The left warpgroup makes S, P and dV.
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
      // Computes P = exp(S - LSE), passes it to the right warpgroup, and begins dV += P^T dO.
      __device__ __forceinline__ void step(const QueryStep &step, u32 n) {
        typename BackwardScores<C>::Fetched fetched;
        my.scores.fetch(step, fetched);
        const u32 allowed = my.scores.allowed(step);
        wait_for<0>(S);
        my.scores.clear_nonfinite_queries(step, n);
        my.scores.template exponentiate<false>(S, P, n, step, allowed, fetched);
        my.give_p(S, n);
        my.scores.round(P, S);
        my.scores.release(my.shared.q_empty(n));
        wait_full(my.shared.dout_full(n), n);
        dV.begin_adding(P, my.shared.dout_of(n));
      }
      // Called when dV += P^T dO has ended. Begins S of the next tile; after the last tile the product's result is not read.
      __device__ __forceinline__ void end(u32 n, u32 next) {
        dV.done();
        P.done();
        my.scores.release(my.shared.dout_empty(n));
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

    // The right warpgroup makes dP, dS and dK.
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
      // Computes dS = P (dP - D), stores it in shared memory for both warpgroups' dQ, and begins dK += dS^T Q.
      __device__ __forceinline__ void step(const QueryStep &step, u32 n) {
        wait_for<0>(dP);
        my.scores.clear_nonfinite_queries(step, n);
        mbarrier_wait(my.shared.p_full(), n % 2);
        if (my.scores.masked(step) || BackwardScores<C>::kHides)
          my.template differentiate<Zeros::each>(dS, dP, n);
        else
          my.template differentiate<Zeros::none>(dS, dP, n);
        __syncwarp();
        my.scores.release(my.shared.p_empty());
        my.scores.release(my.shared.dout_empty(n));
        my.scores.hand_on(dS, n);
        dK.begin_adding(dS, my.shared.q_of(n));
      }
      // Called when dK += dS^T Q has ended. Begins dP of the next tile; after the last tile the product's result is not read.
      __device__ __forceinline__ void end(u32 n, u32 next) {
        dK.done();
        dS.done();
        my.scores.release(my.shared.q_empty(n));
        begin_dp(next);
      }
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
    // Called once S of the first tile is computed: clears the numbers of K that are not finite. The right warpgroup reads K only for dQ,
    // after it has waited for P. V is not cleared, because dS of a hidden key does not depend on dP.
    __device__ __forceinline__ void clear_nonfinite_k(Accumulator<T, kM> &S) const {
      wait_for<0>(S);
      if (!scores.hides()) return;
      if (scores.shows_nonfinite(S)) scores.template clear_nonfinite_keys<true>(shared.k, kBlocks);
      scores.together();
    }
    // Where P is stored in shared memory for the right warpgroup. Dropped elements are negative.
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

    // P from the left warpgroup, as differentiate() reads it.
    struct GivenP {
      const Compute &my;
      u32 P[4];
      __device__ __forceinline__ void take(int i) { load_shared(P, my.place_of_p(i)); }
      __device__ __forceinline__ float at(int i) const { return tile::unpacked<T>(P[i % 8 / 2], i % 2); }
    };
    template <Zeros kZeros> __device__ __forceinline__ void differentiate(LeftOperand<kM> &dS, const Accumulator<T, kM> &dP, u32 n) const {
      sm90::differentiate<F, kZeros>(dS, dP, GivenP{*this}, shared.delta_of(n) + lane % 4 * 8, scores.dropout.dropout.factor());
    }

    // Computes this warpgroup's part of dQ and adds it to the sum. then() is called when the product that was in flight before dQ has
    // ended; it begins another product. If no then() is given, no product may be in flight.
    template <int kBegin, int kEnd, class... Then> __device__ __forceinline__ void add_dq(u32 n, i32 number, const Then &...then) const {
      Accumulator<T, C.dq_queries()> dQ;
      if constexpr (C.deterministic) scores.release(shared.dq_full(w));
      wait_full(shared.ds_full(n), n);
      const u32 dS = shared.ds_of(n) + (kByColumns ? 0 : w * C.dq_queries() * kRowBytes);
#pragma unroll
      for (int block = kBegin; block < kEnd; ++block) {
        dQ.template begin_product_of_columns<kKeys, kM>(shared.k + block * kBlockBytes, dS);
        if (sizeof...(Then) && block == kBegin) {
          wgmma_wait<1>();
          (then(), ...);
          wgmma_wait<1>();
        } else {
          wgmma_wait<0>();
        }
        leave(dQ, n, number, block, block == kBegin, block == kEnd - 1);
      }
    }
    // Adds a block of columns of dQ to the sum over key tiles, in the layout of dq.h. first, last: whether it is the first or last of this
    // warpgroup's blocks.
    __device__ __forceinline__ void leave(Accumulator<T, C.dq_queries()> &dQ, u32 n, i32 number, int block, bool first, bool last) const {
      dQ.done();
      if (last) scores.release(shared.ds_empty(n));
      if (!a.dq_sum) return;
      const int piece = kByColumns ? block : w;
      float *target = a.dq_sum + (i64)number * (kM * C.columns()) + (piece * 4 + warp) * (16 * C.dq_queries());
      if (C.deterministic && first) mbarrier_wait(shared.dq_empty(w), n % 2);
      if (!pads_dq<C>(piece, warp)) {
#pragma unroll
        for (int i = 0; i < C.dq_queries() / 8; ++i) add_quad(target + 128 * i, reinterpret_cast<const float (&)[4]>(dQ.x[4 * i]));
      }
      if (C.deterministic && last) {
        __syncwarp();
        if (lane == 0) end_turn(turn_of(a, number, w));
      }
    }
  };

  static __device__ __forceinline__ void run(const Arguments &a) { run_backward<C, Compute>(a); }
};

} // namespace strobe::sm90
