#include <algorithm>
#include <span>

#include "score/program.h"

namespace strobe::score {
namespace {

constexpr std::pair<int32_t, Operation> kOperations[] = {
#define STROBE_OPERATION(name, number, inputs, takes, gives) {number, {#name, inputs, takes, gives}},
#include "strobe/operations.inc"
};

Kind kind_of(char letter) { return letter == 'B' ? Kind::boolean : letter == 'I' ? Kind::integer : Kind::real; }

} // namespace

const Operation *find_operation(int32_t number) {
  const auto found = std::ranges::find(kOperations, number, [](const auto &row) { return row.first; });
  return found == std::end(kOperations) ? nullptr : &found->second;
}

std::vector<bool> Graph::needed_by(const std::vector<int32_t> &roots) const {
  std::vector<bool> needed(nodes_.size());
  for (const int32_t root : roots)
    if (root >= 0) needed[size_t(root)] = true;
  for (size_t n = nodes_.size(); n-- > 0;) // inputs stand before
    for (int32_t i = 0; needed[n] && i < nodes_[n].count; i++) needed[size_t(nodes_[n].inputs[size_t(i)])] = true;
  return needed;
}

bool Graph::reads_score(const std::vector<int32_t> &roots) const {
  const std::vector<bool> needed = needed_by(roots);
  for (int32_t n = 0; n < size(); n++)
    if (needed[size_t(n)] && nodes_[size_t(n)].op == Op::SCORE) return true;
  return false;
}

int32_t Graph::add(const Node &node) {
  if (!is_constant(node.op)) {
    const auto &in = node.inputs;
    const Key key = {int32_t(node.op), int32_t(node.kind), node.captured, node.count, in[0], in[1], in[2], in[3]};
    const auto [at, is_new] = known_.try_emplace(key, size());
    if (!is_new) return at->second;
  }
  nodes_.push_back(node);
  return size() - 1;
}

int32_t Graph::add(Op op, std::initializer_list<int32_t> inputs) {
  Node node{.op = op, .kind = Kind::real, .count = int32_t(inputs.size())};
  std::ranges::copy(inputs, node.inputs.begin());
  const char gives = find_operation(int32_t(op))->gives[0];
  if (op == Op::WHERE)
    node.kind = nodes_[size_t(node.inputs[1])].kind;
  else
    node.kind = gives == 'S' ? nodes_[size_t(node.inputs[0])].kind : kind_of(gives);
  return add(node);
}

int32_t Graph::load(int32_t captured, Kind kind, const std::vector<int32_t> &indices) {
  Node node{.op = Op::LOAD, .kind = kind, .captured = captured, .count = int32_t(indices.size())};
  std::ranges::copy(indices, node.inputs.begin());
  return add(node);
}

int32_t Graph::real(double value) { return add(Node{.op = Op::REAL, .kind = Kind::real, .real = value}); }
int32_t Graph::fixed(double value) {
  const auto [at, is_new] = fixed_.try_emplace(value, size());
  return is_new ? real(value) : at->second;
}
int32_t Graph::folded(Op op, int32_t a, int32_t b) {
  const auto [at, is_new] = folded_.try_emplace({int32_t(op), a, b}, size());
  if (!is_new) return at->second;
  const double x = nodes_[size_t(a)].real, y = nodes_[size_t(b)].real;
  return real(op == Op::MULTIPLY ? x * y : op == Op::DIVIDE ? x / y : op == Op::ADD ? x + y : x == 0 ? 0 : x - 1);
}
int32_t Graph::integer(int64_t value) { return add(Node{.op = Op::INTEGER, .kind = Kind::integer, .integer = value}); }
int32_t Graph::boolean(bool value) { return add(Node{.op = Op::BOOLEAN, .kind = Kind::boolean, .integer = value}); }

} // namespace strobe::score
