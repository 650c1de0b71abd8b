// Stores O / l and LSE to global memory.
#pragma once
#include "../../device/chunks.h"
#include "../../device/softmax.h"
#include "../../tile/shared.h"
#include "nonfinite.h"
#include "tile_softmax.h"

namespace strobe::sm90 {

// Stores a lane's columns of row r (0 or 1) of O, times a factor, as the partial result of a split. Returns whether a number is not finite.
template <Config C>
__device__ __forceinline__ bool store_partial(const Warpgroup<C> &group, const Item &item, i32 h, i64 row, int r, float factor) {
  constexpr bool kFour = C.eight_bits != 0; // whether a lane's columns are four neighbours of 16 (eight_bits.h)
  const i32 own = kFour ? 2 * tile::lane_column(0, 0) : tile::lane_column(0, 0);
  float *out = partial_out(group.a, item, h, row) + own;
  bool nonfinite = false;
#pragma unroll
  for (int n = 0; n < C.head_dim_v / 4; ++n) {
    const i32 c = kFour ? n / 4 * 16 + n % 2 * 2 + n / 2 % 2 : n / 2 * 8 + n % 2;
    const float x = group.O.x[n / 2 * 4 + 2 * r + n % 2] * factor;
    if (c + own < group.in.head_dim_v) out[c] = x;
    if (r == 0 || C.invariant) nonfinite |= !(x - x == 0); // invariant: a row that sees no key of this split shows nothing
  }
  return nonfinite;
}
// Stores a lane's columns of row r of O, times a factor, as a final result. Two lanes exchange halves of neighbouring blocks of 8 columns,
// so that each lane stores 8 bytes, and both together whole sectors. There are no branches, because in a branch the compiler computes the
// address again and waits for each exchange.
template <Config C>
__device__ __forceinline__ bool store_rounded(const Warpgroup<C> &group, const Item &item, i32 h, i64 row, bool there, int r,
                                              float factor) {
  using T = typename Element<C.dtype>::type;
  const i32 odd = group.lane % 2, column = C.eight_bits ? 2 * tile::lane_column(0, 0) : 8 * odd + group.lane % 4 / 2 * 4;
  T *out = group.a.out.template at<T>(item.b, h, row, 0) + column;
  const i32 columns = there ? group.in.head_dim_v - column : 0;
  u32 zero = 0; // becomes NaN if a number is not finite
#pragma unroll
  for (int c = 0; c < C.head_dim_v; c += 16) {
    const float *o = group.O.x + c / 2 + 2 * r;
    u32 x, y;
    if constexpr (C.eight_bits) { // the lane's columns are neighbours already (eight_bits.h)
      x = pack<T>(o[0] * factor, o[4] * factor), y = pack<T>(o[1] * factor, o[5] * factor);
    } else {
      const u32 left = pack<T>(o[0] * factor, o[1] * factor), right = pack<T>(o[4] * factor, o[5] * factor);
      const u32 other = __shfl_xor_sync(0xFFFFFFFFu, odd ? left : right, 1);
      x = odd ? other : left, y = odd ? right : other;
    }
    store_global_below(c, columns, out + c, x, y);
    // If V has a number that is not finite, all rows show it, so one row is enough. Invariant: both rows are looked at, since the sum of
    // one row may not be finite.
    if (r == 0 || C.invariant) zero = multiply_add_pairs<T>(x, 0, multiply_add_pairs<T>(y, 0, zero));
  }
  return (r == 0 || C.invariant) && there && multiply_add_pairs<T>(zero, 0, 0) != 0;
}

// Stores a row of a partial part (attention/part.h), with the LSE as two numbers.
template <Config C>
__device__ __forceinline__ bool store_partial_of_part(const Warpgroup<C> &group, const Item &item, const TileSoftmax<C> &softmax, i32 h,
                                                      i64 row, bool there, int r, float factor) {
  const HopperForwardArguments &a = group.a;
  const float M = softmax.running.M[r], l = tile::row_sum(softmax.running.l[r]);
  if (!there) return false;
  float *out = a.out.template at<float>(item.b, h, row, tile::lane_column(0, 0));
  float zero = 0; // becomes NaN if a number is not finite
#pragma unroll
  for (int n = 0; n < C.head_dim_v / 8; ++n) {
    const float x = group.O.x[4 * n + 2 * r] * factor, y = group.O.x[4 * n + 2 * r + 1] * factor;
    if (8 * n + tile::lane_column(0, 0) < group.in.head_dim_v) *(float2 *)(out + 8 * n) = {x, y};
    if (r == 0) zero = __fmaf_rn(x, 0.0f, __fmaf_rn(y, 0.0f, zero));
  }
  if (a.lse && group.lane % 4 == 0) {
    const float natural = softmax.natural() ? 1.0f : kLn2<float>, lse = l == 0 ? minus_infinity<float>() : row_lse(M, natural, l);
    float *const to = a.lse.template at<float>(item.b, h, row, 0);
    to[0] = lse, to[group.in.part->lse_low] = fabsf(lse) < -minus_infinity<float>() ? rest_of_lse(M, natural, l, lse) : 0.0f;
  }
  return zero != 0;
}
// Merges row r of a lane's O / l of this chunk with the result of the earlier chunks, and returns the LSE of all chunks so far. A result
// that is not final waits in the block's own global memory, which stays in the L2 cache; each thread reads only what it has written. zero:
// becomes NaN if a number of the chunk is not finite.
template <Config C>
__device__ __forceinline__ float merge_row(Warpgroup<C> &group, const RowEnd &end, float factor, bool there, int r, bool first, bool last,
                                           float &zero) {
  constexpr int kPairs = C.head_dim_v / 8; // pairs of columns in a lane's row; the row's LSE follows them
  float2 *const own = (float2 *)group.a.walked + ((blockIdx.x * C.warpgroups + group.w) * 2 + r) * (C.walked_floats() / 2);
  float2 *const out = own + threadIdx.x % 128;
  float *const lse = (float *)(own + 128 * kPairs) + threadIdx.x % 128;
  const bool reads = !first && there, writes = !last && there;
  float2 old[kPairs];
#pragma unroll
  for (int n = 0; n < kPairs; ++n) old[n] = reads ? out[128 * n] : float2{0, 0}; // all loads are issued before the first is used
  const Merge merge(reads ? *lse : minus_infinity<float>(), end.lse);
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    float &x = group.O.x[4 * n + 2 * r], &y = group.O.x[4 * n + 2 * r + 1];
    x = __fmul_rn(x, factor), y = __fmul_rn(y, factor);
    if (there) zero = __fmaf_rn(x, 0.0f, __fmaf_rn(y, 0.0f, zero));
    x = merge(old[n].x, x), y = merge(old[n].y, y);
    if (writes) out[128 * n] = {x, y};
  }
  if (writes) *lse = merge.lse;
  return merge.lse;
}
// Merges the sink with row r of a lane's O, times a factor. Returns the LSE.
template <Config C> __device__ __forceinline__ float merge_sink(Warpgroup<C> &group, float sink, float lse, float factor, int r) {
  const Merge with_sink(lse, sink);
#pragma unroll
  for (int n = 0; n < C.head_dim_v / 4; ++n) {
    float &x = group.O.x[n / 2 * 4 + 2 * r + n % 2];
    x = with_sink(__fmul_rn(x, factor), 0.0f);
  }
  return with_sink.lse;
}

