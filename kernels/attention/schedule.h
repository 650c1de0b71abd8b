// Answers the one question of every kernel: which tiles of keys belong to this tile of queries, and which of them need masking? Dense,
// causal, window, varlen (one Band per sequence) and block-sparse masks differ here and nowhere else. The backward over key tiles asks the
// same of band.transposed() and of the transposed blocks.
#pragma once
#include "geometry.h"

namespace strobe::inline STROBE_ISA {

// One row of a block-sparse CSR: the kept mask blocks, ascending. Entries are clamped, never trusted. cols == nullptr: all blocks are kept.
struct BlockRow {
  const i32 *cols;
  i64 count;
  i64 block; // keys per mask block
  // The first entry at or after a given column of mask blocks.
  STROBE_FN i64 first_from(i64 column) const {
    i64 low = 0, high = count;
    while (low < high) {
      i64 middle = (low + high) / 2;
      if (cols[middle] < column)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
  STROBE_FN bool keeps(i32 key) const {
    if (!cols) return true;
    i32 column = (i32)((u32)key / (u32)block);
    i64 entry = first_from(column);
    return entry < count && cols[entry] == column;
  }
};

template <class Int> struct BasicKeyTile {
  Int begin, end; // keys [begin, end), begin a multiple of the schedule's alignment
  bool masked;    // some key of the tile is hidden from some query
};
using KeyTile = BasicKeyTile<i64>;

// Walks over the tiles of keys for the queries [q0, q1), q0 < q1, which lie within one row of mask blocks. Tiles ascend, do not overlap,
// have at most `tile` keys, and contain a key that some query sees. Adjacent kept blocks are walked as one run, unless each block holds
// whole tiles. `align` divides `tile` and, with block sparsity, the block's size. share: the part of the keys that this walk takes, if
// several walks divide them.
template <class Int> class BasicSchedule {
public:
  using Range = BasicRange<Int>;
  struct Share {
    Int index, count;
    Int keys = 0; // if not 0: the share has the keys [index * keys, index * keys + keys), whatever the queries see
  };
  STROBE_FN BasicSchedule(const BasicBand<Int> &band, Int q0, Int q1, Int tile, Int align, BlockRow row = {nullptr, 0, 0},
                          Share share = {0, 1})
      : any_(keys_of_share(band.keys_any(q0, q1), tile, align, share)), all_(band.keys_all(q0, q1)), row_(row), tile_(tile), align_(align),
        seqlen_(band.seqlen_k) {
    begin();
  }
  // any: the keys to walk over; some query sees each of them.
  STROBE_FN BasicSchedule(Range any, const BasicBand<Int> &band, Int q0, Int q1, Int tile, Int align, BlockRow row)
      : any_(any), all_(band.keys_all(q0, q1)), row_(row), tile_(tile), align_(align), seqlen_(band.seqlen_k) {
    begin();
  }

  // The keys that one of several walks takes, if they divide `keys`.
  STROBE_FN static Range keys_of_share(Range keys, Int tile, Int align, Share share) {
    if (share.keys) return intersect(keys, {share.index * share.keys, share.index * share.keys + share.keys});
    if (share.count == 1) return keys;
    Int first = Int(round_down(keys.begin, align));
    u32 some =
        (u32)(max(keys.end - first, Int(0)) + share.count - 1) / (u32)share.count; // 32 bits suffice; a 64-bit division would be a call
    Int length = Int(round_up(some, tile));
    return intersect(keys, {first + share.index * length, first + (share.index + 1) * length});
  }

  STROBE_FN bool next(BasicKeyTile<Int> &tile) {
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
  STROBE_FN void begin() {
    if (row_.cols) {
      block_ = max((Int)min(row_.block, (i64)seqlen_), Int(1));
      blocks_ = (seqlen_ + block_ - 1) / block_;
      join_ = tile_ > block_ || (u32)block_ % (u32)tile_ != 0; // a block's size fits 32 bits; a tile's size may not
      advance();
    } else {
      run_ = any_;
      next_ = run_.empty() ? 0 : below(run_.begin);
    }
  }
  STROBE_FN Int below(Int x) const { return x / align_ * align_; }
  // Moves ahead_ to the block of the next entry, clipped to the sequence. If there is no next entry, ahead_ becomes empty, at the
  // sequence's end.
  STROBE_FN void advance() {
    ahead_ = {seqlen_, seqlen_};
    if (entry_ >= row_.count) return;
    const Int c = max((Int)row_.cols[entry_++], Int(0));
    if (c < blocks_) ahead_ = {c * block_, min(c * block_ + block_, seqlen_)};
  }
  STROBE_FN bool next_run() { // a dense schedule has one run, which the constructor set
    if (!row_.cols) return false;
    while (entry_ < row_.count || !ahead_.empty()) {
      Range run = ahead_;
      for (advance(); join_ && ahead_.begin == run.end && !ahead_.empty(); advance()) run.end = ahead_.end;
      run_ = intersect(run, any_);
      if (run_.empty()) continue;
      next_ = max(below(run_.begin), run.begin);
      return true;
    }
    return false;
  }

  Range any_, all_, run_{0, 0}, ahead_{0, 0};
  BlockRow row_;
  Int tile_, align_, seqlen_, next_ = 0;
  Int block_ = 1, blocks_ = 0; // keys per mask block; mask blocks in the sequence
  i64 entry_ = 0;
  bool join_ = false; // whether adjacent blocks are joined, because they do not hold whole tiles
};
using Schedule = BasicSchedule<i64>;

} // namespace strobe::inline STROBE_ISA
