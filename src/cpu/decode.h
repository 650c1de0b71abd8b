// The forward of few queries, as in decoding: the products of forward.h with queries and keys exchanged. Keys lie across lanes, the queries
// of all heads of a group are rows, and K and V are read once for all of them. The keys are divided into spans of a fixed length, an item
// each, whose results are merged in order: no bit depends on the threads. A score is summed in the order of forward.h, so that a backward,
// which computes it again in that order, finds the LSE of its own scores.
#pragma once
#include "fma.h"
#include "isa.h"
#include "keys.h"

namespace strobe::inline STROBE_ISA {

struct DecodeTile {
  static constexpr int64_t kSpan = 1024, kPitch = kSpan + 16; // keys of an item; of a row of scores: rows are not to share cache sets
  static constexpr int64_t kKeys = 64;                        // whose products are made at once
};

// Query i of the n-th head of a group is row n * queries + i.
template <class Math> struct DecodeScratch : DecodeTile {
  using T = typename Math::Real;
  typename Math::Element *q, *k, *p, *v; // operands
  T *wide, *s, *probs, *o, *add, *buffer;

  DecodeScratch(Arena &arena, const Problem &problem, int64_t rows) {
    const int64_t d = problem.head_dim, dv = problem.head_dim_v, padded = round_to(rows, 32);
    q = arena.take<typename Math::Element>(Math::left_size(rows, d));
    k = arena.take<typename Math::Element>(Math::lanes_size(kKeys, d));
    p = arena.take<typename Math::Element>(Math::left_size(rows, kKeys));
    v = arena.take<typename Math::Element>(Math::rows_size(kKeys, dv));
    wide = arena.take<T>(max(rows * round_to(d, 16), kKeys * round_to(dv, 16)));
    s = arena.take<T>(padded * kPitch);
    probs = arena.take<T>(padded * kPitch);
    o = arena.take<T>(padded * round_to(dv, 16));
    add = arena.take<T>(kPitch);
    buffer = arena.take<T>(16 * round_to(d, 16));
  }
};

// What each item leaves of its rows: the largest score m, l, the sum of P, and O = P V; P is measured against m. A sequence's spans have
// places side by side, as many in all as there can be spans of packed tokens.
template <class T> struct DecodeResults : DecodeTile {
  const Problem &p;
  int64_t places, rows, columns; // of a key head; of O
  T *m, *l, *o;

  DecodeResults(Arena &arena, const Problem &problem) : p(problem), rows(p.group() * p.longest_q()), columns(round_to(p.head_dim_v, 16)) {
    places = p.varlen ? p.total_k / kSpan + p.batch : p.batch * div_up(p.seqlen_k, kSpan);
    const int64_t all = places * p.heads_kv * rows;
    m = arena.take<T>(all), l = arena.take<T>(all), o = arena.take<T>(all * columns);
  }
  STROBE_INLINE int64_t first(int64_t b) const { return p.varlen ? p.rows_k(b).begin / kSpan + b : b * div_up(p.seqlen_k, kSpan); }
  STROBE_INLINE int64_t spans(int64_t b) const { return div_up(p.rows_k(b).length, kSpan); }
  STROBE_INLINE int64_t row(int64_t place, int64_t kv) const { return (place * p.heads_kv + kv) * rows; }
  // Whose place it is: the last sequence that begins there or before.
  int64_t sequence(int64_t place) const {
    int64_t low = 0, high = p.batch;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (first(middle) <= place ? low : high) = middle;
    }
    return low;
  }
};

