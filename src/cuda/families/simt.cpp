// The kernels of kernels/simt: plain FMA on any GPU, every dtype and feature.
#include <algorithm>
#include <optional>
#include <span>

#include "../../../kernels/attention/dq_sum.h"
#include "../../../kernels/simt/captured_config.h"
#include "../../../kernels/simt/config.h"
#include "attention/text.h"
#include "cuda/families/families.h"
#include "cuda/program/arguments.h"
#include "cuda/program/captured.h"
#include "cuda/program/part.h"
#include "cuda/program/passes.h"
#include "cuda/program/prediction.h"
#include "cuda/program/tiles.h"

namespace strobe::cuda {
namespace {

using simt::Config;

constexpr KernelSource kForward{"simt/forward.h", "strobe::simt::Forward", "strobe::simt::Config"};
constexpr KernelSource kSettle{"simt/settle.h", "strobe::simt::Settle", "strobe::simt::Config"};
constexpr KernelSource kBackward{"simt/backward.h", "strobe::simt::Backward", "strobe::simt::Config"};
constexpr KernelSource kBiasGradient{"simt/bias_gradient.h", "strobe::simt::BiasGradient", "strobe::simt::Config"};
constexpr KernelSource kCaptured{"simt/captured.h", "strobe::simt::Captured", "strobe::simt::CapturedConfig"};

enum class Kind { forward, backward, bias_gradient, captured };

int64_t shared_bytes(const Config &c, Kind kind) { return kind == Kind::forward ? c.forward_shared_bytes() : c.backward_shared_bytes(); }

// How many registers of a thread hold accumulators, operands and the chunk in flight, in the product that needs the most.
int64_t registers(const Config &c, Kind kind) {
  const int64_t words = c.real_bytes() / 4, rows = c.tile_q / c.threads_q, keys = c.tile_k / c.threads_k;
  const auto nt = [&](int64_t held) { // S or dP
    return held + words * (rows * keys + rows + 4) + words * (c.tile_q + c.tile_k) * c.chunk / c.threads();
  };
  const auto by_rows = [&](int64_t held, int64_t operands, int64_t dim, int64_t staged) { // O, dV, dK, dQ
    return held + words * (operands + 4) + words * staged * dim / c.threads();
  };
  if (kind == Kind::bias_gradient) return nt(2 * words * rows * keys); // the sum and its rounding error
  if (kind == Kind::captured) return nt(0);
  if (kind == Kind::forward) {
    const int64_t o = words * rows * c.head_dim_v / c.threads_k, at_once = c.columns_staged(c.head_dim_v);
    return std::max(nt(o), by_rows(2 * o, rows, at_once, c.rows_staged(c.tile_k, at_once)));
  }
  const int64_t dk_dv = words * (c.tile_k / c.threads_q) * (c.head_dim + c.head_dim_v) / c.threads_k;
  const auto part = [&](int64_t lines, int64_t tile, int32_t dim) { // a gradient's part: dQ, dK or dV
    const int64_t columns = Config::columns_at_once(dim);
    return by_rows(dk_dv + words * lines * columns / c.threads_k, lines, columns, c.rows_staged(tile, columns));
  };
  const int64_t held = std::max(nt(dk_dv), part(rows, c.tile_k, c.head_dim));
  if (c.dtype != kF32) return held;
  const int64_t lines = c.tile_k / c.threads_q;
  return std::max({held, part(lines, c.tile_q, c.head_dim), part(lines, c.tile_q, c.head_dim_v)});
}
// The most registers, of a thread's 255, that registers() may count. Addresses and loops need the others; in FP64 they need more.
int64_t most_registers(const Config &c) {
  const bool paged = c.features.pages || c.features.quant; // each thread keeps the addresses of its rows
  if (c.dtype == kF64) return paged ? 120 : 160;
  if (paged) return c.wide() ? 90 : 136;
  return c.features.part ? 150 : 204;
}

struct Tile {
  int32_t q, k, threads_q, threads_k;
};
// From the fastest to the smallest, as measured on an H200.
constexpr Tile kForwardTiles[] = {
    {.q = 128, .k = 64, .threads_q = 16, .threads_k = 8}, {.q = 64, .k = 128, .threads_q = 8, .threads_k = 16},
    {.q = 64, .k = 64, .threads_q = 8, .threads_k = 16},  {.q = 32, .k = 128, .threads_q = 8, .threads_k = 16},
    {.q = 32, .k = 64, .threads_q = 8, .threads_k = 16},  {.q = 32, .k = 32, .threads_q = 8, .threads_k = 16},
    {.q = 16, .k = 128, .threads_q = 8, .threads_k = 16}, {.q = 16, .k = 64, .threads_q = 8, .threads_k = 16},
    {.q = 16, .k = 32, .threads_q = 8, .threads_k = 16},  {.q = 16, .k = 16, .threads_q = 8, .threads_k = 16},
};
constexpr Tile kBackwardTiles[] = {
    {.q = 128, .k = 64, .threads_q = 8, .threads_k = 16}, {.q = 64, .k = 64, .threads_q = 8, .threads_k = 16},
    {.q = 64, .k = 32, .threads_q = 8, .threads_k = 16},  {.q = 32, .k = 64, .threads_q = 8, .threads_k = 16},
    {.q = 32, .k = 32, .threads_q = 8, .threads_k = 16},  {.q = 64, .k = 16, .threads_q = 8, .threads_k = 16},
    {.q = 32, .k = 16, .threads_q = 8, .threads_k = 16},  {.q = 16, .k = 64, .threads_q = 8, .threads_k = 16},
    {.q = 16, .k = 32, .threads_q = 8, .threads_k = 16},  {.q = 16, .k = 16, .threads_q = 8, .threads_k = 16},
};

// Wide heads use more threads: each thread keeps all columns of its rows of O (backward: of dK and dV).
constexpr Tile kWideTiles[] = {
    {.q = 32, .k = 64, .threads_q = 16, .threads_k = 16}, {.q = 32, .k = 32, .threads_q = 16, .threads_k = 16},
    {.q = 32, .k = 16, .threads_q = 16, .threads_k = 16}, {.q = 16, .k = 64, .threads_q = 16, .threads_k = 16},
    {.q = 16, .k = 32, .threads_q = 16, .threads_k = 16}, {.q = 16, .k = 16, .threads_q = 16, .threads_k = 16},
};

// The Config that all kernels of a call share.
Config config_for(const Problem &p) {
  Config c = begin_config<Config>(p, wide(p) ? Config::wide_step() : Config::kDimStep);
  c.chunk = 16;
  c.blocks_per_sm = wide(p) ? 1 : 2;
  const bool pieces = aligned_keys(p) && aligned({&p.q, &p.dk}, p.head_dim) && aligned({&p.out, &p.dout, &p.dv}, p.head_dim_v);
  const bool whole = p.head_dim == c.head_dim && p.head_dim_v == c.head_dim_v;
  c.copy = !pieces ? simt::kElements : whole ? simt::kWhole : simt::kPieces;
  c.invariant = p.invariant;
  c.features = features_of(p);
  return c;
}

// Invariant: every tile has this many keys, divided among this many threads, so that a thread always sums the same keys.
constexpr int32_t kInvariantKeys = 64, kInvariantThreads = 16;

Config with(Config c, const Tile &tile) {
  c.tile_q = tile.q, c.tile_k = tile.k, c.threads_q = tile.threads_q, c.threads_k = tile.threads_k;
  return c;
}

// The first tile that fits shared memory and the blocks of a sparse mask, preferably one that does not spill; if a tile is requested, the
// nearest of these. A tile longer than the queries is taken only if no shorter one fits.
std::optional<Config> choose(const Config &any, Kind kind, const Problem &p, const Device &device) {
  const std::span<const Tile> tiles = wide(p)                 ? std::span<const Tile>(kWideTiles)
                                      : kind == Kind::forward ? std::span<const Tile>(kForwardTiles)
                                                              : kBackwardTiles;
  const Tile *best = cheapest(tiles, [&](const Tile &tile) {
    const Config c = with(any, tile);
    if (kind == Kind::captured && tile.q != tile.k) return kCannotRun; // diagonals of tiles are walked
    if (p.invariant && kind < Kind::bias_gradient && (tile.k != kInvariantKeys || tile.threads_k != kInvariantThreads)) return kCannotRun;
    if (!divides_blocks(p, tile.q, kind == Kind::forward ? 1 : tile.k) || shared_bytes(c, kind) > device.shared_per_block)
      return kCannotRun;
    const int64_t spare = tile.q - std::max<int64_t>(16, p.longest_q());
    const bool shorter = spare >= 16 && !(p.invariant && kind == Kind::backward); // dk and dv are sums over query tiles
    double cost = 1e3 * distance(p, tile.q, tile.k) + (shorter ? double(spare) : 0.0);
    cost += 1e6 * double(std::max<int64_t>(0, registers(c, kind) - most_registers(c)));                  // these would spill
    if (p.blocks.present && p.blocks.block_k % tile.k) cost += 10.0 * tile.k / double(p.blocks.block_k); // hidden scores are computed, too
    return cost;
  });
  return best ? std::optional(with(any, *best)) : std::nullopt;
}

// FMA per clock and SM.
double rate(const Device &device, DType dtype) {
  if (dtype != DType::f64) return device.cc == 61 || device.cc >= 86 ? 128 : 64;
  return device.cc == 60 || device.cc == 70 || device.cc == 80 || device.cc == 90 || device.cc == 100 ? (device.cc >= 90 ? 64 : 32) : 2;
}

// Measured on an H200.
constexpr Measured kMeasured{.share_of_peak = {0.53, 0.38}, .launch_seconds = 4.5e-6, .block_seconds = {3e-6, 9e-6}};

class SimtEngine final : public CudaEngine {
public:
  const char *name() const override { return "cuda-simt"; }

protected:
  bool computes_parts() const override { return true; }
  bool unrolls_functions() const override { return false; }
  bool reads_pages() const override { return true; }
  bool reads_quantised() const override { return true; }
  Made program(const Problem &p, Operation operation, const Device &device, Scratch &scratch) const override {
    return operation == Operation::forward ? forward(p, device, scratch) : backward(p, device, scratch);
  }

private:
  static void describe(Program &program, const Problem &p, const Config &c) {
    program.kernel = text(p.dtype == DType::f64 ? "fp64" : "fp32", " FMA, ", c.threads(), " threads, head dimensions ", c.head_dim, " and ",
                          c.head_dim_v);
    describe_tile(program, p, c.tile_q, c.tile_k, c.copy != simt::kElements);
    describe_width(program, p);
  }
  static double predicted_seconds(const Problem &p, const Config &c, const Device &device, Operation operation, size_t launches,
                                  int64_t parts) {
    const int64_t shared = shared_bytes(c, writes(operation, kGradients) ? Kind::backward : Kind::forward);
    const Workload work{.problem = p,
                        .operation = operation,
                        .device = device,
                        .rate = rate(device, p.dtype),
                        .operations = 0.5, // one FMA for each column of Q or V
                        .resident = resident(device, shared, c.blocks_per_sm),
                        .launches = launches,
                        .parts = parts};
    return seconds(work, kMeasured, c.tile_q, c.tile_k, c.head_dim, c.head_dim_v);
  }

