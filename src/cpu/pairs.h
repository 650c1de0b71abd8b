// The arithmetic of bf16 dot products: AMX tiles, or AVX512-BF16. Both want the left operand as bf16 rows and the right one as pairs of rows
// interleaved (k, k+1 side by side in 32 bits), both padded with zeros to 32 along k and to 16 along the rest.
// kPlanes 1: bf16 operands. 2: fp16 operands as a sum of two bf16 (8 bits of the significand each), three products. 3: fp32 operands as a sum
// of three, of whose nine products the six above 2^-24 are added up in fp32 (Henry, Tang & Heinecke 2019, "Leveraging the bfloat16 Artificial
// Intelligence Datatype for Higher-Precision Computations").
#pragma once
#include <immintrin.h>

#include "fma.h"

namespace strobe::inline STROBE_ISA {

// x = sum of planes, each a bf16 held in the high half of a lane
template <int kPlanes> struct Split {
  __m512 plane[kPlanes];
  STROBE_INLINE explicit Split(__m512 x) {
    for (int p = 0; p < kPlanes; ++p) {
      plane[p] = x;
      if (p + 1 < kPlanes) {
        __m512 rounded = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
        plane[p] = rounded;
        x = _mm512_sub_ps(x, rounded);
      }
    }
  }
};

STROBE_INLINE __m512i interleave_order() {
  return _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
}

// src[k][width] -> pairs dst[plane][round_to(k, 32) / 2][width]: 32 bits hold rows k (low) and k + 1
template <int kPlanes> __attribute__((noinline)) void pack_pairs(const float *src, int64_t depth, int64_t width, uint32_t *dst) {
  const int64_t padded = round_to(depth, 32), plane_size = padded / 2 * width;
  for (int64_t k = 0; k < padded; k += 2) {
    for (int64_t c = 0; c < width; c += 16) {
      __m512 even = k < depth ? _mm512_loadu_ps(src + k * width + c) : _mm512_setzero_ps();
      __m512 odd = k + 1 < depth ? _mm512_loadu_ps(src + (k + 1) * width + c) : _mm512_setzero_ps();
      Split<kPlanes> low(even), high(odd);
      for (int p = 0; p < kPlanes; ++p) {
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high.plane[p], low.plane[p]);
        _mm512_storeu_si512(dst + p * plane_size + k / 2 * width + c, _mm512_permutexvar_epi16(interleave_order(), both));
      }
    }
  }
}

// Tile registers 0-3 hold C, 4-5 A, 6-7 B, all of 16 rows of 64 bytes.
template <int t> STROBE_INLINE void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(t)); }
template <int t> STROBE_INLINE void tile_load(const void *p, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(t), "r"(p), "r"(stride) : "memory");
}
template <int t> STROBE_INLINE void tile_store(void *p, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(t), "r"(p), "r"(stride) : "memory");
}
template <int c, int a, int b> STROBE_INLINE void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
}

