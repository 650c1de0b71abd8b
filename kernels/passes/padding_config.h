// What the kernel for packed tokens of no sequence is compiled for.
#pragma once
#include "../attention/base.h"

namespace strobe::passes {

struct PaddingConfig {
  i32 dtype; // of q, k, v
  i32 backward;

  STROBE_FN constexpr i32 threads() const { return 256; }
};

} // namespace strobe::passes
