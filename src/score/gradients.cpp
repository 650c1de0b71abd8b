// The positions that a value depends on, and the lines of the score matrix along which a LOAD reads one element.
#include "score/program.h"

namespace strobe::score {
namespace {

// How a value depends on the positions i of the query and j of the key: it is q i + k j, with integers q and k that wrap around as the
// values do, plus a function of those of i, j and i - j that `other` names.
struct Dependence {
  uint64_t q = 0, k = 0;
  unsigned other = kOfNone;

  // What the value is a function of, however it is used.
  unsigned all() const {
    const unsigned linear = q == 0 && k == 0 ? kOfNone : q + k == 0 ? kOfDifference : (q ? kOfQuery : kOfNone) | (k ? kOfKey : kOfNone);
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
  if (node.op == Op::SCORE) all.other = kOfScore;
  for (int32_t n = 0; n < node.count; n++) all.other |= in(n).all();
  return all;
}

} // namespace

std::vector<unsigned> positions_of(const Graph &graph) {
  std::vector<Dependence> known;
  std::vector<unsigned> all;
  for (const Node &node : graph.nodes()) known.push_back(of_node(node, known, graph)), all.push_back(known.back().all());
  return all;
}

Lines lines_of(const Graph &graph, int32_t load) {
  switch (positions_of(graph)[size_t(load)]) {
  case kOfNone:
  case kOfQuery:
    return Lines::rows;
  case kOfKey:
    return Lines::columns;
  case kOfDifference:
    return Lines::diagonals;
  default:
    return Lines::general;
  }
}

} // namespace strobe::score
