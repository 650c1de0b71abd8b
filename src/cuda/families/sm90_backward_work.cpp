#include "cuda/families/sm90_backward_work.h"

#include <algorithm>

#include "../../../kernels/attention/packed_tiles.h"
#include "attention/work.h"
#include "cuda/families/sm90_steps.h"
#include "cuda/program/part.h"

namespace strobe::cuda {

using sm90::BackwardConfig;

namespace {

bool numbers_keys(const Problem &p, int64_t tile_k) { return worth_numbering(p, p.total_k, p.seqlen_k, tile_k); }
// The number of (batch, key head) pairs, and the number of a pair's key tiles. If key tiles are numbered through all sequences, a pair is a
// key head and has the key tiles of all sequences.
int64_t pairs_of(const Problem &p, int64_t tile_k) { return (numbers_keys(p, tile_k) ? 1 : p.batch) * p.heads_kv; }
int64_t tiles_of_pair(const Problem &p, int64_t tile_k) {
  return numbers_keys(p, tile_k) ? count_packed_tiles(p.total_k, p.batch, tile_k) : key_tiles(p, tile_k);
}

// How many (batch, key head) pairs run their key tiles together and share the L2 cache. More pairs run together if some tiles take longer,
// so that more of the long tiles start first; and if tiles add to dQ in turns, so that fewer tiles of one pair wait for each other.
int64_t pairs_in_bundle(const Problem &p, const BackwardConfig &c) {
  constexpr int64_t kCache = 64 << 20;
  const bool some_longer = c.features.band || c.features.blocks || p.varlen;
  // With `deterministic` and heads of up to 64 columns at least 16 pairs run together, although they overflow the L2 cache: 1.07 to 1.09
  // times as fast (H200, 8k and 16k, causal). With 128 columns the ratio is 0.96 to 1.03, so the rule does not apply there.
  const int64_t least = c.deterministic && larger_dim(p) <= 64 ? 16
                        : some_longer                          ? 4
                                                               : 1,
                most = c.deterministic ? 32
                       : some_longer   ? 16
                                       : 4;
  const int64_t size = std::clamp<int64_t>(kCache / (some_longer ? 1 : c.deterministic ? 2 : 4) / pair_bytes(p, c), least, most);
  const int64_t pairs = pairs_of(p, c.tile_k());
  return p.wishes.bundle ? std::clamp<int64_t>(p.wishes.bundle, 1, std::max<int64_t>(1, pairs)) : even_bundle(pairs, size);
}

// The form with two stages of K and V. Beyond 64 columns no shared memory is left to stage dQ, so dQ is added from registers.
BackwardConfig with_stages(BackwardConfig c, const Problem &p) {
  constexpr int32_t kRegisters = 200; // per thread, as in hold_keys(); the loop over keys takes eight more
  c.key_stages = 2;
  if (larger_dim(p) <= 64) return c;
  c.dq_shared = 0, c.registers_load = 40, c.registers_compute = 232;
  if (c.keys_in_registers && 3 * (c.head_dim + c.head_dim_v) / 4 + c.tile_q > kRegisters)
    c.keys_in_registers = 0, c.values_in_registers = 1;
  return c;
}
// Whether persistent blocks have room for two stages of K and V.
bool has_stages(const Problem &p, const BackwardConfig &c, const Device &device) {
  const Features &f = c.features;
  if (c.roles || f.part || c.deterministic || c.owns_dq || beyond_128_keys(p)) return false;
  if (f.curved() && f.bias) return false; // these options take too many registers
  return shared_bytes(p, with_stages(c, p)) <= device.shared_per_block;
}

// Whether `in_line` is faster: the first product of the next key tile begins before the last product of the current one ends. The tensor
// cores are then not idle between key tiles, but K stays in use longer, so that loads begin later. items: the key tiles of all (batch, key
// head) pairs.
//
// Up to 64 columns, speed relative to two stages that are not in line (H100): if key tiles walk over 3 to 5 query tiles of 128, 1.03 to
// 1.075 at head dimension 64, 1.02 to 1.04 at 40 and 48, 1.01 to 1.02 at 32, 0.98 at 16; over 2 or 2.5 query tiles 0.92 to 1.03; over one
// 0.81 to 1.04; with grouped heads 0.995 to 1.02.
// Beyond 64 columns, relative to a block per key tile (H100 and H200): 1.01 to 1.09 if key tiles walk over 4 to 20 query tiles of 64, but
// 0.99 over 5 on an H100; over 27 or more 1.01 at head dimension 128, 0.99 at 80 and 96; over 3 tiles 0.98 to 1.04; where an SM has two
// key tiles 0.98; with grouped heads 0.97 to 1.00. In a window, relative to persistent blocks with one stage: 1.02 to 1.03 over 18 tiles,
// 0.96 over 6.
bool comes_in_line(const Problem &p, const BackwardConfig &c, int64_t items, const Device &device) {
  const Features &f = c.features;
  if (f.by_element() || f.dropout || f.blocks || f.seqused || p.varlen) return false; // not measured; or the host does not know the lengths
  if (p.group() > 1 || c.split_group || std::min(c.head_dim, c.head_dim_v) < 32) return false;
  const double walk = mean_walk(p, c) / double(c.tile_q * c.tile_k()); // in query tiles
  if (larger_dim(p) <= 64) return walk >= 3;
  return walk >= (narrow_window(p) ? 8 : 4) && walk < (larger_dim(p) > 112 ? 48 : 24) && items >= 3 * device.sms;
}
// Whether persistent blocks have two stages. Beyond 64 columns two stages pay only if tiles are in line.
bool takes_stages(const Problem &p, const BackwardConfig &c, int64_t items, const Device &device) {
  return has_stages(p, c, device) && (larger_dim(p) <= 64 || comes_in_line(p, c, items, device));
}

// Whether persistent blocks, which take one key tile after another, are faster. Only their first tile waits for a block to start, and K and
// V of the next tile load while dK and dV are stored. Speed relative to a block per key tile (H100): 0.99 to 1.13 if tiles add to dQ in
// turns, 1.02 to 1.05 with a block mask, 1.00 to 1.06 under a window, else 0.94 to 1.03 (head dimension 64: mostly below 1). With two
// stages of K and V and up to 64 columns: 1.06 to 1.21 if a key tile walks over 3 to 5 tiles of 128 queries, no gain from 8 query tiles on.
bool persistent(const Problem &p, const BackwardConfig &c, int64_t items, const Device &device) {
  constexpr double kLongWalk = 8 * 128 * 128; // scores
  if (c.roles || c.features.part) return false;
  if (c.deterministic && c.features.seqused && c.registers_load < 40)
    return false;                                                       // the threads that load and order have too few registers
  if (c.packed && !c.deterministic && beyond_128_keys(p)) return false; // the computing threads have too few registers
  if (p.wishes.persistent) return *p.wishes.persistent;
  if (items <= device.sms) return false;
  if (c.deterministic || c.features.blocks || narrow_window(p)) return true;
  return takes_stages(p, c, items, device) && (larger_dim(p) > 64 || mean_walk(p, c) < kLongWalk);
}

} // namespace

int64_t tiles_with_keys(const Problem &p, int64_t tile_k) {
  const int64_t all = p.batch * key_tiles(p, tile_k);
  return p.heads_kv * (numbers_tiles(p) ? std::min<int64_t>(all, count_packed_tiles(p.total_k, p.batch, tile_k)) : all);
}

int64_t pair_bytes(const Problem &p, const BackwardConfig &c) {
  return std::max<int64_t>(1, p.seqlen_q * p.group() * (8 * c.columns() + 2 * c.columns_v()));
}

int64_t shared_bytes(const Problem &p, const BackwardConfig &c) {
  return c.shared_bytes() + (c.dq_sum_in_shared() ? tiles(p.seqlen_q, c.tile_q) * p.group() * c.dq_sum_bytes() : 0);
}

bool stages_keys(const Problem &p, const BackwardConfig &c, int64_t tiles, const Device &device) {
  return persistent(p, c, tiles, device) && takes_stages(p, c, tiles, device);
}

Problem of_shares(const Problem &p, int64_t shares) {
  Problem split = p;
  split.heads_kv *= shares;
  return split;
}

Walks walks_of(const Problem &p, const BackwardConfig &c) {
  const Walks w = walks(p, Operation::backward, c.tile_q, c.tile_k());
  if (!c.owns_dq) return w;
  const double all = w.mean * double(tiles(p.seqlen_k, c.tile_k())); // of one walk over all key tiles of a (batch, key head) pair
  return {w.scores() / all, all, all};
}

double predicted_seconds(const Problem &whole, const BackwardConfig &c, int64_t shares, const Device &device) {
  const Problem p = of_shares(whole, shares);
  // Measured on an H200: an SM's FLOP per second on whole tiles; and the seconds that the starts of all kernels take.
  constexpr double kRate = 5.2e12, kWideRate = 4.6e12, kWideRateOf32Queries = 4.1e12, kRolesRate = 3.9e12, kLaunches = 6e-6;
  // kBlockSeconds: a thread block's time to begin and to store. With up to 128 columns, the warpgroups of a block of 64 keys share these
  // keys. On an H100 such a block takes as long for a query tile as a block of 128 keys, hence the factor kShared for the rate; but it
  // starts 3 µs sooner.
  constexpr double kShared = 0.667, kBlockSeconds = 7e-6, kSharedBlockSeconds = 4e-6;
  constexpr double kStagedBlockSeconds = 4.5e-6; // H100, with two stages of keys: the next keys load during a tile
  constexpr double kBiasPerClock = 1400;         // FLOP per clock and SM of the products in kernels/mma, for dbias
  const Walks w = walks_of(p, c);
  const bool wide = beyond_128_keys(p), shared = c.roles && !wide;
  const double columns = c.head_dim + c.head_dim_v;
  const double of_128 = !wide ? kRate : c.tile_q > 32 ? kWideRate : kWideRateOf32Queries;
  const double rate = (c.roles ? kRolesRate : of_128) * (shared ? kShared : 1) / (5 * columns);
  const double block = shared ? kSharedBlockSeconds : c.key_stages == 2 ? kStagedBlockSeconds : kBlockSeconds;
  const double sums = shares > 1 ? 3e-6 + key_rows(p) * 8 * (c.columns() + c.columns_v()) / kBytes : 0;
  const double bias = p.dbias ? 2 * w.scores() * columns / (kBiasPerClock * device.sms * device.clock_hz) : 0;
  const double missing = missing_seconds(p, w, device, c.tile_k(), pairs_in_bundle(p, c), 8 * c.columns() + 2 * c.columns_v());
  const double main = std::max(seconds(w, device, 1, rate, block), missing);
  return kLaunches + main + sums + bias + rows_seconds(p, c.head_dim, c.head_dim_v, !c.owns_dq);
}

// The predictions compared here all assume one stage of K and V (kBlockSeconds). share_out() decides about two stages afterwards, because
// whether blocks are persistent depends on the number of shares.
int64_t count_shares(const Problem &p, const BackwardConfig &c, const Device &device) {
  constexpr double kGain = 0.93; // shares take memory: they must take at most this fraction of the time without them
  const int64_t group = p.group();
  if (c.owns_dq || p.invariant || (!p.dk && !p.dv)) return 1;
  if (p.wishes.shares && group % p.wishes.shares == 0) return p.wishes.shares;
  int64_t best = 1;
  double least = kGain * (group > 1 ? predicted_seconds(p, c, 1, device) : 0);
  for (int64_t n = 2; n <= group; n++) {
    if (group % n || double(n) * key_rows(p) > query_rows(p)) continue;
    if (n * pairs_of(p, c.tile_k()) * tiles_of_pair(p, c.tile_k()) > int64_t{1} << 28) break; // far more blocks than can help
    if (const double time = predicted_seconds(p, c, n, device); time < least) best = n, least = time;
  }
  return best;
}

Work share_out(BackwardConfig &c, const Problem &p, const Inputs &in, const Device &device) {
  c.packed = numbers_keys(p, c.tile_k());
  const int64_t shares = count_shares(p, c, device), bundle = c.owns_dq ? 1 : pairs_in_bundle(of_shares(p, shares), c);
  Work work{.shares = shares,
            .bundle = bundle,
            .pairs = tiles(pairs_of(p, c.tile_k()) * shares, bundle) * bundle,
            .tiles_k = tiles_of_pair(p, c.tile_k()),
            .tiles_q = all_query_tiles(p, in, c.tile_q)};
  c.split_group = work.shares > 1;
  const Problem shared = of_shares(p, shares);
  const int64_t tiles_of_all = tiles_with_keys(shared, c.tile_k());
  if (!c.owns_dq) c.persistent = persistent(shared, c, tiles_of_all, device);
  if (c.persistent && takes_stages(p, c, tiles_of_all, device)) c = with_stages(c, p);
  c.in_line = c.key_stages == 2 && comes_in_line(p, c, tiles_of_all, device);
  if (c.persistent || c.split_group) c.staged_store = 0;
  const int64_t items = c.owns_dq ? work.pairs : work.tiles_k * work.pairs;
  work.blocks = c.persistent ? std::min<int64_t>(items, device.sms) : items;
  return work;
}

} // namespace strobe::cuda
