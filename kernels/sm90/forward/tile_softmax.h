// Turns a tile of S into P, and keeps the running softmax of a warpgroup's queries. It applies options of the score and masks, and chooses
// the reference of exponents.
#pragma once
#include "../../device/query_major_dropout.h"
#include "../../device/softmax.h"
#include "eight_bits.h"
#include "exponent.h"
#include "given.h"
#include "nonfinite.h"
#include "rows.h"

namespace strobe::sm90 {

// The factors of S without any.
struct NoScales {
  template <class... Any> __device__ __forceinline__ explicit NoScales(const Any &...) {}
  template <class Score> __device__ __forceinline__ Score applied(const Score &scores) const { return scores; }
};

template <Config C> struct TileSoftmax {
  using T = typename Element<C.dtype>::type;
  static constexpr Features F = C.features;
  using Score = Scores<F, float, functions_of<C>()>;
  using Fast = FastForm<F, C.reference != kExact>;
  static constexpr bool kLine = Line<C, Score>::kApplies;
  static constexpr int kN = C.tile_k;
  // Bounds of l: P fits its type as long as l is below kMost; from kFar on the reference follows the maxima.
  static constexpr float kMost = C.dtype == kF16 ? 65504.0f : 1e30f, kFar = C.dtype == kF16 ? 4096.0f : 1e12f;
  static_assert(!F.dropout || kN % 32 == 0, "dropout draws for 32 keys");

  Warpgroup<C> &group;
  float (&S)[kN / 2];
  const Item &item;
  const Sequence sequence;
  const typename Either<C.eight_bits != 0, ScoreScales<C>, NoScales>::type factors;
  const Score scores;
  QueryMajorDropout<F> dropout;
  const i32 q, row; // the first query of the warpgroup and of the warp; not used with packed heads
  const typename Score::Row rows[2];
  Given<C, Score> given;
  Line<C, Score> line;
  Fast fast;
  RowSoftmax<2> running;
  bool follows = true, rising; // follows: the reference of some rows follows the maxima; rising: from now on that of all rows does
  static constexpr int kFetched = kN / 4 + 2;
  // Whether lanes fetch their values of what is computed ahead before they wait for S. Registers have to be left for that.
  static constexpr bool kFetches = [] {
    constexpr int kHeld = kN / 2 + kN / 4 + C.head_dim_v / 2 + (C.q_in_registers ? C.head_dim / 4 : 0), kRest = 30;
    if constexpr (C.packed || C.registers_compute < kHeld + kFetched + kRest) return false;
    return requires { CallersFunctions<F.program, F.program_high>::kFetched; };
  }();
  float fetched[kFetches ? kFetched + 14 : 1];
  u32 random[F.dropout ? kN / 32 : 1][4];
  float rescales[2]; // with eight_bits: what O is multiplied by before P V of the tile that was rounded last is added

  __device__ __forceinline__ TileSoftmax(Warpgroup<C> &group, const Item &item)
      : group(group), S(group.S.x), item(item), sequence(sequence_of(group.in, group.shared, item, group.items)),
        factors(group.a, item, sequence, [&](int r) { return place_in(group, item, r); }),
        scores(factors.applied(Score(group.in, sequence, item.b))), dropout{Dropout<F>(group.in), (u32)item.h, (u32)item.b},
        q(item.q + queries_of_warpgroup<C>(group.a) * group.w), row(q + 16 * group.warp),
        rows{scores.row(place(0).i, place(0).h), scores.row(place(1).i, place(1).h)},
        given(group.a, group.shared, scores, item.h, row, group.w, group.warp), line(scores, rows[0].slope), fast(scores),
        rising(item.kind() == kSafe) {
    if constexpr (F.part) dropout.head = dropout.dropout.whole_head(item.h), dropout.batch = dropout.dropout.whole_batch(item.b);
  }

  // The query and the head of a lane's row r.
  __device__ __forceinline__ RowPlace place(int r) const {
    if constexpr (!C.packed) return {row + tile::lane_row(r), item.h};
    return place_in(group, item, r);
  }
  static __device__ __forceinline__ RowPlace place_in(const Warpgroup<C> &group, const Item &item, int r) {
    const i32 in_tile = 16 * group.warp + tile::lane_row(r);
    if constexpr (!C.packed) return {item.q + queries_of_warpgroup<C>(group.a) * group.w + in_tile, item.h};
    return packed_place(group.a, item, group.w, in_tile);
  }
  // Starts another chunk of keys. kFixedByRow: if `lags`, all rows lag; otherwise each row decides for itself. Rows that do not exist never
  // follow.
  __device__ __forceinline__ void restart(bool lags = false) {
    running = RowSoftmax<2>();
    if constexpr (C.reference == kFixedByRow) {
      follows = true, rising = lags;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (place(r).i >= scores.seqlen_q) running.M[r] = -minus_infinity<float>();
      }
    }
  }

