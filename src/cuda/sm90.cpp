// The Hopper family: which configuration, which maps, which launches.
#include "../../kernels/sm90/arguments.h"
#include "../../kernels/sm90/config.h"
#include <algorithm>
#include <cmath>

#include "attention/text.h"
#include "attention/work.h"
#include "cuda/arguments.h"
#include "cuda/engine.h"

namespace strobe::cuda {
namespace {

using sm90::Config;

constexpr KernelSource kForward{"sm90/forward.h", "strobe::sm90::Forward", "strobe::sm90::Config", true};

int64_t rounded_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// Why the copy engine cannot fetch it; empty if it can.
std::string unmapped(const char *argument, const View &view, int64_t columns) {
  if (!view) return {};
  if (reinterpret_cast<uintptr_t>(view.data) % 16) return text(argument, " does not lie on a 16-byte address");
  if (view.stride[3] != 1 && columns > 1) return text(argument, "'s columns do not lie side by side");
  constexpr const char *axes[] = {"batches", "heads", "rows"};
  for (int a = 0; a < 3; a++)
    if (view.stride[a] < 0 || view.stride[a] % 8)
      return text(argument, "'s ", axes[a], " lie ", view.stride[a], " elements apart, no multiple of 16 bytes above 0");
  return {};
}

// box: rows fetched at a time, 64 columns each.
MappedOperand mapped(const View &view, int64_t columns, int64_t rows, int64_t heads, int64_t batch, uint32_t box) {
  MappedOperand operand{};
  operand.head_step = view.stride[1] != 0, operand.batch_step = view.stride[0] != 0;
  if (!devices_missing().empty() || !driver()->cuTensorMapEncodeTiled) return operand; // only planned
  const uint64_t sizes[4] = {uint64_t(columns), uint64_t(rows), uint64_t(operand.head_step ? heads : 1),
                             uint64_t(operand.batch_step ? batch : 1)};
  const uint64_t unused = uint64_t(rounded_up(columns * 2, 16)); // of an axis of size 1
  uint64_t strides[3];                                           // bytes
  for (int a = 0; a < 3; a++) strides[a] = view.stride[2 - a] ? uint64_t(view.stride[2 - a]) * 2 : unused;
  const uint32_t boxes[4] = {64, box, 1, 1}, steps[4] = {1, 1, 1, 1};
  constexpr int kFloat16 = 6, kBfloat16 = 9, kSwizzle128 = 3, kPromote256 = 3;
  check(driver()->cuTensorMapEncodeTiled(reinterpret_cast<CUtensorMap *>(&operand.map), view.dtype == DType::f16 ? kFloat16 : kBfloat16, 4,
                                         view.data, sizes, strides, boxes, steps, 0, kSwizzle128, kPromote256, 0),
        "cuTensorMapEncodeTiled");
  return operand;
}

// Heads whose tiles run together: as many as share the L2 cache; where later tiles take longer, enough to begin with long ones.
int64_t bundle(const Problem &p) {
  constexpr int64_t kCache = 16 << 20, kMost = 16;
  const bool uneven = p.window_left != kUnbounded || p.window_right != kUnbounded || p.varlen || p.blocks.present;
  const int64_t head_bytes = std::max<int64_t>(1, p.seqlen_k * (p.head_dim + p.head_dim_v) * 2), heads = p.batch * p.heads;
  int64_t size = uneven ? kMost : std::clamp<int64_t>(kCache / head_bytes, 1, kMost);
  while (size > 1 && heads % size) size--;
  return size;
}

// warpgroups, tile_k, stages, registers (loading, computing), Q in registers
struct Tiles {
  i32 warpgroups, tile_k, stages, registers_load, registers_compute, q_in_registers;
};

Tiles tiles_for(const Problem &p, const Features &f, i32 reference, const Device &device) {
  const int64_t d = p.head_dim, v = p.head_dim_v, widest = std::max(d, v);
  if (f.mask || f.bias || f.softcap || f.blocks) // more registers for what becomes of a score, or for the walk over blocks
    return widest <= 128 ? Tiles{2, 64, 4, 56, 224, 1} : Tiles{2, f.dropout ? 32 : 48, 2, 56, 224, 0};
  if (f.dropout) // in multiples of 32 keys
    return widest <= 64 ? Tiles{2, 128, 4, 40, 232, 1} : widest <= 128 ? Tiles{2, 96, 3, 56, 224, 1} : Tiles{2, 64, 2, 40, 232, 0};
  if (widest <= 64) {
    const bool fills = p.seqlen_q > 128 && tiles(p.seqlen_q, 256) * p.batch * p.heads >= device.sms;
    return fills ? Tiles{4, 64, 5, 32, 112, 0} : Tiles{2, 128, 4, 40, 232, 1};
  }
  if (widest <= 128) return {2, 128, 3, 40, 232, reference == sm90::kFixed};
  if (widest <= 192) return v <= 128 ? Tiles{2, 128, 2, 40, 232, 0} : Tiles{2, 96, 2, 40, 232, 0};
  return {2, p.seqlen_k <= 512 ? 64 : 80, 2, 40, 232, 0};
}

Config configuration(const Problem &p, const Device &device) {
  Config c{};
  c.dtype = i32(p.dtype);
  c.head_dim = i32(rounded_up(p.head_dim, 16)), c.head_dim_v = i32(rounded_up(p.head_dim_v, 16));
  c.features = features_of(p);
  const bool fixed = p.dtype == DType::bf16 && !c.features.mask && !c.features.bias;
  c.reference = p.exact_max ? sm90::kExact : fixed ? sm90::kFixed : sm90::kLagging;
  const Tiles t = tiles_for(p, c.features, c.reference, device);
  c.warpgroups = t.warpgroups, c.tile_k = t.tile_k, c.stages = t.stages;
  c.registers_load = t.registers_load, c.registers_compute = t.registers_compute, c.q_in_registers = t.q_in_registers;
  c.blocks_per_sm = 1;
  return c;
}

// A thread block's rate does not depend on how many others run; what counts are whole tiles and whole waves of them.
double predicted_seconds(const Problem &p, const Config &c, const Device &device, int64_t items) {
  constexpr double kFlopsPerSm = 600e12 / 132, kStart = 4e-6; // measured
  const double queries = std::max(1.0, double(p.varlen ? p.total_q : p.batch * p.seqlen_q) * double(p.heads));
  const double keys = visible_scores(p) / queries; // of one query
  const double tile = 2.0 * c.tile_q() * keys * (c.head_dim + c.head_dim_v) / kFlopsPerSm;
  const double waves = double(items) / device.sms;
  return kStart + tile * (waves < 4 ? std::ceil(waves) : waves);
}

class Sm90Engine final : public CudaEngine {
public:
  const char *name() const override { return "cuda-sm90"; }

protected:
  Made program(const Problem &p, Direction direction, const Device &device, Scratch &scratch) const override {
    if (device.cc != 90) return text("for compute capability 9.0; this is ", device.cc / 10, ".", device.cc % 10);
    if (p.dtype != DType::f16 && p.dtype != DType::bf16) return text("computes float16 and bfloat16, not ", strobe::name(p.dtype));
    if (direction == Direction::backward) return "has no backward yet";
    if (!p.q || !p.k || !p.v) return "there are no queries or no keys to fetch";
    for (const std::string &reason : {unmapped("q", p.q, p.head_dim), unmapped("k", p.k, p.head_dim), unmapped("v", p.v, p.head_dim_v)})
      if (!reason.empty()) return reason;
    if (!aligned(p.out, p.head_dim_v)) return "out's rows do not lie on 16-byte addresses";
    if (((p.k.stride[2] == 0 || p.v.stride[2] == 0) && p.seqlen_k > 1) || (p.q.stride[2] == 0 && p.seqlen_q > 1))
      return "a row is broadcast over its sequence";

    const Config config = configuration(p, device);
    if (p.blocks.present && p.blocks.block_q % config.tile_q())
      return text("query blocks of ", p.blocks.block_q, "; its tile is ", config.tile_q());

    Program program;
    program.tile_q = config.tile_q();
    program.tile_k = config.tile_k;
    program.kernel = text("wgmma, ", config.warpgroups, " warpgroups, ",
                          config.reference == sm90::kFixed     ? "fixed reference"
                          : config.reference == sm90::kLagging ? "lagging maximum"
                                                               : "running maximum");
    HopperForwardArguments a{};
    a.a = forward_arguments(p);
    const int64_t rows_q = p.varlen ? p.total_q : p.seqlen_q, rows_k = p.varlen ? p.total_k : p.seqlen_k;
    const int64_t heads = p.batch * p.heads, tiles_of_head = tiles(p.seqlen_q, config.tile_q()), items = tiles_of_head * heads;
    if (items > int64_t{1} << 30) return text(items, " tiles of queries; accepted are 2^30");
    a.items = uint32_t(items), a.tiles = i32(tiles_of_head);
    a.a.bundle = i32(bundle(p));
    a.bundle_items = Divisor::make(uint32_t(std::max<int64_t>(1, a.a.bundle * tiles_of_head)));
    a.bundle = Divisor::make(uint32_t(a.a.bundle));
    a.heads = Divisor::make(uint32_t(std::max<int64_t>(1, p.heads))), a.group = Divisor::make(uint32_t(std::max<int64_t>(1, p.group())));
    a.q = mapped(p.q, p.head_dim, rows_q, p.heads, p.batch, 64);
    a.k = mapped(p.k, p.head_dim, rows_k, p.heads_kv, p.batch, uint32_t(config.tile_k));
    a.v = mapped(p.v, p.head_dim_v, rows_k, p.heads_kv, p.batch, uint32_t(config.tile_k));
    const int64_t grid = std::min<int64_t>(items, device.sms * config.blocks_per_sm);
    if (grid < items) a.tickets = scratch.take<TicketCounter>(1);
    program.steps.push_back(Launch(kForward, config, grid, config.threads(), config.shared_bytes(), a));
    program.predicted_seconds = predicted_seconds(p, config, device, items);
    return program;
  }
};

} // namespace

const CudaEngine &sm90_engine() {
  static const Sm90Engine engine;
  return engine;
}

} // namespace strobe::cuda
