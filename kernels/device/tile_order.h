// The order in which thread blocks take tiles. If lists of mask blocks make tiles unequally long, the longest tiles come first, so that
// short ones fill the GPU's idle time at the end.
#pragma once
#include "../attention/arguments.h"
#include "../attention/features.h"
#include "../attention/part.h"
#include "../ptx/atomic.h"
#include "../ptx/math.h"

namespace strobe {

// The tile with the given rank if `tiles` tiles are sorted, the longest first; equally long tiles are sorted by number. length(tile) <=
// most. All kThreads threads of the thread block call it together.
template <int kThreads, class Length> __device__ __forceinline__ i32 longest_first(i32 rank, i32 tiles, i32 most, const Length &length) {
  const u32 longest = min((u32)most, 0x7FFFFFFFu / (u32)tiles - 1);
  const auto key = [&](i32 tile) { // the keys by which tiles are sorted; all keys differ
    return tile < tiles ? min((u32)length(tile), longest) * (u32)tiles + (u32)(tiles - tile) : 0u;
  };
  const u32 own = key((i32)threadIdx.x);
  u32 found = 0; // found bit by bit: the greatest number that more than `rank` keys reach or exceed
  for (u32 bit = 1u << (31 - __clz((longest + 1) * (u32)tiles)); bit; bit >>= 1) {
    i32 reach = __syncthreads_count(own >= (found | bit));
    for (i32 first = kThreads; first < tiles; first += kThreads)
      reach += __syncthreads_count(key(first + (i32)threadIdx.x) >= (found | bit));
    if (reach > rank) found |= bit;
  }
  return (i32)uniform((u32)tiles - 1 - (found - 1) % (u32)tiles);
}

// Estimates how many kept mask blocks a tile has. row: the tile's row of mask blocks. any: the keys that the tile sees, of `length` keys.
template <Features F> __device__ __forceinline__ i32 kept_of(const BlockRow &row, const Range &any, i64 length) {
  if (any.empty()) return 0;
  return F.band ? (i32)__float2int_ru((float)row.count * (float)(any.end - any.begin) / (float)length) : (i32)row.count;
}

// The query tile with the given rank by length among the query tiles of a head.
template <Features F, int kThreads, int kTile> __device__ __forceinline__ i32 longest_query_tile(const Inputs &in, i32 b, i32 h, i32 rank) {
  const Band band = in.sequence<F>(b).band;
  const i32 most = (i32)((u32)in.seqlen_k / (u32)in.blocks.column_tokens) + 1;
  return longest_first<kThreads>(rank, (i32)div_up(in.seqlen_q, kTile), most, [&](i32 tile) {
    const i64 q0 = (i64)tile * kTile, q1 = min(q0 + kTile, band.seqlen_q);
    return q0 < q1 ? kept_of<F>(in.blocks.row(b, h, (u32)q0 / (u32)in.blocks.row_tokens), band.keys_any(q0, q1), band.seqlen_k) : 0;
  });
}
// The key tile with the given rank by length among the key tiles of a key head. The length counts all query heads of the key head.
template <Features F, int kThreads, int kTile>
__device__ __forceinline__ i32 longest_key_tile(const Inputs &in, i32 b, i32 h_kv, i32 rank) {
  const Band band = in.sequence<F>(b).band.transposed();
  const i32 most = ((i32)((u32)in.seqlen_q / (u32)in.blocks_t.column_tokens) + 1) * in.group;
  return longest_first<kThreads>(rank, (i32)div_up(in.seqlen_k, kTile), most, [&](i32 tile) {
    const i64 k0 = (i64)tile * kTile, k1 = min(k0 + kTile, band.seqlen_q);
    i32 kept = 0;
    for (i32 h = h_kv * in.group; k0 < k1 && h < (h_kv + 1) * in.group; ++h)
      kept += kept_of<F>(in.blocks_t.row(b, h, (u32)k0 / (u32)in.blocks_t.row_tokens), band.keys_any(k0, k1), band.seqlen_k);
    return kept;
  });
}

// Which query tile, and which split of the keys, thread block `x` of the forward takes. Heads come in bundles that share the L2 cache;
// within a bundle the last tile comes first, which is the longest under a causal mask.
template <int kTileQ> struct QueryItem {
  i32 b, h, q, split;
  __device__ __forceinline__ QueryItem(const ForwardArguments &a, u32 x) : QueryItem(a, x, (u32)div_up(a.in.seqlen_q, kTileQ)) {}
  __device__ __forceinline__ QueryItem(const ForwardArguments &a, u32 x, u32 tiles) {
    u32 all = (u32)(a.in.batch * a.in.heads);
    split = (i32)(x % a.splits);
    x /= a.splits;
    u32 bundle = x / (tiles * a.bundle), first = bundle * a.bundle, size = min(all - first, (u32)a.bundle);
    x -= first * tiles;
    u32 bh = first + x % size;
    q = (i32)(tiles - 1 - x / size) * kTileQ;
    b = (i32)(bh / a.in.heads);
    h = (i32)(bh % a.in.heads);
  }
  QueryItem() = default;
};

// Chooses this thread block's tile of keys: sets batch, head_kv, k0 and sequence of state. Bundles of heads run together and share the L2
// cache; within a bundle the tiles of the first keys come first, which are the longest under a causal mask.
template <Features F, bool kTickets, int kTileK, class State>
__device__ __forceinline__ void take_keys(State &state, const BackwardArguments &a) {
  const Inputs &in = a.in;
  u32 index = blockIdx.x;
  if constexpr (kTickets) index = fetch_add(a.ticket, 1); // tickets: every block that this block waits for has drawn its ticket earlier
  u32 tiles = (u32)key_tiles<F, kTileK>(in), heads = (u32)in.batch * in.heads_kv, size = max(1u, (u32)a.bundle);
  u32 bundle = index / (size * tiles), rest = index % (size * tiles), first = bundle * size, n = min(size, heads - first);
  u32 pair = first + rest % n;
  state.batch = (i32)(pair / in.heads_kv), state.head_kv = (i32)(pair % in.heads_kv), state.k0 = (i32)(rest / n) * kTileK;
  if constexpr (F.part) {
    state.number = (i32)(rest / n);
    const PartTile tile = part_tile(held_keys(in, state.batch), state.number, kTileK, F.blocks != 0);
    state.k0 = tile.begin, state.sequence = keys_at(in, state.batch, tile);
  } else {
    state.sequence = in.sequence<F>(state.batch);
  }
}

// take_keys() for all threads of a block. If lists of mask blocks give tiles different lengths, the longest tiles come first; not in
// deterministic mode, in which later tiles wait for the tiles of the first keys. The first thread calls begin() once k0 and k1 of state are
// set.
template <Features F, bool kTurns, int kThreads, int kTileK, class State, class Begin>
__device__ __forceinline__ void choose_keys(State &state, const BackwardArguments &a, int thread, const Begin &begin) {
  if (thread == 0) take_keys<F, kTurns, kTileK>(state, a);
  __syncthreads();
  i32 k0 = state.k0;
  if constexpr (F.blocks && !kTurns && !F.part)
    k0 = longest_key_tile<F, kThreads, kTileK>(a.in, state.batch, state.head_kv, k0 / kTileK) * kTileK;
  if (thread == 0) {
    state.k0 = k0, state.k1 = min(k0 + kTileK, (i32)state.sequence.band.seqlen_k);
    begin();
  }
  __syncthreads();
}

// Moves to a query head: state.tiles becomes the head's query tiles that see some of the keys. Returns false past the last head that shares
// the keys.
template <Features F, int kTileK, class State> __device__ __forceinline__ bool take_head(State &state, const Inputs &in, i32 head) {
  state.head = head;
  if (head == (state.head_kv + 1) * in.group) return false;
  BlockRow row{nullptr, 0, 0};
  if constexpr (F.blocks) row = in.blocks_t.row(state.batch, head, state.k0 / (u32)in.blocks_t.row_tokens);
  if constexpr (F.part)
    state.tiles = {held_queries(in, state.batch), state.sequence.band, state.k0, state.k1, kTileK, row};
  else
    state.tiles = decltype(state.tiles)(state.sequence.band, state.k0, state.k1, kTileK, row);
  return true;
}
// Sets t to the next query tile of this head or, after take(head) has moved to it, of a following head. If there is none, t.head is -1.
template <int kTileQ, class State, class Tile, class Take>
__device__ __forceinline__ void next_queries(State &state, const Inputs &in, Tile &t, const Take &take) {
  const i32 heads_end = (state.head_kv + 1) * in.group;
  while (state.head < heads_end && !state.tiles.next(t.queries)) take(state.head + 1);
  t.head = state.head < heads_end ? state.head : -1;
  t.rows = min(kTileQ, (i32)state.sequence.band.seqlen_q - t.queries.begin);
}

} // namespace strobe
