// Rung 3, backward. Dao 2023, Algorithm 2, whose lines stand beside the code (1-4 as in flash2_backward.h).
// A warp owns 16 keys of the tile and computes S^T and dP^T, keys by queries, 16 queries at a time. Rounded to 16 bits, P^T and dS^T are
// the left operands of dV and dK without leaving the registers. dQ sums over all keys, hence over warps, and takes dS through shared
// memory. At d > 128 dK and dV of 16 keys do not fit one warp, so two warps compute the same S^T, and each holds half of the columns.
#pragma once
#include "../attention/schedule.h"
#include "fragment.h"

namespace strobe::ladder {

template <Config C> struct TensorBackward {
  using Arguments = BackwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr i32 kThreads = C.threads_backward(), Br = C.tile_q, Bc = C.tile_k, d = C.head_dim;
  static constexpr i32 kBlocksPerSm = C.blocks_per_sm(kThreads, C.sums_backward());
  static constexpr i32 kPart = d / C.parts(); // columns of dK and dV that a warp holds

  static __device__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Inputs &in = a.in;
    // 5: for 1 <= j <= Tc do, in parallel
    const i64 Tc = div_up(in.seqlen_k, Bc), head = blockIdx.x / Tc, b = head / in.heads_kv, h_kv = head % in.heads_kv;
    const i64 j0 = blockIdx.x % Tc * Bc;
    const i32 warp = threadIdx.x / 32, key = warp / C.parts() * 16, c0 = warp % C.parts() * kPart; // the warp's keys and columns
    const Band band = in.sequence(b).band, seen_by = band.transposed();
    const float scale = float(in.scale), unit = scale * kLog2e<float>; // exp(scale s) = exp2(unit s)
    const Matrix<const T> K(in.k, b, h_kv, in.seqlen_k, in.head_dim), V(in.v, b, h_kv, in.seqlen_k, in.head_dim);
    const Matrix<T> dK(a.dk, b, h_kv, in.seqlen_k, in.head_dim), dV(a.dv, b, h_kv, in.seqlen_k, in.head_dim);
    const SharedHalf<T, Br, d> Qi(shared), dOi(Qi.end());
    const SharedHalf<T, Bc, d> Kj(dOi.end()), Vj(Kj.end());
    const SharedHalf<T, Bc, Br> dS_ij(Vj.end()); // transposed: keys by queries
    float *const L = static_cast<float *>(dS_ij.end()), *const D = L + Br;

    // 6: Load K_j, V_j from HBM to on-chip SRAM.
    load<kThreads, C.aligned>(Kj, K, j0);
    load<kThreads, C.aligned>(Vj, V, j0);
    // 7: Initialize dK_j = 0, dV_j = 0. (Here: in registers.)
    Sums<kPart> dKj, dVj;

    for (i64 h = h_kv * in.group; h < (h_kv + 1) * in.group; h++) { // the query heads that share the key head
      const Matrix<const T> Q(in.q, b, h, in.seqlen_q, in.head_dim), dO(a.dout, b, h, in.seqlen_q, in.head_dim);
      const i64 row0 = in.row_index(b, h, 0);
      const Matrix<float> dQ(a.dq_sum + row0 * in.head_dim, in.seqlen_q, in.head_dim);
      const float *delta = static_cast<const float *>(a.delta) + row0;
      // 8: for 1 <= i <= Tr do (only query tiles that see a key of this key tile)
      Schedule queries(seen_by, j0, min(j0 + Bc, in.seqlen_k), Br, Br);
      for (KeyTile tile; queries.next(tile);) {
        const i64 i0 = tile.begin;
        const bool masked = tile.masked || tile.end - i0 < Br || j0 + Bc > in.seqlen_k;
        // 9: Load Q_i, dO_i, L_i, D_i from HBM to on-chip SRAM.
        load<kThreads, C.aligned>(Qi, Q, i0);
        load<kThreads, C.aligned>(dOi, dO, i0);
        for (i32 i = threadIdx.x; i < Br; i += kThreads) {
          L[i] = log2_sum(a.lse, b, h, i0 + i, in.seqlen_q), D[i] = i0 + i < in.seqlen_q ? delta[i0 + i] : 0;
        }
        arrived();
        u32 x[4], y[4];
        for (i32 q = 0; q < Br; q += 16) {
          // 10: S_ij^T = K_j Q_i^T; 13: dP_ij^T = V_j dO_i^T.
          Sums<16> P, dS;
#pragma unroll 2
          for (i32 k = 0; k < d; k += 16) {
            Kj.read_a(x, key, k);
            Qi.read_b_transposed(y, q, k);
            P.template multiply<T>(0, x, y);
            Vj.read_a(x, key, k);
            dOi.read_b_transposed(y, q, k);
            dS.template multiply<T>(0, x, y);
          }
          if (masked) hide(P, seen_by, j0 + key, i0 + q);
          // 11: P_ij = exp(S_ij - L_i).
          P.each([&](float &s, i32, i32, i32 i) { s = exp2(s * unit - L[q + i]); });
          // 14: dS_ij = P_ij o (dP_ij - D_i).
#pragma unroll
          for (i32 n = 0; n < 2; n++)
#pragma unroll
            for (i32 e = 0; e < 4; e++) dS.x[n][e] = P.x[n][e] * (dS.x[n][e] - D[q + 8 * n + threadIdx.x % 4 * 2 + e % 2]);
          // 12: dV_j <- dV_j + P_ij^T dO_i.
          P.template as_a<T>(x, 0);
#pragma unroll
          for (i32 n = 0; n < kPart / 16; n++) {
            dOi.read_b(y, q, c0 + n * 16);
            dVj.template multiply<T>(n, x, y);
          }
          // 16: dK_j <- dK_j + dS_ij^T Q_i.
          dS.template as_a<T>(x, 0);
#pragma unroll
          for (i32 n = 0; n < kPart / 16; n++) {
            Qi.read_b(y, q, c0 + n * 16);
            dKj.template multiply<T>(n, x, y);
          }
          dS.each([&](float &s, i32, i32 j, i32 i) { *dS_ij.at(key + j, q + i) = Convert<T>::from(s); });
        }
        __syncthreads();
        // 15: dQ_i <- dQ_i + dS_ij K_j in HBM, 16 x 16 at a time.
        for (i32 n = warp; n < Br / 16 * (d / 16); n += kThreads / 32) {
          const i32 q = n / (d / 16) * 16, c = n % (d / 16) * 16;
          Sums<16> sum;
#pragma unroll
          for (i32 k = 0; k < Bc; k += 16) {
            dS_ij.read_a_transposed(x, k, q);
            Kj.read_b(y, k, c);
            sum.template multiply<T>(0, x, y);
          }
          sum.each([&](float &s, i32, i32 i, i32 column) {
            if (dQ.holds(i0 + q + i, c + column)) atomicAdd(&dQ(i0 + q + i, c + column), s);
          });
        }
        __syncthreads(); // every thread has read Q_i, dO_i and dS_ij
      } // 17
    }
    // 18: Write dK_j, dV_j to HBM.
    dKj.each([&](float &x, i32, i32 j, i32 c) {
      if (dK.holds(j0 + key + j, c0 + c)) dK(j0 + key + j, c0 + c) = Convert<T>::from(x * scale);
    });
    dVj.each([&](float &x, i32, i32 j, i32 c) {
      if (dV.holds(j0 + key + j, c0 + c)) dV(j0 + key + j, c0 + c) = Convert<T>::from(x);
    });
  } // 19, 20
};

} // namespace strobe::ladder
