// Parts of a larger problem: the table of the rows that the tensors hold (Inputs::part), and how tiles of these rows are counted. The table
// lies in the workspace (passes/part_table.h). In a part, the sizes in `Inputs` count held rows, and positions count in the whole
// sequences.
#pragma once
#include "arguments.h"
#include "features.h"

namespace strobe::inline STROBE_ISA {

// The rows [local, local + length) that the tensors hold of a sequence are the positions from `start` on.
struct HeldRange {
  i32 start, length, local;
  STROBE_FN i32 end() const { return start + length; }
  STROBE_FN i32 shift() const { return local - start; } // row - position
};

// In memory, the lists of ranges and lengths follow this table.
struct PartTable {
  i64 lse_low; // in a partial part: the distance, in elements, from the first number of a row's LSE to the second one
  i32 first_head, first_batch;
  i32 count_q, count_k;                     // ranges per sequence
  i32 columns;                              // columns of mask, bias and dbias: positions of the longest sequence
  i32 step_q, step_k;                       // words between the ranges of two sequences; 0: all sequences have the same ranges
  i32 step_whole_q, step_whole_k;           // the same for the lists of lengths of whole sequences
  i32 ranges_q, ranges_k, whole_q, whole_k; // where the lists begin, in words
  i32 unused;

