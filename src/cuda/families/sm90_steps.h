// Steps that the forward and the backward of the Hopper family share.
#pragma once
#include <algorithm>
#include <string>

#include "../../../kernels/attention/divisor.h"
#include "cuda/program/arguments.h"
#include "cuda/program/tensor_maps.h"

namespace strobe::cuda {

// A part's ranges count as aligned: none of the supported options depends on where ranges begin.
inline Features hopper_features(const Problem &p) {
  Features f = features_of(p);
  if (f.part) f.part = kAligned;
  return f;
}

// The reason why the copy engine cannot load Q, K or V; empty if it can.
inline std::string unmapped_inputs(const Problem &p) {
  if (p.quantised() && !aligned_keys(p))
    return "quantised keys whose rows, in bytes, are no multiples of 16, or do not lie on such addresses";
  for (const std::string &reason :
       {unmapped("q", p.q, p.head_dim), unmapped("k", p.k, p.stored(p.head_dim)), unmapped("v", p.v, p.stored(p.head_dim_v))})
    if (!reason.empty()) return reason;
  return {};
}

// How many heads a bundle has, at most `most`: there are as few bundles as possible, of nearly equal size. The last bundle may have fewer
// heads.
inline int64_t even_bundle(int64_t heads, int64_t most) { return heads <= 0 ? 1 : tiles(heads, tiles(heads, std::max<int64_t>(1, most))); }
// Sets the order of query or key tiles: bundle after bundle of heads. Each head has tiles_of_head tiles.
template <class Arguments> void order_tiles(Arguments &a, int64_t tiles_of_head, int64_t bundle) {
  a.tiles = i32(tiles_of_head), a.bundle = i32(bundle);
  a.bundle_items = Divisor::make(uint32_t(std::max<int64_t>(1, bundle * tiles_of_head)));
  a.bundle_divisor = Divisor::make(uint32_t(bundle));
}

// Lets the copy engine load the bias in boxes of `box` queries, tile_bytes per tile; or a single row, if all queries share it.
template <class Arguments> void map_bias(Arguments &a, const Problem &p, int32_t box, int32_t tile_bytes, int32_t tile_k) {
  a.tma_bias = mapped_bias(p, box);
  a.bias_bytes = uint32_t(p.bias.stride[2] ? tile_bytes : tiles(tile_k, 64) * 128);
}

} // namespace strobe::cuda
