// Checks each field of strobe_attention by itself. validate.cpp checks fields against the tensors.
#pragma once
#include "attention/reasons.h"

namespace strobe {

void check_options(const strobe_attention &, Reasons &);
void check_dropout(const strobe_attention &, Reasons &);

} // namespace strobe
