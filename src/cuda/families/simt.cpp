// The kernels of kernels/simt: plain FMA on any GPU, every dtype and feature.
#include <algorithm>
#include <cmath>
#include <span>

#include "../../../kernels/simt/config.h"
#include "attention/text.h"
#include "cuda/families/families.h"
#include "cuda/program/arguments.h"
#include "cuda/program/prediction.h"
#include "cuda/program/rows.h"
#include "cuda/program/wishes.h"

namespace strobe::cuda {
namespace {

using simt::Config;

constexpr KernelSource kForward{"simt/forward.h", "strobe::simt::Forward", "strobe::simt::Config"};
constexpr KernelSource kSettle{"simt/settle.h", "strobe::simt::Settle", "strobe::simt::Config"};
constexpr KernelSource kBackward{"simt/backward.h", "strobe::simt::Backward", "strobe::simt::Config"};
constexpr KernelSource kBiasGradient{"simt/bias_gradient.h", "strobe::simt::BiasGradient", "strobe::simt::Config"};

enum class Kind { forward, backward, bias_gradient };

int64_t shared_bytes(const Config &c, Kind kind) { return kind == Kind::forward ? c.forward_shared_bytes() : c.backward_shared_bytes(); }

// Registers that a thread's numbers take in the product that needs the most: accumulators, operands, the chunk on its way.
int64_t registers(const Config &c, Kind kind) {
  const int64_t words = c.real_bytes() / 4, rows = c.tile_q / c.threads_q, keys = c.tile_k / c.threads_k;
  const auto nt = [&](int64_t held) { // S or dP
    return held + words * (rows * keys + rows + 4) + words * (c.tile_q + c.tile_k) * c.chunk / c.threads();
  };
  const auto by_rows = [&](int64_t held, int64_t operands, int64_t dim, int64_t staged) { // O, dV, dK, dQ
    return held + words * (operands + 4) + words * staged * dim / c.threads();
  };
  if (kind == Kind::bias_gradient) return nt(2 * words * rows * keys); // the sum and what it lost
  if (kind == Kind::forward) {
    const int64_t o = words * rows * c.head_dim_v / c.threads_k;
    return std::max(nt(o), by_rows(2 * o, rows, c.head_dim_v, c.rows_staged(c.tile_k, c.head_dim_v)));
  }
  const int64_t dk_dv = words * (c.tile_k / c.threads_q) * (c.head_dim + c.head_dim_v) / c.threads_k;
  const int64_t dq = words * rows * c.columns_at_once() / c.threads_k;
  return std::max(nt(dk_dv), by_rows(dk_dv + dq, rows, c.columns_at_once(), c.rows_staged(c.tile_k, c.columns_at_once())));
}
// Of 255; addresses and loops take the rest. FP64's loops want more.
int64_t most_registers(const Config &c) { return c.dtype == kF64 ? 160 : 204; }

struct Shape {
  int32_t tile_q, tile_k, threads_q, threads_k;
};
// From the fastest to the smallest, as measured on an H200.
constexpr Shape kForwardShapes[] = {{128, 64, 16, 8}, {64, 128, 8, 16}, {64, 64, 8, 16}, {32, 128, 8, 16}, {32, 64, 8, 16},
                                    {32, 32, 8, 16},  {16, 128, 8, 16}, {16, 64, 8, 16}, {16, 32, 8, 16},  {16, 16, 8, 16}};
constexpr Shape kBackwardShapes[] = {{128, 64, 8, 16}, {64, 64, 8, 16}, {64, 32, 8, 16}, {32, 64, 8, 16}, {32, 32, 8, 16},
                                     {64, 16, 8, 16},  {32, 16, 8, 16}, {16, 64, 8, 16}, {16, 32, 8, 16}, {16, 16, 8, 16}};

// The first shape that shared memory and, if any, registers hold and that the blocks of a sparse mask divide into; of those, where there
// are wishes, the one that comes nearest; and none that is longer than the queries if a shorter one will do.
bool choose(Config &config, Kind kind, const Problem &p, const Device &device) {
  const std::span<const Shape> shapes = kind == Kind::forward ? std::span<const Shape>(kForwardShapes) : kBackwardShapes;
  double least = HUGE_VAL;
  Config best = config;
  for (const Shape &shape : shapes) {
    Config c = config;
    c.tile_q = shape.tile_q, c.tile_k = shape.tile_k, c.threads_q = shape.threads_q, c.threads_k = shape.threads_k;
    if (p.blocks.present && (p.blocks.block_q % c.tile_q || (kind != Kind::forward && p.blocks.block_k % c.tile_k))) continue;
    if (shared_bytes(c, kind) > device.shared_per_block) continue;
    const int64_t spare = c.tile_q - std::max<int64_t>(16, p.longest_q());
    double cost = 1e3 * (distance(p.tile_q, c.tile_q) + distance(p.tile_k, c.tile_k)) + (spare >= 16 ? double(spare) : 0.0);
    cost += 1e6 * double(std::max<int64_t>(0, registers(c, kind) - most_registers(c)));                      // they would spill
    if (p.blocks.present && p.blocks.block_k % c.tile_k) cost += 10.0 * c.tile_k / double(p.blocks.block_k); // computed, not kept
    if (cost < least) least = cost, best = c;
  }
  config = best;
  return least < HUGE_VAL;
}

// What all kernels of a call share.
Config config_for(const Problem &p) {
  Config c{};
  c.dtype = int32_t(p.dtype);
  c.head_dim = rounded(p.head_dim, Config::kDimStep), c.head_dim_v = rounded(p.head_dim_v, Config::kDimStep);
  c.chunk = 16;
  c.blocks_per_sm = 2;
  bool pieces = true;
  for (const View *x : {&p.q, &p.k, &p.dk}) pieces = pieces && aligned(*x, p.head_dim);
  for (const View *x : {&p.v, &p.out, &p.dout, &p.dv}) pieces = pieces && aligned(*x, p.head_dim_v);
  const bool whole = p.head_dim == c.head_dim && p.head_dim_v == c.head_dim_v;
  c.copy = !pieces ? simt::kElements : whole ? simt::kWhole : simt::kPieces;
  c.features = features_of(p);
  return c;
}
// FMA per clock and SM.
double rate(const Device &device, DType dtype) {
  const bool wide = device.cc == 61 || device.cc >= 86;
  if (dtype != DType::f64) return device.cc == 90 || wide ? 128 : 64;
  return device.cc == 60 || device.cc == 70 || device.cc == 80 || device.cc == 90 || device.cc == 100 ? (device.cc >= 90 ? 64 : 32) : 2;
}

// Measured on an H200, forward and backward: of each kernel, and of a block, to begin and to store.
constexpr double kShareOfPeak[] = {0.53, 0.38}, kLaunchSeconds = 4.5e-6, kEndsSeconds[] = {3e-6, 9e-6};

class SimtEngine final : public CudaEngine {
public:
  const char *name() const override { return "cuda-simt"; }

protected:
  Made program(const Problem &p, Direction direction, const Device &device, Scratch &scratch) const override {
    return direction == Direction::forward ? forward(p, device, scratch) : backward(p, device, scratch);
  }

private:
  static Made too_small(const Device &device) {
    return text("no tile fits the ", device.shared_per_block, " bytes of shared memory and divides the blocks of block_rows");
  }
  static void describe(Program &program, const Problem &p, const Config &c, const Device &device, Direction direction, int64_t parts) {
    program.kernel = text(p.dtype == DType::f64 ? "fp64" : "fp32", " FMA, ", c.threads(), " threads, head dimensions ", c.head_dim, " and ",
                          c.head_dim_v);
    describe_tile(program, p, c.tile_q, c.tile_k, c.copy != simt::kElements);
    const bool forward = direction == Direction::forward;
    const double fma = double(forward ? 2 : p.dbias ? 7 : 5) * (c.head_dim + c.head_dim_v) / 2;
    const double scores = kShareOfPeak[!forward] * rate(device, p.dtype) * device.clock_hz / fma; // of an SM, a second
    const int64_t side = resident(device, shared_bytes(c, forward ? Kind::forward : Kind::backward), c.blocks_per_sm);
    program.predicted_seconds = kLaunchSeconds * double(program.steps.size()) + (forward ? 0 : rows_seconds(p, c.head_dim, c.head_dim_v)) +
                                seconds(walks(p, direction, c.tile_q, c.tile_k), device, side, scores, kEndsSeconds[!forward], parts) +
                                (parts > 1 ? combining_seconds(p) : 0);
  }

