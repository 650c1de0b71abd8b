// The arithmetic of broadcast and fused multiply-add: fp32 and fp64 throughout; fp16 and bf16 are widened on load. An arithmetic defines
// the layout of a tile of each tensor for its multiply(). forward.h and backward.h use nothing else of it.
#pragma once
#include "gemm.h"
#include "lanes.h"
#include "tile.h"

namespace strobe::inline STROBE_ISA {

template <class T> struct Fma {
  using Real = T;                              // the type of scores, statistics and accumulators
  using Element = T;                           // the type of packed operands
  struct Session {};                           // a thread's state while it works
  static constexpr int64_t kChunk = 64;        // keys whose scores are computed at once
  static constexpr bool kScoresInPlace = true; // Scores overwrites its source
  static constexpr bool kJointQueries = false; // products over queries are computed piece by piece
  static constexpr bool kSumsApart = false;    // a product adds to C every few terms, not only at its end

  static constexpr bool kBFloat16 = false;
  static constexpr int kPlanes = 0;
  static constexpr bool kQuantised = sizeof(T) == 4; // K and V may be quantised
  // The products of decode.h.
  template <class Elements> using Few = FewRows<FmaLanes<T, Elements>>;
  template <class> using Many = ManyRows<Fma>;
  static constexpr int64_t kFewRows = 8; // measured (docs/lab/performance.md)
  static constexpr bool kManyInPlace = false, kDecodesQuantised = kQuantised;

  static constexpr bool kExactPower = true;                       // P keeps all bits of T
  static STROBE_INLINE Vec<T> power(Vec<T> x) { return exp2(x); } // 2^x

  struct Left { // the operand whose elements are broadcast
    Broadcast<T> a;
  };
  struct Right { // the operand whose columns are lanes
    const T *b;
    int64_t ld;
  };

  template <bool /*kExchanged: no difference here*/ = false>
  static STROBE_INLINE void multiply(int64_t rows, int64_t columns, int64_t depth, Left a, Right b, T *c, int64_t ldc, bool accumulate) {
    STROBE_ISA::multiply(rows, columns, depth, a.a, b.b, b.ld, c, ldc, accumulate);
  }

  // Keys: rows of K or V of one head, as left operands: as they are (n x d), or transposed (d x n).
  struct Keys {
    Left rows, columns;
  };
  // Whether a tensor can serve in place.
  static STROBE_INLINE bool in_place(const View &x, int64_t /*d*/) {
    return matches(x) && !x.page_size && (x.stride[3] == 1 || x.stride[2] == 1);
  }
  static STROBE_INLINE Keys keys_in_place(const View &x, int64_t b, int64_t h, int64_t j0) {
    const T *p = x.at<T>(b, h, j0, 0);
    return {{{p, x.stride[2], x.stride[3]}}, {{p, x.stride[3], x.stride[2]}}};
  }
  static int64_t key_size(int64_t d, bool /*rows*/, bool /*columns*/) { return round_to(d, 16); } // elements per packed key
  static Keys keys_at(const Element *base, int64_t /*n*/, int64_t d, bool /*rows*/) {
    int64_t ld = round_to(d, 16);
    return {{{base, ld, 1}}, {{base, 1, ld}}};
  }
  static void pack_keys(const View &x, int64_t b, int64_t h, int64_t j0, int64_t n, int64_t d, Keys to, bool /*rows*/, bool /*columns*/,
                        T * /*reals*/, T * /*buffer*/) {
    for (int64_t j = 0; j < n; ++j) load_row(x, b, h, j0 + j, 0, d, const_cast<T *>(to.rows.a.a) + j * to.rows.a.row);
  }
  // The operand x, beginning at key `skip` of the tile.
  static STROBE_INLINE Left rows_from(Left x, int64_t skip) { return {{x.a.a + skip * x.a.row, x.a.row, x.a.col}}; }
  static STROBE_INLINE Left columns_from(Left x, int64_t skip) { return {{x.a.a + skip * x.a.col, x.a.row, x.a.col}}; }

  // Rows of any tensor, as the operand that is broadcast.
  static STROBE_INLINE int64_t left_size(int64_t /*rows*/, int64_t /*columns*/) { return 0; } // elements of scratch
  static STROBE_INLINE Left left_rows(const T *src, int64_t /*rows*/, int64_t /*columns*/, int64_t ld, T * /*scratch*/) {
    return {{src, ld, 1}};
  }

  // Queries: rows of Q or dO, one per lane (d x width).
  static STROBE_INLINE int64_t lanes_size(int64_t lanes, int64_t d) { return lanes * d; } // elements of scratch
  static Right load_lanes(const View &x, int64_t b, int64_t h, int64_t i0, int64_t n, int64_t d, T factor, int64_t width, T *scratch,
                          T *buffer) {
    STROBE_ISA::load_lanes(x, b, h, i0, n, d, factor, scratch, width, buffer);
    return {scratch, width};
  }
  // Queries: rows of Q or dO in place (n x d), with d padded to lanes.
  static STROBE_INLINE int64_t rows_size(int64_t n, int64_t d) { return n * round_to(d, 16); } // elements of scratch
  static Right load_rows(const View &x, int64_t b, int64_t h, int64_t i0, int64_t n, int64_t d, T *scratch) {
    int64_t ld = round_to(d, 16);
    if (matches(x) && !x.page_size && x.stride[3] == 1 && d == ld) return {x.at<T>(b, h, i0, 0), x.stride[2]};
    for (int64_t i = 0; i < n; ++i) {
      load_row(x, b, h, i0 + i, 0, d, scratch + i * ld);
      fill(scratch + i * ld + d, ld - d, T(0));
    }
    return {scratch, ld};
  }

  static STROBE_INLINE Right right_from(Right x, int64_t row) { return {x.b + row * x.ld, x.ld}; }

  // Scores (P or dS) on their way into a product: keys x width, written by pairs of keys. They are the right operand of a product over
  // keys, and the left operand of a product over queries.
  struct Scores {
    T *s;
    int64_t width;
    STROBE_INLINE void put(int64_t j, int64_t lane, Vec<T> first, Vec<T> second, bool both) const {
      first.store(s + j * width + lane);
      if (both) second.store(s + (j + 1) * width + lane);
    }
    STROBE_INLINE void finish(int64_t /*keys*/) const {}
    STROBE_INLINE Right lanes(int64_t from = 0) const { return {s + from * width, width}; } // beginning at key `from`
    STROBE_INLINE Left rows() const { return {{s, width, 1}}; }
  };
  static int64_t scores_size(int64_t /*tile_k*/, int64_t /*width*/) { return 0; }
  static STROBE_INLINE Scores in_place(T *s, int64_t width) { return {s, width}; }
  static STROBE_INLINE Scores scores(T *s, Element * /*lanes*/, Element * /*rows*/, int64_t /*keys*/, int64_t width, int64_t /*tile_q*/,
                                     int64_t /*lane*/) {
    return {s, width};
  }

private:
  static STROBE_INLINE bool matches(const View &x) { return x.dtype == (sizeof(T) == 8 ? DType::f64 : DType::f32); }
};

} // namespace strobe::inline STROBE_ISA
