// What a kernel of latent attention is compiled for: FP16 and BF16 on wgmma, where V is the first columns of K (sm_90a).
#pragma once
#include "../../attention/features.h"

namespace strobe::sm90::latent {

inline constexpr i32 kRows = 64;          // of a tile of queries: (query head, query) pairs
inline constexpr i32 kKeys = 64;          // of a tile of keys; keys are taken in pairs of tiles
inline constexpr i32 kColumns = 576;      // of Q and K in shared memory. Columns that the tensors lack are zeros
inline constexpr i32 kValues = 512;       // columns of V, the first ones of K
inline constexpr i32 kHalf = kValues / 2; // columns of O that one warpgroup keeps

struct Config {
  i32 dtype;     // kF16 or kBF16
  i32 exact_max; // 1: the running maximum is followed exactly; 0: the reference may lag by a factor of 2^8
  i32 split;     // keys are divided into splits: results are partial and passes/combine.h merges them
  i32 uneven;    // sequences have uneven lengths, and shares of keys follow from them (device/uneven_shares.h)
  i32 invariant; // a row's bits depend on that row only: pairs of tiles begin at multiples of 2 kKeys, and chunks are merged in order
  i32 box;       // rows of K that one copy loads: kKeys, or fewer in pages. It divides kKeys and a page, and is at least 8
  Features features;

  STROBE_FN static constexpr i32 threads() { return 3 * 128; }
  STROBE_FN static constexpr i32 pair() { return 2 * kKeys; }
  STROBE_FN static constexpr i32 chunk() { return 4096; }                       // keys of a chunk, with `invariant`
  STROBE_FN constexpr bool walks_chunks() const { return invariant && !split; } // a block walks over all chunks, one after another
  STROBE_FN static constexpr i32 tile_bytes() { return 2 * kRows * kColumns; }  // of Q, and of a tile of K
  // Q and two tiles of K; barriers and what the warpgroups tell each other; up to 1024 bytes for alignment.
  STROBE_FN static constexpr i32 shared_bytes() { return 3 * tile_bytes() + 1280 + 1024; }
};

} // namespace strobe::sm90::latent
