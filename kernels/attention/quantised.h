// The extra arguments of kernels for quantised K and V.
#pragma once
#include "arguments.h"

namespace strobe::inline STROBE_ISA {

// The scales by which stored numbers are multiplied. Each row has one scale. With Features::by_column, k has instead one scale for each
// column of `group` rows.
struct KeyScales {
  Operand k, v;       // (batch or page, head, row or group of rows, column)
  i32 group;          // how many rows of k, in the tensor or in a page, share one set of column scales
  i32 half_k, half_v; // whether the scales are FP16; otherwise FP32
  i32 half_q;
  Operand q; // the scales of Q in FP8, if it is multiplied so
};

// Q in FP8 E4M3, its scales, and where its rows are to lie in 16 bits. A column is the fourth axis; there is no batch in packed sequences.
struct EightBitQueries {
  Operand from, scale, to;
  i64 rows; // of a head
  i32 batch, heads, columns;
  i32 half; // whether the scales are FP16; otherwise FP32
};

template <class Arguments> struct QuantisedArguments : Arguments {
  KeyScales scales;
};
template <class Arguments, bool kQuantised> struct ArgumentsOf {
  using type = Arguments;
};
template <class Arguments> struct ArgumentsOf<Arguments, true> {
  using type = QuantisedArguments<Arguments>;
};

// The arguments of the pass that dequantises K and V, with their scales as in QuantisedArguments.
struct DequantiseArguments {
  Inputs in;
  Operand to_k, to_v; // contiguous columns of q's dtype, with the rows of k and v; in pages: of the same pages, unless there is a table
  // Pages: null, or (batch, pages_each), a table of the sequences' own pages, which the pass fills. Sequence b's page n is the page
  // b * pages_each + n of to_k and to_v, and -1 if it is missing.
  i32 *table;
  i32 pages_each;
  i32 least_queries; // sequences with fewer queries are left out
  i32 tiles;         // tiles of keys per sequence, unless keys are packed
};

} // namespace strobe::inline STROBE_ISA
