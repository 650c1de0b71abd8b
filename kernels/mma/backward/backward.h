// dQ, dK and dV of attention (FlashAttention-2, algorithm 2) on tensor cores. A thread block owns a tile of keys and walks over the tiles
// of queries that see some of it:
//
//   S^T = K Q^T, P^T = exp(S^T - LSE)        dP^T = V dO^T, dS^T = P^T (dP^T - D)
//   dV += P^T dO                             dK += dS^T Q                             dQ += dS K, in global memory
//
// Half of the warps have the left role (PAndDv: the formulas on the left), the others the right role (DsAndDk). So every sum stays in
// registers, P and dS are operands in the registers where they were made, and one role multiplies while the other one exponentiates. P
// passes from the left role to the right one through shared memory. dS passes to all warps, which compute dQ of a tile one iteration later,
// so that the roles meet once per iteration. S is transposed: its rows are keys.
#pragma once
#include "steps.h"

namespace strobe::mma {

template <BackwardConfig C> struct Backward {
  using Arguments = BackwardArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  static __device__ __forceinline__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const BackwardBlock<C> block(a, shared);
    block.choose_keys();
    if (block.state.k0 >= block.state.k1) return;
    if (block.role == 0)
      Walk<PAndDv>(block).run();
    else
      Walk<DsAndDk>(block).run();
  }

private:
  using Steps = BackwardSteps<C>;
  using T = typename Steps::T;
  static constexpr Features F = C.features;
  static constexpr int kQueries = Steps::kQueries, kSpan = Steps::kSpan, kKeys = Steps::kKeys, kStep = Steps::kStep;

  // The left role: makes P, and from it dV.
  struct PAndDv : Steps {
    using Steps::Steps;
    using Sum = Accumulator[kKeys][Steps::kColumnsV]; // dV

    __device__ __forceinline__ bool load_first() const { return false; }
    // One iteration. Returns whether this thread has loaded a number for the next iteration that is not finite.
    template <bool kNonfinite> __device__ __forceinline__ bool iterate(Sum &dV, int n) const {
      const Blocks<Right, C.head_dim_v, true> dO(this->shared + Steps::kDo + n % 2 * C.dout_bytes(),
                                                 this->dim_warp * Steps::kColumnsV * 16);
#pragma unroll
      for (int span = 0; span < kQueries; span += kSpan) {
        Accumulator S[kKeys][kStep] = {}, P[kKeys][kStep];
        this->template make_p<kNonfinite>(S, P, n, span);
        Left p[kKeys][kStep];
        this->hand_on_p(p, S, P, span);
        this->template accumulate<kNonfinite>(
            dV, [&](int m, int n) { return kept(p[m][n]); }, [&](int m, int n) { return kept(taken(m, n)); }, dO, span);
      }
      if (n > 0) this->template add_dq<kNonfinite>(n - 1);
      return false;
    }
    __device__ __forceinline__ void store(Sum &dV) const {
      this->template store_sum<C.head_dim_v>(this->a.dv, dV, this->factor, Steps::kV, this->in.head_dim_v);
    }

  private:
    __device__ __forceinline__ Left taken(int m, int n) const {
      return tile::take(this->shared + Steps::kP + (C.p_planes() - 1) * C.p_bytes(), this->block(m, n));
    }
    static __device__ __forceinline__ Left kept(const Left &x) { return F.dropout ? tile::positive(x) : x; }
  };

  // The right role: makes dS, and from it dK. Its threads load the next queries while the left role begins to multiply.
  struct DsAndDk : Steps {
    using Steps::Steps;
    using Sum = Accumulator[kKeys][Steps::kColumns]; // dK

    __device__ __forceinline__ bool load_first() const {
      if (this->tile_of(0).head < 0) return false;
      this->load_queries(this->tile_of(0), 0);
      return this->write_stats(this->read_stats(this->tile_of(0)), 0);
    }
    template <bool kNonfinite> __device__ __forceinline__ bool iterate(Sum &dK, int n) const {
      if (n > 0) this->template add_dq<kNonfinite>(n - 1);
      typename Steps::Stats stats;
      const bool more = this->tile_of(n + 1).head >= 0;
      if (more) {
        this->load_queries(this->tile_of(n + 1), (n + 1) % 2);
        stats = this->read_stats(this->tile_of(n + 1));
      }
      cp_async_commit();
      if (this->thread == kThreads / 2) this->schedule(n + 2);

      const Blocks<Right, C.head_dim, true> Q(this->shared + Steps::kQ + n % 2 * C.q_bytes(), this->dim_warp * Steps::kColumns * 16);
#pragma unroll
      for (int span = 0; span < kQueries; span += kSpan) {
        Accumulator dP[kKeys][kStep] = {};
        this->template make_dp<kNonfinite>(dP, n, span);
        this->await_p(span);
        Left dS[kKeys][kStep];
        if (C.invariant || kNonfinite || Steps::kHides || this->tile_of(n).queries.masked)
          this->template differentiate<true>(dS, dP, this->own(span), n % 2);
        else
          this->template differentiate<false>(dS, dP, this->own(span), n % 2);
        this->hand_on_ds(dS, n % 2, span);
        this->template accumulate<kNonfinite>(
            dK, [&](int m, int n) { return dS[m][n]; },
            [&](int m, int k) { return tile::take_parts(this->shared + Steps::kDs + n % 2 * C.p_bytes(), this->block(m, k)); }, Q, span);
      }
      return more && this->write_stats(stats, n + 1);
    }
    __device__ __forceinline__ void store(Sum &dK) const {
      this->template store_sum<C.head_dim>(this->a.dk, dK, (float)this->in.scale, 0, this->in.head_dim);
    }
  };

  // Walks over all tiles of queries, in one role.
  template <class Role> struct Walk : Role {
    using Role::Role;

    __device__ __forceinline__ void run() const {
      typename Role::Sum sum = {}; // not a member: the compiler keeps such an object in memory until loops are unrolled, and then spills it
      this->load_keys();
      bool suspect = this->load_first(); // whether the tile loaded last has a number that is not finite
      cp_async_commit();
      suspect = meet(suspect);
      // Once a number that is not finite may be hidden, this and all further tiles take the careful path (kNonfinite).
      bool nonfinite = barrier_any(any_nonfinite<T>(this->shared, C.k_bytes(), this->thread, kThreads), kThreads);
      int n = 0;
      for (; this->tile_of(n).head >= 0; ++n) {
        if (n > 0) suspect = meet(suspect);
        if (nonfinite |= this->queries_nonfinite(this->tile_of(n), n % 2, suspect)) break;
        suspect = this->template iterate<false>(sum, n);
      }
      if (nonfinite) {
        while (this->tile_of(n).head >= 0) {
          this->template iterate<true>(sum, n++);
          meet(false);
        }
        if (n > 0) this->template add_dq<true>(n - 1);
      } else {
        meet(false);
        if (n > 0) this->template add_dq<false>(n - 1);
      }
      barrier_sync(0, kThreads);
      this->store(sum);
    }

  private:
    // Waits for all threads and for their loads. Returns whether the condition is true for any thread.
    static __device__ __forceinline__ bool meet(bool condition) {
      cp_async_wait<0>();
      return barrier_any(condition, kThreads);
    }
  };
};

} // namespace strobe::mma
