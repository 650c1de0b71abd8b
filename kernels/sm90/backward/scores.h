// How a warpgroup of the Hopper backward makes P^T from S^T, for 64 keys x a tile of queries.
#pragma once
#include "../../device/epilogue.h"
#include "../../device/key_major_dropout.h"
#include "../../device/scores.h"
#include "../../tile/exchange.h"
#include "../accumulator.h"
#include "../fast_form.h"
#include "bias.h"
#include "nonfinite.h"
#include "store.h"

namespace strobe::sm90 {

template <BackwardConfig C> struct BackwardScores : BackwardNonfinite<C> {
  using Base = BackwardNonfinite<C>;
  using Base::F, Base::kM, Base::kHides;
  using Base::masked, Base::clear_nonfinite_queries;
  using Base::shared, Base::half, Base::lane, Base::warp;
  using typename Base::T;
  using Penalty = BackwardPenaltyForm<F>;
  // Whether scores change only by a bias that lies in shared memory together with Q.
  static constexpr bool kSum = C.bias_by_tma && !F.penalty && kAddsOnly<F>;
  static_assert(!F.mask || kM <= 64, "a lane's part of the mask is a word");

  const HopperBackwardArguments &a;
  using Score = Scores<F, float, C.invariant ? Functions::half_rounded : Functions::half>;
  const Score scores;
  const KeyMajorDropout<F> dropout;

  static __device__ __forceinline__ Sequence sequence(const Inputs &in, const KeyBlock &keys) {
    if constexpr (!F.part) return in.sequence<F>(keys.batch);
    Sequence s = whole_sequence(in, keys.batch);
    s.band.seqlen_k = keys.seqlen_k;
    return s;
  }
  // The position at which the tile's queries end.
  __device__ __forceinline__ i32 end_of(const QueryStep &step) const {
    return F.part ? step.begin + (i32)((u32)step.flags / kRows) : scores.seqlen_q;
  }

  static __device__ __forceinline__ Score scores_of(const HopperBackwardArguments &a, const KeyBlock &keys) {
    Score scores(a.in, sequence(a.in, keys), keys.batch);
    // Without this line, ptxas would compute the unit from a double for each tile of queries.
    if constexpr (C.persistent) scores.unit = a.unit;
    return scores;
  }
  __device__ __forceinline__ BackwardScores(const BackwardShared<C> &shared, const HopperBackwardArguments &a, const KeyBlock &keys, int w)
      : Base(shared, w), a(a), scores(scores_of(a, keys)), dropout{Dropout<F>(a.in)} {}

  // Whether lanes fetch their values of what is computed ahead, while the tensor cores compute S.
  static constexpr bool kFetches = [] {
    if constexpr (!F.given() || kM > 64) return false;
    return requires { requires CallersFunctions<F.program, F.program_high>::kFetched == Along::difference; };
  }();
  struct Fetched {
    float x[kFetches ? 20 : 1];
  };
  __device__ __forceinline__ void fetch(const QueryStep &step, Fetched &fetched) const {
    if constexpr (kFetches) {
      const float *values = CallersFunctions<F.program, F.program_high>::template fetchable<float>(
          scores.in.function, scores.pair(scores.row(0, step.head), 0));
      values += step.begin + tile::lane_column(0, 0) - key();
#pragma unroll
      for (int n = -1; n < kM / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c)
          fetched.x[place_fetched<Along::difference>({.query = {0, 8 * n + c}})] = load_global_now(values + 8 * n + c);
      }
    }
  }
  // Loads the mask's bits for this lane's scores. Called while the tensor cores compute these scores.
  __device__ __forceinline__ u32 allowed(const QueryStep &step) const {
    u32 bits = 0;
    if constexpr (F.mask) {
      const i32 keys = min(key() - tile::lane_row(0), scores.seqlen_k - 1) / 16;
      const u8 *bytes = a.mask_bits.at(scores.b, step.head, keys, 0, lane) + step.begin / 16 * a.mask_step;
#pragma unroll
      for (int n = 0; n < kM / 16; ++n) bits |= (u32)bytes[n * a.mask_step] << 8 * n;
    }
    return bits;
  }
  // The bit of the lane's score i.
  static constexpr __device__ __forceinline__ u32 mask_bit(int i) {
    return 1u << (8 * (i / 8) + 4 * (i / 2 % 2) + 2 * (i / 4 % 2) + i % 2);
  }

