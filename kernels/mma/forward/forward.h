// FlashAttention-2's forward (Dao 2023, algorithm 1) on mma.sync: a thread block owns a tile of queries and walks over the tiles of keys. A
// warp owns tile_q / warps rows, and keeps their S, P, O, m and l in its registers. Where O is too wide for that, several warps share rows
// (column_warps.h).
#pragma once
#include "../../device/chunks.h"
#include "../../device/epilogue.h"
#include "../../device/nonfinite.h"
#include "../../device/part_tiles.h"
#include "../../device/query_major_dropout.h"
#include "../../device/score_tile.h"
#include "../../device/softmax.h"
#include "../../device/tile_order.h"
#include "../../tile/copy.h"
#include "../arguments.h"
#include "../column_warps.h"

namespace strobe::mma {

using tile::Accumulator;
using tile::Left;
using tile::Right;

template <Config C> struct Forward {
  using Arguments = typename Either<C.invariant != 0, InvariantForwardArguments, ForwardArguments>::type;
  using T = typename Element<C.dtype>::type;
  using Out = Result<C.dtype, C.features.partial != 0>;
  static constexpr Features F = C.features;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;
  static constexpr int kD = C.head_dim, kDv = C.head_dim_v;
  using Warps = ColumnWarps<C>;
  static constexpr int kRows = C.tile_q / C.groups(); // rows per warp
  static constexpr int kM = kRows / 16, kN = C.tile_k / 16;
  static constexpr bool kAligned = C.aligned;
  static_assert(kRows % 16 == 0 && C.tile_k % 32 == 0 && kD % 16 == 0 && kDv % 16 == 0);

  using Item = QueryItem<C.tile_q>;

  static __device__ __forceinline__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    if constexpr (F.part) return run_part(a, shared_address(shared));
    Item item(a, blockIdx.x);
    Sequence sequence = a.in.sequence<F>(item.b);
    if (item.q >= sequence.band.seqlen_q) return;
    if constexpr (C.invariant) return run_chunks(a, item, sequence, shared_address(shared));
    if (!Forward(a, item, sequence, shared_address(shared)).compute()) return;
    Item again(a, computed_here(blockIdx.x)); // made again, so that the item takes no registers in the main loop
    Forward(a, again, a.in.sequence<F>(again.b), 0).add_nonfinite();
  }

private:
  // Runs a part of a larger problem: item.q is the position of the tile's queries in the whole problem.
  static __device__ __forceinline__ void run_part(const Arguments &a, u32 shared) {
    const auto place = [&](u32 x, Item &item) {
      item = Item(a, x, (u32)query_tiles<F, C.tile_q>(a.in));
      const auto [q0, sequence] = queries_of<F, C.tile_q>(a.in, item.b, item.q / C.tile_q);
      item.q = q0;
      return sequence;
    };
    Item item;
    const Sequence sequence = place(blockIdx.x, item);
    if (item.q >= sequence.band.seqlen_q) return;
    if (!Forward(a, item, sequence, shared).compute()) return;
    const Sequence again = place(computed_here(blockIdx.x), item);
    Forward(a, item, again, 0).add_nonfinite();
  }
  // Invariant: walks in order over the chunks of keys that the tile of queries sees; or over one chunk, if a block's split is one chunk.
  static __device__ __forceinline__ void run_chunks(const Arguments &a, Item item, const Sequence &sequence, u32 shared) {
    const Range keys = sequence.band.keys_any(item.q, min((i64)item.q + C.tile_q, sequence.band.seqlen_q));
    const i32 first = a.splits > 1 ? item.split : keys.empty() ? 0 : (i32)keys.begin / C.chunk();
    const i32 end = a.splits > 1 ? item.split + 1 : keys.empty() ? 1 : (i32)div_up(keys.end, C.chunk());
    bool nonfinite = false;
#pragma unroll 1
    for (i32 chunk = first; chunk < end; ++chunk) {
      item.split = chunk;
      Forward forward(a, item, sequence, shared);
      forward.begins = chunk == first, forward.ends = chunk + 1 == end;
      nonfinite |= forward.compute();
      __syncthreads(); // all threads have read the chunk's tiles
    }
    if (!nonfinite) return;
    if (a.splits == 1) item.split = -1; // -1: all keys
    Forward(a, item, sequence, 0).add_nonfinite();
  }

