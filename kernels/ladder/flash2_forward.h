// Rung 2: O stays on the chip. Dao 2023 (FlashAttention-2), Algorithm 1, whose lines stand beside the code.
//   1: Divide Q into Tr blocks of Br x d, K and V into Tc blocks of Bc x d.
//   2: Divide O into Tr blocks of Br x d, L into Tr blocks of Br.
// The loops have changed places: a CTA owns a tile of queries. So the tiles of all heads run side by side (section 3.2), O is written once,
// and the division by l comes at the end (section 3.1).
#pragma once
#include "../attention/schedule.h"
#include "tile.h"

namespace strobe::ladder {

template <Config C> struct Flash2Forward {
  using Arguments = ForwardArguments;
  static constexpr i32 kThreads = kTileThreads, Br = C.tile_q, Bc = C.tile_k, d = C.head_dim;
  static constexpr i32 kBlocksPerSm = C.blocks_per_sm(kThreads, C.sums_forward());

  static __device__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Inputs &in = a.in;
    // 3: for 1 <= i <= Tr do, in parallel; with a causal mask the last tiles are the longest and go first
    const i64 Tr = div_up(in.seqlen_q, Br), head = blockIdx.x / Tr, b = head / in.heads, h = head % in.heads;
    const i64 i0 = (Tr - 1 - blockIdx.x % Tr) * Br;
    const Band band = in.sequence(b).band;
    const float unit = float(in.scale) * kLog2e<float>; // exp(scale s) = exp2(unit s)
    const Matrix<const float> Q(in.q, b, h, in.seqlen_q, in.head_dim);
    const Matrix<const float> K(in.k, b, h / in.group, in.seqlen_k, in.head_dim), V(in.v, b, h / in.group, in.seqlen_k, in.head_dim);
    const Matrix<float> O(a.out, b, h, in.seqlen_q, in.head_dim);
    const Shared<Br, d> Qi(shared);
    const Shared<Bc, d> Kj(Qi.end()), Vj(Kj.end());
    const Shared<Br, Bc> Pij(Vj.end());

    // 4: Load Q_i from HBM to on-chip SRAM.
    load(Qi, Q, i0);
    // 5: On chip, initialize O_i = 0, l_i = 0, m_i = -inf.
    Registers<Br, d> Oi;
    float m[Oi.kRows], l[Oi.kRows];
#pragma unroll
    for (i32 r = 0; r < Oi.kRows; r++) m[r] = -kInfinity, l[r] = 0;

    // 6: for 1 <= j <= Tc do (only key tiles that a query of this tile sees)
    Schedule keys(band, i0, min(i0 + Br, in.seqlen_q), Bc, Bc);
    for (KeyTile tile; keys.next(tile);) {
      // 7: Load K_j, V_j from HBM to on-chip SRAM.
      load(Kj, K, tile.begin);
      load(Vj, V, tile.begin);
      __syncthreads();
      // 8: On chip, compute S_ij = Q_i K_j^T.
      Registers<Br, Bc> S;
      multiply<d>(S, Qi, Kj.transposed());
      if (tile.masked || tile.end - tile.begin < Bc) hide(S, band, i0, tile.begin);
      // 9: m_new = max(m, rowmax(S)), P~ = exp(S - m_new), l = exp(m - m_new) l + rowsum(P~).
      // 10: O_i = diag(exp(m - m_new)) O_i + P~ V_j.
#pragma unroll
      for (i32 r = 0; r < S.kRows; r++) {
        const float m_new = max(m[r], S.row_max(r)), base = reference_of(m_new, -kInfinity), alpha = exp2((m[r] - base) * unit);
#pragma unroll
        for (float &s : S.x[r]) s = exp2((s - base) * unit);
        l[r] = alpha * l[r] + S.row_sum(r);
        m[r] = m_new;
#pragma unroll
        for (float &o : Oi.x[r]) o *= alpha;
      }
      store(Pij, S);
      __syncthreads();
      multiply<Bc>(Oi, Pij, Vj);
      __syncthreads(); // every thread has read P, K_j and V_j
    } // 11

    // 12: O_i = diag(l)^-1 O_i.
#pragma unroll
    for (i32 r = 0; r < Oi.kRows; r++)
#pragma unroll
      for (float &o : Oi.x[r]) o = l[r] == 0 ? 0 : o / l[r];
    // 14: Write O_i to HBM as the i-th block of O.
    store(O, i0, 0, Oi);
    // 13, 15: L_i = m + log(l), written to HBM as the i-th block of L.
#pragma unroll
    for (i32 r = 0; r < Oi.kRows; r++) {
      const i64 i = i0 + Oi.row(r);
      if (a.lse && threadIdx.x % 16 == 0 && i < in.seqlen_q)
        *a.lse.at<float>(b, h, i, 0) = l[r] == 0 ? -kInfinity : m[r] * float(in.scale) + logf(l[r]);
    }
  } // 16, 17
};

} // namespace strobe::ladder
