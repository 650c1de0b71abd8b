// Quantised K and V. The copy engine brings tiles as they are stored, with their scales, into stages of their own. Three warps make of each
// the tile that wgmma reads: x * scale in FP32, rounded once to q's dtype. So all else computes what it would over a dequantised cache, bit
// by bit.
#pragma once
#include "../../device/stored_numbers.h"
#include "rows.h"
#include "source.h"

namespace strobe::sm90 {

// The stage that the next tile of stored numbers takes, K or V, and the parity of its barriers.
template <Config C> struct StoredStage {
  int index = 0;
  u32 parity = 0;
  __device__ __forceinline__ void advance() {
    if (++index == C.stored_stages) index = 0, parity ^= 1;
  }
};

// The message of a stage: a Tile for K. Values of `last` in the other messages:
enum StoredKind : i32 {
  kStoredValue = -1, // a tile of V
  kStoredEnd = -2,   // there are no more tiles
};

// A tile's rows: `count` of them count, from position `begin` on. They lie one after another from row k0 + begin on, or in pages.
// scale(), which all lanes call: the index of the scales of row j, beside that of the head; in pages negative if the row has none. There
// `group` rows share them.
template <Config C> struct StoredRows {
  i32 begin, count;
  __device__ __forceinline__ StoredRows(const Inputs &, i32, i32 begin, i32 end) : begin(begin), count(end - begin) {}
  __device__ __forceinline__ i32 settle(const Inputs &) { return 0; }
  template <int kColumns> __device__ __forceinline__ void load(const MappedOperand &x, u32 full, u32 to, i32 k0, i32 head, i32 b) const {
    if (elected()) load_rows<C.tile_k, kColumns>(x, full, to, k0 + begin, head, b);
    __syncwarp();
  }
  __device__ __forceinline__ i64 scale(const Inputs &, const Operand &x, i32 k0, i32 b, i32 j) const {
    return b * x.stride[0] + (i64)(k0 + begin + j) * x.stride[2];
  }
};
template <Config C>
  requires(C.features.pages != 0)
struct StoredRows<C> {
  i32 begin, count;
  PagedRows rows;
  __device__ __forceinline__ StoredRows(const Inputs &in, i32 b, i32 begin, i32 end)
      : begin(begin), count(end - begin), rows(in, b, begin, end) {}
  __device__ __forceinline__ i32 settle(const Inputs &in) { return (i32)rows.settle(in); }
  template <int kColumns> __device__ __forceinline__ void load(const MappedOperand &x, u32 full, u32 to, i32, i32 head, i32) const {
    rows.template load<C.tile_k, kColumns, C.page_rows>(x, full, to, head);
  }
  __device__ __forceinline__ i64 scale(const Inputs &in, const Operand &x, i32, i32, i32 j, i32 group = 1) const {
    const i32 row = __shfl_sync(0xFFFFFFFFu, rows.row, j / PagedRows::kCount) + j % PagedRows::kCount; // past the page if that is missing
    const u32 page = __shfl_sync(0xFFFFFFFFu, rows.entry, j / PagedRows::kCount);
    return j < count && row < (i32)in.pages.size.by ? (i64)page * x.stride[0] + (i64)(group == 1 ? row : row / group) * x.stride[2] : -1;
  }
};

// V of a key head of a sequence, one number at a time, rounded as in a tile.
template <class T, Features F> struct DequantisedRows {
  QuantisedKeys<F, false> keys;
  __device__ __forceinline__ DequantisedRows(const Operand &x, const Operand &scale, i32 half, const Inputs &in, const Sequence &s, i32 b,
                                             i32 head)
      : keys(x, scale, half != 0, 1, in, s, b, head, in.head_dim_v) {}
  __device__ __forceinline__ T at(i64 j, i64 c) const { return Convert<T>::from(keys.at((i32)j, (i32)c)); }
};
template <class T, Features F> __device__ __forceinline__ bool lacks(const DequantisedRows<T, F> &rows, i32 j) {
  return lacks(rows.keys, j);
}

// The scales of quantised keys, among a kernel's arguments.
template <Config C> __device__ __forceinline__ const KeyScales &scales_of(const HopperForwardArguments &a) {
  return static_cast<const QuantisedArguments<typename ForwardArgumentsOf<C.packed != 0>::type> &>(a).scales;
}

__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ u32 bits_of(f16 x) { return x.bits; }
// A warp's scales of the rows of a tile, on their way from global to shared memory. They are stored later than they are loaded, so that
// other work fits in between.
template <Config C> struct RowScales {
  enum : int { kCount = (C.tile_k + 31) / 32 };
  u32 x[kCount]; // as they are in global memory
  bool half;

  // head: the index of the head's scales.
  __device__ __forceinline__ void load(const Inputs &in, const Operand &scales, bool is_half, i64 head, const StoredRows<C> &rows, i32 k0,
                                       i32 b) {
    half = is_half;
    half ? load<f16>(in, scales, head, rows, k0, b) : load<float>(in, scales, head, rows, k0, b);
  }
  // Stores a float for each row.
  __device__ __forceinline__ void store(u32 to) const {
    const int lane = tile::lane_id();
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (lane + 32 * i < C.tile_k)
        store_shared(to + 4 * (lane + 32 * i), half ? __float_as_uint(to_float(f16{(unsigned short)x[i]})) : x[i]);
  }

private:
  template <class E>
  __device__ __forceinline__ void load(const Inputs &in, const Operand &scales, i64 head, const StoredRows<C> &rows, i32 k0, i32 b) {
    const int lane = tile::lane_id();
    if constexpr (C.features.pages) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const i64 at = rows.scale(in, scales, k0, b, lane + 32 * i);
        x[i] = at < 0 ? 0 : bits_of(((const E *)scales.data)[head + at]);
      }
    } else {
      const E *row = (const E *)scales.data + (head + rows.scale(in, scales, k0, b, lane));
#pragma unroll
      for (int i = 0; i < kCount; ++i, row += 32 * scales.stride[2]) x[i] = lane + 32 * i < rows.count ? bits_of(*row) : 0;
    }
  }
};

