// Along which lines of the score matrix a LOAD reads one element.
#include "score/program.h"

namespace strobe::score {
namespace {

// How a value depends on the positions i of the query and j of the key: it is q i + k j, with integers q and k that wrap around as the
// values do, plus a function of those of i, j and i - j that `other` names.
struct Dependence {
  enum : unsigned { none = 0, query = 1, key = 2, difference = 4, score = 8 };
  uint64_t q = 0, k = 0;
  unsigned other = none;

  // What the value is a function of, however it is used.
  unsigned all() const {
    const unsigned linear = q == 0 && k == 0 ? none : q + k == 0 ? difference : (q ? query : none) | (k ? key : none);
    return linear | other;
  }
};

Dependence of_node(const Node &node, const std::vector<Dependence> &known, const Graph &graph) {
  const auto in = [&](int32_t n) -> const Dependence & { return known[size_t(node.inputs[size_t(n)])]; };
  const auto factor = [&](int32_t n, uint64_t f) { return Dependence{in(n).q * f, in(n).k * f, in(n).other}; };
  const auto sum = [](const Dependence &a, const Dependence &b) { return Dependence{a.q + b.q, a.k + b.k, a.other | b.other}; };
  if (node.kind == Kind::integer) {
    switch (node.op) {
    case Op::QUERY:
      return {.q = 1};
    case Op::KEY:
      return {.k = 1};
    case Op::ADD:
      return sum(in(0), in(1));
    case Op::SUBTRACT:
      return sum(in(0), factor(1, ~uint64_t{0}));
    case Op::NEGATE:
      return factor(0, ~uint64_t{0});
    case Op::MULTIPLY:
      for (const int32_t n : {0, 1})
        if (const Node &number = graph[node.inputs[size_t(n)]]; number.op == Op::INTEGER) return factor(1 - n, uint64_t(number.integer));
      break;
    case Op::TO_INTEGER: // of an integer
      if (graph[node.inputs[0]].kind == Kind::integer) return in(0);
      break;
    default:
      break;
    }
  }
  Dependence all;
  if (node.op == Op::SCORE) all.other = Dependence::score;
  for (int32_t n = 0; n < node.count; n++) all.other |= in(n).all();
  return all;
}

} // namespace

Lines lines_of(const Graph &graph, int32_t load) {
  std::vector<Dependence> known;
  for (int32_t n = 0; n <= load; n++) known.push_back(of_node(graph[n], known, graph));
  switch (known.back().all()) {
  case Dependence::none:
  case Dependence::query:
    return Lines::rows;
  case Dependence::key:
    return Lines::columns;
  case Dependence::difference:
    return Lines::diagonals;
  default:
    return Lines::general;
  }
}

} // namespace strobe::score
