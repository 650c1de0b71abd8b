// What kernels of quantised K and V are called with beside all others' arguments.
#pragma once
#include "arguments.h"

namespace strobe::inline STROBE_ISA {

// Each stored number is multiplied by its scale: one for each row, or, of k (Features::by_column), for each column and `group` rows.
struct KeyScales {
  Operand k, v;       // (batch or page, head, row or group of rows, column)
  i32 group;          // rows of k, in the tensor or in a page, that share their columns' scales
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
