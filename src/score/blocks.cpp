#include "score/blocks.h"

#include <algorithm>
#include <bit>
#include <tuple>

#include "attention/tensor_check.h"
#include "attention/versioned.h"
#include "score/build.h"
#include "score/interval.h"

namespace strobe::score {
namespace {

constexpr int64_t kMostBlocks = kMostKeptBlocks;

// The blocks of one matrix, numbered from 0, in rows [q0, q1) and columns [k0, k1).
struct KeptArea {
  int64_t q0, q1, k0, k1;
  bool full;
};

// Walks over squares of 2^n by 2^n blocks, from the whole matrix to single blocks, and divides those that bounds do not decide.
class BlockWalk {
public:
  BlockWalk(const Program &program, const Captured *captured, const BlockGrid &grid, int64_t offset, bool exact)
      : grid_(grid), exact_(exact), intervals_(program.graph, program.seen, captured) {
    box_.offset = {offset, offset};
    const int32_t count = int32_t(intervals_.nodes().size());
    std::vector<char> read(static_cast<size_t>(count));
    for (int32_t n = 0; n < count; n++) {
      const int side = intervals_.depends(n) & (Intervals::kQuery | Intervals::kKey);
      (side == Intervals::kQuery ? queries_.nodes : side == Intervals::kKey ? keys_.nodes : side ? of_both_ : fixed_).push_back(n);
    }
    for (int32_t n : of_both_)
      for (int32_t input : intervals_.reads(n)) read[size_t(input)] = true;
    read.back() = true;
    for (Side *side : {&queries_, &keys_})
      std::ranges::copy_if(side->nodes, std::back_inserter(side->read), [&](int32_t n) { return read[size_t(n)]; });
    const int64_t most = std::max({grid.rows(), grid.columns(), int64_t{1}});
    levels_ = std::bit_width(uint64_t(most - 1)) + 1;
    queries_.resize(grid.rows(), levels_), keys_.resize(grid.columns(), levels_);
  }

  const Intervals &intervals() const { return intervals_; }

  // Adds the areas that are kept, so that those of a row of blocks have ascending columns.
  void run(int64_t b, int64_t h, std::vector<KeptArea> &areas) {
    areas_ = &areas;
    box_.b = {b, b}, box_.h = {h, h};
    intervals_.evaluate(fixed_, box_);
    queries_.forget(), keys_.forget();
    if (grid_.rows() && grid_.columns()) visit(levels_ - 1, 0, 0);
  }

private:
  // Nodes that depend on the queries, or on the keys, alone: their bounds are found once for each range.
  struct Side {
    std::vector<int32_t> nodes, read; // read: those that others read
    struct Level {
      std::vector<char> known;
      std::vector<Bounds> bounds; // read.size() for each range
    };
    std::vector<Level> levels;

    void resize(int64_t blocks, int32_t count) {
      for (int32_t level = 0; level < count; level++) {
        const size_t ranges = size_t(((blocks - 1) >> level) + 1);
        levels.push_back({std::vector<char>(ranges), std::vector<Bounds>(ranges * read.size())});
      }
    }
    void forget() {
      for (Level &level : levels) std::ranges::fill(level.known, false);
    }
  };

  int32_t result() const { return int32_t(intervals_.nodes().size()) - 1; }

  // Positions of the blocks from `first` up to `end`.
  static Range positions(int64_t first, int64_t end, int64_t block, int64_t length) {
    return {first * block, std::min(end, (length + block - 1) / block) * block >= length ? length - 1 : end * block - 1};
  }

  void set(Side &side, Range &range, int32_t level, int64_t n, int64_t block, int64_t length) {
    range = positions(n << level, (n + 1) << level, block, length);
    Side::Level &known = side.levels[size_t(level)];
    Bounds *bounds = known.bounds.data() + size_t(n) * side.read.size();
    if (known.known[size_t(n)]) {
      for (size_t k = 0; k < side.read.size(); k++) intervals_[side.read[k]] = bounds[k];
      return;
    }
    intervals_.evaluate(side.nodes, box_);
    for (size_t k = 0; k < side.read.size(); k++) bounds[k] = intervals_[side.read[k]];
    known.known[size_t(n)] = true;
  }

