// Shared memory of a Hopper kernel, and what the threads of a block tell each other through it.
#pragma once
#include "../../ptx/mbarrier.h"
#include "../messages.h"
#include "config.h"

namespace strobe::sm90 {

// How a tile of queries is computed.
enum Kind : i32 {
  kNone,
  kFast, // the first time: it may be that P overflows, or that something in V is not finite; then it is computed again
  kSafe, // the reference follows the maxima, and infinities and NaN in V are kept from those who do not see them
};
// What the assigning thread tells the others.
struct Item {
  i32 b, h, q;
  i32 how;                         // the kind, and which part of the keys
  static constexpr i32 kKinds = 4; // room for the kinds; a power of two, for the part of the keys stands above it
  __device__ __forceinline__ i32 kind() const { return how % kKinds; }
  __device__ __forceinline__ i32 split() const { return how / kKinds; }
  __device__ __forceinline__ Item safely() const { return {b, h, q, split() * kKinds + kSafe}; }
};
// Of a part of a larger problem: what the tile of queries, whose q is a position, has beside the item.
struct HeldQueries {
  i32 end, shift;         // its queries end before this position; row = position + shift
  i32 seqlen_q, seqlen_k; // of the whole sequence
};
// What the loading thread tells the others: a tile of keys. It reaches them with K.
struct Tile {
  i32 begin, end;
  i32 masked, last;
  enum : i32 { kLacks = 2 }; // further bits of masked, from this one on: for each 16 keys, whether their page is none of the pool's
  // last: whether the tile is the last one of the item, of a chunk of keys (if they are walked by chunks), or of the last chunk, which
  // comes again.
  enum Last : i32 { kLast = 1, kLastOfChunk, kLastBeforeAgain };
};

// From an address that is a multiple of 1024.
template <Config C> struct SharedMemory {
  static_assert(C.stages <= 6 && C.warpgroups <= 4, "the barriers' place");
  u32 q, k, v, bias, barriers, messages;
  __device__ __forceinline__ explicit SharedMemory(u32 base)
      : q((base + 1023) & ~1023u), k(q + C.q_bytes()), v(k + C.stages * C.k_bytes()), bias(v + C.stages * C.v_bytes()),
        barriers(bias + C.stages * C.bias_bytes()), messages(barriers + 320) {}
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
  // The number of an item that is lost to an overflow. It is read without order: who sees it late fetches tiles that nobody needs.
  __device__ __forceinline__ u32 lost() const { return messages + 32; }
  __device__ __forceinline__ u32 tile(int stage) const { return messages + 48 + 16 * stage; }

  __device__ __forceinline__ u32 held(u32 item) const { return messages + 144 + 16 * (item % 2); } // two: an item's is read to its end

  enum : i32 { kLoadsV = C.features.seqused == kPaged }; // a warp of its own, which reads the messages as those that compute do
  __device__ __forceinline__ void begin() const {
    for (int w = 0; w < C.warpgroups; ++w) mbarrier_init(q_full(w), 1), mbarrier_init(q_empty(w), 4);
    mbarrier_init(item_full(), 1);
    mbarrier_init(item_empty(), 4 * C.warpgroups + 2 + kLoadsV);
    store_shared(lost(), ~0u);
    for (int n = 0; n < 2; ++n) {
      mbarrier_init(judged(n), 4 * C.warpgroups);
      store_shared(failed(n), 0);
    }
    for (int s = 0; s < C.stages; ++s) {
      mbarrier_init(k_full(s), 1);
      mbarrier_init(k_empty(s), 4 * C.warpgroups + kLoadsV);
      mbarrier_init(v_full(s), 1);
      mbarrier_init(v_empty(s), 4 * C.warpgroups);
    }
    mbarrier_init_fence();
  }
};

// The stage of shared memory that is next, and the parity of its barriers.
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
