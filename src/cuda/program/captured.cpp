#include "cuda/program/captured.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "attention/text.h"
#include "cuda/program/arguments.h"
#include "cuda/program/prediction.h"
#include "cuda/program/tiles.h"
#include "score/program.h"

namespace strobe::cuda {
namespace {

using score::LoadGradient, score::Lines;

constexpr KernelSource kCaptured{"passes/captured.h", "strobe::passes::Captured", "strobe::CapturedTileConfig"};
constexpr KernelSource kScatter{"passes/captured_sums.h", "strobe::passes::CapturedScatter", "strobe::CapturedScatterConfig"};
constexpr KernelSource kResult{"passes/captured_sums.h", "strobe::passes::CapturedResult", "strobe::CapturedResultConfig"};

constexpr double kLaunchSeconds = 3e-6; // of a launch, on an H200

// As many loads as a set has room for, by how they are summed.
struct Group {
  int32_t first;
  int32_t bits[6] = {};
  void *lines[3] = {}; // their sums along rows, columns and diagonals
  LoadSet of(Summed s) const { return {first, bits[s]}; }
};

// Whether df/dl of some load is a function of q.k.
bool slopes_read_score(const score::GradientProgram &program) {
  std::vector<int32_t> slopes;
  for (const LoadGradient &g : program.loads) slopes.push_back(g.slope);
  return program.graph.reads_score(slopes);
}

int32_t log2_up(double x) { return int32_t(std::ceil(std::log2(std::max(x, 1.0)))); }

class Gradients {
public:
  Gradients(const Problem &p, const Device &device, const BackwardArguments &backward, const CapturedPasses &passes)
      : p_(p), device_(device), passes_(passes), program_(*p.gradient_program) {
    static_cast<BackwardArguments &>(a_) = backward;
    a_.in.function = gradient_function_arguments(p);
    features_ = gradient_features(p);
    for (int64_t first = 0, n = 0; n < FunctionArguments::kCaptured; n++) {
      CapturedGradient &g = a_.gradients[n];
      g = {.data = nullptr, .stride = {}, .size = {1, 1, 1, 1}, .first = first, .count = 0, .dtype = 0, .log2_values = 0, .table = -1};
      const Captured &x = p.dcaptured[n];
      if (!x) continue;
      g.data = x.data, g.dtype = int32_t(x.dtype), g.count = x.elements();
      for (int axis = 0; axis < 4; axis++) g.size[axis] = x.size[axis], g.stride[axis] = x.stride[axis];
      first += g.count, elements_ = first;
    }
    share_out();
  }

