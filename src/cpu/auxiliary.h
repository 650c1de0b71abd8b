// The largest score of each head, and the sums of P's columns. A separate pass over S computes them after the forward, whose LSE it reads.
// An item is a run of query tiles of one head. Each item has its own sums, which are added in order, so no bit depends on the threads.
#pragma once
#include "forward.h"
#include "probability.h"

namespace strobe::inline STROBE_ISA {

struct AuxiliaryItems {
  int64_t tiles_each, runs, count, keys; // query tiles per item; items per head; all items; elements in a row of sums
  AuxiliaryItems(const Problem &p, const TileSizes &tile) {
    constexpr int64_t kEnough = 16; // this many items keep many threads busy
    const int64_t tiles = max((i64)query_tiles(p, tile.q), (i64)1), heads = p.batch * p.heads;
    tiles_each = div_up(tiles, min((i64)tiles, max(div_up(kEnough, max((i64)heads, (i64)1)), (i64)1)));
    runs = div_up(tiles, tiles_each);
    count = heads * runs;
    keys = p.column_sums ? round_to(p.longest_k(), 16) : 0;
  }
};

template <class Math> struct AuxiliaryScratch {
  using T = typename Math::Real;
  typename KeySource<Math>::Scratch k;
  ScoreScratch<T> score;
  typename Math::Element *q;
  T *s, *lse, *excess;
  T *sum, *sum_lost; // the sum of a row's P, and its rounding error
  T *run, *lost;     // run: sums of a query tile; lost: the rounding errors of an item's sums

  AuxiliaryScratch(Arena &arena, const Problem &p, const TileSizes &tile, const KeyPair<Math> &keys)
      : k(keys.k.take(arena)), score(arena, p, Math::kChunk, tile.width, max(p.head_dim, Math::kChunk)) {
    const AuxiliaryItems items(p, tile);
    q = arena.take<typename Math::Element>(pieces_of(tile) * Math::lanes_size(tile.width, p.head_dim));
    s = arena.take<T>(Math::kChunk * tile.width);
    lse = arena.take<T>(tile.q);
    excess = arena.take<T>(tile.q);
    sum = arena.take<T>(tile.q);
    sum_lost = arena.take<T>(tile.q);
    run = arena.take<T>(items.keys);
    lost = arena.take<T>(items.keys);
  }
};

// Adds a chunk of scores to the results: `most` is the largest score per lane, `nan` receives a NaN, and `sums` receive P of each key,
// summed over lanes.
template <class T>
__attribute__((noinline)) void add_chunk(const Head<T> &head, const TileSpan &t, const T *s, const T *lse, const T *excess, Vec<T> &most,
                                         Vec<T> &nan, T *sums) {
  using V = Vec<T>;
  constexpr int L = V::kLanes;
  const V hidden(-kInfinity<T>), nobody(kInfinity<T>);
  for (int64_t j = 0; j < t.keys; ++j) {
    V sum(T(0));
    for (int64_t c = 0; c < t.width; c += L) {
      const Probability<Fma<T>> probability(head, lse + c, excess + c);
      const V x = select(probability.lse == nobody, hidden, V::load(s + j * t.width + c));
      most = max(most, x);
      nan = select(x == x, nan, x);
      if (sums) sum += select(x == hidden, V(T(0)), probability(x));
    }
    if (sums) sums[j] += sum_of_lanes(sum);
  }
}

// Adds P of a chunk of scores to the sums of the chunk's rows.
template <class T>
__attribute__((noinline)) void add_rows(const Head<T> &head, const TileSpan &t, int64_t lane, const T *s, const T *lse, const T *excess,
                                        T *row_sum, T *row_lost) {
  using V = Vec<T>;
  for (int64_t c = lane; c < lane + t.width; c += V::kLanes) {
    const Probability<Fma<T>> probability(head, lse + c, excess + c);
    for (int64_t j = 0; j < t.keys;) {
      V sum(T(0));
      for (const int64_t end = min((i64)(j + kRun), (i64)t.keys); j < end; ++j) sum += probability(V::load(s + j * t.width + c - lane));
      add_exactly(sum, row_sum + c, row_lost + c);
    }
  }
}

// Adds one query tile; the sums of its columns go to scratch.run.
template <class Math>
void auxiliary_tile(const Head<typename Math::Real> &head, const TileSizes &tile, const KeyPair<Math> &source,
                    AuxiliaryScratch<Math> &scratch, Vec<typename Math::Real> &most, Vec<typename Math::Real> &nan) {
  using T = typename Math::Real;
  const Problem &p = *head.p;
  const int64_t i0 = head.queries.i0, i1 = head.queries.i1, rows = round_to(i1 - i0, 16);
  typename Math::Right q[kMaxPieces];
  for (int64_t lane = 0, n = 0; lane < rows; lane += tile.width, ++n) {
    const int64_t width = min((i64)tile.width, (i64)(rows - lane)), count = min((i64)width, (i64)(i1 - i0 - lane));
    q[n] = Math::load_lanes(p.q, head.b, head.h, head.q0 + i0 + lane, count, p.head_dim, head.sign, width,
                            scratch.q + n * Math::lanes_size(tile.width, p.head_dim), scratch.score.buffer);
  }
  bool any_large = false;
  for (int64_t i = 0; i < rows; ++i) { // +inf marks a lane past the end, or a row that sees no key
    const T lse = i0 + i < i1 ? (p.column_sums ? *p.lse.at<T>(head.b, head.h, head.q0 + i0 + i, 0) : T(0)) : kInfinity<T>;
    const RowLse<T> row = Probability<Fma<T>>::row(head, lse == -kInfinity<T> ? kInfinity<T> : lse);
    scratch.lse[i] = row.lse, scratch.excess[i] = row.excess;
    any_large |= is_large(p, row.lse);
  }
  auto each_chunk = [&](auto &&work) {
    KeyTiles<T> tiles(head, source.mask, tile, i0, i1);
    for (KeysOfRange keys; tiles.next(keys);) {
      const auto k = source.k.tile(source.shared_k, head.b, head.kv, keys, scratch.k);
      for (int64_t lane = 0, n = 0; lane < rows; lane += tile.width, ++n) {
        const int64_t width = min((i64)tile.width, (i64)(rows - lane));
        Piece<T> piece;
        if (!make_piece(head, source.mask, i0 + lane, min((i64)width, (i64)(i1 - i0 - lane)), width, keys, piece)) continue;
        TileSpan chunk{};
        for (int64_t done = 0; done < piece.span.keys; done += chunk.keys) {
          chunk = piece.span.chunk(done, Math::kChunk);
          Math::multiply(chunk.keys, width, p.head_dim, Math::rows_from(k.keys.rows, chunk.j0 - k.origin), q[n], scratch.s, width, false);
          apply_options(head, piece, chunk, scratch.score, scratch.s, (T *)nullptr);
          work(chunk, lane);
        }
      }
    }
  };
  if (any_large) { // as in the backward, P is divided by its row's sum if LSE's rounding is too large
    fill(scratch.sum, rows, T(0)), fill(scratch.sum_lost, rows, T(0));
    each_chunk([&](const TileSpan &chunk, int64_t lane) {
      add_rows(head, chunk, lane, scratch.s, scratch.lse, scratch.excess, scratch.sum, scratch.sum_lost);
    });
    const double sink = p.sinks ? load_as<double>(p.sinks.dtype, p.sinks.data, p.sinks.index(0, head.h, 0, 0)) : -kInfinity<double>;
    for (int64_t i = 0; i < rows; ++i) {
      if (!is_large(p, scratch.lse[i])) continue;
      const double both = double(scratch.lse[i]) + double(scratch.excess[i]);
      const double sum = double(scratch.sum[i]) + double(scratch.sum_lost[i]) + __builtin_exp(sink - both);
      if (sum > 0 && __builtin_isfinite(sum)) scratch.excess[i] = T(double(scratch.excess[i]) + __builtin_log(sum));
    }
  }
  each_chunk([&](const TileSpan &chunk, int64_t lane) {
    add_chunk(head, chunk, scratch.s, scratch.lse + lane, scratch.excess + lane, most, nan,
              p.column_sums ? scratch.run + chunk.j0 : nullptr);
  });
}

template <class Math> KeyPair<Math> auxiliary_keys(const Problem &p, const TileSizes &tile) {
  return {{p, rows_of_k(p), p.head_dim, true, false, tile}, {p, rows_of_k(p), p.head_dim, false, false, tile}, {p, tile}};
}
template <class Math> int64_t auxiliary_scratch(const Problem &p, const TileSizes &tile) {
  Arena arena(nullptr);
  const KeyPair<Math> keys = auxiliary_keys<Math>(p, tile);
  AuxiliaryScratch<Math> scratch(arena, p, tile, keys);
  keys.v.take(arena); // prepare() needs scratch for K and for V
  return round_to(arena.used(), 256);
}

template <class Math> int64_t auxiliary_workspace(const Problem &p, const TileSizes &tile, int64_t threads) {
  const AuxiliaryItems items(p, tile);
  Arena arena(nullptr);
  arena.take<char>(threads * auxiliary_scratch<Math>(p, tile));
  auxiliary_keys<Math>(p, tile).take(arena, p);
  arena.take<typename Math::Real>(items.count * (items.keys + 1));
  return arena.used();
}

template <class Math> void auxiliary(const Problem &p, const Execution &execution, const TileSizes &tile, void *workspace) {
  using T = typename Math::Real;
  using V = Vec<T>;
  const AuxiliaryItems items(p, tile);
  const int64_t each = auxiliary_scratch<Math>(p, tile);
  Arena arena(workspace);
  char *scratches = arena.take<char>(execution.threads * each);
  KeyPair<Math> source = auxiliary_keys<Math>(p, tile);
  source.take(arena, p);
  T *const sums = arena.take<T>(items.count * (items.keys + 1)), *const largest = sums + items.count * items.keys;
  source.prepare(p, execution, scratches, each);
  int64_t next = 0;
  execution.run(int32_t(min((i64)execution.threads, (i64)items.count)), [&](int32_t thread) {
    Arena own(scratches + thread * each);
    AuxiliaryScratch<Math> scratch(own, p, tile, source);
    [[maybe_unused]] typename Math::Session session;
    for (int64_t item; (item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items.count;) {
      const int64_t b = item / items.runs / p.heads, h = item / items.runs % p.heads;
      T *const total = sums + item * items.keys;
      V most(-kInfinity<T>), nan(T(0));
      for (T *x : {total, scratch.run, scratch.lost}) fill(x, items.keys, T(0));
      for (int64_t n = 0; n < items.tiles_each; ++n) {
        const QuerySpan queries = query_tile(p, b, item % items.runs * items.tiles_each + n, tile.q);
        if (queries.empty()) break;
        auxiliary_tile<Math>({p, b, h, queries}, tile, source, scratch, most, nan);
        move_exactly(scratch.run, total, scratch.lost, items.keys);
      }
      for (int64_t j = 0; j < items.keys; ++j) total[j] += scratch.lost[j];
      T x = most.v[0];
      for (int lane = 1; lane < V::kLanes; ++lane) x = x < most.v[lane] ? most.v[lane] : x;
      for (int lane = 0; lane < V::kLanes; ++lane) x = nan.v[lane] == nan.v[lane] ? x : nan.v[lane];
      largest[item] = x * Head<T>(p, b, h, {}).measure();
    }
  });
  const int64_t heads = p.batch * p.heads;
  const int32_t threads = int32_t(min((i64)execution.threads, (i64)heads));
  execution.run(threads, [&](int32_t thread) {
    for (int64_t n = thread; n < heads; n += threads) {
      const int64_t b = n / p.heads, h = n % p.heads, first = n * items.runs;
      const auto keys = p.rows_k(b);
      T most = largest[first];
      for (int64_t run = 1; run < items.runs; ++run) {
        const T x = largest[first + run];
        if (most < x || x != x) most = x; // a NaN stays, because nothing is larger
      }
      if (p.max_logit) *p.max_logit.at<T>(b, h, 0, 0) = most;
      for (int64_t j = 0; p.column_sums && j < keys.length; ++j) {
        double sum = 0;
        for (int64_t run = 0; run < items.runs; ++run) sum += double(sums[(first + run) * items.keys + j]);
        *p.column_sums.at<T>(b, h, keys.begin + j, 0) = T(sum);
      }
    }
  });
}

} // namespace strobe::inline STROBE_ISA
