// Rung 1: S never leaves the chip. Dao et al. 2022 (FlashAttention), Algorithm 1, and Algorithm 4 of appendix B, whose lines stand beside
// the code. The outer loop is over keys, so every step reads O_i, l_i, m_i from memory and writes them back.
#pragma once
#include "ladder/tile.h"

namespace strobe::ladder::cpu {

class Flash1 {
public:
  // The floats that a call keeps in memory: l and m of each query.
  static int64_t memory(const Problem &p, Operation operation) {
    return operation == Operation::forward ? 2 * p.batch * p.heads * p.seqlen_q : 0;
  }
  static int64_t sram(const TileSize &size, int64_t d, Operation operation) {
    Sram count;
    operation == Operation::forward ? void(Forward(count, size, d)) : void(Backward(count, size, d));
    return count.taken();
  }
  static int64_t items(const Problem &p, const TileSize &, Operation operation) {
    return p.batch * (operation == Operation::forward ? p.heads : p.heads_kv);
  }

  static void forward(const Problem &p, const TileSize &size, int64_t item, float *memory, Sram sram) {
    const int64_t b = item / p.heads, h = item % p.heads, kv = h / p.group(), d = p.head_dim;
    const Band band = band_of(p);
    const float scale = float(p.scale);
    const Matrix Q = head(p.q, b, h, p.seqlen_q, d), K = head(p.k, b, kv, p.seqlen_k, d), V = head(p.v, b, kv, p.seqlen_k, d);
    const Matrix O = head(p.out, b, h, p.seqlen_q, d);
    float *const l = memory + 2 * item * p.seqlen_q, *const m = l + p.seqlen_q;
    auto [Qi, KjT, Vj, S, PV] = Forward(sram, size, d);

    // 2: Initialize O = 0, l = 0, m = -inf in HBM.
    clear(O);
    std::fill_n(l, p.seqlen_q, 0.0f), std::fill_n(m, p.seqlen_q, -kInfinity);
    // 5: for 1 <= j <= Tc do
    for (int64_t j0 = 0; j0 < p.seqlen_k; j0 += size.k) {
      const int64_t j1 = std::min(j0 + size.k, p.seqlen_k);
      // 6: Load K_j, V_j from HBM to on-chip SRAM.
      load_transposed(KjT, K, j0, j1);
      load(Vj, V, j0, j1);
      // 7: for 1 <= i <= Tr do (only query tiles that see a key of this key tile)
      Schedule queries(band.transposed(), j0, j1, size.q, size.q);
      for (KeyTile tile; queries.next(tile);) {
        const int64_t i0 = tile.begin;
        // 8: Load Q_i, O_i, l_i, m_i from HBM to on-chip SRAM. (O_i, l_i, m_i below, row by row)
        load(Qi, Q, i0, tile.end);
        // 9: On chip, compute S_ij = Q_i K_j^T.
        multiply(S, Qi, KjT);
        if (tile.masked) hide(S, band, i0, j0);
        for (int64_t r = 0; r < S.rows; r++) {
          // 10: m~ = rowmax(S_ij), P~ = exp(S_ij - m~), l~ = rowsum(P~).
          const float m_tile = row_max(S[r], S.columns), l_tile = exponentials(S[r], S.columns, reference_of(m_tile), scale);
          // 11: m_new = max(m_i, m~), l_new = exp(m_i - m_new) l_i + exp(m~ - m_new) l~.
          float &m_i = m[i0 + r], &l_i = l[i0 + r];
          const float m_new = std::max(m_i, m_tile), base = reference_of(m_new);
          const float of_old = std::exp(scale * (m_i - base)) * l_i, of_tile = std::exp(scale * (m_tile - base));
          const float l_new = of_old + of_tile * l_tile;
          // 12: Write O_i <- diag(l_new)^-1 (diag(l_i) exp(m_i - m_new) O_i + exp(m~ - m_new) P~ V_j) to HBM.
          std::fill_n(PV[r], d, 0.0f);
          multiply_add_row(PV[r], S[r], 1, Vj);
          for (int64_t c = 0; c < d && l_new != 0; c++) O(i0 + r, c) = (of_old * O(i0 + r, c) + of_tile * PV[r][c]) / l_new;
          // 13: Write l_i <- l_new, m_i <- m_new to HBM.
          l_i = l_new, m_i = m_new;
        }
      } // 14
    } // 15
    // 16: Return O. (The backward needs only LSE = m + log l.)
    for (int64_t i = 0; i < p.seqlen_q && p.lse; i++) *p.lse.at<float>(b, h, i, 0) = log_sum(m[i], l[i], scale);
  }

