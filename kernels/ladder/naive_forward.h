// Rung 0: attention as its formula says, in three kernels, with the S x S matrix in global memory between them.
// Dao et al. 2022 (FlashAttention), Algorithm 0, Standard Attention Implementation:
//   1: Load Q, K by blocks from HBM, compute S = Q K^T, write S to HBM.      Scores
//   2: Read S from HBM, compute P = softmax(S), write P to HBM.              Softmax
//   3: Load P and V by blocks from HBM, compute O = P V, write O to HBM.     Product
// The products are tiled (Br x Bc), because they would be slower still without tiles. Nothing is fused. A causal mask saves no work here.
#pragma once
#include "tile.h"

namespace strobe::ladder {

// scores = x y^T: S = Q K^T, and in the backward dP = dO V^T. One CTA per tile of scores.
template <Config C> struct Scores {
  using Arguments = ProductArguments;
  static constexpr i32 kThreads = kTileThreads, Br = C.tile_q, Bc = C.tile_k, d = C.head_dim;
  static constexpr i32 kBlocksPerSm = C.blocks_per_sm(kThreads, C.sums_naive());

  static __device__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Inputs &in = a.in;
    const i64 Tr = div_up(in.seqlen_q, Br), Tc = div_up(in.seqlen_k, Bc), head = blockIdx.x / (Tr * Tc);
    const i64 b = head / in.heads, h = head % in.heads, i0 = blockIdx.x / Tc % Tr * Br, j0 = blockIdx.x % Tc * Bc;
    const Matrix<const float> Q(a.x, b, h, in.seqlen_q, in.head_dim), K(a.y, b, h / in.group, in.seqlen_k, in.head_dim);
    const Matrix<float> S(a.scores + head * in.seqlen_q * in.seqlen_k, in.seqlen_q, in.seqlen_k);
    const Shared<Br, d> Qi(shared);
    const Shared<Bc, d> Kj(Qi.end());

    load(Qi, Q, i0);
    load(Kj, K, j0);
    __syncthreads();
    Registers<Br, Bc> Sij;
    multiply<d>(Sij, Qi, Kj.transposed());
    store(S, i0, j0, Sij);
  }
};

// Takes each row in three passes: its maximum, its sum, its quotients. One warp per row.
template <Config C> struct Softmax {
  using Arguments = SoftmaxArguments;
  static constexpr i32 kThreads = kTileThreads, kBlocksPerSm = 1;

  static __device__ void run(const Arguments &a) {
    const Inputs &in = a.in;
    const i64 row = ((i64)blockIdx.x * kThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (row >= in.rows()) return;
    const i64 i = row % in.seqlen_q, h = row / in.seqlen_q % in.heads, b = row / in.seqlen_q / in.heads;
    const Range seen = in.sequence(b).band.keys(i); // outside this range P is 0
    const float unit = float(in.scale) * kLog2e<float>;
    float *P = a.P + row * in.seqlen_k;

    float m = -kInfinity, l = 0;
    for (i64 j = seen.begin + lane; j < seen.end; j += 32) m = max(m, P[j]);
    for (i32 lanes = 16; lanes; lanes /= 2) m = max(m, __shfl_xor_sync(~0u, m, lanes));
    for (i64 j = seen.begin + lane; j < seen.end; j += 32) l += exp2((P[j] - m) * unit);
    for (i32 lanes = 16; lanes; lanes /= 2) l += __shfl_xor_sync(~0u, l, lanes);
    for (i64 j = lane; j < in.seqlen_k; j += 32) P[j] = j >= seen.begin && j < seen.end ? exp2((P[j] - m) * unit) / l : 0;
    if (lane == 0 && a.lse) *a.lse.at<float>(b, h, i, 0) = l == 0 ? -kInfinity : m * float(in.scale) + logf(l);
  }
};

// out = scores y, times factor: O = P V, and in the backward dQ = dS K. One CTA per tile of queries.
template <Config C> struct Product {
  using Arguments = ProductArguments;
  static constexpr i32 kThreads = kTileThreads, Br = C.tile_q, Bc = C.tile_k, d = C.head_dim;
  static constexpr i32 kBlocksPerSm = C.blocks_per_sm(kThreads, C.sums_naive());

  static __device__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Inputs &in = a.in;
    const i64 Tr = div_up(in.seqlen_q, Br), head = blockIdx.x / Tr, b = head / in.heads, h = head % in.heads, i0 = blockIdx.x % Tr * Br;
    const Matrix<const float> P(a.scores + head * in.seqlen_q * in.seqlen_k, in.seqlen_q, in.seqlen_k);
    const Matrix<const float> V(a.y, b, h / in.group, in.seqlen_k, in.head_dim);
    const Matrix<float> O(a.out, b, h, in.seqlen_q, in.head_dim);
    const Shared<Br, Bc> Pij(shared);
    const Shared<Bc, d> Vj(Pij.end());

    Registers<Br, d> Oi;
    for (i64 j0 = 0; j0 < in.seqlen_k; j0 += Bc) {
      __syncthreads(); // every thread has read the previous tiles
      load(Pij, P, i0, j0);
      load(Vj, V, j0);
      __syncthreads();
      multiply<Bc>(Oi, Pij, Vj);
    }
    store(O, i0, 0, Oi, float(a.factor));
  }
};

} // namespace strobe::ladder
