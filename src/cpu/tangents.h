// Forward-mode differentiation, for jvp.h and backward_jvp.h: the tangents of K and V as operands, and the tangents of scores.
#pragma once
#include "forward.h"

namespace strobe::inline STROBE_ISA {

// K, V and their tangents. Tangents that the arithmetic cannot read in place are packed tile by tile.
template <class Math> struct TangentKeys {
  KeyPair<Math> of;
  KeySource<Math> k, v;

  // columns_of_k: whether products over keys use K.
  TangentKeys(const Problem &p, const TileSizes &tile, bool rows_of_values, bool columns_of_k, bool columns_of_v)
      : of{{p, rows_of_k(p), p.head_dim, true, columns_of_k, tile},
           {p, rows_of_v(p), p.head_dim_v, rows_of_values, columns_of_v, tile},
           {p, tile}},
        k(p, {p.tk, p.k_scale}, p.head_dim, true, columns_of_k, tile, false),
        v(p, {p.tv, p.v_scale}, p.head_dim_v, rows_of_values, columns_of_v, tile, false) {}

  void take(Arena &arena, const Problem &p) { of.take(arena, p); }
  void prepare(const Problem &p, const Execution &execution, char *scratch, int64_t each) const { of.prepare(p, execution, scratch, each); }

  // The elements that each thread needs for itself; and the operands of a tile of keys.
  struct Scratch {
    typename KeySource<Math>::Scratch k, v, tk, tv;
    Scratch(Arena &arena, const Problem &p, const TangentKeys &keys) : k(keys.of.k.take(arena)), v(keys.of.v.take(arena)) {
      if (p.tk) tk = keys.k.take(arena);
      if (p.tv) tv = keys.v.take(arena);
    }
  };
  struct Tile {
    typename KeySource<Math>::Tile k, v, tk, tv;
  };
  void load(const Head<typename Math::Real> &head, const KeysOfRange &keys, const Scratch &scratch, Tile &tile) const {
    tile.k = of.k.tile(of.shared_k, head.b, head.kv, keys, scratch.k);
    tile.v = of.v.tile(of.shared_v, head.b, head.kv, keys, scratch.v);
    if (head.p->tk) tile.tk = k.tile(nullptr, head.b, head.kv, keys, scratch.tk);
    if (head.p->tv) tile.tv = v.tile(nullptr, head.b, head.kv, keys, scratch.tv);
  }
};

// c = the tangent of a product of keys and queries: the sum of two products, each with the tangent of one operand.
template <class Math> struct TangentTerm {
  const typename KeySource<Math>::Tile *keys; // null: absent
  typename Math::Right queries;
};
template <class Math>
STROBE_INLINE void multiply_terms(const TileSpan &t, int64_t depth, const TangentTerm<Math> (&terms)[2], typename Math::Real *c) {
  bool started = false;
  for (const TangentTerm<Math> &term : terms) {
    if (!term.keys) continue;
    Math::multiply(t.keys, t.width, depth, Math::rows_from(term.keys->keys.rows, t.j0 - term.keys->origin), term.queries, c, t.width,
                   started);
    started = true;
  }
  if (!started) fill(c, t.keys * t.width, typename Math::Real(0));
}

// Scratch for the tangents of a piece's scores. Members that the problem does not need are null.
template <class T> struct TangentScratch {
  T *x = nullptr;         // q.k before the score's function
  T *slopes = nullptr;    // the function's derivative
  T *work = nullptr;      // a derivative in the direction of captured tensors, or tbias
  T *curvature = nullptr; // the tangent of `slopes`
  T *tx = nullptr;        // the tangent of x

  TangentScratch(Arena &arena, const Problem &p, const TileSizes &tile, bool second) {
    const int64_t size = tile.k * tile.width;
    const bool functions = p.bytecode && p.tangent_program;
    if (needs_slopes(p)) slopes = arena.take<T>(size);
    if (functions) x = arena.take<T>(size);
    if (functions && second) curvature = arena.take<T>(size), tx = arena.take<T>(size);
    if (functions || p.tbias) work = arena.take<T>(size);
  }
};

// to[key][lane] = a tensor of scores
template <class T> __attribute__((noinline)) void load_pairs(const Head<T> &head, const View &x, const TileSpan &t, T *to, T *buffer) {
  auto row_of = [&](int64_t lane, T *row) -> const T * {
    load_row(x, head.b, head.h, head.row0 + t.i0 + lane, t.j0, t.keys, row);
    return row;
  };
  if (x.stride[2] != 0) return load_lanes<T>(row_of, t.lanes, t.keys, T(1), to, t.width, buffer);
  row_of(0, buffer);
  for (int64_t j = 0; j < t.keys; ++j) fill(to + j * t.width, t.width, buffer[j]);
}

// Runs one of the codes of the caller's functions that take x, and leaves its values in `to`.
template <class T>
STROBE_INLINE void run_on(const Head<T> &head, const TileSpan &t, const score::Code &code, const T *x, char *scratch, T *to) {
  std::memcpy(to, x, sizeof(T) * size_t(t.keys * t.width));
  head.code->run(code, placed(head, {t.i0, t.j0, t.keys, t.width, t.width}), scratch, to, nullptr);
}

// Turns q.k of a piece into scores, in place, and ts, the tangent of q.k, into that of the scores. Where a key is hidden, ts is anything.
// curvature (optional): receives the tangent of the function's derivative.
template <class T>
__attribute__((noinline)) void apply_options(const Head<T> &head, const Piece<T> &piece, ScoreScratch<T> &scratch, T *s, T *ts,
                                             const TangentScratch<T> &own) {
  using V = Vec<T>;
  const Problem &p = *head.p;
  const TileSpan &t = piece.span;
  const int64_t size = t.keys * t.width;
  if (own.x) std::memcpy(own.x, s, sizeof(T) * size_t(size));
  apply_options(head, piece, t, scratch, s, own.slopes);
  const V scale(head.scale);
  for (int64_t n = 0; n < size; n += V::kLanes) (V::load(ts + n) * scale).store(ts + n);
  if (own.tx) std::memcpy(own.tx, ts, sizeof(T) * size_t(size));
  if (own.curvature) {
    const score::TangentCode &code = head.code->tangents;
    if (code.curvature.score.slot >= 0) {
      run_on(head, t, code.curvature, own.x, scratch.functions, own.curvature);
      for (int64_t n = 0; n < size; n += V::kLanes) (V::load(own.curvature + n) * V::load(ts + n)).store(own.curvature + n);
    } else {
      fill(own.curvature, size, T(0));
    }
    if (code.rest_of_slope.score.slot >= 0) {
      run_on(head, t, code.rest_of_slope, own.x, scratch.functions, own.work);
      for (int64_t n = 0; n < size; n += V::kLanes) (V::load(own.curvature + n) + V::load(own.work + n)).store(own.curvature + n);
    }
  }
  if (own.slopes)
    for (int64_t n = 0; n < size; n += V::kLanes) (V::load(ts + n) * V::load(own.slopes + n)).store(ts + n);
  const auto add = [&](const T *more) {
    for (int64_t n = 0; n < size; n += V::kLanes) (V::load(ts + n) + V::load(more + n)).store(ts + n);
  };
  if (own.x && head.code->tangents.rest.score.slot >= 0) {
    run_on(head, t, head.code->tangents.rest, own.x, scratch.functions, own.work);
    add(own.work);
  }
  if (p.tbias) {
    load_pairs(head, p.tbias, t, own.work, scratch.buffer);
    add(own.work);
  }
}

} // namespace strobe::inline STROBE_ISA
