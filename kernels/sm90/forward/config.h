// What a Hopper kernel is compiled for: FP16 and BF16 on wgmma, fed by the copy engine (sm_90a).
#pragma once
#include "../../attention/features.h"

namespace strobe::sm90 {

// How far M, the value that is subtracted from scores, may lag behind the running maximum.
inline constexpr i32 kExact = 0;   // not at all
inline constexpr i32 kLagging = 1; // by a factor of 2^8 in P: most tiles need no rescaling
inline constexpr i32 kFixed = 2;   // without bound. The maximum is no longer taken once a row has had a tile with no hidden key. A tile of
                                   // queries that overflows is computed again, with kLagging
// kFixedByRow: each row decides for itself. A row's M stays fixed after the first tile with a key that the row sees, and lags by 2^8 while
// the row's sum is large. If a result is not finite, the query tile is computed again. Each chunk of keys is then walked twice: first in
// the same way, then with a lagging M for the rows that are not finite. (An enum leaves no symbol in kernels that do not use it.)
enum : i32 { kFixedByRow = 3 };
// FP8: which scales differ within a head.
enum : i32 { kScaledKeys = 1, kScaledQueries = 2 };

struct Config {
  i32 dtype;                // kF16 or kBF16
  i32 head_dim, head_dim_v; // rounded up to multiples of 16
  i32 warpgroups;           // consumer warpgroups; each owns 64 rows of the query tile, of one head or of several (packed)
  i32 tile_k;               // a multiple of 16
  i32 stages;               // tiles of K, and of V, in shared memory at a time: at most 6
  i32 registers_load, registers_compute;
  i32 q_in_registers;
  i32 blocks_per_sm;
  i32 reference;   // kExact, kLagging, kFixed or kFixedByRow
  i32 split;       // keys are divided into splits: results are partial and passes/combine.h merges them
  i32 bias_by_tma; // a 16-bit bias, loaded by the copy engine
  // A row's bits depend on that row only, unless the reference is kFixed. Tiles of keys begin at multiples of tile_k. With up to 128
  // columns of O, each chunk of tiles has a result of its own, and results are merged in order (device/chunks.h). With more columns no
  // registers are left for that. split: each split is one chunk.
  i32 invariant;
  i32 packed;        // query heads of a key head share a query tile: rows.h
  i32 stored_stages; // quantised K and V: tiles as they are stored, of K or V, in shared memory at a time (stored.h)
  i32 eight_bits;    // Q, K and V are E4M3, and are multiplied as they are stored, which is V's tiles alone (eight_bits.h)
  i32 scaled_rows;   // with eight_bits: kScaledKeys | kScaledQueries, whose scales differ within a head
  i32 page_rows;     // keys in pages: how many rows one copy loads, 16 or more, which lie in one page
  Features features;

  STROBE_FN constexpr i32 tile_q() const { return 64 * warpgroups; }
  STROBE_FN constexpr bool chunked() const { return invariant && head_dim_v <= 128; }
  STROBE_FN constexpr i32 chunk() const { return 4096 / tile_k * tile_k; }             // keys
  STROBE_FN constexpr i32 walked_floats() const { return 128 * (head_dim_v / 4 + 1); } // O and LSE of one row per lane
  STROBE_FN constexpr bool repeats_chunks() const { return reference == kFixedByRow; } // when a query tile is computed again
  STROBE_FN constexpr bool walks_chunks() const { return chunked() && !split; }        // a block walks over all chunks, one after another
  STROBE_FN constexpr i32 threads() const { return 128 * (warpgroups + 1); }
  // Tiles in shared memory are blocks of 64 columns of 16 bits. Two columns of 8 bits count as one.
  STROBE_FN constexpr i32 columns() const { return (product_columns() + 63) / 64 * 64; }
  STROBE_FN constexpr i32 product_columns() const { return eight_bits ? head_dim / 2 : head_dim; }
  STROBE_FN constexpr i32 columns_v() const { return (head_dim_v + 63) / 64 * 64; }
  STROBE_FN constexpr i32 q_bytes() const { return 2 * tile_q() * columns(); }
  STROBE_FN constexpr i32 k_bytes() const { return 2 * tile_k * columns(); }
  STROBE_FN constexpr i32 v_bytes() const { return eight_bits ? head_dim_v * ((tile_k + 127) / 128 * 128) : 2 * tile_k * columns_v(); }
  // Bytes of a tile of the bias. It consists of blocks of 64 columns, with 64 rows for each warpgroup.
  STROBE_FN constexpr i32 bias_columns() const { return 2 * 64 * tile_q(); }
  STROBE_FN constexpr i32 bias_bytes() const { return bias_by_tma ? (tile_k + 63) / 64 * bias_columns() : 0; }
  // Quantised K and V. A row as it is stored is copied as 16-bit columns. Beside a tile lie its scales, in FP32: one for each row; or, for
  // K, an offset for each row and a scale for each column of each group. A group has 32 rows or more, unless a page ends.
  enum : i32 { kDequantising = 3 }; // warps. (An enum leaves no symbol in kernels that do not use it.)
  STROBE_FN constexpr i32 stored_columns(i32 dim) const { return (dim / (features.quant == kInt4 ? 4 : 2) + 63) / 64 * 64; }
  STROBE_FN constexpr i32 stored_bytes() const { return 2 * tile_k * stored_columns(eight_bits ? head_dim_v : max(head_dim, head_dim_v)); }
  STROBE_FN constexpr i32 groups_of_tile() const { return features.pages ? tile_k / 16 : tile_k / 32 + 2; }
  STROBE_FN constexpr i32 scale_stages() const { return eight_bits ? stages : stored_stages; } // of K as it is multiplied, or as stored
  STROBE_FN constexpr i32 scale_bytes() const {
    if (eight_bits && !(scaled_rows & kScaledKeys)) return 0;
    return (4 * tile_k + (features.by_column ? groups_of_tile() * 4 * head_dim : 0) + 127) / 128 * 128;
  }
  STROBE_FN constexpr i32 all_stored_bytes() const {
    return features.quant ? stored_stages * (stored_bytes() + 32) + scale_stages() * scale_bytes() : 0;
  }
  // Q, the stages of K, of V and of the bias, and of what is stored; 512 bytes of barriers and messages; up to 1024 bytes for alignment.
  STROBE_FN constexpr i32 shared_bytes() const {
    return q_bytes() + stages * (k_bytes() + v_bytes() + bias_bytes()) + all_stored_bytes() + 512 + 1024;
  }
};

} // namespace strobe::sm90
