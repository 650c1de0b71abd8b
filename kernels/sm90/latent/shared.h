// Shared memory of the kernel of latent attention, and its barriers.
#pragma once
#include "../../ptx/mbarrier.h"
#include "../messages.h"
#include "config.h"

namespace strobe::sm90::latent {

// A tile of K has three parts: `left` and `right` are the columns of V that belong to the O of warpgroup 0 and 1, `rest` those of K alone.
// Once S is computed, `rest` is free, and the warpgroup that computed S stores its P there.
enum Part : int { kLeft, kRight, kRest, kParts };
STROBE_FN constexpr int first_block(int part) { return part * (kHalf / 64); } // in blocks of 64 columns
STROBE_FN constexpr int count_blocks(int part) { return part == kRest ? (kColumns - kValues) / 64 : kHalf / 64; }
static_assert(kColumns - kValues == kKeys, "P takes the place of `rest`");

inline constexpr u32 kBlockBytes = kRows * kRowBytes; // of 64 rows of 64 columns

// Named barriers. kTurn: S of the first tile of a pair is computed. kP + w: P of warpgroup w, and its reference, are in shared memory.
// kTogether + w: all threads of warpgroup w.
enum Named : int { kTurn = 1, kP = 2, kTogether = 4, kConsumers = 6 };

struct Shared {
  u32 q, k, barriers;
  __device__ __forceinline__ explicit Shared(u32 base)
      : q((base + 1023) & ~1023u), k(q + Config::tile_bytes()), barriers(k + 2 * Config::tile_bytes()) {}
  __device__ __forceinline__ u32 tile(int w) const { return k + w * Config::tile_bytes(); } // the tile of which warpgroup w computes S
  __device__ __forceinline__ u32 part(int w, int part) const { return tile(w) + first_block(part) * kBlockBytes; }

  __device__ __forceinline__ u32 q_full() const { return barriers; }
  __device__ __forceinline__ u32 full(int w, int part) const { return barriers + 8 + 8 * (kParts * w + part); }
  // Arrived at by the warpgroup `by` when it needs its parts of tile w no more: its columns of V, and the other's P.
  __device__ __forceinline__ u32 empty(int w, int by) const { return barriers + 56 + 8 * (2 * w + by); }
  __device__ __forceinline__ u32 lacks(int w) const { return barriers + 96 + 4 * w; } // in pages: a bit for each box that has no page
  __device__ __forceinline__ u32 reference(int w, int row) const { return barriers + 128 + 4 * (kRows * w + row); }
  __device__ __forceinline__ u32 sum(int w, int row) const { return barriers + 128 + 8 * kRows + 4 * (kRows * w + row); }

  __device__ __forceinline__ void begin() const {
    mbarrier_init(q_full(), 1);
    for (int w = 0; w < 2; ++w) {
      for (int part = 0; part < kParts; ++part) mbarrier_init(full(w, part), 1);
      for (int by = 0; by < 2; ++by) mbarrier_init(empty(w, by), 4);
    }
    mbarrier_init_fence();
  }
};

} // namespace strobe::sm90::latent
