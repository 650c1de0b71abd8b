#include "cuda/program/mask_blocks.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "../../../kernels/attention/mask_blocks.h"
#include "../../../kernels/attention/part.h"
#include "../../../kernels/passes/config.h"
#include "attention/text.h"
#include "cuda/compile/jit.h"
#include "cuda/driver/device.h"
#include "cuda/driver/stream.h"
#include "cuda/program/addresses.h"
#include "cuda/program/part.h"
#include "score/block_code.h"

namespace strobe::cuda {
namespace {

constexpr const char *kHeader = "passes/mask_blocks.h";
constexpr KernelSource kMakeCells{kHeader, "strobe::passes::MakeCells", "strobe::KeptListsConfig"};
constexpr KernelSource kCountKept{kHeader, "strobe::passes::CountKept", "strobe::KeptListsConfig"};
constexpr KernelSource kListKept{kHeader, "strobe::passes::ListKept", "strobe::KeptListsConfig"};
constexpr KernelSource kSideBounds{kHeader, "strobe::passes::SideBounds", "strobe::BoundsConfig"};
constexpr KernelSource kPairBounds{kHeader, "strobe::passes::PairBounds", "strobe::BoundsConfig"};

constexpr int64_t kMostBlocks = score::kMostKeptBlocks; // of all matrices: kernels count them as int32

// The product of numbers that are not negative, or what exceeds kMostBlocks.
int64_t product_of(std::initializer_list<int64_t> numbers) {
  int64_t all = 1;
  for (const int64_t n : numbers) all = n && all > kMostBlocks / n ? kMostBlocks + 1 : all * n;
  return std::ranges::count(numbers, 0) ? 0 : all;
}

ElementKind element_of(DType dtype) {
  switch (dtype) {
  case DType::boolean:
    return kBooleans;
  case DType::i32:
    return kInts;
  case DType::i64:
    return kLongs;
  case DType::f16:
    return kHalves;
  case DType::bf16:
    return kBrains;
  case DType::f32:
    return kFloats;
  case DType::f64:
    return kDoubles;
  default:
    throw Error(STROBE_INTERNAL, "a captured tensor of an unknown dtype");
  }
}

// The launches that make the cells, level after level.
class Cells {
public:
  // Takes room for the cells of a load, and sets their addresses.
  void add(BoundsLoad &load, Scratch &room) {
    load.levels_x = levels_of(load, load.x), load.levels_y = levels_of(load, load.y);
    for (int32_t x = 0; x < load.levels_x; x++)
      for (int32_t y = 0; y < load.levels_y; y++)
        if (x || y) add_level(load, x, y, room);
  }

  int64_t launches() const { return int64_t(levels_.size()); }
  void run(const Kernel &kernel, CUstream stream, bool early) const {
    constexpr int64_t warps = KeptListsConfig::threads() / 32;
    for (const Level &level : levels_)
      launch(kernel, {.x = (level.cells + warps - 1) / warps}, KeptListsConfig::threads(), 0, stream, &level.arguments,
             sizeof level.arguments, early);
  }

private:
  struct Level {
    CellArguments arguments{};
    int64_t cells = 0;
  };

  static int32_t levels_of(const BoundsLoad &load, int32_t axis) {
    int32_t levels = 1;
    if (axis >= 0)
      for (int64_t size = load.size[axis]; size > kCellsFanOut && levels < kCellLevels; size = div_up(size, kCellsFanOut)) levels++;
    return levels;
  }
  static void sizes_of(const BoundsLoad &load, int32_t level_x, int32_t level_y, int64_t *sizes) {
    for (int32_t axis = 0; axis < 4; axis++) {
      sizes[axis] = load.stride[axis] == 0 ? 1 : load.size[axis];
      for (int32_t level = axis == load.x ? level_x : axis == load.y ? level_y : 0; level > 0; level--)
        sizes[axis] = div_up(sizes[axis], kCellsFanOut);
    }
  }