  const Arguments &a;
  const Inputs &in;
  Item item;                       // item.split: the split of the keys, or the chunk
  bool begins = true, ends = true; // invariant: the chunk is the first or the last one of the tile of queries
  Sequence sequence;
  Scores<F, float, C.invariant ? Functions::half_rounded : Functions::half> scores;
  QueryMajorDropout<F> dropout;
  const typename KeysOf<T, F>::type k, v;
  u32 q_shared, k_shared, v_shared; // O takes Q's place at the end
  int warp_row = Warps::group((int)threadIdx.x) * kRows;

  static constexpr u32 kKBytes = C.tile_k * kD * 2, kVBytes = C.tile_k * kDv * 2;

  __device__ __forceinline__ Forward(const Arguments &a, const Item &item, const Sequence &sequence, u32 shared)
      : a(a), in(a.in), item(item), sequence(sequence), scores(in, sequence, item.b), dropout{Dropout<F>(in), (u32)item.h, (u32)item.b},
        k(k_of<T, F>(in, sequence, item.b, item.h / in.group)), v(v_of<T, F>(in, sequence, item.b, item.h / in.group)), q_shared(shared),
        k_shared(shared + C.q_bytes()), v_shared(k_shared + C.stages * kKBytes) {
    if constexpr (F.part) {
      scores.row_shift = (i32)(sequence.q0 - in.held(item.b).q0);
      dropout.head = dropout.dropout.whole_head(item.h), dropout.batch = dropout.dropout.whole_batch(item.b);
    }
  }

  using Tile = typename Either<F.part != 0, PartKeyTile, KeyTile>::type;
  template <class Of> static __device__ __forceinline__ auto rows_of(const Of &x, const KeyTile &t) { return x.rows(t.begin, t.end); }
  static __device__ __forceinline__ tile::Matrix<const T> rows_of(const Keys<T> &x, const PartKeyTile &t) {
    return x.rows(t.begin + t.shift, t.end + t.shift);
  }

  __device__ __forceinline__ void load_q() {
    const T *q = in.q.at<const T>(item.b, item.h, sequence.q0 + item.q, 0);
    tile::load<C.tile_q, kD, kThreads, kAligned>(
        q_shared, tile::Matrix<const T>{q, in.q.stride[2], in.q.stride[3], scores.seqlen_q - item.q, in.head_dim}, threadIdx.x);
  }
  __device__ __forceinline__ void load_k(const Tile &t, int stage) {
    tile::load<C.tile_k, kD, kThreads, kAligned>(k_shared + stage * kKBytes, rows_of(k, t), threadIdx.x);
  }
  __device__ __forceinline__ void load_v(const Tile &t, int stage) {
    tile::load<C.tile_k, kDv, kThreads, kAligned>(v_shared + stage * kVBytes, rows_of(v, t), computed_here(threadIdx.x));
  }

  __device__ __forceinline__ i64 last() const { return min((i64)item.q + C.tile_q, sequence.band.seqlen_q); } // the last query, plus 1
  __device__ __forceinline__ BlockRow blocks() const {
    if constexpr (F.blocks) return in.template block_row<F>(item.b, item.h, (u32)item.q / (u32)in.blocks.row_tokens);
    return {nullptr, 0, 0};
  }
  __device__ __forceinline__ Schedule::Share share() const {
    if constexpr (C.invariant) return item.split < 0 ? Schedule::Share{0, 1} : Schedule::Share{item.split, 1, C.chunk()};
    return {item.split, a.splits};
  }

  // The tiles of keys that some of the queries see.
  __device__ __forceinline__ auto tiles_of_keys() const {
    if constexpr (F.part) {
      extern __shared__ __align__(128) unsigned char shared[];
      static_assert(sizeof(SharedKeys::Memory) <= 640);
      return SharedKeys(*reinterpret_cast<SharedKeys::Memory *>(shared + C.forward_walk_at()), sequence.band, item.q, last(), C.tile_k,
                        F.part == kAnywhere ? 1 : 16, blocks(), held_keys(in, item.b));
    } else {
      return Schedule(sequence.band, item.q, last(), C.tile_k, C.invariant ? C.tile_k : 16, blocks(), share());
    }
  }