  STROBE_FN const i32 *words() const { return (const i32 *)this; }
};

// The arguments of the kernel that writes the table: a piece of the table's words.
enum : i32 { kMostWords = 1016 };
struct WordArguments {
  i32 *to;
  i32 count, unused;
  i32 words[kMostWords];
};

// How many tile numbers a sequence with `rows` held rows in `count` ranges has. Each tile lies within one range, and a range's first tile
// begins where the range does. With block sparsity, tiles also end at multiples of `tile`. So some numbers belong to empty tiles.
STROBE_FN constexpr i64 spare_tiles(bool blocks) { return blocks ? 2 : 1; } // per range
STROBE_FN constexpr i64 part_tiles(i64 rows, i64 count, i64 tile, bool blocks) { return rows / tile + count * spare_tiles(blocks); }

// The first n below `count` for which is_so(n) is true, or `count`. is_so must be monotonic: false, then true.
template <class IsSo> STROBE_FN i32 first_where(i32 count, const IsSo &is_so) {
  i32 low = 0, high = count;
  while (low < high) {
    const i32 middle = (low + high) / 2;
    if (!is_so(middle))
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}
// The range that contains the tile with this number: the last range whose first tile has no greater number. count > 0.
template <class FirstNumber> STROBE_FN i32 range_of_tile(i32 count, i32 number, const FirstNumber &first_number) {
  i32 low = 0, high = count;
  while (high - low > 1) {
    const i32 middle = (low + high) / 2;
    if (first_number(middle) <= number)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// The ranges of queries, or of keys, of one sequence, ascending. The host has moved empty ranges to the end. held: the number of held rows;
// it limits the ranges, whatever the list says.
struct HeldRanges {
  const HeldRange *ranges;
  i32 count;
  i32 held;

  STROBE_FN HeldRange at(i32 n) const {
    HeldRange r = ranges[n];
    r.length = max(min(r.length, held - r.local), 0);
    return r;
  }
  // The first range that ends after this position, or `count`.
  STROBE_FN i32 first_behind(i64 position) const {
    return first_where(count, [&](i32 n) { return ranges[n].end() > position; });
  }
};
STROBE_FN HeldRanges held_queries(const Inputs &in, i64 b) {
  const PartTable &t = *in.part;
  return {(const HeldRange *)(t.words() + t.ranges_q) + b * t.step_q, t.count_q, (i32)in.held(b).seqlen_q};
}
STROBE_FN HeldRanges held_keys(const Inputs &in, i64 b) {
  const PartTable &t = *in.part;
  return {(const HeldRange *)(t.words() + t.ranges_k) + b * t.step_k, t.count_k, (i32)in.held(b).seqlen_k};
}

// The whole sequence. q0 and k0 are the first held rows in the tensors; a tile's shift has to be added to them.
STROBE_FN Sequence whole_sequence(const Inputs &in, i64 b) {
  const PartTable &t = *in.part;
  const HeldRows held = in.held(b);
  const i64 nq = t.words()[t.whole_q + b * t.step_whole_q], nk = t.words()[t.whole_k + b * t.step_whole_k];
  return {held.q0, held.k0, Band::make(nq, nk, in.bottom_right != 0, in.left, in.right)};
}

// A tile of rows: the positions [begin, end); empty if its number has no rows.
struct PartTile {
  i32 begin, end, shift; // row = position + shift
};
// first_of_tiles(): the position at which a range's first tile begins. number_of_first(): that tile's number within the sequence.
STROBE_FN i32 first_of_tiles(const HeldRange &r, i32 tile, bool blocks) {
  return blocks ? (i32)((u32)r.start / (u32)tile) * tile : r.start;
}
STROBE_FN i32 number_of_first(const HeldRange &r, i32 n, i32 tile, bool blocks) {
  return (i32)((u32)r.local / (u32)tile) + n * (i32)spare_tiles(blocks);
}
STROBE_FN PartTile part_tile(const HeldRanges &ranges, i32 number, i32 tile, bool blocks) {
  const i32 n = range_of_tile(ranges.count, number, [&](i32 n) { return number_of_first(ranges.ranges[n], n, tile, blocks); });
  if (ranges.count == 0) return {0, 0, 0};
  const HeldRange r = ranges.at(n);
  const i32 at = first_of_tiles(r, tile, blocks) + (number - number_of_first(r, n, tile, blocks)) * tile;
  return {max(at, r.start), min(at + tile, r.end()), r.shift()};
}

// The largest number of query tiles, and of key tiles, that a sequence can have, in a whole call or in a part.
template <Features F, i32 kTile> STROBE_FN i64 query_tiles(const Inputs &in) {
  if constexpr (F.part) return part_tiles(in.seqlen_q, in.part->count_q, kTile, F.blocks != 0);
  return div_up(in.seqlen_q, kTile);
}
template <Features F, i32 kTile> STROBE_FN i64 key_tiles(const Inputs &in) {
  if constexpr (F.part) return part_tiles(in.seqlen_k, in.part->count_k, kTile, F.blocks != 0);
  return div_up(in.seqlen_k, kTile);
}
// A query tile: q0 is the position of its first query, and s is the sequence as the tile sees it. Row s.q0 + i holds position i. In a part,
// the tile's queries end at position s.band.seqlen_q.
struct Queries {
  i32 q0;
  Sequence s;
};
STROBE_FN Queries queries_at(const Inputs &in, i64 b, const PartTile &tile) {
  Queries x{tile.begin, whole_sequence(in, b)};
  x.s.q0 += tile.shift, x.s.band.seqlen_q = tile.end;
  return x;
}
// The sequence s as a key tile sees it. Row s.k0 + j holds position j, and the tile's keys end at position s.band.seqlen_k.
STROBE_FN Sequence keys_at(const Inputs &in, i64 b, const PartTile &tile) {
  Sequence s = whole_sequence(in, b);
  s.k0 += tile.shift, s.band.seqlen_k = tile.end;
  return s;
}
// The number of a head's first tile in dq_sum, for a part. For a whole call see first_query_tile (dq_sum.h).
STROBE_FN i64 first_part_tile(const Inputs &in, i64 b, i64 h, i64 tile, bool blocks) {
  const i64 count = in.part->count_q, spare = count * spare_tiles(blocks);
  if (!in.cu_seqlens_q) return (b * in.heads + h) * part_tiles(in.seqlen_q, count, tile, blocks);
  return h * (in.total_q / tile + in.batch * spare) + in.held(b).q0 / tile + b * spare;
}
template <Features F, i32 kTile> STROBE_FN Queries queries_of(const Inputs &in, i64 b, i32 number) {
  if constexpr (F.part)
    return queries_at(in, b, part_tile(held_queries(in, b), number, kTile, F.blocks != 0));
  else
    return {number * kTile, in.sequence<F>(b)};
}

} // namespace strobe::inline STROBE_ISA
