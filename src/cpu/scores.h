// One tile of scores: the problem's options are applied before softmax reads it. Rows are keys, lanes are queries.
#pragma once
#include "../../kernels/attention/dropout.h"
#include "../../kernels/attention/schedule.h"
#include "../../kernels/attention/score.h"
#include "mask_map.h"
#include "score/bytecode.h"

namespace strobe::inline STROBE_ISA {

// A tile of scores: the queries [i0, i0 + lanes) and the keys [j0, j0 + keys) are s[key * width + lane].
struct TileSpan {
  int64_t i0, lanes, width;
  int64_t j0, keys;
  // At most `most` keys from j0 + from on. If the span begins at a multiple of kKeyAlign, the chunk ends at the next multiple of `most`,
  // counted over all keys, so that chunks do not depend on where the span begins.
  STROBE_INLINE TileSpan chunk(int64_t from, int64_t most) const {
    const int64_t left = j0 % kKeyAlign == 0 ? most - (j0 + from) % most : most;
    return {i0, lanes, width, j0 + from, keys - from < left ? keys - from : left};
  }
};

// The constants of a problem, of one head and of one sequence. Queries i and keys j are positions in the whole sequence.
template <class T> struct Head {
  int64_t b, h;           // batch or sequence, query head
  int64_t kv;             // its key head
  int64_t q0;             // query i is row q0 + i of Q, and of tensors with Q's rows
  int64_t row0;           // query i is row row0 + i of mask and bias
  int64_t k_begin, k_end; // the sequence's rows of K and V
  QuerySpan queries;      // the queries that these constants belong to
  Band band;
  BlockRow no_blocks{nullptr, 0, 0};
  const Problem *p;

  bool additive; // there is a function of q.k, a penalty or a bias: scores are kept in their own unit, otherwise as q.k
  T scale, unit; // score = q.k * scale; exp2's argument = (s - m) * unit
  T slack;       // how far m may lag behind the running maximum
  T sign;        // the factor of Q, chosen so that q.k grows with the score
  T cap, slope;
  const score::Bytecode *code; // the functions of the score and of the mask; null: there are none
  bool computes, hides;        // computes: the code computes scores; hides: it may hide keys
  bool penalised;              // the penalty's slope times a distance is subtracted
  bool dropout;
  DropoutKey key;
  u32 threshold;

  Head(const Problem &problem, int64_t batch, int64_t head, const QuerySpan &span) : b(batch), h(head), queries(span), p(&problem) {
    kv = head / problem.group();
    const auto k = problem.rows_k(batch);
    row0 = span.range.local - span.range.start;
    q0 = problem.rows_q(batch).begin + row0;
    k_begin = k.begin, k_end = k.begin + k.length;
    band = Band::make(problem.whole_q(batch), problem.whole_k(batch), problem.bottom_right, problem.window_left, problem.window_right);
    code = problem.bytecode;
    computes = code && code->forward.score.slot >= 0;
    hides = computes || (code && code->forward.seen.slot >= 0);
    penalised = code && code->penalised;
    additive = curved(problem) || penalised || problem.bias || outsized(problem.scale);
    sign = !additive && problem.scale < 0 ? T(-1) : T(1);
    scale = T(additive ? problem.scale : problem.scale * double(sign));
    unit = T(additive ? kLog2e<double> : double(scale) * kLog2e<double>);
    slack = problem.exact_max ? T(0) : T(8) / unit; // P <= 2^8
    cap = T(code ? code->cap : 0);
    slope = penalised ? number(code->slope) : T(0);
    dropout = problem.dropout > 0;
    if (dropout) {
      key = problem.rng ? dropout_key(u64(problem.rng[0]), u64(problem.rng[1])) : dropout_key(problem.seed, problem.offset);
      threshold = dropout_threshold(problem.dropout);
    }
  }

  // What the penalty's slope is multiplied by counts from this key.
  STROBE_INLINE int64_t opposite(int64_t i) const { return i + (penalised && !code->counts_offset ? 0 : band.offset); }
  // Whether the score is not linear in q.k.
  static STROBE_INLINE bool curved(const Problem &problem) { return problem.bytecode && problem.bytecode->curved; }
  // The factor from scores as they are kept to scores in their own unit.
  STROBE_INLINE T measure() const { return additive ? T(1) : scale; }
  // Whether these are only some of a tile's queries, so that the cells of a mask's map do not apply to them.
  STROBE_INLINE bool cut() const { return queries.cut; }
  // The positions of the keys that the call holds.
  STROBE_INLINE int64_t ranges_k() const { return p->part ? p->part.count_k : 1; }
  STROBE_INLINE RowRange range_k(int64_t n) const { return p->range_k(b, n); }

  // The row of mask blocks that contains the queries from i0 on.
  STROBE_INLINE BlockRow blocks(int64_t i0) const {
    const Problem::Blocks &m = p->blocks;
    if (!m.present) return no_blocks;
    const int64_t matrix = (m.batch > 1 ? p->part.first_batch + b : 0) * m.heads + (m.heads > 1 ? p->part.first_head + h : 0);
    int64_t row = i0 / m.block_q, base = matrix * (m.rows + 1);
    int64_t begin = clamp(m.row_ptr[base + row], 0, m.kept), end = clamp(m.row_ptr[base + row + 1], begin, m.kept);
    static const i32 nothing = 0; // a row without entries is still a row
    const int64_t to_full = m.kept > 0 && m.full && hides && !computes ? m.full - m.col : 0;
    return {m.kept > 0 ? m.col + begin : &nothing, end - begin, m.block_k, to_full};
  }

private:
  STROBE_INLINE T number(const score::HeadNumber &x) const {
    int64_t at = 0;
    for (int32_t axis = 0; axis < x.rank; ++axis) {
      const auto &of = x.axes[axis];
      int64_t index = (of.of_head ? p->part.first_head + h : p->part.first_batch + b) - of.first;
      if (index < 0) index += of.size; // it counts from the end
      at += clamp(index, 0, of.size - 1) * of.stride;
    }
    const T value = load_as<T>(x.dtype, x.data, at);
    return x.negative ? -value : value;
  }
  // Whether the scale must multiply the scores and not exp2's argument: the scale's reciprocal leaves FP32's range, or the scale makes
  // scores of 2^31 and more, whose rounding would become a factor outside that range.
  static STROBE_INLINE bool outsized(double scale) { return !(__builtin_fabs(scale) > 1e-30 && __builtin_fabs(scale) <= 1e4); }
  static STROBE_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }
};

