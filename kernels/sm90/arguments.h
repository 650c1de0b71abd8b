// What the Hopper kernels are called with.
#pragma once
#include "../attention/arguments.h"
#include "../ptx/tensor_map.h"

namespace strobe::inline STROBE_ISA {

// Axes (column, row, head, batch). A broadcast axis has size 1 in the map: head and batch are multiplied by 0 or 1.
struct MappedOperand {
  TensorMap map;
  i32 head_step, batch_step;
};

struct HopperForwardArguments {
  ForwardArguments a;
  MappedOperand q, k, v;
  i64 items; // tiles of queries
};

} // namespace strobe::inline STROBE_ISA
