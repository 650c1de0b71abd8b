// The configurations of the passes that make the gradients of captured tensors (device/captured.h).
#pragma once
#include "tile_gradient_config.h"

namespace strobe {

// What a launch that recomputes dS adds up: the sums along lines; with kTable the sums of each element of small tensors, in shared memory;
// with kPairs each pair by itself, in global memory, after kLargest has found the largest value.
enum Summed : i32 { kRows = 0, kColumns = 1, kDiagonals = 2, kTable = 3, kLargest = 4, kPairs = 5 };

// A table has at most so many elements. Where it is small it has copies, so that lanes meet less often: kTableCells is the number of
// elements times copies.
inline constexpr i32 kTableElements = 4096, kTableCells = 4096, kMostTableCopies = 5; // log2
inline constexpr i32 kLoadsAtOnce = 4; // that a launch adds up: more sums would not fit a thread's registers

// Some of the loads whose gradients are wanted. Bit n: load first + n.
struct LoadSet {
  i32 first, bits;
  static constexpr i32 kMost = 31;

  STROBE_FN constexpr i32 end() const { return first + kMost; }
  STROBE_FN constexpr bool has(i32 load) const { return load >= first && load < end() && (bits >> (load - first) & 1) != 0; }
  STROBE_FN constexpr i32 count() const { return count_bits((u32)bits); }
  // How many of them stand before this one.
  STROBE_FN constexpr i32 rank(i32 load) const { return count_bits((u32)bits & ((1u << (load - first)) - 1)); }

private:
  STROBE_FN static constexpr i32 count_bits(u32 bits) {
    i32 count = 0;
    for (; bits; bits &= bits - 1) ++count;
    return count;
  }
};

// Members of the Configs of launches that recompute dS. summed: a Summed; loads: those that the launch adds up; of_lines: all loads that
// are summed in this way, whose sums lie one after another.
struct CapturedTileConfig : TileConfig {
  i32 summed;
  LoadSet loads, of_lines;

  // A thread's elements in a tile that have one distance to the thread's first diagonal have one sum.
  STROBE_FN constexpr i32 thread_diagonals() const { return 2 * (tile_q / query_warps / 8 + tile_k / key_warps / 8 - 1); }
  STROBE_FN constexpr i32 cells() const { return dtype == kF32 ? 2 * kTableCells : kTableCells; } // ints; FP32: with a second, finer int
  STROBE_FN constexpr i32 sum_bytes() const { return dtype == kF32 ? 8 : 4; }                     // of an element of the table
  STROBE_FN constexpr i32 operand_bytes() const {
    return max(k_bytes() + v_bytes() + q_bytes() + dout_bytes(), 4 * threads() * max(thread_diagonals(), 4));
  }
  static constexpr i32 kWarpBytes = 4 * 8 * kLoadsAtOnce;                  // a number for each load and each of up to 8 warps
  STROBE_FN constexpr i32 row_bytes() const { return 2 * 3 * 4 * tile_q; } // three numbers for each query of two tiles
  STROBE_FN constexpr i32 bytes(i32 table_elements) const {
    return operand_bytes() + row_bytes() + (summed == kTable ? kWarpBytes + 4 * cells() + sum_bytes() * table_elements : 0);
  }
};

// The launch that adds sums along lines to the elements that they belong to.
struct CapturedScatterConfig {
  i32 dtype;
  i32 tile; // of diagonals
  LoadSet rows, columns, diagonals;
  Features features;

  STROBE_FN static constexpr i32 threads() { return 256; }
};
struct CapturedResultConfig {
  i32 dtype; // of q
  STROBE_FN static constexpr i32 threads() { return 256; }
  STROBE_FN static constexpr i32 elements() { return 32; } // per thread block
};

} // namespace strobe