// Scratch of one tile. Members that the problem does not need are null.
template <class T> struct ScoreScratch {
  T *add = nullptr;                    // bias, and -inf where the mask hides
  T *buffer = nullptr;                 // 16 rows
  T *first = nullptr, *last = nullptr; // the first and last visible key of each lane, relative to the tile
  char *functions = nullptr;           // scratch of the caller's functions

  ScoreScratch(Arena &arena, const Problem &p, int64_t tile_k, int64_t width, int64_t columns) {
    if (p.mask || p.bias) add = arena.take<T>(tile_k * width);
    buffer = arena.take<T>(16 * round_to(columns, 16));
    first = arena.take<T>(width);
    last = arena.take<T>(width);
    if (p.bytecode) functions = arena.take<char>(p.bytecode->scratch_bytes);
  }
};

template <class T> constexpr T kInfinity = T(__builtin_inf());

// row[j] = bias of query i and key j0 + j, -inf where the mask hides the key
template <class T> void load_additive_row(const Head<T> &head, int64_t i, int64_t j0, int64_t count, bool use_mask, T *row) {
  const Problem &p = *head.p;
  const View &m = p.mask;
  if (p.bias)
    load_row(p.bias, head.b, head.h, head.row0 + i, j0, count, row);
  else
    fill(row, count, T(0));
  if (!use_mask) return;
  const uint8_t *seen = m.at<uint8_t>(head.b, head.h, head.row0 + i, j0);
  if (m.stride[3] == 1)
    for (int64_t j = 0; j < count; ++j) row[j] = seen[j] ? row[j] : -kInfinity<T>;
  else
    for (int64_t j = 0; j < count; ++j) row[j] = seen[j * m.stride[3]] ? row[j] : -kInfinity<T>;
}