  void add_level(BoundsLoad &load, int32_t x, int32_t y, Scratch &room) {
    CellReduction r{};
    const int32_t from_x = y ? x : x - 1, from_y = y ? y - 1 : y;
    int64_t sizes[4], from[4], dense = 1;
    sizes_of(load, x, y, sizes), sizes_of(load, from_x, from_y, from);
    r.axis = y ? load.y : load.x, r.length = from[r.axis];
    const bool elements = !from_x && !from_y;
    r.count = 1;
    for (int32_t axis = 3; axis >= 0; axis--) {
      r.size[axis] = sizes[axis], r.stride[axis] = elements ? load.stride[axis] : dense;
      dense *= from[axis], r.count *= sizes[axis];
    }
    r.from = elements ? load.data : load.cells[from_x * kCellLevels + from_y];
    r.kind = cells_of(load.element);
    r.element = elements ? load.element : r.kind;
    r.of_reals = load.element >= kHalves && load.element <= kDoubles;
    r.to = r.kind == kBooleanCells ? static_cast<void *>(room.take<uint8_t>(r.count)) : room.take<uint64_t>(3 * r.count);
    load.cells[x * kCellLevels + y] = r.to;
    const size_t depth = size_t(x + y - 1); // what it reads is made in an earlier launch
    if (levels_.size() <= depth) levels_.resize(depth + 1);
    Level &level = levels_[depth];
    r.first = level.cells, level.cells += r.count;
    level.arguments.reductions[level.arguments.count++] = r;
  }

  std::vector<Level> levels_;
};
// What a call launches.
struct Work {
  score::BlockCode code;
  MaskBlocksArguments a{};
  Cells cells;
  unsigned short *bits = nullptr; // of both lists, 0 before
  uint64_t bit_bytes = 0;
  u64 *words = nullptr;
  BoundsConfig config{};
  int64_t slots = 0;
  uint64_t bytes = 0; // of the workspace

  Work(const score::MaskProblem &p, const score::Intervals &intervals, const Device &on, void *workspace) : code(intervals, p.captured) {
    if (!code.refusal.empty()) throw Error(STROBE_UNSUPPORTED, code.refusal);
    slots = std::max({code.side[0].slots, code.side[1].slots, code.pairs.slots, 1});
    config.functions = code.functions;
    for (config.warps = 4; config.warps > 1 && config.shared_bytes(slots) > kFewBytes;) config.warps /= 2;
    if (config.shared_bytes(slots) > on.shared_per_block)
      throw Error(STROBE_UNSUPPORTED,
                  text("the function needs ", config.shared_bytes(slots), " bytes of shared memory; this GPU has ", on.shared_per_block));
    a.heads = int32_t(p.to.heads), a.matrices = p.to.batch * p.to.heads, a.offset = p.offset, a.result = code.result;
    Scratch room(workspace);
    words = reinterpret_cast<u64 *>(room.take<uint64_t>(int64_t(code.words.size())));
    a.words = words;
    const auto steps_at = [&](int64_t place) { return reinterpret_cast<const BoundsStep *>(words + place); };
    const int64_t lengths[] = {p.grid.seqlen_q, p.grid.seqlen_k}, blocks[] = {p.grid.block_q, p.grid.block_k};
    const int64_t counts[] = {p.grid.rows(), p.grid.columns()};
    a.pairs = {steps_at(code.pairs.steps), code.pairs.count};
    a.kept = reinterpret_cast<i64 *>(room.take<int64_t>(1));
    for (int s = 0; s < 2; s++) {
      const score::BlockCode::Part &part = code.side[s];
      BoundsSide &side = a.side[s];
      side.code = {steps_at(part.steps), part.count};
      side.reads = part.reads, side.out = words + part.out, side.in = words + part.in;
      side.length = lengths[s], side.block = blocks[s];
      side.blocks = int32_t(counts[s]), side.squares = int32_t(div_up(counts[s], kSquare));
      side.values = reinterpret_cast<u64 *>(room.take<uint64_t>(3 * a.matrices * (side.blocks + side.squares) * side.reads));
    }
    unsigned short *last = nullptr;
    for (int s = 0; s < 2; s++) {
      KeptLists &list = a.lists[s];
      list.lines = a.side[s].blocks, list.words = int32_t(round_up(a.side[1 - s].squares, 2));
      const int64_t lines = a.matrices * list.lines;
      for (unsigned short **to : {&list.kept, &list.full}) *to = last = room.take<unsigned short>(lines * list.words);
      last += lines * list.words;
    }
    bits = a.lists[0].kept, bit_bytes = uint64_t(reinterpret_cast<uintptr_t>(last) - reinterpret_cast<uintptr_t>(bits));
    for (KeptLists &list : a.lists) {
      const int64_t lines = a.matrices * list.lines;
      list.before = room.take<int32_t>(lines), list.totals = room.take<int32_t>(div_up(lines, KeptListsConfig::chunk()));
    }
    for (size_t n = 0; n < code.loads.size(); n++) {
      const score::BlockCode::Load &from = code.loads[n];
      const Captured &tensor = p.captured[from.captured];
      BoundsLoad &load = a.loads[n];
      load.data = tensor.data, load.element = element_of(tensor.dtype), load.axes = tensor.rank;
      for (int axis = 0; axis < 4; axis++) load.size[axis] = tensor.size[axis], load.stride[axis] = tensor.stride[axis];
      load.x = from.x, load.y = from.y;
      cells.add(load, room);
    }
    bytes = room.bytes();
    const strobe_kept_blocks &to = p.to;
    a.lists[0].rows = to.rows, a.lists[0].cols = to.cols, a.lists[0].marks = to.marks;
    a.lists[1].rows = to.rows_t, a.lists[1].cols = to.cols_t, a.lists[1].marks = to.marks_t;
    a.most_kept = to.most_kept;
  }

