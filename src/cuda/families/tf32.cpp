// The kernels of kernels/tf32: FP32 on tensor cores, from sm_80. Passes that compute no scores use the other families' kernels.
#include <algorithm>
#include <optional>
#include <span>

#include "../../../kernels/attention/dq_sum.h"
#include "../../../kernels/tf32/config.h"
#include "attention/text.h"
#include "cuda/families/families.h"
#include "cuda/program/arguments.h"
#include "cuda/program/captured.h"
#include "cuda/program/passes.h"
#include "cuda/program/prediction.h"
#include "cuda/program/tiles.h"

namespace strobe::cuda {
namespace {

using tf32::Config;

constexpr KernelSource kForward{"tf32/forward.h", "strobe::tf32::Forward", "strobe::tf32::Config"};
constexpr KernelSource kBackward{"tf32/backward.h", "strobe::tf32::Backward", "strobe::tf32::Config"};

constexpr int64_t kFewestColumns = 64; // the least head dimension, of Q and K and of V, that the engine takes unless TF32 is allowed

// From the fastest to the smallest.
struct Tile {
  int32_t most_dims; // Dqk + Dv, limited by registers
  int32_t q, k, warps, stages;
  int32_t blocks_per_sm; // how many blocks an SM shall hold; limits a thread's registers
};
constexpr Tile kForwardTiles[] = {
    {.most_dims = 128, .q = 64, .k = 32, .warps = 4, .stages = 2, .blocks_per_sm = 3},
    {.most_dims = 256, .q = 64, .k = 32, .warps = 4, .stages = 2, .blocks_per_sm = 2},
    {.most_dims = 256, .q = 32, .k = 32, .warps = 2, .stages = 1, .blocks_per_sm = 3},
    {.most_dims = 512, .q = 64, .k = 32, .warps = 4, .stages = 1, .blocks_per_sm = 1},
    {.most_dims = 512, .q = 32, .k = 32, .warps = 2, .stages = 1, .blocks_per_sm = 2},
    {.most_dims = 512, .q = 16, .k = 32, .warps = 1, .stages = 1, .blocks_per_sm = 4},
};
constexpr Tile kBackwardTiles[] = {
    {.most_dims = 256, .q = 32, .k = 64, .warps = 4, .stages = 1, .blocks_per_sm = 2},
    {.most_dims = 256, .q = 32, .k = 32, .warps = 2, .stages = 1, .blocks_per_sm = 4},
};

Config config_for(const Problem &p, Operation operation) {
  const bool forward = operation == Operation::forward;
  Config c = begin_config<Config>(p, 32);
  c.products = p.allow_tf32 ? 1 : 3;
  c.aligned = forward ? aligned({&p.q, &p.k}, p.head_dim) && aligned({&p.v, &p.out}, p.head_dim_v)
                      : aligned({&p.q, &p.k, &p.dk}, p.head_dim) && aligned({&p.v, &p.dout, &p.dv}, p.head_dim_v);
  c.exact_max = forward && p.exact_max;
  c.deterministic = !forward && p.deterministic && p.dq;
  c.features = features_of(p);
  return c;
}

Config with(Config c, const Tile &tile) {
  c.tile_q = tile.q, c.tile_k = tile.k, c.warps = tile.warps, c.stages = tile.stages, c.blocks_per_sm = tile.blocks_per_sm;
  return c;
}

int32_t shared_bytes(const Config &c, Operation operation) {
  return operation == Operation::forward ? c.forward_shared_bytes() : c.backward_shared_bytes();
}

// The first tile that fits; if a tile is requested, the nearest to it.
std::optional<Config> choose(const Problem &p, const Device &device, Operation operation) {
  const bool forward = operation == Operation::forward;
  const Config any = config_for(p, operation);
  const std::span<const Tile> tiles = forward ? std::span<const Tile>(kForwardTiles) : kBackwardTiles;
  const Tile *best = cheapest(tiles, [&](const Tile &tile) {
    const bool fits =
        any.head_dim + any.head_dim_v <= tile.most_dims && shared_bytes(with(any, tile), operation) <= device.shared_per_block;
    return fits && divides_blocks(p, tile.q, forward ? 1 : tile.k) ? distance(p, tile.q, tile.k) : kCannotRun;
  });
  return best ? std::optional(with(any, *best)) : std::nullopt;
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

// Measured on an H200.
constexpr Measured kMeasured{.share_of_peak = {0.38, 0.3}, .launch_seconds = 4e-6, .block_seconds = {6.5e-6, 16e-6}};

class Tf32Engine final : public CudaEngine {
public:
  const char *name() const override { return "cuda-tf32"; }

protected:
  bool reads_pages() const override { return true; }
  Made program(const Problem &p, Operation operation, const Device &device, Scratch &scratch) const override {
    if (p.dtype != DType::f32) return text("takes float32, not ", strobe::name(p.dtype));
    if (device.cc < 80) return text(device.name, " has no TF32: sm_80 or newer is needed, this is sm_", device.cc);
    if (std::string reason = outsized_scale(p); !reason.empty()) return reason;
    if (p.invariant) return "is not invariant: its tiles of keys begin where a tile of queries sees some";
    if (!p.allow_tf32) {
      // Rms errors, relative to the exact product: three TF32 products of 11-bit numbers have 2^-23.8; an FP32 sum of n products has n /
      // 1.4 2^-25.8. They are equal at n = 31; but at 32 columns the error of single rows of dK was still 1.3 times the bound.
      if (std::min(p.head_dim, p.head_dim_v) < kFewestColumns)
        return text("head dimensions under ", kFewestColumns, ": FP32 rounds a sum of so few products less than TF32's parts do");
      if (function_of(p) == kHyperbolic) return "a Lorentz product cancels, which shows what TF32's parts leave of FP32's last bits";
    }
    return operation == Operation::forward ? forward(p, device, scratch) : backward(p, device, scratch);
  }

private:
  static bool exceeds_registers(const Problem &p) { return rounded(p.head_dim, 32) + rounded(p.head_dim_v, 32) > 256; }

  static Made forward(const Problem &p, const Device &device, Scratch &scratch) {
    // The backward computes P again from this forward's LSE. Both must use the same arithmetic, or rows of P no longer sum to 1.
    if (exceeds_registers(p) || !choose(p, device, Operation::backward))
      return "takes no forward whose backward it would leave to another arithmetic: dK and dV of these head dimensions or blocks do not "
             "fit";
    const std::optional<Config> c = choose(p, device, Operation::forward);
    if (!c) return no_tile(device);
    ForwardArguments a = forward_arguments(p);
    const int64_t ctas = p.batch * p.heads * tiles(p.seqlen_q, c->tile_q);
    const int64_t slots = device.sms * resident(device, c->forward_shared_bytes(), c->blocks_per_sm);
    a.splits = splits_to_fill(slots, ctas, most_splits(p));
    a.bundle = pairs_in_half_the_cache(p, device);
    take_splits(a, p, scratch);
    Program program;
    describe(program, p, *c);
    program.steps.push_back(Launch(kForward, *c, ctas * a.splits, c->threads(), c->forward_shared_bytes(), a));
    combine_splits(program, p, a);
    program.predicted_seconds = predicted_seconds(p, *c, device, Operation::forward, program.steps.size(), a.splits);
    return program;
  }

  static Made backward(const Problem &p, const Device &device, Scratch &scratch) {
    if (exceeds_registers(p)) return "dK and dV of head dimensions beyond 256 together do not fit the registers";
    const std::optional<Config> c = choose(p, device, Operation::backward);
    if (!c || !tensor_cores_settle(p, device)) return no_tile(device);
    if (std::string reason = captured_refusal(p, device); !reason.empty()) return reason;
    BackwardArguments a = backward_arguments(p);
    a.dq_sums = dq_sums(p, a.in.rows() * c->head_dim);
    a.bundle = bundle_of_heads(c->deterministic);
    Program program;
    describe(program, p, *c);
    take_sums(program, a, p, scratch,
              {.dq = a.dq_sums * a.in.rows() * c->head_dim,
               .turns = c->deterministic ? std::optional(count_query_tiles(a.in, c->tile_q) * c->warps) : std::nullopt,
               .zero_dq = true});
    const int64_t ctas = p.batch * p.heads_kv * tiles(p.seqlen_k, c->tile_k);
    push(program, p, a,
         {.delta = delta(p, a),
          .settle = settle(p, device, a),
          .main = Launch(kBackward, *c, ctas, c->threads(), c->backward_shared_bytes(), a),
          .dq = dq_from_sum(p, a, c->head_dim),
          .dbias = bias_gradient(p, device, a)});
    program.predicted_seconds = predicted_seconds(p, *c, device, Operation::backward, program.steps.size(), 1);
    captured_gradients(program, p, device, a, scratch);
    return program;
  }

  static void describe(Program &program, const Problem &p, const Config &c) {
    program.kernel = text("fp32 as ", c.products, c.products > 1 ? " products" : " product", " in TF32, ", c.warps,
                          " warps, head dimensions ", c.head_dim, " and ", c.head_dim_v);
    describe_tile(program, p, c.tile_q, c.tile_k, c.aligned);
  }
  static double predicted_seconds(const Problem &p, const Config &c, const Device &device, Operation operation, size_t launches,
                                  int64_t parts) {
    const Workload work{.problem = p,
                        .operation = operation,
                        .device = device,
                        .rate = rate(device),
                        .operations = double(c.products), // 2 FLOP for each column of Q or V, in each product
                        .resident = resident(device, shared_bytes(c, operation), c.blocks_per_sm),
                        .launches = launches,
                        .parts = parts};
    return seconds(work, kMeasured, c.tile_q, c.tile_k, c.head_dim, c.head_dim_v);
  }
};

} // namespace

const CudaEngine &tf32_engine() {
  static const Tf32Engine engine;
  return engine;
}

} // namespace strobe::cuda
