// The forward for few queries over many keys; and for quantised keys, the forward for any number of queries. The query heads that share a
// key head are packed into the rows of one tile, row = query * group + head, so that K and V are read once. Each warp walks over its own
// keys with its own copies in flight; at the end the warps' O are merged. Where O is too wide for one warp, a group of warps
// (column_warps.h) takes the place of each warp.
#pragma once
#include "../../device/epilogue.h"
#include "../../device/nonfinite.h"
#include "../../device/score_tile.h"
#include "../../device/softmax.h"
#include "../../device/uneven_shares.h"
#include "../../tile/copy.h"
#include "../column_warps.h"
#include "load.h"
#include "quantised.h"

namespace strobe::mma {

using tile::Accumulator;
using tile::Left;
using tile::Right;

template <Config C> struct Decode {
  using Arguments = typename ArgumentsOf<ForwardArguments, C.features.quant != 0>::type;
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;
  static constexpr int kD = C.head_dim, kDv = C.head_dim_v;
  using Warps = ColumnWarps<C>;
  static constexpr int kM = C.tile_q / 16, kN = C.tile_k / 16;
  static constexpr bool kAligned = C.aligned;
  static_assert(!F.blocks && C.tile_q % 16 == 0 && C.tile_k % 16 == 0 && kD % 16 == 0 && kDv % 16 == 0);

  static __device__ __forceinline__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Inputs &in = a.in;
    u32 tiles = (u32)div_up(in.seqlen_q * in.group, C.tile_q), x = blockIdx.x; // blocks that read the same keys are neighbours
    i32 row = (i32)(x % tiles) * C.tile_q;
    x /= tiles;
    i32 head = (i32)(x % in.heads_kv);
    x /= in.heads_kv;
    const KeySplit keys = split_of(a, x);
    if (keys.b < 0) return;
    if (C.uneven && keys.split == 0 && head == 0 && row == 0 && threadIdx.x == 0)
      a.share_places[2 * keys.b] = keys.place, a.share_places[2 * keys.b + 1] = keys.splits;
    Sequence sequence = in.sequence<F>(keys.b);
    if (row >= sequence.band.seqlen_q * in.group) return;
    Decode(a, sequence, head, row, keys, shared).compute();
  }

private:
  // The split that a block takes of its sequence's keys: number `split` of `splits`. place: where its results lie among those of all
  // splits.
  struct KeySplit {
    i32 b, split, splits, place;
  };
  static __device__ __forceinline__ KeySplit split_of(const Arguments &a, u32 x) {
    if constexpr (C.uneven) {
      const UnevenShare share = UnevenShares(a.in, a.extra_shares, a.round_shares).find((i32)x);
      return {share.batch, share.index, share.count, (i32)x};
    } else {
      return {(i32)(x / a.splits), (i32)(x % a.splits), a.splits, (i32)(x % a.splits)};
    }
  }

  const Arguments &a;
  const Inputs &in;
  Sequence sequence;
  KeySplit keys;
  i32 b, head, first; // sequence; head of K and V; the tile's first row
  i32 rows;           // rows of the sequence
  Scores<F, float, Functions::half> scores;
  Dropout<F> dropout;
  int group = Warps::group((int)threadIdx.x), column = Warps::column((int)threadIdx.x);
  int lane = column * 32 + tile::lane_id(); // the thread's number within the group
  unsigned char *shared;
  u32 q_shared, k_shared, v_shared; // k_shared, v_shared: those of this group

  static constexpr u32 kKBytes = C.tile_k * C.row_bytes(kD), kVBytes = C.tile_k * C.row_bytes(kDv);
  static constexpr int kOPitch = kDv + 8; // floats; spreads rows over the banks

  __device__ __forceinline__ Decode(const Arguments &a, const Sequence &s, i32 head, i32 first, const KeySplit &keys, unsigned char *shared)
      : a(a), in(a.in), sequence(s), keys(keys), b(keys.b), head(head), first(first), rows((i32)s.band.seqlen_q * in.group),
        scores(in, s, b), dropout(in), shared(shared), q_shared(shared_address(shared)),
        k_shared(q_shared + C.tile_q * kD * 2 + group * C.stages * kKBytes),
        v_shared(q_shared + C.tile_q * kD * 2 + C.groups() * C.stages * kKBytes + group * C.stages * kVBytes) {}

  __device__ __forceinline__ i32 query(i32 row) const { return row / in.group; }
  __device__ __forceinline__ i32 query_head(i32 row) const { return head * in.group + row % in.group; }

  struct PackedRows {
    const Decode &d;
    i32 rows, columns;
    i64 column_stride;
    __device__ __forceinline__ const T *row(i32 r) const {
      r = min(r + d.first, d.rows - 1);
      return d.in.q.template at<const T>(d.b, d.query_head(r), d.sequence.q0 + d.query(r), 0);
    }
  };

