// dbias: dS summed over the axes over which bias is broadcast, each sum in a fixed order. It is a separate pass (two products per tile), so
// that the order does not depend on how the other gradients are divided.
#pragma once
#include "backward_captured.h"

namespace strobe::inline STROBE_ISA {

// If bias has a row for each query, an item is a query tile of one slice of bias. It walks over the heads that share the slice, and its sum
// has keys x queries elements. If one row serves all queries, an item is one head, and its sum has one element per key; the sums of the
// heads are then added in order.
struct BiasItems {
  bool rows;                                           // bias has a row for each query
  int64_t batch, heads;                                // slices of bias
  int64_t tiles;                                       // query tiles
  int64_t count, sum_size;                             // items; elements of an item's sum
  int64_t terms, terms_once;                           // terms of an item, each a query tile of one head; terms of one running sum
  BiasItems(const Problem &p, const TileSizes &tile) { // if bias has rows, tiles are counted in these rows, whatever their positions
    rows = p.dbias.stride[2] != 0;
    batch = p.dbias.stride[0] != 0 ? p.batch : 1;
    heads = p.dbias.stride[1] != 0 ? p.heads : 1;
    tiles = rows ? div_up(p.seqlen_q, tile.q) : query_tiles(p, tile.q);
    count = rows ? batch * heads * tiles : p.batch * p.heads;
    sum_size = rows ? round_to(p.size_k(), 16) * tile.q : round_to(p.size_k(), 16);
    terms = rows ? (batch > 1 ? 1 : p.batch) * (heads > 1 ? 1 : p.heads) : tiles;
    terms_once = rows ? 16 : 1; // with rows, a term of an element is one dS; otherwise it is the sum of a whole tile
  }
  // Elements of the sums. own_size(): for one thread. size(): for all threads and, if each item's sum is kept, for all items.
  int64_t own_size() const { return (terms > terms_once ? 3 : 1) * sum_size; }
  int64_t size(int64_t threads) const { return min((i64)threads, (i64)count) * own_size() + (rows ? 0 : count * sum_size); }
};

// The sum of an item. After every terms_once terms, the running sum is added exactly to the total and starts again.
template <class T> struct BiasSum {
  const BiasItems &items;
  T *run, *total, *lost; // total and lost are used if there are several runs
  int64_t terms = 0;
  BiasSum(const BiasItems &items, T *own) : items(items), run(own), total(own + items.sum_size), lost(own + 2 * items.sum_size) {}
  void clear() {
    fill(run, items.own_size(), T(0));
    terms = 0;
  }
  void term_done() {
    if (++terms % items.terms_once == 0) carry();
  }
  const T *result() {
    carry();
    for (int64_t i = 0; i < items.sum_size && items.terms > items.terms_once; ++i) run[i] = total[i] + lost[i];
    return run;
  }

private:
  void carry() {
    if (items.terms > items.terms_once) move_exactly(run, total, lost, items.sum_size);
  }
};

// Adds dS of key j of a piece, for the lanes from c on, to a sum. first: the sum's row for the piece's first query, if the sum has a row
// per query.
template <class T>
STROBE_INLINE void add_to_bias(const TileSpan &t, const TileSizes &tile, bool rows, int64_t first, int64_t j, int64_t c, Vec<T> grad,
                               T *sum) {
  using V = Vec<T>;
  if (rows) {
    T *to = sum + (t.j0 + j) * tile.q + first + c;
    if (first + c + V::kLanes <= tile.q) return (V::load(to) + grad).store(to);
    for (int64_t lane = 0; lane < min((i64)V::kLanes, (i64)(t.lanes - c)); ++lane) to[lane] += grad.v[lane];
  } else {
    sum[t.j0 + j] += sum_of_lanes(grad);
  }
}

// Adds dS of one query tile of one head to the sum. first: the sum's row for the tile's first query, if the sum has a row per query.
template <class Math>
void backward_bias_tile(const Head<typename Math::Real> &head, const TileSizes &tile, bool rows, int64_t first, const KeyPair<Math> &source,
                        BackwardScratch<Math> &scratch, typename Math::Real *sum) {
  using T = typename Math::Real;
  using V = Vec<T>;
  const int64_t i0 = head.queries.i0;
  QueryTile<Math> queries;
  load_queries(head, source.mask, tile, false, scratch, queries);
  if (queries.sums_first) sum_rows(head, tile, queries, source, scratch);
  const bool infinite = meets_nonfinite(head, queries, scratch);
  KeyTiles<T> tiles(head, source.mask, tile, i0, queries.i1);
  for (KeysOfRange keys; tiles.next(keys);) {
    auto k = source.k.tile(source.shared_k, head.b, head.kv, keys, scratch.k);
    auto v = source.v.tile(source.shared_v, head.b, head.kv, keys, scratch.v);
    for (int64_t n = 0; n < queries.pieces; ++n) {
      Piece<T> piece;
      if (!make_piece(head, source.mask, i0 + n * tile.width, queries.piece_lanes(n), queries.piece_width(n), keys, piece)) continue;
      piece.infinite = infinite;
      const TileSpan &t = piece.span;
      auto add = [&](int64_t j, int64_t c, V grad)
                     __attribute__((always_inline)) { add_to_bias(t, tile, rows, first + n * tile.width, j, c, grad, sum); };
      recompute<false>(head, queries, n, piece, Math::rows_from(k.keys.rows, t.j0 - k.origin),
                       Math::rows_from(v.keys.rows, t.j0 - v.origin), scratch,
                       [&](int64_t done, int64_t j, int64_t c, V, V, V g0, V g1, bool both) __attribute__((always_inline)) {
                         add(done + j, c, g0);
                         if (both) add(done + j + 1, c, g1);
                       });
    }
  }
}

// Stores one row of dbias. sum[j * stride] has one number per column of bias; a bias with one column takes one number.
template <class T> STROBE_INLINE void store_bias_row(const Problem &p, int64_t b, int64_t h, int64_t i, const T *sum, int64_t stride) {
  with_type(p.dbias.dtype, [&](auto *type) {
    using To = std::remove_pointer_t<decltype(type)>;
    double all = 0;
    for (int64_t j = 0; j < p.size_k(); ++j) {
      if (p.dbias.stride[3] != 0)
        narrow(Narrow<To>(sum[j * stride]), *p.dbias.at<To>(b, h, i, j));
      else
        all += double(sum[j * stride]);
    }
    if (p.dbias.stride[3] == 0) narrow(Narrow<To>(T(all)), *p.dbias.at<To>(b, h, i, 0));
  });
}

template <class Pass>
void backward_bias(const Problem &p, const Execution &execution, const TileSizes &tile, const typename Pass::Source &source,
                   char *scratches, int64_t each, typename Pass::Math::Real *sums) {
  using Math = typename Pass::Math;
  using T = typename Math::Real;
  const BiasItems items(p, tile);
  if (p.batch == 0 || p.seqlen_q == 0) { // nothing to sum
    const T zero = 0;
    for (int64_t slice = 0; slice < items.batch * items.heads; ++slice)
      for (int64_t i = 0; i < (items.rows ? p.seqlen_q : 1); ++i) store_bias_row(p, slice / items.heads, slice % items.heads, i, &zero, 0);
    return;
  }
  auto each_of = [&](int64_t slice_b, int64_t slice_h, auto &&f) { // the heads that share a slice
    for (int64_t b = items.batch > 1 ? slice_b : 0; b < (items.batch > 1 ? slice_b + 1 : p.batch); ++b)
      for (int64_t h = items.heads > 1 ? slice_h : 0; h < (items.heads > 1 ? slice_h + 1 : p.heads); ++h) f(b, h);
  };
  const int64_t threads = min((i64)execution.threads, (i64)items.count);
  T *const kept = sums + threads * items.own_size();
  int64_t next = 0;
  execution.run(int32_t(threads), [&](int32_t thread) {
    Arena arena(scratches + thread * each);
    typename Pass::Scratch scratch(arena, p, tile, source);
    [[maybe_unused]] typename Math::Session session;
    BiasSum<T> sum(items, sums + thread * items.own_size());
    auto add_tile = [&](int64_t b, int64_t h, const QuerySpan &queries, int64_t first) {
      if (!queries.empty()) Pass::bias({p, b, h, queries}, tile, items.rows, first, source, scratch, sum.run);
    };
    // Adds the rows [r0, r1) of the sequence, one range and one tile at a time.
    auto add_rows = [&](int64_t b, int64_t h, int64_t r0, int64_t r1) {
      for (int64_t n = 0; n < ranges_of_queries(p); ++n) {
        const RowRange range = p.range_q(b, n);
        const int64_t shift = range.start - range.local, end = min(r1 + shift, range.end());
        for (int64_t i0 = max(r0 + shift, range.start), i1; i0 < end; i0 = i1) {
          i1 = min((i0 / tile.q + 1) * tile.q, end);
          add_tile(b, h, {range, 0, i0, i1, bool(p.part)}, i0 - shift - r0);
        }
      }
      sum.term_done();
    };
    for (int64_t item; (item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items.count;) {
      sum.clear();
      if (!items.rows) {
        for (int64_t n = 0; n < items.tiles; ++n) {
          add_tile(item / p.heads, item % p.heads, query_tile(p, item / p.heads, n, tile.q), 0);
          sum.term_done();
        }
        std::memcpy(kept + item * items.sum_size, sum.result(), sizeof(T) * size_t(items.sum_size));
        continue;
      }
      const int64_t i0 = item % items.tiles * tile.q, slice_b = item / items.tiles / items.heads,
                    slice_h = item / items.tiles % items.heads;
      each_of(slice_b, slice_h, [&](int64_t b, int64_t h) { add_rows(b, h, i0, i0 + tile.q); });
      const T *rows = sum.result();
      for (int64_t i = i0; i < min((i64)(i0 + tile.q), (i64)p.seqlen_q); ++i) store_bias_row(p, slice_b, slice_h, i, rows + i - i0, tile.q);
    }
  });
  if (items.rows) return;
  for (int64_t slice = 0; slice < items.batch * items.heads; ++slice) {
    const int64_t slice_b = slice / items.heads, slice_h = slice % items.heads;
    T *const total = kept + (slice_b * p.heads + slice_h) * items.sum_size; // the sum of the slice's first head
    for (int64_t j = 0; j < items.sum_size; j += 16) {
      double sum[16] = {};
      each_of(slice_b, slice_h, [&](int64_t b, int64_t h) {
        for (int64_t n = 0; n < 16; ++n) sum[n] += double(kept[(b * p.heads + h) * items.sum_size + j + n]);
      });
      for (int64_t n = 0; n < 16; ++n) total[j + n] = T(sum[n]);
    }
    store_bias_row(p, slice_b, slice_h, 0, total, 1);
  }
}

// dsinks_h = sum over b, i of exp(sink_h - LSE_i) (dLSE_i - D_i)
template <class T> void backward_sinks(const Problem &p, int64_t h, T *buffer) {
  double sum = 0, sink = load_as<double>(p.sinks.dtype, p.sinks.data, p.sinks.index(0, h, 0, 0));
  for (int64_t b = 0; b < p.batch; ++b) {
    const auto rows = p.rows_q(b);
    const Head<T> head(p, b, h, {});
    for (int64_t i = rows.begin; i < rows.begin + rows.length; ++i) {
      double lse = double(*p.lse.at<T>(b, h, i, 0)), dlse = p.dlse ? double(*p.dlse.at<T>(b, h, i, 0)) : 0;
      if (lse > -__builtin_inf()) sum += __builtin_exp(sink - lse) * (dlse - row_delta(head, i, buffer));
    }
  }
  *p.dsinks.at<T>(0, h, 0, 0) = T(sum);
}

// The passes of a backward: the gradients themselves.
template <class M> struct GradientPass {
  using Math = M;
  using T = typename Math::Real;
  using Source = KeyPair<Math>;
  using Scratch = BackwardScratch<Math>;
  static Source sources(const Problem &p, const TileSizes &tile) {
    return {{p, rows_of_k(p), p.head_dim, true, bool(p.dq), tile}, {p, rows_of_v(p), p.head_dim_v, true, false, tile}, {p, tile}};
  }
  static void tile(const Head<T> &head, const TileSizes &tile, const Source &source, Scratch &scratch, const KeyGradients<T> &sums) {
    backward_tile<Math>(head, tile, source, scratch, sums);
  }
  static void bias(const Head<T> &head, const TileSizes &tile, bool rows, int64_t first, const Source &source, Scratch &scratch, T *sum) {
    backward_bias_tile<Math>(head, tile, rows, first, source, scratch, sum);
  }
  static void captured(const Head<T> &head, const TileSizes &tile, const Source &source, const CapturedItems &items, Scratch &scratch,
                       double *sums) {
    backward_captured_tile<Math>(head, tile, source, items, scratch, sums);
  }
  static void sinks(const Problem &p, int64_t h, T *buffer) { backward_sinks<T>(p, h, buffer); }
};

// The number of elements in the sums of backward_keys, backward_bias and backward_captured, which run one after the other.
template <class Math> int64_t backward_sums(const Problem &p, const TileSizes &tile, int64_t threads) {
  int64_t most = p.dq || p.dk || p.dv ? BackwardItems(p, tile).sums(threads) *
                                            KeyGradients<typename Math::Real>::size(p, BackwardItems(p, tile).tiles_each())
                                      : 0;
  if (p.dbias) {
    BiasItems items(p, tile);
    most = max((i64)most, (i64)items.size(threads));
  }
  if (p.gradient_program) most = max((i64)most, (i64)div_up(CapturedItems(p, tile).bytes(), int64_t(sizeof(typename Math::Real))));
  return most;
}

template <class Pass> int64_t backward_workspace(const Problem &p, const TileSizes &tile, int64_t threads) {
  using Math = typename Pass::Math;
  Arena arena(nullptr);
  arena.take<char>(threads * scratch_bytes<Pass>(p, tile));
  Pass::sources(p, tile).take(arena, p);
  arena.take<typename Math::Real>(backward_sums<Math>(p, tile, threads));
  return arena.used();
}

template <class Pass> void backward(const Problem &p, const Execution &execution, const TileSizes &tile, void *workspace) {
  using Math = typename Pass::Math;
  using T = typename Math::Real;
  const int64_t each = scratch_bytes<Pass>(p, tile);
  Arena arena(workspace);
  char *scratches = arena.take<char>(execution.threads * each);
  typename Pass::Source source = Pass::sources(p, tile);
  source.take(arena, p);
  T *sums = arena.take<T>(backward_sums<Math>(p, tile, execution.threads));
  source.prepare(p, execution, scratches, each);
  if (p.dq || p.dk || p.dv) backward_keys<Pass>(p, execution, tile, source, scratches, each, sums);
  if (p.dbias) backward_bias<Pass>(p, execution, tile, source, scratches, each, sums);
  if (p.gradient_program) backward_captured<Pass>(p, execution, tile, source, scratches, each, reinterpret_cast<double *>(sums));
  if (!p.dsinks) return;
  const int32_t threads = int32_t(min((i64)execution.threads, (i64)p.heads));
  execution.run(threads, [&](int32_t thread) {
    Arena own(scratches + thread * each);
    typename Pass::Scratch scratch(own, p, tile, source);
    for (int64_t h = thread; h < p.heads; h += threads) Pass::sinks(p, h, scratch.row);
  });
}

} // namespace strobe::inline STROBE_ISA