  Made forward(const Problem &p, const Device &device, Scratch &scratch) const {
    Config c = config_for(p);
    if (!choose(c, Kind::forward, p, device)) return too_small(device);
    ForwardArguments a = forward_arguments(p);
    const int64_t ctas = p.batch * p.heads * tiles(p.seqlen_q, c.tile_q);

    // Too few CTAs to fill the GPU: several share the keys of one tile. FP64 has no partial results.
    if (p.dtype != DType::f64 && ctas > 0) {
      const int64_t slots = int64_t{device.sms} * c.blocks_per_sm, most = tiles(p.seqlen_k, c.tile_k) / 2;
      a.splits = int32_t(std::max<int64_t>(1, std::min<int64_t>({slots / ctas, most, 64})));
    }
    Program program;
    if (a.splits > 1) {
      const int64_t rows = a.in.rows();
      a.partial_out = scratch.take<float>(a.splits * rows * p.head_dim_v);
      a.partial_lse = scratch.take<float>(a.splits * rows);
    }
    program.steps.push_back(Launch(kForward, c, ctas * a.splits, c.threads(), c.forward_shared_bytes(), a));
    if (a.splits > 1) program.steps.push_back(combine(p, a));
    describe(program, p, c, device, Direction::forward, a.splits);
    if (a.splits > 1) program.kernel += text(", keys split in ", a.splits);
    return program;
  }

