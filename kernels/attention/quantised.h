// The extra arguments of kernels for quantised K and V.
#pragma once
#include "arguments.h"

namespace strobe::inline STROBE_ISA {

// Each stored number is multiplied by its scale. There is a scale for each row or, for k with Features::by_column, for each column and
// `group` rows.
struct KeyScales {
  Operand k, v;       // (batch or page, head, row or group of rows, column)
  i32 group;          // rows of k, in the tensor or in a page, that share one set of column scales
  i32 half_k, half_v; // FP16, else FP32
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

} // namespace strobe::inline STROBE_ISA
