// A form of the Hopper backward for persistent blocks with two stages of keys, in which consecutive key tiles overlap, so that the tensor
// cores stay busy between them. S of a key tile's first queries begins before dK and dV of the previous key tile are stored. dQ of a key
// tile's last queries is computed in the first iteration of the next key tile. K therefore stays in use until that iteration ends, which
// shortens the producers' lead by half a key tile.
#pragma once
#include "scores.h"

namespace strobe::sm90 {

// What a warpgroup keeps from one tile of keys to the next. S_ and K_ are the types of S and K in Backward::Compute.
template <BackwardConfig C, class S_, class K_> struct InLineCarried {
  const BackwardShared<C> &block;
  S_ S;
  K_ K;
  i32 number = -1;  // the last tile of queries, numbered as in dq_sum; -1: that tile's dQ has been added
  u32 k = 0;        // the address of the K from which that tile's dQ is computed
  bool more = true; // whether another tile of keys follows
};

template <BackwardConfig C, class Compute> struct InLine {
  Compute &my;

  // n: the number of the first iteration with these keys. Returns the number of the first iteration with the next keys.
  __device__ __forceinline__ u32 all(u32 n) const {
    my.clear_sums();
    if (n == 0) {
      if (my.w == 1) my.leave_tensor_cores(); // warpgroup 0 begins
      mbarrier_wait(my.shared.k_full(), 0);
      begin_s_of_keys(my.shared, n);
    }
    const QueryStep step = read<QueryStep>(my.shared.step(n));
    KeyBlock keys;
    if (step.flags & kNothing) {
      keys = read<KeyBlock>(my.shared.keys());
      pass(n);
    } else {
      walk(step, n);
      keys = read<KeyBlock>(my.shared.keys());
    }
    my.store_sums(keys);
    if (!my.carried->more) {
      wait_for<0>(my.S);
      add_last_dq(n);
      my.dq_sum().finish(keys);
    }
    return next_keys_number<C>(n + 1);
  }
  // Ends the last tile of queries; it replaces begin_next_s. Leaves the tensor cores, begins S for the next keys, and returns n. later: dQ
  // of the previous tile is in flight.
  __device__ __forceinline__ u32 end_keys(u32 n, bool later, i32 before) const {
    my.leave_tensor_cores();
    if (later) my.template take_dq<0>(n - 1);
    my.scores.release(my.shared.q_empty(n));
    begin_other_keys(n);
    if (later) my.add_dq(n - 1, before);
    return n;
  }
  // Called when dQ of iteration n is complete. If that iteration used K of the previous keys, their stage is now free.
  __device__ __forceinline__ void release_keys_before(u32 n) const {
    if (my.carried->k != my.shared.k) my.scores.release(my.carried->block.at(next_keys_number<C>(n)).keys_empty());
  }

private:
  // The work for keys that no query sees.
  __device__ __forceinline__ void pass(u32 n) const {
    wait_for<0>(my.S);
    add_last_dq(n - 1);
    my.carried->k = 0;
    my.pass(n);
    my.release_tiles(n);
    begin_other_keys(n);
  }
  __device__ __forceinline__ void walk(QueryStep step, u32 &n) const {
    auto &carried = *my.carried;
    mbarrier_wait(my.shared.v_full(), n >> 31);
    if constexpr (!Compute::kHidden) look_at_keys();
    my.each_tile(step, n, carried.number, [&] {
      if (Compute::kHidden && carried.k != my.shared.k) look_at_keys(); // in the loop, because outside it no registers are left
    });
  }
  // Does for S of these keys' first queries, once computed, what Compute::first_scores does.
  __device__ __forceinline__ void look_at_keys() const {
    if (my.scores.hides()) {
      if constexpr (!Compute::kHidden) wait_for<0>(my.S);
      const bool cleared = my.clear_keys_that_show();
      if (cleared) my.load_k(my.shared);
    }
    my.load_v();
  }
  // Loads K into registers, if K is kept there, and begins S of iteration n.
  __device__ __forceinline__ void begin_s_of_keys(const BackwardShared<C> &keys, u32 n) const {
    wait_full(keys.q_full(n), n);
    my.load_k(keys);
    my.begin_s(keys, n);
  }
  // Called after iteration n, the last one with these keys. Begins S of the next keys' first queries. If there are no more keys, the
  // product's result is not read.
  __device__ __forceinline__ void begin_other_keys(u32 n) const {
    const u32 next = next_keys_number<C>(n + 1);
    const BackwardShared<C> keys = my.carried->block.at(next);
    mbarrier_wait(keys.k_full(), next >> 31);
    my.carried->more = (i32)load_shared(keys.keys()) != KeyBlock::kNone;
    begin_s_of_keys(keys, my.carried->more ? next : n);
  }
  // Adds dQ of iteration n, unless that has been done.
  __device__ __forceinline__ void add_last_dq(u32 n) const {
    if (my.carried->number < 0) return;
    my.begin_dq(n);
    my.template take_dq<0>(n);
    my.add_dq(n, my.carried->number);
    my.carried->number = -1;
  }
};

} // namespace strobe::sm90
