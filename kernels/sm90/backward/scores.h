// What a warpgroup of the Hopper backward makes of S^T, 64 keys x a tile of queries: P. And how it keeps out what is hidden and no number.
#pragma once
#include "../../device/epilogue.h"
#include "../../device/key_major_dropout.h"
#include "../../device/nonfinite.h"
#include "../../device/scores.h"
#include "../../ptx/tma.h"
#include "../../tile/exchange.h"
#include "../accumulator.h"
#include "bias.h"
#include "shared.h"
#include "softcap.h"
#include "store.h"

namespace strobe::sm90 {

template <BackwardConfig C> struct BackwardScores {
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  static constexpr int kM = C.tile_q;
  // Elements may be hidden in any tile, not in those alone that position masks; invariant: all tiles are treated so.
  static constexpr bool kHides = F.mask || F.bias || C.invariant;
  // ALiBi's penalty is a multiply-add of the exponent.
  static constexpr bool kLine = F.alibi && !F.bias && F.function == kLinear && !F.scaled;
  // A bias is there when the score is, and alone what is added to it.
  static constexpr bool kSum = C.bias_by_tma && !F.alibi && F.function == kLinear && !F.scaled;
  // Named barriers: all of a warpgroup have come, + its number; all of both.
  static constexpr int kTogether = 2, kBoth = kTogether + C.kWarpgroups;
  static_assert(!F.mask || kM <= 64, "a lane's part of the mask is a word");

  const HopperBackwardArguments &a;
  const BackwardShared<C> &shared;
  const int w, part, lane, warp; // warpgroup; which 64 of the block's keys
  using Score = Scores<F, float, C.invariant ? Functions::half_rounded : Functions::half>;
  const Score scores;
  const KeyMajorDropout<F> dropout;

  static __device__ __forceinline__ Sequence sequence(const Inputs &in, const KeyBlock &keys) {
    if constexpr (!F.part) return in.sequence<F>(keys.batch);
    Sequence s = whole_sequence(in, keys.batch);
    s.band.seqlen_k = keys.seqlen_k;
    return s;
  }
  // None of the tile's queries stands there or behind.
  __device__ __forceinline__ i32 end_of(const QueryStep &step) const {
    return F.part ? step.begin + (i32)((u32)step.flags / kRows) : scores.seqlen_q;
  }

  static __device__ __forceinline__ Score scores_of(const HopperBackwardArguments &a, const KeyBlock &keys) {
    Score scores(a.in, sequence(a.in, keys), keys.batch);
    // Within a loop over keys ptxas would make it anew for each tile of queries, from a double.
    if constexpr (C.persistent) scores.unit = a.unit;
    return scores;
  }
  __device__ __forceinline__ BackwardScores(const BackwardShared<C> &shared, const HopperBackwardArguments &a, const KeyBlock &keys, int w)
      : a(a), shared(shared), w(w), part(C.roles ? 0 : w), lane(this_thread<C>() % 32),
        warp(__shfl_sync(0xFFFFFFFFu, this_thread<C>() / 32 % 4, 0)), scores(scores_of(a, keys)), dropout{Dropout<F>(a.in)} {}

  static __device__ __forceinline__ bool masked(const QueryStep &step) { return step.flags & kMasked; }

  // The mask's bits for this lane's scores: to be asked for while the tensor cores make them.
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

  // S -> P, in S. With a function S becomes P times its slope, and P is returned separately, rounded; with dropout the dropped elements get
  // a sign. kClear: afterwards Q and dO hold only finite numbers where that matters.
  template <bool kClear>
  __device__ __forceinline__ void exponentiate(Accumulator<T, kM> &scored, LeftOperand<kM> &rounded, u32 n, const QueryStep &step,
                                               u32 allowed) const {
    float (&S)[kM / 2] = scored.x;
    u32(&P)[kM / 4] = rounded.x;
    if constexpr (BackwardSoftcap<F>::kApplies) {
      BackwardSoftcap<F>(scores).template exponentiate<T>(S, P, shared.lse_of(n) + lane % 4 * 8);
      auto clear = [&](int i) { S[i] = 0, P[i / 2] &= i % 2 ? 0x0000FFFFu : 0xFFFF0000u; };
      if (masked(step)) hide(step, clear);
      if constexpr (F.mask) {
#pragma unroll
        for (int i = 0; i < kM / 2; ++i) {
          if (!(allowed & mask_bit(i))) clear(i);
        }
      }
      if constexpr (kClear) clear_nonfinite_queries(step, n);
    } else if constexpr (F.additive() && !kLine && !kSum) {
      if (masked(step))
        score<true>(S, P, n, step, allowed);
      else
        score<false>(S, P, n, step, allowed);
      if constexpr (kClear) clear_nonfinite_queries(step, n);
    } else {
      const u32 lse = shared.lse_of(n) + lane % 4 * 8;
      float unit = scores.unit, slope = 0, distance = 0; // in exp2's unit; of the lane's first query and key
      if constexpr (kLine) {
        const i32 q = step.begin + tile::lane_column(0, 0);
        unit = scores.scale * kLog2e<float>, slope = scores.row(q, step.head).slope * kLog2e<float>;
        distance = (float)(q + scores.offset - key());
      }
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
            const float p = exp2(__fmaf_rn(score + negative[k % 2], unit, correction[k % 2]));
            S[4 * i + k] = added == minus_infinity<float>() ? 0 : p;
          }
          continue;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float exponent = __fmaf_rn(S[4 * i + k], unit, negative[k % 2]);
          if constexpr (kLine) exponent = __fmaf_rn(-slope, fabsf(distance + (float)(8 * i + k % 2 - k / 2 * 8)), exponent);
          S[4 * i + k] = exp2(exponent);
        }
      }
      if (masked(step)) hide(step, [&](int i) { S[i] = 0; });
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
      dropout.mark(reinterpret_cast<tile::Accumulator(&)[1][kM / 16]>(S), step.begin, keys.begin + 64 * part + 16 * warp, step.head,
                   keys.batch);
    }
  }
  // P as dV takes it.
  static __device__ __forceinline__ void round(LeftOperand<kM> &rounded, const Accumulator<T, kM> &p) {
    u32(&P)[kM / 4] = rounded.x;
    const float (&S)[kM / 2] = p.x;
    auto kept = [](float x) { return F.dropout && x < 0 ? 0.0f : x; };
    auto dropped = [](float x) { return (u32)(__float_as_int(x) >> 31); };
#pragma unroll
    for (int i = 0; i < kM / 4; ++i) {
      if constexpr (!F.function)
        P[i] = pack<T>(kept(S[2 * i]), kept(S[2 * i + 1]));
      else if constexpr (F.dropout)
        P[i] &= ~__byte_perm(dropped(S[2 * i]), dropped(S[2 * i + 1]), 0x5410);
    }
  }

  // dS to shared memory, for dQ: rows are queries, columns keys.
  __device__ __forceinline__ void hand_on(const LeftOperand<kM> &dS, u32 n) const {
    const int row = lane / 16 * 8 + lane % 8, chunk = 2 * warp + lane / 8 % 2;
    const u32 target = shared.ds_of(n) + part * kM * kRowBytes + row * kRowBytes + ((chunk ^ row % 8) << 4);
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
  // dK or dV of this warpgroup's keys.
  template <int kColumns>
  __device__ __forceinline__ void store(const Operand &out, const Inputs &in, const KeyBlock &keys, i32 columns,
                                        const Accumulator<T, kColumns> &x, float factor) const {
    const i32 j = keys.begin + 64 * part + 16 * warp;
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
                                            factor, shared.v + (64 * part + 16 * warp) * kRowBytes, C.tile_k() * kRowBytes);
    store_rows<T, kColumns>(out, keys.batch, keys.head_kv, in.held(keys.batch).k0 + j, keys.seqlen_k - j, columns, x.x, factor);
  }

