#include "cuda/program/ahead.h"

#include <algorithm>

#include "../../../kernels/passes/ahead_config.h"
#include "attention/text.h"
#include "cuda/program/arguments.h"
#include "score/cuda_source.h"

namespace strobe::cuda {
namespace {

constexpr KernelSource kAhead{"passes/ahead.h", "strobe::passes::ComputeAhead", "strobe::AheadConfig"};

} // namespace

std::optional<Launch> compute_ahead(Problem &p, Scratch &scratch) {
  if (!p.cuda_functions || p.cuda_functions->ahead().empty()) return {};
  constexpr int64_t kMostBlocks = 1024;
  p.ahead = scratch.take<std::byte>(p.cuda_functions->bytes_ahead());
  int64_t most = 0;
  for (const CapturedOperand &x : p.cuda_functions->operands_ahead()) most = std::max<int64_t>(most, x.size[0] * x.stride[0]);
  const Features of = features_of(p);
  AheadConfig c{.dtype = int32_t(p.dtype), .features = {}};
  c.features.seqused = of.seqused, c.features.pages = of.pages;
  c.features.program = of.program, c.features.program_high = of.program_high;
  Launch launch(kAhead, c, std::clamp<int64_t>(tiles(most, c.threads()), 1, kMostBlocks), c.threads(), 0, all_inputs(p));
  launch.finishes = true;
  return launch;
}

double ahead_seconds(const Problem &p, const Device &device) {
  if (!p.cuda_functions || p.cuda_functions->ahead().empty()) return 0;
  // As guessed: a launch on an H200, the instructions that find a value's place, and an SM's rate.
  constexpr double kLaunchSeconds = 3e-6, kInstructions = 40, kInstructionsPerClock = 100;
  const std::vector<CapturedOperand> operands = p.cuda_functions->operands_ahead();
  double instructions = 0;
  for (size_t n = 0; n < operands.size(); n++) {
    const auto &size = operands[n].size;
    instructions += double(size[0]) * double(size[1]) * double(size[2]) * (kInstructions + p.cuda_functions->ahead()[n].saved);
  }
  return kLaunchSeconds + instructions / (kInstructionsPerClock * device.clock_hz * device.sms);
}

std::vector<std::string> ahead_in_words(const Problem &p) {
  std::vector<std::string> notes;
  if (!p.cuda_functions) return notes;
  for (const score::Ahead &x : p.cuda_functions->ahead()) {
    const char *by = x.by == score::kOfQuery ? "i" : x.by == score::kOfKey ? "j" : "i - j";
    notes.push_back(text("computed ahead, once for each ", by, x.of_head ? " and head" : "", x.of_batch ? " and sequence" : "", ": ",
                         p.cuda_functions->formula_ahead(x)));
  }
  return notes;
}

} // namespace strobe::cuda