// Raw q.k of query i and the keys of a range -> scores, in place. add: room for as many.
template <class T> __attribute__((noinline)) void score_row(const Head<T> &head, int64_t i, Range keys, T *add, T *s) {
  using V = Vec<T>;
  const Problem &p = *head.p;
  const int64_t count = keys.end - keys.begin;
  const V scale(head.scale), cap(head.cap), inverse_cap(T(1) / head.cap), slope(head.slope), hidden(-kInfinity<T>);
  const V distance = V(T(i + head.band.offset - keys.begin)) - V::iota();
  if (p.bias)
    load_row(p.bias, head.b, head.h, head.row0 + i, keys.begin, count, add);
  else if (p.mask)
    fill(add, count, T(0));
  if (p.mask) {
    const uint8_t *seen = p.mask.at<uint8_t>(head.b, head.h, head.row0 + i, keys.begin);
    for (int64_t j = 0; j < count; ++j) add[j] = seen[j * p.mask.stride[3]] ? add[j] : -kInfinity<T>;
  }
  for (int64_t j = 0; j < count && (head.additive || p.mask); j += V::kLanes) {
    V x = V::load(s + j);
    if (head.additive) {
      V unused;
      x *= scale;
      if (p.softcap > 0) x = softcap(x, cap, inverse_cap, unused);
      if (p.alibi_slopes) x += alibi(slope, distance - V(T(j)));
    }
    if (p.bias || p.mask) {
      const V more = V::load(add + j);
      x = select(more == hidden, hidden, x + more);
    }
    x.store(s + j);
  }
  const Range seen = intersect(keys, head.band.keys(i));
  fill(s, min(max(seen.begin - keys.begin, 0ll), (i64)count), -kInfinity<T>);
  for (int64_t j = max(seen.end - keys.begin, 0ll); j < round_to(count, 16); ++j) s[j] = -kInfinity<T>; // and behind the range
}

// P = exp2((s - reference) * unit); returns their sum. count: a multiple of 16.
template <class Math>
__attribute__((noinline)) typename Math::Real exponentials(const typename Math::Real *s, int64_t count, typename Math::Real reference,
                                                           typename Math::Real unit, typename Math::Real *probs) {
  using V = Vec<typename Math::Real>;
  V sum[2] = {V(0), V(0)};
  for (int64_t j = 0; j < count; j += V::kLanes) {
    const V prob = Math::power((V::load(s + j) - V(reference)) * V(unit));
    prob.store(probs + j);
    sum[j / V::kLanes % 2] += prob;
  }
  return sum_of_lanes(sum[0] + sum[1]);
}

// O = P V of the rows, over the keys of a range. Where something is hidden, what is not finite in V is taken out of the product and added
// for the rows whose P is not 0 there.
template <class Math>
void multiply_values(const Problem &p, int64_t b, int64_t kv, int64_t k_begin, Range keys, bool hides, int64_t rows,
                     DecodeScratch<Math> &scratch) {
  using T = typename Math::Real;
  constexpr int64_t kKeys = DecodeTile::kKeys, kPitch = DecodeTile::kPitch;
  const int64_t dv = p.head_dim_v, ldo = round_to(dv, 16);
  for (int64_t j = keys.begin; j < keys.end; j += kKeys) {
    const int64_t n = min((i64)kKeys, keys.end - j), row = k_begin + j;
    const T *const probs = scratch.probs + (j - keys.begin);
    const bool nonfinite = hides && !all_finite(p.v, b, kv, row, n, dv);
    const auto v = nonfinite ? Math::load_rows(finite_rows(p.v, b, kv, row, n, dv, scratch.wide), 0, 0, 0, n, dv, scratch.v)
                             : Math::load_rows(p.v, b, kv, row, n, dv, scratch.v);
    Math::multiply(rows, ldo, n, Math::left_rows(probs, rows, n, kPitch, scratch.p), v, scratch.o, ldo, j > keys.begin);
    for (int64_t key = 0; nonfinite && key < n; ++key) {
      load_row(p.v, b, kv, row + key, 0, dv, scratch.wide);
      for (int64_t c = 0; c < dv; ++c)
        for (int64_t r = 0; r < rows && !__builtin_isfinite(scratch.wide[c]); ++r)
          if (const T weight = probs[r * kPitch + key]; weight != T(0)) scratch.o[r * ldo + c] += weight * scratch.wide[c];
    }
  }
}