  static Made forward(const Problem &p, const Device &device, Scratch &scratch) {
    if (p.invariant)
      if (std::string reason = cuts_blocks(p, kInvariantKeys); !reason.empty()) return reason;
    const std::optional<Config> c = choose(config_for(p), Kind::forward, p, device);
    if (!c) return no_tile(device);
    ForwardArguments a = forward_arguments(p);
    const int64_t ctas = p.batch * p.heads * query_tiles(p, c->tile_q), slots = int64_t{device.sms} * c->blocks_per_sm;
    if (p.dtype != DType::f64 && !p.invariant && !p.part.partial)
      a.splits = splits_to_fill(slots, ctas, std::min<int64_t>(tiles(p.seqlen_k, c->tile_k) / 2, 64));
    take_splits(a, p, scratch); // FP64 has no splits
    Program program;
    describe(program, p, *c);
    program.steps.push_back(with_scales(p, kForward, *c, ctas * a.splits, c->threads(), c->forward_shared_bytes(), a));
    combine_splits(program, p, a);
    program.predicted_seconds = predicted_seconds(p, *c, device, Operation::forward, program.steps.size(), a.splits);
    return program;
  }

  static Made backward(const Problem &p, const Device &device, Scratch &scratch) {
    if (p.invariant)
      if (std::string reason = cuts_blocks(p, kInvariantKeys); !reason.empty()) return reason;
    const Config any = config_for(p);
    const std::optional<Config> c = choose(any, Kind::backward, p, device);
    Config with_bias = any;
    if (p.part) with_bias.features.part = kAnywhere; // its tiles hold held rows, whatever their positions
    const std::optional<Config> of_bias = p.dbias ? choose(with_bias, Kind::bias_gradient, p, device) : c;
    const std::optional<Config> of_captured = p.gradient_program ? choose(config_of_captured(p), Kind::captured, p, device) : c;
    if (!c || !of_bias || !of_captured) return no_tile(device);
    BackwardArguments a = backward_arguments(p);
    a.dq_sums = dq_sums(p, a.in.rows() * c->head_dim);
    const int64_t tiles_q = p.batch * p.heads * query_tiles(p, c->tile_q), tiles_k = p.batch * p.heads_kv * key_tiles(p, c->tile_k);
    Program program;
    describe(program, p, *c);
    take_sums(program, a, p, scratch,
              {.real_bytes = c->real_bytes(),
               .dq = a.dq_sums * a.in.rows() * c->head_dim,
               .turns = (p.deterministic || p.invariant) && p.dq ? std::optional(tiles_q) : std::nullopt,
               .zero_dq = true});
    const int32_t shared = c->backward_shared_bytes();
    push(program, p, a,
         {.delta = delta(p, a),
          .settle = p.part.partial ? std::nullopt : std::optional(Launch(kSettle, *c, tiles_q, c->threads(), shared, a)),
          .main = Launch(kBackward, *c, tiles_k, c->threads(), shared, a),
          .dq = dq_from_sum(p, a, c->head_dim),
          .dbias = bias_gradient(p, *of_bias, a)});
    program.predicted_seconds = predicted_seconds(p, *c, device, Operation::backward, program.steps.size() - bool(p.dbias), 1);
    captured_gradients(program, p, device, a, scratch, captured_passes(p, *of_captured, device));
    return program;
  }

