// Sums of many terms that keep their rounding errors: a plain running sum rounds each addition to the last bit of the sum so far.
#pragma once
#include "tile.h"

namespace strobe::inline STROBE_ISA {

// sum += x in each lane. Returns the rounding error (Knuth's two-sum).
template <class T> STROBE_INLINE Vec<T> add_rounded(Vec<T> x, Vec<T> &sum) {
  const Vec<T> before = sum, added = (sum = before + x) - before;
  return (before - (sum - added)) + (x - added);
}
template <class T> STROBE_INLINE Vec<T> add_rounded(Vec<T> x, T *sum) {
  Vec<T> in_lanes = Vec<T>::load(sum);
  const Vec<T> lost = add_rounded(x, in_lanes);
  in_lanes.store(sum);
  return lost;
}

// sum += x, and lost += the rounding error, so that the exact sum is sum + lost.
template <class T> STROBE_INLINE void add_exactly(Vec<T> x, T *sum, T *lost) { (Vec<T>::load(lost) + add_rounded(x, sum)).store(lost); }

// add_exactly() for `size` numbers in memory; x is cleared.
template <class T> __attribute__((noinline)) void move_exactly(T *x, T *sum, T *lost, int64_t size) {
  for (int64_t i = 0; i < size; i += Vec<T>::kLanes) add_exactly(Vec<T>::load(x + i), sum + i, lost + i);
  fill(x, size, T(0));
}

// x[row * width + lane] *= factor[lane]
template <class T> STROBE_INLINE void scale_lanes(T *x, int64_t rows, int64_t width, const T *factor) {
  constexpr int L = Vec<T>::kLanes;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t lane = 0; lane < width; lane += L)
      (Vec<T>::load(x + r * width + lane) * Vec<T>::load(factor + lane)).store(x + r * width + lane);
}

// O or dQ of a piece, rows x width. Products over keys accumulate in `run`. Whenever the keys pass a multiple of kKeys, `run` is added to
// `total` and starts again with the rounding error of that addition.
template <class T> struct KeySum {
  static constexpr int64_t kKeys = 512;
  T *run, *total;
  int64_t rows, width;
  int64_t segment = 0;                   // the index of the kKeys keys whose terms are in `run`
  bool started = false, carried = false; // whether `run` has been written; whether `total` has been

  void expect(int64_t key) { // announces the terms of the key tile that begins here
    if (key / kKeys != segment) carry();
    segment = key / kKeys;
  }
  // The running sum, for products that always add. It is set to 0 if no product has written it yet.
  T *add_to() {
    if (!started) fill(run, rows * width, T(0));
    started = true;
    return run;
  }
  void scale(const T *factor) {
    if (started) scale_lanes(run, rows, width, factor);
    if (carried) scale_lanes(total, rows, width, factor);
  }
  T *result() {
    if (!carried) return add_to();
    carry();
    return total;
  }

private:
  void carry() {
    if (!started) return;
    if (carried) {
      using V = Vec<T>;
      for (int64_t i = 0; i < rows * width; i += V::kLanes) {
        const V lost = add_rounded(V::load(run + i), total + i);
        select(lost * V(0) == V(0), lost, V(0)).store(run + i); // an infinite sum has no rounding error
      }
    } else {
      std::memcpy(total, run, sizeof(T) * rows * width);
      started = false;
    }
    carried = true;
  }
};

} // namespace strobe::inline STROBE_ISA
