// The steps of the backward on mma.sync: what a warp computes from its keys and a span of queries.
#pragma once
#include "../../device/key_major_dropout.h"
#include "../../device/probabilities.h"
#include "../../device/turns.h"
#include "../../tile/exchange.h"
#include "../../tile/multiply.h"
#include "block.h"

namespace strobe::mma {

template <BackwardConfig C> struct BackwardSteps : BackwardBlock<C> {
  using Block = BackwardBlock<C>;
  using Block::a, Block::in, Block::state, Block::shared, Block::thread, Block::role, Block::key_warp, Block::dim_warp;
  using Block::kD, Block::kDv, Block::kTileQ, Block::kTileK, Block::kThreads, Block::kShort, Block::kHides, Block::F;
  using Block::kKeys, Block::kStep, Block::kSpan, Block::kQueries, Block::kColumns, Block::kColumnsV, Block::kDqRows, Block::kDqColumns;
  using Block::kQ, Block::kV, Block::kDo, Block::kP, Block::kDs;
  using Block::tile_of, Block::lse_of, Block::delta_of;
  using typename Block::T, typename Block::Tile, typename Block::StagedLse;

  const Scores<F, float, C.invariant ? Functions::half_rounded : Functions::half> scores;
  const KeyMajorDropout<F> dropout;
  const float factor; // by how much dropout scales the elements that it keeps

  // Must be constructed after choose_keys().
  __device__ __forceinline__ explicit BackwardSteps(const Block &block)
      : Block(block), scores(in, state.sequence, state.batch), dropout{Dropout<F>(in)}, factor(dropout.dropout.factor()) {}

  // The number of a 16x16 block in the exchange through shared memory: block m of this warp's keys, block n of the tile's queries.
  __device__ __forceinline__ int block(int m, int n) const { return (key_warp * kKeys + m) * kQueries + n; }
  // The barriers of the warps with the same keys. Each role that has several such warps has one. Each span of queries of P has one, because
  // the warps that write P go on without waiting.
  static constexpr int kSpans = kQueries / kSpan, kBarriers = kSpans + (C.dim_warps > 1 ? 2 : 0);
  static_assert(C.key_warps * kBarriers < 16);
  __device__ __forceinline__ int barrier_of_p(int span) const { return 1 + kBarriers * key_warp + span; }
  __device__ __forceinline__ int barrier_of_role() const { return 1 + kBarriers * key_warp + kSpans + role; }
  // The first block of queries for which this warp computes S and dP, in the span of queries that begins at block `span`.
  __device__ __forceinline__ int own(int span) const { return C.repeats() ? span : span + dim_warp * kStep; }
  // Whether this warp hands over P and dS. If several warps compute the same P and dS, only the first one does.
  __device__ __forceinline__ bool hands_on() const { return !C.repeats() || dim_warp == 0; }

  // The left role hands the derivative of a function of q.k to the right one as P * derivative. In FP16 it hands over P and the derivative
  // separately: below 2^-14 FP16's steps are 2^-24, so that with many keys the product would vanish. slope_unit() keeps the derivative
  // above these steps. arccosh's derivative is at most 2^11, and 2^-18 at a Lorentz product of 2^18; that of c tanh(x / c) is at most 1;
  // that of the caller's function may be up to 2^12. With dropout, which marks dropped elements by P's sign, a derivative that may be
  // negative, as that of the caller's function, is handed over separately as well.
  static constexpr Slope kSlope = !F.curved()                                                ? Slope::none
                                  : C.dtype == kF16 || (F.function == kProgram && F.dropout) ? Slope::apart
                                                                                             : Slope::times_p;
  __device__ __forceinline__ float slope_unit() const {
    if constexpr (F.function == kProgram) return C.dtype == kF16 ? 0x1p-4f : 1.0f;
    return F.function == kHyperbolic ? fmaxf((float)in.beta, 1e-30f) * 0x1p-4f : 0x1p-15f;
  }

  // S^T = K Q^T; P^T = exp(S^T - LSE). Without a function of q.k, S becomes P, and the argument P is not written. With a function, P is
  // written to the argument, and S becomes P times the derivative, or the derivative alone in its unit. Dropped elements are negated,
  // except in the derivative alone.
  template <bool kNonfinite>
  __device__ __forceinline__ void make_p(Accumulator (&S)[kKeys][kStep], Accumulator (&P)[kKeys][kStep], int iteration, int span) const {
    const int stage = iteration % 2, n0 = own(span);
    tile::multiply<T, kD, kNonfinite>(S, shared + key_warp * kKeys * 16 * kD * 2, shared + kQ + stage * C.q_bytes() + n0 * 16 * kD * 2);
    const Tile &t = tile_of(iteration);
    i32 i = t.queries.begin + 16 * n0, j = state.k0 + key_warp * kKeys * 16;
    auto lse = [&](int n) { return StagedLse(lse_of(stage, n0 + n)); };
    decltype(auto) own_scores = scores_of(t);
    if (kNonfinite || t.queries.masked)
      exponentiate<true>(S, P, own_scores, t, i, j, lse);
    else
      exponentiate<false>(S, P, own_scores, t, i, j, lse);
    if constexpr (F.dropout) {
      if constexpr (kSlope != Slope::apart) dropout.mark(S, i, j, t.head, state.batch);
      if constexpr (F.curved()) dropout.mark(P, i, j, t.head, state.batch);
    }
    if constexpr (kSlope == Slope::apart) {
      const float inverse = 1 / slope_unit();
#pragma unroll
      for (int m = 0; m < kKeys; ++m) {
#pragma unroll
        for (int n = 0; n < kStep; ++n) {
#pragma unroll
          for (int i = 0; i < 8; ++i) S[m][n].x[i / 4][i % 4] *= inverse;
        }
      }
    }
  }
  template <bool kMasked, class OwnScores, class Lse>
  __device__ __forceinline__ void exponentiate(Accumulator (&S)[kKeys][kStep], Accumulator (&P)[kKeys][kStep], const OwnScores &own_scores,
                                               const Tile &t, i32 i, i32 j, const Lse &lse) const {
    if constexpr (F.blocks == kFullKnown) {
      if (t.queries.entry[in.template to_full_t<F>()])
        return probabilities<F, kMasked, kSlope, F.unbounded(), false, false>(S, P, own_scores, t.head, i, j, state.k1, lse);
    }
    probabilities<F, kMasked, kSlope, F.unbounded()>(S, P, own_scores, t.head, i, j, state.k1, lse);
  }
  // The scores of a tile. In a part, they end with the tile's last query, wherever the sequence ends, and they read mask and bias at the
  // tile's own rows.
  __device__ __forceinline__ decltype(auto) scores_of(const Tile &t) const {
    if constexpr (F.part) {
      auto own = scores;
      own.seqlen_q = t.queries.begin + t.rows;
      if constexpr (F.mask || F.bias) own.row_shift = t.shift;
      return own;
    } else {
      return (scores);
    }
  }
  // Rounds P and hands it to the warps of both roles through shared memory. p receives this warp's P, as the operand of dV.
  __device__ __forceinline__ void hand_on_p(Left (&p)[kKeys][kStep], const Accumulator (&S)[kKeys][kStep],
                                            const Accumulator (&P)[kKeys][kStep], int span) const {
#pragma unroll
    for (int m = 0; m < kKeys; ++m) {
#pragma unroll
      for (int n = 0; n < kStep; ++n) {
        p[m][n] = tile::rounded<T>(S[m][n]);
        if (hands_on()) tile::put(shared + kP, block(m, own(span) + n), p[m][n]);
        if constexpr (F.curved()) {
          p[m][n] = tile::rounded<T>(P[m][n]);
          if (hands_on()) tile::put(shared + kP + C.p_bytes(), block(m, own(span) + n), p[m][n]);
        }
      }
    }
    barrier_arrive(barrier_of_p(span / kSpan), 64 * C.dim_warps);
  }

  // dP = dP^T - D^T, where dP^T = V dO^T. With dropout D is subtracted later, when P is known.
  template <bool kNonfinite> __device__ __forceinline__ void make_dp(Accumulator (&dP)[kKeys][kStep], int iteration, int span) const {
    const int stage = iteration % 2, n0 = own(span);
    if constexpr (!F.dropout) {
#pragma unroll
      for (int n = 0; n < kStep; ++n) {
        load_shared<0>(dP[0][n].x[0], delta_of(stage, n0 + n));
        load_shared<64>(dP[0][n].x[1], delta_of(stage, n0 + n));
#pragma unroll
        for (int m = 1; m < kKeys; ++m) dP[m][n] = dP[0][n];
      }
    }
    tile::multiply<T, kDv, kNonfinite>(dP, shared + kV + key_warp * kKeys * 16 * kDv * 2,
                                       shared + kDo + stage * C.dout_bytes() + n0 * 16 * kDv * 2);
  }
  __device__ __forceinline__ void await_p(int span) const { barrier_sync(barrier_of_p(span / kSpan), 64 * C.dim_warps); }
  // Computes dS^T from P^T and the result of make_dp: dP^T - D^T, or with dropout dP^T.
  template <bool kHidden>
  __device__ __forceinline__ void differentiate(Left (&dS)[kKeys][kStep], Accumulator (&dP)[kKeys][kStep], int n0, int stage) const {
    const float unit = slope_unit();
#pragma unroll
    for (int n = 0; n < kStep; ++n) {
#pragma unroll
      for (int m = 0; m < kKeys; ++m) {
        Left P = tile::take(shared + kP, block(m, n0 + n)), slope;
        if constexpr (kSlope == Slope::apart) slope = P, P = tile::take(shared + kP + C.p_bytes(), block(m, n0 + n));
        Accumulator &x = dP[m][n];
        if constexpr (C.dtype == kBF16 && !kHidden && !F.dropout) {
          dS[m][n] = tile::rounded<T>(x);
#pragma unroll
          for (int i = 0; i < 4; ++i) dS[m][n].x[i] = tile::multiply_pairs<T>(dS[m][n].x[i], P.x[i]);
        } else {
          float D[2][4] = {};
          if constexpr (F.dropout) load_shared<0>(D[0], delta_of(stage, n0 + n)), load_shared<64>(D[1], delta_of(stage, n0 + n));
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            int c = i / 4, r = i / 2 % 2, e = i % 2;
            float &y = x.x[c][i % 4], p = tile::unpacked<T>(P.x[r + 2 * c], e);
            if constexpr (F.dropout) {
              y = (__float_as_uint(p) >> 31 ? 0.0f : y * factor) + D[c][e];
              p = fabsf(p);
            }
            y *= p;
            if constexpr (kSlope == Slope::apart) y *= tile::unpacked<T>(slope.x[r + 2 * c], e) * unit;
            if (kHidden && p == 0) y = 0; // dP may be NaN where nothing is visible
          }
          dS[m][n] = tile::rounded<T>(x);
        }
      }
    }
  }
  __device__ __forceinline__ void hand_on_ds(const Left (&dS)[kKeys][kStep], int stage, int span) const {
#pragma unroll
    for (int m = 0; m < kKeys; ++m) {
#pragma unroll
      for (int n = 0; n < kStep; ++n)
        if (hands_on()) tile::put_parts(shared + kDs + stage * C.p_bytes(), block(m, own(span) + n), dS[m][n]);
    }
  }

