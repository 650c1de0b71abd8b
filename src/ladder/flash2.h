// Rung 2: O stays on the chip. Dao 2023 (FlashAttention-2), Algorithms 1 and 2, whose lines stand beside the code. The forward's loops have
// changed places: a tile of queries is an item of work, O is written once, and the division by l comes at the end.
#pragma once
#include "ladder/tile.h"

namespace strobe::ladder::cpu {

class Flash2 {
public:
  // The floats that a call keeps in memory: in the backward, D of each query.
  static int64_t memory(const Problem &p, Operation operation) {
    return operation == Operation::forward ? 0 : p.batch * p.heads * p.seqlen_q;
  }
  static int64_t sram(const TileSize &size, int64_t d, Operation operation) {
    Sram count;
    operation == Operation::forward ? void(Forward(count, size, d)) : void(Backward(count, size, d));
    return count.taken();
  }
  static int64_t items(const Problem &p, const TileSize &size, Operation operation) {
    return operation == Operation::forward ? p.batch * p.heads * div_up(p.seqlen_q, size.q) : p.batch * p.heads_kv;
  }

  // One item: a tile of queries.
  static void forward(const Problem &p, const TileSize &size, int64_t item, float *, Sram sram) {
    const int64_t Tr = div_up(p.seqlen_q, size.q), b = item / Tr / p.heads, h = item / Tr % p.heads, kv = h / p.group(), d = p.head_dim;
    const int64_t i0 = item % Tr * size.q, i1 = std::min(i0 + size.q, p.seqlen_q);
    const Band band = band_of(p);
    const float scale = float(p.scale);
    const Matrix Q = head(p.q, b, h, p.seqlen_q, d), K = head(p.k, b, kv, p.seqlen_k, d), V = head(p.v, b, kv, p.seqlen_k, d);
    auto [Qi, KjT, Vj, S, Oi, l, m] = Forward(sram, size, d);

    // 4: Load Q_i from HBM to on-chip SRAM.
    load(Qi, Q, i0, i1);
    // 5: On chip, initialize O_i = 0, l_i = 0, m_i = -inf.
    zero(Oi, i1 - i0, d);
    l.fill(0), m.fill(-kInfinity);
    // 6: for 1 <= j <= Tc do (only key tiles that a query of this tile sees)
    Schedule keys(band, i0, i1, size.k, size.k);
    for (KeyTile tile; keys.next(tile);) {
      // 7: Load K_j, V_j from HBM to on-chip SRAM.
      load_transposed(KjT, K, tile.begin, tile.end);
      load(Vj, V, tile.begin, tile.end);
      // 8: On chip, compute S_ij = Q_i K_j^T.
      multiply(S, Qi, KjT);
      if (tile.masked) hide(S, band, i0, tile.begin);
      // 9: m_new = max(m, rowmax(S)), P~ = exp(S - m_new), l = exp(m - m_new) l + rowsum(P~).
      for (int64_t r = 0; r < S.rows; r++) {
        const float m_new = std::max(m[0][r], row_max(S[r], S.columns)), base = reference_of(m_new);
        const float alpha = std::exp(scale * (m[0][r] - base));
        l[0][r] = alpha * l[0][r] + exponentials(S[r], S.columns, base, scale);
        m[0][r] = m_new;
        for (int64_t c = 0; c < d; c++) Oi[r][c] *= alpha;
      }
      // 10: O_i = diag(exp(m - m_new)) O_i + P~ V_j.
      multiply_add(Oi, S, Vj);
    } // 11
    // 12: O_i = diag(l)^-1 O_i.
    for (int64_t r = 0; r < Oi.rows; r++)
      for (int64_t c = 0; c < d && l[0][r] != 0; c++) Oi[r][c] /= l[0][r];
    // 14: Write O_i to HBM as the i-th block of O.
    store(head(p.out, b, h, p.seqlen_q, d), i0, 0, Oi);
    // 13, 15: L_i = m + log(l), written to HBM as the i-th block of L.
    for (int64_t r = 0; r < Oi.rows && p.lse; r++) *p.lse.at<float>(b, h, i0 + r, 0) = log_sum(m[0][r], l[0][r], scale);
  } // 16, 17

