// The fields of strobe_attention, each on its own; what they mean together with the tensors is checked in validate.cpp.
#pragma once
#include "attention/reasons.h"

namespace strobe {

void check_options(const strobe_attention &, Reasons &);
void check_dropout(const strobe_attention &, Reasons &);

} // namespace strobe