// Which rows exist. Invariant: computed again each time, so that the answer takes no registers.
template <Config C>
__device__ __forceinline__ auto rows_of_result(const Warpgroup<C> &group, const Item &item, const TileSoftmax<C> &softmax) {
  struct {
    i64 q0;
    i32 seqlen_q;
  } rows{softmax.sequence.q0, softmax.scores.seqlen_q};
  if constexpr (C.invariant) {
    const HeldRows held = group.in.template held<C.features>(computed_here(item.b));
    rows = {held.q0, held.seqlen_q};
  }
  return rows;
}
// Whether row r's sum l is wrong, so that the tile must be computed again.
template <Config C> __device__ __forceinline__ bool overflowed(const TileSoftmax<C> &softmax, const RowEnd &end, int r) {
  if constexpr (C.invariant) return !(end.lse < -minus_infinity<float>());
  const bool too_low = C.features.unbounded() && softmax.running.M[r] == minus_infinity<float>(); // scores may be too low for exp2's unit
  return (C.reference == kFixed && !(softmax.running.l[r] < TileSoftmax<C>::kMost)) || too_low;
}

// Stores O / l and LSE of the warpgroup's rows: as final results, or as those of a split or of a partial part. Invariant: merges the result
// of a chunk of keys with those of the earlier chunks. first, last: whether this is the first and the last chunk. counts: which of a lane's
// two rows are stored.
template <Config C>
__device__ __forceinline__ void store_results(Warpgroup<C> &group, const Item &item, const TileSoftmax<C> &softmax, bool first, bool last,
                                              const bool (&counts)[2]) {
  static_assert(!C.invariant || !(C.features.bias || C.features.part));
  static_assert(!C.eight_bits || !C.features.part);
  const HopperForwardArguments &a = group.a;
  const Inputs &in = group.in;
  const RowSoftmax<2> &running = softmax.running;
  const bool natural = softmax.natural();
  const auto sink_of = [&](i32 h) {
    return !C.split && !C.invariant && in.sinks ? *in.sinks.at<const float>(0, h, 0, 0) * (natural ? 1 : kLog2e<float>)
                                                : minus_infinity<float>(); // invariant: the sink is merged like a chunk
  };
  const float sink = C.packed ? 0 : sink_of(item.h);
  const auto rows = rows_of_result(group, item, softmax);
  bool overflow = false, nonfinite = false;
  float zero = 0; // becomes NaN if a number of the chunk is not finite
  float value = 1;
  if constexpr (C.eight_bits) value = scale_of_values<C>(a, item);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const auto [i, h] = softmax.place(r);
    const i64 row = rows.q0 + i;
    const float l = tile::row_sum(running.l[r]);
    const RowEnd end = row_end(running.M[r], C.eight_bits ? l * kLowered : l, C.packed ? sink_of(h) : sink, natural);
    float factor = end.factor * softmax.dropout.dropout.factor(), lse = end.lse;
    if constexpr (C.eight_bits) factor *= kLowered * value;
    const bool there = i < rows.seqlen_q && counts[r];
    overflow = overflow || (there && overflowed(softmax, end, r));
    if constexpr (C.split) {
      if (!there) continue;
      if (group.lane % 4 == 0) a.partial_lse[item.split() * in.rows() + in.row_index(item.b, h, row)] = lse;
      nonfinite |= store_partial(group, item, h, row, r, factor);
    } else if constexpr (C.features.partial) {
      nonfinite |= store_partial_of_part(group, item, softmax, h, row, there, r, factor);
    } else {
      if (C.walks_chunks() && !(first && last)) lse = merge_row(group, end, factor, there, r, first, last, zero), factor = 1;
      if (!last) continue;
      if (C.invariant && in.sinks) lse = merge_sink(group, *in.sinks.at<const float>(0, h, 0, 0), lse, factor, r), factor = 1;
      if (a.lse && there && group.lane % 4 == 0) *a.lse.template at<float>(item.b, h, row, 0) = lse;
      nonfinite |= store_rounded(group, item, h, row, there, r, factor);
    }
  }
  if (item.kind() != kFast) return;
  const bool wrong = overflow || nonfinite || zero != 0;
  if (last)
    group.judge(wrong);
  else if (wrong)
    store_shared(group.shared.failed(group.verdicts), 1);
}

} // namespace strobe::sm90
