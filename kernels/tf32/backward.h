// dQ, dK and dV of attention (FlashAttention-2, algorithm 2) in FP32 on tensor cores. A thread block owns a tile of keys, and each warp
// owns tile_k / warps of these. The block walks over the query tiles that see some of its keys:
//   S^T = K Q^T, P^T = exp(S^T - LSE)        dP^T = V dO^T, dS^T = P^T (dP^T - D)
//   dV += P^T dO                             dK += dS^T Q                             dQ += dS K, in global memory
//
// S is transposed, so its rows are keys, and P^T and dS^T are left operands in the registers where they were made. dS also goes to shared
// memory, for dQ.
#pragma once
#include "../device/key_major_dropout.h"
#include "../device/nonfinite.h"
#include "../device/probabilities.h"
#include "../device/turns.h"
#include "backward_block.h"

namespace strobe::tf32 {

template <Config C> struct Backward : BackwardBlock<C> {
  using Arguments = BackwardArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  static __device__ __forceinline__ void run(const Arguments &a) { Backward(a).run(); }

private:
  using Block = BackwardBlock<C>;
  using Block::a, Block::in, Block::F, Block::kD, Block::kDv, Block::kTileQ, Block::kTileK, Block::kM, Block::kN;
  using Block::Block;
  using Block::kBlocks, Block::kSegment, Block::kRepeatSegment, Block::kV, Block::kQ, Block::kDo, Block::kDs;
  using Block::shared_state, Block::shared, Block::first_key, Block::choose_keys, Block::find, Block::load_keys, Block::load_queries;
  using Block::statistic;
  using typename Block::State, typename Block::Tile;

  __device__ __forceinline__ void run() const {
    choose_keys();
    if (shared_state().k0 >= shared_state().k1) return;
    load_keys();
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    bool k_finite = __syncthreads_and(keys_finite());
    if (threadIdx.x == 0) {
      State &state = shared_state();
      state.k_finite = k_finite, state.segment = -1, state.walked = state.repeats_left = state.repeat = 0;
    }

    Accumulator dK[kM][kD / 16], dV[kM][kDv / 16];
#pragma unroll 1
    while (true) {
      const bool more = walk(dK, dV);
      const bool repeat = !__syncthreads_and(shared_state().repeats_left || (all_finite(dK) && all_finite(dV)));
      if (threadIdx.x == 0) shared_state().repeat = repeat;
      if (repeat) continue;
      store(a.dk, dK, (float)in.scale, in.head_dim);
      store(a.dv, dV, Dropout<F>(in).factor(), in.head_dim_v);
      if (!more) break;
    }
  }

  // Walks over a segment: kSegment query tiles, or the rest. Returns whether there is another segment. Infinities and NaN in dO and Q must
  // reach only the keys that their queries see. They are rare, so a segment is repeated without them only if its dK or dV is not finite.
  // The repetition has short segments and does not compute dQ.
  __device__ __forceinline__ bool walk(Accumulator (&dK)[kM][kD / 16], Accumulator (&dV)[kM][kDv / 16]) const {
    set_zero(dK), set_zero(dV);
    begin_segment();
    if (shared_state().ring[0].head >= 0) load_queries(shared_state().ring[0]);
    cp_async_commit();
    int n = 0;
#pragma unroll 1
    for (; shared_state().ring[n % 2].head >= 0; ++n) {
      const Tile &t = shared_state().ring[n % 2], &next = shared_state().ring[(n + 1) % 2];
      cp_async_wait<0>();
      __syncthreads(); // Q and dO have arrived, and all threads have read the previous dS
      if (threadIdx.x == 0) find_within_segment(n + 1);
      const u32 keys = first_key();
      Accumulator P[kM][kN] = {}, slope[kM][kN] = {}, dS[kM][kN] = {};
      make_p(P, slope, t, keys);
      put(P);
      accumulate<kDv, true>(dV, P, shared(kDo));
      make_ds(dS, slope, keys);
      put(dS);
      accumulate<kD, false>(dK, dS, shared(kQ));
      __syncthreads(); // all of dS is stored, and all threads have read Q and dO
      if (next.head >= 0) load_queries(next);
      cp_async_commit();
      add_dq(t);
    }
    cp_async_wait<0>();
    if (threadIdx.x == 0) shared_state().walked = n;
    __syncthreads();
    return shared_state().ring[0].head < -1;
  }

  // Finds the tile of iteration n. If the segment ends before that tile, the tile's head is -2 - head until the next segment.
  __device__ __forceinline__ void find_within_segment(int n) const {
    find(n);
    State &state = shared_state();
    if (i32 &head = state.ring[n % 2].head; head >= 0 && n == (state.repeats_left ? kRepeatSegment : kSegment)) head = -2 - head;
  }
  __device__ __forceinline__ void begin_segment() const {
    if (threadIdx.x == 0) {
      State &state = shared_state();
      state.repeats_left = state.repeat ? state.walked : max(state.repeats_left - state.walked, 0);
      if (state.repeat) {
        state.head = state.begin.head, state.tiles = state.begin.tiles, state.ring[0] = state.begin.tile;
      } else {
        if (i32 &head = state.ring[0].head; head < -1) head = -2 - head;
        state.begin = {state.head, state.tiles, state.ring[0]};
      }
    }
    __syncthreads();
    if (threadIdx.x == 0 && !shared_state().repeat) ++shared_state().segment; // then the last segment has been stored
  }
  template <int kC> static __device__ __forceinline__ void set_zero(Accumulator (&x)[kM][kC]) {
#pragma unroll
    for (int i = 0; i < 8 * kM * kC; ++i) x[i / (8 * kC)][i / 8 % kC].x[i / 4 % 2][i % 4] = 0;
  }

  // S^T = K Q^T, P^T = exp(S^T - LSE). With a function of q.k, `slope` becomes P^T times the derivative. Dropped elements are negated.
  __device__ __forceinline__ void make_p(Accumulator (&P)[kM][kN], Accumulator (&slope)[kM][kN], const Tile &t, u32 keys) const {
    multiply_rows<kD, C.products, Sum::of_scores_transposed>(F.curved() ? slope : P, shared(0) + 4 * keys * kD, shared(kQ));
    if (t.queries.masked)
      probabilities<true>(P, slope, t);
    else
      probabilities<false>(P, slope, t);
    if constexpr (F.dropout) {
      KeyMajorDropout<F> dropout{Dropout<F>(in)};
      dropout.mark(P, t.queries.begin, shared_state().k0 + (i32)keys, t.head, shared_state().batch);
    }
  }
  // dP^T = V dO^T, dS^T = P^T (dP^T - D)
  __device__ __forceinline__ void make_ds(Accumulator (&dS)[kM][kN], const Accumulator (&slope)[kM][kN], u32 keys) const {
    multiply_rows<kDv, C.products>(dS, shared(kV) + 4 * keys * kDv, shared(kDo));
    differentiate(dS, slope);
  }

  struct RowLse { // loads LSE where it is used: registers are scarce
    const Backward &backward;
    int n;
    __device__ __forceinline__ float lse(int c, int e) const { return backward.statistic(0, n, c, e); }
    __device__ __forceinline__ float correction(int c, int e) const { return backward.statistic(2, n, c, e); }
  };
  // Turns S^T into P^T. With a function of q.k, slope[..] holds S^T, and becomes P^T times the derivative.
  template <bool kMasked>
  __device__ __forceinline__ void probabilities(Accumulator (&P)[kM][kN], Accumulator (&slope)[kM][kN], const Tile &t) const {
    const auto lse = [&](int n) { return RowLse{*this, n}; };
    Scores<F, float> scores(in, shared_state().sequence, shared_state().batch);
    constexpr Slope kSlope = F.curved() ? Slope::times_p : Slope::none;
    const i32 i = t.queries.begin, j = shared_state().k0 + first_key(), end = shared_state().k1;
    if constexpr (F.blocks == kFullKnown) {
      if (t.queries.entry[in.template to_full_t<F>()])
        return strobe::probabilities<F, kMasked, kSlope, true, false, false>(F.curved() ? slope : P, P, scores, t.head, i, j, end, lse);
    }
    strobe::probabilities<F, kMasked, kSlope, true>(F.curved() ? slope : P, P, scores, t.head, i, j, end, lse);
  }

  // Turns dP^T into dS^T, with P^T from shared memory, where this lane has put it. dS is 0 where nothing is visible, whatever dP is.
  __device__ __forceinline__ void differentiate(Accumulator (&dP)[kM][kN], const Accumulator (&slope)[kM][kN]) const {
    float factor = Dropout<F>(in).factor();
#pragma unroll
    for (int k = 0; k < 4 * kN; ++k) {
      int n = k / 4, c = k / 2 % 2, e = k % 2;
      float D = statistic(1, n, c, e);
#pragma unroll
      for (int i = 0; i < 2 * kM; ++i) {
        int at = 2 * (i % 2) + e;
        float &x = dP[i / 2][n].x[c][at], p = load_shared_float(address_of(i / 2, n, c, i % 2, e));
        if constexpr (F.dropout) x = dropped(p) ? 0.0f : x * factor;
        x = p == 0 ? 0.0f : (F.curved() ? slope[i / 2][n].x[c][at] : fabsf(p)) * (x - D);
      }
    }
  }

  // Whether dropout drops the element p of P^T, which is then negative.
  static __device__ __forceinline__ bool dropped(float p) { return F.dropout && __float_as_uint(p) >> 31; }

  // The address of P^T and later dS^T in shared memory; rows are queries.
  __device__ __forceinline__ u32 address_ds(int query, int key) const { return shared(kDs) + 4 * (query * C.ds_pitch() + key); }
  __device__ __forceinline__ u32 address_of(int m, int n, int c, int r, int e) const { // address of a lane's element
    return address_ds(16 * n + tile::lane_column(c, e), first_key() + 16 * m + tile::lane_row(r));
  }
  __device__ __forceinline__ void put(const Accumulator (&x)[kM][kN]) const {
#pragma unroll
    for (int i = 0; i < 8 * kM * kN; ++i) {
      int m = i / (8 * kN), n = i / 8 % kN, c = i / 4 % 2, r = i / 2 % 2, e = i % 2;
      store_shared(address_of(m, n, c, r, e), __float_as_uint(x[m][n].x[c][2 * r + e]));
    }
    __syncwarp();
  }

  // sum += x B. x: P^T or dS^T, which also lies in shared memory. B: the tile's dO or Q.
  template <int kColumns, bool kP>
  __device__ __forceinline__ void accumulate(Accumulator (&sum)[kM][kColumns / 16], Accumulator (&x)[kM][kN], u32 b) const {
    if (shared_state().repeats_left) return accumulate_nonfinite<kColumns, kP>(sum, b);
    Pairs<kColumns> B(b);
#pragma unroll
    for (int n = 0; n < kN; n += kBlocks) {
      Left f[kM][2 * kBlocks];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        if constexpr (kP && F.dropout) {
#pragma unroll
          for (int i = 0; i < 8 * kBlocks; ++i) {
            float &p = x[m][n + i / 8].x[i / 4 % 2][i % 4];
            if (dropped(p)) p = 0;
          }
        }
        set_left<C.products>(f[m], x[m] + n);
      }
      multiply_pairs<kColumns, C.products>(sum, f, B, 16 * n);
    }
  }
  // accumulate() for a B that is not finite. An element of x that is 0 adds nothing.
  template <int kColumns, bool kP>
  __device__ __forceinline__ void accumulate_nonfinite(Accumulator (&sum)[kM][kColumns / 16], u32 b) const {
#pragma unroll 1
    for (int j = 0; j < kTileQ; ++j) {
#pragma unroll
      for (int k = 0; k < kColumns / 4; ++k) {
        int column = 32 * (k / 8) + first_column() + k % 8;
        float y = load_shared_float(b + Layout<kColumns>::offset(j, column / 4) + column % 4 * 4);
#pragma unroll
        for (int i = 0; i < 2 * kM; ++i) {
          float x = load_shared_float(address_ds(j, first_key() + 16 * (i / 2) + tile::lane_row(i % 2))),
                &z = element(sum, i / 2, i % 2, k / 8, k % 8);
          if (x != 0 && !(kP && dropped(x))) z = fmaf(x, y, z);
        }
      }
    }
  }

