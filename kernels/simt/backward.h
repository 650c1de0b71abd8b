// Backward (Dao 2023, algorithm 2) with plain FMA: a CTA owns a tile of keys and walks the tiles of queries that see them, of every query head
// of its key head. dK and dV grow in registers; dQ is added up in global memory, in any order, or key tile after key tile where the result
// must be the same over runs.
#pragma once
#include "gradient.h"
#include "walk.h"

namespace strobe::simt {

template <Config C> struct Backward {
  using Arguments = BackwardArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  using Multiply = Products<C>;
  using E = typename Multiply::E;
  using T = typename Multiply::T;
  static constexpr int kRows = C.tile_q / C.threads_q, kKeys = C.tile_k / C.threads_q; // dQ's rows of a thread; dK's and dV's
  static constexpr int kColumns = C.head_dim / C.threads_k, kColumnsV = C.head_dim_v / C.threads_k;
  // Columns of dQ that are in registers at a time, beside dK and dV.
  static constexpr int kPass = C.head_dim <= 96 ? C.head_dim : C.head_dim % 64 ? 32 : 64;

  static __device__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    static_assert(sizeof(Walk) <= Config::kWalkBytes);
    const Inputs &in = a.in;
    Walk &walk = *reinterpret_cast<Walk *>(shared);
    T *P = reinterpret_cast<T *>(shared + Config::kWalkBytes), *dS = P + C.p_elements();
    const RowStatistics<C, T> rows(dS + C.p_elements());
    Multiply multiply(dS + C.p_elements() + 2 * C.tile_q);
    const auto grid = multiply.grid;

    u32 number = blockIdx.x;
    if (a.deterministic) { // Key tiles wait for the ones before them, so those must have started: numbers in the order of arrival.
      __shared__ u32 ticket;
      if (threadIdx.x == 0) ticket = atomicAdd(a.turns, 1u);
      __syncthreads();
      number = ticket;
    }
    const Item item = Item::of(number, 1, div_up(in.seqlen_k, C.tile_k), in.heads_kv, in.batch, C.features.band || a.deterministic);
    const i32 n = item.tile, h_kv = item.head, b = item.batch;
    const Sequence s = in.sequence(b);
    const i32 seqlen_q = (i32)s.band.seqlen_q, seqlen_k = (i32)s.band.seqlen_k, k0 = n * C.tile_k, k1 = min(k0 + C.tile_k, seqlen_k);
    if (k0 >= seqlen_k) return;

    const Rows<E> K(in.k, b, h_kv, s.k0, seqlen_k, in.head_dim), V(in.v, b, h_kv, s.k0, seqlen_k, in.head_dim_v);
    const Scores<C.features, T> scores(in, s, b);
    const Dropout<C.features> dropout(in);

    T dK[kKeys][kColumns] = {}, dV[kKeys][kColumnsV] = {};
    for (i32 h = h_kv * in.group; h < (h_kv + 1) * in.group; ++h) {
      if (seqlen_q == 0) break;
      const Rows<E> Q(in.q, b, h, s.q0, seqlen_q, in.head_dim), dO(a.dout, b, h, s.q0, seqlen_q, in.head_dim_v);
      const Schedule schedule(s.band.transposed(), k0, k1, C.tile_q, C.tile_q,
                              C.features.blocks ? in.blocks_t.row(b, h, k0 / in.blocks_t.row_tokens) : BlockRow{});
      walk.run(schedule, 0, 1, [&](const Tile &tile) { // of queries
        const i32 q0 = tile.begin, q1 = tile.end;
        rows.load(a, b, h, s, q0, q1);
        recompute<C, true>(multiply, scores, dropout, rows, P, dS, Q, K, dO, V, h, q0, q1, k0, k1, tile.masked);

        multiply.template tn<C.head_dim_v>(dV, P, dO, q0, q1 - q0); // dV += P^T dO
        multiply.template tn<C.head_dim>(dK, dS, Q, q0, q1 - q0);   // dK += dS^T Q
        if (a.dq_sum) {
#pragma unroll 1
          for (i32 column = 0; column < C.head_dim; column += kPass) {
            T dQ[kRows][kPass / C.threads_k] = {};
            multiply.template nn<kPass>(dQ, dS, K, k0, k1 - k0, column); // dQ = dS K
            if (a.deterministic && column == 0) await_turn(a, b, h, s, q0, q1, n);
            add_dq(a, b, h, s, q0, q1, column, dQ, grid);
          }
          if (a.deterministic) end_turn(a, b, h, q0);
        }
        __syncthreads(); // P, dS and the rows' statistics have been read
      });
    }

    store<kColumns>(a.dk, b, h_kv, s.k0 + k0, k1 - k0, in.head_dim, dK, T(in.scale), grid);
    store<kColumnsV>(a.dv, b, h_kv, s.k0 + k0, k1 - k0, in.head_dim_v, dV, T(dropout.factor()), grid);
  }

private:
  // How many key tiles add to the query tile at q0 before tile n does.
  static __device__ i32 turn_of(const Inputs &in, i64 b, i64 h, const Sequence &s, i32 q0, i32 q1, i32 n) {
    const i32 first = (i32)(s.band.keys_any(q0, q1).begin / C.tile_k);
    if constexpr (!C.features.blocks) return n - first;
    const BlockRow kept = in.blocks.row(b, h, q0 / in.blocks.row_tokens);
    const i32 per_block = (i32)(kept.block / C.tile_k);
    i32 turn = 0;
    for (i64 e = 0; e < kept.count; ++e) {
      const i32 begin = max(kept.cols[e] * per_block, first), end = min((kept.cols[e] + 1) * per_block, n);
      if (begin < end) turn += end - begin;
    }
    return turn;
  }