  void append(Program &program, Scratch &scratch) {
    take(scratch);
    const size_t before = program.steps.size();
    program.steps.push_back(Zero{a_.largest, zeros_});
    const int64_t pairs = p_.batch * p_.heads, tiles_q = tiles(p_.seqlen_q, passes_.tile_q), tiles_k = tiles(p_.seqlen_k, passes_.tile_k);
    const bool empty = !pairs || !tiles_q || !tiles_k;
    const int64_t rows = empty ? 0 : pairs * tiles_q, columns = empty ? 0 : pairs * tiles_k;
    sum(program, kLargest, rows), sum(program, kRows, rows), sum(program, kColumns, columns);
    sum(program, kDiagonals, empty ? 0 : pairs * (tiles_q + tiles_k - 1));
    sum(program, kTable, a_.table_blocks);
    sum(program, kPairs, rows);
    for (const Group &group : groups_) { // when the largest values of all are known
      const CapturedScatterConfig c{.dtype = int32_t(p_.dtype),
                                    .tile = group.bits[kDiagonals] ? passes_.tile_q : 0,
                                    .rows = group.of(kRows),
                                    .columns = group.of(kColumns),
                                    .diagonals = group.of(kDiagonals),
                                    .features = features_};
      if (!c.rows.bits && !c.columns.bits && !c.diagonals.bits) continue;
      const int64_t lines = c.diagonals.bits ? 2 * passes_.tile_q * (tiles_q + tiles_k - 1) : std::max(p_.seqlen_q, p_.seqlen_k);
      std::ranges::copy(group.lines, a_.lines);
      push(program, Launch(kScatter, c, empty ? 0 : pairs * std::min<int64_t>(tiles(lines, c.threads()), 64), c.threads(), 0, a_));
    }
    a_.tables = tables_, a_.table_blocks *= i32(launches_of(kTable));
    const CapturedResultConfig result{.dtype = int32_t(p_.dtype)};
    program.steps.push_back(Launch(kResult, result, tiles(elements_, result.elements()), result.threads(), 0, a_));
    predict(program, program.steps.size() - before);
  }

private:
  // Which loads are summed in which way, and how many values each tensor gets.
  void share_out() {
    const std::vector<LoadGradient> &loads = program_.loads;
    double values[FunctionArguments::kCaptured] = {};
    for (size_t n = 0; n < loads.size(); n++) {
      if (n % LoadSet::kMost == 0) groups_.push_back({int32_t(n)});
      int32_t *const bits = groups_.back().bits;
      const int32_t tensor = program_.graph[loads[n].load].captured, bit = 1 << n % LoadSet::kMost;
      CapturedGradient &g = a_.gradients[tensor];
      const Lines lines = passes_.of_lines ? loads[n].lines : Lines::general;
      if (lines == Lines::general && has_table(g)) {
        bits[kTable] |= bit;
        continue;
      }
      bits[lines == Lines::rows ? kRows : lines == Lines::columns ? kColumns : lines == Lines::diagonals ? kDiagonals : kPairs] |= bit;
      if (lines == Lines::general) bits[kLargest] |= bit;
      const double of_head = lines == Lines::rows        ? double(p_.seqlen_q)
                             : lines == Lines::columns   ? double(p_.seqlen_k)
                             : lines == Lines::diagonals ? 2.0 * double(p_.seqlen_q + p_.seqlen_k + 2 * passes_.tile_q)
                                                         : double(p_.seqlen_q) * double(p_.part ? p_.size_k() : p_.seqlen_k);
      values[tensor] += double(p_.batch * p_.heads) * of_head;
    }
    for (int n = 0; n < FunctionArguments::kCaptured; n++) a_.gradients[n].log2_values = log2_up(values[n]);
    while (a_.table_copies < kMostTableCopies && a_.table_elements << (a_.table_copies + 1) <= kTableCells) a_.table_copies++;
    if (has(kTable))
      a_.table_blocks = i32(std::min(passes_.table_blocks(a_.table_elements), p_.batch * p_.heads * tiles(p_.seqlen_q, passes_.tile_q)));
  }
  // Whether the tensor lies in a table, in which it gets a place.
  bool has_table(CapturedGradient &g) {
    if (g.table >= 0) return true;
    if (g.count > kTableElements - a_.table_elements || !passes_.table_blocks(i32(a_.table_elements + g.count))) return false;
    g.table = a_.table_elements, a_.table_elements += i32(g.count);
    return true;
  }

  void take(Scratch &scratch) {
    const uint64_t before = scratch.bytes();
    a_.largest = scratch.take<u64>(FunctionArguments::kCaptured);
    a_.sums = scratch.take<i64>(elements_ * (p_.dtype == DType::f64 ? 2 : 1));
    a_.elements = elements_;
    a_.broken = scratch.take<u8>(elements_);
    zeros_ = scratch.bytes() - before;
    const int64_t real = p_.dtype == DType::f64 ? 8 : 4, pairs = p_.batch * p_.heads;
    a_.count[kRows] = a_.in.rows();
    a_.count[kColumns] = p_.varlen ? p_.heads * p_.total_k : pairs * p_.seqlen_k;
    a_.count[kDiagonals] =
        pairs * std::max<int64_t>(0, tiles(p_.seqlen_q, passes_.tile_q) + tiles(p_.seqlen_k, passes_.tile_k) - 1) * 2 * passes_.tile_q;
    for (Group &group : groups_)
      for (const Summed lines : {kRows, kColumns, kDiagonals})
        if (group.bits[lines]) group.lines[lines] = scratch.take<char>(group.of(lines).count() * a_.count[lines] * real);
    if (has(kTable)) a_.tables = tables_ = scratch.take<char>(launches_of(kTable) * table_bytes());
  }

