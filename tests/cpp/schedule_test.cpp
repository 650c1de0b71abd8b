// The schedule of tiles, compared with a brute force over all pairs of query and key.
#include "kernels/attention/schedule.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <random>
#include <vector>

#define __device__ // not a keyword on the host
#define __forceinline__ inline
#include "kernels/device/query_tiles.h"

using namespace strobe;

namespace {

// One sequence, with the definition of visibility written out from docs/semantics.md.
struct Case {
  i64 seqlen_q, seqlen_k;
  bool bottom_right;
  i64 left, right;                    // -1: unbounded
  i64 block_q = 0, block_k = 0;       // 0: no blocks
  std::vector<std::vector<i32>> kept; // for each query block, the kept key blocks, ascending

  bool in_window(i64 i, i64 j) const {
    const i64 opposite = i + (bottom_right ? seqlen_k - seqlen_q : 0);
    return (left < 0 || j >= opposite - left) && (right < 0 || j <= opposite + right);
  }
  bool in_blocks(i64 i, i64 j) const {
    if (!block_q) return true;
    const auto &row = kept[i / block_q];
    return std::count(row.begin(), row.end(), j / block_k) > 0;
  }
  bool visible(i64 i, i64 j) const { return in_window(i, j) && in_blocks(i, j); }

  Band band() const { return Band::make(seqlen_q, seqlen_k, bottom_right, left < 0 ? Band::kFar : left, right < 0 ? Band::kFar : right); }
  Case transposed_blocks() const {
    Case t = *this;
    std::swap(t.block_q, t.block_k);
    t.kept.assign(block_k ? (seqlen_k + block_k - 1) / block_k : 0, {});
    for (size_t r = 0; r < kept.size(); r++)
      for (i32 c : kept[r]) t.kept[c].push_back(static_cast<i32>(r));
    return t;
  }
};

struct Tally {
  i64 tiles = 0, whole = 0; // all tiles; tiles without masking
};

// Walks over the rows [0, rows) in tiles of tile_q, and checks the columns of each tile against the brute force, sees(row, column). blocks:
// the mask blocks of the rows.
template <class Sees>
void check_walk(const Band &band, i64 rows, i64 columns, i64 tile_q, i64 tile_k, i64 align, const Case &c, Sees sees, Tally &tally) {
  for (i64 q0 = 0; q0 < rows; q0 += tile_q) {
    const i64 q1 = std::min(q0 + tile_q, rows);
    BlockRow row{nullptr, 0, 0};
    if (c.block_q) {
      const auto &kept = c.kept[q0 / c.block_q];
      static const i32 nothing = 0;
      row = {kept.empty() ? &nothing : kept.data(), static_cast<i64>(kept.size()), c.block_k};
    }
    Schedule schedule(band, q0, q1, tile_k, align, row);
    std::vector<bool> covered(columns);
    i64 end = 0;
    for (KeyTile tile{}; schedule.next(tile);) {
      tally.tiles++, tally.whole += !tile.masked;
      REQUIRE(tile.begin < tile.end);
      REQUIRE(tile.begin >= end); // tiles ascend, and none comes twice
      REQUIRE(tile.end <= columns);
      REQUIRE(tile.end - tile.begin <= tile_k);
      REQUIRE(tile.begin % align == 0);
      end = tile.end;
      bool any = false, all = true;
      for (i64 i = q0; i < q1; i++)
        for (i64 j = tile.begin; j < tile.end; j++) {
          any |= sees(i, j), all &= sees(i, j);
          covered[j] = true;
        }
      REQUIRE(any);
      REQUIRE(tile.masked == !all);
    }
    for (i64 i = q0; i < q1; i++)
      for (i64 j = 0; j < columns; j++)
        if (sees(i, j)) REQUIRE(covered[j]);
  }
}

void check_both_ways(const Case &c, i64 tile_q, i64 tile_k, i64 align, Tally &tally) {
  check_walk(c.band(), c.seqlen_q, c.seqlen_k, tile_q, tile_k, align, c, [&](i64 i, i64 j) { return c.visible(i, j); }, tally);
  const Case t = c.transposed_blocks();
  check_walk(c.band().transposed(), c.seqlen_k, c.seqlen_q, tile_q, tile_k, align, t, [&](i64 j, i64 i) { return c.visible(i, j); }, tally);
}

// Checks kernels that own a tile of keys and walk over tiles of queries, from the last to the first.
template <bool kBlocks> void check_queries(const Case &c, i64 tile_k, Tally &tally) {
  constexpr i32 kTile = 16, kNothing = 0;
  const Case t = c.transposed_blocks();
  for (i64 k0 = 0; k0 < c.seqlen_k; k0 += tile_k) {
    const i64 k1 = std::min(k0 + tile_k, c.seqlen_k);
    BlockRow row{nullptr, 0, 0};
    if constexpr (kBlocks) {
      const std::vector<i32> &kept = t.kept[k0 / t.block_q];
      row = {kept.empty() ? &kNothing : kept.data(), static_cast<i64>(kept.size()), t.block_k};
    }
    QueryTiles<kBlocks, kTile> tiles(c.band(), k0, k1, tile_k, row);
    std::vector<bool> covered(c.seqlen_q);
    i64 before = c.seqlen_q;
    for (QueryTile tile{}; tiles.next(tile); before = tile.begin) {
      tally.tiles++, tally.whole += !tile.masked;
      REQUIRE(tile.begin >= 0);
      REQUIRE(tile.begin % kTile == 0);
      REQUIRE(tile.begin < before);
      bool all = k1 - k0 == tile_k && tile.begin + kTile <= c.seqlen_q;
      for (i64 i = tile.begin; i < std::min<i64>(tile.begin + kTile, c.seqlen_q); i++) {
        covered[i] = true;
        for (i64 j = k0; j < k1; j++) all &= c.in_window(i, j);
      }
      REQUIRE((tile.masked != 0) == !all);
    }
    for (i64 i = 0; i < c.seqlen_q; i++)
      for (i64 j = k0; j < k1; j++)
        if (c.visible(i, j)) REQUIRE(covered[i]);
  }
}

} // namespace

