// The one question every kernel asks: for this tile of queries, which tiles of keys, and does this one need masking?
// Dense, causal, window, varlen (one Band a sequence) and block-sparse differ here and nowhere else. The backward over key tiles asks the
// same of band.transposed() and the transposed blocks.
#pragma once
#include "geometry.h"

namespace strobe::inline STROBE_ISA {

// One row of a block-sparse CSR: the kept blocks, ascending. Entries are clamped, never trusted. cols == nullptr: everything is kept.
struct BlockRow {
  const i32 *cols;
  i64 count;
  i64 block; // keys per block
  STROBE_FN bool keeps(i32 key) const {
    i32 column = (i32)((u32)key / (u32)block);
    for (i64 i = 0; i < count; ++i) {
      if (cols[i] == column) return true;
    }
    return !cols;
  }
};

struct KeyTile {
  i64 begin, end; // keys [begin, end), begin a multiple of the schedule's alignment
  bool masked;    // some query of the tile does not see some key of it
};

// Tiles of at most tile keys, ascending, none twice, none without a visible key in its hull. The queries [q0, q1), q0 < q1, lie within one
// row of blocks. Runs of adjacent kept blocks are walked as one; align divides tile and, for block-sparse, block. part:
// where several share the work over the keys.
class Schedule {
public:
  struct Part {
    i64 index, count;
  };
  STROBE_FN Schedule(const Band &band, i64 q0, i64 q1, i64 tile, i64 align, BlockRow row = {nullptr, 0, 0}, Part part = {0, 1})
      : any_(share(band.keys_any(q0, q1), tile, align, part)), all_(band.keys_all(q0, q1)), row_(row), tile_(tile), align_(align),
        seqlen_(band.seqlen_k) {
    if (row_.cols) {
      run_ = {0, 0};
    } else {
      run_ = any_;
      next_ = run_.empty() ? 0 : round_down(run_.begin, align_);
    }
  }

  // The part of the keys that one of several walks over.
  STROBE_FN static Range share(Range keys, i64 tile, i64 align, Part part) {
    if (part.count == 1) return keys;
    i64 first = round_down(keys.begin, align);
    u32 some = (u32)(max(keys.end - first, 0ll) + part.count - 1) / (u32)part.count; // positions fit 31 bits; a 64-bit division is a call
    i64 length = round_up(some, tile);
    return intersect(keys, {first + part.index * length, first + (part.index + 1) * length});
  }

  STROBE_FN bool next(KeyTile &tile) {
    while (next_ >= run_.end || run_.empty()) {
      if (!next_run()) return false;
    }
    tile.begin = next_;
    tile.end = min(next_ + tile_, run_.end);
    tile.masked = tile.begin < all_.begin || tile.end > all_.end;
    next_ = tile.end;
    return true;
  }

private:
  STROBE_FN Range block(i64 entry) const { // of an entry of the row, cut to the sequence
    i64 c = row_.cols[entry];
    c = max(c, 0ll);
    return {min(c * row_.block, seqlen_), min((c + 1) * row_.block, seqlen_)};
  }
  STROBE_FN bool next_run() { // dense has the one run that the constructor set
    if (!row_.cols) return false;
    while (entry_ < row_.count) {
      Range run = block(entry_++);
      while (entry_ < row_.count && block(entry_).begin == run.end && run.end < seqlen_) run.end = block(entry_++).end;
      run_ = intersect(run, any_);
      if (run_.empty()) continue;
      next_ = max(round_down(run_.begin, align_), run.begin);
      return true;
    }
    return false;
  }

  Range any_, all_, run_{0, 0};
  BlockRow row_;
  i64 tile_, align_, seqlen_, entry_ = 0, next_ = 0;
};

} // namespace strobe::inline STROBE_ISA
