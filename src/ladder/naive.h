// Rung 0: attention as its formula says, with all of S and P in memory. Dao et al. 2022 (FlashAttention), Algorithm 0, and Algorithm 3 of
// appendix B. Products are computed tile by tile, nothing is fused, and a causal mask saves no work.
#pragma once
#include "ladder/tile.h"

namespace strobe::ladder::cpu {

class Naive {
public:
  // The floats that a call keeps in memory: S of every head, which becomes P; in the backward P and dP.
  static int64_t memory(const Problem &p, Operation operation) {
    return p.batch * p.heads * p.seqlen_q * p.seqlen_k * (operation == Operation::forward ? 1 : 2);
  }
  static int64_t sram(const TileSize &size, int64_t d, Operation) {
    Sram count;
    Tiles(count, size, d);
    return count.taken();
  }
  static int64_t items(const Problem &p, const TileSize &, Operation operation) {
    return p.batch * (operation == Operation::forward ? p.heads : p.heads_kv);
  }

  static void forward(const Problem &p, const TileSize &size, int64_t item, float *memory, Sram sram) {
    const int64_t b = item / p.heads, h = item % p.heads, kv = h / p.group(), d = p.head_dim;
    const Matrix Q = head(p.q, b, h, p.seqlen_q, d), K = head(p.k, b, kv, p.seqlen_k, d), V = head(p.v, b, kv, p.seqlen_k, d);
    const Matrix S = whole(p, memory, b, h);
    Tiles t(sram, size, d);
    // 1: S = Q K^T.
    outer(S, Q, K, size, t);
    // 2: P = softmax(S).
    softmax(S, p, p.lse, b, h);
    // 3: O = P V.
    product(head(p.out, b, h, p.seqlen_q, d), S, V, 1, size, t);
  }

  // One item: a key head, with the query heads that share it.
  static void backward(const Problem &p, const TileSize &size, int64_t item, float *memory, Sram sram) {
    const int64_t b = item / p.heads_kv, kv = item % p.heads_kv, d = p.head_dim;
    const Matrix K = head(p.k, b, kv, p.seqlen_k, d), V = head(p.v, b, kv, p.seqlen_k, d);
    const Matrix dK = head(p.dk, b, kv, p.seqlen_k, d), dV = head(p.dv, b, kv, p.seqlen_k, d);
    Tiles t(sram, size, d);
    clear(dK), clear(dV);
    for (int64_t h = kv * p.group(); h < (kv + 1) * p.group(); h++) {
      const Matrix Q = head(p.q, b, h, p.seqlen_q, d), dO = head(p.dout, b, h, p.seqlen_q, d);
      // The paper keeps P from the forward. Here P is computed again.
      const Matrix P = whole(p, memory, b, h), dP = whole(p, memory + memory_of(p), b, h);
      outer(P, Q, K, size, t);
      softmax(P, p, {}, b, h);
      // 1: dV = P^T dO.
      product_transposed(dV, P, dO, 1, size, t);
      // 2: dP = dO V^T.
      outer(dP, dO, V, size, t);
      // 3: dS_ij = P_ij (dP_ij - sum_l P_il dP_il), in place of dP.
      for (int64_t i = 0; i < p.seqlen_q; i++) {
        float D = 0;
        for (int64_t j = 0; j < p.seqlen_k; j++) D += P(i, j) * dP(i, j);
        for (int64_t j = 0; j < p.seqlen_k; j++) dP(i, j) = P(i, j) * (dP(i, j) - D);
      }
      // 4: dQ = dS K.
      product(head(p.dq, b, h, p.seqlen_q, d), dP, K, float(p.scale), size, t);
      // 5: dK = dS^T Q.
      product_transposed(dK, dP, Q, float(p.scale), size, t);
    }
  }

private:
  struct Tiles {
    Tile x, y, scores, result; // x: of Q or dO; y: of K or V; scores: of S, P, dP or dS
    Tiles(Sram &sram, const TileSize &size, int64_t d)
        : x(sram.tile(size.q, d)), y(sram.tile(size.k, d)), scores(sram.tile(size.q, size.k)),
          result(sram.tile(std::max(size.q, size.k), std::max(size.k, d))) {}
  };

  static int64_t memory_of(const Problem &p) { return memory(p, Operation::forward); }
  static Matrix whole(const Problem &p, float *memory, int64_t b, int64_t h) {
    return {memory + (b * p.heads + h) * p.seqlen_q * p.seqlen_k, p.seqlen_q, p.seqlen_k, p.seqlen_k};
  }

  // S = x y^T
  static void outer(const Matrix &S, const Matrix &x, const Matrix &y, const TileSize &size, Tiles &t) {
    for (int64_t i0 = 0; i0 < S.rows; i0 += size.q) {
      load(t.x, x, i0, std::min(i0 + size.q, S.rows));
      for (int64_t j0 = 0; j0 < S.columns; j0 += size.k) {
        load_transposed(t.y, y, j0, std::min(j0 + size.k, S.columns));
        multiply(t.result, t.x, t.y);
        store(S, i0, j0, t.result);
      }
    }
  }

  // out = factor P y
  static void product(const Matrix &out, const Matrix &P, const Matrix &y, float factor, const TileSize &size, Tiles &t) {
    for (int64_t i0 = 0; i0 < out.rows; i0 += size.q) {
      const int64_t i1 = std::min(i0 + size.q, out.rows);
      zero(t.result, i1 - i0, out.columns);
      for (int64_t j0 = 0; j0 < P.columns; j0 += size.k) {
        const int64_t j1 = std::min(j0 + size.k, P.columns);
        load(t.scores, P, i0, i1, j0, j1);
        load(t.y, y, j0, j1);
        multiply_add(t.result, t.scores, t.y);
      }
      store(out, i0, 0, t.result, factor);
    }
  }

  // out += factor P^T x
  static void product_transposed(const Matrix &out, const Matrix &P, const Matrix &x, float factor, const TileSize &size, Tiles &t) {
    for (int64_t j0 = 0; j0 < out.rows; j0 += size.k) {
      const int64_t j1 = std::min(j0 + size.k, out.rows);
      zero(t.result, j1 - j0, out.columns);
      for (int64_t i0 = 0; i0 < P.rows; i0 += size.q) {
        const int64_t i1 = std::min(i0 + size.q, P.rows);
        load(t.scores, P, i0, i1, j0, j1);
        load(t.x, x, i0, i1);
        multiply_add_transposed(t.result, t.scores, t.x);
      }
      add(out, j0, t.result, factor);
    }
  }

  // Each row takes three passes: for the maximum, the sum, the quotients.
  static void softmax(const Matrix &S, const Problem &p, const View &lse, int64_t b, int64_t h) {
    const Band band = band_of(p);
    const float scale = float(p.scale);
    for (int64_t i = 0; i < S.rows; i++) {
      float *row = &S(i, 0);
      for (int64_t j = 0; j < S.columns; j++)
        if (!band.visible(i, j)) row[j] = -kInfinity;
      const float m = row_max(row, S.columns), l = exponentials(row, S.columns, reference_of(m), scale);
      for (int64_t j = 0; j < S.columns && l != 0; j++) row[j] /= l;
      if (lse) *lse.at<float>(b, h, i, 0) = log_sum(m, l, scale);
    }
  }
};

} // namespace strobe::ladder::cpu