// Stores the scales of columns of a tile of K: first, for each row, the offset of its group's scales from `to`; then a float for each
// column of each group. In pages, 16 rows lie in one group.
template <Config C>
__device__ __forceinline__ void store_column_scales(const Inputs &in, const Operand &x, bool half, i64 head, i32 group,
                                                    const StoredRows<C> &rows, i32 k0, i32 b, u32 to) {
  constexpr u32 kFirst = 4 * C.tile_k, kBytes = 4 * C.head_dim;
  const int lane = tile::lane_id();
  i32 groups;
  if constexpr (C.features.pages) {
    groups = max((rows.count + PagedRows::kCount - 1) / PagedRows::kCount, 1);
    for (i32 j = lane; j < C.tile_k; j += 32) store_shared(to + 4 * j, kFirst + kBytes * (j < rows.count ? j / PagedRows::kCount : 0));
  } else {
    const i32 row = k0 + rows.begin, first = (i32)((u32)row / (u32)group);
    groups = rows.count > 0 ? (i32)((u32)(row + rows.count - 1) / (u32)group) - first + 1 : 1;
    for (i32 j = lane; j < C.tile_k; j += 32)
      store_shared(to + 4 * j, kFirst + kBytes * (j < rows.count ? (u32)(row + j) / (u32)group - first : 0));
    head += b * x.stride[0] + (i64)first * x.stride[2];
  }
#pragma unroll 1
  for (i32 n = 0; n < groups; ++n) {
    i64 at = head + lane * x.stride[3];
    bool exists = rows.count > 0; // a tile without rows, too, has scales that are read: zeros
    if constexpr (C.features.pages) {
      const i64 row = rows.scale(in, x, k0, b, PagedRows::kCount * n, group);
      exists = exists && row >= 0, at += row;
    }
#pragma unroll 2
    for (int c = lane; c < C.head_dim; c += 32, at += 32 * x.stride[3])
      store_shared(to + kFirst + kBytes * n + 4 * c, exists ? __float_as_uint(scale_at(x.data, at, half)) : 0u);
    if constexpr (!C.features.pages) head += x.stride[2];
  }
}

