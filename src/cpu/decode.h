// The forward of few queries, as in decoding: the products of forward.h with queries and keys exchanged. Keys lie across lanes, the queries
// of all heads of a group are rows, and K and V are read once for all rows. An item is a span of keys of a fixed length. The results of
// spans are merged in order, so no bit depends on the threads. Scores are summed in the order of forward.h, in which the backward
// recomputes them, so that LSE agrees with the recomputed scores.
#pragma once
#include "decode_products.h"
#include "isa.h"
#include "sums.h"

namespace strobe::inline STROBE_ISA {

// Query i of the n-th head of a group is row n * queries + i.
template <class T> struct DecodeScratch : DecodeTile {
  T *s, *probs, *add, *reals;
  char *functions = nullptr; // scratch of the caller's functions

  DecodeScratch(Arena &arena, const Problem &problem, int64_t rows) {
    const int64_t padded = round_to(rows, 32);
    s = arena.take<T>(padded * kPitch);
    probs = arena.take<T>(padded * kPitch);
    add = arena.take<T>(kPitch);
    if (problem.bytecode) functions = arena.take<char>(problem.bytecode->scratch_bytes);
    reals = arena.take<T>(max(rows * round_to(problem.head_dim, 16), round_to(problem.head_dim_v, 16)));
  }
};

// A thread's products, and the rows whose queries they have loaded.
template <class T> struct LoadedProducts {
  DecodeProducts<T> &products;
  int64_t of_b = -1, of_kv = -1;
  bool holds(int64_t b, int64_t kv) const { return b == of_b && kv == of_kv; }
};

// The results of each item for each of its rows: m, the largest score; l, the sum of P relative to m; and O = P V. A sequence has adjacent
// places, one for each span in which some query sees a key. The number of places is bounded by the window or by the packed tokens.
template <class T> struct DecodeResults : DecodeTile {
  const Problem &p;
  int64_t each;                  // places per sequence; 0: packed sequences, whose places follow from their tokens
  int64_t places, rows, columns; // places and rows of a key head; columns of O
  T *m, *l, *o;

  DecodeResults(Arena &arena, const Problem &problem) : p(problem), rows(p.group() * p.longest_q()), columns(round_to(p.head_dim_v, 16)) {
    each = div_up(p.longest_k(), kSpan);
    if (p.window_left < p.longest_k() && p.window_right < p.longest_k()) // a range may begin and end anywhere within a span
      each = min((i64)each, div_up(p.window_left + p.window_right + p.longest_q(), kSpan) + 1);
    if (p.packed_k() && p.total_k / kSpan + p.batch < p.batch * each) each = 0;
    places = each > 0 || !p.packed_k() ? p.batch * each : p.total_k / kSpan + p.batch;
    const int64_t all = places * p.heads_kv * rows;
    m = arena.take<T>(all), l = arena.take<T>(all), o = arena.take<T>(all * columns);
  }
  // The spans that hold a key which some query of sequence b sees.
  STROBE_INLINE Range spans(int64_t b) const {
    const QuerySpan queries = query_tile(p, b, 0, max((i64)p.longest_q(), (i64)1));
    if (queries.empty()) return {0, 0};
    const Range keys = Head<T>(p, b, 0, queries).band.keys_any(0, queries.i1);
    return keys.empty() ? Range{0, 0} : Range{keys.begin / kSpan, div_up(keys.end, kSpan)};
  }
  STROBE_INLINE int64_t first(int64_t b) const { return each > 0 || !p.packed_k() ? b * each : p.rows_k(b).begin / kSpan + b; }
  STROBE_INLINE int64_t row(int64_t place, int64_t kv) const { return (place * p.heads_kv + kv) * rows; }
  // The sequence of a place: the last sequence that begins at the place or before.
  int64_t sequence(int64_t place) const {
    int64_t low = 0, high = p.batch;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (first(middle) <= place ? low : high) = middle;
    }
    return low;
  }
};

