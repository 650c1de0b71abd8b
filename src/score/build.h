// From the caller's functions, as the C ABI has them, to a program.
#pragma once
#include <array>

#include "attention/reasons.h"
#include "attention/tensor_check.h"
#include "score/program.h"

namespace strobe::score {

using CapturedTensors = std::array<const strobe_tensor *, STROBE_MOST_CAPTURED>; // captured_0 to captured_7; null: not given

// Adds the reasons against captured tensor n, a tensor of the call.
void check_captured_tensor(int32_t n, const strobe_tensor &, TensorChecks &, Reasons &);
Captured captured_of(const strobe_tensor *); // null: not given

// The program of one of the forms; null: of the identity.
std::shared_ptr<const Program> built_in(const BuiltIn &);

// The program of the options and of score_function and mask_function, which are copied; null if they change nothing, or if a reason was
// added. A captured tensor that was refused already adds no reason.
std::shared_ptr<const Program> make_program(const strobe_attention &, const CapturedTensors &, Reasons &);

} // namespace strobe::score
