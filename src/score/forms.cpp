#include "score/forms.h"

#include <cmath>
#include <map>
#include <optional>
#include <vector>

#include "attention/text.h"

namespace strobe::score {
namespace {

// Larger factors are infinite in float32, at the latest when multiplied by log2(e).
constexpr double kMost = 2e38;

// Looks at a graph from its result downwards.
class Matcher {
public:
  explicit Matcher(const Graph &graph) : graph(graph) {}

  // c in c tanh(x / c): either order of a product, x * (1 / c), constants of either sign.
  std::optional<BuiltIn> softcap(int32_t n) const {
    if (!is(n, Op::MULTIPLY)) return {};
    for (int32_t side : {0, 1}) {
      const std::optional<double> outer = constant(input(n, side));
      const int32_t tanh = input(n, 1 - side);
      if (!outer || !is(tanh, Op::TANH)) continue;
      const std::optional<double> divisor = divisor_of_score(input(tanh, 0));
      if (divisor && equal(*divisor, *outer) && std::abs(*outer) <= kMost) return BuiltIn{.form = Form::softcap, .cap = std::abs(*outer)};
    }
    return {};
  }

  // -beta arccosh(max(-x, 1)) - shift
  std::optional<BuiltIn> hyperbolic(int32_t n) const {
    double shift = 0;
    if (is(n, Op::SUBTRACT)) {
      if (const auto right = constant(input(n, 1))) {
        shift = *right, n = input(n, 0);
      } else if (const auto left = constant(input(n, 0))) {
        const auto factor = factor_of_distance(input(n, 1));
        return factor ? made(-*factor, -*left) : std::nullopt;
      }
    } else if (is(n, Op::ADD)) {
      for (int32_t side : {0, 1})
        if (const auto added = constant(input(n, side))) {
          const auto factor = factor_of_distance(input(n, 1 - side));
          return factor ? made(*factor, -*added) : std::nullopt;
        }
    }
    const auto factor = factor_of_distance(n);
    return factor ? made(*factor, shift) : std::nullopt;
  }

private:
  bool is(int32_t n, Op op) const { return graph[n].op == op; }
  int32_t input(int32_t n, int32_t i) const { return graph[n].inputs[size_t(i)]; }

  // Each node is looked at once, however many ways lead to it.
  using Known = std::map<int32_t, std::optional<double>>;
  template <class F> std::optional<double> once(Known &known, int32_t n, F &&find) const {
    const auto at = known.find(n);
    return at != known.end() ? at->second : known[n] = find();
  }

  std::optional<double> constant(int32_t n) const {
    return once(constants, n, [&] { return constant_now(n); });
  }
  std::optional<double> constant_now(int32_t n) const {
    if (is(n, Op::REAL)) return graph[n].real;
    if (is(n, Op::NEGATE)) {
      if (const auto inner = constant(input(n, 0))) return -*inner;
    }
    if (is(n, Op::DIVIDE)) {
      const auto above = constant(input(n, 0)), below = constant(input(n, 1));
      if (above && below) return *above / *below;
    }
    return {};
  }

  // Equal but for the rounding of a reciprocal.
  static bool equal(double a, double b) { return std::isfinite(a) && a != 0 && std::abs(a - b) <= 0x1p-51 * std::abs(a); }

  // d in x / d, x * (1 / d) or -x / d.
  std::optional<double> divisor_of_score(int32_t n) const {
    if (is(n, Op::SCORE)) return 1.0;
    if (is(n, Op::NEGATE)) {
      if (const auto inner = divisor_of_score(input(n, 0))) return -*inner;
    }
    if (is(n, Op::DIVIDE) && is(input(n, 0), Op::SCORE)) return constant(input(n, 1));
    if (!is(n, Op::MULTIPLY)) return {};
    for (int32_t side : {0, 1})
      if (is(input(n, side), Op::SCORE)) {
        const auto factor = constant(input(n, 1 - side));
        if (factor && *factor != 0) return 1 / *factor;
      }
    return {};
  }

