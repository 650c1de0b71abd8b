#include "score/interval.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>
#include <numbers>

namespace strobe::score {
namespace {

using Wide = __int128;
constexpr int64_t kLeastInteger = std::numeric_limits<int64_t>::min(), kMostInteger = std::numeric_limits<int64_t>::max();
constexpr double kInfinite = std::numeric_limits<double>::infinity();

Bounds any_integer() { return {kLeastInteger, kMostInteger}; }
Bounds any_real() { return Bounds::reals(-kInfinite, kInfinite, true); }
Bounds either() { return {0, 1}; }

bool fits(Wide x) { return x >= kLeastInteger && x <= kMostInteger; }
// What so many bits cannot hold wraps around: if all values do so equally often, they are still a range.
template <int kBits> Bounds wrapped(Wide low, Wide high) {
  constexpr Wide least = -(Wide{1} << (kBits - 1));
  const Wide laps = (low - least) >> kBits;
  if (laps != (high - least) >> kBits) return {int64_t(least), int64_t(-least - 1)};
  return {int64_t(low - (laps << kBits)), int64_t(high - (laps << kBits))};
}
Bounds within(Wide low, Wide high) { return wrapped<64>(low, high); }
Bounds hull(const Bounds &a, const Bounds &b) { return {std::min(a.whole.low, b.whole.low), std::max(a.whole.high, b.whole.high)}; }
template <class T, class F> Bounds at_corners(Range a, Range b, F f) {
  const T corners[] = {f(a.low, b.low), f(a.low, b.high), f(a.high, b.low), f(a.high, b.high)};
  return within(*std::ranges::min_element(corners), *std::ranges::max_element(corners));
}

Wide floor_divided(Wide a, Wide b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
Wide magnitude(Range a) { return std::max(a.low < 0 ? -Wide{a.low} : Wide{a.low}, a.high < 0 ? -Wide{a.high} : Wide{a.high}); }
bool is_one(Range a) { return a.low == a.high; }

Bounds quotient(Range a, Range b) {
  const auto of = [&](Range by) { return at_corners<Wide>(a, by, [](Wide x, Wide y) { return floor_divided(x, y); }); };
  if (b.low > 0 || b.high < 0) return of(b);
  Bounds all{0, 0}; // by 0 it is 0
  if (b.high > 0) all = hull(all, of({1, b.high}));
  if (b.low < 0) all = hull(all, of({b.low, -1}));
  return all;
}

// The remainder of a floored division.
Bounds remainder(Range a, Range b) {
  if (is_one(a) && is_one(b)) {
    const Wide rest = b.low ? Wide{a.low} - floor_divided(a.low, b.low) * b.low : 0;
    return within(rest, rest);
  }
  if (b.low > 0) {
    if (is_one(b) && floor_divided(a.low, b.low) == floor_divided(a.high, b.low)) {
      const Wide start = floor_divided(a.low, b.low) * b.low;
      return within(a.low - start, a.high - start);
    }
    if (a.low >= 0) return a.high < b.low ? Bounds{a.low, a.high} : Bounds{0, std::min(a.high, b.high - 1)};
    return {0, b.high - 1};
  }
  if (b.high < 0) return {b.low + 1, 0};
  return {std::min<int64_t>(b.low < 0 ? b.low + 1 : 0, 0), std::max<int64_t>(b.high - 1, 0)}; // by 0 it is 0
}

Bounds truncated_remainder(Range a, Range b) {
  if (is_one(a) && is_one(b)) {
    const Wide rest = b.low ? Wide{a.low} % b.low : 0;
    return within(rest, rest);
  }
  if (a.low >= 0 && b.low > 0) return remainder(a, b);
  const Wide most = std::min(magnitude(a), std::max<Wide>(magnitude(b) - 1, 0));
  return within(a.low < 0 ? -most : 0, a.high > 0 ? most : 0);
}

// The bits that the values of a range do not share are all below this many.
uint64_t open_bits(Range a) {
  const uint64_t differing = uint64_t(a.low) ^ uint64_t(a.high);
  return differing ? ~uint64_t{0} >> std::countl_zero(differing) : 0;
}

Bounds of_bits(Op op, Range a, Range b) {
  const uint64_t open = open_bits(a) | open_bits(b), x = uint64_t(a.low), y = uint64_t(b.low);
  if (open >> 63) { // numbers of both signs
    if (op == Op::AND && a.low >= 0) return {0, a.high};
    if (op == Op::AND && b.low >= 0) return {0, b.high};
    uint64_t below = 0; // the bits in which some number differs from its sign
    for (const int64_t end : {a.low, a.high, b.low, b.high}) below |= uint64_t(end ^ (end >> 63));
    const int64_t most = int64_t(below ? ~uint64_t{0} >> std::countl_zero(below) : 0);
    return {~most, most};
  }
  const uint64_t shared = (op == Op::AND ? x & y : op == Op::OR ? x | y : x ^ y) & ~open;
  Range made = {int64_t(shared), int64_t(shared | open)};
  if (op == Op::AND && a.low >= 0 && b.low >= 0) made.high = std::min({made.high, a.high, b.high});
  if (op == Op::OR && a.low >= 0 && b.low >= 0) made.low = std::max({made.low, a.low, b.low});
  return {made.low, made.high};
}

Bounds shifted_left(Range a, Range by) {
  if (by.low >= 0 && by.high <= 63) return at_corners<Wide>(a, by, [](Wide x, Wide y) { return x * (Wide{1} << int(y)); });
  if (by.high < 0 || by.low > 63) return {0, 0};
  return any_integer();
}

Bounds shifted_right(Range a, Range by) {
  if (by.low >= 0 && by.high <= 63) return at_corners<Wide>(a, by, [](int64_t x, int64_t y) { return Wide{x >> y}; });
  if (by.high < 0 || by.low > 63) return {-(a.low < 0), -(a.high < 0)};
  return {std::min<int64_t>(a.low, 0), std::max<int64_t>(a.high, 0)};
}

double rounded_down(double x) {
  float f = float(x);
  if (double(f) > x) f = std::nextafter(f, -std::numeric_limits<float>::infinity());
  if (std::abs(f) < FLT_MIN) return f < 0 ? -FLT_MIN : 0;
  return f;
}
double rounded_up(double x) { return -rounded_down(-x); }
Bounds rounded(double least, double most, bool may_be_nan) { return Bounds::rounded(least, most, may_be_nan); }
// The same where engines compute approximately.
Bounds approximate(double least, double most, bool may_be_nan, double relative = 0x1p-10, double absolute = 0x1p-10) {
  if (std::isnan(least) || std::isnan(most)) return any_real();
  if (!std::isinf(least)) least -= std::abs(least) * relative + absolute;
  if (!std::isinf(most)) most += std::abs(most) * relative + absolute;
  return rounded(least, most, may_be_nan);
}
constexpr double kFewUlps = 0x1p-21;

bool is_finite(const Bounds &a) { return std::isfinite(a.real.least) && std::isfinite(a.real.most); }

template <class F> Bounds corners_of_reals(const Bounds &a, const Bounds &b, F f, double relative = 0) {
  if (!is_finite(a) || !is_finite(b)) return any_real();
  const double corners[] = {f(a.real.least, b.real.least), f(a.real.least, b.real.most), f(a.real.most, b.real.least),
                            f(a.real.most, b.real.most)};
  if (std::ranges::any_of(corners, [](double x) { return std::isnan(x); })) return any_real();
  return approximate(*std::ranges::min_element(corners), *std::ranges::max_element(corners), a.may_be_nan || b.may_be_nan, relative, 0);
}

Bounds divided(const Bounds &a, const Bounds &b) {
  if (b.real.least <= 0 && b.real.most >= 0) return any_real();
  return corners_of_reals(a, b, [](double x, double y) { return x / y; }, kFewUlps);
}

Bounds real_remainder(Op op, const Bounds &a, const Bounds &b) {
  const bool nan = a.may_be_nan || b.may_be_nan, by_zero = b.real.least <= 0 && b.real.most >= 0;
  if (!is_finite(a) || !is_finite(b) || by_zero) return any_real();
  const double error = std::max(std::abs(a.real.least), std::abs(a.real.most)) * 0x1p-20;
  if (op == Op::REMAINDER) return rounded(std::min(b.real.least, 0.0) - error, std::max(b.real.most, 0.0) + error, nan);
  const double most = std::max(std::abs(b.real.least), std::abs(b.real.most));
  return rounded((a.real.least < 0 ? -most : 0) - error, (a.real.most > 0 ? most : 0) + error, nan);
}

using Function1 = double (*)(double);
// A function that ascends, or descends, from `from` to `to`, and is NaN elsewhere.
Bounds monotone(const Bounds &a, Function1 f, bool ascends = true, double from = -kInfinite, double to = kInfinite) {
  if (a.real.most < from || a.real.least > to) return any_real();
  const double low = f(std::max(a.real.least, from)), high = f(std::min(a.real.most, to));
  const bool nan = a.may_be_nan || a.real.least < from || a.real.most > to;
  return ascends ? approximate(low, high, nan) : approximate(high, low, nan);
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double arccosh_from_1(double x) { return std::acosh(std::max(x, 1.0)); }

Bounds of_one_real(Op op, const Bounds &a) {
  const auto [least, most] = a.real;
  const bool nan = a.may_be_nan;
  auto exact = [&](Function1 f) { return Bounds::reals(f(least), f(most), nan); };
  switch (op) {
  case Op::NEGATE:
    return Bounds::reals(-most, -least, nan);
  case Op::ABSOLUTE:
    if (least >= 0) return a;
    return Bounds::reals(most <= 0 ? -most : 0, std::max(-least, most), nan);
  case Op::SIGN:
    if (nan) return Bounds::reals(-1, 1, true);
    return Bounds::reals((least > 0) - (least < 0), (most > 0) - (most < 0), false);
  case Op::FLOOR:
    return exact([](double x) { return std::floor(x); });
  case Op::CEIL:
    return exact([](double x) { return std::ceil(x); });
  case Op::TRUNC:
    return exact([](double x) { return std::trunc(x); });
  case Op::ROUND:
    return exact([](double x) { return std::nearbyint(x); });
  case Op::EXP:
    return monotone(a, [](double x) { return std::exp(x); });
  case Op::EXP2:
    return monotone(a, [](double x) { return std::exp2(x); });
  case Op::EXPM1:
    return monotone(a, [](double x) { return std::expm1(x); });
  case Op::LOG:
    return monotone(a, [](double x) { return std::log(x); }, true, 0);
  case Op::LOG2:
    return monotone(a, [](double x) { return std::log2(x); }, true, 0);
  case Op::LOG1P:
    return monotone(a, [](double x) { return std::log1p(x); }, true, -1);
  case Op::SQRT:
    if (most < 0) return any_real();
    return approximate(std::sqrt(std::max(least, 0.0)), std::sqrt(most), nan || least < 0, kFewUlps, 0);
  case Op::RSQRT:
    if (least <= 0) return any_real();
    return approximate(1 / std::sqrt(most), 1 / std::sqrt(least), nan, kFewUlps, 0);
  case Op::SIN:
  case Op::COS:
    return approximate(-1, 1, nan || !is_finite(a));
  case Op::ASIN:
    return monotone(a, [](double x) { return std::asin(x); }, true, -1, 1);
  case Op::ACOS:
    return monotone(a, [](double x) { return std::acos(x); }, false, -1, 1);
  case Op::ATAN:
    return monotone(a, [](double x) { return std::atan(x); });
  case Op::SINH:
    return monotone(a, [](double x) { return std::sinh(x); });
  case Op::COSH:
    return monotone(of_one_real(Op::ABSOLUTE, a), [](double x) { return std::cosh(x); });
  case Op::TANH:
    return monotone(a, [](double x) { return std::tanh(x); });
  case Op::ASINH:
    return monotone(a, [](double x) { return std::asinh(x); });
  case Op::ACOSH:
    return monotone(a, [](double x) { return std::acosh(x); }, true, 1);
  case Op::ATANH:
    return monotone(a, [](double x) { return std::atanh(x); }, true, -1, 1);
  case Op::ERF:
    return monotone(a, [](double x) { return std::erf(x); });
  case Op::ERFC:
    return monotone(a, [](double x) { return std::erfc(x); }, false);
  case Op::SIGMOID:
    return monotone(a, sigmoid);
  case Op::ARCCOSH_FROM_1:
    return monotone(a, arccosh_from_1);
  default:
    return any_real();
  }
}

Bounds of_two_reals(Op op, const Bounds &a, const Bounds &b) {
  const bool nan = a.may_be_nan || b.may_be_nan;
  switch (op) {
  case Op::ADD:
    return corners_of_reals(a, b, [](double x, double y) { return x + y; });
  case Op::SUBTRACT:
    return corners_of_reals(a, b, [](double x, double y) { return x - y; });
  case Op::MULTIPLY:
    return corners_of_reals(a, b, [](double x, double y) { return x * y; });
  case Op::DIVIDE:
    return divided(a, b);
  case Op::FLOOR_DIVIDE: {
    const Bounds q = divided(a, b);
    return is_finite(q) ? rounded(std::floor(q.real.least), std::floor(q.real.most), nan) : any_real();
  }
  case Op::REMAINDER:
  case Op::TRUNC_REMAINDER:
    return real_remainder(op, a, b);
  case Op::MINIMUM:
    return Bounds::reals(std::min(a.real.least, b.real.least), std::min(a.real.most, b.real.most), nan);
  case Op::MAXIMUM:
    return Bounds::reals(std::max(a.real.least, b.real.least), std::max(a.real.most, b.real.most), nan);
  case Op::POWER:
    if (a.real.least <= 0) return any_real();
    return corners_of_reals(a, b, [](double x, double y) { return std::pow(x, y); }, 0x1p-10);
  case Op::ATAN2:
    return approximate(-std::numbers::pi, std::numbers::pi, nan);
  default:
    return any_real();
  }
}

// The result of a < b, a <= b and so on, where each of a's values may meet each of b's: 1, 0 or both.
template <class T> Bounds order(Op op, T a_low, T a_high, T b_low, T b_high) {
  const auto decided = [](bool always, bool never) { return Bounds{always, !never}; };
  switch (op) {
  case Op::LESS:
    return decided(a_high < b_low, a_low >= b_high);
  case Op::LESS_EQUAL:
    return decided(a_high <= b_low, a_low > b_high);
  case Op::GREATER:
    return decided(a_low > b_high, a_high <= b_low);
  case Op::GREATER_EQUAL:
    return decided(a_low >= b_high, a_high < b_low);
  default: {
    const bool same = a_low == a_high && b_low == b_high && a_low == b_low, apart = a_high < b_low || b_high < a_low;
    return op == Op::EQUAL ? decided(same, apart) : decided(apart, same);
  }
  }
}

Bounds of_booleans(Op op, Range a, Range b, bool same) {
  switch (op) {
  case Op::AND:
    return {a.low & b.low, a.high & b.high};
  case Op::OR:
    return {a.low | b.low, a.high | b.high};
  case Op::NOT:
    return {1 - a.high, 1 - a.low};
  case Op::XOR:
  case Op::NOT_EQUAL:
    if (same) return {0, 0};
    return is_one(a) && is_one(b) ? Bounds{a.low ^ b.low, a.low ^ b.low} : either();
  default: // EQUAL
    if (same) return {1, 1};
    return is_one(a) && is_one(b) ? Bounds{a.low == b.low, a.low == b.low} : either();
  }
}

Bounds of_integers(Op op, Range a, Range b, bool same) {
  switch (op) {
  case Op::ADD:
    return within(Wide{a.low} + b.low, Wide{a.high} + b.high);
  case Op::SUBTRACT:
    return within(Wide{a.low} - b.high, Wide{a.high} - b.low);
  case Op::MULTIPLY:
    if (same) return within(a.low > 0 ? Wide{a.low} * a.low : a.high < 0 ? Wide{a.high} * a.high : 0, magnitude(a) * magnitude(a));
    return at_corners<Wide>(a, b, [](Wide x, Wide y) { return x * y; });
  case Op::FLOOR_DIVIDE:
    return quotient(a, b);
  case Op::REMAINDER:
    return remainder(a, b);
  case Op::TRUNC_REMAINDER:
    return truncated_remainder(a, b);
  case Op::MINIMUM:
    return {std::min(a.low, b.low), std::min(a.high, b.high)};
  case Op::MAXIMUM:
    return {std::max(a.low, b.low), std::max(a.high, b.high)};
  case Op::NEGATE:
    return within(-Wide{a.high}, -Wide{a.low});
  case Op::ABSOLUTE:
    if (a.low >= 0) return {a.low, a.high};
    return within(a.high <= 0 ? -Wide{a.high} : 0, magnitude(a));
  case Op::SIGN:
    return {(a.low > 0) - (a.low < 0), (a.high > 0) - (a.high < 0)};
  case Op::XOR:
    if (same) return {0, 0};
    [[fallthrough]];
  case Op::AND:
  case Op::OR:
    return of_bits(op, a, b);
  case Op::NOT:
    return {~a.high, ~a.low};
  case Op::SHIFT_LEFT:
    return shifted_left(a, b);
  case Op::SHIFT_RIGHT:
    return shifted_right(a, b);
  case Op::TO_REAL:
    return rounded(double(a.low), double(a.high), false);
  case Op::TO_INTEGER:
    return {a.low, a.high};
  case Op::TO_INT32:
    return wrapped<32>(a.low, a.high);
  case Op::TO_BOOLEAN:
    return {a.low > 0 || a.high < 0, a.low != 0 || a.high != 0};
  default:
    return order(op, a.low, a.high, b.low, b.high);
  }
}

// What is no real, of reals.
Bounds from_reals(Op op, const Bounds &a, const Bounds &b, bool same) {
  if (op == Op::TO_BOOLEAN) return {a.real.least > 0 || a.real.most < 0, a.real.least != 0 || a.real.most != 0 || a.may_be_nan};
  if (op == Op::TO_INTEGER) {
    constexpr double most = 0x1p62;
    if (a.may_be_nan || a.real.least < -most || a.real.most > most) return any_integer();
    return {int64_t(a.real.least), int64_t(a.real.most)};
  }
  Bounds made = order(op, a.real.least, a.real.most, b.real.least, b.real.most);
  if (same) made = order(op, 0, 0, 0, 0);
  if (a.may_be_nan || b.may_be_nan) { // NaN differs from every number, and is neither less nor greater
    if (op == Op::NOT_EQUAL)
      made.whole.high = 1;
    else
      made.whole.low = 0;
  }
  return made;
}

Bounds chosen(Kind kind, Range condition, const Bounds &a, const Bounds &b) {
  if (is_one(condition)) return condition.low ? a : b;
  if (kind != Kind::real) return hull(a, b);
  return Bounds::reals(std::min(a.real.least, b.real.least), std::max(a.real.most, b.real.most), a.may_be_nan || b.may_be_nan);
}

uint8_t argument(Op op) {
  switch (op) {
  case Op::BATCH:
    return Intervals::kBatch;
  case Op::HEAD:
    return Intervals::kHead;
  case Op::QUERY:
    return Intervals::kQuery;
  case Op::KEY:
    return Intervals::kKey;
  default:
    return 0;
  }
}

} // namespace

Bounds Bounds::rounded(double least, double most, bool may_be_nan) {
  if (!(least <= most)) return any_real(); // NaN alone
  return reals(rounded_down(least), rounded_up(most), may_be_nan);
}

Bounds Bounds::any(Kind kind) { return kind == Kind::real ? any_real() : kind == Kind::integer ? any_integer() : either(); }

Bounds result_bounds(const Node &node, Kind of, const Bounds *in, bool same) {
  switch (node.op) {
  case Op::REAL:
    return rounded(node.real, node.real, std::isnan(node.real));
  case Op::INTEGER:
  case Op::BOOLEAN:
    return {node.integer, node.integer};
  case Op::WHERE:
    return chosen(node.kind, in[0].whole, in[1], in[2]);
  default:
    break;
  }
  if (!node.count || node.op == Op::LOAD) return Bounds::any(node.kind);
  const Bounds none, &a = in[0], &b = node.count > 1 ? in[1] : none;
  if (of != Kind::real) {
    const bool logical = of == Kind::boolean && (node.count > 1 || node.op == Op::NOT);
    return logical ? of_booleans(node.op, a.whole, b.whole, same) : of_integers(node.op, a.whole, b.whole, same);
  }
  if (node.kind != Kind::real) return from_reals(node.op, a, b, same);
  return node.count > 1 ? of_two_reals(node.op, a, b) : of_one_real(node.op, a);
}

std::vector<Bounds> bounds_of_nodes(const Graph &graph, const KnownBounds &known) {
  std::vector<Bounds> all;
  all.reserve(size_t(graph.size()));
  for (int32_t n = 0; n < graph.size(); n++) { // inputs stand before
    const Node &node = graph[n];
    if (const std::optional<Bounds> more = known(n, all)) {
      all.push_back(*more);
      continue;
    }
    Bounds in[4];
    for (int32_t k = 0; k < node.count; k++) in[k] = all[size_t(node.inputs[size_t(k)])];
    const Kind of = node.count ? graph[node.inputs[0]].kind : node.kind;
    all.push_back(result_bounds(node, of, in, node.count > 1 && node.inputs[0] == node.inputs[1]));
  }
  return all;
}

Intervals::Intervals(const Graph &graph, int32_t result, const Captured *captured) {
  for (int32_t c = 0; c < STROBE_MOST_CAPTURED; c++) extrema_.emplace_back(captured[c]);
  const std::vector<bool> needed = graph.needed_by({result});
  using Key = std::pair<std::array<int32_t, 8>, std::pair<uint64_t, int64_t>>;
  std::map<Key, int32_t> known;
  std::vector<int32_t> at(size_t(result) + 1, -1);
  for (int32_t n = 0; n <= result; n++) {
    if (!needed[size_t(n)]) continue;
    Node node = graph[n];
    for (int32_t k = 0; k < node.count; k++) node.inputs[size_t(k)] = at[size_t(node.inputs[size_t(k)])];
    const auto &in = node.inputs;
    const Key key = {{int32_t(node.op), int32_t(node.kind), node.captured, node.count, in[0], in[1], in[2], in[3]},
                     {std::bit_cast<uint64_t>(node.real), node.integer}};
    const auto [place, is_new] = known.try_emplace(key, int32_t(nodes_.size()));
    at[size_t(n)] = place->second;
    if (!is_new) continue;
    nodes_.push_back(node);
    const int32_t own = place->second;
    uint8_t depends = argument(node.op);
    std::vector<int32_t> reads(in.begin(), in.begin() + node.count);
    for (int32_t k : reads) depends |= depends_[size_t(k)];
    depends_.push_back(depends);
    sums_.push_back(node.kind == Kind::integer ? sum_of(own) : Sum{});
    const bool of_two = node.count == 2 && nodes_[size_t(in[0])].kind == Kind::integer && node.op != Op::LOAD;
    const auto &terms = sums_.back().terms;
    const bool is_itself = terms.size() == 1 && terms[0].first == own;
    correlated_.push_back(of_two && !is_itself && share_terms(sums_[size_t(in[0])], sums_[size_t(in[1])]));
    if (correlated_.back())
      for (int32_t k : {in[0], in[1]})
        for (const auto &[term, factor] : sums_[size_t(k)].terms) reads.push_back(term);
    std::ranges::sort(reads);
    reads.erase(std::ranges::unique(reads).begin(), reads.end());
    reads_.push_back(std::move(reads));
  }
  values_.resize(nodes_.size());
}

Intervals::Sum Intervals::sum_of(int32_t n) const {
  const Node &node = nodes_[size_t(n)];
  const Sum itself = {0, {{n, 1}}};
  auto in = [&](int k) -> const Sum & { return sums_[size_t(node.inputs[size_t(k)])]; };
  auto combined = [&](int64_t of_first, int64_t of_second) {
    Sum made;
    const bool good = add(made, in(0), of_first) && (!of_second || add(made, in(1), of_second));
    return good ? made : itself;
  };
  constexpr int64_t most = int64_t{1} << 48;
  auto is_factor = [&](int k) { return in(k).terms.empty() && std::abs(in(k).constant) <= most; };
  switch (node.op) {
  case Op::INTEGER:
    return std::abs(double(node.integer)) < 0x1p62 ? Sum{node.integer, {}} : itself;
  case Op::ADD:
    return combined(1, 1);
  case Op::SUBTRACT:
    return combined(1, -1);
  case Op::NEGATE:
    return combined(-1, 0);
  case Op::MULTIPLY:
    if (is_factor(1)) return combined(in(1).constant, 0);
    if (is_factor(0)) {
      Sum made;
      return add(made, in(1), in(0).constant) ? made : itself;
    }
    return itself;
  case Op::SHIFT_LEFT:
    if (is_factor(1) && in(1).constant >= 0 && in(1).constant <= 48) return combined(int64_t{1} << in(1).constant, 0);
    return itself;
  default:
    return itself;
  }
}

bool Intervals::share_terms(const Sum &a, const Sum &b) {
  return std::ranges::any_of(
      a.terms, [&](const auto &x) { return std::ranges::any_of(b.terms, [&](const auto &y) { return x.first == y.first; }); });
}

bool Intervals::add(Sum &to, const Sum &from, int64_t factor) {
  constexpr Wide most_factor = Wide{1} << 48, most_constant = Wide{1} << 62;
  constexpr size_t most_terms = 16;
  auto small = [](Wide x, Wide most) { return x <= most && x >= -most; };
  const Wide constant = Wide{from.constant} * factor + to.constant;
  if (!small(constant, most_constant)) return false;
  to.constant = int64_t(constant);
  for (const auto &[node, of_node] : from.terms) {
    auto found = std::ranges::lower_bound(to.terms, node, {}, [](const auto &term) { return term.first; });
    if (found == to.terms.end() || found->first != node) found = to.terms.insert(found, {node, 0});
    const Wide sum = Wide{of_node} * factor + found->second;
    if (!small(sum, most_factor)) return false;
    if (sum == 0)
      to.terms.erase(found);
    else
      found->second = int64_t(sum);
  }
  return to.terms.size() <= most_terms;
}

bool Intervals::bounds_of(const Sum &sum, Range &made) const {
  Wide low = sum.constant, high = sum.constant;
  for (const auto &[node, factor] : sum.terms) {
    const Range &x = values_[size_t(node)].whole;
    low += Wide{factor} * (factor > 0 ? x.low : x.high), high += Wide{factor} * (factor > 0 ? x.high : x.low);
  }
  if (!fits(low) || !fits(high)) return false;
  made = {int64_t(low), int64_t(high)};
  return true;
}

void Intervals::evaluate(std::span<const int32_t> which, const Box &box) {
  for (int32_t n : which) values_[size_t(n)] = value(n, box);
}

Bounds Intervals::evaluate(const Box &box) {
  for (int32_t n = 0; n < int32_t(nodes_.size()); n++) values_[size_t(n)] = value(n, box);
  return values_.back();
}

Bounds Intervals::value(int32_t n, const Box &box) {
  const Node &node = nodes_[size_t(n)];
  auto of = [](Range r) { return Bounds{r.low, r.high}; };
  switch (node.op) {
  case Op::BATCH:
    return of(box.b);
  case Op::HEAD:
    return of(box.h);
  case Op::QUERY:
    return of(box.i);
  case Op::KEY:
    return of(box.j);
  case Op::OFFSET:
    return of(box.offset);
  case Op::LOAD:
    return element(node);
  default:
    break;
  }
  if (Bounds made; correlated_[size_t(n)] && by_sums(n, made)) return made;
  Bounds in[3];
  for (int32_t k = 0; k < node.count; k++) in[k] = values_[size_t(node.inputs[size_t(k)])];
  const Kind kind = node.count ? nodes_[size_t(node.inputs[0])].kind : node.kind;
  return result_bounds(node, kind, in, node.count > 1 && node.inputs[0] == node.inputs[1]);
}

Bounds Intervals::element(const Node &node) {
  Range at[4];
  for (int32_t k = 0; k < node.count; k++) at[k] = values_[size_t(node.inputs[size_t(k)])].whole;
  return extrema_[size_t(node.captured)].over(at, node.count);
}

bool Intervals::by_sums(int32_t n, Bounds &made) const {
  const Node &node = nodes_[size_t(n)];
  if (node.op == Op::ADD || node.op == Op::SUBTRACT) {
    Range sum;
    if (!bounds_of(sums_[size_t(n)], sum)) return false;
    made = {sum.low, sum.high};
    return true;
  }
  if (node.kind != Kind::boolean) return false;
  const size_t x = size_t(node.inputs[0]), y = size_t(node.inputs[1]); // a comparison: of a - b with 0, if none of the sums wraps around
  Range of_a, of_b, apart;
  Sum difference = sums_[x];
  if (!add(difference, sums_[y], -1) || !bounds_of(sums_[x], of_a) || !bounds_of(sums_[y], of_b) || !bounds_of(difference, apart))
    return false;
  made = order<int64_t>(node.op, apart.low, apart.high, 0, 0);
  return true;
}

} // namespace strobe::score
