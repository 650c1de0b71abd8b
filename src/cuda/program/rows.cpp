#include "cuda/program/rows.h"

#include <algorithm>

#include "../../../kernels/passes/config.h"
#include "cuda/program/arguments.h"

namespace strobe::cuda {
namespace {

using passes::RowsConfig;

constexpr KernelSource kCombine{"passes/combine.h", "strobe::passes::Combine", "strobe::passes::CombineConfig"};
constexpr KernelSource kDelta{"passes/delta.h", "strobe::passes::Delta", "strobe::passes::RowsConfig"};
constexpr KernelSource kConvertDq{"passes/dq.h", "strobe::passes::ConvertDq", "strobe::passes::RowsConfig"};
constexpr KernelSource kPadding{"passes/padding.h", "strobe::passes::Padding", "strobe::passes::PaddingConfig"};
constexpr KernelSource kSinkGradient{"passes/sinks.h", "strobe::passes::SinkGradient", "strobe::passes::SinksConfig"};

// Of FP32 and FP64: they do not vary with tiles and features. dq_sum's rows are as wide as the backward's.
RowsConfig config_for(const Problem &p) {
  return {int32_t(p.dtype), rounded(p.head_dim, 32), RowsConfig::kRowTile, 0, passes::kRowAfterRow};
}

} // namespace

Launch combine(const Problem &p, const ForwardArguments &a) {
  const passes::CombineConfig c{.dtype = int32_t(p.dtype)};
  return Launch(kCombine, c, a.in.rows(), c.threads(), 0, a);
}
Launch delta(const Problem &p, const RowsConfig &c, const BackwardArguments &a) {
  return Launch(kDelta, c, c.blocks(p.batch, p.heads, p.seqlen_q), c.delta_threads(), 0, a);
}
Launch convert_dq(const Problem &p, const RowsConfig &c, const BackwardArguments &a) {
  return Launch(kConvertDq, c, c.blocks(p.batch, p.heads, p.seqlen_q), c.threads(), 0, a);
}
Launch row_sums(const Problem &p, const BackwardArguments &a) { return delta(p, config_for(p), a); }
Launch query_gradient(const Problem &p, const BackwardArguments &a) { return convert_dq(p, config_for(p), a); }
Launch sink_gradient(const Problem &p, const BackwardArguments &a) {
  const passes::SinksConfig c{.dtype = int32_t(p.dtype)};
  return Launch(kSinkGradient, c, p.heads, c.threads(), 0, a);
}
Launch padding(const Problem &p, Direction direction) {
  constexpr int64_t most = 128; // blocks of threads for long padding behind few sequences
  const passes::PaddingConfig c{.dtype = int32_t(p.dtype), .backward = direction == Direction::backward};
  const int64_t grid = (p.batch + 1) * std::max<int64_t>(1, most / (p.batch + 1));
  return direction == Direction::forward ? Launch(kPadding, c, grid, c.threads(), 0, forward_arguments(p))
                                         : Launch(kPadding, c, grid, c.threads(), 0, backward_arguments(p));
}

} // namespace strobe::cuda