  __device__ __forceinline__ i64 last() const { return query(min(first + C.tile_q, rows) - 1) + 1; } // the last query, plus 1
  __device__ __forceinline__ Schedule::Share share(int w) const {
    return {(i64)keys.split * C.groups() + w, (i64)keys.splits * C.groups()};
  }
  __device__ __forceinline__ bool whole() const { return keys.splits == 1; }
  // Where a query's results lie among those of all splits.
  __device__ __forceinline__ i64 partial_row(i32 h, i64 q) const {
    if constexpr (C.uneven) return ((i64)keys.place * in.heads + h) * in.seqlen_q + q;
    return keys.place * in.rows() + in.row_index(b, h, q);
  }

  __device__ __forceinline__ void compute() {
    const auto k = k_of_call<T, F>(a, sequence, b, head);
    const auto v = v_of_call<T, F>(a, sequence, b, head);
    Schedule ahead(sequence.band, query(first), last(), C.tile_k, 16, {nullptr, 0, 0}, share(group)), tiles = ahead;
    int loading = 0, stage = 0;
    PlacesAhead<typename KeysOf<T, F>::type, C.stages> places(k, ahead);
    u32 lacking_tiles = 0; // a bit for each tile in flight, the lowest one for the next tile: whether keys are missing in the tile
    tile::load<C.tile_q, kD, kThreads, kAligned>(q_shared, PackedRows{*this, rows - first, in.head_dim, in.q.stride[3]}, threadIdx.x);
    cp_async_commit();
#pragma unroll
    for (int i = 0; i < C.stages - 1; ++i) load_next(ahead, loading, k, v, places, lacking_tiles);
    cp_async_wait<C.stages - 1>();
    __syncthreads();
    const tile::Blocks<Left, kD> q_blocks(q_shared, 16 * column * kInner);
    Left Q[kM][kInner];
    if constexpr (kKeepQ) keep_q(Q, q_blocks);

    Accumulator O[kM][Warps::columns()] = {};
    RowSoftmax<2 * kM> softmax;
    KeyTile tile;
    bool nonfinite = false;
    TileScales<C.features> key_scales(k, v, tiles, places);
    const QueryScales<T, F.quant, kM> row_scales(Q);
    while (tiles.next(tile)) {
      cp_async_wait<C.stages - 2>();
      Warps::meet((int)threadIdx.x); // this tile has arrived, and no warp reads the previous one any more
      const bool lacking = lacking_tiles & 1;
      load_next(ahead, loading, k, v, places, lacking_tiles);
      Accumulator S[kM][kN] = {};
      if constexpr (F.quant) {
        nonfinite |= key_scales.next(k, v, tiles, places);
        multiply_stored<T, F.quant, kD>(S, Q, k_shared + stage * kKBytes, row_scales, key_scales, zero());
      } else {
        multiply_q_k(S, Q, q_blocks, stage);
      }
      Warps::exchange(S, q_shared + C.decode_exchange_at(), (int)threadIdx.x);
      score(S, tile);
      if (lacking) hide_lacking(S, k, tile);
      softmax.template follow<C.exact_max>(S, exponent(), O);
      if constexpr (F.quant)
        nonfinite |= add_stored_p_v(O, S, softmax, tile, stage, key_scales);
      else
        nonfinite |= add_p_v(O, S, softmax, tile, stage, lacking);
      stage = next_stage(stage);
    }
    merge(O, softmax);
    if (__syncthreads_or(nonfinite)) add_nonfinite(v);
  }

  static __device__ __forceinline__ int next_stage(int stage) { return stage + 1 == C.stages ? 0 : stage + 1; }
  // Begins to copy the next tile of keys. After the last tile, commits an empty group of copies.
  template <class RowsOfK, class RowsOfV>
  __device__ __forceinline__ void load_next(Schedule &ahead, int &stage, const RowsOfK &k, const RowsOfV &v,
                                            PlacesAhead<RowsOfK, C.stages> &places, u32 &lacking_tiles) const {
    KeyTile t;
    bool lacks = false;
    if (ahead.next(t)) {
      load_rows<C.tile_k, C.row_bytes(kD) / 2, C.row_bytes(kDv) / 2, 32 * C.column_warps, kAligned>(
          k_shared + stage * kKBytes, v_shared + stage * kVBytes, k, v, t, places, lane);
      if constexpr (kInPages<RowsOfK>) lacks = places.lacks_some(k, t);
      stage = next_stage(stage);
    }
    places.read(k, ahead);
    if constexpr (kInPages<RowsOfK>) lacking_tiles = lacking_tiles >> 1 | (u32)lacks << (C.stages - 2);
    cp_async_commit();
  }

