// The values of quantised K and V, read one at a time: a stored number times its scale.
#pragma once
#include "../attention/quantised.h"
#include "../ptx/math.h"
#include "../tile/copy.h"

namespace strobe {

// The number that the low bits of x store. Integers are put into the last bits of a float's fraction: 2^23 + 2^7 + x is exact for any INT8
// number x.
template <i32 kStored> __device__ __forceinline__ float stored_number(u32 x);
template <> __device__ __forceinline__ float stored_number<kInt8>(u32 x) {
  return __uint_as_float(0x4B000000 | ((x & 255) ^ 128)) - 8388736.0f;
}
template <> __device__ __forceinline__ float stored_number<kInt4>(u32 x) {
  return __uint_as_float(0x4B000000 | ((x & 15) ^ 8)) - 8388616.0f;
}
template <> __device__ __forceinline__ float stored_number<kE4M3>(u32 x) { // FP16 has the same fields, with another exponent bias
  const f16 y{(unsigned short)((x & 0x80) << 8 | (x & 0x7F) << 7)};
  return (x & 0x7F) == 0x7F ? __int_as_float(0x7FFFFFFF) : 256.0f * to_float(y);
}
template <> __device__ __forceinline__ float stored_number<kE5M2>(u32 x) { // the upper byte of an FP16 number
  return to_float(f16{(unsigned short)(x << 8)});
}

__device__ __forceinline__ float scale_at(const void *scales, i64 at, bool half) {
  return half ? to_float(((const f16 *)scales)[at]) : ((const float *)scales)[at];
}

// A scale as it is stored, in FP16 or FP32. Each dtype has a register of its own: if two conditional loads shared one, the second load
// would wait for the first.
struct StoredScale {
  u32 as_half = 0;
  float as_float = 0;
};

// K or V of one key head of a sequence. kByColumn: for K only.
template <Features F, bool kByColumn> struct QuantisedKeys {
  static constexpr bool kPages = F.pages;
  const Operand &x, &scale;
  const u8 *first;    // row 0, or row 0 of page 0
  const void *scales; // the scales of that row; with kByColumn those of the tensor's first group
  i64 k0;             // the sequence's first row in the tensor
  i32 columns, group;
  bool half;
  SequencePages pages;

  __device__ __forceinline__ QuantisedKeys(const Operand &x, const Operand &scale, bool half, i32 group, const Inputs &in,
                                           const Sequence &s, i64 b, i64 head, i32 columns)
      : x(x), scale(scale), k0(kPages ? 0 : s.k0), columns(columns), group(group), half(half) {
    const i64 batch = kPages ? 0 : b, row = k0;
    first = x.at<const u8>(batch, head, row, 0);
    const i64 at = batch * scale.stride[0] + head * scale.stride[1] + (kByColumn ? 0 : row * scale.stride[2]);
    scales = half ? (const void *)((const f16 *)scale.data + at) : (const float *)scale.data + at;
    if constexpr (kPages) pages = in.pages.of(b);
  }

  __device__ __forceinline__ const u8 *row(i32 j) const {
    if constexpr (kPages)
      return first + pages.offset(j, x.stride[0], x.stride[2]);
    else
      return first + j * x.stride[2];
  }
  // The index of row j's scale, or of the first of its column scales.
  __device__ __forceinline__ i64 scales_of(i32 j) const {
    if constexpr (!kByColumn) {
      return kPages ? pages.offset(j, scale.stride[0], scale.stride[2]) : j * scale.stride[2];
    } else if constexpr (kPages) {
      const u32 n = pages.number(j), slot = (u32)j - n * pages.page;
      return pages.offset((i32)(n * pages.page), scale.stride[0], 0) + slot / (u32)group * scale.stride[2];
    } else {
      return (k0 + j) / group * scale.stride[2];
    }
  }
  // The scale of column c. at: the result of scales_of(j).
  __device__ __forceinline__ float scale_of(i64 at, i32 c) const {
    return scale_at(scales, kByColumn ? at + c * scale.stride[3] : at, half);
  }
  // Reads the scale of a row. The scale is converted in a second step, so that other work fits between load and use.
  __device__ __forceinline__ StoredScale stored_scale(i64 at) const {
    StoredScale x;
    if (half)
      x.as_half = ((const f16 *)scales)[at].bits;
    else
      x.as_float = ((const float *)scales)[at];
    return x;
  }
  __device__ __forceinline__ float number(StoredScale x) const { return half ? to_float(f16{(unsigned short)x.as_half}) : x.as_float; }
  __device__ __forceinline__ u32 stored(const u8 *row, i32 c) const {
    if constexpr (F.quant == kInt4)
      return row[c / 2 * x.stride[3]] >> 4 * (c % 2);
    else
      return row[c * x.stride[3]];
  }
  __device__ __forceinline__ float at(i32 j, i32 c) const { return stored_number<F.quant>(stored(row(j), c)) * scale_of(scales_of(j), c); }

  // The bytes of the rows [begin, end) as 16-bit elements, to be copied 16 bytes at a time. For keys that are not paged.
  __device__ __forceinline__ tile::StridedMatrix<const f16> bytes(i64 begin, i64 end) const {
    static_assert(!kPages);
    return {{(const f16 *)row((i32)begin), x.stride[2] / 2, 1, (i32)end - (i32)begin, elements()}};
  }
  __device__ __forceinline__ i32 elements() const { return columns / (F.quant == kInt4 ? 4 : 2); } // 16-bit elements per row

  struct Matrix {
    const QuantisedKeys *keys;
    i32 begin, rows, columns;
    __device__ __forceinline__ float number(i32 r, i32 c) const { return keys->at(begin + r, c); }
  };
  __device__ __forceinline__ Matrix rows(i64 begin, i64 end) const { return {this, (i32)begin, (i32)end - (i32)begin, columns}; }
};
template <Features F, bool kByColumn> __device__ __forceinline__ bool lacks(const QuantisedKeys<F, kByColumn> &keys, i32 j) {
  if constexpr (F.pages)
    return keys.pages.lacks(j);
  else
    return false;
}

} // namespace strobe
