// Conversions of every half, of every bfloat and of numbers between; and packed sums, which are rounded once.
#include <doctest/doctest.h>

#include <random>

#include "numbers.h"

using namespace strobe::emulator;

namespace {

// Checks each number, the midpoint to the next number, and the nearest floats on either side of the midpoint.
template <auto from, auto to> void check_rounding(uint16_t largest) {
  int wrong = 0;
  for (uint32_t n = 0; n < largest; n++)
    for (float sign : {1.0f, -1.0f}) {
      const auto high = static_cast<uint16_t>(sign < 0 ? 0x8000 : 0);
      const auto here = static_cast<uint16_t>(n | high), next = static_cast<uint16_t>((n + 1) | high), even = n % 2 ? next : here;
      const float low = std::fabs(from(here)), top = std::fabs(from(next)), middle = low + (top - low) / 2;
      wrong += to(sign * low) != here;
      wrong += to(sign * middle) != even;
      wrong += to(sign * std::nextafter(middle, 0.0f)) != here;
      wrong += to(sign * std::nextafter(middle, INFINITY)) != next;
    }
  CHECK(wrong == 0);
}

} // namespace

TEST_CASE("emulator: halves and bfloats round to nearest even") {
  check_rounding<from_half, to_half>(0x7BFF);
  check_rounding<from_bfloat, to_bfloat>(0x7F7F);
  CHECK(from_half(1) == 0x1p-24f);
  CHECK(from_half(0x3C01) == 1 + 0x1p-10f);
  CHECK(from_half(0x7BFF) == 65504);
  CHECK(to_half(65519.99f) == 0x7BFF);
  CHECK(to_half(65520) == 0x7C00);
  CHECK(to_half(-INFINITY) == 0xFC00);
  CHECK(std::isinf(from_half(0x7C00)));
  CHECK(std::isnan(from_half(0x7E00)));
  CHECK(to_half(std::nanf("")) == 0x7FFF);
  CHECK(to_bfloat(std::nanf("")) == 0x7FFF);
  CHECK(to_bfloat(3.4e38f) == 0x7F80);
}

TEST_CASE("emulator: FP8 as halves") {
  for (int x = 0; x < 256; x++) {
    const int exponent = x >> 3 & 15, fraction = x & 7;
    const float magnitude = exponent ? std::ldexp(float(8 + fraction), exponent - 10) : std::ldexp(float(fraction), -9);
    const float found = from_half(half_of_e4m3(static_cast<uint8_t>(x)));
    if (x % 128 == 127)
      CHECK(std::isnan(found));
    else
      CHECK(found == (x < 128 ? magnitude : -magnitude));
  }
}

TEST_CASE("emulator: a product and a sum of halves are rounded once") {
  std::mt19937 random(1);
  int wrong = 0;
  for (int n = 0; n < 200'000; n++) {
    // The numbers have 11 bits each, and the sum fits the 64 bits of a long double, so that it is exact.
    auto draw = [&](int spread) {
      const float fraction = static_cast<float>(random() % 2048) * 0x1p-10f;
      return from_half(to_half(std::ldexp(fraction, static_cast<int>(random() % static_cast<unsigned>(spread)) - spread / 2)));
    };
    const float a = draw(8), b = draw(8), c = draw(20) * (n % 2 ? -1.0f : 1.0f);
    const long double exact = static_cast<long double>(a) * b + c;
    const uint16_t got = to_half(fma_to_odd(a, b, c));
    // The result's neighbours must not be nearer.
    const long double error = std::fabs(exact - from_half(got));
    for (int step : {-1, 1}) {
      const auto other = static_cast<uint16_t>(got + step);
      const long double others = std::fabs(exact - from_half(other));
      if ((got & 0x7FFF) && (others < error || (others == error && got % 2))) wrong++;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("emulator: tf32 rounds ties away from zero") {
  CHECK(to_tf32(1 + 0x1p-11f) == 1 + 0x1p-10f);
  CHECK(to_tf32(-1 - 0x1p-11f) == -1 - 0x1p-10f);
  CHECK(to_tf32(1 + 0x1p-12f) == 1);
  CHECK(to_tf32(INFINITY) == INFINITY);
  CHECK(std::isnan(to_tf32(std::nanf(""))));
}
