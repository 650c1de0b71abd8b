// The Hopper family: its choice of configuration, maps and launches.
#include "../../../kernels/attention/packed_tiles.h"
#include "../../../kernels/sm90/arguments.h"
#include "../../../kernels/sm90/forward/config.h"
#include <algorithm>
#include <optional>

#include "attention/text.h"
#include "attention/work.h"
#include "cuda/driver/driver.h"
#include "cuda/families/families.h"
#include "cuda/families/sm90_backward.h"
#include "cuda/families/sm90_mask.h"
#include "cuda/families/sm90_steps.h"
#include "cuda/families/sm90_tiles.h"
#include "cuda/program/arguments.h"
#include "cuda/program/part.h"
#include "cuda/program/passes.h"
#include "cuda/program/prediction.h"
#include "cuda/program/tiles.h"

namespace strobe::cuda {

template <class V> void each_pointer(const HopperForwardArguments &a, V &visit) {
  each_pointer(static_cast<const ForwardArguments &>(a), visit);
  for (const MappedOperand *x : {&a.tma_q, &a.tma_k, &a.tma_v, &a.tma_bias}) visit(x->map);
  visit(a.tickets), visit(a.mask_bits.data), visit(a.walked);
}

namespace {

using sm90::Config;

constexpr KernelSource kForward{"sm90/forward/forward.h", "strobe::sm90::Forward", "strobe::sm90::Config", true};

// How many of `heads` heads run their tiles together: as many as the L2 cache holds. If some tiles take longer, more heads run together, so
// that more of the long tiles start first.
int64_t heads_in_bundle(const Problem &p, const Device &device, int64_t heads) {
  const bool some_longer = p.window_left != kUnbounded || p.window_right != kUnbounded || p.varlen;
  const int64_t head_bytes = std::max<int64_t>(1, p.seqlen_k * (p.head_dim + p.head_dim_v) * 2);
  const int64_t size =
      some_longer ? std::clamp<int64_t>(device.l2 / head_bytes, 16, 64) : std::clamp<int64_t>(device.l2 / 3 / head_bytes, 1, 16);
  return p.wishes.bundle ? std::clamp<int64_t>(p.wishes.bundle, 1, std::max<int64_t>(1, heads)) : even_bundle(heads, size);
}

constexpr int32_t kRowsOfPage = 16; // how many rows of a page one copy loads; key tiles begin at multiples of this

// The reason why an invariant call is refused: a query's bits would depend on the queries beside it. Empty if the call is accepted.
std::string against_invariant(const Problem &p, const Config &c) {
  if (p.bias) return "is not invariant with a bias: a tile that is computed again takes other roundings";
  if (p.alibi_slopes) return "is not invariant with ALiBi: it is added from where a tile's own queries stand";
  if (c.features.function == kCapped && c.reference != sm90::kExact)
    return text("is not invariant with ", score_in_words(p), ": whether it is approximated is said of 16 queries at once");
  return cuts_blocks(p, c.tile_k);
}

// The reason why the engine does not support this part of a larger problem; empty if it does.
std::string against_part(const Problem &p) {
  if (!p.part) return {};
  for (const auto &[there, option] : {std::pair{bool(p.mask), "a mask"}, {bool(p.bias), "a bias"}, {p.blocks.present, "block sparsity"}})
    if (there) return text("takes parts of larger problems without ", option);
  if (p.dropout > 0 && !begins_aligned(p)) return "takes dropout in parts whose ranges begin at multiples of 16";
  return {};
}

constexpr double kFlopsPerSm = 5e12; // per second, measured on an H200 with whole tiles

// The seconds that a query tile takes if it has an SM to itself.
double tile_seconds(const Problem &p, const Config &c) {
  const double queries = std::max(1.0, double(p.varlen ? p.total_q : p.batch * p.seqlen_q) * double(p.heads));
  const double keys = visible_scores(p) / queries; // keys per query
  return 2.0 * c.tile_q() * keys * (c.head_dim + c.head_dim_v) / kFlopsPerSm;
}

// The number of splits of the keys, if query tiles leave SMs idle: as many as fill the GPU once. It is 1 if combining the splits would take
// more time than they save.
int32_t splits_for_idle_sms(const Problem &p, const Config &c, const Device &device, int64_t items) {
  const int64_t most = std::min(device.sms * c.blocks_per_sm / std::max<int64_t>(1, items), p.seqlen_k / kLeastKeysOfSplit);
  return most > 1 && tile_seconds(p, c) * (1 - 1 / double(most)) > combining_seconds(p) ? int32_t(most) : 1;
}

// Invariant: chunks of keys are merged by the thread block that walks over them; if there are fewer query tiles than SMs, by the pass that
// combines splits.
int32_t splits_by_chunk(const Problem &p, const Config &c, const Device &device, int64_t items) {
  return c.chunked() && items < device.sms * c.blocks_per_sm ? int32_t(std::max<int64_t>(1, tiles(p.seqlen_k, c.chunk()))) : 1;
}

// The reason why the engine supports neither forward nor backward of this call; empty if it may support one of them.
std::string against_call(const Problem &p, const Device &device) {
  if (device.cc != 90) return text("for compute capability 9.0; this is ", device.cc / 10, ".", device.cc % 10);
  if (driver() && !driver()->cuTensorMapEncodeTiled) return "the driver has no cuTensorMapEncodeTiled; CUDA 12.0's has";
  if (p.dtype != DType::f16 && p.dtype != DType::bf16) return text("computes float16 and bfloat16, not ", strobe::name(p.dtype));
  if (std::string reason = outsized_scale(p); !reason.empty()) return reason;
  if (wide(p)) return text("takes head dimensions up to ", kMostUsualDim, ", not ", std::max(p.head_dim, p.head_dim_v));
  return against_part(p);
}

// The reason why the forward cannot read or write these tensors; empty if it can.
std::string against_tensors(const Problem &p) {
  if (!p.q || !p.k || !p.v || !p.seqlen_k || (p.page_size && !p.pages)) return "there are no queries or no keys to fetch";
  if (std::string reason = unmapped_inputs(p); !reason.empty()) return reason;
  if (!aligned(p.out, p.head_dim_v)) return "out's rows do not lie on 16-byte addresses";
  if (p.page_size % kRowsOfPage) return text("reads pages of multiples of ", kRowsOfPage, " keys, not of ", p.page_size);
  return broadcast_row({&p.q}, {&p.k, &p.v}, p);
}

// The work that is divided among thread blocks.
struct Work {
  HeadsOfTile rows;
  int64_t pieces;     // groups of query heads that share a tile, in one sequence
  int64_t heads;      // such groups in all sequences; or in one, if tiles are numbered through all sequences
  int64_t tiles;      // query tiles per group of heads
  int64_t bundle;     // groups of heads whose tiles run together
  int32_t splits = 1; // splits of each tile's keys
  int64_t items = 0;  // tiles times splits, counted as if the last bundle were full
};

// Also sets the members of the Config that depend on the amount of work.
Work share_out(Config &c, const Problem &p, const Device &device) {
  const HeadsOfTile rows = heads_of_tile(p, c);
  const int64_t queries = rows.queries * c.warpgroups, pieces = p.heads_kv * rows.pieces;
  const bool numbered = numbers_tiles(p);
  Work work{.rows = rows,
            .pieces = pieces,
            .heads = numbered ? pieces : p.batch * pieces,
            .tiles = numbered ? count_packed_tiles(p.total_q, p.batch, queries) : query_tiles(p, queries),
            .bundle = heads_in_bundle(p, device, numbered ? pieces : p.batch * pieces)};
  c.packed = rows.heads > 1;
  const int64_t all_tiles = work.tiles * work.heads;
  if (!p.part) work.splits = p.invariant ? splits_by_chunk(p, c, device, all_tiles) : splits_for_idle_sms(p, c, device, all_tiles);
  c.split = work.splits > 1;
  work.items = tiles(work.heads, work.bundle) * work.bundle * work.tiles * work.splits;
  return work;
}

double predicted_seconds(const Problem &p, const Config &c, const Device &device, const Work &work) {
  constexpr double kStart = 5.2e-6, kBlockSeconds = 2.5e-6; // measured on an H200: per call, and per thread block
  Problem of_pieces = p;
  of_pieces.heads = work.pieces;
  const Walks w = walks(of_pieces, Operation::forward, work.rows.queries * c.warpgroups, c.tile_k);
  const double flop = 2.0 * (c.head_dim + c.head_dim_v) * 64 / double(work.rows.queries);
  double computing = seconds(w, device, c.blocks_per_sm, kFlopsPerSm / flop, kBlockSeconds, work.splits);
  if (p.quantised()) { // each tile of queries has the keys that it walks over dequantised
    const double keys = w.scores() / double(work.rows.queries * c.warpgroups);
    computing = std::max(computing, kBlockSeconds + keys * clocks_of_stored_key(c) / (device.clock_hz * device.sms));
  }
  return kStart + std::max(computing, kBlockSeconds + reading_seconds(p, device)) + (work.splits > 1 ? combining_seconds(p) : 0);
}

void order_items(HopperForwardArguments &a, const Problem &p, const Work &work) {
  a.splits = work.splits, a.items = uint32_t(work.items);
  order_tiles(a, work.tiles, work.bundle);
  a.splits_divisor = Divisor::make(uint32_t(work.splits));
  a.heads_divisor = Divisor::make(uint32_t(std::max<int64_t>(1, work.pieces)));
  a.group_divisor = Divisor::make(uint32_t(std::max<int64_t>(1, p.group())));
}

void map_operands(HopperForwardArguments &a, const Problem &p, const Config &c, const Work &work) {
  a.tma_q = mapped_queries(p, p.q, p.head_dim, i32(work.rows.queries), i32(work.rows.heads));
  const int32_t keys = p.page_size ? kRowsOfPage : c.tile_k;
  a.tma_k = mapped_keys(p, p.k, p.stored(p.head_dim), keys), a.tma_v = mapped_keys(p, p.v, p.stored(p.head_dim_v), keys);
  if (!c.bias_by_tma) return;
  map_bias(a, p, 64, c.bias_bytes(), c.tile_k);
  a.bias_rows_step = p.bias.stride[2] != 0;
}

// The arguments, except for addresses in the workspace. The members for packed heads are used only if heads are packed.
PackedForwardArguments hopper_arguments(const Problem &p, const Config &c, const Work &work) {
  PackedForwardArguments a{};
  static_cast<ForwardArguments &>(a) = forward_arguments(p);
  order_items(a, p, work);
  map_operands(a, p, c, work);
  if (c.packed) {
    a.packed = i32(work.rows.heads), a.queries = Divisor::make(uint32_t(work.rows.queries));
    a.pieces = Divisor::make(uint32_t(work.rows.pieces));
  }
  return a;
}

void push_launches(Program &program, const Problem &p, const Config &c, PackedForwardArguments &a, const Device &device, Scratch &scratch) {
  const int64_t grid = std::min<int64_t>(a.items, device.sms * c.blocks_per_sm);
  if (grid < a.items) a.tickets = scratch.take<TicketCounter>(1);
  take_splits(a, p, scratch);
  if (c.walks_chunks() && p.seqlen_k > c.chunk()) a.walked = scratch.take<float>(grid * c.warpgroups * 2 * c.walked_floats());
  if (p.mask) program.steps.push_back(pack_mask(p, a.in, MaskOrder::by_queries, a.mask_bits, scratch));
  const auto launch = [&](const auto &arguments) {
    program.steps.push_back(with_scales(p, kForward, c, grid, c.threads(), c.shared_bytes(), arguments));
  };
  c.packed ? launch(a) : launch(static_cast<const HopperForwardArguments &>(a));
  combine_splits(program, p, a);
}

const char *reference_name(const Config &c) {
  switch (c.reference) {
  case sm90::kFixed:
    return "fixed reference";
  case sm90::kFixedByRow:
    return "reference fixed row by row";
  case sm90::kLagging:
    return "lagging maximum";
  default:
    return "running maximum";
  }
}

class Sm90Engine final : public CudaEngine {
public:
  const char *name() const override { return "cuda-sm90"; }

protected:
  bool computes_parts() const override { return true; }
  bool reads_pages() const override { return true; }
  bool reads_quantised() const override { return true; }
  Made program(const Problem &p, Operation operation, const Device &device, Scratch &scratch) const override {
    if (std::string reason = against_call(p, device); !reason.empty()) return reason;
    return operation == Operation::backward ? sm90_backward(p, device, scratch) : forward(p, device, scratch);
  }

private:
  static Made forward(const Problem &p, const Device &device, Scratch &scratch) {
    if (std::string reason = against_tensors(p); !reason.empty()) return reason;
    const std::optional<Config> chosen = choose_tile(p, device);
    if (!chosen && p.quantised()) return "no tile of quantised keys for these head dimensions, options and blocks";
    if (!chosen) return text("no tile of queries divides the blocks of ", p.blocks.block_q);
    Config config = *chosen;
    if (p.invariant)
      if (std::string reason = against_invariant(p, config); !reason.empty()) return reason;
    const Work work = share_out(config, p, device);
    if (work.items > int64_t{1} << 30) return text(work.items, " tiles of queries; accepted are 2^30");

    PackedForwardArguments a = hopper_arguments(p, config, work);
    Program program;
    program.overlap = program.persistent = true;
    program.kernel = text("wgmma, ", config.warpgroups, " warpgroups, ", reference_name(config));
    if (p.quantised())
      program.kernel += text(", k and v dequantised to ", strobe::name(p.dtype), " by ", i32(Config::kDequantising), " warps");
    if (config.packed) program.kernel += text(", ", work.rows.heads, " query heads packed");
    describe_tile(program, p, config.tile_q(), config.tile_k, true);
    push_launches(program, p, config, a, device, scratch);
    if (p.mask) program.kernel += ", mask packed into bits";
    program.predicted_seconds = predicted_seconds(p, config, device, work);
    return program;
  }
};

} // namespace

const CudaEngine &sm90_engine() {
  static const Sm90Engine engine;
  return engine;
}

} // namespace strobe::cuda
