// dQ, dK and dV of attention (FlashAttention-2, algorithm 2) on tensor cores. A block of threads owns a tile of keys and walks over the tiles
// of queries that see some of it:
//
//   S^T = K Q^T, P^T = exp(S^T - LSE)        dP^T = V dO^T, dS^T = P^T (dP^T - D)
//   dV += P^T dO                             dK += dS^T Q                             dQ += dS K, in global memory
//
// Half of the warps have the role on the left, half the one on the right, so that every sum stays in registers, P and dS are operands where
// they lie, and one role multiplies while the other one exponentiates. P goes from left to right through shared memory; dS goes there for
// dQ, which all warps multiply one iteration later, so that the roles meet once an iteration. S is transposed: rows are keys.
#pragma once
#include "../attention/query_tiles.h"
#include "../attention/scores.h"
#include "../ptx/barrier.h"
#include "../tile/copy.h"
#include "../tile/exchange.h"
#include "backward_config.h"
#include "backward_dropout.h"
#include "backward_scores.h"

namespace strobe::mma {

template <BackwardConfig C> struct Backward {
  using Arguments = BackwardArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  static __device__ __forceinline__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    Backward(a, shared).run();
  }

private:
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  static constexpr int kD = C.head_dim, kDv = C.head_dim_v, kTileQ = C.tile_q, kTileK = C.tile_k;
  // A warp's parts, in blocks of 16: keys; queries of S at a time, and of what it multiplies by dO or Q; columns of dK and of dV.
  static constexpr int kKeys = kTileK / C.key_warps / 16, kStep = C.step_q / 16, kSpan = kStep * C.dim_warps, kQueries = kTileQ / 16;
  static constexpr int kColumns = kD / C.dim_warps / 16, kColumnsV = kDv / C.dim_warps / 16;
  static constexpr int kDqRows = kTileQ / C.dq_rows() / 16, kDqColumns = kD / C.dq_columns() / 16;
  // Elements may be hidden in any tile, not in those alone that position masks.
  static constexpr bool kHides = F.mask || F.bias;

  // In shared memory
  static constexpr u32 kV = C.k_bytes(), kQ = kV + C.v_bytes(), kDo = kQ + 2 * C.q_bytes(), kP = kDo + 2 * C.dout_bytes(),
                       kDs = kP + C.p_planes() * C.p_bytes(), kStats = kDs + 2 * C.p_bytes(), kState = kStats + C.stats_bytes();

  using Tiles = QueryTiles<F.blocks != 0, kTileQ>;
  struct __align__(16) Tile { // of queries of a head; -1: there are no more
    i32 head;
    QueryTile queries;
  };
  // What the threads have in common lies in shared memory: registers are short.
  struct State {
    Tile ring[4];               // iteration n's at n % 4
    i32 batch, head_kv, k0, k1; // this block's keys [k0, k1) of the sequence
    Sequence sequence;
    Tiles tiles;
    i32 head; // that tiles is about
  };
  static_assert(sizeof(State) <= C.state_bytes());

  const Arguments &a;
  const Inputs &in;
  State &state;
  u32 shared;
  int thread, warp, role, key_warp, dim_warp; // role 0: P and dV, 1: dS and dK

  __device__ __forceinline__ Backward(const Arguments &a, unsigned char *memory)
      : a(a), in(a.in), state(*(State *)(memory + kState)), shared(shared_address(memory)), thread((int)threadIdx.x), warp(thread / 32),
        role(warp / (C.warps() / 2)), key_warp(warp % C.key_warps), dim_warp(warp / C.key_warps % C.dim_warps) {}

