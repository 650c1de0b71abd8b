// The backward of kernels/mma. Its launches: D, and zeros in dQ's sum; dQ, dK and dV; rounding of dQ to 16 bits; dbias and dsinks.
#include "cuda/families/mma_backward.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "../../../kernels/attention/dq_sum.h"
#include "../../../kernels/mma/backward/config.h"
#include "attention/text.h"
#include "cuda/program/arguments.h"
#include "cuda/program/captured.h"
#include "cuda/program/part.h"
#include "cuda/program/passes.h"
#include "cuda/program/prediction.h"
#include "cuda/program/tiles.h"

namespace strobe::cuda {
namespace {

using mma::BackwardConfig;

constexpr KernelSource kBackward{"mma/backward/backward.h", "strobe::mma::Backward", "strobe::mma::BackwardConfig"};

constexpr int32_t kAll = 16;
struct BackwardTile {
  int32_t most_dim, q, k, key_warps, dim_warps, step_q;
  int32_t most_features = kAll; // the largest costly_features() that leaves enough registers
  // The rate of the products relative to other rows, measured on an H200: in large problems, and for 32 x 32 and 32 x 16 in small ones. The
  // other rates (0.25 and below) are guessed: these tiles are never chosen on an H200 with its large shared memory.
  double speed;
  int32_t least_dim = 0;
};
constexpr BackwardTile kBackwardTiles[] = {
    {.most_dim = 64, .q = 64, .k = 256, .key_warps = 4, .dim_warps = 1, .step_q = 32, .most_features = 0, .speed = 1.05},
    {.most_dim = 128, .q = 64, .k = 128, .key_warps = 4, .dim_warps = 1, .step_q = 64, .most_features = 0, .speed = 1.0},
    {.most_dim = 64, .q = 128, .k = 128, .key_warps = 4, .dim_warps = 1, .step_q = 64, .most_features = 0, .speed = 1.02},
    {.most_dim = 128, .q = 64, .k = 128, .key_warps = 4, .dim_warps = 1, .step_q = 32, .most_features = 2, .speed = 0.95},
    {.most_dim = 128, .q = 64, .k = 64, .key_warps = 2, .dim_warps = 2, .step_q = 32, .speed = 0.8},
    {.most_dim = 256, .q = 64, .k = 64, .key_warps = 2, .dim_warps = 2, .step_q = 32, .most_features = 2, .speed = 0.85},
    {.most_dim = 256, .q = 32, .k = 64, .key_warps = 2, .dim_warps = 2, .step_q = 16, .speed = 0.7},
    {.most_dim = 192, .q = 16, .k = 64, .key_warps = 4, .dim_warps = 1, .step_q = 16, .most_features = 2, .speed = 0.25},
    {.most_dim = 256, .q = 32, .k = 32, .key_warps = 2, .dim_warps = 2, .step_q = 16, .speed = 0.3},
    {.most_dim = 192, .q = 16, .k = 32, .key_warps = 2, .dim_warps = 1, .step_q = 16, .speed = 0.15},
    {.most_dim = 256, .q = 32, .k = 16, .key_warps = 1, .dim_warps = 2, .step_q = 16, .speed = 0.15},
    {.most_dim = 256, .q = 16, .k = 16, .key_warps = 1, .dim_warps = 1, .step_q = 16, .speed = 0.1},
    {.most_dim = 576, .q = 32, .k = 32, .key_warps = 2, .dim_warps = 2, .step_q = 16, .speed = 0.3, .least_dim = kWide},
    {.most_dim = 576, .q = 32, .k = 16, .key_warps = 1, .dim_warps = 2, .step_q = 16, .speed = 0.15, .least_dim = kWide},
    // for mask blocks of 16 and 48, and for GPUs with less memory
    {.most_dim = 576, .q = 16, .k = 16, .key_warps = 1, .dim_warps = 2, .step_q = 16, .speed = 0.1, .least_dim = kWide},
};

// The number of features that take registers; costlier ones count more.
int32_t costly_features(const BackwardConfig &c) {
  const Features &f = c.features;
  const int32_t alibi = f.alibi ? (f.part ? 3 : 1) : 0, dropout = f.dropout ? (f.part ? 3 : f.additive()) : 0;
  return (f.mask != 0) + (f.bias != 0) + alibi + 2 * f.curved() + (f.given() || f.seen) + dropout + !c.aligned;
}

struct Chosen {
  BackwardConfig config;
  double speed;
};

// The fastest tile that fits; if a tile is requested, the nearest to it. If a grid is too small to fill the GPU, tiles of fewer keys may be
// faster.
std::optional<Chosen> choose(const Problem &p, const Device &device) {
  BackwardConfig any = begin_config<BackwardConfig>(p, 16);
  any.aligned = aligned_backward(p), any.deterministic = (p.deterministic || p.invariant) && p.dq, any.blocks_per_sm = 1;
  any.invariant = p.invariant;
  any.features = features_of(p);
  // Invariant: the tile depends on neither strides nor lengths.
  const int32_t features = costly_features(any) + (p.invariant && any.aligned);
  const auto with = [&](const BackwardTile &tile) {
    BackwardConfig c = any;
    const int32_t unit = wide(p) ? 64 : 16 * tile.dim_warps; // wide: dQ's columns too are divided among many warps
    c.head_dim = rounded(p.head_dim, unit), c.head_dim_v = rounded(p.head_dim_v, unit);
    c.tile_q = tile.q, c.tile_k = tile.k, c.key_warps = tile.key_warps, c.dim_warps = tile.dim_warps, c.step_q = tile.step_q;
    return c;
  };
  const BackwardTile *best = cheapest(kBackwardTiles, [&](const BackwardTile &tile) {
    const BackwardConfig c = with(tile);
    const int32_t dim = std::max(c.head_dim, c.head_dim_v);
    const bool suits = dim <= tile.most_dim && dim >= tile.least_dim && features <= tile.most_features;
    if (!suits || c.shared_bytes() > device.shared_per_block || !divides_blocks(p, tile.q, tile.k)) return kCannotRun;
    if (p.invariant) return 16 * distance(p, tile.q, tile.k) - tile.speed;
    const double waves = double(p.batch * p.heads_kv * tiles(p.seqlen_k, tile.k)) / device.sms;
    return 16 * distance(p, tile.q, tile.k) + std::log2(std::max(1.0, waves) * tile.k / tile.speed);
  });
  return best ? std::optional(Chosen{with(*best), best->speed}) : std::nullopt;
}

// Measured on an H200: an SM's rate with the tile of speed 1; the time of a launch; a block's time to begin and to store; a step's time
// beside its products.
constexpr double kFlopPerClock = 1370, kBiasPerClock = 1400, kLaunchSeconds = 3e-6, kBlockSeconds = 5.5e-6, kStepSeconds = 0.5e-6;

double predicted_seconds(const Problem &p, const BackwardConfig &c, double speed, const Device &device, size_t launches) {
  const double columns = c.head_dim + c.head_dim_v;
  const Walks w = walks(p, Operation::backward, c.tile_q, c.tile_k);
  const double score = 5 * columns / (speed * kFlopPerClock * device.clock_hz) + kStepSeconds / double(c.tile_q * c.tile_k);
  const double bias = p.dbias ? 2 * w.scores() * columns / (kBiasPerClock * device.sms * device.clock_hz) : 0;
  const double missing = missing_seconds(p, w, device, c.tile_k, bundle_of_heads(c.deterministic), 8 * c.head_dim + 2 * c.head_dim_v);
  return kLaunchSeconds * double(launches) + std::max(seconds(w, device, 1, 1 / score, kBlockSeconds), missing) + bias +
         rows_seconds(p, c.head_dim, c.head_dim_v);
}

} // namespace

CudaEngine::Made mma_backward(const Problem &p, const Device &device, Scratch &scratch) {
  const std::optional<Chosen> chosen = choose(p, device);
  if (p.part && p.bias && (!p.part.partial || p.dbias))
    return "has no backward of a part with a bias, but for a partial one without its gradient";
  if (!chosen || ((p.bias || settles(p)) && !tensor_cores_settle(p, device))) return no_tile(device);
  if (std::string reason = captured_refusal(p, device); !reason.empty()) return reason;
  const BackwardConfig &c = chosen->config;
  BackwardArguments a = backward_arguments(p);
  a.bundle = bundle_of_heads(c.deterministic);
  const int64_t tiles_q = all_query_tiles(p, a.in, c.tile_q), tiles_k = p.batch * p.heads_kv * key_tiles(p, c.tile_k);
  const passes::RowsConfig rows = rows_config(p, c.head_dim, c.tile_q, passes::kFragments, c.aligned);
  Program program;
  take_sums(program, a, p, scratch,
            {.dq = tiles_q * c.tile_q * c.head_dim, .turns = c.deterministic ? std::optional(c.turns(tiles_q)) : std::nullopt});
  push(program, p, a,
       {.delta = delta(p, rows, a),
        .settle = settles(p) ? std::optional(settle(p, device, a)) : std::nullopt,
        .main = Launch(kBackward, c, tiles_k, c.threads(), c.shared_bytes(), a),
        .dq = dq_from_sum(p, rows, a),
        .dbias = bias_gradient(p, device, a)});

  program.kernel = text(strobe::name(p.dtype), " mma.sync, ", c.warps(), " warps, head dimensions ", c.head_dim, " and ", c.head_dim_v);
  describe_tile(program, p, c.tile_q, c.tile_k, c.aligned);
  describe_width(program, p);
  program.predicted_seconds = predicted_seconds(p, c, chosen->speed, device, program.steps.size());
  captured_gradients(program, p, device, a, scratch);
  return program;
}

} // namespace strobe::cuda
