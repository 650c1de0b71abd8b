// Infinities and NaN in V. What a query does not see must not reach it, but 0 * infinity in P V would: in tiles where something is hidden
// they are replaced by 0, and at the end they are added to the results of those who see them.
#pragma once
#include "../attention/scores.h"
#include "../tile/shared.h"

namespace strobe::mma {

// This thread's share of a tile of V in shared memory. Returns whether anything was replaced.
template <i32 kDType, int kRows, int kColumns, int kThreads> __device__ __forceinline__ bool clear_specials(u32 v, int thread) {
  constexpr u32 kExponent = kDType == kF16 ? 0x7C007C00 : 0x7F807F80, kLowest = kDType == kF16 ? 0x04000400 : 0x00800080;
  constexpr int kChunks = kRows * kColumns / 8;
  u32 any = 0;
#pragma unroll 2
  for (int i = 0; i < kChunks; i += kThreads) { // no thread takes another way than its warp: that would cost the main loop registers
    u32 x[4], special[4], place = v + 16 * min(i + thread, kChunks - 1);
    load_shared(x, place);
#pragma unroll
    for (int w = 0; w < 4; ++w) special[w] = ((x[w] & kExponent) + kLowest) & 0x80008000; // an exponent of all ones carries into the sign
    u32 here = special[0] | special[1] | special[2] | special[3];
    if (__any_sync(0xFFFFFFFFu, here)) {
#pragma unroll
      for (int w = 0; w < 4; ++w) x[w] &= ~((special[w] >> 15) * 0xFFFF);
      store_shared(place, x);
    }
    any |= here;
  }
  return any;
}

// By kThreads threads, of which this is `thread`; the results are in memory. Rows: count, query(row), head(row), add(row, column, x). keys:
// those that were walked over, of them only blocks' ones; v: the sequence's, in global memory.
template <int kThreads, Features F, bool kApproximate, class T, class Rows>
__device__ __forceinline__ void restore_specials(const Scores<F, float, kApproximate> &scores, const Dropout<F> &dropout, const T *v,
                                                 Range keys, BlockRow blocks, Rows rows, int thread) {
  const Inputs &in = scores.in;
#pragma unroll 1
  for (i32 j = (i32)keys.begin; j < (i32)keys.end; ++j) {
    if (F.blocks && !blocks.keeps(j)) continue;
#pragma unroll 1
    for (i32 c = thread; c < in.head_dim_v; c += kThreads) {
      float x = to_float(v[j * in.v.stride[2] + c * in.v.stride[3]]);
      if (x - x == 0) continue;
#pragma unroll 1
      for (i32 r = 0; r < rows.count; ++r) {
        auto row = scores.row(rows.query(r), rows.head(r));
        if (scores.score(0.0f, row, j, true, scores.seqlen_k) == minus_infinity<float>()) continue;
        rows.add(r, c, dropout.keep(scores.b, row.h, row.i, j) ? x : x - x);
      }
    }
  }
}

} // namespace strobe::mma