  // By one thread. Bundles of heads run together and share the L2 cache; within one, tiles of the first keys come first: they are the longest.
  __device__ __forceinline__ void choose_keys() const {
    u32 index = blockIdx.x;
    if constexpr (C.deterministic) index = atomicAdd(a.turns, 1u); // a ticket: whatever a block waits for has drawn its own before
    u32 tiles = (u32)div_up(in.seqlen_k, kTileK), heads = (u32)in.batch * in.heads_kv, size = max(1u, (u32)a.bundle);
    u32 bundle = index / (size * tiles), rest = index % (size * tiles), first = bundle * size, n = min(size, heads - first);
    u32 pair = first + rest % n;
    state.batch = (i32)(pair / in.heads_kv), state.head_kv = (i32)(pair % in.heads_kv), state.k0 = (i32)(rest / n) * kTileK;
    state.sequence = in.sequence(state.batch);
    state.k1 = min(state.k0 + kTileK, (i32)state.sequence.band.seqlen_k);
    state.head = state.head_kv * in.group;
    state.tiles = tiles_of(state.head);
  }
  __device__ __forceinline__ Tiles tiles_of(i32 head) const {
    BlockRow row{nullptr, 0, 0};
    if constexpr (F.blocks) row = in.blocks_t.row(state.batch, head, state.k0 / in.blocks_t.row_tokens);
    return Tiles(state.sequence.band, state.k0, state.k1, kTileK, row);
  }
  // By one thread: the tile of iteration n.
  __device__ __forceinline__ void schedule(int n) const {
    Tile &t = state.ring[n % 4];
    i32 heads_end = (state.head_kv + 1) * in.group;
    while (state.head < heads_end && !state.tiles.next(t.queries)) {
      if (++state.head < heads_end) state.tiles = tiles_of(state.head);
    }
    t.head = state.head < heads_end ? state.head : -1;
  }
  __device__ __forceinline__ Tile tile_of(int n) const {
    u32 x[4];
    load_shared(x, shared + kState + n % 4 * (u32)sizeof(Tile));
    return {(i32)x[0], {(i32)x[1], x[2] != 0}};
  }

  template <int kRows, int kColumns>
  __device__ __forceinline__ void load(u32 target, const Operand &x, i32 h, i64 row, i32 rows, i32 columns) const {
    tile::Matrix<const T> m{x.at<const T>(state.batch, h, row, 0), x.stride[2], x.stride[3], rows, columns};
    tile::load<kRows, kColumns, kThreads, C.aligned != 0>(shared + target, m, thread);
  }
  __device__ __forceinline__ void load_keys() const {
    load<kTileK, kD>(0, in.k, state.head_kv, state.sequence.k0 + state.k0, state.k1 - state.k0, in.head_dim);
    load<kTileK, kDv>(kV, in.v, state.head_kv, state.sequence.k0 + state.k0, state.k1 - state.k0, in.head_dim_v);
  }
  __device__ __forceinline__ i32 rows_of(const Tile &t) const { return min(kTileQ, (i32)state.sequence.band.seqlen_q - t.queries.begin); }
  __device__ __forceinline__ void load_queries(const Tile &t, int stage) const {
    i64 row = state.sequence.q0 + t.queries.begin;
    load<kTileQ, kD>(kQ + stage * C.q_bytes(), in.q, t.head, row, rows_of(t), in.head_dim);
    load<kTileQ, kDv>(kDo + stage * C.dout_bytes(), a.dout, t.head, row, rows_of(t), in.head_dim_v);
  }

