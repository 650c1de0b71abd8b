#include "cuda/families/sm90_latent.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "../../../kernels/sm90/latent/arguments.h"
#include "../../../kernels/sm90/latent/config.h"
#include "attention/text.h"
#include "attention/work.h"
#include "cuda/families/sm90_steps.h"
#include "cuda/program/passes.h"
#include "cuda/program/prediction.h"
#include "cuda/program/tiles.h"

namespace strobe::cuda {

template <class V> void each_pointer(const LatentArguments &a, V &visit) {
  each_pointer(static_cast<const ForwardArguments &>(a), visit);
  visit(a.tma_q.map), visit(a.tma_k.map), visit(a.merged_out), visit(a.merged_lse);
}

namespace {

using sm90::latent::Config;
using sm90::latent::kColumns, sm90::latent::kKeys, sm90::latent::kRows, sm90::latent::kValues;

constexpr KernelSource kLatent{"sm90/latent/latent.h", "strobe::sm90::latent::Latent", "strobe::sm90::latent::Config", true};

// Whether latent calls run here without being asked to. No GPU has run this kernel yet; until one has, cuda-mma stays the default. With it
// stored_densely (engines.cpp) must keep V within K, and Prepared::run, which plans again where V lies elsewhere, must keep its workspace.
constexpr bool kByItself = false;

constexpr double kFlopsPerSm = 4e12, kBlockSeconds = 4e-6, kStart = 5e-6; // guessed: 60% of the peak; a block's start and end

// The rows of a tile: `queries` queries of each of `heads` query heads. A key head's query heads are divided into `pieces`.
struct RowsOfTile {
  int64_t heads, queries, pieces;
};
RowsOfTile rows_of_tile(const Problem &p) {
  const int64_t heads = tiles(p.group(), tiles(p.group(), kRows));
  return {heads, std::clamp<int64_t>(kRows / heads, 1, std::max<int64_t>(1, p.seqlen_q)), tiles(p.group(), heads)};
}

std::string against(const Problem &p, const Features &f) {
  if (!kByItself && p.wishes.engine != "cuda-sm90") return "takes latent attention only when asked for by name: no GPU has measured it yet";
  if (p.head_dim > kColumns || p.head_dim <= kValues || p.head_dim_v > kValues)
    return text("takes v within k for ", kValues + 1, " to ", kColumns, " columns of k and up to ", kValues, " of v, not for ", p.head_dim,
                " and ", p.head_dim_v);
  for (const auto &[there, option] : {std::pair{f.mask != 0, "a mask"},
                                      {f.bias != 0, "a bias"},
                                      {f.penalty != 0, "ALiBi"},
                                      {f.dropout != 0, "dropout"},
                                      {f.blocks != 0, "block sparsity"},
                                      {f.part != 0, "parts of a larger problem"},
                                      {f.seen != 0, "a function of the mask"},
                                      {f.function != kLinear && f.function != kCapped, score_in_words(p)}})
    if (there) return text("takes v within k without ", option);
  if (!p.q || !p.k || !p.seqlen_k || (p.page_size && !p.pages)) return "there are no queries or no keys to fetch";
  for (const std::string &reason : {unmapped("q", p.q, p.head_dim), unmapped("k", p.k, p.head_dim)})
    if (!reason.empty()) return reason;
  if (p.q.stride[1] == 0 && p.heads > 1) return "q is broadcast over heads: the copy engine cannot load several of them at once";
  if (!aligned(p.out, p.head_dim_v)) return "out's rows do not lie on 16-byte addresses";
  if (p.page_size % 8) return text("reads pages of multiples of 8 keys, not of ", p.page_size);
  return broadcast_row({&p.q}, {&p.k}, p);
}

// How many splits the keys are divided into: as many as let the blocks end soonest, with what it takes to combine them.
int32_t choose_splits(const Problem &p, const Device &device, int64_t items) {
  constexpr double kBytesPerSecond = 3e12; // at which partial results are written and read
  const double keys = visible_scores(p) / std::max(1.0, query_rows(p));
  const double whole = 2.0 * (kColumns + kValues) * kRows * keys / kFlopsPerSm;
  const double merging = 8.0 * double(p.head_dim_v) * query_rows(p) / kBytesPerSecond;
  int32_t best = 1;
  double least = HUGE_VAL;
  for (int32_t splits = 1; splits <= std::max<int64_t>(1, most_splits(p)); ++splits) {
    const double rounds = std::ceil(double(items * splits) / double(device.sms));
    const double seconds = rounds * (whole / splits + kBlockSeconds) + (splits > 1 ? combining_seconds(p) + splits * merging : 0);
    if (seconds < least) least = seconds, best = splits;
  }
  return best;
}

double predicted_seconds(const Problem &p, const Device &device, int64_t items, int64_t splits) {
  const double keys = visible_scores(p) / std::max(1.0, query_rows(p));
  const double of_item = 2.0 * (kColumns + kValues) * kRows * keys / kFlopsPerSm / double(splits) + kBlockSeconds;
  Problem k_only = p;
  k_only.head_dim_v = 0;
  const double reading = reading_seconds(k_only, device) + kBlockSeconds;
  const double computing = std::ceil(double(items * splits) / double(device.sms)) * of_item;
  return kStart + std::max(computing, reading) + (splits > 1 ? combining_seconds(p) : 0);
}

} // namespace

CudaEngine::Made sm90_latent(const Problem &p, const Device &device, Scratch &scratch) {
  Config c{};
  c.dtype = i32(p.dtype), c.exact_max = p.exact_max, c.invariant = p.invariant, c.features = features_of(p);
  if (std::string reason = against(p, c.features); !reason.empty()) return reason;
  c.box = p.page_size ? i32(std::gcd(p.page_size, int64_t(kKeys))) : kKeys;

  const RowsOfTile rows = rows_of_tile(p);
  LatentArguments a{};
  static_cast<ForwardArguments &>(a) = forward_arguments(p);
  a.packed = i32(rows.heads), a.pieces = i32(rows.pieces), a.queries = Divisor::make(uint32_t(rows.queries));
  a.tiles = i32(std::max<int64_t>(1, tiles(p.seqlen_q, rows.queries)));
  a.tma_q = mapped_queries(p, p.q, p.head_dim, i32(rows.queries), i32(rows.heads));
  a.tma_k = mapped_keys(p, p.k, p.head_dim, c.box);
  const int64_t of_sequence = p.heads_kv * rows.pieces * a.tiles, items = p.batch * of_sequence;
  const int64_t chunks = std::max<int64_t>(1, tiles(p.seqlen_k, Config::chunk()));
  a.splits = !p.invariant ? choose_splits(p, device, items) : items < device.sms ? i32(chunks) : 1;
  const UnevenShares uneven = p.invariant ? UnevenShares{} : take_uneven_shares(a, p, scratch, device.sms, of_sequence);
  if (uneven.most > 0)
    c.uneven = 1, a.splits = 1;
  else
    take_splits(a, p, scratch);
  c.split = a.splits > 1;
  if (c.walks_chunks() && chunks > 1) {
    a.merged_out = scratch.take<float>(a.in.rows() * kValues);
    a.merged_lse = scratch.take<float>(a.in.rows() * 8); // one for each thread that holds a part of the row
  }
  const int64_t blocks = uneven.most > 0 ? uneven.most * of_sequence : items * a.splits;

  Program program;
  program.overlap = true;
  program.kernel = text("latent attention, v is the first ", p.head_dim_v, " columns of k and not loaded; wgmma, 2 warpgroups, ",
                        rows.heads, " query heads packed");
  describe_tile(program, p, kRows, kKeys, true);
  program.steps.push_back(Launch(kLatent, c, blocks, c.threads(), c.shared_bytes(), a));
  combine_splits(program, p, a);
  program.predicted_seconds = predicted_seconds(p, device, items, std::max<int64_t>(a.splits, uneven.likely));
  return program;
}

} // namespace strobe::cuda
