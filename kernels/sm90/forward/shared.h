// Shared memory of a Hopper kernel, and the messages that the threads of a block exchange through it.
#pragma once
#include "../../ptx/mbarrier.h"
#include "../messages.h"
#include "config.h"

namespace strobe::sm90 {

// How a query tile is computed.
enum Kind : i32 {
  kNone,
  kFast, // the first time. If P overflows, or V holds numbers that are not finite, the tile is computed again
  kSafe, // the second time: the reference follows the maxima, and queries do not get infinities and NaN from rows of V that they do not see
};
// The message of the assigning thread: what the block computes next.
struct Item {
  i32 b, h, q;
  i32 how;                         // the kind, and the number of the item's split of the keys
  static constexpr i32 kKinds = 4; // room for the kinds; a power of two, because the split is stored in the bits above
  __device__ __forceinline__ i32 kind() const { return how % kKinds; }
  __device__ __forceinline__ i32 split() const { return how / kKinds; }
  __device__ __forceinline__ Item safely() const { return {b, h, q, split() * kKinds + kSafe}; }
};
// Sent after Item, if the tensors hold only a part of a larger problem. Item::q is then a position.
struct HeldQueries {
  i32 end, shift;         // the position at which the item's queries end; row = position + shift
  i32 seqlen_q, seqlen_k; // lengths of the whole sequence
};
// The message of the loading thread: a tile of keys. It arrives together with K.
struct Tile {
  i32 begin, end;
  i32 masked, last;
  // kLacks: from this bit of `masked` on, one bit for each 16 keys: their page does not exist. kOpen: in a call that says which blocks are
  // full, the function of the mask may hide some key.
  enum : i32 { kLacks = 2, kOpen = 1 << 16 };
  // Values of `last`. kLast: the item's last tile. If keys are walked by chunks, kLastOfChunk: the last tile of a walk over a chunk;
  // kLastBeforeAgain: the last tile of the first walk over the final chunk, which is walked twice.
  enum Last : i32 { kLast = 1, kLastOfChunk, kLastBeforeAgain };
};

// The offsets of shared memory, from an address that is a multiple of 1024.
template <Config C> struct SharedMemory {
  static_assert(C.stages <= 6 && C.warpgroups <= 4, "the barriers' place");
  u32 q, k, v, bias, stored, barriers, messages;
  __device__ __forceinline__ explicit SharedMemory(u32 base)
      : q((base + 1023) & ~1023u), k(q + C.q_bytes()), v(k + C.stages * C.k_bytes()), bias(v + C.stages * C.v_bytes()),
        stored(bias + C.stages * C.bias_bytes()), barriers(stored + C.all_stored_bytes()), messages(barriers + 320) {}
  __device__ __forceinline__ u32 item_full() const { return barriers; }
  __device__ __forceinline__ u32 item_empty() const { return barriers + 8; }
  __device__ __forceinline__ u32 judged(u32 n) const { return barriers + 16 + 8 * (n % 2); }
  __device__ __forceinline__ u32 q_full(int w) const { return barriers + 32 + 16 * w; }
  __device__ __forceinline__ u32 q_empty(int w) const { return barriers + 40 + 16 * w; }
  __device__ __forceinline__ u32 k_full(int stage) const { return barriers + 96 + 32 * stage; }
  __device__ __forceinline__ u32 k_empty(int stage) const { return barriers + 104 + 32 * stage; }
  __device__ __forceinline__ u32 v_full(int stage) const { return barriers + 112 + 32 * stage; }
  __device__ __forceinline__ u32 v_empty(int stage) const { return barriers + 120 + 32 * stage; }
  __device__ __forceinline__ u32 item() const { return messages; }
  __device__ __forceinline__ u32 failed(u32 n) const { return messages + 16 + 4 * (n % 2); } // P overflowed, or O is not finite
  // The number of an item whose P has overflowed, so that its remaining tiles need not be loaded. Relaxed read: a late reader only loads
  // tiles that are not used.
  __device__ __forceinline__ u32 lost() const { return messages + 32; }
  __device__ __forceinline__ u32 tile(int stage) const { return messages + 48 + 16 * stage; }

  __device__ __forceinline__ u32 held(u32 item) const {
    return messages + 144 + 16 * (item % 2);
  } // two places, because an item's message is read until the item ends

  // Quantised K and V: the stages of what is stored.
  __device__ __forceinline__ u32 stored_tile(int stage) const { return stored + stage * C.stored_bytes(); }
  __device__ __forceinline__ u32 scales(int stage) const { return stored + C.stored_stages * C.stored_bytes() + stage * C.scale_bytes(); }
  __device__ __forceinline__ u32 stored_full(int stage) const {
    return stored + C.stored_stages * C.stored_bytes() + C.scale_stages() * C.scale_bytes() + 32 * stage;
  }
  __device__ __forceinline__ u32 stored_empty(int stage) const { return stored_full(stage) + 8; }
  __device__ __forceinline__ u32 stored_message(int stage) const { return stored_full(stage) + 16; }

  enum : bool { kDequantises = C.features.quant != 0 };
  enum : i32 {
    kLoadsV = C.features.pages && !kDequantises, // a warp of its own loads V, and reads the messages as consumers do
    kReaders = kDequantises ? 0 : 2 + kLoadsV,   // warps that read an item's message, beside the consumers
    kFills = kDequantises ? C.kDequantising : 1, // arrivals that make a stage of V full
    kFillsK = C.eight_bits ? 1 + (C.scaled_rows & kScaledKeys) : kFills,
    kFillsStored = C.eight_bits ? 1 : 2, // the copy engine's bytes, and the scales
  };
  __device__ __forceinline__ void begin() const {
    for (int w = 0; w < C.warpgroups; ++w) mbarrier_init(q_full(w), 1), mbarrier_init(q_empty(w), 4);
    mbarrier_init(item_full(), 1);
    mbarrier_init(item_empty(), 4 * C.warpgroups + kReaders);
    store_shared(lost(), ~0u);
    for (int n = 0; n < 2; ++n) {
      mbarrier_init(judged(n), 4 * C.warpgroups);
      store_shared(failed(n), 0);
    }
    for (int s = 0; s < C.stages; ++s) {
      mbarrier_init(k_full(s), kFillsK);
      mbarrier_init(k_empty(s), 4 * C.warpgroups + kLoadsV);
      mbarrier_init(v_full(s), kFills);
      mbarrier_init(v_empty(s), 4 * C.warpgroups);
    }
    if constexpr (kDequantises) {
      for (int s = 0; s < C.stored_stages; ++s)
        mbarrier_init(stored_full(s), kFillsStored), mbarrier_init(stored_empty(s), C.kDequantising);
    }
    mbarrier_init_fence();
  }
};

// The next stage of shared memory, and the parity of its barriers.
template <Config C> struct Stage {
  int index = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance() {
    if (++index == C.stages) index = 0, parity ^= 1;
  }
  __device__ __forceinline__ Stage next() const {
    Stage s = *this;
    s.advance();
    return s;
  }
};

} // namespace strobe::sm90
