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

// Adds the reasons against dcaptured_n (null: not wanted). oracle: the gradient is float64.
void check_gradient(int32_t n, const strobe_tensor *gradient, const strobe_tensor *captured, bool oracle, TensorChecks &, Reasons &);

// Adds the reasons against tcaptured_n (null: not given).
void check_tangent(int32_t n, const strobe_tensor *tangent, const strobe_tensor *captured, TensorChecks &, Reasons &);

struct Programs {
  std::shared_ptr<const Program> program;           // null: the options and functions change nothing
  std::shared_ptr<const GradientProgram> gradients; // null: none is wanted
  std::shared_ptr<const TangentProgram> tangents;   // null: not asked for, or the score is linear in x
};
// What is asked for beside the functions themselves.
struct Wanted {
  CapturedTensors gradients{};               // dcaptured_0 to dcaptured_7
  const CapturedTensors *tangents = nullptr; // tcaptured_0 to tcaptured_7; null: no derivative in a direction
};
// The programs of the options and of score_function and mask_function, which are copied; none if a reason was added. A captured tensor
// that was refused already adds no reason.
Programs make_programs(const strobe_attention &, const CapturedTensors &, const Wanted &, Reasons &);
inline std::shared_ptr<const Program> make_program(const strobe_attention &a, const CapturedTensors &given, Reasons &reasons) {
  return make_programs(a, given, {}, reasons).program;
}

} // namespace strobe::score
