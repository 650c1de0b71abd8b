// Backward (Dao 2023, algorithm 2) with plain FMA: a CTA owns a tile of keys and walks the tiles of queries that see them, of every query head
// of its key head. dK and dV grow in registers; dQ is added up in global memory, in any order, or key tile after key tile where the result
// must be the same over runs.
#pragma once
#include "../attention/schedule.h"
#include "gradient.h"

namespace strobe::simt {

template <Config C> struct Backward {
  using Arguments = BackwardArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = C.blocks_per_sm;

  using Multiply = Products<C>;
  using E = typename Multiply::E;
  using T = typename Multiply::T;
  static constexpr int kRows = C.tile_q / C.threads_q, kKeys = C.tile_k / C.threads_q; // dQ's rows of a thread; dK's and dV's
  static constexpr int kColumns = C.head_dim / C.threads_k, kColumnsV = C.head_dim_v / C.threads_k;

  static __device__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Inputs &in = a.in;
    T *P = reinterpret_cast<T *>(shared), *dS = P + C.p_elements();
    const RowStatistics<C, T> rows(dS + C.p_elements());
    Multiply multiply(dS + C.p_elements() + 2 * C.tile_q);
    const auto grid = multiply.grid;

    const i32 tiles = (i32)div_up(in.seqlen_k, C.tile_k);
    i32 n, h_kv, b;
    if (a.deterministic) {
      // Key tiles wait for the ones before them, so those must have started: work is handed out in the order of arrival, heads first.
      __shared__ u32 ticket;
      if (threadIdx.x == 0) ticket = atomicAdd(a.turns, 1u);
      __syncthreads();
      u32 item = ticket;
      h_kv = (i32)(item % (u32)in.heads_kv), item /= (u32)in.heads_kv;
      b = (i32)(item % (u32)in.batch), n = (i32)(item / (u32)in.batch);
    } else { // tiles of one head are neighbours
      u32 item = blockIdx.x;
      n = (i32)(item % (u32)tiles), item /= (u32)tiles;
      h_kv = (i32)(item % (u32)in.heads_kv), b = (i32)(item / (u32)in.heads_kv);
    }
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
      Schedule schedule(s.band.transposed(), k0, k1, C.tile_q, C.tile_q,
                        C.features.blocks ? in.blocks_t.row(b, h, k0 / in.blocks_t.row_tokens) : BlockRow{});
      KeyTile tile; // of queries
      while (schedule.next(tile)) {
        const i32 q0 = (i32)tile.begin, q1 = (i32)tile.end;
        rows.load(a, b, h, s, q0, q1);
        recompute<C>(multiply, scores, dropout, rows, Q, K, dO, V, h, q0, q1, k0, k1, tile.masked, [&](int i, int j, T p, T ds, T slope) {
          const i32 at = grid.row(i) * C.p_stride() + grid.column(j);
          P[at] = p;
          dS[at] = ds * slope;
        });

        multiply.template tn<C.head_dim_v>(dV, P, dO, q0, q1 - q0); // dV += P^T dO
        multiply.template tn<C.head_dim>(dK, dS, Q, q0, q1 - q0);   // dK += dS^T Q
        if (a.dq_sum) {
          T dQ[kRows][kColumns] = {};
          multiply.template nn<C.head_dim>(dQ, dS, K, k0, k1 - k0); // dQ = dS K
          add_dq(a, b, h, s, q0, q1, n, dQ, grid);
        }
        __syncthreads(); // P, dS and the rows' statistics have been read
      }
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

  static __device__ __forceinline__ void add_dq(const Arguments &a, i64 b, i64 h, const Sequence &s, i32 q0, i32 q1, i32 n,
                                                const T (&dQ)[kRows][kColumns], const typename Multiply::Grid &grid) {
    constexpr int W = piece<T>(kColumns);
    const T scale = T(a.in.scale);
    T *sum = reinterpret_cast<T *>(a.dq_sum) + a.in.row_index(b, h, s.q0 + q0) * C.head_dim;
    u32 *turn = a.turns + 1 + (b * a.in.heads + h) * div_up(a.in.seqlen_q, C.tile_q) + q0 / C.tile_q;
    if (a.deterministic) {
      if (threadIdx.x == 0) wait(turn, (u32)turn_of(a.in, b, h, s, q0, q1, n));
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if (q0 + grid.row(i) < q1)
#pragma unroll
        for (int j = 0; j < kColumns; ++j) atomicAdd(sum + grid.row(i) * C.head_dim + grid.template column<W>(j), dQ[i][j] * scale);
    if (a.deterministic) {
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) atomicAdd(turn, 1u);
    }
  }
  static __device__ void wait(const u32 *turn, u32 mine) {
    while (*(const volatile u32 *)turn < mine) {
    }
    __threadfence();
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
