// The kernels of kernels/mma: FP16 and BF16 on tensor cores by mma.sync, from sm_80 (FP16: sm_75).
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <span>

#include "../../../kernels/mma/arguments.h"
#include "../../../kernels/mma/config.h"
#include "attention/text.h"
#include "attention/work.h"
#include "cuda/families/families.h"
#include "cuda/families/mma_backward.h"
#include "cuda/program/arguments.h"
#include "cuda/program/part.h"
#include "cuda/program/passes.h"
#include "cuda/program/prediction.h"
#include "cuda/program/tiles.h"

namespace strobe::cuda {

template <class V> void each_pointer(const mma::InvariantForwardArguments &a, V &visit) {
  each_pointer(static_cast<const ForwardArguments &>(a), visit);
  visit(a.merged_out), visit(a.merged_lse);
}

namespace {

using mma::Config;

constexpr KernelSource kForward{"mma/forward/forward.h", "strobe::mma::Forward", "strobe::mma::Config"};
constexpr KernelSource kDecode{"mma/decode/decode.h", "strobe::mma::Decode", "strobe::mma::Config"};

// Which features a tile has registers for.
enum Load { plain, sparse, sparse_band, features, anything };

struct Suits {
  int32_t least_cc = 75, most_cc = 1000;
  int64_t least_queries = 0; // under a causal mask or a window: tiles of more queries waste work below this
  int32_t least_dim = 0;
};
struct ForwardTile {
  int32_t most_dim, q, k, warps, stages;
  int32_t blocks_per_sm; // how many blocks an SM shall hold; limits a thread's registers
  int32_t column_warps;  // how many warps divide the columns of the same queries
  Load most_load;
  Suits suits{};
};

// From the fastest tile to the smallest, measured on an H200; no tile spills. A warp owns q / warps rows. A warp with 32 rows reads K and V
// from shared memory half as often as one with 16, but leaves no registers for features, or for copies by element.
// clang-format off
constexpr ForwardTile kForwardTiles[] = {
    // up                   stages,   warps that divide
    // to D  q,   k, warps   |  per SM   columns; the most features, what it suits
    { 64, 128,  96,   4,   2,   2,   1, plain, {.least_cc = 80, .most_cc = 99, .least_queries = 2048}},
    { 64, 128,  64,   4,   2,   2,   1, sparse_band, {.least_cc = 80, .least_queries = 2048}},
    {128, 128,  64,   4,   2,   2,   1, plain, {.least_cc = 90, .most_cc = 90}}, // sm_90 keeps the loop's state in uniform registers
    {128, 128,  64,   4,   2,   2,   1, sparse, {.least_cc = 90, .most_cc = 90, .least_dim = 97}},
    {128, 128,  32,   4,   2,   2,   1, plain, {.least_cc = 80, .most_cc = 89}},
    {128, 128,  32,   4,   2,   2,   1, sparse_band, {.least_cc = 90, .most_cc = 90}},
    {192, 128, 128,   8,   1,   1,   1, plain, {.least_cc = 90, .most_cc = 90, .least_queries = 4096}},
    {256, 128, 128,   8,   1,   1,   1, plain, {.least_cc = 90, .most_cc = 90, .least_queries = 4096, .least_dim = 225}},
    {128,  64,  64,   4,   1,   2,   1, features, {.least_cc = 100}},
    {128,  64,  64,   4,   2,   2,   1, features},
    {128,  64,  64,   4,   1,   2,   1, features},
    {192,  64,  64,   4,   1,   2,   1, sparse_band, {.least_cc = 90, .most_cc = 90}},
    {256,  64,  64,   4,   1,   2,   1, plain, {.least_cc = 90, .most_cc = 90}},
    {128,  64,  32,   4,   2,   2,   1, anything},
    {256,  64,  32,   4,   1,   2,   1, anything},
    {256,  32,  32,   2,   1,   2,   1, anything},
    {256,  16,  32,   1,   1,   2,   1, anything},
    {576,  64,  32,   8,   2,   1,   2, anything, {.least_dim = kWide}}, // guessed, as are the following rows
    {576,  64,  32,   8,   1,   1,   2, anything, {.least_dim = kWide}},
    {576,  32,  32,   4,   1,   1,   2, anything, {.least_dim = kWide}},
    {576,  16,  32,   2,   1,   1,   2, anything, {.least_dim = kWide}},
};
// clang-format on

struct DecodeTile {
  int32_t most_rows; // query heads of a group times queries
  int32_t most_dim, q, k, warps, stages, blocks_per_sm;
  int32_t column_warps = 1; // more than 1 for wide heads
  int32_t most_queries = 0; // up to this many queries the tile serves any number of heads
};
constexpr DecodeTile kDecodeTiles[] = {
    {.most_rows = 16, .most_dim = 128, .q = 16, .k = 16, .warps = 4, .stages = 3, .blocks_per_sm = 2},
    {.most_rows = 16, .most_dim = 256, .q = 16, .k = 16, .warps = 4, .stages = 3, .blocks_per_sm = 1},
    {.most_rows = 16, .most_dim = 256, .q = 16, .k = 16, .warps = 2, .stages = 2, .blocks_per_sm = 1},
    {.most_rows = 64, .most_dim = 128, .q = 32, .k = 16, .warps = 4, .stages = 3, .blocks_per_sm = 1},
    {.most_rows = 64, .most_dim = 256, .q = 16, .k = 16, .warps = 4, .stages = 2, .blocks_per_sm = 1},
    {.most_rows = 16, .most_dim = 576, .q = 16, .k = 16, .warps = 4, .stages = 3, .blocks_per_sm = 1, .column_warps = 2},
    {.most_rows = 16, .most_dim = 576, .q = 16, .k = 16, .warps = 4, .stages = 2, .blocks_per_sm = 1, .column_warps = 2},
    {.most_rows = 64, .most_dim = 576, .q = 32, .k = 16, .warps = 8, .stages = 2, .blocks_per_sm = 1, .column_warps = 4, .most_queries = 8},
    {.most_rows = 64, .most_dim = 576, .q = 16, .k = 16, .warps = 4, .stages = 2, .blocks_per_sm = 1, .column_warps = 2, .most_queries = 8},
    {.most_rows = 64, .most_dim = 576, .q = 16, .k = 16, .warps = 2, .stages = 2, .blocks_per_sm = 1, .column_warps = 2, .most_queries = 8},
};

constexpr int32_t kAnyRows = std::numeric_limits<int32_t>::max() - 15; // leaves room for the number of a tile's last row
// For quantised K and V. Each lane of a warp holds the scales of one key. Q stays in registers, with its columns reordered.
constexpr DecodeTile kQuantisedTiles[] = {
    {.most_rows = kAnyRows, .most_dim = 128, .q = 16, .k = 32, .warps = 4, .stages = 3, .blocks_per_sm = 2},
    {.most_rows = kAnyRows, .most_dim = 128, .q = 16, .k = 16, .warps = 4, .stages = 4, .blocks_per_sm = 2}, // see lacks_registers()
    {.most_rows = kAnyRows, .most_dim = 128, .q = 16, .k = 16, .warps = 4, .stages = 3, .blocks_per_sm = 1},
};

// The Config except for the tile.
Config config_for(const Problem &p) {
  const bool in_quarters = p.quantised_as == DType::i4x2; // whether a quarter of a row of K consists of whole words
  Config c = begin_config<Config>(p, wide(p) || in_quarters ? 64 : 32);
  c.aligned = aligned_keys(p) && aligned(p.q, p.head_dim) && aligned(p.out, p.head_dim_v);
  c.exact_max = p.exact_max;
  c.invariant = p.invariant;
  c.features = features_of(p);
  return c;
}

template <class Tile> Config with(Config c, const Tile &tile) {
  c.tile_q = tile.q, c.tile_k = tile.k, c.warps = tile.warps, c.stages = tile.stages, c.blocks_per_sm = tile.blocks_per_sm;
  c.column_warps = tile.column_warps;
  return c;
}

Load load_of(const Config &c) {
  const Features &f = c.features;
  const int many = 2 * !!f.function + !!f.bias + f.mask + !!f.alibi + f.dropout + f.scaled;
  if (many > 2) return anything;
  if (many || !c.aligned) return features;
  if (f.part || f.pages) return sparse_band; // the walk, or the rows' addresses, take registers too
  return !f.blocks ? plain : f.band ? sparse_band : sparse;
}

// The widest head in which one warp has registers for O and for merging chunks, as the option `invariant` needs. In wider heads two warps
// divide O's columns, as in heads beyond kMostUsualDim.
int32_t most_dim_of_one_warp(const Device &device) { return device.cc < 100 ? 192 : 96; }

// Invariant: how many scores are compared with the running maximum at once, in every query tile and with every dtype, option and stride.
constexpr int32_t kInvariantKeys = 32;

// The first tile that fits; if a tile is requested, the nearest to it.
std::optional<Config> choose(const Problem &p, const Device &device) {
  const Config any = config_for(p);
  const int32_t dim = std::max(any.head_dim, any.head_dim_v);
  const Load load = p.invariant ? anything : load_of(any); // merging chunks takes registers too
  const ForwardTile *best = cheapest(kForwardTiles, [&](const ForwardTile &tile) {
    const bool wide_enough = p.invariant && dim > most_dim_of_one_warp(device) ? tile.column_warps > 1 : dim >= tile.suits.least_dim;
    const bool suits = dim <= tile.most_dim && wide_enough && load <= tile.most_load && device.cc >= tile.suits.least_cc &&
                       device.cc <= tile.suits.most_cc && (!any.features.band || p.seqlen_q >= tile.suits.least_queries);
    const bool fits = with(any, tile).forward_shared_bytes() <= device.shared_per_block && divides_blocks(p, tile.q) &&
                      (!p.invariant || tile.k == kInvariantKeys);
    return suits && fits ? distance(p, tile.q, tile.k) : kCannotRun;
  });
  return best ? std::optional(with(any, *best)) : std::nullopt;
}

// Quantised keys with options lack registers in two cases: where P in FP16 becomes two terms, and where K in FP8 is searched for NaN
// because the GPU does not convert FP8.
bool lacks_registers(const Problem &p, const Device &device) {
  return p.dtype == DType::f16 || (p.quantised_as == DType::e4m3 && device.cc < 90);
}

// Decode packs the query heads of a group into the rows of a tile, if there are few rows or keys are quantised. Calls with a block mask are
// left out, because heads may differ in it.
std::optional<Config> choose_decode(const Problem &p, const Device &device) {
  if (p.blocks.present || p.invariant) return std::nullopt;
  const int64_t rows = p.seqlen_q * p.group();
  const Config any = config_for(p);
  const std::span<const DecodeTile> tiles = p.quantised() ? std::span<const DecodeTile>(kQuantisedTiles) : kDecodeTiles;
  const DecodeTile *best = cheapest(tiles, [&](const DecodeTile &tile) {
    const int32_t dim = std::max(any.head_dim, any.head_dim_v);
    // The addresses of paged FP8 rows take more registers.
    const bool fp8 = p.quantised_as == DType::e4m3 || p.quantised_as == DType::e5m2;
    const bool crowded = load_of(any) >= features || (p.page_size && p.dtype == DType::f16 && fp8);
    const bool registers = !p.quantised() || dim <= 64 || tile.k <= 16 || !crowded || !lacks_registers(p, device);
    const bool suits = registers && dim <= tile.most_dim && wide(p) == (tile.column_warps > 1) &&
                       (rows <= tile.most_rows || p.seqlen_q <= tile.most_queries);
    return suits && with(any, tile).decode_shared_bytes() <= device.shared_per_block ? 0 : kCannotRun;
  });
  return best ? std::optional(with(any, *best)) : std::nullopt;
}

// Dense FLOP per clock and SM of mma.sync with FP32 sums.
double rate(const Device &device) {
  switch (device.cc) {
  case 80:
  case 90:
  case 100:
  case 103:
    return 2048;
  default:
    return device.cc >= 87 && device.cc < 89 ? 1024 : 512;
  }
}

// Measured on an H200. At its end a decode block merges its warps' rows, one row after another.
constexpr double kShareOfPeak = 0.7, kWideShare = 0.3 /* guessed */, kLaunchSeconds = 4e-6, kBlockSeconds = 6e-6,
                 kDecodeBlockSeconds = 2.5e-6, kMergedRowSeconds = 1e-7,
                 kExposed = 0.4, // fraction of a block's end that takes time (fitted); the rest overlaps with the reads of other blocks
    kReread = 0.4,               // fraction of the reading time for each further tile of rows, which finds the keys in the L2 cache
    kQuantisedClocks = 0.06;     // clocks in which an SM converts one stored number for a tile of rows

// How many tiles of a decode have rows. Of each packed sequence, the last tile may be partly empty.
double row_tiles(const Problem &p, const Config &c) {
  const int64_t of_longest = p.batch * tiles(p.seqlen_q * p.group(), c.tile_q);
  const int64_t of_all = p.varlen ? std::min(of_longest, p.total_q * p.group() / c.tile_q + p.batch) : of_longest;
  return double(p.heads_kv * of_all);
}

// The time to convert keys: each tile of rows converts the keys that it sees.
double converting_seconds(const Problem &p, const Config &c, const Device &device) {
  const double keys = visible_scores(p) / std::max(1.0, double(query_rows(p)));
  return row_tiles(p, c) * keys * (c.head_dim + c.head_dim_v) * kQuantisedClocks / (device.clock_hz * device.sms);
}

double predicted_seconds(const Problem &p, const Config &c, const Device &device, bool decode, int64_t resident, int64_t splits) {
  const double flop = 2.0 * (c.head_dim + c.head_dim_v), of_sm = (wide(p) ? kWideShare : kShareOfPeak) * rate(device) * device.clock_hz;
  double computing = 0, ends = 0, reading = reading_seconds(p, device);
  if (decode) {
    const int64_t rows = p.seqlen_q * p.group();
    const double blocks = (p.quantised() ? row_tiles(p, c) : double(p.batch * p.heads_kv * tiles(rows, c.tile_q))) * double(splits);
    const double used = wide(p) ? double(rows) / double(tiles(rows, c.tile_q) * c.tile_q) : std::min(1.0, double(p.seqlen_q) / 16);
    computing = p.quantised() ? converting_seconds(p, c, device) : visible_scores(p) / used * flop / (of_sm * device.sms);
    ends = (kDecodeBlockSeconds + kMergedRowSeconds * double(std::min<int64_t>(rows, c.tile_q))) * std::max(1.0, blocks / device.sms);
    if (!p.quantised() && !wide(p)) ends *= kExposed, reading *= 1 + kReread * double(tiles(rows, c.tile_q) - 1);
  } else {
    computing = seconds(walks(p, Operation::forward, c.tile_q, c.tile_k), device, resident, of_sm / flop, kBlockSeconds, splits);
  }
  return kLaunchSeconds + ends + std::max(computing, reading) + (splits > 1 ? combining_seconds(p) : 0);
}

// How many splits quantised keys are divided into. A block converts keys more slowly than memory delivers them, so there are enough splits
// for the blocks to fill all slots, in rounds.
int32_t quantised_splits(const Problem &p, const Config &c, const Device &device, int64_t slots) {
  constexpr double kBytesPerSecond = 3e12; // at which partial results are written and read
  const double whole = std::max(reading_seconds(p, device), converting_seconds(p, c, device));
  const double merging = 8.0 * double(p.head_dim_v) * query_rows(p) / kBytesPerSecond;
  int32_t best = 1;
  double least = std::numeric_limits<double>::infinity();
  for (int32_t splits = 1; splits <= std::max<int64_t>(1, most_splits(p)); ++splits) {
    const double blocks = std::max(1.0, row_tiles(p, c)) * splits;
    const double of_block = whole * double(slots) / blocks + kDecodeBlockSeconds;
    const double seconds = std::ceil(blocks / double(slots)) * of_block + (splits > 1 ? combining_seconds(p) + splits * merging : 0);
    if (seconds < least) least = seconds, best = splits;
  }
  return best;
}

// Uneven shares are made up to this product of queries and heads of a group. Beyond it there are enough blocks.
constexpr int64_t kMostSharedRows = 64;

class MmaEngine final : public CudaEngine {
public:
  const char *name() const override { return "cuda-mma"; }

protected:
  bool computes_parts() const override { return true; }
  bool reads_pages() const override { return true; }
  bool reads_quantised() const override { return true; }
  Made program(const Problem &p, Operation operation, const Device &device, Scratch &scratch) const override {
    if (p.dtype != DType::f16 && p.dtype != DType::bf16) return text("takes float16 and bfloat16, not ", strobe::name(p.dtype));
    if (device.cc < 75) return text(device.name, " has no mma.sync of this shape: sm_75 or newer is needed, this is sm_", device.cc);
    if (device.cc < 80 && p.dtype == DType::bf16)
      return text(device.name, " multiplies no bfloat16: sm_80 or newer is needed, this is sm_", device.cc);
    if (std::string reason = outsized_scale(p); !reason.empty()) return reason;
    if (p.invariant && p.bias && operation == Operation::backward) return kNoInvariantBias;
    if (p.invariant && operation == Operation::forward)
      if (std::string reason = cuts_blocks(p, kInvariantKeys); !reason.empty()) return reason;
    if (operation == Operation::backward) return mma_backward(p, device, scratch);
    return forward(p, device, scratch);
  }

private:
  static Made forward(const Problem &p, const Device &device, Scratch &scratch) {
    const std::optional<Config> packed = p.part ? std::nullopt : choose_decode(p, device), chosen = packed ? packed : choose(p, device);
    if (p.quantised())
      if (std::string reason = against_quantised(p, packed, device); !reason.empty()) return reason;
    if (!chosen) return no_tile(device);
    const bool decode = packed.has_value();
    Config c = *chosen;
    mma::InvariantForwardArguments invariant{};
    ForwardArguments &a = invariant;
    a = forward_arguments(p);
    const int32_t shared = decode ? c.decode_shared_bytes() : c.forward_shared_bytes();
    const int64_t ctas =
        decode ? p.batch * p.heads_kv * tiles(p.seqlen_q * p.group(), c.tile_q) : p.batch * p.heads * query_tiles(p, c.tile_q);
    const int64_t per_sm = decode ? 1 : resident(device, shared, c.blocks_per_sm); // decode: one block per SM leaves fewer splits to merge
    const int64_t chunks = tiles(p.seqlen_k, Config::chunk());
    // Invariant: chunks are merged by the thread block that walks over them; if blocks are few, by the pass that combines splits.
    a.splits = p.invariant     ? tiles(p.seqlen_q, c.tile_q) == 1 && ctas < device.sms * per_sm ? i32(std::max<int64_t>(1, chunks)) : 1
               : p.part        ? 1
               : p.quantised() ? quantised_splits(p, c, device, device.sms * resident(device, shared, c.blocks_per_sm))
                               : splits_to_fill(device.sms * per_sm, ctas, most_splits(p));
    if (!p.invariant && !decode &&
        predicted_seconds(p, c, device, false, per_sm, 1) < predicted_seconds(p, c, device, false, per_sm, a.splits))
      a.splits = 1;
    a.bundle = pairs_in_half_the_cache(p, device);
    const int64_t blocks_of_share = ctas / std::max<int64_t>(1, p.batch);
    const bool spills = p.quantised() && c.tile_k > 16 && lacks_registers(p, device);
    const bool few = decode && p.seqlen_q * p.group() <= kMostSharedRows && !spills;
    const UnevenShares uneven =
        few ? take_uneven_shares(a, p, scratch, device.sms * resident(device, shared, c.blocks_per_sm), blocks_of_share) : UnevenShares{};
    if (uneven.most > 0)
      c.uneven = 1, a.splits = 1;
    else
      take_splits(a, p, scratch);
    if (p.invariant && a.splits == 1 && chunks > 1) {
      invariant.merged_out = scratch.take<float>(a.in.rows() * p.head_dim_v);
      invariant.merged_lse = scratch.take<float>(a.in.rows());
    }
    const int64_t blocks = uneven.most > 0 ? uneven.most * blocks_of_share : ctas * a.splits;
    Program program;
    program.overlap = true;
    describe(program, p, c, decode);
    program.steps.push_back(p.invariant ? Launch(kForward, c, blocks, c.threads(), shared, invariant)
                                        : with_scales(p, decode ? kDecode : kForward, c, blocks, c.threads(), shared, a));
    combine_splits(program, p, a);
    program.predicted_seconds = predicted_seconds(p, c, device, decode, per_sm, std::max<int64_t>(a.splits, uneven.likely));
    if (uneven.likely == 1) program.predicted_seconds += combining_seconds(p); // the pass is launched, but has nothing to do
    return program;
  }

