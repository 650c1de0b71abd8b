// The two products of decode.h in AMX's tiles, for queries in bf16. A product of tiles takes 16 cycles, however few of the 16 rows of Q or
// P are used. Loading the tile of K or V from memory takes longer, so up to 16 rows cost little more than the loads. Rows of K are used as
// tiles in place; rows of V are interleaved by pairs. A quantised number (integer or E4M3) is exact in bf16; scales of rows multiply S and
// P. Tile registers 0-3 hold sums, 4-6 are loaded in rotation, and 7 holds the operand that four products share.
#pragma once
#include "decode_products.h"
#include "pairs.h"
#include "tiles.h"

namespace strobe::inline STROBE_ISA {

template <class E> class TileRows final : public DecodeProducts<float>, DecodeTile {
public:
  using T = float;
  using Word = typename E::Word;
  using Rows = WordRows<E>;

  TileRows(Arena &arena, const Problem &p, int64_t rows) {
    const int64_t padded = round_to(rows, kTile);
    words_k_ = Rows::words(p.head_dim), words_v_ = Rows::words(p.head_dim_v);
    q_ = arena.take<uint32_t>(padded * pairs_k());
    if (kConverts) k_ = arena.take<uint32_t>(kKeys * pairs_k());
    v_ = arena.take<uint32_t>(kKeys / 2 * columns_v());
    p_ = arena.take<uint16_t>(padded * kKeys);
    s_ = arena.take<T>(kKeys * kTile);
    o_ = arena.take<T>(padded * columns_v());
    if (p.quantised()) scales_ = arena.take<T>(kPitch);
    reals_ = arena.take<T>(round_to(p.head_dim_v, 16));
    copies_ = arena.take<Word>(kKeys * max(words_k_, words_v_));
  }

  // queries: rows of round_to(d, 16) columns, whose numbers are bf16. q_: [tile of rows][pair of columns][row].
  void load_queries(const T *queries, int64_t rows, int64_t d) override {
    fill(q_, round_to(rows, kTile) * pairs_k(), 0u);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < d; ++c) {
        const int64_t at = place_k(c);
        uint32_t &pair = q_[(r / kTile * pairs_k() + at / 2) * kTile + r % kTile];
        pair |= bit_cast<uint32_t>(queries[r * round_to(d, 16) + c]) >> 16 << at % 2 * 16;
      }
  }

  void scores(const DecodeKeys &span, int64_t rows, T *s) override {
    const Problem &p = span.p;
    const int64_t first = span.k_begin + span.keys.begin, count = span.count();
    const Rows k(p.k, span.b, span.kv, p.head_dim, first + count, kTile, kTile, ahead(words_k_));
    for (int64_t done = 0; done < count;) {
      const auto keys = k.block(first + done, kKeys, false, copies_);
      Fetch fetch{keys.ahead, keys.stride, words_k_, keys.count};
      if (kConverts) convert_keys(keys);
      const uint32_t *const from = kConverts ? k_ : reinterpret_cast<const uint32_t *>(keys.rows);
      const int64_t stride = kConverts ? pairs_k() : keys.stride;
      for (int64_t n = 0; n < div_up(rows, kTile); ++n) {
        multiply_keys(keys.count, from, stride, q_ + n * pairs_k() * kTile, fetch);
        for (int64_t key = 0; key < keys.count; key += kTile)
          store_scores(s_ + key * kTile, min((i64)kTile, (i64)(rows - n * kTile)), s + n * kTile * kPitch + done + key);
      }
      done += keys.count;
    }
    if (p.quantised()) scale_scores(span, rows, scales_, s);
  }

