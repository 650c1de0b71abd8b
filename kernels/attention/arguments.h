// The arguments of kernels, written by the host and read by the device: plain structs, the same bytes in both.
#pragma once
#include "divisor.h"
#include "features.h"
#include "geometry.h"
#include "schedule.h"

namespace strobe::inline STROBE_ISA {

// A tensor with the axes (batch, head, row, column). Strides count elements and are 0 where an axis is broadcast or absent. Varlen tensors
// have batch stride 0, and their rows are the packed tokens. mask, bias: (batch, head, query, key); slopes: (batch, head, -, -); sinks:
// (-, head, -, -); lse, dlse: (batch, head, query, -).
struct Operand {
  void *data;
  i64 stride[4];
  template <class T> STROBE_FN T *at(i64 b, i64 h, i64 i, i64 c) const {
    return (T *)data + (b * stride[0] + h * stride[1] + i * stride[2] + c * stride[3]);
  }
  STROBE_FN explicit operator bool() const { return data != nullptr; }
};

// CSR of kept mask blocks: over query blocks, or transposed over key blocks.
struct BlockList {
  const i32 *offsets, *indices;        // offsets: (batch, heads, rows + 1), absolute
  i64 count;                           // entries
  i64 rows, batch_stride, head_stride; // strides of offsets; 0: broadcast
  i64 row_tokens, column_tokens;       // tokens of a mask block

  // The list of row `row` of mask blocks. Entries are clamped, never trusted.
  STROBE_FN BlockRow row(i64 b, i64 h, i64 row) const {
    const i32 *o = offsets + b * batch_stride + h * head_stride + row;
    i64 begin = min(max((i64)o[0], 0ll), count), end = min(max((i64)o[1], begin), count);
    return {indices + begin, end - begin, column_tokens};
  }
};

// The rows of one sequence that the tensors hold.
struct HeldRows {
  i64 q0, k0; // first packed token; 0 when dense
  i64 seqlen_q, seqlen_k;
};

// One sequence of the batch: where its tokens lie and which keys are visible. Positions within a sequence fit 31 bits (the host refuses
// more).
struct Sequence {
  i64 q0, k0; // first packed token; 0 when dense
  Band band;
};

// Where the keys of one sequence lie if K and V are pools of pages. A key is missing, and hidden, if the table names no page of the pools
// for it.
struct SequencePages {
  const i32 *table;
  u32 page, pages; // keys per page; pages in the pools
  i32 shift;       // log2 of page; -1: page is no power of two

  STROBE_FN u32 number(i32 j) const { return shift >= 0 ? (u32)j >> shift : (u32)j / page; }
  STROBE_FN bool lacks(i32 j) const { return (u32)table[number(j)] >= pages; }
  // The distance, in elements, from row 0 of page 0 to row j of a head. For a missing row: the distance to some row that may be read.
  STROBE_FN i64 offset(i32 j, i64 page_stride, i64 row_stride) const {
    const u32 n = number(j);
    return offset_of((u32)table[n], (u32)j - n * page, page_stride, row_stride);
  }
  // The same for row `slot` of the page that `entry` of the table names.
  STROBE_FN i64 offset_of(u32 entry, u32 slot, i64 page_stride, i64 row_stride) const {
    return (entry < pages ? (i64)entry * page_stride : 0) + (i64)slot * row_stride;
  }
  // Whether any of the keys [begin, end) is missing. This thread looks only at page `first` and every count-th page after it.
  STROBE_FN bool lacks_some(i32 begin, i32 end, u32 first, u32 count) const {
    bool some = false;
    for (u32 n = number(begin) + first; n <= number(end - 1); n += count) some |= (u32)table[n] >= pages;
    return some;
  }
};

// The same for all sequences (Features::pages).
struct Pages {
  const i32 *table; // (batch, pages of a sequence): which page holds the next keys; null: K and V are tensors
  u32 row;          // distance between two rows of the table
  u32 count;        // pages in the pools
  Divisor size;     // keys per page
  i32 shift;        // log2 of size; -1: size is no power of two

  STROBE_FN const i32 *table_of(i64 b) const { return table + (u64)(u32)b * row; }
  STROBE_FN SequencePages of(i64 b) const { return {table_of(b), size.by, count, shift}; }
};

struct PartTable; // part.h

struct Inputs {
  Operand q, k, v, mask, bias, slopes, sinks;
  const i32 *cu_seqlens_q, *cu_seqlens_k; // null when dense; keys in pages are never packed
  const i32 *seqused_k;                   // (batch): how many keys of each sequence count; null: all
  Pages pages;
  const PartTable *part;             // which rows of a larger problem the tensors hold (Features::part); null: all
  i64 seqlen_q, seqlen_k;            // of the longest sequence
  i64 total_q, total_k;              // varlen: packed tokens
  i64 left, right;                   // the window; Band::kFar: unbounded
  i32 batch, heads, heads_kv, group; // group = heads / heads_kv
  i32 head_dim, head_dim_v;
  i32 bottom_right;
  u32 threshold; // of dropout: keep if byte < threshold
  double scale, softcap;
  u64 seed, offset;
  const i64 *rng;             // seed, offset on the device, if not null
  BlockList blocks, blocks_t; // the backward reads both, the forward only blocks
  double beta, shift;         // of hyperbolic scores

