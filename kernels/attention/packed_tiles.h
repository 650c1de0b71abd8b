// Tiles of packed sequences, numbered through all sequences. The tiles of sequence b begin at number row / tile + b, where `row` is the
// sequence's first row, so no tiles of earlier sequences have to be counted. A number after the last tile of a sequence may be unused.
#pragma once
#include "base.h"

namespace strobe::inline STROBE_ISA {

STROBE_FN constexpr i64 first_packed_tile(i64 row, i64 b, i64 tile) { return row / tile + b; }
STROBE_FN constexpr i64 count_packed_tiles(i64 rows, i64 batch, i64 tile) { return div_up(rows, tile) + batch; }

// A tile of sequence b, which begins at row `begin` of the sequence. If the number is unused, `begin` is negative or past the last row.
struct PackedTile {
  i32 b, begin;
};
// The tile with this number. rows: the number of rows of all sequences. cu_seqlens may be invalid. All numbers have 32 bits, for threads
// with few registers.
STROBE_FN PackedTile packed_tile(const i32 *cu_seqlens, i64 rows, i32 batch, i32 tile, i32 number) {
  const u32 most = (u32)min(rows, 0x7FFFFFFFll);
  const auto row_of = [&](i32 b) { return min((u32)max(cu_seqlens[b], 0), most); };
  i32 low = 0, high = batch;
  while (high - low > 1) {
    const i32 middle = (i32)((u32)(low + high) / 2);
    if (middle <= number && row_of(middle) < (u32)(number - middle + 1) * (u32)tile) // the first tile's number is not greater
      low = middle;
    else
      high = middle;
  }
  return {low, (number - low - (i32)(row_of(low) / (u32)tile)) * tile};
}

} // namespace strobe::inline STROBE_ISA