  // Replaces S by P. With a function of q.k it writes P times the function's derivative to S, and P, rounded, to `rounded`. With dropout
  // the dropped elements become negative. kClear: also clears rows of Q and dO (clear_nonfinite_queries).
  template <bool kClear>
  __device__ __forceinline__ void exponentiate(Accumulator<T, kM> &scored, LeftOperand<kM> &rounded, u32 n, const QueryStep &step,
                                               u32 allowed, const Fetched &fetched) const {
    float (&S)[kM / 2] = scored.x;
    u32(&P)[kM / 4] = rounded.x;
    if constexpr (BackwardFastForm<F>::kApplies) {
      BackwardFastForm<F>(scores).template exponentiate<T>(S, P, shared.lse_of(n) + lane % 4 * 8);
      auto clear = [&](int i) { S[i] = 0, P[i / 2] &= i % 2 ? 0x0000FFFFu : 0xFFFF0000u; };
      if (masked(step)) hide(step, clear);
      if constexpr (F.seen) {
        if (open(step)) hide_unseen(step, clear);
      }
      if constexpr (F.mask) {
#pragma unroll
        for (int i = 0; i < kM / 2; ++i) {
          if (!(allowed & mask_bit(i))) clear(i);
        }
      }
      if constexpr (kClear) clear_nonfinite_queries(step, n);
    } else if constexpr (F.additive() && !Penalty::kApplies && !kSum) {
      if (masked(step))
        score<true>(S, P, n, step, allowed, fetched);
      else if (open(step))
        score<false>(S, P, n, step, allowed, fetched);
      else
        score<false, false>(S, P, n, step, allowed, fetched);
      if constexpr (kClear) clear_nonfinite_queries(step, n);
    } else {
      const u32 lse = shared.lse_of(n) + lane % 4 * 8;
      const Penalty penalty(scores, step.begin + tile::lane_column(0, 0), step.head, Penalty::kApplies ? key() : 0);
      BackwardBias<C> bias = bias_of(n);
#pragma unroll
      for (int i = 0; i < kM / 8; ++i) {
        float negative[2];
        load_shared(negative, lse + 32 * i);
        if constexpr (kSum) {
          if (i % 2 == 0) bias.take(i / 2);
          float correction[2];
          load_shared(correction, lse + C.row_bytes() + 32 * i);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const float added = bias.at(4 * i + k), score = S[4 * i + k] * scores.scale + added;
            const float p = exp2(__fmaf_rn(score + negative[k % 2], penalty.unit, correction[k % 2]));
            S[4 * i + k] = added == minus_infinity<float>() ? 0 : p;
          }
          continue;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float exponent = __fmaf_rn(S[4 * i + k], penalty.unit, negative[k % 2]);
          S[4 * i + k] = exp2(penalty.added(8 * i + k % 2, k / 2 * 8, exponent));
        }
      }
      if (masked(step)) hide(step, [&](int i) { S[i] = 0; });
      if constexpr (F.seen) {
        if (open(step)) hide_unseen(step, [&](int i) { S[i] = 0; });
      }
      if constexpr (F.mask) {
#pragma unroll
        for (int i = 0; i < kM / 2; ++i) {
          if (!(allowed & mask_bit(i))) S[i] = 0;
        }
      }
      if constexpr (kClear) clear_nonfinite_queries(step, n);
    }
    if constexpr (F.dropout) {
      const KeyBlock keys = read<KeyBlock>(shared.keys());
      dropout.mark(reinterpret_cast<tile::Accumulator(&)[1][kM / 16]>(S), step.begin, keys.begin + 64 * half + 16 * warp, step.head,
                   keys.batch);
    }
  }
  // Rounds P to the left operand of dV, where dropped elements are 0.
  static __device__ __forceinline__ void round(LeftOperand<kM> &rounded, const Accumulator<T, kM> &p) {
    u32(&P)[kM / 4] = rounded.x;
    const float (&S)[kM / 2] = p.x;
    auto kept = [](float x) { return F.dropout && x < 0 ? 0.0f : x; };
    auto dropped = [](float x) { return (u32)(__float_as_int(x) >> 31); };
#pragma unroll
    for (int i = 0; i < kM / 4; ++i) {
      if constexpr (!F.curved())
        P[i] = pack<T>(kept(S[2 * i]), kept(S[2 * i + 1]));
      else if constexpr (F.dropout)
        P[i] &= ~__byte_perm(dropped(S[2 * i]), dropped(S[2 * i + 1]), 0x5410);
    }
  }

  // Stores dS to shared memory, for dQ, with queries as rows and keys as columns.
  __device__ __forceinline__ void hand_on(const LeftOperand<kM> &dS, u32 n) const {
    const int row = lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
    const u32 target = shared.ds_of(n) + half * kM * kRowBytes + row * kRowBytes + ((chunk ^ row % 8) << 4);
    wait_empty(shared.ds_empty(n), n);
#pragma unroll
    for (int i = 0; i < kM / 16; ++i) stmatrix_transposed(target + 16 * kRowBytes * i, dS.x + 4 * i);
    async_proxy_fence();
    __syncwarp();
    release(shared.ds_full(n));
  }
  __device__ __forceinline__ void hand_on_nothing(u32 n) const { hand_on({}, n); }
  __device__ __forceinline__ void release(u32 barrier) const {
    if (lane == 0) mbarrier_arrive(barrier);
  }
  // Stores dK or dV of this warpgroup's keys.
  template <int kColumns>
  __device__ __forceinline__ void store(const Operand &out, const Inputs &in, const KeyBlock &keys, i32 columns,
                                        const Accumulator<T, kColumns> &x, float factor) const {
    const i32 j = keys.begin + 64 * half + 16 * warp;
    if constexpr (F.part || C.unrounded_sums()) {
      const i32 shift = F.part ? read<HeldKeyBlock>(shared.held()).shift : 0;
      constexpr bool kAdds = F.adds && !C.split_group;
      if constexpr (C.unrounded_sums())
        return store_rows_unrounded<kAdds, kColumns>(out, keys.batch, keys.head_kv, in.held(keys.batch).k0 + j + shift, keys.seqlen_k - j,
                                                     columns, x.x, factor);
      return store_rows<T, kColumns>(out, keys.batch, keys.head_kv, in.held(keys.batch).k0 + j + shift, keys.seqlen_k - j, columns, x.x,
                                     factor);
    }
    if constexpr (C.staged_store)
      return store_rows_staged<T, kColumns>(out, keys.batch, keys.head_kv, in.held(keys.batch).k0 + j, keys.seqlen_k - j, columns, x.x,
                                            factor, shared.v + (64 * half + 16 * warp) * kRowBytes, C.tile_k() * kRowBytes);
    store_rows<T, kColumns>(out, keys.batch, keys.head_kv, in.held(keys.batch).k0 + j, keys.seqlen_k - j, columns, x.x, factor);
  }

