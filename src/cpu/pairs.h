// The arithmetic of bf16 dot products, of AMX or of AVX512-BF16. The left operand is bf16 rows. The right one is pairs of rows, interleaved
// (k, k+1 adjacent in 32 bits). Both are padded with zeros to 32 along k and to 16 along the other axis. kPlanes 1: operands are bf16. 2:
// operands are fp16, each a sum of two bf16 (8 bits of the significand each); three products. 3: operands are fp32, each a sum of three
// bf16; of the nine products the six above 2^-24 are added up in fp32 (Henry, Tang & Heinecke 2019, "Leveraging the bfloat16 Artificial
// Intelligence Datatype for Higher-Precision Computations").
#pragma once
#include <immintrin.h>

#include "fma.h"

namespace strobe::inline STROBE_ISA {

// Splits x into a sum of planes. Each plane will be cut to a bf16 number, the high half of a lane, with 8 significant bits. All planes but
// the last are rounded, so that the remainder is small and of either sign. FP32 numbers beyond the largest bf16 are truncated, because
// rounding would make them infinite.
template <int kPlanes> struct Split {
  __m512 plane[kPlanes];
  static STROBE_INLINE __m512 largest() { return _mm512_castsi512_ps(_mm512_set1_epi32(0x7F7F0000)); } // the largest bf16 number
  STROBE_INLINE explicit Split(__m512 x) {
    unroll<kPlanes>(STROBE_UNROLL(p) {
      plane[p] = x;
      if constexpr (p + 1 < kPlanes) {
        __m512i rounded = _mm512_castps_si512(x);
        const __m512i half = _mm512_set1_epi32(0x8000);
        if constexpr (kPlanes == 3 && p == 0)
          rounded = _mm512_mask_add_epi32(rounded, _mm512_cmp_ps_mask(_mm512_abs_ps(x), largest(), _CMP_LE_OQ), rounded, half);
        else
          rounded = _mm512_add_epi32(rounded, half);
        plane[p] = _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(int(0xFFFF0000))));
        x = _mm512_sub_ps(x, plane[p]);
      }
    });
  }
};

// The left operand: rows of 32 elements along k. Strides, in elements: from row to row, from 32 elements along k to the next 32, from 32
// rows to the next 32, and from plane to plane.
struct PairsLeft {
  const uint16_t *a;
  int64_t row, step, block, plane;
  STROBE_INLINE PairsLeft rows_from(int64_t m) const { return {a + m / 32 * block, row, step, block, plane}; } // m: a multiple of 32
  // Where element k of row m is packed.
  STROBE_INLINE uint16_t *at(int64_t m, int64_t k) const {
    return const_cast<uint16_t *>(a) + m / 32 * block + m % 32 * row + k / 32 * step + k % 32;
  }
};
// The right operand: [plane][k / 2][ld], two along k in each 32 bits.
struct PairsRight {
  const uint32_t *b;
  int64_t ld, plane;
  STROBE_INLINE PairsRight columns_from(int64_t n) const { return {b + n, ld, plane}; }
};

STROBE_INLINE __m512i interleave_order() {
  return _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16,
                          0);
}

// The bf16 of two vectors: `low` in the low half and `high` in the high half of each lane.
template <int kPlanes> STROBE_INLINE __m512i pair_up(__m512 low, __m512 high) {
  if constexpr (kPlanes == 1) return _mm512_permutexvar_epi16(interleave_order(), (__m512i)_mm512_cvtne2ps_pbh(high, low));
  return _mm512_ternarylogic_epi32(_mm512_srli_epi32(_mm512_castps_si512(low), 16), _mm512_castps_si512(high),
                                   _mm512_set1_epi32(int(0xFFFF0000)), 0xF8); // low | (high & mask)
}

