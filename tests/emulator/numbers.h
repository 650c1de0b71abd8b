// The GPU's small floating-point numbers, as bits. They round to nearest even. NaN has the bits that the GPU gives it.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

namespace strobe::emulator {

inline uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
inline float number(uint32_t bits) { return std::bit_cast<float>(bits); }

inline float from_bfloat(uint16_t x) { return number(uint32_t(x) << 16); }
inline uint16_t to_bfloat(float x) {
  const uint32_t u = bits(x);
  return x != x ? 0x7FFF : (u + 0x7FFF + (u >> 16 & 1)) >> 16;
}

inline float from_half(uint16_t x) {
  const uint32_t magnitude = x & 0x7FFF, sign = uint32_t(x & 0x8000) << 16;
  const float finite = number(magnitude << 13) * 0x1p112f;
  return number(sign | (magnitude < 0x7C00 ? bits(finite) : 0x7F800000 | magnitude << 13));
}
inline uint16_t to_half(float x) {
  const uint32_t magnitude = bits(x) & 0x7FFFFFFF, sign = bits(x) >> 16 & 0x8000;
  uint32_t half = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
  if (magnitude < 0x38800000)
    half = bits(number(magnitude) + 0.5f) - bits(0.5f); // below 2^-14: the last bit of 0.5 is the unit of half's subnormals
  if (magnitude >= 0x477FF000) half = 0x7C00;
  return magnitude > 0x7F800000 ? 0x7FFF : sign | half;
}
// FP8 (E4M3) has the fields of FP16 with another bias. Above 448 there is only NaN.
inline uint16_t half_of_e4m3(uint8_t x) {
  if ((x & 0x7F) == 0x7F) return 0x7FFF;
  return to_half((x & 0x80 ? -256.0f : 256.0f) * from_half(static_cast<uint16_t>((x & 0x7F) << 7)));
}

inline uint8_t to_e4m3(float x) { // what is larger than 448 becomes 448
  const uint32_t sign = bits(x) >> 24 & 0x80;
  const float size = std::fmin(std::fabs(x), 448.0f);
  if (x != x) return 0x7F;
  if (size == 0) return static_cast<uint8_t>(sign);
  int exponent;
  std::frexp(size, &exponent);                          // size < 2^exponent
  const int unit = (exponent < -5 ? -5 : exponent) - 4; // the exponent of the last bit
  const auto last = static_cast<int>(std::nearbyint(std::ldexp(size, -unit)));
  return static_cast<uint8_t>(sign | static_cast<uint32_t>((unit + 9) * 8 + last)); // a carry goes into the exponent
}

// Rounds to ten bits of fraction, ties away from zero.
inline float to_tf32(float x) {
  if (x != x) return number(0x7FFFFFFF);
  return std::isinf(x) ? x : number((bits(x) + 0x1000) & ~0x1FFFu);
}

inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// a b + c, rounded to odd, so that a second rounding to fewer bits is correct. The product of a and b must be exact in a double.
inline float fma_to_odd(float a, float b, float c) {
  const double product = double(a) * b, sum = product + c, part = sum - product;
  const double error = (product - (sum - part)) + (c - part);
  auto odd = std::bit_cast<uint64_t>(sum);
  if (std::isfinite(sum) && error != 0 && !(odd & 1)) odd += (error > 0) == (sum > 0) ? 1 : -1;
  const double exact = std::bit_cast<double>(odd);
  const float rounded = float(exact);
  if (!std::isfinite(rounded) || rounded == exact || bits(rounded) & 1) return rounded;
  return std::nextafter(rounded, exact > rounded ? INFINITY : -INFINITY);
}

} // namespace strobe::emulator
