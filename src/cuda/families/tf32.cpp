// The kernels of kernels/tf32: FP32 on tensor cores, from sm_80. What looks at rows and not at scores is done by kernels of the other
// families.
#include <algorithm>
#include <cmath>

#include "../../../kernels/attention/dq_sum.h"
#include "../../../kernels/tf32/config.h"
#include "attention/text.h"
#include "cuda/families/families.h"
#include "cuda/program/arguments.h"
#include "cuda/program/prediction.h"
#include "cuda/program/rows.h"
#include "cuda/program/tile_gradient.h"
#include "cuda/program/wishes.h"

namespace strobe::cuda {
namespace {

using tf32::Config;

constexpr KernelSource kForward{"tf32/forward.h", "strobe::tf32::Forward", "strobe::tf32::Config"};
constexpr KernelSource kBackward{"tf32/backward.h", "strobe::tf32::Backward", "strobe::tf32::Config"};

// From the fastest to the smallest. most_dims: of Q and V together, what the registers hold; ctas: per SM, what they are limited for.
struct Tile {
  int32_t most_dims, q, k, warps, stages, ctas;
};
constexpr Tile kForwardTiles[] = {
    {128, 64, 32, 4, 2, 3}, {256, 64, 32, 4, 2, 2}, {256, 32, 32, 2, 1, 3},
    {512, 64, 32, 4, 1, 1}, {512, 32, 32, 2, 1, 2}, {512, 16, 32, 1, 1, 4},
};
constexpr Tile kBackwardTiles[] = {{256, 32, 64, 4, 1, 2}, {256, 32, 32, 2, 1, 4}};

Config config_for(const Problem &p, const Tile &tile, Direction direction) {
  Config c{};
  c.head_dim = rounded(p.head_dim, 32), c.head_dim_v = rounded(p.head_dim_v, 32);
  c.tile_q = tile.q, c.tile_k = tile.k, c.warps = tile.warps, c.stages = tile.stages, c.blocks_per_sm = tile.ctas;
  c.products = p.allow_tf32 ? 1 : 3;
  c.aligned = aligned(p.q, p.head_dim) && aligned(p.k, p.head_dim) && aligned(p.v, p.head_dim_v);
  if (direction == Direction::forward)
    c.aligned = c.aligned && aligned(p.out, p.head_dim_v);
  else
    c.aligned = c.aligned && aligned(p.dout, p.head_dim_v) && aligned(p.dk, p.head_dim) && aligned(p.dv, p.head_dim_v);
  c.exact_max = direction == Direction::forward && p.exact_max;
  c.deterministic = direction == Direction::backward && p.deterministic && p.dq;
  c.features = features_of(p);
  return c;
}

int32_t shared_bytes(const Config &c, Direction direction) {
  return direction == Direction::forward ? c.forward_shared_bytes() : c.backward_shared_bytes();
}

// The first tile that fits, or with wishes the nearest.
template <size_t n> bool choose(Config &chosen, const Tile (&tiles)[n], const Problem &p, const Device &device, Direction direction) {
  double least = HUGE_VAL;
  for (const Tile &tile : tiles) {
    const Config c = config_for(p, tile, direction);
    if (c.head_dim + c.head_dim_v > tile.most_dims || shared_bytes(c, direction) > device.shared_per_block) continue;
    if (p.blocks.present && (p.blocks.block_q % tile.q || (direction == Direction::backward && p.blocks.block_k % tile.k))) continue;
    const double cost = distance(p.tile_q, tile.q) + distance(p.tile_k, tile.k);
    if (cost < least) least = cost, chosen = c;
  }
  return least < HUGE_VAL;
}

// Dense FLOP per clock and SM of mma.sync in TF32.
double rate(const Device &device) {
  switch (device.cc) {
  case 80:
    return 1024;
  case 90:
    return 1615; // measured on an H200
  case 100:
  case 103:
    return 1024;
  default:
    return 256;
  }
}

// Measured on an H200, forward and backward: of each kernel, and of a block, to begin and to store.
constexpr double kShareOfPeak[] = {0.38, 0.3}, kLaunchSeconds = 4e-6, kEndsSeconds[] = {6.5e-6, 16e-6};

class Tf32Engine final : public CudaEngine {
public:
  const char *name() const override { return "cuda-tf32"; }

protected:
  Made program(const Problem &p, Direction direction, const Device &device, Scratch &scratch) const override {
    if (p.dtype != DType::f32) return text("takes float32, not ", strobe::name(p.dtype));
    if (device.cc < 80) return text(device.name, " has no TF32: sm_80 or newer is needed, this is sm_", device.cc);
    if (std::string reason = outsized_scale(p); !reason.empty()) return reason;
    return direction == Direction::forward ? forward(p, device, scratch) : backward(p, device, scratch);
  }

private:
  static bool too_wide(const Problem &p) { return rounded(p.head_dim, 32) + rounded(p.head_dim_v, 32) > 256; }
  static Made no_tile(const Device &device) {
    return text("no tile fits the ", device.shared_per_block, " bytes of shared memory and divides the blocks of block_rows");
  }