template <int planes> struct Pairs {
  using Real = float;
  using Element = uint16_t;
  static constexpr int kPlanes = planes;

  // fp32 and fp16 as Fma does; bf16, whose P is rounded to 8 bits, in one multiply-add and a shorter polynomial (3e-6).
  using V = Vec<float>;
  static STROBE_INLINE V reference(V m, V unit) { return kPlanes > 1 ? m : m * unit; }
  static STROBE_INLINE V power(V s, V reference, V unit) {
    return kPlanes > 1 ? Fma<float>::power(s, reference, unit) : exp2<4>(s * unit - reference);
  }
  struct Normaliser : Fma<float>::Normaliser {
    STROBE_INLINE Normaliser(V lse, float natural)
        : Fma<float>::Normaliser(kPlanes > 1 ? lse : lse * V(1.44269504f), kPlanes > 1 ? natural : natural * 1.44269504f) {}
    STROBE_INLINE V operator()(V s) const { return kPlanes > 1 ? Fma<float>::Normaliser::operator()(s) : exp2<4>(s * this->natural - this->lse); }
  };

  struct Left { // rows of 32 along k, `step` from one 32 to the next
    const uint16_t *a;
    int64_t ld, step, plane;
  };
  struct Right {
    const uint32_t *b;
    int64_t ld, plane;
  };

  // The thread's tile registers, configured for the time it works.
  struct Session {
    STROBE_INLINE Session() {
      alignas(64) struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t columns[16];
        uint8_t rows[16];
      } config = {};
      config.palette = 1;
      for (int t = 0; t < 8; ++t) {
        config.columns[t] = 64;
        config.rows[t] = 16;
      }
      asm volatile("ldtilecfg %0" ::"m"(config));
    }
    STROBE_INLINE ~Session() { asm volatile("tilerelease"); }
  };

  // One block of C: kRows x kColumns tiles.
  template <int kRows, int kColumns> static STROBE_INLINE void multiply_block(int64_t depth, Left a, Right b, float *c, int64_t ldc, bool accumulate) {
    unroll<kRows>(STROBE_UNROLL(m) {
      unroll<kColumns>(STROBE_UNROLL(n) {
        if (accumulate)
          tile_load<2 * m + n>(c + 16 * m * ldc + 16 * n, ldc * 4);
        else
          tile_zero<2 * m + n>();
      });
    });
    for (int64_t k = 0; k < depth; k += 32) {
      unroll<kPlanes>(STROBE_UNROLL(pa) {
        unroll<kRows>(STROBE_UNROLL(m) { tile_load<4 + m>(a.a + pa * a.plane + 16 * m * a.ld + k / 32 * a.step, a.ld * 2); });
        unroll<kPlanes - pa>(STROBE_UNROLL(pb) {
          unroll<kColumns>(STROBE_UNROLL(n) { tile_load<6 + n>(b.b + pb * b.plane + k / 2 * b.ld + 16 * n, b.ld * 4); });
          unroll<kRows>(STROBE_UNROLL(m) {
            unroll<kColumns>(STROBE_UNROLL(n) { tile_multiply<2 * m + n, 4 + m, 6 + n>(); });
          });
        });
      });
    }
    unroll<kRows>(STROBE_UNROLL(m) {
      unroll<kColumns>(STROBE_UNROLL(n) { tile_store<2 * m + n>(c + 16 * m * ldc + 16 * n, ldc * 4); });
    });
  }
  template <int kRows> static STROBE_INLINE void multiply_rows(int64_t columns, int64_t depth, Left a, Right b, float *c, int64_t ldc, bool accumulate) {
    int64_t n = 0;
    for (; n + 32 <= columns; n += 32) multiply_block<kRows, 2>(depth, a, {b.b + n, b.ld, b.plane}, c + n, ldc, accumulate);
    if (n < columns) multiply_block<kRows, 1>(depth, a, {b.b + n, b.ld, b.plane}, c + n, ldc, accumulate);
  }
  static __attribute__((noinline)) void multiply(int64_t rows, int64_t columns, int64_t depth, Left a, Right b, float *c, int64_t ldc, bool accumulate) {
    int64_t m = 0;
    for (; m + 16 < rows; m += 32) multiply_rows<2>(columns, depth, {a.a + m * a.ld, a.ld, a.step, a.plane}, b, c + m * ldc, ldc, accumulate);
    if (m < rows) multiply_rows<1>(columns, depth, {a.a + m * a.ld, a.ld, a.step, a.plane}, b, c + m * ldc, ldc, accumulate);
  }

  struct Keys {
    Left rows, columns;
  };
  static STROBE_INLINE bool in_place(const View &, int64_t) { return false; }
  static STROBE_INLINE Keys keys_in_place(const View &, int64_t, int64_t, int64_t) { return {}; }
  // Elements a packed key takes; n keys are padded to at most n + 64.
  static int64_t key_size(int64_t d, bool rows, bool columns) { return kPlanes * ((rows ? round_to(d, 32) : 0) + (columns ? round_to(d, 16) : 0)); }
  static Keys keys_at(const uint16_t *base, int64_t n, int64_t d, bool rows) {
    const int64_t wide = round_to(d, 32), tall = round_to(d, 16), row_plane = round_to(n, 16) * wide;
    return {{base, wide, 32, row_plane}, {base + (rows ? kPlanes * row_plane : 0), 32, 32 * tall, round_to(n, 32) * tall}};
  }
  // wide: 64 x round_to(d, 32)
  static void pack_keys(const View &x, int64_t b, int64_t h, int64_t j0, int64_t n, int64_t d, Keys to, bool rows, bool columns, float *wide, float *buffer) {
    const int64_t ld = round_to(d, 32);
    for (int64_t j = 0; j < n; j += 64) {
      const int64_t count = n - j < 64 ? n - j : 64, width = round_to(count, 32);
      if (rows) {
        for (int64_t r = 0; r < count; ++r) load_row(x, b, h, j0 + j + r, 0, d, wide + r * ld);
        pack_rows(wide, count, d, ld, rows_from(to.rows, j), ld);
      }
      if (columns) {
        load_lanes_of(x, b, h, j0 + j, count, d, 1.0f, wide, width, buffer);
        pack_rows(wide, d, width, width, columns_from(to.columns, j), width);
      }
    }
  }
  // From key `skip` on, a multiple of kKeyAlign.
  static STROBE_INLINE Left rows_from(Left x, int64_t skip) { return {x.a + skip * x.ld, x.ld, x.step, x.plane}; }
  static STROBE_INLINE Left columns_from(Left x, int64_t skip) { return {x.a + skip / 32 * x.step, x.ld, x.step, x.plane}; }

  static int64_t lanes_size(int64_t width, int64_t d) { return kPlanes * round_to(d, 32) * width + 2 * d * width; } // packed, and wide
  static Right load_lanes(const View &x, int64_t b, int64_t h, int64_t i0, int64_t n, int64_t d, float factor, int64_t width, uint16_t *scratch, float *buffer) {
    float *wide = reinterpret_cast<float *>(scratch);
    uint32_t *packed = reinterpret_cast<uint32_t *>(scratch + 2 * d * width);
    load_lanes_of(x, b, h, i0, n, d, factor, wide, width, buffer);
    pack_pairs<kPlanes>(wide, d, width, packed);
    return {packed, width, round_to(d, 32) / 2 * width};
  }

  static int64_t rows_size(int64_t n, int64_t d) { return (kPlanes + 2) * round_to(n, 32) * round_to(d, 16); }
  static Right load_rows(const View &x, int64_t b, int64_t h, int64_t i0, int64_t n, int64_t d, uint16_t *scratch) {
    const int64_t ld = round_to(d, 16);
    float *wide = reinterpret_cast<float *>(scratch);
    uint32_t *packed = reinterpret_cast<uint32_t *>(scratch + 2 * round_to(n, 32) * ld);
    for (int64_t i = 0; i < n; ++i) {
      load_row(x, b, h, i0 + i, 0, d, wide + i * ld);
      fill(wide + i * ld + d, ld - d, 0.0f);
    }
    pack_pairs<kPlanes>(wide, n, ld, packed);
    return {packed, ld, round_to(n, 32) / 2 * ld};
  }

  struct Scores {
    uint32_t *pairs;   // [plane][round_to(keys, 32) / 2][width], or null
    uint16_t *bf16;    // [plane][round_to(keys, 16)][ld], or null
    int64_t width, ld, pairs_plane, rows_plane;
    STROBE_INLINE void put(int64_t j, int64_t lane, Vec<float> first, Vec<float> second, bool /*both: zero where not*/) const {
      Split<kPlanes> a((__m512)first.v), b((__m512)second.v);
      for (int p = 0; p < kPlanes; ++p) {
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b.plane[p], a.plane[p]);
        if (bf16) {
          uint16_t *to = bf16 + p * rows_plane + j * ld + lane;
          _mm256_storeu_si256((__m256i *)to, _mm512_castsi512_si256(both));
          _mm256_storeu_si256((__m256i *)(to + ld), _mm512_extracti64x4_epi64(both, 1));
        }
        if (pairs) _mm512_storeu_si512(pairs + p * pairs_plane + j / 2 * width + lane, _mm512_permutexvar_epi16(interleave_order(), both));
      }
    }
    STROBE_INLINE void finish(int64_t keys) const { // zeros where the padding lies
      const int64_t even = round_to(keys, 2);
      for (int p = 0; p < kPlanes; ++p) {
        if (pairs) fill(pairs + p * pairs_plane + even / 2 * width, (round_to(keys, 32) - even) / 2 * width, 0u);
        if (!bf16) continue;
        fill(bf16 + p * rows_plane + even * ld, (round_to(keys, 16) - even) * ld, uint16_t(0));
        if (width < ld)
          for (int64_t j = 0; j < even; ++j) fill(bf16 + p * rows_plane + j * ld + width, ld - width, uint16_t(0));
      }
    }
    STROBE_INLINE Right lanes() const { return {pairs, width, pairs_plane}; }
    STROBE_INLINE Left rows() const { return {bf16, ld, 32, rows_plane}; }
  };
  static int64_t scores_size(int64_t tile_k, int64_t width) { return kPlanes * round_to(tile_k, 32) * round_to(width, 32); }
  static STROBE_INLINE Scores scores(float * /*s*/, uint16_t *lanes, uint16_t *rows, int64_t keys, int64_t width) {
    const int64_t ld = round_to(width, 32);
    return {reinterpret_cast<uint32_t *>(lanes), rows, width, ld, round_to(keys, 32) / 2 * width, round_to(keys, 16) * ld};
  }

