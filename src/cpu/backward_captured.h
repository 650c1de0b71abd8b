// The gradients of captured tensors: dS times the derivative of the score by what a LOAD reads, added to the element that it reads. It is a
// pass of its own behind the backward (two products per tile, a third one where a derivative depends on the score).
#pragma once
#include "backward.h"
#include "isa.h"

namespace strobe::inline STROBE_ISA {

// The query tiles of all heads are dealt out to shares, each of which adds its terms in order to sums of its own; the sums of the shares
// are then added in order. Shares follow from the shape alone, so that the bits do not depend on the number of threads.
struct CapturedItems {
  static constexpr int64_t kMostShares = 64, kMostSums = int64_t(1) << 24; // sums of all shares: 128 MiB, or one share
  int64_t first[STROBE_MOST_CAPTURED];                                     // of the tensor's elements among a share's sums
  int64_t elements = 0, tiles, count, shares;                              // tiles: of a head; count: of all heads
  CapturedItems(const Problem &p, const TileSizes &tile) {
    for (int n = 0; n < STROBE_MOST_CAPTURED; ++n) first[n] = elements, elements += p.dcaptured[n] ? p.dcaptured[n].elements() : 0;
    tiles = query_tiles(p, tile.q);
    count = p.batch * p.heads * tiles;
    shares = max(1ll, min(min((i64)kMostShares, (i64)count), (i64)(kMostSums / max((i64)elements, 1ll))));
  }
  int64_t bytes() const { return shares * elements * int64_t(sizeof(double)); }
};

// What the lines of a piece add up to, and where these sums go.
template <class Math> class CapturedPiece {
  using T = typename Math::Real;
  using V = Vec<T>;
  using Int = typename V::Int;
  static constexpr int L = V::kLanes;

public:
  // values: for each query and key of the piece, dS times the derivative by the element that they read; places: room for the numbers of
  // these elements
  CapturedPiece(const Head<T> &head, const TileSpan &t, const score::LoadCode &load, const T *values, T *places, char *scratch,
                double *sums)
      : head_(head), t_(t), load_(load), values_(values), places_(places), scratch_(scratch), sums_(sums) {}

  // x: scale q.k before the scale, if the places depend on it
  void add(const T *x) {
    switch (load_.lines) {
    case score::Lines::rows:
      return add_rows();
    case score::Lines::columns:
      return add_columns();
    case score::Lines::diagonals:
      return add_diagonals();
    default:
      return add_pairs(x);
    }
  }

private:
  // Finds the places of `rows` keys from the piece's first on, `lanes` queries each.
  void find(int64_t rows, int64_t lanes) {
    const score::Scores at = placed(head_, {t_.i0, t_.j0, rows, lanes, lanes});
    head_.code->run(load_.place, at, scratch_, places_, nullptr);
  }
  int64_t place(int64_t n) const { return bit_cast<Int>(places_[n]); }

  void add_rows() { // a row of scores is a lane
    for (int64_t c = 0; c < t_.width; c += L) {
      double *sum = line_ + c;
      fill(sum, L, 0.0);
      for (int64_t j = 0; j < t_.keys;) {
        V run(T(0));
        for (const int64_t end = min((i64)(j + kRun), (i64)t_.keys); j < end; ++j) run += V::load(values_ + j * t_.width + c);
        for (int n = 0; n < L; ++n) sum[n] += double(run.v[n]);
      }
    }
    find(1, t_.width);
    for (int64_t lane = 0; lane < t_.lanes; ++lane) sums_[place(lane)] += line_[lane];
  }

  void add_columns() {
    find(t_.keys, L);
    for (int64_t j = 0; j < t_.keys; ++j) {
      V run(T(0));
      for (int64_t c = 0; c < t_.width; c += L) run += V::load(values_ + j * t_.width + c);
      sums_[place(j * L)] += double(sum_of_lanes(run));
    }
  }

  // The diagonals of the piece: that of lane c and key j is c - j + keys - 1.
  void add_diagonals() {
    const int64_t last = t_.keys - 1;
    fill(line_, t_.width + last, 0.0);
    for (int64_t j = 0; j < t_.keys; ++j)
      for (int64_t c = 0; c < t_.width; ++c) line_[last - j + c] += double(values_[j * t_.width + c]);
    find(1, t_.width);
    for (int64_t lane = 0; lane < t_.lanes; ++lane) sums_[place(lane)] += line_[last + lane];
    find(t_.keys, L);
    for (int64_t j = 1; j < t_.keys; ++j) sums_[place(j * L)] += line_[last - j];
  }

  void add_pairs(const T *x) {
    if (load_.place_reads_score) std::memcpy(places_, x, sizeof(T) * size_t(t_.keys * t_.width));
    find(t_.keys, t_.width);
    for (int64_t j = 0; j < t_.keys; ++j)
      for (int64_t lane = 0; lane < t_.lanes; ++lane) {
        const int64_t at = j * t_.width + lane;
        if (values_[at] != T(0)) sums_[place(at)] += double(values_[at]);
      }
  }

  const Head<T> &head_;
  const TileSpan &t_;
  const score::LoadCode &load_;
  const T *values_;
  T *places_;
  char *scratch_;
  double *sums_;
  double line_[kLongestTileK + kLongestTileQ];
};

// Adds the terms of one query tile of one head to the sums.
template <class Math>
void backward_captured_tile(const Head<typename Math::Real> &head, const TileSizes &tile, const KeyPair<Math> &source,
                            const CapturedItems &items, BackwardScratch<Math> &scratch, double *sums) {
  using T = typename Math::Real;
  using V = Vec<T>;
  QueryTile<Math> queries;
  load_queries(head, source.mask, tile, false, scratch, queries);
  if (queries.sums_first) sum_rows(head, tile, queries, source, scratch);
  const bool infinite = meets_nonfinite(head, queries, scratch);
  const score::Bytecode &code = *head.code;
  bool reads_score = false;
  for (int32_t n = 0; n < code.load_count; ++n) reads_score |= code.loads[n].slope_reads_score || code.loads[n].place_reads_score;
  KeyTiles<T> tiles(head, source.mask, tile, head.queries.i0, queries.i1);
  for (KeysOfRange keys; tiles.next(keys);) {
    auto k = source.k.tile(source.shared_k, head.b, head.kv, keys, scratch.k);
    auto v = source.v.tile(source.shared_v, head.b, head.kv, keys, scratch.v);
    for (int64_t n = 0; n < queries.pieces; ++n) {
      Piece<T> piece;
      if (!make_piece(head, source.mask, queries.i0 + n * tile.width, queries.piece_lanes(n), queries.piece_width(n), keys, piece))
        continue;
      piece.infinite = infinite;
      const TileSpan &t = piece.span;
      const auto k_rows = Math::rows_from(k.keys.rows, t.j0 - k.origin), v_rows = Math::rows_from(v.keys.rows, t.j0 - v.origin);
      T *const ds = scratch.unrounded_ds, *const x = scratch.s, *const products = scratch.dp, *const places = scratch.unrounded_p;
      recompute<false>(head, queries, n, piece, k_rows, v_rows, scratch,
                       [&](int64_t done, int64_t j, int64_t c, V, V, V g0, V g1, bool both) __attribute__((always_inline)) {
                         T *to = ds + (done + j) * t.width + c;
                         g0.store(to);
                         if (both) g1.store(to + t.width);
                       });
      if (reads_score) Math::multiply(t.keys, t.width, head.p->head_dim, k_rows, queries.q[n], x, t.width, false);
      for (int32_t m = 0; m < code.load_count; ++m) {
        const score::LoadCode &load = code.loads[m];
        const T *values = ds;
        if (!load.slope_is_one) {
          if (load.slope_reads_score) std::memcpy(products, x, sizeof(T) * size_t(t.keys * t.width));
          code.run(load.slope, placed(head, {t.i0, t.j0, t.keys, t.width, t.width}), scratch.score.functions, products, nullptr);
          for (int64_t at = 0; at < t.keys * t.width; at += V::kLanes) { // what is hidden stays 0
            const V grad = V::load(ds + at);
            select(grad == V(T(0)), V(T(0)), grad * V::load(products + at)).store(products + at);
          }
          values = products;
        }
        CapturedPiece<Math>(head, t, load, values, places, scratch.score.functions, sums + items.first[load.captured]).add(x);
      }
    }
  }
}

// Stores elements [from, to) of a gradient, each the sum of all shares.
inline void store_captured(const Captured &x, int64_t from, int64_t to, const double *sums, int64_t shares, int64_t stride) {
  with_type(x.dtype, [&](auto *type) {
    using To = std::remove_pointer_t<decltype(type)>;
    for (int64_t e = from; e < to; ++e) {
      double sum = 0;
      for (int64_t share = 0; share < shares; ++share) sum += sums[share * stride + e];
      int64_t rest = e, place = 0;
      for (int32_t axis = x.rank; axis-- > 0; rest /= x.size[axis]) place += rest % x.size[axis] * x.stride[axis];
      narrow(Narrow<To>(sum), reinterpret_cast<To *>(x.data)[place]);
    }
  });
}

template <class Pass>
void backward_captured(const Problem &p, const Execution &execution, const TileSizes &tile, const typename Pass::Source &source,
                       char *scratches, int64_t each, double *sums) {
  const CapturedItems items(p, tile);
  int64_t next = 0;
  execution.run(int32_t(min((i64)execution.threads, (i64)items.shares)), [&](int32_t thread) {
    Arena arena(scratches + thread * each);
    typename Pass::Scratch scratch(arena, p, tile, source);
    [[maybe_unused]] typename Pass::Math::Session session;
    for (int64_t share; (share = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items.shares;) {
      double *own = sums + share * items.elements;
      fill(own, items.elements, 0.0);
      for (int64_t item = share; item < items.count; item += items.shares) {
        const int64_t b = item / items.tiles / p.heads, h = item / items.tiles % p.heads;
        const QuerySpan queries = query_tile(p, b, item % items.tiles, tile.q);
        if (!queries.empty()) Pass::captured({p, b, h, queries}, tile, source, items, scratch, own);
      }
    }
  });
  constexpr int64_t kElements = 4096; // that a thread stores at a time
  for (int n = 0; n < STROBE_MOST_CAPTURED; ++n) {
    const Captured &to = p.dcaptured[n];
    if (!to) continue;
    const int64_t size = to.elements(), pieces = div_up(size, kElements);
    const int32_t threads = int32_t(min((i64)execution.threads, (i64)pieces));
    execution.run(threads, [&](int32_t thread) {
      for (int64_t piece = thread; piece < pieces; piece += threads)
        store_captured(to, piece * kElements, min((i64)((piece + 1) * kElements), (i64)size), sums + items.first[n], items.shares,
                       items.elements);
    });
  }
}

} // namespace strobe::inline STROBE_ISA
