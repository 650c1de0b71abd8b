// Rung 1: S never leaves the chip. Dao et al. 2022 (FlashAttention), Algorithm 1, whose lines stand beside the code.
//   1: Set block sizes Bc, Br.                                                          Config
//   3: Divide Q into Tr blocks of Br x d, K and V into Tc blocks of Bc x d.
//   4: Divide O into Tr blocks of Br x d, l and m into Tr blocks of Br.
// One CTA walks one head, as in the paper. The outer loop is over keys, so every step reads O_i, l_i, m_i from global memory and writes
// them back. FlashAttention-2 does away with that traffic, and with the idle SMs where heads are few.
#pragma once
#include "../attention/schedule.h"
#include "tile.h"

namespace strobe::ladder {

template <Config C> struct Flash1Forward {
  using Arguments = Flash1Arguments;
  static constexpr i32 kThreads = kTileThreads, kBlocksPerSm = 1, Br = C.tile_q, Bc = C.tile_k, d = C.head_dim;

  static __device__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Inputs &in = a.call.in;
    const i64 b = blockIdx.x / in.heads, h = blockIdx.x % in.heads;
    const Band band = in.sequence(b).band;
    const float unit = float(in.scale) * kLog2e<float>; // exp(scale s) = exp2(unit s)
    const Matrix<const float> Q(in.q, b, h, in.seqlen_q, in.head_dim);
    const Matrix<const float> K(in.k, b, h / in.group, in.seqlen_k, in.head_dim), V(in.v, b, h / in.group, in.seqlen_k, in.head_dim);
    const Matrix<float> O(a.call.out, b, h, in.seqlen_q, in.head_dim);
    float *const l = a.l + in.row_index(b, h, 0), *const m = a.m + in.row_index(b, h, 0);
    const Shared<Br, d> Qi(shared);
    const Shared<Bc, d> Kj(Qi.end()), Vj(Kj.end());
    const Shared<Br, Bc> Pij(Vj.end());

    // 2: Initialize O = 0, l = 0, m = -inf in HBM.
    for (i64 n = threadIdx.x; n < O.rows * O.columns; n += kThreads) O(n / O.columns, n % O.columns) = 0;
    for (i64 i = threadIdx.x; i < in.seqlen_q; i += kThreads) l[i] = 0, m[i] = -kInfinity;

    // 5: for 1 <= j <= Tc do
    for (i64 j0 = 0; j0 < in.seqlen_k; j0 += Bc) {
      // 6: Load K_j, V_j from HBM to on-chip SRAM.
      load(Kj, K, j0);
      load(Vj, V, j0);
      // 7: for 1 <= i <= Tr do (only query tiles that see a key of this key tile)
      Schedule queries(band.transposed(), j0, min(j0 + Bc, in.seqlen_k), Br, Br);
      for (KeyTile tile; queries.next(tile);) {
        const i64 i0 = tile.begin;
        // 8: Load Q_i, O_i, l_i, m_i from HBM to on-chip SRAM. (O_i, l_i, m_i below, each thread its own elements)
        load(Qi, Q, i0);
        __syncthreads();
        // 9: On chip, compute S_ij = Q_i K_j^T.
        Registers<Br, Bc> S;
        multiply<d>(S, Qi, Kj.transposed());
        if (tile.masked || tile.end - i0 < Br || j0 + Bc > in.seqlen_k) hide(S, band, i0, j0);
        float m_new[S.kRows], l_new[S.kRows], of_old[S.kRows], of_tile[S.kRows];
#pragma unroll
        for (i32 r = 0; r < S.kRows; r++) {
          const i64 i = i0 + S.row(r);
          const float m_i = i < in.seqlen_q ? m[i] : -kInfinity, l_i = i < in.seqlen_q ? l[i] : 0;
          // 10: m~ = rowmax(S_ij), P~ = exp(S_ij - m~), l~ = rowsum(P~).
          const float m_tile = S.row_max(r);
#pragma unroll
          for (float &s : S.x[r]) s = exp2((s - reference_of(m_tile, -kInfinity)) * unit);
          const float l_tile = S.row_sum(r);
          // 11: m_new = max(m_i, m~), l_new = exp(m_i - m_new) l_i + exp(m~ - m_new) l~.
          m_new[r] = max(m_i, m_tile);
          const float base = reference_of(m_new[r], -kInfinity);
          of_old[r] = exp2((m_i - base) * unit) * l_i, of_tile[r] = exp2((m_tile - base) * unit);
          l_new[r] = of_old[r] + of_tile[r] * l_tile;
        }
        // 12: Write O_i <- diag(l_new)^-1 (diag(l_i) exp(m_i - m_new) O_i + exp(m~ - m_new) P~ V_j) to HBM.
        store(Pij, S);
        __syncthreads();
        Registers<Br, d> PV;
        multiply<Bc>(PV, Pij, Vj);
        PV.each([&](float &x, i32 r, i32 i, i32 c) {
          if (O.holds(i0 + i, c) && l_new[r] != 0) O(i0 + i, c) = (of_old[r] * O(i0 + i, c) + of_tile[r] * x) / l_new[r];
        });
        // 13: Write l_i <- l_new, m_i <- m_new to HBM.
#pragma unroll
        for (i32 r = 0; r < S.kRows; r++)
          if (threadIdx.x % 16 == 0 && i0 + S.row(r) < in.seqlen_q) l[i0 + S.row(r)] = l_new[r], m[i0 + S.row(r)] = m_new[r];
        __syncthreads(); // every thread has read Q_i, P_ij, K_j and V_j
      } // 14
    } // 15

    // 16: Return O. (The backward needs only LSE = m + log l.)
    __syncthreads();
    if (a.call.lse)
      for (i64 i = threadIdx.x; i < in.seqlen_q; i += kThreads)
        *a.call.lse.at<float>(b, h, i, 0) = l[i] == 0 ? -kInfinity : m[i] * float(in.scale) + logf(l[i]);
  }
};

} // namespace strobe::ladder
