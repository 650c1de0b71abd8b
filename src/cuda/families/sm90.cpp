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
#include "cuda/families/sm90_latent.h"
#include "cuda/families/sm90_mask.h"
#include "cuda/families/sm90_steps.h"
#include "cuda/families/sm90_tiles.h"
#include "cuda/program/arguments.h"
#include "cuda/program/dequantise.h"
#include "cuda/program/part.h"
#include "cuda/program/passes.h"
#include "cuda/program/prediction.h"
#include "cuda/program/tiles.h"
#include "score/program.h"

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

// The reason why an invariant call is refused: a query's bits would depend on the queries beside it. Empty if the call is accepted.
std::string against_invariant(const Problem &p, const Config &c) {
  if (p.bias) return "is not invariant with a bias: a tile that is computed again takes other roundings";
  if (features_of(p).penalty) return "is not invariant with ALiBi: it is added from where a tile's own queries stand";
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

constexpr double kFlopsPerSm = 5e12;   // per second, measured on an H200 with whole tiles
constexpr double kEightBitsRate = 1.5; // of FP8 products, guessed

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
std::string against_call(const Problem &p, Operation operation, const Device &device) {
  if (device.cc != 90) return text("for compute capability 9.0; this is ", device.cc / 10, ".", device.cc % 10);
  if (driver() && !driver()->cuTensorMapEncodeTiled) return "the driver has no cuTensorMapEncodeTiled; CUDA 12.0's has";
  if (p.dtype != DType::f16 && p.dtype != DType::bf16) return text("computes float16 and bfloat16, not ", strobe::name(p.dtype));
  if (std::string reason = outsized_scale(p); !reason.empty()) return reason;
  if (wide(p) && !(is_latent(p) && operation == Operation::forward))
    return text("takes head dimensions up to ", kMostUsualDim, ", not ", std::max(p.head_dim, p.head_dim_v),
                operation == Operation::forward ? ", unless v is the first columns of k" : "");
  return against_part(p);
}

// The reason why Q, K and V in FP8 are not multiplied as they are stored; empty if they are.
std::string against_eight_bits(const Problem &p) {
  // A row's rounding would depend on the strides of the scales, on pages, and on how many queries share a tile.
  if (p.invariant) return "multiplies FP8 without invariant";
  if (p.head_dim_v > 128) return text("multiplies FP8 with head dimensions of v up to 128, not ", p.head_dim_v);
  if (p.scaled_by_channel()) return "multiplies FP8 without scales of k by column";
  if (p.v_scale.stride[2] || (p.page_size && p.v_scale.stride[0])) return "multiplies FP8 with one scale of v for each head";
  if (p.auxiliary()) return "multiplies FP8 without aux, whose pass reads q in 16 bits";
  return {};
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

// Also sets the members of the Config that depend on the amount of work. splits: whether keys may be split.
Work share_out(Config &c, const Problem &p, const Device &device, const HeadsOfTile &rows, bool splits = true) {
  const int64_t queries = rows.queries * c.warpgroups, pieces = p.heads_kv * rows.pieces;
  const bool numbered = numbers_tiles(p);
  Work work{.rows = rows,
            .pieces = pieces,
            .heads = numbered ? pieces : p.batch * pieces,
            .tiles = numbered ? count_packed_tiles(p.total_q, p.batch, queries) : query_tiles(p, queries),
            .bundle = heads_in_bundle(p, device, numbered ? pieces : p.batch * pieces)};
  c.packed = rows.heads > 1;
  const int64_t all_tiles = work.tiles * work.heads;
  if (!p.part && splits)
    work.splits = p.invariant ? splits_by_chunk(p, c, device, all_tiles) : splits_for_idle_sms(p, c, device, all_tiles);
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
  const double rate = c.eight_bits ? kEightBitsRate * kFlopsPerSm : kFlopsPerSm;
  double computing = seconds(w, device, c.blocks_per_sm, rate / flop, kBlockSeconds, work.splits);
  if (p.quantised() && !c.eight_bits) { // each tile of queries has the keys that it walks over dequantised
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
  const int32_t keys = p.page_size ? c.page_rows : c.tile_k;
  a.tma_k = mapped_keys(p, p.k, p.stored(p.head_dim), keys), a.tma_v = mapped_keys(p, p.v, p.stored(p.head_dim_v), keys);
  if (!c.bias_by_tma) return;
  map_bias(a, p, 64, c.bias_bytes(), c.tile_k);
  a.bias_rows_step = p.bias.stride[2] != 0;
}

// The numbers of queries of the packed sequences that a launch computes.
struct Queries {
  int64_t least = 0, most = INT32_MAX;
};

// The arguments, except for addresses in the workspace. The members for packed heads are used only if heads are packed.
PackedForwardArguments hopper_arguments(const Problem &p, const Config &c, const Work &work, const Queries &queries) {
  PackedForwardArguments a{};
  static_cast<ForwardArguments &>(a) = forward_arguments(p);
  order_items(a, p, work);
  map_operands(a, p, c, work);
  a.least_queries = i32(queries.least), a.most_queries = i32(queries.most);
  if (c.packed) {
    a.packed = i32(work.rows.heads), a.queries = Divisor::make(uint32_t(work.rows.queries));
    a.pieces = Divisor::make(uint32_t(work.rows.pieces));
  }
  return a;
}

void push_launches(Program &program, const Problem &p, const Config &c, const Work &work, const Queries &queries, const Device &device,
                   Scratch &scratch) {
  PackedForwardArguments a = hopper_arguments(p, c, work, queries);
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

std::string in_words(const Problem &p, const Config &c, const Work &work) {
  std::string words = text("wgmma, ", c.warpgroups, " warpgroups, ", reference_name(c));
  if (c.eight_bits)
    words += ", products of float8_e4m3fn, v transposed by 3 warps";
  else if (p.quantised())
    words += text(", k and v dequantised to ", strobe::name(p.dtype), " by ", i32(Config::kDequantising), " warps");
  if (c.packed) words += text(", ", work.rows.heads, " query heads packed");
  return words;
}

Program empty_program(const Problem &p, const Config &c) {
  Program program;
  program.overlap = program.persistent = true;
  describe_tile(program, p, c.tile_q(), c.tile_k, true);
  return program;
}

constexpr int64_t kMostItems = int64_t(1) << 30;

// The launches of a call if K and V are read as they are.
CudaEngine::Made in_place(const Problem &p, Config c, const Device &device, Scratch &scratch) {
  const Work work = share_out(c, p, device, heads_of_tile(p, c));
  if (work.items > kMostItems) return text(work.items, " tiles of queries; accepted are 2^30");
  Program program = empty_program(p, c);
  program.kernel = in_words(p, c, work);
  push_launches(program, p, c, work, {}, device, scratch);
  program.predicted_seconds = predicted_seconds(p, c, device, work);
  return program;
}

// If K and V are dequantised first, it is for sequences with at least so many rows of queries for a key head. Counted: beside an SM's time
// for tiles of 64 to 256 rows, dequantising a key in their loads takes as much longer as the pass takes for it.
constexpr int64_t kRowsThatShareKeys = 256;
constexpr int64_t kMostDequantised = int64_t(1) << 30; // bytes of K and V in the workspace; with more, key heads come one after another

// The call for `count` key heads from `first` on, and their query heads.
Problem of_key_heads(Problem p, int64_t first, int64_t count) {
  const auto move = [](View &x, int64_t head) {
    if (x) x.data += head * x.stride[1] * bytes(x.dtype);
  };
  const std::initializer_list<View *> of_keys = {&p.k, &p.v, &p.k_scale, &p.v_scale};
  for (View *x : of_keys) move(*x, first);
  for (View *x : {&p.q, &p.out, &p.lse, &p.mask, &p.bias, &p.sinks}) move(*x, first * p.group());
  p.heads = count * p.group(), p.heads_kv = count;
  return p;
}
// Whether a head's results depend on its number.
bool numbers_heads(const Problem &p) {
  return p.dropout > 0 || features_of(p).program || p.captured[score::kSlopesRead] || p.blocks.heads > 1;
}

// The sequences of a call by their queries, as far as the host knows: `many` have at least `least` queries each, `few` have fewer.
struct Sequences {
  int64_t least, many, few, mean_of_few;
  bool mixed; // whether there may be sequences of both kinds
};
Sequences sequences_of(const Problem &p) {
  const int64_t longest = std::max<int64_t>(1, p.longest_q());
  Sequences s{
      .least = std::max<int64_t>(2, div_up(kRowsThatShareKeys, p.group())), .many = p.batch, .few = 0, .mean_of_few = 1, .mixed = false};
  if (!p.varlen || p.total_q >= p.batch * longest) return s;
  s.mixed = true;
  s.many = std::clamp<int64_t>(p.total_q / longest + (p.total_q % longest >= s.least), 1, p.batch), s.few = p.batch - s.many;
  const int64_t rest = std::max<int64_t>(0, p.total_q - s.many * longest);
  s.mean_of_few = std::clamp<int64_t>(div_up(rest, std::max<int64_t>(1, s.few)), 1, s.least - 1);
  return s;
}
// For choices and predictions: the call with these sequences alone.
Problem with_many(Problem p, const Sequences &s) {
  p.total_q = std::min(p.total_q, s.many * p.longest_q()), p.total_k = std::min(p.total_k, s.many * p.longest_k()), p.batch = s.many;
  return p;
}
Problem with_few(Problem p, const Sequences &s) {
  p.varlen = false, p.batch = std::max<int64_t>(1, s.few), p.seqlen_q = s.mean_of_few, p.most_q = kUnbounded;
  p.total_q = p.batch * p.seqlen_q, p.total_k = p.batch * p.seqlen_k;
  return p;
}

// The predicted seconds of the launches of a call that is only planned.
double seconds_alone(const Problem &p, Config c, const Device &device) {
  const Work work = share_out(c, p, device, heads_of_tile(p, c));
  return predicted_seconds(p, c, device, work);
}

// How the sequences of a call over quantised keys are computed if the keys of those with many queries are dequantised first, and the others
// in their loads.
struct Ways {
  Config many, few;
};
// in_place: the Config of the call if all keys are dequantised in the loads. d: the call over dequantised keys.
std::optional<Ways> ways(const Problem &p, const Problem &d, const Sequences &sequences, const Config &in_place, const Device &device) {
  Ways w{in_place, in_place};
  if (p.invariant) { // a query's bits must not depend on how its keys are read, so all tiles are those of the call in place
    w.many.features.quant = w.many.features.by_column = w.many.stored_stages = 0;
    return w;
  }
  const std::optional<Config> many = choose_tile(with_many(d, sequences), device);
  const std::optional<Config> few = sequences.mixed ? choose_tile(with_few(p, sequences), device) : in_place;
  if (!many || !few) return {};
  return Ways{*many, *few};
}

// The launches of a call over quantised keys in these ways. Null if they are not possible, or slower than those of the call in place.
std::optional<Program> dequantised_first(const Problem &p, const Config &in_place, const Device &device, Scratch &scratch) {
  const Sequences sequences = sequences_of(p);
  const int64_t fit = kMostDequantised / std::max<int64_t>(1, dequantised_bytes(p) / std::max<int64_t>(1, p.heads_kv)); // key heads
  if (p.longest_q() < sequences.least || fit < 1 || (fit < p.heads_kv && numbers_heads(p))) return {};
  const int64_t heads = div_up(p.heads_kv, div_up(p.heads_kv, fit));
  const int64_t least = sequences.mixed ? sequences.least : 0;
  Scratch end = scratch;
  std::optional<Program> program;
  for (int64_t first = 0; first < p.heads_kv; first += heads) {
    const Problem part = of_key_heads(p, first, std::min(heads, p.heads_kv - first));
    Scratch of_part = scratch; // the parts use the same memory, one after another
    auto [d, launch] = dequantise(part, of_part, least);
    std::optional<Ways> way = ways(part, d, sequences, in_place, device);
    if (!way) return {};
    const Problem all_many = with_many(d, sequences), all_few = with_few(part, sequences);
    const Work of_many = share_out(way->many, d, device, heads_of_tile(all_many, way->many), !sequences.mixed);
    const Work of_few = share_out(way->few, part, device, heads_of_tile(all_few, way->few), false);
    if (std::max(of_many.items, of_few.items) > kMostItems) return {};
    if (!program) {
      program = empty_program(p, way->many);
      const std::string which = sequences.mixed ? text(" of sequences with at least ", least, " queries") : "";
      program->kernel = text("k and v", which, " dequantised first; ", in_words(d, way->many, of_many));
      if (sequences.mixed) program->kernel += text("; the others: ", in_words(part, way->few, of_few));
      program->notes.push_back(text("dequantised k and v take ", div_up(dequantised_bytes(part), 1 << 20), " MiB of the workspace",
                                    heads < p.heads_kv ? text(", ", heads, " key heads at a time") : ""));
    }
    program->steps.push_back(std::move(launch));
    push_launches(*program, d, way->many, of_many, {.least = least}, device, of_part);
    if (sequences.mixed) push_launches(*program, part, way->few, of_few, {.most = least - 1}, device, of_part);
    program->predicted_seconds += dequantising_seconds(part, device, keys_read(with_many(part, sequences))) +
                                  seconds_alone(all_many, way->many, device) +
                                  (sequences.few ? seconds_alone(all_few, way->few, device) : 0);
    if (of_part.bytes() > end.bytes()) end = of_part;
  }
  const double otherwise = seconds_alone(with_many(p, sequences), in_place, device) +
                           (sequences.few ? seconds_alone(with_few(p, sequences), in_place, device) : 0);
  if (!program || program->predicted_seconds >= otherwise) return {};
  scratch = end;
  return program;
}

class Sm90Engine final : public CudaEngine {
public:
  const char *name() const override { return "cuda-sm90"; }

protected:
  bool computes_parts() const override { return true; }
  bool reads_pages() const override { return true; }
  bool reads_quantised() const override { return true; }
  bool multiplies_eight_bits(const Problem &p, const Device &device) const override {
    if (!against_call(p, Operation::forward, device).empty() || !against_eight_bits(p).empty() || !against_tensors(p).empty()) return false;
    return choose_tile(p, device).has_value();
  }
  Made program(const Problem &p, Operation operation, const Device &device, Scratch &scratch) const override {
    if (std::string reason = against_call(p, operation, device); !reason.empty()) return reason;
    if (operation == Operation::backward) return sm90_backward(p, device, scratch);
    return is_latent(p) ? sm90_latent(p, device, scratch) : forward(p, device, scratch);
  }

private:
  static Made forward(const Problem &p, const Device &device, Scratch &scratch) {
    if (std::string reason = against_tensors(p); !reason.empty()) return reason;
    const std::optional<Config> config = choose_tile(p, device);
    if (!config && p.quantised()) return "no tile of quantised keys for these head dimensions, options and blocks";
    if (!config) return text("no tile of queries divides the blocks of ", p.blocks.block_q);
    if (p.invariant)
      if (std::string reason = against_invariant(p, *config); !reason.empty()) return reason;

    Scratch of_first = scratch;
    Made made = in_place(p, *config, device, scratch);
    Program *program = std::get_if<Program>(&made);
    if (!program) return made;
    if (p.quantised() && !p.quantised_queries())
      if (std::optional<Program> first = dequantised_first(p, *config, device, of_first)) *program = std::move(*first), scratch = of_first;
    if (p.mask) program->kernel += ", mask packed into bits";
    return made;
  }
};

} // namespace

const CudaEngine &sm90_engine() {
  static const Sm90Engine engine;
  return engine;
}

} // namespace strobe::cuda
