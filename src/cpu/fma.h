// The arithmetic of broadcast and fused multiply-add: fp32 and fp64 throughout, fp16 and bf16 widened on load.
// A family of arithmetic says how a tile of each tensor is laid out for its multiply; forward.h and backward.h know nothing else of it.
#pragma once
#include "gemm.h"
#include "tile.h"

namespace strobe::inline STROBE_ISA {

template <class T> struct Fma {
  using Real = T;    // of scores, statistics and accumulators
  using Element = T; // of packed operands
  struct Session {}; // what a thread holds while it works

  struct Left { // the operand of a product whose elements are broadcast
    Broadcast<T> a;
  };
  struct Right { // the operand whose columns are lanes
    const T *b;
    int64_t ld;
  };

  static STROBE_INLINE void multiply(int64_t rows, int64_t columns, int64_t depth, Left a, Right b, T *c, int64_t ldc, bool accumulate) {
    STROBE_ISA::multiply(rows, columns, depth, a.a, b.b, b.ld, c, ldc, accumulate);
  }

  // Keys: rows [j0, j0 + n) of K or V, to be multiplied from the left as they are (n x d) or transposed (d x n).
  struct Keys {
    Left rows, columns;
  };
  struct KeyScratch {
    T *wide;
    KeyScratch(Arena &arena, int64_t tile_k, int64_t d, bool /*rows*/, bool /*columns*/) : wide(arena.take<T>(tile_k * round_to(d, 16))) {}
  };
  static Keys load_keys(const View &x, int64_t b, int64_t h, int64_t j0, int64_t n, int64_t d, const KeyScratch &scratch, T * /*buffer*/) {
    if (bytes_match(x) && (x.stride[3] == 1 || x.stride[2] == 1)) { // in place
      const T *p = x.at<T>(b, h, j0, 0);
      int64_t row = x.stride[2], column = x.stride[3];
      return {{{p, row, column}}, {{p, column, row}}};
    }
    int64_t ld = round_to(d, 16);
    for (int64_t j = 0; j < n; ++j) load_row(x, b, h, j0 + j, 0, d, scratch.wide + j * ld);
    return {{{scratch.wide, ld, 1}}, {{scratch.wide, 1, ld}}};
  }

  // The same operands from key `skip` of the tile on.
  static STROBE_INLINE Left rows_from(Left x, int64_t skip) { return {{x.a.a + skip * x.a.row, x.a.row, x.a.col}}; }
  static STROBE_INLINE Left columns_from(Left x, int64_t skip) { return {{x.a.a + skip * x.a.col, x.a.row, x.a.col}}; }

  // Queries: rows of Q or dO, one a lane (d x width).
  static STROBE_INLINE int64_t lanes_size(int64_t lanes, int64_t d) { return lanes * d; } // of scratch
  static Right load_lanes(const View &x, int64_t b, int64_t h, int64_t i0, int64_t n, int64_t d, T factor, int64_t width, T *scratch, T *buffer) {
    STROBE_ISA::load_lanes(x, b, h, i0, n, 0, d, factor, scratch, width, buffer);
    return {scratch, width};
  }
  // Queries: rows of Q or dO as they are (n x d), d padded to lanes.
  static STROBE_INLINE int64_t rows_size(int64_t n, int64_t d) { return n * round_to(d, 16); } // of scratch
  static Right load_rows(const View &x, int64_t b, int64_t h, int64_t i0, int64_t n, int64_t d, T *scratch) {
    int64_t ld = round_to(d, 16);
    if (bytes_match(x) && x.stride[3] == 1 && d == ld) return {x.at<T>(b, h, i0, 0), x.stride[2]};
    for (int64_t i = 0; i < n; ++i) {
      load_row(x, b, h, i0 + i, 0, d, scratch + i * ld);
      fill(scratch + i * ld + d, ld - d, T(0));
    }
    return {scratch, ld};
  }

  // Scores (P or dS), keys x width: as the right operand of a product over keys, as the left operand of a product over queries.
  static int64_t scores_size(int64_t /*tile_k*/, int64_t /*width*/) { return 0; }
  static Right score_lanes(const T *s, int64_t /*keys*/, int64_t width, T * /*scratch*/) { return {s, width}; }
  static Left score_rows(const T *s, int64_t /*keys*/, int64_t width, T * /*scratch*/) { return {{s, width, 1}}; }

private:
  static STROBE_INLINE bool bytes_match(const View &x) { return x.dtype == (sizeof(T) == 8 ? DType::f64 : DType::f32); }
};

} // namespace strobe::inline STROBE_ISA