  // One item: a key head, with the query heads that share it. Lines 1, 14, 15 and 18 of the paper are about dropout.
  static void backward(const Problem &p, const TileSize &size, int64_t item, float *, Sram sram) {
    const int64_t b = item / p.heads_kv, kv = item % p.heads_kv, d = p.head_dim, h0 = kv * p.group();
    const Band band = band_of(p);
    const float tau = float(p.scale);
    const Matrix K = head(p.k, b, kv, p.seqlen_k, d), V = head(p.v, b, kv, p.seqlen_k, d);
    const Matrix dK = head(p.dk, b, kv, p.seqlen_k, d), dV = head(p.dv, b, kv, p.seqlen_k, d);
    auto [Qi, dOi, Kj, KjT, VjT, P, dS, dKj, dVj, dQi] = Backward(sram, size, d);

    // 5: Initialize dQ = 0 in HBM.
    for (int64_t h = h0; h < h0 + p.group(); h++) clear(head(p.dq, b, h, p.seqlen_q, d));
    // 6: for 1 <= j <= Tc do
    for (int64_t j0 = 0; j0 < p.seqlen_k; j0 += size.k) {
      const int64_t j1 = std::min(j0 + size.k, p.seqlen_k);
      // 7: Load K_j, V_j from HBM to on-chip SRAM.
      load(Kj, K, j0, j1);
      load_transposed(KjT, K, j0, j1);
      load_transposed(VjT, V, j0, j1);
      // 8: Initialize dK~_j = 0, dV~_j = 0 on SRAM.
      zero(dKj, j1 - j0, d), zero(dVj, j1 - j0, d);
      for (int64_t h = h0; h < h0 + p.group(); h++) {
        const Matrix Q = head(p.q, b, h, p.seqlen_q, d), O = head(p.out, b, h, p.seqlen_q, d), dO = head(p.dout, b, h, p.seqlen_q, d);
        const Matrix dQ = head(p.dq, b, h, p.seqlen_q, d);
        // 9: for 1 <= i <= Tr do (only query tiles that see a key of this key tile)
        Schedule queries(band.transposed(), j0, j1, size.q, size.q);
        for (KeyTile tile; queries.next(tile);) {
          const int64_t i0 = tile.begin;
          // 10: Load Q_i, O_i, dO_i, dQ_i, l_i, m_i from HBM to on-chip SRAM. (O_i and dQ_i below; l_i and m_i are LSE_i)
          load(Qi, Q, i0, tile.end);
          load(dOi, dO, i0, tile.end);
          // 11: S_ij = tau Q_i K_j^T. (Here tau is applied in the exponent.)
          multiply(P, Qi, KjT);
          // 12: S_ij^masked = MASK(S_ij).
          if (tile.masked) hide(P, band, i0, j0);
          // 13: P_ij = diag(l_i)^-1 exp(S_ij^masked - m_i), which is exp(S_ij^masked - LSE_i).
          probabilities(P, p.lse, b, h, i0, tau);
          // 16: dV~_j <- dV~_j + P_ij^T dO_i.
          multiply_add_transposed(dVj, P, dOi);
          // 17: dP_ij = dO_i V_j^T.
          multiply(dS, dOi, VjT);
          for (int64_t r = 0; r < P.rows; r++) {
            // 19: D_i = rowsum(dO_i o O_i).
            float D = 0;
            for (int64_t c = 0; c < d; c++) D += dOi[r][c] * O(i0 + r, c);
            // 20: dS_ij = P_ij o (dP_ij - D_i).
            for (int64_t j = 0; j < P.columns; j++) dS[r][j] = P[r][j] * (dS[r][j] - D);
          }
          // 21: Write dQ_i <- dQ_i + tau dS_ij K_j to HBM.
          multiply(dQi, dS, Kj);
          add(dQ, i0, dQi, tau);
          // 22: dK~_j <- dK~_j + tau dS_ij^T Q_i.
          multiply_add_transposed(dKj, dS, Qi);
        } // 23
      }
      // 24: Write dK_j <- dK~_j, dV_j <- dV~_j to HBM.
      store(dK, j0, 0, dKj, tau);
      store(dV, j0, 0, dVj);
    } // 25
    // 26: Return dQ, dK, dV.
  }

private:
  struct Forward {
    Tile Qi, KjT, Vj, S, PV;
    Forward(Sram &sram, const TileSize &size, int64_t d)
        : Qi(sram.tile(size.q, d)), KjT(sram.tile(d, size.k)), Vj(sram.tile(size.k, d)), S(sram.tile(size.q, size.k)),
          PV(sram.tile(size.q, d)) {}
  };
};

} // namespace strobe::ladder::cpu
