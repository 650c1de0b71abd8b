// Where the rows of a tile of K or V lie in global memory, and how the copy engine loads them.
#pragma once
#include "../../device/keys.h"
#include "../../ptx/tma.h"
#include "../arguments.h"
#include "shared.h"

namespace strobe::sm90 {

// Loads rows that lie one after another: kN rows of kColumns columns, from `row` on.
template <int kN, int kColumns>
__device__ __forceinline__ void load_rows(const MappedOperand &x, u32 full, u32 address, i32 row, i32 head, i32 b) {
#pragma unroll
  for (int c = 0; c < kColumns; c += 64)
    tma_load(address + kN * kRowBytes * (c / 64), x.map, full, c, row, head * x.head_step, b * x.batch_step);
}

// Where a tile's rows lie in paged K or V. Each lane of the loading warp looks up 16 rows, which lie in one page.
struct PagedRows {
  enum : i32 { kCount = 16 };
  i32 row;   // the lane's first row within its page. A lane without rows has a row past the page's end, where the copy engine reads zeros
  u32 entry; // the table's entry: the number of a page, or a number that is no page
  // Looks up the lane's rows of the tile [begin, end), where begin is a multiple of kCount. Entries of the table past `end` are not read.
  __device__ __forceinline__ PagedRows(const Inputs &in, i32 b, i32 begin, i32 end) : row((i32)in.pages.size.by), entry(0) {
    const i32 j = begin + (i32)((u32)thread_index() % 32 * kCount);
    if (j >= end) return;
    const Divisor page = in.pages.size;
    __builtin_assume(page.by != 1); // a page holds a multiple of kCount keys
    const u32 n = page.divide((u32)j);
    row = j - (i32)(n * page.by), entry = (u32)in.pages.table_of(b)[n];
  }
  // Makes load() read zeros for rows whose page does not exist, and returns which lanes have such rows.
  __device__ __forceinline__ u32 settle(const Inputs &in) {
    const bool lacks = entry >= in.pages.count && row < (i32)in.pages.size.by;
    if (lacks) row = (i32)in.pages.size.by;
    return __ballot_sync(0xFFFFFFFFu, lacks);
  }
  // Loads the tile: kN rows of kColumns columns, kRows rows at a time.
  template <int kN, int kColumns, int kRows>
  __device__ __forceinline__ void load(const MappedOperand &x, u32 full, u32 address, i32 head) const {
    const i32 page = (i32)entry * x.batch_step;
    // kBoxes limits how many boxes are issued without a break: there are no registers for more.
    constexpr int kGroups = kN / kRows, kEach = kRows / kCount, kBoxes = 6, kTogether = min(4, max(1, kBoxes * 64 / kColumns));
#pragma unroll
    for (int n = 0; n < kGroups; n += kTogether) {
      i32 row_of[kTogether], page_of[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether && n + i < kGroups; ++i)
        row_of[i] = __shfl_sync(0xFFFFFFFFu, row, kEach * (n + i)), page_of[i] = __shfl_sync(0xFFFFFFFFu, page, kEach * (n + i));
      if (elected()) {
#pragma unroll
        for (int i = 0; i < kTogether && n + i < kGroups; ++i) {
#pragma unroll
          for (int c = 0; c < kColumns; c += 64)
            tma_load(address + (kN * (c / 64) + kRows * (n + i)) * kRowBytes, x.map, full, c, row_of[i], head * x.head_step, page_of[i]);
        }
      }
      __syncwarp();
    }
  }
};

} // namespace strobe::sm90
