// A bool mask as bits, in the order in which lanes hold a tile of scores (forward) or a transposed tile (backward); and the arguments of
// the kernel that packs them.
#pragma once
#include "../attention/arguments.h"
#include "../attention/divisor.h"

namespace strobe {

// A byte holds one lane's elements of 16 queries and 16 keys: bit 4 r + 2 c + e is row 8 r + lane / 4, column 8 c + 2 (lane % 4) + e. The
// bytes lie in the order (batch, head, block of 16 queries, block of 16 keys, lane); strides are 0 where the mask is broadcast. In
// transposed bits, rows are keys and columns are queries.
struct MaskBits {
  STROBE_FN static constexpr i64 block_bytes() { return 32; } // bytes of 16 x 16 elements
  u8 *data;
  i64 batch_stride, head_stride, row_stride;
  STROBE_FN u8 *at(i64 b, i64 h, i64 rows, i64 keys, i32 lane) const {
    return data + (b * batch_stride + h * head_stride + rows * row_stride + block_bytes() * keys + lane);
  }
};

struct MaskArguments {
  Operand mask;
  MaskBits bits;
  u32 cells;             // how many cells are packed, in all distinct heads; a cell is 16 queries x 64 keys (transposed: 64 x 16)
  Divisor heads;         // distinct heads per sequence
  Divisor rows, columns; // rows and columns of cells per head
  i32 queries, keys;     // size of a head's mask; queries is 1 if the mask is broadcast over queries
  BasicBand<i32> band;   // elements outside the band are not packed; transposed like the bits
  STROBE_FN static constexpr i32 tail() { return 32 * 16; } // bytes past the last one that the forward may read
};

struct MaskConfig {
  i32 aligned; // rows begin at 16-byte addresses, so 16 keys are read at a time
  i32 by_keys; // the bits are transposed
  STROBE_FN static constexpr i32 threads() { return 128; }
};

} // namespace strobe