// The rows of a group of heads and a span of the sequence's keys.
template <class Math>
void decode_span(const Problem &p, int64_t b, int64_t kv, int64_t span, const QuerySpan &queries, DecodeScratch<Math> &scratch,
                 const DecodeResults<typename Math::Real> &results) {
  using T = typename Math::Real;
  constexpr int64_t kKeys = DecodeTile::kKeys, kPitch = DecodeTile::kPitch;
  const int64_t group = p.group(), count = queries.i1, rows = group * count, d = p.head_dim, ldq = round_to(d, 16);
  const int64_t first = results.row(results.first(b) + span, kv);
  T *const m = results.m + first, *const l = results.l + first, *const o = results.o + first * results.columns;

  const Head<T> any(p, b, kv * group, queries);
  const Range keys = intersect(any.band.keys_any(0, count), {span * DecodeTile::kSpan, (span + 1) * DecodeTile::kSpan});
  fill(m, rows, -kInfinity<T>), fill(l, rows, T(0));
  if (keys.empty()) return;
  const Range all = any.band.keys_all(0, count);
  const bool hides = p.mask || p.bias || keys.begin < all.begin || keys.end > all.end;

  for (int64_t r = 0; r < rows; ++r) {
    T *const row = scratch.wide + r * ldq;
    load_row(p.q, b, kv * group + r / count, any.q0 + r % count, 0, d, row);
    for (int64_t c = 0; c < d; ++c) row[c] *= any.sign;
  }
  const auto q = Math::left_rows(scratch.wide, rows, d, ldq, scratch.q);
  for (int64_t j = keys.begin; j < keys.end; j += kKeys) { // S = Q K^T
    const int64_t n = min((i64)kKeys, keys.end - j);
    const auto k = Math::load_lanes(p.k, b, kv, any.k_begin + j, n, d, T(1), kKeys, scratch.k, scratch.buffer);
    Math::multiply(rows, kKeys, d, q, k, scratch.s + (j - keys.begin), kPitch, false);
  }

  const int64_t padded = round_to(keys.end - keys.begin, 16);
  for (int64_t n = 0; n < group; ++n) {
    const Head<T> head(p, b, kv * group + n, queries);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t r = n * count + i;
      T *const s = scratch.s + r * kPitch;
      score_row(head, i, keys, scratch.add, s);
      Vec<T> most(-kInfinity<T>);
      for (int64_t j = 0; j < padded; j += Vec<T>::kLanes) most = max(most, Vec<T>::load(s + j));
      for (int lane = 0; lane < Vec<T>::kLanes; ++lane) m[r] = max(m[r], T(most.v[lane]));
      l[r] = exponentials<Math>(s, padded, m[r] == -kInfinity<T> ? T(0) : m[r], head.unit, scratch.probs + r * kPitch);
    }
  }
  multiply_values(p, b, kv, any.k_begin, keys, hides, rows, scratch);

  // The sum P V may overflow where the mean does not: once more with m at log2 l above, P then sums to 1.
  bool again = false;
  for (int64_t r = 0; r < rows; ++r) {
    T zero = l[r] * T(0); // or NaN
    const bool good = zero == T(0);
    for (int64_t c = 0; c < p.head_dim_v; ++c) zero += scratch.o[r * results.columns + c] * T(0);
    if (!good || zero == T(0) || !(l[r] > T(0))) continue;
    again = true;
    m[r] = T(double(m[r]) + __builtin_log2(double(l[r])) / double(any.unit));
    l[r] = exponentials<Math>(scratch.s + r * kPitch, padded, m[r], any.unit, scratch.probs + r * kPitch);
  }
  if (again) multiply_values(p, b, kv, any.k_begin, keys, hides, rows, scratch);
  std::memcpy(o, scratch.o, sizeof(T) * size_t(rows * results.columns));
}

