// The arguments of the Hopper kernels.
#pragma once
#include "../attention/arguments.h"
#include "../attention/divisor.h"
#include "../device/mask_bits.h"
#include "../ptx/tensor_map.h"

namespace strobe::inline STROBE_ISA {

struct alignas(16) TicketCounter {
  u32 count;
  u32 mark[3]; // a mark that says that count is valid
};

struct HopperForwardArguments : ForwardArguments {
  MappedOperand tma_q, tma_k, tma_v;
  // Query tiles: `tiles` for each of batch * heads heads (packed sequences: numbered as in PackedTile, so for each of `heads`); each is
  // split in a.splits.
  u32 items;
  i32 tiles;
  // Heads come in bundles of `bundle`, which share the L2 cache. Items are counted as if the last bundle were full.
  Divisor splits_divisor, bundle_items, bundle_divisor, heads_divisor, group_divisor;
  TicketCounter *tickets; // thread blocks draw their next item from it; unused if there are as many blocks as items
  MaskBits mask_bits;     // with a mask
  MappedOperand tma_bias; // used if the copy engine loads the bias
  i32 bias_rows_step;     // 0: broadcast over queries, then one row is loaded
  u32 bias_bytes;         // per tile
  // Invariant: each thread block's own memory for O and LSE of the chunks of keys that it has walked over.
  float *walked;
};
// Query heads packed into a query tile: a warpgroup's 64 rows are `queries` queries of each of `packed` heads, the next warpgroup's are the
// following queries. A key head's query heads come in this many `pieces`, which count as heads above.
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