  int64_t table_bytes() const { return int64_t{a_.table_blocks} * a_.table_elements * (p_.dtype == DType::f32 ? 8 : 4); }

  void push(Program &program, Launch &&launch) {
    launch.of_captured = true;
    program.steps.push_back(std::move(launch));
  }
  // A launch for each few loads that are summed in this way; each has its own sums of tables.
  int64_t launches_of(Summed summed) const {
    int64_t launches = 0;
    for (const Group &group : groups_) launches += tiles(group.of(summed).count(), passes_.loads_at_once(summed));
    return launches;
  }
  bool has(Summed summed) const {
    return std::ranges::any_of(groups_, [&](const Group &group) { return group.bits[summed] != 0; });
  }
  void sum(Program &program, Summed summed, int64_t grid) {
    int64_t launch = 0;
    for (const Group &group : groups_) {
      std::ranges::copy(group.lines, a_.lines);
      for (int32_t rest = group.bits[summed]; rest; launch++) {
        int32_t some = 0;
        for (int32_t n = 0; n < passes_.loads_at_once(summed) && rest; n++) some |= rest & -rest, rest &= rest - 1;
        if (summed == kTable) a_.tables = tables_ + launch * table_bytes();
        push(program, passes_.launch({summed, {group.first, some}, group.of(summed)}, grid, a_));
        launches_++;
      }
    }
  }

  void predict(Program &program, size_t steps) const {
    const double scores = walks(p_, Operation::forward, passes_.tile_q, passes_.tile_k).scores();
    const double pass = kLaunchSeconds * double(steps) + launches_ * scores * passes_.score_seconds / device_.sms;
    program.predicted_seconds += pass;
    std::string how;
    for (const auto &[summed, name] : {std::pair{kRows, "rows"}, std::pair{kColumns, "columns"}, std::pair{kDiagonals, "diagonals"},
                                       std::pair{kTable, "elements in shared memory"}, std::pair{kPairs, "pairs, twice"}})
      if (has(summed)) how += text(how.empty() ? "" : ", ", name);
    program.notes.push_back(text("gradients of captured tensors: dS is computed again and summed by ", how.empty() ? "nothing" : how, ", ",
                                 std::lround(pass * 1e6), " of ", std::lround(program.predicted_seconds * 1e6), " µs"));
  }