private:
  // src[rows][width] -> the left operand `to`; of its columns [0, end) those past `columns` are zero. width and end are multiples of 16.
  static __attribute__((noinline)) void pack_rows(const float *src, int64_t rows, int64_t columns, int64_t width, Left to, int64_t end) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < end; c += 16) {
        int64_t left = columns - c;
        __mmask16 some = left >= 16 ? 0xFFFF : left > 0 ? __mmask16((1u << left) - 1) : 0;
        Split<kPlanes> x(_mm512_maskz_loadu_ps(some, src + r * width + c));
        uint16_t *dst = const_cast<uint16_t *>(to.a) + r * to.ld + c / 32 * to.step + c % 32;
        for (int p = 0; p < kPlanes; ++p) _mm256_storeu_si256((__m256i *)(dst + p * to.plane), (__m256i)_mm512_cvtneps_pbh(x.plane[p]));
      }
    }
  }
  static STROBE_INLINE void load_lanes_of(const View &x, int64_t b, int64_t h, int64_t i0, int64_t n, int64_t d, float factor, float *dst, int64_t width,
                                          float *buffer) {
    STROBE_ISA::load_lanes(x, b, h, i0, n, 0, d, factor, dst, width, buffer);
  }
};

} // namespace strobe::inline STROBE_ISA