  // sum += x Y, for this warp's keys and columns and the queries of a span. Block (m, n) of x is own(m, n) if this warp has computed the
  // whole span. Otherwise, and with kNonfinite, it is taken(m, n), which the warps of this role have put into shared memory.
  template <bool kNonfinite, int kInner, int kN, class Own, class Taken>
  __device__ __forceinline__ void accumulate(Accumulator (&sum)[kKeys][kN], const Own &own, const Taken &taken,
                                             const Blocks<Right, kInner, true> &Y, int span) const {
    if constexpr (C.dim_warps > 1) barrier_sync(barrier_of_role(), 32 * C.dim_warps);
    if constexpr (kNonfinite) {
      __syncwarp();
      accumulate_nonfinite(sum, taken, Y, span);
    } else {
#pragma unroll
      for (int n = 0; n < kSpan; ++n) {
        Left x[kKeys];
#pragma unroll
        for (int m = 0; m < kKeys; ++m) {
          if constexpr (C.dim_warps > 1 && !C.repeats())
            x[m] = taken(m, span + n);
          else
            x[m] = own(m, n);
        }
#pragma unroll
        for (int c = 0; c < kN; ++c) {
          Right y = Y.load(16 * (span + n), 16 * c);
#pragma unroll
          for (int m = 0; m < kKeys; ++m) tile::multiply_add<T>(sum[m][c], x[m], y);
        }
      }
    }
  }
  // accumulate() for a Y with numbers that are not finite. Such a number counts only where the element of x is not 0.
  template <int kInner, int kN, class X>
  __device__ __forceinline__ void accumulate_nonfinite(Accumulator (&sum)[kKeys][kN], const X &x, const Blocks<Right, kInner, true> &Y,
                                                       int n0) const {
#pragma unroll
    for (int c = 0; c < kN; ++c) {
      Accumulator count[kKeys] = {};
#pragma unroll 1
      for (int n = n0; n < n0 + kSpan; ++n) {
        Right y = Y.load(16 * n, 16 * c), bad = split_nonfinite<T>(y);
#pragma unroll
        for (int m = 0; m < kKeys; ++m) {
          Left z = x(m, n);
          tile::multiply_add<T>(sum[m][c], z, y);
          tile::multiply_add<T>(count[m], nonzero<T>(z), bad);
        }
      }
#pragma unroll
      for (int m = 0; m < kKeys; ++m) make_nonfinite(sum[m][c], count[m]);
    }
  }
  // How many 16-column blocks of dQ a warp computes at a time. Wide heads take few, because their dK and dV leave few registers.
  static __device__ constexpr int dq_at_once() { return wide(kD, kDv) ? min(3, kDqColumns) : kDqColumns; }
  // Adds this warp's region of an iteration's dQ (without the scale) to dq_sum.
  template <bool kNonfinite> __device__ __forceinline__ void add_dq(int iteration) const {
    int stage = iteration % 2;
    int warp = (kShort ? thread_index() : thread) / 32;
    if (!a.dq_sum || warp >= C.dq_rows() * C.dq_columns()) return;
    int row = warp / C.dq_columns() * kDqRows * 16, column = warp % C.dq_columns() * kDqColumns * 16;
    const Tile &t = tile_of(iteration);
    i64 number = this->number_of(t);
    u32 *turn = a.turns + number * C.warps() + warp, seen = 0;
    if constexpr (C.deterministic) seen = load_relaxed(turn); // usually this warp's turn has come, and no lane waits
    Blocks<Right, kD, true> K(shared, column);
    auto taken = [&](int m, int k) {
      return tile::take_parts_transposed(shared + kDs + stage * C.p_bytes() + row / 16 * tile::kBlockBytes, k * kQueries + m);
    };
    add_dq_columns<kNonfinite, 0>(taken, K, [&] {
      if constexpr (C.deterministic) {
        if (tile::lane_id() == 0) await_turn<F.blocks != 0>(turn, seen, key_tiles_before(t));
        __syncwarp();
      }
      // dq_sum holds 16x16 blocks in the order of lanes, one row of blocks after another.
      return a.dq_sum + (number * (kTileQ * kD) + row * kD + column * 16);
    });
    if constexpr (C.deterministic) {
      __syncwarp();
      if (tile::lane_id() == 0) end_turn(turn);
    }
  }
  // Computes and adds dQ's columns from block kFirst on. place() waits for this warp's turn and returns the sum's address.
  template <bool kNonfinite, int kFirst, class Taken, class Place>
  __device__ __forceinline__ void add_dq_columns(const Taken &taken, const Blocks<Right, kD, true> &K, const Place &place) const {
    constexpr int kCount = min(dq_at_once(), kDqColumns - kFirst);
    Accumulator dQ[kDqRows][kCount] = {};
    if constexpr (kNonfinite) { // numbers of K that are not finite count only where dS is not 0
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        Accumulator count[kDqRows] = {};
#pragma unroll 1
        for (int k = 0; k < kTileK / 16; ++k) {
          Right y = K.load(16 * k, 16 * (kFirst + c)), bad = split_nonfinite<T>(y);
#pragma unroll
          for (int m = 0; m < kDqRows; ++m) {
            tile::multiply_add<T>(dQ[m][c], taken(m, k), y);
            tile::multiply_add<T>(count[m], nonzero<T>(taken(m, k)), bad);
          }
        }
#pragma unroll
        for (int m = 0; m < kDqRows; ++m) make_nonfinite(dQ[m][c], count[m]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kTileK / 16; ++k) {
        Left dS[kDqRows];
#pragma unroll
        for (int m = 0; m < kDqRows; ++m) dS[m] = taken(m, k);
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
          Right y = K.load(16 * k, 16 * (kFirst + c));
#pragma unroll
          for (int m = 0; m < kDqRows; ++m) tile::multiply_add<T>(dQ[m][c], dS[m], y);
        }
      }
    }
    float *target = place();
#pragma unroll
    for (int m = 0; m < kDqRows; ++m) {
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        add_quad(target + m * 16 * kD + (kFirst + c) * 256, dQ[m][c].x[0]);
        add_quad(target + m * 16 * kD + (kFirst + c) * 256 + 128, dQ[m][c].x[1]);
      }
    }
    if constexpr (kFirst + kCount < kDqColumns) add_dq_columns<kNonfinite, kFirst + kCount>(taken, K, [&] { return target; });
  }

  __device__ __forceinline__ u32 key_tiles_before(const Tile &t) const {
    if constexpr (F.part)
      return part_tiles_before<F.blocks != 0, kTileK>(in, state.sequence.band, state.batch, t.head, t.queries.begin,
                                                      t.queries.begin + t.rows, state.number);
    return strobe::key_tiles_before<F.blocks != 0, kTileK>(in, state.sequence.band, state.batch, t.head, t.queries.begin, state.k0);
  }
  // Stores dK or dV in FP32 directly from the registers, or adds it to what the tensor holds.
  template <int kN>
  __device__ __forceinline__ void store_unrounded(const Operand &out, const Accumulator (&x)[kKeys][kN], float factor, i32 columns) const {
    if (!out) return;
#pragma unroll
    for (int m = 0; m < kKeys; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const i32 j = (key_warp * kKeys + m) * 16 + tile::lane_row(r);
        if (state.k0 + j >= state.k1) continue;
        float *const row = out.at<float>(state.batch, state.head_kv, state.sequence.k0 + state.k0 + j, 0);
#pragma unroll
        for (int k = 0; k < 4 * kN; ++k) {
          const i32 c = (dim_warp * kN + k / 4) * 16 + tile::lane_column(k / 2 % 2, k % 2);
          if (c >= columns) continue;
          float y = x[m][k / 4].x[k / 2 % 2][2 * r + k % 2] * factor, &to = row[c * out.stride[3]];
          if constexpr (F.adds) y += to;
          to = y;
        }
      }
    }
  }
  // Stores dK or dV, which is x times `factor`, rounded, through the shared memory that held K or V.
  template <int kInner, int kN>
  __device__ __forceinline__ void store_sum(const Operand &out, Accumulator (&x)[kKeys][kN], float factor, u32 place, i32 columns) const {
    if constexpr (F.unrounded_gradients()) return store_unrounded(out, x, factor, columns);
#pragma unroll
    for (int m = 0; m < kKeys; ++m) {
#pragma unroll
      for (int c = 0; c < kN; ++c) {
#pragma unroll
        for (int e = 0; e < 8; ++e) x[m][c].x[e / 4][e % 4] *= factor;
        tile::store<kInner>(shared + place, (key_warp * kKeys + m) * 16, (dim_warp * kN + c) * 16, tile::rounded<T>(x[m][c]));
      }
    }
    barrier_sync(1 + role, kThreads / 2);
    if (!out) return;
    tile::Matrix<T> m{out.at<T>(state.batch, state.head_kv, state.sequence.k0 + state.k0, 0), out.stride[2], out.stride[3],
                      state.k1 - state.k0, columns};
    tile::store<kTileK, kInner, kThreads / 2, C.aligned != 0>(m, shared + place, thread % (kThreads / 2));
  }
};

} // namespace strobe::mma
