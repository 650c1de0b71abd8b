// Which elements dropout keeps: a pure function of (seed, offset, batch, head, query, key), the same on every engine, tile and device.
// Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). One call gives 16 bytes to a 4x4 group of elements.
// A group's queries are {a, a+1, a+8, a+9} and its keys {b, b+1, b+8, b+9} (a, b even, below 8, within a block of 16). In the accumulator
// fragments of mma.sync and wgmma, two neighbouring lanes own a group, in S and in S transposed alike. So a lane makes one call for each 16
// of its elements, and exchanges half of the bytes with its neighbour.
#pragma once
#include "base.h"

namespace strobe::inline STROBE_ISA {

struct Philox {
  u32 x[4];
};

STROBE_FN Philox philox4x32_7(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const u64 x0 = (u64)0xD2511F53u * c0,
              x2 = (u64)0xCD9E8D57u * c2; // in 64 bits, because separate low and high products would take two instructions each on the GPU
    c0 = (u32)(x2 >> 32) ^ c1 ^ k0;
    c1 = (u32)x2;
    c2 = (u32)(x0 >> 32) ^ c3 ^ k1;
    c3 = (u32)x0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

struct DropoutKey {
  u32 k0, k1;
};

STROBE_FN u64 mix64(u64 x) { // the finaliser of splitmix64
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}
STROBE_FN DropoutKey dropout_key(u64 seed, u64 offset) {
  u64 key = mix64(seed + 0x9E3779B97F4A7C15ull * (mix64(offset) | 1));
  return {(u32)key, (u32)(key >> 32)};
}

// An element is kept if its byte is below the threshold. The keep rate is threshold / 256; it is never 0, and if p > 0 it is never 1.
STROBE_FN constexpr u32 dropout_threshold(double p) {
  u32 t = (u32)((1.0 - p) * 256.0 + 0.5);
  return p == 0 ? 256u : t < 1 ? 1u : t > 255 ? 255u : t;
}
STROBE_FN constexpr float dropout_keep_rate(u32 threshold) { return (float)threshold / 256.0f; }

// A position's group, which is a coordinate of Philox's counter, and its slot, one of the group's 4 rows or columns. Queries and keys use
// the same functions.
STROBE_FN constexpr u32 dropout_group(i64 position) { return (u32)((position >> 4) * 4 + ((position & 7) >> 1)); }
STROBE_FN constexpr u32 dropout_slot(i64 position) { return (u32)((position & 1) + 2 * ((position >> 3) & 1)); }

// The bytes of a group: byte m of word n belongs to the query in slot n and the key in slot m.
STROBE_FN Philox dropout_bits(DropoutKey key, u32 key_group, u32 query_group, u32 head, u32 batch) {
  return philox4x32_7(key_group, query_group, head, batch, key.k0, key.k1);
}
STROBE_FN bool dropout_keep(DropoutKey key, u32 threshold, i64 batch, i64 head, i64 i, i64 j) {
  Philox bits = dropout_bits(key, dropout_group(j), dropout_group(i), (u32)head, (u32)batch);
  return (bits.x[dropout_slot(i)] >> 8 * dropout_slot(j) & 0xFF) < threshold;
}

} // namespace strobe::inline STROBE_ISA
