// Turns a tile of S into P. A warpgroup's running softmax covers the tiles of which it computes S, but follows one reference with the
// other warpgroup's, which it adopts before it adds P V of the other's tile.
#pragma once
#include "../../device/softmax.h"
#include "../accumulator.h"
#include "item.h"
#include "shared.h"

namespace strobe::sm90::latent {

template <Config C> struct Softmax {
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  using Score = Scores<F, float, C.exact_max ? Functions::half : Functions::rough>;

  const LatentArguments &a;
  const Item &item;
  const Score scores;
  const int warp;
  const RowPlace places[2];
  const typename Score::Row rows[2];
  RowSoftmax<2> running;

  __device__ __forceinline__ Softmax(const LatentArguments &a, const Item &item, int warp)
      : a(a), item(item), scores(a.in, item.sequence, item.b), warp(warp), places{place_of(a, item, row(0)), place_of(a, item, row(1))},
        rows{scores.row(places[0].i, places[0].h), scores.row(places[1].i, places[1].h)} {}

  // The lane's row r, counted in the tile.
  __device__ __forceinline__ int row(int r) const { return 16 * warp + tile::lane_row(r); }

  // Whether some row of the tile that begins at `key` does not see all of its keys.
  __device__ __forceinline__ bool masked(i32 key) const { return key < item.all.begin || key + kKeys > min(item.all.end, item.any.end); }

  // Replaces q.k by scores; hidden elements become -inf. lacking: the boxes of keys that have no page.
  __device__ __forceinline__ void score(float (&S)[kKeys / 2], i32 key, u32 lacking) const {
    const bool hides = masked(key);
    if (F.additive()) {
      hides ? score_elements<true>(S, key) : score_elements<false>(S, key);
    } else if (hides) {
      const i32 column = key + tile::lane_column(0, 0);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const i32 begin = rows[r].begin - column, end = min(rows[r].end, item.any.end) - column;
#pragma unroll
        for (int i = 2 * r; i < kKeys / 2; i += i % 2 ? 3 : 1) {
          const i32 j = i / 4 * 8 + i % 2;
          if ((F.band && j < begin) || j >= end) S[i] = minus_infinity<float>();
        }
      }
    }
    if (F.pages && lacking) {
#pragma unroll
      for (int i = 0; i < kKeys / 2; ++i) {
        if (lacking >> (i / 4 * 8 / C.box) & 1) S[i] = minus_infinity<float>();
      }
    }
  }
  // Replaces S by P, and tells the other warpgroup the reference. w: the number of this warpgroup.
  __device__ __forceinline__ void exponentiate(float (&S)[kKeys / 2], const Shared &shared, int w) {
    const Linear of{scores.unit};
    running.template follow<C.exact_max != 0>(S, of);
    if (tile::lane_id() % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) store_shared(shared.reference(w, row(r)), __float_as_uint(running.M[r]));
    }
    running.exponentiate(S, of);
  }
  // Takes the reference of the other warpgroup, w. O has to be rescaled if it has moved.
  __device__ __forceinline__ void adopt(const Shared &shared, int w) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float before = running.M[r], now = load_shared_float(shared.reference(w, row(r)));
      running.alpha[r] = now == before ? 1.0f : exp2(before - now);
      running.M[r] = now;
      running.l[r] *= running.alpha[r];
    }
  }

private:
  template <bool kByPosition> __device__ __forceinline__ void score_elements(float (&S)[kKeys / 2], i32 key) const {
    const i32 column = key + tile::lane_column(0, 0);
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) S[i] = scores.score(S[i], rows[i / 2 % 2], column + i / 4 * 8 + i % 2, kByPosition, item.any.end);
  }
};

} // namespace strobe::sm90::latent
