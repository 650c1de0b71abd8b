// The numbers of the oracle: any float dtype, and quantised K and V, as double.
#pragma once
#include <bit>
#include <cmath>

#include "attention/attention.h"
#include "attention/text.h"

namespace strobe::oracle {

// A 16-bit float: one sign bit, then the exponent's bits, then the fraction's bits.
template <int exponent_bits> double decode(uint16_t bits) {
  constexpr int fraction_bits = 15 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
  constexpr int infinity = ((1 << exponent_bits) - 1) << fraction_bits;
  const int magnitude = bits & 0x7FFF, exponent = magnitude >> fraction_bits, fraction = magnitude & ((1 << fraction_bits) - 1);
  double value;
  if (magnitude > infinity)
    value = std::numeric_limits<double>::quiet_NaN();
  else if (magnitude == infinity)
    value = std::numeric_limits<double>::infinity();
  else if (exponent == 0)
    value = std::ldexp(fraction, 1 - bias - fraction_bits);
  else
    value = std::bit_cast<double>(uint64_t(exponent - bias + 1023) << 52 | uint64_t(fraction) << (52 - fraction_bits));
  return bits & 0x8000 ? -value : value;
}
inline double half(uint16_t bits) { return decode<5>(bits); }
inline double bfloat(uint16_t bits) { return decode<8>(bits); }

inline double load(const View &x, int64_t b, int64_t h, int64_t i, int64_t c) {
  if (x.dtype == DType::f64) return *x.at<double>(b, h, i, c);
  if (x.dtype == DType::f32) return *x.at<float>(b, h, i, c);
  if (x.dtype == DType::f16) return half(*x.at<uint16_t>(b, h, i, c));
  if (x.dtype == DType::bf16) return bfloat(*x.at<uint16_t>(b, h, i, c));
  throw Error(STROBE_INTERNAL, text("the oracle cannot read ", name(x.dtype)));
}

// FP8 E4M3. It has no infinity, and its largest exponent holds numbers too.
inline double e4m3(uint8_t bits) {
  const int exponent = (bits >> 3) & 15, fraction = bits & 7;
  double value = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
  if ((bits & 0x7F) == 0x7F) value = std::numeric_limits<double>::quiet_NaN();
  return bits & 0x80 ? -value : value;
}

// FP8 E5M2: the upper byte of a half.
inline double e5m2(uint8_t bits) { return half(uint16_t(bits << 8)); }

// An element of K or V: the stored number, multiplied by its scale if there is one.
inline double load(const View &x, const Scales &scales, int64_t b, int64_t h, int64_t i, int64_t c) {
  if (!scales) return load(x, b, h, i, c);
  double stored;
  if (x.dtype == DType::i8)
    stored = *x.at<int8_t>(b, h, i, c);
  else if (x.dtype == DType::e4m3)
    stored = e4m3(*x.at<uint8_t>(b, h, i, c));
  else if (x.dtype == DType::e5m2)
    stored = e5m2(*x.at<uint8_t>(b, h, i, c));
  else if (x.dtype == DType::i4x2)
    stored = (((*x.at<uint8_t>(b, h, i, c / 2) >> (c % 2 ? 4 : 0)) & 15) ^ 8) - 8;
  else
    throw Error(STROBE_INTERNAL, text("the oracle knows no scales of ", name(x.dtype)));
  const int64_t at = scales.index(b, h, i, c);
  View one = scales;
  one.page_size = 0, one.data += at * bytes(one.dtype);
  return stored * load(one, 0, 0, 0, 0);
}

} // namespace strobe::oracle
