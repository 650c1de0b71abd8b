// The oracle's dropout: Philox4x32-7 (Salmon et al. 2011), and which byte belongs to which score.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

namespace strobe::oracle {

using Counter = std::array<uint32_t, 4>;
using Key = std::array<uint32_t, 2>;

inline Counter philox4x32_7(Counter c, Key key) {
  for (int round = 0; round < 7; round++) {
    const uint64_t x = uint64_t{0xD2511F53} * c[0], y = uint64_t{0xCD9E8D57} * c[2];
    c = {uint32_t(y >> 32) ^ c[1] ^ key[0], uint32_t(y), uint32_t(x >> 32) ^ c[3] ^ key[1], uint32_t(x)};
    key = {key[0] + 0x9E3779B9, key[1] + 0xBB67AE85};
  }
  return c;
}

// The finaliser of splitmix64.
inline uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

class Dropout {
public:
  Dropout(double probability, uint64_t seed, uint64_t offset) {
    if (probability > 0) threshold = uint32_t(std::clamp(std::round((1 - probability) * 256), 1.0, 255.0));
    const uint64_t x = mix64(seed + 0x9E3779B97F4A7C15 * (mix64(offset) | 1));
    key = {uint32_t(x), uint32_t(x >> 32)};
  }

  // The random byte of query i and key j. One Philox call serves a group of 4 queries x 4 keys: those positions of a 16 x 16 block that
  // agree in bits 2 and 1. Bits 3 and 0 of the query pick one of four words; bits 3 and 0 of the key pick one of its bytes.
  uint32_t byte(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const Counter words = philox4x32_7({group(j), group(i), uint32_t(h), uint32_t(b)}, key);
    return words[slot(i)] >> (8 * slot(j)) & 255;
  }

  // The factor of P_ij: 1 / keep rate if dropout keeps the element, 0 if it drops it.
  double factor(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (threshold == 256) return 1;
    return byte(b, h, i, j) < threshold ? 256.0 / threshold : 0.0;
  }

private:
  static uint32_t group(int64_t x) { return uint32_t(x / 16 * 4 + x % 8 / 2); }
  static uint32_t slot(int64_t x) { return uint32_t((x & 1) + 2 * (x >> 3 & 1)); }

  uint32_t threshold = 256; // an element is kept if byte < threshold
  Key key;
};

} // namespace strobe::oracle
