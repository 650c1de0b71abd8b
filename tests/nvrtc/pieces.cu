// Kernels that call, with float, every piece of kernels/attention and those of kernels/device that take no tile. They compile with NVRTC
// alone.
#include "ptx/math.h" // first: numbers must be declared before the templates that use them

#include "attention/arguments.h"
#include "attention/base.h"
#include "attention/divisor.h"
#include "attention/dq_sum.h"
#include "attention/dropout.h"
#include "attention/features.h"
#include "attention/geometry.h"
#include "attention/lists.h"
#include "attention/packed_tiles.h"
#include "attention/part.h"
#include "attention/quantised.h"
#include "attention/schedule.h"
#include "attention/score.h"
#include "attention/softmax.h"
#include "device/part_tiles.h"
#include "device/query_tiles.h"
#include "device/scores.h"
#include "device/settle_row.h"
#include "device/tile_order.h"
#include "device/turns.h"

namespace strobe {

struct Arguments {
  const float *scores; // (seqlen_q, seqlen_k)
  const i32 *cols;     // of the one block row, or null
  float *lse;          // (seqlen_q)
  float *slopes;       // d capped / d s summed over the row
  i64 seqlen_q, seqlen_k, left, right, blocks, block;
  bool bottom_right;
  double dropout;
  u64 seed, offset;
};

// One thread per query.
extern "C" __global__ void pieces(Arguments a) {
  const float lowest = minus_infinity<float>(), log2e = 1.4426950408889634f, cap = 30.0f;
  const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= a.seqlen_q) return;
  const DropoutKey key = dropout_key(a.seed, a.offset);
  const u32 threshold = dropout_threshold(a.dropout);
  const Band band = Band::make(a.seqlen_q, a.seqlen_k, a.bottom_right, a.left, a.right);
  RowState<float> row{lowest, 0};
  float slopes = 0;
  Schedule schedule(band, i, i + 1, 64, 16, {a.cols, a.blocks, a.block});
  for (KeyTile tile; schedule.next(tile);) {
    for (i64 j = tile.begin; j < tile.end; ++j) {
      if (tile.masked && !band.visible(i, j)) continue;
      float slope, capped = softcap(a.scores[i * a.seqlen_k + j], cap, 1 / cap, slope);
      slopes += slope;
      capped += hyperbolic(capped, 2.0f, 2.0f * 0.69314718f, 0.5f, slope);
      slopes += slope;
      float s = capped + alibi(0.1f, (float)(i + band.offset - j));
      rescale(row, s, log2e, 0.0f, lowest);
      if (dropout_keep(key, threshold, 0, 0, i, j)) row.l += exp2((s - row.m) * log2e) / dropout_keep_rate(threshold);
    }
  }
  a.lse[i] = row.m + log(row.l);
  a.slopes[i] = slopes + (float)band.transposed().keys(0).begin;
}

// The pieces of a backward over lists of mask blocks.
extern "C" __global__ void backward_pieces(const BackwardArguments a, u32 *before) {
  constexpr Features kFeatures{1, 1};
  const i32 tile = longest_key_tile<kFeatures, 64, 16>(a.in, 0, 0, (i32)blockIdx.x),
            query = longest_query_tile<kFeatures, 64, 16>(a.in, 0, 0, 0);
  *before = key_tiles_before<true, 16>(a.in, a.in.sequence(0).band, 0, 0, query * 16, tile * 16);
  await_turn<true>(a.turns, 0, *before);
  const float lse = *a.lse.at<const float>(0, 0, 0, 0);
  if (large_lse<kF32>(lse)) settle_row(a, 0, 0, 0, lse, 1.0f, 0.0f);
}

// The ranges of a part: how many keys a query tile walks over, how many queries a key tile.
extern "C" __global__ void part_pieces(const BackwardArguments a, u32 *walked) {
  constexpr Features kFeatures{.band = 1, .blocks = 1, .part = kAnywhere};
  const auto [q0, s] = queries_of<kFeatures, 64>(a.in, 0, (i32)blockIdx.x);
  u32 keys = 0, queries = 0;
  PartKeys tiles(s.band, q0, s.band.seqlen_q, 64, 1, a.in.blocks.row(0, 0, 0), held_keys(a.in, 0));
  for (PartKeyTile tile; tiles.next(tile);) keys += (u32)(tile.end - tile.begin);
  const PartTile own = part_tile(held_keys(a.in, 0), (i32)blockIdx.x, 64, true);
  PartQueries<true, 64> others(held_queries(a.in, 0), keys_at(a.in, 0, own).band, own.begin, own.end, 64, a.in.blocks_t.row(0, 0, 0));
  for (PartQueryTile tile; others.next(tile);) queries += (u32)(tile.end - tile.begin);
  walked[0] = keys, walked[1] = queries;
  walked[2] = part_tiles_before<true, 64>(a.in, s.band, 0, 0, q0, (i32)s.band.seqlen_q, (i32)key_tiles<kFeatures, 64>(a.in));
  walked[3] = (u32)first_part_tile(a.in, 0, 0, 64, true);
}

// The scale of a quantised key's row.
extern "C" __global__ void quantised_pieces(const ArgumentsOf<ForwardArguments, true>::type a, float *scale) {
  *scale = *a.scales.k.at<const float>(0, 0, (i64)threadIdx.x, 0);
}

extern "C" __global__ void packed_tiles(Inputs in, i32 *begin) {
  const PackedTile of = packed_tile(in.cu_seqlens_q, in.total_q, in.batch, 64, (i32)threadIdx.x);
  begin[threadIdx.x] = of.begin + of.b;
}

} // namespace strobe
