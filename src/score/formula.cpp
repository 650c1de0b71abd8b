#include <string_view>

#include "attention/text.h"
#include "score/program.h"

namespace strobe::score {
namespace {

// How an operation is written: between its inputs, with a precedence, or as a function.
struct Infix {
  Op op;
  const char *sign;
  int precedence;
};
constexpr Infix kInfix[] = {
    {Op::OR, "|", 1},
    {Op::XOR, "^", 2},
    {Op::AND, "&", 3},
    {Op::EQUAL, "==", 4},
    {Op::NOT_EQUAL, "!=", 4},
    {Op::LESS, "<", 5},
    {Op::LESS_EQUAL, "<=", 5},
    {Op::GREATER, ">", 5},
    {Op::GREATER_EQUAL, ">=", 5},
    {Op::SHIFT_LEFT, "<<", 6},
    {Op::SHIFT_RIGHT, ">>", 6},
    {Op::ADD, "+", 7},
    {Op::SUBTRACT, "-", 7},
    {Op::MULTIPLY, "*", 8},
    {Op::DIVIDE, "/", 8},
    {Op::FLOOR_DIVIDE, "//", 8},
    {Op::REMAINDER, "%", 8},
};
constexpr int kPrefix = 9, kWhole = 10;

const char *argument_name(Op op) {
  switch (op) {
  case Op::SCORE:
    return "x";
  case Op::BATCH:
    return "b";
  case Op::HEAD:
    return "h";
  case Op::QUERY:
    return "i";
  case Op::KEY:
    return "j";
  case Op::OFFSET:
    return "offset";
  default:
    return nullptr;
  }
}

std::string lower(std::string_view name) {
  std::string text(name);
  for (char &c : text)
    if (c >= 'A' && c <= 'Z') c = char(c - 'A' + 'a');
  return text;
}

struct Written {
  std::string text;
  int precedence;
};

std::string within(const Written &w, int least) { return w.precedence < least ? "(" + w.text + ")" : w.text; }

Written written(const Graph &graph, int32_t n, const std::vector<Written> &done) {
  const Node &node = graph[n];
  auto in = [&](int32_t i) -> const Written & { return done[size_t(node.inputs[size_t(i)])]; };
  auto listed = [&] {
    std::string all;
    for (int32_t i = 0; i < node.count; i++) all += (i ? ", " : "") + in(i).text;
    return all;
  };
  if (const char *name = argument_name(node.op)) return {name, kWhole};
  for (const Infix &infix : kInfix)
    if (infix.op == node.op)
      return {text(within(in(0), infix.precedence), " ", infix.sign, " ", within(in(1), infix.precedence + 1)), infix.precedence};
  switch (node.op) {
  case Op::REAL:
    return {text(node.real), node.real < 0 ? kPrefix : kWhole};
  case Op::INTEGER:
    return {text(node.integer), node.integer < 0 ? kPrefix : kWhole};
  case Op::BOOLEAN:
    return {node.integer ? "true" : "false", kWhole};
  case Op::LOAD:
    return {text("captured_", node.captured, node.count ? "[" + listed() + "]" : ""), kWhole};
  case Op::NEGATE:
    return {"-" + within(in(0), kPrefix + 1), kPrefix};
  case Op::NOT:
    return {"~" + within(in(0), kPrefix + 1), kPrefix};
  case Op::TO_REAL:
    return {text("real(", in(0).text, ")"), kWhole};
  case Op::TO_INTEGER:
    return {text("integer(", in(0).text, ")"), kWhole};
  case Op::TO_BOOLEAN:
    return {text("boolean(", in(0).text, ")"), kWhole};
  default:
    return {text(lower(find_operation(int32_t(node.op))->name), "(", listed(), ")"), kWhole};
  }
}

} // namespace

std::string formula(const Graph &graph, int32_t node) {
  std::vector<int32_t> uses(size_t(node) + 1);
  uses[size_t(node)] = 1;
  for (int32_t n = node; n >= 0; n--)
    for (int32_t i = 0; uses[size_t(n)] && i < graph[n].count; i++) uses[size_t(graph[n].inputs[size_t(i)])]++;
  std::string before;
  int32_t names = 0;
  std::vector<Written> done(size_t(node) + 1);
  for (int32_t n = 0; n <= node; n++) {
    if (!uses[size_t(n)]) continue;
    done[size_t(n)] = written(graph, n, done);
    if (uses[size_t(n)] < 2 || !graph[n].count) continue;
    const std::string name = text("t", names++);
    before += text(name, " = ", done[size_t(n)].text, "; ");
    done[size_t(n)] = {name, kWhole};
  }
  return before + done[size_t(node)].text;
}

} // namespace strobe::score
