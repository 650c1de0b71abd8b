// The derivative of a graph's node, as further nodes of the graph: forwards, from the variable to the result. What a WHERE hides then
// stays hidden, infinities included, because the derivative of a WHERE is a WHERE itself. At kinks it is PyTorch's.
#include <map>
#include <numbers>

#include "score/program.h"

namespace strobe::score {
namespace {

constexpr int32_t kOne = -1;

// scale * factor, where scale is a constant: constants are multiplied here, once, and never by a kernel.
struct Term {
  bool zero = false;
  int32_t scale = kOne, factor = kOne; // nodes
};
constexpr Term kZero = {.zero = true};

class Differentiation {
public:
  explicit Differentiation(Graph &graph) : g(graph) {}

  Term of(int32_t result, int32_t by) { return of(result, {{by, kOne}}); }
  // direction: nodes, each with its tangent.
  Term of(int32_t result, const std::vector<std::pair<int32_t, int32_t>> &direction) {
    std::map<int32_t, int32_t> tangents(direction.begin(), direction.end());
    std::vector<Term> of_node(size_t(result) + 1, kZero);
    for (int32_t n = 0; n <= result; n++) {
      const Node node = g[n]; // a copy: the graph grows
      if (const auto tangent = tangents.find(n); tangent != tangents.end())
        of_node[size_t(n)] = {.factor = tangent->second};
      else if (node.kind == Kind::real)
        of_node[size_t(n)] = rule(n, node, [&](int32_t i) {
          const int32_t in = node.inputs[size_t(i)];
          return g[in].kind == Kind::real ? of_node[size_t(in)] : kZero;
        });
    }
    return of_node[size_t(result)];
  }

  int32_t node(Term t) {
    if (t.zero) return constant(0);
    if (t.scale == kOne && t.factor == kOne) return constant(1);
    if (t.scale == kOne) return t.factor;
    return t.factor == kOne ? t.scale : g.add(Op::MULTIPLY, {t.factor, t.scale});
  }

private:
  int32_t constant(double value) { return g.fixed(value); }
  bool is_constant(int32_t n) const { return g[n].op == Op::REAL; }
  int32_t number(int32_t scale) { return scale == kOne ? constant(1) : scale; }
  int32_t op(Op name, int32_t x) { return g.add(name, {x}); }
  int32_t op(Op name, int32_t x, int32_t y) { return g.add(name, {x, y}); }
  int32_t square(int32_t x) { return op(Op::MULTIPLY, x, x); }

  Term scaled(Term t, int32_t by) {
    if (!t.zero) t.scale = t.scale == kOne ? by : g.folded(Op::MULTIPLY, t.scale, by);
    return t;
  }
  Term scaled(Term t, double by) { return t.zero ? t : scaled(t, constant(by)); }
  Term times(Term t, int32_t by) {
    if (t.zero) return t;
    if (is_constant(by)) return scaled(t, by);
    t.factor = t.factor == kOne ? by : op(Op::MULTIPLY, t.factor, by);
    return t;
  }
  Term over(Term t, int32_t by) {
    if (t.zero) return t;
    if (is_constant(by)) return scaled(t, g.folded(Op::DIVIDE, constant(1), by));
    t.factor = op(Op::DIVIDE, t.factor == kOne ? constant(1) : t.factor, by);
    return t;
  }
  Term sum(Term a, Term b) {
    if (a.zero || b.zero) return a.zero ? b : a;
    if (a.factor == b.factor) return {.scale = g.folded(Op::ADD, number(a.scale), number(b.scale)), .factor = a.factor};
    return {.factor = op(Op::ADD, node(a), node(b))};
  }
  Term difference(Term a, Term b) {
    if (a.zero || b.zero || a.factor == b.factor) return sum(a, scaled(b, -1.0));
    return {.factor = op(Op::SUBTRACT, node(a), node(b))};
  }
  Term where(int32_t condition, Term a, Term b) {
    if (a.zero && b.zero) return kZero;
    if (!a.zero && !b.zero && a.scale == b.scale && a.factor == b.factor) return a;
    return {.factor = g.add(Op::WHERE, {condition, node(a), node(b)})};
  }

  // in(i): the derivative of the node's input i.
  template <class In> Term rule(int32_t y, const Node &node, In &&in) {
    const int32_t a = node.inputs[0], b = node.inputs[1];
    switch (node.op) {
    case Op::ADD:
      return sum(in(0), in(1));
    case Op::SUBTRACT:
      return difference(in(0), in(1));
    case Op::MULTIPLY:
      return a == b ? scaled(times(in(0), a), 2.0) : sum(times(in(0), b), times(in(1), a));
    case Op::DIVIDE:
      return over(difference(in(0), times(in(1), y)), b);
    case Op::REMAINDER:
      return in(1).zero ? in(0) : difference(in(0), times(in(1), op(Op::FLOOR_DIVIDE, a, b)));
    case Op::TRUNC_REMAINDER:
      return in(1).zero ? in(0) : difference(in(0), times(in(1), op(Op::TRUNC, op(Op::DIVIDE, a, b))));
    case Op::MINIMUM:
      return chosen(Op::LESS, Op::GREATER, a, in(0), b, in(1));
    case Op::MAXIMUM:
      return chosen(Op::GREATER, Op::LESS, a, in(0), b, in(1));
    case Op::NEGATE:
      return scaled(in(0), -1.0);
    case Op::ABSOLUTE:
      return in(0).zero ? kZero : times(in(0), op(Op::SIGN, a));
    case Op::POWER:
      return sum(power_by_base(in(0), a, b), power_by_exponent(in(1), a, b, y));
    case Op::WHERE:
      return where(a, in(1), in(2));
    case Op::ATAN2:
      return in(0).zero && in(1).zero ? kZero : over(difference(times(in(0), b), times(in(1), a)), op(Op::ADD, square(a), square(b)));
    case Op::TO_REAL: // of a real; other kinds have no derivative
      return in(0);
    default:
      return node.count == 1 && !in(0).zero ? unary(node.op, a, y, in(0)) : kZero;
    }
  }