  // Returns whether V had a number that is not finite.
  __device__ __forceinline__ bool compute() {
    Accumulator O[kM][Warps::columns()] = {};
    RowSoftmax<2 * kM> softmax;
    auto tiles = tiles_of_keys();
    Tile tile, next;
    bool more = tiles.next(next), nonfinite = false;
    int stage = 0;

    load_q();
    if (more) load_k(next, 0);
    if (more && C.stages > 1) load_v(next, 0);
    cp_async_commit();
    while (more) {
      tile = next;
      more = tiles.next(next);
      arrive(); // K of this tile (with two stages also V) has arrived, and all threads have read the previous tile
      if constexpr (C.stages == 1) {
        load_v(tile, 0);
      } else if (more) {
        load_k(next, stage ^ 1);
        load_v(next, stage ^ 1);
      }
      cp_async_commit();

      Accumulator S[kM][kN] = {};
      multiply_q_k(S, stage);
      score(S, tile);
      const bool lacking = lacks_some(k, tile);
      if (lacking) hide_lacking(S, k, tile);
      softmax.template follow<C.exact_max, C.invariant>(S, exponent(), O);
      if constexpr (C.stages == 1) arrive(); // V has arrived, and all threads have read K
      if (C.invariant || masked(tile) || lacking) nonfinite |= clear_nonfinite(stage);
      if constexpr (C.stages == 1) {
        if (more) load_k(next, 0);
        cp_async_commit();
      }
      multiply_p_v(O, S, softmax, tile, stage);
      if constexpr (C.stages > 1) stage ^= 1;
    }
    finish(O, softmax);
    return nonfinite;
  }

  static __device__ __forceinline__ void arrive() {
    cp_async_wait<0>();
    __syncthreads();
  }

  __device__ __forceinline__ auto exponent() const { return exponent_of<F.unbounded()>(scores.unit); }

  // S = Q K^T
  __device__ __forceinline__ void multiply_q_k(Accumulator (&S)[kM][kN], int stage) const {
    const int first = Warps::column((int)threadIdx.x) * Warps::inner();
    tile::Blocks<Left, kD> Q(q_shared + warp_row * kD * 2, first);
    tile::Blocks<Right, kD> K(k_shared + stage * kKBytes, first, computed_here(tile::lane_id()));
#pragma unroll
    for (int c = 0; c < Warps::inner(); c += 16) {
      Left q[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) q[m] = Q.load(16 * m, c);
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        Right key = K.load(16 * n, c);
#pragma unroll
        for (int m = 0; m < kM; ++m) tile::multiply_add<T>(S[m][n], q[m], key);
      }
    }
    Warps::exchange(S, q_shared + C.forward_exchange_at(), (int)threadIdx.x);
  }

  // The first of the warp's columns of O.
  static __device__ __forceinline__ int first_column() { return Warps::column((int)threadIdx.x) * 16 * Warps::columns(); }
  static __device__ __forceinline__ bool masked(const KeyTile &tile) { return F.hides() || hides_by_position<C.tile_k>(tile); }

  // Replaces q.k by scores.
  __device__ __forceinline__ void score(Accumulator (&S)[kM][kN], const KeyTile &tile) const {
    score_tile(S, scores, tile, [&](int row) {
      const i32 first = item.q + Warps::group(computed_here(threadIdx.x)) * kRows; // computed here, because registers are scarce
      return scores.row(first + 16 * (row / 2) + tile::lane_row(row % 2), item.h);
    });
  }

  // P = exp2(S * unit - M); O += P V
  __device__ __forceinline__ void multiply_p_v(Accumulator (&O)[kM][Warps::columns()], Accumulator (&S)[kM][kN],
                                               RowSoftmax<2 * kM> &softmax, const KeyTile &tile, int stage) const {
    tile::Blocks<Right, kDv, true> V(v_shared + stage * kVBytes, first_column());
#pragma unroll
    for (int pair = 0; pair < kN; pair += 2) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        softmax.exponentiate(S[m][pair], 2 * m, exponent());
        softmax.exponentiate(S[m][pair + 1], 2 * m, exponent());
        if constexpr (F.dropout) dropout.apply(S[m][pair], S[m][pair + 1], item.q + warp_row + 16 * m, (i32)tile.begin + 16 * pair);
      }