  // The square (q, k) of blocks of a level.
  void visit(int32_t level, int64_t q, int64_t k) {
    set(queries_, box_.i, level, q, grid_.block_q, grid_.seqlen_q);
    set(keys_, box_.j, level, k, grid_.block_k, grid_.seqlen_k);
    intervals_.evaluate(of_both_, box_);
    const Range seen = intervals_[result()].whole;
    if (!seen.high) return;
    if (seen.low) return keep(level, q, k, true);
    if (level > 0) {
      const int32_t below = level - 1;
      for (int64_t row = 2 * q; row <= 2 * q + 1 && row << below < grid_.rows(); row++)
        for (int64_t column = 2 * k; column <= 2 * k + 1 && column << below < grid_.columns(); column++) visit(below, row, column);
      return;
    }
    if (!exact_) return keep(0, q, k, false);
    Found found;
    search(box_.i, box_.j, found);
    if (found.visible) keep(0, q, k, !found.hidden);
  }

  void keep(int32_t level, int64_t q, int64_t k, bool full) {
    areas_->push_back(
        {q << level, std::min((q + 1) << level, grid_.rows()), k << level, std::min((k + 1) << level, grid_.columns()), full});
  }

  struct Found {
    bool visible = false, hidden = false;
  };

  // Looks for a visible and a hidden pair, until both are found.
  void search(Range i, Range j, Found &found) {
    Box box = box_;
    box.i = i, box.j = j;
    for (const std::vector<int32_t> *nodes : {&queries_.nodes, &keys_.nodes, &of_both_}) intervals_.evaluate(*nodes, box);
    const Range seen = intervals_[result()].whole;
    if (seen.low == seen.high) {
      (seen.low ? found.visible : found.hidden) = true;
    } else if (i.low == i.high && j.low == j.high) { // a pair that the rounding of reals decides: engines may differ
      found = {true, true};
    } else {
      const bool by_queries = i.high - i.low > j.high - j.low;
      const Range all = by_queries ? i : j;
      const int64_t middle = all.low + (all.high - all.low) / 2;
      for (Range half : {Range{all.low, middle}, Range{middle + 1, all.high}})
        if (!found.visible || !found.hidden) by_queries ? search(half, j, found) : search(i, half, found);
    }
  }

  const BlockGrid grid_;
  const bool exact_;
  Intervals intervals_;
  Box box_;
  Side queries_, keys_;
  std::vector<int32_t> of_both_, fixed_;
  int32_t levels_ = 1;
  std::vector<KeptArea> *areas_ = nullptr;
};

// Areas as a CSR, matrix by matrix.
class KeptCsr {
public:
  KeptCsr(const BlockGrid &grid, strobe_kept_blocks &to) : rows_(grid.rows()), to_(to) {}

  void add(std::vector<KeptArea> areas) {
    for (const KeptArea &area : areas) to_.kept += (area.q1 - area.q0) * (area.k1 - area.k0);
    if (to_.kept > kMostBlocks)
      refuse("block_mask", Code::size, "more than {0} blocks are kept; accepted are as many as an int32 can count: larger blocks are fewer",
             kMostBlocks);
    matrices_.push_back(std::move(areas));
    to_.n_rows += rows_ + 1;
  }

