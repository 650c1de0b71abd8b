#include "score/interval.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace strobe::score {
namespace {

using Wide = __int128;
constexpr int64_t kLeastInteger = std::numeric_limits<int64_t>::min(), kMostInteger = std::numeric_limits<int64_t>::max();

bool fits(Wide x) { return x >= kLeastInteger && x <= kMostInteger; }

#define STROBE_OPERATION(name, number, inputs, takes, gives) static_assert(bounds::name == number);
#include "strobe/operations.inc"
static_assert(int(Kind::boolean) == bounds::kBoolean && int(Kind::integer) == bounds::kInteger && int(Kind::real) == bounds::kReal);

// The host's functions for kernels/attention/bounds.h.
struct Mathematics {
  static constexpr int32_t kFunctions = bounds::kAllFunctions;
  static double float_below(double x) {
    const float f = float(x);
    return double(f) > x ? std::nextafter(f, -std::numeric_limits<float>::infinity()) : f;
  }
#define STROBE_FUNCTION(name)                                                                                                              \
  static double name(double x) { return std::name(x); }
  STROBE_BOUNDS_FUNCTIONS(STROBE_FUNCTION)
#undef STROBE_FUNCTION
};

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

Bounds rounded_bounds(double least, double most, bool may_be_nan) { return bounds::rounded<Mathematics>(least, most, may_be_nan); }

Bounds result_bounds(const Node &node, Kind of, const Bounds *in, bool same) {
  switch (node.op) {
  case Op::REAL:
    return rounded_bounds(node.real, node.real, std::isnan(node.real));
  case Op::INTEGER:
  case Op::BOOLEAN:
    return bounds::integers(node.integer, node.integer);
  default:
    break;
  }
  if (!node.count || node.op == Op::LOAD) return any_bounds(node.kind);
  const auto input = [&](int32_t k) { return k < node.count ? in[k] : bounds::integers(0, 0); };
  return bounds::result<Mathematics>(int32_t(node.op), int32_t(node.kind), int32_t(of), node.count > 1, same, input(0), input(1), input(2));
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
    Bounds in[4] = {};
    for (int32_t k = 0; k < 3 && k < node.count; k++) in[k] = all[size_t(node.inputs[size_t(k)])];
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
  auto of = [](Range r) { return bounds::integers(r.low, r.high); };
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
  if (Bounds made{}; correlated_[size_t(n)] && by_sums(n, made)) return made;
  Bounds in[3];
  for (int32_t k = 0; k < 3 && k < node.count; k++) in[k] = values_[size_t(node.inputs[size_t(k)])];
  const Kind kind = node.count ? nodes_[size_t(node.inputs[0])].kind : node.kind;
  return result_bounds(node, kind, in, node.count > 1 && node.inputs[0] == node.inputs[1]);
}

Bounds Intervals::element(const Node &node) {
  Range at[4] = {};
  for (int32_t k = 0; k < node.count; k++) at[k] = values_[size_t(node.inputs[size_t(k)])].whole;
  return extrema_[size_t(node.captured)].over(at, node.count);
}

std::vector<Intervals::Sum> Intervals::sums_for(int32_t n) const {
  const Node &node = nodes_[size_t(n)];
  if (!correlated_[size_t(n)]) return {};
  if (node.op == Op::ADD || node.op == Op::SUBTRACT) return {sums_[size_t(n)]};
  if (node.kind != Kind::boolean) return {};
  const size_t x = size_t(node.inputs[0]), y = size_t(node.inputs[1]);
  Sum difference = sums_[x];
  if (!add(difference, sums_[y], -1)) return {};
  return {sums_[x], sums_[y], difference};
}

bool Intervals::by_sums(int32_t n, Bounds &made) const {
  const Node &node = nodes_[size_t(n)];
  if (node.op == Op::ADD || node.op == Op::SUBTRACT) {
    Range sum{};
    if (!bounds_of(sums_[size_t(n)], sum)) return false;
    made = bounds::integers(sum.low, sum.high);
    return true;
  }
  if (node.kind != Kind::boolean) return false;
  const size_t x = size_t(node.inputs[0]), y = size_t(node.inputs[1]); // a comparison: of a - b with 0, if none of the sums wraps around
  Range of_a{}, of_b{}, apart{};
  Sum difference = sums_[x];
  if (!add(difference, sums_[y], -1) || !bounds_of(sums_[x], of_a) || !bounds_of(sums_[y], of_b) || !bounds_of(difference, apart))
    return false;
  made = bounds::order<int64_t>(int32_t(node.op), apart.low, apart.high, 0, 0);
  return true;
}

} // namespace strobe::score
