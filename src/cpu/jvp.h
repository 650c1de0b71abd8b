// The derivatives of O and LSE in the direction of tangents, with O and LSE themselves, in one pass of online softmax. Beside l = sum P and
// O = sum P V a row has e = sum P ts and A = sum P (ts V + tV), where ts is the tangent of the score; then tLSE = e / l and tO = A / l -
// tLSE O / l.
#pragma once
#include "tangents.h"

namespace strobe::inline STROBE_ISA {

template <class Math> struct JvpScratch {
  using T = typename Math::Real;
  using Element = typename Math::Element;
  typename TangentKeys<Math>::Scratch keys;
  FiniteKeys<Math> finite_v, finite_tv;
  ScoreScratch<T> score;
  TangentScratch<T> tangents;
  Element *q, *tq, *p, *tp;
  T *s, *ts; // scores and their tangents, then P and P ts
  T *o, *o_total, *a, *a_total;
  T *m, *l, *l_lost, *e, *e_lost, *alpha, *keep = nullptr;

  JvpScratch(Arena &arena, const Problem &problem, const TileSizes &tile, const TangentKeys<Math> &source)
      : keys(arena, problem, source), finite_v(arena, tile.k, problem.head_dim_v), finite_tv(arena, tile.k, problem.head_dim_v),
        score(arena, problem, tile.k, tile.width, max(max(problem.head_dim, problem.head_dim_v), tile.k)),
        tangents(arena, problem, tile, false) {
    const int64_t of_q = pieces_of(tile) * Math::lanes_size(tile.width, problem.head_dim), of_o = round_to(problem.head_dim_v, 16) * tile.q;
    for (Element **x : {&q, &tq}) *x = arena.take<Element>(of_q);
    for (Element **x : {&p, &tp}) *x = arena.take<Element>(Math::scores_size(tile.k, tile.width));
    for (T **x : {&s, &ts}) *x = arena.take<T>(tile.k * tile.width);
    for (T **x : {&o, &o_total, &a, &a_total}) *x = arena.take<T>(of_o);
    for (T **x : {&m, &l, &l_lost, &e, &e_lost}) *x = arena.take<T>(tile.q);
    alpha = arena.take<T>(tile.width);
    if (problem.dropout > 0) keep = arena.take<T>(tile.k * tile.width);
  }
};

// One step of online softmax over a piece, for the lanes from first_lane on. P and P ts, after dropout, go to the operands and take the
// place of s and ts. Returns whether m has changed: alpha is then the factor of O and A.
template <class Math>
__attribute__((noinline)) bool softmax_step(const Head<typename Math::Real> &head, const TileSpan &t, int64_t first_lane,
                                            const typename Math::Scores &p_to, const typename Math::Scores &tp_to,
                                            JvpScratch<Math> &scratch) {
  using T = typename Math::Real;
  using V = Vec<T>;
  const V unit(head.unit), hidden(-kInfinity<T>), slack(head.slack);
  bool moved = false;
  fill(scratch.alpha, t.width, T(1));
  for (int64_t c = 0; c < t.width; c += V::kLanes) {
    const int64_t lane = first_lane + c;
    V most = hidden;
    for (int64_t j = 0; j < t.keys; ++j) most = max(most, V::load(scratch.s + j * t.width + c));
    RowState<V> row{V::load(scratch.m + lane), V::load(scratch.l + lane)};
    if (any(row.m + slack < most)) {
      const V factor = rescale(row, most, unit, slack, hidden);
      moved = true;
      factor.store(scratch.alpha + c);
      row.m.store(scratch.m + lane), row.l.store(scratch.l + lane);
      for (T *x : {scratch.l_lost, scratch.e, scratch.e_lost}) (V::load(x + lane) * factor).store(x + lane);
    }
    const V reference = reference_of(row.m, hidden);
    constexpr int64_t kAtOnce = 4; // a P that is added to a much larger sum may be lost
    for (int64_t from = 0; from < t.keys; from += kAtOnce) {
      V sum(T(0)), tangents(T(0));
      const auto element = [&](int64_t j, V &p, V &tp) __attribute__((always_inline)) {
        const int64_t at = j * t.width + c;
        const V score = V::load(scratch.s + at);
        p = Math::power((score - reference) * unit);
        tp = select(score == hidden, V(T(0)), p * V::load(scratch.ts + at));
        sum += p, tangents += tp;
        if (scratch.keep) p *= V::load(scratch.keep + at), tp *= V::load(scratch.keep + at);
        p.store(scratch.s + at), tp.store(scratch.ts + at);
      };
      for (int64_t j = from; j < min((i64)(from + kAtOnce), (i64)t.keys); j += 2) {
        const bool both = j + 1 < t.keys;
        V p0, p1(T(0)), t0, t1(T(0));
        element(j, p0, t0);
        if (both) element(j + 1, p1, t1);
        p_to.put(j, c, p0, p1, both), tp_to.put(j, c, t0, t1, both);
      }
      add_exactly(sum, scratch.l + lane, scratch.l_lost + lane), add_exactly(tangents, scratch.e + lane, scratch.e_lost + lane);
    }
  }
  return moved;
}

template <class Math>
void jvp_tile(const Head<typename Math::Real> &head, const TileSizes &tile, const TangentKeys<Math> &source, JvpScratch<Math> &scratch) {
  using T = typename Math::Real;
  using Right = typename Math::Right;
  const Problem &p = *head.p;
  const int64_t i0 = head.queries.i0, i1 = head.queries.i1, d = p.head_dim, dv = p.head_dim_v, rows = round_to(i1 - i0, 16);
  const int64_t ldo = round_to(dv, 16), pieces = div_up(rows, tile.width);
  const auto width_of = [&](int64_t n) { return min((i64)tile.width, (i64)(rows - n * tile.width)); };
  const auto lanes_of = [&](int64_t n) { return min((i64)width_of(n), (i64)(i1 - i0 - n * tile.width)); };
  Right q[kMaxPieces], tq[kMaxPieces];
  KeySum<T> o[kMaxPieces], a[kMaxPieces];
  for (int64_t n = 0; n < pieces; ++n) {
    const int64_t lane = n * tile.width, size = n * Math::lanes_size(tile.width, d);
    const auto load = [&](const View &x, typename Math::Element *to) {
      return Math::load_lanes(x, head.b, head.h, head.q0 + i0 + lane, lanes_of(n), d, head.sign, width_of(n), to + size,
                              scratch.score.buffer);
    };
    q[n] = load(p.q, scratch.q);
    if (p.tq) tq[n] = load(p.tq, scratch.tq);
    o[n] = {scratch.o + ldo * lane, scratch.o_total + ldo * lane, dv, width_of(n)};
    a[n] = {scratch.a + ldo * lane, scratch.a_total + ldo * lane, dv, width_of(n)};
  }
  fill(scratch.m, rows, -kInfinity<T>);
  for (T *x : {scratch.l, scratch.l_lost, scratch.e, scratch.e_lost}) fill(x, rows, T(0));

  KeyTiles<T> tiles(head, source.of.mask, tile, i0, i1);
  for (KeysOfRange keys; tiles.next(keys);) {
    typename TangentKeys<Math>::Tile of;
    bool loaded = false;
    for (int64_t n = 0; n < pieces; ++n) {
      const int64_t lane = n * tile.width, width = width_of(n);
      Piece<T> piece;
      if (!make_piece(head, source.of.mask, i0 + lane, lanes_of(n), width, keys, piece)) continue;
      if (!loaded) source.load(head, keys, scratch.keys, of);
      loaded = true;
      const TileSpan &t = piece.span;
      o[n].expect(keys.begin), a[n].expect(keys.begin);
      Math::multiply(t.keys, width, d, Math::rows_from(of.k.keys.rows, t.j0 - of.k.origin), q[n], scratch.s, width, false); // S = K Q^T
      multiply_terms<Math>(t, d, {{p.tk ? &of.tk : nullptr, q[n]}, {p.tq ? &of.k : nullptr, tq[n]}}, scratch.ts);
      apply_options(head, piece, scratch.score, scratch.s, scratch.ts, scratch.tangents);
      if (head.dropout) load_keep(head, t, scratch.keep);
      const auto probs = Math::scores(scratch.s, scratch.p, nullptr, t.keys, width, width, 0);
      const auto tangents = Math::scores(scratch.ts, scratch.tp, nullptr, t.keys, width, width, 0);
      if (softmax_step<Math>(head, t, lane, probs, tangents, scratch)) o[n].scale(scratch.alpha), a[n].scale(scratch.alpha);
      probs.finish(t.keys), tangents.finish(t.keys);
      // O += V^T P and A += V^T (P ts) + tV^T P. Numbers that are not finite reach the queries that see them, and no others.
      struct Product {
        const typename Math::Scores *scores;
        const T *unrounded;
        KeySum<T> *sum;
      };
      const Product of_v[] = {{&probs, scratch.s, &o[n]}, {&tangents, scratch.ts, &a[n]}}, of_tv[] = {{&probs, scratch.s, &a[n]}};
      const auto multiply = [&](const View &tensor, const typename KeySource<Math>::Tile &operand, const FiniteKeys<Math> &finite,
                                const Product *products, int count) {
        const KeyRows values{tensor, p.v_scale};
        const bool nonfinite = !all_finite(values, head.b, head.kv, piece.k0 + t.j0, piece.keys_read(head), dv);
        const auto columns = nonfinite ? finite.columns(values, head.b, head.kv, piece.k0 + t.j0, piece.keys_read(head), dv)
                                       : Math::columns_from(operand.keys.columns, t.j0 - operand.origin);
        for (const Product *x = products; x < products + count; ++x) {
          multiply_keys<Math>(head, dv, width, t.keys, columns, *x->scores, 0, *x->sum);
          if (nonfinite) add_nonfinite(t, x->unrounded, values, head.b, head.kv, piece.k0, dv, x->sum->add_to());
        }
      };
      multiply(p.v, of.v, scratch.finite_v, of_v, 2);
      if (p.tv) multiply(p.tv, of.tv, scratch.finite_tv, of_tv, 1);
    }
  }

  // The sink joins the denominator, and its tangent joins e. In FP64, because a sink in the unit of q.k may leave FP32's range.
  const auto of_head = [&](const View &x) { return load_as<double>(x.dtype, x.data, x.index(0, head.h, 0, 0)); };
  const double sink = p.sinks ? of_head(p.sinks) : -kInfinity<double>, tsink = p.tsinks ? of_head(p.tsinks) : 0;
  T *const factor = scratch.l, *const tlse = scratch.e; // of each row
  for (int64_t i = 0; i < rows; ++i) {
    double reference = double(scratch.m[i]) * double(head.measure()), scale = 1;
    double sum = double(scratch.l[i]) + double(scratch.l_lost[i]), tangent = double(scratch.e[i]) + double(scratch.e_lost[i]);
    if (p.sinks) {
      const double largest = max(reference, sink), most = largest == -kInfinity<double> ? 0 : largest, of_sink = __builtin_exp(sink - most);
      scale = __builtin_exp(reference - most);
      sum = sum * scale + of_sink, tangent = tangent * scale + of_sink * tsink;
      reference = most;
    }
    factor[i] = sum == 0 ? T(0) : T(scale / sum);
    tlse[i] = sum == 0 ? T(0) : T(tangent / sum);
    if (i0 + i >= i1) continue;
    const int64_t row = head.q0 + i0 + i;
    if (p.lse) *p.lse.at<T>(head.b, head.h, row, 0) = sum == 0 ? -kInfinity<T> : T(reference + __builtin_log(sum));
    if (p.tlse) *p.tlse.at<T>(head.b, head.h, row, 0) = tlse[i];
  }
  for (int64_t n = 0; n < pieces; ++n) {
    const int64_t lane = n * tile.width, width = width_of(n);
    const auto store = [&](const View &to, const T *sum) {
      if (to) store_lanes(to, head.b, head.h, head.q0 + i0 + lane, lanes_of(n), dv, factor + lane, sum, width, scratch.score.buffer);
    };
    T *const sum = o[n].result(), *const tangent = a[n].result();
    for (int64_t r = 0; r < dv; ++r)
      for (int64_t c = 0; c < width; ++c) tangent[r * width + c] -= tlse[lane + c] * sum[r * width + c];
    store(p.out, sum), store(p.tout, tangent);
  }
}

// What forward() does for this operation.
template <class M> struct JvpPass {
  using Math = M;
  using T = typename Math::Real;
  using Source = TangentKeys<Math>;
  using Scratch = JvpScratch<Math>;
  static Source sources(const Problem &p, const TileSizes &tile) { return {p, tile, false, false, true}; }
  static void tile(const Head<T> &head, const TileSizes &tile, const Source &source, Scratch &scratch) {
    jvp_tile<Math>(head, tile, source, scratch);
  }
};

} // namespace strobe::inline STROBE_ISA
