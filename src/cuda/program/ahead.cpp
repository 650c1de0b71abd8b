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
