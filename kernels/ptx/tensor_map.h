#pragma once
#include "../attention/base.h"

namespace strobe::inline STROBE_ISA {

// A CUtensorMap, which describes a tensor to the copy engine. The host encodes it; it is part of a kernel's arguments.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// A tensor with the axes (column, row, head, batch). A broadcast axis has size 1 in the map; head and batch are multiplied by 0 or 1.
struct MappedOperand {
  TensorMap map;
  i32 head_step, batch_step;
};

} // namespace strobe::inline STROBE_ISA
