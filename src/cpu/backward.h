// The backward: FlashAttention-2's recomputation (Dao 2023, Algorithm 2), five products per tile. An item is one key head of one sequence.
// Its query tiles are walked in order; dQ of a tile is complete when its keys are done; dK and dV accumulate in rows of the arithmetic's
// real type. The order of every sum follows from the shape alone, whatever the number of threads.
#pragma once
#include "forward.h"
#include "probability.h"

namespace strobe::inline STROBE_ISA {

// Arrays with one number for each row of a query tile.
template <class T> struct BackwardRows {
  T *lse, *excess;           // LSE as the two numbers that Probability takes
  T *delta, *dlse;           // D and dLSE
  T *sum, *sum_lost;         // the sum of P, and its rounding error
  T *rest, *rest_lost;       // the sum of P (dP - D), and its rounding error
  T *settled;                // a value of Settled: how D and P of a row are computed
  T *first_tile, *last_tile; // the first and last key tile that the row sees, set for rows that might see a single tile
  T *scale;                  // the factor of dQ

  BackwardRows(Arena &arena, int64_t rows) {
    T **const all[] = {&lse, &dlse, &excess, &delta, &sum, &sum_lost, &rest, &rest_lost, &scale, &settled, &first_tile, &last_tile};
    for (T **x : all) *x = arena.take<T>(rows);
  }
  void clear_sums(int64_t lane, int64_t width) const {
    T *const all[] = {sum, sum_lost, rest, rest_lost};
    for (T *x : all) fill(x + lane, width, T(0));
  }
};

template <class Math> struct BackwardScratch {
  using T = typename Math::Real;
  using Element = typename Math::Element;
  typename KeySource<Math>::Scratch k, v;
  FiniteKeys<Math> finite_k;
  ScoreScratch<T> score;
  Element *q, *d_o, *q_rows, *do_rows, *p_rows, *ds_lanes, *ds_rows;
  BackwardRows<T> rows;
  T *s, *dp;        // S and dP of a piece
  T *dq, *dq_total; // dQ's running sum, and the sum of earlier running sums
  T *row;           // a row of dO and a row of O
  T *keep = nullptr, *slopes = nullptr;
  T *finite_q, *finite_do;       // copies of a query tile that has numbers that are not finite
  T *unrounded_p, *unrounded_ds; // P and dS of a piece that has numbers that are not finite
  struct {
    int64_t b = -1, kv = -1;
    bool finite = true; // whether all of K is finite
  } known;              // the key head that was checked last, and the result of that check

  BackwardScratch(Arena &arena, const Problem &problem, const TileSizes &tile, const KeyPair<Math> &keys)
      : k(keys.k.take(arena)), v(keys.v.take(arena)), finite_k(arena, tile.k, problem.head_dim),
        score(arena, problem, tile.k, tile.width, max(max(problem.head_dim, problem.head_dim_v), tile.k)), rows(arena, tile.q) {
    const int64_t d = problem.head_dim, dv = problem.head_dim_v, pieces = pieces_of(tile);
    q = arena.take<Element>(pieces * Math::lanes_size(tile.width, d));
    d_o = arena.take<Element>(pieces * Math::lanes_size(tile.width, dv));
    q_rows = arena.take<Element>(Math::rows_size(tile.q, d));
    do_rows = arena.take<Element>(Math::rows_size(tile.q, dv));
    p_rows = arena.take<Element>(Math::scores_size(tile.k, tile.q));
    ds_lanes = arena.take<Element>(Math::scores_size(tile.k, tile.width));
    ds_rows = arena.take<Element>(Math::scores_size(tile.k, tile.q));
    s = arena.take<T>(tile.k * tile.width);
    dp = arena.take<T>(tile.k * tile.width);
    dq = arena.take<T>(round_to(d, 16) * tile.q);
    dq_total = arena.take<T>(round_to(d, 16) * tile.q);
    finite_q = arena.take<T>(tile.q * round_to(d, 16));
    finite_do = arena.take<T>(tile.q * round_to(dv, 16));
    row = arena.take<T>(2 * round_to(dv, 16));
    if (problem.dropout > 0) keep = arena.take<T>(tile.k * tile.width);
    unrounded_p = arena.take<T>(tile.k * tile.width);
    unrounded_ds = arena.take<T>(tile.k * tile.width);
    if (needs_slopes(problem)) slopes = arena.take<T>(tile.k * tile.width);
  }
};

// How D and P of a row are computed (add_rows). kDelta: D from the sums of P dP and P. kDeltaAndLse: D in that way, and P from LSE and the
// sum of P. Unless invariant, all rows of a query tile have the same value.
enum Settled { kAsItIs, kDelta, kDeltaAndLse };

// A prepared query tile: Q and dO as lanes and as rows, LSE, D and dLSE.
template <class Math> struct QueryTile {
  using T = typename Math::Real;
  int64_t i0, i1, rows, pieces, width;
  bool finite;     // Q and dO are finite; otherwise the rows are copies made by finite_rows()
  bool whole;      // all keys that the queries see lie in one tile, which then gives the rows' sums
  bool sums_first; // the sums of some row must be known before the gradients
  typename Math::Right q[kMaxPieces], d_o[kMaxPieces], q_rows, do_rows;

  int64_t piece_lanes(int64_t n) const { return min((i64)width, (i64)(i1 - i0 - n * width)); }
  int64_t piece_width(int64_t n) const { return min((i64)width, (i64)(rows - n * width)); }
};

// The sum of x y over the columns of V, in double: one rounding for the whole row.
template <class T> STROBE_INLINE double row_product(const Head<T> &head, const View &x, const View &y, int64_t token, T *buffer) {
  const int64_t dv = head.p->head_dim_v, ld = round_to(dv, 16);
  load_row(x, head.b, head.h, token, 0, dv, buffer);
  load_row(y, head.b, head.h, token, 0, dv, buffer + ld);
  double sum = 0;
  for (int64_t c = 0; c < dv; ++c) sum += double(buffer[c]) * double(buffer[ld + c]);
  return sum;
}
// D_i = sum_c dO_ic O_ic (FlashAttention-2, section 3.1.2)
template <class T> STROBE_INLINE double row_delta(const Head<T> &head, int64_t token, T *buffer) {
  return row_product(head, head.p->dout, head.p->out, token, buffer);
}

// Whether all keys that a query sees may lie in one key tile. (Keys hidden by a mask or a bias are known only from the scores.)
template <class T> STROBE_INLINE bool may_see_one_tile(const Head<T> &head, int64_t tile_k, int64_t i) {
  const Problem &p = *head.p;
  const Range keys = head.band.keys(i);
  return !keys.empty() && (p.mask || p.bias || head.hides || p.blocks.present || keys.begin / tile_k == (keys.end - 1) / tile_k);
}

template <class Math>
void load_queries(const Head<typename Math::Real> &head, const MaskMap &mask, const TileSizes &tile, bool rows_too,
                  BackwardScratch<Math> &scratch, QueryTile<Math> &out) {
  using T = typename Math::Real;
  const Problem &p = *head.p;
  const int64_t i0 = head.queries.i0, d = p.head_dim, dv = p.head_dim_v, token = head.q0 + i0;
  out.i0 = i0;
  out.i1 = head.queries.i1;
  out.rows = round_to(out.i1 - i0, 16);
  out.width = tile.width;
  out.pieces = div_up(out.rows, tile.width);
  for (int64_t n = 0; n < out.pieces; ++n) {
    int64_t lane = n * tile.width, count = out.piece_lanes(n), width = out.piece_width(n);
    out.q[n] = Math::load_lanes(p.q, head.b, head.h, token + lane, count, d, head.sign, width,
                                scratch.q + n * Math::lanes_size(tile.width, d), scratch.score.buffer);
    out.d_o[n] = Math::load_lanes(p.dout, head.b, head.h, token + lane, count, dv, T(1), width,
                                  scratch.d_o + n * Math::lanes_size(tile.width, dv), scratch.score.buffer);
  }
  const int64_t real_rows = out.i1 - i0;
  out.finite = all_finite(p.q, head.b, head.h, token, real_rows, d) && all_finite(p.dout, head.b, head.h, token, real_rows, dv);
  if (rows_too && out.finite) {
    out.q_rows = Math::load_rows(p.q, head.b, head.h, token, real_rows, d, scratch.q_rows);
    out.do_rows = Math::load_rows(p.dout, head.b, head.h, token, real_rows, dv, scratch.do_rows);
  } else if (rows_too) {
    const View finite_q = finite_rows(p.q, head.b, head.h, token, real_rows, d, scratch.finite_q);
    const View finite_do = finite_rows(p.dout, head.b, head.h, token, real_rows, dv, scratch.finite_do);
    out.q_rows = Math::load_rows(finite_q, 0, 0, 0, real_rows, d, scratch.q_rows);
    out.do_rows = Math::load_rows(finite_do, 0, 0, 0, real_rows, dv, scratch.do_rows);
  }
  bool any_large = false, any_settled = false;
  fill(scratch.rows.settled, out.rows, T(kAsItIs));
  for (int64_t i = 0; i < out.rows; ++i) {
    bool real = i0 + i < out.i1;
    double lse = real ? double(*p.lse.at<T>(head.b, head.h, token + i, 0)) : -kInfinity<double>;
    if (lse == -kInfinity<double>) lse = kInfinity<double>; // so that P is 0 in lanes past the end and in rows that see no key
    if (p.part.partial && __builtin_isfinite(lse)) lse += double(p.lse.at<T>(head.b, head.h, token + i, 0)[p.lse_low]);
    const RowLse<T> row = Probability<Math>::row(head, lse);
    scratch.rows.lse[i] = row.lse, scratch.rows.excess[i] = row.excess;
    const bool large = is_large(p, lse);
    scratch.rows.settled[i] = large ? T(kDeltaAndLse) : real && may_see_one_tile(head, tile.k, i0 + i) ? T(kDelta) : T(kAsItIs);
    any_large |= large;
    any_settled |= scratch.rows.settled[i] != T(kAsItIs);
    scratch.rows.dlse[i] = real && p.dlse ? *p.dlse.at<T>(head.b, head.h, token + i, 0) : T(0);
    scratch.rows.delta[i] = !real     ? T(0)
                            : p.delta ? *p.delta.at<T>(head.b, head.h, token + i, 0)
                                      : T(row_delta(head, token + i, scratch.row));
  }
  if (p.part.partial) { // other calls have terms of these sums, so the caller gives LSE and D
    out.sums_first = out.whole = false;
    return;
  }
  out.whole = false;
  out.sums_first = any_settled;
  if (p.invariant) return;
  KeyTiles<T> tiles(head, mask, tile, i0, out.i1);
  KeysOfRange keys;
  out.whole = tiles.next(keys) && !tiles.next(keys);
  out.sums_first = any_large && !out.whole;
  fill(scratch.rows.settled, out.rows, T(any_large ? kDeltaAndLse : kDelta));
}

// Sums P and P (dP - D) of each row once more, and corrects D and P by these sums. Two rounding errors make this necessary. First, dP and D
// cancel if a row sees few keys, or if nearly all of its P lies on one key; they are summed in different orders, so their rounding errors
// remain. Second, LSE is off by up to eps |LSE|, which gives P = e^(s - LSE) a wrong factor in the whole row. Rows are corrected if their
// keys lie in one tile; and all rows of a query tile, if some LSE in it is large. Invariant: a row is corrected if its own keys lie in one
// tile, or if its own LSE is large.
template <class Math>
__attribute__((noinline)) void add_rows(const Head<typename Math::Real> &head, const TileSpan &t, int64_t lane,
                                        const typename Math::Real *s, const typename Math::Real *dp, BackwardScratch<Math> &scratch) {
  using T = typename Math::Real;
  using V = Vec<T>;
  for (int64_t c = 0; c < t.width; c += V::kLanes) {
    const Probability<Math> probability(head, scratch.rows.lse + lane + c, scratch.rows.excess + lane + c);
    const V delta = V::load(scratch.rows.delta + lane + c);
    for (int64_t j = 0; j < t.keys;) {
      V sum(T(0)), rest(T(0));
      for (const int64_t end = min((i64)(j + kRun), (i64)t.keys); j < end; ++j) {
        const int64_t at = j * t.width + c;
        const V prob = probability(V::load(s + at));
        V grad = V::load(dp + at);
        if (head.dropout) grad *= V::load(scratch.keep + at);
        sum += prob;
        rest += select(prob == V(T(0)), V(T(0)), prob * (grad - delta));
      }
      add_exactly(sum, scratch.rows.sum + lane + c, scratch.rows.sum_lost + lane + c);
      add_exactly(rest, scratch.rows.rest + lane + c, scratch.rows.rest_lost + lane + c);
    }
  }
}

// Finds the first and the last key tile that each row sees.
template <class Math>
__attribute__((noinline)) void note_tile(const TileSpan &t, int64_t lane, const typename Math::Real *s, int64_t tile,
                                         BackwardScratch<Math> &scratch) {
  using T = typename Math::Real;
  using V = Vec<T>;
  const V hidden(-kInfinity<T>), number{T(tile)};
  for (int64_t c = 0; c < t.width; c += V::kLanes) {
    V seen(T(0));
    for (int64_t j = 0; j < t.keys; ++j) seen = select(V::load(s + j * t.width + c) == hidden, seen, V(T(1)));
    const V first = V::load(scratch.rows.first_tile + lane + c), last = V::load(scratch.rows.last_tile + lane + c);
    select((seen == V(T(1))) & (number < first), number, first).store(scratch.rows.first_tile + lane + c);
    select((seen == V(T(1))) & (last < number), number, last).store(scratch.rows.last_tile + lane + c);
  }
}

// Corrects D and LSE from the sums: D = (sum of P dP) / (sum of P), where the sum of P includes the sink's; LSE grows by ln(sum of P).
template <class Math>
__attribute__((noinline)) void settle_rows(const Head<typename Math::Real> &head, int64_t lane, int64_t width,
                                           BackwardScratch<Math> &scratch) {
  using T = typename Math::Real;
  using V = Vec<T>;
  const Problem &p = *head.p;
  const T sink = p.sinks ? load_as<T>(p.sinks.dtype, p.sinks.data, p.sinks.index(0, head.h, 0, 0)) : -kInfinity<T>;
  for (int64_t c = lane; c < lane + width; c += V::kLanes) {
    const V delta = V::load(scratch.rows.delta + c), rest = V::load(scratch.rows.rest + c) + V::load(scratch.rows.rest_lost + c);
    const V of_sink = Math::power((V(sink) - V::load(scratch.rows.lse + c) - V::load(scratch.rows.excess + c)) * V(kLog2e<T>));
    const V sum = V::load(scratch.rows.sum + c) + (V::load(scratch.rows.sum_lost + c) + of_sink);
    const auto as_it_is = (sum == V(T(0))) | (V::load(scratch.rows.settled + c) == V(T(kAsItIs)));
    select(as_it_is, delta, delta + (rest - of_sink * delta) / sum).store(scratch.rows.delta + c);
    sum.store(scratch.rows.sum + c);
  }
  for (int64_t i = lane; i < lane + width; ++i) {
    if (scratch.rows.settled[i] != T(kDeltaAndLse)) continue;
    const double sum = double(scratch.rows.sum[i]);
    if (sum > 0 && __builtin_isfinite(sum)) scratch.rows.excess[i] = T(double(scratch.rows.excess[i]) + __builtin_log(sum));
  }
}

// Computes the sums of all rows of a query tile, before the tile's gradients.
template <class Math>
__attribute__((noinline)) void sum_rows(const Head<typename Math::Real> &head, const TileSizes &tile, const QueryTile<Math> &queries,
                                        const KeyPair<Math> &source, BackwardScratch<Math> &scratch) {
  using T = typename Math::Real;
  const Problem &p = *head.p;
  scratch.rows.clear_sums(0, queries.rows);
  fill(scratch.rows.first_tile, queries.rows, kInfinity<T>);
  fill(scratch.rows.last_tile, queries.rows, -kInfinity<T>);
  KeyTiles<T> tiles(head, source.mask, tile, queries.i0, queries.i1);
  for (KeysOfRange keys; tiles.next(keys);) {
    auto k = source.k.tile(source.shared_k, head.b, head.kv, keys, scratch.k);
    auto v = source.v.tile(source.shared_v, head.b, head.kv, keys, scratch.v);
    for (int64_t n = 0; n < queries.pieces; ++n) {
      const int64_t lane = n * queries.width, width = queries.piece_width(n);
      Piece<T> piece;
      if (!make_piece(head, source.mask, queries.i0 + lane, queries.piece_lanes(n), width, keys, piece)) continue;
      TileSpan t;
      for (int64_t done = 0; done < piece.span.keys; done += t.keys) {
        t = piece.span.chunk(done, Math::kChunk);
        Math::multiply(t.keys, width, p.head_dim, Math::rows_from(k.keys.rows, t.j0 - k.origin), queries.q[n], scratch.s, width, false);
        Math::multiply(t.keys, width, p.head_dim_v, Math::rows_from(v.keys.rows, t.j0 - v.origin), queries.d_o[n], scratch.dp, width,
                       false);
        apply_options(head, piece, t, scratch.score, scratch.s, (T *)nullptr);
        if (head.dropout) load_keep(head, t, scratch.keep);
        add_rows(head, t, lane, scratch.s, scratch.dp, scratch);
        if (p.invariant) note_tile(t, lane, scratch.s, keys.begin / tile.k, scratch);
      }
    }
  }
  for (int64_t i = 0; p.invariant && i < queries.rows; ++i)
    if (scratch.rows.settled[i] == T(kDelta) && scratch.rows.first_tile[i] != scratch.rows.last_tile[i])
      scratch.rows.settled[i] = T(kAsItIs);
  settle_rows(head, 0, queries.rows, scratch);
}

// Computes P (after dropout) and dS = P (dP - D + dLSE) of one piece of a tile, by chunks of keys, and in a chunk by pairs of keys. For
// each pair it calls emit(first key of the chunk, the pair's first key in the chunk, lane, P of both keys, dS of both keys, whether there
// is a second key). kThroughFunction: the score is a function of scale q.k, and dS is the gradient by scale q.k.
template <bool kThroughFunction, class Math, class Emit>
STROBE_INLINE void recompute(const Head<typename Math::Real> &head, const QueryTile<Math> &queries, int64_t n,
                             const Piece<typename Math::Real> &piece, typename Math::Left k_rows, typename Math::Left v_rows,
                             BackwardScratch<Math> &scratch, Emit &&emit) {
  using T = typename Math::Real;
  using V = Vec<T>;
  constexpr int L = V::kLanes;
  const Problem &p = *head.p;
  const int64_t lane = n * queries.width, width = piece.span.width;
  const bool masked = piece.masked(head);
  TileSpan t;
  for (int64_t done = 0; done < piece.span.keys; done += t.keys) {
    t = queries.whole ? piece.span : piece.span.chunk(done, Math::kChunk); // D needs all scores of the rows at once
    T *s = scratch.s + (Math::kScoresInPlace ? done * width : 0), *dp = scratch.dp + (Math::kScoresInPlace ? done * width : 0);
    Math::multiply(t.keys, width, p.head_dim, Math::rows_from(k_rows, done), queries.q[n], s, width, false);      // S = K Q^T
    Math::multiply(t.keys, width, p.head_dim_v, Math::rows_from(v_rows, done), queries.d_o[n], dp, width, false); // dP = V dO^T
    apply_options(head, piece, t, scratch.score, s, scratch.slopes);
    if (head.dropout) load_keep(head, t, scratch.keep);
    if (queries.whole) {
      scratch.rows.clear_sums(lane, width);
      add_rows(head, t, lane, s, dp, scratch);
      settle_rows(head, lane, width, scratch);
    }
    for (int64_t c = 0; c < width; c += L) {
      const V delta = V::load(scratch.rows.delta + lane + c), dlse = V::load(scratch.rows.dlse + lane + c);
      const Probability<Math> probability(head, scratch.rows.lse + lane + c, scratch.rows.excess + lane + c);
      auto element = [&](int64_t at, V &prob, V &grad) __attribute__((always_inline)) {
        const V score = V::load(s + at);
        prob = probability(score);
        grad = V::load(dp + at);
        const V keep = head.dropout ? V::load(scratch.keep + at) : V(T(1));
        grad = (head.dropout ? grad * keep : grad) - delta;
        grad = prob * (p.dlse ? grad + dlse : grad); // dP and D may cancel, so dLSE must not be rounded with either
        if (scratch.slopes && kThroughFunction) grad *= V::load(scratch.slopes + at);
        if (masked) { // 0 if hidden or past the last query, whatever LSE, dP and D are
          const auto hidden = (score == V(-kInfinity<T>)) | (probability.lse == V(kInfinity<T>));
          prob = select(hidden, V(T(0)), prob);
          grad = select(hidden, V(T(0)), grad);
        }
        if (head.dropout) prob *= keep;
      };
      for (int64_t j = 0; j < t.keys; j += 2) {
        const bool both = j + 1 < t.keys;
        V p0, p1 = T(0), g0, g1 = T(0);
        element(j * width + c, p0, g0);
        if (both) element((j + 1) * width + c, p1, g1);
        emit(done, j, c, p0, p1, g0, g1, both);
      }
    }
  }
}

// dK and dV of one key head accumulate here, keys x round_to(d, 16). One running sum over all tiles would lose bits in long sequences. So
// after every kTiles tiles, the running sum is added to the total and starts again.
template <class T> struct KeyGradients {
  static constexpr int64_t kTiles = 16;
  T *dk, *dv;             // the running sums
  T *total_dk, *total_dv; // the totals; if there is a single run, the running sums themselves
  int64_t size_dk, size_dv;
  int64_t tiles = 0;

  // The rows of memory for dK, and for dV. A product writes 16 rows at a time; in a part, its first row need not be a multiple of 16.
  static int64_t keys(const Problem &p) { return round_to(p.longest_k(), 16) + (p.part ? 16 : 0); }
  static int64_t sums(int64_t tiles) { return tiles > kTiles ? 2 : 1; }
  static int64_t size(const Problem &p, int64_t tiles) {
    return sums(tiles) * keys(p) * (round_to(p.head_dim, 16) + round_to(p.head_dim_v, 16));
  }
  // length: the number of keys of the sequence
  KeyGradients(T *base, const Problem &p, int64_t tiles_at_most, int64_t length)
      : size_dk(length * round_to(p.head_dim, 16)), size_dv(length * round_to(p.head_dim_v, 16)) {
    const int64_t all_dk = keys(p) * round_to(p.head_dim, 16), all_dv = keys(p) * round_to(p.head_dim_v, 16);
    total_dk = base;
    total_dv = base + all_dk;
    dk = sums(tiles_at_most) > 1 ? total_dv + all_dv : total_dk;
    dv = sums(tiles_at_most) > 1 ? dk + all_dk : total_dv;
  }
  void clear() const {
    fill(total_dk, size_dk, T(0));
    fill(total_dv, size_dv, T(0));
    if (dk == total_dk) return;
    fill(dk, size_dk, T(0));
    fill(dv, size_dv, T(0));
  }
  void tile_done() {
    if (++tiles % kTiles == 0) add_up();
  }
  void add_up() const {
    if (dk == total_dk) return;
    add_up(total_dk, dk, size_dk);
    add_up(total_dv, dv, size_dv);
  }

private:
  static void add_up(T *total, T *run, int64_t size) {
    for (int64_t i = 0; i < size; ++i) total[i] += run[i];
    fill(run, size, T(0));
  }
};

// For each element of x that is not finite: sum[key][c] += weights[key][i] x(i, c), from the piece's first key on, if the weight is not 0.
// finite_rows() has left these elements out.
template <class T>
__attribute__((noinline)) void add_nonfinite_queries(const Head<T> &head, const TileSpan &t, const View &x, int64_t columns,
                                                     const T *weights, T *sum, int64_t ld) {
  for (int64_t i = 0; i < t.lanes; ++i)
    for (int64_t c = 0; c < columns; ++c) {
      T value;
      load_row(x, head.b, head.h, head.q0 + t.i0 + i, c, 1, &value);
      if (__builtin_isfinite(value)) continue;
      for (int64_t j = 0; j < t.keys; ++j) {
        const T weight = weights[j * t.width + i];
        sum[j * ld + c] += weight != T(0) ? weight * value : T(0);
      }
    }
}

// Whether a score of these queries and keys may be -inf without being hidden.
template <class Math>
bool meets_nonfinite(const Head<typename Math::Real> &head, const QueryTile<Math> &queries, BackwardScratch<Math> &scratch) {
  if (auto &known = scratch.known; known.b != head.b || known.kv != head.kv)
    known = {head.b, head.kv, all_finite(head.p->k, head.b, head.kv, head.k_begin, head.k_end - head.k_begin, head.p->head_dim)};
  return !queries.finite || !scratch.known.finite;
}

// The gradients of a query tile: its dQ, and its terms of dK and dV, one key tile after another.
template <class Math> struct TileGradients {
  using T = typename Math::Real;
  using V = Vec<T>;
  using KeysInMemory = typename KeySource<Math>::Tile;
  const Head<T> &head;
  const Problem &p;
  const TileSizes &tile;
  const KeyPair<Math> &source;
  BackwardScratch<Math> &scratch;
  const KeyGradients<T> &sums;
  const int64_t d, dv, ldk, ldv;
  const bool want_dq, want_dk, want_dv;
  QueryTile<Math> queries;
  KeySum<T> dq[kMaxPieces];
  bool infinite;

  TileGradients(const Head<T> &head, const TileSizes &tile, const KeyPair<Math> &source, BackwardScratch<Math> &scratch,
                const KeyGradients<T> &sums)
      : head(head), p(*head.p), tile(tile), source(source), scratch(scratch), sums(sums), d(p.head_dim), dv(p.head_dim_v),
        ldk(round_to(d, 16)), ldv(round_to(dv, 16)), want_dq(p.dq), want_dk(p.dk), want_dv(p.dv) {
    load_queries(head, source.mask, tile, want_dk || want_dv, scratch, queries);
    if (queries.sums_first) sum_rows(head, tile, queries, source, scratch);
    for (int64_t n = 0; n < queries.pieces; ++n)
      dq[n] = {scratch.dq + ldk * n * tile.width, scratch.dq_total + ldk * n * tile.width, d, queries.piece_width(n)};
    infinite = meets_nonfinite(head, queries, scratch);
  }

  void add_keys(const KeysOfRange &keys) {
    KeysInMemory k{}, v{};
    bool loaded = false;
    TileSpan spans[kMaxPieces];
    for (int64_t n = 0; n < queries.pieces; ++n) {
      const int64_t i = queries.i0 + n * tile.width;
      Piece<T> piece;
      if (!make_piece(head, source.mask, i, queries.piece_lanes(n), queries.piece_width(n), keys, piece)) {
        spans[n] = {};
        continue;
      }
      if (!loaded) {
        k = source.k.tile(source.shared_k, head.b, head.kv, keys, scratch.k);
        v = source.v.tile(source.shared_v, head.b, head.kv, keys, scratch.v);
        loaded = true;
      }
      piece.infinite = infinite;
      spans[n] = piece.span;
      add_piece(n, keys, piece, k, v);
    }
    if constexpr (Math::kJointQueries) multiply_neighbours(keys, spans);
  }

  void add_piece(int64_t n, const KeysOfRange &keys, const Piece<T> &piece, const KeysInMemory &k, const KeysInMemory &v) {
    const TileSpan &t = piece.span;
    const int64_t lane = n * tile.width;
    dq[n].expect(keys.begin);
    const auto k_rows = Math::rows_from(k.keys.rows, t.j0 - k.origin), v_rows = Math::rows_from(v.keys.rows, t.j0 - v.origin);
    // A product reads rows past the piece's keys. They belong to other keys, whose P is 0 here; but 0 times an infinity or NaN would be
    // NaN.
    const bool reads_others = piece.reads_hidden(head) || t.keys % 16 != 0,
               nonfinite = reads_nonfinite(head, piece, reads_others, rows_of_k(p), d);
    auto probs = Math::scores(scratch.s, nullptr, want_dv ? scratch.p_rows : nullptr, t.keys, t.width, tile.q, lane);
    auto grads =
        Math::scores(scratch.dp, want_dq ? scratch.ds_lanes : nullptr, want_dk ? scratch.ds_rows : nullptr, t.keys, t.width, tile.q, lane);
    auto emit_to = [&](const auto &p_to, const auto &ds_to) __attribute__((always_inline)) {
      recompute<true>(head, queries, n, piece, k_rows, v_rows, scratch,
                      [&](int64_t done, int64_t j, int64_t c, V p0, V p1, V g0, V g1, bool both) __attribute__((always_inline)) {
                        p_to.put(done + j, c, p0, p1, both);
                        ds_to.put(done + j, c, g0, g1, both);
                      });
    };
    if (nonfinite || !queries.finite)
      emit_to(BothScores<Math>{probs, scratch.unrounded_p, 0, t.width}, BothScores<Math>{grads, scratch.unrounded_ds, 0, t.width});
    else
      emit_to(probs, grads);
    probs.finish(t.keys);
    grads.finish(t.keys);
    if (!Math::kJointQueries) multiply_queries(keys, t, probs.rows(), grads.rows(), lane, queries.piece_lanes(n));
    if (!queries.finite) add_what_is_not_finite(keys, t);
    if (!want_dq) return; // dQ^T += K^T dS
    const auto columns = nonfinite ? scratch.finite_k.columns(rows_of_k(p), head.b, head.kv, piece.k0 + t.j0, piece.keys_read(head), d)
                                   : Math::columns_from(k.keys.columns, t.j0 - k.origin);
    multiply_keys<Math>(head, d, t.width, t.keys, columns, grads, 0, dq[n]);
    if (nonfinite) add_nonfinite(t, scratch.unrounded_ds, rows_of_k(p), head.b, head.kv, piece.k0, d, dq[n].add_to());
  }

  // The piece's first key, as a row of the sequence's dK and dV sums.
  int64_t first_row(const KeysOfRange &keys, const TileSpan &t) const { return keys.k0 - head.k_begin + t.j0; }

  // dV += P^T dO and dK += dS^T Q over the queries [lane, lane + count) of the tile
  void multiply_queries(const KeysOfRange &keys, const TileSpan &t, typename Math::Left probs, typename Math::Left grads, int64_t lane,
                        int64_t count) const {
    const int64_t j0 = first_row(keys, t);
    if (want_dv) Math::multiply(t.keys, ldv, count, probs, Math::right_from(queries.do_rows, lane), sums.dv + j0 * ldv, ldv, true);
    if (want_dk) Math::multiply(t.keys, ldk, count, grads, Math::right_from(queries.q_rows, lane), sums.dk + j0 * ldk, ldk, true);
  }

  void add_what_is_not_finite(const KeysOfRange &keys, const TileSpan &t) const {
    const int64_t j0 = first_row(keys, t);
    if (want_dv) add_nonfinite_queries(head, t, p.dout, dv, scratch.unrounded_p, sums.dv + j0 * ldv, ldv);
    if (want_dk) add_nonfinite_queries(head, t, p.q, d, scratch.unrounded_ds, sums.dk + j0 * ldk, ldk);
  }

  // Adds the terms of adjacent pieces that see the same keys to dK and dV, in one product.
  void multiply_neighbours(const KeysOfRange &keys, const TileSpan *spans) const {
    for (int64_t n = 0, end; n < queries.pieces; n = end) {
      const TileSpan &t = spans[n];
      int64_t count = 0;
      for (end = n; end < queries.pieces && spans[end].keys == t.keys && (end == n || spans[end].j0 == t.j0); ++end)
        count += queries.piece_lanes(end);
      auto rows_of = [&](typename Math::Element *rows) {
        return Math::scores(nullptr, nullptr, rows, t.keys, tile.width, tile.q, n * tile.width).rows();
      };
      if (t.keys > 0) multiply_queries(keys, t, rows_of(scratch.p_rows), rows_of(scratch.ds_rows), n * tile.width, count);
    }
  }

  void store_dq() {
    if (!want_dq) return;
    fill(scratch.rows.scale, queries.rows, T(p.scale));
    for (int64_t n = 0; n < queries.pieces; ++n) {
      const int64_t lane = n * tile.width;
      store_lanes(p.dq, head.b, head.h, head.q0 + queries.i0 + lane, queries.piece_lanes(n), d, scratch.rows.scale + lane, dq[n].result(),
                  queries.piece_width(n), scratch.score.buffer, p.accumulate);
    }
  }
};

template <class Math>
void backward_tile(const Head<typename Math::Real> &head, const TileSizes &tile, const KeyPair<Math> &source,
                   BackwardScratch<Math> &scratch, const KeyGradients<typename Math::Real> &sums) {
  TileGradients<Math> gradients(head, tile, source, scratch, sums);
  KeyTiles<typename Math::Real> tiles(head, source.mask, tile, head.queries.i0, head.queries.i1);
  for (KeysOfRange keys; tiles.next(keys);) gradients.add_keys(keys);
  gradients.store_dq();
}

// An item is a key head. If key heads are few, the query tiles of each are cut into chunks, and an item is a chunk with its own sums. Items
// follow from the shape alone. Invariant: nothing is cut, because the number of key heads depends on the batch.
struct BackwardItems {
  int64_t heads, chunks, tiles; // tiles: query tiles of all heads of a group
  BackwardItems(const Problem &p, const TileSizes &tile) {
    constexpr int64_t kEnough = 8;
    heads = p.batch * p.heads_kv;
    tiles = p.group() * query_tiles(p, tile.q);
    chunks = heads > 0 && !p.invariant ? max(1ll, min((i64)tiles, div_up(kEnough, heads))) : 1;
  }
  int64_t count() const { return heads * chunks; }
  int64_t tiles_each() const { return div_up(tiles, chunks); }
  // If chunks must be added up, each item has its own sums; otherwise each thread has.
  int64_t sums(int64_t threads) const { return chunks > 1 ? count() : min((i64)threads, (i64)count()); }
};

// dst = scale * the sum over chunks, for rows [j0, j1) of one key head. The sums of chunks lie `stride` apart.
template <class T>
void store_key_gradients(const View &dst, int64_t b, int64_t h, int64_t k0, int64_t j0, int64_t j1, int64_t d, T scale, const T *first,
                         int64_t parts, int64_t stride, T *buffer, bool add) {
  if (!dst) return;
  int64_t ld = round_to(d, 16);
  for (int64_t j = j0; j < j1; ++j) {
    fill(buffer, ld, T(0));
    for (int64_t n = 0; n < parts; ++n)
      for (int64_t c = 0; c < ld; ++c) buffer[c] += first[n * stride + j * ld + c];
    for (int64_t c = 0; c < ld; ++c) buffer[c] *= scale;
    store_row(dst, b, h, k0 + j, d, buffer, add);
  }
}

// Pass: what is computed of a query tile (GradientPass, or BackwardJvpPass).
template <class Pass>
void backward_keys(const Problem &p, const Execution &execution, const TileSizes &tile, const typename Pass::Source &source,
                   char *scratches, int64_t each, typename Pass::Math::Real *sums) {
  using Math = typename Pass::Math;
  using T = typename Math::Real;
  const BackwardItems items(p, tile);
  const int64_t size = KeyGradients<T>::size(p, items.tiles_each()), threads = min((i64)execution.threads, (i64)items.count());
  const int64_t tiles = query_tiles(p, tile.q);

  auto store = [&](int64_t kv_head, int64_t j0, int64_t j1, const T *first, T *buffer) {
    const int64_t b = kv_head / p.heads_kv, h = kv_head % p.heads_kv;
    auto k = p.rows_k(b);
    const KeyGradients<T> part(const_cast<T *>(first), p, items.tiles_each(), k.length);
    j1 = min((i64)j1, (i64)k.length);
    store_key_gradients(p.dk, b, h, k.begin, j0, j1, p.head_dim, T(p.scale), part.total_dk, items.chunks, size, buffer, p.accumulate);
    store_key_gradients(p.dv, b, h, k.begin, j0, j1, p.head_dim_v, T(1), part.total_dv, items.chunks, size, buffer, p.accumulate);
  };

  int64_t next = 0;
  execution.run(int32_t(threads), [&](int32_t thread) {
    Arena arena(scratches + thread * each);
    typename Pass::Scratch scratch(arena, p, tile, source);
    [[maybe_unused]] typename Math::Session session;
    for (int64_t item; (item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items.count();) {
      // the last chunk of queries comes first: under a causal mask it takes the longest
      const int64_t kv_head = item % items.heads, chunk = items.chunks - 1 - item / items.heads;
      T *sum = sums + (items.chunks > 1 ? kv_head * items.chunks + chunk : thread) * size;
      KeyGradients<T> gradients(sum, p, items.tiles_each(), p.rows_k(kv_head / p.heads_kv).length);
      gradients.clear();
      for (int64_t n = chunk * items.tiles / items.chunks; n < (chunk + 1) * items.tiles / items.chunks; ++n) {
        const int64_t b = kv_head / p.heads_kv, h = kv_head % p.heads_kv * p.group() + n / tiles;
        const QuerySpan queries = query_tile(p, b, n % tiles, tile.q);
        if (queries.empty()) continue;
        Pass::tile({p, b, h, queries}, tile, source, scratch, gradients);
        gradients.tile_done();
      }
      gradients.add_up();
      if (items.chunks == 1) store(kv_head, 0, p.seqlen_k, sum, scratch.score.buffer);
    }
  });
  if (items.chunks == 1 || (!p.dk && !p.dv)) return;

  constexpr int64_t kRows = 64; // keys per item
  const int64_t pieces = div_up(p.seqlen_k, kRows), stores = items.heads * pieces;
  next = 0;
  execution.run(int32_t(min((i64)execution.threads, (i64)stores)), [&](int32_t thread) {
    Arena arena(scratches + thread * each);
    typename Pass::Scratch scratch(arena, p, tile, source);
    for (int64_t item; (item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < stores;) {
      int64_t kv_head = item / pieces, j0 = item % pieces * kRows;
      store(kv_head, j0, j0 + kRows, sums + kv_head * items.chunks * size, scratch.score.buffer);
    }
  });
}

} // namespace strobe::inline STROBE_ISA
