// A thread block of the backward on mma.sync: its tile of keys, the tiles of queries that it walks over, and its loads of keys and queries
// into shared memory. The loop is in backward.h.
#pragma once
#include "../../attention/dq_sum.h"
#include "../../device/keys.h"
#include "../../device/nonfinite.h"
#include "../../device/part_tiles.h"
#include "../../device/tile_order.h"
#include "../../ptx/barrier.h"
#include "../../tile/copy.h"
#include "config.h"

namespace strobe::mma {

using tile::Accumulator;
using tile::Blocks;
using tile::Left;
using tile::Right;

// What the block's state has only in a part: the number of the key tile within the sequence, and where the rows of a query tile lie.
template <bool kPart> struct NumberOfTile {};
template <> struct NumberOfTile<true> {
  i32 number;
};
template <bool kPart> struct ShiftOfTile {};
template <> struct ShiftOfTile<true> {
  i32 shift; // row = position + shift
};

template <BackwardConfig C> struct BackwardBlock {
  using Arguments = BackwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  static constexpr int kThreads = C.threads(), kD = C.head_dim, kDv = C.head_dim_v, kTileQ = C.tile_q, kTileK = C.tile_k;
  // Counts of 16x16 blocks. kKeys: a warp's keys. kStep: the queries for which a warp computes S at a time. kSpan: the queries that it
  // multiplies by dO or Q at a time. The others: the tile's queries, and a warp's columns of dK and of dV.
  static constexpr int kKeys = kTileK / C.key_warps / 16, kStep = C.step_q / 16, kSpan = C.repeats() ? kStep : kStep * C.dim_warps,
                       kQueries = kTileQ / 16;
  static constexpr int kColumns = kD / C.dim_warps / 16, kColumnsV = kDv / C.dim_warps / 16;
  static constexpr int kDqRows = kTileQ / C.dq_rows() / 16, kDqColumns = kD / C.dq_columns() / 16;
  // Whether any tile may have hidden elements, and not only tiles that are masked by position.
  static constexpr bool kHides = F.hides();

  // Offsets in shared memory.
  static constexpr u32 kV = C.k_bytes(), kQ = kV + C.v_bytes(), kDo = kQ + 2 * C.q_bytes(), kP = kDo + 2 * C.dout_bytes(),
                       kDs = kP + C.p_planes() * C.p_bytes(), kStats = kDs + 2 * C.p_bytes(), kState = kStats + C.stats_bytes();

  using Tiles = typename Either<F.part != 0, PartQueries<F.blocks != 0, kTileQ>, QueryTiles<F.blocks != 0, kTileQ>>::type;
  // Where the rows of a head of the sequence begin.
  struct Head {
    const T *q, *dout;
    const float *lse, *delta;
    i64 query_tile; // the number of the head's first query tile
  };
  struct __align__(16) Tile : ShiftOfTile<F.part != 0> { // a tile of queries
    i32 head;                                            // -1: there are no more tiles
    QueryTile queries;
    i32 rows; // how many rows exist
    Head at;
  };
  // State that the threads share lies in shared memory: registers are scarce.
  struct State : NumberOfTile<F.part != 0> {
    Tile ring[4];               // iteration n uses n % 4
    i32 batch, head_kv, k0, k1; // this block's keys [k0, k1) of the sequence
    Sequence sequence;
    i32 head; // the head that the following members belong to
    Tiles tiles;
    Head at;
  };
  static_assert(sizeof(State) <= C.state_bytes());

  const Arguments &a;
  const Inputs &in;
  State &state;
  u32 shared;
  int thread, warp, role, key_warp, dim_warp; // role 0: P and dV, 1: dS and dK

  __device__ __forceinline__ BackwardBlock(const Arguments &a, unsigned char *memory)
      : a(a), in(a.in), state(*(State *)(memory + kState)), shared(shared_address(memory)), thread((int)threadIdx.x), warp(thread / 32),
        role(warp / (C.warps() / 2)), key_warp(warp % C.key_warps), dim_warp(warp / C.key_warps % C.dim_warps) {}

  __device__ __forceinline__ void choose_keys() const {
    strobe::choose_keys<F, C.deterministic, kThreads, kTileK>(state, a, thread, [&] {
      take_head(state.head_kv * in.group);
      schedule(0);
      schedule(1);
    });
  }
  __device__ __forceinline__ void take_head(i32 head) const {
    if (!strobe::take_head<F, kTileK>(state, in, head)) return;
    i64 b = state.batch, q0 = state.sequence.q0;
    state.at = {in.q.at<const T>(b, head, q0, 0), a.dout.at<const T>(b, head, q0, 0), a.lse.at<const float>(b, head, q0, 0),
                (const float *)a.delta + in.row_index(b, head, q0), first_tile(b, head)};
  }
  // Finds the tile of iteration n; one thread calls it.
  __device__ __forceinline__ void schedule(int n) const {
    Tile &t = state.ring[n % 4];
    if constexpr (F.part) {
      schedule_part(t);
    } else {
      next_queries<kTileQ>(state, in, t, [&](i32 head) { take_head(head); });
      t.at = state.at;
    }
  }
  // schedule() for a part: its tiles have numbers of their own, and rows that differ from their positions.
  template <class TileOfPart> __device__ __forceinline__ void schedule_part(TileOfPart &t) const {
    const i32 heads_end = (state.head_kv + 1) * in.group;
    PartQueryTile tile = {};
    while (state.head < heads_end && !state.tiles.next(tile)) take_head(state.head + 1);
    t.head = state.head < heads_end ? state.head : -1;
    t.queries = {tile.begin, tile.masked}, t.rows = tile.end - tile.begin;
    t.at = state.at;
    t.at.q += tile.shift * in.q.stride[2], t.at.dout += tile.shift * a.dout.stride[2], t.at.lse += tile.shift * a.lse.stride[2];
    t.at.delta += tile.shift, t.at.query_tile += tile.number;
    if constexpr (F.part) t.shift = tile.shift;
  }
  __device__ __forceinline__ i64 first_tile(i64 b, i64 head) const {
    if constexpr (F.part) return first_part_tile(in, b, head, kTileQ, F.blocks != 0);
    return first_query_tile(in, b, head, kTileQ);
  }
  // The tile's number in dq_sum and in `turns`.
  static __device__ __forceinline__ i64 number_of(const Tile &t) {
    return F.part ? t.at.query_tile : t.at.query_tile + t.queries.begin / kTileQ;
  }
  __device__ __forceinline__ const Tile &tile_of(int n) const {
    return state.ring[computed_here(n) % 4]; // computed_here keeps the address out of registers
  }

  __device__ __forceinline__ void load_keys() const {
    tile::load<kTileK, kD, kThreads, C.aligned != 0>(
        shared, k_of<T>(in, state.sequence, state.batch, state.head_kv).rows(state.k0, state.k1), thread);
    tile::load<kTileK, kDv, kThreads, C.aligned != 0>(
        shared + kV, v_of<T>(in, state.sequence, state.batch, state.head_kv).rows(state.k0, state.k1), thread);
  }
  // How many threads load queries: those of the right role.
  static constexpr int kLoaders = kThreads / 2;
  // Where registers are scarce, the thread's number is read again each time, so that no value derived from it stays in a register.
  static constexpr bool kShort = kD > 128 || kDv > 128 || F.by_element() || kTileK > 128;
  __device__ __forceinline__ int loader() const { return (kShort ? thread_index() : thread) % kLoaders; }
  template <int kColumns>
  __device__ __forceinline__ void load_queries(u32 target, const T *rows, const Operand &x, const Tile &t, i32 columns) const {
    int thread = loader();
    i64 stride = x.stride[2];
    rows += t.queries.begin * stride;
    tile::load<kTileQ, kColumns, kLoaders, C.aligned != 0>(shared + target,
                                                           tile::Matrix<const T>{rows, stride, x.stride[3], t.rows, columns}, thread);
  }
  __device__ __forceinline__ void load_queries(const Tile &t, int stage) const {
    load_queries<kD>(kQ + stage * C.q_bytes(), t.at.q, in.q, t, in.head_dim);
    load_queries<kDv>(kDo + stage * C.dout_bytes(), t.at.dout, a.dout, t, in.head_dim_v);
  }

  // Whether Q or dO of a tile with hidden elements has a number that is not finite. suspect: LSE or D has such a number. A row of Q or dO
  // that has one makes LSE or D not finite too, unless the row sees only its sink.
  __device__ __forceinline__ bool queries_nonfinite(const Tile &t, int stage, bool suspect) const {
    if (!(kHides || t.queries.masked) || !(suspect || in.sinks)) return false;
    return barrier_any(any_nonfinite<T>(shared + kQ + stage * C.q_bytes(), C.q_bytes(), thread, kThreads) ||
                           any_nonfinite<T>(shared + kDo + stage * C.dout_bytes(), C.dout_bytes(), thread, kThreads),
                       kThreads);
  }

  // A tile's LSE and -D and, with a bias, LSE's correction. Threads hold them until there is room in shared memory. For rows that see no
  // key or do not exist, LSE is +inf, so that P is 0.
  static constexpr int kStatsEach = (int)div_up((C.stats() - 1) * kTileQ, kLoaders);
  struct Stats {
    float x[kStatsEach];
  };
  __device__ __forceinline__ Stats read_stats(const Tile &t) const {
    Stats s;
    int thread = loader();
#pragma unroll
    for (int k = 0; k < kStatsEach; ++k) {
      int n = thread + k * kLoaders, i = n % kTileQ, row = t.queries.begin + i;
      float &x = s.x[k];
      x = 0;
      if (n < kTileQ) {
        x = i < t.rows ? t.at.lse[row * a.lse.stride[2]] * (F.unbounded() ? 1.0f : kLog2e<float>) : minus_infinity<float>();
        if (x == minus_infinity<float>()) x = -x;
      } else if (i < t.rows) {
        if (n < 2 * kTileQ) x = -t.at.delta[row];
        if (F.unbounded() && n >= 2 * kTileQ && n < 3 * kTileQ) x = t.at.delta[in.rows() + row] * kLog2e<float>;
      }
    }
    return s;
  }
  static constexpr int kStatsBytes = C.stats_bytes() / 2; // per stage
  // Stores LSE and D in the order in which lanes read them. For each 16 queries: LSE of 2t, 2t + 1, 2t + 8, 2t + 9 side by side; LSE's
  // correction in the same order; -D of 2t and 2t + 1 twice, for the two rows of an accumulator. Returns whether a number of this thread is
  // not finite.
  __device__ __forceinline__ bool write_stats(const Stats &s, int iteration) const {
    int thread = loader(), stage = iteration % 2;
    bool suspect = false;
#pragma unroll
    for (int k = 0; k < kStatsEach; ++k) {
      int n = thread + k * kLoaders, i = n % kTileQ, c = i / 8 % 2, t = i % 8 / 2, e = i % 2;
      u32 base = shared + kStats + stage * kStatsBytes, x = __float_as_uint(s.x[k]);
      suspect |= (x & 0x7F800000) == 0x7F800000;
      if (n < kTileQ || (F.unbounded() && n >= 2 * kTileQ && n < 3 * kTileQ)) {
        store_shared(base + (n < kTileQ ? 0 : 12 * kTileQ) + (i / 16 * 16 + 4 * t + 2 * c + e) * 4, x);
      } else if (n < 2 * kTileQ) {
        u32 target = base + (kTileQ + i / 8 * 16 + 4 * t + e) * 4;
        store_shared(target, x);
        store_shared(target + 8, x);
      }
    }
    return suspect;
  }
  __device__ __forceinline__ u32 lse_of(int stage, int n) const {
    return shared + kStats + stage * kStatsBytes + n * 64 + (tile::lane_id() & 3) * 16;
  }
  __device__ __forceinline__ u32 delta_of(int stage, int n) const { return lse_of(stage, 2 * n) + kTileQ * 4; }

  // LSE of the lane's four queries of a 16x16 block. LSE's correction is rarely used, so it is loaded only where it is used.
  struct StagedLse {
    u32 at;
    float lse_[4];
    __device__ __forceinline__ explicit StagedLse(u32 at) : at(at) { load_shared<0>(lse_, at); }
    __device__ __forceinline__ float lse(int c, int e) const { return lse_[2 * c + e]; }
    __device__ __forceinline__ float correction(int c, int e) const { return load_shared_float(at + 12 * kTileQ + 4 * (2 * c + e)); }
  };
};

} // namespace strobe::mma
