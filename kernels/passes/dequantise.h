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
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 4, kGroup = 16; // a warp takes 16 rows at a time, which lie in one page

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
    const i64 first = tile.begin <= seen.begin ? round_down(max(seen.begin - C.beside(), 0ll), kGroup) : tile.begin;
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
    const i32 warp = (i32)threadIdx.x / 32;
#pragma unroll 1
    for (i32 j = rows.begin + kGroup * warp; j < rows.end; j += kGroup * kThreads / 32) dequantise<kValue>(a, s, rows, j);
  }
  // Dequantises up to 16 rows from key j0 on. A lane takes the same eight columns of several rows.
  template <bool kValue>
  static __device__ __forceinline__ void dequantise(const Arguments &a, const Sequence &s, const Rows &rows, i32 j0) {
    constexpr bool kByColumn = F.by_column && !kValue;
    constexpr int kColumns = kValue ? C.head_dim_v : C.head_dim, kPieces = kColumns / 8, kDown = 32 / kPieces; // rows at a time
    constexpr int kTurns = (kGroup + kDown - 1) / kDown, kTogether = min(4, kTurns); // turns; those whose loads are under way together
    constexpr int kWords = 8 / numbers_of_word(F.quant);
    const Inputs &in = a.in;
    const Operand &to = kValue ? a.to_v : a.to_k;
    const bool half = kValue ? a.scales.half_v : a.scales.half_k;
    const QuantisedKeys<F, kByColumn> keys(kValue ? in.v : in.k, kValue ? a.scales.v : a.scales.k, half, kValue ? 1 : a.scales.group, in, s,
                                           rows.b, rows.head, kColumns);
    const u8 *from;
    i64 scales; // the index of the first row's scale
    T *target;
    // Rows from `counted` on, keys that do not count, become zeros, unless another sequence may have the same rows.
    i32 counted = rows.end - j0;
    if constexpr (F.pages) {
      const Divisor page = in.pages.size;
      __builtin_assume(page.by != 1);
      const u32 n = page.divide((u32)j0), slot = (u32)j0 - n * page.by, entry = (u32)keys.pages.table[n];
      if (entry >= keys.pages.pages) return; // missing
      from = keys.first + keys.pages.offset_of(entry, slot, keys.x.stride[0], keys.x.stride[2]);
      scales = kByColumn ? keys.pages.offset_of(entry, 0, keys.scale.stride[0], 0) + slot / (u32)keys.group * keys.scale.stride[2]
                         : keys.pages.offset_of(entry, slot, keys.scale.stride[0], keys.scale.stride[2]);
      target = to.at<T>(a.table ? rows.b * a.pages_each + n : entry, rows.head, slot, 0);
      if (a.table) counted = (i32)s.band.seqlen_k - j0;
    } else {
      from = keys.row(j0), scales = kByColumn ? 0 : keys.scales_of(j0);
      target = to.at<T>(rows.b, rows.head, s.k0 + j0, 0);
      if (!in.cu_seqlens_q) counted = (i32)s.band.seqlen_k - j0;
    }
    const i32 lane = (i32)threadIdx.x % 32, r0 = lane / kPieces, c = lane % kPieces * 8;
    const i32 end = lane < kDown * kPieces ? min(rows.end - j0, (i32)kGroup) : 0;
    counted = min(counted, end);
    const i64 scale_bytes = keys.scale.stride[2] * (half ? 2 : 4);
    const u8 *scale_from = (const u8 *)keys.scales + scales * (half ? 2 : 4) + r0 * scale_bytes;
    from = kept(from + r0 * keys.x.stride[2] + c * kWords / 2), scale_from = kept(scale_from), target = kept(target + r0 * kColumns + c);

    const Magic<F.quant> magic;
    float by[8] = {};
    i32 next_group = 0; // the row from which on other scales of columns hold
#pragma unroll 1
    for (i32 r = r0; r < end; r += kTogether * kDown, target += kTogether * kDown * kColumns) {
      u32 words[kTogether][kWords] = {};
      StoredScale scale[kTogether];
#pragma unroll
      for (int t = 0; t < kTogether; ++t, from += kDown * keys.x.stride[2], scale_from += kDown * scale_bytes) {
        if (r + t * kDown >= counted) continue;
        if constexpr (kWords == 2) {
          const uint2 x = *(const uint2 *)from;
          words[t][0] = x.x, words[t][1] = x.y;
        } else {
          words[t][0] = *(const u32 *)from;
        }
        if constexpr (kByColumn) continue;
        if (half)
          scale[t].as_half = *(const unsigned short *)scale_from;
        else
          scale[t].as_float = *(const float *)scale_from;
      }
#pragma unroll
      for (int t = 0; t < kTogether; ++t) {
        const i32 row = r + t * kDown;
        if (row >= end) continue;
        if constexpr (kByColumn) {
          if (row >= next_group && row < counted) {
            i64 first = scales;
            next_group = kGroup;
            if constexpr (!F.pages) {
              const u32 of = (u32)(s.k0 + j0 + row), number = of / (u32)keys.group;
              first = number * keys.scale.stride[2], next_group = row + (i32)((number + 1) * (u32)keys.group - of);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) by[i] = keys.scale_of(first, c + i);
          }
        } else {
          const float x = keys.number(scale[t]);
#pragma unroll
          for (int i = 0; i < 8; ++i) by[i] = x;
        }
        u32 pairs[4] = {};
        if (!kByColumn || row < counted) dequantise_eight<T, F.quant>(words[t], by, pairs, magic);
        *(uint4 *)(target + t * kDown * kColumns) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
  }
  // Returns x, but the compiler does not know that it could compute it again.
  template <class P> static __device__ __forceinline__ P *kept(P *x) {
    asm volatile("" : "+l"(x));
    __builtin_assume(__isGlobal(x));
    return x;
  }
};

} // namespace strobe::passes
