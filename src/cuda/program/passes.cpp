#include "cuda/program/passes.h"

#include <algorithm>
#include <bit>
#include <span>

#include "../../../kernels/attention/dq_sum.h"
#include "../../../kernels/device/tile_gradient_config.h"
#include "../../../kernels/passes/auxiliary_config.h"
#include "attention/text.h"
#include "attention/work.h"
#include "cuda/program/arguments.h"
#include "cuda/program/part.h"
#include "cuda/program/tiles.h"

namespace strobe::cuda {
namespace {

constexpr KernelSource kCombine{"passes/combine.h", "strobe::passes::Combine", "strobe::passes::CombineConfig"};
constexpr KernelSource kDelta{"passes/delta.h", "strobe::passes::Delta", "strobe::passes::RowsConfig"};
constexpr KernelSource kConvertDq{"passes/dq.h", "strobe::passes::ConvertDq", "strobe::passes::RowsConfig"};
constexpr KernelSource kPadding{"passes/padding.h", "strobe::passes::Padding", "strobe::passes::PaddingConfig"};
constexpr KernelSource kSinkGradient{"passes/sinks.h", "strobe::passes::SinkGradient", "strobe::passes::SinksConfig"};
constexpr KernelSource kSumShares{"passes/shares.h", "strobe::passes::SumShares", "strobe::passes::SharesConfig"};
constexpr KernelSource kSettle{"passes/settle.h", "strobe::passes::Settle", "strobe::TileConfig"};
constexpr KernelSource kAuxiliary{"passes/auxiliary.h", "strobe::passes::Auxiliary", "strobe::passes::AuxiliaryConfig"};
constexpr KernelSource kRowTotals{"passes/auxiliary.h", "strobe::passes::RowTotals", "strobe::passes::AuxiliaryConfig"};
constexpr KernelSource kLargestScore{"passes/auxiliary.h", "strobe::passes::LargestScore", "strobe::passes::LargestConfig"};
constexpr KernelSource kBiasGradient{"passes/bias_gradient.h", "strobe::passes::BiasGradient", "strobe::TileConfig"};

// The Config for FP32 and FP64, whose rows do not depend on tiles and features.
passes::RowsConfig row_after_row(const Problem &p, int32_t head_dim) {
  return {.dtype = int32_t(p.dtype),
          .head_dim = head_dim,
          .tile_q = passes::RowsConfig::kRowTile,
          .aligned = 0,
          .form = passes::kRowAfterRow,
          .partial = p.part.partial,
          .packed = p.varlen,
          .part = 0,
          .sparse = 0,
          .adds = p.accumulate};
}

struct GradientTile {
  int32_t q, k, key_warps, query_warps;
};
constexpr GradientTile kSettleTiles[] = {
    {.q = 32, .k = 64, .key_warps = 4, .query_warps = 1},
    {.q = 32, .k = 32, .key_warps = 2, .query_warps = 1},
    {.q = 16, .k = 16, .key_warps = 1, .query_warps = 1},
};
constexpr GradientTile kBiasTiles[] = {
    {.q = 64, .k = 128, .key_warps = 4, .query_warps = 2}, // fp16 and bf16
    {.q = 64, .k = 64, .key_warps = 2, .query_warps = 2},
    {.q = 32, .k = 32, .key_warps = 2, .query_warps = 1},
    {.q = 16, .k = 16, .key_warps = 1, .query_warps = 1},
};
constexpr GradientTile kBiasTilesTf32[] = {
    {.q = 64, .k = 64, .key_warps = 4, .query_warps = 2},
    {.q = 32, .k = 32, .key_warps = 2, .query_warps = 1},
    {.q = 16, .k = 16, .key_warps = 1, .query_warps = 1},
};

// The first tile that fits.
std::optional<TileConfig> gradient_config(std::span<const GradientTile> tiles, const Problem &p, const Device &device) {
  const bool tf32 = p.dtype == DType::f32;
  TileConfig c = begin_config<TileConfig>(p, tf32 ? 32 : 16);
  c.products = !tf32 ? 0 : p.allow_tf32 ? 1 : 3;
  c.aligned = aligned_backward(p), c.blocks_per_sm = 1, c.features = features_of(p);
  for (const GradientTile &tile : tiles) {
    c.tile_q = tile.q, c.tile_k = tile.k, c.key_warps = tile.key_warps, c.query_warps = tile.query_warps;
    if (c.shared_bytes() <= device.shared_per_block && divides_blocks(p, tile.q, tile.k)) return c;
  }
  return std::nullopt;
}

} // namespace

int32_t splits_to_fill(int64_t slots, int64_t ctas, int64_t most) {
  return ctas > 0 ? int32_t(std::clamp<int64_t>(slots / ctas, 1, std::max<int64_t>(1, most))) : 1;
}

int64_t most_splits(const Problem &p) {
  constexpr int64_t kLeastKeys = 256, kMost = 256;
  return std::min(p.seqlen_k / kLeastKeys, kMost);
}

void take_splits(ForwardArguments &a, const Problem &p, Scratch &scratch) {
  if (a.splits <= 1) return;
  a.partial_out = scratch.take<float>(a.splits * a.in.rows() * p.head_dim_v);
  a.partial_lse = scratch.take<float>(a.splits * a.in.rows());
}

// The most sequences for which shares are made. More sequences fill a GPU by themselves, and a block would read their lengths for too long.
constexpr int64_t kMostUneven = 1024;
// The most times that shares fill the GPU: with more shares, the start and end of each take too long.
constexpr int64_t kMostRounds = 6;
constexpr int64_t kMostReals = int64_t(1) << 24; // FP32 numbers of all shares' results: 64 MiB

UnevenShares take_uneven_shares(ForwardArguments &a, const Problem &p, Scratch &scratch, int64_t slots, int64_t blocks_of_share) {
  const bool uneven = p.seqused_k && !p.varlen && p.window_left >= p.seqlen_k; // within a window all sequences have as many keys
  const int64_t reals = p.heads * p.seqlen_q * p.head_dim_v;                   // per share
  if (!uneven || p.batch < 2 || p.batch > kMostUneven || blocks_of_share <= 0 || reals <= 0 || most_splits(p) < 2) return {};
  const int64_t round = std::max<int64_t>(1, slots / blocks_of_share);
  // The kernel makes at most this many further shares (device/uneven_shares.h): the blocks of more shares would only read the lengths and
  // end.
  const int64_t full = std::max<int64_t>(round, div_up(p.batch * p.seqlen_k, enough_keys_of_share()));
  const int64_t extra = std::min({full, kMostRounds * round, p.batch * most_splits(p), kMostReals / reals - p.batch});
  if (extra < std::min(round, p.batch)) return {};
  a.round_shares = i32(round), a.extra_shares = i32(extra);
  const int64_t shares = p.batch + extra;
  a.partial_out = scratch.take<float>(shares * reals);
  a.partial_lse = scratch.take<float>(shares * p.heads * p.seqlen_q);
  a.share_places = scratch.take<int32_t>(2 * p.batch);
  const int64_t keys = p.batch * p.seqlen_k;
  const int64_t of_round = std::clamp<int64_t>(keys / round, least_keys_of_share(), enough_keys_of_share());
  const int64_t of_share = std::max(of_round, keys / extra);
  return {shares, i32(std::max<int64_t>(1, (p.seqlen_k + of_share / 2) / of_share))};
}

void combine_splits(Program &program, const Problem &p, const ForwardArguments &a) {
  if (a.splits <= 1 && !a.extra_shares) return;
  const bool uneven = a.extra_shares > 0;
  const passes::CombineConfig c{.dtype = int32_t(p.dtype), .invariant = p.invariant, .uneven = uneven};
  program.steps.push_back(Launch(kCombine, c, a.in.rows(), c.threads(), 0, a));
  program.kernel +=
      uneven ? text(", keys shared out evenly, in at most ", p.batch + a.extra_shares, " shares") : text(", keys split in ", a.splits);
}

int32_t dq_sums(const Problem &p, int64_t reals) {
  constexpr int64_t kReals = int64_t(1) << 26;
  if (p.dtype != DType::f32) return 1;
  const int64_t most = p.invariant ? most_dq_sums() : std::clamp<int64_t>(kReals / std::max<int64_t>(reals, 1), 1, most_dq_sums());
  const uint64_t wanted = std::bit_ceil(uint64_t(div_up(std::max<int64_t>(p.seqlen_k, 1), keys_of_dq_sum())));
  return int32_t(std::min(wanted, std::bit_floor(uint64_t(most))));
}

void take_sums(Program &program, BackwardArguments &a, const Problem &p, Scratch &scratch, const BackwardSums &sums) {
  a.delta = scratch.take<char>(2 * a.in.rows() * sums.real_bytes);
  if (p.dq) {
    const int64_t bytes = sums.dq * sums.real_bytes;
    a.dq_sum = reinterpret_cast<float *>(scratch.take<char>(bytes));
    if (sums.zero_dq) program.steps.push_back(Zero{a.dq_sum, uint64_t(bytes)});
  }
  a.deterministic = sums.turns.has_value();
  if (sums.turns) {
    a.ticket = scratch.take<uint32_t>(1 + *sums.turns), a.turns = a.ticket + 1;
    program.steps.push_back(Zero{a.ticket, uint64_t(1 + *sums.turns) * sizeof(uint32_t)});
  }
}

void push(Program &program, const Problem &p, const BackwardArguments &a, BackwardLaunches &&launches) {
  const auto next = [&program](std::optional<Launch> &launch) {
    if (launch) program.steps.push_back(*std::move(launch));
  };
  next(launches.delta), next(launches.settle), next(launches.rows_by_tiles);
  if (p.dq || p.dk || p.dv) next(launches.main);
  next(launches.shares);
  if (p.dq) next(launches.dq);
  if (p.dsinks) {
    const passes::SinksConfig c{.dtype = int32_t(p.dtype)};
    program.steps.push_back(Launch(kSinkGradient, c, p.heads, c.threads(), 0, a));
  }
  next(launches.dbias);
}

Shares take_shares(const BackwardArguments &a, const Problem &p, Scratch &scratch, int64_t shares) {
  SharesArguments sum{.in = a.in, .dk = a.dk, .dv = a.dv, .dk_shares = {}, .dv_shares = {}, .shares = i32(shares), .tiles = 0};
  const int64_t rows = p.varlen ? p.total_k : p.seqlen_k, heads = p.heads_kv * shares;
  const auto take = [&](const Operand &wanted, int64_t width) {
    if (!wanted) return Operand{};
    return Operand{scratch.take<float>((p.varlen ? 1 : p.batch) * heads * rows * width),
                   {p.varlen ? 0 : heads * rows * width, rows * width, width, 1}};
  };
  sum.dk_shares = take(a.dk, p.head_dim), sum.dv_shares = take(a.dv, p.head_dim_v);
  if (!sum.dk && !sum.dv) return {};
  const passes::SharesConfig c{
      .dtype = int32_t(p.dtype), .seqused = features_of(p).seqused, .partial = p.part.partial, .adds = p.accumulate};
  sum.tiles = i32(tiles(p.seqlen_k, c.rows()));
  return {sum.dk_shares, sum.dv_shares, Launch(kSumShares, c, sum.tiles * p.batch * p.heads_kv, c.threads(), 0, sum)};
}

passes::RowsConfig rows_config(const Problem &p, int32_t head_dim, int32_t tile_q, int32_t form, bool aligned) {
  return {.dtype = int32_t(p.dtype),
          .head_dim = head_dim,
          .tile_q = tile_q,
          .aligned = aligned,
          .form = form,
          .partial = p.part.partial,
          .packed = worth_numbering(p, p.total_q, p.seqlen_q, tile_q),
          .part = bool(p.part),
          .sparse = bool(p.part) && p.blocks.present,
          .adds = p.accumulate};
}
static int64_t row_tiles(const Problem &p, const passes::RowsConfig &c) {
  if (c.part) return p.batch * p.heads * query_tiles(p, c.tile_q);
  return c.packed ? p.heads * count_packed_tiles(p.total_q, p.batch, c.tile_q) : c.blocks(p.batch, p.heads, p.seqlen_q);
}
Launch delta(const Problem &p, const passes::RowsConfig &c, const BackwardArguments &a) {
  return Launch(kDelta, c, row_tiles(p, c), c.delta_threads(), 0, a);
}
Launch dq_from_sum(const Problem &p, const passes::RowsConfig &c, const BackwardArguments &a) {
  return Launch(kConvertDq, c, row_tiles(p, c), c.threads(), 0, a);
}
Launch delta(const Problem &p, const BackwardArguments &a) { return delta(p, row_after_row(p, rounded(p.head_dim, 32)), a); }
Launch dq_from_sum(const Problem &p, const BackwardArguments &a, int32_t head_dim) { return dq_from_sum(p, row_after_row(p, head_dim), a); }

bool tensor_cores_settle(const Problem &p, const Device &device) { return gradient_config(kSettleTiles, p, device).has_value(); }

Launch settle(const Problem &p, const Device &device, const BackwardArguments &a) {
  const TileConfig c = *gradient_config(kSettleTiles, p, device);
  return Launch(kSettle, c, p.batch * p.heads * tiles(p.seqlen_q, c.tile_q), c.threads(), c.shared_bytes(), a);
}

std::optional<Launch> bias_gradient(const Problem &p, const Device &device, const BackwardArguments &a) {
  if (!p.dbias) return std::nullopt;
  const std::span<const GradientTile> tiles = p.dtype == DType::f32 ? std::span<const GradientTile>(kBiasTilesTf32) : kBiasTiles;
  const TileConfig c = *gradient_config(tiles, p, device); // settle uses the smallest tile, too
  return Launch(kBiasGradient, c, bias_tiles(p, c.tile_q, c.tile_k), c.threads(), c.shared_bytes(), a);
}

namespace {

struct AuxiliaryTile {
  int32_t q, k, tensor_cores, blocks_per_sm;
};
constexpr AuxiliaryTile kAuxiliaryTiles[] = {
    {.q = 64, .k = 128, .tensor_cores = 1, .blocks_per_sm = 2}, {.q = 64, .k = 128, .tensor_cores = 1, .blocks_per_sm = 1},
    {.q = 64, .k = 64, .tensor_cores = 1, .blocks_per_sm = 1},  {.q = 32, .k = 32, .tensor_cores = 1, .blocks_per_sm = 1},
    {.q = 16, .k = 16, .tensor_cores = 1, .blocks_per_sm = 1},  {.q = 64, .k = 64, .tensor_cores = 0, .blocks_per_sm = 2},
    {.q = 32, .k = 32, .tensor_cores = 0, .blocks_per_sm = 2},  {.q = 16, .k = 16, .tensor_cores = 0, .blocks_per_sm = 2},
};

// The Config with the first tile that fits; the last tile always does. of_rows: keys and queries change places.
passes::AuxiliaryConfig auxiliary_config(const Problem &p, const Device &device, bool of_rows = false) {
  const bool multiplied = p.dtype == DType::f16 ? device.cc >= 75 : p.dtype == DType::bf16 && device.cc >= 80;
  passes::AuxiliaryConfig c{};
  c.dtype = int32_t(p.dtype), c.column_sums = bool(p.column_sums);
  c.features = features_of(p), c.features.dropout = 0;
  for (const AuxiliaryTile &tile : kAuxiliaryTiles) {
    c.tile_q = tile.q, c.tile_k = tile.k, c.tensor_cores = tile.tensor_cores, c.blocks_per_sm = tile.blocks_per_sm;
    c.head_dim = tile.tensor_cores ? rounded(p.head_dim, 16) : 0;
    c.aligned = tile.tensor_cores && aligned({&p.q, &p.k}, p.head_dim);
    if (tile.tensor_cores && (!multiplied || p.quantised())) continue; // quantised keys are converted one by one
    if (c.shared_bytes() <= device.shared_per_block && c.shared_bytes() * c.blocks_per_sm <= device.shared_per_sm &&
        (of_rows ? divides_blocks(p, tile.k, tile.q) : divides_blocks(p, tile.q, tile.k)))
      break;
  }
  return c;
}

} // namespace

void auxiliary(Program &program, const Problem &p, const Device &device, Scratch &scratch) {
  const passes::AuxiliaryConfig c = auxiliary_config(p, device);
  AuxiliaryArguments a = auxiliary_arguments(p);
  const int64_t tiles_of_head = tiles(p.seqlen_k, c.tile_k), heads = p.batch * p.heads;
  a.tiles = i32(tiles_of_head);
  if (p.max_logit) a.largest = scratch.take<char>(heads * tiles_of_head * c.real_bytes());
  if (p.column_sums) {
    const passes::AuxiliaryConfig rows = auxiliary_config(p, device, true);
    a.inverse = scratch.take<char>(a.in.rows() * c.real_bytes());
    if (const int64_t blocks = heads * tiles(p.seqlen_q, rows.tile_k))
      program.steps.push_back(with_scales(p, kRowTotals, rows, blocks, rows.threads(), rows.shared_bytes(), a));
  }
  const int64_t blocks = std::max<int64_t>(p.batch, 1) * p.heads * tiles_of_head; // without a sequence all tokens are padding
  program.steps.push_back(with_scales(p, kAuxiliary, c, blocks, c.threads(), c.shared_bytes(), a));
  const passes::LargestConfig largest{.dtype = int32_t(p.dtype)};
  if (p.max_logit) program.steps.push_back(Launch(kLargestScore, largest, heads, largest.threads(), 0, a));

  // Multiply-adds per clock and SM, and the cost of the work after q.k in multiply-adds per score: fitted to an H200, except for FP64
  // (guessed).
  constexpr double kLaunchSeconds = 5e-6, kTensorCores = 520, kFma = 28, kDouble = 14;
  const double rate = c.tensor_cores ? kTensorCores : p.dtype == DType::f64 ? kDouble : kFma, after = c.tensor_cores ? 200 : 16;
  const double pass = kLaunchSeconds * (1 + bool(p.max_logit) + bool(p.column_sums)) +
                      (1 + bool(p.column_sums)) * visible_scores(p) * (double(p.head_dim) + after) / (rate * device.sms * device.clock_hz);
  program.predicted_seconds += pass;
  program.notes.push_back(auxiliary_note(p, pass, program.predicted_seconds));
}

Launch padding(const Problem &p, Operation operation) {
  constexpr int64_t most = 128; // thread blocks for long padding after few sequences
  const passes::PaddingConfig c{.dtype = int32_t(p.dtype),
                                .backward = writes(operation, kGradients),
                                .packed = p.varlen,
                                .seqused = features_of(p).seqused,
                                .pages = features_of(p).pages,
                                .partial = p.part.partial,
                                .adds = writes(operation, kGradients) && p.accumulate};
  const int64_t groups = p.batch + c.packed, grid = groups * std::max<int64_t>(1, most / std::max<int64_t>(1, groups));
  return !writes(operation, kGradients) ? Launch(kPadding, c, grid, c.threads(), 0, forward_arguments(p))
                                        : Launch(kPadding, c, grid, c.threads(), 0, backward_arguments(p));
}

} // namespace strobe::cuda
