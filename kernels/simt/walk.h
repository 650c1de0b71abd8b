// A schedule walked by one thread for the whole CTA: its state lies in shared memory and not in every thread's registers.
#pragma once
#include "../attention/schedule.h"

namespace strobe::simt {

struct Tile {
  i32 begin, end;
  bool masked;
};

// What a CTA works on, from its number: tiles of one head are neighbours, which share K and V in the L2 cache; or, where tiles are of unequal
// length, those of equal length, so that the longest come first.
struct Item {
  i32 split, tile, head, batch;

  static __device__ Item of(u32 number, i32 splits, i64 tiles, i32 heads, i32 batches, bool longest_first) {
    Item x;
    x.split = take(number, splits);
    if (!longest_first) x.tile = take(number, (i32)tiles);
    x.head = take(number, heads);
    x.batch = take(number, batches);
    if (longest_first) x.tile = (i32)number;
    return x;
  }

private:
  static __device__ i32 take(u32 &number, i32 count) {
    const u32 x = number % (u32)count;
    number /= (u32)count;
    return (i32)x;
  }
};

// The first entry of a row of blocks that is `block` or lies beyond it.
__device__ inline i64 first_entry(const BlockRow &row, i64 block) {
  i64 first = 0, last = row.count;
  while (first < last) {
    const i64 middle = (first + last) / 2;
    if (row.cols[middle] < block)
      first = middle + 1;
    else
      last = middle;
  }
  return first;
}

// Lies in shared memory. The tile after the current one is found while that is worked on.
class Walk {
  struct Slot {
    Tile tile;
    bool valid;
  };
  Schedule schedule_;
  Slot slots_[2];

  __device__ void find(Slot &slot, i32 nth) {
    KeyTile tile;
    bool valid = true;
    for (i32 n = 0; n < nth && valid; ++n) valid = schedule_.next(tile);
    slot.valid = valid;
    if (valid) slot.tile = {(i32)tile.begin, (i32)tile.end, tile.masked};
  }

public:
  // body(tile, more) for every `stride`-th tile from number `first` on. Between the starts of two calls of body the CTA must meet at a
  // barrier, and only then is `more` right: whether another tile follows.
  template <class F> __device__ __forceinline__ void run(const Schedule &schedule, i32 first, i32 stride, F &&body) {
    __syncthreads(); // the last walk is over
    if (threadIdx.x == 0) {
      schedule_ = schedule;
      find(slots_[0], first + 1);
    }
    __syncthreads();
    for (i32 current = 0; slots_[current].valid; current ^= 1) {
      if (threadIdx.x == 0) find(slots_[current ^ 1], stride);
      const Tile tile = slots_[current].tile;
      body(tile, slots_[current ^ 1].valid);
    }
  }
};

} // namespace strobe::simt