  bool is_minus_score(int32_t n) const {
    if (is(n, Op::NEGATE)) return is(input(n, 0), Op::SCORE);
    const auto divisor = is(n, Op::MULTIPLY) ? divisor_of_score(n) : std::nullopt;
    return divisor && *divisor == -1;
  }
  bool is_distance(int32_t n) const {
    if (is(n, Op::ARCCOSH_FROM_1)) return is_minus_score(input(n, 0));
    if (!is(n, Op::ACOSH) || !is(input(n, 0), Op::MAXIMUM)) return false;
    for (int32_t side : {0, 1})
      if (constant(input(input(n, 0), side)) == 1.0) return is_minus_score(input(input(n, 0), 1 - side));
    return false;
  }
  std::optional<double> factor_of_distance(int32_t n) const {
    return once(factors, n, [&] { return factor_now(n); });
  }
  std::optional<double> factor_now(int32_t n) const {
    if (is_distance(n)) return 1.0;
    if (is(n, Op::NEGATE)) {
      if (const auto inner = factor_of_distance(input(n, 0))) return -*inner;
    }
    if (is(n, Op::DIVIDE)) {
      const auto above = factor_of_distance(input(n, 0)), below = constant(input(n, 1));
      if (above && below) return *above / *below;
    }
    if (!is(n, Op::MULTIPLY)) return {};
    for (int32_t side : {0, 1}) {
      const auto factor = constant(input(n, side)), inner = factor_of_distance(input(n, 1 - side));
      if (factor && inner) return *factor * *inner;
    }
    return {};
  }

  static std::optional<BuiltIn> made(double factor, double shift) {
    if (!(factor < 0 && factor >= -kMost && std::abs(shift) <= kMost)) return {};
    return BuiltIn{.form = Form::hyperbolic, .beta = -factor, .shift = shift};
  }

  const Graph &graph;
  mutable Known constants, factors;
};

// Finds a sum of a form and a product of a distance and a factor that is the same for all pairs of a head. It may add nodes to the graph.
class PenaltyMatcher {
public:
  explicit PenaltyMatcher(Graph &graph) : graph(graph) {
    for (const Node &x : graph.nodes()) {
      bool varies = x.op == Op::SCORE || x.op == Op::QUERY || x.op == Op::KEY;
      for (int32_t i = 0; i < x.count; i++) varies = varies || varies_[size_t(x.inputs[size_t(i)])];
      varies_.push_back(varies);
    }
  }

  std::optional<Penalty> penalty(int32_t n) {
    if (!is(n, Op::ADD) && !is(n, Op::SUBTRACT)) return {};
    for (int32_t side : {0, 1}) {
      if (side && is(n, Op::SUBTRACT)) break;
      const std::optional<BuiltIn> rest = form(input(n, side));
      if (!rest) continue;
      if (std::optional<Product> added = product(input(n, 1 - side))) {
        if (is(n, Op::ADD)) added->negative = !added->negative; // rest + x is rest - (-x)
        const int32_t slope = added->negative ? graph.add(Op::NEGATE, {added->factor}) : added->factor;
        return Penalty{.slope = slope, .has_sign = added->has_sign, .counts_offset = added->counts_offset, .rest = *rest};
      }
    }
    return {};
  }

private:
  struct Distance {
    bool negative, has_sign, counts_offset; // (negative ? -1 : 1) * (has_sign ? d : |d|), d = i - j, or i + offset - j
  };
  struct Product : Distance {
    int32_t factor;
  };

  bool is(int32_t n, Op op) const { return graph[n].op == op; }
  int32_t input(int32_t n, int32_t i) const { return graph[n].inputs[size_t(i)]; }
  bool is_sum(int32_t n, Op a, Op b) const {
    return is(n, Op::ADD) && ((is(input(n, 0), a) && is(input(n, 1), b)) || (is(input(n, 0), b) && is(input(n, 1), a)));
  }

  std::optional<BuiltIn> form(int32_t n) const {
    if (is(n, Op::SCORE)) return BuiltIn{};
    const Matcher matcher(graph);
    const auto softcap = matcher.softcap(n);
    return softcap ? softcap : matcher.hyperbolic(n);
  }

