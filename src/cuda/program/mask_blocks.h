// strobe_mask_blocks on a GPU.
#pragma once

#include "score/blocks.h"

namespace strobe::cuda {

void mask_blocks(score::MaskProblem &);

} // namespace strobe::cuda