  // Begins to fetch what is computed ahead for tile t.
  __device__ __forceinline__ void fetch(const Tile &t) {
    if constexpr (kFetches) {
      using Of = CallersFunctions<F.program, F.program_high>;
      if (!F.given() && !open(t)) return;
      constexpr bool kByKey = Of::kFetched == Along::key;
      const i32 column = t.begin + tile::lane_column(0, 0), first = kByKey ? column : row + tile::lane_row(0) - column;
      const float *values = Of::template fetchable<float>(scores.in.function, scores.pair(rows[0], 0)) + first;
#pragma unroll
      for (int n = kByKey ? 0 : -1; n < kN / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c)
          fetched[place_fetched<Of::kFetched>({.key = {0, 8 * n + c}})] = load_global_now(values + (kByKey ? 8 * n + c : -8 * n - c));
      }
    }
  }

  // Whether scores and M are natural logarithms, as in a tile with a bias that is computed again. Scores may then be as low as FP32 allows,
  // or -inf.
  __device__ __forceinline__ bool natural() const { return F.unbounded() && !C.invariant && item.kind() != kFast; }

  // Whether the numbers of V that are not finite are cleared in all tiles, and not only in those masked by position: mask and bias may hide
  // any element, and an invariant row's bits must not depend on the other rows of its tile.
  static constexpr bool kClearsEachTile = F.hides() || C.invariant;
  // Replaces Q K^T in S by P for tile t. value: the stage that holds the tile's V.
  __device__ __forceinline__ void exponentiate(const Tile &t, const Stage<C> &value) {
    if constexpr (kClearsEachTile) {
      if (item.kind() != kFast) clear_nonfinite_v(group, value);
    }
    score_and_hide(t, value);
    if (natural())
      exponentiate(Natural{});
    else if constexpr (kLine)
      exponentiate(line.exponent(given));
    else if (Fast::kApplies && fast.small)
      exponentiate(fast);
    else
      exponentiate(Linear{Fast::kApplies ? fast.cap : scores.unit});
    if constexpr (F.dropout) {
#pragma unroll
      for (int n = 0; n < kN / 32; ++n) dropout.draw(random[n], row, t.begin + 32 * n);
    }
  }
  template <class Exponent> __device__ __forceinline__ void exponentiate(const Exponent &of) {
    if constexpr (C.reference == kFixedByRow) {
      if (follows) follow_by_row(of);
    } else {
      if (follows) running.template follow<C.reference == kExact>(S, of);
    }
    if constexpr (C.eight_bits)
      running.exponentiate(S, Raised<Exponent>{of});
    else
      running.exponentiate(S, of);
  }
  // Rounds P to an operand of the tensor cores, in which dropped elements are 0.
  __device__ __forceinline__ void round(LeftOperand<kN> &P) const
    requires(!C.eight_bits)
  {
#pragma unroll
    for (int i = 0; i < kN / 4; ++i) {
      P.x[i] = pack<T>(S[2 * i], S[2 * i + 1]);
      if constexpr (F.dropout) P.x[i] = dropout.kept(P.x[i], random[i / 8][i / 4 % 2 * 2 + i % 2], i / 2 % 2);
    }
  }
  __device__ __forceinline__ void round(LeftOperand<kN / 2> &P)
    requires(C.eight_bits != 0)
  {
    rescales[0] = running.alpha[0], rescales[1] = running.alpha[1];
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
      const float *s = S + i / 4 * 16 + i / 2 % 2 * 8 + i % 2 * 2; // keys 2t, 2t + 1, 2t + 8, 2t + 9 of 16
      P.x[i] = pack_e4m3(s[0], s[1]) | pack_e4m3(s[4], s[5]) << 16;
      if constexpr (F.dropout) P.x[i] &= less_bytes(random[i / 4][i % 4], dropout.dropout.threshold * 0x01010101u);
    }
  }
  // Adds P V of a tile to O, in FP32.
  __device__ __forceinline__ void promote() {
#pragma unroll
    for (int i = 0; i < C.head_dim_v / 2; ++i) group.O.x[i] = __fmaf_rn(group.O.x[i], rescales[i / 2 % 2], group.O_of_tile.x[i]);
  }
  // Rescales O to the current reference.
  template <int N> __device__ __forceinline__ void rescale(Accumulator<T, N> &O) const {
    if (running.moved()) running.rescale(O.x);
  }

  // Called after tile t. Decides whether the reference goes on following the maxima, and whether P has already overflowed.
  __device__ __forceinline__ void watch(const Tile &t) {
    if constexpr (C.reference == kFixed) {
      const float l = fmaxf(running.l[0], running.l[1]);
      if (__any_sync(0xFFFFFFFFu, !(l < kFar))) {
        rising = true;
        if (item.kind() == kFast && !(l < kMost))
          store_shared(group.shared.failed(group.verdicts), 1), store_shared(group.shared.lost(), group.items);
      }
      bool hidden = hides_by_position(t); // if true: a row may have seen no key yet, or only some where a penalty falls
      if constexpr (kLine) hidden = hidden || line.falls();
      if constexpr (F.hides()) hidden = hidden || __any_sync(0xFFFFFFFFu, is_low(fminf(running.M[0], running.M[1])));
      follows = rising || (follows && hidden);
    }
    if constexpr (C.reference == kFixedByRow) follows = rising || __any_sync(0xFFFFFFFFu, wants(0) || wants(1));
  }
  // Always false, but the compiler must finish the softmax to know it.
  __device__ __forceinline__ bool never() const { return __any_sync(0xFFFFFFFFu, running.l[0] + running.l[1] < 0); }

