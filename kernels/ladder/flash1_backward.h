// Rung 1, backward. Dao et al. 2022, appendix B, Algorithm 4, whose lines stand beside the code (1, 14, 15 and 18 are about dropout).
//   2-4: Divide Q, O, dO into Tr blocks, K and V into Tc blocks.
// One CTA walks one key head, so no other CTA touches its dQ_i in global memory. S and P are computed again from Q and K: that costs a
// product, and saves reading S x S numbers.
#pragma once
#include "../attention/schedule.h"
#include "tile.h"

namespace strobe::ladder {

template <Config C> struct Flash1Backward {
  using Arguments = BackwardArguments;
  static constexpr i32 kThreads = kTileThreads, kBlocksPerSm = 1, Br = C.tile_q, Bc = C.tile_k, d = C.head_dim;

  static __device__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Inputs &in = a.in;
    const i64 b = blockIdx.x / in.heads_kv, h_kv = blockIdx.x % in.heads_kv, h0 = h_kv * in.group;
    const Band band = in.sequence(b).band;
    const float tau = float(in.scale), unit = tau * kLog2e<float>; // exp(tau s) = exp2(unit s)
    const Matrix<const float> K(in.k, b, h_kv, in.seqlen_k, in.head_dim), V(in.v, b, h_kv, in.seqlen_k, in.head_dim);
    const Matrix<float> dK(a.dk, b, h_kv, in.seqlen_k, in.head_dim), dV(a.dv, b, h_kv, in.seqlen_k, in.head_dim);
    const Shared<Br, d> Qi(shared), dOi(Qi.end());
    const Shared<Bc, d> Kj(dOi.end()), Vj(Kj.end());
    const Shared<Br, Bc> tile_ij(Vj.end()); // P_ij, then dS_ij

    // 5: Initialize dQ = 0 in HBM.
    for (i64 h = h0; h < h0 + in.group; h++) {
      const Matrix<float> dQ(a.dq, b, h, in.seqlen_q, in.head_dim);
      for (i64 n = threadIdx.x; n < dQ.rows * dQ.columns; n += kThreads) dQ(n / dQ.columns, n % dQ.columns) = 0;
    }
    // 6: for 1 <= j <= Tc do
    for (i64 j0 = 0; j0 < in.seqlen_k; j0 += Bc) {
      __syncthreads(); // every thread has read the previous tiles
      // 7: Load K_j, V_j from HBM to on-chip SRAM.
      load(Kj, K, j0);
      load(Vj, V, j0);
      // 8: Initialize dK~_j = 0, dV~_j = 0 on SRAM. (Here: in registers.)
      Registers<Bc, d> dKj, dVj;
      for (i64 h = h0; h < h0 + in.group; h++) { // the query heads that share the key head
        const Matrix<const float> Q(in.q, b, h, in.seqlen_q, in.head_dim), O(a.out, b, h, in.seqlen_q, in.head_dim);
        const Matrix<const float> dO(a.dout, b, h, in.seqlen_q, in.head_dim);
        const Matrix<float> dQ(a.dq, b, h, in.seqlen_q, in.head_dim);
        // 9: for 1 <= i <= Tr do (only query tiles that see a key of this key tile)
        Schedule queries(band.transposed(), j0, min(j0 + Bc, in.seqlen_k), Br, Br);
        for (KeyTile tile; queries.next(tile);) {
          const i64 i0 = tile.begin;
          // 10: Load Q_i, O_i, dO_i, dQ_i, l_i, m_i from HBM to on-chip SRAM. (O_i, dQ_i below; l_i and m_i are LSE_i)
          __syncthreads(); // every thread has read the previous tiles
          load(Qi, Q, i0);
          load(dOi, dO, i0);
          __syncthreads();
          // 11: S_ij = tau Q_i K_j^T. (Here tau is applied in the exponent.)
          Registers<Br, Bc> P, dS;
          multiply<d>(P, Qi, Kj.transposed());
          // 12: S_ij^masked = MASK(S_ij).
          if (tile.masked || tile.end - i0 < Br || j0 + Bc > in.seqlen_k) hide(P, band, i0, j0);
          // 13: P_ij = diag(l_i)^-1 exp(S_ij^masked - m_i), which is exp(S_ij^masked - LSE_i).
          float L[P.kRows], D[P.kRows];
#pragma unroll
          for (i32 r = 0; r < P.kRows; r++) L[r] = log2_sum(a.lse, b, h, i0 + P.row(r), in.seqlen_q);
          P.each([&](float &s, i32 r, i32, i32) { s = exp2(s * unit - L[r]); });
          // 16: dV~_j <- dV~_j + P_ij^T dO_i.
          store(tile_ij, P);
          __syncthreads();
          multiply<Br>(dVj, tile_ij.transposed(), dOi);
          // 17: dP_ij = dO_i V_j^T.
          multiply<d>(dS, dOi, Vj.transposed());
          // 19: D_i = rowsum(dO_i o O_i). The 16 lanes that share a row add up their parts.
#pragma unroll
          for (i32 r = 0; r < P.kRows; r++) {
            D[r] = 0;
            for (i32 c = threadIdx.x % 16; c < in.head_dim; c += 16)
              if (i0 + P.row(r) < in.seqlen_q) D[r] += dOi(P.row(r), c) * O(i0 + P.row(r), c);
            for (i32 lanes = 8; lanes; lanes /= 2) D[r] += __shfl_xor_sync(~0u, D[r], lanes);
          }
          // 20: dS_ij = P_ij o (dP_ij - D_i).
#pragma unroll
          for (i32 r = 0; r < P.kRows; r++)
#pragma unroll
            for (i32 c = 0; c < P.kColumns; c++) dS.x[r][c] = P.x[r][c] * (dS.x[r][c] - D[r]);
          __syncthreads(); // every thread has read P_ij
          store(tile_ij, dS);
          __syncthreads();
          // 21: Write dQ_i <- dQ_i + tau dS_ij K_j to HBM.
          Registers<Br, d> dSK;
          multiply<Bc>(dSK, tile_ij, Kj);
          dSK.each([&](float &x, i32, i32 i, i32 c) {
            if (dQ.holds(i0 + i, c)) dQ(i0 + i, c) += tau * x;
          });
          // 22: dK~_j <- dK~_j + tau dS_ij^T Q_i.
          multiply<Br>(dKj, tile_ij.transposed(), Qi);
        } // 23
      }
      // 24: Write dK_j <- dK~_j, dV_j <- dV~_j to HBM.
      store(dK, j0, 0, dKj, tau);
      store(dV, j0, 0, dVj);
    } // 25
    // 26: Return dQ, dK, dV.
  }
};

} // namespace strobe::ladder
