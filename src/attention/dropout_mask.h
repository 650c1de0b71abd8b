// strobe_dropout_mask: which elements dropout keeps, written out.
#pragma once
#include "strobe/strobe.h"

namespace strobe {

void dropout_mask(const strobe_attention *, const strobe_tensor *rng, const strobe_tensor *keep, const strobe_execution *);

} // namespace strobe