  const Problem &p_;
  const Device &device_;
  const CapturedPasses &passes_;
  const score::GradientProgram &program_;
  CapturedArguments a_{};
  Features features_;
  std::vector<Group> groups_;
  int64_t elements_ = 0;
  uint64_t zeros_ = 0;
  char *tables_ = nullptr;
  int launches_ = 0;
};

struct CapturedTile {
  int32_t side, key_warps, query_warps, blocks_per_sm;
};
constexpr CapturedTile kTiles[] = {
    {.side = 64, .key_warps = 2, .query_warps = 2, .blocks_per_sm = 3},
    {.side = 32, .key_warps = 2, .query_warps = 1, .blocks_per_sm = 4},
    {.side = 16, .key_warps = 1, .query_warps = 1, .blocks_per_sm = 4},
};
// Half as many scores per thread: for wide heads, and for short ones if df/dl reads q.k, which has to be kept.
constexpr CapturedTile kTilesOfFewer[] = {
    {.side = 64, .key_warps = 4, .query_warps = 2, .blocks_per_sm = 2},
    {.side = 32, .key_warps = 2, .query_warps = 1, .blocks_per_sm = 4},
    {.side = 16, .key_warps = 1, .query_warps = 1, .blocks_per_sm = 4},
};
constexpr CapturedTile kTilesTf32[] = {
    {.side = 64, .key_warps = 4, .query_warps = 2, .blocks_per_sm = 1},
    {.side = 32, .key_warps = 2, .query_warps = 1, .blocks_per_sm = 2},
    {.side = 16, .key_warps = 1, .query_warps = 1, .blocks_per_sm = 4},
};

// The Config of the first tile that fits.
std::optional<CapturedTileConfig> tile_config(const Problem &p, const Device &device) {
  const bool tf32 = p.dtype == DType::f32;
  CapturedTileConfig c = begin_config<CapturedTileConfig>(p, tf32 ? 32 : 16);
  c.products = !tf32 ? 0 : p.allow_tf32 ? 1 : 3;
  c.aligned = aligned_backward(p), c.features = gradient_features(p);
  const int32_t dim = std::max(c.head_dim, c.head_dim_v);
  const bool fewer = dim > 128 || (dim <= 64 && slopes_read_score(*p.gradient_program));
  for (const CapturedTile &tile : tf32 ? kTilesTf32 : fewer ? kTilesOfFewer : kTiles) {
    c.tile_q = c.tile_k = tile.side, c.key_warps = tile.key_warps, c.query_warps = tile.query_warps;
    c.summed = kRows, c.blocks_per_sm = tile.blocks_per_sm;
    if (c.bytes(0) <= device.shared_per_block && divides_blocks(p, tile.side, tile.side)) return c;
  }
  return std::nullopt;
}

} // namespace

void captured_gradients(Program &program, const Problem &p, const Device &device, const BackwardArguments &a, Scratch &scratch,
                        const CapturedPasses &passes) {
  if (p.gradient_program) Gradients(p, device, a, passes).append(program, scratch);
}

std::string captured_refusal(const Problem &p, const Device &device) {
  if (!p.gradient_program) return {};
  if (p.part) return "computes no gradients of captured tensors in parts";
  return tile_config(p, device) ? "" : no_tile(device);
}

void captured_gradients(Program &program, const Problem &p, const Device &device, const BackwardArguments &a, Scratch &scratch) {
  if (!p.gradient_program) return;
  const CapturedTileConfig any = *tile_config(p, device);
  const bool read_score = slopes_read_score(*p.gradient_program);
  const auto with = [&](Summed summed, int32_t table_elements) {
    CapturedTileConfig c = any;
    c.summed = summed;
    const int32_t most = read_score ? 2 : 3; // it has no registers for more
    c.blocks_per_sm = int32_t(resident(device, c.bytes(table_elements), std::min(any.blocks_per_sm, most)));
    return c;
  };
  // As guessed: the products at the rate of kernels/mma's dbias, and a pair's instructions at this rate.
  constexpr double kPerClock = 1400, kInstructionsPerClock = 100, kInstructions = 24;
  const double columns = any.head_dim + any.head_dim_v, products = p.dtype == DType::f32 ? 2.0 * any.products : 1;
  CapturedPasses passes{.tile_q = any.tile_q,
                        .tile_k = any.tile_k,
                        .of_lines = true,
                        .diagonals_at_once = p.dtype == DType::f32 ? 1 : 2,
                        .table_blocks = [&](int32_t elements) -> int64_t {
                          const CapturedTileConfig c = with(kTable, elements);
                          return c.bytes(elements) <= device.shared_per_block ? int64_t{device.sms} * c.blocks_per_sm : 0;
                        },
                        .launch =
                            [&](const CapturedPasses::Sums &sums, int64_t grid, const CapturedArguments &arguments) {
                              CapturedTileConfig c = with(sums.summed, arguments.table_elements);
                              c.loads = sums.loads, c.of_lines = sums.of_lines;
                              return Launch(kCaptured, c, grid, c.threads(), c.bytes(arguments.table_elements), arguments);
                            },
                        .score_seconds =
                            (2 * columns * products / kPerClock + (kInstructions + gradient_instructions(p)) / kInstructionsPerClock) /
                            device.clock_hz};
  captured_gradients(program, p, device, a, scratch, passes);
}

} // namespace strobe::cuda