private:
  // Whether a row's reference is that of hidden keys. The caller's functions may hide them by a large negative number, too.
  static __device__ __forceinline__ bool is_low(float M) { return F.given() ? M <= -4096.0f : M == minus_infinity<float>(); }
  // Whether this lane's columns show that the reference of row r must follow the row's maximum.
  __device__ __forceinline__ bool wants(int r) const { return running.M[r] == minus_infinity<float>() || running.l[r] >= kFar; }
  template <class Exponent> __device__ __forceinline__ void follow_by_row(const Exponent &of) {
    bool rows[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) rows[r] = rising || tile::row_max(wants(r) ? 1.0f : 0.0f) > 0;
    running.follow(S, of, rows);
  }
  __device__ __forceinline__ void score_and_hide(const Tile &t, const Stage<C> &value) {
    const bool scored = natural() || (F.additive() && !kLine && !Fast::kApplies);
    if constexpr (kLine) {
      if (!scored) line.begin(S, row, t.begin, t.end);
    }
    if constexpr (Fast::kApplies) fast.begin(S);
    if (hides_by_position(t)) {
      if constexpr (!kClearsEachTile) {
        if (item.kind() != kFast) clear_nonfinite_v(group, value);
      }
      if (scored)
        score<true>(t);
      else
        hide(t);
      if constexpr (F.pages) {
        if (t.masked >= Tile::kLacks) hide_lacking(t);
      }
    } else if (scored && open(t)) {
      score<false>(t);
    } else if (scored) {
      score<false, false>(t);
    }
    if constexpr (F.seen) {
      if (!scored && open(t)) hide_unseen(t);
    }
    given.mask.hide(S);
  }
  // The row of the lane's element i. column: the lane's first key.
  __device__ __forceinline__ decltype(auto) row_of(int i, i32 column) const {
    const typename Score::Row &found = rows[i / 2 % 2];
    if constexpr (!(F.given() || F.seen) || C.packed) {
      return (found);
    } else {
      typename Score::Row stepped = found;
      stepped.stepped = true;
      if constexpr (kFetches) stepped.fetched = fetched;
      stepped.query = {row + tile::lane_row(0), i / 2 % 2 * 8}, stepped.key = {column, i / 4 * 8 + i % 2};
      return stepped;
    }
  }
  // Hides elements outside the rows' bands, or past the tile's end.
  __device__ __forceinline__ void hide(const Tile &t) {
    const i32 column = t.begin + tile::lane_column(0, 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const i32 begin = rows[r].begin - column, end = min(rows[r].end, t.end) - column;
#pragma unroll
      for (int i = 2 * r; i < kN / 2; i += i % 2 ? 3 : 1) {
        const i32 j = i / 4 * 8 + i % 2;
        if ((F.band && j < begin) || j >= end) S[i] = minus_infinity<float>();
      }
    }
  }
  // Whether an item that is computed fast adds -inf to what the mask function hides: fewer instructions than a choice. If q.k is infinite
  // or NaN there, O is NaN, and the item is computed again.
  static constexpr bool kAddsMask = [] {
    if constexpr (F.seen && C.reference == kFixed) return kSeenAhead<F>;
    return false;
  }();
  // Hides what the mask function hides, where score() does not do so.
  __device__ __forceinline__ void hide_unseen(const Tile &t) {
    const i32 column = t.begin + tile::lane_column(0, 0);
    if constexpr (kAddsMask) {
      if (item.kind() == kFast) {
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) S[i] += scores.hidden(row_of(i, column), column + i / 4 * 8 + i % 2);
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      if (!scores.seen(row_of(i, column), column + i / 4 * 8 + i % 2)) S[i] = minus_infinity<float>();
    }
  }
  __device__ __forceinline__ void hide_lacking(const Tile &t) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      if (t.masked & Tile::kLacks << i / 8) S[i] = minus_infinity<float>();
    }
  }
  static constexpr bool kFullKnown = F.seen && F.blocks == strobe::kFullKnown;
  static __device__ __forceinline__ i32 hides_by_position(const Tile &t) { return kFullKnown ? t.masked & ~Tile::kOpen : t.masked; }
  // Whether the function of the mask has to be asked.
  static __device__ __forceinline__ bool open(const Tile &t) { return !kFullKnown || t.masked & Tile::kOpen; }
  template <bool kByPosition, bool kAsks = true> __device__ __forceinline__ void score(const Tile &t) {
    const i32 column = t.begin + tile::lane_column(0, 0);
    const float distance[2] = {(float)scores.distance(rows[0].i, column), (float)scores.distance(rows[1].i, column)};
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      given.bias.read(i);
      const i32 r = i / 2 % 2, j = i / 4 * 8 + i % 2;
      const auto &own = row_of(i, column);
      const typename Given<C, Score>::At at{given, {scores, own, column + j}, i};
      S[i] = scores.score(S[i], own, column + j, distance[r] - (float)j, at, kByPosition, t.end, kAsks);
    }
  }
};

} // namespace strobe::sm90