  static Config config_of_captured(const Problem &p) {
    Config c = config_for(p);
    c.features = gradient_features(p);
    if (p.part) c.features.part = kAnywhere; // its tiles consist of held rows, whatever their positions
    return c;
  }
  static CapturedPasses captured_passes(const Problem &p, const Config &of_captured, const Device &device) {
    const double products = 2 * double(of_captured.head_dim + of_captured.head_dim_v) / 2;
    return {.tile_q = of_captured.tile_q,
            .tile_k = of_captured.tile_k,
            .of_lines = !p.part,
            .diagonals_at_once = kLoadsAtOnce,
            .table_blocks = [](int32_t) { return 0; },
            .launch =
                [of_captured](const CapturedPasses::Sums &sums, int64_t grid, const CapturedArguments &arguments) {
                  simt::CapturedConfig c{};
                  static_cast<Config &>(c) = of_captured;
                  c.summed = sums.summed, c.loads = sums.loads, c.of_lines = sums.of_lines;
                  return Launch(kCaptured, c, grid, c.threads(), c.backward_shared_bytes(), arguments);
                },
            .score_seconds = products / (kMeasured.share_of_peak[1] * rate(device, p.dtype) * device.clock_hz)};
  }

  static std::optional<Launch> bias_gradient(const Problem &p, const Config &c, const BackwardArguments &a) {
    if (!p.dbias) return std::nullopt;
    return Launch(kBiasGradient, c, bias_tiles(p, c.tile_q, c.tile_k), c.threads(), c.backward_shared_bytes(), a);
  }
};

} // namespace

const CudaEngine &simt_engine() {
  static const SimtEngine engine;
  return engine;
}

} // namespace strobe::cuda