// src[k][width] to pairs, dst[plane][round_to(k, 32) / 2][width]: 32 bits hold row k in the low half and row k + 1 in the high half.
template <int kPlanes> __attribute__((noinline)) void pack_pairs(const float *src, int64_t depth, int64_t width, uint32_t *dst) {
  const int64_t padded = round_to(depth, 32), plane_size = padded / 2 * width;
  for (int64_t k = 0; k < padded; k += 2) {
    for (int64_t c = 0; c < width; c += 16) {
      __m512 even = k < depth ? _mm512_loadu_ps(src + k * width + c) : _mm512_setzero_ps();
      __m512 odd = k + 1 < depth ? _mm512_loadu_ps(src + (k + 1) * width + c) : _mm512_setzero_ps();
      Split<kPlanes> low(even), high(odd);
      for (int p = 0; p < kPlanes; ++p) {
        _mm512_storeu_si512(dst + p * plane_size + k / 2 * width + c, pair_up<kPlanes>(low.plane[p], high.plane[p]));
      }
    }
  }
}

// Transposes bf16 rows into pairs: dst[c / 2][lane] holds columns c and c + 1 of row `lane`. `count` rows exist, and `width` lanes are
// written.
inline __attribute__((noinline)) void pair_lanes(const uint16_t *src, int64_t row, int64_t count, int64_t columns, int64_t width,
                                                 uint32_t *dst) {
  for (int64_t lane = 0; lane < width; lane += 16)
    for (int64_t c = 0; c < columns; c += 32) {
      Vec<float> block[16];                                                                           // holds pairs, which are only moved
      unroll<16>(STROBE_UNROLL(r) { __builtin_prefetch(src + (lane + r + width) * row + c, 0, 2); }); // for the next tile
      unroll<16>(STROBE_UNROLL(r) {
        block[r] = lane + r < count ? Vec<float>::load(reinterpret_cast<const float *>(src + (lane + r) * row + c)) : Vec<float>(0.0f);
      });
      transpose_block(block);
      unroll<16>(STROBE_UNROLL(r) { block[r].store(reinterpret_cast<float *>(dst) + (c / 2 + r) * width + lane); });
    }
}
// Sixteen columns of rows i (low half) and i + 1 (high half) of src. Rows from `count` on are zeros.
STROBE_INLINE __m512i pair_of_rows(const uint16_t *src, int64_t row, int64_t i, int64_t count) {
  const auto load = [&](int64_t n) __attribute__((always_inline)) {
    return n < count ? _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(src + n * row))) : _mm512_setzero_si512();
  };
  return _mm512_or_si512(load(i), _mm512_slli_epi32(load(i + 1), 16));
}
// Interleaves bf16 rows as pairs of rows, dst[i / 2][c]; zeros after the last row, to a multiple of 32 rows.
inline __attribute__((noinline)) void pair_rows(const uint16_t *src, int64_t row, int64_t count, int64_t columns, uint32_t *dst) {
  for (int64_t i = 0; i < round_to(count, 32); i += 2)
    for (int64_t c = 0; c < columns; c += 16) _mm512_storeu_si512(dst + i / 2 * columns + c, pair_of_rows(src + c, row, i, count));
}
// Copies bf16 rows as the left operand. Rows after the last one are not written: products with them give scores that are not read.
inline __attribute__((noinline)) void copy_rows(const uint16_t *src, int64_t row, int64_t count, int64_t columns, PairsLeft to) {
  for (int64_t i = 0; i < count; ++i)
    for (int64_t c = 0; c < columns; c += 32) _mm512_storeu_si512(to.at(i, c), _mm512_loadu_si512(src + i * row + c));
}
// Copies bf16 rows, transposed, as columns of the left operand. Products sum over these columns, so zeros follow the last row, up to a
// multiple of 32.
inline __attribute__((noinline)) void turn_rows(const uint16_t *src, int64_t row, int64_t count, int64_t columns, PairsLeft to) {
  for (int64_t i = 0; i < count; i += 32)
    for (int64_t c = 0; c < columns; c += 16) {
      Vec<float> block[16]; // holds pairs, which are only moved
      unroll<16>(STROBE_UNROLL(r) { block[r] = Vec<float>((Vec<float>::Raw)pair_of_rows(src + c, row, i + 2 * r, count)); });
      transpose_block(block);
      uint16_t *const dst = to.at(c, i);
      unroll<16>(STROBE_UNROLL(r) { block[r].store(reinterpret_cast<float *>(dst + r * to.row)); });
    }
}

