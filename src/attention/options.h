// Checks of the fields of strobe_attention, each by itself; validate.cpp checks them together with the tensors.
#pragma once
#include "attention/reasons.h"

namespace strobe {

void check_options(const strobe_attention &, Reasons &);
void check_dropout(const strobe_attention &, Reasons &);

} // namespace strobe
