// dS of the tiles along a row, a column or a diagonal of tiles, one after another, for the gradients of captured tensors (captured.h).
// While a thread block computes with a part of a tile, its successor is loaded to where the other part was:
//   S = K Q^T | the next K and Q | P = exp(S - LSE), dP = V dO^T | the next V and dO | dS = P (dP - D)
// A bar is a barrier.
#pragma once
#include "tile_gradient.h"

namespace strobe {

// What differs from tile to tile.
enum class WalkAlong { keys, queries, both };

template <TileConfig C, WalkAlong kAlong> class TileWalk : public TileGradient<C> {
  using Base = TileGradient<C>;
  using Base::kTf32, Base::F, Base::kD, Base::kDv, Base::kTileQ, Base::kTileK, Base::kThreads, Base::kK, Base::kV, Base::kQ, Base::kDo;
  using typename Base::T;

public:
  using Base::a, Base::in, Base::thread, Base::key_warp, Base::query_warp, Base::kKeys, Base::kQueries, Base::kFunctions;
  using typename Base::Place, typename Base::Tile;

  // stats: room in shared memory for 2 x 3 numbers of each query
  __device__ __forceinline__ TileWalk(const BackwardArguments &a, unsigned char *memory, float *stats) : Base(a, memory), stats_(stats) {}

  // Calls use(place) for each tile from `place` on, up to queries_end and keys_end, in which some query sees some key. raw is then q.k, and
  // dS is 0 where P is. kBetween: between() is called before each tile and after the last one, while raw and dS are still those of the tile
  // before; all threads have returned from its use().
  template <bool kBetween, class Between, class Use>
  __device__ __forceinline__ void run(Tile &raw, Tile &dS, const Sequence &s, Place place, i64 queries_end, i64 keys_end,
                                      const Between &between, const Use &use) const {
    const auto find = [&] { // along a diagonal some query sees some key of all tiles, or of none
      while (F.blocks && !this->sees(s, place))
        if (!advance(place, queries_end, keys_end)) return false;
      return true;
    };
    if (place.q0 >= queries_end || place.k0 >= keys_end || (kAlong == WalkAlong::both && !F.blocks && !this->sees(s, place)) || !find())
      return;
    const Operands from(*this, s, place);
    __syncthreads(); // all threads have read what lay there
    load_part<true, true>(from, s, place, Part::scores), cp_async_commit();
    load_part<true, true>(from, s, place, Part::gradients), cp_async_commit();
    write_stats(read_stats(from, s, place), 0);
    cp_async_wait<1>();
    __syncthreads();
    bool exists = true;
    for (int stage = 0;; stage ^= kAlong != WalkAlong::keys) {
      const Place own = place;
      Tile P;
      bool more = false;
      if (!kBetween || exists) {
        this->fill(P, 0), this->template multiply<kD, true>(P, kK, kQ);
        more = advance(place, queries_end, keys_end) && find();
      }
      cp_async_wait<0>();
      __syncthreads(); // V and dO have arrived; all threads have read K and Q
      Stats stats;
      if (more) {
        load_part<kAlong != WalkAlong::queries, kAlong != WalkAlong::keys>(from, s, place, Part::scores);
        if constexpr (kAlong != WalkAlong::keys) stats = read_stats(from, s, place);
      }
      cp_async_commit();
      if constexpr (kBetween) {
        between();
        if (!exists) return;
        exists = more;
      }
#pragma unroll
      for (int n = 0; n < kKeys * kQueries; ++n) raw[n / kQueries][n % kQueries] = P[n / kQueries][n % kQueries];
      exponentiate(P, s, own, stage);
      differentiate(dS, stage);
      if (more && kAlong != WalkAlong::keys) write_stats(stats, stage ^ 1);
      cp_async_wait<0>();
      __syncthreads(); // K and Q of the next tile have arrived; all threads have read V and dO
      if (more) load_part<kAlong != WalkAlong::queries, kAlong != WalkAlong::keys>(from, s, place, Part::gradients);
      cp_async_commit();
      finish(dS, P, stage);
      use(own);
      if (!kBetween && !more) return;
    }
  }

private:
  enum class Part { scores, gradients }; // K and Q, or V and dO
  struct Stats {
    float lse, correction, D;
  };
  float *const stats_;
  static_assert(kTileQ <= kThreads);

  static __device__ __forceinline__ bool advance(Place &place, i64 queries_end, i64 keys_end) {
    if (kAlong != WalkAlong::keys && queries_end - place.q0 <= kTileQ) return false;
    if (kAlong != WalkAlong::queries && keys_end - place.k0 <= kTileK) return false;
    if constexpr (kAlong != WalkAlong::keys) place.q0 += kTileQ;
    if constexpr (kAlong != WalkAlong::queries) place.k0 += kTileK;
    return true;
  }
  // Where the rows of a head begin.
  struct Operands {
    const T *k, *v, *q, *dout;
    const float *lse, *delta;
    __device__ __forceinline__ Operands(const TileWalk &walk, const Sequence &s, const Place &place) {
      const Inputs &in = walk.in;
      const i32 b = place.batch, h = place.head, head_kv = h / in.group;
      k = in.k.at<const T>(b, head_kv, s.k0, 0), v = in.v.at<const T>(b, head_kv, s.k0, 0);
      q = in.q.at<const T>(b, h, s.q0, 0), dout = walk.a.dout.template at<const T>(b, h, s.q0, 0);
      lse = walk.a.lse.template at<const float>(b, h, s.q0, 0), delta = (const float *)walk.a.delta + in.row_index(b, h, s.q0);
    }
  };
  template <int kRows, int kColumns>
  __device__ __forceinline__ void load_rows(u32 to, const T *first, const Operand &x, i32 begin, i64 length, i32 columns) const {
    const i32 rows = (i32)min((i64)kRows, length - begin);
    Base::template load<kRows, kColumns>(to, {first + begin * x.stride[2], x.stride[2], x.stride[3], rows, columns});
  }
  template <bool kLoadKeys, bool kLoadQueries>
  __device__ __forceinline__ void load_part(const Operands &from, const Sequence &s, const Place &place, Part part) const {
    if (part == Part::scores) {
      if constexpr (kLoadKeys) load_rows<kTileK, kD>(kK, from.k, in.k, place.k0, s.band.seqlen_k, in.head_dim);
      if constexpr (kLoadQueries) load_rows<kTileQ, kD>(kQ, from.q, in.q, place.q0, s.band.seqlen_q, in.head_dim);
    } else {
      if constexpr (kLoadKeys) load_rows<kTileK, kDv>(kV, from.v, in.v, place.k0, s.band.seqlen_k, in.head_dim_v);
      if constexpr (kLoadQueries) load_rows<kTileQ, kDv>(kDo, from.dout, a.dout, place.q0, s.band.seqlen_q, in.head_dim_v);
    }
  }

  // LSE, its correction and D of the query that this thread stages. In 16 bits LSE becomes a number even if it is NaN; D is NaN, too, then.
  __device__ __forceinline__ Stats read_stats(const Operands &from, const Sequence &s, const Place &place) const {
    if (thread >= kTileQ) return {};
    const i32 q1 = (i32)s.band.seqlen_q, row = place.q0 + thread;
    const float lse = row < q1 ? from.lse[row * a.lse.stride[2]] : minus_infinity<float>();
    const float *const D = from.delta + min(row, q1 - 1);
    Stats x{lse == minus_infinity<float>() ? -lse : lse, D[in.rows()] * kLog2e<float>, *D};
    if (!kTf32 && x.lse != x.lse) x.lse = -3e38f;
    if (!kTf32 && x.correction != x.correction) x.correction = 0;
    return x;
  }
  __device__ __forceinline__ float *stats_of(int stage) const { return stats_ + stage * 3 * kTileQ; }
  __device__ __forceinline__ void write_stats(const Stats &x, int stage) const {
    float *const to = stats_of(stage) + thread;
    if (thread < kTileQ) to[0] = x.lse, to[kTileQ] = x.correction, to[2 * kTileQ] = x.D;
  }
  struct StagedLse {
    const float *of_block;
    __device__ __forceinline__ float lse(int c, int e) const { return of_block[tile::lane_column(c, e)]; }
    __device__ __forceinline__ float correction(int c, int e) const { return of_block[kTileQ + tile::lane_column(c, e)]; }
  };
  __device__ __forceinline__ i32 first_query() const { return query_warp * kQueries * 16; } // of this warp, in a tile
  __device__ __forceinline__ float D(int stage, int n, int k) const {
    return stats_of(stage)[2 * kTileQ + first_query() + 16 * n + tile::lane_column(k / 2, k % 2)];
  }

  // P from q.k; it is negated where dropout drops it.
  __device__ __forceinline__ void exponentiate(Tile &P, const Sequence &s, const Place &place, int stage) const {
    const Scores<F, float, kFunctions> scores(in, s, place.batch);
    const i32 i = place.q0 + first_query(), j = place.k0 + key_warp * kKeys * 16;
    const i32 k1 = (i32)min((i64)place.k0 + kTileK, s.band.seqlen_k);
    const auto lse = [&](int n) { return StagedLse{stats_of(stage) + first_query() + 16 * n}; };
    if (this->masked(s, place))
      probabilities<F, true, Slope::none, true, !kTf32>(P, P, scores, place.head, i, j, k1, lse);
    else
      probabilities<F, false, Slope::none, true, !kTf32>(P, P, scores, place.head, i, j, k1, lse);
    if constexpr (F.dropout) KeyMajorDropout<F>{Dropout<F>(in)}.mark(P, i, j, place.head, place.batch);
  }
  // dP - D; with dropout, and where sums are more exact than one of them, dP.
  static constexpr bool kFromD = !F.dropout && !kTf32;
  __device__ __forceinline__ void differentiate(Tile &dS, int stage) const {
#pragma unroll
    for (int n = 0; n < kQueries; ++n) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float start = kFromD ? -D(stage, n, k) : 0.0f;
#pragma unroll
        for (int m = 0; m < 2 * kKeys; ++m) dS[m / 2][n].x[k / 2][2 * (m % 2) + k % 2] = start;
      }
    }
    this->template multiply<kDv, false>(dS, kV, kDo);
  }
  __device__ __forceinline__ void finish(Tile &dS, const Tile &P, int stage) const {
    const KeyMajorDropout<F> dropout{Dropout<F>(in)};
#pragma unroll
    for (int n = 0; n < kQueries; ++n) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float own = kFromD ? 0.0f : D(stage, n, k);
#pragma unroll
        for (int m = 0; m < 2 * kKeys; ++m) {
          float &x = dS[m / 2][n].x[k / 2][2 * (m % 2) + k % 2];
          x = this->differentiated(x, P[m / 2][n].x[k / 2][2 * (m % 2) + k % 2], own, dropout);
        }
      }
    }
  }
};

} // namespace strobe
