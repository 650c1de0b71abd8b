// The configuration of the passes that make the gradients of captured tensors (device/captured.h) with plain FMA.
#pragma once
#include "../device/captured_config.h"
#include "config.h"

namespace strobe::simt {

struct CapturedConfig : Config {
  i32 summed;
  LoadSet loads, of_lines; // as in CapturedTileConfig
};

} // namespace strobe::simt
