// The building blocks of the CPU's rungs: a head's matrix in memory ("HBM" in the papers), a tile of it ("SRAM"), and the product of tiles.
// A tile has only rows that exist, so nothing is padded.
#pragma once
#include <algorithm>
#include <cmath>

#include "../../kernels/attention/schedule.h"
#include "attention/attention.h"

namespace strobe::ladder::cpu {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct TileSize {
  int64_t q, k; // Br, Bc
};

struct Matrix { // one head, with the caller's strides; or all of S, P, dP or dS
  float *x = nullptr;
  int64_t rows = 0, columns = 0, row_stride = 0, column_stride = 1;
  float &operator()(int64_t i, int64_t c) const { return x[i * row_stride + c * column_stride]; }
};

// An absent tensor has no rows.
inline Matrix head(const View &tensor, int64_t b, int64_t h, int64_t rows, int64_t columns) {
  if (!tensor) return {};
  return {tensor.at<float>(b, h, 0, 0), rows, columns, tensor.stride[2], tensor.stride[3]};
}

struct Tile {
  float *x;
  int64_t rows, columns;
  float *operator[](int64_t i) const { return x + i * columns; }
  void fill(float value) const { std::fill_n(x, rows * columns, value); }
};

inline void zero(Tile &tile, int64_t rows, int64_t columns) {
  tile.rows = rows, tile.columns = columns;
  tile.fill(0);
}

// Hands out a thread's tiles. Without memory it only counts their bytes.
class Sram {
public:
  explicit Sram(float *memory = nullptr) : memory_(memory) {}
  Tile tile(int64_t rows, int64_t columns) {
    Tile made{memory_ ? memory_ + taken_ : nullptr, rows, columns};
    taken_ += rows * columns;
    return made;
  }
  int64_t taken() const { return taken_; }

private:
  float *memory_;
  int64_t taken_ = 0;
};

inline void load(Tile &tile, const Matrix &m, int64_t i0, int64_t i1, int64_t c0, int64_t c1) {
  tile.rows = i1 - i0, tile.columns = c1 - c0;
  for (int64_t i = i0; i < i1; i++)
    for (int64_t c = c0; c < c1; c++) tile[i - i0][c - c0] = m(i, c);
}
inline void load(Tile &tile, const Matrix &m, int64_t i0, int64_t i1) { load(tile, m, i0, i1, 0, m.columns); }

// tile = the rows [i0, i1) of m, transposed, so that the inner loop of a product runs along them.
inline void load_transposed(Tile &tile, const Matrix &m, int64_t i0, int64_t i1) {
  tile.rows = m.columns, tile.columns = i1 - i0;
  for (int64_t i = i0; i < i1; i++)
    for (int64_t c = 0; c < m.columns; c++) tile[c][i - i0] = m(i, c);
}

inline void store(const Matrix &m, int64_t i0, int64_t c0, const Tile &tile, float factor = 1) {
  if (!m.x) return;
  for (int64_t i = 0; i < tile.rows; i++)
    for (int64_t c = 0; c < tile.columns; c++) m(i0 + i, c0 + c) = tile[i][c] * factor;
}

inline void clear(const Matrix &m) {
  for (int64_t i = 0; i < m.rows; i++)
    for (int64_t c = 0; c < m.columns; c++) m(i, c) = 0;
}

inline void add(const Matrix &m, int64_t i0, const Tile &tile, float factor) {
  if (!m.x) return;
  for (int64_t i = 0; i < tile.rows; i++)
    for (int64_t c = 0; c < tile.columns; c++) m(i0 + i, c) += tile[i][c] * factor;
}

// to += x B, a row times a tile. The numbers of x lie `stride` apart. Four rows of B are taken at a time, so that `to` is read and written
// less often.
inline void multiply_add_row(float *__restrict to, const float *__restrict x, int64_t stride, const Tile &B) {
  int64_t k = 0;
  for (; k + 4 <= B.rows; k += 4) {
    const float x0 = x[k * stride], x1 = x[(k + 1) * stride], x2 = x[(k + 2) * stride], x3 = x[(k + 3) * stride];
    const float *__restrict b0 = B[k], *__restrict b1 = B[k + 1], *__restrict b2 = B[k + 2], *__restrict b3 = B[k + 3];
    for (int64_t c = 0; c < B.columns; c++) to[c] += x0 * b0[c] + x1 * b1[c] + x2 * b2[c] + x3 * b3[c];
  }
  for (; k < B.rows; k++)
    for (int64_t c = 0; c < B.columns; c++) to[c] += x[k * stride] * B[k][c];
}

// C += A B
inline void multiply_add(const Tile &C, const Tile &A, const Tile &B) {
  for (int64_t i = 0; i < A.rows; i++) multiply_add_row(C[i], A[i], 1, B);
}

// C += A^T B
inline void multiply_add_transposed(const Tile &C, const Tile &A, const Tile &B) {
  for (int64_t i = 0; i < A.columns; i++) multiply_add_row(C[i], A.x + i, A.columns, B);
}

// C = A B
inline void multiply(Tile &C, const Tile &A, const Tile &B) {
  zero(C, A.rows, B.columns);
  multiply_add(C, A, B);
}

inline Band band_of(const Problem &p) { return Band::make(p.seqlen_q, p.seqlen_k, p.bottom_right, p.window_left, p.window_right); }

// Sets to -inf the scores, of queries from i0 on and keys from j0 on, that lie outside the band.
inline void hide(const Tile &S, const Band &band, int64_t i0, int64_t j0) {
  for (int64_t i = 0; i < S.rows; i++)
    for (int64_t j = 0; j < S.columns; j++)
      if (!band.visible(i0 + i, j0 + j)) S[i][j] = -kInfinity;
}

inline float row_max(const float *row, int64_t n) { return n ? *std::max_element(row, row + n) : -kInfinity; }

// The number that exponentials() subtracts: m, or 0 in a row that has seen no key, because -inf - (-inf) would be NaN.
inline float reference_of(float m) { return m == -kInfinity ? 0 : m; }

// row = exp(scale (row - m)). Returns the sum of the row.
inline float exponentials(float *row, int64_t n, float m, float scale) {
  float sum = 0;
  for (int64_t j = 0; j < n; j++) sum += row[j] = std::exp(scale * (row[j] - m));
  return sum;
}

// LSE of a row of unscaled scores
inline float log_sum(float m, float l, float scale) { return l == 0 ? -kInfinity : scale * m + std::log(l); }

// P_ij = exp(S_ij - LSE_i), from unscaled scores
inline void probabilities(const Tile &S, const View &lse, int64_t b, int64_t h, int64_t i0, float scale) {
  for (int64_t i = 0; i < S.rows; i++) {
    const float L = reference_of(*lse.at<float>(b, h, i0 + i, 0));
    for (int64_t j = 0; j < S.columns; j++) S[i][j] = std::exp(scale * S[i][j] - L);
  }
}

// The tiles that both backwards hold on the chip.
struct Backward {
  Tile Qi, dOi, Kj, KjT, VjT, P, dS, dKj, dVj, dQi;
  Backward(Sram &sram, const TileSize &size, int64_t d)
      : Qi(sram.tile(size.q, d)), dOi(sram.tile(size.q, d)), Kj(sram.tile(size.k, d)), KjT(sram.tile(d, size.k)), VjT(sram.tile(d, size.k)),
        P(sram.tile(size.q, size.k)), dS(sram.tile(size.q, size.k)), dKj(sram.tile(size.k, d)), dVj(sram.tile(size.k, d)),
        dQi(sram.tile(size.q, d)) {}
};

} // namespace strobe::ladder::cpu
