// The asynchronous operations of a thread. With Machine::late they happen only when a wait (or the end) demands it.
#pragma once
#include <array>
#include <vector>

#include "warp.h"

namespace strobe::emulator {

// A copy into shared memory that completes on a barrier.
struct Transfer {
  uint32_t barrier;
  std::function<void(const Warp &)> perform; // may be called with any warp of the block
};
struct BlockAsync {
  std::vector<Transfer> transfers; // transfers that are delayed
  uint32_t warps_ended = 0;
};

// A lane's cp.async.
struct Copy {
  uint32_t group, lane, to;
  uint64_t from;
  uint32_t bytes, read; // bytes beyond `read` become zeros
};
// A lane's cp.reduce.async.bulk; or its cp.async.bulk to global memory, which copies instead of adding.
struct Addition {
  bool adds;
  uint32_t group, lane;
  uint64_t to;
  uint32_t from, bytes;
  std::vector<float> read; // the numbers read from shared memory; empty before they are read
};
// A warp's wgmma.
struct Product {
  uint32_t group;
  std::function<void(const Warp &)> perform;
};
struct WarpAsync {
  std::array<uint32_t, kLanes> copy_groups{}, addition_groups{}; // how many groups each lane has committed so far
  uint32_t product_groups = 0;
  std::vector<Copy> copies;
  std::vector<Addition> additions;
  std::vector<Product> products;
};

void copies_end(Warp &);    // in copy.cpp; completes additions that are in flight
void products_end(Warp &);  // in wgmma.cpp
void barriers_end(Block &); // in mbarrier.cpp

} // namespace strobe::emulator