// The warps that dequantise. Each lane makes 16 bytes of stored numbers, a piece, into 16-bit ones at a time. Eight lanes take eight rows,
// so that neither their loads nor their stores meet in a bank. A warp takes whole rows, and its lanes the same places of each, so that few
// addresses are computed for a tile.
template <Config C> struct Dequantise {
  using T = typename Element<C.dtype>::type;
  static constexpr i32 kStored = C.features.quant;
  enum : int { kWord = numbers_of_word(kStored), kPiece = 4 * kWord };
  const SharedMemory<C> &shared;

  __device__ __forceinline__ void all() const {
    constexpr bool kByColumn = C.features.by_column != 0;
    Stage<C> k{}, v{};
    StoredStage<C> from{};
#pragma unroll 1
    for (;; from.advance()) {
      mbarrier_wait(shared.stored_full(from.index), from.parity);
      const Tile t = read<Tile>(shared.stored_message(from.index));
      if (t.last == kStoredEnd) break;
      const bool value = t.last == kStoredValue;
      const Stage<C> &to = value ? v : k;
      const u32 tile = value ? shared.v + v.index * C.v_bytes() : shared.k + k.index * C.k_bytes();
      const auto wait = [&] {
        mbarrier_wait(value ? shared.v_empty(to.index) : shared.k_empty(to.index), to.parity ^ 1);
        if (!value && threadIdx.x == 32) write(shared.tile(k.index), t.begin, t.end, t.masked, t.last);
      };
      // One loop for K and V, if it can be: instructions that are fetched again and again come more slowly.
      if (!kByColumn && C.head_dim == C.head_dim_v)
        convert<C.head_dim, false>(from.index, tile, value, wait);
      else if (value)
        convert<C.head_dim_v, false>(from.index, tile, value, wait);
      else
        convert<C.head_dim, kByColumn>(from.index, tile, value, wait);
      release(value ? shared.v_full(to.index) : shared.k_full(to.index), from);
      value ? v.advance() : k.advance();
    }
  }

private:
  __device__ __forceinline__ void release(u32 full, const StoredStage<C> &from) const {
    async_proxy_fence();
    __syncwarp();
    if (tile::lane_id() == 0) {
      mbarrier_arrive(full);
      mbarrier_arrive(shared.stored_empty(from.index));
    }
  }

  // Makes the tile at `to` from a stage. value: whether it is V's; wait(): waits until the tile may be written.
  template <int kColumns, bool kByColumn, class Wait>
  __device__ __forceinline__ void convert(int stage, u32 to, bool value, Wait wait) const {
    // Eight lanes each take kAcross pieces side by side, kTimes times; the others take further rows.
    constexpr int kPieces = kColumns / kPiece, kAcross = kPieces > 2 ? 4 : kPieces, kTimes = (kPieces + kAcross - 1) / kAcross;
    constexpr int kRows = 32 / kAcross, kStep = C.kDequantising * kRows, kTurns = (C.tile_k + kStep - 1) / kStep, kChunks = kPiece / 8;
    constexpr int kBlock = C.tile_k * kRowBytes;                              // bytes of 64 columns of 16 bits
    constexpr int kUnrolled = kTurns * kTimes <= 6 ? kTurns : 1 + kTimes % 2; // pieces have one of two places in turn
    // K's last rows and V's are left to different warps.
    const int lane = computed_here((i32)threadIdx.x % 32), next = (int)threadIdx.x / 32 - 1 + value, piece = lane / 8 % kAcross;
    const int row = (next == C.kDequantising ? 0 : next) * kRows + lane / 8 / kAcross * 8 + lane % 8;
    const auto chunk = [&](int n) { return kBlock * (n / 8) + row * (int)kRowBytes + ((n ^ lane) % 8 << 4); };
    const u32 from = shared.stored_tile(stage) + chunk(piece), other = from ^ 64; // pieces of even and odd times
    const u32 scales = shared.scales(stage), columns = scales + 4 * kPiece * piece;
    u32 at[kChunks];
#pragma unroll
    for (int c = 0; c < kChunks; ++c) at[c] = to + chunk(kChunks * piece + c);
    const auto exists = [&](int turn, int time) {
      return (C.tile_k % kStep == 0 || turn + 1 < kTurns || row + turn * kStep < C.tile_k) &&
             (kPieces % kAcross == 0 || time + 1 < kTimes || piece + kAcross * time < kPieces);
    };
    u32 words[2][4] = {}, scale[2] = {};
    const auto load = [&](int turn, int time, int n) {
      if (!exists(turn, time)) return;
      load_shared(words[n % 2], (time % 2 ? other : from) + kBlock * (time / 2) + turn * kStep * (int)kRowBytes);
      scale[n % 2] = load_shared(scales + 4 * (row + turn * kStep));
    };
    const Magic<kStored> magic;
    load(0, 0, 0);
    wait();
#pragma unroll kUnrolled
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
      for (int time = 0; time < kTimes; ++time) {
        const int n = turn * kTimes + time;
        if (time + 1 < kTimes)
          load(turn, time + 1, n + 1);
        else if (turn + 1 < kTurns)
          load(turn + 1, 0, n + 1);
        if (!exists(turn, time)) continue;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
          float by[8];
          if constexpr (kByColumn) {
            float four[2][4];
            const u32 first = columns + 4 * kPiece * kAcross * time + scale[n % 2] + 32 * c;
            load_shared<0>(four[0], first), load_shared<16>(four[1], first);
#pragma unroll
            for (int i = 0; i < 8; ++i) by[i] = four[i / 4][i % 4];
          } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) by[i] = __uint_as_float(scale[n % 2]);
          }
          u32 some[8 / kWord], pairs[4];
#pragma unroll
          for (int i = 0; i < 8 / kWord; ++i) some[i] = words[n % 2][8 / kWord * c + i];
          dequantise_eight<T, kStored>(some, by, pairs, magic);
          store_shared(at[c] + kBlock * (kAcross * kChunks / 8 * time) + turn * kStep * (int)kRowBytes, pairs);
        }
      }
    }
  }
};

} // namespace strobe::sm90
