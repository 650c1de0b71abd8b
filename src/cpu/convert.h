// Conversions of elements, written so that the compiler vectorises loops over them. fp16 and bf16 are bits; rounding is to nearest even.
#pragma once
#include <type_traits>

#include "../attention/attention.h"
#include "simd.h"

namespace strobe::inline STROBE_ISA {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class To, class From> STROBE_INLINE To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To r;
  std::memcpy(&r, &x, sizeof r);
  return r;
}

STROBE_INLINE float widen(float x) { return x; }
STROBE_INLINE double widen(double x) { return x; }
STROBE_INLINE float widen(BFloat16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }
STROBE_INLINE float widen(Half x) {
  uint32_t magnitude = uint32_t(x.bits & 0x7FFF) << 13;
  uint32_t finite = bit_cast<uint32_t>(bit_cast<float>(magnitude) * 0x1p112f); // changes the exponent's bias; also correct for subnormals
  uint32_t r = magnitude >= 0x0F800000u ? magnitude | 0x7F800000u : finite;
  return bit_cast<float>(r | uint32_t(x.bits & 0x8000) << 16);
}

STROBE_INLINE void narrow(double x, double &to) { to = x; }
STROBE_INLINE void narrow(float x, float &to) { to = x; }
STROBE_INLINE void narrow(float x, BFloat16 &to) {
  uint32_t u = bit_cast<uint32_t>(x);
  uint32_t rounded = (u + 0x7FFF + (u >> 16 & 1)) >> 16;
  to.bits = uint16_t((u & 0x7FFFFFFF) > 0x7F800000u ? (u >> 16 | 0x40) : rounded);
}
STROBE_INLINE void narrow(float x, Half &to) {
  uint32_t u = bit_cast<uint32_t>(x), sign = u & 0x80000000u;
  u ^= sign;
  uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(u) + 0.5f) - 0x3F000000u; // adding 2^-1 aligns the 10 bits
  uint32_t normal = (u + (uint32_t(15 - 127) << 23) + 0xFFF + (u >> 13 & 1)) >> 13;
  uint32_t special = u > 0x7F800000u ? 0x7E00u : 0x7C00u;
  uint32_t r = u >= 0x47800000u ? special : u < 0x38800000u ? subnormal : normal;
  to.bits = uint16_t(r | sign >> 16);
}

template <class To> using Narrow = std::conditional_t<std::is_same_v<To, double>, double, float>; // the type that is narrowed to To

// Calls f with a null pointer to the element type of a float dtype.
template <class F> STROBE_INLINE void with_type(DType dtype, F &&f) {
  switch (dtype) {
  case DType::f32:
    return f((float *)nullptr);
  case DType::f64:
    return f((double *)nullptr);
  case DType::f16:
    return f((Half *)nullptr);
  case DType::bf16:
    return f((BFloat16 *)nullptr);
  default:
    __builtin_unreachable();
  }
}

template <class T> STROBE_INLINE T load_as(DType dtype, const char *base, int64_t index) {
  T r{};
  with_type(dtype, [&](auto *type) { r = T(widen(reinterpret_cast<decltype(type)>(const_cast<char *>(base))[index])); });
  return r;
}

// Whether rows [i, i + n) of a head, d columns, hold neither infinity nor NaN.
inline bool all_finite(const View &view, int64_t b, int64_t h, int64_t i, int64_t n, int64_t d) {
  if (n == 0) return true; // a view without elements has no dtype
  bool finite = true;
  with_type(view.dtype, [&](auto *type) {
    using T = std::remove_pointer_t<decltype(type)>;
    using Word = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
    constexpr Word kExponent = std::is_same_v<T, Half>       ? Word(0x7C00)
                               : std::is_same_v<T, BFloat16> ? Word(0x7F80)
                               : sizeof(T) == 4              ? Word(0x7F800000)
                                                             : Word(0x7FF0000000000000);
    for (int64_t r = 0; r < n && finite; ++r) {
      const auto *row = view.at<T>(b, h, i + r, 0);
      const int64_t stride = view.stride[3];
      Word most = 0;
      auto look = [&](const T &x) __attribute__((always_inline)) {
        Word exponent = bit_cast<Word>(x) & kExponent;
        most = exponent > most ? exponent : most;
      };
      if (stride == 1)
        for (int64_t c = 0; c < d; ++c) look(row[c]);
      else
        for (int64_t c = 0; c < d; ++c) look(row[c * stride]);
      finite = most != kExponent;
    }
  });
  return finite;
}

// dst[c] = view(b, h, i, c) for c in [0, n)
template <class T> void load_row(const View &view, int64_t b, int64_t h, int64_t i, int64_t c0, int64_t n, T *dst) {
  with_type(view.dtype, [&](auto *type) {
    auto *src = view.at<std::remove_pointer_t<decltype(type)>>(b, h, i, c0);
    int64_t stride = view.stride[3];
    if (stride == 1) {
      for (int64_t c = 0; c < n; ++c) dst[c] = T(widen(src[c]));
    } else {
      for (int64_t c = 0; c < n; ++c) dst[c] = T(widen(src[c * stride]));
    }
  });
}
// add: adds to what the tensor holds, in T's own type.
template <class T> void store_row(const View &view, int64_t b, int64_t h, int64_t i, int64_t n, const T *src, bool add = false) {
  if (add) {
    T *dst = view.at<T>(b, h, i, 0);
    for (int64_t c = 0; c < n; ++c) dst[c * view.stride[3]] += src[c];
    return;
  }
  with_type(view.dtype, [&](auto *type) {
    using To = std::remove_pointer_t<decltype(type)>;
    auto *dst = view.at<To>(b, h, i, 0);
    int64_t stride = view.stride[3];
    if (stride == 1) {
      for (int64_t c = 0; c < n; ++c) narrow(Narrow<To>(src[c]), dst[c]);
    } else {
      for (int64_t c = 0; c < n; ++c) narrow(Narrow<To>(src[c]), dst[c * stride]);
    }
  });
}

} // namespace strobe::inline STROBE_ISA
