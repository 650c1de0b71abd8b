// Query tiles by their positions in the sequence. A call may hold only some ranges of the positions (a part of a larger problem). A tile
// lies within one range and begins at a multiple of tile_q, or where the range begins, so that it lies in one row of mask blocks.
#pragma once
#include "../../kernels/attention/geometry.h"
#include "isa.h"
#include "simd.h"

namespace strobe::inline STROBE_ISA {

// The queries [i0, i1): positions within one range of the rows that the call holds.
struct QuerySpan {
  RowRange range{0, 0, 0};
  int64_t first_tile = 0; // the number of the range's first tile within the sequence
  int64_t i0 = 0, i1 = 0;
  bool cut = false; // these are only some of the tile's queries
  STROBE_INLINE bool empty() const { return i0 >= i1; }
};

STROBE_INLINE int64_t ranges_of_queries(const Problem &p) { return p.part ? p.part.count_q : 1; }
STROBE_INLINE int64_t tiles_of(const RowRange &range, int64_t tile_q) {
  return range.length > 0 ? int64_t(div_up(range.end(), tile_q)) - range.start / tile_q : 0;
}
// The number of tiles of the sequence with the most tiles.
inline int64_t query_tiles(const Problem &p, int64_t tile_q) {
  if (!p.part) return div_up(p.longest_q(), tile_q);
  int64_t most = 0;
  for (int64_t b = 0; b < p.part.batch_q; ++b) {
    int64_t tiles = 0;
    for (int64_t n = 0; n < p.part.count_q; ++n) tiles += tiles_of(p.range_q(b, n), tile_q);
    most = max(most, tiles);
  }
  return most;
}
// The queries of tile `index` of a sequence. Past the last tile there are none.
inline QuerySpan query_tile(const Problem &p, int64_t b, int64_t index, int64_t tile_q) {
  int64_t first = 0;
  for (int64_t n = 0; n < ranges_of_queries(p); ++n) {
    const RowRange range = p.range_q(b, n);
    const int64_t tiles = tiles_of(range, tile_q);
    if (index - first < tiles) {
      const int64_t at = (range.start / tile_q + index - first) * tile_q;
      return {range, first, max(at, range.start), min(at + tile_q, range.end())};
    }
    first += tiles;
  }
  return {};
}

} // namespace strobe::inline STROBE_ISA