#pragma unroll
      for (int n = pair; n < pair + 2; ++n) {
        Left p[kM];
#pragma unroll
        for (int m = 0; m < kM; ++m) p[m] = tile::rounded<T>(S[m][n]);
#pragma unroll
        for (int c = 0; c < Warps::columns(); ++c) {
          Right value = V.load(16 * n, 16 * c);
#pragma unroll
          for (int m = 0; m < kM; ++m) tile::multiply_add<T>(O[m][c], p[m], value);
        }
      }
    }
  }

  // Clears numbers of V that are not finite. Tells all threads whether there were any.
  __device__ __forceinline__ bool clear_nonfinite(int stage) const {
    return __any_sync(0xFFFFFFFFu, __syncthreads_or(strobe::clear_nonfinite<T, C.tile_k, kDv, kThreads>(v_shared + stage * kVBytes,
                                                                                                        computed_here(threadIdx.x))));
  }
  struct Results {
    const Forward &f;
    i32 count;
    __device__ __forceinline__ i32 query(i32 r) const { return f.item.q + r; }
    __device__ __forceinline__ i32 head(i32) const { return f.item.h; }
    __device__ __forceinline__ void add(i32 r, i32 c, float x) const {
      add_to_out<Out>(f.a, f.item.split, f.item.b, f.item.h, f.sequence.q0 + query(r), c, x);
    }
  };
  __device__ __forceinline__ void add_nonfinite() const {
    Results results{*this, min((i32)C.tile_q, scores.seqlen_q - item.q)};
    if constexpr (F.part) return add_nonfinite_of_ranges(results);
    Range keys = Schedule::keys_of_share(sequence.band.keys_any(item.q, last()), C.tile_k, 16, share());
    __syncthreads();
    strobe::add_nonfinite<kThreads>(scores, dropout.dropout, v, keys, blocks(), results, (int)threadIdx.x);
  }
  __device__ __forceinline__ void add_nonfinite_of_ranges(const Results &results) const {
    const HeldRanges ranges = held_keys(in, item.b);
    const Range any = sequence.band.keys_any(item.q, last());
    __syncthreads();
    for (i32 n = ranges.first_behind(any.begin); n < ranges.count; ++n) {
      const HeldRange r = ranges.at(n);
      const Keys<T> own(v.x, v.row(r.shift()), v.columns);
      strobe::add_nonfinite<kThreads>(scores, dropout.dropout, own, intersect(any, {r.start, r.end()}), blocks(), results,
                                      (int)threadIdx.x);
    }
  }

  // Stores O / l and LSE: as the result, as that of a split, or, with LSE as two numbers, as that of a partial part. Invariant: a chunk's
  // result is merged with those of the earlier chunks, and waits in merged_out and merged_lse until the last chunk is done.
  __device__ __forceinline__ void finish(Accumulator (&O)[kM][Warps::columns()], RowSoftmax<2 * kM> &softmax) {
    const bool complete = a.splits == 1 && ends;
    float before[2 * kM]; // LSE of the earlier chunks
    if constexpr (C.invariant) load_merged_lse(before);
    const float sink = !C.invariant && complete && in.sinks ? exponent().from_natural(*in.sinks.at<const float>(0, item.h, 0, 0))
                                                            : minus_infinity<float>(); // invariant: the sink is merged like a chunk
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const int m = i / 2, r = i % 2;
      const float l = tile::row_sum(softmax.l[i]);
      const RowEnd end = row_end(softmax.M[i], l, sink, F.unbounded());
      const float factor = end.factor * dropout.dropout.factor();
      if constexpr (C.invariant) {
        merge_chunk(O[m], i, before[i], end.lse, factor, complete);
        continue;
      }
      each_column(O[m], r, [&](i32, float &o) { o *= factor; });
      const i32 q = query(i);
      if (q >= scores.seqlen_q) continue;
      if constexpr (F.partial)
        store_partial(O[m], r, q, softmax.M[i], l);
      else if (!complete)
        store_split(O[m], r, q, end.lse);
      else if (stores_lse())
        store_lse(q, end.lse);
    }
    if (complete && !F.partial) store_o(O);
  }
  // The query of the lane's row i.
  __device__ __forceinline__ i32 query(int i) const { return item.q + warp_row + 16 * (i / 2) + tile::lane_row(i % 2); }
  // Which of the lanes and warps that share a row stores the row's LSE.
  static __device__ __forceinline__ bool stores_lse() { return first_column() + tile::lane_column(0, 0) == 0; }
  __device__ __forceinline__ void store_lse(i32 q, float lse) const {
    if (a.lse) *a.lse.template at<float>(item.b, item.h, sequence.q0 + q, 0) = lse;
  }
  // Calls each(column, element) for the elements that the lane holds of its row r in a block of rows.
  template <class Row, class Each> static __device__ __forceinline__ void each_column(Row &O, int r, const Each &each) {
#pragma unroll
    for (int k = 0; k < 4 * Warps::columns(); ++k)
      each(first_column() + 16 * (k / 4) + tile::lane_column(k / 2 % 2, k % 2), O[k / 4].x[k / 2 % 2][2 * r + k % 2]);
  }
  // Where a query's row lies among the results of splits, or of the chunks so far.
  __device__ __forceinline__ i64 partial_row(i32 q) const {
    return (C.invariant && a.splits == 1 ? 0 : item.split) * in.rows() + in.row_index(item.b, item.h, sequence.q0 + q);
  }
  __device__ __forceinline__ void store_split(const Accumulator (&O)[Warps::columns()], int r, i32 q, float lse) const {
    const i64 row = partial_row(q);
    if (stores_lse()) a.partial_lse[row] = lse;
    float *const out = a.partial_out + row * in.head_dim_v;
    each_column(O, r, [&](i32 c, float o) {
      if (c < in.head_dim_v) out[c] = o;
    });
  }
  __device__ __forceinline__ void store_partial(const Accumulator (&O)[Warps::columns()], int r, i32 q, float M, float l) const {
    const i64 row = sequence.q0 + q;
    each_column(O, r, [&](i32 c, float o) {
      if (c < in.head_dim_v) *a.out.template at<float>(item.b, item.h, row, c) = o;
    });
    if (!a.lse || !stores_lse()) return;
    const float natural = F.unbounded() ? 1.0f : kLn2<float>, lse = l == 0 ? minus_infinity<float>() : row_lse(M, natural, l);
    float *const to = a.lse.template at<float>(item.b, item.h, row, 0);
    to[0] = lse, to[in.part->lse_low] = fabsf(lse) < -minus_infinity<float>() ? rest_of_lse(M, natural, l, lse) : 0.0f;
  }
  // Invariant: true if there is no earlier chunk to merge with.
  __device__ __forceinline__ bool alone() const { return a.splits != 1 || begins; }
  __device__ __forceinline__ i64 merged_row(int i) const { return partial_row(min(query(i), scores.seqlen_q - 1)); }
  // The LSE of the lane's rows over the earlier chunks. Their merged result lies in memory.
  __device__ __forceinline__ void load_merged_lse(float (&lse)[2 * kM]) const {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) lse[i] = alone() ? minus_infinity<float>() : a.merged_lse[merged_row(i)];
    if constexpr (C.column_warps > 1)
      __syncthreads();
    else
      __syncwarp(); // every lane has read the LSE
  }
  // Merges row i of this chunk, O times `factor`, with the earlier chunks. complete: no chunk follows, and the sink is added. Otherwise the
  // merged row is stored as the result of a split, or of the chunks so far. Columns are stored one at a time, because no registers are left
  // to read several.
  __device__ __forceinline__ void merge_chunk(Accumulator (&O)[Warps::columns()], int i, float before, float lse, float factor,
                                              bool complete) const {
    const i32 q = query(i);
    const bool there = q < scores.seqlen_q, alone = this->alone();
    const i64 row = merged_row(i);
    const Merge merge(before, lse);
    const float sink = in.sinks ? *in.sinks.at<const float>(0, item.h, 0, 0) : minus_infinity<float>();
    const Merge with_sink(merge.lse, sink);
    float *const merged = (a.splits > 1 ? a.partial_out : a.merged_out) + row * in.head_dim_v;
    each_column(O, i % 2, [&](i32 c, float &o) {
      const bool exists = there && c < in.head_dim_v;
      o = merge(alone || !exists ? 0.0f : merged[c], __fmul_rn(o, factor));
      if (complete)
        o = with_sink(o, 0.0f);
      else if (exists)
        merged[c] = o;
    });
    if (!there || !stores_lse()) return;
    if (!complete)
      (a.splits > 1 ? a.partial_lse : a.merged_lse)[row] = merge.lse;
    else
      store_lse(q, with_sink.lse);
  }
  __device__ __forceinline__ void store_o(const Accumulator (&O)[kM][Warps::columns()]) {
    cp_async_wait<0>();
    __syncthreads(); // O replaces Q
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int c = 0; c < Warps::columns(); ++c)
        tile::store<kDv>(q_shared, warp_row + 16 * m, first_column() + 16 * c, tile::rounded<T>(O[m][c]));
    }
    __syncthreads();
    T *out = a.out.template at<T>(item.b, item.h, sequence.q0 + item.q, 0);
    tile::store<C.tile_q, kDv, kThreads, kAligned>(
        tile::Matrix<T>{out, a.out.stride[2], a.out.stride[3], scores.seqlen_q - item.q, in.head_dim_v}, q_shared, threadIdx.x);
  }
};

} // namespace strobe::mma
