// The forward: FlashAttention-2's loop (Dao 2023, Algorithm 1), one query tile per item, one query per lane.
#pragma once
#include "../../kernels/attention/softmax.h"
#include "fma.h"
#include "isa.h"
#include "pieces.h"
#include "sums.h"

namespace strobe::inline STROBE_ISA {

inline constexpr int64_t kMaxPieces = 16; // Br / width is at most this

// The scratch that one thread needs for one query tile.
template <class Math> struct ForwardScratch {
  using T = typename Math::Real;
  typename KeySource<Math>::Scratch k, v;
  FiniteKeys<Math> finite_v;
  ScoreScratch<T> score;
  typename Math::Element *q, *p;
  T *s, *o, *o_total, *m, *l, *l_lost, *restart_m, *alpha, *keep = nullptr;

  ForwardScratch(Arena &arena, const Problem &problem, const TileSizes &tile, const KeyPair<Math> &keys)
      : k(keys.k.take(arena)), v(keys.v.take(arena)), finite_v(arena, tile.k, problem.head_dim_v),
        score(arena, problem, Math::kChunk, tile.width, max(max(problem.head_dim, problem.head_dim_v), Math::kChunk)) {
    q = arena.take<typename Math::Element>(pieces_of(tile) * Math::lanes_size(tile.width, problem.head_dim));
    p = arena.take<typename Math::Element>(Math::scores_size(tile.k, tile.width));
    s = arena.take<T>((Math::kScoresInPlace ? tile.k : Math::kChunk) * tile.width);
    o = arena.take<T>(round_to(problem.head_dim_v, 16) * tile.q);
    o_total = arena.take<T>(round_to(problem.head_dim_v, 16) * tile.q);
    m = arena.take<T>(tile.q);
    l = arena.take<T>(tile.q);
    l_lost = arena.take<T>(tile.q);
    restart_m = arena.take<T>(tile.q);
    alpha = arena.take<T>(tile.width);
    if (problem.dropout > 0) keep = arena.take<T>(Math::kChunk * tile.width);
  }
};

// One step of online softmax over a chunk of scores s, for the lanes from first_lane on. P goes to `out`, from its key `at_key` on; m and l
// are updated. Returns whether m has changed: alpha is then the factor of O.
template <class Math, class Scores>
__attribute__((noinline)) bool softmax_step(const Head<typename Math::Real> &head, const TileSpan &span, const typename Math::Real *s,
                                            int64_t first_lane, const Scores &scores, int64_t at_key, ForwardScratch<Math> &scratch) {
  // The copies spare the compiler from loading the members of a referenced object again after each store.
  const TileSpan t = span;
  const Scores out = scores;
  using T = typename Math::Real;
  using V = Vec<T>;
  constexpr int L = V::kLanes, kColumns = 4;
  const V unit(head.unit), hidden(-kInfinity<T>), slack(head.slack);
  T *const m = scratch.m + first_lane, *const l = scratch.l + first_lane, *const l_lost = scratch.l_lost + first_lane,
           *const alpha = scratch.alpha;
  const T *const keep = scratch.keep;
  bool moved = false;
  auto columns = [&](auto count, int64_t lane) __attribute__((always_inline)) {
    constexpr int n = count;
    V most[n], sum[n], reference[n];
    unroll<n>(STROBE_UNROLL(c) { most[c] = hidden; });
    for (int64_t j = 0; j < t.keys; ++j) unroll<n>(STROBE_UNROLL(c) { most[c] = max(most[c], V::load(s + j * t.width + lane + c * L)); });
    bool ahead = false; // some score exceeds its row's m by more than the slack
    unroll<n>(STROBE_UNROLL(c) { ahead |= any(V::load(m + lane + c * L) + slack < most[c]); });
    unroll<n>(STROBE_UNROLL(c) {
      RowState<V> row{V::load(m + lane + c * L), V::load(l + lane + c * L)};
      if (ahead) {
        const V factor = rescale(row, most[c], unit, slack, hidden);
        factor.store(alpha + lane + c * L);
        row.m.store(m + lane + c * L);
        row.l.store(l + lane + c * L);
        (V::load(l_lost + lane + c * L) * factor).store(l_lost + lane + c * L);
      }
      reference[c] = reference_of(row.m, hidden);
    });
    if (ahead && !moved) fill(alpha, lane, T(1));
    moved |= ahead;
    if (moved && !ahead) fill(alpha + lane, n * L, T(1));
    const auto exponentiate = [&](int64_t from, int64_t to) __attribute__((always_inline)) {
      unroll<n>(STROBE_UNROLL(c) { sum[c] = V(T(0)); });
      for (int64_t j = from; j < to; j += 2) {
        const bool both = j + 1 < to;
        unroll<n>(STROBE_UNROLL(c) {
          const int64_t at = j * t.width + lane + c * L;
          V first = Math::power((V::load(s + at) - reference[c]) * unit);
          V second = both ? Math::power((V::load(s + at + t.width) - reference[c]) * unit) : V(T(0));
          sum[c] += first + second;
          if (keep) {
            first *= V::load(keep + at);
            if (both) second *= V::load(keep + at + t.width);
          }
          out.put(at_key + j, lane + c * L, first, second, both);
        });
      }
    };
    // A P that is added to a much larger sum may be lost, so several P are added up first.
    constexpr int64_t kAtOnce = Math::kExactPower ? 4 : Math::kChunk;
    for (int64_t j = 0; j < t.keys; j += kAtOnce) {
      exponentiate(j, min((i64)(j + kAtOnce), (i64)t.keys));
      unroll<n>(STROBE_UNROLL(c) { add_exactly(sum[c], l + lane + c * L, l_lost + lane + c * L); });
    }
  };
  int64_t lane = 0;
  for (; lane + kColumns * L <= t.width; lane += kColumns * L) columns(Index<kColumns>{}, lane);
  for (; lane + 2 * L <= t.width; lane += 2 * L) columns(Index<2>{}, lane);
  for (; lane < t.width; lane += L) columns(Index<1>{}, lane);
  return moved;
}

// sum[c * width + lane] += s[key * width + lane] x(key, c) for each x(key, c) that is not finite, if s is not 0. FiniteKeys has left these
// numbers out, but queries that see their keys must receive them.
template <class T>
__attribute__((noinline)) void add_nonfinite(const TileSpan &t, const T *s, const KeyRows &x, int64_t b, int64_t h, int64_t k0, int64_t d,
                                             T *sum) {
  for (int64_t j = 0; j < t.keys; ++j)
    for (int64_t c = 0; c < d; ++c) {
      T value;
      load_row(x, b, h, k0 + t.j0 + j, c, 1, &value);
      if (__builtin_isfinite(value)) continue;
      for (int64_t lane = 0; lane < t.width; ++lane) {
        const T weight = s[j * t.width + lane];
        sum[c * t.width + lane] += weight != T(0) ? weight * value : T(0);
      }
    }
}

// Stores scores as an operand of a product, and also unrounded, in `unrounded`, from key `from` on.
template <class Math> struct BothScores {
  typename Math::Scores probs;
  typename Math::Real *unrounded;
  int64_t from, width;
  STROBE_INLINE void put(int64_t j, int64_t lane, Vec<typename Math::Real> first, Vec<typename Math::Real> second, bool both) const {
    probs.put(j, lane, first, second, both);
    first.store(unrounded + (j - from) * width + lane);
    if (both) second.store(unrounded + (j + 1 - from) * width + lane);
  }
};

// Whether FiniteKeys are needed: the rows of K or V that a piece's products read hold numbers that are not finite. That matters in two
// cases: some query does not see such a key (hidden); or `invariant`, where the bits of a row that sees the key must not depend on whether
// other rows see it.
template <class T> bool reads_nonfinite(const Head<T> &head, const Piece<T> &piece, bool hidden, const KeyRows &x, int64_t d) {
  return (hidden || head.p->invariant) && !all_finite(x, head.b, head.kv, piece.k0 + piece.span.j0, piece.keys_read(head), d);
}

// sum += x^T s, a product over keys, from key `from` of s on. invariant: each product must have kKeyAlign keys, because an arithmetic with
// kSumsApart adds a product to `sum` only when it is finished.
template <class Math>
STROBE_INLINE void multiply_keys(const Head<typename Math::Real> &head, int64_t d, int64_t width, int64_t keys, typename Math::Left x,
                                 const typename Math::Scores &s, int64_t from, KeySum<typename Math::Real> &sum) {
  const int64_t step = Math::kSumsApart && head.p->invariant ? kKeyAlign : keys;
  for (int64_t done = 0; done < keys; done += step) {
    Math::multiply(d, width, min((i64)step, (i64)(keys - done)), Math::columns_from(x, done), s.lanes(from + done), sum.run, width,
                   sum.started);
    sum.started = true;
  }
}

// A query tile in progress: Q transposed, and O, in pieces of tile.width lanes.
template <class Math> struct ForwardTile {
  int64_t i0, i1, rows, pieces = 0;
  typename Math::Right q[kMaxPieces];
  KeySum<typename Math::Real> o[kMaxPieces];
};

// Computes O, m and l of a query tile, beginning with the given m. hides: some key may have a P of 0, whatever V holds.
template <class Math>
void add_keys(const Head<typename Math::Real> &head, const TileSizes &tile, const KeyPair<Math> &source, ForwardScratch<Math> &scratch,
              ForwardTile<Math> &queries, bool hides) {
  using T = typename Math::Real;
  const Problem &p = *head.p;
  const int64_t d = p.head_dim, dv = p.head_dim_v, ldo = round_to(dv, 16), i0 = queries.i0, i1 = queries.i1;
  for (int64_t n = 0; n < queries.pieces; ++n) {
    const int64_t lane = n * tile.width, width = min((i64)tile.width, (i64)(queries.rows - lane));
    queries.o[n] = {scratch.o + ldo * lane, scratch.o_total + ldo * lane, dv, width};
  }
  fill(scratch.l, queries.rows, T(0));
  fill(scratch.l_lost, queries.rows, T(0));

  KeyTiles<T> tiles(head, source.mask, tile, i0, i1);
  for (KeysOfRange keys; tiles.next(keys);) {
    typename KeySource<Math>::Tile k{}, v{};
    bool loaded = false;
    for (int64_t n = 0; n < queries.pieces; ++n) {
      KeySum<T> &o = queries.o[n];
      const int64_t lane = n * tile.width, width = o.width;
      Piece<T> piece;
      if (!make_piece(head, source.mask, i0 + lane, min((i64)width, (i64)(i1 - i0 - lane)), width, keys, piece)) continue;
      if (!loaded) {
        k = source.k.tile(source.shared_k, head.b, head.kv, keys, scratch.k);
        v = source.v.tile(source.shared_v, head.b, head.kv, keys, scratch.v);
        loaded = true;
      }
      const TileSpan &t = piece.span;
      o.expect(keys.begin);
      auto probs = Math::scores(scratch.s, scratch.p, nullptr, t.keys, width, width, 0);
      const bool nonfinite = reads_nonfinite(head, piece, hides || piece.reads_hidden(head), rows_of_v(p), dv);
      const auto columns = nonfinite ? scratch.finite_v.columns(rows_of_v(p), head.b, head.kv, piece.k0 + t.j0, piece.keys_read(head), dv)
                                     : Math::columns_from(v.keys.columns, t.j0 - v.origin);
      int64_t multiplied = 0;                   // keys of the tile whose P V has been added to O
      auto multiply_values = [&](int64_t end) { // O += V^T P
        multiply_keys<Math>(head, dv, width, end - multiplied, Math::columns_from(columns, multiplied), probs, multiplied, o);
        multiplied = end;
      };
      TileSpan chunk;
      for (int64_t done = 0; done < t.keys; done += chunk.keys) {
        chunk = t.chunk(done, Math::kChunk);
        T *s = scratch.s + (Math::kScoresInPlace ? done * width : 0);
        Math::multiply(chunk.keys, width, d, Math::rows_from(k.keys.rows, chunk.j0 - k.origin), queries.q[n], s, width, false); // S = K Q^T
        apply_options(head, piece, chunk, scratch.score, s, (T *)nullptr);
        if (head.dropout) load_keep(head, chunk, scratch.keep);
        const bool moved = nonfinite ? softmax_step<Math>(head, chunk, s, lane, BothScores<Math>{probs, s, done, width}, done, scratch)
                                     : softmax_step<Math>(head, chunk, s, lane, probs, done, scratch);
        if (moved) {
          if (done > multiplied) multiply_values(done); // P of the keys before `done` belongs to the old m
          o.scale(scratch.alpha);
        }
        if (nonfinite) add_nonfinite(chunk, s, rows_of_v(p), head.b, head.kv, piece.k0, dv, o.add_to());
      }
      probs.finish(t.keys);
      multiply_values(t.keys);
    }
  }
  for (int64_t i = 0; i < queries.rows; ++i) scratch.l[i] += scratch.l_lost[i];
}

// Whether some row has a finite l but an O that is not finite. Such a row starts again with `restart_m`, its m raised by log2 l. All other
// rows start as before.
template <class Math>
bool overflowed(const Head<typename Math::Real> &head, const ForwardScratch<Math> &scratch, ForwardTile<Math> &queries) {
  using T = typename Math::Real;
  using V = Vec<T>;
  bool any_row = false;
  for (int64_t n = 0, lane = 0; n < queries.pieces; lane += queries.o[n++].width) {
    KeySum<typename Math::Real> &o = queries.o[n];
    const auto *sum = o.result();
    for (int64_t c = 0; c < o.width; c += V::kLanes) {
      V all = V::load(scratch.l + lane + c) * V(0); // 0, or NaN if l is not finite
      const auto good = all == V(0);
      for (int64_t r = 0; r < o.rows; ++r) all += V::load(sum + r * o.width + c) * V(0);
      const auto lost = good & ~(all == V(0));
      any_row |= any(lost);
      select(lost, V(T(1)), V(T(0))).store(scratch.restart_m + lane + c);
    }
  }
  for (int64_t i = 0; any_row && i < queries.rows; ++i) {
    const T m = scratch.m[i], l = scratch.l[i];
    scratch.restart_m[i] =
        scratch.restart_m[i] != 0 && l > T(0) ? T(double(m) + __builtin_log2(double(l)) / double(head.unit)) : -kInfinity<T>;
  }
  return any_row;
}

template <class Math>
void forward_tile(const Head<typename Math::Real> &head, const TileSizes &tile, const KeyPair<Math> &source,
                  ForwardScratch<Math> &scratch) {
  using T = typename Math::Real;
  const Problem &p = *head.p;
  const int64_t i0 = head.queries.i0, i1 = head.queries.i1, d = p.head_dim, dv = p.head_dim_v, rows = round_to(i1 - i0, 16);

  ForwardTile<Math> queries;
  queries.i0 = i0, queries.i1 = i1, queries.rows = rows;
  for (int64_t lane = 0; lane < rows; lane += tile.width, ++queries.pieces) {
    int64_t width = min((i64)tile.width, (i64)(rows - lane)), count = min((i64)width, (i64)(i1 - i0 - lane));
    queries.q[queries.pieces] = Math::load_lanes(p.q, head.b, head.h, head.q0 + i0 + lane, count, d, head.sign, width,
                                                 scratch.q + queries.pieces * Math::lanes_size(tile.width, d), scratch.score.buffer);
  }
  fill(scratch.m, rows, -kInfinity<T>);
  add_keys(head, tile, source, scratch, queries, false);
  // The sum P V, with P up to 2^8, may overflow although the mean does not. It may also contain a NaN of V, of a key that an infinite K
  // hides by a score of -inf. Then P V is computed once more, with m raised by log2 l, so that P sums to 1.
  if (overflowed(head, scratch, queries)) {
    std::memcpy(scratch.m, scratch.restart_m, sizeof(T) * size_t(rows));
    add_keys(head, tile, source, scratch, queries, true);
  }

  // O / l and LSE. The sink is added to the denominator. In FP64, because a sink in the unit of q.k may leave FP32's range.
  const double sink = p.sinks ? load_as<double>(p.sinks.dtype, p.sinks.data, p.sinks.index(0, head.h, 0, 0)) : -kInfinity<double>;
  for (int64_t i = 0; i < rows; ++i) {
    double reference = double(scratch.m[i]) * double(head.measure()), sum = double(scratch.l[i]), factor = 1;
    if (p.sinks) {
      const double largest = max(reference, sink), most = largest == -kInfinity<double> ? 0 : largest;
      factor = __builtin_exp(reference - most);
      sum = sum * factor + __builtin_exp(sink - most);
      reference = most;
    }
    scratch.l[i] = sum == 0 ? T(0) : T(factor / sum);
    if (!p.lse || i0 + i >= i1) continue;
    const double natural = reference + __builtin_log(sum);
    const T lse = sum == 0 ? -kInfinity<T> : T(natural);
    T *const at = p.lse.at<T>(head.b, head.h, head.q0 + i0 + i, 0);
    *at = lse;
    if (p.part.partial) at[p.lse_low] = __builtin_isfinite(lse) ? T(natural - double(lse)) : T(0);
  }
  for (int64_t n = 0; n < queries.pieces; ++n) {
    const int64_t lane = n * tile.width, width = queries.o[n].width;
    store_lanes(p.out, head.b, head.h, head.q0 + i0 + lane, min((i64)width, (i64)(i1 - i0 - lane)), dv, scratch.l + lane,
                queries.o[n].result(), width, scratch.score.buffer);
  }
}

// What forward() does for the forward. The JVP has a pass of its own (jvp.h).
template <class M> struct ForwardPass {
  using Math = M;
  using T = typename Math::Real;
  using Source = KeyPair<Math>;
  using Scratch = ForwardScratch<Math>;
  static Source sources(const Problem &p, const TileSizes &tile) {
    return {{p, rows_of_k(p), p.head_dim, true, false, tile}, {p, rows_of_v(p), p.head_dim_v, false, true, tile}, {p, tile}};
  }
  static void tile(const Head<T> &head, const TileSizes &tile, const Source &source, Scratch &scratch) {
    forward_tile<Math>(head, tile, source, scratch);
  }
};

// What a thread needs for a pass, be it of forward() or of backward().
template <class Pass> int64_t scratch_bytes(const Problem &p, const TileSizes &tile) {
  Arena arena(nullptr);
  typename Pass::Scratch scratch(arena, p, tile, Pass::sources(p, tile));
  return round_to(arena.used(), 256);
}

template <class Pass> int64_t forward_workspace(const Problem &p, const TileSizes &tile, int64_t threads) {
  Arena arena(nullptr);
  arena.take<char>(threads * scratch_bytes<Pass>(p, tile));
  Pass::sources(p, tile).take(arena, p);
  return arena.used();
}

template <class Pass> void forward(const Problem &p, const Execution &execution, const TileSizes &tile, void *workspace) {
  const int64_t tiles = query_tiles(p, tile.q), items = p.batch * p.heads * tiles, each = scratch_bytes<Pass>(p, tile);
  Arena arena(workspace);
  char *scratches = arena.take<char>(execution.threads * each);
  typename Pass::Source source = Pass::sources(p, tile);
  source.take(arena, p);
  source.prepare(p, execution, scratches, each);
  int64_t next = 0;
  execution.run(int32_t(min((i64)execution.threads, (i64)items)), [&](int32_t thread) {
    Arena own(scratches + thread * each);
    typename Pass::Scratch scratch(own, p, tile, source);
    [[maybe_unused]] typename Pass::Math::Session session;
    for (int64_t item; (item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items;) {
      const int64_t b = item / tiles / p.heads;
      const QuerySpan queries = query_tile(p, b, tiles - 1 - item % tiles, tile.q); // causal: the longest rows first
      if (!queries.empty()) Pass::tile({p, b, item / tiles % p.heads, queries}, tile, source, scratch);
    }
  });
}

} // namespace strobe::inline STROBE_ISA
