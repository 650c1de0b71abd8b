#include "cuda/families/sm90_tiles.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "cuda/families/sm90_steps.h"
#include "cuda/program/arguments.h"
#include "cuda/program/prediction.h"
#include "cuda/program/tensor_maps.h"
#include "cuda/program/tiles.h"

namespace strobe::cuda {

using sm90::Config;

namespace {

// Which features a tile has registers for.
constexpr int kFixed = 1;           // the fixed reference
constexpr int kLagging = 2;         // the maximum of every tile is taken
constexpr int kPenalty = 4;         // a penalty (ALiBi); a tanh cap alone or a mask alone needs no more registers than no option
constexpr int kPenaltyInBand = 256; // a penalty under a causal mask or a window, if keys are not paged
constexpr int kBlockSparse = 8;     // block sparsity, with the fixed reference
constexpr int kDropout = 16;        // dropout; tile_k must be a multiple of 32
constexpr int kBias = 32;           // a bias loaded by the copy engine, which also takes shared memory
constexpr int kFunction = 64;       // a hyperbolic score, or functions of the caller
constexpr int kSeen = 512;          // a function of the mask beside blocks, with the fixed reference
constexpr int kLight = 1024;        // functions of the caller of few instructions
constexpr int kFetched = 2048;      // functions of the score of which lanes fetch values ahead
constexpr int kAnything = 128;      // all of these at once

// The figures from which a tile's time is predicted. The tile with the least predicted time runs, unless the caller requests tile_q or
// tile_k.
struct Suits {
  double rate = 1; // scores per second, relative to the fastest tile for such heads
  int64_t least_keys = 0, most_keys = INT64_MAX;
  double blocks = 0; // how many blocks per SM make the tile suitable; if even the smallest tiles give fewer, splits count as well
};
struct ForwardTile {
  int32_t most_dim, most_dim_v;
  int32_t warpgroups, tile_k, stages, registers_load, registers_compute, q_in_registers, blocks_per_sm;
  int loads;
  Suits suits{};
  int32_t stored_stages = 0; // quantised K and V
};

// With these rates, the chosen tiles are those that were fastest on an H200 at 70 to 16k keys (bench/search_forward.py). With at most one
// option no tile spills. With several, the worst known tile spills 88 bytes per thread (tests/nvrtc/test_shipped.py).
// clang-format off
constexpr ForwardTile kForwardTiles[] = {
    // up to  warp-      stages  registers to  Q in  blocks
    // D, Dv  groups  tile_k  |  load, compute regs  per SM   loads, what it suits
    { 64,  64,   1,  64,   4,  32, 128,   1,   3, kFixed, {.rate = 0.84}},
    { 64,  64,   3, 128,   4,  32, 160,   0,   1, kFixed, {.least_keys = 8192, .blocks = 1}},
    { 64,  64,   4,  64,   5,  32, 112,   0,   1, kFixed | kLagging | kPenaltyInBand, {.rate = 0.96, .blocks = 1}},
    { 64,  64,   3,  64,   4,  40, 152,   1,   1, kDropout | kBias},
    { 64,  64,   3,  80,   4,  40, 152,   0,   1, kPenalty | kPenaltyInBand | kFunction, {.rate = 0.94}},
    { 64,  64,   3,  96,   4,  32, 160,   0,   1, kFetched, {.rate = 1.2}},
    { 64,  64,   2, 128,   4,  40, 232,   1,   1, kLagging | kDropout, {.rate = 0.75}},
    { 64,  64,   1,  64,   3,  40, 208,   1,   2, kBias, {.rate = 0.7}},
    { 64,  64,   1, 128,   3,  56, 200,   1,   2, kBlockSparse | kSeen},
    { 64,  64,   2, 128,   4,  56, 224,   1,   1, kBlockSparse | kSeen, {.rate = 0.83}},
    {128, 128,   3,  80,   3,  32, 160,   0,   1, kFixed | kPenaltyInBand, {.blocks = 1}},
    {128, 128,   2, 128,   3,  40, 232,   1,   1, kFixed, {.rate = 0.88, .blocks = 0.5}},
    {128, 128,   1,  64,   3,  40, 208,   1,   2, kFixed, {.rate = 0.54}},
    {128, 128,   3,  64,   3,  32, 160,   0,   1, kFetched, {.rate = 1.0}},
    {128, 128,   3,  64,   3,  40, 152,   0,   1, kDropout | kFunction},
    {128, 128,   3,  80,   3,  32, 160,   0,   1, kLight, {.rate = 0.99}},
    {128, 128,   2, 128,   2,  40, 232,   0,   1, kBias, {.blocks = 0.5}},
    {128, 128,   1,  64,   2,  40, 208,   1,   2, kBias, {.rate = 0.62}},
    {128, 128,   2, 128,   3,  40, 232,   0,   1, kFetched, {.rate = 1.2}},
    {128, 128,   2, 128,   3,  40, 232,   0,   1, kLagging | kPenalty | kPenaltyInBand | kFunction, {.rate = 0.83}},
    {128, 128,   2, 128,   3,  56, 224,   1,   1, kBlockSparse},
    {128, 128,   2, 128,   3,  56, 224,   0,   1, kSeen, {.rate = 1.2}},
    {128, 128,   2,  96,   3,  56, 224,   1,   1, kDropout, {.rate = 0.83}},
    {128, 128,   2,  64,   4,  56, 224,   1,   1, kAnything},
    {192, 128,   2, 128,   2,  40, 232,   0,   1, kFixed | kLagging | kPenalty | kPenaltyInBand},
    {192, 192,   2,  96,   2,  40, 232,   0,   1, kFixed | kLagging | kPenalty | kPenaltyInBand},
    {256, 256,   2,  64,   2,  40, 232,   0,   1, kFixed | kLagging | kPenalty | kPenaltyInBand, {.most_keys = 512}},
    {256, 256,   2,  80,   2,  40, 232,   0,   1, kFixed | kLagging},
    {256, 256,   2,  64,   2,  40, 232,   0,   1, kPenalty | kPenaltyInBand | kFunction | kDropout | kBias},
    {256, 256,   2,  64,   2,  56, 224,   0,   1, kBlockSparse},
    {256, 256,   2,  48,   2,  56, 224,   0,   1, kAnything},
    {256, 256,   2,  32,   2,  56, 224,   0,   1, kAnything},
};
// clang-format on

constexpr int kPlain = kFixed | kLagging | kPenalty | kPenaltyInBand | kFunction | kLight; // at most one of these options, or none

// For quantised K and V. The warpgroup that loads also dequantises, so it has more registers, and shared memory holds tiles as they are
// stored, too.
// clang-format off
constexpr ForwardTile kQuantisedTiles[] = {
    { 64,  64,   3, 112,   3,  56, 152,   0,   1, kFixed, {.blocks = 1}, 5},
    { 64,  64,   3,  96,   3,  56, 152,   0,   1, kFixed | kDropout, {.rate = 0.98, .blocks = 1}, 5},
    { 64,  64,   3,  80,   4,  56, 152,   0,   1, kPlain, {.rate = 0.94}, 6},
    { 64,  64,   2, 128,   3,  72, 216,   0,   1, kFixed | kLagging | kBlockSparse | kSeen, {.rate = 0.83}, 4},
    { 64,  64,   2,  64,   4,  72, 216,   0,   1, kPlain | kDropout | kAnything, {.rate = 0.7}, 6},
    { 64,  64,   1,  64,   3,  56, 200,   1,   2, kFixed, {.rate = 0.6}, 4},
    {128, 128,   3,  80,   3,  56, 152,   0,   1, kFixed | kPenaltyInBand, {.blocks = 1}, 4},
    {128, 128,   2, 128,   2,  72, 216,   0,   1, kPlain, {.rate = 0.88, .blocks = 0.5}, 3},
    {128, 128,   2,  96,   2,  72, 216,   0,   1, kFixed | kDropout | kBlockSparse | kSeen, {.rate = 0.83}, 5},
    {128, 128,   1,  64,   2,  56, 200,   0,   2, kFixed, {.rate = 0.54}, 3},
    {128, 128,   2,  64,   3,  72, 216,   0,   1, kAnything, {.rate = 0.7}, 6},
    {256, 256,   2,  64,   2,  72, 216,   0,   1, kFixed | kLagging, {}, 2},
    {256, 256,   2,  48,   2,  72, 216,   0,   1, kPlain | kBlockSparse | kSeen | kAnything, {.rate = 0.9}, 4},
    {256, 256,   2,  32,   2,  72, 216,   0,   1, kAnything | kDropout, {.rate = 0.6}, 4},
};
// clang-format on

// For Q, K and V in FP8. P V of a tile is in registers beside O, and head_dim_v is one of those for which wgmma is declared. (No GPU has
// measured these rates.)
// clang-format off
constexpr ForwardTile kEightBitTiles[] = {
    { 64,  64,   3,  96,   3,  56, 152,   0,   1, kLagging, {.blocks = 1}, 2},
    { 64,  64,   2, 128,   3,  72, 216,   0,   1, kPlain | kAnything, {.rate = 0.9}, 2},
    {256, 128,   2, 128,   2,  40, 232,   0,   1, kLagging, {.blocks = 0.5}, 2},
    {256, 128,   2,  96,   2,  56, 224,   0,   1, kPlain | kLagging, {.rate = 0.9}, 2},
    {256, 128,   2,  64,   3,  72, 216,   0,   1, kPlain | kAnything, {.rate = 0.7}, 2},
};
// clang-format on
constexpr int32_t kEightBitColumns[] = {64, 96, 128}; // of V

// light: functions of the caller take few instructions. fetched: lanes may fetch values ahead.
int load_of(const Config &c, bool light, bool fetched) {
  const Features &f = c.features;
  const bool capped = f.function == kCapped, function = (f.function && !capped) || f.seen;
  const bool penalty = f.penalty || (f.scaled && f.function != kHyperbolic && !f.given());
  if (f.blocks && f.seen && !f.mask && !f.bias && !penalty && !f.function && !f.dropout && c.reference == sm90::kFixed)
    return kSeen | kAnything;
  if (!!f.mask + !!f.bias + penalty + function + capped + !!f.blocks + !!f.dropout > 1) return kAnything;
  if (capped && c.reference == sm90::kExact) return kAnything;
  if (f.bias) return c.bias_by_tma ? kBias : kAnything;
  if ((f.blocks || f.dropout) && c.reference != sm90::kFixed) return kAnything;
  if (f.blocks) return kBlockSparse;
  if (f.dropout) return kDropout;
  if (function) return kFunction | (light ? kLight : 0) | (fetched ? kFetched : 0);
  if (penalty)
    return f.penalty && f.band && !c.invariant && !f.pages ? kPenaltyInBand : kPenalty; // invariant: a band may depend on lengths
  return c.reference == sm90::kFixed ? kFixed : kLagging;
}

// The Config except for the tile.
Config config_for(const Problem &p) {
  Config c = begin_config<Config>(p, 16);
  c.features = hopper_features(p);
  // In FP16, a sum of 64k numbers near 1 would look like an overflow.
  const bool fixed = p.dtype == DType::bf16 || p.seqlen_k <= 1 << 15;
  c.reference = p.exact_max ? sm90::kExact : p.invariant ? i32(sm90::kFixedByRow) : fixed ? sm90::kFixed : sm90::kLagging;
  // A function's score may grow from key to key. P of FP16 would then overflow often.
  if (c.features.given() && c.reference == sm90::kFixed && p.dtype == DType::f16) c.reference = sm90::kLagging;
  // A part's tiles come in ascending order of keys, so a penalty falls towards the diagonal, and the reference cannot stay fixed.
  if (c.features.part && c.features.penalty && c.reference == sm90::kFixed) c.reference = sm90::kLagging;
  c.invariant = p.invariant;
  if (p.quantised_queries()) {
    c.eight_bits = 1;
    c.head_dim = rounded(p.head_dim, 32); // columns that a product takes at a time
    for (int32_t columns : kEightBitColumns)
      if (c.head_dim_v <= columns) {
        c.head_dim_v = columns;
        break;
      }
    if (p.k_scale.stride[2] || (p.page_size && p.k_scale.stride[0])) c.scaled_rows |= sm90::kScaledKeys;
    if (p.q_scale.stride[2]) c.scaled_rows |= sm90::kScaledQueries;
    c.reference = sm90::kExact; // E4M3 has few exponents: P must not exceed 1
  }
  c.bias_by_tma = maps_bias(p) && !p.quantised(); // K is dequantised later than the copy engine would bring the bias
  return c;
}

Config with(Config c, const ForwardTile &t) {
  c.warpgroups = t.warpgroups, c.tile_k = t.tile_k, c.stages = t.stages;
  c.registers_load = t.registers_load, c.registers_compute = t.registers_compute, c.q_in_registers = t.q_in_registers;
  c.blocks_per_sm = t.blocks_per_sm, c.stored_stages = t.stored_stages;
  return c;
}

// How many rows of a page one copy loads. Tiles begin at multiples of kRowsOfPage; but without a window or blocks at multiples of tile_k,
// so that the single warp which loads quantised keys can ask for more rows at a time.
int32_t page_rows(const Problem &p, int32_t tile_k) {
  if (!p.page_size) return 0;
  int32_t rows = kRowsOfPage;
  if (p.quantised() && p.window_left == kUnbounded && !p.blocks.present)
    while (p.page_size % (2 * rows) == 0 && tile_k % (2 * rows) == 0) rows *= 2;
  return rows;
}

// How many scores tiles of the shape `rows` compute in one sequence. others: other sequences have other lengths; the sequence's last tile
// then counts as half full.
double computed(const Problem &p, const Config &c, const HeadsOfTile &rows, int64_t seqlen_q, int64_t seqlen_k, bool others) {
  constexpr int64_t kSamples = 32;
  const Band band = Band::make(seqlen_q, seqlen_k, p.bottom_right, p.window_left, p.window_right);
  const int64_t queries = rows.queries * c.warpgroups;
  const Walked w = walked(band, queries, c.tile_k, 16, kSamples);
  const double count = others ? std::max(1.0, double(seqlen_q) / double(queries) + 0.5) : double(w.tiles);
  return count * w.mean * c.tile_q() * double(p.heads_kv * rows.pieces);
}
// How many scores are computed in all sequences. Of packed sequences only the longest length and the total are known, so all others count
// as equally long.
double computed(const Problem &p, const Config &c, const HeadsOfTile &rows) {
  if (!p.varlen) return double(p.batch) * computed(p, c, rows, p.seqlen_q, p.seqlen_k, false);
  const int64_t q = p.longest_q(), k = p.longest_k(), others = std::max<int64_t>(0, p.batch - 1);
  const int64_t rest_q = others ? std::min(q, std::max<int64_t>(0, p.total_q - q) / others) : 0;
  const int64_t rest_k = p.packed_k() ? others ? std::min(k, std::max<int64_t>(0, p.total_k - k) / others) : 0 : k;
  return computed(p, c, rows, q, k, false) + double(others) * computed(p, c, rows, rest_q, rest_k, rest_q < q);
}

} // namespace

// Heads share a tile of queries only if no option ties a tile to one head. Options that do: a mask and dropout (read for 16 queries of one
// head), a block mask, ALiBi (one slope per tile), a bias, a part; and a Q that is broadcast over heads, of which the copy engine cannot
// load several heads at once. An invariant call with a bias or ALiBi is refused elsewhere. Calls of up to 16 rows are left to cuda-mma,
// which computes them as fast as memory allows; but not all of those with quantised keys, which are dequantised once for each tile.
HeadsOfTile heads_of_tile(const Problem &p, const Config &c) {
  constexpr int64_t kRowsOfMma = 16;
  constexpr double kWorth = 0.9; // packing must save 10% of the scores, because packed heads load and store more slowly (guessed)
  const HeadsOfTile apart{1, 64, p.group()};
  if (p.mask || c.features.dropout || c.features.blocks || p.q.stride[1] == 0 || p.seqlen_q <= 0) return apart;
  const bool few = p.seqlen_q * p.group() <= kRowsOfMma && !p.quantised();
  if (!p.invariant && (few || p.bias || c.features.penalty || p.part)) return apart;
  HeadsOfTile best = apart;
  double least = kWorth * computed(p, c, apart);
  for (int64_t n = tiles(p.group(), 64); n < p.group(); n *= 2) {
    const int64_t heads = tiles(p.group(), n);
    const HeadsOfTile rows{heads, 64 / heads, tiles(p.group(), heads)};
    if (const double its = computed(p, c, rows); its < least) least = its, best = rows;
  }
  return best;
}

namespace {

// The clocks in which an SM's copy engine loads a key and its value if their rows are not whole sectors of 32 bytes. With whole sectors the
// result is 0, because copies were never the limit.
double clocks_of_key(const Problem &p) {
  constexpr double kLine = 6.5; // clocks per started 128 bytes of a row (H200, head dimensions 24 to 88)
  const auto of_row = [](int64_t head_dim) { return head_dim % 16 ? kLine * double(tiles(head_dim, 64)) : 0; };
  return of_row(p.head_dim) + of_row(p.head_dim_v);
}

// The time of the whole call with tiles of this kind, in clocks of an SM. For a tile that does not suit, it is kUnsuited times as long.
constexpr double kUnsuited = 1e100;
double cost(const Suits &row, const Problem &p, const Config &c, const Device &device) {
  const int64_t queries = p.varlen ? p.total_q / std::max<int64_t>(1, p.batch) : p.seqlen_q, heads = p.batch * p.heads;
  const int64_t splits = tiles(queries, 64) * heads < device.sms ? std::max<int64_t>(1, p.seqlen_k / kLeastKeysOfSplit) : 1;
  const HeadsOfTile rows = heads_of_tile(p, c);
  const int64_t blocks = tiles(queries, rows.queries * c.warpgroups) * p.batch * p.heads_kv * rows.pieces * splits;
  const bool suits = p.seqlen_k >= row.least_keys && p.seqlen_k <= row.most_keys && double(blocks) >= row.blocks * device.sms;
  const int64_t dim = std::max(c.head_dim, c.head_dim_v);
  const double best = dim <= 64 ? 10 : std::min(7.0, 900.0 / double(dim)); // scores per clock, roughly
  const double dequantising = p.quantised() && !c.eight_bits ? clocks_of_stored_key(c) : 0;
  const double clocks = std::max({c.tile_q() / (best * row.rate), clocks_of_key(p), dequantising});
  return computed(p, c, rows) / c.tile_q() * clocks * (suits ? 1 : kUnsuited);
}

} // namespace

std::optional<Config> choose_tile(const Problem &p, const Device &device) {
  const bool wishes = p.wishes.tile_q > 0 || p.wishes.tile_k > 0;
  const Config any = config_for(p);
  constexpr int32_t kFew = 6; // instructions for a pair
  const bool given = any.features.given();
  const int load = load_of(any, given && function_instructions(p) <= kFew, given && fetches_ahead(p));
  // FP8: scales by row, and pages, take registers that a tile of 128 keys leaves only up to 64 columns of V.
  const bool crowded = any.eight_bits && any.head_dim_v > 64 && (any.scaled_rows || any.features.pages);
  constexpr int32_t kOfColumns = 72; // registers with which a warp loads scales of columns without spilling
  const bool takes_registers = any.features.part ? !any.features.band : p.page_size && any.features.mask;
  const ForwardTile *first = nullptr; // the first tile that fits; only tiles with the same limits of head dimensions compete with it
  const std::span<const ForwardTile> table = p.quantised_queries() ? std::span<const ForwardTile>(kEightBitTiles)
                                             : p.quantised()       ? std::span<const ForwardTile>(kQuantisedTiles)
                                                                   : kForwardTiles;
  const ForwardTile *best = cheapest(table, [&](const ForwardTile &t) {
    const Config c = with(any, t);
    const bool fits = c.head_dim <= t.most_dim && c.head_dim_v <= t.most_dim_v && (load & t.loads) && !(crowded && t.tile_k > 96) &&
                      !(c.features.dropout && t.tile_k % 32) && !(takes_registers && t.blocks_per_sm > 2) &&
                      (!p.quantised() || (!(c.features.by_column && t.registers_load < kOfColumns) &&
                                          t.blocks_per_sm * (c.shared_bytes() + 1024) <= device.shared_per_sm));
    if (!fits || !divides_blocks(p, c.tile_q())) return kCannotRun;
    if (p.invariant) return t.suits.least_keys == 0 && t.suits.most_keys == INT64_MAX ? 0 : kCannotRun;
    if (wishes) return distance(p, c.tile_q(), c.tile_k);
    if (!first) first = &t;
    return t.most_dim == first->most_dim && t.most_dim_v == first->most_dim_v ? cost(t.suits, p, c, device) : kCannotRun;
  });
  if (!best) return {};
  Config c = with(any, *best);
  c.page_rows = page_rows(p, c.tile_k);
  return c;
}

} // namespace strobe::cuda
