// The configurations of the passes over rows, which compute no scores.
#pragma once
#include "../attention/features.h"

namespace strobe::passes {

// The backward that a pass belongs to. It determines the order in which D is summed; and the layout of dq_sum.
inline constexpr i32 kFragments = 0;   // mma.sync: eight lanes share a row of D; dq_sum has 16x16 blocks as a warp's lanes hold them
inline constexpr i32 kWarpgroups = 1;  // Hopper: all loads of a tile for D are in flight at once; dq_sum has a warpgroup's pieces of a tile
inline constexpr i32 kRowAfterRow = 2; // FP32 and FP64: D in the order and the runs of dP; dq_sum has whole rows, already scaled

struct RowsConfig {
  i32 dtype;
  i32 head_dim, tile_q; // the backward's
  i32 aligned;          // adjacent columns, rows and bases multiples of 16 bytes, head dims multiples of 8: 16-byte copies
  i32 form;             // kFragments, kWarpgroups or kRowAfterRow
  i32 partial;          // a partial part: D and both numbers of LSE are given (Features::partial)
  i32 packed;           // packed sequences: tiles are numbered as in attention/packed_tiles.h
  i32 part, sparse;     // tiles lie within a part's ranges (attention/part.h); and within mask blocks
  i32 adds;             // dQ is added to the tensor's contents

  static constexpr i32 kRowTile = 64;                                    // tile_q if form is kRowAfterRow
  STROBE_FN constexpr bool unrounded() const { return partial || adds; } // whether dQ has the type of sums
  STROBE_FN static constexpr i32 threads() { return 256; }
  STROBE_FN constexpr i32 delta_threads() const { return form == kRowAfterRow ? kRowTile : threads(); }
  STROBE_FN constexpr i64 blocks(i64 batch, i64 heads, i64 seqlen_q) const { return batch * heads * div_up(seqlen_q, tile_q); }
};

struct CombineConfig {
  i32 dtype;     // dtype of out
  i32 invariant; // splits are chunks of keys, which are merged one after the other: device/chunks.h
  i32 uneven;    // splits are shares of sequences of uneven lengths: device/uneven_shares.h
  STROBE_FN static constexpr i32 threads() { return 128; }
};

struct WordsConfig {
  i32 unused;
  STROBE_FN static constexpr i32 threads() { return 256; }
};

// Where the caller's scales are, and how keys are stored, features says.
struct DequantiseConfig {
  i32 dtype; // dtype of q
  i32 head_dim, head_dim_v;
  Features features;                                    // quant, by_column, pages and seqused; nothing else
  STROBE_FN static constexpr i32 rows() { return 128; } // per thread block
  // How many rows before and after the visible keys a tile of the attention may have.
  STROBE_FN static constexpr i32 beside() { return 128; }
  STROBE_FN static constexpr i32 threads() { return 256; }
};

struct ListsConfig {
  i32 unused;
  STROBE_FN static constexpr i32 threads() { return 256; }
};

struct QueriesConfig {
  i32 dtype; // of the rows that are written
  i32 words; // four columns that are read lie in one word
  STROBE_FN static constexpr i32 threads() { return 256; }
  STROBE_FN static constexpr i32 warps() { return threads() / 32; }
};

// The features that say how long sequences are.
STROBE_FN constexpr Features keys_of(i32 seqused, i32 pages) {
  Features f{};
  f.seqused = seqused, f.pages = pages;
  return f;
}

struct SharesConfig {
  i32 dtype;                  // dtype of q
  i32 seqused, partial, adds; // as in Features
  STROBE_FN constexpr Features keys() const { return keys_of(seqused, 0); }
  STROBE_FN static constexpr i32 rows() { return 32; } // per thread block
  STROBE_FN static constexpr i32 threads() { return 256; }
};

struct SinksConfig {
  i32 dtype; // dtype of q
  STROBE_FN static constexpr i32 threads() { return 256; }
};

struct PaddingConfig {
  i32 dtype; // dtype of q, k, v
  i32 backward;
  i32 packed;
  i32 seqused, pages, partial, adds; // as in Features
  STROBE_FN constexpr Features keys() const { return keys_of(seqused, pages); }
  STROBE_FN static constexpr i32 threads() { return 256; }
};

} // namespace strobe::passes