  // One item: a key head, with the query heads that share it. The paper also divides key tiles among blocks, which add to dQ atomically.
  // Here the order of every sum must be the same in each run.
  static void backward(const Problem &p, const TileSize &size, int64_t item, float *memory, Sram sram) {
    const int64_t b = item / p.heads_kv, kv = item % p.heads_kv, d = p.head_dim, h0 = kv * p.group();
    const Band band = band_of(p);
    const float scale = float(p.scale);
    const Matrix K = head(p.k, b, kv, p.seqlen_k, d), V = head(p.v, b, kv, p.seqlen_k, d);
    const Matrix dK = head(p.dk, b, kv, p.seqlen_k, d), dV = head(p.dv, b, kv, p.seqlen_k, d);
    float *const D = memory + item * p.group() * p.seqlen_q;
    auto [Qi, dOi, Kj, KjT, VjT, P, dS, dKj, dVj, dQi] = Backward(sram, size, d);

    // 3: Initialize dQ = 0 in HBM.
    // 4: Compute D = rowsum(dO o O), write D to HBM.
    for (int64_t n = 0; n < p.group(); n++) {
      const Matrix O = head(p.out, b, h0 + n, p.seqlen_q, d), dO = head(p.dout, b, h0 + n, p.seqlen_q, d);
      clear(head(p.dq, b, h0 + n, p.seqlen_q, d));
      for (int64_t i = 0; i < p.seqlen_q; i++) {
        D[n * p.seqlen_q + i] = 0;
        for (int64_t c = 0; c < d; c++) D[n * p.seqlen_q + i] += dO(i, c) * O(i, c);
      }
    }
    // 5: for 1 <= j <= Tc do
    for (int64_t j0 = 0; j0 < p.seqlen_k; j0 += size.k) {
      const int64_t j1 = std::min(j0 + size.k, p.seqlen_k);
      // 6: Load K_j, V_j from HBM to on-chip SRAM.
      load(Kj, K, j0, j1);
      load_transposed(KjT, K, j0, j1);
      load_transposed(VjT, V, j0, j1);
      // 7: Initialize dK_j = 0, dV_j = 0 on SRAM.
      zero(dKj, j1 - j0, d), zero(dVj, j1 - j0, d);
      for (int64_t n = 0; n < p.group(); n++) {
        const Matrix Q = head(p.q, b, h0 + n, p.seqlen_q, d), dO = head(p.dout, b, h0 + n, p.seqlen_q, d);
        const Matrix dQ = head(p.dq, b, h0 + n, p.seqlen_q, d);
        // 8: for 1 <= i <= Tr do (only query tiles that see a key of this key tile)
        Schedule queries(band.transposed(), j0, j1, size.q, size.q);
        for (KeyTile tile; queries.next(tile);) {
          const int64_t i0 = tile.begin;
          // 9: Load Q_i, dO_i, L_i, D_i from HBM to on-chip SRAM. (L_i and D_i below, row by row)
          load(Qi, Q, i0, tile.end);
          load(dOi, dO, i0, tile.end);
          // 10: S_ij = Q_i K_j^T.
          multiply(P, Qi, KjT);
          if (tile.masked) hide(P, band, i0, j0);
          // 11: P_ij = exp(S_ij - L_i).
          probabilities(P, p.lse, b, h0 + n, i0, scale);
          // 12: dV_j <- dV_j + P_ij^T dO_i.
          multiply_add_transposed(dVj, P, dOi);
          // 13: dP_ij = dO_i V_j^T.
          multiply(dS, dOi, VjT);
          // 14: dS_ij = P_ij o (dP_ij - D_i).
          for (int64_t r = 0; r < P.rows; r++)
            for (int64_t j = 0; j < P.columns; j++) dS[r][j] = P[r][j] * (dS[r][j] - D[n * p.seqlen_q + i0 + r]);
          // 15: dQ_i <- dQ_i + dS_ij K_j in HBM.
          multiply(dQi, dS, Kj);
          add(dQ, i0, dQi, scale);
          // 16: dK_j <- dK_j + dS_ij^T Q_i.
          multiply_add_transposed(dKj, dS, Qi);
        } // 17
      }
      // 18: Write dK_j, dV_j to HBM.
      store(dK, j0, 0, dKj, scale);
      store(dV, j0, 0, dVj);
    } // 19, 20
  }

private:
  struct Forward {
    Tile Qi, KjT, Vj, S, Oi, l, m;
    Forward(Sram &sram, const TileSize &size, int64_t d)
        : Qi(sram.tile(size.q, d)), KjT(sram.tile(d, size.k)), Vj(sram.tile(size.k, d)), S(sram.tile(size.q, size.k)),
          Oi(sram.tile(size.q, d)), l(sram.tile(1, size.q)), m(sram.tile(1, size.q)) {}
  };
};

} // namespace strobe::ladder::cpu