  void values(const DecodeKeys &span, bool hides, int64_t rows, const T *probs, T *o, int64_t ldo) override {
    const Problem &p = span.p;
    const int64_t first = span.k_begin + span.keys.begin, count = span.count(), ld = columns_v();
    const Rows v(p.v, span.b, span.kv, p.head_dim_v, first + count, kDepth, 2, ahead(words_v_));
    T power = 1, lifted = 1;
    if (p.quantised()) {
      load_row_scales(p.v_scale, span.b, span.kv, first, count, scales_);
      power = lift_scales(rows, count, probs), lifted = 1 / kLift;
    }
    for (int64_t done = 0; done < count;) {
      const int64_t j = span.keys.begin + done, most = min((i64)kKeys, (i64)(count - done));
      const bool nonfinite = hides && stores_nonfinite(span.v(), span.b, span.kv, span.k_begin + j, most, p.head_dim_v);
      const auto keys = v.block(first + done, most, nonfinite, copies_);
      const int64_t there = min((i64)keys.count, (i64)most);
      interleave_values(keys);
      convert_probabilities(p.quantised() ? scales_ + done : nullptr, hides, rows, there, probs + done);
      Fetch fetch{keys.ahead, keys.stride, words_v_, keys.count};
      for (int64_t n = 0; n < div_up(rows, kTile); ++n)
        multiply_values(round_to(there, kDepth), p_ + n * kTile * kKeys, o_ + n * kTile * ld, done > 0, fetch);
      if (nonfinite) add_nonfinite_values(span, j, there, rows, probs + done, reals_, o_, ld, place_v);
      done += keys.count;
    }
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < p.head_dim_v; ++c) o[r * ldo + c] = o_[r * ld + place_v(c)] * lifted * power;
  }

