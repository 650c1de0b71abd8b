// Shared memory of the Hopper backward, and the messages that the threads of a block exchange through it.
#pragma once
#include "../../attention/geometry.h"
#include "../../ptx/barrier.h"
#include "../../ptx/mbarrier.h"
#include "../messages.h"
#include "config.h"

namespace strobe::sm90 {

// A tile of queries, and the bits of its flags. The thread that loads Q writes this message, which arrives together with Q.
enum : i32 {
  kLast = 1,
  kNothing = 2, // these keys have no tile of queries
  kMasked = 4,  // some key is hidden from some query
  kUnseen = 16, // shifted by 0 or 1: no query sees any of the first, or of the second, 64 keys
  kRows = 256   // in a part of a larger problem, flags also hold kRows times the number of the tile's queries
};
struct QueryStep {
  i32 begin, head;
  i32 number; // the tile's number in the order of dq_sum
  i32 flags;
};
// The tile of keys that this thread block works on.
struct KeyBlock {                  // head_kv: with split_group, the number of a share
  static constexpr i32 kNone = -1; // a value of `batch`: there are no more keys
  i32 batch, head_kv, begin, seqlen_k;
};
__device__ __forceinline__ bool there(const KeyBlock &keys) { return keys.begin < keys.seqlen_k; }
// Sent after KeyBlock, if the tensors hold only a part of a larger problem. KeyBlock::begin is then a position, and the keys end at
// position KeyBlock::seqlen_k.
struct HeldKeyBlock {
  i32 shift, number; // row = position + shift; the tile's number within the sequence
  i32 unused, unused_too;
};
// Key j is seen by queries from j - high to j - low.
struct Reach {
  i32 low, high, seqlen_q, unused;
};

// threadIdx.x. Persistent kernels read it again each time, so that no value derived from it stays in registers around the loop over keys.
template <BackwardConfig C> __device__ __forceinline__ int this_thread() {
  if constexpr (C.persistent) return thread_index();
  return (int)threadIdx.x;
}

// The addresses of everything in shared memory, from a multiple of 1024 on.
template <BackwardConfig C> struct BackwardShared {
  u32 k, v, q, dout, ds, p, dq, bias, rows, barriers;
  u32 of_keys; // barriers and messages of one stage of keys: those of stage 0 at `barriers`, those of stage 1 message_bytes() further
  __device__ __forceinline__ explicit BackwardShared(u32 base)
      : k((base + 1023) & ~1023u), v(k + C.key_stages * C.k_bytes()), q(v + C.key_stages * C.v_bytes()), dout(q + 2 * C.q_bytes()),
        ds(dout + 2 * C.dout_bytes()), p(ds + 2 * C.ds_bytes()), dq(p + C.p_bytes()), bias(dq + C.dq_bytes()),
        rows(bias + 2 * C.bias_bytes()), barriers(rows + 2 * (C.lse_bytes() + C.row_bytes())), of_keys(barriers) {}
  // These addresses, with those of the stage of K and V that iteration n reads.
  __device__ __forceinline__ BackwardShared at(u32 n) const {
    BackwardShared found = *this;
    if constexpr (C.key_stages == 2) {
      const u32 stage = n >> 30 & 1;
      found.k += stage * C.k_bytes(), found.v += stage * C.v_bytes(), found.of_keys += stage * C.message_bytes();
    }
    return found;
  }
  // Iteration n uses stage n % 2.
  __device__ __forceinline__ u32 q_of(u32 n) const { return q + n % 2 * C.q_bytes(); }
  __device__ __forceinline__ u32 dout_of(u32 n) const { return dout + n % 2 * C.dout_bytes(); }
  __device__ __forceinline__ u32 ds_of(u32 n) const { return ds + n % 2 * C.ds_bytes(); }
  __device__ __forceinline__ u32 bias_of(u32 n) const { return bias + n % 2 * C.bias_bytes(); }
  __device__ __forceinline__ u32 lse_of(u32 n) const { return rows + n % 2 * C.lse_bytes(); }
  __device__ __forceinline__ u32 delta_of(u32 n) const { return rows + 2 * C.lse_bytes() + n % 2 * C.row_bytes(); }
  __device__ __forceinline__ u32 q_full(u32 n) const { return barriers + n % 2 * 8; }
  __device__ __forceinline__ u32 q_empty(u32 n) const { return barriers + 16 + n % 2 * 8; }
  __device__ __forceinline__ u32 dout_full(u32 n) const { return barriers + 32 + n % 2 * 8; }
  __device__ __forceinline__ u32 dout_empty(u32 n) const { return barriers + 48 + n % 2 * 8; }
  __device__ __forceinline__ u32 ds_full(u32 n) const { return barriers + 64 + n % 2 * 8; }
  __device__ __forceinline__ u32 ds_empty(u32 n) const { return barriers + 80 + n % 2 * 8; }
  __device__ __forceinline__ u32 k_full() const { return of_keys + 96; }
  __device__ __forceinline__ u32 v_full() const { return of_keys + 104; }
  // Persistent blocks: K and V have been read, so the next tile may be loaded into their stage.
  __device__ __forceinline__ u32 keys_empty() const { return of_keys + 160; }
  __device__ __forceinline__ u32 dq_full(int w) const { return barriers + (C.roles ? 336 : 112) + 8 * w; }
  __device__ __forceinline__ u32 dq_empty(int w) const { return barriers + 192 + 8 * w; }
  // With `roles`: P of an iteration, which the left warpgroup passes to the right one.
  __device__ __forceinline__ u32 p_full() const { return barriers + 112; }
  __device__ __forceinline__ u32 p_empty() const { return barriers + 120; }
  __device__ __forceinline__ u32 step(u32 n) const { return barriers + 128 + n % 2 * 16; }
  __device__ __forceinline__ u32 keys() const { return of_keys + 352; }
  __device__ __forceinline__ u32 held() const { return barriers + 368; }
  __device__ __forceinline__ u32 walk(int loader) const { return barriers + C.message_bytes() + 48 * loader; }
  __device__ __forceinline__ u32 reach() const { return of_keys + 176; }
  // Where blocks own dQ: the sum of dQ, one tile of queries after another.
  __device__ __forceinline__ u32 dq_sum() const { return barriers + C.message_bytes(); }
  // Deterministic: copies of the steps, for the thread that adds up dQ. That thread is never eight steps behind, so eight places suffice.
  __device__ __forceinline__ u32 dq_step(u32 n) const { return barriers + 208 + n % 8 * 16; }

  __device__ __forceinline__ void begin() const {
    constexpr int kWarps = 4 * C.kWarpgroups;
    for (u32 n = 0; n < 2; ++n) {
      mbarrier_init(q_full(n), 1);
      mbarrier_init(q_empty(n), kWarps);
      mbarrier_init(dout_full(n), 1);
      mbarrier_init(dout_empty(n), kWarps);
      mbarrier_init(ds_full(n), C.roles ? 4 : kWarps);
      mbarrier_init(ds_empty(n), kWarps);
    }
    for (int w = 0; w < C.kWarpgroups; ++w) {
      if (!C.roles || C.deterministic) mbarrier_init(dq_full(w), 4);
      if (C.roles) mbarrier_init(w == 0 ? p_full() : p_empty(), 4);
      mbarrier_init(dq_empty(w), 1);
    }
    for (u32 stage = 0; stage < C.key_stages; ++stage) {
      const BackwardShared keys = at(stage << 30);
      mbarrier_init(keys.k_full(), 1);
      mbarrier_init(keys.v_full(), 1);
      mbarrier_init(keys.keys_empty(), kWarps + (C.deterministic ? C.kWarpgroups : 0));
    }
    mbarrier_init_fence();
  }
};

// The two highest bits of an iteration's number say which tile of keys a persistent block works on. With two stages, bit 30 is the stage.
// Bit 31 is the parity of the number of tiles that have used the stage before.
inline constexpr u32 kOddKeys = 1u << 31;
template <BackwardConfig C> __device__ __forceinline__ u32 next_keys_number(u32 n) {
  return C.key_stages == 2 ? n + (1u << 30) : n ^ kOddKeys;
}
// The parity that keys_empty() completes when the stage for the next tile of keys is free.
template <BackwardConfig C> __device__ __forceinline__ u32 parity_before_next_keys(u32 n) {
  return C.key_stages == 2 ? next_keys_number<C>(n) >> 31 ^ 1 : n >> 31;
}
// Waits for a persistent block's next tile of keys, and returns whether there is one. n: on entry the number after the last iteration with
// the previous tile, on return the number of the first iteration with the next tile.
template <BackwardConfig C> __device__ __forceinline__ bool other_keys(const BackwardShared<C> &shared, u32 &n) {
  if constexpr (!C.persistent) return false;
  n = next_keys_number<C>(n);
  const BackwardShared<C> at = shared.at(n);
  mbarrier_wait(at.k_full(), n >> 31);
  return (i32)load_shared(at.keys()) != KeyBlock::kNone;
}

// Barriers of the two stages that iterations use alternately. wait_full waits until the stage of iteration n is full, wait_empty until it
// is free for iteration n.
__device__ __forceinline__ void wait_full(u32 barrier, u32 n) { mbarrier_wait(barrier, n / 2 % 2); }
__device__ __forceinline__ void wait_empty(u32 barrier, u32 n) { mbarrier_wait(barrier, n / 2 % 2 ^ 1); }

} // namespace strobe::sm90
