// The tile of queries of one head and one sequence that a thread block of a pass takes.
#pragma once
#include "../attention/dq_sum.h"
#include "../attention/part.h"
#include "config.h"

namespace strobe::passes {

template <RowsConfig C> struct RowTile {
  i32 batch, head, rows;
  i64 row, index, number; // its first row in the tensors; the same in contiguous scratch; the tile's number in dq_sum

  __device__ __forceinline__ explicit RowTile(const Inputs &in) {
    u32 block = blockIdx.x;
    // On Hopper dq_sum of the first tiles is cleared last, so that it is still in the L2 cache when the backward begins with them (packed:
    // the first tiles of all heads). The pass after the backward also walks in this order, because the last tiles are then in the cache.
    if constexpr (C.form == kWarpgroups) block = gridDim.x - 1 - block;
    const u32 tiles = (u32)count(in);
    if constexpr (C.packed) { // all heads of a tile are neighbours: the heads of a token are adjacent in memory
      const u32 tile = block / (u32)in.heads;
      const PackedTile of = packed_tile(in.cu_seqlens_q, in.total_q, in.batch, C.tile_q, (i32)tile);
      const HeldRows s = in.held(of.b);
      batch = (i32)uniform((u32)of.b), head = (i32)(block % (u32)in.heads), number = (i64)head * tiles + tile;
      rows = (i32)uniform(of.begin < 0 ? 0u : (u32)max(0ll, min(s.seqlen_q - of.begin, (i64)C.tile_q)));
      row = (i64)uniform((u32)(s.q0 + of.begin)), index = in.row_index(batch, head, row);
      return;
    }
    const u32 pair = block / tiles, tile = block % tiles;
    batch = (i32)(pair / in.heads), head = (i32)(pair % in.heads);
    const HeldRows s = in.held(batch);
    if constexpr (C.part) {
      const PartTile of_part = part_tile(held_queries(in, batch), (i32)tile, C.tile_q, C.sparse != 0);
      rows = max(of_part.end - of_part.begin, 0);
      row = s.q0 + of_part.begin + of_part.shift, index = in.row_index(batch, head, row);
      number = first_part_tile(in, batch, head, C.tile_q, C.sparse != 0) + tile;
      return;
    }
    const i64 begin = (i64)tile * C.tile_q;
    rows = (i32)max(0ll, min(s.seqlen_q - begin, (i64)C.tile_q));
    row = s.q0 + begin, index = in.row_index(batch, head, row), number = first_query_tile(in, batch, head, C.tile_q) + tile;
  }

private:
  static __device__ __forceinline__ i64 count(const Inputs &in) {
    if constexpr (C.part) return part_tiles(in.seqlen_q, in.part->count_q, C.tile_q, C.sparse != 0);
    return C.packed ? count_packed_tiles(in.total_q, in.batch, C.tile_q) : div_up(in.seqlen_q, C.tile_q);
  }
};

} // namespace strobe::passes
