#include "cuda/families/sm90_tiles.h"

#include <algorithm>
#include <cmath>

#include "attention/work.h"
#include "cuda/families/sm90_steps.h"
#include "cuda/program/arguments.h"
#include "cuda/program/tensor_maps.h"
#include "cuda/program/tiles.h"

namespace strobe::cuda {

using sm90::Config;

namespace {

// What a tile has registers for.
constexpr int kFixed = 1;       // the fixed reference
constexpr int kLagging = 2;     // a maximum of every tile
constexpr int kAlibi = 4;       // ALiBi; a softcap or a mask alone takes no more than nothing does
constexpr int kBlockSparse = 8; // blocks, with the fixed reference
constexpr int kDropout = 16;    // dropout: tile_k a multiple of 32
constexpr int kBias = 32;       // a bias that comes by the copy engine: shared memory, too
constexpr int kHyperbolicScore = 64;
constexpr int kAnything = 128; // all of these at a time

// Without a wish the tile runs whose scores, all that it computes, take the shortest time.
struct Suits {
  double rate = 1; // scores a second, of the fastest tile's for such heads
  int64_t least_keys = 0, most_keys = INT64_MAX;
  double blocks = 0; // on every SM, of tiles (or parts, where even the smallest tiles are too few)
};
struct ForwardTile {
  int32_t most_dim, most_dim_v;
  int32_t warpgroups, tile_k, stages, registers_load, registers_compute, q_in_registers, blocks_per_sm;
  int loads;
  Suits suits{};
};

// Measured on an H200 (bench/search_forward.py). None spills.
// clang-format off
constexpr ForwardTile kForwardTiles[] = {
    // up to  warp-      stages  registers to  Q in  blocks
    // D, Dv  groups  tile_k  |  load, compute regs  per SM   loads, what it suits
    { 64,  64,   1,  64,   4,  32, 128,   1,   3, kFixed, {.rate = 0.87}},
    { 64,  64,   3, 128,   4,  32, 160,   0,   1, kFixed, {.least_keys = 8192, .blocks = 1}},
    { 64,  64,   4,  64,   5,  32, 112,   0,   1, kFixed | kLagging, {.rate = 0.98, .blocks = 1}},
    { 64,  64,   3,  64,   4,  40, 152,   0,   1, kDropout | kBias},
    { 64,  64,   3,  80,   4,  40, 152,   0,   1, kAlibi | kHyperbolicScore},
    { 64,  64,   2, 128,   4,  40, 232,   1,   1, kLagging | kDropout, {.rate = 0.83}},
    { 64,  64,   1,  64,   3,  40, 208,   1,   2, kBias, {.rate = 0.83}},
    { 64,  64,   1, 128,   3,  56, 200,   1,   2, kBlockSparse},
    { 64,  64,   2, 128,   4,  56, 224,   1,   1, kBlockSparse, {.rate = 0.83}},
    {128, 128,   3,  80,   3,  32, 160,   0,   1, kFixed, {.least_keys = 2048, .blocks = 1}},
    {128, 128,   2, 128,   3,  40, 232,   1,   1, kFixed, {.rate = 0.92, .blocks = 0.5}},
    {128, 128,   1,  64,   3,  40, 208,   1,   2, kFixed, {.rate = 0.58}},
    {128, 128,   3,  64,   3,  40, 152,   0,   1, kDropout | kHyperbolicScore},
    {128, 128,   2,  96,   2,  40, 232,   0,   1, kBias, {.blocks = 0.5}},
    {128, 128,   1,  64,   2,  40, 208,   1,   2, kBias, {.rate = 0.62}},
    {128, 128,   2, 128,   3,  40, 232,   0,   1, kLagging | kAlibi | kHyperbolicScore, {.rate = 0.83}},
    {128, 128,   2, 128,   3,  56, 224,   1,   1, kBlockSparse},
    {128, 128,   2,  96,   3,  56, 224,   1,   1, kDropout, {.rate = 0.83}},
    {128, 128,   2,  64,   4,  56, 224,   1,   1, kAnything},
    {192, 128,   2, 128,   2,  40, 232,   0,   1, kFixed | kLagging | kAlibi},
    {192, 192,   2,  96,   2,  40, 232,   0,   1, kFixed | kLagging | kAlibi},
    {256, 256,   2,  64,   2,  40, 232,   0,   1, kFixed | kLagging | kAlibi, {.most_keys = 512}},
    {256, 256,   2,  80,   2,  40, 232,   0,   1, kFixed | kLagging},
    {256, 256,   2,  64,   2,  40, 232,   0,   1, kAlibi | kHyperbolicScore | kDropout | kBias},
    {256, 256,   2,  64,   2,  56, 224,   0,   1, kBlockSparse},
    {256, 256,   2,  48,   2,  56, 224,   0,   1, kAnything},
    {256, 256,   2,  32,   2,  56, 224,   0,   1, kAnything},
};
// clang-format on

int load_of(const Config &c) {
  const Features &f = c.features;
  const bool softcap = f.function == kSoftcap, hyperbolic = f.function == kHyperbolic, alibi = f.alibi || (f.scaled && !hyperbolic);
  if (!!f.mask + !!f.bias + alibi + hyperbolic + softcap + !!f.blocks + !!f.dropout > 1) return kAnything;
  if (softcap && c.reference == sm90::kExact) return kAnything;
  if (f.bias) return c.bias_by_tma ? kBias : kAnything;
  if ((f.blocks || f.dropout) && c.reference != sm90::kFixed) return kAnything;
  if (f.blocks) return kBlockSparse;
  if (f.dropout) return kDropout;
  if (hyperbolic) return kHyperbolicScore;
  if (alibi) return kAlibi;
  return c.reference == sm90::kFixed ? kFixed : kLagging;
}

// But for the tile.
Config config_for(const Problem &p) {
  Config c = begin_config<Config>(p, 16);
  c.features = hopper_features(p);
  // With FP16 a sum of 64k numbers near 1 would look like an overflow.
  const bool fixed = p.dtype == DType::bf16 || p.seqlen_k <= 1 << 15;
  c.reference = p.exact_max ? sm90::kExact : p.invariant ? i32(sm90::kFixedByRow) : fixed ? sm90::kFixed : sm90::kLagging;
  // Tiles of a part come by ascending keys, and ALiBi's penalty falls towards the diagonal.
  if (c.features.part && c.features.alibi && c.reference == sm90::kFixed) c.reference = sm90::kLagging;
  c.invariant = p.invariant;
  c.bias_by_tma = maps_bias(p);
  return c;
}

Config with(Config c, const ForwardTile &t) {
  c.warpgroups = t.warpgroups, c.tile_k = t.tile_k, c.stages = t.stages;
  c.registers_load = t.registers_load, c.registers_compute = t.registers_compute, c.q_in_registers = t.q_in_registers;
  c.blocks_per_sm = t.blocks_per_sm;
  return c;
}

// How many scores tiles of such rows compute, about: they walk over the keys that any of their queries sees.
double computed(const Problem &p, const Config &c, const Rows &rows) {
  const double sequences = double(std::max<int64_t>(1, p.batch)), tile = double(rows.queries * c.warpgroups);
  const double queries = p.varlen ? double(p.total_q) / sequences : double(p.seqlen_q);
  const double keys = p.packed_k() ? double(p.total_k) / sequences : double(p.seqlen_k);
  // A sequence's last tile is full by half in the mean, where lengths differ; and so is a tile of queries' last one of keys.
  const double count = p.varlen ? queries / tile + 0.5 : double(tiles(p.seqlen_q, rows.queries * c.warpgroups));
  const int bounds = (p.window_left != kUnbounded) + (p.window_right != kUnbounded);
  const double around = bounds * std::min(queries, tile) / 2 + c.tile_k / 2.0;
  const double most = p.varlen ? keys + c.tile_k / 2.0 : double(tiles(p.seqlen_k, c.tile_k) * c.tile_k);
  const double walked = std::min(mean_keys(p, queries, keys) + around, most);
  return sequences * double(p.heads_kv * rows.pieces) * count * c.tile_q() * walked;
}

} // namespace

// A mask and dropout come by 16 queries of a head, of ALiBi a tile has one slope; and up to 16 rows cuda-mma computes at the memory's rate.
Rows rows_of(const Problem &p, const Config &c) {
  constexpr int64_t kRowsOfMma = 16;
  constexpr double kWorth = 0.9; // what a gain is, not yet measured
  const Rows apart{1, 64, p.group()};
  if (p.mask || c.features.dropout || c.features.blocks || p.q.stride[1] == 0 || p.seqlen_q <= 0) return apart;
  if (!p.invariant && (p.seqlen_q * p.group() <= kRowsOfMma || p.bias || p.alibi_slopes || p.part)) return apart;
  Rows best = apart;
  double least = kWorth * computed(p, c, apart);
  for (int64_t heads = std::min<int64_t>(p.group(), 64); heads > 1; heads--) {
    const Rows rows{heads, 64 / heads, tiles(p.group(), heads)};
    if (heads != tiles(p.group(), rows.pieces)) continue; // fewer heads in as many pieces leave room for more queries
    if (const double its = computed(p, c, rows); its < least) least = its, best = rows;
  }
  return best;
}

namespace {

// How long a tile's scores take, in the time of one at the best rate. Beyond kUnsuited it does not suit, but runs.
constexpr double kUnsuited = 1e100;
double cost(const Suits &row, const Problem &p, const Config &c, const Device &device) {
  const Rows rows = rows_of(p, c);
  const double sequences = double(std::max<int64_t>(1, p.batch)), queries = p.varlen ? double(p.total_q) / sequences : double(p.seqlen_q);
  const double pieces = double(p.batch * p.heads_kv * rows.pieces), tiles_of_64 = std::ceil(queries / double(rows.queries));
  const double parts = tiles_of_64 * pieces < double(device.sms) ? double(std::max<int64_t>(1, p.seqlen_k / kLeastKeysOfPart)) : 1;
  const bool suits = p.seqlen_k >= row.least_keys && p.seqlen_k <= row.most_keys &&
                     std::ceil(tiles_of_64 / c.warpgroups) * pieces * parts >= row.blocks * device.sms;
  return computed(p, c, rows) / row.rate * (suits ? 1 : kUnsuited);
}

} // namespace

std::optional<Config> choose_tile(const Problem &p, const Device &device) {
  const bool wishes = p.tile_q > 0 || p.tile_k > 0;
  const Config any = config_for(p);
  const int load = load_of(any);
  const bool takes_registers = any.features.part ? !any.features.band : p.page_size && any.features.mask;
  const ForwardTile *first = nullptr; // that runs: the next ones for such heads are made for them as well
  const ForwardTile *best = cheapest(kForwardTiles, [&](const ForwardTile &t) {
    const Config c = with(any, t);
    const bool fits = c.head_dim <= t.most_dim && c.head_dim_v <= t.most_dim_v && (load & t.loads) &&
                      !(c.features.dropout && t.tile_k % 32) && !(takes_registers && t.blocks_per_sm > 2);
    if (!fits || !divides_blocks(p, c.tile_q())) return kCannotRun;
    if (p.invariant) return t.suits.least_keys == 0 && t.suits.most_keys == INT64_MAX ? 0 : kCannotRun;
    if (wishes) return distance(p, c.tile_q(), c.tile_k);
    if (!first) first = &t;
    return t.most_dim == first->most_dim && t.most_dim_v == first->most_dim_v ? cost(t.suits, p, c, device) : kCannotRun;
  });
  return best ? std::optional(with(any, *best)) : std::nullopt;
}

} // namespace strobe::cuda
