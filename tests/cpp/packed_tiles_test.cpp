// How tiles of packed sequences are numbered.
#include "kernels/attention/packed_tiles.h"

#include <doctest/doctest.h>

#include <random>
#include <vector>

using namespace strobe;

namespace {

std::vector<i32> starts(const std::vector<i32> &lengths) {
  std::vector<i32> found{0};
  for (i32 n : lengths) found.push_back(found.back() + n);
  return found;
}

} // namespace

TEST_CASE("packed tiles: every tile has one number, in order, and no other number has one") {
  std::mt19937 random(1);
  for (int round = 0; round < 300; round++) {
    std::vector<i32> lengths(1 + random() % 40);
    for (i32 &n : lengths) n = i32(random() % 4 ? random() % 40 : random() % 700);
    const std::vector<i32> cu_seqlens = starts(lengths);
    const i32 batch = i32(lengths.size()), tile = i32(1 + random() % 200), rows = cu_seqlens.back() + i32(random() % 300);
    std::vector<std::pair<i32, i32>> expected, found;
    for (i32 b = 0; b < batch; b++)
      for (i32 begin = 0; begin < lengths[size_t(b)]; begin += tile) expected.emplace_back(b, begin);
    for (i32 number = 0; number < count_packed_tiles(rows, batch, tile); number++) {
      const PackedTile of = packed_tile(cu_seqlens.data(), rows, batch, tile, number);
      REQUIRE(of.b >= 0);
      REQUIRE(of.b < batch);
      if (of.begin < 0 || of.begin >= lengths[size_t(of.b)]) continue;
      CHECK(number == first_packed_tile(cu_seqlens[size_t(of.b)], of.b, tile) + of.begin / tile);
      found.emplace_back(of.b, of.begin);
    }
    CHECK(found == expected);
  }
}

TEST_CASE("packed tiles: many tokens, and cu_seqlens that are none") {
  const std::vector<i32> long_ones = starts({1 << 30, 5, (1 << 30) - 6});
  for (i32 tile : {64, 192}) {
    const i32 last = i32(count_packed_tiles(0x7FFFFFFF, 3, tile)) - 1, second = i32(first_packed_tile(1 << 30, 1, tile));
    CHECK(packed_tile(long_ones.data(), 0x7FFFFFFF, 3, tile, second).b == 1);
    CHECK(packed_tile(long_ones.data(), 0x7FFFFFFF, 3, tile, second).begin == 0);
    CHECK(packed_tile(long_ones.data(), 0x7FFFFFFF, 3, tile, second - 1).b == 0);
    CHECK(packed_tile(long_ones.data(), 0x7FFFFFFF, 3, tile, last).b == 2);
  }
  std::mt19937 random(2);
  for (int round = 0; round < 1000; round++) {
    std::vector<i32> garbage(20);
    for (i32 &x : garbage) x = i32(random());
    const PackedTile of = packed_tile(garbage.data(), 1000, 19, 64, i32(random() % 40));
    CHECK(of.b >= 0);
    CHECK(of.b < 19);
  }
}