TEST_CASE("geometry: visible(), keys() and their hulls are the window") {
  for (i64 seqlen_q : {1, 5, 9})
    for (i64 seqlen_k : {1, 6, 13})
      for (bool bottom_right : {false, true})
        for (i64 left : {-1, 0, 2, 20})
          for (i64 right : {-1, 0, 3, 20}) {
            const Case c{seqlen_q, seqlen_k, bottom_right, left, right, 0, 0, {}};
            const Band band = c.band(), transposed = band.transposed();
            for (i64 i = 0; i < seqlen_q; i++)
              for (i64 j = 0; j < seqlen_k; j++) {
                const Range keys = band.keys(i);
                REQUIRE(band.visible(i, j) == c.in_window(i, j));
                REQUIRE((j >= keys.begin && j < keys.end) == c.in_window(i, j));
                REQUIRE(transposed.visible(j, i) == c.in_window(i, j));
              }
            CHECK_FALSE(band.visible(0, -1));
            CHECK_FALSE(band.visible(0, seqlen_k));
          }
}

TEST_CASE("schedule: dense, causal and windows, every alignment, lengths that differ") {
  Tally tally;
  for (i64 seqlen_q : {0, 1, 7, 16, 33})
    for (i64 seqlen_k : {0, 1, 8, 31, 48})
      for (bool bottom_right : {false, true})
        for (i64 left : {-1, 0, 1, 9, 100})
          for (i64 right : {-1, 0, 1, 9, 100})
            for (auto [tile_q, tile_k, align] : {std::array<i64, 3>{1, 1, 1}, {8, 8, 4}, {16, 12, 4}, {64, 64, 16}})
              check_both_ways({seqlen_q, seqlen_k, bottom_right, left, right, 0, 0, {}}, tile_q, tile_k, align, tally);
  CHECK(tally.whole > 1000);
  CHECK(tally.tiles - tally.whole > 1000);
}

TEST_CASE("schedule: tiles of queries that see a tile of keys, dense, causal and windows") {
  Tally tally;
  for (i64 seqlen_q : {0, 1, 15, 16, 17, 31, 65})
    for (i64 seqlen_k : {1, 16, 31, 48, 49})
      for (bool bottom_right : {false, true})
        for (i64 left : {-1, 0, 1, 14, 15, 16, 17, 40})
          for (i64 right : {-1, 0, 1, 15, 16, 40})
            for (i64 tile_k : {16, 48}) check_queries<false>({seqlen_q, seqlen_k, bottom_right, left, right, 0, 0, {}}, tile_k, tally);
  CHECK(tally.whole > 1000);
  CHECK(tally.tiles - tally.whole > 1000);
}

TEST_CASE("schedule: block-sparse, alone and with a window, the last block partial") {
  std::mt19937 random(5);
  auto draw = [&](i64 lo, i64 hi) { return std::uniform_int_distribution<i64>(lo, hi)(random); };
  Tally tally;
  for (int n = 0; n < 600; n++) {
    Case c{draw(1, 100),
           draw(1, 100),
           draw(0, 1) == 1,
           draw(0, 2) ? -1 : draw(0, 60),
           draw(0, 2) ? -1 : draw(0, 60),
           16 * draw(1, 2),
           16 * draw(1, 2),
           {}};
    const i64 density = draw(0, 4); // in quarters: from no block kept to all blocks kept
    for (i64 r = 0; r * c.block_q < c.seqlen_q; r++) {
      c.kept.emplace_back();
      for (i64 j = 0; j * c.block_k < c.seqlen_k; j++)
        if (draw(1, 4) <= density) c.kept.back().push_back(static_cast<i32>(j));
    }
    for (i64 tile_k : {16, 48}) check_both_ways(c, 16, tile_k, 16, tally);
    check_queries<true>(c, 16, tally);
  }
  CHECK(tally.whole > 1000);
  CHECK(tally.tiles - tally.whole > 1000);
}

TEST_CASE("schedule: work is proportional to what is kept") {
  const i64 n = 1 << 20;
  const std::vector<i32> diagonal = {1000};
  Schedule sparse(Band::make(n, n, true, Band::kFar, Band::kFar), 64000, 64064, 64, 16, {diagonal.data(), 1, 64});
  KeyTile tile{};
  REQUIRE(sparse.next(tile));
  CHECK(tile.begin == 64000);
  CHECK(tile.end == 64064);
  CHECK_FALSE(sparse.next(tile));

  Schedule window(Band::make(n, n, true, 128, 0), 64000, 64064, 64, 16);
  int tiles = 0;
  while (window.next(tile)) tiles++;
  CHECK(tiles == 3); // the tiles cover keys 63872 to 64064
}

TEST_CASE("schedule: indices out of range are clamped, not followed") {
  const std::vector<i32> broken = {-7, 1, 1 << 30};
  Schedule schedule(Band::make(32, 40, true, Band::kFar, Band::kFar), 0, 16, 16, 16, {broken.data(), 3, 16});
  for (KeyTile tile{}; schedule.next(tile);) {
    CHECK(tile.begin >= 0);
    CHECK(tile.end <= 40);
    CHECK(tile.begin < tile.end);
  }
}