  // LSE (in exp2's unit; of rows that see nothing and of those that are not there +inf: P = 0) and D of a tile's rows, held by the threads
  // until there is room for them.
  static constexpr int kStatsEach = (int)div_up(2 * kTileQ, kThreads);
  struct Stats {
    float x[kStatsEach];
  };
  __device__ __forceinline__ Stats read_stats(const Tile &t) const {
    Stats s;
#pragma unroll
    for (int k = 0; k < kStatsEach; ++k) {
      int n = thread + k * kThreads, i = n % kTileQ;
      bool lse = n < kTileQ, inside = i < rows_of(t) && n < 2 * kTileQ;
      i64 row = state.sequence.q0 + t.queries.begin + i;
      float x = lse ? -minus_infinity<float>() : 0.0f;
      if (inside) {
        x = lse ? *a.lse.at<const float>(state.batch, t.head, row, 0) * 1.4426950408889634f
                : ((const float *)a.delta)[in.row_index(state.batch, t.head, row)];
        if (lse && x == minus_infinity<float>()) x = -x;
      }
      s.x[k] = x;
    }
    return s;
  }
  __device__ __forceinline__ void write_stats(const Stats &s, int stage) const {
#pragma unroll
    for (int k = 0; k < kStatsEach; ++k) {
      int n = thread + k * kThreads;
      if (2 * kTileQ % kThreads == 0 || n < 2 * kTileQ)
        store_shared(shared + kStats + (stage * 2 * kTileQ + n) * 4, __float_as_uint(s.x[k]));
    }
  }
  // Those of a lane's two queries of block n, half c.
  __device__ __forceinline__ float2 stats(int stage, int which, int n, int c) const {
    u32 address = shared + kStats + ((stage * 2 + which) * kTileQ + 16 * n + tile::lane_column(c, 0)) * 4;
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
    return x;
  }

  // sum (this warp's keys and columns) += x (keys x 16 queries) * block n of queries of y
  template <int kInner, int kN>
  __device__ __forceinline__ void accumulate(Accumulator (&sum)[kKeys][kN], const Left (&x)[kKeys], const Blocks<Right, kInner, true> &Y,
                                             int n) const {
#pragma unroll
    for (int c = 0; c < kN; ++c) {
      Right y = Y.load(16 * n, 16 * c);
#pragma unroll
      for (int m = 0; m < kKeys; ++m) tile::multiply_add<T>(sum[m][c], x[m], y);
    }
  }

  // Where block (m of this warp's keys, n of the tile's queries) lies among those that are handed on.
  __device__ __forceinline__ int block(int m, int n) const { return (key_warp * kKeys + m) * kQueries + n; }
  // Barriers of the warps that share keys: a role's own, if it is several warps; and for P one a span, since who writes it does not wait.
  static constexpr int kSpans = kQueries / kSpan, kBarriers = kSpans + (C.dim_warps > 1 ? 2 : 0);
  static_assert(C.key_warps * kBarriers < 16);
  __device__ __forceinline__ int barrier_of_p(int span) const { return 1 + kBarriers * key_warp + span; }
  __device__ __forceinline__ int barrier_of_role() const { return 1 + kBarriers * key_warp + kSpans + role; }

