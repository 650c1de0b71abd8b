// Compares the map of the mask with a brute force over the mask's bytes; and tests which cells share a map.
#define STROBE_VECTOR_BYTES 16
#include "cpu/mask_map.h"

#include <doctest/doctest.h>

#include <random>
#include <vector>

using namespace strobe;

namespace {

// A mask that owns its memory. An axis whose flag in `axes` is unset is broadcast, by stride 0.
struct Mask {
  int64_t sizes[4];
  std::vector<uint8_t> bytes;
  View view;

  Mask(const Problem &p, int axes, bool keys_first, auto &&value) {
    const int64_t full[] = {p.batch, p.heads, p.seqlen_q, p.seqlen_k};
    for (int a = 0; a < 4; a++) sizes[a] = axes >> a & 1 ? full[a] : 1;
    view.dtype = DType::boolean;
    int64_t stride = 1;
    for (int a : {keys_first ? 2 : 3, keys_first ? 3 : 2, 1, 0}) {
      view.stride[a] = axes >> a & 1 ? stride : 0;
      stride *= sizes[a];
    }
    bytes.resize(static_cast<size_t>(stride));
    view.data = reinterpret_cast<char *>(bytes.data());
    for (int64_t b = 0; b < sizes[0]; b++)
      for (int64_t h = 0; h < sizes[1]; h++)
        for (int64_t i = 0; i < sizes[2]; i++)
          for (int64_t j = 0; j < sizes[3]; j++) *view.at<uint8_t>(b, h, i, j) = value(i, j);
  }
};

Problem problem(int64_t batch, int64_t heads, int64_t seqlen_q, int64_t seqlen_k) {
  Problem p;
  p.batch = batch, p.heads = p.heads_kv = heads;
  p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k;
  p.total_q = batch * seqlen_q, p.total_k = batch * seqlen_k;
  return p;
}

struct Made {
  MaskMap map;
  std::vector<uint8_t> memory;
  int64_t used;
  Made(const Problem &p, const TileSizes &tile, int threads) : map(p, tile) {
    Arena count(nullptr);
    map.take(count);
    used = count.used();
    memory.assign(static_cast<size_t>(used), 0xFF);
    Arena arena(memory.data());
    map.take(arena);
    Execution execution;
    execution.threads = threads;
    map.make(execution);
  }
};

} // namespace

TEST_CASE("mask map: every cell, tile and total is what the bytes say, whatever is broadcast") {
  std::mt19937 random(3);
  auto draw = [&](int64_t lo, int64_t hi) { return std::uniform_int_distribution<int64_t>(lo, hi)(random); };
  int kinds[4] = {};
  for (int axes = 0; axes < 16; axes++)
    for (int n = 0; n < 24; n++) {
      Problem p = problem(draw(1, 2), draw(1, 3), draw(1, 200), draw(1, 200));
      const int64_t density = draw(0, 3), noise = draw(0, 40); // density: in thirds; noise: how many of 1600 bytes differ from their block
      std::vector<uint8_t> kept(16 * 16);
      for (uint8_t &k : kept) k = draw(1, 3) <= density ? static_cast<uint8_t>(draw(1, 255)) : 0; // any byte but 0 is true
      Mask mask(p, axes, n % 2, [&](int64_t i, int64_t j) {
        const uint8_t x = kept[static_cast<size_t>(i / 32 * 16 + j / 32)];
        return draw(0, 1599) < noise ? uint8_t(!x) : x;
      });
      p.mask = mask.view;
      const int64_t q = 16 * draw(1, 8);
      const TileSizes tile{q, 64, std::min<int64_t>(q, 16 * draw(1, 4))};
      Made made(p, tile, static_cast<int>(draw(1, 3)));
      const int64_t cell = axes & 8 ? kKeyAlign : p.seqlen_k;

      auto expected = [&](int64_t b, int64_t h, int64_t i0, int64_t i1, int64_t j) {
        uint8_t kind = 0;
        for (int64_t i = i0; i < std::min(i1, p.seqlen_q); i++)
          for (int64_t c = j / cell * cell; c < std::min((j / cell + 1) * cell, p.seqlen_k); c++)
            kind |= *p.mask.at<uint8_t>(b, h, i, c) ? kSeen : kHidden;
        return kind;
      };
      for (int64_t b = 0; b < p.batch; b++)
        for (int64_t h = 0; h < p.heads; h++)
          for (int64_t j = 0; j < p.seqlen_k; j += 32) {
            REQUIRE(made.map.of_all(b, h, j) == expected(b, h, 0, p.seqlen_q, j));
            for (int64_t i0 = 0; i0 < p.seqlen_q; i0 += tile.q) {
              REQUIRE(made.map.of_tile(b, h, {}, i0, j) == expected(b, h, i0, i0 + tile.q, j));
              for (int64_t i = i0; i < std::min(i0 + tile.q, p.seqlen_q); i += tile.width) {
                const uint8_t kind = made.map.of(made.map.row(b, h, {}, i), j, j + 1);
                REQUIRE(kind == expected(b, h, i, std::min(i + tile.width, i0 + tile.q), j));
                kinds[kind]++;
              }
            }
          }
    }
  CHECK(kinds[0] == 0);
  for (int kind : {1, 2, 3}) CHECK(kinds[kind] > 1000);
}

TEST_CASE("mask map: the hull of what is seen, and the union over keys") {
  Problem p = problem(1, 1, 16, 300);
  Mask mask(p, 8, false, [](int64_t, int64_t j) { return uint8_t((j >= 70 && j < 100) || j == 200); });
  p.mask = mask.view;
  Made made(p, {16, 64, 16}, 1);
  const uint8_t *row = made.map.row(0, 0, {}, 0);
  auto hull = [&](i64 begin, i64 end) {
    const Range r = made.map.seen(row, {begin, end});
    return r.empty() ? std::pair<i64, i64>{0, 0} : std::pair<i64, i64>{r.begin, r.end};
  };
  CHECK(hull(0, 300) == std::pair<i64, i64>{64, 224});
  CHECK(hull(80, 90) == std::pair<i64, i64>{80, 90});
  CHECK(hull(0, 65) == std::pair<i64, i64>{64, 65});
  CHECK(hull(128, 192) == std::pair<i64, i64>{0, 0});
  CHECK(hull(224, 300) == std::pair<i64, i64>{0, 0});
  CHECK(made.map.of(row, 0, 64) == kHidden);
  CHECK(made.map.of(row, 63, 65) == (kSeen | kHidden));
}

TEST_CASE("mask map: heads and sequences that share a slice share its cells") {
  const TileSizes tile{64, 64, 32};
  auto size = [&](int axes) {
    Problem p = problem(4, 8, 256, 512);
    Mask mask(p, axes, false, [](int64_t, int64_t) { return uint8_t(1); });
    p.mask = mask.view;
    Made made(p, tile, 1);
    CHECK((made.map.row(0, 0, {}, 32) == made.map.row(3, 0, {}, 32)) == !(axes & 1));
    CHECK((made.map.row(0, 0, {}, 32) == made.map.row(0, 7, {}, 32)) == !(axes & 2));
    CHECK((made.map.row(0, 0, {}, 0) == made.map.row(0, 0, {}, 32)) == !(axes & 4));
    return made.used;
  };
  const int64_t cells = 256 / 32 * 512 / kKeyAlign, totals = 64; // in bytes, aligned to 64
  CHECK(size(4 + 8) == cells + totals);
  CHECK(size(1 + 4 + 8) == 4 * cells + totals);
  CHECK(size(8) == 64 + totals);
}