  std::optional<Distance> distance(int32_t n) const {
    if (is(n, Op::TO_REAL)) return distance(input(n, 0));
    if (is(n, Op::NEGATE) || is(n, Op::ABSOLUTE)) {
      auto inner = distance(input(n, 0));
      if (!inner) return {};
      if (is(n, Op::NEGATE)) return Distance{!inner->negative, inner->has_sign, inner->counts_offset};
      return Distance{false, false, inner->counts_offset};
    }
    if (is(n, Op::ADD))
      for (int32_t side : {0, 1})
        if (is(input(n, side), Op::OFFSET)) { // (i - j) + offset
          const auto inner = difference(input(n, 1 - side));
          if (inner && !inner->negative && !inner->counts_offset) return Distance{false, true, true};
        }
    return difference(n);
  }
  std::optional<Distance> difference(int32_t n) const {
    if (!is(n, Op::SUBTRACT)) return {};
    for (int32_t side : {0, 1}) {
      const int32_t query = input(n, side);
      const bool counts_offset = is_sum(query, Op::QUERY, Op::OFFSET);
      if ((counts_offset || is(query, Op::QUERY)) && is(input(n, 1 - side), Op::KEY)) return Distance{side == 1, true, counts_offset};
    }
    return {};
  }

  std::optional<Product> product(int32_t n) {
    if (const auto d = distance(n)) return Product{*d, graph.real(1)};
    if (is(n, Op::NEGATE)) {
      auto inner = product(input(n, 0));
      if (inner) inner->negative = !inner->negative;
      return inner;
    }
    if (!is(n, Op::MULTIPLY) || graph[n].kind != Kind::real) return {};
    for (int32_t side : {0, 1}) {
      const int32_t factor = input(n, side), other = input(n, 1 - side);
      if (varies_[size_t(factor)]) continue;
      if (const auto d = distance(other)) return Product{*d, factor};
    }
    return {};
  }

