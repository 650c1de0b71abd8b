// A thread block of the backward in FP32: its tile of keys, the query tiles that it walks over, and its loads of keys and queries into
// shared memory. The loop is in backward.h.
#pragma once
#include "../attention/dq_sum.h"
#include "../device/keys.h"
#include "../device/query_tiles.h"
#include "../device/scores.h"
#include "../device/tile_order.h"
#include "../tile/tf32_multiply.h"
#include "config.h"

namespace strobe::tf32 {

using namespace tile::tf32;

template <Config C> struct BackwardBlock {
  using Arguments = BackwardArguments;
  static constexpr Features F = C.features;
  static constexpr int kThreads = C.threads(), kD = C.head_dim, kDv = C.head_dim_v, kTileQ = C.tile_q, kTileK = C.tile_k;
  static constexpr int kM = kTileK / C.warps / 16, kN = kTileQ / 16; // in 16x16 blocks: a warp's keys, and the tile's queries
  static constexpr int kBlocks = kM * (kD + kDv) > 192 ? 1 : 2;      // blocks of queries that are multiplied into dK and dV at a time
  // dK and dV are summed in segments of this many tiles (2048 queries), because longer sums round more.
  static constexpr int kSegment = 2048 / kTileQ;
  // A segment whose dK or dV is not finite is walked again in segments of this many tiles. Each product is then a separate multiply-add, so
  // that zeros of P and dS can be left out.
  static constexpr int kRepeatSegment = 2;
  static_assert(kTileK % (16 * C.warps) == 0 && kTileK % 32 == 0 && kTileQ % 32 == 0 && kSegment % kRepeatSegment == 0);

  // Offsets in shared memory
  static constexpr u32 kV = 4 * kTileK * kD, kQ = kV + 4 * kTileK * kDv, kDo = kQ + 4 * kTileQ * kD, kDs = kDo + 4 * kTileQ * kDv,
                       kStats = kDs + 4 * kTileQ * C.ds_pitch(), kState = kStats + 12 * kTileQ;
  static_assert(kState + C.state_bytes() == C.backward_shared_bytes());

  using Tiles = QueryTiles<F.blocks != 0, kTileQ>;
  struct Tile { // a tile of queries
    i32 head;   // -1: there are no more tiles; below -1: no more in this segment
    QueryTile queries;
    i32 rows; // how many rows exist
  };
  struct Position {
    i32 head; // the head that `tiles` belongs to
    Tiles tiles;
    Tile tile; // the next one
  };
  // State that the threads share lies in shared memory: registers are scarce.
  struct State {
    Tile ring[2];               // iteration n uses n % 2
    i32 batch, head_kv, k0, k1; // this block's keys [k0, k1) of the sequence
    Sequence sequence;
    i32 head; // the head that `tiles` belongs to
    Tiles tiles;
    Position begin; // where the segment begins
    i32 k_finite;
    i32 walked;       // tiles of the last segment
    i32 repeat;       // the last segment is repeated, because dO or Q is not finite
    i32 repeats_left; // how many tiles from here on are walked for the second time
    i32 segment;      // the number of the segment
  };
  static_assert(sizeof(State) <= C.state_bytes());

  const Arguments &a;
  const Inputs &in;
  __device__ __forceinline__ explicit BackwardBlock(const Arguments &a) : a(a), in(a.in) {}

  static __device__ __forceinline__ State &shared_state() { return *(State *)(shared_memory() + kState); }
  static __device__ __forceinline__ u32 shared(u32 offset) { return shared_address(shared_memory()) + offset; }
  static __device__ __forceinline__ int first_key() { return thread_index() / 32 * kM * 16; } // first key of this warp, within the tile

  __device__ __forceinline__ void choose_keys() const {
    strobe::choose_keys<F, C.deterministic, kThreads, kTileK>(shared_state(), a, (int)threadIdx.x, [&] {
      take_head(shared_state().head_kv * in.group);
      find(0);
    });
  }
  __device__ __forceinline__ void take_head(i32 head) const { strobe::take_head<F, kTileK>(shared_state(), in, head); }
  // Loads the tile of iteration n.
  __device__ __forceinline__ void find(int n) const {
    next_queries<kTileQ>(shared_state(), in, shared_state().ring[n % 2], [&](i32 head) { take_head(head); });
  }

  template <int kRows, int kColumns> __device__ __forceinline__ void load_tile(u32 target, const tile::Matrix<const float> &m) const {
    tile::tf32::load<kRows, kColumns, kThreads, C.aligned != 0>(shared(target), m, thread_index());
  }
  __device__ __forceinline__ void load_keys() const {
    const State &state = shared_state();
    load_tile<kTileK, kD>(0, k_of<float>(in, state.sequence, state.batch, state.head_kv).rows(state.k0, state.k1));
    load_tile<kTileK, kDv>(kV, v_of<float>(in, state.sequence, state.batch, state.head_kv).rows(state.k0, state.k1));
  }
  __device__ __forceinline__ tile::Matrix<const float> queries(const Operand &x, const Tile &t, i64 row, i32 columns) const {
    return {x.at<const float>(shared_state().batch, t.head, row, 0), x.stride[2], x.stride[3], t.rows, columns};
  }
  // Loads LSE, D and LSE's correction. LSE is +inf, so that P is 0, for rows that see no key and for rows that do not exist.
  __device__ __forceinline__ void load_queries(const Tile &t) const {
    i64 row = shared_state().sequence.q0 + t.queries.begin;
    load_tile<kTileQ, kD>(kQ, queries(in.q, t, row, in.head_dim));
    load_tile<kTileQ, kDv>(kDo, queries(a.dout, t, row, in.head_dim_v));
    for (int i = thread_index(); i < kTileQ; i += kThreads) {
      float lse = minus_infinity<float>(), D = 0, correction = 0;
      if (i < t.rows) {
        const float *delta = (const float *)a.delta + in.row_index(shared_state().batch, t.head, row + i);
        lse = *a.lse.at<const float>(shared_state().batch, t.head, row + i, 0);
        D = delta[0], correction = delta[in.rows()];
      }
      if (lse == minus_infinity<float>()) lse = -lse;
      store_shared(shared(kStats) + 4 * i, __float_as_uint(lse));
      store_shared(shared(kStats) + 4 * (kTileQ + i), __float_as_uint(D));
      store_shared(shared(kStats) + 4 * (2 * kTileQ + i), __float_as_uint(correction * kLog2e<float>));
    }
  }
  // LSE (which = 0), D (1), or LSE's correction in exp2's unit (2), of the query in this lane's column (c, e) of block n.
  __device__ __forceinline__ float statistic(int which, int n, int c, int e) const {
    return load_shared_float(shared(kStats) + 4 * (which * kTileQ + 16 * n + tile::lane_column(c, e)));
  }
};

} // namespace strobe::tf32
