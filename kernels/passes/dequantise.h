// Dequantises K and V into tensors of q's dtype, before an attention in which many queries read each key: x * scale in FP32, rounded once.
// Only keys that some query sees by position are dequantised, and those beside them that lie in the same tiles of the attention.
#pragma once
#include "../attention/packed_tiles.h"
#include "../attention/quantised.h"
#include "../device/quantised.h"
#include "../device/stored_numbers.h"
#include "config.h"

namespace strobe::passes {

template <DequantiseConfig C> struct Dequantise {
  using Arguments = QuantisedArguments<DequantiseArguments>;
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 4;

  // A block takes the rows of one key head that lie in one tile of C.rows() keys.
  static __device__ __forceinline__ void run(const Arguments &a) {
    const Inputs &in = a.in;
    const bool packed = in.cu_seqlens_q && !F.pages;
    const u32 number = blockIdx.x / (u32)in.heads_kv;
    const i32 head = (i32)(blockIdx.x - number * (u32)in.heads_kv);
    PackedTile tile{(i32)(number / (u32)a.tiles), (i32)(number % (u32)a.tiles) * C.rows()};
    if (packed) tile = packed_tile(in.cu_seqlens_k, in.total_k, in.batch, C.rows(), (i32)number);
    const Sequence s = in.sequence<F>(tile.b);
    const i64 queries = s.band.seqlen_q;
    if (tile.begin < 0 || queries == 0 || queries < a.least_queries) return;

    // The tile's rows; in the sequence's first and last tile also rows beside the visible ones.
    const Range seen = s.band.keys_any(0, queries);
    const i64 end = tile.begin + C.rows();
    if (tile.begin >= seen.end || end <= seen.begin) return;
    const i64 held = packed ? in.total_k - s.k0 : F.pages ? round_up(s.band.seqlen_k, 16) : in.seqlen_k;
    const i64 first = tile.begin <= seen.begin ? max(seen.begin - C.beside(), 0ll) : tile.begin;
    const Rows rows{(i32)first, (i32)(end < seen.end ? end : min(seen.end + C.beside(), held)), tile.b, head};

    if (F.pages && a.table && head == 0) write_table(a, rows);
    dequantise<false>(a, s, rows);
    dequantise<true>(a, s, rows);
  }

private:
  struct Rows {
    i32 begin, end, b, head;
  };
  // The entries of the new table for the pages of these rows: missing pages stay missing.
  static __device__ __forceinline__ void write_table(const Arguments &a, const Rows &rows) {
    const SequencePages pages = a.in.pages.of(rows.b);
    const u32 end = pages.number(rows.end - 1) + 1;
    for (u32 n = pages.number(rows.begin) + threadIdx.x; n < end; n += kThreads) {
      const i32 slot = rows.b * a.pages_each + (i32)n;
      a.table[slot] = (u32)pages.table[n] < pages.pages ? slot : -1;
    }
  }

  template <bool kValue> static __device__ __forceinline__ void dequantise(const Arguments &a, const Sequence &s, const Rows &rows) {
    constexpr bool kByColumn = F.by_column && !kValue;
    constexpr int kColumns = kValue ? C.head_dim_v : C.head_dim, kPieces = kColumns / 8; // a thread takes eight columns at a time
    constexpr int kWords = 8 / numbers_of_word(F.quant), kTurns = 4;                     // turns whose loads are under way together
    const Inputs &in = a.in;
    const Operand &scales = kValue ? a.scales.v : a.scales.k, &to = kValue ? a.to_v : a.to_k;
    const bool half = kValue ? a.scales.half_v : a.scales.half_k;
    const QuantisedKeys<F, kByColumn> keys(kValue ? in.v : in.k, scales, half, kValue ? 1 : a.scales.group, in, s, rows.b, rows.head,
                                           kColumns);
    // Keys that do not count become zeros where no other sequence has the same row.
    const i32 counted = (F.pages && !a.table) || (in.cu_seqlens_q && !F.pages) ? rows.end : (i32)s.band.seqlen_k;
    const i32 count = (rows.end - rows.begin) * kPieces;
    const Magic<F.quant> magic;
#pragma unroll 1
    for (i32 n0 = (i32)threadIdx.x; n0 < count; n0 += kTurns * kThreads) {
      u32 words[kTurns][kWords] = {};
      StoredScale scale[kTurns];
      T *at[kTurns];
#pragma unroll
      for (int t = 0; t < kTurns; ++t) {
        const i32 n = n0 + t * kThreads, j = rows.begin + n / kPieces, c = n % kPieces * 8;
        at[t] = n < count ? place(a, to, s, rows, j, c) : nullptr;
        if (!at[t] || j >= counted) continue;
        const u8 *from = keys.row(j) + c * kWords / 2;
        if constexpr (kWords == 2) {
          const uint2 x = *(const uint2 *)from;
          words[t][0] = x.x, words[t][1] = x.y;
        } else {
          words[t][0] = *(const u32 *)from;
        }
        if constexpr (!kByColumn) scale[t] = keys.stored_scale(keys.scales_of(j));
      }
#pragma unroll
      for (int t = 0; t < kTurns; ++t) {
        if (!at[t]) continue;
        const i32 n = n0 + t * kThreads, j = rows.begin + n / kPieces, c = n % kPieces * 8;
        float by[8] = {};
        if constexpr (kByColumn) {
          const i64 first = j < counted ? keys.scales_of(j) : 0;
#pragma unroll
          for (int i = 0; i < 8; ++i)
            if (j < counted) by[i] = keys.scale_of(first, c + i);
        } else {
#pragma unroll
          for (int i = 0; i < 8; ++i) by[i] = keys.number(scale[t]);
        }
        u32 pairs[4];
        dequantise_eight<T, F.quant>(words[t], by, pairs, magic);
        *(uint4 *)at[t] = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
  }
  // Where columns c to c + 7 of key j are written; null if the key is missing.
  static __device__ __forceinline__ T *place(const Arguments &a, const Operand &to, const Sequence &s, const Rows &rows, i32 j, i32 c) {
    if constexpr (!F.pages) return to.at<T>(rows.b, rows.head, s.k0 + j, c);
    const SequencePages pages = a.in.pages.of(rows.b);
    const u32 n = pages.number(j), entry = (u32)pages.table[n];
    if (entry >= pages.pages) return nullptr;
    return to.at<T>(a.table ? rows.b * a.pages_each + n : entry, rows.head, j - n * pages.page, c);
  }
};

} // namespace strobe::passes
