// strobe_dropout_mask: writes out which elements dropout keeps.
#pragma once
#include "strobe/strobe.h"

namespace strobe {

void dropout_mask(const strobe_attention *, const strobe_tensor *rng, const strobe_tensor *keep, const strobe_execution *);

} // namespace strobe