private:
  __device__ __forceinline__ BackwardBias<C> bias_of(u32 n) const {
    return BackwardBias<C>(shared, n, scores.in.bias.stride[2] != 0, part, warp, lane);
  }
  // The bias and mask of one score.
  struct Given {
    const typename Score::InMemory memory;
    const BackwardBias<C> &tile;
    const int i; // which of the lane's
    const u32 bit;
    __device__ __forceinline__ float bias() const {
      if constexpr (C.bias_by_tma)
        return tile.at(i);
      else
        return memory.bias();
    }
    __device__ __forceinline__ bool allowed() const { return bit != 0; }
  };
  // Scores that are more than products.
  template <bool kByPosition>
  __device__ __forceinline__ void score(float (&S)[kM / 2], u32 (&P)[kM / 4], u32 n, const QueryStep &step, u32 allowed) const {
    const u32 lse = shared.lse_of(n) + lane % 4 * 8;
    const i32 q = step.begin + tile::lane_column(0, 0), j = key();
    const auto first = scores.row(q, step.head);
    BackwardBias<C> bias = bias_of(n);
#pragma unroll
    for (int i = 0; i < kM / 8; ++i) {
      if (i % 2 == 0) bias.take(i / 2);
      float negative[2], correction[2]; // -LSE and, with a bias, its correction, which is kept apart (kernels/device/settle_row.h)
      load_shared(negative, lse + 32 * i);
      if constexpr (F.bias) load_shared(correction, lse + C.row_bytes() + 32 * i);
      float p[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const i32 at = q + 8 * i + k % 2;
        auto row = first;
        row.i = min(at, end_of(step) - 1);
        if constexpr (F.band) row.begin = max(0, row.i + scores.low), row.end = min(scores.seqlen_k, row.i + scores.high + 1);
        float &x = S[4 * i + k], slope = 1;
        const i32 own = j + k / 2 * 8;
        const Given given{{scores, row, own}, bias, 4 * i + k, allowed & mask_bit(4 * i + k)};
        x = F.function ? scores.score(x, row, own, given, kByPosition, scores.seqlen_k, slope)
                       : scores.score(x, row, own, float(row.i + scores.offset - own), given, kByPosition, scores.seqlen_k);
        const bool hidden = ((kByPosition || kHides) && x == minus_infinity<float>()) || (kByPosition && at >= end_of(step));
        const float exponent =
            F.bias ? __fmaf_rn(x + negative[k % 2], scores.unit, correction[k % 2]) : __fmaf_rn(x, scores.unit, negative[k % 2]);
        p[k] = hidden ? 0 : exp2(exponent);              // LSE may be no number
        x = !F.function || hidden ? p[k] : p[k] * slope; // of a query that is not there the slope may be NaN
      }
      if constexpr (F.function) P[2 * i] = pack<T>(p[0], p[1]), P[2 * i + 1] = pack<T>(p[2], p[3]);
    }
  }
  // This lane's first key; the other one is 8 further.
  __device__ __forceinline__ i32 key() const { return (i32)load_shared(shared.keys() + 8) + 64 * part + 16 * warp + tile::lane_row(0); }
  // clear(i) for each of the lane's scores that is not seen by position.
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