// Turns q.k of query i and the keys of a range into scores, in place. add: a buffer of the same size. functions: scratch.
template <class T> __attribute__((noinline)) void score_row(const Head<T> &head, int64_t i, Range keys, T *add, char *functions, T *s) {
  using V = Vec<T>;
  const Problem &p = *head.p;
  const int64_t count = keys.end - keys.begin;
  const V distance = V(T(head.opposite(i) - keys.begin)) - V::iota();
  const ScoreTerms<T> terms(head);
  const int64_t lanes = round_to(count, 16);
  const score::Scores of_functions{i, keys.begin, 1, lanes, lanes};
  if (head.computes) run_functions(head, of_functions, false, functions, s, (T *)nullptr);
  if (p.bias || p.mask) load_additive_row(head, i, keys.begin, count, bool(p.mask), add);
  for (int64_t j = 0; j < count && (head.additive || p.mask); j += V::kLanes) {
    V x = terms(V::load(s + j), distance - V(T(j)), [](V) {});
    if (p.bias || p.mask) x = terms.plus(x, V::load(add + j));
    x.store(s + j);
  }
  if (head.hides && !head.computes) run_functions(head, of_functions, false, functions, s, (T *)nullptr);
  const Range seen = intersect(keys, head.band.keys(i));
  fill(s, min(max(seen.begin - keys.begin, 0ll), (i64)count), -kInfinity<T>);
  for (int64_t j = max(seen.end - keys.begin, 0ll); j < lanes; ++j) s[j] = -kInfinity<T>; // also keys past the range
}

// P = exp2((s - reference) * unit). Returns the sum of P. count: a multiple of 16. Also prefetches V, each_ahead bytes per step.
template <class Math>
__attribute__((noinline)) typename Math::Real exponentials(const typename Math::Real *s, int64_t count, typename Math::Real reference,
                                                           typename Math::Real unit, typename Math::Real *probs,
                                                           const char *ahead = nullptr, int64_t each_ahead = 0) {
  using V = Vec<typename Math::Real>;
  V sum[2] = {V(0), V(0)}, lost(0); // lost: the rounding error of sum[0]
  for (int64_t j = 0; j < count; j += V::kLanes, ahead += each_ahead) {
    for (int64_t n = 0; n < each_ahead; n += 64) __builtin_prefetch(ahead + n, 0, 2);
    const V prob = Math::power((V::load(s + j) - V(reference)) * V(unit));
    prob.store(probs + j);
    if constexpr (Math::kExactPower)
      lost += add_rounded(prob, sum[0]);
    else
      sum[j / V::kLanes % 2] += prob;
  }
  if constexpr (!Math::kExactPower) return sum_of_lanes(sum[0] + sum[1]);
  double total = 0;
  for (int lane = 0; lane < V::kLanes; ++lane) total += double(sum[0].v[lane]) + double(lost.v[lane]);
  return typename Math::Real(total);
}