private:
  static constexpr int64_t kTile = 16;  // rows of a tile, and columns of FP32
  static constexpr int64_t kDepth = 32; // columns of bf16
  static constexpr int64_t L = Vec<T>::kLanes;
  static constexpr T kLift = 0x1p64f;
  static constexpr int64_t kPerWord = E::kPerWord;
  static constexpr bool kConverts = kPerWord > 2;
  static int64_t ahead(int64_t words) { return max((i64)16384, (i64)(kKeys * words * int64_t(sizeof(Word)))); } // in bytes, a block or more
  int64_t pairs_k() const { return words_k_ * kPerWord / 2; }
  int64_t columns_v() const { return words_v_ * kPerWord; }

  // Prefetches the rows of the next block. Each product of tiles prefetches as many lines as it consumes, so that memory and products work
  // at the same time.
  struct Fetch {
    const Word *row;
    int64_t stride, words, rows, w = 0;
    STROBE_INLINE void lines() {
      for (int64_t n = 0; n < kDepth / kPerWord && rows > 0; ++n) {
        __builtin_prefetch(row + w, 0, 2);
        w += L;
        if (w == words) w = 0, row += stride, --rows;
      }
    }
  };

  // The place of column c of K in its row: adjacent words have the order [pair of each word][word].
  static STROBE_INLINE int64_t place_k(int64_t c) {
    return c / (L * kPerWord) * (L * kPerWord) + c % kPerWord / 2 * kDepth + c / kPerWord % L * 2 + c % 2;
  }
  // The place of column c of V in a row of O, in the order [column of each word][word].
  static STROBE_INLINE int64_t place_v(int64_t c) { return FmaLanes<T, E>::place(c); }
  static STROBE_INLINE WordsOf<T> load(const Word *at) { return (WordsOf<T>)Vec<T>::load(reinterpret_cast<const T *>(at)).v; }
  // Pairs of bf16 numbers, `low` in the low half of each lane.
  static STROBE_INLINE __m512i pair(Vec<T> low, Vec<T> high) { return pair_up<2>((__m512)low.v, (__m512)high.v); }
  // Element n of each word of two rows, as pairs of bf16.
  template <int n> static STROBE_INLINE __m512i pair(WordsOf<T> even, WordsOf<T> odd) {
    if constexpr (kConverts) return pair(E::template element<n>(even), E::template element<n>(odd));
    const __m512i low = n == 0 ? (__m512i)even : _mm512_srli_epi32((__m512i)even, 16);
    return _mm512_mask_mov_epi16(low, 0xAAAAAAAA, n == 0 ? _mm512_slli_epi32((__m512i)odd, 16) : (__m512i)odd);
  }

  __attribute__((noinline)) void convert_keys(const WordBlock<Word> &keys) {
    for (int64_t key = 0; key < keys.count; ++key) {
      const Word *const row = keys.rows + key * keys.stride;
      for (int64_t w = 0; w < words_k_; w += L) {
        const WordsOf<T> words = load(row + w);
        unroll<kPerWord / 2>(STROBE_UNROLL(n) {
          _mm512_storeu_si512(k_ + key * pairs_k() + w * kPerWord / 2 + n * L,
                              pair(E::template element<2 * n>(words), E::template element<2 * n + 1>(words)));
        });
      }
    }
  }

  // Computes s_[key][row] of one tile of rows.
  __attribute__((noinline)) void multiply_keys(int64_t count, const uint32_t *from, int64_t stride, const uint32_t *q, Fetch &fetch) {
    int64_t key = 0;
    for (; key + 4 * kTile <= count; key += 4 * kTile) multiply_tiles<4>(key, from, stride, q, fetch);
    for (; key < count; key += kTile) multiply_tiles<1>(key, from, stride, q, fetch);
  }
  template <int kTiles>
  STROBE_INLINE void multiply_tiles(int64_t key, const uint32_t *from, int64_t stride, const uint32_t *q, Fetch &fetch) {
    unroll<kTiles>(STROBE_UNROLL(t) { tile_zero<t>(); });
    const int64_t pairs = pairs_k();
    for (int64_t w = 0; w < pairs; w += kTile) {
      tile_load<7>(q + w * kTile, 64);
      unroll<kTiles>(STROBE_UNROLL(t) {
        fetch.lines();
        tile_load<4 + t % 3>(from + (key + t * kTile) * stride + w, stride * 4);
        tile_multiply<t, 4 + t % 3, 7>();
      });
    }
    unroll<kTiles>(STROBE_UNROLL(t) { tile_store<t>(s_ + (key + t * kTile) * kTile, 64); });
  }
  // Stores s[row * kPitch + key] of 16 keys.
  static STROBE_INLINE void store_scores(const T *tile, int64_t rows, T *s) {
    Vec<T> block[kTile];
    unroll<kTile>(STROBE_UNROLL(i) { block[i] = Vec<T>::load(tile + i * kTile); });
    transpose_block(block);
    unroll<kTile>(STROBE_UNROLL(r) {
      if (r < rows) block[r].store(s + r * kPitch);
    });
  }

  // Fills v_: [32 keys][16 columns][pair of keys][column]; zeros after the last row.
  __attribute__((noinline)) void interleave_values(const WordBlock<Word> &keys) {
    for (int64_t key = 0; key < round_to(keys.count, kDepth); key += 2) {
      uint32_t *const to = v_ + key / kDepth * (kDepth / 2) * columns_v() + key % kDepth / 2 * kTile;
      const Word *const row = keys.rows + key * keys.stride;
      for (int64_t w = 0; w < words_v_; w += L) {
        WordsOf<T> even{}, odd{};
        if (key < keys.count) even = load(row + w), odd = load(row + keys.stride + w);
        unroll<int(kPerWord)>(
            STROBE_UNROLL(n) { _mm512_storeu_si512(to + (w / L * kPerWord + n) * (kDepth / 2 * kTile), pair<n>(even, odd)); });
      }
    }
  }

  // Tiles flush products below 2^-126 to 0. So powers of two lift the largest product of P and a scale to about 2^100. P is multiplied by
  // kLift elsewhere, and here the scales are multiplied by the rest. Returns the factor by which O must be multiplied afterwards, besides 1
  // / kLift.
  __attribute__((noinline)) T lift_scales(int64_t rows, int64_t count, const T *probs) {
    const Vec<T> none(T(0));
    fill(scales_ + count, round_to(count, L) - count, T(0));
    Vec<T> most = none;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < count; j += L) {
        const Vec<T> p = Vec<T>::load(probs + r * kPitch + j);
        most = max(most, select(none < p, abs(p * Vec<T>::load(scales_ + j)), none)); // a hidden key's scale may be any number
      }
    T largest = 0;
    for (int lane = 0; lane < L; ++lane) largest = max(largest, T(most.v[lane]));
    if (largest == 0 || !__builtin_isfinite(largest)) return 1;
    constexpr uint32_t kMore = 36, kBias = 127; // 2^36 kLift = 2^100
    const uint32_t exponent = max(bit_cast<uint32_t>(largest) >> 23, kMore + 1);
    const Vec<T> factor(bit_cast<T>((2 * kBias + kMore - exponent) << 23));
    for (int64_t j = 0; j < count; j += L) (Vec<T>::load(scales_ + j) * factor).store(scales_ + j);
    return bit_cast<T>((exponent - kMore) << 23);
  }

  // Fills p_: [tile of rows][32 keys][row][key]. scales: the scales of V's rows, or null.
  __attribute__((noinline)) void convert_probabilities(const T *scales, bool hides, int64_t rows, int64_t count, const T *probs) {
    for (int64_t r = 0; r < round_to(rows, kTile); ++r)
      for (int64_t key = 0; key < round_to(count, kDepth); key += L) {
        const int64_t left = r < rows ? count - key : 0;
        const __mmask16 some = left >= L ? 0xFFFF : left > 0 ? __mmask16((1u << left) - 1) : 0;
        __m512 x = _mm512_maskz_loadu_ps(some, probs + r * kPitch + key);
        if (scales) { // a hidden key's scale may be any number
          const __mmask16 seen = hides ? _mm512_mask_cmp_ps_mask(some, x, _mm512_setzero_ps(), _CMP_NEQ_UQ) : some;
          x = _mm512_maskz_mul_ps(seen, _mm512_mul_ps(x, _mm512_set1_ps(kLift)), _mm512_maskz_loadu_ps(some, scales + key));
        }
        uint16_t *const to = p_ + r / kTile * kTile * kKeys + (key / kDepth * kTile + r % kTile) * kDepth + key % kDepth;
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), (__m256i)_mm512_cvtneps_pbh(x));
      }
  }

  // o (+)= P V of one tile of rows.
  __attribute__((noinline)) void multiply_values(int64_t keys, const uint16_t *p, T *o, bool accumulate, Fetch &fetch) {
    const int64_t columns = columns_v();
    int64_t c = 0;
    for (; c + 4 * kTile <= columns; c += 4 * kTile) multiply_columns<4>(c, keys, p, o, accumulate, fetch);
    for (; c < columns; c += 2 * kTile)
      multiply_columns<2>(c, keys, p, o, accumulate, fetch); // words are read in vectors of two columns or more
  }
  template <int kTiles>
  STROBE_INLINE void multiply_columns(int64_t c, int64_t keys, const uint16_t *p, T *o, bool accumulate, Fetch &fetch) {
    const int64_t ld = columns_v();
    unroll<kTiles>(STROBE_UNROLL(t) {
      if (accumulate)
        tile_load<t>(o + c + t * kTile, ld * 4);
      else
        tile_zero<t>();
    });
    for (int64_t key = 0; key < keys; key += kDepth) {
      tile_load<7>(p + key * kTile, 64);
      unroll<kTiles>(STROBE_UNROLL(t) {
        fetch.lines();
        tile_load<4 + t % 3>(v_ + key / 2 * ld + (c + t * kTile) * (kDepth / 2), 64);
        tile_multiply<t, 7, 4 + t % 3>();
      });
    }
    unroll<kTiles>(STROBE_UNROLL(t) { tile_store<t>(o + c + t * kTile, ld * 4); });
  }

  int64_t words_k_, words_v_;
  uint32_t *q_, *k_ = nullptr, *v_;
  uint16_t *p_;
  T *s_, *o_, *scales_ = nullptr, *reals_;
  Word *copies_;
};

} // namespace strobe::inline STROBE_ISA
