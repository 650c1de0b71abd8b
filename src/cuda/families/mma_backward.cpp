// The backward of kernels/mma: D and room for dQ; dQ, dK and dV; dQ in 16 bits; dbias, dsinks.
#include "cuda/families/mma_backward.h"

#include <algorithm>
#include <cmath>

#include "../../../kernels/attention/dq_sum.h"
#include "../../../kernels/mma/backward/config.h"
#include "attention/text.h"
#include "cuda/program/arguments.h"
#include "cuda/program/prediction.h"
#include "cuda/program/rows.h"
#include "cuda/program/tile_gradient.h"
#include "cuda/program/wishes.h"

namespace strobe::cuda {
namespace {

using mma::BackwardConfig;
using passes::RowsConfig;

constexpr KernelSource kBackward{"mma/backward/backward.h", "strobe::mma::Backward", "strobe::mma::BackwardConfig"};

// most_dim and most_features are what the registers hold; speed: of the products, relative to other rows, on an H200: of large problems; of
// 32 x 32 and 32 x 16 of small ones; of the others that it has memory enough to pass over (0.25 and below), guessed.
struct BackwardTile {
  int32_t most_dim, q, k, key_warps, dim_warps, step_q, most_features;
  double speed;
};
constexpr int32_t kAll = 8;
constexpr BackwardTile kBackwardTiles[] = {
    {64, 64, 256, 4, 1, 32, 0, 1.05},    {128, 64, 128, 4, 1, 64, 0, 1.0},    {64, 128, 128, 4, 1, 64, 0, 1.02},
    {128, 64, 128, 4, 1, 32, 2, 0.95},   {128, 64, 64, 2, 2, 32, kAll, 0.8},  {256, 64, 64, 2, 2, 32, 2, 0.85},
    {256, 32, 64, 2, 2, 16, kAll, 0.7},  {192, 16, 64, 4, 1, 16, 2, 0.25},    {256, 32, 32, 2, 2, 16, kAll, 0.3},
    {192, 16, 32, 2, 1, 16, kAll, 0.15}, {256, 32, 16, 1, 2, 16, kAll, 0.15}, {256, 16, 16, 1, 1, 16, kAll, 0.1},
};
// With block sparsity a tile lies within a block.
bool divides(const Problem &p, int32_t tile_q, int32_t tile_k) {
  return !p.blocks.present || (p.blocks.block_q % tile_q == 0 && p.blocks.block_k % tile_k == 0);
}

// Features that take registers.
int32_t heavy(const BackwardConfig &c) {
  const Features &f = c.features;
  return (f.mask != 0) + (f.bias != 0) + (f.alibi != 0) + 2 * (f.function != 0) + (f.dropout != 0 && f.additive()) + !c.aligned;
}

// The fastest tile that fits, or with wishes the nearest, and its speed. A small grid does not fill the GPU: then tiles of fewer keys may
// be faster.
bool choose(BackwardConfig &chosen, double &speed, const Problem &p, const Device &device) {
  BackwardConfig any{};
  any.dtype = int32_t(p.dtype);
  any.aligned = aligned_backward(p), any.deterministic = p.deterministic && p.dq, any.blocks_per_sm = 1;
  any.features = features_of(p);
  const int32_t features = heavy(any);
  double least = HUGE_VAL;
  for (const BackwardTile &tile : kBackwardTiles) {
    BackwardConfig c = any;
    c.head_dim = rounded(p.head_dim, 16 * tile.dim_warps), c.head_dim_v = rounded(p.head_dim_v, 16 * tile.dim_warps);
    c.tile_q = tile.q, c.tile_k = tile.k, c.key_warps = tile.key_warps, c.dim_warps = tile.dim_warps, c.step_q = tile.step_q;
    if (std::max(c.head_dim, c.head_dim_v) > tile.most_dim || features > tile.most_features) continue;
    if (c.shared_bytes() > device.shared_per_block || !divides(p, tile.q, tile.k)) continue;
    const double waves = double(p.batch * p.heads_kv * tiles(p.seqlen_k, tile.k)) / device.sms;
    const double cost =
        16 * (distance(p.tile_q, tile.q) + distance(p.tile_k, tile.k)) + std::log2(std::max(1.0, waves) * tile.k / tile.speed);
    if (cost < least) least = cost, chosen = c, speed = tile.speed;
  }
  return least < HUGE_VAL;
}

// Measured on an H200: of an SM, with the tile of speed 1; of each kernel; of a block, to begin and to store; of a step, besides its
// products.
constexpr double kFlopPerClock = 1370, kBiasPerClock = 1400, kLaunchSeconds = 3e-6, kEndsSeconds = 5.5e-6, kStepSeconds = 0.5e-6;

double predicted_seconds(const Problem &p, const BackwardConfig &c, double speed, const Device &device, size_t launches) {
  const double columns = c.head_dim + c.head_dim_v;
  const Walks w = walks(p, Direction::backward, c.tile_q, c.tile_k);
  const double score = 5 * columns / (speed * kFlopPerClock * device.clock_hz) + kStepSeconds / double(c.tile_q * c.tile_k);
  const double bias = p.dbias ? 2 * w.scores() * columns / (kBiasPerClock * device.sms * device.clock_hz) : 0;
  return kLaunchSeconds * double(launches) + seconds(w, device, 1, 1 / score, kEndsSeconds) + bias +
         rows_seconds(p, c.head_dim, c.head_dim_v);
}

} // namespace

CudaEngine::Made mma_backward(const Problem &p, const Device &device, Scratch &scratch) {
  BackwardConfig c{};
  double speed = 1;
  BackwardArguments a = backward_arguments(p);
  if (!choose(c, speed, p, device) || (p.bias && !(settle(p, device, a) && bias_gradient(p, device, a))))
    return text("no tile fits the ", device.shared_per_block, " bytes of shared memory and divides the blocks of block_rows");

  a.bundle = c.deterministic ? 16 : 4; // more heads at a time: fewer key tiles of one wait for their turn
  a.deterministic = c.deterministic;
  const int64_t rows = a.in.rows(), query_tiles = count_query_tiles(a.in, c.tile_q);
  const RowsConfig each{c.dtype, c.head_dim, c.tile_q, c.aligned, passes::kFragments};
  Program program;
  a.delta = scratch.take<float>(2 * rows); // D, and LSE's correction
  if (p.dq) a.dq_sum = scratch.take<float>(query_tiles * c.tile_q * c.head_dim);
  if (c.deterministic) {
    const int64_t turns = c.turns(query_tiles);
    a.turns = scratch.take<uint32_t>(turns);
    program.steps.push_back(Zero{a.turns, uint64_t(turns) * 4});
  }
  program.steps.push_back(delta(p, each, a));
  if (p.bias) program.steps.push_back(*settle(p, device, a)); // of other scores P's 16 bits hide LSE's correction
  if (p.dq || p.dk || p.dv)
    program.steps.push_back(Launch(kBackward, c, p.batch * p.heads_kv * tiles(p.seqlen_k, c.tile_k), c.threads(), c.shared_bytes(), a));
  if (p.dq) program.steps.push_back(convert_dq(p, each, a));
  if (p.dsinks) program.steps.push_back(sink_gradient(p, a));
  if (p.dbias) program.steps.push_back(*bias_gradient(p, device, a));

  program.kernel = text(strobe::name(p.dtype), " mma.sync, ", c.warps(), " warps, head dimensions ", c.head_dim, " and ", c.head_dim_v);
  describe_tile(program, p, c.tile_q, c.tile_k, c.aligned);
  program.predicted_seconds = predicted_seconds(p, c, speed, device, program.steps.size());
  return program;
}

} // namespace strobe::cuda
