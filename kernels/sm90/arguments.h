// The arguments of the Hopper kernels.
#pragma once
#include "../attention/arguments.h"
#include "../attention/divisor.h"
#include "../attention/quantised.h"
#include "../device/mask_bits.h"
#include "../ptx/tensor_map.h"

namespace strobe::inline STROBE_ISA {

struct alignas(16) TicketCounter {
  u32 count;
  u32 mark[3]; // a fixed pattern if `count` is valid
};

struct HopperForwardArguments : ForwardArguments {
  MappedOperand tma_q, tma_k, tma_v;
  // The number of items: a query tile has a.splits of them. Each of the batch * heads heads has `tiles` query tiles. Packed sequences
  // number their tiles as PackedTile says, so there each of the `heads` heads has `tiles`.
  u32 items;
  i32 tiles;
  // Heads come in bundles of `bundle`, which share the L2 cache. Items are counted as if the last bundle were full.
  Divisor splits_divisor, bundle_items, bundle_divisor, heads_divisor, group_divisor;
  TicketCounter *tickets; // thread blocks draw their next item from it; unused if there are as many blocks as items
  MaskBits mask_bits;     // used with a mask
  MappedOperand tma_bias; // used if the copy engine loads the bias
  i32 bias_rows_step;     // 0: the bias is broadcast over queries, and one row is loaded
  u32 bias_bytes;         // per tile
  // Packed sequences with fewer or more queries are left to another launch.
  i32 least_queries, most_queries;
  // Invariant: global memory where each thread block keeps O and LSE of the chunks of keys that it has walked over.
  float *walked;
};
// The arguments if several query heads share a query tile. The 64 rows of a warpgroup are `queries` queries of each of `packed` heads; the
// next warpgroup has the next queries. The query heads of a key head are divided into `pieces`, which count as heads in the members above.
struct PackedForwardArguments : HopperForwardArguments {
  i32 packed;
  Divisor queries, pieces;
};
template <bool kPacked> struct ForwardArgumentsOf {
  using type = HopperForwardArguments;
};
template <> struct ForwardArgumentsOf<true> {
  using type = PackedForwardArguments;
};

} // namespace strobe::inline STROBE_ISA
