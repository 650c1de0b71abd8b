#include "cuda/compile/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace strobe::cuda {

static constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

void Sha256::block(const uint8_t *bytes) {
  uint32_t w[64];
  for (int i = 0; i < 16; i++)
    w[i] = uint32_t(bytes[4 * i]) << 24 | uint32_t(bytes[4 * i + 1]) << 16 | uint32_t(bytes[4 * i + 2]) << 8 | bytes[4 * i + 3];
  for (int i = 16; i < 64; i++) {
    const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ w[i - 15] >> 3;
    const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ w[i - 2] >> 10;
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (int i = 0; i < 64; i++) {
    const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25), choice = (e & f) ^ (~e & g);
    const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22), majority = (a & b) ^ (a & c) ^ (b & c);
    const uint32_t t1 = h + s1 + choice + kRound[i] + w[i], t2 = s0 + majority;
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const uint32_t add[8] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; i++) state_[i] += add[i];
}

Sha256 &Sha256::add(std::string_view bytes) {
  while (!bytes.empty()) {
    const size_t held = length_ % 64, take = std::min(bytes.size(), 64 - held);
    std::memcpy(rest_.data() + held, bytes.data(), take);
    length_ += take;
    bytes.remove_prefix(take);
    if (length_ % 64 == 0) block(rest_.data());
  }
  return *this;
}

Sha256 &Sha256::add_field(std::string_view bytes) { return add(std::to_string(bytes.size())).add(":").add(bytes); }

Sha256::Digest Sha256::digest() const {
  Sha256 last = *this;
  std::string padding(1 + (119 - length_ % 64) % 64, '\0');
  padding[0] = static_cast<char>(0x80);
  for (int shift = 56; shift >= 0; shift -= 8) padding += static_cast<char>(length_ * 8 >> shift);
  last.add(padding);
  Digest out;
  for (int i = 0; i < 32; i++) out[i] = static_cast<uint8_t>(last.state_[i / 4] >> (24 - i % 4 * 8));
  return out;
}

std::string hex(const Sha256::Digest &digest) {
  std::string out;
  for (uint8_t byte : digest) out += {"0123456789abcdef"[byte / 16], "0123456789abcdef"[byte % 16]};
  return out;
}

} // namespace strobe::cuda
