// The oracle's numbers: any float dtype to double, and back rounded to nearest even.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>

#include "attention/attention.h"
#include "attention/text.h"

namespace strobe::oracle {

// A 16-bit float: one sign bit, then the exponent's, then the fraction's.
template <int exponent_bits> struct Float16 {
  static constexpr int fraction_bits = 15 - exponent_bits;
  static constexpr int bias = (1 << (exponent_bits - 1)) - 1;
  static constexpr int infinity = ((1 << exponent_bits) - 1) << fraction_bits;

  static double decode(uint16_t bits) {
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

  static uint16_t encode(double x) {
    const int sign = std::signbit(x) ? 0x8000 : 0;
    if (std::isnan(x)) return uint16_t(sign | infinity | 1 << (fraction_bits - 1));
    if (std::isinf(x)) return uint16_t(sign | infinity);
    const int exponent = x == 0 ? 1 - bias : std::max(std::ilogb(x), 1 - bias);
    // In units of the last place; a carry out of the fraction steps the exponent, up to infinity.
    const int units = int(std::nearbyint(std::ldexp(std::fabs(x), fraction_bits - exponent)));
    const int magnitude = ((exponent - (1 - bias)) << fraction_bits) + units;
    return uint16_t(sign | std::min(magnitude, infinity));
  }
};
using Half = Float16<5>;
using Bfloat = Float16<8>;

inline double load(const View &x, int64_t b, int64_t h, int64_t i, int64_t c) {
  if (x.dtype == DType::f64) return *x.at<double>(b, h, i, c);
  if (x.dtype == DType::f32) return *x.at<float>(b, h, i, c);
  if (x.dtype == DType::f16) return Half::decode(*x.at<uint16_t>(b, h, i, c));
  if (x.dtype == DType::bf16) return Bfloat::decode(*x.at<uint16_t>(b, h, i, c));
  throw Error(STROBE_INTERNAL, text("the oracle cannot read ", name(x.dtype)));
}

inline void store(const View &x, int64_t b, int64_t h, int64_t i, int64_t c, double value) {
  if (x.dtype == DType::f64)
    *x.at<double>(b, h, i, c) = value;
  else if (x.dtype == DType::f32)
    *x.at<float>(b, h, i, c) = float(value);
  else if (x.dtype == DType::f16)
    *x.at<uint16_t>(b, h, i, c) = Half::encode(value);
  else if (x.dtype == DType::bf16)
    *x.at<uint16_t>(b, h, i, c) = Bfloat::encode(value);
  else
    throw Error(STROBE_INTERNAL, text("the oracle cannot write ", name(x.dtype)));
}

} // namespace strobe::oracle
