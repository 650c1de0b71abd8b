// Tiles of packed sequences, numbered through all sequences without summing up the tiles of the sequences before: the tiles of sequence b
// begin at number row / tile + b, where `row` is its first row. After the last tile of a sequence a number may be unused.
#pragma once
#include "base.h"

namespace strobe::inline STROBE_ISA {

STROBE_FN constexpr i64 first_packed_tile(i64 row, i64 b, i64 tile) { return row / tile + b; }
STROBE_FN constexpr i64 count_packed_tiles(i64 rows, i64 batch, i64 tile) { return div_up(rows, tile) + batch; }

// A tile of sequence b that starts at the sequence's row `begin`; if the number is unused, `begin` is below 0 or past the last row.
struct PackedTile {
  i32 b, begin;
};
// The tile with this number. rows: the number of rows of all sequences. cu_seqlens may be invalid. Everything has 32 bits, for threads with
// few registers.
STROBE_FN PackedTile packed_tile(const i32 *cu_seqlens, i64 rows, i32 batch, i32 tile, i32 number) {
  const u32 most = (u32)min(rows, 0x7FFFFFFFll);
  const auto row_of = [&](i32 b) { return min((u32)max(cu_seqlens[b], 0), most); };
  i32 low = 0, high = batch;
  while (high - low > 1) {
    const i32 middle = (i32)((u32)(low + high) / 2);
    if (middle <= number && row_of(middle) < (u32)(number - middle + 1) * (u32)tile) // the sequence's first tile has no greater number
      low = middle;
    else
      high = middle;
  }
  return {low, (number - low - (i32)(row_of(low) / (u32)tile)) * tile};
}

} // namespace strobe::inline STROBE_ISA
