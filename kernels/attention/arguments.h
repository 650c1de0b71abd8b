// The arguments of kernels: plain structs, which the host writes and the device reads.
#pragma once
#include "divisor.h"
#include "features.h"
#include "geometry.h"
#include "schedule.h"

namespace strobe::inline STROBE_ISA {

// A tensor with the axes (batch, head, row, column). Strides count elements, and are 0 where an axis is broadcast or absent. Varlen tensors
// have batch stride 0, and their rows are the packed tokens. Axes of mask and bias: (batch, head, query, key); of sinks: (-, head, -, -);
// of lse and dlse: (batch, head, query, -).
struct Operand {
  void *data;
  i64 stride[4];
  template <class T> STROBE_FN T *at(i64 b, i64 h, i64 i, i64 c) const {
    return (T *)data + (b * stride[0] + h * stride[1] + i * stride[2] + c * stride[3]);
  }
  STROBE_FN explicit operator bool() const { return data != nullptr; }
};

// The kept mask blocks as CSR: for each query block, a list of key blocks; transposed, for each key block, a list of query blocks.
struct BlockList {
  const i32 *offsets, *indices;        // offsets: (batch, heads, rows + 1), absolute
  i64 count;                           // entries
  i64 rows, batch_stride, head_stride; // strides of offsets, in elements; 0: broadcast
  i64 row_tokens, column_tokens;       // the size of a mask block, in tokens

  // The list of row `row` of mask blocks. Entries are clamped, never trusted.
  STROBE_FN BlockRow row(i64 b, i64 h, i64 row) const {
    const i32 *o = offsets + b * batch_stride + h * head_stride + row;
    i64 begin = min(max((i64)o[0], 0ll), count), end = min(max((i64)o[1], begin), count);
    return {indices + begin, end - begin, column_tokens};
  }
};

// The rows of one sequence that the tensors hold.
struct HeldRows {
  i64 q0, k0; // first packed token; 0 if sequences are not packed
  i64 seqlen_q, seqlen_k;
};

// One sequence of the batch: where its tokens lie, and which keys are visible. Positions within a sequence fit 31 bits; the host refuses
// longer sequences.
struct Sequence {
  i64 q0, k0; // first packed token; 0 if sequences are not packed
  Band band;
};

// Where the keys of one sequence lie if K and V are pools of pages. A key is missing, and therefore hidden, if the table's entry for it is
// not the number of a page.
struct SequencePages {
  const i32 *table;
  u32 page, pages; // keys per page; pages in the pools
  i32 shift;       // log2 of page; -1: page is not a power of two

  STROBE_FN u32 number(i32 j) const { return shift >= 0 ? (u32)j >> shift : (u32)j / page; }
  STROBE_FN bool lacks(i32 j) const { return (u32)table[number(j)] >= pages; }
  // The distance, in elements, from a head's row 0 of page 0 to the row of key j. For a missing key: to a row that may be read.
  STROBE_FN i64 offset(i32 j, i64 page_stride, i64 row_stride) const {
    const u32 n = number(j);
    return offset_of((u32)table[n], (u32)j - n * page, page_stride, row_stride);
  }
  // The distance, in elements, from a head's row 0 of page 0 to row `slot` of the page in `entry`, an entry of the table.
  STROBE_FN i64 offset_of(u32 entry, u32 slot, i64 page_stride, i64 row_stride) const {
    return (entry < pages ? (i64)entry * page_stride : 0) + (i64)slot * row_stride;
  }
  // Whether any of the keys [begin, end) is missing. This thread checks every count-th page of the range, starting with number `first`.
  STROBE_FN bool lacks_some(i32 begin, i32 end, u32 first, u32 count) const {
    bool some = false;
    for (u32 n = number(begin) + first; n <= number(end - 1); n += count) some |= (u32)table[n] >= pages;
    return some;
  }
};

// The pages of all sequences (Features::pages).
struct Pages {
  const i32 *table; // (batch, pages of a sequence): the pages that hold a sequence's keys, in order; null: K and V are not paged
  u32 row;          // entries of the table from one sequence to the next
  u32 count;        // pages in the pools
  Divisor size;     // keys per page
  i32 shift;        // log2 of size; -1: size is not a power of two

