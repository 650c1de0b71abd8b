// Tiles in memory: scratch, and loads that bring a tensor's tile into the layout of lanes (one query per lane).
#pragma once
#include <utility>

#include "convert.h"

namespace strobe::inline STROBE_ISA {

// Hands out 64-byte aligned pieces of the caller's workspace. With a null base it only counts bytes.
class Arena {
public:
  explicit Arena(void *base) : base_(static_cast<char *>(base)) {}
  template <class T> STROBE_INLINE T *take(int64_t count) {
    char *p = base_ ? base_ + used_ : nullptr;
    used_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T *>(p);
  }
  STROBE_INLINE int64_t used() const { return used_; }

private:
  char *base_;
  int64_t used_ = 0;
};

STROBE_INLINE int64_t round_to(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

template <class T> STROBE_INLINE void fill(T *p, int64_t count, T value) {
  for (int64_t i = 0; i < count; ++i) p[i] = value;
}

// Swaps rows and columns of a kLanes x kLanes block in registers. It takes log2 steps; a step exchanges rows i and i + s, with s a power of
// two.
template <int s, class T, int... lane> STROBE_INLINE void exchange(Vec<T> &x, Vec<T> &y, std::integer_sequence<int, lane...>) {
  constexpr int L = sizeof...(lane);
  auto a = x.v, b = y.v; // x keeps the lanes of a without bit s and takes those of b; y takes the others
  x.v = __builtin_shufflevector(a, b, (lane & s ? lane - s + L : lane)...);
  y.v = __builtin_shufflevector(a, b, (lane & s ? lane + L : lane + s)...);
}
template <int s = 1, class T> STROBE_INLINE void transpose_block(Vec<T> (&x)[Vec<T>::kLanes]) {
  constexpr int L = Vec<T>::kLanes;
  if constexpr (s < L) {
    unroll<L>(STROBE_UNROLL(i) {
      if constexpr ((i & s) == 0) exchange<s>(x[i], x[i + s], std::make_integer_sequence<int, L>{});
    });
    transpose_block<2 * s>(x);
  }
}

// dst[c * width + lane] = x[c] * factor for lane < count (0 in further lanes, up to width) and c < columns. Here x = row_of(lane, room),
// and row_of may write to room. width is a multiple of 16. x has round_to(columns, 16) elements that may be read, and buffer has 16 such
// rows. ahead: the distance, in elements, from each row to a row that will be read soon (0: not known).
template <class T, class Row>
STROBE_INLINE void load_lanes(Row &&row_of, int64_t count, int64_t columns, T factor, T *dst, int64_t width, T *buffer, int64_t ahead = 0) {
  constexpr int L = Vec<T>::kLanes;
  int64_t padded = round_to(columns, 16);
  for (int64_t lane = 0; lane < width; lane += L) {
    const T *rows[L];
    for (int64_t r = 0; r < L; ++r) {
      T *row = buffer + r * padded;
      if (lane + r >= count) fill(row, columns, T(0));
      rows[r] = lane + r < count ? row_of(lane + r, row) : row;
    }
    for (int64_t c = 0; c < columns; c += L) {
      Vec<T> block[L];
      if (ahead) unroll<L>(STROBE_UNROLL(r) { __builtin_prefetch(rows[r] + c + ahead, 0, 2); });
      unroll<L>(STROBE_UNROLL(r) { block[r] = Vec<T>::load(rows[r] + c) * Vec<T>(factor); });
      transpose_block(block);
      int64_t n = columns - c < L ? columns - c : L;
      if (n == L) {
        unroll<L>(STROBE_UNROLL(r) { block[r].store(dst + (c + r) * width + lane); });
      } else {
        T tail[L * L];
        unroll<L>(STROBE_UNROLL(r) { block[r].store(tail + r * L); });
        for (int64_t r = 0; r < n; ++r) std::memcpy(dst + (c + r) * width + lane, tail + r * L, sizeof(T) * L);
      }
    }
  }
}

// load_lanes() for rows i0 + lane of a tensor.
template <class T>
__attribute__((noinline)) void load_lanes(const View &src, int64_t b, int64_t h, int64_t i0, int64_t count, int64_t columns, T factor,
                                          T *dst, int64_t width, T *buffer) {
  const bool in_place = src.dtype == (sizeof(T) == 8 ? DType::f64 : DType::f32) && src.stride[3] == 1 && columns % 16 == 0;
  auto row_of = [&](int64_t lane, T *room) -> const T * {
    if (in_place) return src.at<T>(b, h, i0 + lane, 0);
    load_row(src, b, h, i0 + lane, 0, columns, room);
    return room;
  };
  load_lanes<T>(row_of, count, columns, factor, dst, width, buffer, in_place && !src.page_size ? width * src.stride[2] : 0);
}

// The inverse of load_lanes(): dst(b, h, i0 + lane, c) = src[c * width + lane] * factor[lane] for lane < count. add: adds to what the
// tensor holds. buffer: 16 rows of round_to(columns, 16) elements.
template <class T>
__attribute__((noinline)) void store_lanes(const View &dst, int64_t b, int64_t h, int64_t i0, int64_t count, int64_t columns,
                                           const T *factor, const T *src, int64_t width, T *buffer, bool add = false) {
  constexpr int L = Vec<T>::kLanes;
  int64_t padded = round_to(columns, 16);
  for (int64_t lane = 0; lane < count; lane += L) {
    Vec<T> scale = Vec<T>::load(factor + lane);
    for (int64_t c = 0; c < columns; c += L) {
      Vec<T> block[L];
      unroll<L>(STROBE_UNROLL(r) { block[r] = c + r < columns ? Vec<T>::load(src + (c + r) * width + lane) * scale : Vec<T>(T(0)); });
      transpose_block(block);
      unroll<L>(STROBE_UNROLL(r) { block[r].store(buffer + r * padded + c); });
    }
    for (int64_t r = 0; r < L && lane + r < count; ++r) store_row(dst, b, h, i0 + lane + r, columns, buffer + r * padded, add);
  }
}

} // namespace strobe::inline STROBE_ISA
