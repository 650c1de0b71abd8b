// K and V as numbers. Quantised elements are stored numbers, which are multiplied by their scales.
#pragma once
#include "convert.h"

namespace strobe::inline STROBE_ISA {

struct E4M3 {
  uint8_t bits;
};
STROBE_INLINE float widen(E4M3 x) {
  const float value = bit_cast<float>(uint32_t(x.bits & 0x7F) << 20) * 0x1p120f; // changes the exponent's bias; also correct for subnormals
  return bit_cast<float>(((x.bits & 0x7F) == 0x7F ? 0x7FC00000u : bit_cast<uint32_t>(value)) | uint32_t(x.bits & 0x80) << 24);
}

struct E5M2 { // the upper byte of a half
  uint8_t bits;
};
STROBE_INLINE float widen(E5M2 x) { return widen(Half{uint16_t(x.bits << 8)}); }

// The rows of K or of V.
struct KeyRows {
  const View &x;
  const Scales &scales;
  STROBE_INLINE bool quantised() const { return bool(scales); }
};
STROBE_INLINE KeyRows rows_of_k(const Problem &p) { return {p.k, p.k_scale}; }
STROBE_INLINE KeyRows rows_of_v(const Problem &p) { return {p.v, p.v_scale}; }

// dst[c] = column c0 + c of a row, as stored.
template <class T> STROBE_INLINE void load_stored(const View &x, int64_t b, int64_t h, int64_t i, int64_t c0, int64_t n, T *dst) {
  const int64_t stride = x.stride[3];
  const auto load = [&](auto *src) __attribute__((always_inline)) {
    const auto number = [](auto stored) __attribute__((always_inline)) {
      if constexpr (std::is_same_v<decltype(stored), int8_t>)
        return T(stored);
      else
        return T(widen(stored));
    };
    if (stride == 1)
      for (int64_t c = 0; c < n; ++c) dst[c] = number(src[c]);
    else
      for (int64_t c = 0; c < n; ++c) dst[c] = number(src[c * stride]);
  };
  if (x.dtype == DType::i8) return load(x.at<int8_t>(b, h, i, c0));
  if (x.dtype == DType::e4m3) return load(x.at<E4M3>(b, h, i, c0));
  if (x.dtype == DType::e5m2) return load(x.at<E5M2>(b, h, i, c0));
  const uint8_t *src = x.at<uint8_t>(b, h, i, 0);
  for (int64_t c = 0; c < n; ++c)
    dst[c] =
        T(int(src[(c0 + c) / 2 * stride] >> (c0 + c) % 2 * 4 & 15) - 16 * int(src[(c0 + c) / 2 * stride] >> ((c0 + c) % 2 * 4 + 3) & 1));
}

// dst[n] = the scale at index + n * stride, for n < count.
template <class T> STROBE_INLINE void load_scales_at(const Scales &scales, int64_t index, int64_t stride, int64_t count, T *dst) {
  const auto load = [&](auto *src) __attribute__((always_inline)) {
    if (stride == 1)
      for (int64_t n = 0; n < count; ++n) dst[n] = T(widen(src[n]));
    else
      for (int64_t n = 0; n < count; ++n) dst[n] = T(widen(src[n * stride]));
  };
  if (scales.dtype == DType::f32)
    load(reinterpret_cast<const float *>(scales.data) + index);
  else
    load(reinterpret_cast<const Half *>(scales.data) + index);
}
// dst[c] = the scale of column c0 + c of a row.
template <class T> STROBE_INLINE void load_scales(const Scales &scales, int64_t b, int64_t h, int64_t i, int64_t c0, int64_t n, T *dst) {
  load_scales_at(scales, scales.index(b, h, i, c0), scales.stride[3], n, dst);
}
// dst[r] = the scale of row i + r. For scales that belong to rows.
template <class T>
__attribute__((noinline)) void load_row_scales(const Scales &scales, int64_t b, int64_t h, int64_t i, int64_t n, T *dst) {
  for (int64_t r = 0, count; r < n; r += count) { // rows up to the end of a page
    count = scales.page_size ? min((i64)(n - r), (i64)(scales.page_size - (i + r) % scales.page_size)) : n;
    load_scales_at(scales, scales.index(b, h, i + r, 0), scales.stride[2], count, dst + r);
  }
}

// dst[c] = column c0 + c of a row.
template <class T>
__attribute__((noinline)) void load_row(const KeyRows &rows, int64_t b, int64_t h, int64_t i, int64_t c0, int64_t n, T *dst) {
  if (!rows.quantised()) return load_row(rows.x, b, h, i, c0, n, dst);
  load_stored(rows.x, b, h, i, c0, n, dst);
  T scale;
  const bool of_row = rows.scales.rows == 1;
  if (of_row) load_scales(rows.scales, b, h, i, 0, 1, &scale);
  for (int64_t c = 0; c < n; ++c) {
    if (!of_row) load_scales(rows.scales, b, h, i, c0 + c, 1, &scale);
    dst[c] *= scale;
  }
}

// Whether stored rows hold a NaN or an infinity, whatever their scales.
inline bool stores_nonfinite(const KeyRows &rows, int64_t b, int64_t h, int64_t i, int64_t n, int64_t d) {
  if (!rows.quantised()) return !all_finite(rows.x, b, h, i, n, d);
  bool found = false;
  const int least = rows.x.dtype == DType::e4m3 ? 0x7F : rows.x.dtype == DType::e5m2 ? 0x7C : 0x80; // magnitudes from there on
  for (int64_t r = i; least < 0x80 && r < i + n; ++r) {
    const uint8_t *row = rows.x.at<uint8_t>(b, h, r, 0);
    for (int64_t c = 0; c < d; ++c) found |= (row[c * rows.x.stride[3]] & 0x7F) >= least;
  }
  return found;
}
inline bool all_finite(const KeyRows &rows, int64_t b, int64_t h, int64_t i, int64_t n, int64_t d) {
  if (stores_nonfinite(rows, b, h, i, n, d)) return false;
  constexpr float kLargest = 0x1.fp127f / 65536; // with a scale up to this, every stored number times the scale is finite
  const bool of_row = rows.scales.rows == 1;
  for (int64_t r = i; rows.quantised() && r < i + n; ++r)
    for (int64_t c = 0; c < (of_row ? 1 : d); ++c) {
      float scale;
      load_scales(rows.scales, b, h, r, c, 1, &scale);
      if (!(__builtin_fabsf(scale) <= kLargest)) return false;
    }
  return true;
}

} // namespace strobe::inline STROBE_ISA