  // dS^T from dP^T and P^T.
  template <bool kHidden>
  __device__ __forceinline__ void differentiate(Accumulator (&dP)[kKeys][kStep], float factor, int n0, int stage) const {
#pragma unroll
    for (int n = 0; n < kStep; ++n) {
      float2 D[2] = {stats(stage, 1, n0 + n, 0), stats(stage, 1, n0 + n, 1)};
#pragma unroll
      for (int m = 0; m < kKeys; ++m) {
        Left P = tile::take(shared + kP, block(m, n0 + n));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int r = i & 1, c = i >> 1;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float &x = dP[m][n].x[c][2 * r + e], p = tile::unpacked<T>(P.x[i], e);
            if constexpr (F.dropout) {
              x = __float_as_uint(p) >> 31 ? 0.0f : x * factor;
              p = fabsf(p);
            }
            x = p * (x - (e ? D[c].y : D[c].x));
            if (kHidden && p == 0) x = 0; // whatever dP is: what is not seen may be no number
          }
        }
      }
    }
  }

  // P and dV of an iteration.
  __device__ __forceinline__ void left(Accumulator (&dV)[kKeys][kColumnsV], const Scores<F, float> &scores, const BlockDropout<F> &dropout,
                                       int iteration) const {
    int stage = iteration % 2;
    Blocks<Right, kDv, true> dO(shared + kDo + stage * C.dout_bytes(), dim_warp * kColumnsV * 16);
#pragma unroll
    for (int span = 0; span < kQueries; span += kSpan) {
      int n0 = span + dim_warp * kStep;
      Accumulator s[kKeys][kStep], P[kKeys][kStep];
      multiply<T, kD>(s, shared + key_warp * kKeys * 16 * kD * 2, shared + kQ + stage * C.q_bytes() + n0 * 16 * kD * 2);
      Tile t = tile_of(iteration);
      i32 i = t.queries.begin + 16 * n0, j = state.k0 + key_warp * kKeys * 16;
      auto lse = [&](int n, int c) { return stats(stage, 0, n0 + n, c); };
      if (t.queries.masked)
        probabilities<F, true, F.softcap != 0>(s, P, scores, t.head, i, j, state.k1, lse);
      else
        probabilities<F, false, F.softcap != 0>(s, P, scores, t.head, i, j, state.k1, lse);
      if constexpr (F.dropout) {
        dropout.mark(s, i, j, t.head, state.batch);
        if constexpr (F.softcap) dropout.mark(P, i, j, t.head, state.batch);
      }
      Left p[kKeys][kStep];
#pragma unroll
      for (int m = 0; m < kKeys; ++m) {
#pragma unroll
        for (int n = 0; n < kStep; ++n) {
          p[m][n] = tile::rounded<T>(s[m][n]);
          tile::put(shared + kP, block(m, n0 + n), p[m][n]);
          if constexpr (F.softcap) {
            p[m][n] = tile::rounded<T>(P[m][n]);
            if constexpr (C.dim_warps > 1) tile::put(shared + kP + C.p_bytes(), block(m, n0 + n), p[m][n]);
          }
        }
      }
      barrier_arrive(barrier_of_p(span / kSpan), 64 * C.dim_warps);
      if constexpr (C.dim_warps > 1) barrier_sync(barrier_of_role(), 32 * C.dim_warps);
#pragma unroll
      for (int n = 0; n < kSpan; ++n) {
        Left x[kKeys];
#pragma unroll
        for (int m = 0; m < kKeys; ++m) {
          if constexpr (C.dim_warps > 1)
            x[m] = tile::take(shared + kP + (C.p_planes() - 1) * C.p_bytes(), block(m, span + n));
          else
            x[m] = p[m][n];
          if constexpr (F.dropout) x[m] = tile::positive(x[m]);
        }
        accumulate<kDv>(dV, x, dO, span + n);
      }
    }
  }

  // dS and dK of an iteration.
  __device__ __forceinline__ void right(Accumulator (&dK)[kKeys][kColumns], float factor, int iteration) const {
    int stage = iteration % 2;
    Blocks<Right, kD, true> Q(shared + kQ + stage * C.q_bytes(), dim_warp * kColumns * 16);
#pragma unroll
    for (int span = 0; span < kQueries; span += kSpan) {
      int n0 = span + dim_warp * kStep;
      Accumulator s[kKeys][kStep];
      multiply<T, kDv>(s, shared + kV + key_warp * kKeys * 16 * kDv * 2, shared + kDo + stage * C.dout_bytes() + n0 * 16 * kDv * 2);
      barrier_sync(barrier_of_p(span / kSpan), 64 * C.dim_warps);
      if (kHides || tile_of(iteration).queries.masked)
        differentiate<true>(s, factor, n0, stage);
      else
        differentiate<false>(s, factor, n0, stage);
      Left dS[kKeys][kStep];
#pragma unroll
      for (int m = 0; m < kKeys; ++m) {
#pragma unroll
        for (int n = 0; n < kStep; ++n) {
          dS[m][n] = tile::rounded<T>(s[m][n]);
          tile::put_parts(shared + kDs + stage * C.p_bytes(), block(m, n0 + n), dS[m][n]);
        }
      }
      if constexpr (C.dim_warps > 1) barrier_sync(barrier_of_role(), 32 * C.dim_warps);
#pragma unroll
      for (int n = 0; n < kSpan; ++n) {
        Left x[kKeys];
#pragma unroll
        for (int m = 0; m < kKeys; ++m)
          x[m] = C.dim_warps > 1 ? tile::take_parts(shared + kDs + stage * C.p_bytes(), block(m, span + n)) : dS[m][n % kStep];
        accumulate<kD>(dK, x, Q, span + n);
      }
    }
  }

  // Floats of a row of dq_sum. Within 16 columns c = 8n + 2t + e lies at 4t + 2n + e: what a lane holds, side by side.
  static __device__ __forceinline__ i32 dq_pitch(i32 head_dim) { return (head_dim + 31) / 32 * 32; }

  // Adds an iteration's dQ (without the scale) to the rows of its tile.
  __device__ __forceinline__ void add_dq(int iteration) const {
    int stage = iteration % 2;
    if (!a.dq_sum || warp >= C.dq_rows() * C.dq_columns()) return;
    int row = warp / C.dq_columns() * kDqRows * 16, column = warp % C.dq_columns() * kDqColumns * 16;
    Accumulator dQ[kDqRows][kDqColumns] = {};
    Blocks<Right, kD, true> K(shared, column);
#pragma unroll
    for (int k = 0; k < kTileK / 16; ++k) {
      Left dS[kDqRows];
#pragma unroll
      for (int m = 0; m < kDqRows; ++m)
        dS[m] = tile::take_parts_transposed(shared + kDs + stage * C.p_bytes() + row / 16 * tile::kBlockBytes, k * kQueries + m);
#pragma unroll
      for (int c = 0; c < kDqColumns; ++c) {
        Right y = K.load(16 * k, 16 * c);
#pragma unroll
        for (int m = 0; m < kDqRows; ++m) tile::multiply_add<T>(dQ[m][c], dS[m], y);
      }
    }
    Tile t = tile_of(iteration);
    u32 *turn = nullptr;
    u32 before = 0;
    if constexpr (C.deterministic) {
      turn = a.turns + 1 + ((state.batch * in.heads + t.head) * C.query_tiles(in.seqlen_q) + t.queries.begin / kTileQ) * C.warps() + warp;
      before = key_tiles_before(t);
      if (tile::lane_id() == 0) await(turn, before);
      __syncwarp();
    }
    int rows = rows_of(t) - row - tile::lane_row(0);
    i64 first = in.row_index(state.batch, t.head, state.sequence.q0 + t.queries.begin + row + tile::lane_row(0));
    float *target = a.dq_sum + first * dq_pitch(in.head_dim) + column + 4 * (tile::lane_id() & 3);
#pragma unroll
    for (int m = 0; m < kDqRows; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (16 * m + 8 * r >= rows) continue;
#pragma unroll
        for (int c = 0; c < kDqColumns; ++c) {
          const Accumulator &x = dQ[m][c];
          if (column + 16 * c < dq_pitch(in.head_dim))
            add_global(target + (16 * m + 8 * r) * (i64)dq_pitch(in.head_dim) + 16 * c, x.x[0][2 * r], x.x[0][2 * r + 1], x.x[1][2 * r],
                       x.x[1][2 * r + 1]);
        }
      }
    }
    if constexpr (C.deterministic) {
      __syncwarp();
      if (tile::lane_id() == 0) store_release(turn, before + 1);
    }
  }

  // How many tiles of smaller keys add to dQ of these queries.
  __device__ __forceinline__ u32 key_tiles_before(const Tile &t) const {
    const Band &band = state.sequence.band;
    i64 first = max(0ll, band.low + t.queries.begin) / kTileK, own = state.k0 / kTileK;
    if constexpr (F.blocks) {
      i64 each = in.blocks.column_tokens / kTileK; // key tiles of a block
      BlockRow row = in.blocks.row(state.batch, t.head, t.queries.begin / in.blocks.row_tokens);
      i64 entry = entries_below(row, first / each), kept = entries_below(row, own / each) - entry;
      bool cut = entry < row.count && row.cols[entry] == first / each;
      return (u32)(kept * each + own % each - (cut ? first % each : 0));
    }
    return (u32)(own - first);
  }
  static __device__ __forceinline__ i64 entries_below(const BlockRow &row, i64 block) {
    i64 low = 0, high = row.count;
    while (low < high) {
      i64 middle = (low + high) / 2;
      if (row.cols[middle] < block)
        low = middle + 1;
      else
        high = middle;
    }
    return low;
  }
  // Block lists come from the caller: if they contradict one another, the wait ends all the same.
  static __device__ __forceinline__ void await(const u32 *turn, u32 before) {
    for (i64 tries = 0; load_acquire(turn) != before && (!F.blocks || tries < 1 << 24); ++tries) {}
  }

  // Writes dK or dV: x, rounded, through what was K's or V's place.
  template <int kInner, int kN>
  __device__ __forceinline__ void store(const Operand &out, Accumulator (&x)[kKeys][kN], float factor, u32 place, i32 columns) const {
#pragma unroll
    for (int m = 0; m < kKeys; ++m) {
#pragma unroll
      for (int c = 0; c < kN; ++c) {
#pragma unroll
        for (int e = 0; e < 8; ++e) x[m][c].x[e / 4][e % 4] *= factor;
        tile::store<kInner>(shared + place, (key_warp * kKeys + m) * 16, (dim_warp * kN + c) * 16, tile::rounded<T>(x[m][c]));
      }
    }
    barrier_sync(1 + role, kThreads / 2);
    if (!out) return;
    tile::Matrix<T> m{out.at<T>(state.batch, state.head_kv, state.sequence.k0 + state.k0, 0), out.stride[2], out.stride[3],
                      state.k1 - state.k0, columns};
    tile::store<kTileK, kInner, kThreads / 2, C.aligned != 0>(m, shared + place, thread % (kThreads / 2));
  }

  // The whole of a role.
  template <int kRole> __device__ __forceinline__ void walk() const {
    Accumulator sum[kKeys][kRole == 0 ? kColumnsV : kColumns] = {}; // dV or dK
    Scores<F, float> scores(in, state.sequence, state.batch);
    BlockDropout<F> dropout{Dropout<F>(in)};
    float factor = dropout.dropout.factor();

    load_keys();
    if (tile_of(0).head >= 0) {
      load_queries(tile_of(0), 0);
      write_stats(read_stats(tile_of(0)), 0);
    }
    cp_async_commit();
    int n = 0;
    for (; tile_of(n).head >= 0; ++n) {
      cp_async_wait<0>();
      barrier_sync(0, kThreads);
      Stats stats;
      bool more = tile_of(n + 1).head >= 0;
      if (more) {
        load_queries(tile_of(n + 1), (n + 1) % 2);
        stats = read_stats(tile_of(n + 1));
      }
      cp_async_commit();
      if constexpr (kRole == 0) {
        left(sum, scores, dropout, n);
        if (n > 0) add_dq(n - 1);
      } else {
        if (thread == kThreads / 2) schedule(n + 2);
        if (n > 0) add_dq(n - 1);
        right(sum, factor, n);
      }
      if (more) write_stats(stats, (n + 1) % 2);
    }
    cp_async_wait<0>();
    barrier_sync(0, kThreads);
    if (n > 0) add_dq(n - 1);
    barrier_sync(0, kThreads);
    if constexpr (kRole == 0)
      store<kDv>(a.dv, sum, factor, kV, in.head_dim_v);
    else
      store<kD>(a.dk, sum, (float)in.scale, 0, in.head_dim);
  }

  __device__ __forceinline__ void run() const {
    if (thread == 0) {
      choose_keys();
      schedule(0);
      schedule(1);
    }
    __syncthreads();
    if (state.k0 >= state.k1) return;
    if (role == 0)
      walk<0>();
    else
      walk<1>();
  }
};

} // namespace strobe::mma