// O / l and LSE of a group's rows from those of the spans; the sink joins the denominator.
template <class T>
__attribute__((noinline)) void merge_spans(const Problem &p, int64_t b, int64_t kv, const QuerySpan &queries,
                                           const DecodeResults<T> &results, double *sum, T *row) {
  const int64_t group = p.group(), count = queries.i1;
  for (int64_t r = 0; r < group * count; ++r) {
    const auto at_span = [&](int64_t n) { return results.row(results.first(b) + n, kv) + r; };
    const int64_t spans = results.spans(b);
    const Head<T> head(p, b, kv * group + r / count, queries);
    double most = -kInfinity<double>, l = 0, sink = 0;
    for (int64_t n = 0; n < spans; ++n) most = max(most, double(results.m[at_span(n)]));
    if (p.sinks) {
      sink = load_as<double>(p.sinks.dtype, p.sinks.data, p.sinks.index(0, head.h, 0, 0)) / double(head.measure());
      most = max(most, sink);
    }
    const double reference = most == -kInfinity<double> ? 0 : most;
    fill(sum, results.columns, 0.0);
    for (int64_t n = 0; n < spans; ++n) {
      const int64_t at = at_span(n);
      if (results.l[at] == T(0)) continue; // nothing is seen there, and O may not have been written
      const double factor = __builtin_exp2((double(results.m[at]) - reference) * double(head.unit));
      l += double(results.l[at]) * factor;
      for (int64_t c = 0; c < p.head_dim_v; ++c) sum[c] += double(results.o[at * results.columns + c]) * factor;
    }
    if (p.sinks) l += __builtin_exp2((sink - reference) * double(head.unit));
    for (int64_t c = 0; c < p.head_dim_v; ++c) row[c] = l == 0 ? T(0) : T(sum[c] / l);
    store_row(p.out, head.b, head.h, head.q0 + r % count, p.head_dim_v, row);
    if (p.lse)
      *p.lse.at<T>(head.b, head.h, head.q0 + r % count, 0) = l == 0 ? -kInfinity<T> : T(most * double(head.measure()) + __builtin_log(l));
  }
}

template <class Math> int64_t decode_scratch(const Problem &p) {
  Arena arena(nullptr);
  DecodeScratch<Math>(arena, p, p.group() * p.longest_q());
  return round_to(arena.used(), 256);
}
template <class Math> int64_t decode_workspace(const Problem &p, int64_t threads) {
  Arena arena(nullptr);
  arena.take<char>(threads * decode_scratch<Math>(p));
  DecodeResults<typename Math::Real>(arena, p);
  return arena.used();
}

template <class Math> void decode(const Problem &p, const Execution &execution, void *workspace) {
  using T = typename Math::Real;
  const int64_t each = decode_scratch<Math>(p), heads = p.batch * p.heads_kv;
  Arena arena(workspace);
  char *const scratches = arena.take<char>(execution.threads * each);
  const DecodeResults<T> results(arena, p);
  // Calls work(scratch, item) for each item.
  auto share = [&](int64_t items, auto &&work) {
    int64_t next = 0; // by builtins, not std::atomic: see isa.h on inline functions of std
    execution.run(int32_t(min((i64)execution.threads, (i64)items)), [&](int32_t thread) {
      [[maybe_unused]] typename Math::Session session;
      Arena own(scratches + thread * each);
      DecodeScratch<Math> scratch(own, p, p.group() * p.longest_q());
      for (int64_t item; (item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items;) work(scratch, item);
    });
  };
  share(results.places * p.heads_kv, [&](DecodeScratch<Math> &scratch, int64_t item) {
    const int64_t place = item / p.heads_kv, b = results.sequence(place), span = place - results.first(b);
    const QuerySpan queries = query_tile(p, b, 0, max((i64)p.longest_q(), (i64)1));
    if (span >= 0 && span < results.spans(b) && !queries.empty())
      decode_span<Math>(p, b, item % p.heads_kv, span, queries, scratch, results);
  });
  share(heads, [&](DecodeScratch<Math> &scratch, int64_t head) {
    const int64_t b = head / p.heads_kv;
    const QuerySpan queries = query_tile(p, b, 0, max((i64)p.longest_q(), (i64)1));
    if (!queries.empty()) merge_spans<T>(p, b, head % p.heads_kv, queries, results, (double *)scratch.s, scratch.o);
  });
}

} // namespace strobe::inline STROBE_ISA