// Loads bias and mask, as load_additive_row() does, for a tile: add[key][lane].
template <class T>
__attribute__((noinline)) void load_additive(const Head<T> &head, const TileSpan &t, bool use_mask, ScoreScratch<T> &scratch) {
  const Problem &p = *head.p;
  const View &m = p.mask;
  auto row_of = [&](int64_t i, T *row) { load_additive_row(head, i, t.j0, t.keys, use_mask, row); };
  if ((p.bias && p.bias.stride[2] != 0) || (use_mask && m.stride[2] != 0)) {
    auto of_lane = [&](int64_t lane, T *row) -> const T * {
      row_of(t.i0 + lane, row);
      return row;
    };
    load_lanes<T>(of_lane, t.lanes, t.keys, T(1), scratch.add, t.width, scratch.buffer);
  } else {
    row_of(t.i0, scratch.buffer);
    for (int64_t j = 0; j < t.keys; ++j) fill(scratch.add + j * t.width, t.width, scratch.buffer[j]);
  }
}

// Whether the backward needs d score / d (scaled q.k).
STROBE_INLINE bool needs_slopes(const Problem &p) {
  const score::Bytecode *code = p.bytecode;
  return code && code->curved && (code->forward.score.slot < 0 || code->backward.slope.slot >= 0);
}

// The scores of a head, as the caller's functions see them.
template <class T> STROBE_INLINE score::Scores placed(const Head<T> &head, score::Scores t, bool keys_are_rows = true) {
  const Problem::Part &part = head.p->part;
  t.batch = part.first_batch + head.b, t.head = part.first_head + head.h, t.offset = head.band.offset;
  t.keys_are_rows = keys_are_rows, t.scale = double(head.scale);
  return t;
}
// Applies the caller's functions to scores: to those of a tile, whose rows are keys, or to a row of keys.
template <class T>
STROBE_INLINE void run_functions(const Head<T> &head, score::Scores t, bool keys_are_rows, char *scratch, T *s, T *slopes) {
  head.code->run(slopes ? head.code->backward : head.code->forward, placed(head, t, keys_are_rows), scratch, s, slopes);
}

// From q.k of a head to the score before bias and mask.
template <class T> struct ScoreTerms {
  using V = Vec<T>;
  const bool additive, computed, capped, distances; // computed: by the caller's function
  const bool penalised, has_sign;
  const V scale, cap, inverse_cap, slope, beta, beta_ln2, shift;

  STROBE_INLINE explicit ScoreTerms(const Head<T> &head)
      : additive(head.additive), computed(head.computes), capped(has_form(head, score::Form::softcap)),
        distances(has_form(head, score::Form::hyperbolic)), penalised(head.penalised), has_sign(penalised && head.code->has_sign),
        scale(head.scale), cap(head.cap), inverse_cap(T(1) / head.cap), slope(head.slope), beta(T(head.code ? head.code->beta : 0)),
        beta_ln2(T(head.code ? head.code->beta * kLn2<double> : 0)), shift(T(head.code ? head.code->shift : 0)) {}
  // distance: the penalty's. keep(d score / d (scaled q.k)) is called if the score is a function of q.k.
  template <class Keep> STROBE_INLINE V operator()(V x, V distance, Keep &&keep) const {
    if (!additive) return x;
    if (!computed) x *= scale;
    V derivative;
    if (capped) {
      x = softcap(x, cap, inverse_cap, derivative);
      keep(derivative);
    } else if (distances) {
      x = hyperbolic(arccosh2(-x, derivative), beta_ln2, beta, shift, derivative);
      keep(derivative);
    }
    return !penalised ? x : has_sign ? x - slope * distance : x + alibi(slope, distance);
  }
  // add: the bias; or -inf, which hides the key, as a -inf from the caller's function does.
  STROBE_INLINE V plus(V x, V add) const {
    const V hidden(-kInfinity<T>);
    auto hides = add == hidden;
    if (computed) hides |= x == hidden;
    return select(hides, hidden, x + add);
  }

private:
  static STROBE_INLINE bool has_form(const Head<T> &head, score::Form form) { return head.code && head.code->form == form; }
};

