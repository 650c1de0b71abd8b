// Rung 3: the same algorithm on tensor cores. Dao 2023 (FlashAttention-2), Algorithm 1, whose lines stand beside the code.
//   1-2: Divide Q, O, L into Tr blocks, K and V into Tc blocks.
// A warp owns 16 queries of the tile and all keys (section 3.3: "split Q", not "split K"), so warps exchange nothing: S, P, O, m and l live
// in the warp's registers. Products take FP16 (BF16) and give FP32. The library's own kernels add asynchronous copies that run ahead of the
// arithmetic, Q in registers, and swizzled tiles.
#pragma once
#include "../attention/schedule.h"
#include "fragment.h"

namespace strobe::ladder {

template <Config C> struct TensorForward {
  using Arguments = ForwardArguments;
  using T = typename Element<C.dtype>::type;
  static constexpr i32 kThreads = C.threads_forward(), Br = C.tile_q, Bc = C.tile_k, d = C.head_dim;
  static constexpr i32 kBlocksPerSm = C.blocks_per_sm(kThreads, C.sums_forward());

  static __device__ void run(const Arguments &a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const Inputs &in = a.in;
    // 3: for 1 <= i <= Tr do, in parallel; with a causal mask the last tiles are the longest and go first
    const i64 Tr = div_up(in.seqlen_q, Br), head = blockIdx.x / Tr, b = head / in.heads, h = head % in.heads;
    const i64 i0 = (Tr - 1 - blockIdx.x % Tr) * Br, i_warp = i0 + threadIdx.x / 32 * 16;
    const Band band = in.sequence(b).band;
    const float unit = float(in.scale) * kLog2e<float>; // exp(scale s) = exp2(unit s)
    const Matrix<const T> Q(in.q, b, h, in.seqlen_q, in.head_dim);
    const Matrix<const T> K(in.k, b, h / in.group, in.seqlen_k, in.head_dim), V(in.v, b, h / in.group, in.seqlen_k, in.head_dim);
    const Matrix<T> O(a.out, b, h, in.seqlen_q, in.head_dim);
    const SharedHalf<T, Br, d> Qi(shared);
    const SharedHalf<T, Bc, d> Kj(Qi.end()), Vj(Kj.end());

    // 4: Load Q_i from HBM to on-chip SRAM.
    load<kThreads, C.aligned>(Qi, Q, i0);
    // 5: On chip, initialize O_i = 0, l_i = 0, m_i = -inf.
    Sums<d> Oi;
    float m[2] = {-kInfinity, -kInfinity}, l[2] = {0, 0};

    // 6: for 1 <= j <= Tc do (only key tiles that a query of this tile sees)
    Schedule keys(band, i0, min(i0 + Br, in.seqlen_q), Bc, Bc);
    for (KeyTile tile; keys.next(tile);) {
      // 7: Load K_j, V_j from HBM to on-chip SRAM.
      load<kThreads, C.aligned>(Kj, K, tile.begin);
      load<kThreads, C.aligned>(Vj, V, tile.begin);
      arrived();
      // 8: On chip, compute S_ij = Q_i K_j^T.
      Sums<Bc> S;
      u32 x[4], y[4];
#pragma unroll
      for (i32 k = 0; k < d; k += 16) {
        Qi.read_a(x, threadIdx.x / 32 * 16, k);
#pragma unroll
        for (i32 n = 0; n < Bc / 16; n++) {
          Kj.read_b_transposed(y, n * 16, k);
          S.template multiply<T>(n, x, y);
        }
      }
      if (tile.masked || tile.end - tile.begin < Bc) hide(S, band, i_warp, tile.begin);
      // 9: m_new = max(m, rowmax(S)), P~ = exp(S - m_new), l = exp(m - m_new) l + rowsum(P~).
      float base[2], alpha[2];
#pragma unroll
      for (i32 r = 0; r < 2; r++) {
        const float m_new = max(m[r], S.row_max(r));
        base[r] = reference_of(m_new, -kInfinity), alpha[r] = exp2((m[r] - base[r]) * unit);
        m[r] = m_new;
      }
      S.each([&](float &s, i32 r, i32, i32) { s = exp2((s - base[r]) * unit); });
#pragma unroll
      for (i32 r = 0; r < 2; r++) l[r] = alpha[r] * l[r] + S.row_sum(r);
      // 10: O_i = diag(exp(m - m_new)) O_i + P~ V_j.
      Oi.each([&](float &o, i32 r, i32, i32) { o *= alpha[r]; });
#pragma unroll
      for (i32 k = 0; k < Bc / 16; k++) {
        S.template as_a<T>(x, k);
#pragma unroll
        for (i32 n = 0; n < d / 16; n++) {
          Vj.read_b(y, k * 16, n * 16);
          Oi.template multiply<T>(n, x, y);
        }
      }
      __syncthreads(); // every thread has read K_j and V_j
    } // 11

    // 12, 14: O_i = diag(l)^-1 O_i, written to HBM as the i-th block of O.
    Oi.each([&](float &o, i32 r, i32 i, i32 c) {
      if (O.holds(i_warp + i, c)) O(i_warp + i, c) = Convert<T>::from(l[r] == 0 ? 0 : o / l[r]);
    });
    // 13, 15: L_i = m + log(l), written to HBM as the i-th block of L.
#pragma unroll
    for (i32 r = 0; r < 2; r++) {
      const i64 i = i_warp + Oi.row(r);
      if (a.lse && threadIdx.x % 4 == 0 && i < in.seqlen_q)
        *a.lse.at<float>(b, h, i, 0) = l[r] == 0 ? -kInfinity : m[r] * float(in.scale) + logf(l[r]);
    }
  } // 16, 17
};

} // namespace strobe::ladder
