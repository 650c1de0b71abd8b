// Turns q.k into the score that softmax sees, one element at a time, and computes the derivative. Every kernel uses it; features that a
// kernel is not compiled with cost nothing.
#pragma once
#include "../ptx/math.h" // included first: score.h finds tanh there

#include "../attention/arguments.h"
#include "../attention/dropout.h"
#include "../attention/features.h"
#include "../attention/part.h"
#include "../attention/score.h"
#include "functions.h"

namespace strobe {

// The numbers that a part of a larger problem adds to a kernel's state; empty without a part.
template <bool kPart> struct PlaceOfRows { // the row of mask and bias that belongs to a query
  __device__ __forceinline__ i32 row(i32 i) const { return i; }
};
template <> struct PlaceOfRows<true> {
  i32 row_shift = 0; // the query tile's: row = position + row_shift
  __device__ __forceinline__ i32 row(i32 i) const { return i + row_shift; }
};
template <bool kPart> struct PlaceOfHeads { // the heads in dropout's counters
  __device__ __forceinline__ explicit PlaceOfHeads(const Inputs &) {}
  __device__ __forceinline__ u32 whole_head(i64 h) const { return (u32)h; }
  __device__ __forceinline__ u32 whole_batch(i64 b) const { return (u32)b; }
};
template <> struct PlaceOfHeads<true> {
  u32 first_head, first_batch;
  __device__ __forceinline__ explicit PlaceOfHeads(const Inputs &in)
      : first_head((u32)in.part->first_head), first_batch((u32)in.part->first_batch) {}
  __device__ __forceinline__ u32 whole_head(i64 h) const { return (u32)h + first_head; }
  __device__ __forceinline__ u32 whole_batch(i64 b) const { return (u32)b + first_batch; }
};

// The scores of one sequence. T: float, or double for fp64. A row is a query i of a head h; kernels that pack the heads of a group into a
// tile pass rows with different h.
template <Features F, class T, Functions kFunctions = Functions::full> struct Scores : PlaceOfRows<F.part != 0> {
  const Inputs &in;
  i64 b;
  i32 seqlen_q, seqlen_k;
  i32 low, high; // query i sees key j if i + low <= j <= i + high; bounds that no query reaches are tightened, so that sums fit 32 bits
  i32 offset;    // i + offset is the key opposite query i
  T scale;       // score = raw * scale
  T unit;        // (s - m) * unit is exp2's argument
  T cap, inverse_cap;
  T beta, beta_ln2, shift;

  __device__ Scores(const Inputs &in, const Sequence &s, i64 b)
      : in(in), b(b), seqlen_q((i32)s.band.seqlen_q), seqlen_k((i32)s.band.seqlen_k),
        low((i32)min(max(s.band.low, -s.band.seqlen_q), (i64)kMost)), high((i32)max(min(s.band.high, s.band.seqlen_k - 1), -(i64)kMost)),
        offset((i32)s.band.offset), scale(T(in.scale)), unit(T(natural_factor<F>(in.scale) * kLog2e<double>)), cap(T(in.cap)),
        inverse_cap(T(1.0 / in.cap)), beta(T(in.beta)), beta_ln2(T(in.beta * kLn2<double>)), shift(T(in.shift)) {}

  // One query: the values that are the same for all its keys.
  struct Row {
    i32 i, h;       // i is clamped into the sequence, for reads
    i32 begin, end; // keys visible by position: [begin, end)
    T slope;
    bool stepped;       // whether the following are known; otherwise they are i, and the key of the pair
    Stepped query, key; // those of PlaceOfPair
    const float *fetched = nullptr;
  };
  __device__ __forceinline__ Row row(i32 i, i32 h) const {
    Row r{min(i, seqlen_q - 1), h, 0, seqlen_k, T(0), false, {}, {}};
    if constexpr (F.band) {
      r.begin = max(0, r.i + low);
      r.end = min(seqlen_k, r.i + high + 1);
    }
    if constexpr (F.penalty)
      r.slope = CallersFunctions<F.program, F.program_high>::template penalty<kFunctions, T>(in.function, pair(r, 0));
    return r;
  }

  // The penalty's distance of a query and a key, and what it adds to their score.
  __device__ __forceinline__ i32 distance(i32 i, i32 j) const { return F.penalty & kFromZero ? i - j : i + offset - j; }
  static __device__ __forceinline__ T added(T slope, T distance) {
    if constexpr (F.penalty & kSigned) return -slope * distance;
    return alibi(slope, distance);
  }

  // Whether the caller's function lets row r see key j.
  __device__ __forceinline__ bool seen(const Row &r, i32 j) const {
    return CallersFunctions<F.program, F.program_high>::template seen<kFunctions, T>(in.function, pair(r, j));
  }

  // 0 if it does, else -inf; with kSeenAhead.
  __device__ __forceinline__ T hidden(const Row &r, i32 j) const {
    return CallersFunctions<F.program, F.program_high>::template hidden<T>(in.function, pair(r, j));
  }

  __device__ __forceinline__ i32 row_of(const Row &r) const { return PlaceOfRows<F.part != 0>::row(r.i); }

  // The score of row r and key j, whose q.k is raw; -inf if the key is hidden. by_position: some keys of the tile are hidden by position:
  // outside r's band, past the end of the sequence, or past `limit`, the end of the schedule's tile. Otherwise none is.
  __device__ __forceinline__ T score(T raw, const Row &r, i32 j, bool by_position, i32 limit) const {
    T unused;
    return score<false>(raw, r, j, T(distance(r.i, j)), InMemory{*this, r, j}, by_position, limit, unused);
  }
  // The same for a caller that has distance(r.i, j) as a float, and the bias and the mask as given.bias() and given.allowed(). open: the
  // function of the mask has to be asked.
  template <class Given>
  __device__ __forceinline__ T score(T raw, const Row &r, i32 j, T distance, const Given &given, bool by_position, i32 limit,
                                     bool open = true) const {
    T unused;
    return score<false>(raw, r, j, distance, given, by_position, limit, unused, open);
  }
  // Mask and bias of a query and a key, read from memory.
  struct InMemory {
    const Scores &s;
    const Row &r;
    i32 j;
    __device__ __forceinline__ T bias() const {
      return to_real<T>(*s.in.bias.template at<const typename Element<F.bias>::type>(s.b, r.h, s.row_of(r), j));
    }
    __device__ __forceinline__ bool allowed() const { return *s.in.mask.template at<const u8>(s.b, r.h, s.row_of(r), j) != 0; }
  };
  // The same with d score / d (scale * raw), 0 where hidden.
  __device__ __forceinline__ T score(T raw, const Row &r, i32 j, bool by_position, i32 limit, T &slope) const {
    return score(raw, r, j, InMemory{*this, r, j}, by_position, limit, slope);
  }
  template <class Given>
  __device__ __forceinline__ T score(T raw, const Row &r, i32 j, const Given &given, bool by_position, i32 limit, T &slope,
                                     bool open = true) const {
    return score<true>(raw, r, j, T(distance(r.i, j)), given, by_position, limit, slope, open);
  }

  // The pair as the caller's functions see it, in the whole problem.
  __device__ __forceinline__ PlaceOfPair pair(const Row &r, i32 j) const {
    const PlaceOfHeads<F.part != 0> heads(in);
    return {(i32)heads.whole_batch(b),
            (i32)heads.whole_head(r.h),
            r.i,
            j,
            offset,
            r.stepped ? r.query : Stepped{r.i, 0},
            r.stepped ? r.key : Stepped{j, 0},
            r.fetched};
  }

private:
  static constexpr i32 kMost = 1 << 30;

  // Where P must be as exact as FP32, forward and backward must compute the same score to the last bit, because the last bit of a large
  // score changes P by more than P's own last bit.
  static __device__ __forceinline__ T product(T x, T y) { return rounds_each(kFunctions) ? rounded_product(x, y) : x * y; }
  static __device__ __forceinline__ T sum(T x, T y) { return rounds_each(kFunctions) ? rounded_sum(x, y) : x + y; }

  template <bool kSlope, class Given>
  __device__ __forceinline__ T score(T raw, const Row &r, i32 j, T distance, const Given &given, bool by_position, i32 limit, T &slope,
                                     bool open = true) const {
    static_assert(!kSlope || kFunctions != Functions::rough);
    T s = raw;
    bool seen = !by_position || (F.band ? j >= r.begin && j < min(r.end, limit) : j < limit); // limit <= seqlen_k
    if constexpr (kSlope) slope = T(1);
    if constexpr (F.additive()) {
      if constexpr (F.function != kHyperbolic || F.scaled) s = product(s, scale);
      if constexpr (F.function == kCapped) {
        if constexpr (kSlope && kFunctions == Functions::full)
          s = softcap(s, cap, inverse_cap, slope);
        else if constexpr (kSlope)
          s = cap * tanh_approximate(s * inverse_cap, slope);
        else if constexpr (kFunctions == Functions::rough)
          s = cap * tanh_approximate(s * inverse_cap);
        else
          s = cap * tanh(s * inverse_cap);
      }
      if constexpr (F.function == kHyperbolic) {
        T distance;
        if constexpr (kFunctions == Functions::full)
          distance = arccosh(-s, slope);
        else
          distance = arccosh2_approximate(-s, slope);
        s = hyperbolic(distance, kFunctions == Functions::full ? beta : beta_ln2, beta, shift, slope);
      }
      if constexpr (F.given()) {
        s = CallersFunctions<F.program, F.program_high>::template score < kFunctions,
        kSlope && F.curved() > (in.function, pair(r, j), s, slope);
        if constexpr (kSlope || F.penalty || F.bias) seen = seen && s != minus_infinity<T>();
      }
      if constexpr (F.penalty) s = sum(s, added(r.slope, distance));
      if constexpr (F.bias) {
        if (seen) {
          const T x = given.bias();
          s = sum(s, x);
          seen = x != minus_infinity<T>(); // then s may be NaN
        }
      }
    }
    if constexpr (F.seen) seen = seen & (!open || this->seen(r, j));
    if constexpr (F.mask) {
      if (seen) seen = given.allowed();
    }
    if constexpr (kSlope) slope = seen ? slope : T(0); // if s is NaN, so is the derivative
    return seen ? s : minus_infinity<T>();
  }
};

// Dropout of one sequence.
template <Features F> struct Dropout : PlaceOfHeads<F.part && F.dropout> {
  DropoutKey key;
  u32 threshold;
  __device__ explicit Dropout(const Inputs &in) : PlaceOfHeads < F.part && F.dropout > (in) {
    if constexpr (F.dropout) {
      key = in.rng ? dropout_key((u64)in.rng[0], (u64)in.rng[1]) : dropout_key(in.seed, in.offset);
      threshold = in.threshold;
    }
  }
  __device__ __forceinline__ bool keep(i64 b, i32 h, i32 i, i32 j) const {
    if constexpr (F.dropout)
      return dropout_keep(key, threshold, this->whole_batch(b), this->whole_head(h), i, j);
    else
      return true;
  }
  // The factor by which kept elements are multiplied.
  __device__ __forceinline__ float factor() const { return F.dropout ? 1.0f / dropout_keep_rate(threshold) : 1.0f; }
};

} // namespace strobe
