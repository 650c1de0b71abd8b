// The schedule's key tiles, range by range. Keys are positions of the sequence, of which the call may hold only some ranges.
#pragma once
#include "scores.h"

namespace strobe::inline STROBE_ISA {

// Positions within one range. Key j is row k0 + j of K and V.
struct KeysOfRange : KeyTile {
  int64_t k0, range;
};

// The keys that some of the queries [i0, i1) see.
template <class T> class RangeTiles {
public:
  RangeTiles(const Head<T> &head, int64_t i0, int64_t i1, int64_t tile_k)
      : head_(head), i0_(i0), i1_(i1), tile_k_(tile_k), range_(head.range_k(0)), schedule_(of_range()) {}

  bool next(KeysOfRange &keys) {
    for (;;) {
      while (!schedule_.next(keys)) {
        do {
          if (++n_ >= head_.ranges_k()) return false;
          range_ = head_.range_k(n_);
        } while (!seen());
        schedule_ = of_range();
      }
      keys.begin = max((i64)(keys.begin + shift_), (i64)range_.start); // a block may begin before the range
      keys.end += shift_;
      keys.k0 = head_.k_begin + range_.local - range_.start;
      keys.range = n_;
      if (keys.begin < keys.end) return true;
    }
  }

private:
  bool seen() const { return !intersect(head_.band.keys_any(i0_, i1_), {range_.start, range_.end()}).empty(); }
  // Without blocks, keys are counted from the beginning of the range, so that tiles begin there.
  Schedule of_range() {
    const bool blocks = head_.p->blocks.present;
    shift_ = blocks ? 0 : range_.start;
    Band band = head_.band;
    band.low -= shift_, band.high -= shift_;
    band.seqlen_k = range_.end() - shift_;
    BlockRow row = head_.blocks(i0_);
    if (blocks) {
      const int64_t skipped = row.first_from(range_.start / row.block);
      row.cols += skipped, row.count -= skipped;
    }
    return Schedule(band, i0_, i1_, tile_k_, kKeyAlign, row);
  }

  const Head<T> &head_;
  int64_t i0_, i1_, tile_k_, n_ = 0, shift_ = 0;
  RowRange range_;
  Schedule schedule_;
};

} // namespace strobe::inline STROBE_ISA
