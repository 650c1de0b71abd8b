// The derivatives of the gradients in the direction of tangents: forward-mode differentiation of the backward, formula by formula. With the
// cotangents of dQ, dK, ... as tangents it is the backward's own backward, because the second derivatives are symmetric. A tile takes
// twelve products: S, its tangent (two), dP, its tangent (two), and two each for dQ, dK and dV.
#pragma once
#include "backward_bias.h"
#include "tangents.h"

namespace strobe::inline STROBE_ISA {

template <class Math> struct BackwardJvpScratch {
  using T = typename Math::Real;
  using Element = typename Math::Element;
  typename TangentKeys<Math>::Scratch keys;
  FiniteKeys<Math> finite_k, finite_tk;
  ScoreScratch<T> score;
  TangentScratch<T> tangents;
  Element *q, *tq, *d_o, *td_o, *q_rows, *tq_rows, *do_rows, *tdo_rows;  // of a query tile
  Element *p_rows, *tp_rows, *ds_lanes, *tds_lanes, *ds_rows, *tds_rows; // of a piece
  T *finite_rows;                                                 // copies of the rows of a tile that has numbers that are not finite
  T *lse, *excess, *tlse, *delta, *tdelta, *dlse, *tdlse, *scale; // of each row: LSE as Probability takes it; D and dLSE; dQ's factor
  // Of a piece: S, dP and their tangents, which become P, dS and their tangents; then dS becomes the gradient by scale q.k.
  T *s, *ts, *dp, *tdp;
  T *dq, *dq_total, *row, *keep = nullptr;

  BackwardJvpScratch(Arena &arena, const Problem &problem, const TileSizes &tile, const TangentKeys<Math> &source)
      : keys(arena, problem, source), finite_k(arena, tile.k, problem.head_dim), finite_tk(arena, tile.k, problem.head_dim),
        score(arena, problem, tile.k, tile.width, max(max(problem.head_dim, problem.head_dim_v), tile.k)),
        tangents(arena, problem, tile, true) {
    const int64_t d = problem.head_dim, dv = problem.head_dim_v, pieces = pieces_of(tile), widest = round_to(max(d, dv), 16);
    for (Element **x : {&q, &tq}) *x = arena.take<Element>(pieces * Math::lanes_size(tile.width, d));
    for (Element **x : {&d_o, &td_o}) *x = arena.take<Element>(pieces * Math::lanes_size(tile.width, dv));
    for (Element **x : {&q_rows, &tq_rows}) *x = arena.take<Element>(Math::rows_size(tile.q, d));
    for (Element **x : {&do_rows, &tdo_rows}) *x = arena.take<Element>(Math::rows_size(tile.q, dv));
    for (Element **x : {&p_rows, &tp_rows, &ds_rows, &tds_rows}) *x = arena.take<Element>(Math::scores_size(tile.k, tile.q));
    for (Element **x : {&ds_lanes, &tds_lanes}) *x = arena.take<Element>(Math::scores_size(tile.k, tile.width));
    finite_rows = arena.take<T>(4 * tile.q * widest);
    for (T **x : {&lse, &excess, &tlse, &delta, &tdelta, &dlse, &tdlse, &scale}) *x = arena.take<T>(tile.q);
    for (T **x : {&s, &ts, &dp, &tdp}) *x = arena.take<T>(tile.k * tile.width);
    for (T **x : {&dq, &dq_total}) *x = arena.take<T>(round_to(d, 16) * tile.q);
    row = arena.take<T>(2 * round_to(dv, 16));
    if (problem.dropout > 0) keep = arena.take<T>(tile.k * tile.width);
  }
};

// The derivative of D = sum_c dO_c O_c.
template <class T> STROBE_INLINE double tangent_of_delta(const Head<T> &head, int64_t token, T *buffer) {
  const Problem &p = *head.p;
  return row_product(head, p.dout, p.tout, token, buffer) + (p.tdout ? row_product(head, p.tdout, p.out, token, buffer) : 0);
}

// A prepared query tile.
template <class Math> struct TangentQueries {
  using T = typename Math::Real;
  int64_t i0, i1, rows, pieces, width;
  bool finite; // otherwise the rows are copies made by finite_rows()
  typename Math::Right q[kMaxPieces], tq[kMaxPieces], d_o[kMaxPieces], td_o[kMaxPieces], q_rows, tq_rows, do_rows, tdo_rows;

  int64_t piece_lanes(int64_t n) const { return min((i64)width, (i64)(i1 - i0 - n * width)); }
  int64_t piece_width(int64_t n) const { return min((i64)width, (i64)(rows - n * width)); }

  TangentQueries(const Head<T> &head, const TileSizes &tile, BackwardJvpScratch<Math> &scratch)
      : i0(head.queries.i0), i1(head.queries.i1), rows(round_to(i1 - i0, 16)), pieces(div_up(rows, tile.width)), width(tile.width) {
    const Problem &p = *head.p;
    const int64_t d = p.head_dim, dv = p.head_dim_v, token = head.q0 + i0, real = i1 - i0;
    const auto is_finite = [&](const View &x, int64_t columns) { return !x || all_finite(x, head.b, head.h, token, real, columns); };
    finite = is_finite(p.q, d) && is_finite(p.tq, d) && is_finite(p.dout, dv) && is_finite(p.tdout, dv);
    const auto load = [&](int place, const View &x, int64_t columns, T sign, typename Math::Element *lanes, typename Math::Right *pieces_to,
                          typename Math::Element *rows_at, typename Math::Right &rows_to) {
      if (!x) return;
      for (int64_t n = 0; n < pieces; ++n)
        pieces_to[n] = Math::load_lanes(x, head.b, head.h, token + n * width, piece_lanes(n), columns, sign, piece_width(n),
                                        lanes + n * Math::lanes_size(width, columns), scratch.score.buffer);
      if (finite) {
        rows_to = Math::load_rows(x, head.b, head.h, token, real, columns, rows_at);
      } else {
        T *const copy = scratch.finite_rows + place * tile.q * round_to(max(d, dv), 16);
        rows_to = Math::load_rows(finite_rows(x, head.b, head.h, token, real, columns, copy), 0, 0, 0, real, columns, rows_at);
      }
    };
    load(0, p.q, d, head.sign, scratch.q, q, scratch.q_rows, q_rows);
    load(1, p.tq, d, head.sign, scratch.tq, tq, scratch.tq_rows, tq_rows);
    load(2, p.dout, dv, T(1), scratch.d_o, d_o, scratch.do_rows, do_rows);
    load(3, p.tdout, dv, T(1), scratch.td_o, td_o, scratch.tdo_rows, tdo_rows);
    for (int64_t i = 0; i < rows; ++i) load_row_statistics(head, i, scratch);
  }

private:
  void load_row_statistics(const Head<T> &head, int64_t i, BackwardJvpScratch<Math> &scratch) const {
    const Problem &p = *head.p;
    const bool real = i0 + i < i1;
    const int64_t token = head.q0 + i0 + i;
    const auto number = [&](const View &x) { return real && x ? *x.at<T>(head.b, head.h, token, 0) : T(0); };
    double lse = real ? double(number(p.lse)) : -kInfinity<double>;
    if (lse == -kInfinity<double>) lse = kInfinity<double>; // so that P is 0 in lanes past the end and in rows that see no key
    const RowLse<T> row = Probability<Math>::row(head, lse);
    scratch.lse[i] = row.lse, scratch.excess[i] = row.excess;
    scratch.tlse[i] = number(p.tlse), scratch.dlse[i] = number(p.dlse), scratch.tdlse[i] = number(p.tdlse);
    scratch.delta[i] = real ? T(row_product(head, p.dout, p.out, token, scratch.row)) : T(0);
    scratch.tdelta[i] = real ? T(tangent_of_delta(head, token, scratch.row)) : T(0);
  }
};

// Computes P and dS of a piece, before the score's function, with their tangents: P and tP after dropout in scratch.s and ts, dS and tdS in
// scratch.dp and tdp. Where a key is hidden all are 0.
template <class Math>
__attribute__((noinline)) void recompute(const Head<typename Math::Real> &head, const TangentQueries<Math> &queries, int64_t n,
                                         const Piece<typename Math::Real> &piece, const typename TangentKeys<Math>::Tile &of,
                                         BackwardJvpScratch<Math> &scratch) {
  using T = typename Math::Real;
  using V = Vec<T>;
  const Problem &p = *head.p;
  const TileSpan &t = piece.span;
  const int64_t lane = n * queries.width, width = t.width;
  const auto rows_of = [&](const typename KeySource<Math>::Tile &x) { return Math::rows_from(x.keys.rows, t.j0 - x.origin); };
  Math::multiply(t.keys, width, p.head_dim, rows_of(of.k), queries.q[n], scratch.s, width, false);
  multiply_terms<Math>(t, p.head_dim, {{p.tk ? &of.tk : nullptr, queries.q[n]}, {p.tq ? &of.k : nullptr, queries.tq[n]}}, scratch.ts);
  Math::multiply(t.keys, width, p.head_dim_v, rows_of(of.v), queries.d_o[n], scratch.dp, width, false);
  multiply_terms<Math>(t, p.head_dim_v, {{p.tv ? &of.tv : nullptr, queries.d_o[n]}, {p.tdout ? &of.v : nullptr, queries.td_o[n]}},
                       scratch.tdp);
  apply_options(head, piece, scratch.score, scratch.s, scratch.ts, scratch.tangents);
  if (head.dropout) load_keep(head, t, scratch.keep);
  const V hidden(-kInfinity<T>), zero(T(0));
  for (int64_t c = 0; c < width; c += V::kLanes) {
    const int64_t row = lane + c;
    const Probability<Math> probability(head, scratch.lse + row, scratch.excess + row);
    const V tlse = V::load(scratch.tlse + row), delta = V::load(scratch.delta + row), tdelta = V::load(scratch.tdelta + row);
    const V dlse = V::load(scratch.dlse + row), tdlse = V::load(scratch.tdlse + row);
    for (int64_t j = 0; j < t.keys; ++j) {
      const int64_t at = j * width + c;
      const V score = V::load(scratch.s + at), keep = head.dropout ? V::load(scratch.keep + at) : V(T(1));
      const auto unseen = (score == hidden) | (probability.lse == V(kInfinity<T>));
      const V prob = probability(score), tprob = prob * (V::load(scratch.ts + at) - tlse);
      const V grad = V::load(scratch.dp + at) * keep - delta + dlse, tgrad = V::load(scratch.tdp + at) * keep - tdelta + tdlse;
      select(unseen, zero, prob * keep).store(scratch.s + at), select(unseen, zero, tprob * keep).store(scratch.ts + at);
      select(unseen, zero, prob * grad).store(scratch.dp + at);
      select(unseen, zero, tprob * grad + prob * tgrad).store(scratch.tdp + at);
    }
  }
}

// From the gradients by the score to those by scale q.k, with their tangents.
template <class T> STROBE_INLINE void through_function(int64_t size, const TangentScratch<T> &own, T *ds, T *tds) {
  using V = Vec<T>;
  if (!own.slopes) return;
  const V zero(T(0));
  for (int64_t n = 0; n < size; n += V::kLanes) {
    const V x = V::load(ds + n), tx = V::load(tds + n), slope = V::load(own.slopes + n);
    V sum = select(tx == zero, zero, tx * slope); // what is hidden stays 0, whatever the derivatives are
    if (own.curvature) sum += select(x == zero, zero, x * V::load(own.curvature + n));
    select(x == zero, zero, x * slope).store(ds + n), sum.store(tds + n);
  }
}

// The derivatives of a query tile's gradients: of its dQ, and of its terms of dK and dV.
template <class Math>
void backward_jvp_tile(const Head<typename Math::Real> &head, const TileSizes &tile, const TangentKeys<Math> &source,
                       BackwardJvpScratch<Math> &scratch, const KeyGradients<typename Math::Real> &sums) {
  using T = typename Math::Real;
  using V = Vec<T>;
  using Scores = typename Math::Scores;
  const Problem &p = *head.p;
  const int64_t d = p.head_dim, dv = p.head_dim_v, ldk = round_to(d, 16);
  const bool want_dq = bool(p.dq), want_dk = bool(p.dk), want_dv = bool(p.dv);
  const TangentQueries<Math> queries(head, tile, scratch);
  KeySum<T> dq[kMaxPieces];
  for (int64_t n = 0; n < queries.pieces; ++n)
    dq[n] = {scratch.dq + ldk * n * tile.width, scratch.dq_total + ldk * n * tile.width, d, queries.piece_width(n)};
  KeyTiles<T> tiles(head, source.of.mask, tile, queries.i0, queries.i1);
  for (KeysOfRange keys; tiles.next(keys);) {
    typename TangentKeys<Math>::Tile of;
    bool loaded = false;
    for (int64_t n = 0; n < queries.pieces; ++n) {
      Piece<T> piece;
      if (!make_piece(head, source.of.mask, queries.i0 + n * tile.width, queries.piece_lanes(n), queries.piece_width(n), keys, piece))
        continue;
      if (!loaded) source.load(head, keys, scratch.keys, of);
      loaded = true;
      const TileSpan &t = piece.span;
      const int64_t lane = n * tile.width, lanes = queries.piece_lanes(n), j0 = keys.k0 - head.k_begin + t.j0;
      dq[n].expect(keys.begin);
      recompute(head, queries, n, piece, of, scratch);
      through_function(t.keys * t.width, scratch.tangents, scratch.dp, scratch.tdp);
      const auto operand = [&](T *x, typename Math::Element *as_lanes, typename Math::Element *as_rows) {
        const Scores scores = Math::scores(x, as_lanes, as_rows, t.keys, t.width, tile.q, lane);
        for (int64_t c = 0; !Math::kScoresInPlace && c < t.width; c += V::kLanes)
          for (int64_t j = 0; j < t.keys; j += 2) {
            const bool both = j + 1 < t.keys;
            scores.put(j, c, V::load(x + j * t.width + c), both ? V::load(x + (j + 1) * t.width + c) : V(T(0)), both);
          }
        scores.finish(t.keys);
        return scores;
      };
      const Scores probs = operand(scratch.s, nullptr, scratch.p_rows), tprobs = operand(scratch.ts, nullptr, scratch.tp_rows);
      const Scores grads = operand(scratch.dp, scratch.ds_lanes, scratch.ds_rows),
                   tgrads = operand(scratch.tdp, scratch.tds_lanes, scratch.tds_rows);
      // sum += weights^T x over the piece's queries, where x is Q, dO or a tangent of these
      const auto add_queries = [&](const View &x, const Scores &weights, const T *unrounded, const typename Math::Right &rows,
                                   int64_t columns, T *sum) {
        if (!x) return;
        const int64_t ld = round_to(columns, 16);
        Math::multiply(t.keys, ld, lanes, weights.rows(), Math::right_from(rows, lane), sum + j0 * ld, ld, true);
        if (!queries.finite) add_nonfinite_queries(head, t, x, columns, unrounded, sum + j0 * ld, ld);
      };
      if (want_dv) {
        add_queries(p.dout, tprobs, scratch.ts, queries.do_rows, dv, sums.dv);
        add_queries(p.tdout, probs, scratch.s, queries.tdo_rows, dv, sums.dv);
      }
      if (want_dk) {
        add_queries(p.q, tgrads, scratch.tdp, queries.q_rows, d, sums.dk);
        add_queries(p.tq, grads, scratch.dp, queries.tq_rows, d, sums.dk);
      }
      // dQ^T += x^T weights over the piece's keys, where x is K or its tangent
      const auto add_keys = [&](const View &x, const typename KeySource<Math>::Tile &tile_of, const FiniteKeys<Math> &finite,
                                const Scores &weights, const T *unrounded) {
        if (!x) return;
        const KeyRows values{x, p.k_scale};
        const bool nonfinite = !all_finite(values, head.b, head.kv, piece.k0 + t.j0, piece.keys_read(head), d);
        const auto columns = nonfinite ? finite.columns(values, head.b, head.kv, piece.k0 + t.j0, piece.keys_read(head), d)
                                       : Math::columns_from(tile_of.keys.columns, t.j0 - tile_of.origin);
        multiply_keys<Math>(head, d, t.width, t.keys, columns, weights, 0, dq[n]);
        if (nonfinite) add_nonfinite(t, unrounded, values, head.b, head.kv, piece.k0, d, dq[n].add_to());
      };
      if (!want_dq) continue;
      add_keys(p.k, of.k, scratch.finite_k, tgrads, scratch.tdp);
      add_keys(p.tk, of.tk, scratch.finite_tk, grads, scratch.dp);
    }
  }
  if (!want_dq) return;
  fill(scratch.scale, queries.rows, T(p.scale));
  for (int64_t n = 0; n < queries.pieces; ++n) {
    const int64_t lane = n * tile.width;
    store_lanes(p.dq, head.b, head.h, head.q0 + queries.i0 + lane, queries.piece_lanes(n), d, scratch.scale + lane, dq[n].result(),
                queries.piece_width(n), scratch.score.buffer);
  }
}

// Calls use(piece, n) for each piece of the tile, after recompute().
template <class Math, class Use>
void each_piece(const Head<typename Math::Real> &head, const TileSizes &tile, const TangentKeys<Math> &source,
                BackwardJvpScratch<Math> &scratch, Use &&use) {
  using T = typename Math::Real;
  const TangentQueries<Math> queries(head, tile, scratch);
  KeyTiles<T> tiles(head, source.of.mask, tile, queries.i0, queries.i1);
  for (KeysOfRange keys; tiles.next(keys);) {
    typename TangentKeys<Math>::Tile of;
    source.load(head, keys, scratch.keys, of);
    for (int64_t n = 0; n < queries.pieces; ++n) {
      Piece<T> piece;
      if (!make_piece(head, source.of.mask, queries.i0 + n * tile.width, queries.piece_lanes(n), queries.piece_width(n), keys, piece))
        continue;
      recompute(head, queries, n, piece, of, scratch);
      use(piece, n);
    }
  }
}

// The derivatives of captured tensors' gradients.
template <class Math>
void backward_jvp_captured_tile(const Head<typename Math::Real> &head, const TileSizes &tile, const TangentKeys<Math> &source,
                                const CapturedItems &items, BackwardJvpScratch<Math> &scratch, double *sums) {
  using T = typename Math::Real;
  using V = Vec<T>;
  const score::Bytecode &code = *head.code;
  T *const x = scratch.tangents.x, *const work = scratch.s, *const values = scratch.ts; // P is not needed
  each_piece(head, tile, source, scratch, [&](const Piece<T> &piece, int64_t) {
    const TileSpan &t = piece.span;
    const int64_t size = t.keys * t.width;
    for (int32_t m = 0; m < code.load_count; ++m) {
      const score::LoadCode &load = code.loads[m];
      // values = tdS slope + dS (curvature tx + rest)
      const auto run = [&](const score::Code &of) { run_on(head, t, of, x, scratch.score.functions, work); };
      run(load.slope);
      for (int64_t n = 0; n < size; n += V::kLanes) {
        const V grad = V::load(scratch.tdp + n);
        select(grad == V(T(0)), V(T(0)), grad * V::load(work + n)).store(values + n);
      }
      const auto add = [&](const score::Code &of, const T *factor) {
        if (of.score.slot < 0) return;
        run(of);
        for (int64_t n = 0; n < size; n += V::kLanes) {
          const V grad = V::load(scratch.dp + n), by = factor ? V::load(work + n) * V::load(factor + n) : V::load(work + n);
          (V::load(values + n) + select(grad == V(T(0)), V(T(0)), grad * by)).store(values + n);
        }
      };
      add(load.curvature, scratch.tangents.tx);
      add(load.rest, nullptr);
      CapturedPiece<Math>(head, t, load, values, work, scratch.score.functions, sums + items.first[load.captured]).add(x);
    }
  });
}

// dsinks_h = sum over b, i of P (dLSE - D), with P = exp(sink_h - LSE), and its derivative
template <class T> void backward_jvp_sinks(const Problem &p, int64_t h, T *buffer) {
  const auto of_head = [&](const View &x) { return load_as<double>(x.dtype, x.data, x.index(0, h, 0, 0)); };
  const double sink = of_head(p.sinks), tsink = p.tsinks ? of_head(p.tsinks) : 0;
  double sum = 0;
  for (int64_t b = 0; b < p.batch; ++b) {
    const auto rows = p.rows_q(b);
    const Head<T> head(p, b, h, {});
    for (int64_t i = rows.begin; i < rows.begin + rows.length; ++i) {
      const auto number = [&](const View &x) { return x ? double(*x.at<T>(b, h, i, 0)) : 0; };
      const double lse = number(p.lse);
      if (!(lse > -__builtin_inf())) continue;
      const double prob = __builtin_exp(sink - lse), rest = number(p.dlse) - row_product(head, p.dout, p.out, i, buffer);
      sum += prob * ((tsink - number(p.tlse)) * rest + number(p.tdlse) - tangent_of_delta(head, i, buffer));
    }
  }
  *p.dsinks.at<T>(0, h, 0, 0) = T(sum);
}

// What backward() does for this operation.
template <class M> struct BackwardJvpPass {
  using Math = M;
  using T = typename Math::Real;
  using Source = TangentKeys<Math>;
  using Scratch = BackwardJvpScratch<Math>;
  static Source sources(const Problem &p, const TileSizes &tile) { return {p, tile, true, true, false}; }
  static void tile(const Head<T> &head, const TileSizes &tile, const Source &source, Scratch &scratch, const KeyGradients<T> &sums) {
    backward_jvp_tile<Math>(head, tile, source, scratch, sums);
  }
  static void bias(const Head<T> &head, const TileSizes &tile, bool rows, int64_t first, const Source &source, Scratch &scratch, T *sum) {
    each_piece(head, tile, source, scratch, [&](const Piece<T> &piece, int64_t n) {
      const TileSpan &t = piece.span;
      for (int64_t c = 0; c < t.width; c += Vec<T>::kLanes)
        for (int64_t j = 0; j < t.keys; ++j)
          add_to_bias(t, tile, rows, first + n * tile.width, j, c, Vec<T>::load(scratch.tdp + j * t.width + c), sum);
    });
  }
  static void captured(const Head<T> &head, const TileSizes &tile, const Source &source, const CapturedItems &items, Scratch &scratch,
                       double *sums) {
    backward_jvp_captured_tile<Math>(head, tile, source, items, scratch, sums);
  }
  static void sinks(const Problem &p, int64_t h, T *buffer) { backward_jvp_sinks<T>(p, h, buffer); }
};

} // namespace strobe::inline STROBE_ISA
