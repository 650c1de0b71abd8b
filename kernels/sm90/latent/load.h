// The warp that has the copy engine load Q and the tiles of K.
#pragma once
#include "../../ptx/tma.h"
#include "../../tile/registers.h"
#include "item.h"
#include "shared.h"

namespace strobe::sm90::latent {

// Where the rows of a tile of K lie: each lane looks up one box of C.box rows. A box without rows lies past its page's end, where the copy
// engine reads zeros.
template <Config C> struct Boxes {
  enum : int { kCount = kKeys / C.box };
  i32 row, page = 0;

  __device__ __forceinline__ Boxes(const LatentArguments &, const Item &item, i32 key)
      : row((i32)item.sequence.k0 + key + C.box * tile::lane_id()), page(item.b) {}
  // Which boxes have no page.
  __device__ __forceinline__ u32 lacking() const { return 0; }
};
template <Config C>
  requires(C.features.pages != 0)
struct Boxes<C> {
  enum : int { kCount = kKeys / C.box };
  i32 row, page = 0;
  bool lacks = false;

  __device__ __forceinline__ Boxes(const LatentArguments &a, const Item &item, i32 key) : row((i32)a.in.pages.size.by) {
    const i32 j = key + C.box * tile::lane_id();
    if (tile::lane_id() >= kCount || j >= item.any.end) return; // entries of the table past the last key are not read
    const u32 n = a.in.pages.size.divide((u32)j), entry = (u32)a.in.pages.table_of(item.b)[n];
    lacks = entry >= a.in.pages.count;
    if (!lacks) row = j - (i32)(n * a.in.pages.size.by), page = (i32)entry;
  }
  __device__ __forceinline__ u32 lacking() const { return __ballot_sync(0xFFFFFFFFu, lacks); }
};

template <Config C> struct Load {
  const LatentArguments &a;
  const Shared &shared;
  const Item &item;

  // All lanes call it.
  __device__ __forceinline__ void all() const {
    if (elected()) tma_prefetch(a.tma_q.map), tma_prefetch(a.tma_k.map);
    __syncwarp();
    load_q();
    const i32 pairs = item.pairs();
#pragma unroll 1
    for (i32 n = 0; n < pairs; ++n) {
      load_tile(0, n);
      if (item.has_both(n)) load_tile(1, n);
    }
  }

private:
  __device__ __forceinline__ void load_q() const {
    if (elected()) {
      mbarrier_expect(shared.q_full(), 2 * kColumns * a.queries.by * (u32)a.packed);
      for (int c = 0; c < kColumns / 64; ++c)
        tma_load(shared.q + kBlockBytes * c, a.tma_q.map, shared.q_full(), 64 * c, (i32)item.sequence.q0 + item.q, item.h,
                 item.b * a.tma_q.batch_step);
    }
    __syncwarp();
  }
  // Loads the parts of tile w of pair n, each as soon as its place is free. `rest` goes with the part of the warpgroup that reads the
  // other's P there.
  __device__ __forceinline__ void load_tile(int w, i32 n) const {
    const Boxes<C> boxes(a, item, item.key(n, w));
    const u32 lacking = boxes.lacking();
    wait_empty(w, 0, n);
    load_part<kLeft>(boxes, w, lacking);
    if (w == 0) wait_empty(w, 1, n);
    if (w == 1) load_part<kRest>(boxes, w, lacking), wait_empty(w, 1, n);
    load_part<kRight>(boxes, w, lacking);
    if (w == 0) load_part<kRest>(boxes, w, lacking);
  }
  __device__ __forceinline__ void wait_empty(int w, int by, i32 n) const {
    mbarrier_wait(shared.empty(w, by), n % 2 ^ 1);
    __syncwarp();
  }
  template <int kPart> __device__ __forceinline__ void load_part(const Boxes<C> &boxes, int w, u32 lacking) const {
    const u32 full = shared.full(w, kPart), to = shared.part(w, kPart);
    if (elected()) {
      if (C.features.pages && kPart == kLeft) store_shared(shared.lacks(w), lacking);
      mbarrier_expect(full, count_blocks(kPart) * kBlockBytes);
    }
    __syncwarp();
#pragma unroll
    for (int box = 0; box < Boxes<C>::kCount; ++box) {
      const i32 row = __shfl_sync(0xFFFFFFFFu, boxes.row, box), page = __shfl_sync(0xFFFFFFFFu, boxes.page, box);
      if (elected()) {
#pragma unroll
        for (int c = 0; c < count_blocks(kPart); ++c)
          tma_load(to + kBlockBytes * c + C.box * kRowBytes * box, a.tma_k.map, full, 64 * (first_block(kPart) + c), row,
                   item.kv * a.tma_k.head_step, page * a.tma_k.batch_step);
      }
      __syncwarp();
    }
  }
};

} // namespace strobe::sm90::latent
