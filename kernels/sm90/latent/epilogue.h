// Stores O / l and LSE of a tile of queries: as final results, as those of a split, or merged with those of the chunks of keys before.
#pragma once
#include "../../device/chunks.h"
#include "../../device/epilogue.h"
#include "warpgroup.h"

namespace strobe::sm90::latent {

template <Config C, int kW> struct Epilogue {
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  Warpgroup<C, kW> &group;
  const LatentArguments &a;
  const Item &item;

  // first, last: whether this is the first and the last chunk of keys, if the block walks over chunks.
  __device__ __forceinline__ void store(bool first, bool last) const {
    RowSoftmax<2> &running = group.softmax.running;
    const Shared &shared = group.shared;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = tile::row_sum(running.l[r]);
      if (group.lane % 4 == 0) store_shared(shared.sum(kW, group.softmax.row(r)), __float_as_uint(sum));
    }
    barrier_sync(kConsumers, 256);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = group.softmax.row(r);
      store_row(r, load_shared_float(shared.sum(0, row)) + load_shared_float(shared.sum(1, row)), first, last);
    }
    if (!last) barrier_sync(kConsumers, 256); // the sums have been read
  }

private:
  __device__ __forceinline__ bool whole() const { return !(C.split || C.uneven) || item.whole(); }
  __device__ __forceinline__ void store_row(int r, float sum, bool first, bool last) const {
    const Inputs &in = a.in;
    const auto [i, h] = group.softmax.places[r];
    const bool there = i < item.band.seqlen_q;
    const i64 row = item.sequence.q0 + i;
    const float natural_sink = there && in.sinks && whole() ? *in.sinks.at<const float>(0, h, 0, 0) : minus_infinity<float>();
    const float sink = C.invariant ? minus_infinity<float>() : natural_sink * kLog2e<float>; // invariant: it is merged like a chunk
    const RowEnd end = row_end(group.softmax.running.M[r], sum, sink);
    scale(r, end.factor);
    float lse = end.lse;
    if (!whole()) {
      if (there) store_partial(r, h, i, lse);
      return;
    }
    if (C.walks_chunks() && !(first && last)) lse = merge(r, h, row, there, lse, first);
    if (!last) return;
    if constexpr (C.invariant) {
      const Merge with_sink(lse, natural_sink);
      each(r, [&](float &x, float &y, int) { x = with_sink(x, 0.0f), y = with_sink(y, 0.0f); });
      lse = with_sink.lse;
    }
    if (a.lse && there && kW == 0 && group.lane % 4 == 0) *a.lse.at<float>(item.b, h, row, 0) = lse;
    T *const out = a.out.at<T>(item.b, h, there ? row : 0, kW * kHalf);
    const i32 columns = there ? in.head_dim_v - kW * kHalf : 0;
#pragma unroll
    for (int c = 0; c < kHalf; c += 16) {
      const float *o = group.O.x + c / 2 + 2 * r;
      store_sixteen(out + c, columns - c, pack<T>(o[0], o[1]), pack<T>(o[4], o[5]));
    }
  }
  // Calls f(x, y, column) for the pairs of columns that the lane holds of its row r; column counts from the lane's first one.
  template <class Function> __device__ __forceinline__ void each(int r, Function f) const {
#pragma unroll
    for (int c = 0; c < kHalf; c += 8) f(group.O.x[c / 2 + 2 * r], group.O.x[c / 2 + 2 * r + 1], c);
  }
  __device__ __forceinline__ void scale(int r, float factor) const {
    each(r, [&](float &x, float &y, int) { x = __fmul_rn(x, factor), y = __fmul_rn(y, factor); });
  }
  __device__ __forceinline__ i32 first_column() const { return kW * kHalf + tile::lane_column(0, 0); }
  __device__ __forceinline__ void store_partial(int r, i32 h, i32 i, float lse) const {
    const i64 row = partial_row<C>(a, item, h, i);
    if (kW == 0 && group.lane % 4 == 0) a.partial_lse[row] = lse;
    float *const out = a.partial_out + row * a.in.head_dim_v + first_column();
    const i32 columns = a.in.head_dim_v - first_column();
    each(r, [&](float x, float y, int c) {
      if (c < columns) out[c] = x;
      if (c + 1 < columns) out[c + 1] = y;
    });
  }
  // Merges the row's O with that of the chunks before, and returns their LSE. Each thread reads what it wrote.
  __device__ __forceinline__ float merge(int r, i32 h, i64 row, bool there, float lse, bool first) const {
    const i64 at = there ? a.in.row_index(item.b, h, row) : 0;
    float *const out = a.merged_out + at * kValues + first_column(), *const kept = a.merged_lse + 8 * at + 4 * kW + group.lane % 4;
    const bool reads = there && !first;
    const Merge merge(reads ? *kept : minus_infinity<float>(), lse);
    each(r, [&](float &x, float &y, int c) {
      float2 *const place = (float2 *)(out + c);
      const float2 before = reads ? *place : float2{0, 0};
      x = merge(before.x, x), y = merge(before.y, y);
      if (there) *place = {x, y}; // after the last chunk, too: no load is moved up beyond a store, and registers are left for a few loads
    });
    if (there) *kept = merge.lse;
    return merge.lse;
  }
};

} // namespace strobe::sm90::latent
