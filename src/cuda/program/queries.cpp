#include "cuda/program/queries.h"

#include <algorithm>

#include "../../../kernels/passes/config.h"
#include "cuda/program/arguments.h"
#include "cuda/program/prediction.h"

namespace strobe::cuda {
namespace {

constexpr KernelSource kQueries{"passes/queries.h", "strobe::passes::DequantiseQueries", "strobe::passes::QueriesConfig"};

int64_t rows_of_q(const Problem &p) { return p.varlen ? p.total_q : p.seqlen_q; }
int64_t batches_of_q(const Problem &p) { return p.varlen ? 1 : p.batch; }

} // namespace

Launch dequantise_queries(Problem &p, Scratch &scratch) {
  constexpr int64_t kMostBlocks = 4096, kBytes = 2, kUnit = 8;
  const int64_t rows = rows_of_q(p), width = (p.head_dim + kUnit - 1) / kUnit * kUnit, count = batches_of_q(p) * p.heads * rows;
  EightBitQueries a{};
  a.from = operand(p.q), a.scale = operand(p.q_scale);
  a.rows = rows, a.batch = i32(batches_of_q(p)), a.heads = i32(p.heads), a.columns = i32(p.head_dim);
  a.half = p.q_scale.dtype == DType::f16;
  const bool words = p.q && reinterpret_cast<uintptr_t>(p.q.data) % 16 == 0 && p.q.stride[3] == 1 && p.head_dim % 4 == 0 &&
                     p.q.stride[0] % 4 == 0 && p.q.stride[1] % 4 == 0 && p.q.stride[2] % 4 == 0;
  const passes::QueriesConfig c{.dtype = int32_t(p.dtype), .words = words};
  if (p.q) {
    p.q.data = reinterpret_cast<char *>(scratch.take<std::byte>(count * width * kBytes));
    p.q.dtype = p.dtype;
    p.q.stride[3] = 1, p.q.stride[2] = width, p.q.stride[1] = rows * width, p.q.stride[0] = p.varlen ? 0 : p.heads * rows * width;
  }
  p.q_scale = Scales();
  a.to = operand(p.q);
  Launch launch(kQueries, c, p.q ? std::clamp<int64_t>(tiles(count, c.warps()), 1, kMostBlocks) : 0, c.threads(), 0, a);
  launch.finishes = true;
  return launch;
}

double dequantising_q_seconds(const Problem &p, const Device &device) {
  constexpr double kLaunchSeconds = 3e-6, kBytes = 3, kBytesPerClock = 16; // for each number; per SM; guessed
  const double numbers = double(batches_of_q(p) * p.heads * rows_of_q(p)) * double(p.head_dim);
  return kLaunchSeconds + numbers * kBytes / (kBytesPerClock * device.clock_hz * device.sms);
}

} // namespace strobe::cuda