// Turns q.k into scores, in place. hides: the functions may hide keys here. slopes (optional): receives d score / d (scaled q.k), if the
// score is a function of q.k.
template <class T>
__attribute__((noinline)) void apply_options(const Head<T> &head, const TileSpan &t, bool band_masked, bool use_mask, bool hides,
                                             ScoreScratch<T> &scratch, T *s, T *slopes) {
  using V = Vec<T>;
  constexpr int L = V::kLanes;
  const Problem &p = *head.p;
  bool use_add = use_mask || p.bias;
  if (use_add) load_additive(head, t, use_mask, scratch);
  if (band_masked) {
    for (int64_t lane = 0; lane < t.width; ++lane) {
      Range seen = head.band.keys(t.i0 + lane);
      scratch.first[lane] = T(min(max(seen.begin - t.j0, 0ll), (i64)t.keys));
      scratch.last[lane] = T(min(max(seen.end - 1 - t.j0, -1ll), (i64)t.keys));
    }
  }
  const V hidden(-kInfinity<T>);
  const ScoreTerms<T> terms(head);
  const score::Scores of_functions{t.i0, t.j0, t.keys, t.width, t.width};
  if (head.computes) run_functions(head, of_functions, true, scratch.functions, s, slopes);
  const bool more = !head.computes || terms.penalised || use_add || band_masked;
  for (int64_t lane = 0; more && lane < t.width; lane += L) {
    V distance = V(T(head.opposite(t.i0 + lane) - t.j0)) + V::iota();
    V first = band_masked ? V::load(scratch.first + lane) : V(T(0)), last = band_masked ? V::load(scratch.last + lane) : V(T(0));
    for (int64_t j = 0; j < t.keys; ++j) {
      T *at = s + j * t.width + lane;
      V x = terms(V::load(at), distance - V(T(j)), [&](V derivative) __attribute__((always_inline)) {
        if (slopes) derivative.store(slopes + j * t.width + lane);
      });
      if (use_add) x = terms.plus(x, V::load(scratch.add + j * t.width + lane));
      if (band_masked) x = select((V(T(j)) >= first) & (V(T(j)) <= last), x, hidden);
      x.store(at);
    }
  }
  if (hides && !head.computes) run_functions(head, of_functions, true, scratch.functions, s, (T *)nullptr);
}

// keep[key][lane] = 1 / keep rate if dropout keeps the element, else 0. Bits are drawn for blocks of 16 x 16. i0 and j0 may lie within a
// block.
template <class T> __attribute__((noinline)) void load_keep(const Head<T> &head, const TileSpan &t, T *keep) {
  const T kept = T(1) / T(dropout_keep_rate(head.threshold));
  const u32 of_head = u32(head.p->part.first_head + head.h), of_batch = u32(head.p->part.first_batch + head.b);
  for (int64_t j = t.j0 / 16 * 16; j < t.j0 + t.keys; j += 16) {
    for (int64_t i = t.i0 / 16 * 16; i < t.i0 + t.width; i += 16) {
      u32 key_group = dropout_group(j), query_group = dropout_group(i);
      u32 bits[4][16]; // [word][4 * key group + query group]: sixteen calls at once
      for (u32 g = 0; g < 16; ++g) {
        Philox x = dropout_bits(head.key, key_group + g / 4, query_group + g % 4, of_head, of_batch);
        unroll<4>(STROBE_UNROLL(w) { bits[w][g] = x.x[w]; });
      }
      const i64 first_row = max((i64)(t.j0 - j), 0ll), last_row = min((i64)(t.j0 + t.keys - j), 16ll);
      const i64 first = max((i64)(t.i0 - i), 0ll), last = min((i64)(t.i0 + t.width - i), 16ll);
      for (int64_t r = first_row; r < last_row; ++r) {
        u32 g = dropout_group(r), shift = 8 * dropout_slot(r);
        T *to = keep + (j + r - t.j0) * t.width + i - t.i0;
        auto put = [&](int64_t c) __attribute__((always_inline)) {
          to[c] = (bits[dropout_slot(c)][4 * g + dropout_group(c)] >> shift & 0xFF) < head.threshold ? kept : T(0);
        };
        if (last - first == 16)
          unroll<16>(STROBE_UNROLL(c) { put(c); });
        else
          for (int64_t c = first; c < last; ++c) put(c);
      }
    }
  }
}

} // namespace strobe::inline STROBE_ISA