  // a, where the first comparison holds, b, where the second does; of equal ones each has a half.
  Term chosen(Op is_a, Op is_b, int32_t a, Term da, int32_t b, Term db) {
    if (da.zero && db.zero) return kZero;
    return where(op(is_a, a, b), da, where(op(is_b, a, b), db, scaled(sum(da, db), 0.5)));
  }

  // b a^(b - 1), and 0 if b is 0. A constant exponent is chosen such that no kernel has to look.
  Term power_by_base(Term da, int32_t a, int32_t b) {
    if (da.zero) return kZero;
    if (is_constant(b)) return scaled(times(da, op(Op::POWER, a, g.folded(Op::POWER, b, b))), b);
    const int32_t power = op(Op::POWER, a, op(Op::SUBTRACT, b, constant(1)));
    return where(op(Op::EQUAL, b, constant(0)), kZero, times(times(da, b), power));
  }
  // y log a, and 0 if a is 0 and b is not negative
  Term power_by_exponent(Term db, int32_t a, int32_t b, int32_t y) {
    if (db.zero) return kZero;
    const int32_t zero = constant(0);
    const int32_t none = op(Op::AND, op(Op::EQUAL, a, zero), op(Op::GREATER_EQUAL, b, zero));
    return where(none, kZero, times(times(db, y), op(Op::LOG, a)));
  }

  // dx: not zero
  Term unary(Op name, int32_t x, int32_t y, Term dx) {
    const int32_t one = constant(1);
    switch (name) {
    case Op::EXP:
      return times(dx, y);
    case Op::EXP2:
      return scaled(times(dx, y), std::numbers::ln2);
    case Op::EXPM1:
      return times(dx, op(Op::ADD, y, one));
    case Op::LOG:
      return over(dx, x);
    case Op::LOG2:
      return scaled(over(dx, x), std::numbers::log2e);
    case Op::LOG1P:
      return over(dx, op(Op::ADD, x, one));
    case Op::SQRT:
      return scaled(over(dx, y), 0.5);
    case Op::RSQRT:
      return scaled(times(dx, op(Op::MULTIPLY, y, square(y))), -0.5);
    case Op::SIN:
      return times(dx, op(Op::COS, x));
    case Op::COS:
      return scaled(times(dx, op(Op::SIN, x)), -1.0);
    case Op::TAN:
      return times(dx, op(Op::ADD, square(y), one));
    case Op::ASIN:
      return times(dx, op(Op::RSQRT, one_minus_square(x)));
    case Op::ACOS:
      return scaled(times(dx, op(Op::RSQRT, one_minus_square(x))), -1.0);
    case Op::ATAN:
      return over(dx, op(Op::ADD, square(x), one));
    case Op::SINH:
      return times(dx, op(Op::COSH, x));
    case Op::COSH:
      return times(dx, op(Op::SINH, x));
    case Op::TANH:
      return times(dx, one_minus_square(y));
    case Op::ASINH:
      return times(dx, op(Op::RSQRT, op(Op::ADD, square(x), one)));
    case Op::ACOSH:
      return times(dx, slope_of_acosh(x));
    case Op::ARCCOSH_FROM_1:
      return where(op(Op::GREATER, x, one), times(dx, slope_of_acosh(x)), kZero);
    case Op::ATANH:
      return over(dx, one_minus_square(x));
    case Op::ERF:
      return scaled(times(dx, op(Op::EXP, op(Op::NEGATE, square(x)))), 2 * std::numbers::inv_sqrtpi);
    case Op::ERFC:
      return scaled(times(dx, op(Op::EXP, op(Op::NEGATE, square(x)))), -2 * std::numbers::inv_sqrtpi);
    case Op::SIGMOID:
      return times(dx, op(Op::MULTIPLY, y, op(Op::SUBTRACT, one, y)));
    default: // steps
      return kZero;
    }
  }
  int32_t one_minus_square(int32_t x) { return op(Op::SUBTRACT, constant(1), square(x)); }
  // 1 / sqrt(x² - 1), without cancellation near 1
  int32_t slope_of_acosh(int32_t x) {
    const int32_t one = constant(1);
    return op(Op::MULTIPLY, op(Op::RSQRT, op(Op::SUBTRACT, x, one)), op(Op::RSQRT, op(Op::ADD, x, one)));
  }

  Graph &g;
};

} // namespace

int32_t derivative(Graph &graph, int32_t of, int32_t by) {
  Differentiation differentiation(graph);
  const Term term = differentiation.of(of, by);
  return term.zero ? -1 : differentiation.node(term);
}

int32_t derivative(Graph &graph, int32_t of, const std::vector<std::pair<int32_t, int32_t>> &direction) {
  Differentiation differentiation(graph);
  const Term term = differentiation.of(of, direction);
  return term.zero ? -1 : differentiation.node(term);
}

void differentiate(Program &p) {
  Differentiation differentiation(p.graph);
  const Term term = differentiation.of(p.score, p.graph.add(Op::SCORE));
  const bool is_one = !term.zero && term.scale == kOne && term.factor == kOne;
  p.slope = is_one ? -1 : differentiation.node(term);
}

} // namespace strobe::score
