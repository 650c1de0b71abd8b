// dQ, dK and dV of attention (FlashAttention-2, algorithm 2) on tensor cores. A block of threads owns a tile of keys and walks over the
// tiles of queries that see some of it:
//
//   S^T = K Q^T, P^T = exp(S^T - LSE)        dP^T = V dO^T, dS^T = P^T (dP^T - D)
//   dV += P^T dO                             dK += dS^T Q                             dQ += dS K, in global memory
//
// Half of the warps have the role on the left, half the one on the right, so that every sum stays in registers, P and dS are operands where
// they lie, and one role multiplies while the other one exponentiates. P goes from left to right through shared memory; dS goes there for
// dQ, which all warps multiply one iteration later, so that the roles meet once an iteration. S is transposed: rows are keys.
#pragma once
#include "../../attention/dq_sum.h"
#include "../../device/key_major_dropout.h"
#include "../../device/nonfinite.h"
#include "../../device/probabilities.h"
#include "../../device/query_tiles.h"
#include "../../device/scores.h"
#include "../../device/tile_order.h"
#include "../../device/turns.h"
#include "../../ptx/barrier.h"
#include "../../tile/copy.h"
#include "../../tile/exchange.h"
#include "../../tile/multiply.h"
#include "config.h"

namespace strobe::mma {

using tile::Accumulator;
using tile::Blocks;
using tile::Left;
using tile::Right;

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
  // Where the rows of a head of the sequence begin.
  struct Head {
    const T *q, *dout;
    const float *lse, *delta;
    i64 query_tile; // its first one's number
  };
  struct __align__(16) Tile { // of queries
    i32 head;                 // -1: there are no more
    QueryTile queries;
    i32 rows; // that are there
    Head at;
  };
  // What the threads have in common lies in shared memory: registers are short.
  struct State {
    Tile ring[4];               // iteration n's at n % 4
    i32 batch, head_kv, k0, k1; // this block's keys [k0, k1) of the sequence
    Sequence sequence;
    i32 head; // that the following are about
    Tiles tiles;
    Head at;
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