  static __device__ __forceinline__ u32 *turns(const Arguments &a, i64 b, i64 h, i32 q0) {
    return a.turns + 1 + (b * a.in.heads + h) * div_up(a.in.seqlen_q, C.tile_q) + q0 / C.tile_q;
  }
  static __device__ void await_turn(const Arguments &a, i64 b, i64 h, const Sequence &s, i32 q0, i32 q1, i32 n) {
    if (threadIdx.x == 0) {
      const u32 mine = (u32)turn_of(a.in, b, h, s, q0, q1, n);
      while (*(const volatile u32 *)turns(a, b, h, q0) < mine) {}
      __threadfence();
    }
    __syncthreads();
  }
  static __device__ void end_turn(const Arguments &a, i64 b, i64 h, i32 q0) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(turns(a, b, h, q0), 1u);
  }

  static __device__ __forceinline__ void add_dq(const Arguments &a, i64 b, i64 h, const Sequence &s, i32 q0, i32 q1, i32 column,
                                                const T (&dQ)[kRows][kPass / C.threads_k], const typename Multiply::Grid &grid) {
    constexpr int kColumns = kPass / C.threads_k, W = piece<T>(kColumns);
    const T scale = T(a.in.scale);
    T *sum = reinterpret_cast<T *>(a.dq_sum) + a.in.row_index(b, h, s.q0 + q0) * C.head_dim + column;
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (q0 + grid.row(i) < q1)
#pragma unroll
        for (int j = 0; j < kColumns; ++j) atomicAdd(sum + grid.row(i) * C.head_dim + grid.template column<W>(j), dQ[i][j] * scale);
  }

  template <int kColumns> // adjacent to another in pieces, as multiply_tn left them
  static __device__ __forceinline__ void store(const Operand &to, i64 b, i64 h, i64 row, i32 count, i32 columns,
                                               const T (&x)[kKeys][kColumns], T scale, const typename Multiply::Grid &grid) {
    if (!to) return;
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const i32 r = grid.template row<piece<T>(kKeys)>(i), c = grid.template column<piece<T>(kColumns)>(j);
        if (r < count && c < columns) *to.at<E>(b, h, row + r, c) = Convert<E>::from(x[i][j] * scale);
      }
  }
};

} // namespace strobe::simt
