// Where K and V are quantised, one warp does what assign.h and load.h divide among several: it assigns items, and loads Q, K and V. The
// other warps of its warpgroup dequantise (stored.h).
#pragma once
#include "assign.h"
#include "load.h"

namespace strobe::sm90 {

template <Config C> struct Control {
  Load<C> load; // its `items` counts the items told
  Assign<C> assign;
  u32 fast = 0, judged = 0; // how many items were computed fast, and how many of them the consumers have judged

  __device__ __forceinline__ void all() {
    if (elected()) tma_prefetch(load.a.tma_q.map), tma_prefetch(load.a.tma_k.map), tma_prefetch(load.a.tma_v.map);
    __syncwarp();
    bool failed = false; // whether the item judged last must be computed again
    u32 x = blockIdx.x;
#pragma unroll 1
    for (;;) {
      Item item{0, 0, 0, kNone};
      if (failed) {
        item = assign.item(kept(judged - 1)).safely();
      } else if (x < load.a.items) {
        item = assign.item(x);
        if (item.kind() != kNone) keep(x);
      } else if (judged == fast) {
        break;
      }
      // One call serves all items: instructions that are fetched again and again come more slowly.
      if (item.kind() != kNone) serve(item);
      const bool again = failed;
      failed = false;
      if (judged + (x < load.a.items) < fast) failed = verdict(judged++);
      if (!again && x < load.a.items) x = draw(x);
    }
    tell({0, 0, 0, kNone});
    load.end_stored();
  }

private:
  // The number of the item after item x.
  __device__ __forceinline__ u32 draw(u32 x) const {
    bool first = x == blockIdx.x;
    if (tile::lane_id() == 0) x = assign.draw(first);
    return __shfl_sync(0xFFFFFFFFu, x, 0);
  }
  // Keeps an item's number until its verdict is known: in shared memory, where parts of a problem have messages, since registers are few.
  __device__ __forceinline__ void keep(u32 x) {
    if (elected()) store_shared(load.shared.held(fast), x);
    __syncwarp();
    ++fast;
  }
  __device__ __forceinline__ u32 kept(u32 n) const { return load_shared(load.shared.held(n)); }
  // Tells the consumers which item comes, and loads what they need for it.
  __device__ __forceinline__ void serve(const Item &item) {
    tell(item);
    load.load(read<Item>(load.shared.item()));
    ++load.items;
  }
  __device__ __forceinline__ void tell(const Item &item) {
    const SharedMemory<C> &shared = load.shared;
    mbarrier_wait(shared.item_empty(), load.items % 2 ^ 1); // all warps have read the last item
    __syncwarp();
    if (elected()) {
      write(shared.item(), item.b, item.h, item.q, item.how);
      mbarrier_arrive(shared.item_full());
    }
    __syncwarp();
  }
  // As in assign.h: waits for the consumers' verdict on the n-th item that was computed fast. Returns whether it failed.
  __device__ __forceinline__ bool verdict(u32 n) const {
    const SharedMemory<C> &shared = load.shared;
    mbarrier_wait(shared.judged(n), n / 2 % 2);
    const bool failed = __shfl_sync(0xFFFFFFFFu, load_shared(shared.failed(n)), 0) != 0;
    if (failed && elected()) store_shared(shared.failed(n), 0u);
    __syncwarp();
    return failed;
  }
};

} // namespace strobe::sm90
