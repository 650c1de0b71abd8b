// Products of bf16 pairs by AVX512-BF16: a vector of pairs of B times one broadcast pair of A.
#pragma once
#include "lanes.h"
#include "pairs.h"

namespace strobe::inline STROBE_ISA {

// Products of few rows of queries, for lanes.h. A word of K is a pair of bf16 numbers; two adjacent rows of V make pairs of keys. Sums have
// the order of Dot::multiply.
struct DotLanes {
  using Real = float;
  using Elements = BFloat16Elements;
  using Operand = uint32_t; // a pair
  using Words = WordsOf<float>;
  static constexpr int kTerms = 1, kTogether = 1;
  static constexpr int64_t kTermsOfRun = 0;
  template <int> static STROBE_INLINE Vec<float> term(Words words) { return Vec<float>((Vec<float>::Raw)words); }
  template <int> static STROBE_INLINE void add(const Vec<float> (&x)[1], const Operand *y, Vec<float> &sum) {
    sum = dot((__m512i)x[0].v, y, sum);
  }

  static constexpr int kVectors = 2, kKeys = 2, kOperands = 1;
  template <int n> static STROBE_INLINE void add_values(const Words (&words)[2], const Operand *p, Vec<float> &sum) {
    const __m512i a = (__m512i)words[0], b = (__m512i)words[1];
    sum = dot(n == 0 ? _mm512_unpacklo_epi16(a, b) : _mm512_unpackhi_epi16(a, b), p, sum);
  }
  // The order is [32 columns][low or high 4 of 8][adjacent columns of the same 8].
  static STROBE_INLINE int64_t place(int64_t c) { return c / 32 * 32 + c % 8 / 4 * 16 + c % 32 / 8 * 4 + c % 4; }
  static STROBE_INLINE void convert(const float *src, int64_t count, Operand *dst) { // count: a multiple of 16
    for (int64_t i = 0; i < count; i += 16)
      _mm256_storeu_si256(reinterpret_cast<__m256i *>(dst + i / 2), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(src + i)));
  }

private:
  static STROBE_INLINE Vec<float> dot(__m512i x, const Operand *y, Vec<float> sum) {
    return Vec<float>((Vec<float>::Raw)_mm512_dpbf16_ps((__m512)sum.v, (__m512bh)x, (__m512bh)_mm512_set1_epi32(int32_t(*y))));
  }
};

struct Dot {
  struct Session {};
  template <class> using Few = FewRows<DotLanes>;
  template <class Math, class> using Many = ManyRows<Math>;
  static constexpr int64_t kFewRows = 8; // measured (docs/lab/performance.md)
  static constexpr bool kManyInPlace = false, kDecodesQuantised = false;

  template <int kPlanes, bool>
  static __attribute__((noinline)) void multiply(int64_t rows, int64_t columns, int64_t depth, PairsLeft a, PairsRight b, float *c,
                                                 int64_t ldc, bool accumulate) {
    static_assert(kPlanes == 1); // with more planes, fp32 multiply-adds are as fast
    if (rows <= 2)
      multiply_rows<2, 4>(rows, columns, depth, a, b, c, ldc, accumulate);
    else if (rows <= 4)
      multiply_rows<4, 4>(rows, columns, depth, a, b, c, ldc, accumulate);
    else
      multiply_rows<8, 2>(rows, columns, depth, a, b, c, ldc, accumulate);
  }

private:
  template <int kRows, int kColumns>
  static STROBE_INLINE void multiply_rows(int64_t rows, int64_t columns, int64_t depth, PairsLeft a, PairsRight b, float *c, int64_t ldc,
                                          bool accumulate) {
    int64_t n = 0;
    for (; n + 16 * kColumns <= columns; n += 16 * kColumns)
      multiply_columns<kRows, kColumns>(rows, depth, a, b.columns_from(n), c + n, ldc, accumulate);
    for (; n < columns; n += 16) multiply_columns<kRows, 1>(rows, depth, a, b.columns_from(n), c + n, ldc, accumulate);
  }

  // The left operand is padded to blocks of 32 rows and C to 16, so that blocks of C have two, four or eight rows.
  template <int kRows, int kColumns>
  static STROBE_INLINE void multiply_columns(int64_t rows, int64_t depth, PairsLeft a, PairsRight b, float *c, int64_t ldc,
                                             bool accumulate) {
    for (int64_t m = 0; m < rows; m += kRows) {
      const uint16_t *left = a.rows_from(m).a + m % 32 * a.row;
      __m512 sum[kRows][kColumns];
      unroll<kRows>(STROBE_UNROLL(r) {
        unroll<kColumns>(STROBE_UNROLL(n) { sum[r][n] = accumulate ? _mm512_loadu_ps(c + (m + r) * ldc + 16 * n) : _mm512_setzero_ps(); });
      });
      for (int64_t k = 0; k < depth; k += 2) {
        const uint16_t *at = left + k / 32 * a.step + k % 32;
        __m512bh pairs[kColumns];
        unroll<kColumns>(STROBE_UNROLL(n) { pairs[n] = (__m512bh)_mm512_loadu_si512(b.b + k / 2 * b.ld + 16 * n); });
        unroll<kRows>(STROBE_UNROLL(r) {
          int32_t pair;
          std::memcpy(&pair, at + r * a.row, sizeof pair);
          __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
          unroll<kColumns>(STROBE_UNROLL(n) { sum[r][n] = _mm512_dpbf16_ps(sum[r][n], pairs[n], x); });
        });
      }
      unroll<kRows>(STROBE_UNROLL(r) { unroll<kColumns>(STROBE_UNROLL(n) { _mm512_storeu_ps(c + (m + r) * ldc + 16 * n, sum[r][n]); }); });
    }
  }
};

} // namespace strobe::inline STROBE_ISA
