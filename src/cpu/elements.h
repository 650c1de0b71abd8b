// The elements of K and V, for code that reads rows as words of a lane's width: how many elements a word holds, and each element of a word
// as a number. The same functions serve keys across lanes (a vector has one word of each of many rows) and columns across lanes (a vector
// has many words of one row). Words are little-endian: element 0 is the lowest.
#pragma once
#include "quantised.h"
#include "tile.h"

namespace strobe::inline STROBE_ISA {

template <class T> using WordsOf = typename Vec<T>::RawInt;

// float or double, stored as they are.
template <class T> struct PlainElements {
  using Real = T;
  using Stored = T;
  using Word = typename Vec<T>::Int;
  static constexpr int kPerWord = 1;
  template <int> static STROBE_INLINE Vec<T> element(WordsOf<T> words) { return Vec<T>((typename Vec<T>::Raw)words); }
};

struct BFloat16Elements {
  using Real = float;
  using Stored = BFloat16;
  using Word = int32_t;
  static constexpr int kPerWord = 2;
  template <int n> static STROBE_INLINE Vec<float> element(WordsOf<float> words) {
    return Vec<float>((Vec<float>::Raw)(n == 0 ? words << 16 : words & int32_t(0xFFFF0000)));
  }
};

struct HalfElements {
  using Real = float;
  using Stored = Half;
  using Word = int32_t;
  static constexpr int kPerWord = 2;
  template <int n> static STROBE_INLINE Vec<float> element(WordsOf<float> words) { // converts like widen()
    using V = Vec<float>;
    const WordsOf<float> high = n == 0 ? words << 16 : words, magnitude = (high & 0x7FFF0000) >> 3;
    const WordsOf<float> finite = (WordsOf<float>)(V((V::Raw)magnitude) * V(0x1p112f)).v;
    const WordsOf<float> r = magnitude >= 0x0F800000 ? magnitude | 0x7F800000 : finite;
    return V((V::Raw)(r | (high & int32_t(0x80000000))));
  }
};

// Quantised elements, as stored.
struct Int8Elements {
  using Real = float;
  using Stored = uint8_t;
  using Word = int32_t;
  static constexpr int kPerWord = 4;
  template <int n> static STROBE_INLINE Vec<float> element(WordsOf<float> words) {
    return Vec<float>(__builtin_convertvector((words << (24 - 8 * n)) >> 24, Vec<float>::Raw));
  }
};
// FP8: E4M3 or E5M2, whose exponents have four and five bits. The largest exponent, in E4M3 with the largest fraction, is not finite.
template <class E> struct Fp8Elements {
  using Real = float;
  using Stored = E;
  using Word = int32_t;
  static constexpr int kPerWord = 4;
  static constexpr bool kFive = std::is_same_v<E, E5M2>;
  template <int n> static STROBE_INLINE Vec<float> element(WordsOf<float> words) { // converts like widen()
    using V = Vec<float>;
    const WordsOf<float> high = words << (24 - 8 * n), magnitude = (high & 0x7F000000) >> (kFive ? 3 : 4);
    const WordsOf<float> number = (WordsOf<float>)(V((V::Raw)magnitude) * V(kFive ? 0x1p112f : 0x1p120f)).v;
    const WordsOf<float> r = magnitude >= (kFive ? 0x0F800000 : 0x07F00000) ? magnitude | 0x7F800000 : number;
    return V((V::Raw)(r | (high & int32_t(0x80000000))));
  }
};
struct Int4Elements { // two per byte
  using Real = float;
  using Stored = uint8_t;
  using Word = int32_t;
  static constexpr int kPerWord = 8;
  template <int n> static STROBE_INLINE Vec<float> element(WordsOf<float> words) {
#if defined(__AVX512F__)
    const __m512 numbers = _mm512_set_ps(-1, -2, -3, -4, -5, -6, -7, -8, 7, 6, 5, 4, 3, 2, 1, 0);
    return Vec<float>((Vec<float>::Raw)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)words, 4 * n), numbers));
#else
    return Vec<float>(__builtin_convertvector((words << (28 - 4 * n)) >> 28, Vec<float>::Raw));
#endif
  }
};

// Calls f with the element type of a dtype. kBFloat16: whether elements that are not quantised are bf16.
template <class T, bool kQuantised, bool kBFloat16, class F> STROBE_INLINE void with_elements(DType dtype, F &&f) {
  if constexpr (kQuantised) {
    if (dtype == DType::i8) return f(Int8Elements{});
    if (dtype == DType::e4m3) return f(Fp8Elements<E4M3>{});
    if (dtype == DType::e5m2) return f(Fp8Elements<E5M2>{});
    if (dtype == DType::i4x2) return f(Int4Elements{});
  }
  if constexpr (kBFloat16)
    f(BFloat16Elements{});
  else if constexpr (sizeof(T) == 8)
    f(PlainElements<double>{});
  else if (dtype == DType::f32)
    f(PlainElements<float>{});
  else if (dtype == DType::bf16)
    f(BFloat16Elements{});
  else
    f(HalfElements{});
}

