// Rung 2, backward. Dao 2023, Algorithm 2, whose lines stand beside the code.
//   1-2: Divide Q, O, dO, L into Tr blocks, K and V into Tc blocks.
//   3: Initialize dQ = 0 in HBM.                                         the host
//   4: Compute D = rowsum(dO o O), write D to HBM.                       Delta (delta.h)
// A CTA owns a tile of keys, and the tiles of all heads run side by side. Several CTAs add to the same dQ_i, so additions are atomic. Their
// order changes from run to run: this rung is not deterministic.
#pragma once
#include "../attention/schedule.h"
#include "tile.h"

namespace strobe::ladder {

template <Config C> struct Flash2Backward {
  using Arguments = BackwardArguments;
  static constexpr i32 kThreads = kTileThreads, Br = C.tile_q, Bc = C.tile_k, d = C.head_dim;
  static constexpr i32 kBlocksPerSm = C.blocks_per_sm(kThreads, C.sums_backward());

  static __device__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Inputs &in = a.in;
    // 5: for 1 <= j <= Tc do, in parallel
    const i64 Tc = div_up(in.seqlen_k, Bc), head = blockIdx.x / Tc, b = head / in.heads_kv, h_kv = head % in.heads_kv;
    const i64 j0 = blockIdx.x % Tc * Bc;
    const Band band = in.sequence(b).band;
    const float scale = float(in.scale), unit = scale * kLog2e<float>; // exp(scale s) = exp2(unit s)
    const Matrix<const float> K(in.k, b, h_kv, in.seqlen_k, in.head_dim), V(in.v, b, h_kv, in.seqlen_k, in.head_dim);
    const Matrix<float> dK(a.dk, b, h_kv, in.seqlen_k, in.head_dim), dV(a.dv, b, h_kv, in.seqlen_k, in.head_dim);
    const Shared<Br, d> Qi(shared), dOi(Qi.end());
    const Shared<Bc, d> Kj(dOi.end()), Vj(Kj.end());
    const Shared<Br, Bc> tile_ij(Vj.end()); // P_ij, then dS_ij

    // 6: Load K_j, V_j from HBM to on-chip SRAM.
    load(Kj, K, j0);
    load(Vj, V, j0);
    // 7: Initialize dK_j = 0, dV_j = 0 on SRAM. (Here: in registers.)
    Registers<Bc, d> dKj, dVj;

    for (i64 h = h_kv * in.group; h < (h_kv + 1) * in.group; h++) { // the query heads that share the key head
      const Matrix<const float> Q(in.q, b, h, in.seqlen_q, in.head_dim), dO(a.dout, b, h, in.seqlen_q, in.head_dim);
      const i64 row0 = in.row_index(b, h, 0);
      const Matrix<float> dQ(a.dq_sum + row0 * in.head_dim, in.seqlen_q, in.head_dim);
      const float *delta = static_cast<const float *>(a.delta) + row0;
      // 8: for 1 <= i <= Tr do (only query tiles that see a key of this key tile)
      Schedule queries(band.transposed(), j0, min(j0 + Bc, in.seqlen_k), Br, Br);
      for (KeyTile tile; queries.next(tile);) {
        const i64 i0 = tile.begin;
        // 9: Load Q_i, dO_i, L_i, D_i from HBM to on-chip SRAM.
        __syncthreads(); // every thread has read the previous tiles
        load(Qi, Q, i0);
        load(dOi, dO, i0);
        __syncthreads();
        // 10: S_ij = Q_i K_j^T.
        Registers<Br, Bc> P, dS;
        multiply<d>(P, Qi, Kj.transposed());
        if (tile.masked || tile.end - i0 < Br || j0 + Bc > in.seqlen_k) hide(P, band, i0, j0);
        // 11: P_ij = exp(S_ij - L_i).
        float L[P.kRows], D[P.kRows];
#pragma unroll
        for (i32 r = 0; r < P.kRows; r++) {
          const i64 i = i0 + P.row(r);
          L[r] = log2_sum(a.lse, b, h, i, in.seqlen_q), D[r] = i < in.seqlen_q ? delta[i] : 0;
        }
        P.each([&](float &s, i32 r, i32, i32) { s = exp2(s * unit - L[r]); });
        // 12: dV_j <- dV_j + P_ij^T dO_i.
        store(tile_ij, P);
        __syncthreads();
        multiply<Br>(dVj, tile_ij.transposed(), dOi);
        // 13: dP_ij = dO_i V_j^T.
        multiply<d>(dS, dOi, Vj.transposed());
        // 14: dS_ij = P_ij o (dP_ij - D_i).
#pragma unroll
        for (i32 r = 0; r < P.kRows; r++)
#pragma unroll
          for (i32 c = 0; c < P.kColumns; c++) dS.x[r][c] = P.x[r][c] * (dS.x[r][c] - D[r]);
        __syncthreads(); // every thread has read P_ij
        store(tile_ij, dS);
        __syncthreads();
        // 15: dQ_i <- dQ_i + dS_ij K_j in HBM.
        Registers<Br, d> dSK;
        multiply<Bc>(dSK, tile_ij, Kj);
        dSK.each([&](float &x, i32, i32 i, i32 c) {
          if (dQ.holds(i0 + i, c)) atomicAdd(&dQ(i0 + i, c), x);
        });
        // 16: dK_j <- dK_j + dS_ij^T Q_i.
        multiply<Br>(dKj, tile_ij.transposed(), Qi);
      } // 17
    }
    // 18: Write dK_j, dV_j to HBM.
    store(dK, j0, 0, dKj, scale);
    store(dV, j0, 0, dVj);
  } // 19, 20
};

} // namespace strobe::ladder