  STROBE_FN const i32 *table_of(i64 b) const { return table + (u64)(u32)b * row; }
  STROBE_FN SequencePages of(i64 b) const { return {table_of(b), size.by, count, shift}; }
};

struct PartTable; // part.h

// A tensor that a function of the caller reads. Its dtype and number of axes are part of the function's code.
struct CapturedOperand {
  const void *data;
  i64 stride[4];
  i64 size[4];
};
// What a call's functions read: numbers, each in the type that the code reads (an int64, or the kernel's real type), captured tensors,
// and behind them the slopes of ALiBi's option.
struct FunctionArguments {
  static constexpr i32 kNumbers = 32, kDivisors = 8, kCaptured = 8, kRead = kCaptured + 1;
  u64 numbers[kNumbers];
  Divisor divisors[kDivisors];
  CapturedOperand captured[kRead];
  const i32 *full, *full_t; // for each kept mask block, and transposed: whether the function of the mask sees it as a whole (kFullKnown)
};

struct Inputs {
  Operand q, k, v, mask, bias, sinks;
  const i32 *cu_seqlens_q, *cu_seqlens_k; // null if sequences are not packed; keys in pages are never packed
  const i32 *seqused_k;                   // (batch): how many keys of each sequence count; null: all of them
  Pages pages;
  const PartTable *part;             // which rows of a larger problem the tensors hold (Features::part); null: all rows
  i64 seqlen_q, seqlen_k;            // lengths of the longest sequence
  i64 total_q, total_k;              // varlen: the number of packed tokens
  i64 left, right;                   // the window; Band::kFar: unbounded
  i32 batch, heads, heads_kv, group; // group = heads / heads_kv
  i32 head_dim, head_dim_v;
  i32 bottom_right;
  u32 threshold;     // dropout keeps an element whose byte is below it
  double scale, cap; // cap is used with kCapped
  u64 seed, offset;
  const i64 *rng;             // if not null: seed and offset in device memory
  BlockList blocks, blocks_t; // the backward reads both, the forward only blocks
  double beta, shift;         // for hyperbolic scores
  FunctionArguments function; // used with Features::program

  // The kept blocks of keys for row `row` of mask blocks, with those that are full.
  template <Features F> STROBE_FN BlockRow block_row(i64 b, i64 h, i64 row) const {
    BlockRow r = blocks.row(b, h, row);
    if constexpr (F.blocks == kFullKnown) r.to_full = function.full - blocks.indices;
    return r;
  }
  // The distance from an entry of blocks_t to the number that says whether its block is full; 0: not known.
  template <Features F> STROBE_FN i64 to_full_t() const { return F.blocks == kFullKnown ? function.full_t - blocks_t.indices : 0; }

