// The two products of decode.h, S = Q K^T and O = P V, for the rows of a group and the keys of a span. lanes.h multiplies few rows; more
// rows go through the tiles of an arithmetic.
#pragma once
#include "fma.h"
#include "keys.h"
#include "lanes.h"
#include "sums.h"

namespace strobe::inline STROBE_ISA {

struct DecodeTile {
  static constexpr int64_t kSpan = kPitch - 16; // keys per item
  static constexpr int64_t kKeys = 64;          // keys whose products are computed at once
};

// The keys of a span and a key head. Key j is row k_begin + j of K and V.
struct DecodeKeys {
  const Problem &p;
  int64_t b, kv, k_begin;
  Range keys;
  KeyRows k() const { return rows_of_k(p); }
  KeyRows v() const { return rows_of_v(p); }
  int64_t count() const { return keys.end - keys.begin; }
};

// The interface of decode.h's products. It is virtual, so that decode.h is compiled only once and not for each kind of product. One call
// multiplies a whole span.
template <class T> class DecodeProducts {
public:
  // queries: rows of round_to(d, 16) columns.
  virtual void load_queries(const T *queries, int64_t rows, int64_t d) = 0;
  // s[row * kPitch + key] = q.k of the loaded rows and the span's keys.
  virtual void scores(const DecodeKeys &span, int64_t rows, T *s) = 0;
  // o[row * ldo + column] = P V. probs has zeros after the last row, up to a multiple of kMostRowsHeld, and after the last key, up to a
  // multiple of 16. hides: some P may be 0 where V is not finite.
  virtual void values(const DecodeKeys &span, bool hides, int64_t rows, const T *probs, T *o, int64_t ldo) = 0;
};

// Adds those numbers of V, in the keys [j, j + n), that are not finite to the rows of o whose P is not 0 there. place(c): where column c of
// o lies.
template <class T, class Place>
void add_nonfinite_values(const DecodeKeys &span, int64_t j, int64_t n, int64_t rows, const T *probs, T *v, T *o, int64_t ldo,
                          Place &&place) {
  for (int64_t key = 0; key < n; ++key) {
    load_row(span.v(), span.b, span.kv, span.k_begin + j + key, 0, span.p.head_dim_v, v);
    for (int64_t c = 0; c < span.p.head_dim_v; ++c)
      for (int64_t r = 0; r < rows && !__builtin_isfinite(v[c]); ++r)
        if (const T weight = probs[r * kPitch + key]; weight != T(0)) o[r * ldo + place(c)] += weight * v[c];
  }
}

// Multiplies the scores of a span's keys by the scales of their rows. scales: a buffer.
template <class T> void scale_scores(const DecodeKeys &span, int64_t rows, T *scales, T *s) {
  load_row_scales(span.p.k_scale, span.b, span.kv, span.k_begin + span.keys.begin, span.count(), scales);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < span.count(); ++j) s[r * kPitch + j] *= scales[j];
}

// to[term][r] = q[term][r] * scales[term], for `rows` adjacent rows; 0 from term d on.
template <class T> __attribute__((noinline)) void scale_terms(const T *q, const T *scales, int64_t d, int64_t terms, int64_t rows, T *to) {
  for (int64_t n = 0; n < terms; ++n) {
    const T scale = n < d ? scales[n] : T(0);
    for (int64_t i = 0; i < rows; ++i) to[n * rows + i] = q[n * rows + i] * scale;
  }
}

// weights[r * kPitch + j] = probs[r * kPitch + j] * scales[j] for the keys [0, count). hides: a P of 0 stays 0, because the scale of a
// hidden key may be any number.
template <class T>
__attribute__((noinline)) void scale_probabilities(const T *probs, const T *scales, bool hides, int64_t rows, int64_t count, T *weights) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t j = 0; j < count; ++j) {
      const T weight = probs[r * kPitch + j], product = weight * scales[j];
      weights[r * kPitch + j] = (hides && weight == T(0)) ? T(0) : product;
    }
}