  template <Features F = Features{}> STROBE_FN Sequence sequence(i64 b) const {
    i64 q0 = 0, k0 = 0, nq = seqlen_q, nk = seqlen_k;
    if (cu_seqlens_q) { // clamped, never trusted
      q0 = min(max((i64)cu_seqlens_q[b], 0ll), total_q);
      nq = min(min(max((i64)cu_seqlens_q[b + 1], q0), total_q) - q0, seqlen_q);
      if constexpr (!F.pages) {
        k0 = min(max((i64)cu_seqlens_k[b], 0ll), total_k);
        nk = min(min(max((i64)cu_seqlens_k[b + 1], k0), total_k) - k0, seqlen_k);
      }
    }
    if constexpr (F.seqused) nk = min((i64)max(seqused_k[b], 0), nk); // clamped as well
    if constexpr (F.pages) {
      if (seqused_k) nk = min((i64)max(seqused_k[b], 0), nk);
      if (pages.count == 0) nk = 0; // nothing may be read from empty pools
    }
    return {q0, k0, Band::make(nq, nk, bottom_right != 0, left, right)};
  }
  template <Features F = Features{}> STROBE_FN HeldRows held(i64 b) const {
    const Sequence s = sequence<without_seqused(F)>(b);
    return {s.q0, s.k0, s.band.seqlen_q, s.band.seqlen_k};
  }
  // Index of a query's row in contiguous per-row scratch: (batch, head, query), varlen (head, token).
  STROBE_FN i64 row_index(i64 b, i64 h, i64 row) const { return cu_seqlens_q ? h * total_q + row : (b * heads + h) * seqlen_q + row; }
  STROBE_FN i64 rows() const { return cu_seqlens_q ? heads * total_q : (i64)batch * heads * seqlen_q; }

private:
  STROBE_FN static constexpr Features without_seqused(Features f) {
    f.seqused = 0;
    return f;
  }
};

// The keys of one share, where sequences have uneven lengths.
STROBE_FN constexpr i32 least_keys_of_share() { return 256; }
STROBE_FN constexpr i32 enough_keys_of_share() { return 4096; }

struct ForwardArguments {
  Inputs in;
  Operand out, lse; // lse may be null
  // Split over keys: split s of `splits` writes its O (normalised, fp32, (splits, rows, head_dim_v)) and LSE ((splits, rows)) to
  // partial_out and partial_lse.
  i32 splits;
  i32 bundle; // (batch, head) pairs whose tiles run together, sharing the L2 cache
  float *partial_out, *partial_lse;
  // Replaces `splits` for sequences of uneven lengths (device/uneven_shares.h): the largest number of shares beyond one per sequence, and
  // the number of shares that fill the GPU once. Shares are numbered through all sequences. Each writes O, (shares, heads, seqlen_q,
  // head_dim_v), and LSE to partial_out and partial_lse, unless it is its sequence's only share. share_places: (batch) a sequence's first
  // share, and how many it has.
  i32 extra_shares, round_shares;
  i32 *share_places;
};

// The arguments of the pass after a forward that makes max_logit and column_sums; either may be null.
struct AuxiliaryArguments {
  Inputs in;
  Operand lse, max_logit, column_sums; // (batch, head, query, -), (batch, head, -, -), (batch, query head, key, -)
  void *largest;                       // one per (batch, head, tile of keys), in lse's type
  void *inverse;                       // (rows), in lse's type, for column_sums: the factor of P of a row
  i32 tiles;                           // tiles of keys per head
};

// The arguments of the pass that adds up dK and dV where the query heads of a key head are divided among thread blocks. dk_shares,
// dv_shares: FP32, (batch, share, key, columns); the shares of a key head follow one another.
struct SharesArguments {
  Inputs in;
  Operand dk, dv, dk_shares, dv_shares; // gradients that are not asked for are null
  i32 shares;                           // shares per key head
  i32 tiles;                            // tiles of keys per (batch, key head) pair
};

struct BackwardArguments {
  Inputs in;
  Operand out, lse, dout, dlse, dq, dk, dv, dbias, dsinks; // gradients that are not asked for are null
  Operand given_delta; // a partial part, which has no `out`: rowsum(dO * O) of whole rows, (batch, head, query, -), in lse's type
  void *delta;   // (2, rows), in lse's type: D = rowsum(dO * O) - dLSE, and LSE's correction (device/settle_row.h; the ladder: D alone)
  float *dq_sum; // (rows, head_dim of the kernel), FP32: dq_sums of them: where several key tiles add to dQ
  // A counter from which thread blocks draw tickets for tiles of keys: in deterministic mode, so that each one waits only for blocks that
  // have begun, and where persistent blocks (Hopper) draw their next tile.
  u32 *ticket;
  u32 *turns; // deterministic mode: for each query tile (of some families: of each warp), how many key tiles have added to it
  i32 deterministic;
  i32 bundle; // (batch, key head) pairs whose tiles run together, sharing the L2 cache
  // Hopper, for each tile of tile_q queries: -LSE in exp2's unit, and D; with a bias -LSE, its correction in exp2's unit
  // (kernels/device/settle_row.h) and D. A query that does not exist or sees no key has -inf and 0; a query whose dO is not finite has NaN
  // and 0; a query of which only LSE is not finite has -LSE and 0.
  float *rows;
  i32 first_stores; // dq_sum is not cleared: the first block that reaches a tile stores instead of adding
  i32 dq_sums;      // how many copies of dQ's sum dq_sum holds, one after another: a power of two (attention/dq_sum.h)
};

} // namespace strobe::inline STROBE_ISA
