#include "cuda/families/sm90_backward_forms.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "attention/work.h"
#include "cuda/families/sm90_backward_work.h"
#include "cuda/program/arguments.h"
#include "cuda/program/tensor_maps.h"

namespace strobe::cuda {
namespace {

using sm90::BackwardConfig;

// Whether key tiles add to dQ in turns, so that a sum always has the same order.
bool in_turns(const Problem &p) { return p.deterministic || p.invariant; }

// Whether, in heads of up to kMostDimOf128Keys, blocks of 64 keys are faster than blocks of 128 for any number of blocks.
bool takes_64_keys(const Problem &p, const Features &f) {
  if (larger_dim(p) <= 64) return false;
  // These combinations of options, with dK and dV, take more registers than a warpgroup has.
  const bool costly_pair = (f.curved() && (f.dropout || (f.band && in_turns(p)))) || (f.mask && f.dropout && f.band);
  // In a part the loading threads walk over ranges; these options leave them too few registers.
  if (f.part && (f.curved() || (f.dropout && in_turns(p)))) return true;
  const bool crowded = (f.bias != 0) + (f.mask || (f.alibi && f.bias)) + f.curved() + costly_pair > 1;
  return crowded || (f.blocks && (p.blocks.block_k % 128 || f.dropout || f.curved()));
}

// The time of these blocks relative to the same work spread evenly over all SMs.
double uneven(double blocks, const Device &device) { return std::ceil(blocks / device.sms) / (blocks / device.sms); }

// Whether a block may own the dQ of its (batch, key head) pair. Such a dQ needs no zeroing, no turns, and no launch that rounds it. The
// block's first key tile stores to dQ, and its later tiles add. So every query must see some of the first keys, and every key must be seen.
bool may_own_dq(const Problem &p, const Features &f) {
  if (f.blocks || p.varlen || p.seqused_k || !p.dq || p.invariant) return false; // invariant: independent of lengths
  if (f.part || f.unrounded_gradients()) return false;
  if (larger_dim(p) > 64 && (f.curved() || f.dropout || f.bias)) return false; // too few registers
  const Band band = Band::make(p.seqlen_q, p.seqlen_k, p.bottom_right, p.window_left, p.window_right);
  return p.window_left == kUnbounded && band.high >= 0 && band.high + p.seqlen_q >= p.seqlen_k;
}

// Whether it is faster that blocks own dQ if dQ has more than 64 columns and its sum lies in global memory. Each block then works at one
// (batch, key head) pair, which must stay in the L2 cache, and SMs idle if pairs do not fill them evenly.
bool owns_dq_in_memory(const Problem &p, const BackwardConfig &c, const Device &device) {
  if (c.columns() == 64 || !may_own_dq(p, c.features)) return false;
  constexpr double kPartOfCache = 0.6; // measured: 15 to 34% faster if pairs take 0.5 of the cache, 5% at 0.6, equal at 0.7
  const double pairs = double(p.batch * p.heads_kv), blocks = pairs * double(tiles(p.seqlen_k, c.tile_k()));
  if (std::min(pairs, double(device.sms)) * double(pair_bytes(p, c)) > kPartOfCache * double(device.l2)) return false;
  const double products = 5 * visible_scores(p) * (c.head_dim + c.head_dim_v) / (kFlopsPerSm * device.sms);
  const double rows = double(p.batch * p.heads * p.seqlen_q);
  return products * (uneven(pairs, device) - uneven(blocks, device)) < rows * 8 * c.columns() / kBytes;
}

// Whether tiles of 80 queries are slower than tiles of 64. They multiply at a higher rate, but compute more scores that are hidden or past
// the end. With a band, tiles of 64 are faster by 1 to 10% (H200) if queries, or the band's width, are at most 4096; without a band, if
// tiles of 80 have 7% more rows. Invariant: dK and dV are sums over query tiles, so the tile is the same for all lengths.
bool wastes_80(const Problem &p, const Features &f) {
  if (p.invariant) return f.band;
  if (f.band) {
    const bool bounded = p.window_left != kUnbounded && p.window_right != kUnbounded;
    return std::min(p.seqlen_q, bounded ? p.window_left + p.window_right + 1 : p.seqlen_q) <= 4096;
  }
  return double(tiles(p.seqlen_q, 80) * 80) > 1.07 * double(tiles(p.seqlen_q, 64) * 64);
}

// Whether tiles of 80 queries are slower than tiles of 64 in short walks without a band at head dimension 128. With tiles of 64, but not of
// 80, shared memory has room for the two stages that in_line.h needs. Speed of 64-query over 80-query tiles, if they have no more rows:
// 1.04 at 1024 queries; 1.01 at 2048, where they are not taken (H100, H200).
bool wastes_80_in_line(const Problem &p, const BackwardConfig &of_64, const Device &device) {
  return !of_64.features.band && larger_dim(p) > 112 && p.seqlen_q <= 1024 && tiles(p.seqlen_q, 64) * 64 <= tiles(p.seqlen_q, 80) * 80 &&
         stages_keys(p, of_64, tiles_with_keys(p, of_64.tile_k()), device);
}

// Whether the score's options leave enough registers for tiles of 128 queries (heads of up to 64 columns). Speed of 128-query over 64-query
// tiles on an H200: 1.21 to 1.30 with a block mask, 1.14 to 1.25 with ALiBi, 0.94 with a bias, below 1 with a function of the score;
// dropout spills.
bool leaves_registers(const Problem &p, const Features &f) {
  constexpr int32_t kFew = 6; // instructions of the caller's functions for a pair; up to these no kernel spills
  if (function_instructions(p) > kFew) return false;
  return !f.mask && !f.bias && !f.curved() && !f.scaled && !f.dropout && (!f.blocks || p.blocks.block_q % 128 == 0);
}

// Lets the copy engine load the bias, if it can and shared memory has room.
BackwardConfig with_bias(BackwardConfig c, const Problem &p, const Device &device) {
  c.bias_by_tma = maps_bias(p);
  if (shared_bytes(p, c) > device.shared_per_block) c.bias_by_tma = 0;
  return c;
}

// Whether blocks walk over enough query tiles to gain from keys in registers. Each iteration then reads less shared memory, but the walk
// begins later. Speed relative to keys in shared memory (H200, heads of up to 64 columns): 1.02 to 1.08 without a band; with a band 1.01
// from 8 iterations on, 0.97 for 4.
bool walks_on(const Problem &p, const BackwardConfig &c) {
  return !c.features.band || (!p.invariant && mean_walk(p, c) >= 8.0 * c.tile_q * c.tile_k());
}

BackwardConfig begin(const Problem &p, const Features &f) {
  BackwardConfig c = begin_config<BackwardConfig>(p, 16);
  c.features = f;
  c.registers_load = 40, c.registers_compute = 232;
  c.deterministic = in_turns(p) && p.dq;
  c.invariant = p.invariant;
  c.key_stages = 1;
  return c;
}

BackwardConfig of_64_keys(const Problem &p, const Features &f) {
  BackwardConfig c = begin(p, f);
  c.roles = 1, c.tile_q = 64;
  // Otherwise the computing warpgroups would spill, or the loading threads, which have fewer registers if registers hold keys.
  const bool room = larger_dim(p) <= 192 && !f.blocks && !f.part && !(f.bias && f.curved());
  c.keys_in_registers = room && walks_on(p, c);
  if (c.keys_in_registers) c.registers_load = 24, c.registers_compute = 240;
  return c;
}

// The form with 128 keys for heads beyond kMostDimOf128Keys. Beside dK and dV, and 32 registers for the rest, a warpgroup has registers for
// S and dP of a tile of few queries. Null if these would be fewer than 32 queries, or if an option takes more registers.
std::optional<BackwardConfig> of_fewer_queries(const Problem &p, const Features &f, const Device &device) {
  const int options = (f.alibi != 0) + (f.mask != 0) + (f.dropout != 0) + (f.function != 0) + f.seen;
  BackwardConfig c = begin(p, f);
  if (f.blocks || f.bias || f.scaled || options + (f.part != 0) > 1 || std::max(c.columns(), c.columns_v()) > 192) return {};
  if (!f.part) c.registers_load = 24, c.registers_compute = 240; // a part's loading threads walk over ranges
  c.exact_p = f.curved() || f.dropout;
  c.tile_q = std::min(64, (c.registers_compute - 32 - (c.head_dim + c.head_dim_v) / 2) / 16 * 16 - 16 * options);
  // If key tiles take turns, dQ is added through shared memory. The tile does not depend on whether dQ is asked for, because dK and dV of
  // an invariant call are sums over query tiles.
  c.dq_shared = in_turns(p);
  while (c.tile_q >= 32 && c.shared_bytes() > device.shared_per_block) c.tile_q -= 16;
  c.dq_shared = c.deterministic;
  if (c.tile_q < 32) return {};
  return c;
}

// Holds K and V, or V alone, in registers for heads of 65 to 112 columns, where S and dP leave room. dQ is then added from registers as
// well. Speed relative to K and V in shared memory (H100): 1.05 to 1.12 at head dimensions 80 and 96, 1.06 at 112. At 128 there is no room,
// and adding dQ from registers gains nothing by itself (0.98 beyond lengths of 4k).
void hold_keys(BackwardConfig &c, const Problem &p) {
  constexpr int32_t kRegisters = 208; // a thread's registers for dK, dV, K, V, and S and dQ; with more it spills
  const Features &f = c.features;
  if (c.head_dim <= 64 || larger_dim(p) > 112 || c.deterministic || c.owns_dq || p.invariant) return;
  if (f.by_element() || f.dropout || f.blocks || f.part) return; // these options need the registers
  c.dq_shared = 0, c.registers_load = 24, c.registers_compute = 240;
  const int32_t room = kRegisters - (c.head_dim + c.head_dim_v) / 2 - c.tile_q;
  c.keys_in_registers = (c.head_dim + c.head_dim_v) / 4 <= room;
  c.values_in_registers = !c.keys_in_registers && c.head_dim_v / 4 <= room;
}

// The seconds in which an SM walks a key tile over query tiles, in heads of up to 64 columns. Tiles of 64 queries are slower than tiles of
// 128. The constants here and in pays_to_own_dq() were measured on an H100 (head dimensions 32 and 64, 128 to 577 keys).
double narrow_walk(const Problem &p, const BackwardConfig &c) {
  constexpr double kOf64Queries = 1.17;
  const double score = (1.46e-6 + 7.5e-9 * (c.head_dim + c.head_dim_v)) / (128 * 128);
  return mean_walk(p, c) * score * (c.tile_q == 64 ? kOf64Queries : 1);
}

// The form for up to 64 columns in which blocks own dQ and keep its sum in shared memory; null if the sum does not fit.
std::optional<BackwardConfig> with_own_dq(BackwardConfig c, const Problem &p, const Device &device) {
  if (c.features.curved() && c.features.bias) return {}; // too few registers
  c.owns_dq = c.persistent = 1, c.deterministic = c.dq_shared = c.staged_store = 0;
  BackwardConfig small = c;
  small.tile_q = 64;
  const auto fits = [&](BackwardConfig x) {
    x.bias_by_tma = maps_bias(p);
    return shared_bytes(p, x) <= device.shared_per_block;
  };
  if (fits(c) && narrow_walk(p, c) <= narrow_walk(p, small)) return c;
  return fits(small) ? std::optional(small) : std::nullopt;
}

// Whether the form that owns dQ is faster. Its dQ is neither set to 0, nor added up in the L2 cache, nor rounded by another launch; but SMs
// idle if (batch, key head) pairs do not fill them evenly. apart: the other form. With two stages of K and V it loads the next tile of keys
// during the current one, so that all tiles of a block but the first cost less to begin and to end.
bool pays_to_own_dq(const Problem &p, const BackwardConfig &own, const BackwardConfig &apart, const Device &device) {
  constexpr double kTile = 2.74e-6, kColumnOfStagedTile = 18e-9, kLaunch = 0.5e-6;
  const double owned = std::ceil(double(p.batch * p.heads_kv) / device.sms) * double(tiles(p.seqlen_k, own.tile_k()));
  const Walks w = walks(p, Operation::backward, apart.tile_q, apart.tile_k());
  const double others = std::max(1.0, w.last(device.sms) / w.mean); // key tiles that an SM computes in the form `apart`
  const bool staged = stages_keys(p, apart, tiles_with_keys(p, apart.tile_k()), device);
  const double tile = staged ? kColumnOfStagedTile * (own.head_dim + own.head_dim_v) : kTile;
  const double lost = owned * (kTile + narrow_walk(p, own)) - kTile - others * narrow_walk(p, apart) - (others - 1) * tile;
  return lost < kLaunch + query_rows(p) * 8 * own.head_dim / (kBytes / 132 * device.sms);
}

BackwardConfig of_128_keys(const Problem &p, const Features &f, const Device &device) {
  BackwardConfig c = begin(p, f);
  c.owns_dq = owns_dq_in_memory(p, c, device);
  if (c.owns_dq) c.persistent = 1, c.deterministic = 0;        // one block adds to dQ, so the order is fixed without turns
  const bool costly = f.by_element() || f.dropout || f.blocks; // scores, or the walk, take more registers
  c.staged_store = p.wishes.staged_store && !f.part && !f.unrounded_gradients() && c.columns() <= c.columns_v();
  c.exact_p = f.curved() || f.dropout;
  c.dq_shared = c.head_dim > 64 || c.deterministic || (!f.band && costly);
  if (std::max(c.head_dim, c.head_dim_v) <= 64) {
    c.tile_q = leaves_registers(p, f) ? 128 : 64;
    c.keys_in_registers = walks_on(p, c);
  } else { // the threads that load and order have registers for no more than 64 with some options
    c.tile_q = 64;
    const bool takes_80 = !costly && c.head_dim > 64 && !c.owns_dq && !(f.part && c.deterministic);
    if (takes_80 && !wastes_80(p, f) && !wastes_80_in_line(p, c, device)) c.tile_q = 80;
  }
  if (c.tile_q == 80 || (c.exact_p && c.head_dim > 64)) c.registers_load = 24, c.registers_compute = 240;
  hold_keys(c, p);
  if (c.columns() > 64 || !may_own_dq(p, f)) return c;
  const std::optional<BackwardConfig> own = with_own_dq(c, p, device);
  return own && pays_to_own_dq(p, *own, c, device) ? *own : c;
}

// Whether both forms, blocks of 64 and of 128 keys, may serve the call. In heads of up to kMostDimOf128Keys, with dropout or a function of
// the score, blocks of 128 keys compute dS from P in FP32, and blocks of 64 do not. Invariant: the choice must not depend on lengths.
bool takes_either(const Problem &p, const Features &f) {
  const bool wide = beyond_128_keys(p), crowded = !wide && ((f.bias && (f.mask || f.alibi)) || f.curved() || f.dropout);
  return !(crowded || f.blocks || f.part || p.invariant || p.wishes.persistent.value_or(false));
}

// Whether blocks of 64 keys are faster where both forms may serve. The warpgroups of such a block share its keys, so it takes about as long
// for a query tile as a block of 128 keys (with more than 128 columns, 0.65 times as long). But it begins 3 µs sooner, and uneven walks
// fill the SMs more evenly. Speed relative to 128 keys (H100, head dimensions 64 and 128): 1.01 to 1.29 where it is chosen, 0.63 to 1.02
// where it is not.
bool fill_better(const Problem &p, const BackwardConfig &of_64, const BackwardConfig &of_128, const Device &device) {
  const auto queries = [&](const BackwardConfig &c) { // how many queries an SM has walked over when the last block ends
    return walks_of(of_shares(p, count_shares(p, c, device)), c).last(device.sms) / c.tile_k();
  };
  return (beyond_128_keys(p) ? 0.65 : 1.0) * queries(of_64) <= 1.05 * queries(of_128);
}

BackwardConfig configuration(const Problem &p, const Features &f, const Device &device) {
  const bool wide = beyond_128_keys(p);
  std::optional<BackwardConfig> of_128;
  if (wide)
    of_128 = of_fewer_queries(p, f, device);
  else if (!takes_64_keys(p, f))
    of_128 = of_128_keys(p, f, device);
  if (!of_128 || (p.wishes.tile_k == 64 && takes_either(p, f))) return of_64_keys(p, f);
  if (!takes_either(p, f) || p.wishes.tile_k == 128) return *of_128;
  if (wide && of_128->deterministic) return *of_128;                     // 1.1 to 2.2 times as fast (H200), also with few blocks
  if (tiles_with_keys(p, of_128->tile_k()) > device.sms) return *of_128; // no SM idles
  const BackwardConfig of_64 = of_64_keys(p, f);
  return fill_better(p, of_64, *of_128, device) ? of_64 : *of_128;
}

} // namespace

BackwardConfig choose_form(const Problem &p, const Features &f, const Device &device) {
  return with_bias(configuration(p, f, device), p, device);
}

} // namespace strobe::cuda
