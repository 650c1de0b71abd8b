// Products of bf16 tiles in AMX's registers.
#pragma once
#include "decode_tiles.h"

namespace strobe::inline STROBE_ISA {

struct Amx {
  // Few rows use multiply-adds: in a tile they would leave most rows idle, and these CPUs execute dot products more slowly.
  template <class Elements> using Few = FewRows<FmaLanes<float, Elements>>;
  template <class, class Elements> using Many = TileRows<Elements>;
  static constexpr int64_t kFewRows = 4; // measured (docs/lab/performance.md)
  static constexpr bool kManyInPlace = true, kDecodesQuantised = true;

  using Session = TileSession;

  template <int kPlanes, bool kExchanged>
  static __attribute__((noinline)) void multiply(int64_t rows, int64_t columns, int64_t depth, PairsLeft a, PairsRight b, float *c,
                                                 int64_t ldc, bool accumulate) {
    int64_t m = 0;
    for (; m + 16 < rows; m += 32) multiply_rows<kPlanes, kExchanged, 2>(columns, depth, a.rows_from(m), b, c + m * ldc, ldc, accumulate);
    if (m < rows) multiply_rows<kPlanes, kExchanged, 1>(columns, depth, a.rows_from(m), b, c + m * ldc, ldc, accumulate);
  }

private:
  template <int kPlanes, bool kExchanged, int kRows>
  static STROBE_INLINE void multiply_rows(int64_t columns, int64_t depth, PairsLeft a, PairsRight b, float *c, int64_t ldc,
                                          bool accumulate) {
    int64_t n = 0;
    for (; n + 32 <= columns; n += 32) multiply_block<kPlanes, kExchanged, kRows, 2>(depth, a, b.columns_from(n), c + n, ldc, accumulate);
    if (n < columns) multiply_block<kPlanes, kExchanged, kRows, 1>(depth, a, b.columns_from(n), c + n, ldc, accumulate);
  }

  // Computes one block of C: kRows x kColumns tiles. Registers 0-3 hold C, 4-5 A, 6-7 B. Each instruction adds 32 products of two planes to
  // a sum and rounds once. FP32 takes six instructions for 32 terms, so the sum starts from 0 there and is added to C at the end.
  template <int kPlanes, bool kExchanged, int kRows, int kColumns>
  static STROBE_INLINE void multiply_block(int64_t depth, PairsLeft a, PairsRight b, float *c, int64_t ldc, bool accumulate) {
    const bool apart = accumulate && kPlanes == 3;
    unroll<kRows>(STROBE_UNROLL(m) {
      unroll<kColumns>(STROBE_UNROLL(n) {
        if (accumulate && !apart)
          tile_load<2 * m + n>(c + 16 * m * ldc + 16 * n, ldc * 4);
        else
          tile_zero<2 * m + n>();
      });
    });
    for (int64_t k = 0; k < depth; k += 32) {
      unroll<kPlanes *(kPlanes + 1) / 2>(STROBE_UNROLL(i) {
        constexpr Product kThis = product<kPlanes, kExchanged>(i), kLast = product<kPlanes, kExchanged>(i > 0 ? i - 1 : 0);
        constexpr int kA = kThis.a, kB = kThis.b;
        if constexpr (i == 0 || kA != kLast.a) load_left<kRows>(a.a + kA * a.plane + k / 32 * a.step, a.row);
        if constexpr (i == 0 || kB != kLast.b) load_right<kColumns>(b.b + kB * b.plane + k / 2 * b.ld, b.ld);
        unroll<kRows>(STROBE_UNROLL(m) { unroll<kColumns>(STROBE_UNROLL(n) { tile_multiply<2 * m + n, 4 + m, 6 + n>(); }); });
      });
    }
    alignas(64) float sum[16 * kRows * 16 * kColumns];
    float *const to = apart ? sum : c;
    const int64_t ld = apart ? 16 * kColumns : ldc;
    unroll<kRows>(STROBE_UNROLL(m) { unroll<kColumns>(STROBE_UNROLL(n) { tile_store<2 * m + n>(to + 16 * m * ld + 16 * n, ld * 4); }); });
    for (int64_t i = 0; i < 16 * kRows && apart; ++i)
      unroll<kColumns>(STROBE_UNROLL(n) {
        float *const at = c + i * ldc + 16 * n;
        _mm512_storeu_ps(at, _mm512_add_ps(_mm512_loadu_ps(at), _mm512_load_ps(sum + i * ld + 16 * n)));
      });
  }

  // The planes of a and b for the i-th product. Small products come first, in an order that reloads few tiles. kExchanged: the order of the
  // product b a.
  struct Product {
    int a, b;
  };
  template <int kPlanes, bool kExchanged> static constexpr Product product(int i) {
    constexpr Product three[] = {{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 0}, {0, 2}}, two[] = {{1, 0}, {0, 0}, {0, 1}};
    const Product of = kPlanes == 3 ? three[i] : kPlanes == 2 ? two[i] : Product{0, 0};
    return kExchanged ? Product{of.b, of.a} : of;
  }
  template <int kRows> static STROBE_INLINE void load_left(const uint16_t *a, int64_t row) {
    unroll<kRows>(STROBE_UNROLL(m) { tile_load<4 + m>(a + 16 * m * row, row * 2); });
  }
  template <int kColumns> static STROBE_INLINE void load_right(const uint32_t *b, int64_t ld) {
    unroll<kColumns>(STROBE_UNROLL(n) { tile_load<6 + n>(b + 16 * n, ld * 4); });
  }
};

} // namespace strobe::inline STROBE_ISA
