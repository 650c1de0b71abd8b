// dQ, dK and dV of attention on Hopper (FlashAttention-2's backward). A thread block owns 128 keys, and each of its two computing
// warpgroups owns 64 of them. Two producer threads have the copy engine load K, V and, tile by tile, Q and dO. For each tile of queries a
// warpgroup computes
//
//   S^T = K Q^T, P^T = exp(S^T - LSE)        dP^T = V dO^T, dS^T = P^T (dP^T - D)
//   dV += P^T dO                             dK += dS^T Q                             dQ^T = K^T dS^T, added up in global memory
//
// S is transposed, so that P and dS are operands in the registers where they were made. dS also goes to shared memory, because dQ needs the
// dS of both warpgroups. An iteration computes dQ of the previous tile and S of the next tile. The warpgroups alternate on the tensor
// cores: one multiplies while the other exponentiates.
#pragma once
#include "differentiate.h"
#include "dq.h"
#include "in_line.h"
#include "run.h"
#include "scores.h"

namespace strobe::sm90 {

template <bool kReference, class X> struct ReferenceIf {
  using type = X;
};
template <class X> struct ReferenceIf<true, X> {
  using type = X &;
};

template <BackwardConfig C> struct Backward {
  using Arguments = HopperBackwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  static constexpr bool kWaitsItself = true; // load.h waits for the previous launch
  static constexpr int kThreads = C.kThreads, kBlocksPerSm = 1;
  static constexpr int kD = C.head_dim, kDv = C.head_dim_v, kM = C.tile_q, kTileK = C.tile_k();
  static constexpr int kComputing = 128 * C.kWarpgroups;

  static_assert(!C.roles && C.columns() <= 192 && C.columns_v() <= 192);
  static_assert(!C.owns_dq || (C.persistent && !C.split_group));
  static_assert(!C.persistent || !F.part);
  static_assert(!C.staged_store || (!C.persistent && !C.split_group && C.columns() <= C.columns_v()));
  static_assert(C.key_stages == 1 || (C.draws_keys() && !C.deterministic));
  static_assert(!C.in_line || (C.key_stages == 2 && !C.third() && !C.split_group));
  static_assert(!(F.dropout || F.curved()) || C.exact_p, "dS is made of what S becomes");

  // Whether a warpgroup skips tiles of queries that see none of its keys. Kernels that are short of registers do not: such tiles are few.
  static constexpr bool kSkips = F.band && !F.curved();
  // Named barriers: at kTensorCores + w, warpgroup w waits until it may use the tensor cores, which it keeps from dP to dQ. Without these
  // barriers, some kernels fall into a rhythm in which both warpgroups multiply and then both exponentiate; iterations then take up to 15%
  // longer.
  static constexpr int kTensorCores = BackwardScores<C>::kBoth + 1;

  struct Compute {
    using Scores = Accumulator<T, kM>;
    using Keys = LeftOperand<C.keys_in_registers ? kD : 4>; // K of this warpgroup's keys
    using Carried = InLineCarried<C, Scores, Keys>;
    // With in_line, Kept is a reference to a member of Carried, which outlives the tile of keys.
    template <class X> using Kept = typename ReferenceIf<C.in_line != 0, X>::type;

    const Arguments &a;
    const BackwardShared<C> &shared;
    Carried *const carried = nullptr;
    const int w, lane, warp; // the warpgroup, and the warp within the warpgroup
    const BackwardScores<C> scores;
    Accumulator<T, kD> dK;
    Accumulator<T, kDv> dV;
    Kept<Scores> S;
    Accumulator<T, kM> dP;
    Accumulator<T, C.dq_queries()> dQ;
    Accumulator<T, C.dq_queries_of_third()> dQ_of_third;
    LeftOperand<kM> P, dS;
    Kept<Keys> K;
    LeftOperand<C.v_in_registers() ? kDv : 4> V;

    __device__ __forceinline__ Compute(const Arguments &a, const BackwardShared<C> &shared, const KeyBlock &keys, int w)
      requires(!C.in_line)
        : a(a), shared(shared), w(w), lane(this_thread<C>() % 32), warp(__shfl_sync(0xFFFFFFFFu, this_thread<C>() / 32 % 4, 0)),
          scores(shared, a, keys, w) {}
    __device__ __forceinline__ Compute(const Arguments &a, const BackwardShared<C> &shared, const KeyBlock &keys, int w, Carried &carried)
      requires(C.in_line != 0)
        : a(a), shared(shared), carried(&carried), w(w), lane(this_thread<C>() % 32),
          warp(__shfl_sync(0xFFFFFFFFu, this_thread<C>() / 32 % 4, 0)), scores(shared, a, keys, w), S(carried.S), K(carried.K) {}

    // Does all work for these keys. n: the number of the first iteration. Returns the number of the iteration after the last one.
    __device__ __forceinline__ u32 all(u32 n) {
      if constexpr (C.in_line) return in_line().all(n);
      clear_sums();
      if (w == 1 && n == 0) leave_tensor_cores(); // warpgroup 0 begins
      wait_full(shared.q_full(n), n);
      const QueryStep step = read<QueryStep>(shared.step(n));
      const bool nothing = step.flags & kNothing;
      i32 last = 0;
      if (!nothing)
        last = walk(step, n);
      else if constexpr (C.persistent)
        pass(n);
      else if constexpr (C.deterministic)
        scores.release(shared.dq_full(w));
      const KeyBlock keys = read<KeyBlock>(shared.keys());
      if constexpr (C.persistent) release_tiles(n);
      if (!nothing) {
        if constexpr (C.third()) dq_sum().add_third(dQ_of_third, n, last);
        dq_sum().add(dQ, n, last, keys.begin);
      }
      if constexpr (C.staged_store) mbarrier_wait(shared.v_full(), 0); // without a tile of queries nothing has waited for V yet
      store_sums(keys);
      dq_sum().finish(keys);
      return n + 1;
    }
    __device__ __forceinline__ void clear_sums() {
      dK.clear();
      dV.clear();
    }
    __device__ __forceinline__ void store_sums(const KeyBlock &keys) const {
      scores.template store<kDv>(a.dv_of(C.split_group), a.in, keys, a.in.head_dim_v, dV, scores.dropout.dropout.factor());
      scores.template store<kD>(a.dk_of(C.split_group), a.in, keys, a.in.head_dim, dK, (float)a.in.scale);
    }
    // Called after iteration n, the last one with these keys: frees the stages that the iteration read.
    __device__ __forceinline__ void release_tiles(u32 n) const {
      __syncwarp();
      for (u32 read : {shared.q_empty(n), shared.ds_empty(n), shared.keys_empty()}) scores.release(read);
    }

    // An iteration without a tile of queries still completes every barrier phase, so that the next iteration waits for the right phases.
    __device__ __forceinline__ void pass(u32 n) const {
      wait_full(shared.dout_full(n), n);
      scores.hand_on_nothing(n);
      wait_full(shared.ds_full(n), n);
      scores.release(shared.dout_empty(n));
      if constexpr (C.deterministic) {
        mbarrier_wait(shared.dq_empty(w), n % 2 ^ 1);
        scores.release(shared.dq_full(w));
      }
    }
    // Walks over all tiles of queries, and returns the number of the last tile. The dQ of that tile is then in registers and not added yet.
    __device__ __forceinline__ i32 walk(QueryStep step, u32 &n) {
      first_scores(n);
      i32 before = C.persistent ? -1 : 0;
      each_tile(step, n, before, [] {});
      wait_for<0>(S);
      begin_dq(n);
      if constexpr (C.third()) wait_for<0>(dQ_of_third);
      wait_for<0>(dQ);
      return before;
    }

    // Computes all tiles of queries. before: the number of the previous iteration's tile, if there was one. look() is called once S of a
    // tile has been computed.
    template <class Look> __device__ __forceinline__ void each_tile(QueryStep step, u32 &n, i32 &before, const Look &look) {
#pragma unroll 1
      for (;; ++n) {
        typename BackwardScores<C>::Fetched fetched;
        scores.fetch(step, fetched);
        const u32 allowed = scores.allowed(step);
        wait_for<0>(S);
        look();
        u32 next;
        if (!kSkips || !(step.flags & kUnseen << w))
          next = steady_step(step, allowed, fetched, n, before);
        else
          next = unseen_step(step, n, before);
        before = step.number;
        if constexpr (C.in_line) carried->k = shared.k;
        if (next == n) break;
        step = read<QueryStep>(shared.step(next));
      }
    }

    // Computes S of the first tile, from K in shared memory. If S shows that K holds numbers that are not finite, these numbers are cleared
    // in shared memory before K is loaded into registers.
    __device__ __forceinline__ void first_scores(u32 n) {
      mbarrier_wait(shared.k_full(), n >> 31);
      begin_s_of_shared(shared, n);
      mbarrier_wait(shared.v_full(), n >> 31);
      clear_nonfinite_keys();
      load_k(shared);
      load_v();
    }
    __device__ __forceinline__ void load_k(const BackwardShared<C> &keys) {
      if constexpr (C.keys_in_registers) load_left<kTileK>(K, keys.k, 64 * w + 16 * warp, lane);
    }
    __device__ __forceinline__ void load_v() {
      if constexpr (C.v_in_registers()) load_left<kTileK>(V, shared.v, 64 * w + 16 * warp, lane);
    }
    // Computes P, dP and dS of a tile whose S is ready, dV += P^T dO, dK += dS^T Q, dQ of the previous tile, and S of the next tile. Like
    // unseen_step, returns the number of the next iteration, or n if this tile is the last one.
    __device__ __forceinline__ u32 steady_step(const QueryStep &step, u32 allowed, const typename BackwardScores<C>::Fetched &fetched,
                                               u32 n, i32 before) {
      scores.template exponentiate<true>(S, P, n, step, allowed, fetched);
      scores.round(P, S);
      wait_full(shared.dout_full(n), n);
      take_tensor_cores();
      begin_dp(n);
      dV.begin_adding(P, shared.dout_of(n));
      wait_for<1>(dP);
      differentiate(n);
      scores.hand_on(dS, n);
      dK.begin_adding(dS, shared.q_of(n));
      wait_for<1>(dV, P);
      scores.release(shared.dout_empty(n));
      return end_step<true>(step, n, before);
    }
    // The step of a tile whose queries see none of this warpgroup's keys. Only dQ of the previous tile is computed, from the dS of both
    // warpgroups.
    __device__ __forceinline__ u32 unseen_step(const QueryStep &step, u32 n, i32 before) {
      scores.clear_nonfinite_queries(step, n);
      scores.hand_on_nothing(n);
      scores.release(shared.dout_empty(n));
      take_tensor_cores();
      return end_step<false>(step, n, before);
    }
    // Computes dQ of the previous tile, and S of the next tile. kSeen: dK += dS^T Q is in flight.
    template <bool kSeen> __device__ __forceinline__ u32 end_step(const QueryStep &step, u32 n, i32 before) {
      const u32 next = n + !(step.flags & kLast);
      if (later(n, before)) { // two branches: otherwise ptxas makes the products wait for one another
        begin_dq(n - 1);
        if constexpr (kSeen) wait_for<1>(dK, dS);
        if constexpr (C.third()) add_third(n - 1, before);
        return go_on(n, next, true, before);
      } else {
        if constexpr (kSeen) wait_for<0>(dK, dS);
        return go_on(n, next, false, before);
      }
    }
    // later: dQ of the previous iteration is in flight, so this iteration is not the first.
    __device__ __forceinline__ u32 go_on(u32 n, u32 next, bool later, i32 before) {
      if constexpr (C.in_line) {
        if (next == n) return in_line().end_keys(n, later, before);
      }
      begin_next_s(n, next, later);
      if (later) take_dq<1>(n - 1), add_dq(n - 1, before);
      return next;
    }

    // There are two branches because a barrier number that is not constant takes a register, and a function of the score leaves none.
    __device__ __forceinline__ void take_tensor_cores() const {
      w == 0 ? barrier_sync(kTensorCores, kComputing) : barrier_sync(kTensorCores + 1, kComputing);
    }
    __device__ __forceinline__ void leave_tensor_cores() const {
      w == 0 ? barrier_arrive(kTensorCores + 1, kComputing) : barrier_arrive(kTensorCores, kComputing);
    }
    // Whether there has been an iteration with these keys.
    static __device__ __forceinline__ bool later(u32 n, i32 before) { return C.persistent ? before >= 0 : n > 0; }
    // Passes the tensor cores to the other warpgroup and begins S of the next tile. After the last tile the product's result is not read.
    __device__ __forceinline__ void begin_next_s(u32 n, u32 next, bool later) {
      if (!C.third() || !later) leave_tensor_cores(); // otherwise add_third has called it
      if (next != n) scores.release(shared.q_empty(n));
      wait_full(shared.q_full(next), next);
      begin_s(shared, next);
    }
    // Begins S of iteration n. keys: the stage where K lies, unless K is in registers.
    __device__ __forceinline__ void begin_s(const BackwardShared<C> &keys, u32 n) {
      if constexpr (C.keys_in_registers)
        S.template begin_product<Place::free>(K, keys.q_of(n));
      else
        begin_s_of_shared(keys, n);
    }
    __device__ __forceinline__ void begin_s_of_shared(const BackwardShared<C> &keys, u32 n) {
      S.template begin_product<kD, kTileK, Place::free>(keys.k + 64 * kRowBytes * w, keys.q_of(n));
    }
    __device__ __forceinline__ void begin_dp(u32 n) {
      if constexpr (C.v_in_registers())
        dP.template begin_product<Place::free>(V, shared.dout_of(n));
      else
        dP.template begin_product<kDv, kTileK, Place::free>(shared.v + 64 * kRowBytes * w, shared.dout_of(n));
    }
    // Whether a warpgroup computes some columns of dQ for all queries; otherwise all columns for half of the queries.
    static constexpr bool kByColumns = C.columns() > 64;
    __device__ __forceinline__ u32 columns_of_k() const {
      u32 keys = shared.k;
      if constexpr (C.in_line) keys = carried->k;
      return keys + (kByColumns ? w * kTileK * kRowBytes : 0);
    }
    __device__ __forceinline__ void begin_dq(u32 n) {
      wait_full(shared.ds_full(n), n);
      if constexpr (C.third())
        dQ_of_third.template begin_product_of_columns<kTileK, kM>(shared.k + 2 * kTileK * kRowBytes,
                                                                  shared.ds_of(n) + w * C.dq_queries_of_third() * kRowBytes);
      dQ.template begin_product_of_columns<kTileK, kM>(columns_of_k(), shared.ds_of(n) + (kByColumns ? 0 : w * C.dq_queries() * kRowBytes));
    }
    // Leaves the tensor cores to the other warpgroup and adds the third piece of dQ, because S needs the piece's registers. The rest of dQ
    // is still in flight.
    __device__ __forceinline__ void add_third(u32 n, i32 number) {
      wait_for<1>(dQ_of_third);
      leave_tensor_cores();
      dq_sum().add_third(dQ_of_third, n, number);
    }
    // Waits for dQ of iteration n, and frees that iteration's dS. At most kPending products have begun after that dQ.
    template <int kPending> __device__ __forceinline__ void take_dq(u32 n) {
      wait_for<kPending>(dQ);
      scores.release(shared.ds_empty(n));
      if constexpr (C.in_line) in_line().release_keys_before(n);
    }
    __device__ __forceinline__ void add_dq(u32 n, i32 number) const {
      dq_sum().add(dQ, n, number, C.owns_dq ? (i32)load_shared(shared.keys() + 8) : 0);
    }
    __device__ __forceinline__ DqSum<C> dq_sum() const { return {a, shared, w, lane, warp}; }
    __device__ __forceinline__ InLine<C, Compute> in_line() { return {*this}; }

    // Called once S of the first tile is computed: clears the numbers of this warp's keys that are not finite. All warps meet at a barrier
    // before the next product that reads K. V is not cleared where dS of a hidden key does not depend on dP.
    __device__ __forceinline__ void clear_nonfinite_keys() {
      if (!scores.hides()) return;
      wait_for<0>(S);
      clear_keys_that_show();
    }
    // If S, which is complete, shows numbers in K that are not finite, clears them in this warp's keys. Returns whether it has cleared any.
    __device__ __forceinline__ bool clear_keys_that_show() {
      if (!scores.shows_nonfinite(S)) return false;
      scores.template clear_nonfinite_keys<true>(shared.k, C.columns() / 64);
      if constexpr (!kHidden) scores.template clear_nonfinite_keys<false>(shared.v, C.columns_v() / 64);
      return true;
    }

    // Whether every tile of keys may have hidden elements, and not only the last tile.
    static constexpr bool kHidden = F.band || BackwardScores<C>::kHides;
    // P in this warpgroup's registers, as differentiate() reads it.
    struct OwnP {
      const Compute &my;
      __device__ __forceinline__ void take(int) {}
      __device__ __forceinline__ float at(int i) const { return C.exact_p ? my.S.x[i] : tile::unpacked<T>(my.P.x[i / 2], i % 2); }
      __device__ __forceinline__ u32 pair(int i) const { return my.P.x[i]; }
    };
    __device__ __forceinline__ void differentiate(u32 n) {
      constexpr Zeros kZeros = !kHidden ? Zeros::none : C.exact_p ? Zeros::each : Zeros::pairs;
      sm90::differentiate<F, kZeros>(dS, dP, OwnP{*this}, shared.delta_of(n) + lane % 4 * 8, scores.dropout.dropout.factor());
    }
  };

  static __device__ __forceinline__ void run(const Arguments &a) { run_backward<C, Compute>(a); }
};

} // namespace strobe::sm90