  // Loads the kernels. Throws STROBE_UNSUPPORTED if there is no compiler for one.
  void load_all(const Device &on) const {
    std::vector<KernelName> missing;
    for (const KernelName &name : kernels())
      if (!find_loaded(*name.source, name.config, on)) missing.push_back(name);
    load_together(missing, on);
  }

  void run(const Device &on, CUstream stream) const {
    const std::vector<KernelName> names = kernels();
    const auto kernel = [&](size_t n) -> const Kernel & { return load(*names[n].source, names[n].config, on); };
    const bool early = on.cc >= 90; // every kernel waits for the one before
    fill(bits, 0, bit_bytes, stream);
    constexpr size_t most = size_t(kMostWords) / 2;
    for (size_t first = 0; first < code.words.size(); first += most) {
      WordArguments some{};
      some.to = reinterpret_cast<i32 *>(words + first), some.count = i32(2 * std::min(code.words.size() - first, most));
      std::memcpy(some.words, &code.words[first], size_t(some.count) * sizeof(i32));
      launch(kernel(0), {}, passes::WordsConfig::threads(), 0, stream, &some, sizeof some, early && first);
    }
    if (cells.launches()) cells.run(kernel(5), stream, early);
    const auto start = [&](size_t n, int64_t work, int64_t of_block, int threads, int64_t shared_bytes) {
      launch(kernel(n), {.x = div_up(work, of_block)}, threads, shared_bytes, stream, &a, sizeof a, early);
    };
    const int64_t entries = a.side[0].blocks + a.side[0].squares + int64_t{a.side[1].blocks} + a.side[1].squares;
    const int64_t squares = int64_t{a.side[0].squares} * a.side[1].squares,
                  lines = a.matrices * (int64_t{a.lists[0].lines} + a.lists[1].lines);
    int64_t chunks = 0;
    for (const KeptLists &list : a.lists) chunks += div_up(a.matrices * list.lines, KeptListsConfig::chunk());
    start(1, a.matrices * entries, config.threads(), config.threads(), config.shared_bytes(slots));
    start(2, a.matrices * squares, config.warps, config.threads(), config.shared_bytes(slots));
    start(3, chunks, 1, KeptListsConfig::count_threads(), 0);
    start(4, lines, KeptListsConfig::threads() / 32, KeptListsConfig::threads(), 0);
  }

private:
  static constexpr int64_t kFewBytes = 48 << 10; // several blocks of threads fit a multiprocessor

