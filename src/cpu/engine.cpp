#include "engine.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "attention/text.h"
#include "attention/work.h"
#include "isa.h"
#include "score/program.h"
#include "sets.h"
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace strobe {

namespace {

std::string never_missing() { return {}; }

#if defined(__x86_64__) && !defined(STROBE_UP_TO_AVX2)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

// cpuid leaf 7: bit 5 of EAX of subleaf 1 is AVX512_BF16; bits 22 and 24 of EDX of subleaf 0 are AMX_BF16 and AMX_TILE.
bool has_bf16_dot() {
  unsigned a, b, c, d;
  return has_avx512() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 5 & 1;
}
bool has_amx() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 22 & 1 && d >> 24 & 1;
}

std::string amx_missing() {
  if (!has_amx() || !has_bf16_dot()) return "this CPU lacks AMX (TILE, BF16) or AVX512-BF16";
  constexpr long kRequest = 0x1023, kTileData = 18; // ARCH_REQ_XCOMP_PERM: once per process, for all its threads
  if (syscall(SYS_arch_prctl, kRequest, kTileData) != 0) return "the kernel does not grant AMX's tile registers";
  return {};
}

// FLOP per cycle of the bf16 dot product. CPUs with AMX execute it at less than half the rate of fp32 multiply-adds (measured: one per 2.5
// cycles). Other CPUs execute it at twice the rate of fp32 multiply-adds.
double bf16_dot_rate() { return has_amx() ? 26 : 128; }
#endif

// The sets from the fastest to the slowest. idle_lanes and pack_cycles were measured with 1 to 256 queries, 512 to 8192 keys, head
// dimensions 64 and 128.
const InstructionSet kInstructionSets[] = {
#if defined(__x86_64__) && !defined(STROBE_UP_TO_AVX2)
    {"cpu-amx", amx_missing, amx::kernels, {80, 160, 240}, 0, {1.5, 1.3, 1.0}},
    {"cpu-avx512bf16",
     [] { return std::string(has_bf16_dot() ? "" : "this CPU lacks AVX512-BF16"); },
     avx512bf16::kernels,
     {0, 0, bf16_dot_rate()},
     0,
     {0, 0, 1.0}},
    {"cpu-avx512",
     [] { return std::string(has_avx512() ? "" : "this CPU lacks AVX-512 (F, BW, DQ, VL)"); },
     avx512::kernels,
     {64, 64, 64},
     24,
     {0, 0.15, 0.15}},
#endif
#if defined(__x86_64__) && !defined(STROBE_WITHOUT_AVX2)
    {"cpu-avx2",
     [] {
       bool all = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
       return std::string(all ? "" : "this CPU lacks AVX2 and FMA");
     },
     avx2::kernels,
     {32, 32, 32},
     5,
     {0, 0.4, 0.1}},
#endif
#if defined(__aarch64__)
    {"cpu-neon", never_missing, neon::kernels, {16, 16, 16}, 0, {0, 0, 0}},
#else
    {"cpu-baseline", never_missing, baseline::kernels, {8, 8, 8}, 0, {0, 0, 0}},
#endif
};

struct Foreign {
  const char *engine, *architecture;
};
constexpr Foreign kForeign[] = {
#if !defined(__x86_64__)
    {"cpu-amx", "x86-64"},      {"cpu-avx512bf16", "x86-64"}, {"cpu-avx512", "x86-64"}, {"cpu-avx2", "x86-64"},
#endif
#if defined(__aarch64__)
    {"cpu-baseline", "x86-64"},
#else
    {"cpu-neon", "aarch64"},
#endif
};

constexpr int64_t kFewQueries = 16; // with at most this many queries, one lane per query would leave most lanes idle

// The reason why decode.h does not compute this forward of few queries; empty if it does. It refuses invariant calls, whose bits must not
// depend on the number of queries.
const char *against_decoding(const Problem &p) {
  if (p.invariant) return "invariant";
  if (p.part) return "a part";
  if (p.blocks.present) return "block sparsity";
  if (p.dropout > 0) return "dropout";
  if (p.quantised() && p.auxiliary()) return "aux of quantised keys"; // the auxiliary pass rounds scores in another place
  if (p.bytecode && p.bytecode->form == score::Form::hyperbolic) return "hyperbolic scores";
  if (p.group() * p.longest_q() > kMostDecodedRows) return "so many query heads of a key head";
  return p.wishes.tile_q > 0 || p.wishes.tile_k > 0 ? "tiles that are asked for" : "";
}
bool has_few(const Problem &p) { return p.longest_q() <= kFewQueries && !*against_decoding(p); }
bool decodes(const Problem &p, Operation operation) { return operation == Operation::forward && has_few(p); }

// The model counts the products of all lanes, padding included, and the packing of K and V. The backward takes a multiple of the forward,
// according to its number of products, on every set alike. The backward must run on the set that is chosen for the forward, because P =
// e^(s - LSE) is exact only if both round s alike. The number of threads must not change a bit, so the order of the sets does not depend on
// it. The forward of few queries has no padding lanes. (With AMX it has some, which cost little beside reading.)
double predict(const InstructionSet &set, const CpuKernels &kernels, const Problem &p, int64_t threads, Operation operation) {
  constexpr double kHertz = 3e9, kShare = 0.7, kStart = 5e-6; // a typical clock, a fraction of the peak, the seconds to begin a call
  constexpr int64_t kShortestTile = 64;                       // tiles are not shortened below this for more parallel work
  constexpr double kTransposed = 1;                           // cycles per element of K and V that few queries cannot read in place
  const int column = p.dtype == DType::bf16 ? 2 : p.dtype == DType::f16 ? 1 : 0;
  const double queries = std::max(1.0, double(p.varlen ? p.total_q : p.seqlen_q) / double(std::max<int64_t>(p.varlen ? p.batch : 1, 1)));
  const double width = double(kernels.tiles[Operation::forward].width), pieces = std::ceil(queries / width);
  const double whole = std::ceil(queries / 16) * 16, lanes = whole + pieces * set.idle_lanes;
  const bool few = has_few(p), in_place = few && p.group() * p.longest_q() <= kernels.rows_in_place;
  const double padded = few ? 1 : lanes / queries * width / (width + set.idle_lanes);
  const double pack = in_place ? 0 : few ? std::max(kTransposed, set.pack_cycles[column]) : set.pack_cycles[column];
  const double rate = set.flops_per_cycle[column] * kShare * (p.dtype == DType::f64 ? 0.5 : 1.0);
  const double packed = keys_read(p) * double(p.head_dim + p.head_dim_v) * pack;
  const double items = double(p.batch * p.heads) * double((p.longest_q() + kShortestTile - 1) / kShortestTile);
  const double cycles = flops(p, Operation::forward) * padded / rate + packed;
  const double products = operation == Operation::forward ? 1 : flops(p, operation) / std::max(1.0, flops(p, Operation::forward));
  const double passes = products * (few && !decodes(p, operation) ? whole / queries : 1);
  return kStart + passes * cycles / kHertz / std::clamp(items, 1.0, double(threads));
}

std::string rounded(const char *what, int64_t wish, int64_t got, const char *why) {
  char text[160];
  std::snprintf(text, sizeof text, "%s %lld rounded to %lld: %s", what, (long long)wish, (long long)got, why);
  return text;
}

// The multiple of 16 that divides a block of queries and is nearest to the requested size; of two equally near, the larger.
int64_t nearest_divisor(int64_t block, int64_t wish) {
  int64_t best = 16;
  for (int64_t q = 32; q <= kLongestTileQ; q += 16)
    if (block % q == 0 && std::abs(q - wish) <= std::abs(best - wish)) best = q;
  return best;
}

// Br is a multiple of 16 and, under block sparsity, divides the query block. Requested sizes are rounded. Without a request, the kernels'
// preferred size is halved until there is work for many threads. The number of threads must not change a bit, so everything follows from
// the shape alone. Invariant: key tiles have the kernels' own size, because bits depend on it; so have the backward's query tiles, because
// dK and dV depend on them.
TileSizes choose_tiles(const Problem &p, const TileSizes &preferred, Operation operation, std::vector<std::string> &notes) {
  auto round_up = [](int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; };
  TileSizes tile = preferred;
  const bool fixed = p.invariant && writes(operation, kGradients);
  auto items = [&] { return p.batch * p.heads * ((p.longest_q() + tile.q - 1) / tile.q); };
  if (p.wishes.tile_q > 0)
    tile.q = std::min(kLongestTileQ, round_up(p.wishes.tile_q, 16));
  else
    while (!fixed && tile.q > 64 && items() < 32) tile.q /= 2;
  if (!fixed) tile.q = std::min(tile.q, std::max<int64_t>(16, round_up(p.longest_q(), 16)));
  if (p.blocks.present) tile.q = nearest_divisor(p.blocks.block_q, tile.q);
  if (p.wishes.tile_k > 0 && !p.invariant) tile.k = std::min(kLongestTileK, round_up(p.wishes.tile_k, 32));
  tile.width = std::min(tile.width, tile.q);
  if (p.wishes.tile_q > 0 && tile.q != p.wishes.tile_q)
    notes.push_back(rounded("tile_q", p.wishes.tile_q, tile.q,
                            "a multiple of 16, at most 256 and the queries, dividing the block of a block-sparse mask"));
  if (p.wishes.tile_k > 0 && tile.k != p.wishes.tile_k)
    notes.push_back(
        rounded("tile_k", p.wishes.tile_k, tile.k, p.invariant ? "invariant bits have one tile of keys" : "a multiple of 32, at most 512"));
  return tile;
}

// Q in FP8 becomes rows of 16 bits at the beginning of the workspace (queries.h), before the other kernels read them.
struct DequantisedQueries {
  const int64_t sequences, rows, width;

  explicit DequantisedQueries(const Problem &p)
      : sequences(p.varlen ? 1 : p.batch), rows(p.varlen ? p.total_q : p.seqlen_q), width(p.head_dim) {}
  static uint64_t bytes(const Problem &p) {
    if (!p.quantised_queries()) return 0;
    const DequantisedQueries of(p);
    return (uint64_t(of.sequences * p.heads * of.rows * of.width) * sizeof(uint16_t) + 255) / 256 * 256;
  }
  // The problem with these rows in place of Q.
  Problem written(const Problem &p, const CpuKernels &kernels, const Execution &execution, void *to) const {
    Problem own = p;
    own.q_scale = Scales();
    own.q.data = static_cast<char *>(to), own.q.dtype = p.dtype;
    own.q.stride[3] = 1, own.q.stride[2] = width, own.q.stride[1] = rows * width, own.q.stride[0] = p.varlen ? 0 : p.heads * rows * width;
    constexpr int64_t kMostItems = 4096, kNumbersOfItem = 16384; // fewer numbers are not worth a thread
    const int64_t all = sequences * p.heads * rows, items = std::clamp<int64_t>(all * width / kNumbersOfItem, 1, kMostItems);
    execution.run(int32_t(items), [&](int32_t item) {
      for (int64_t n = all * item / items; n < all * (item + 1) / items; n++) {
        const int64_t b = n / rows / p.heads, h = n / rows % p.heads, i = n % rows;
        kernels.dequantise_query(p, b, h, i, own.q.at<uint16_t>(b, h, i, 0));
      }
    });
    return own;
  }
};

// The problem with the bytecode of its program, if it has one.
class Compiled {
public:
  Compiled(const Problem &p, const InstructionSet &set) : p_(&p) {
    if (!p.program) return;
    own_ = p;
    for (size_t n = 0; p.tangent_program && n < STROBE_MOST_CAPTURED; n++)
      if (const int32_t place = p.tangent_program->place[n]; place >= 0) own_.captured[place] = p.tcaptured[n];
    const std::shared_ptr<score::Bytecode> code = score::compile(own_);
    const CpuKernels *kernels = set.kernels(p.dtype);
#if defined(__x86_64__) && !defined(STROBE_UP_TO_AVX2)
    if (!kernels->run_program) kernels = avx512::kernels(DType::f32);
#endif
    code->run = kernels->run_program;
    own_.bytecode = code.get();
    code_ = code;
    p_ = &own_;
  }
  Compiled(const Compiled &) = delete;
  const Problem &problem() const { return *p_; }

private:
  const Problem *p_;
  Problem own_;
  std::shared_ptr<const score::Bytecode> code_;
};

// The reason why an engine refuses a function of the score, which may expose the rounding errors of bf16 products; empty if there is none.
std::string against_function(const CpuKernels &kernels, const Problem &p) {
  if (!p.bytecode) return "";
  const bool general = p.bytecode->backward.slope.slot >= 0; // more general than x plus a number, for instance
  const bool hyperbolic = p.bytecode->form == score::Form::hyperbolic;
  if (kernels.planes == 3 && hyperbolic) return "a Lorentz product cancels, which shows what three bf16 leave of FP32's last bits";
  if (kernels.planes == 3 && general) return "a function of the score may show what three bf16 leave of FP32's last bits";
  if (kernels.planes == 2 && p.bytecode->curved && !hyperbolic)
    return "a function may make small scores of large ones, which shows what two bf16 leave of FP16's products";
  return "";
}

// The reason why an engine cannot read quantised K and V; empty if it can.
std::string against_quantised(const CpuKernels &kernels, const Problem &p, Operation operation) {
  if (!p.quantised() || kernels.quantised) return "";
  const std::string rounds = text("k and v in ", strobe::name(p.quantised_as), ": it would round what they stand for to bfloat16");
  if (kernels.decodes_quantised_from == 0) return rounds;
  if (p.scaled_by_channel()) return rounds + ", but for few queries with scales of rows";
  if (p.longest_q() > kFewQueries) return text(rounds, ", but for up to ", kFewQueries, " queries");
  if (!decodes(p, operation)) return rounds + ", but for few queries without " + against_decoding(p);
  if (p.group() * p.longest_q() >= kernels.decodes_quantised_from) return "";
  return text("fewer than ", kernels.decodes_quantised_from, " rows of a group's queries: quantised keys are read faster by multiply-adds");
}

class CpuEngine final : public Engine {
public:
  explicit CpuEngine(const InstructionSet &set) : set_(set) {}
  const char *name() const override { return set_.name; }
  std::string missing() const override { return set_.missing(); }
  bool computes(Operation) const override { return true; }

  Answer plan(const Problem &problem, const Execution &execution, Operation operation) const override {
    Answer answer = plan_16_bits(problem, execution, operation);
    Plan *plan = std::get_if<Plan>(&answer);
    if (!plan || !problem.quantised_queries()) return answer;
    plan->workspace_bytes += DequantisedQueries::bytes(problem);
    plan->notes.push_back(text("q dequantised to ", strobe::name(problem.dtype), " first"));
    return answer;
  }

  void run(const Problem &problem, const Execution &execution, Operation operation, const Plan &plan, void *workspace) const override {
    if (!problem.quantised_queries()) return run_16_bits(problem, execution, operation, plan, workspace);
    const CpuKernels &kernels = *set_.kernels(problem.dtype);
    run_16_bits(DequantisedQueries(problem).written(problem, kernels, execution, workspace), execution, operation, plan,
                static_cast<char *>(workspace) + DequantisedQueries::bytes(problem));
  }

private:
  Answer plan_16_bits(const Problem &problem, const Execution &execution, Operation operation) const {
    const CpuKernels *kernels = set_.kernels(problem.dtype);
    if (!kernels) return std::string("adds nothing for ") + strobe::name(problem.dtype);
    const Compiled compiled(problem, set_);
    const Problem &p = compiled.problem();
    if (std::string reason = against_quantised(*kernels, p, operation); !reason.empty()) return reason;
    if (std::string reason = against_function(*kernels, p); !reason.empty()) return reason;
    Plan plan;
    plan.engine = set_.name;
    const bool forward = operation == Operation::forward;
    TileSizes tile = choose_tiles(p, kernels->tiles[operation], operation, plan.notes);
    const bool few = decodes(p, operation);
    plan.kernel = std::string(kernels->arithmetic) +
                  (few ? ", the queries of a group at once, keys across lanes" : ", " + std::to_string(tile.width) + " queries at once");
    plan.tile_q = few ? p.longest_q() : tile.q;
    plan.tile_k = few ? kernels->decode_keys : tile.k;
    if (const char *reason = against_decoding(p); forward && p.longest_q() <= kFewQueries && *reason)
      plan.notes.push_back(std::string("queries across lanes, 16 at a time, though they are few: keys are not beside ") + reason);
    if (const score::Code *code = p.bytecode ? &(forward ? p.bytecode->forward : p.bytecode->backward) : nullptr; code && code->computes())
      plan.notes.push_back(text("functions: operations for each pair ", code->count(score::Stage::pair), ", query ",
                                code->count(score::Stage::query), ", key ", code->count(score::Stage::key), ", head ",
                                code->count(score::Stage::head)));
    plan.workspace_bytes =
        uint64_t(few ? kernels->decode_workspace(p, execution.threads) : kernels->workspace[operation](p, tile, execution.threads));
    plan.predicted_seconds = predict(set_, *kernels, p, execution.threads, operation);
    if (p.gradient_program) { // two of the backward's five products once more
      plan.predicted_seconds *= 1 + double(p.head_dim + p.head_dim_v) / double(3 * p.head_dim + 2 * p.head_dim_v);
      plan.notes.push_back("gradients of captured tensors: another pass over the scores");
    }
    if (p.auxiliary()) {
      plan.workspace_bytes = std::max(plan.workspace_bytes, uint64_t(kernels->auxiliary_workspace(p, tile, execution.threads)));
      const double pass = plan.predicted_seconds * double(p.head_dim) / double(p.head_dim + p.head_dim_v);
      plan.predicted_seconds += pass;
      plan.notes.push_back(auxiliary_note(p, pass, plan.predicted_seconds));
    }
    return plan;
  }

  void run_16_bits(const Problem &problem, const Execution &execution, Operation operation, const Plan &plan, void *workspace) const {
    const Compiled compiled(problem, set_);
    const Problem &p = compiled.problem();
    const CpuKernels *kernels = set_.kernels(p.dtype);
    const TileSizes &preferred = kernels->tiles[operation];
    const TileSizes tile{plan.tile_q, plan.tile_k, std::min(preferred.width, plan.tile_q)};
    const bool few = decodes(p, operation);
    if (few)
      kernels->decode(p, execution, workspace);
    else
      kernels->run[operation](p, execution, tile, workspace);
    if (!p.auxiliary()) return;
    std::vector<std::string> told; // the plan collects these
    kernels->auxiliary(p, execution, few ? choose_tiles(p, preferred, operation, told) : tile, workspace);
  }

  const InstructionSet &set_;
};

} // namespace

std::vector<const Engine *> cpu_engines() {
  static const std::vector<CpuEngine> all(std::begin(kInstructionSets), std::end(kInstructionSets));
  std::vector<const Engine *> list;
  for (const CpuEngine &engine : all) list.push_back(&engine);
  return list;
}

const char *foreign_architecture(const std::string &engine) {
  for (const Foreign &foreign : kForeign)
    if (engine == foreign.engine) return foreign.architecture;
  return nullptr;
}

} // namespace strobe