  template <Features F = Features{}> STROBE_FN Sequence sequence(i64 b) const {
    i64 q0 = 0, k0 = 0, nq = seqlen_q, nk = seqlen_k;
    if (cu_seqlens_q) { // the caller's values are clamped, never trusted
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
  // The index of a query's row in contiguous scratch with one entry per row. The scratch's axes: (batch, head, query), or (head, token) for
  // varlen.
  STROBE_FN i64 row_index(i64 b, i64 h, i64 row) const { return cu_seqlens_q ? h * total_q + row : (b * heads + h) * seqlen_q + row; }
  STROBE_FN i64 rows() const { return cu_seqlens_q ? heads * total_q : (i64)batch * heads * seqlen_q; }

private:
  STROBE_FN static constexpr Features without_seqused(Features f) {
    f.seqused = 0;
    return f;
  }
};

// Bounds of the number of keys in one share, for sequences of uneven lengths (device/uneven_shares.h).
STROBE_FN constexpr i32 least_keys_of_share() { return 256; }
STROBE_FN constexpr i32 enough_keys_of_share() { return 4096; }

struct ForwardArguments {
  Inputs in;
  Operand out, lse; // lse may be null
  // How many splits the keys are divided into. With several splits, each stores its O, normalised, to partial_out, FP32 (splits, rows,
  // head_dim_v), and its LSE to partial_lse (splits, rows).
  i32 splits;
  i32 bundle; // (batch, head) pairs whose tiles run together, sharing the L2 cache
  float *partial_out, *partial_lse;
  // For sequences of uneven lengths (device/uneven_shares.h) the following members replace `splits`. extra_shares: the largest number of
  // shares beyond one per sequence. round_shares: how many shares fill the GPU once. Shares are numbered through all sequences. A share
  // stores its O, (shares, heads, seqlen_q, head_dim_v), and its LSE to partial_out and partial_lse, unless it is its sequence's only
  // share. share_places: (batch, 2), each sequence's first share and number of shares.
  i32 extra_shares, round_shares;
  i32 *share_places;
};

// The arguments of the passes that make max_logit and column_sums after a forward. Either result may be null.
struct AuxiliaryArguments {
  Inputs in;
  Operand lse, max_logit, column_sums; // (batch, head, query, -), (batch, head, -, -), (batch, query head, key, -)
  void *largest;                       // the largest score of each (batch, head, tile of keys), in lse's type
  void *inverse;                       // for column_sums, (rows), in lse's type: the factor by which a row of P is corrected
  i32 tiles;                           // tiles of keys per head
};

// The arguments of the pass that adds up dK and dV if the query heads of a key head are divided into shares, one for each thread block.
// dk_shares, dv_shares: FP32, (batch, share, key, column); the shares of a key head follow one another.
struct SharesArguments {
  Inputs in;
  Operand dk, dv, dk_shares, dv_shares; // gradients that are not asked for are null
  i32 shares;                           // shares per key head
  i32 tiles;                            // tiles of keys per (batch, key head) pair
};

struct BackwardArguments {
  Inputs in;
  Operand out, lse, dout, dlse, dq, dk, dv, dbias, dsinks; // gradients that are not asked for are null
  Operand given_delta; // for a partial part, which has no `out`: rowsum(dO * O) of whole rows, (batch, head, query, -), in lse's type
  void *delta;   // (2, rows), in lse's type: D = rowsum(dO * O) - dLSE, and LSE's correction (device/settle_row.h); in the ladder D alone
  float *dq_sum; // FP32, dq_sums times (rows, head_dim of the kernel): the sum to which key tiles add their dQ
  // A counter from which thread blocks draw tickets for tiles of keys. In deterministic mode, a block then waits only for blocks that have
  // already begun. On Hopper, persistent blocks draw their next tile from it.
  u32 *ticket;
  u32 *turns; // deterministic mode: how many key tiles have added to each query tile (in some families: to each warp's part of it)
  i32 deterministic;
  i32 bundle; // (batch, key head) pairs whose tiles run together, sharing the L2 cache
  // Hopper, for each tile of tile_q queries: -LSE in exp2's unit, and D. With natural_lse: -LSE, its correction in exp2's unit
  // (kernels/device/settle_row.h), and D. The values are -inf and 0 for a query that does not exist or sees no key, NaN and 0 if dO is not
  // finite, and -LSE and 0 if only LSE is not finite.
  float *rows;
  i32 first_stores; // dq_sum is not cleared: the first block at a tile stores instead of adding
  i32 natural_lse;  // Features::unbounded()
  i32 dq_sums;      // how many copies of dQ's sum dq_sum holds, one after another: a power of two (attention/dq_sum.h)
};

// The gradient of a captured tensor. Axes that the tensor lacks have size 1.
struct CapturedGradient {
  void *data; // null: it is not wanted
  i64 stride[4], size[4];
  i64 first, count; // elements: those of the gradients before it, and its own
  i32 dtype;        // a strobe_dtype
  i32 log2_values;  // at most 2^log2_values values are added to its elements
  i32 table;        // where its elements begin in a table; -1: it is in none
};
// The arguments of the passes that make the gradients of captured tensors (device/captured.h). Only the first `kCaptured` can be wanted.
struct CapturedArguments : BackwardArguments {
  CapturedGradient gradients[FunctionArguments::kCaptured];
  i64 *sums;      // (elements of all gradients), in fixed point; FP64: (2, elements), the second for what the first rounds away
  i64 elements;   // of all gradients
  u8 *broken;     // for each element whether a value that is not finite is added to it
  u64 *largest;   // for each gradient the bits, as a double, of the largest finite value that is added to `sums`
  void *lines[3]; // the sums along rows, columns and diagonals, in lse's type: (load, line)
  i64 count[3];   // lines per load
  void *tables;   // (table_blocks, table_elements): each thread block's sums for the small captured tensors
  i32 table_elements, table_blocks;
  i32 table_copies; // in shared memory; log2
};

} // namespace strobe::inline STROBE_ISA
