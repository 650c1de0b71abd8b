#pragma once
#include "../attention/base.h"

namespace strobe::inline STROBE_ISA {

// What the copy engine knows of a tensor: a CUtensorMap, encoded by the host, part of a kernel's arguments.
struct alignas(64) TensorMap {
  u64 opaque[16];
};

} // namespace strobe::inline STROBE_ISA
