// strobe_dropout_mask: writes the mask of the elements that dropout keeps.
#pragma once
#include "strobe/strobe.h"

namespace strobe {

void dropout_mask(const strobe_attention *, const strobe_tensor *rng, const strobe_tensor *keep, const strobe_execution *);

} // namespace strobe
