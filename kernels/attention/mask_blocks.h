// The arguments of the kernels of passes/mask_blocks.h, which find the blocks that a mask function keeps.
#pragma once
#include "base.h"

namespace strobe::inline STROBE_ISA {

inline constexpr i32 kSquare = 16;          // blocks along each side of a square, whose bounds are found before those of its blocks
inline constexpr i32 kCellsFanOut = 32;     // elements, or cells, that one cell of the next level covers
inline constexpr i32 kCellLevels = 3;       // levels along an axis: elements, and two levels of cells
inline constexpr i32 kMostBoundsLoads = 10; // ways in which tensors are read: a tensor, and the axes along which the index varies

// One operation of a function, of which bounds are found. A slot holds the bounds of one node.
struct BoundsStep {
  u8 op, kind, of; // bounds::Operation, and bounds::Kind of the result and of the inputs
  u8 flags;
  unsigned short to, in[4]; // slots
  u8 load, count;           // the number of the load; of inputs
  u64 number;               // an integer; two floats, the least and the most; or the place of sums

  enum : u8 { kBinary = 1, kSame = 2, kBySums = 4, kNan = 8 };
};

// The words of a program. A sum is: its constant, the number of terms, and for each term a slot and a factor.
struct BoundsCode {
  const BoundsStep *steps;
  i32 count;
};

// The nodes that depend on the queries alone (side 0; with those that depend on neither), or on the keys alone (1).
struct BoundsSide {
  BoundsCode code;
  i32 reads;      // how many of them the nodes of pairs read
  const u64 *out; // their slots here
  const u64 *in;  // their slots there
  u64 *values;    // (matrix, entry, read) of three words: the bounds. The entries are blocks, then squares
  i64 length, block;
  i32 blocks, squares;
};

// The elements of a tensor, and cells of them.
struct BoundsLoad {
  const void *data;
  i64 size[4], stride[4];
  i32 element;                                  // ElementKind
  i32 axes;                                     // of the tensor
  i32 x, y;                                     // the axes along which there are cells; -1: none
  i32 levels_x, levels_y;                       // 1: elements alone
  const void *cells[kCellLevels * kCellLevels]; // by level_x * kCellLevels + level_y, row by row
};
// A cell has the least and the largest of its elements. It takes three words: bounds::Bounds. One of booleans is a byte: bit 0 if there is
// a false, bit 1 if there is a true.
enum ElementKind : i32 { kBooleans, kInts, kLongs, kHalves, kBrains, kFloats, kDoubles, kCells, kBooleanCells };
STROBE_FN constexpr ElementKind cells_of(i32 element) { return element == kBooleans ? kBooleanCells : kCells; }

// Cells of one level, each of kCellsFanOut elements, or of cells, along one axis.
struct CellReduction {
  const void *from;
  i64 size[4];   // of the result
  i64 stride[4]; // of what is read, in elements or cells
  i64 length;    // of the axis of what is read
  void *to;
  i64 first, count; // which warps of the launch make it, one for each cell
  i32 axis, element, of_reals;
  i32 kind; // of the cells
};
struct CellArguments {
  static constexpr i32 kMost = 3 * kMostBoundsLoads; // each load makes up to three levels in one launch
  CellReduction reductions[kMost];
  i32 count, unused;
};

// The lists by queries (0) and by keys (1).
struct KeptLists {
  unsigned short *kept, *full; // bits: (matrix, line, words), 16 blocks each
  i32 lines, words;            // of a matrix; of a line, even
  i32 *before;                 // (matrix, line): the blocks that lines before it in its chunk keep
  i32 *totals;                 // of each chunk
  i32 *rows, *cols, *marks;    // of the mask; null: not wanted
};

struct MaskBlocksArguments {
  BoundsSide side[2];
  BoundsCode pairs;
  const u64 *words; // where sums stand
  i32 result;       // the slot of the result in the code of pairs
  i32 heads;        // matrices of a sequence
  i64 matrices, offset;
  KeptLists lists[2];
  i64 most_kept;
  i64 *kept; // how many blocks are
  BoundsLoad loads[kMostBoundsLoads];
};

struct BoundsConfig {
  i32 functions; // bounds::bit_of_function() of those that occur
  i32 warps;     // of a block of threads. More slots leave room for fewer
  STROBE_FN constexpr i32 threads() const { return 32 * warps; }
  STROBE_FN constexpr i64 shared_bytes(i64 slots) const { return slots * 24 * threads(); }
};
struct KeptListsConfig {
  i32 unused;
  STROBE_FN static constexpr i32 chunk() { return 256; } // lines that a block of threads counts
  STROBE_FN static constexpr i32 count_threads() { return 1024; }
  STROBE_FN static constexpr i32 threads() { return 256; }
};

} // namespace strobe::inline STROBE_ISA
