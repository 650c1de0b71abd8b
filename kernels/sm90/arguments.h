// What the Hopper kernels are called with.
#pragma once
#include "../attention/arguments.h"
#include "../attention/divisor.h"
#include "../device/mask_bits.h"
#include "../ptx/tensor_map.h"

namespace strobe::inline STROBE_ISA {

struct alignas(16) TicketCounter {
  u32 count;
  u32 mark[3]; // that count is meant
};

struct HopperForwardArguments : ForwardArguments {
  MappedOperand tma_q, tma_k, tma_v;
  u32 items; // tiles of queries: `tiles` of each of batch * heads heads (of packed sequences as PackedTile numbers them, so of each of
             // `heads`); each is split in a.splits
  i32 tiles;
  // Heads come in bundles, `bundle` of them, that share the L2 cache. Items are counted as if the last bundle were full.
  Divisor splits_divisor, bundle_items, bundle_divisor, heads_divisor, group_divisor;
  TicketCounter *tickets; // blocks of threads draw their next item from it; unused if there are as many blocks as items
  MaskBits mask;
  MappedOperand tma_bias; // if it comes by the copy engine
  i32 bias_rows_step;     // 0: broadcast over queries, then one row is fetched
  u32 bias_bytes;         // of a tile
};
// Query heads packed into a tile of queries: a warpgroup's 64 rows are `queries` of each of `packed` heads, the next warpgroup's the
// queries after them. A key head's query heads come in so many `pieces`, which count as heads above.
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
