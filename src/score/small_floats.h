// Floats of 16 bits as reals; FP32 and FP64 hold each of them exactly.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace strobe::score {

template <class T> T from_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const T x = exponent == 31 ? (fraction ? std::numeric_limits<T>::quiet_NaN() : std::numeric_limits<T>::infinity())
              : exponent     ? T(std::ldexp(double(fraction + 1024), exponent - 25))
                             : T(std::ldexp(double(fraction), -24));
  return bits & 0x8000 ? -x : x;
}
template <class T> T from_bfloat(uint16_t bits) { return T(std::bit_cast<float>(uint32_t(bits) << 16)); }

} // namespace strobe::score
