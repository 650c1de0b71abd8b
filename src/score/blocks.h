// strobe_mask_blocks: which blocks a mask function hides, sees in part, or sees as a whole.
#pragma once
#include "strobe/strobe.h"

namespace strobe::score {

void mask_blocks(const strobe_block_mask *, strobe_kept_blocks *);

} // namespace strobe::score