  // In the order of the launches but for the cells, which a function may not need.
  std::vector<KernelName> kernels() const {
    static constexpr int32_t kNone[] = {0};
    const std::span<const int32_t> of_bounds(reinterpret_cast<const int32_t *>(&config), sizeof config / sizeof(int32_t));
    std::vector<KernelName> names = {
        {&kWriteWords, kNone}, {&kSideBounds, of_bounds}, {&kPairBounds, of_bounds}, {&kCountKept, kNone}, {&kListKept, kNone}};
    if (cells.launches()) names.push_back({&kMakeCells, kNone});
    return names;
  }
};

static_assert(sizeof(MaskBlocksArguments) <= 4096 && sizeof(CellArguments) <= 4096);

} // namespace

void mask_blocks(score::MaskProblem &p) {
  const score::Intervals intervals(p.program->graph, p.program->seen, p.captured);
  p.set_matrices(intervals);
  strobe_kept_blocks &to = p.to;
  const int64_t rows = p.grid.rows(), columns = p.grid.columns(), matrices = product_of({to.batch, to.heads});
  const int64_t all = product_of({matrices, rows, columns});
  if (all > kMostBlocks) throw Error(STROBE_UNSUPPORTED, text("more than ", kMostBlocks, " blocks in all"));
  to.n_rows = matrices * (rows + 1), to.n_rows_t = matrices * (columns + 1), to.kept = all;
  if (const std::string why = devices_missing(); !why.empty()) throw Error(STROBE_UNSUPPORTED, why);
  const Device &on = device(p.mask.device_index);
  const bool sizes_alone = !to.most_rows && !to.most_rows_t && !to.most_kept;
  if (sizes_alone && !all) return;
  if (!sizes_alone && (to.n_rows > to.most_rows || to.n_rows_t > to.most_rows_t))
    refuse("kept_blocks", Code::size, "room for {0} and {1} rows; accepted is room for {2} and {3}", to.most_rows, to.most_rows_t,
           to.n_rows, to.n_rows_t);
  DeviceGuard guard(on);
  const CUstream stream = static_cast<CUstream>(p.mask.stream);
  if (!all) {
    fill(to.rows, 0, uint64_t(to.n_rows) * sizeof(int32_t), stream), fill(to.rows_t, 0, uint64_t(to.n_rows_t) * sizeof(int32_t), stream);
    return;
  }
  const Work sized(p, intervals, on, nullptr);
  const uint64_t needed = to.workspace_bytes = sized.bytes;
  sized.load_all(on);
  if (sizes_alone) return;
  const bool waits = !capturing(stream);
  if (!waits && to.most_kept < all)
    refuse("most_kept", Code::size, "{0} while the stream is captured; accepted is {1}, all blocks, or more", to.most_kept, all);
  if (p.mask.workspace && p.mask.workspace_bytes < needed)
    refuse("workspace_bytes", Code::size, "{0}; accepted is {1} or more", p.mask.workspace_bytes, needed);
  void *workspace = p.mask.workspace ? p.mask.workspace : allocate(needed, stream);
  const auto release = [&](void *memory) {
    if (!p.mask.workspace) cuda::free(memory, stream);
  };
  const std::unique_ptr<void, decltype(release)> owner(workspace, release);
  const Work work(p, intervals, on, workspace);
  work.run(on, stream);
  if (!waits) return;
  int64_t kept = 0;
  read(&kept, work.a.kept, sizeof kept, stream);
  if (kept > score::kMostKeptBlocks) score::refuse_many_kept();
  to.kept = kept;
}

} // namespace strobe::cuda
