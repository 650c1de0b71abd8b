#include "cuda/program/rows.h"

#include <algorithm>

#include "../../../kernels/mma/config.h"
#include "../../../kernels/passes/padding_config.h"
#include "../../../kernels/simt/config.h"
#include "cuda/program/arguments.h"

namespace strobe::cuda {
namespace {

using simt::Config;

constexpr KernelSource kCombine{"passes/combine.h", "strobe::passes::Combine", "strobe::mma::Config"};
constexpr KernelSource kDelta{"passes/simt_delta.h", "strobe::passes::SimtDelta", "strobe::simt::Config"};
constexpr KernelSource kQueryGradient{"passes/simt_delta.h", "strobe::passes::QueryGradient", "strobe::simt::Config"};
constexpr KernelSource kPadding{"passes/padding.h", "strobe::passes::Padding", "strobe::passes::PaddingConfig"};
constexpr KernelSource kSinkGradient{"passes/simt_delta.h", "strobe::passes::SinkGradient", "strobe::simt::Config"};

// They do not vary with tiles and features.
Config config_for(const Problem &p) {
  Config c{};
  c.dtype = int32_t(p.dtype), c.head_dim = rounded(p.head_dim, Config::kDimStep), c.head_dim_v = rounded(p.head_dim_v, Config::kDimStep);
  return c;
}
int64_t row_tiles(const Problem &p) { return p.batch * p.heads * tiles(p.seqlen_q, Config::kDeltaRows); }

} // namespace

Launch combine(const Problem &p, const ForwardArguments &a) {
  mma::Config c{};
  c.dtype = int32_t(p.dtype), c.warps = 4, c.blocks_per_sm = 1;
  return Launch(kCombine, c, a.in.rows(), c.threads(), 0, a);
}
Launch row_sums(const Problem &p, const BackwardArguments &a) {
  return Launch(kDelta, config_for(p), row_tiles(p), Config::kDeltaRows, 0, a);
}
Launch query_gradient(const Problem &p, const BackwardArguments &a) {
  return Launch(kQueryGradient, config_for(p), row_tiles(p), 256, 0, a);
}
Launch sink_gradient(const Problem &p, const BackwardArguments &a) {
  Config c{};
  c.dtype = int32_t(p.dtype);
  return Launch(kSinkGradient, c, p.heads, 256, 0, a);
}
Launch padding(const Problem &p, Direction direction) {
  constexpr int64_t most = 128; // blocks of threads for long padding behind few sequences
  const passes::PaddingConfig c{.dtype = int32_t(p.dtype), .backward = direction == Direction::backward};
  const int64_t grid = (p.batch + 1) * std::max<int64_t>(1, most / (p.batch + 1));
  return direction == Direction::forward ? Launch(kPadding, c, grid, c.threads(), 0, forward_arguments(p))
                                         : Launch(kPadding, c, grid, c.threads(), 0, backward_arguments(p));
}

} // namespace strobe::cuda
