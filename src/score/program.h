// A call's functions as one graph, from which every engine makes its own code. The score function says what becomes of x = scale q.k before
// ALiBi and bias are added; the mask function says which keys are hidden. Both are the caller's or built in. docs/functions.md says what a
// function means.
#pragma once
#include <array>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "strobe/strobe.h"

namespace strobe::score {

enum class Op : int32_t {
#define STROBE_OPERATION(name, number, inputs, takes, gives) name = number,
#include "strobe/operations.inc"
};
enum class Kind : int32_t { boolean, integer, real };

// A row of operations.inc.
struct Operation {
  const char *name;
  int32_t inputs;
  const char *takes, *gives;
};
// null: there is no operation of this number.
const Operation *find_operation(int32_t number);

inline bool is_constant(Op op) { return op == Op::REAL || op == Op::INTEGER || op == Op::BOOLEAN; }

struct Node {
  Op op;
  Kind kind;            // of its value
  int32_t captured = 0; // LOAD
  int32_t count = 0;    // of inputs
  std::array<int32_t, 4> inputs{};
  double real = 0;
  int64_t integer = 0;
};

// Each node comes after its inputs. A node that equals an earlier one is not added again. Constants are an exception: kernels take their
// values as arguments, so the graph must not depend on which constants are equal.
class Graph {
public:
  const std::vector<Node> &nodes() const { return nodes_; }
  const Node &operator[](int32_t n) const { return nodes_[size_t(n)]; }
  int32_t size() const { return int32_t(nodes_.size()); }
  // Whether each node is one of the roots (-1: none) or an input, direct or indirect, of one.
  std::vector<bool> needed_by(const std::vector<int32_t> &roots) const;
  // Whether one of the roots depends on the score.
  bool reads_score(const std::vector<int32_t> &roots) const;
  // The index of the node. Kind and count are set from the operation and the inputs, which have to be right.
  int32_t add(Op, std::initializer_list<int32_t> inputs = {});
  int32_t add(const Node &); // as it is
  int32_t load(int32_t captured, Kind, const std::vector<int32_t> &indices);
  int32_t real(double), integer(int64_t), boolean(bool);
  // A real that is not one of the caller's numbers. Equal ones share a node.
  int32_t fixed(double);
  // A real computed from the constants a and b: their product, quotient or sum; for POWER, the exponent of the derivative of x^a. The same
  // arguments always give the same node.
  int32_t folded(Op, int32_t a, int32_t b);

private:
  using Key = std::array<int32_t, 8>;
  std::vector<Node> nodes_;
  std::map<Key, int32_t> known_, folded_;
  std::map<double, int32_t> fixed_;
};

// A function that engines also have hand-written code for.
enum class Form : int32_t {
  identity,   // x
  softcap,    // c tanh(x / c)
  hyperbolic, // -beta arccosh(max(-x, 1)) - shift
  general
};

// A form with its numbers.
struct BuiltIn {
  Form form = Form::identity;
  double cap = 0, beta = 0, shift = 0;
  bool operator==(const BuiltIn &) const = default;
};

// f(x) = rest(x) - slope * distance, where the slope depends on b and h alone. A caller's function of this kind is ALiBi.
struct Penalty {
  int32_t slope = -1;         // its node; -1: the function is no such sum
  bool has_sign = false;      // the distance is i - j; otherwise |i - j|
  bool counts_offset = false; // the distance is measured from i + offset instead of i
  BuiltIn rest;
};

struct Program : BuiltIn {
  Graph graph;
  int32_t score = -1; // the node of f(x); -1: it is x
  int32_t slope = -1; // the node of df/dx; -1: it is 1
  int32_t seen = -1;  // the node of g; -1: it hides nothing
  // The caller's own graph of f and its result, where `graph` has a built-in form in its place: what the reference evaluates.
  std::shared_ptr<const Graph> given;
  int32_t given_score = -1;
  Penalty penalty; // of Form::general
  // A hash of everything but the values of constants: equal for programs that differ in these alone.
  std::array<uint32_t, 2> digest{};

  // Whether the score is not linear in q.k.
  bool curved() const { return score >= 0; }
  // Whether the score is none of the forms, or keys are hidden.
  bool is_given() const { return form == Form::general || seen >= 0; }
};

// The lines of a head's score matrix along which a LOAD reads one and the same element.
enum class Lines : int32_t {
  rows,      // the element does not depend on the key; it may depend on the query
  columns,   // the element does not depend on the query
  diagonals, // the element depends only on the difference of query and key
  general    // any two pairs may read different elements
};
Lines lines_of(const Graph &, int32_t load);

// What each node's value is a function of beside b and h, as bits: of i, of j, of i - j, of x.
enum Positions : unsigned { kOfNone = 0, kOfQuery = 1, kOfKey = 2, kOfDifference = 4, kOfScore = 8 };
std::vector<unsigned> positions_of(const Graph &);

// A LOAD of a captured tensor whose gradient is wanted, and the derivative of the score by what it loads.
struct LoadGradient {
  int32_t load, slope; // nodes
  Lines lines;
};

// What the gradients of captured tensors are made of. It is not the call's Program, so that kernels of the other gradients stay as they
// are. form is general, and slope is not set.
struct GradientProgram : Program {
  std::vector<LoadGradient> loads; // without those whose derivative is 0 everywhere
};

// A LOAD whose captured tensor's gradient is to be differentiated.
struct TangentLoad : LoadGradient {
  int32_t curvature, rest; // of its slope, as below
};

// The derivatives of the score in the direction of tangents. With x's tangent tx, that of the score is slope * tx + rest, and that of the
// slope is curvature * tx + rest_of_slope. -1: a node that is 0 everywhere; slope: it is 1.
struct TangentProgram : Program {
  int32_t curvature = -1, rest = -1, rest_of_slope = -1;
  // Where its LOADs find the tangent of captured tensor n: in place of a captured tensor that the call leaves free; -1: there is none.
  std::array<int32_t, STROBE_MOST_CAPTURED> place;
  std::vector<TangentLoad> loads; // of the wanted gradients
};

// Adds the derivative of node `of`, a real, by node `by` (SCORE or a LOAD of reals) to the graph. Returns its node; -1: it is 0 everywhere.
// Where a function has no derivative, PyTorch's value is used.
int32_t derivative(Graph &, int32_t of, int32_t by);
// The same in a direction: for each (node, its tangent), both reals. The tangents come after `of`.
int32_t derivative(Graph &, int32_t of, const std::vector<std::pair<int32_t, int32_t>> &direction);

// Sets the slope of a program that has a score.
void differentiate(Program &);

// "20 * tanh(x / 20) + captured_0[h]", for explain(). A term that occurs several times gets a name: "t0 = i - j; t0 * t0".
std::string formula(const Graph &, int32_t node);

} // namespace strobe::score
