// The configuration of the pass that computes what many pairs share (ahead.h).
#pragma once
#include "../attention/features.h"

namespace strobe {

struct AheadConfig {
  i32 dtype; // of q
  Features features;

  STROBE_FN static constexpr i32 threads() { return 256; }
};

} // namespace strobe