public:
  // What is hidden must count as 0 even if it is not a number, but 0 times infinity is NaN. Some queries have an LSE or D that is not a
  // number, see nothing, or do not exist. Their P is NaN where they see a key and 0 elsewhere, and so are all products with P, whatever Q
  // and dO hold; so their rows of Q and dO become 0. Both warpgroups must first have ended their products of this tile so far (S; by roles
  // S, and dP); then one clears Q, and the other one dO.
  __device__ __forceinline__ void clear_nonfinite_queries(const QueryStep &step, u32 n) const {
    if (!kHides && !masked(step)) return; // nothing is hidden
    bool found = false;
#pragma unroll
    for (int i = 0; i < (kM + 31) / 32; ++i) found |= !finite(n, min(32 * i + lane, kM - 1));
    if (!__any_sync(0xFFFFFFFFu, found)) return;
    wait_full(shared.dout_full(n), n);
    barrier_sync(kBoth, 128 * C.kWarpgroups);
    const int row = 32 * warp + lane, blocks = w ? C.columns_v() / 64 : C.columns() / 64;
    if (row < kM && !finite(n, row)) {
      const u32 zero[4] = {0, 0, 0, 0}, begin = (w ? shared.dout_of(n) : shared.q_of(n)) + row * kRowBytes;
#pragma unroll 1
      for (int block = 0; block < blocks; ++block) {
#pragma unroll 1
        for (u32 c = 0; c < kRowBytes; c += 16) store_shared(begin + block * kM * kRowBytes + c, zero);
      }
    }
    both();
    // Only ptxas needs this: ahead of a barrier whose number is a constant it puts the arguments of all exponentials first
    // (docs/lab/hopper-backward.md, step 25; whether that still costs anything since step 33 was not measured).
    together();
  }
  // Whether something of these keys is hidden from a query.
  __device__ __forceinline__ bool hides() const { return F.band || kHides || absent(); }
  // Whether keys of this tile are beyond the sequence.
  __device__ __forceinline__ bool absent() const {
    const KeyBlock keys = read<KeyBlock>(shared.keys());
    return keys.begin + C.tile_k() > keys.seqlen_k;
  }
  // Whether this warp's keys have to be cleared in K. Their first scores show it: where K is not finite, no score of its key is, for 0
  // times infinity is NaN.
  __device__ __forceinline__ bool shows_nonfinite(const Accumulator<T, kM> &S) const {
    const bool one_of_each_key = finite(__float_as_uint(S.x[0])) && finite(__float_as_uint(S.x[2]));
    return __any_sync(0xFFFFFFFFu, absent() || !one_of_each_key);
  }
  // If a query sees a key, a K that is not finite shows in its LSE, and such a V in its O and so in D. So what is not finite becomes 0 in
  // V, and the largest finite number in K (kLargest), where it may still have to make a score of -inf. Keys beyond the sequence become 0,
  // because they may be so large that dP is not finite. Each warp clears its own 16 keys, in the blocks of 64 columns of the tile: its
  // first scores have been made, and the other warps' scores do not depend on these keys.
  template <bool kLargest> __device__ __forceinline__ void clear_nonfinite_keys(u32 tile, int blocks) const {
    const KeyBlock keys = read<KeyBlock>(shared.keys());
    const int first = 64 * part + 16 * warp, there = keys.seqlen_k - keys.begin - first;
#pragma unroll 1
    for (int i = lane; i < 128 * blocks; i += 32) { // 16 bytes: 8 of a row, 16 rows of a block
      const int row = i / 8 % 16;
      const u32 place = tile + (i / 128 * C.tile_k() + first + row) * kRowBytes + i % 8 * 16;
      u32 x[4], bad[4];
      load_shared(x, place);
#pragma unroll
      for (int k = 0; k < 4; ++k) bad[k] = nonfinite<T>(x[k]);
      if (!(bad[0] | bad[1] | bad[2] | bad[3] | (row >= there))) continue;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (row >= there) x[k] = 0, bad[k] = 0;
        const u32 all = spread(bad[k]);
        x[k] = (x[k] & (~all | 0x80008000u)) | (kLargest ? all & (0x7FFF7FFFu - ExponentBits<T>::kUnit) : 0);
      }
      store_shared(place, x);
    }
    async_proxy_fence();
    __syncwarp();
  }
  // What both warpgroups wrote is there for wgmma.
  __device__ __forceinline__ void both() const {
    async_proxy_fence();
    barrier_sync(kBoth, 128 * C.kWarpgroups);
  }
  // What the warpgroup wrote is there for wgmma.
  __device__ __forceinline__ void together() const {
    async_proxy_fence();
    barrier_sync(kTogether + w, 128);
  }

private:
  static __device__ __forceinline__ bool finite(u32 bits) { return (bits & 0x7F800000) != 0x7F800000; }
  __device__ __forceinline__ bool finite(u32 n, int row) const { return finite(load_shared(shared.lse_of(n) + 4 * row)); }
};

} // namespace strobe::sm90