// Unit: the class of amx.h or dot.h that multiplies.
template <int planes, class Unit> struct Pairs {
  using Real = float;
  using Element = uint16_t;
  static constexpr int kPlanes = planes;
  static constexpr int64_t kChunk = 32;           // keys whose scores are held at once
  static constexpr bool kScoresInPlace = false;   // Scores leaves its source unchanged
  static constexpr bool kJointQueries = true;     // products over queries take the whole tile, so that C is loaded less often
  static constexpr bool kSumsApart = planes == 3; // the sum of a product starts from 0 and is then added to C (amx.h)

  using V = Vec<float>;
  static constexpr bool kBFloat16 = kPlanes == 1;
  static constexpr bool kQuantised = false;
  // The products for decode.h. With several planes, their sums have the order of the backward.
  template <class Elements> using Few = typename Unit::template Few<Elements>;
  template <class Elements> using Many = std::conditional_t<kPlanes == 1, typename Unit::template Many<Pairs, Elements>, ManyRows<Pairs>>;
  static constexpr int64_t kFewRows = kPlanes == 1 ? Unit::kFewRows : 0;
  static constexpr bool kManyInPlace = kPlanes == 1 && Unit::kManyInPlace;
  static constexpr bool kDecodesQuantised = kPlanes == 1 && Unit::kDecodesQuantised; // if scales belong to rows

  static constexpr bool kExactPower = kPlanes == 3;
  // bf16's P is rounded to 8 bits, so a shorter polynomial (3e-6) is enough.
  static STROBE_INLINE V power(V x) { return exp2<kPlanes == 1 ? 4 : 5>(x); }

  using Left = PairsLeft;
  using Right = PairsRight;
  using Session = typename Unit::Session;
  // kExchanged: sums have the order of the product with a and b exchanged.
  template <bool kExchanged = false>
  static STROBE_INLINE void multiply(int64_t rows, int64_t columns, int64_t depth, Left a, Right b, float *c, int64_t ldc,
                                     bool accumulate) {
    Unit::template multiply<kPlanes, kExchanged>(rows, columns, depth, a, b, c, ldc, accumulate);
  }

  struct Keys {
    Left rows, columns;
  };
  static STROBE_INLINE bool in_place(const View &, int64_t) { return false; }
  static STROBE_INLINE Keys keys_in_place(const View &, int64_t, int64_t, int64_t) { return {}; }
  // Elements per packed key; n keys are padded to at most n + 64.
  static int64_t key_size(int64_t d, bool rows, bool columns) {
    return kPlanes * ((rows ? round_to(d, 32) : 0) + (columns ? round_to(d, 16) : 0));
  }
  static Keys keys_at(const uint16_t *base, int64_t n, int64_t d, bool rows) {
    const int64_t d_of_rows = round_to(d, 32), d_of_columns = round_to(d, 16), unit = 32 * 32;
    return {{base, 32, kPlanes * unit, kPlanes * 32 * d_of_rows, unit}, // [n / 32][d / 32][plane][32][32]
            {base + (rows ? kPlanes * round_to(n, 32) * d_of_rows : 0), 32, kPlanes * 32 * d_of_columns, unit,
             32 * d_of_columns}}; // [n / 32][plane][d][32]
  }
  // reals: 64 x round_to(d, 32)
  static void pack_keys(const View &x, int64_t b, int64_t h, int64_t j0, int64_t n, int64_t d, Keys to, bool rows, bool columns,
                        float *reals, float *buffer) {
    if (kPlanes == 1 && is_paired(x, d)) {
      const uint16_t *const from = x.at<uint16_t>(b, h, j0, 0);
      if (rows) copy_rows(from, x.stride[2], n, d, to.rows);
      if (columns) turn_rows(from, x.stride[2], n, d, to.columns);
      return;
    }
    const int64_t ld = round_to(d, 32);
    for (int64_t j = 0; j < n; j += 64) {
      const int64_t count = n - j < 64 ? n - j : 64, width = round_to(count, 32);
      if (rows) {
        for (int64_t r = 0; r < count; ++r) load_row(x, b, h, j0 + j + r, 0, d, reals + r * ld);
        pack_rows(reals, count, d, ld, rows_from(to.rows, j), ld);
      }
      if (columns) {
        load_lanes_of(x, b, h, j0 + j, count, d, 1.0f, reals, width, buffer);
        pack_rows(reals, d, width, width, columns_from(to.columns, j), width);
      }
    }
  }
  // The operands, beginning at key `skip`, a multiple of kKeyAlign.
  static STROBE_INLINE Left rows_from(Left x, int64_t skip) { return x.rows_from(skip); }
  static STROBE_INLINE Left columns_from(Left x, int64_t skip) { return {x.a + skip / 32 * x.step, x.row, x.step, x.block, x.plane}; }

  static int64_t left_size(int64_t rows, int64_t columns) { return kPlanes * round_to(rows, 32) * round_to(columns, 32); }
  static Left left_rows(const float *src, int64_t rows, int64_t columns, int64_t ld, uint16_t *scratch) {
    const Left left = keys_at(scratch, rows, columns, true).rows;
    pack_rows(src, rows, columns, ld, left, round_to(columns, 32));
    return left;
  }

  static int64_t lanes_size(int64_t width, int64_t d) { return kPlanes * round_to(d, 32) * width + 2 * d * width; } // packed; and as reals
  static Right load_lanes(const View &x, int64_t b, int64_t h, int64_t i0, int64_t n, int64_t d, float factor, int64_t width,
                          uint16_t *scratch, float *buffer) {
    float *reals = reinterpret_cast<float *>(scratch);
    uint32_t *packed = reinterpret_cast<uint32_t *>(scratch + 2 * d * width);
    if (kPlanes == 1 && is_paired(x, d) && factor == 1) {
      pair_lanes(x.at<uint16_t>(b, h, i0, 0), x.stride[2], n, d, width, packed);
      return {packed, width, d / 2 * width};
    }
    load_lanes_of(x, b, h, i0, n, d, factor, reals, width, buffer);
    pack_pairs<kPlanes>(reals, d, width, packed);
    return {packed, width, round_to(d, 32) / 2 * width};
  }

  static int64_t rows_size(int64_t n, int64_t d) { return (kPlanes + 2) * round_to(n, 32) * round_to(d, 16); }
  static Right load_rows(const View &x, int64_t b, int64_t h, int64_t i0, int64_t n, int64_t d, uint16_t *scratch) {
    const int64_t ld = round_to(d, 16);
    float *reals = reinterpret_cast<float *>(scratch);
    uint32_t *packed = reinterpret_cast<uint32_t *>(scratch + 2 * round_to(n, 32) * ld);
    if (kPlanes == 1 && is_paired(x, d)) {
      pair_rows(x.at<uint16_t>(b, h, i0, 0), x.stride[2], n, d, packed);
      return {packed, ld, round_to(n, 32) / 2 * ld};
    }
    for (int64_t i = 0; i < n; ++i) {
      load_row(x, b, h, i0 + i, 0, d, reals + i * ld);
      fill(reals + i * ld + d, ld - d, 0.0f);
    }
    pack_pairs<kPlanes>(reals, n, ld, packed);
    return {packed, ld, round_to(n, 32) / 2 * ld};
  }

  static STROBE_INLINE Right right_from(Right x, int64_t row) { return {x.b + row / 2 * x.ld, x.ld, x.plane}; }

  struct Scores {
    uint32_t *pairs; // [plane][round_to(keys, 32) / 2][width], or null
    Left left;       // these queries' scores as a left operand, or null; [keys / 32][tile_q / 32][plane][32][32], as in Keys::rows
    int64_t width, pairs_plane;
    STROBE_INLINE void put(int64_t j, int64_t lane, V first, V second, bool /*both: zero where not*/) const {
      Split<kPlanes> a((__m512)first.v), b((__m512)second.v);
      uint16_t *to = row_at(j, lane);
      unroll<kPlanes>(STROBE_UNROLL(p) {
        if (left.a) {
          __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b.plane[p], a.plane[p]);
          _mm256_storeu_si256((__m256i *)(to + p * left.plane), _mm512_castsi512_si256(both));
          _mm256_storeu_si256((__m256i *)(to + p * left.plane + 32), _mm512_extracti64x4_epi64(both, 1));
        }
        if (pairs) _mm512_storeu_si512(pairs + p * pairs_plane + j / 2 * width + lane, pair_up<kPlanes>(a.plane[p], b.plane[p]));
      });
    }
    STROBE_INLINE void finish(int64_t keys) const { // fills the padding with zeros
      const int64_t even = round_to(keys, 2), end = round_to(keys, 32);
      for (int p = 0; p < kPlanes; ++p) {
        if (pairs) fill(pairs + p * pairs_plane + even / 2 * width, (end - even) / 2 * width, 0u);
        if (!left.a) continue;
        for (int64_t lane = 0; lane < round_to(width, 32); lane += 16)
          for (int64_t j = lane < width ? even : 0; j < end; ++j) fill(row_at(j, lane) + p * left.plane, 16, uint16_t(0));
      }
    }
    STROBE_INLINE Right lanes(int64_t from = 0) const { return {pairs + from / 2 * width, width, pairs_plane}; } // from: a multiple of 32
    STROBE_INLINE Left rows() const { return left; }

  private:
    STROBE_INLINE uint16_t *row_at(int64_t j, int64_t lane) const {
      return const_cast<uint16_t *>(left.a) + j / 32 * left.block + lane / 32 * left.step + j % 32 * 32 + lane % 32;
    }
  };
  static int64_t scores_size(int64_t tile_k, int64_t width) { return kPlanes * round_to(tile_k, 32) * round_to(width, 32); }
  // rows: the left operand of the whole tile of tile_q queries. These scores are its lanes from `lane` on, a multiple of 32.
  static STROBE_INLINE Scores scores(float * /*s*/, uint16_t *lanes, uint16_t *rows, int64_t keys, int64_t width, int64_t tile_q,
                                     int64_t lane) {
    const int64_t unit = 32 * 32, step = kPlanes * unit;
    return {reinterpret_cast<uint32_t *>(lanes),
            {rows ? rows + lane / 32 * step : nullptr, 32, step, step * (round_to(tile_q, 32) / 32), unit},
            width,
            round_to(keys, 32) / 2 * width};
  }