  Graph &graph;
  std::vector<bool> varies_; // of each of the caller's nodes: whether it depends on the pair, not on its sequence and head alone
};

} // namespace

void check_forms(const strobe_attention &a, Reasons &reasons) {
  if (!(a.softcap >= 0 && std::isfinite(a.softcap)))
    reasons.add("softcap", strobe::Code::value, "{0}; accepted is 0 (none) or a positive finite number", a.softcap);
  if (a.score == STROBE_DOT) {
    for (auto [field, value] : {std::pair{"beta", a.beta}, {"shift", a.shift}})
      if (value != 0)
        reasons.add(field, strobe::Code::excluded, "{0} with a score of q.k itself; accepted is 0, or a hyperbolic score", value);
  } else if (a.score == STROBE_HYPERBOLIC) {
    if (!(a.beta > 0 && std::isfinite(a.beta)))
      reasons.add("beta", strobe::Code::value, "{0}; accepted with a hyperbolic score is a positive finite number", a.beta);
    if (!std::isfinite(a.shift)) reasons.add("shift", strobe::Code::value, "{0}; accepted is any finite number", a.shift);
    if (a.softcap != 0) reasons.add("softcap", strobe::Code::excluded, "{0} with a hyperbolic score; accepted is 0", a.softcap);
  } else {
    reasons.add("score", strobe::Code::value, "{0}; accepted is {1} (q.k) or {2} (hyperbolic)", a.score, int(STROBE_DOT),
                int(STROBE_HYPERBOLIC));
  }
  if (!a.score_function) return;
  if (a.softcap != 0)
    reasons.add("score_function", strobe::Code::excluded, "given beside {0}; accepted is one of the two", Argument{"softcap"});
  if (a.score == STROBE_HYPERBOLIC)
    reasons.add("score_function", strobe::Code::excluded, "given with a hyperbolic score; accepted is one of the two");
}

void check_range(const strobe_attention &a, DType of_q, Reasons &reasons) {
  for (auto [field, value] : {std::pair{"scale", a.scale}, {"softcap", a.softcap}, {"beta", a.beta}, {"shift", a.shift}})
    if (std::isfinite(value) && std::abs(value) > kMost)
      reasons.add(field, strobe::Code::value, "{0}; accepted for {1} of {2} is at most {3}", value, Argument{"q"}, of_q, kMost);
}

BuiltIn asked_form(const strobe_attention &a) {
  if (a.score == STROBE_HYPERBOLIC) return {.form = Form::hyperbolic, .beta = a.beta, .shift = a.shift};
  if (a.softcap > 0) return {.form = Form::softcap, .cap = a.softcap};
  return {};
}

void set_form(Program &p, const BuiltIn &built_in) {
  static_cast<BuiltIn &>(p) = built_in;
  Graph &g = p.graph;
  if (p.form == Form::softcap) {
    const int32_t c = g.real(p.cap);
    p.score = g.add(Op::MULTIPLY, {c, g.add(Op::TANH, {g.add(Op::DIVIDE, {g.add(Op::SCORE), c})})});
  } else if (p.form == Form::hyperbolic) {
    const int32_t distance = g.add(Op::ARCCOSH_FROM_1, {g.add(Op::NEGATE, {g.add(Op::SCORE)})});
    p.score = g.add(Op::SUBTRACT, {g.add(Op::MULTIPLY, {g.real(-p.beta), distance}), g.real(p.shift)});
  } else {
    p.score = -1;
  }
}

void match(Program &p) {
  if (p.score < 0) return;
  if (p.graph[p.score].op == Op::SCORE) return set_form(p, {});
  const Matcher matcher(p.graph);
  if (const auto softcap = matcher.softcap(p.score))
    set_form(p, *softcap);
  else if (const auto hyperbolic = matcher.hyperbolic(p.score))
    set_form(p, *hyperbolic);
  else
    p.form = Form::general, p.penalty = PenaltyMatcher(p.graph).penalty(p.score).value_or(Penalty{});
}

namespace {

// The score less slope |i + offset - j|. In a part, the slopes are those of its own sequences and heads.
int32_t less_alibi(Graph &g, int32_t score, const AlibiSlopes &slopes, int32_t &slope) {
  const auto index = [&](Op op, int64_t first) {
    const int32_t n = g.add(op);
    return slopes.in_part ? g.add(Op::SUBTRACT, {n, g.integer(first)}) : n;
  };
  std::vector<int32_t> indices;
  if (slopes.rank == 2) indices.push_back(index(Op::BATCH, slopes.first_batch));
  indices.push_back(index(Op::HEAD, slopes.first_head));
  slope = g.load(kSlopesRead, Kind::real, indices);
  const int32_t difference = g.add(Op::SUBTRACT, {g.add(Op::ADD, {g.add(Op::QUERY), g.add(Op::OFFSET)}), g.add(Op::KEY)});
  return g.add(Op::SUBTRACT, {score, g.add(Op::MULTIPLY, {slope, g.add(Op::TO_REAL, {g.add(Op::ABSOLUTE, {difference})})})});
}

} // namespace

void add_alibi(Program &p, const AlibiSlopes &slopes) {
  if (!slopes.rank) return;
  Penalty added{.counts_offset = true, .is_option = true, .rest = p, .rest_score = p.score};
  if (p.given) {
    int32_t unused;
    Graph graph = *p.given;
    p.given_score = less_alibi(graph, p.given_score, slopes, unused);
    p.given = std::make_shared<const Graph>(std::move(graph));
  }
  p.score = less_alibi(p.graph, p.score < 0 ? p.graph.add(Op::SCORE) : p.score, slopes, added.slope);
  static_cast<BuiltIn &>(p) = {.form = Form::general}, p.penalty = added;
}

std::vector<std::pair<const char *, std::string>> in_words(const Program &p) {
  std::vector<std::pair<const char *, std::string>> lines;
  const BuiltIn &form = p.penalty.is_option ? p.penalty.rest : p;
  const int32_t score = p.penalty.is_option ? p.penalty.rest_score : p.score;
  if (form.form == Form::softcap) lines.emplace_back("softcap", text(form.cap));
  if (form.form == Form::hyperbolic) lines.emplace_back("score", text("hyperbolic: -", form.beta, " arccosh(max(-x, 1)) - ", form.shift));
  if (form.form == Form::general) lines.emplace_back("score", "f(x, b, h, i, j) = " + formula(p.graph, score));
  if (form.form == Form::general && p.slope >= 0) lines.emplace_back("df/dx", formula(p.graph, p.slope));
  if (p.seen >= 0) lines.emplace_back("mask", "g(b, h, i, j) = " + formula(p.graph, p.seen));
  return lines;
}

} // namespace strobe::score
