// The products of few rows of queries with K and V. Memory limits them: they read K and V once and in place. S = Q K^T has one key per
// lane, so words of K are transposed. O = P V has one word of V per lane. Rows of Q and P are broadcast, and the sums stay in registers.
#pragma once
#include "elements.h"
#include "gemm.h"
#include "tile.h"

namespace strobe::inline STROBE_ISA {

// The products for decode.h (decode_products.h).
template <class Lanes> class FewRows;
template <class Math> class ManyRows;

// Products by multiply-add. Sums have the order of gemm.h.
template <class T, class E> struct FmaLanes {
  using Real = T;
  using Elements = E;
  using Operand = T; // an element of a row of Q or P, to be broadcast
  using Words = WordsOf<T>;
  static constexpr int kTerms = E::kPerWord; // operands per word of K
  static constexpr int64_t kTermsOfRun = kRun;
  static constexpr int kTogether = kRoundsProducts ? 4 : 1; // terms that are added up before they join a sum
  template <int n> static STROBE_INLINE Vec<T> term(Words words) { return E::template element<n>(words); }
  template <int kStride> static STROBE_INLINE void add(const Vec<T> (&x)[kTogether], const Operand *y, Vec<T> &sum) {
    if constexpr (kTogether == 4)
      sum += (x[0] * V(y[0]) + x[1] * V(y[kStride])) + (x[2] * V(y[2 * kStride]) + x[3] * V(y[3 * kStride]));
    else
      sum = fma(x[0], V(*y), sum);
  }

  // A row of V: its words hold as many vectors of columns as a word holds elements.
  static constexpr int kVectors = E::kPerWord, kKeys = kTogether, kOperands = kTogether; // keys that are added up at once
  template <int n> static STROBE_INLINE void add_values(const Words (&words)[kKeys], const Operand *p, Vec<T> &sum) {
    Vec<T> x[kKeys];
    unroll<kKeys>(STROBE_UNROLL(i) { x[i] = E::template element<n>(words[i]); });
    add<1>(x, p, sum);
  }
  // The place of column c in a row of the sums: [vector of words][element][lane].
  static STROBE_INLINE int64_t place(int64_t c) {
    constexpr int64_t L = Vec<T>::kLanes, n = E::kPerWord;
    return c / (L * n) * (L * n) + c % n * L + c / n % L;
  }
  static STROBE_INLINE void convert(const T *src, int64_t count, Operand *dst) { std::memcpy(dst, src, sizeof(T) * size_t(count)); }

private:
  using V = Vec<T>;
};

inline constexpr int kMostRowsHeld = kVectorRegisters == 32 ? 8 : 4;

inline constexpr int64_t kPitch = 1024 + 16; // elements from one row of scores or P to the next, so that rows share no cache sets

// Prefetches words of later rows. If rows are adjacent, it prefetches words in memory order, because the CPU's own prefetcher follows only
// that order. Otherwise it prefetches the same words of each row.
template <class Word> class Prefetch {
public:
  // For a loop over the words [w, w + words) of `rows` rows, which have `all` words each.
  STROBE_INLINE Prefetch(const Word *ahead, int64_t stride, int64_t rows, int64_t w, int64_t words, int64_t all)
      : at_(ahead + (stride == all ? rows * w : w)), row_(stride == all ? words : stride) {}
  STROBE_INLINE void operator()(int64_t row, int64_t word) const {
    if (word * int64_t(sizeof(Word)) % 64 == 0) __builtin_prefetch(at_ + row * row_ + word, 0, 2);
  }

private:
  const Word *at_;
  int64_t row_;
};

// s[r * kPitch + key] = q(r) k(key) for a block of keys, a multiple of the lanes. q: [words * Lanes::kTerms][kRows].
template <class Lanes, int kRows>
__attribute__((noinline)) void score_keys(const WordBlock<typename Lanes::Elements::Word> &block, int64_t words,
                                          const typename Lanes::Operand *q, typename Lanes::Real *s) {
  using T = typename Lanes::Real;
  using V = Vec<T>;
  constexpr int L = V::kLanes, kTerms = Lanes::kTerms, kTogether = Lanes::kTogether, kStep = max(1, kTogether / kTerms);
  constexpr int kSquare = max(L, kStep); // words that are transposed at a time
  constexpr int64_t kRunWords = Lanes::kTermsOfRun / kTerms;
  for (int64_t key = 0; key < block.count; key += L) {
    V run[kRows];
    unroll<kRows>(STROBE_UNROLL(r) { run[r] = V(T(0)); });
    bool started = false;
    const auto end_run = [&]() __attribute__((always_inline)) { // sums are added up in memory, because registers hold a square of K
      unroll<kRows>(STROBE_UNROLL(r) {
        T *const at = s + r * kPitch + key;
        (started ? run[r] + V::load(at) : run[r]).store(at);
        run[r] = V(T(0));
      });
      started = true;
    };
    const auto *const keys = block.rows + key * block.stride;
    const typename Lanes::Operand *operand = q;
    // Adds the terms of kStep words.
    const auto add_step = [&](const V *word) __attribute__((always_inline)) {
      unroll<kStep * kTerms / kTogether>(STROBE_UNROLL(n) {
        V terms[kTogether];
        unroll<kTogether>(STROBE_UNROLL(i) {
          constexpr int kTerm = n * kTogether + i;
          terms[i] = Lanes::template term<kTerm % kTerms>((typename Lanes::Words)word[kTerm / kTerms].v);
        });
        unroll<kRows>(STROBE_UNROLL(r) { Lanes::template add<kRows>(terms, operand + r, run[r]); });
        operand += kTogether * kRows;
      });
    };
    for (int64_t w = 0; w < words; w += kSquare) {
      const Prefetch prefetch(block.ahead + key * block.stride, block.stride, L, w, kSquare, words);
      V x[kSquare];
      unroll<kSquare / L>(STROBE_UNROLL(part) {
        V square[L];
        unroll<L>(STROBE_UNROLL(i) {
          prefetch(i, part * L);
          square[i] = V::load(reinterpret_cast<const T *>(keys + i * block.stride + w + part * L));
        });
        transpose_block(square);
        unroll<L>(STROBE_UNROLL(i) { x[part * L + i] = square[i]; });
      });
      if constexpr (kTerms <= 2) { // in registers
        unroll<kSquare / kStep>(STROBE_UNROLL(i) { add_step(x + i * kStep); });
        if (kRunWords > 0 && (w + kSquare) % max(kRunWords, int64_t(1)) == 0) end_run();
      } else {                        // a loop through memory, whose code is shorter
        static_assert(kRunWords > 0); // otherwise each word would end a run
        alignas(64) T stored[kSquare * L];
        unroll<kSquare>(STROBE_UNROLL(i) { x[i].store(stored + i * L); });
        for (int64_t i = 0; i < kSquare; ++i) {
          const V word[1] = {V::load(stored + i * L)};
          add_step(word);
          if ((w + i + 1) % kRunWords == 0) end_run();
        }
      }
    }
    if (kRunWords == 0 || words % max(kRunWords, int64_t(1)) != 0) end_run();
  }
}

// o[r * ldo ...] (+)= P V for a run of keys, a multiple of Lanes::kKeys: kWords vectors of words at a time, at the end fewer.
template <class Lanes, int kRows, int kWords, int kParts>
STROBE_INLINE void add_run(const WordBlock<typename Lanes::Elements::Word> &block, int64_t first, int64_t keys, int64_t w, int64_t words,
                           const typename Lanes::Operand *p, typename Lanes::Real *o, int64_t ldo, bool accumulate) {
  using T = typename Lanes::Real;
  using V = Vec<T>;
  constexpr int L = V::kLanes, kOfWord = Lanes::kVectors; // vectors of columns in a vector of words; kParts of them are taken at a time
  for (; w + kWords * L <= words; w += kWords * L) {
    const Prefetch prefetch(block.ahead + first * block.stride, block.stride, keys, w, kWords * L, words);
    unroll<kOfWord / kParts>(STROBE_UNROLL(part) {
      constexpr int kFirst = part * kParts;
      V sum[kRows][kWords * kParts];
      unroll<kRows>(STROBE_UNROLL(r) { unroll<kWords * kParts>(STROBE_UNROLL(n) { sum[r][n] = V(T(0)); }); });
      const typename Lanes::Operand *weight = p;
      const typename Lanes::Elements::Word *row = block.rows + first * block.stride + w;
      for (int64_t key = 0; key < keys; key += Lanes::kKeys, weight += Lanes::kOperands, row += Lanes::kKeys * block.stride) {
        unroll<kWords>(STROBE_UNROLL(v) {
          typename Lanes::Words x[Lanes::kKeys];
          unroll<Lanes::kKeys>(STROBE_UNROLL(i) {
            if constexpr (kFirst == 0) prefetch(key + i, v * L);
            x[i] = (typename Lanes::Words)V::load(reinterpret_cast<const T *>(row + i * block.stride + v * L)).v;
          });
          unroll<kParts>(STROBE_UNROLL(n) {
            unroll<kRows>(STROBE_UNROLL(r) { Lanes::template add_values<kFirst + n>(x, weight + r * kPitch, sum[r][v * kParts + n]); });
          });
        });
      }
      unroll<kRows>(STROBE_UNROLL(r) {
        unroll<kWords * kParts>(STROBE_UNROLL(n) {
          T *at = o + r * ldo + (w / L + n / kParts) * (kOfWord * L) + (kFirst + n % kParts) * L;
          (accumulate ? V::load(at) + sum[r][n] : sum[r][n]).store(at);
        });
      });
    });
  }
  if constexpr (kWords > 1) add_run<Lanes, kRows, kWords / 2, kParts>(block, first, keys, w, words, p, o, ldo, accumulate);
}

// o (+)= P V for a block of keys, by add_run(). Each run of kRun keys starts from 0.
template <class Lanes, int kRows>
__attribute__((noinline)) void add_values(const WordBlock<typename Lanes::Elements::Word> &block, int64_t words,
                                          const typename Lanes::Operand *p, typename Lanes::Real *o, int64_t ldo, bool accumulate) {
  constexpr int kHeld = min(8, 2 * kMostRowsHeld / kRows), kParts = min(kHeld, Lanes::kVectors);
  for (int64_t key = 0; key < block.count; key += kRun, accumulate = true)
    add_run<Lanes, kRows, kHeld / kParts, kParts>(block, key, min((i64)kRun, (i64)(block.count - key)), 0, words,
                                                  p + key * Lanes::kOperands / Lanes::kKeys, o, ldo, accumulate);
}

} // namespace strobe::inline STROBE_ISA