private:
  // Whether the rows of a tensor are bf16 and contiguous, lie at one distance from each other, and have whole steps of 32.
  static STROBE_INLINE bool is_paired(const View &x, int64_t d) {
    return x.dtype == DType::bf16 && !x.page_size && x.stride[3] == 1 && d % 32 == 0;
  }
  // Packs src[rows][width] as the left operand `to`. Of its columns [0, end), those past `columns` become zero. width and end are multiples
  // of 16.
  static __attribute__((noinline)) void pack_rows(const float *src, int64_t rows, int64_t columns, int64_t width, Left to, int64_t end) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < end; c += 16) {
        int64_t left = columns - c;
        __mmask16 some = left >= 16 ? 0xFFFF : left > 0 ? __mmask16((1u << left) - 1) : 0;
        Split<kPlanes> x(_mm512_maskz_loadu_ps(some, src + r * width + c));
        uint16_t *dst = to.at(r, c);
        for (int p = 0; p < kPlanes; ++p) _mm256_storeu_si256((__m256i *)(dst + p * to.plane), (__m256i)_mm512_cvtneps_pbh(x.plane[p]));
      }
    }
  }
  static STROBE_INLINE void load_lanes_of(const View &x, int64_t b, int64_t h, int64_t i0, int64_t n, int64_t d, float factor, float *dst,
                                          int64_t width, float *buffer) {
    STROBE_ISA::load_lanes(x, b, h, i0, n, d, factor, dst, width, buffer);
  }
};

} // namespace strobe::inline STROBE_ISA