  static constexpr int kInner = Warps::inner() / 16;
  static constexpr bool kKeepQ = kM * kD <= 128; // Q stays in registers
  static_assert(!F.quant || kKeepQ && C.column_warps == 1);
  __device__ __forceinline__ void keep_q(Left (&Q)[kM][kInner], const tile::Blocks<Left, kD> &q_blocks) const {
#pragma unroll
    for (int i = 0; i < kM * kInner; ++i) {
      if constexpr (F.quant)
        Q[i / kInner][i % kInner] = tile::left_of_steps<F.quant, kD>(q_shared, i / kInner * 16, i % kInner);
      else
        Q[i / kInner][i % kInner] = q_blocks.load(i / kInner * 16, i % kInner * 16);
    }
  }
  // S = Q K^T
  __device__ __forceinline__ void multiply_q_k(Accumulator (&S)[kM][kN], Left (&Q)[kM][kInner], const tile::Blocks<Left, kD> &q_blocks,
                                               int stage) const {
    const tile::Blocks<Right, kD> K(k_shared + stage * kKBytes, 16 * column * kInner);
#pragma unroll
    for (int c = 0; c < kInner; ++c) {
      if constexpr (!kKeepQ) {
#pragma unroll
        for (int m = 0; m < kM; ++m) Q[m][c] = q_blocks.load(16 * m, 16 * c);
      }
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        Right key = K.load(16 * n, 16 * c);
#pragma unroll
        for (int m = 0; m < kM; ++m) tile::multiply_add<T>(S[m][n], Q[m][c], key);
      }
    }
  }

  // Replaces a block of S by P = exp2(S * unit - M).
  __device__ __forceinline__ void make_p(Accumulator (&S)[kM][kN], RowSoftmax<2 * kM> &softmax, const KeyTile &tile, int m, int n) const {
    softmax.exponentiate(S[m][n], 2 * m, exponent());
    if constexpr (F.dropout) drop(S[m][n], 16 * m, (i32)tile.begin + 16 * n);
  }
  // O += P V. Returns whether V had numbers that are not finite.
  __device__ __forceinline__ bool add_p_v(Accumulator (&O)[kM][Warps::columns()], Accumulator (&S)[kM][kN], RowSoftmax<2 * kM> &softmax,
                                          const KeyTile &tile, int stage, bool lacking) const {
    bool nonfinite = false;
    if (masked(tile) || lacking) nonfinite = clear_nonfinite<T, C.tile_k, kDv, 32 * C.column_warps>(v_shared + stage * kVBytes, lane);
    Warps::meet((int)threadIdx.x);
    const tile::Blocks<Right, kDv, true> V(v_shared + stage * kVBytes, 16 * column * Warps::columns());
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      Left P[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        make_p(S, softmax, tile, m, n);
        P[m] = tile::rounded<T>(S[m][n]);
      }
#pragma unroll
      for (int c = 0; c < Warps::columns(); ++c) {
        Right value = V.load(16 * n, 16 * c);
#pragma unroll
        for (int m = 0; m < kM; ++m) tile::multiply_add<T>(O[m][c], P[m], value);
      }
    }
    return nonfinite;
  }
  // add_p_v() for quantised V.
  __device__ __forceinline__ bool add_stored_p_v(Accumulator (&O)[kM][Warps::columns()], Accumulator (&S)[kM][kN],
                                                 RowSoftmax<2 * kM> &softmax, const KeyTile &tile, int stage,
                                                 const TileScales<C.features> &key_scales) const {
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int m = 0; m < kM; ++m) make_p(S, softmax, tile, m, n);
    return add_stored<T, F.quant, kDv>(O, S, v_shared + stage * kVBytes, key_scales, zero());
  }

  __device__ __forceinline__ auto exponent() const { return exponent_of<F.unbounded()>(scores.unit); }
  __device__ __forceinline__ u32 zero() const { return (u32)a.splits >> 31; } // see tile/quantised.h
  static __device__ __forceinline__ bool masked(const KeyTile &tile) { return F.hides() || hides_by_position<C.tile_k>(tile); }

  // Replaces q.k by scores.
  __device__ __forceinline__ void score(Accumulator (&S)[kM][kN], const KeyTile &tile) const {
    score_tile(S, scores, tile, [&](int row) {
      const i32 packed = computed_here(first + 16 * (row / 2)) + tile::lane_row(row % 2);
      return scores.row(query(packed), query_head(packed));
    });
  }
  // Dropout of one block. The rows of a tile belong to several heads, so dropout's 4x4 groups do not fit, and each element is drawn alone.
  __device__ __forceinline__ void drop(Accumulator &P, i32 row, i32 key) const {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      int c = k / 4, r = k / 2 % 2, e = k % 2;
      i32 packed = first + row + tile::lane_row(r);
      if (!dropout.keep(b, query_head(packed), query(packed), key + tile::lane_column(c, e))) P.x[c][2 * r + e] = 0;
    }
  }

  // Merges the O of all groups and stores the result. Shared memory then holds M and l (group, row), and after them O (group, row, column).
  __device__ __forceinline__ void merge(const Accumulator (&O)[kM][Warps::columns()], const RowSoftmax<2 * kM> &softmax) {
    cp_async_wait<0>();
    __syncthreads();
    const int first_column = column * 16 * Warps::columns();
    float *M = (float *)shared, *l = M + C.groups() * C.tile_q, *o = l + C.groups() * C.tile_q;
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      int m = i / 2, r = i % 2, row = group * C.tile_q + 16 * m + tile::lane_row(r);
      float sum = tile::row_sum(softmax.l[i]);
      if (first + 16 * m + tile::lane_row(r) >= rows) continue;
      if (first_column + tile::lane_column(0, 0) == 0) M[row] = softmax.M[i], l[row] = sum;
#pragma unroll
      for (int k = 0; k < 4 * Warps::columns(); ++k) {
        int c = first_column + 16 * (k / 4) + tile::lane_column(k / 2 % 2, k % 2);
        if constexpr (F.quant) c = tile::column_of_sum<F.quant>(k / 4, k / 2 % 2, tile::lane_column(0, k % 2));
        o[row * kOPitch + c] = O[m][k / 4].x[k / 2 % 2][2 * r + k % 2];
      }
    }
    __syncthreads();
    for (int r = (int)threadIdx.x / 32; r < C.tile_q && first + r < rows; r += C.warps) store_row(r, M, l, o);
  }
  // Merges and stores row r of the tile; one warp calls it.
  __device__ __forceinline__ void store_row(int r, const float *M, const float *l, const float *o) const {
    i32 h = query_head(first + r);
    i64 q = sequence.q0 + query(first + r);
    float sink = whole() && in.sinks ? exponent().from_natural(*in.sinks.at<const float>(0, h, 0, 0)) : minus_infinity<float>();
    float top = minus_infinity<float>(), sum = 0, weight[C.groups()];
#pragma unroll
    for (int w = 0; w < C.groups(); ++w) top = fmaxf(top, M[w * C.tile_q + r]);
#pragma unroll
    for (int w = 0; w < C.groups(); ++w) {
      weight[w] = top == minus_infinity<float>() ? 1.0f : exp2(exponent().difference(M[w * C.tile_q + r] - top));
      sum += weight[w] * l[w * C.tile_q + r];
    }
    const RowEnd end = row_end(top, sum, sink, F.unbounded());
    float factor = end.factor * dropout.factor();
    i64 row = partial_row(h, q);
    if (tile::lane_id() == 0) {
      if (!whole())
        a.partial_lse[row] = end.lse;
      else if (a.lse)
        *a.lse.template at<float>(b, h, q, 0) = end.lse;
    }
    for (int c = tile::lane_id(); c < in.head_dim_v; c += 32) {
      float x = 0;
#pragma unroll
      for (int w = 0; w < C.groups(); ++w) x += weight[w] * o[(w * C.tile_q + r) * kOPitch + c];
      x *= factor;
      if (whole())
        *a.out.template at<T>(b, h, q, c) = Convert<T>::from(x);
      else
        a.partial_out[row * in.head_dim_v + c] = x;
    }
  }

  struct Results {
    const Decode &d;
    i32 count;
    __device__ __forceinline__ i32 query(i32 r) const { return d.query(d.first + r); }
    __device__ __forceinline__ i32 head(i32 r) const { return d.query_head(d.first + r); }
    __device__ __forceinline__ void add(i32 r, i32 c, float x) const {
      const i64 q = d.sequence.q0 + query(r);
      if (d.whole())
        add_to<T>(*d.a.out.template at<T>(d.b, head(r), q, c), x);
      else
        d.a.partial_out[d.partial_row(head(r), q) * d.in.head_dim_v + c] += x;
    }
  };
  template <class Values> __device__ __forceinline__ void add_nonfinite(const Values &v) const {
    Results results{*this, min((i32)C.tile_q, rows - first)};
    for (int w = 0; w < C.groups(); ++w) {
      Range seen = Schedule::keys_of_share(sequence.band.keys_any(query(first), last()), C.tile_k, 16, share(w));
      __syncthreads();
      strobe::add_nonfinite<kThreads>(scores, dropout, v, seen, {nullptr, 0, 0}, results, (int)threadIdx.x);
    }
  }
};

} // namespace strobe::mma