// Products that read K and V once and in place, for up to kMostRowsHeld rows at a time.
template <class Lanes> class FewRows final : public DecodeProducts<typename Lanes::Real>, DecodeTile {
public:
  using T = typename Lanes::Real;
  using Elements = typename Lanes::Elements;
  using Word = typename Elements::Word;
  using Operand = typename Lanes::Operand;
  using Rows = WordRows<Elements>;

  FewRows(Arena &arena, const Problem &p, int64_t rows) : padded_(round_to(rows, kMostRowsHeld)) {
    const int64_t most = Rows::words(max(p.head_dim, p.head_dim_v));
    words_k_ = Rows::words(p.head_dim), words_v_ = Rows::words(p.head_dim_v);
    q_ = arena.take<Operand>(padded_ * terms());
    row_ = arena.take<Operand>(terms());
    if (!kWeightsAreP || p.quantised()) p_ = arena.take<Operand>(padded_ * kPitch);
    if (p.quantised()) scales_ = arena.take<T>(max(kPitch, round_to(p.head_dim, 16)));
    if (p.scaled_by_channel()) scaled_q_ = arena.take<Operand>(padded_ * terms());
    for (T **o : {&o_, &o_total_}) *o = arena.take<T>(padded_ * columns());
    reals_ = arena.take<T>(max(words_k_ * Elements::kPerWord, round_to(p.head_dim_v, 16)));
    copies_ = arena.take<Word>(kKeys * most);
  }

  void load_queries(const T *queries, int64_t rows, int64_t d) override {
    const int64_t all = words_k_ * Elements::kPerWord;
    fill(q_, padded_ * terms(), Operand(0));
    batches(rows, [&](int64_t batch, int64_t first) {
      for (int64_t r = first; r < min(first + batch, rows); ++r) {
        std::memcpy(reals_, queries + r * round_to(d, 16), sizeof(T) * size_t(d));
        fill(reals_ + d, all - d, T(0));
        Lanes::convert(reals_, all, row_);
        for (int64_t n = 0; n < terms(); ++n) q_[first * terms() + n * batch + r - first] = row_[n];
      }
    });
  }

  void scores(const DecodeKeys &span, int64_t rows, T *s) override {
    const Problem &p = span.p;
    const int64_t count = span.count();
    if (!p.scaled_by_channel()) {
      add_scores(span, rows, q_, 0, count, s);
      if (p.quantised()) scale_scores(span, rows, scales_, s);
      return;
    }
    for (int64_t done = 0, end; done < count; done = end) { // one group of rows with the same column scales at a time
      const int64_t row = span.k_begin + span.keys.begin + done, in_page = p.page_size ? row % p.page_size : row;
      const int64_t left = p.k_scale.rows - in_page % p.k_scale.rows;
      end = min((i64)count, (i64)(done + (p.page_size ? min((i64)left, (i64)(p.page_size - in_page)) : left)));
      load_scales(p.k_scale, span.b, span.kv, row, 0, p.head_dim, scales_);
      if constexpr (kWeightsAreP)
        batches(rows, [&](int64_t batch, int64_t r) {
          scale_terms(q_ + r * terms(), scales_, p.head_dim, terms(), batch, scaled_q_ + r * terms());
        });
      add_scores(span, rows, scaled_q_, done, end, s);
    }
  }

  void values(const DecodeKeys &span, bool hides, int64_t rows, const T *probs, T *o, int64_t ldo) override {
    const Problem &p = span.p;
    const Rows v(p.v, span.b, span.kv, p.head_dim_v, span.k_begin + span.keys.end, kRun, Lanes::kKeys);
    const int64_t ld = columns(), count = span.count();
    KeySum<T> sum{o_, o_total_, rows, ld};
    const Operand *weights = p_;
    if constexpr (kWeightsAreP) {
      if (p.quantised()) {
        load_row_scales(p.v_scale, span.b, span.kv, span.k_begin + span.keys.begin, count, scales_);
        fill(scales_ + count, round_to(count, 16) - count, T(0));
        scale_probabilities(probs, scales_, hides, padded_, round_to(count, 16), p_);
      } else {
        weights = probs;
      }
    } else {
      for (int64_t r = 0; r < padded_; ++r) Lanes::convert(probs + r * kPitch, round_to(count, 16), p_ + r * kPitch);
    }
    for (int64_t done = 0; done < count;) {
      const int64_t j = span.keys.begin + done, most = min((i64)kKeys, (i64)(count - done));
      const bool nonfinite = hides && stores_nonfinite(span.v(), span.b, span.kv, span.k_begin + j, most, p.head_dim_v);
      const auto keys = v.block(span.k_begin + j, most, nonfinite, copies_);
      sum.expect(j);
      batches(rows, [&](int64_t batch, int64_t r) {
        add(batch)(keys, words_v_, weights + r * kPitch + done * Lanes::kOperands / Lanes::kKeys, o_ + r * ld, ld, sum.started);
      });
      sum.started = true;
      if (nonfinite)
        add_nonfinite_values(span, j, min((i64)keys.count, (i64)most), rows, probs + done, reals_, o_, ld,
                             [](int64_t c) { return Lanes::place(c); });
      done += keys.count;
    }
    const T *const result = sum.result();
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < span.p.head_dim_v; ++c) o[r * ldo + c] = result[r * ld + Lanes::place(c)];
  }

