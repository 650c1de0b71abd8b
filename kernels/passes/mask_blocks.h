// Which blocks a mask function keeps: bounds of its values in squares of blocks and in blocks, and lists of the blocks that may see a pair.
// src/score/block_code.h makes the programs that are interpreted here, once compiled for all functions.
#pragma once
#include "../attention/bounds.h"
#include "../attention/mask_blocks.h"
#include "../ptx/math.h"

namespace strobe::passes {

inline constexpr u32 kAllLanes = 0xffffffff;

using bounds::Bounds;
using bounds::Range;

__device__ __forceinline__ Bounds of_words(u64 low, u64 high, u64 nan) {
  Bounds made = bounds::integers((i64)low, (i64)high); // the same bits if they are reals
  made.may_be_nan = nan != 0;
  return made;
}

// Elements as bounds. Reals are not rounded yet, and NaN is no number.
__device__ __forceinline__ Bounds no_elements(bool reals) {
  return reals ? bounds::reals(bounds::kInfinite, -bounds::kInfinite, false) : bounds::integers(bounds::kMost, bounds::kLeast);
}
__device__ __forceinline__ Bounds real_element(double x) {
  return x != x ? bounds::reals(bounds::kInfinite, -bounds::kInfinite, true) : bounds::reals(x, x, false);
}
__device__ __forceinline__ Bounds integer_element(i64 x) { return bounds::integers(x, x); }
__device__ __forceinline__ Bounds element_at(const void *data, i32 element, i64 at) {
  switch (element) {
  case kBooleans:
    return integer_element(((const u8 *)data)[at] != 0);
  case kInts:
    return integer_element(((const i32 *)data)[at]);
  case kLongs:
    return integer_element(((const i64 *)data)[at]);
  case kHalves:
    return real_element(to_float(f16{((const unsigned short *)data)[at]}));
  case kBrains:
    return real_element(to_float(bf16{((const unsigned short *)data)[at]}));
  case kFloats:
    return real_element(((const float *)data)[at]);
  case kDoubles:
    return real_element(((const double *)data)[at]);
  case kBooleanCells: {
    const u8 cell = ((const u8 *)data)[at];
    return bounds::integers(cell & 1 ? 0 : 1, cell & 2 ? 1 : 0);
  }
  default: {
    const u64 *cell = (const u64 *)data + 3 * at;
    return of_words(cell[0], cell[1], cell[2]);
  }
  }
}
__device__ __forceinline__ void add_element(Bounds &to, const Bounds &x, bool reals) {
  if (reals)
    to.real.least = min(to.real.least, x.real.least), to.real.most = max(to.real.most, x.real.most);
  else
    to.whole.low = min(to.whole.low, x.whole.low), to.whole.high = max(to.whole.high, x.whole.high);
  to.may_be_nan = to.may_be_nan || x.may_be_nan;
}
STROBE_FN bool are_reals(i32 element) { return element >= kHalves && element <= kDoubles; }

// A level of cells: one warp makes a cell.
template <KeptListsConfig C> struct MakeCells {
  using Arguments = CellArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 1;

  static __device__ __forceinline__ void run(const Arguments &a) {
    const i64 warp = (i64)blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
    const i32 lane = threadIdx.x % 32;
    for (i32 n = 0; n < a.count; ++n) {
      const CellReduction &r = a.reductions[n];
      if (warp < r.first || warp >= r.first + r.count) continue;
      i64 rest = warp - r.first, at = 0, own = 0;
      for (i32 axis = 3; axis >= 0; --axis) {
        const i64 place = rest % r.size[axis];
        rest /= r.size[axis];
        if (axis == r.axis)
          own = place * kCellsFanOut + lane;
        else
          at += place * r.stride[axis];
      }
      Bounds cell = no_elements(r.of_reals);
      if (own < r.length) add_element(cell, element_at(r.from, r.element, at + own * r.stride[r.axis]), r.of_reals);
      for (i32 by = 16; by; by /= 2)
        add_element(cell,
                    of_words(__shfl_xor_sync(kAllLanes, (u64)cell.whole.low, by), __shfl_xor_sync(kAllLanes, (u64)cell.whole.high, by),
                             __shfl_xor_sync(kAllLanes, (u32)cell.may_be_nan, by)),
                    r.of_reals);
      if (lane != 0) return;
      if (r.kind == kBooleanCells) {
        ((u8 *)r.to)[warp - r.first] = (cell.whole.low == 0 ? 1 : 0) | (cell.whole.high == 1 ? 2 : 0);
      } else {
        u64 *to = (u64 *)r.to + 3 * (warp - r.first);
        to[0] = (u64)cell.whole.low, to[1] = (u64)cell.whole.high, to[2] = cell.may_be_nan;
      }
      return;
    }
  }
};

template <i32 kFunctions_> struct DeviceMathematics {
  static constexpr i32 kFunctions = kFunctions_;
  static __device__ __forceinline__ double float_below(double x) {
    const float f = (float)x;
    return (double)f > x ? ::nextafterf(f, minus_infinity<float>()) : f;
  }
#define STROBE_FUNCTION(name)                                                                                                              \
  static __device__ __forceinline__ double name(double x) { return ::name(x); }
  STROBE_BOUNDS_FUNCTIONS(STROBE_FUNCTION)
#undef STROBE_FUNCTION
};

// Which pairs bounds are found for.
struct PairsBox {
  i64 b, h;
  Range i, j;
};

// Interprets the steps of a function. Each thread has slots of its own in shared memory.
template <BoundsConfig C> struct BoundsMachine {
  using M = DeviceMathematics<C.functions>;
  const MaskBlocksArguments &a;
  u64 *slots; // of this thread: three words of a slot, C.threads() words apart

  __device__ __forceinline__ BoundsMachine(const MaskBlocksArguments &a) : a(a) {
    extern __shared__ __align__(128) unsigned char shared[];
    slots = (u64 *)shared + threadIdx.x;
  }

  __device__ __forceinline__ Bounds get(u32 slot) const {
    const u64 *from = slots + slot * (3 * C.threads());
    return of_words(from[0], from[C.threads()], from[2 * C.threads()]);
  }
  __device__ __forceinline__ void set(u32 slot, const Bounds &x) {
    u64 *to = slots + slot * (3 * C.threads());
    to[0] = (u64)x.whole.low, to[C.threads()] = (u64)x.whole.high, to[2 * C.threads()] = x.may_be_nan;
  }

  __device__ __forceinline__ void run(const BoundsCode &code, const PairsBox &box) {
#pragma unroll 1
    for (i32 n = 0; n < code.count; ++n) set(code.steps[n].to, value(code.steps[n], box));
  }

  __device__ __forceinline__ Bounds value(const BoundsStep &step, const PairsBox &box) const {
    switch (step.op) {
    case bounds::BATCH:
      return bounds::integers(box.b, box.b);
    case bounds::HEAD:
      return bounds::integers(box.h, box.h);
    case bounds::QUERY:
      return bounds::integers(box.i.low, box.i.high);
    case bounds::KEY:
      return bounds::integers(box.j.low, box.j.high);
    case bounds::OFFSET:
      return bounds::integers(a.offset, a.offset);
    case bounds::INTEGER:
    case bounds::BOOLEAN:
      return bounds::integers((i64)step.number, (i64)step.number);
    case bounds::REAL:
      return bounds::reals(__uint_as_float((u32)step.number), __uint_as_float((u32)(step.number >> 32)), step.flags & BoundsStep::kNan);
    case bounds::LOAD:
      return loaded(step);
    default:
      break;
    }
    Bounds made;
    if (step.flags & BoundsStep::kBySums && by_sums(step, made)) return made;
    const Bounds first = get(step.in[0]);
    const bool binary = step.flags & BoundsStep::kBinary;
    const Bounds second = step.count > 1 ? get(step.in[1]) : first, third = step.count > 2 ? get(step.in[2]) : first;
    return bounds::result<M>(step.op, step.kind, step.of, binary, step.flags & BoundsStep::kSame, first, second, third);
  }

  __device__ __forceinline__ bool bounds_of(u64 place, Range &made) const {
    const u64 *sum = a.words + place;
    bounds::Wide low = bounds::wide((i64)sum[0]), high = low;
    const i32 count = (i32)sum[1];
#pragma unroll 1
    for (i32 n = 0; n < count; ++n) {
      const Range x = get((u32)sum[2 + 2 * n]).whole;
      const i64 factor = (i64)sum[3 + 2 * n];
      low = low + bounds::product(factor, factor > 0 ? x.low : x.high), high = high + bounds::product(factor, factor > 0 ? x.high : x.low);
    }
    if (!fits(low) || !fits(high)) return false;
    made = {(i64)low.low, (i64)high.low};
    return true;
  }
  // As Intervals::by_sums() does on the host.
  __device__ __forceinline__ bool by_sums(const BoundsStep &step, Bounds &made) const {
    Range sums[3];
    const bool compared = step.kind == bounds::kBoolean;
#pragma unroll 1
    for (i32 n = 0; n < (compared ? 3 : 1); ++n) {
      Range &sum = sums[n];
      if (!bounds_of(compared ? a.words[step.number + n] : step.number, sum)) return false;
      if (n == 2) sums[0] = sum;
    }
    made = compared ? bounds::order<i64>(step.op, sums[0].low, sums[0].high, 0, 0) : bounds::integers(sums[0].low, sums[0].high);
    return true;
  }

  static __device__ __forceinline__ Range inside(Range r, i64 size) {
    if (r.low < 0 && r.high >= 0) return {0, size - 1};
    if (r.high < 0) r.low = r.low < -size ? 0 : r.low + size, r.high = r.high < -size ? 0 : r.high + size;
    return {min(r.low, size - 1), min(r.high, size - 1)};
  }
  // The largest span that begins at `from` and lies within the range: its level and how many elements it covers.
  static __device__ __forceinline__ i32 level_at(i64 from, const Range &r, i64 size, i32 levels, i64 &covers) {
    i32 level = 0;
    covers = 1;
    for (i64 wide = kCellsFanOut; level + 1 < levels && from % wide == 0 && (from + wide - 1 <= r.high || r.high == size - 1);
         wide *= kCellsFanOut)
      ++level, covers = wide;
    return level;
  }
  // The least and the largest element in the ranges of indices.
  __device__ __forceinline__ Bounds loaded(const BoundsStep &step) const {
    const BoundsLoad &load = a.loads[step.load];
    const bool reals = are_reals(load.element);
    Range at[4] = {{0, 0}, {0, 0}, {0, 0}, {0, 0}};
#pragma unroll
    for (i32 axis = 0; axis < 4; ++axis)
      if (axis < load.axes) {
        at[axis] = inside(get(step.in[axis]).whole, load.size[axis]);
        if (load.stride[axis] == 0) at[axis] = {0, 0};
        if (at[axis].low != at[axis].high && axis != load.x && axis != load.y) return bounds::any(step.kind);
      }
    Bounds found = no_elements(reals);
    Range of_x = {0, 0}, of_y = {0, 0};
    i64 size_x = 1, size_y = 1;
#pragma unroll
    for (i32 axis = 0; axis < 4; ++axis) {
      if (axis == load.x) of_x = at[axis], size_x = load.size[axis];
      if (axis == load.y) of_y = at[axis], size_y = load.size[axis];
    }
    i64 covers_x, covers_y;
#pragma unroll 1
    for (i64 x = of_x.low; x <= of_x.high; x += covers_x) {
      const i32 level_x = level_at(x, of_x, size_x, load.levels_x, covers_x);
#pragma unroll 1
      for (i64 y = of_y.low; y <= of_y.high; y += covers_y) {
        const i32 level_y = level_at(y, of_y, size_y, load.levels_y, covers_y);
        const bool elements = level_x == 0 && level_y == 0;
        i64 place = 0;
#pragma unroll
        for (i32 axis = 0; axis < 4; ++axis) {
          const i64 covers = axis == load.x ? covers_x : axis == load.y ? covers_y : 1;
          const i64 index = axis == load.x ? x / covers : axis == load.y ? y / covers : at[axis].low;
          if (elements)
            place += index * load.stride[axis];
          else
            place = place * (load.stride[axis] == 0 ? 1 : (load.size[axis] + covers - 1) / covers) + index;
        }
        const void *from = elements ? load.data : load.cells[level_x * kCellLevels + level_y];
        add_element(found, element_at(from, elements ? load.element : cells_of(load.element), place), reals);
      }
    }
    return reals ? bounds::rounded<M>(found.real.least, found.real.most, found.may_be_nan) : found;
  }
};

// Bounds of what depends on the queries, or on the keys, alone, for each block and each square: one thread for each.
template <BoundsConfig C> struct SideBounds {
  using Arguments = MaskBlocksArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 1;

  static __device__ __forceinline__ void run(const Arguments &a) {
    const i64 of_queries = a.side[0].blocks + a.side[0].squares, of_matrix = of_queries + a.side[1].blocks + a.side[1].squares;
    const i64 n = (i64)blockIdx.x * kThreads + threadIdx.x;
    if (n >= a.matrices * of_matrix) return;
    const i64 matrix = n / of_matrix;
    i64 entry = n % of_matrix;
    const bool keys = entry >= of_queries;
    if (keys) entry -= of_queries;
    const BoundsSide &side = a.side[keys];
    const i64 length = entry < side.blocks ? side.block : side.block * kSquare;
    const i64 first = (entry < side.blocks ? entry : entry - side.blocks) * length;
    PairsBox box{};
    box.b = matrix / a.heads, box.h = matrix % a.heads;
    const Range all = {first, min(first + length, side.length) - 1};
    box.i = all, box.j = all; // the other one is not read
    BoundsMachine<C> machine(a);
    machine.run(side.code, box);
    u64 *to = side.values + 3 * side.reads * (matrix * (side.blocks + side.squares) + entry);
    for (i32 k = 0; k < side.reads; ++k, to += 3) {
      const Bounds x = machine.get((u32)side.out[k]);
      to[0] = (u64)x.whole.low, to[1] = (u64)x.whole.high, to[2] = x.may_be_nan;
    }
  }
};

// Which blocks of a square are kept, and which are full: one warp for each square. The bits are 0 before.
template <BoundsConfig C> struct PairBounds {
  using Arguments = MaskBlocksArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 1;

  static __device__ __forceinline__ Range result(BoundsMachine<C> &machine, const MaskBlocksArguments &a, i64 matrix, i32 query, i32 key,
                                                 const PairsBox &box) {
#pragma unroll
    for (i32 s = 0; s < 2; ++s) {
      const BoundsSide &side = a.side[s];
      const u64 *from = side.values + 3 * side.reads * (matrix * (side.blocks + side.squares) + (s ? key : query));
#pragma unroll 1
      for (i32 k = 0; k < side.reads; ++k, from += 3) machine.set((u32)side.in[k], of_words(from[0], from[1], from[2]));
    }
    machine.run(a.pairs, box);
    return machine.get(a.result).whole;
  }

  static __device__ __forceinline__ void run(const Arguments &a) {
    const BoundsSide &queries = a.side[0], &keys = a.side[1];
    const i64 of_matrix = (i64)queries.squares * keys.squares, n = (i64)blockIdx.x * C.warps + threadIdx.x / 32;
    if (n >= a.matrices * of_matrix) return;
    const i64 matrix = n / of_matrix;
    const i32 row = (i32)(n % of_matrix / keys.squares), column = (i32)(n % of_matrix % keys.squares), lane = threadIdx.x % 32;
    PairsBox box{};
    box.b = matrix / a.heads, box.h = matrix % a.heads;
    BoundsMachine<C> machine(a);
    const i32 last_query = queries.blocks - 1 - row * kSquare, last_key = keys.blocks - 1 - column * kSquare;
    // The first evaluation is of the square. If it leaves the square open, each of the others is of two rows of blocks.
    u32 kept = 0, full = 0; // lanes 0 to 15: a row of the square
#pragma unroll 1
    for (i32 step = 0; step <= kSquare / 2; ++step) {
      const i32 i = step ? 2 * (step - 1) + lane / kSquare : 0, j = step ? lane % kSquare : 0;
      const i32 query = step ? min(row * kSquare + i, queries.blocks - 1) : queries.blocks + row;
      const i32 key = step ? min(column * kSquare + j, keys.blocks - 1) : keys.blocks + column;
      const Range seen = result(machine, a, matrix, query, key, box);
      if (step == 0) {
        if (!seen.high) return;
        if (seen.low) {
          const u32 whole = last_key >= kSquare - 1 ? 0xffff : (2u << last_key) - 1;
          kept = full = lane <= last_query ? whole : 0;
          break;
        }
        continue;
      }
      const bool in_matrix = i <= last_query && j <= last_key;
      const u32 may = __ballot_sync(kAllLanes, in_matrix && seen.high), must = __ballot_sync(kAllLanes, in_matrix && seen.low);
      if (lane / 2 == step - 1) kept = may >> (lane % 2 * kSquare) & 0xffff, full = must >> (lane % 2 * kSquare) & 0xffff;
    }
    u32 kept_t = 0, full_t = 0; // lanes 0 to 15: a column of the square
#pragma unroll 1
    for (i32 i = 0; i < kSquare; ++i) {
      kept_t |= (__shfl_sync(kAllLanes, kept, i) >> (lane % kSquare) & 1) << i;
      full_t |= (__shfl_sync(kAllLanes, full, i) >> (lane % kSquare) & 1) << i;
    }
    if (lane >= kSquare) return;
    if (lane <= last_query) store(a.lists[0], matrix, row * kSquare + lane, column, kept, full);
    if (lane <= last_key) store(a.lists[1], matrix, column * kSquare + lane, row, kept_t, full_t);
  }

  static __device__ __forceinline__ void store(const KeptLists &to, i64 matrix, i32 line, i32 word, u32 kept, u32 full) {
    const i64 at = (matrix * to.lines + line) * to.words + word;
    to.kept[at] = (unsigned short)kept, to.full[at] = (unsigned short)full;
  }
};

__device__ __forceinline__ i32 sum_of_lanes(i32 x) {
  for (i32 by = 16; by; by /= 2) x += __shfl_xor_sync(kAllLanes, x, by);
  return x;
}
__device__ __forceinline__ i32 sum_of_lanes_before(i32 x) {
  const i32 lane = threadIdx.x % 32;
  i32 sum = x;
  for (i32 by = 1; by < 32; by *= 2) {
    const i32 other = __shfl_up_sync(kAllLanes, sum, by);
    if (lane >= by) sum += other;
  }
  return sum - x;
}

// Counts the kept blocks of each line. A block of threads counts a chunk of lines and adds them up.
template <KeptListsConfig C> struct CountKept {
  using Arguments = MaskBlocksArguments;
  static constexpr int kThreads = C.count_threads(), kBlocksPerSm = 1, kWarps = kThreads / 32, kOfLane = C.chunk() / 32;

  static __device__ __forceinline__ void run(const Arguments &a) {
    __shared__ i32 counts[C.chunk()];
    const i64 chunks_of_queries = div_up(a.matrices * a.lists[0].lines, C.chunk());
    const bool by_keys = blockIdx.x >= chunks_of_queries;
    const KeptLists &list = a.lists[by_keys];
    const i64 chunk = blockIdx.x - (by_keys ? chunks_of_queries : 0), first = chunk * C.chunk(), lines = a.matrices * list.lines;
    const i32 lane = threadIdx.x % 32, words = list.words / 2;
    for (i32 n = threadIdx.x / 32; n < C.chunk(); n += kWarps) {
      i32 count = 0;
      const u32 *line = (const u32 *)list.kept + (first + n) * words;
      if (first + n < lines)
        for (i32 word = lane; word < words; word += 32) count += __popc(line[word]);
      count = sum_of_lanes(count);
      if (lane == 0) counts[n] = count;
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    i32 own = 0;
    for (i32 n = 0; n < kOfLane; ++n) own += counts[lane * kOfLane + n];
    i32 before = sum_of_lanes_before(own);
    if (lane == 31) list.totals[chunk] = before + own;
    for (i32 n = 0; n < kOfLane; ++n) {
      const i64 line = first + lane * kOfLane + n;
      if (line < lines) list.before[line] = before;
      before += counts[lane * kOfLane + n];
    }
  }
};

// Writes the lists: one warp for each line.
template <KeptListsConfig C> struct ListKept {
  using Arguments = MaskBlocksArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 1;

  static __device__ __forceinline__ void run(const Arguments &a) {
    const i64 of_queries = a.matrices * a.lists[0].lines, all = of_queries + a.matrices * a.lists[1].lines;
    i64 line = (i64)blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
    if (line >= all) return;
    const bool by_keys = line >= of_queries;
    if (by_keys) line -= of_queries;
    const KeptLists &list = a.lists[by_keys];
    const i32 lane = threadIdx.x % 32, words = list.words / 2;
    i64 at = 0;
    for (i64 chunk = lane; chunk < line / C.chunk(); chunk += 32) at += list.totals[chunk];
    for (i32 by = 16; by; by /= 2) at += __shfl_xor_sync(kAllLanes, at, by);
    at += list.before[line];
    const i64 matrix = line / list.lines, own = line % list.lines;
    i32 *row = list.rows + matrix * (list.lines + 1) + own;
    if (lane == 0) row[0] = (i32)at;
    for (i32 first = 0; first < words; first += 32) {
      const bool some = first + lane < words;
      const u32 kept = some ? ((const u32 *)list.kept)[line * words + first + lane] : 0;
      const u32 full = some ? ((const u32 *)list.full)[line * words + first + lane] : 0;
      for (u32 left = __ballot_sync(kAllLanes, kept != 0); left; left &= left - 1) {
        const i32 source = 31 - __clz((i32)(left & -left));
        const u32 word = __shfl_sync(kAllLanes, kept, source), marks = __shfl_sync(kAllLanes, full, source);
        const i64 place = at + __popc(word & ((1u << lane) - 1));
        if ((word >> lane & 1) && place < a.most_kept) {
          list.cols[place] = (first + source) * 32 + lane;
          list.marks[place] = marks >> lane & 1;
        }
        at += __popc(word);
      }
    }
    if (lane || own != list.lines - 1) return;
    row[1] = (i32)at;
    if (!by_keys && matrix == a.matrices - 1) *a.kept = at;
  }
};

} // namespace strobe::passes