  // The reason why this engine leaves quantised keys to cuda-simt; empty if it computes them.
  static std::string against_quantised(const Problem &p, const std::optional<Config> &packed, const Device &device) {
    if (device.cc < 80) return text("multiplies quantised v as bfloat16: sm_80 or newer is needed, this is sm_", device.cc);
    if (p.scaled_by_channel()) return "k has scales of columns: it takes those of rows alone";
    if (p.invariant) return "has no invariant forward of quantised keys";
    if (p.blocks.present) return "quantised keys with a block mask";
    if (std::max(p.head_dim, p.head_dim_v) > 128) return "quantised keys of head dimensions beyond 128";
    if (!packed) return text("quantised keys of more rows than 2^31, or no tile that fits ", device.name, "'s shared memory");
    return packed->aligned ? "" : "quantised keys whose rows, in bytes, are no multiples of 16, or do not lie on such addresses";
  }

  static void describe(Program &program, const Problem &p, const Config &c, bool decode) {
    program.kernel = text(strobe::name(p.dtype), " mma.sync, ", c.warps, " warps, ", c.stages, " stages, head dimensions ", c.head_dim,
                          " and ", c.head_dim_v, decode ? ", query heads packed" : "");
    describe_tile(program, p, c.tile_q, c.tile_k, c.aligned);
    describe_width(program, p);
  }
};

} // namespace

const CudaEngine &mma_engine() {
  static const MmaEngine engine;
  return engine;
}

} // namespace strobe::cuda