  void write() const {
    if (to_.n_rows > to_.most_rows || to_.kept > to_.most_kept) return;
    int32_t *rows = to_.rows, first = 0;
    std::vector<int32_t> next(size_t(rows_) + 1);
    for (const auto &areas : matrices_) {
      std::ranges::fill(next, 0);
      for (const KeptArea &area : areas)
        for (int64_t q = area.q0; q < area.q1; q++) next[size_t(q) + 1] += int32_t(area.k1 - area.k0);
      next[0] = first;
      for (int64_t q = 0; q < rows_; q++) next[size_t(q) + 1] += next[size_t(q)];
      first = next.back();
      rows = std::ranges::copy(next, rows).out;
      for (const KeptArea &area : areas)
        for (int64_t q = area.q0; q < area.q1; q++) {
          int32_t &at = next[size_t(q)];
          for (int64_t k = area.k0; k < area.k1; k++, at++) to_.cols[at] = int32_t(k), to_.full[at] = area.full;
        }
    }
  }

private:
  const int64_t rows_;
  strobe_kept_blocks &to_;
  std::vector<std::vector<KeptArea>> matrices_;
};

void check_numbers(const strobe_block_mask &mask, Reasons &reasons) {
  const std::pair<const char *, int64_t> sizes[] = {
      {"batch", mask.batch}, {"heads", mask.heads}, {"seqlen_q", mask.seqlen_q}, {"seqlen_k", mask.seqlen_k}};
  constexpr int64_t most = int64_t{1} << 53; // sums of positions have 64 bits
  for (const auto &[name, x] : sizes)
    if (x < 0 || x > most) reasons.add(name, Code::value, "{0}; accepted is 0 to {1}", x, most);
  const std::tuple<const char *, int64_t, const char *, int64_t> blocks[] = {{"block_q", mask.block_q, "seqlen_q", mask.seqlen_q},
                                                                             {"block_k", mask.block_k, "seqlen_k", mask.seqlen_k}};
  for (const auto &[name, block, of, length] : blocks)
    if (block < 1 || block > most)
      reasons.add(name, Code::value, "{0}; accepted is 1 to {1}", block, most);
    else if (length <= most && (length + block - 1) / block > kMostBlocks)
      reasons.add(of, Code::size, "{0} in blocks of {1}; accepted are up to {2} blocks, what an int32 can count", length, block,
                  kMostBlocks);
  if (mask.alignment != STROBE_BOTTOM_RIGHT && mask.alignment != STROBE_TOP_LEFT)
    reasons.add("alignment", Code::value, "{0}; accepted is {1} (bottom right) or {2} (top left)", mask.alignment, int(STROBE_BOTTOM_RIGHT),
                int(STROBE_TOP_LEFT));
  if (mask.exact != 0 && mask.exact != 1) reasons.add("exact", Code::value, "{0}; accepted is 0 or 1", mask.exact);
  if (mask.device_type == STROBE_CUDA && mask.exact == 1)
    reasons.add("exact", Code::excluded, "1 on a GPU; accepted is 0: copy what the function reads, and ask for it on the CPU");
}

strobe_tensor place_of(const strobe_block_mask &mask) {
  strobe_tensor place{};
  place.device_type = mask.device_type, place.device_index = mask.device_index;
  return place;
}

void check_device(const strobe_block_mask &mask, Reasons &reasons) {
  if (mask.device_type != 0 && mask.device_type != STROBE_CPU && mask.device_type != STROBE_CUDA)
    reasons.add("device_type", Code::value, "{0}; accepted is {1} (the CPU) or {2} (CUDA)", mask.device_type, int(STROBE_CPU),
                int(STROBE_CUDA));
  if (mask.device_type == STROBE_CUDA) {
    if (mask.workspace && reinterpret_cast<uintptr_t>(mask.workspace) % 256)
      reasons.add("workspace", Code::memory, "not aligned; accepted is an address that is a multiple of 256");
    return;
  }
  if (mask.device_index) reasons.add("device_index", Code::value, "{0} of the CPU; accepted is 0", mask.device_index);
  for (const auto &[name, given] : {std::pair{"stream", mask.stream}, {"workspace", mask.workspace}})
    if (given) reasons.add(name, Code::excluded, "given on the CPU; accepted is null");
}

void check_captured(const strobe_block_mask &mask, const CapturedTensors &given, Reasons &reasons) {
  TensorChecks checks(reasons);
  const strobe_tensor place = place_of(mask);
  checks.on_device_of(place, nullptr);
  for (size_t c = 0; c < given.size(); c++)
    if (given[c]) check_captured_tensor(int32_t(c), *given[c], checks, reasons);
}

void check_room(const strobe_block_mask &mask, const strobe_kept_blocks &to, Reasons &reasons) {
  for (const auto &[name, room] : {std::pair{"most_rows", to.most_rows}, {"most_rows_t", to.most_rows_t}, {"most_kept", to.most_kept}})
    if (room < 0) reasons.add(name, Code::value, "{0}; accepted is 0 or more", room);
  const bool on_gpu = mask.device_type == STROBE_CUDA;
  const std::tuple<const char *, const void *, int64_t, bool> given[] = {
      {"rows", to.rows, to.most_rows, true},         {"cols", to.cols, to.most_kept, true},       {"full", to.full, to.most_kept, !on_gpu},
      {"rows_t", to.rows_t, to.most_rows_t, on_gpu}, {"cols_t", to.cols_t, to.most_kept, on_gpu}, {"marks", to.marks, to.most_kept, on_gpu},
      {"marks_t", to.marks_t, to.most_kept, on_gpu},
  };
  for (const auto &[name, address, room, is_taken] : given)
    if (is_taken && !address && room > 0)
      reasons.add(name, Code::memory, "null; accepted is memory for {0} entries, or null with room for none", room);
    else if (!is_taken && address)
      reasons.add(name, Code::excluded, on_gpu ? "given on a GPU; accepted is null" : "given on the CPU; accepted is null");
  if (!on_gpu && to.most_rows_t > 0) reasons.add("most_rows_t", Code::excluded, "{0} on the CPU; accepted is 0", to.most_rows_t);
}

} // namespace

MaskProblem::MaskProblem(const strobe_block_mask *given, const strobe_kept_blocks *kept) {
  Reasons reasons;
  mask = read_versioned("block_mask", given, reasons);
  to = read_versioned("kept_blocks", kept, reasons);
  reasons.raise_if_any();
  check_numbers(mask, reasons);
  check_device(mask, reasons);
  const CapturedTensors tensors = {mask.captured_0, mask.captured_1, mask.captured_2, mask.captured_3,
                                   mask.captured_4, mask.captured_5, mask.captured_6, mask.captured_7};
  if (!reasons.size()) check_captured(mask, tensors, reasons);
  if (mask.mask_function) {
    strobe_attention a{};
    a.mask_function = mask.mask_function;
    program = make_program(a, tensors, reasons);
  } else {
    reasons.add("mask_function", Code::missing, "missing; accepted is a pointer to a strobe_function");
  }
  check_room(mask, to, reasons);
  reasons.raise_if_any();
  for (size_t c = 0; c < tensors.size(); c++) captured[c] = captured_of(tensors[c]);
  grid = {mask.seqlen_q, mask.seqlen_k, mask.block_q, mask.block_k};
  offset = mask.alignment == STROBE_BOTTOM_RIGHT ? mask.seqlen_k - mask.seqlen_q : 0;
  to.n_rows = to.n_rows_t = to.kept = 0, to.workspace_bytes = 0;
}

void refuse_many_kept() {
  refuse("block_mask", Code::size, "more than {0} blocks are kept; accepted are as many as an int32 can count: larger blocks are fewer",
         kMostKeptBlocks);
}

void MaskProblem::set_matrices(const Intervals &intervals) {
  const uint8_t depends = intervals.depends(int32_t(intervals.nodes().size()) - 1);
  to.batch = depends & Intervals::kBatch ? mask.batch : 1;
  to.heads = depends & Intervals::kHead ? mask.heads : 1;
}

void MaskProblem::write(strobe_kept_blocks *kept) const {
  strobe_kept_blocks result = to;
  result.size = kept->size; // the caller's struct may be shorter
  std::memcpy(kept, &result, std::min<size_t>(kept->size, sizeof result));
}

void mask_blocks(MaskProblem &problem) {
  BlockWalk walk(*problem.program, problem.captured, problem.grid, problem.offset, problem.mask.exact);
  problem.set_matrices(walk.intervals());
  KeptCsr csr(problem.grid, problem.to);
  for (int64_t b = 0; b < problem.to.batch; b++)
    for (int64_t h = 0; h < problem.to.heads; h++) {
      std::vector<KeptArea> areas;
      walk.run(b, h, areas);
      csr.add(std::move(areas));
    }
  csr.write();
}

} // namespace strobe::score