// Computes one item: the rows of a group of heads and a span of the sequence's keys.
template <class Math>
void decode_span(const Problem &p, int64_t b, int64_t kv, int64_t span, const QuerySpan &queries,
                 LoadedProducts<typename Math::Real> &loaded, const DecodeScratch<typename Math::Real> &scratch,
                 const DecodeResults<typename Math::Real> &results) {
  using T = typename Math::Real;
  const int64_t group = p.group(), count = queries.i1, rows = group * count, d = p.head_dim;
  const int64_t first = results.row(results.first(b) + span - results.spans(b).begin, kv);
  T *const m = results.m + first, *const l = results.l + first, *const o = results.o + first * results.columns;

  const Head<T> any(p, b, kv * group, queries);
  const Range keys = intersect(any.band.keys_any(0, count), {span * DecodeTile::kSpan, (span + 1) * DecodeTile::kSpan});
  fill(m, rows, -kInfinity<T>), fill(l, rows, T(0));
  if (keys.empty()) return;
  const Range all = any.band.keys_all(0, count);
  const bool hides = p.mask || p.bias || any.hides || keys.begin < all.begin || keys.end > all.end;

  const DecodeKeys of_span{p, b, kv, any.k_begin, keys};
  for (int64_t r = 0; r < rows && !loaded.holds(b, kv); ++r) {
    T *const row = scratch.reals + r * round_to(d, 16);
    load_row(p.q, b, kv * group + r / count, any.q0 + r % count, 0, d, row);
    for (int64_t c = 0; c < d; ++c) row[c] *= any.sign;
  }
  if (!loaded.holds(b, kv)) loaded.products.load_queries(scratch.reals, rows, d);
  loaded.of_b = b, loaded.of_kv = kv;
  loaded.products.scores(of_span, rows, scratch.s);

  const int64_t padded = round_to(keys.end - keys.begin, 16);
  // During the exponentials V is prefetched, if its rows are adjacent.
  const int64_t element = strobe::bytes(p.v.dtype);
  const char *const v = p.v.data + p.v.index(b, kv, any.k_begin + keys.begin, 0) * element;
  const bool dense = !p.v.page_size && p.v.stride[2] == p.stored(p.head_dim_v);
  const int64_t bytes = !dense ? 0 : min((i64)32768, (i64)((keys.end - keys.begin) * p.v.stride[2] * element));
  const int64_t each_ahead = round_down(bytes * Vec<T>::kLanes / padded, 64);
  for (int64_t n = 0; n < group; ++n) {
    const Head<T> head(p, b, kv * group + n, queries);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t r = n * count + i;
      T *const s = scratch.s + r * kPitch;
      score_row(head, i, keys, scratch.add, scratch.functions, s);
      Vec<T> most(-kInfinity<T>);
      for (int64_t j = 0; j < padded; j += Vec<T>::kLanes) most = max(most, Vec<T>::load(s + j));
      for (int lane = 0; lane < Vec<T>::kLanes; ++lane) m[r] = max(m[r], T(most.v[lane]));
      l[r] = exponentials<Math>(s, padded, m[r] == -kInfinity<T> ? T(0) : m[r], head.unit, scratch.probs + r * kPitch, v,
                                r == 0 ? each_ahead : 0);
    }
  }
  loaded.products.values(of_span, hides, rows, scratch.probs, o, results.columns);

  // As in forward.h, P V is computed once more, with m raised by log2 l, if the sum of P V has overflowed, or if a key with a score of -inf
  // has a NaN in V.
  bool overflowed = false;
  for (int64_t r = 0; r < rows; ++r) {
    T zero = l[r] * T(0); // NaN if l is not finite
    const bool good = zero == T(0);
    for (int64_t c = 0; c < p.head_dim_v; ++c) zero += o[r * results.columns + c] * T(0);
    if (!good || zero == T(0) || !(l[r] > T(0))) continue;
    overflowed = true;
    m[r] = T(double(m[r]) + __builtin_log2(double(l[r])) / double(any.unit));
    l[r] = exponentials<Math>(scratch.s + r * kPitch, padded, m[r], any.unit, scratch.probs + r * kPitch);
  }
  if (overflowed) loaded.products.values(of_span, true, rows, scratch.probs, o, results.columns);
}

// Merges the results of the spans into O / l and LSE of a group's rows. The sink is added to the denominator.
template <class T>
__attribute__((noinline)) void merge_spans(const Problem &p, int64_t b, int64_t kv, const QuerySpan &queries,
                                           const DecodeResults<T> &results, double *sum, T *row) {
  const int64_t group = p.group(), count = queries.i1;
  for (int64_t r = 0; r < group * count; ++r) {
    const auto at_span = [&](int64_t n) { return results.row(results.first(b) + n, kv) + r; };
    const Range range = results.spans(b);
    const int64_t spans = range.end - range.begin;
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
      if (results.l[at] == T(0)) continue; // the span has no visible key, and its O may not be written
      const double factor = __builtin_exp2((double(results.m[at]) - reference) * double(head.unit));
      const double weight = double(results.l[at]) * factor;
      if (weight == 0) continue; // beside the other spans this span's P is 0, so an infinity in its V does not count
      l += weight;
      for (int64_t c = 0; c < p.head_dim_v; ++c) sum[c] += double(results.o[at * results.columns + c]) * factor;
    }
    if (p.sinks) l += __builtin_exp2((sink - reference) * double(head.unit));
    for (int64_t c = 0; c < p.head_dim_v; ++c) row[c] = l == 0 ? T(0) : T(sum[c] / l);
    store_row(p.out, head.b, head.h, head.q0 + r % count, p.head_dim_v, row);
    if (p.lse)
      *p.lse.at<T>(head.b, head.h, head.q0 + r % count, 0) = l == 0 ? -kInfinity<T> : T(most * double(head.measure()) + __builtin_log(l));
  }
}