private:
  // Whether the function of the mask has to be asked.
  static __device__ __forceinline__ bool open(const QueryStep &step) { return !F.seen || F.blocks != kFullKnown || step.flags & kOpen; }
  __device__ __forceinline__ BackwardBias<C> bias_of(u32 n) const {
    return BackwardBias<C>(shared, n, scores.in.bias.stride[2] != 0, half, warp, lane);
  }
  // The bias and mask of one score.
  struct Given {
    const typename Score::InMemory memory;
    const BackwardBias<C> &tile;
    const int i; // the number of the score among the lane's
    const u32 bit;
    __device__ __forceinline__ float bias() const {
      if constexpr (C.bias_by_tma)
        return tile.at(i);
      else
        return memory.bias();
    }
    __device__ __forceinline__ bool allowed() const { return bit != 0; }
  };
  // Replaces S by P, if some option changes the scores.
  template <bool kByPosition, bool kAsks = true>
  __device__ __forceinline__ void score(float (&S)[kM / 2], u32 (&P)[kM / 4], u32 n, const QueryStep &step, u32 allowed,
                                        const Fetched &fetched) const {
    const u32 lse = shared.lse_of(n) + lane % 4 * 8;
    const i32 q = step.begin + tile::lane_column(0, 0), j = key();
    const auto first = scores.row(q, step.head);
    BackwardBias<C> bias = bias_of(n);
#pragma unroll
    for (int i = 0; i < kM / 8; ++i) {
      if (i % 2 == 0) bias.take(i / 2);
      float negative[2],
          correction[2]; // -LSE, and the correction of LSE if scores are unbounded (kernels/device/settle_row.h)
      load_shared(negative, lse + 32 * i);
      if constexpr (F.unbounded()) load_shared(correction, lse + C.row_bytes() + 32 * i);
      float p[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const i32 at = q + 8 * i + k % 2;
        auto row = first;
        row.i = min(at, end_of(step) - 1), row.stepped = true, row.query = {q, 8 * i + k % 2}, row.key = {j, k / 2 * 8};
        if constexpr (kFetches) row.fetched = fetched.x;
        if constexpr (F.band) row.begin = max(0, row.i + scores.low), row.end = min(scores.seqlen_k, row.i + scores.high + 1);
        float &x = S[4 * i + k], slope = 1;
        const i32 own = j + k / 2 * 8;
        const Given given{{scores, row, own}, bias, 4 * i + k, allowed & mask_bit(4 * i + k)};
        x = F.curved() ? scores.score(x, row, own, given, kByPosition, scores.seqlen_k, slope, kAsks)
                       : scores.score(x, row, own, float(scores.distance(row.i, own)), given, kByPosition, scores.seqlen_k, kAsks);
        const bool hidden = ((kByPosition || kHides) && x == minus_infinity<float>()) || (kByPosition && at >= end_of(step));
        const float exponent =
            F.unbounded() ? __fmaf_rn(x + negative[k % 2], scores.unit, correction[k % 2]) : __fmaf_rn(x, scores.unit, negative[k % 2]);
        p[k] = hidden ? 0 : exp2(exponent);              // LSE may be NaN
        x = !F.curved() || hidden ? p[k] : p[k] * slope; // the slope may be NaN if the query does not exist
      }
      if constexpr (F.curved()) P[2 * i] = pack<T>(p[0], p[1]), P[2 * i + 1] = pack<T>(p[2], p[3]);
    }
  }
  // The position of this lane's first key; the lane's second key lies 8 positions further.
  __device__ __forceinline__ i32 key() const { return (i32)load_shared(shared.keys() + 8) + 64 * half + 16 * warp + tile::lane_row(0); }
  // Calls clear(i) for each of the lane's scores that the mask function hides.
  template <class Clear> __device__ __forceinline__ void hide_unseen(const QueryStep &step, const Clear &clear) const {
    const i32 q = step.begin + tile::lane_column(0, 0), j = key();
    auto row = scores.row(q, step.head);
#pragma unroll
    for (int i = 0; i < kM / 2; ++i) {
      row.i = min(q + i / 4 * 8 + i % 2, end_of(step) - 1);
      row.stepped = true, row.query = {q, i / 4 * 8 + i % 2}, row.key = {j, i / 2 % 2 * 8};
      if (!scores.seen(row, j + i / 2 % 2 * 8)) clear(i);
    }
  }
  // Calls clear(i) for each of the lane's scores that are hidden by position.
  template <class Clear> __device__ __forceinline__ void hide(const QueryStep &step, const Clear &clear) const {
    const i32 column = step.begin + tile::lane_column(0, 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const i32 j = key() + 8 * r;
      const i32 begin = F.band ? j - scores.high - column : 0;
      const i32 end = j >= scores.seqlen_k ? begin : min(F.band ? j - scores.low + 1 : kM + column, end_of(step)) - column;
#pragma unroll
      for (int i = 2 * r; i < kM / 2; i += i % 2 ? 3 : 1) {
        const i32 at = i / 4 * 8 + i % 2;
        if ((F.band && at < begin) || at >= end) clear(i);
      }
    }
  }
};

} // namespace strobe::sm90
