// Rung 0, backward. Dao et al. 2022, appendix B, Algorithm 3, Standard Attention Backward Pass:
//   1: Load P, dO by blocks from HBM, compute dV = P^T dO, write dV to HBM.                      ProductTransposed
//   2: Load dO, V by blocks from HBM, compute dP = dO V^T, write dP to HBM.                      Scores (naive_forward.h)
//   3: Read P, dP from HBM, compute dS, dS_ij = P_ij (dP_ij - sum_l P_il dP_il), write it.       SoftmaxGradient
//   4: Load dS and K by blocks from HBM, compute dQ = dS K, write dQ to HBM.                     Product (naive_forward.h)
//   5: Load dS and Q by blocks from HBM, compute dK = dS^T Q, write dK to HBM.                   ProductTransposed
// The paper keeps P from the forward. Here Scores and Softmax compute P again.
#pragma once
#include "tile.h"

namespace strobe::ladder {

// One warp per row.
template <Config C> struct SoftmaxGradient {
  using Arguments = SoftmaxArguments;
  static constexpr i32 kThreads = kTileThreads, kBlocksPerSm = 1;

  static __device__ void run(const Arguments &a) {
    const i64 row = ((i64)blockIdx.x * kThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= a.in.rows()) return;
    const float *P = a.P + row * a.in.seqlen_k;
    float *dP = a.dP + row * a.in.seqlen_k;

    float D = 0;
    for (i64 j = lane; j < a.in.seqlen_k; j += 32) D += P[j] * dP[j];
    for (i32 lanes = 16; lanes; lanes /= 2) D += __shfl_xor_sync(~0u, D, lanes);
    for (i64 j = lane; j < a.in.seqlen_k; j += 32) dP[j] = P[j] * (dP[j] - D);
  }
};

// out = scores^T x, times factor, summed over the heads that share a key head: dV = P^T dO, dK = dS^T Q. One CTA per tile of keys.
template <Config C> struct ProductTransposed {
  using Arguments = ProductArguments;
  static constexpr i32 kThreads = kTileThreads, Br = C.tile_q, Bc = C.tile_k, d = C.head_dim;
  static constexpr i32 kBlocksPerSm = C.blocks_per_sm(kThreads, C.sums_naive());

  static __device__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Inputs &in = a.in;
    const i64 Tc = div_up(in.seqlen_k, Bc), b = blockIdx.x / Tc / in.heads_kv, h_kv = blockIdx.x / Tc % in.heads_kv;
    const i64 j0 = blockIdx.x % Tc * Bc;
    const Matrix<float> dV(a.out, b, h_kv, in.seqlen_k, in.head_dim);
    const Shared<Br, Bc> Pij(shared);
    const Shared<Br, d> dOi(Pij.end());

    Registers<Bc, d> dVj;
    for (i64 h = h_kv * in.group; h < (h_kv + 1) * in.group; h++) {
      const Matrix<const float> P(a.scores + (b * in.heads + h) * in.seqlen_q * in.seqlen_k, in.seqlen_q, in.seqlen_k);
      const Matrix<const float> dO(a.x, b, h, in.seqlen_q, in.head_dim);
      for (i64 i0 = 0; i0 < in.seqlen_q; i0 += Br) {
        __syncthreads(); // every thread has read the previous tiles
        load(Pij, P, i0, j0);
        load(dOi, dO, i0);
        __syncthreads();
        multiply<Br>(dVj, Pij.transposed(), dOi);
      }
    }
    store(dV, j0, 0, dVj, float(a.factor));
  }
};

} // namespace strobe::ladder