template <class Stored> STROBE_INLINE bool is_finite(Stored x) {
  if constexpr (std::is_same_v<Stored, uint8_t>)
    return true; // integers
  else
    return __builtin_isfinite(widen(x));
}

// Rows at a fixed distance, counted in words. `ahead` points to as many rows that will be read soon.
template <class Word> struct WordBlock {
  const Word *rows;
  int64_t count; // rows; rows past the tensor's end are 0
  int64_t stride;
  const Word *ahead;
};

// Rows of K or V of one head, in whole steps of words: in place if memory holds whole steps, otherwise as copies, with zeros after their
// columns.
template <class Elements> class WordRows {
public:
  using Word = typename Elements::Word;
  using Stored = typename Elements::Stored;
  static constexpr int64_t kStored = sizeof(Word) / sizeof(Stored); // per word; two INT4 are one stored element
  static constexpr int64_t kStep = Vec<typename Elements::Real>::kLanes < 4 ? 4 : Vec<typename Elements::Real>::kLanes;
  static int64_t words(int64_t d) { return (d + kStep * Elements::kPerWord - 1) / (kStep * Elements::kPerWord) * kStep; }

  // Rows before `end` are read in blocks, which are cut at multiples of `unit` rows and padded to a multiple of `least`. ahead_bytes:
  // measured (docs/lab/performance.md).
  WordRows(const View &x, int64_t b, int64_t h, int64_t d, int64_t end, int64_t unit, int64_t least, int64_t ahead_bytes = 8192)
      : x_(x), b_(b), h_(h), d_(d * kStored / Elements::kPerWord), end_(end), unit_(unit), least_(least), words_(words(d)),
        stride_(x.stride[2] / kStored), ahead_(max((i64)unit, (i64)(ahead_bytes / (words_ * int64_t(sizeof(Word)))))),
        in_place_(x.stride[3] == 1 && words_ * kStored == d_ && stride_ * kStored == x.stride[2]) {}

  // The rows from i0 on, at most `most`. finite: numbers that are not finite become 0. copies: a buffer for as many rows.
  STROBE_INLINE WordBlock<Word> block(int64_t i0, int64_t most, bool finite, Word *copies) const {
    const Word *ahead = at(min((i64)(i0 + ahead_), (i64)(end_ - 1)));
    int64_t n = min((i64)most, (i64)(end_ - i0));
    if (n > unit_) n = n / unit_ * unit_;
    if (x_.page_size) n = min((i64)n, max((i64)unit_, (i64)((x_.page_size - i0 % x_.page_size) / unit_ * unit_)));
    const bool together = !x_.page_size || i0 % x_.page_size + n <= x_.page_size;
    if (in_place_ && together && n % least_ == 0 && !finite) return {at(i0), n, stride_, ahead};
    return copied(i0, n, ahead, finite, copies);
  }

private:
  STROBE_INLINE const Word *at(int64_t i) const { return reinterpret_cast<const Word *>(x_.at<Stored>(b_, h_, i, 0)); }
  __attribute__((noinline)) WordBlock<Word> copied(int64_t i0, int64_t n, const Word *ahead, bool finite, Word *copies) const {
    for (int64_t i = 0; i < n; ++i) {
      const Stored *from = x_.at<Stored>(b_, h_, i0 + i, 0);
      Stored *const to = reinterpret_cast<Stored *>(copies + i * words_);
      if (x_.stride[3] == 1 && d_ * int64_t(sizeof(Stored)) == 32 && words_ * int64_t(sizeof(Word)) == 64) { // 64 columns of INT4
        std::memcpy(to, from, 32);
        std::memset(to + d_, 0, 32);
      } else {
        if (x_.stride[3] == 1)
          std::memcpy(to, from, sizeof(Stored) * size_t(d_));
        else
          for (int64_t c = 0; c < d_; ++c) to[c] = from[c * x_.stride[3]];
        fill(to + d_, words_ * kStored - d_, Stored{});
      }
      for (int64_t c = 0; c < d_ && finite; ++c) to[c] = is_finite(to[c]) ? to[c] : Stored{};
    }
    const int64_t count = round_to(n, least_);
    fill(copies + n * words_, (count - n) * words_, Word(0));
    return {copies, count, words_, ahead};
  }

  const View &x_;
  int64_t b_, h_, d_, end_, unit_, least_, words_, stride_, ahead_;
  bool in_place_;
};

} // namespace strobe::inline STROBE_ISA
