// The backward of kernels/sm90: LSE, D and room for dQ; dQ, dK and dV; dQ in 16 bits; dsinks.
#include "cuda/families/sm90_backward.h"

#include <algorithm>
#include <cmath>

#include "../../../kernels/attention/packed_tiles.h"
#include "../../../kernels/sm90/backward/config.h"
#include "attention/text.h"
#include "attention/work.h"
#include "cuda/families/sm90_mask.h"
#include "cuda/families/sm90_steps.h"
#include "cuda/program/arguments.h"
#include "cuda/program/part.h"
#include "cuda/program/passes.h"
#include "cuda/program/prediction.h"
#include "cuda/program/tiles.h"

namespace strobe::cuda {

template <class V> void each_pointer(const HopperBackwardArguments &a, V &visit) {
  each_pointer(static_cast<const BackwardArguments &>(a), visit);
  for (const MappedOperand *x : {&a.tma_q, &a.tma_k, &a.tma_v, &a.tma_dout, &a.tma_bias}) visit(x->map);
}

namespace {

using sm90::BackwardConfig;

constexpr KernelSource kBackward{"sm90/backward/backward.h", "strobe::sm90::Backward", "strobe::sm90::BackwardConfig", true};
constexpr KernelSource kByRoles{"sm90/backward/roles.h", "strobe::sm90::BackwardRoles", "strobe::sm90::BackwardConfig", true};

// The widest head that leaves a warpgroup registers for both dK and dV of its keys, whatever the options.
constexpr int64_t kMostDimOf128Keys = 128;

int64_t larger_dim(const Problem &p) { return std::max(p.head_dim, p.head_dim_v); }

// Sums of dQ have one order: tiles of keys add to it in turns.
bool in_turns(const Problem &p) { return p.deterministic || p.invariant; }

// Why it does not carry this; empty if it does.
std::string refusal(const Problem &p, const Features &f) {
  if (p.accumulate && p.dbias) return "its backward adds to no gradients beside that of a bias";
  if (p.invariant && p.bias) return kNoInvariantBias;
  if (p.invariant && p.softcap > 0)
    return "has no invariant backward with a softcap: whether it is approximated is said of many scores at once";
  if (larger_dim(p) > kMostDimOf128Keys) {
    if (f.bias && (f.mask || f.alibi || f.dropout))
      return text("its backward takes a bias with no mask, alibi_slopes or dropout where head dimensions exceed ", kMostDimOf128Keys);
    if (f.function && f.alibi && f.dropout)
      return text("its backward takes at most two of alibi_slopes, dropout and softcap where head dimensions "
                  "exceed ",
                  kMostDimOf128Keys);
    if (f.part && f.function) return text("its backward takes no softcap in parts where head dimensions exceed ", kMostDimOf128Keys);
    if (f.function == kHyperbolic) return text("its backward takes no hyperbolic scores where head dimensions exceed ", kMostDimOf128Keys);
  }
  if (!p.q || !p.k || !p.v || !p.dout || !p.seqlen_q || !p.seqlen_k) return "there are no queries or no keys to fetch";
  if (std::string reason = unmapped_inputs(p); !reason.empty()) return reason;
  if (std::string reason = unmapped("dout", p.dout, p.head_dim_v); !reason.empty()) return reason;
  for (const auto &[name, view, columns] : {std::tuple{"out", &p.out, p.head_dim_v}, std::tuple{"dq", &p.dq, p.head_dim},
                                            std::tuple{"dk", &p.dk, p.head_dim}, std::tuple{"dv", &p.dv, p.head_dim_v}})
    if (!aligned(*view, columns)) return text(name, "'s rows do not lie on 16-byte addresses");
  return broadcast_row({&p.q, &p.dout}, {&p.k, &p.v}, p);
}

// Do 64 keys a block serve better than 128 up to kMostDimOf128Keys, however many blocks there are?
bool takes_64_keys(const Problem &p, const Features &f) {
  if (larger_dim(p) <= 64) return false;
  // A warpgroup's registers with dK and dV.
  const bool costly_pair = (f.function && (f.dropout || (f.band && in_turns(p)))) || (f.mask && f.dropout && f.band);
  // Those who load walk over ranges, and these leave them too few registers.
  if (f.part && (f.function || (f.dropout && in_turns(p)))) return true;
  const bool crowded = (f.bias != 0) + (f.mask || f.alibi) + (f.function != 0) + costly_pair > 1;
  return crowded || (f.blocks && (p.blocks.block_k % 128 || f.dropout || f.function));
}

constexpr double kFlopsPerSm = 560e12 / 132, kBytes = 3e12; // measured on an H200

// The factor by which thread blocks take longer than if they kept every SM busy.
double uneven(double blocks, const Device &device) { return std::ceil(blocks / device.sms) / (blocks / device.sms); }

bool numbers_keys(const Problem &p, int64_t tile_k) { return worth_numbering(p, p.total_k, p.seqlen_k, tile_k); }
// (batch, key head) pairs, and the tiles of keys of one; where these are numbered, key heads, and the tiles of all sequences.
int64_t pairs_of(const Problem &p, int64_t tile_k) { return (numbers_keys(p, tile_k) ? 1 : p.batch) * p.heads_kv; }
// All tiles that may have keys: packed sequences that are not numbered have empty ones as well.
int64_t tiles_with_keys(const Problem &p, int64_t tile_k) {
  const int64_t all = p.batch * key_tiles(p, tile_k);
  return p.heads_kv * (numbers_tiles(p) ? std::min<int64_t>(all, count_packed_tiles(p.total_k, p.batch, tile_k)) : all);
}
int64_t tiles_of_pair(const Problem &p, int64_t tile_k) {
  return numbers_keys(p, tile_k) ? count_packed_tiles(p.total_k, p.batch, tile_k) : key_tiles(p, tile_k);
}

// What a (batch, key head) pair reads, and adds up, time after time.
int64_t pair_bytes(const Problem &p, const BackwardConfig &c) {
  return std::max<int64_t>(1, p.seqlen_q * p.group() * (8 * c.columns() + 2 * c.columns_v()));
}

// Do blocks that own a pair's dQ serve better than one for each tile of keys? They spare its zeros, its turns and the launch that rounds
// it; but each works at a pair of its own, which must stay in the L2 cache, and SMs idle where pairs do not fill them evenly.
bool owns_dq(const Problem &p, const BackwardConfig &c, const Device &device) {
  const Features &f = c.features;
  if (f.blocks || p.varlen || p.seqused_k || !p.dq || p.invariant) return false; // invariant: lengths have no say
  if (f.part || f.unrounded_gradients()) return false;
  if (larger_dim(p) > 64 && (f.function || f.dropout || f.bias)) return false; // registers
  const Band band = Band::make(p.seqlen_q, p.seqlen_k, p.bottom_right, p.window_left, p.window_right);
  // The first keys are seen by all queries, and all keys by some.
  if (p.window_left != kUnbounded || band.high < 0 || band.high + p.seqlen_q < p.seqlen_k) return false;
  constexpr double kPartOfCache = 0.6; // measured: 15-34% faster at half of it, 5% at this, as fast at 0.7, slower beyond
  const double pairs = double(p.batch * p.heads_kv), blocks = pairs * double(tiles(p.seqlen_k, c.tile_k()));
  if (std::min(pairs, double(device.sms)) * double(pair_bytes(p, c)) > kPartOfCache * double(device.l2)) return false;
  const double products = 5 * visible_scores(p) * (c.head_dim + c.head_dim_v) / (kFlopsPerSm * device.sms);
  const double rows = double(p.batch * p.heads * p.seqlen_q);
  return products * (uneven(pairs, device) - uneven(blocks, device)) < rows * 8 * c.columns() / kBytes;
}

// Tiles of 80 queries multiply at a higher rate, but hold more of what is not seen or not there: 64 are faster by 1 to 10% (measured on an
// H200) where a band has up to 4096 queries or is as narrow, and without one where 80 make 7% more rows. Invariant: dK and dV are sums over
// tiles of queries, which are the same for all lengths.
bool wastes_80(const Problem &p, const Features &f) {
  if (p.invariant) return f.band;
  if (f.band) {
    const bool bounded = p.window_left != kUnbounded && p.window_right != kUnbounded;
    return std::min(p.seqlen_q, bounded ? p.window_left + p.window_right + 1 : p.seqlen_q) <= 4096;
  }
  return double(tiles(p.seqlen_q, 80) * 80) > 1.07 * double(tiles(p.seqlen_q, 64) * 64);
}

// Does what becomes of a score leave a head of up to 64 columns registers for tiles of 128 queries? Measured on an H200, 128 over 64:
// blocks 1.21 to 1.30, ALiBi 1.14 to 1.25; a bias 0.94, softcap slower, dropout spills.
bool leaves_registers(const Problem &p, const Features &f) {
  return !f.mask && !f.bias && !f.function && !f.scaled && !f.dropout && (!f.blocks || p.blocks.block_q % 128 == 0);
}

// Let the copy engine bring the bias, if it can and there is room.
BackwardConfig with_bias(BackwardConfig c, const Problem &p, const Device &device) {
  c.bias_by_tma = maps_bias(p);
  if (c.shared_bytes() > device.shared_per_block) c.bias_by_tma = 0;
  return c;
}

// Do blocks walk over so many tiles of queries that it is worth while to hold their keys in registers? Shared memory is read less in each
// iteration, but the walk begins later. On an H200, heads of up to 64 columns: 1.02 to 1.08 without a band, and with one 1.01 from 8
// iterations on, 0.97 for 4.
bool walks_on(const Problem &p, const BackwardConfig &c) {
  return !c.features.band || (!p.invariant && walks(p, Direction::backward, c.tile_q, c.tile_k()).mean >= 8.0 * c.tile_q * c.tile_k());
}

BackwardConfig begin(const Problem &p, const Features &f) {
  BackwardConfig c = begin_config<BackwardConfig>(p, 16);
  c.features = f;
  c.registers_load = 40, c.registers_compute = 232;
  c.deterministic = in_turns(p) && p.dq;
  c.invariant = p.invariant;
  return c;
}

BackwardConfig of_64_keys(const Problem &p, const Features &f) {
  BackwardConfig c = begin(p, f);
  c.roles = 1, c.tile_q = 64;
  // Beyond these a warpgroup that computes spills, or threads that load, which then have fewer registers.
  const bool room = larger_dim(p) <= 192 && !f.blocks && !f.part && !(f.bias && f.function);
  c.keys_in_registers = room && walks_on(p, c);
  if (c.keys_in_registers) c.registers_load = 24, c.registers_compute = 240;
  return c;
}

// Of heads beyond kMostDimOf128Keys, whose dK and dV leave a warpgroup registers for tiles of few queries: S and dP of as many, beside 32
// for the rest. Nothing, where these are fewer than 32, or where an option takes more.
std::optional<BackwardConfig> of_128_wide_keys(const Problem &p, const Features &f, const Device &device) {
  const int options = f.alibi + (f.mask != 0) + (f.dropout != 0) + (f.function != 0);
  BackwardConfig c = begin(p, f);
  if (f.blocks || f.bias || f.scaled || options + (f.part != 0) > 1 || std::max(c.columns(), c.columns_v()) > 192) return {};
  if (!f.part) c.registers_load = 24, c.registers_compute = 240; // those who load parts walk over ranges
  c.exact_p = f.function || f.dropout;
  c.tile_q = std::min(64, (c.registers_compute - 32 - (c.head_dim + c.head_dim_v) / 2) / 16 * 16 - 16 * options);
  // In turns dQ leaves through shared memory. Without a dQ tiles are the same, for dK and dV of an invariant call are sums over them.
  c.dq_shared = in_turns(p);
  while (c.tile_q >= 32 && c.shared_bytes() > device.shared_per_block) c.tile_q -= 16;
  c.dq_shared = c.deterministic;
  if (c.tile_q < 32) return {};
  return c;
}

BackwardConfig of_128_keys(const Problem &p, const Features &f, const Device &device) {
  BackwardConfig c = begin(p, f);
  c.owns_dq = owns_dq(p, c, device);
  if (c.owns_dq) c.persistent = 1, c.deterministic = 0;                // it is
  const bool costly = f.additive() || f.mask || f.dropout || f.blocks; // more registers for what becomes of a score, or for the walk
  c.staged_store = p.staged_store && !f.part && !f.unrounded_gradients() && c.columns() <= c.columns_v();
  c.exact_p = f.function || f.dropout;
  c.dq_shared = c.head_dim > 64 || c.deterministic || (!f.band && (costly || c.owns_dq));
  if (std::max(c.head_dim, c.head_dim_v) <= 64) {
    c.tile_q = leaves_registers(p, f) ? 128 : 64;
    c.keys_in_registers = walks_on(p, c);
  } else if (costly || c.head_dim <= 64 || c.owns_dq || (f.part && c.deterministic)) // registers of those who load and order
    c.tile_q = 64;
  else
    c.tile_q = wastes_80(p, f) ? 64 : 80;
  if (c.tile_q == 80 || (c.exact_p && c.head_dim > 64)) c.registers_load = 24, c.registers_compute = 240;
  return c;
}

// (batch, key head) pairs whose tiles run together: what they read and add up shares the L2 cache. Where some tiles take longer, more of
// them begin with long ones; where they take turns, the more pairs, the fewer tiles of one wait for one another.
int64_t pairs_in_bundle(const Problem &p, const BackwardConfig &c) {
  constexpr int64_t kCache = 64 << 20;
  const bool some_longer = c.features.band || c.features.blocks || p.varlen;
  // In turns: 16 of up to 64 columns, though they leave the cache (on an H200 1.07 to 1.09 at 8k and 16k, causal); of 128, 0.96 to 1.03.
  const int64_t least = c.deterministic && larger_dim(p) <= 64 ? 16
                        : some_longer                          ? 4
                                                               : 1,
                most = c.deterministic ? 32
                       : some_longer   ? 16
                                       : 4;
  const int64_t size = std::clamp<int64_t>(kCache / (some_longer ? 1 : c.deterministic ? 2 : 4) / pair_bytes(p, c), least, most);
  const int64_t pairs = pairs_of(p, c.tile_k());
  return p.bundle ? std::clamp<int64_t>(p.bundle, 1, std::max<int64_t>(1, pairs)) : even_bundle(pairs, size);
}

// As the main launch sees it: each share of a key head's query heads has a key head of its own.
Problem of_shares(const Problem &p, int64_t shares) {
  Problem split = p;
  split.heads_kv *= shares;
  return split;
}

Walks walks_of(const Problem &p, const BackwardConfig &c) {
  const Walks w = walks(p, Direction::backward, c.tile_q, c.tile_k());
  if (!c.owns_dq) return w;
  const double all = w.mean * double(tiles(p.seqlen_k, c.tile_k())); // one walk over all tiles of a pair's keys
  return {w.scores() / all, all, all};
}

double predicted_seconds(const Problem &whole, const BackwardConfig &c, int64_t shares, const Device &device) {
  const Problem p = of_shares(whole, shares);
  // Measured on an H200: of an SM on whole tiles, of the kernels' starts together, of a thread block to begin and to store
  constexpr double kRate = 5.2e12, kWideRate = 4.6e12, kWideRateOf32Queries = 4.1e12, kRolesRate = 3.9e12, kLaunches = 6e-6;
  // Where up to 128 columns share a tile of 64 keys (an H100): of the rate, as long for a tile of queries as 128 keys take; and a start
  // that is 3 µs shorter.
  constexpr double kShared = 0.667, kBlockSeconds[] = {7e-6, 4e-6};
  constexpr double kBiasPerClock = 1400; // kernels/mma's products for dbias, of an SM
  const Walks w = walks_of(p, c);
  const bool wide = larger_dim(p) > kMostDimOf128Keys, shared = c.roles && !wide;
  const double columns = c.head_dim + c.head_dim_v;
  const double of_128 = !wide ? kRate : c.tile_q > 32 ? kWideRate : kWideRateOf32Queries;
  const double rate = (c.roles ? kRolesRate : of_128) * (shared ? kShared : 1) / (5 * columns);
  const double sums = shares > 1 ? 3e-6 + key_rows(p) * 8 * (c.columns() + c.columns_v()) / kBytes : 0;
  const double bias = p.dbias ? 2 * w.scores() * columns / (kBiasPerClock * device.sms * device.clock_hz) : 0;
  const double missing = missing_seconds(p, w, device, c.tile_k(), pairs_in_bundle(p, c), 8 * c.columns() + 2 * c.columns_v());
  const double main = std::max(seconds(w, device, 1, rate, kBlockSeconds[shared]), missing);
  return kLaunches + main + sums + bias + rows_seconds(p, c.head_dim, c.head_dim_v, !c.owns_dq);
}

// In how many shares thread blocks take the query heads of a key head: in one, unless several are predicted to be clearly faster, since
// they fill the GPU more evenly or find more in the L2 cache. Their dK and dV may have as many rows as Q. Invariant: lengths have no say.
int64_t count_shares(const Problem &p, const BackwardConfig &c, const Device &device) {
  constexpr double kGain = 0.93; // predicted; for which it is worth the memory
  const int64_t group = p.group();
  if (c.owns_dq || p.invariant || (!p.dk && !p.dv)) return 1;
  if (p.shares && group % p.shares == 0) return p.shares;
  int64_t best = 1;
  double least = kGain * (group > 1 ? predicted_seconds(p, c, 1, device) : 0);
  for (int64_t n = 2; n <= group; n++) {
    if (group % n || double(n) * key_rows(p) > query_rows(p)) continue;
    if (n * pairs_of(p, c.tile_k()) * tiles_of_pair(p, c.tile_k()) > int64_t{1} << 28) break; // far more blocks than help
    if (const double time = predicted_seconds(p, c, n, device); time < least) best = n, least = time;
  }
  return best;
}

// May a block have 64 keys or 128? Up to kMostDimOf128Keys dropout and functions of a score make dS of P in FP32 always, which 64 keys do
// not; invariant: lengths have no say.
bool takes_either(const Problem &p, const Features &f) {
  const bool wide = larger_dim(p) > kMostDimOf128Keys, crowded = !wide && ((f.bias && (f.mask || f.alibi)) || f.function || f.dropout);
  return !(crowded || f.blocks || f.part || p.invariant || p.persistent);
}

// Do 64 keys a block serve better where either would do? A tile of queries takes such a block, whose warpgroups work at the same keys in
// turn, about as long as one of 128 keys (beyond 128 columns, 0.65 of it), but it begins 3 µs sooner, and walks that differ fill the SMs
// more evenly (an H100, d 64 and 128: 1.01 to 1.29 times as fast where it is chosen, 0.63 to 1.02 where it is not).
bool fill_better(const Problem &p, const BackwardConfig &of_64, const BackwardConfig &of_128, const Device &device) {
  const auto queries = [&](const BackwardConfig &c) { // that the last block has walked over when it ends
    return walks_of(of_shares(p, count_shares(p, c, device)), c).last(device.sms) / c.tile_k();
  };
  return (larger_dim(p) > kMostDimOf128Keys ? 0.65 : 1.0) * queries(of_64) <= 1.05 * queries(of_128);
}

BackwardConfig configuration(const Problem &p, const Features &f, const Device &device) {
  const bool wide = larger_dim(p) > kMostDimOf128Keys;
  std::optional<BackwardConfig> of_128;
  if (wide)
    of_128 = of_128_wide_keys(p, f, device);
  else if (!takes_64_keys(p, f))
    of_128 = of_128_keys(p, f, device);
  if (!of_128 || (p.tile_k == 64 && takes_either(p, f))) return of_64_keys(p, f);
  if (!takes_either(p, f) || p.tile_k == 128) return *of_128;
  if (wide && of_128->deterministic) return *of_128;                     // an H200: 1.1 to 2.2 times as fast, with few blocks as well
  if (tiles_with_keys(p, of_128->tile_k()) > device.sms) return *of_128; // no SM idles
  const BackwardConfig of_64 = of_64_keys(p, f);
  return fill_better(p, of_64, *of_128, device) ? of_64 : *of_128;
}

// Do blocks serve better that take one tile of keys after the other? They spare a block's start and fetch K and V while others are stored.
// Measured on an H100: where tiles add to dQ in turns 0.99 to 1.13, with blocks 1.02 to 1.05, under a window 1.00 to 1.06; else 0.94 to
// 1.03, at d 64 mostly below 1.
bool persistent(const Problem &p, const BackwardConfig &c, int64_t items, const Device &device) {
  if (c.roles || c.features.part) return false;
  if (c.deterministic && c.features.seqused && c.registers_load < 40) return false;    // those who load and order have too few registers
  if (c.packed && !c.deterministic && larger_dim(p) > kMostDimOf128Keys) return false; // so have those who compute
  if (p.persistent) return *p.persistent;
  return items > device.sms && (c.deterministic || c.features.blocks || narrow_window(p));
}

Features backward_features(const Problem &p) {
  Features f = hopper_features(p);
  const double scale = std::abs(p.scale); // its sign does not matter where LSE is known
  if (f.function != kHyperbolic) f.scaled = scale != 0 && !(scale > 1e-30);
  return f;
}

// What thread blocks share out among them.
struct Work {
  int64_t shares;  // of a key head's query heads
  int64_t bundle;  // of pairs, which come together
  int64_t pairs;   // (batch, key head), once for each share; as if the last bundle were full
  int64_t tiles_k; // of a pair
  int64_t tiles_q; // of all heads and sequences
  int64_t blocks = 0;
};

// Also decides what of the Config follows from how much work there is.
Work share_out(BackwardConfig &c, const Problem &p, const Inputs &in, const Device &device) {
  c.packed = numbers_keys(p, c.tile_k());
  const int64_t shares = count_shares(p, c, device), bundle = c.owns_dq ? 1 : pairs_in_bundle(of_shares(p, shares), c);
  Work work{.shares = shares,
            .bundle = bundle,
            .pairs = tiles(pairs_of(p, c.tile_k()) * shares, bundle) * bundle,
            .tiles_k = tiles_of_pair(p, c.tile_k()),
            .tiles_q = all_query_tiles(p, in, c.tile_q)};
  c.split_group = work.shares > 1;
  if (!c.owns_dq) c.persistent = persistent(p, c, tiles_with_keys(p, c.tile_k()) * shares, device);
  if (c.persistent || c.split_group) c.staged_store = 0;
  const int64_t items = c.owns_dq ? work.pairs : work.tiles_k * work.pairs;
  work.blocks = c.persistent ? std::min<int64_t>(items, device.sms) : items;
  return work;
}

void take_workspace(HopperBackwardArguments &a, const Problem &p, const BackwardConfig &c, const Work &work, Scratch &scratch) {
  a.rows = scratch.take<float>(work.tiles_q * (c.lse_bytes() + c.row_bytes()) / 4);
  a.query_tiles = i32(p.heads ? work.tiles_q / (p.varlen ? p.heads : p.batch * p.heads) : 0);
  const int64_t dq_tiles = c.owns_dq ? work.blocks * p.group() * a.query_tiles : work.tiles_q;
  if (p.dq) a.dq_sum = scratch.take<float>(dq_tiles * c.tile_q * c.columns());
  if (c.deterministic || c.draws_keys()) a.turns = scratch.take<uint32_t>(1 + 2 * work.tiles_q);
  a.first_stores = c.owns_dq || (c.deterministic && !c.roles);
  if (p.bias || p.dsinks) a.delta = scratch.take<float>(2 * a.in.rows());
}

void order_pairs(HopperBackwardArguments &a, const Problem &p, const Work &work) {
  a.pairs = i32(work.pairs);
  order_tiles(a, work.tiles_k, work.bundle);
  a.heads_kv_divisor = Divisor::make(uint32_t(p.heads_kv * work.shares)), a.shares = Divisor::make(uint32_t(work.shares));
}

void map_operands(HopperBackwardArguments &a, const Problem &p, const BackwardConfig &c) {
  a.tma_q = mapped_queries(p, p.q, p.head_dim, c.tile_q), a.tma_dout = mapped_queries(p, p.dout, p.head_dim_v, c.tile_q);
  a.tma_k = mapped_keys(p, p.k, p.head_dim, c.tile_k()), a.tma_v = mapped_keys(p, p.v, p.head_dim_v, c.tile_k());
  if (c.bias_by_tma) map_bias(a, p, c.tile_q, c.bias_bytes(), c.tile_k());
}

// The mask's bits take its place.
Launch replace_mask(HopperBackwardArguments &a, const Problem &p, Scratch &scratch) {
  MaskBits bits{};
  Launch packing = pack_mask(p, a.in, MaskOrder::by_keys, bits, scratch);
  a.in.mask = {bits.data, {bits.batch_stride, bits.head_stride, bits.row_stride, p.mask.stride[2] ? MaskBits::block_bytes() : 0}};
  return packing;
}

void push_launches(Program &program, const Problem &p, const BackwardConfig &c, const Work &work, const HopperBackwardArguments &a,
                   const Device &device, Scratch &scratch) {
  HopperBackwardArguments main = a;
  if (p.mask) program.steps.push_back(replace_mask(main, p, scratch));
  std::optional<Launch> sum;
  if (work.shares > 1) sum = take_shares(main, p, scratch, work.shares);
  const passes::RowsConfig rows = rows_config(p, c.columns(), c.tile_q, passes::kWarpgroups, true);
  BackwardLaunches launches{.rows_by_tiles = delta(p, rows, a),
                            .main = Launch(c.roles ? kByRoles : kBackward, c, work.blocks, c.kThreads, c.shared_bytes(), main),
                            .shares = std::move(sum),
                            .dbias = bias_gradient(p, device, a)};
  if (p.bias) { // the settle kernel wants D first
    BackwardArguments before_settle = a;
    before_settle.dq_sum = nullptr;
    passes::RowsConfig only_d = rows;
    only_d.form = passes::kFragments;
    launches.delta = delta(p, only_d, before_settle);
    launches.settle = settle(p, device, a);
  }
  if (!c.owns_dq) launches.dq = dq_from_sum(p, rows, a);
  push(program, p, a, std::move(launches));
}

void describe(Program &program, const Problem &p, const BackwardConfig &c, int64_t shares) {
  program.kernel =
      text(strobe::name(p.dtype), " wgmma, ", c.kWarpgroups, " warpgroups, head dimensions ", c.head_dim, " and ", c.head_dim_v);
  if (c.owns_dq) program.kernel += ", a block all keys of a head";
  if (c.draws_keys()) program.kernel += ", persistent blocks";
  if (shares > 1) program.kernel += text(", query heads of a key head in ", shares, " shares");
  if (p.mask) program.kernel += ", mask packed into bits";
  describe_tile(program, p, c.tile_q, c.tile_k(), true);
}

} // namespace

CudaEngine::Made sm90_backward(const Problem &p, const Device &device, Scratch &scratch) {
  const Features features = backward_features(p);
  if (std::string reason = refusal(p, features); !reason.empty()) return reason;
  BackwardConfig c = with_bias(configuration(p, features, device), p, device);
  if (!divides_blocks(p, c.tile_q, c.tile_k()))
    return text("blocks of ", p.blocks.block_q, " x ", p.blocks.block_k, "; the backward's tile is ", c.tile_q, " x ", c.tile_k());
  HopperBackwardArguments a{};
  static_cast<BackwardArguments &>(a) = backward_arguments(p);
  const Work work = share_out(c, p, a.in, device);
  for (const auto &[count, what] : {std::pair{work.tiles_k * work.pairs, "keys"}, std::pair{work.tiles_q, "queries"}})
    if (count > int64_t{1} << 30) return text(count, " tiles of ", what, "; its backward takes 2^30");

  take_workspace(a, p, c, work, scratch);
  order_pairs(a, p, work);
  map_operands(a, p, c);
  a.unit = float((features.additive() ? 1.0 : a.in.scale) * kLog2e<double>);
  Program program;
  program.overlap = true, program.persistent = c.persistent;
  push_launches(program, p, c, work, a, device, scratch);
  describe(program, p, c, work.shares);
  program.predicted_seconds = predicted_seconds(p, c, work.shares, device);
  return program;
}

} // namespace strobe::cuda
