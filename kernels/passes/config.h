// What the passes that look at rows, and not at scores, are compiled for.
#pragma once
#include "../attention/base.h"

namespace strobe::passes {

// The backward that a pass belongs to: it decides in which order D is summed, and how dq_sum lies.
inline constexpr i32 kFragments = 0;   // mma.sync: eight lanes share a row; 16x16 blocks as a warp's lanes hold them
inline constexpr i32 kWarpgroups = 1;  // Hopper: all of a tile's loads under way at once; parts of a tile as a warpgroup's lanes hold them
inline constexpr i32 kRowAfterRow = 2; // FP32 and FP64: in the order and the runs of dP; rows, which have the scale already

struct RowsConfig {
  i32 dtype;
  i32 head_dim, tile_q; // of the backward
  i32 aligned;          // columns side by side, rows and bases multiples of 16 bytes, head dims multiples of 8: 16-byte copies
  i32 form;             // kFragments, kWarpgroups or kRowAfterRow
  i32 partial;          // of a part: D and both numbers of LSE are given (Features::partial)
  i32 packed;           // tiles are those of packed sequences (attention/packed_tiles.h)
  i32 part, sparse;     // tiles are those of a part's ranges (attention/part.h), and of blocks
  i32 adds;             // dQ is added to what is there; such a dQ, and that of a partial part, has the type of sums

  static constexpr i32 kRowTile = 64;                                    // tile_q of kRowAfterRow
  STROBE_FN constexpr bool unrounded() const { return partial || adds; } // dQ
  STROBE_FN static constexpr i32 threads() { return 256; }
  STROBE_FN constexpr i32 delta_threads() const { return form == kRowAfterRow ? kRowTile : threads(); }
  STROBE_FN constexpr i64 blocks(i64 batch, i64 heads, i64 seqlen_q) const { return batch * heads * div_up(seqlen_q, tile_q); }
};

struct CombineConfig {
  i32 dtype;     // of out
  i32 invariant; // parts are chunks of keys, to be merged one after the other: device/chunks.h
  i32 uneven;    // parts are shares of sequences of uneven lengths: device/uneven_shares.h
  STROBE_FN static constexpr i32 threads() { return 128; }
};

struct WordsConfig {
  i32 unused;
  STROBE_FN static constexpr i32 threads() { return 256; }
};

struct ListsConfig {
  i32 unused;
  STROBE_FN static constexpr i32 threads() { return 256; }
};

struct SharesConfig {
  i32 dtype;                                           // of q
  i32 seqused;                                         // as Features
  i32 partial, adds;                                   // as Features
  STROBE_FN static constexpr i32 rows() { return 32; } // of a block of threads
  STROBE_FN static constexpr i32 threads() { return 256; }
};

struct SinksConfig {
  i32 dtype; // of q
  STROBE_FN static constexpr i32 threads() { return 256; }
};

struct PaddingConfig {
  i32 dtype; // of q, k, v
  i32 backward;
  i32 packed, seqused;
  i32 partial, adds; // as Features
  STROBE_FN static constexpr i32 threads() { return 256; }
};

} // namespace strobe::passes
