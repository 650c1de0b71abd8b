// How the work of a kernel of this family is divided. The family runs on any GPU from compute capability 6.1, with plain FMA in FP32 (FP16
// and BF16 are loaded as FP32) or FP64. Host and device share this file.
#pragma once
#include "../attention/features.h"

namespace strobe::simt {

// How rows of q, k, v, out, dout, dk and dv are copied.
inline constexpr i32 kElements = 0; // any strides
inline constexpr i32 kPieces = 1;   // 16 bytes (16-bit types: 8) at a time; rows lie on 16-byte addresses, and their elements are adjacent
inline constexpr i32 kWhole = 2;    // like kPieces, and no column is missing: the head dimensions are the Config's

struct Config {
  i32 dtype;                // dtype of q, k, v
  i32 head_dim, head_dim_v; // rounded up to kDimStep; wide heads: to wide_step()
  i32 tile_q, tile_k;       // tile of S
  i32 threads_q, threads_k; // a thread owns tile_q / threads_q rows by tile_k / threads_k columns of S; threads of a row lie in one warp
  i32 chunk;                // columns of the head dimension that are staged in shared memory at a time
  i32 blocks_per_sm;        // how many CTAs an SM shall hold; limits a thread's registers
  i32 copy;                 // kElements, kPieces or kWhole
  i32 invariant;            // forward: tiles of keys begin at multiples of tile_k
  Features features;

  static constexpr i32 kDimStep = 32;

  static constexpr i32 kWalkBytes = 384; // shared memory for the schedule and the values that all threads use
  STROBE_FN constexpr i32 walk_bytes() const { return features.part ? 640 : kWalkBytes; }

  STROBE_FN static constexpr i32 wide_step() { return 64; } // with 16 threads side by side, four adjacent columns per thread
  STROBE_FN constexpr i32 threads() const { return threads_q * threads_k; }
  STROBE_FN constexpr i32 real_bytes() const { return dtype == kF64 ? 8 : 4; }
  STROBE_FN constexpr i32 pad() const { return 16 / real_bytes(); }
  // Over how many columns q.k is summed in one run, in forward and backward alike. If scores are large, longer runs would round too much.
  STROBE_FN constexpr i32 score_run() const { return dtype == kF32 ? kRunOfColumns : head_dim; }
  // How many of a tile's keys or queries one run of the sums O, dK and dV covers. If N terms are summed in runs of r, and the runs are then
  // added up, the squared rounding errors add up to about N (r + N / r). N is 1024 or 2048 (run_of_keys, Backward::kFlush). Shorter runs,
  // however, lose more of the other terms beside a large one.
  STROBE_FN constexpr i32 run_of_rows(i32 tile) const { return dtype == kF32 ? min(tile, 64) : tile; }
  // P and dS have one line per query; the forward's P and the backward's second copy of dS have one line per key. The pitch, in elements,
  // spreads neighbours over the banks.
  STROBE_FN constexpr i32 p_stride() const { return tile_k + pad(); }
  STROBE_FN constexpr i32 p_elements() const { return tile_q * p_stride(); }
  STROBE_FN constexpr i32 pt_stride() const { return tile_q + pad(); }
  STROBE_FN constexpr i32 pt_elements() const { return tile_k * pt_stride(); }

  // How many of the `dim` columns of O, dV, dK or dQ are multiplied at a time. Wide rows are staged in pieces.
  STROBE_FN constexpr bool wide() const { return strobe::wide(head_dim, head_dim_v); }
  STROBE_FN constexpr i32 columns_staged(i32 dim) const { return wide() ? min(dim, wide_step()) : dim; }
  // The elements of one of the two stages that operands pass through: a chunk of two tiles along the head dimension, or some rows of one
  // tile.
  STROBE_FN constexpr i32 stage_elements() const {
    return max((tile_q + tile_k) * chunk, wide() ? 16 * wide_step() : pad() * max(head_dim, head_dim_v));
  }
  // How many rows of a tile of `rows` rows are staged at a time, if whole rows of `dim` elements are staged.
  STROBE_FN constexpr i32 rows_staged(i32 rows, i32 dim) const {
    i32 n = rows < 16 ? rows : 16;
    while (n > pad() && n * dim > stage_elements()) n /= 2;
    return n;
  }
  // How many columns of a tile's dQ, dK or dV the backward holds in registers at a time, beside all of dK and dV.
  STROBE_FN static constexpr i32 columns_at_once(i32 dim) { return dim <= 96 ? dim : dim % 64 ? 32 : 64; }
  // Bytes of a tile's dropout: 16 elements take 2 bytes.
  STROBE_FN constexpr i32 kept_bytes() const { return features.dropout ? tile_q * tile_k / 8 : 0; }
  // Where the states of rows begin in shared memory: after the walk, P, the stages and dropout.
  STROBE_FN constexpr i32 forward_states_at() const {
    return walk_bytes() + (2 * stage_elements() + pt_elements()) * real_bytes() + kept_bytes();
  }
  // Whether the forward keeps the rounding errors of l, and restarts O after some tiles. Over many keys, the rounding error of a single run
  // would exceed FP32's bound.
  STROBE_FN constexpr bool compensated() const { return dtype == kF32; }
  // How many key positions a run of O covers. Runs begin at multiples of this number. If keys are split, each split has runs of this
  // length.
  STROBE_FN constexpr i32 run_of_keys() const { return min(16 * tile_k, 1024); }
  // Bytes of the forward's shared memory, which ends with the states of rows: m of each row, and l of each thread and row. If compensated,
  // they also have l's rounding error, m of each row at the end of its last run of keys, and the number of each thread's run.
  STROBE_FN constexpr i32 forward_shared_bytes() const {
    const i32 each = tile_q / threads_q * threads(); // rows of all threads together
    return forward_states_at() + (compensated() ? 2 * tile_q + 2 * each + threads() : tile_q + each) * real_bytes();
  }
  // Walk, P (later dS, one line per key), dS, three numbers per query, stages, dropout. The kernel of dbias needs as much.
  STROBE_FN constexpr i32 backward_shared_bytes() const {
    return walk_bytes() + (2 * stage_elements() + 2 * max(p_elements(), pt_elements()) + 3 * tile_q) * real_bytes() + kept_bytes();
  }
};

} // namespace strobe::simt