  // The longest tiles come first, where lists of blocks say which. (In turns it must stay the first keys: they are waited for.)
  __device__ __forceinline__ void choose_keys() const {
    if (thread == 0) take_keys<C.deterministic, kTileK>(state, a);
    __syncthreads();
    i32 k0 = state.k0;
    if constexpr (F.blocks && !C.deterministic)
      k0 = longest_key_tile<F, kThreads, kTileK>(in, state.batch, state.head_kv, k0 / kTileK) * kTileK;
    if (thread == 0) {
      state.k0 = k0, state.k1 = min(k0 + kTileK, (i32)state.sequence.band.seqlen_k);
      take_head(state.head_kv * in.group);
      schedule(0);
      schedule(1);
    }
    __syncthreads();
  }
  __device__ __forceinline__ void take_head(i32 head) const {
    state.head = head;
    if (head == (state.head_kv + 1) * in.group) return;
    BlockRow row{nullptr, 0, 0};
    if constexpr (F.blocks) row = in.blocks_t.row(state.batch, head, state.k0 / (u32)in.blocks_t.row_tokens);
    state.tiles = Tiles(state.sequence.band, state.k0, state.k1, kTileK, row);
    i64 b = state.batch, q0 = state.sequence.q0;
    state.at = {in.q.at<const T>(b, head, q0, 0), a.dout.at<const T>(b, head, q0, 0), a.lse.at<const float>(b, head, q0, 0),
                (const float *)a.delta + in.row_index(b, head, q0), first_query_tile(in, b, head, kTileQ)};
  }
  // By one thread: the tile of iteration n.
  __device__ __forceinline__ void schedule(int n) const {
    Tile &t = state.ring[n % 4];
    i32 heads_end = (state.head_kv + 1) * in.group;
    while (state.head < heads_end && !state.tiles.next(t.queries)) take_head(state.head + 1);
    t.head = state.head < heads_end ? state.head : -1;
    t.rows = min(kTileQ, (i32)state.sequence.band.seqlen_q - t.queries.begin);
    t.at = state.at;
  }
  __device__ __forceinline__ const Tile &tile_of(int n) const {
    asm volatile("" : "+r"(n)); // its address is found anew, not kept in a register
    return state.ring[n % 4];
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
  // By the threads of the role on the right, while the other one begins to multiply.
  static constexpr int kLoaders = kThreads / 2;
  // Where registers are short its number is asked anew, so that nothing that follows from it is kept in one.
  static constexpr bool kShort = kD > 128 || kDv > 128 || F.additive() || F.mask || kTileK > 128;
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

  // Is some number of Q or dO not finite, of a tile in which something is hidden? It would have shown in LSE or D (suspect), unless there
  // was a sink and nothing else to see.
  __device__ __forceinline__ bool queries_nonfinite(const Tile &t, int stage, bool suspect) const {
    if (!(kHides || t.queries.masked) || !(suspect || in.sinks)) return false;
    return barrier_any(any_nonfinite<T>(shared + kQ + stage * C.q_bytes(), C.q_bytes(), thread, kThreads) ||
                           any_nonfinite<T>(shared + kDo + stage * C.dout_bytes(), C.dout_bytes(), thread, kThreads),
                       kThreads);
  }

  // LSE (of rows that see nothing and of those that are not there +inf: P = 0), -D and, with a bias, what LSE lacks, of a tile's rows, held
  // by the threads until there is room for them.
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
        x = i < t.rows ? t.at.lse[row * a.lse.stride[2]] * (F.bias ? 1.0f : kLog2e<float>) : minus_infinity<float>();
        if (x == minus_infinity<float>()) x = -x;
      } else if (i < t.rows) {
        if (n < 2 * kTileQ) x = -t.at.delta[row];
        if (F.bias && n >= 2 * kTileQ && n < 3 * kTileQ) x = t.at.delta[in.rows() + row] * kLog2e<float>;
      }
    }
    return s;
  }
  // In the order in which lanes want them: of each 16 queries, LSE of 2t, 2t + 1, 2t + 8, 2t + 9 side by side, and so what it lacks; -D of
  // 2t and 2t + 1 twice, the two rows of an accumulator.
  static constexpr int kStatsBytes = C.stats_bytes() / 2; // of a stage
  // Was some number of this thread's not finite?
  __device__ __forceinline__ bool write_stats(const Stats &s, int iteration) const {
    int thread = loader(), stage = iteration % 2;
    bool suspect = false;
#pragma unroll
    for (int k = 0; k < kStatsEach; ++k) {
      int n = thread + k * kLoaders, i = n % kTileQ, c = i / 8 % 2, t = i % 8 / 2, e = i % 2;
      u32 base = shared + kStats + stage * kStatsBytes, x = __float_as_uint(s.x[k]);
      suspect |= (x & 0x7F800000) == 0x7F800000;
      if (n < kTileQ || (F.bias && n >= 2 * kTileQ && n < 3 * kTileQ)) {
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

  // LSE of a block's queries, four side by side; what it lacks, seldom used, is loaded where it is: registers are short.
  struct StagedLse {
    u32 at;
    float lse_[4];
    __device__ __forceinline__ explicit StagedLse(u32 at) : at(at) { load_shared<0>(lse_, at); }
    __device__ __forceinline__ float lse(int c, int e) const { return lse_[2 * c + e]; }
    __device__ __forceinline__ float excess(int c, int e) const { return load_shared_float(at + 12 * kTileQ + 4 * (2 * c + e)); }
  };

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

  // The same over all of a tile's queries, where Y has numbers that are not finite: they count only where x(m, n) is not 0.
  template <int kInner, int kN, class X>
  __device__ __forceinline__ void accumulate_nonfinite(Accumulator (&sum)[kKeys][kN], const X &x, const Blocks<Right, kInner, true> &Y,
                                                       int n0) const {
#pragma unroll
    for (int c = 0; c < kN; ++c) {
      Accumulator count[kKeys] = {};
#pragma unroll 1
      for (int n = n0; n < n0 + kSpan; ++n) {
        Right y = Y.load(16 * n, 16 * c), bad = split_nonfinite<T>(y);
#pragma unroll
        for (int m = 0; m < kKeys; ++m) {
          Left z = x(m, n);
          tile::multiply_add<T>(sum[m][c], z, y);
          tile::multiply_add<T>(count[m], nonzero<T>(z), bad);
        }
      }
#pragma unroll
      for (int m = 0; m < kKeys; ++m) make_nonfinite(sum[m][c], count[m]);
    }
  }

  // Where block (m of this warp's keys, n of the tile's queries) lies among those that are handed on.
  __device__ __forceinline__ int block(int m, int n) const { return (key_warp * kKeys + m) * kQueries + n; }
  // Barriers of the warps that share keys: a role's own, if it is several warps; and for P one a span, since who writes it does not wait.
  static constexpr int kSpans = kQueries / kSpan, kBarriers = kSpans + (C.dim_warps > 1 ? 2 : 0);
  static_assert(C.key_warps * kBarriers < 16);
  __device__ __forceinline__ int barrier_of_p(int span) const { return 1 + kBarriers * key_warp + span; }
  __device__ __forceinline__ int barrier_of_role() const { return 1 + kBarriers * key_warp + kSpans + role; }

  // The slope of a function of q.k goes from left to right as P * slope. FP16, whose steps below 2^-14 are 2^-24, loses that where keys
  // are many, and takes P and the slope apart, in units that keep the slope above those steps: arccosh's is at most 2^11, and 2^-18 at a
  // Lorentz product of 2^18; softcap's is at most 1.
  static constexpr Slope kSlope = !F.function ? Slope::none : C.dtype == kF16 ? Slope::apart : Slope::times_p;
  __device__ __forceinline__ float slope_unit() const {
    return F.function == kHyperbolic ? fmaxf((float)in.beta, 1e-30f) * 0x1p-4f : 0x1p-15f;
  }

  // dS^T from dP^T - D and P^T. Dropout: from dP^T.
  template <bool kHidden>
  __device__ __forceinline__ void differentiate(Left (&dS)[kKeys][kStep], Accumulator (&dP)[kKeys][kStep], float factor, int n0,
                                                int stage) const {
    const float unit = slope_unit();
#pragma unroll
    for (int n = 0; n < kStep; ++n) {
#pragma unroll
      for (int m = 0; m < kKeys; ++m) {
        Left P = tile::take(shared + kP, block(m, n0 + n)), slope;
        if constexpr (kSlope == Slope::apart) slope = P, P = tile::take(shared + kP + C.p_bytes(), block(m, n0 + n));
        Accumulator &x = dP[m][n];
        if constexpr (C.dtype == kBF16 && !kHidden && !F.dropout) {
          dS[m][n] = tile::rounded<T>(x);
#pragma unroll
          for (int i = 0; i < 4; ++i) dS[m][n].x[i] = tile::multiply_pairs<T>(dS[m][n].x[i], P.x[i]);
        } else {
          float D[2][4] = {};
          if constexpr (F.dropout) load_shared<0>(D[0], delta_of(stage, n0 + n)), load_shared<64>(D[1], delta_of(stage, n0 + n));
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            int c = i / 4, r = i / 2 % 2, e = i % 2;
            float &y = x.x[c][i % 4], p = tile::unpacked<T>(P.x[r + 2 * c], e);
            if constexpr (F.dropout) {
              y = (__float_as_uint(p) >> 31 ? 0.0f : y * factor) + D[c][e];
              p = fabsf(p);
            }
            y *= p;
            if constexpr (kSlope == Slope::apart) y *= tile::unpacked<T>(slope.x[r + 2 * c], e) * unit;
            if (kHidden && p == 0) y = 0; // whatever dP is: what is not seen may be no number
          }
          dS[m][n] = tile::rounded<T>(x);
        }
      }
    }
  }

  // P and dV of an iteration.
  template <bool kNonfinite>
  __device__ __forceinline__ void left(Accumulator (&dV)[kKeys][kColumnsV], const Scores<F, float> &scores,
                                       const KeyMajorDropout<F> &dropout, int iteration) const {
    int stage = iteration % 2;
    Blocks<Right, kDv, true> dO(shared + kDo + stage * C.dout_bytes(), dim_warp * kColumnsV * 16);
#pragma unroll
    for (int span = 0; span < kQueries; span += kSpan) {
      int n0 = span + dim_warp * kStep;
      Accumulator s[kKeys][kStep] = {}, P[kKeys][kStep];
      tile::multiply<T, kD, kNonfinite>(s, shared + key_warp * kKeys * 16 * kD * 2, shared + kQ + stage * C.q_bytes() + n0 * 16 * kD * 2);
      const Tile &t = tile_of(iteration);
      i32 i = t.queries.begin + 16 * n0, j = state.k0 + key_warp * kKeys * 16;
      auto lse = [&](int n) { return StagedLse(lse_of(stage, n0 + n)); };
      if (kNonfinite || t.queries.masked)
        probabilities<F, true, kSlope, F.bias != 0>(s, P, scores, t.head, i, j, state.k1, lse);
      else
        probabilities<F, false, kSlope, F.bias != 0>(s, P, scores, t.head, i, j, state.k1, lse);
      if constexpr (F.dropout) {
        if constexpr (kSlope != Slope::apart) dropout.mark(s, i, j, t.head, state.batch);
        if constexpr (F.function) dropout.mark(P, i, j, t.head, state.batch);
      }
      Left p[kKeys][kStep];
#pragma unroll
      for (int m = 0; m < kKeys; ++m) {
#pragma unroll
        for (int n = 0; n < kStep; ++n) {
          if constexpr (kSlope == Slope::apart) {
            const float inverse = 1 / slope_unit();
#pragma unroll
            for (int i = 0; i < 8; ++i) s[m][n].x[i / 4][i % 4] *= inverse;
          }
          p[m][n] = tile::rounded<T>(s[m][n]);
          tile::put(shared + kP, block(m, n0 + n), p[m][n]);
          if constexpr (F.function) {
            p[m][n] = tile::rounded<T>(P[m][n]);
            tile::put(shared + kP + C.p_bytes(), block(m, n0 + n), p[m][n]);
          }
        }
      }
      barrier_arrive(barrier_of_p(span / kSpan), 64 * C.dim_warps);
      if constexpr (C.dim_warps > 1) barrier_sync(barrier_of_role(), 32 * C.dim_warps);
      auto taken = [&](int m, int n) {
        Left x = tile::take(shared + kP + (C.p_planes() - 1) * C.p_bytes(), block(m, n));
        return F.dropout ? tile::positive(x) : x;
      };
      if constexpr (kNonfinite) {
        accumulate_nonfinite<kDv>(dV, taken, dO, span);
        continue;
      }
#pragma unroll
      for (int n = 0; n < kSpan; ++n) {
        Left x[kKeys];
#pragma unroll
        for (int m = 0; m < kKeys; ++m) {
          if constexpr (C.dim_warps > 1)
            x[m] = taken(m, span + n);
          else
            x[m] = F.dropout ? tile::positive(p[m][n]) : p[m][n];
        }
        accumulate<kDv>(dV, x, dO, span + n);
      }
    }
  }

  // dS and dK of an iteration.
  template <bool kNonfinite> __device__ __forceinline__ void right(Accumulator (&dK)[kKeys][kColumns], float factor, int iteration) const {
    int stage = iteration % 2;
    Blocks<Right, kD, true> Q(shared + kQ + stage * C.q_bytes(), dim_warp * kColumns * 16);
#pragma unroll
    for (int span = 0; span < kQueries; span += kSpan) {
      int n0 = span + dim_warp * kStep;
      Accumulator s[kKeys][kStep] = {};
      if constexpr (!F.dropout) {
#pragma unroll
        for (int n = 0; n < kStep; ++n) {
          load_shared<0>(s[0][n].x[0], delta_of(stage, n0 + n));
          load_shared<64>(s[0][n].x[1], delta_of(stage, n0 + n));
#pragma unroll
          for (int m = 1; m < kKeys; ++m) s[m][n] = s[0][n];
        }
      }
      tile::multiply<T, kDv, kNonfinite>(s, shared + kV + key_warp * kKeys * 16 * kDv * 2,
                                         shared + kDo + stage * C.dout_bytes() + n0 * 16 * kDv * 2);
      barrier_sync(barrier_of_p(span / kSpan), 64 * C.dim_warps);
      Left dS[kKeys][kStep];
      if (kNonfinite || kHides || tile_of(iteration).queries.masked)
        differentiate<true>(dS, s, factor, n0, stage);
      else
        differentiate<false>(dS, s, factor, n0, stage);
#pragma unroll
      for (int m = 0; m < kKeys; ++m) {
#pragma unroll
        for (int n = 0; n < kStep; ++n) {
          tile::put_parts(shared + kDs + stage * C.p_bytes(), block(m, n0 + n), dS[m][n]);
        }
      }
      if constexpr (C.dim_warps > 1) barrier_sync(barrier_of_role(), 32 * C.dim_warps);
      auto taken = [&](int m, int n) { return tile::take_parts(shared + kDs + stage * C.p_bytes(), block(m, n)); };
      if constexpr (kNonfinite) {
        __syncwarp();
        accumulate_nonfinite<kD>(dK, taken, Q, span);
        continue;
      }
#pragma unroll
      for (int n = 0; n < kSpan; ++n) {
        Left x[kKeys];
#pragma unroll
        for (int m = 0; m < kKeys; ++m) {
          if constexpr (C.dim_warps > 1)
            x[m] = taken(m, span + n);
          else
            x[m] = dS[m][n];
        }
        accumulate<kD>(dK, x, Q, span + n);
      }
    }
  }

  // Adds an iteration's dQ (without the scale) to the rows of its tile.
  template <bool kNonfinite> __device__ __forceinline__ void add_dq(int iteration) const {
    int stage = iteration % 2;
    int warp = (kShort ? thread_index() : thread) / 32;
    if (!a.dq_sum || warp >= C.dq_rows() * C.dq_columns()) return;
    int row = warp / C.dq_columns() * kDqRows * 16, column = warp % C.dq_columns() * kDqColumns * 16;
    Accumulator dQ[kDqRows][kDqColumns] = {};
    const Tile &t = tile_of(iteration);
    i64 number = t.at.query_tile + t.queries.begin / kTileQ;
    u32 *turn = a.turns + 1 + number * C.warps() + warp, seen = 0;
    if constexpr (C.deterministic) seen = load_relaxed(turn); // most often it is our turn: then nobody waits
    Blocks<Right, kD, true> K(shared, column);
    auto taken = [&](int m, int k) {
      return tile::take_parts_transposed(shared + kDs + stage * C.p_bytes() + row / 16 * tile::kBlockBytes, k * kQueries + m);
    };
    if constexpr (kNonfinite) { // not finite numbers of K count only where dS is not 0
#pragma unroll
      for (int c = 0; c < kDqColumns; ++c) {
        Accumulator count[kDqRows] = {};
#pragma unroll 1
        for (int k = 0; k < kTileK / 16; ++k) {
          Right y = K.load(16 * k, 16 * c), bad = split_nonfinite<T>(y);
#pragma unroll
          for (int m = 0; m < kDqRows; ++m) {
            tile::multiply_add<T>(dQ[m][c], taken(m, k), y);
            tile::multiply_add<T>(count[m], nonzero<T>(taken(m, k)), bad);
          }
        }
#pragma unroll
        for (int m = 0; m < kDqRows; ++m) make_nonfinite(dQ[m][c], count[m]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kTileK / 16; ++k) {
        Left dS[kDqRows];
#pragma unroll
        for (int m = 0; m < kDqRows; ++m) dS[m] = taken(m, k);
#pragma unroll
        for (int c = 0; c < kDqColumns; ++c) {
          Right y = K.load(16 * k, 16 * c);
#pragma unroll
          for (int m = 0; m < kDqRows; ++m) tile::multiply_add<T>(dQ[m][c], dS[m], y);
        }
      }
    }
    if constexpr (C.deterministic) {
      if (tile::lane_id() == 0) await_turn<F.blocks != 0>(turn, seen, key_tiles_before(t));
      __syncwarp();
    }
    // dq_sum holds 16x16 blocks as the lanes hold them, row by row of blocks.
    float *target = a.dq_sum + (number * (kTileQ * kD) + row * kD + column * 16);
#pragma unroll
    for (int m = 0; m < kDqRows; ++m) {
#pragma unroll
      for (int c = 0; c < kDqColumns; ++c) {
        add_quad(target + m * 16 * kD + c * 256, dQ[m][c].x[0]);
        add_quad(target + m * 16 * kD + c * 256 + 128, dQ[m][c].x[1]);
      }
    }
    if constexpr (C.deterministic) {
      __syncwarp();
      if (tile::lane_id() == 0) end_turn(turn);
    }
  }

  __device__ __forceinline__ u32 key_tiles_before(const Tile &t) const {
    return strobe::key_tiles_before<F.blocks != 0, kTileK>(in, state.sequence.band, state.batch, t.head, t.queries.begin, state.k0);
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

  // An iteration of a role; whether this thread found the next tile suspect.
  template <int kRole, bool kNonfinite, int kN>
  __device__ __forceinline__ bool iterate(Accumulator (&sum)[kKeys][kN], const Scores<F, float> &scores, const KeyMajorDropout<F> &dropout,
                                          float factor, int n) const {
    if constexpr (kRole == 0) {
      left<kNonfinite>(sum, scores, dropout, n);
      if (n > 0) add_dq<kNonfinite>(n - 1);
      return false;
    } else {
      if (n > 0) add_dq<kNonfinite>(n - 1);
      Stats stats;
      bool more = tile_of(n + 1).head >= 0;
      if (more) {
        load_queries(tile_of(n + 1), (n + 1) % 2);
        stats = read_stats(tile_of(n + 1));
      }
      cp_async_commit();
      if (thread == kThreads / 2) schedule(n + 2);
      right<kNonfinite>(sum, factor, n);
      return more && write_stats(stats, n + 1);
    }
  }
  // All threads have come, and what they loaded is there. Does the condition hold for some thread?
  static __device__ __forceinline__ bool meet(bool condition) {
    cp_async_wait<0>();
    return barrier_any(condition, kThreads);
  }

  // The whole of a role.
  template <int kRole> __device__ __forceinline__ void walk() const {
    Accumulator sum[kKeys][kRole == 0 ? kColumnsV : kColumns] = {}; // dV or dK
    Scores<F, float> scores(in, state.sequence, state.batch);
    KeyMajorDropout<F> dropout{Dropout<F>(in)};
    float factor = dropout.dropout.factor();

    bool suspect = false; // the tile that was loaded last
    load_keys();
    if (kRole == 1 && tile_of(0).head >= 0) {
      load_queries(tile_of(0), 0);
      suspect = write_stats(read_stats(tile_of(0)), 0);
    }
    cp_async_commit();
    suspect = meet(suspect);
    // From the first number on that is not finite and may be hidden, tiles are multiplied with care.
    bool nonfinite = barrier_any(any_nonfinite<T>(shared, C.k_bytes(), thread, kThreads), kThreads);
    int n = 0;
    for (; tile_of(n).head >= 0; ++n) {
      if (n > 0) suspect = meet(suspect);
      if (nonfinite |= queries_nonfinite(tile_of(n), n % 2, suspect)) break;
      suspect = iterate<kRole, false>(sum, scores, dropout, factor, n);
    }
    if (nonfinite) {
      while (tile_of(n).head >= 0) {
        iterate<kRole, true>(sum, scores, dropout, factor, n++);
        meet(false);
      }
      if (n > 0) add_dq<true>(n - 1);
    } else {
      meet(false);
      if (n > 0) add_dq<false>(n - 1);
    }
    barrier_sync(0, kThreads);
    if constexpr (kRole == 0)
      store<kDv>(a.dv, sum, factor, kV, in.head_dim_v);
    else
      store<kD>(a.dk, sum, (float)in.scale, 0, in.head_dim);
  }

  __device__ __forceinline__ void run() const {
    choose_keys();
    if (state.k0 >= state.k1) return;
    if (role == 0)
      walk<0>();
    else
      walk<1>();
  }
};

} // namespace strobe::mma
