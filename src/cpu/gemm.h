// C (+)= A B on tiles in cache, by outer products in registers. B and C hold one column per lane. A's elements are broadcast in place, so
// that K and V are read where they lie, transposed or not.
#pragma once
#include "simd.h"

namespace strobe::inline STROBE_ISA {

// The element (m, k) is a[m * row + k * col]. One of the two strides is 1.
template <class T> struct Broadcast {
  const T *a;
  int64_t row, col;
};

#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kVectorRegisters = 32;
#else
inline constexpr int kVectorRegisters = 16;
#endif
inline constexpr int64_t kRun = 32; // terms of a product that are added up one after another
#if defined(__FMA__) || defined(__aarch64__)
inline constexpr bool kRoundsProducts = false;
#else
inline constexpr bool kRoundsProducts = true; // each product is rounded, so four products are added up before they join the sum
#endif
inline constexpr int kMaxColumns = kVectorRegisters == 32 ? 4 : 2; // how many vectors of C's columns are held at once
constexpr int block_rows(int columns) { return kVectorRegisters == 32 ? (columns == 4 ? 6 : 8) : (columns == 2 ? 4 : 8); }

// A block of C, rows x `columns` vectors, held in registers over a run of k.
template <int kRows, int kColumns, bool kUnitRow, class T>
STROBE_INLINE void multiply_block(int64_t depth, Broadcast<T> a, const T *b, int64_t ldb, T *c, int64_t ldc, bool accumulate) {
  using V = Vec<T>;
  constexpr int L = V::kLanes;
  V sum[kRows][kColumns];
  const T *rows[kRows];
  unroll<kRows>(STROBE_UNROLL(m) {
    rows[m] = a.a + m * a.row;
    unroll<kColumns>(STROBE_UNROLL(n) { sum[m][n] = V(T(0)); });
  });
  for (int64_t k = 0;;) {
    const int64_t end = kRun < depth - k ? k + kRun : depth;
    if constexpr (kRoundsProducts) {
      for (; k < end; k += 4, b += 4 * ldb) {
        const int64_t left = end - k; // fewer than four terms have the bits of four terms with zeros at the end
        unroll<kRows>(STROBE_UNROLL(m) {
          const auto product = [&](int i, int n) __attribute__((always_inline)) {
            return V(kUnitRow ? a.a[i * a.col + m] : rows[m][k + i]) * V::load(b + i * ldb + n * L);
          };
          unroll<kColumns>(STROBE_UNROLL(n) {
            if (left >= 4)
              sum[m][n] += (product(0, n) + product(1, n)) + (product(2, n) + product(3, n));
            else
              sum[m][n] += left == 3   ? product(0, n) + product(1, n) + product(2, n)
                           : left == 2 ? product(0, n) + product(1, n)
                                       : product(0, n);
          });
        });
        if constexpr (kUnitRow) a.a += 4 * a.col;
      }
      k = end;
    } else {
#pragma GCC unroll 4
      for (; k < end; ++k) {
        V column[kColumns];
        unroll<kColumns>(STROBE_UNROLL(n) { column[n] = V::load(b + n * L); });
        unroll<kRows>(STROBE_UNROLL(m) {
          V x = kUnitRow ? a.a[m] : rows[m][k];
          unroll<kColumns>(STROBE_UNROLL(n) { sum[m][n] += x * column[n]; });
        });
        b += ldb;
        if constexpr (kUnitRow) a.a += a.col;
      }
    }
    if (accumulate || end > kRun)
      unroll<kRows>(STROBE_UNROLL(m) { unroll<kColumns>(STROBE_UNROLL(n) { sum[m][n] += V::load(c + m * ldc + n * L); }); });
    if (end == depth) break;
    unroll<kRows>(STROBE_UNROLL(m) {
      unroll<kColumns>(STROBE_UNROLL(n) {
        sum[m][n].store(c + m * ldc + n * L);
        sum[m][n] = V(T(0));
      });
    });
  }
  unroll<kRows>(STROBE_UNROLL(m) { unroll<kColumns>(STROBE_UNROLL(n) { sum[m][n].store(c + m * ldc + n * L); }); });
}

template <int kRows, int kColumns, bool kUnitRow, class T>
STROBE_INLINE void multiply_rows(int64_t rows, int64_t depth, Broadcast<T> a, const T *b, int64_t ldb, T *c, int64_t ldc, bool accumulate) {
  for (; rows >= kRows; rows -= kRows) {
    multiply_block<kRows, kColumns, kUnitRow>(depth, a, b, ldb, c, ldc, accumulate);
    a.a += kRows * a.row;
    c += kRows * ldc;
  }
  if constexpr (kRows > 1) multiply_rows<kRows == 6 ? 4 : kRows / 2, kColumns, kUnitRow>(rows, depth, a, b, ldb, c, ldc, accumulate);
}

template <int kColumns, bool kUnitRow, class T>
STROBE_INLINE void multiply_columns(int64_t rows, int64_t columns, int64_t depth, Broadcast<T> a, const T *b, int64_t ldb, T *c,
                                    int64_t ldc, bool accumulate) {
  constexpr int kWidth = kColumns * Vec<T>::kLanes;
  for (; columns >= kWidth; columns -= kWidth) {
    multiply_rows<block_rows(kColumns), kColumns, kUnitRow>(rows, depth, a, b, ldb, c, ldc, accumulate);
    b += kWidth;
    c += kWidth;
  }
  if constexpr (kColumns > 1) multiply_columns<kColumns - 1, kUnitRow>(rows, columns, depth, a, b, ldb, c, ldc, accumulate);
}

// C[rows][columns] (+)= A[rows][depth] B[depth][columns]; columns is a multiple of the lanes. A sum of many terms one after another loses
// bits as it grows, so each run of kRun terms starts from 0 and is then added to C. Hence two products over successive terms have the bits
// of one product over all terms, if the first one has a multiple of kRun terms. Terms of 0 change nothing.
template <class T>
__attribute__((noinline)) void multiply(int64_t rows, int64_t columns, int64_t depth, Broadcast<T> a, const T *b, int64_t ldb, T *c,
                                        int64_t ldc, bool accumulate) {
  if (a.row == 1)
    multiply_columns<kMaxColumns, true>(rows, columns, depth, a, b, ldb, c, ldc, accumulate);
  else
    multiply_columns<kMaxColumns, false>(rows, columns, depth, a, b, ldb, c, ldc, accumulate);
}

} // namespace strobe::inline STROBE_ISA