  Made backward(const Problem &p, const Device &device, Scratch &scratch) const {
    Config c = config_for(p);
    if (!choose(c, Kind::backward, p, device)) return too_small(device);
    BackwardArguments a = backward_arguments(p);
    const int64_t rows = a.in.rows(), real = c.real_bytes();

    Program program;
    a.delta = scratch.take<char>(2 * rows * real); // D, and LSE's correction
    program.steps.push_back(row_sums(p, a));
    program.steps.push_back(Launch(kSettle, c, p.batch * p.heads * tiles(p.seqlen_q, c.tile_q), c.threads(), c.backward_shared_bytes(), a));
    if (p.dsinks) program.steps.push_back(sink_gradient(p, a));
    if (p.dq) {
      const uint64_t bytes = uint64_t(rows * c.head_dim * real);
      a.dq_sum = reinterpret_cast<float *>(scratch.take<char>(int64_t(bytes)));
      program.steps.push_back(Zero{a.dq_sum, bytes});
    }
    a.deterministic = a.deterministic && p.dq;
    if (a.deterministic) {
      const int64_t turns = 1 + p.batch * p.heads * tiles(p.seqlen_q, c.tile_q);
      a.turns = scratch.take<uint32_t>(turns);
      program.steps.push_back(Zero{a.turns, uint64_t(turns) * 4});
    }
    if (p.dq || p.dk || p.dv)
      program.steps.push_back(
          Launch(kBackward, c, p.batch * p.heads_kv * tiles(p.seqlen_k, c.tile_k), c.threads(), c.backward_shared_bytes(), a));
    if (p.dq) program.steps.push_back(query_gradient(p, a));
    describe(program, p, c, device, Direction::backward, 1);
    if (p.dbias) {
      Config d = c;
      if (!choose(d, Kind::bias_gradient, p, device)) return too_small(device);
      int64_t ctas = 1;
      const int64_t parts[4] = {p.batch, p.heads, tiles(p.seqlen_q, d.tile_q), tiles(p.seqlen_k, d.tile_k)};
      for (int axis = 0; axis < 4; axis++)
        if (p.dbias.stride[axis]) ctas *= parts[axis];
      program.steps.push_back(Launch(kBiasGradient, d, ctas, d.threads(), d.backward_shared_bytes(), a));
    }
    return program;
  }
};

} // namespace

const CudaEngine &simt_engine() {
  static const SimtEngine engine;
  return engine;
}

} // namespace strobe::cuda
