// Executes the bytecode of the caller's functions (score/bytecode.h) on a tile of scores. An instruction computes a block of pairs, whose
// rows lie one after another, before the next instruction is looked at, so that looking costs little. Values of a head, of a query and of
// a key are computed first: those of the lanes' axis stand once for each lane, those of the rows' axis as a vector of equal lanes.
#pragma once
#include "score/bytecode.h"
#include "simd.h"

namespace strobe::inline STROBE_ISA {

// e^x, 2^x and logarithms of any number. What would be subnormal may be 0.
STROBE_INLINE Vec<float> times_2_to(Vec<float> x, Vec<float> n) { // |n| <= 127, x near 1; the result may be infinite
  using V = Vec<float>;
  const V half = (n - V(1)) + V(kIntegers);
  return x * V((V::Raw)(((V::RawInt)half.v + Bits<float>::kBias) << Bits<float>::kMantissa)) * V(2);
}
STROBE_INLINE Vec<double> times_2_to(Vec<double> x, Vec<double> n) {
  using V = Vec<double>;
  const V half = (n - V(1)) + V(0x1.8p52);
  return x * V((V::Raw)(((V::RawInt)half.v + Bits<double>::kBias) << Bits<double>::kMantissa)) * V(2);
}
// The integer next to x, |x| < 2^20.
template <class T> STROBE_INLINE Vec<T> nearest(Vec<T> x) {
  const Vec<T> magic(sizeof(T) == 4 ? T(kIntegers) : T(0x1.8p52)), shifted = x + magic;
  return shifted - magic;
}
// e^r for |r| <= ln(2) / 2.
STROBE_INLINE Vec<float> small_exponential(Vec<float> r) { return exp_fraction(r); }
STROBE_INLINE Vec<double> small_exponential(Vec<double> r) {
  Vec<double> p = 0; // the power series
  unroll<13>(STROBE_UNROLL(i) {
    double factor = 1;
    for (int n = 2; n <= 13 - i; ++n) factor /= n;
    p = p * r + factor;
  });
  return p * r + 1.0;
}
template <class T> STROBE_INLINE Vec<T> limited(Vec<T> x, Vec<T> result, T least, T most) {
  using V = Vec<T>;
  result = select(x < V(least), V(0), result);
  return select(V(most) < x, V(T(__builtin_inf())), result);
}
template <class T> STROBE_INLINE Vec<T> exponential(Vec<T> x) {
  using V = Vec<T>;
  constexpr bool kSingle = sizeof(T) == 4;
  constexpr T least = kSingle ? T(-86.6) : T(-707.7), most = kSingle ? T(88.722839) : T(709.782712893384);
  const V y = select(x < V(least), V(least), select(V(most) < x, V(most), x)), n = nearest(y * V(kLog2e<T>));
  const V high(kSingle ? T(0.693359375) : T(6.93145751953125e-1)), low(kSingle ? T(-2.12194440e-4) : T(1.42860682030941723212e-6));
  const V r = fma(-n, low, fma(-n, high, y));
  return limited(x, times_2_to(small_exponential(r), n), least, most);
}
template <class T> STROBE_INLINE Vec<T> exponential2(Vec<T> x) {
  using V = Vec<T>;
  constexpr T least = sizeof(T) == 4 ? T(-125) : T(-1021), most = sizeof(T) == 4 ? T(127.99999) : T(1023.9999999999999);
  const V y = select(x < V(least), V(least), select(V(most) < x, V(most), x)), n = nearest(y);
  return limited(x, times_2_to(small_exponential((y - n) * V(kLn2<T>)), n), least, most);
}
// ln x, or log2 x.
template <class T> STROBE_INLINE Vec<T> logarithm(Vec<T> x, bool base_2) {
  using V = Vec<T>;
  using B = Bits<T>;
  using RawInt = typename V::RawInt;
  constexpr bool kSingle = sizeof(T) == 4;
  const auto subnormal = x < V(kSingle ? T(0x1p-126) : T(0x1p-1022));
  const V y = abs(select(subnormal, x * V(kSingle ? T(0x1p24) : T(0x1p54)), x)); // without a sign its bits do not overflow
  const RawInt exponent = ((RawInt)y.v - (RawInt)V(T(0.70710678118654752440)).v) >> B::kMantissa;
  const V fraction = log_fraction(V((typename V::Raw)((RawInt)y.v - (exponent << B::kMantissa))) - V(1));
  const V n = V(__builtin_convertvector(exponent, typename V::Raw)) - select(subnormal, V(kSingle ? T(24) : T(54)), V(0));
  const V high(kSingle ? T(0.693359375) : T(6.93145751953125e-1)), low(kSingle ? T(-2.12194440e-4) : T(1.42860682030941723212e-6));
  V result = base_2 ? fma(fraction, V(kLog2e<T>), n) : fma(n, high, fma(n, low, fraction));
  result = select(x < V(T(__builtin_inf())), result, x); // infinite or NaN
  result = select(x == V(0), V(-T(__builtin_inf())), result);
  return select(x < V(0), V(T(__builtin_nan(""))), result);
}

template <class T> class ProgramRun {
  using V = Vec<T>;
  using Raw = typename V::Raw;
  using RawInt = typename V::RawInt; // masks and narrow integers
  using Int = typename V::Int;
  using Wrapping __attribute__((vector_size(sizeof(RawInt)))) = std::make_unsigned_t<Int>; // sums and products wrap around
  using Op = score::Op;
  using Type = score::Type;
  using Stage = score::Stage;
  using Operand = score::Operand;
  using Instruction = score::Instruction;
  static constexpr int L = V::kLanes;
  static constexpr int64_t kBytes = sizeof(V), kLine = 8 * score::kValuesAtOnce, kRow = 8 * score::kRowsAtOnce;

public:
  ProgramRun(const score::Code &code, const score::Scores &scores, char *scratch, T *s, T *slopes)
      : code_(code), scores_(scores), s_(s), slopes_(slopes), rows_(scores.keys_are_rows ? Stage::key : Stage::query),
        lanes_(scores.keys_are_rows ? Stage::query : Stage::key) {
    head_ = scratch;
    in_lanes_ = head_ + list(Stage::head).slots * score::kVectorRoom;
    in_pairs_ = in_lanes_ + list(lanes_).slots * kLine;
    in_rows_ = in_pairs_ + list(Stage::pair).slots * kLine;
    spread_ = in_rows_ + list(rows_).slots * kRow;
  }

  void run() {
    section(Stage::head, 1, 1, 0);
    for (lane0_ = 0; lane0_ < scores_.lanes; lane0_ += score::kValuesAtOnce) {
      const int64_t lanes = min((i64)score::kValuesAtOnce, (i64)(scores_.lanes - lane0_)),
                    each = max(1ll, (i64)(score::kValuesAtOnce / lanes));
      section(lanes_, 1, lanes / L, first(lanes_) + lane0_);
      for (int64_t row0 = 0; row0 < scores_.rows; row0 += score::kRowsAtOnce) {
        const int64_t rows = min((i64)score::kRowsAtOnce, (i64)(scores_.rows - row0));
        section(rows_, 1, (rows + L - 1) / L, first(rows_) + row0);
        for (int32_t n = 0; n < list(rows_).used_count; ++n) spread(list(rows_).used[n], rows);
        for (row_ = 0; row_ < rows; row_ += each) {
          const int64_t count = min((i64)each, (i64)(rows - row_));
          at_ = (row0 + row_) * scores_.stride + lane0_;
          pitch_ = lanes;
          section(Stage::pair, count, lanes / L, 0);
          finish(count, lanes / L);
        }
      }
    }
  }

private:
  const score::Code::List &list(Stage stage) const { return code_.lists[int(stage)]; }
  int64_t first(Stage stage) const { return stage == Stage::query ? scores_.query : scores_.key; }

  // Where a section of `stage` finds a value, or leaves its own.
  Operand operand(Stage stage, const score::Place &place) const {
    const int64_t size = place.wide ? 8 : int64_t(sizeof(T)), vector = L * size;
    if (place.stage == Stage::head) return {head_ + place.slot * score::kVectorRoom, 0, 0};
    if (place.stage == Stage::pair) return {in_pairs_ + place.slot * kLine, pitch_ * size, vector};
    if (place.stage == lanes_) return {in_lanes_ + place.slot * kLine, 0, vector};
    if (stage != Stage::pair) return {in_rows_ + place.slot * kRow, 0, vector};
    return {spread_ + (place.slot * score::kRowsAtOnce + row_) * score::kVectorRoom, score::kVectorRoom, 0};
  }

  // One vector of equal lanes for each row.
  void spread(const score::Place &place, int64_t rows) {
    const char *from = in_rows_ + place.slot * kRow;
    char *to = spread_ + place.slot * score::kRowsAtOnce * score::kVectorRoom;
    for (int64_t r = 0; r < rows; ++r, to += score::kVectorRoom) {
      if (place.wide && sizeof(T) == 4) {
        for (int l = 0; l < L; ++l) reinterpret_cast<int64_t *>(to)[l] = reinterpret_cast<const int64_t *>(from)[r];
      } else {
        V(reinterpret_cast<const T *>(from)[r]).store(reinterpret_cast<T *>(to));
      }
    }
  }

  void section(Stage stage, int64_t rows, int64_t vectors, int64_t position) {
    const score::Code::List &all = list(stage);
    for (int32_t n = 0; n < all.count; ++n) {
      const Instruction &x = all.at[n];
      out_ = operand(stage, x.out);
      for (int i = 0; i < 3 && x.in[i].slot >= 0; ++i) in_[i] = operand(stage, x.in[i]);
      n_ = {rows, vectors, L};
      if (execute(x)) continue;
      const int64_t of_head = x.op == int32_t(Op::BATCH)    ? scores_.batch
                              : x.op == int32_t(Op::HEAD)   ? scores_.head
                              : x.op == int32_t(Op::OFFSET) ? scores_.offset
                                                            : position;
      score::compute_each<T>(x, n_, of_head, out_, in_);
    }
  }

  // Calls f with the vectors of `count` inputs; its result is the output.
  template <int count, class F> STROBE_INLINE bool each(F &&f) {
    int64_t rows = n_.rows, vectors = n_.vectors;
    bool flat = true; // all rows are one
    const Operand *const all[] = {&out_, &in_[0], &in_[1], &in_[2]};
    unroll<count + 1>(STROBE_UNROLL(i) { flat &= all[i]->row == vectors * all[i]->step; });
    if (flat) vectors *= rows, rows = 1;
    for (int64_t r = 0; r < rows; ++r) {
      T *to = reinterpret_cast<T *>(out_.at + r * out_.row);
      const char *from[3];
      unroll<count>(STROBE_UNROLL(i) { from[i] = in_[i].at + r * in_[i].row; });
      for (int64_t v = 0; v < vectors; ++v, to += L) {
        V x[3];
        unroll<count>(STROBE_UNROLL(i) {
          x[i] = V::load(reinterpret_cast<const T *>(from[i]));
          from[i] += in_[i].step;
        });
        f(x).store(to);
      }
    }
    return true;
  }
  template <class F> STROBE_INLINE bool one(F &&f) {
    return each<1>([&](const V *x) __attribute__((always_inline)) { return f(x[0]); });
  }
  template <class F> STROBE_INLINE bool two(F &&f) {
    return each<2>([&](const V *x) __attribute__((always_inline)) { return f(x[0], x[1]); });
  }
  template <class F> STROBE_INLINE bool integers(F &&f) {
    return two([&](V a, V b) __attribute__((always_inline)) { return of(f((RawInt)a.v, (RawInt)b.v)); });
  }
  static STROBE_INLINE V of(RawInt x) { return V((Raw)x); }
  static STROBE_INLINE RawInt in_lanes(Int x) { return RawInt{} + x; }

  // Whether the instruction is one of those that are vectors; then it is executed.
  bool execute(const Instruction &x) {
    if (x.op == int32_t(Op::SCORE)) return load_scores();
    if (x.op >= score::kWiden) return x.op == score::kIndex ? add_index(x) : x.op == score::kElement && load_elements(x);
    const bool as_narrow = x.type == Type::narrow || (x.type == Type::wide && sizeof(T) == 8);
    if (x.op == int32_t(Op::WHERE) && (x.type != Type::wide || sizeof(T) == 8))
      return each<3>([&](const V *v) __attribute__((always_inline)) { return select((RawInt)v[0].v, v[1], v[2]); });
    return x.type == Type::real ? execute_real(x) : x.type == Type::mask ? execute_mask(x) : as_narrow && execute_integer(x);
  }

  bool load_scores() {
    const V scale(T(scores_.scale));
    for (int64_t r = 0; r < n_.rows; ++r)
      for (int64_t v = 0; v < n_.vectors; ++v)
        (V::load(s_ + at_ + r * scores_.stride + v * L) * scale).store(reinterpret_cast<T *>(out_.at + r * out_.row + v * out_.step));
    return true;
  }

  __attribute__((noinline)) bool execute_real(const Instruction &x) {
    switch (Op(x.op)) {
    case Op::REAL: {
      const V value(T(x.real));
      return each<0>([&](const V *) __attribute__((always_inline)) { return value; });
    }
    case Op::ADD:
      return two([](V a, V b) __attribute__((always_inline)) { return a + b; });
    case Op::SUBTRACT:
      return two([](V a, V b) __attribute__((always_inline)) { return a - b; });
    case Op::MULTIPLY:
      return two([](V a, V b) __attribute__((always_inline)) { return a * b; });
    case Op::DIVIDE:
      return two([](V a, V b) __attribute__((always_inline)) { return a / b; });
    case Op::MINIMUM: // NaN if either is
      return two([](V a, V b) __attribute__((always_inline)) { return select((b < a) | ~(b == b), b, a); });
    case Op::MAXIMUM:
      return two([](V a, V b) __attribute__((always_inline)) { return select((a < b) | ~(b == b), b, a); });
    case Op::NEGATE:
      return one([](V a) __attribute__((always_inline)) { return -a; });
    case Op::ABSOLUTE:
      return one([](V a) __attribute__((always_inline)) { return abs(a); });
    case Op::EQUAL:
      return two([](V a, V b) __attribute__((always_inline)) { return of(a == b); });
    case Op::NOT_EQUAL:
      return two([](V a, V b) __attribute__((always_inline)) { return of(~(a == b)); });
    case Op::LESS:
      return two([](V a, V b) __attribute__((always_inline)) { return of(a < b); });
    case Op::LESS_EQUAL:
      return two([](V a, V b) __attribute__((always_inline)) { return of(a <= b); });
    case Op::GREATER:
      return two([](V a, V b) __attribute__((always_inline)) { return of(b < a); });
    case Op::GREATER_EQUAL:
      return two([](V a, V b) __attribute__((always_inline)) { return of(b <= a); });
    case Op::TO_BOOLEAN:
      return one([](V a) __attribute__((always_inline)) { return of(~(a == V(0))); });
    case Op::TO_INTEGER: // -inf and inf, too
      if (x.gives == Type::wide) return false;
      return one([](V a) __attribute__((always_inline)) {
        const V least(T(-0x1p30)), most(T(0x1p30)), y = select(a >= least, select(a <= most, a, most), least);
        return of(__builtin_convertvector(y.v, RawInt));
      });
    case Op::EXP:
      return one([](V a) __attribute__((always_inline)) { return exponential(a); });
    case Op::EXP2:
      return one([](V a) __attribute__((always_inline)) { return exponential2(a); });
    case Op::LOG:
      return one([](V a) __attribute__((always_inline)) { return logarithm(a, false); });
    case Op::LOG2:
      return one([](V a) __attribute__((always_inline)) { return logarithm(a, true); });
    case Op::SQRT:
      return one([](V a) __attribute__((always_inline)) { return sqrt(a); });
    case Op::RSQRT:
      return one([](V a) __attribute__((always_inline)) { return V(1) / sqrt(a); });
    case Op::TANH:
      return one([](V a) __attribute__((always_inline)) {
        V slope;
        return tanh(a, slope);
      });
    case Op::SIGMOID:
      return one([](V a) __attribute__((always_inline)) { return V(1) / (V(1) + exponential(-a)); });
    default:
      return false;
    }
  }

  __attribute__((noinline)) bool execute_mask(const Instruction &x) {
    switch (Op(x.op)) {
    case Op::AND:
      return integers([](RawInt a, RawInt b) __attribute__((always_inline)) { return a & b; });
    case Op::OR:
      return integers([](RawInt a, RawInt b) __attribute__((always_inline)) { return a | b; });
    case Op::XOR:
    case Op::NOT_EQUAL:
      return integers([](RawInt a, RawInt b) __attribute__((always_inline)) { return a ^ b; });
    case Op::EQUAL:
      return integers([](RawInt a, RawInt b) __attribute__((always_inline)) { return ~(a ^ b); });
    case Op::NOT:
      return one([](V a) __attribute__((always_inline)) { return of(~(RawInt)a.v); });
    case Op::TO_REAL:
      return one([](V a) __attribute__((always_inline)) { return of((RawInt)a.v & (RawInt)V(1).v); });
    case Op::TO_INTEGER:
      return one([](V a) __attribute__((always_inline)) { return of(-(RawInt)a.v); });
    default:
      return false;
    }
  }

  __attribute__((noinline)) bool execute_integer(const Instruction &x) {
    switch (Op(x.op)) {
    case Op::ADD:
      return integers([](RawInt a, RawInt b) __attribute__((always_inline)) { return (RawInt)((Wrapping)a + (Wrapping)b); });
    case Op::SUBTRACT:
      return integers([](RawInt a, RawInt b) __attribute__((always_inline)) { return (RawInt)((Wrapping)a - (Wrapping)b); });
    case Op::MULTIPLY:
      return integers([](RawInt a, RawInt b) __attribute__((always_inline)) { return (RawInt)((Wrapping)a * (Wrapping)b); });
    case Op::MINIMUM:
      return integers([](RawInt a, RawInt b) __attribute__((always_inline)) { return a < b ? a : b; });
    case Op::MAXIMUM:
      return integers([](RawInt a, RawInt b) __attribute__((always_inline)) { return a < b ? b : a; });
    case Op::NEGATE:
      return one([](V a) __attribute__((always_inline)) { return of((RawInt)(-(Wrapping)a.v)); });
    case Op::ABSOLUTE:
      return one([](V a) __attribute__((always_inline)) {
        const RawInt i = (RawInt)a.v;
        return of(i < 0 ? (RawInt)(-(Wrapping)a.v) : i);
      });
    case Op::AND:
      return integers([](RawInt a, RawInt b) __attribute__((always_inline)) { return a & b; });
    case Op::OR:
      return integers([](RawInt a, RawInt b) __attribute__((always_inline)) { return a | b; });
    case Op::XOR:
      return integers([](RawInt a, RawInt b) __attribute__((always_inline)) { return a ^ b; });
    case Op::NOT:
      return one([](V a) __attribute__((always_inline)) { return of(~(RawInt)a.v); });
    case Op::SHIFT_RIGHT:
      if (x.type == Type::wide) return false; // by any number
      return integers([](RawInt a, RawInt b) __attribute__((always_inline)) { return a >> b; });
    case Op::EQUAL:
      return integers([](RawInt a, RawInt b) __attribute__((always_inline)) { return a == b; });
    case Op::NOT_EQUAL:
      return integers([](RawInt a, RawInt b) __attribute__((always_inline)) { return ~(a == b); });
    case Op::LESS:
      return integers([](RawInt a, RawInt b) __attribute__((always_inline)) { return a < b; });
    case Op::LESS_EQUAL:
      return integers([](RawInt a, RawInt b) __attribute__((always_inline)) { return ~(b < a); });
    case Op::GREATER:
      return integers([](RawInt a, RawInt b) __attribute__((always_inline)) { return b < a; });
    case Op::GREATER_EQUAL:
      return integers([](RawInt a, RawInt b) __attribute__((always_inline)) { return ~(a < b); });
    case Op::TO_BOOLEAN:
      return one([](V a) __attribute__((always_inline)) { return of((RawInt)a.v != 0); });
    case Op::TO_REAL:
      return one([](V a) __attribute__((always_inline)) { return V(__builtin_convertvector((RawInt)a.v, Raw)); });
    case Op::FLOOR_DIVIDE:
      return x.type == Type::narrow && (x.small ? divide_small<false>() : divide<false>());
    case Op::REMAINDER:
      return x.type == Type::narrow && (x.small ? divide_small<true>() : divide<true>());
    default:
      return false;
    }
  }

  // Divides integers below 2^20 by a number that is the same for all. The quotient, a product in T with the reciprocal, is off by one at
  // most.
  template <bool kRemainder> bool divide_small() {
    const V divisor(__builtin_convertvector((RawInt)V::load(reinterpret_cast<const T *>(in_[1].at)).v, Raw)), inverse = V(1) / divisor;
    const auto zero = divisor == V(0);
    return one([&](V a) __attribute__((always_inline)) {
      const V x(__builtin_convertvector((RawInt)a.v, Raw));
      V quotient = nearest(select(zero, V(0), x * inverse)), rest = x - quotient * divisor; // exact
      const auto below = rest * divisor < V(0);                                             // the quotient is one too large
      quotient = select(below, quotient - V(1), quotient);
      if constexpr (!kRemainder) return of(__builtin_convertvector(quotient.v, RawInt));
      rest = select(below, rest + divisor, rest);
      return of(__builtin_convertvector(select(zero, V(0), rest).v, RawInt));
    });
  }

  // Divides integers below 2^31: their quotient in FP64, rounded towards 0, is exact.
  template <bool kRemainder> bool divide() {
    typedef double Doubles __attribute__((vector_size(L * sizeof(double))));
    return integers([](RawInt a, RawInt b) __attribute__((always_inline)) {
      const RawInt zero = b == 0, divisor = zero ? RawInt{} + 1 : b;
      const Doubles exact = __builtin_convertvector(a, Doubles) / __builtin_convertvector(divisor, Doubles);
      const RawInt quotient = __builtin_convertvector(exact, RawInt), rest = a - quotient * divisor;
      const RawInt below = (rest != 0) & ((rest ^ divisor) < 0); // -1: the quotient is one too large
      return ~zero & (kRemainder ? rest + (below & divisor) : quotient + below);
    });
  }

  bool add_index(const Instruction &x) {
    if (x.type == Type::wide && sizeof(T) == 4) return false;
    const RawInt size = in_lanes(Int(x.integer)), last = size - 1, stride = in_lanes(Int(x.stride));
    return integers([&](RawInt i, RawInt sum) __attribute__((always_inline)) {
      i = i < 0 ? (RawInt)((Wrapping)i + (Wrapping)size) : i;
      i = i < 0 ? RawInt{} : i;
      i = last < i ? last : i;
      return i * stride + sum;
    });
  }

  template <class Stored, class F> STROBE_INLINE bool gather(const Instruction &x, F &&convert) {
    const auto *data = reinterpret_cast<const Stored *>(x.data);
    return one([&](V a) __attribute__((always_inline)) {
      Int at[L];
      T to[L];
      a.store(reinterpret_cast<T *>(at));
      for (int l = 0; l < L; ++l) to[l] = convert(data[at[l]]);
      return V::load(to);
    });
  }
  __attribute__((noinline)) bool load_elements(const Instruction &x) {
    if (x.type == Type::wide && sizeof(T) == 4) return false;
    const auto as_bits = [](Int e) __attribute__((always_inline)) {
      T r;
      std::memcpy(&r, &e, sizeof r);
      return r;
    };
    switch (x.dtype) {
    case DType::f32:
      return gather<float>(x, [](float e) __attribute__((always_inline)) { return T(e); });
    case DType::f64:
      return gather<double>(x, [](double e) __attribute__((always_inline)) { return T(e); });
    case DType::i32:
      return gather<int32_t>(x, [&](int32_t e) __attribute__((always_inline)) { return as_bits(Int(e)); });
    case DType::boolean:
      return gather<uint8_t>(x, [&](uint8_t e) __attribute__((always_inline)) { return as_bits(e ? Int(-1) : Int(0)); });
    case DType::bf16:
      return gather<uint16_t>(x, [](uint16_t e) __attribute__((always_inline)) {
        const uint32_t word = uint32_t(e) << 16;
        float r;
        std::memcpy(&r, &word, sizeof r);
        return T(r);
      });
    default:
      return false;
    }
  }

  // Moves the results of a block to the scores and slopes.
  void finish(int64_t rows, int64_t vectors) {
    const Operand score = of_result(code_.score), seen = of_result(code_.seen), slope = of_result(code_.slope);
    const V hidden(-T(__builtin_inf()));
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t v = 0; v < vectors; ++v) {
        const auto load = [&](const Operand &x) __attribute__((always_inline)) {
          return V::load(reinterpret_cast<const T *>(x.at + r * x.row + v * x.step));
        };
        const int64_t at = at_ + r * scores_.stride + v * L;
        V s = score.at ? load(score) : V::load(s_ + at);
        if (seen.at) s = select((RawInt)load(seen).v, s, hidden);
        s.store(s_ + at);
        if (slopes_ && slope.at) load(slope).store(slopes_ + at);
      }
  }
  Operand of_result(const score::Place &place) const { return place.slot < 0 ? Operand{} : operand(Stage::pair, place); }

  const score::Code &code_;
  const score::Scores &scores_;
  T *const s_, *const slopes_;
  const Stage rows_, lanes_;
  char *head_, *in_lanes_, *in_pairs_, *in_rows_, *spread_;
  int64_t lane0_ = 0, row_ = 0, at_ = 0, pitch_ = 0; // of the block: its first lane; its first row among those at once; its place in s
  Operand out_, in_[3];
  score::Vectors n_{};
};

template <class T> void run_program(const score::Code &code, const score::Scores &scores, char *scratch, void *s, void *slopes) {
  ProgramRun<T>(code, scores, scratch, static_cast<T *>(s), static_cast<T *>(slopes)).run();
}

} // namespace strobe::inline STROBE_ISA