private:
  static constexpr bool kWeightsAreP = std::is_same_v<Operand, T>;

  int64_t terms() const { return words_k_ * Lanes::kTerms; }
  int64_t columns() const { return words_v_ * Elements::kPerWord; }

  // Computes s for the keys [done, end), counted from the span's first key.
  void add_scores(const DecodeKeys &span, int64_t rows, const Operand *q, int64_t done, int64_t end, T *s) {
    const int64_t first = span.k_begin + span.keys.begin;
    const Rows k(span.p.k, span.b, span.kv, span.p.head_dim, first + end, Vec<T>::kLanes, Vec<T>::kLanes);
    while (done < end) {
      const auto keys = k.block(first + done, kKeys, false, copies_);
      batches(rows, [&](int64_t batch, int64_t r) { score(batch)(keys, words_k_, q + r * terms(), s + r * kPitch + done); });
      done += keys.count;
    }
  }

  // Calls f(number of rows, first row) for 8, 4, 2 or 1 rows at a time.
  template <class F> static STROBE_INLINE void batches(int64_t rows, F &&f) {
    for (int64_t r = 0, batch; r < rows; r += batch) {
      const int64_t left = rows - r;
      batch = kMostRowsHeld == 8 && left > 4 ? 8 : left > 2 ? 4 : left > 1 ? 2 : 1;
      f(batch, r);
    }
  }
  static auto score(int64_t batch) {
    constexpr int kMost = kMostRowsHeld;
    return batch == 8   ? score_keys<Lanes, kMost>
           : batch == 4 ? score_keys<Lanes, 4>
           : batch == 2 ? score_keys<Lanes, 2>
                        : score_keys<Lanes, 1>;
  }
  static auto add(int64_t batch) {
    constexpr int kMost = kMostRowsHeld;
    return batch == 8   ? add_values<Lanes, kMost>
           : batch == 4 ? add_values<Lanes, 4>
           : batch == 2 ? add_values<Lanes, 2>
                        : add_values<Lanes, 1>;
  }

  int64_t padded_, words_k_, words_v_;
  Operand *q_, *row_, *p_ = nullptr, *scaled_q_ = nullptr;
  T *o_, *o_total_, *reals_, *scales_ = nullptr;
  Word *copies_;
};

// Products on tiles of K and V, which are converted to the layout of an arithmetic.
template <class Math> class ManyRows final : public DecodeProducts<typename Math::Real>, DecodeTile {
public:
  using T = typename Math::Real;

  ManyRows(Arena &arena, const Problem &p, int64_t rows) {
    const int64_t d = p.head_dim, dv = p.head_dim_v;
    q_ = arena.take<typename Math::Element>(Math::left_size(rows, d));
    k_ = arena.take<typename Math::Element>(Math::lanes_size(kKeys, d));
    p_ = arena.take<typename Math::Element>(Math::left_size(rows, kKeys));
    v_ = arena.take<typename Math::Element>(Math::rows_size(kKeys, dv));
    reals_ = arena.take<T>(kKeys * max(round_to(d, 16), round_to(dv, 16)));
    for (T **o : {&o_, &o_total_}) *o = arena.take<T>(round_to(rows, 32) * round_to(dv, 16));
    buffer_ = arena.take<T>(16 * round_to(d, 16));
  }

  void load_queries(const T *queries, int64_t rows, int64_t d) override { left_ = Math::left_rows(queries, rows, d, round_to(d, 16), q_); }

  void scores(const DecodeKeys &span, int64_t rows, T *s) override {
    const int64_t d = span.p.head_dim;
    for (int64_t j = span.keys.begin; j < span.keys.end; j += kKeys) {
      const int64_t n = min((i64)kKeys, span.keys.end - j);
      const auto k = span.p.quantised() ? Math::load_lanes(dense_copy(span.k(), span.b, span.kv, span.k_begin + j, n, d, false, reals_), 0,
                                                           0, 0, n, d, T(1), kKeys, k_, buffer_)
                                        : Math::load_lanes(span.p.k, span.b, span.kv, span.k_begin + j, n, d, T(1), kKeys, k_, buffer_);
      Math::template multiply<true>(rows, kKeys, d, left_, k, s + (j - span.keys.begin), kPitch, false);
    }
  }

  void values(const DecodeKeys &span, bool hides, int64_t rows, const T *probs, T *o, int64_t ldo) override {
    const Problem &p = span.p;
    const int64_t dv = p.head_dim_v, ld = round_to(dv, 16);
    KeySum<T> sum{o_, o_total_, rows, ld};
    for (int64_t j = span.keys.begin; j < span.keys.end; j += kKeys) {
      const int64_t n = min((i64)kKeys, span.keys.end - j), row = span.k_begin + j;
      const T *const weights = probs + (j - span.keys.begin);
      const bool nonfinite = hides && !all_finite(span.v(), span.b, span.kv, row, n, dv);
      const auto v = nonfinite || p.quantised()
                         ? Math::load_rows(dense_copy(span.v(), span.b, span.kv, row, n, dv, nonfinite, reals_), 0, 0, 0, n, dv, v_)
                         : Math::load_rows(p.v, span.b, span.kv, row, n, dv, v_);
      sum.expect(j);
      Math::multiply(rows, ld, n, Math::left_rows(weights, rows, n, kPitch, p_), v, o_, ld, sum.started);
      sum.started = true;
      if (nonfinite) add_nonfinite_values(span, j, n, rows, weights, reals_, o_, ld, [](int64_t c) { return c; });
    }
    const T *const result = sum.result();
    for (int64_t r = 0; r < rows; ++r) std::memcpy(o + r * ldo, result + r * ld, sizeof(T) * size_t(dv));
  }

private:
  typename Math::Left left_;
  typename Math::Element *q_, *k_, *p_, *v_;
  T *reals_, *o_, *o_total_, *buffer_;
};

} // namespace strobe::inline STROBE_ISA