// Calls f with the products for this many rows.
template <class Math, class F> STROBE_INLINE void with_products(const Problem &p, F &&f) {
  using T = typename Math::Real;
  with_elements<T, Math::kDecodesQuantised, Math::kBFloat16>(p.k.dtype, [&](auto elements) {
    using Elements = decltype(elements);
    if constexpr (Math::kFewRows > 0 && (Math::kQuantised || Elements::kPerWord <= 2)) // isa.h: decodes_quantised_from
      if (p.group() * p.longest_q() <= Math::kFewRows) return f((typename Math::template Few<Elements> *)nullptr);
    f((typename Math::template Many<Elements> *)nullptr);
  });
}

// Bytes of a thread's scratch and products.
template <class Math> int64_t decode_scratch(const Problem &p) {
  const int64_t rows = p.group() * p.longest_q();
  Arena arena(nullptr);
  DecodeScratch<typename Math::Real>(arena, p, rows);
  with_products<Math>(p, [&](auto *type) { std::remove_pointer_t<decltype(type)>(arena, p, rows); });
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
  const int64_t each = decode_scratch<Math>(p), heads = p.batch * p.heads_kv, rows = p.group() * p.longest_q();
  Arena arena(workspace);
  char *const scratches = arena.take<char>(execution.threads * each);
  const DecodeResults<T> results(arena, p);
  const auto queries_of = [&](int64_t b) { return query_tile(p, b, 0, max((i64)p.longest_q(), (i64)1)); };

  // Items take the spans of a sequence in memory order.
  const int64_t items = results.places * p.heads_kv;
  int64_t next = 0; // uses builtins, not std::atomic, because isa.h forbids inline functions of std
  const auto take_spans = [&](DecodeProducts<T> &products, const DecodeScratch<T> &scratch) {
    LoadedProducts<T> loaded{products};
    for (int64_t item; (item = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < items;) {
      const int64_t place = item % results.places, b = results.sequence(place);
      const Range spans = results.spans(b);
      const int64_t span = spans.begin + place - results.first(b);
      if (span >= spans.begin && span < spans.end)
        decode_span<Math>(p, b, item / results.places, span, queries_of(b), loaded, scratch, results);
    }
  };
  execution.run(int32_t(min((i64)execution.threads, (i64)items)), [&](int32_t thread) {
    [[maybe_unused]] typename Math::Session session;
    Arena own(scratches + thread * each);
    const DecodeScratch<T> scratch(own, p, rows);
    for (int64_t r = rows; r < round_to(rows, 8); ++r) fill(scratch.probs + r * kPitch, kPitch, T(0));
    with_products<Math>(p, [&](auto *type) {
      std::remove_pointer_t<decltype(type)> products(own, p, rows);
      take_spans(products, scratch);
    });
  });

  next = 0;
  execution.run(int32_t(min((i64)execution.threads, (i64)heads)), [&](int32_t thread) {
    Arena own(scratches + thread * each);
    const DecodeScratch<T> scratch(own, p, rows);
    for (int64_t head; (head = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < heads;) {
      const int64_t b = head / p.heads_kv;
      const QuerySpan queries = queries_of(b);
      if (!queries.empty()) merge_spans<T>(p, b, head % p.heads_kv, queries, results, (double *)scratch.s, scratch.reals);
    }
  });
}

} // namespace strobe::inline STROBE_ISA