  static Made forward(const Problem &p, const Device &device, Scratch &scratch) {
    Config c;
    // The backward rebuilds P from this forward's LSE: it must come from the same arithmetic, or rows of P no longer sum to 1.
    Config unused;
    if (too_wide(p) || !choose(unused, kBackwardTiles, p, device, Direction::backward))
      return "takes no forward whose backward it would leave to another arithmetic: dK and dV of these head dimensions or blocks do not "
             "fit";
    if (!choose(c, kForwardTiles, p, device, Direction::forward)) return no_tile(device);
    ForwardArguments a = forward_arguments(p);
    const int64_t ctas = p.batch * p.heads * tiles(p.seqlen_q, c.tile_q), rows = a.in.rows();
    // As many parts as fill the GPU once; each is worth its own O: at least 256 keys.
    const int64_t slots = device.sms * resident(device, c.forward_shared_bytes(), c.blocks_per_sm);
    if (ctas > 0) a.splits = int32_t(std::clamp<int64_t>(slots / ctas, 1, std::clamp<int64_t>(p.seqlen_k / 256, 1, 256)));
    // (batch, head) pairs whose tiles run together: their K and V should stay in half of the L2 cache.
    const double bytes = 4 * double(p.seqlen_k) * double(p.head_dim + p.head_dim_v) / double(p.group());
    a.bundle = int32_t(std::clamp(double(device.l2) / 2 / std::max(1.0, bytes), 4.0, 64.0));
    if (a.splits > 1) {
      a.partial_out = scratch.take<float>(a.splits * rows * p.head_dim_v);
      a.partial_lse = scratch.take<float>(a.splits * rows);
    }
    Program program;
    program.steps.push_back(Launch(kForward, c, ctas * a.splits, c.threads(), c.forward_shared_bytes(), a));
    if (a.splits > 1) program.steps.push_back(combine(p, a));
    describe(program, p, c, device, Direction::forward, a.splits);
    if (a.splits > 1) program.kernel += text(", keys split in ", a.splits);
    return program;
  }

  static Made backward(const Problem &p, const Device &device, Scratch &scratch) {
    if (too_wide(p)) return "dK and dV of head dimensions beyond 256 together do not fit the registers";
    Config c;
    BackwardArguments a = backward_arguments(p);
    if (!choose(c, kBackwardTiles, p, device, Direction::backward) || !settle(p, device, a) || (p.dbias && !bias_gradient(p, device, a)))
      return no_tile(device);
    a.bundle = c.deterministic ? 16 : 4; // more heads at a time: fewer key tiles of one wait for their turn
    a.deterministic = c.deterministic;
    const int64_t rows = a.in.rows();

    Program program;
    a.delta = scratch.take<float>(2 * rows); // D, and LSE's correction
    if (p.dq) a.dq_sum = scratch.take<float>(rows * c.head_dim);
    if (c.deterministic) {
      const int64_t turns = 1 + count_query_tiles(a.in, c.tile_q) * c.warps;
      a.turns = scratch.take<uint32_t>(turns);
      program.steps.push_back(Zero{a.turns, uint64_t(turns) * 4});
    }
    program.steps.push_back(row_sums(p, a));
    program.steps.push_back(*settle(p, device, a));
    if (p.dsinks) program.steps.push_back(sink_gradient(p, a));
    if (p.dq) program.steps.push_back(Zero{a.dq_sum, uint64_t(rows * c.head_dim) * 4});
    if (p.dq || p.dk || p.dv)
      program.steps.push_back(
          Launch(kBackward, c, p.batch * p.heads_kv * tiles(p.seqlen_k, c.tile_k), c.threads(), c.backward_shared_bytes(), a));
    if (p.dq) program.steps.push_back(query_gradient(p, a));
    if (p.dbias) program.steps.push_back(*bias_gradient(p, device, a));
    describe(program, p, c, device, Direction::backward, 1);
    return program;
  }

  static void describe(Program &program, const Problem &p, const Config &c, const Device &device, Direction direction, int64_t parts) {
    program.kernel = text("fp32 as ", c.products, c.products > 1 ? " products" : " product", " in TF32, ", c.warps,
                          " warps, head dimensions ", c.head_dim, " and ", c.head_dim_v);
    describe_tile(program, p, c.tile_q, c.tile_k, c.aligned);
    const bool forward = direction == Direction::forward;
    const double flop = double(forward ? 2 : p.dbias ? 7 : 5) * (c.head_dim + c.head_dim_v) * c.products;
    const double scores = kShareOfPeak[!forward] * rate(device) * device.clock_hz / flop; // of an SM, a second
    const int64_t side = resident(device, shared_bytes(c, direction), c.blocks_per_sm);
    program.predicted_seconds = kLaunchSeconds * double(program.steps.size()) + (forward ? 0 : rows_seconds(p, c.head_dim, c.head_dim_v)) +
                                seconds(walks(p, direction, c.tile_q, c.tile_k), device, side, scores, kEndsSeconds[!forward], parts) +
                                (parts > 1 ? combining_seconds(p) : 0);
  }
};

} // namespace

const CudaEngine &tf32_engine() {
  static const Tf32Engine engine;
  return engine;
}

} // namespace strobe::cuda
