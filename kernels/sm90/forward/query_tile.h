// The forward's main loop: a warpgroup walks over the tiles of keys for its 64 rows.
#pragma once
#include "epilogue.h"
#include "nonfinite.h"
#include "tile_softmax.h"

namespace strobe::sm90 {

template <Config C> struct QueryTile {
  static constexpr Features F = C.features;
  Warpgroup<C> &group;
  const Item &item;
  TileSoftmax<C> softmax;
  // The keys that some query of this warpgroup sees by position.
  const BasicRange<i32> visible;
  Tile t; // the tile whose scores are computed

  __device__ __forceinline__ QueryTile(Warpgroup<C> &group, const Item &item)
      : group(group), item(item), softmax(group, item),
        visible(softmax.q < softmax.scores.seqlen_q
                    ? narrow(softmax.sequence.band)
                          .keys_any(softmax.q, min(softmax.q + queries_of_warpgroup<C>(group.a), softmax.scores.seqlen_q))
                    : BasicRange<i32>{0, 0}) {}

  __device__ __forceinline__ void compute() {
    if constexpr (C.repeats_chunks()) softmax.restart();
    group.O.clear();
    const bool turn = find_first_tile();
    const bool any = sees();
    softmax.given.mask.fetch(t.begin);
    if constexpr (C.walks_chunks()) {
      walk_chunks(turn);
    } else {
      if (any) {
        walk(turn);
        last_p_v();
      } else {
        release_q(true);
      }
      if (!sees()) drain(turn || any);
      store_results(group, item, softmax, true, true, {true, true});
    }
    if (!C.repeats_chunks() && item.kind() != kFast) add_nonfinite(group, item, softmax.dropout.dropout);
  }
  // Walks from the first visible tile on in chunks of keys, each with a softmax of its own.
  __device__ __forceinline__ void walk_chunks(bool turn) {
    const bool any = sees();
    for (bool first = true;; first = false) {
      if (any) walk(turn);
      bool last = true;
      if (any && t.last == Tile::kLastOfChunk) t = group.wait_tile(), last = !sees();
      if (last) release_q(!any);
      if (any) p_v();
      if (last && !sees()) drain(turn || any);
      store_results(group, item, softmax, first, last, {true, true});
      if (last) return;
      group.O.clear();
      softmax.restart();
      softmax.given.mask.fetch(t.begin);
      turn = true;
    }
  }
  // Walks over each chunk of keys twice: for all rows, and then, lagging, for the rows that were not finite.
  __device__ __forceinline__ void compute_safely() {
    bool failed[2] = {}, first = true, repeats = false, turn = false; // which rows failed; in the repetition: which rows did not
    for (;;) {
      group.O.clear();
      softmax.restart(repeats);
      for (t = group.wait_tile(); !sees() && !t.last; turn = true) {
        group.skip_tile(turn);
        t = group.wait_tile();
      }
      if (sees()) {
        softmax.given.mask.fetch(t.begin);
        walk(turn);
        p_v();
        turn = true;
      }
      if (!sees()) { // then the warpgroup sees none of the following tiles either
        group.skip_tile(turn);
        turn = true;
        while (!t.last) {
          t = group.wait_tile();
          group.skip_tile(true);
        }
      }
      const bool end = t.last == Tile::kLast, last = t.last != Tile::kLastOfChunk;
      if (end) release_q(true);
      for (int r = 0; r < 2; ++r) failed[r] = repeats ? !failed[r] : !finite(r);
      store_results(group, item, softmax, first, last, {!failed[0], !failed[1]});
      if (end) break;
      if (repeats) first = false;
      repeats = !repeats;
    }
    add_nonfinite(group, item, softmax.dropout.dropout);
  }
  // Whether row r of a lane is finite, including the columns that other lanes hold.
  __device__ __forceinline__ bool finite(int r) const {
    float zero = tile::row_sum(softmax.running.l[r]) * 0.0f;
#pragma unroll
    for (int n = 0; n < C.head_dim_v / 4; ++n) zero = __fmaf_rn(group.O.x[n / 2 * 4 + 2 * r + n % 2], 0.0f, zero);
    return tile::row_max(zero == 0 ? 0.0f : 1.0f) == 0;
  }

  __device__ __forceinline__ bool is_last() const { return C.walks_chunks() ? t.last == Tile::kLast : t.last; }
  __device__ __forceinline__ bool sees() const { return t.begin < visible.end && t.end > visible.begin; }

  // Skips tiles that are not visible. Returns whether the tile found must wait for its turn; all tiles of an item except the first must.
  __device__ __forceinline__ bool find_first_tile() {
    t = group.wait_tile();
    bool turn = false;
    while (!sees() && !is_last()) {
      group.skip_tile(turn);
      turn = true;
      t = group.wait_tile();
    }
    return turn;
  }
  // Walks from this tile on over all visible tiles, except for the last tile's O += P V.
  __device__ __forceinline__ void walk(bool turn) {
    bool more = first_tile(turn);
#pragma unroll 1
    while (more) more = steady_step();
  }
  // S = Q K^T, P = softmax(S). Like steady_step, returns whether another tile must be computed.
  __device__ __forceinline__ bool first_tile(bool turn) {
    softmax.fetch(t);
    if (turn) group.wait_turn();
    group.begin_q_k();
    if (turn) group.pass_turn();
    wait_for<0>(group.S);
    take_k();
    softmax.exponentiate(t, group.v);
    leave_bias();
    softmax.round(group.P);
    return next_tile();
  }
  // S = Q K^T of this tile; then O += P V of the previous tile, while P = softmax(S) of this tile is computed.
  __device__ __forceinline__ bool steady_step() {
    softmax.fetch(t);
    group.wait_turn();
    group.begin_q_k();
    group.begin_p_v();
    group.pass_turn();
    wait_for<1>(group.S);
    take_k();
    const bool followed = softmax.follows;
    softmax.exponentiate(t, group.v.next());
    leave_bias();
    group.S.done(); // makes the compiler wait for P V only after the softmax
    const bool more = next_tile();
    group.end_p_v();
    group.release_v();
    if constexpr (C.eight_bits) softmax.promote();
    softmax.round(group.P);
    if (followed && !C.eight_bits) softmax.rescale(group.O);
    return more;
  }
  // O += P V of the last visible tile.
  __device__ __forceinline__ void last_p_v() {
    release_q(false);
    p_v();
  }
  __device__ __forceinline__ void p_v() {
    group.begin_p_v();
    group.end_p_v();
    group.release_v();
    if constexpr (C.eight_bits) softmax.promote();
  }
  // Skips this tile, which is not visible, and the following ones.
  __device__ __forceinline__ void drain(bool turn) {
    group.skip_tile(turn);
    while (!is_last()) {
      t = group.wait_tile();
      group.skip_tile(true);
    }
  }

  // Called when S is in registers. Frees the stage of K, unless a bias lies there too.
  __device__ __forceinline__ void take_k() {
    if constexpr (C.eight_bits) softmax.factors.multiply(group.S.x, group.shared.scales(group.k.index));
    softmax.given.bias.begin(group.k.index);
    if constexpr (!Given<C, typename TileSoftmax<C>::Score>::kBias) group.release_k();
  }
  __device__ __forceinline__ void leave_bias() {
    if constexpr (!Given<C, typename TileSoftmax<C>::Score>::kBias) return;
    __syncwarp();
    group.release_k();
  }
  __device__ __forceinline__ void release_q(bool apart) const {
    if constexpr (!C.q_in_registers) {
      if (apart) __syncwarp();
      group.release(group.shared.q_empty(group.w));
    }
  }
  // Moves t to the next tile, if there is one. Returns whether that tile must be computed.
  __device__ __forceinline__ bool next_tile() {
    if (t.last) return false;
    softmax.watch(t);
    t = group.wait_tile(softmax.never());
    softmax.given.mask.fetch(t.begin);
    return sees();
  }
};

} // namespace strobe::sm90
