// Two producer threads of a block drive the copy engine: one loads K and, tile by tile, Q with LSE; the other one loads V and dO with D.
#pragma once
#include "../../attention/packed_tiles.h"
#include "../../device/keys.h"
#include "../../device/query_tiles.h"
#include "../../ptx/atomic.h"
#include "../../ptx/grid.h"
#include "../../ptx/tma.h"
#include "part.h"

namespace strobe::sm90 {

template <BackwardConfig C> struct BackwardLoad {
  static constexpr Features F = C.features;
  static constexpr int kM = C.tile_q, kTileK = C.tile_k();
  using Tiles = QueryTiles<F.blocks != 0, kM, F.blocks == kFullKnown>;
  const HopperBackwardArguments &a;
  const BackwardShared<C> shared;

  // Writes this block's (first) keys to shared memory. One thread calls it, before the other threads begin.
  static __device__ __forceinline__ void choose_keys(const HopperBackwardArguments &a, const BackwardShared<C> &shared) {
    // Deterministic: keys are drawn as tickets, so that a block waits only for blocks with earlier tickets, which already run.
    const u32 x = C.deterministic ? fetch_add(a.ticket, 1) : C.owns_dq ? blockIdx.x * (u32)a.tiles : blockIdx.x;
    if constexpr (C.draws_keys())
      take_keys(a, shared, x);
    else
      place_keys(a, shared, x);
  }
  // Takes the keys of item x, or of the next item that has keys. Returns whether there is one.
  static __device__ __forceinline__ bool take_keys(const HopperBackwardArguments &a, const BackwardShared<C> &shared, u32 x) {
    while (x < (u32)a.tiles * (u32)a.pairs) {
      place_keys(a, shared, x);
      if (there(read<KeyBlock>(shared.keys()))) return true;
      wait_for_launch_before();
      x = next_item(a);
    }
    write(shared.keys(), KeyBlock::kNone, 0, 0, 0);
    return false;
  }
  // Draws the next item. The previous launch has set the ticket to 0.
  static __device__ __forceinline__ u32 next_item(const HopperBackwardArguments &a) {
    return (C.deterministic ? 0 : gridDim.x) + fetch_add(a.ticket, 1);
  }
  // Writes the keys of item x to shared memory. Within a bundle of heads the first tile comes first (under a causal mask the longest).
  static __device__ __forceinline__ void place_keys(const HopperBackwardArguments &a, const BackwardShared<C> &shared, u32 x) {
    const u32 bundle = a.bundle_items.divide(x), within = x - bundle * a.bundle_items.by, tile = a.bundle_divisor.divide(within);
    const u32 pair = bundle * a.bundle_divisor.by + within - tile * a.bundle_divisor.by, b = a.heads_kv_divisor.divide(pair);
    const i32 head_kv = (i32)(pair - b * a.heads_kv_divisor.by);
    bool none = b >= (C.packed ? 1 : (u32)a.in.batch); // true if the last bundle is not full
    if constexpr (F.part) return choose_held_keys(a, shared, none ? 0 : (i32)b, head_kv, (i32)tile, none);
    PackedTile of{none ? 0 : (i32)b, (i32)tile * kTileK};
    if constexpr (C.packed) of = packed_tile(a.in.cu_seqlens_k, a.in.total_k, a.in.batch, kTileK, (i32)tile), none |= of.begin < 0;
    const BasicBand<i32> band = narrow(a.in.sequence<F>(of.b).band);
    write(shared.keys(), of.b, head_kv, none ? band.seqlen_k : of.begin, band.seqlen_k);
    write(shared.reach(), band.low, band.high, band.seqlen_q, 0);
  }

  static __device__ __forceinline__ void choose_held_keys(const HopperBackwardArguments &a, const BackwardShared<C> &shared, i32 b,
                                                          i32 head_kv, i32 number, bool none) {
    const PartTile tile = part_tile(held_keys(a.in, b), number, kTileK, false);
    const BasicBand<i32> band = narrow(whole_sequence(a.in, b).band);
    write(shared.keys(), b, head_kv, none ? tile.end : tile.begin, tile.end);
    write(shared.reach(), band.low, band.high, band.seqlen_q, 0);
    write(shared.held(), tile.shift, number, 0, 0);
  }

  __device__ __forceinline__ void q() const {
#pragma unroll 1
    for (u32 n = 0;; n = next_keys_number<C>(n)) {
      n = of_keys(n).q(n);
      if constexpr (!C.persistent) return;
      if constexpr (C.draws_keys()) {
        const u32 x = next_item(a);
        const BackwardShared<C> next = shared.at(next_keys_number<C>(n));
        mbarrier_wait(next.keys_empty(), parity_before_next_keys<C>(n));
        if (take_keys(a, next, x)) continue;
        return mbarrier_arrive(next.k_full());
      }
      KeyBlock keys = read<KeyBlock>(shared.keys());
      const bool more = next_keys(keys);
      mbarrier_wait(shared.keys_empty(), n >> 31);
      write(shared.keys(), more ? keys.batch : KeyBlock::kNone, keys.head_kv, keys.begin, keys.seqlen_k);
      if (!more) return mbarrier_arrive(shared.k_full());
    }
  }
  __device__ __forceinline__ void dout() const {
    u32 n = 0;
    do n = of_keys(n).dout(n);
    while (other_keys<C>(shared, n));
  }

private:
  __device__ __forceinline__ BackwardLoad of_keys(u32 n) const { return {a, shared.at(n)}; }
  // Where blocks own dQ: replaces `keys` by the block's next keys. Returns whether there are any.
  __device__ __forceinline__ bool next_keys(KeyBlock &keys) const {
    keys.begin += kTileK;
    if (keys.begin < keys.seqlen_k) return true;
    const u32 pair = (u32)keys.batch * a.heads_kv_divisor.by + (u32)keys.head_kv + gridDim.x;
    keys.begin = 0, keys.batch = (i32)a.heads_kv_divisor.divide(pair), keys.head_kv = (i32)(pair - (u32)keys.batch * a.heads_kv_divisor.by);
    return pair < (u32)a.pairs;
  }
  static __device__ __forceinline__ u32 keys_parity(u32 n) { return C.persistent ? n >> 31 : 0; }
  // The loads for one tile of keys: q() loads K, Q and LSE, dout() loads V, dO and D. Both return the number of the next iteration.
  __device__ __forceinline__ u32 q(u32 n) const {
    const KeyBlock keys = read<KeyBlock>(shared.keys());
    load<C.columns(), C.k_bytes(), kTileK>(a.tma_k, shared.k_full(), shared.k, k_row(keys), head_of(keys), keys.batch);
    // The launch before writes LSE and D and clears dQ's sum. Computing warpgroups wait for these loads, and so for that launch.
    wait_for_launch_before();
    const i32 batch = keys.batch;
    return walk(n, [&](u32 n, i32 row, const QueryStep &step) {
      wait_empty(shared.q_empty(n), n);
      write(shared.step(n), step.begin, step.head, number_of_dq(step), step.flags);
      if constexpr (C.deterministic) write(shared.dq_step(n), step.begin, step.head, step.number, step.flags);
      if (step.flags & kNothing) {
        mbarrier_wait(shared.k_full(), keys_parity(n)); // K must arrive before the block ends and its shared memory is freed
        return mbarrier_arrive(shared.q_full(n));
      }
      load<C.columns(), C.q_bytes(), kM>(a.tma_q, shared.q_full(n), shared.q_of(n), row, step.head, batch,
                                         C.lse_bytes() + (C.bias_by_tma ? a.bias_bytes : 0u));
      if constexpr (C.bias_by_tma) load_bias(step, keys, n);
      bulk_load(shared.lse_of(n), rows(step), C.lse_bytes(), shared.q_full(n));
    });
  }
  __device__ __forceinline__ u32 dout(u32 n) const {
    const KeyBlock keys = read<KeyBlock>(shared.keys());
    load<C.columns_v(), C.v_bytes(), kTileK>(a.tma_v, shared.v_full(), shared.v, k_row(keys), head_of(keys), keys.batch);
    wait_for_launch_before();
    if constexpr (C.persistent)
      mbarrier_wait(shared.k_full(), n >> 31); // otherwise this thread might take these keys' K for the next keys'
    const i32 batch = keys.batch;
    return walk(n, [&](u32 n, i32 row, const QueryStep &step) {
      if (step.flags & kNothing) {
        mbarrier_wait(shared.v_full(), keys_parity(n));
        if constexpr (!C.persistent) return;
        wait_empty(shared.dout_empty(n), n);
        return mbarrier_arrive(shared.dout_full(n));
      }
      wait_empty(shared.dout_empty(n), n);
      load<C.columns_v(), C.dout_bytes(), kM>(a.tma_dout, shared.dout_full(n), shared.dout_of(n), row, step.head, batch, C.row_bytes());
      bulk_load(shared.delta_of(n), rows(step) + C.lse_bytes() / 4, C.row_bytes(), shared.dout_full(n));
    });
  }

  __device__ __forceinline__ void load_bias(const QueryStep &step, const KeyBlock &keys, u32 n) const {
    const bool rows = a.in.bias.stride[2] != 0;
#pragma unroll
    for (int w = 0; w < kTileK / 64; ++w)
      tma_load(shared.bias_of(n) + w * kM * kRowBytes, a.tma_bias.map, shared.q_full(n), keys.begin + 64 * w, rows ? step.begin : 0,
               step.head * a.tma_bias.head_step, keys.batch * a.tma_bias.batch_step);
  }

  // The tile's number in dq_sum. Where blocks own dQ, the number counts within the block's own part, which holds one (batch, key head) pair
  // at a time.
  __device__ __forceinline__ i32 number_of_dq(const QueryStep &step) const {
    if (!C.owns_dq) return step.number;
    const i32 first = read<KeyBlock>(shared.keys()).head_kv * a.heads_of_keys;
    return (step.head - first) * a.query_tiles + (i32)((u32)step.begin / kM);
  }
  __device__ __forceinline__ const float *rows(const QueryStep &step) const {
    return a.rows + (i64)step.number * ((C.lse_bytes() + C.row_bytes()) / 4);
  }
  __device__ __forceinline__ i32 head_of(const KeyBlock &keys) const { // the head of K and V
    return C.split_group ? (i32)a.shares.divide((u32)keys.head_kv) : keys.head_kv;
  }
  __device__ __forceinline__ i32 k_row(const KeyBlock &keys) const {
    const i32 shift = F.part ? read<HeldKeyBlock>(shared.held()).shift : 0;
    return mapped_row(a.in.held(keys.batch), keys.begin + shift);
  }

  // Calls visit(iteration, row of the tensors, step) for each tile of queries that sees some of these keys, in each head that shares them.
  template <class Visit> __device__ __forceinline__ u32 walk(u32 n, const Visit &visit) const {
    if constexpr (F.part) return walk_held(n, visit);
    const KeyBlock keys = read<KeyBlock>(shared.keys());
    const Inputs &in = a.in;
    const i32 q0 = (i32)in.held(keys.batch).q0, end = (keys.head_kv + 1) * a.heads_of_keys;
    const i32 first = in.cu_seqlens_q ? (i32)((u32)q0 / kM) + keys.batch : keys.batch * in.heads * a.query_tiles;
    i32 head = keys.head_kv * a.heads_of_keys;
    const Tiles of_first = tiles_of(keys, head);
    Tiles tiles = of_first;
    QueryTile next;
    auto more = [&] {
      while (!tiles.next(next)) {
        if (++head == end) return false;
        tiles = F.blocks ? tiles_of(keys, head) : of_first;
      }
      return true;
    };
    if (!more()) {
      visit(n, 0, {0, 0, 0, kNothing});
      return n + 1;
    }
    i32 flags = 0;
#pragma unroll 1
    for (; !(flags & kLast); ++n) {
      QueryStep step{next.begin, head, first + head * a.query_tiles + (i32)((u32)next.begin / kM), masks(next.begin)};
      if constexpr (F.blocks == kFullKnown) step.flags |= in.function.full_t[next.entry - in.blocks_t.indices] ? 0 : kOpen;
      if (!more()) step.flags |= kLast;
      flags = step.flags;
      visit(n, q0 + step.begin, step);
    }
    return n;
  }
  template <class Visit> __device__ __forceinline__ u32 walk_held(u32 n, const Visit &visit) const {
    HeldQueryTiles<C> tiles(a, shared, shared.walk(threadIdx.x / 32));
    if (!tiles.next()) {
      visit(n, 0, {0, 0, 0, kNothing});
      return n + 1;
    }
    i32 flags = 0;
#pragma unroll 1
    for (; !(flags & kLast); ++n) {
      QueryStep step = tiles.step();
      const i32 row = tiles.row();
      step.flags |= masks(step.begin);
      if (step.flags < kM * kRows) step.flags |= kMasked;
      if (!tiles.next()) step.flags |= kLast;
      flags = step.flags;
      visit(n, row, step);
    }
    return n;
  }
  __device__ __forceinline__ Tiles tiles_of(const KeyBlock &keys, i32 head) const {
    BlockRow row{nullptr, 0, 0};
    if constexpr (F.blocks) row = a.in.blocks_t.row(keys.batch, head, keys.begin / (u32)a.in.blocks_t.row_tokens);
    return Tiles(a.in.sequence<F>(keys.batch).band, keys.begin, min(keys.begin + kTileK, keys.seqlen_k), kTileK, row);
  }
  // The flags of this key tile for the kM queries from q on: kMasked if a key may be hidden from one of the queries; kUnseen << w if the
  // queries see none of the w-th 64 keys.
  __device__ __forceinline__ i32 masks(i32 q) const {
    const KeyBlock keys = read<KeyBlock>(shared.keys());
    const Reach reach = read<Reach>(shared.reach());
    // Rows past the last query have to be masked. They may belong to another sequence, the copy engine may have filled their bias with 0,
    // which hides nothing, or the caller's function may be NaN at a distance that no query has.
    i32 flags = !F.part && (C.bias_by_tma || F.given() || a.in.cu_seqlens_q) && q + kM > reach.seqlen_q ? kMasked : 0;
#pragma unroll
    for (int w = 0; w < kTileK / 64; ++w) {
      const i32 j = keys.begin + 64 * w;
      if (j + 64 > keys.seqlen_k || (F.band && (q < j + 63 - reach.high || q + kM - 1 > j - reach.low))) flags |= kMasked;
      if (F.band && (q + kM - 1 < j - reach.high || q > j + 63 - reach.low)) flags |= kUnseen << w;
    }
    return flags;
  }

  template <int kColumns, u32 kBytes, int kRows>
  static __device__ __forceinline__ void load(const MappedOperand &x, u32 full, u32 address, i32 row, i32 head, i32 b, u32 more_bytes = 0) {
    mbarrier_expect(full, kBytes + more_bytes);
#pragma unroll
    for (int c = 0; c < kColumns; c += 64)
      tma_load(address + kRows * kRowBytes * (c / 64), x.map, full, c, row, head * x.head_step, b * x.batch_step);
  }
};

} // namespace strobe::sm90