  // Adds dS K, 16 queries by 32 columns at a time, to the tile's rows of dQ. In deterministic mode each warp waits for its turn and adds to
  // its own columns.
  __device__ __forceinline__ void add_dq(const Tile &t) const {
    if (!a.dq_sum || shared_state().repeats_left) return;
    const i64 rows = in.row_index(shared_state().batch, t.head, shared_state().sequence.q0 + t.queries.begin);
    float *target = a.dq_sum + (rows + dq_sum_of(shared_state().k0, a.dq_sums) * in.rows()) * kD;
    const float scale = (float)in.scale;
    u32 *turn = nullptr, before = 0;
    if constexpr (C.deterministic) {
      const i64 number = first_query_tile(in, shared_state().batch, t.head, kTileQ) + t.queries.begin / kTileQ;
      turn = a.turns + number * C.warps + thread_index() / 32;
      before = key_tiles_before<F.blocks != 0, kTileK>(in, shared_state().sequence.band, shared_state().batch, t.head, t.queries.begin,
                                                       shared_state().k0);
    }
#pragma unroll 1
    for (int part = thread_index() / 32; part < kN * (kD / 32); part += C.warps) {
      const int row = part % kN * 16, column = part / kN * 32;
      Accumulator dQ[1][2] = {};
      if (shared_state().k_finite)
        multiply_dq(dQ, row, column);
      else
        multiply_dq_nonfinite(dQ, row, column);
      if (C.deterministic && part < C.warps) {
        if (tile::lane_id() == 0) await_turn<F.blocks != 0>(turn, load_acquire(turn), before);
        __syncwarp();
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        int r = row + tile::lane_row(i / 4), k = i % 4 * 2;
        if (r >= t.rows) continue;
        add_pair(target + r * kD + column + first_column() + k, element(dQ, 0, i / 4, 0, k) * scale,
                 element(dQ, 0, i / 4, 0, k + 1) * scale);
      }
    }
    if constexpr (C.deterministic) {
      __syncwarp();
      if (tile::lane_id() == 0) end_turn(turn);
    }
  }
  __device__ __forceinline__ void multiply_dq(Accumulator (&dQ)[1][2], int row, int column) const {
    Pairs<kD> K(shared(0));
#pragma unroll
    for (int k = 0; k < kTileK; k += 32) {
      Left dS[1][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float x[2];
        load_shared(x, address_ds(row + tile::lane_row(i % 2), k + 8 * (i / 2) + 2 * (tile::lane_id() & 3)));
#pragma unroll
        for (int e = 0; e < 2; ++e) dS[0][i / 2].set<C.products>(i % 2 + 2 * e, x[e]);
      }
      multiply_pairs<kD, C.products>(dQ, dS, K, k, column);
    }
  }
  // Computes dQ for a K that is not finite. An element of dS that is 0 adds nothing.
  __device__ __forceinline__ void multiply_dq_nonfinite(Accumulator (&dQ)[1][2], int row, int column) const {
#pragma unroll 1
    for (int j = 0; j < kTileK; ++j) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const int c = column + first_column() + k;
        const float y = load_shared_float(shared(0) + Layout<kD>::offset(j, c / 4) + c % 4 * 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float x = load_shared_float(address_ds(row + tile::lane_row(r), j));
          float &z = element(dQ, 0, r, 0, k);
          if (x != 0) z = fmaf(x, y, z);
        }
      }
    }
  }

  template <int kC> static __device__ __forceinline__ bool all_finite(const Accumulator (&x)[kM][kC]) {
    float zero = 0; // becomes NaN if a number is not finite
#pragma unroll
    for (int i = 0; i < 8 * kM * kC; ++i) zero = fmaf(x[i / (8 * kC)][i / 8 % kC].x[i / 4 % 2][i % 4], 0.0f, zero);
    return zero == 0;
  }
  __device__ __forceinline__ bool keys_finite() const {
    bool yes = true;
#pragma unroll 1
    for (int i = thread_index(); i < kTileK * kD; i += kThreads) yes = yes && finite_tf32(load_shared_float(shared(0) + 4 * i));
    return yes;
  }

  // Stores dK or dV. Segments after the first one add to what the tensor holds.
  template <int kC> __device__ __forceinline__ void store(const Operand &out, Accumulator (&x)[kM][kC], float factor, i32 columns) const {
    if (!out) return;
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      i32 key = shared_state().k0 + first_key() + 16 * (i / 2) + tile::lane_row(i % 2);
      if (key >= shared_state().k1) continue;
      float *row = out.at<float>(shared_state().batch, shared_state().head_kv, shared_state().sequence.k0 + key, 0);
      store_row<C.aligned != 0>(x, i / 2, i % 2, factor, row, out.stride[3], columns, shared_state().segment > 0);
    }
  }
};

} // namespace strobe::tf32
