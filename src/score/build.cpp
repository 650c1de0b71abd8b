#include "score/build.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "attention/versioned.h"
#include "score/forms.h"
#include "score/hash.h"

namespace strobe::score {
namespace {

constexpr const char *kCaptured[] = {
#define STROBE_CAPTURED(name, place) #name,
#include "strobe/fields.inc"
};
constexpr const char *kGradients[] = {
#define STROBE_DCAPTURED(name, place) #name,
#include "strobe/fields.inc"
};
constexpr const char *kTangents[] = {
#define STROBE_TCAPTURED(name, place) #name,
#include "strobe/fields.inc"
};
static_assert(std::size(kCaptured) == STROBE_MOST_CAPTURED && std::size(kGradients) == STROBE_MOST_CAPTURED);

const Types kBooleans = {DType::boolean}, kIntegers = {DType::i32, DType::i64}, kReals = {DType::f32, DType::f16, DType::bf16, DType::f64};

bool is_one_of(const Types &types, DType type) { return std::ranges::find(types, type) != types.end(); }

std::optional<Kind> kind_of(const strobe_tensor &tensor) {
  const DType type = DType(tensor.dtype);
  if (is_one_of(kBooleans, type)) return Kind::boolean;
  if (is_one_of(kIntegers, type)) return Kind::integer;
  if (is_one_of(kReals, type)) return Kind::real;
  return {};
}

const char *in_words(Kind kind) { return kind == Kind::boolean ? "a boolean" : kind == Kind::integer ? "an integer" : "a real"; }
const char *in_words(const char *letters) {
  const std::string_view takes = letters;
  return takes == "B"    ? "booleans"
         : takes == "I"  ? "integers"
         : takes == "R"  ? "reals"
         : takes == "IR" ? "integers or reals, all of one kind"
         : takes == "BI" ? "booleans or integers, all of one kind"
                         : "booleans, integers or reals, all of one kind";
}
bool takes(const char *letters, Kind kind) {
  return std::string_view(letters).find(kind == Kind::boolean ? 'B' : kind == Kind::integer ? 'I' : 'R') != std::string_view::npos;
}

// Reads one of the two functions: checks its nodes and adds those that its result needs to a graph.
class Reader {
public:
  Reader(const char *argument, const strobe_function *from, const CapturedTensors &given, Reasons &reasons)
      : argument_(argument), given_(given), reasons_(reasons), before_(reasons.size()),
        function_(read_versioned(argument, from, reasons, "function")) {
    if (reasons.size() > before_) return;
    if (function_.n_nodes < 1 || function_.n_nodes > STROBE_MOST_NODES)
      refuse(strobe::Code::value, "{0} nodes; accepted are 1 to {1}", function_.n_nodes, int(STROBE_MOST_NODES));
    else if (!function_.nodes)
      refuse(strobe::Code::memory, "nodes is null; accepted is a pointer to {0} nodes", function_.n_nodes);
    else
      nodes_.assign(function_.nodes, function_.nodes + function_.n_nodes);
  }

  // The node of the result; -1: the function was refused, or reads a captured tensor that was.
  int32_t add_to(Graph &graph, Kind result, bool has_score) {
    for (size_t n = 0; n < nodes_.size(); n++) {
      const std::optional<Kind> kind = checked(int32_t(n), has_score);
      if (!kind) return -1;
      kinds_.push_back(*kind);
    }
    if (nodes_.empty()) return -1;
    if (kinds_.back() != result) {
      refuse(strobe::Code::value, "its result, node {0}, is {1}; accepted is {2}", nodes_.size() - 1, in_words(kinds_.back()),
             in_words(result));
      return -1;
    }
    const std::vector<bool> needed = needed_nodes();
    std::vector<int32_t> at(nodes_.size(), -1);
    for (size_t n = 0; n < nodes_.size(); n++)
      if (needed[n]) at[n] = added(graph, nodes_[n], kinds_[n], at);
    return at.back();
  }

  bool reads(int32_t captured) const {
    return std::ranges::any_of(nodes_, [&](const strobe_node &n) { return is_load(n) && n.captured == captured; });
  }
  // Whether the result depends on the tensor.
  bool needs(int32_t captured) const {
    const std::vector<bool> needed = needed_nodes();
    for (size_t n = 0; n < nodes_.size(); n++)
      if (needed[n] && is_load(nodes_[n]) && nodes_[n].captured == captured) return true;
    return false;
  }

private:
  template <class... Values> void refuse(strobe::Code code, const char *words, const Values &...values) {
    reasons_.add(argument_, code, words, values...);
  }

  // Whether each node is the result, the last one, or an input of it, direct or indirect.
  std::vector<bool> needed_nodes() const {
    std::vector<bool> needed(nodes_.size());
    needed.back() = true;
    for (size_t n = nodes_.size(); n-- > 0;)
      for (int32_t i = 0; needed[n] && i < count(nodes_[n]); i++) needed[size_t(nodes_[n].inputs[i])] = true;
    return needed;
  }

  static bool is_load(const strobe_node &node) { return node.operation == STROBE_OP_LOAD; }
  int32_t count(const strobe_node &node) const {
    return is_load(node) ? given_[size_t(node.captured)]->rank : find_operation(node.operation)->inputs;
  }

  // The kind of node n; null if it was refused.
  std::optional<Kind> checked(int32_t n, bool has_score) {
    const strobe_node &node = nodes_[size_t(n)];
    const Operation *operation = find_operation(node.operation);
    if (!operation) {
      refuse(strobe::Code::value, "node {0} has operation {1}; accepted are the numbers in strobe/operations.inc", n, node.operation);
      return {};
    }
    const char *name = operation->name;
    if (node.operation == STROBE_OP_SCORE && !has_score) {
      refuse(strobe::Code::excluded, "node {0} is SCORE; accepted is a function of b, h, i and j alone", n);
      return {};
    }
    if (!is_load(node) && node.captured) {
      refuse(strobe::Code::value, "node {0}, {1}, has captured = {2}; accepted is 0 for all but LOAD", n, name, node.captured);
      return {};
    }
    if (is_load(node) && !readable(n)) return {};
    const int32_t taken = count(node);
    for (int32_t i = taken; i < 4; i++)
      if (node.inputs[i]) {
        refuse(strobe::Code::value, "node {0}, {1}, has inputs[{2}] = {3}; accepted is 0, for it takes {4}", n, name, i, node.inputs[i],
               taken);
        return {};
      }
    for (int32_t i = 0; i < taken; i++)
      if (node.inputs[i] < 0 || node.inputs[i] >= n) {
        refuse(strobe::Code::value,
               n ? "node {0}, {1}, has inputs[{2}] = {3}; accepted are earlier nodes, 0 to {4}"
                 : "node {0}, {1}, has inputs[{2}] = {3}; accepted are earlier nodes, and the first has none",
               n, name, i, node.inputs[i], n - 1);
        return {};
      }
    if (node.real != 0 && node.operation != STROBE_OP_REAL) {
      refuse(strobe::Code::value, "node {0}, {1}, has real = {2}; accepted is 0 for all but REAL", n, name, node.real);
      return {};
    }
    if (node.integer && node.operation != STROBE_OP_INTEGER && node.operation != STROBE_OP_BOOLEAN) {
      refuse(strobe::Code::value, "node {0}, {1}, has integer = {2}; accepted is 0 for all but INTEGER and BOOLEAN", n, name, node.integer);
      return {};
    }
    if (node.operation == STROBE_OP_BOOLEAN && node.integer != 0 && node.integer != 1) {
      refuse(strobe::Code::value, "node {0}, {1}, has integer = {2}; accepted is 0 or 1", n, name, node.integer);
      return {};
    }
    return kind_of_result(n, *operation, taken);
  }

  bool readable(int32_t n) {
    const int32_t captured = nodes_[size_t(n)].captured;
    if (captured < 0 || captured >= STROBE_MOST_CAPTURED) {
      refuse(strobe::Code::value, "node {0}, LOAD, has captured = {1}; accepted are 0 to {2}", n, captured, STROBE_MOST_CAPTURED - 1);
      return false;
    }
    const strobe_tensor *tensor = given_[size_t(captured)];
    if (!tensor) {
      refuse(strobe::Code::missing, "node {0}, LOAD, reads {1}, which is not given; accepted are captured tensors of the call", n,
             Argument{kCaptured[captured]});
      return false;
    }
    return tensor->rank >= 0 && tensor->rank <= 4; // another one was refused already
  }

  std::optional<Kind> kind_of_result(int32_t n, const Operation &operation, int32_t taken) {
    const strobe_node &node = nodes_[size_t(n)];
    auto kind = [&](int32_t i) { return kinds_[size_t(node.inputs[i])]; };
    if (node.operation == STROBE_OP_WHERE) {
      if (kind(0) == Kind::boolean && kind(1) == kind(2)) return kind(1);
      refuse(strobe::Code::value, "node {0}, WHERE, takes {1}, {2} and {3}; accepted are a boolean and two values of one kind", n,
             in_words(kind(0)), in_words(kind(1)), in_words(kind(2)));
      return {};
    }
    for (int32_t i = 0; i < taken; i++)
      if (!takes(operation.takes, kind(i)) || kind(i) != kind(0)) {
        refuse(strobe::Code::value, "node {0}, {1}, has {2} as inputs[{3}]; accepted are {4}", n, operation.name, in_words(kind(i)), i,
               in_words(operation.takes));
        return {};
      }
    if (is_load(node)) return kind_of(*given_[size_t(node.captured)]);
    const char gives = operation.gives[0];
    return gives == 'S' ? kind(0) : gives == 'B' ? Kind::boolean : gives == 'I' ? Kind::integer : Kind::real;
  }

  int32_t added(Graph &graph, const strobe_node &node, Kind kind, const std::vector<int32_t> &at) const {
    Node own{Op(node.operation), kind, node.captured, count(node), {}, node.real, node.integer};
    for (int32_t i = 0; i < own.count; i++) own.inputs[size_t(i)] = at[size_t(node.inputs[i])];
    return graph.add(own);
  }

  const char *const argument_;
  const CapturedTensors &given_;
  Reasons &reasons_;
  const size_t before_;
  const strobe_function function_;
  std::vector<strobe_node> nodes_; // the call's own copy
  std::vector<Kind> kinds_;
};

// Keeps the nodes that the program's results and these nodes need.
void prune(Program &p, std::vector<int32_t *> roots = {}) {
  roots.insert(roots.end(), {&p.score, &p.slope, &p.seen, &p.penalty.slope, &p.penalty.rest_score});
  std::vector<int32_t> nodes;
  for (const int32_t *root : roots) nodes.push_back(*root);
  const std::vector<bool> needed = p.graph.needed_by(nodes);
  std::vector<int32_t> at(size_t(p.graph.size()), -1);
  Graph kept;
  for (int32_t n = 0; n < p.graph.size(); n++) {
    if (!needed[size_t(n)]) continue;
    Node node = p.graph[n];
    for (int32_t i = 0; i < node.count; i++) node.inputs[size_t(i)] = at[size_t(node.inputs[size_t(i)])];
    at[size_t(n)] = kept.add(node);
  }
  for (int32_t *root : roots)
    if (*root >= 0) *root = at[size_t(*root)];
  p.graph = std::move(kept);
}

std::array<uint32_t, 2> digest(const Program &p, const CapturedTensors &given, const std::vector<LoadGradient> &loads = {}) {
  Hash hash;
  auto add = [&](auto... numbers) { (hash.add(uint64_t(int64_t(numbers))), ...); };
  for (const Node &n : p.graph.nodes())
    add(int32_t(n.op), int32_t(n.kind), n.captured, n.count, n.inputs[0], n.inputs[1], n.inputs[2], n.inputs[3]);
  add(p.score, p.slope, p.seen, int32_t(p.form), p.penalty.slope, p.penalty.has_sign, p.penalty.counts_offset, int32_t(p.penalty.rest.form),
      p.penalty.rest_score, p.penalty.is_option);
  for (const strobe_tensor *t : given) t ? add(t->dtype, t->rank) : add(0, -1);
  for (const LoadGradient &g : loads) add(g.load, g.slope, int32_t(g.lines));
  return hash.words();
}

std::shared_ptr<const Program> finished(const std::shared_ptr<Program> &program, const CapturedTensors &given) {
  if (program->score >= 0) differentiate(*program);
  if (program->score < 0 && program->seen < 0) return nullptr;
  prune(*program);
  program->digest = digest(*program, given);
  return program;
}

// The program of the wanted gradients; from: the call's functions.
std::shared_ptr<const GradientProgram> gradients_of(const Program &from, const CapturedTensors &given, const CapturedTensors &wanted,
                                                    const AlibiSlopes &slopes) {
  auto program = std::make_shared<GradientProgram>();
  static_cast<Program &>(*program) = from;
  program->form = Form::general;
  const std::vector<bool> needed = from.graph.needed_by({from.score});
  for (int32_t n = 0; n < from.graph.size(); n++) {
    const Node &node = from.graph[n];
    if (!needed[size_t(n)] || node.op != Op::LOAD || !wanted[size_t(node.captured)]) continue;
    const int32_t slope = derivative(program->graph, from.score, n);
    if (slope >= 0) program->loads.push_back({n, slope, lines_of(from.graph, n)});
  }
  add_alibi(*program, slopes);
  std::vector<int32_t *> roots;
  for (LoadGradient &g : program->loads) roots.insert(roots.end(), {&g.load, &g.slope});
  prune(*program, roots);
  program->digest = digest(*program, given, program->loads);
  return program;
}

// The program of derivatives in the direction of asked.tangents. from: the call's program, which has a score.
std::shared_ptr<const TangentProgram> tangents_of(const Program &from, const CapturedTensors &given, const Wanted &asked) {
  auto program = std::make_shared<TangentProgram>();
  static_cast<Program &>(*program) = from;
  Graph &graph = program->graph;
  int32_t free = 0;
  for (size_t c = 0; c < STROBE_MOST_CAPTURED; c++) {
    program->place[c] = -1;
    if (!given[c] || !(*asked.tangents)[c]) continue;
    while (given[size_t(free)]) free++;
    program->place[c] = free++;
  }
  const std::vector<bool> needed = from.graph.needed_by({from.score});
  std::vector<std::pair<int32_t, int32_t>> direction;
  for (int32_t n = 0; n < from.graph.size(); n++) {
    const Node &node = from.graph[n];
    if (!needed[size_t(n)] || node.op != Op::LOAD || node.captured == kSlopesRead) continue; // slopes have no derivative
    if (const int32_t place = program->place[size_t(node.captured)]; place >= 0)
      direction.emplace_back(n, graph.load(place, Kind::real, {node.inputs.begin(), node.inputs.begin() + node.count}));
    if (!asked.gradients[size_t(node.captured)]) continue;
    const int32_t slope = derivative(graph, from.score, n);
    if (slope >= 0) program->loads.push_back({{n, slope, lines_of(from.graph, n)}, -1, -1});
  }
  const int32_t x = graph.add(Op::SCORE);
  const auto of_slope = [&](int32_t slope, int32_t &curvature, int32_t &rest) {
    if (slope < 0) return;
    curvature = derivative(graph, slope, x);
    if (!direction.empty()) rest = derivative(graph, slope, direction);
  };
  if (!direction.empty()) program->rest = derivative(graph, from.score, direction);
  of_slope(program->slope, program->curvature, program->rest_of_slope);
  for (TangentLoad &g : program->loads) of_slope(g.slope, g.curvature, g.rest);
  std::vector<int32_t *> roots = {&program->curvature, &program->rest, &program->rest_of_slope};
  for (TangentLoad &g : program->loads) roots.insert(roots.end(), {&g.load, &g.slope, &g.curvature, &g.rest});
  prune(*program, roots);
  CapturedTensors all = given;
  for (size_t c = 0; c < STROBE_MOST_CAPTURED; c++)
    if (program->place[c] >= 0) all[size_t(program->place[c])] = (*asked.tangents)[c];
  std::vector<LoadGradient> of_loads(program->loads.begin(), program->loads.end());
  for (const TangentLoad &g : program->loads) of_loads.push_back({g.curvature, g.rest, g.lines});
  of_loads.push_back({program->curvature, program->rest, Lines::rows});
  of_loads.push_back({program->rest_of_slope, -1, Lines::rows});
  program->digest = digest(*program, all, of_loads);
  return program;
}

} // namespace

void check_captured_tensor(int32_t n, const strobe_tensor &tensor, TensorChecks &checks, Reasons &reasons) {
  static const Types all = [] {
    Types all = kBooleans;
    for (const Types *more : {&kIntegers, &kReals}) all.insert(all.end(), more->begin(), more->end());
    return all;
  }();
  const char *argument = kCaptured[n];
  if (tensor.rank < 0 || tensor.rank > 4) return reasons.add(argument, Code::rank, "rank {0}; accepted is 0 to 4", tensor.rank);
  if (std::any_of(tensor.shape, tensor.shape + tensor.rank, [](int64_t size) { return size < 1; }))
    return reasons.add(argument, Code::shape, "shape {0}; accepted is 1 or more on each axis", Numbers{tensor.shape, tensor.rank});
  checks.accept(argument, tensor, Axes(size_t(tensor.rank), Axis{"any"}), all, Access::read);
}

// Checks what belongs to captured tensor n: its gradient or its tangent.
static void check_like(const char *argument, int32_t n, const strobe_tensor *gradient, const strobe_tensor *captured, Types types,
                       Access access, bool oracle, TensorChecks &checks, Reasons &reasons) {
  if (!gradient) return;
  const Argument of = {kCaptured[n]};
  if (!captured) return reasons.add(argument, Code::excluded, "given without {0}; accepted is both, or {0} alone", of);
  const DType dtype = DType(captured->dtype);
  if (is_one_of(kBooleans, dtype) || is_one_of(kIntegers, dtype))
    return reasons.add(argument, Code::excluded, "given for {0} of dtype {1}; accepted is none: only floats have a gradient", of, dtype);
  if (!is_one_of(kReals, dtype) || captured->rank < 0 || captured->rank > 4) return; // refused already
  const int32_t rank = gradient->rank;
  if (rank != captured->rank) return reasons.add(argument, Code::rank, "rank {0}; accepted is {1}, that of {2}", rank, captured->rank, of);
  if (!std::equal(gradient->shape, gradient->shape + rank, captured->shape))
    return reasons.add(argument, Code::shape, "shape {0}; accepted is {1}, that of {2}", Numbers{gradient->shape, rank},
                       Numbers{captured->shape, rank}, of);
  double elements = 1;
  for (int32_t axis = 0; axis < rank; axis++) elements *= double(gradient->shape[axis]);
  if (!oracle && elements >= 0x1p31) // engines number elements by 32 bits
    return reasons.add(argument, Code::shape, "shape {0}; accepted are fewer than 2^31 elements", Numbers{gradient->shape, rank});
  if (types.empty()) {
    types = {DType::f32, DType::f64};
    if (!is_one_of(types, dtype)) types.insert(types.begin(), dtype);
  }
  checks.accept(argument, *gradient, Axes(size_t(rank), Axis{"any"}), types, access);
}

void check_gradient(int32_t n, const strobe_tensor *gradient, const strobe_tensor *captured, bool oracle, TensorChecks &checks,
                    Reasons &reasons) {
  check_like(kGradients[n], n, gradient, captured, oracle ? Types{DType::f64} : Types{}, Access::write, oracle, checks, reasons);
}

void check_tangent(int32_t n, const strobe_tensor *tangent, const strobe_tensor *captured, TensorChecks &checks, Reasons &reasons) {
  check_like(kTangents[n], n, tangent, captured, {}, Access::read, true, checks, reasons);
}

Captured captured_of(const strobe_tensor *t) {
  Captured c;
  if (!t) return c;
  c.data = static_cast<char *>(t->data), c.dtype = static_cast<DType>(t->dtype), c.rank = t->rank;
  for (int32_t axis = 0; axis < t->rank; axis++) {
    c.size[axis] = t->shape[axis];
    if (t->shape[axis] > 1) c.stride[axis] = t->strides[axis];
  }
  return c;
}

std::shared_ptr<const Program> built_in(const BuiltIn &form, const AlibiSlopes &slopes) {
  thread_local struct { // the same options come again and again
    BuiltIn form;
    AlibiSlopes slopes;
    std::shared_ptr<const Program> program;
  } last;
  if (last.form == form && last.slopes == slopes) return last.program;
  auto program = std::make_shared<Program>();
  set_form(*program, form);
  add_alibi(*program, slopes);
  last = {form, slopes, finished(program, {})};
  return last.program;
}

Programs make_programs(const strobe_attention &a, const CapturedTensors &given, const Wanted &asked, Reasons &reasons,
                       const AlibiSlopes &slopes) {
  const CapturedTensors &wanted = asked.gradients;
  const size_t before = reasons.size();
  auto program = std::make_shared<Program>();
  std::vector<Reader> readers;
  auto read = [&](const char *argument, const strobe_function *function, Kind result, bool has_score) {
    if (!function) return -1;
    return readers.emplace_back(argument, function, given, reasons).add_to(program->graph, result, has_score);
  };
  program->score = read("score_function", a.score_function, Kind::real, true);
  program->seen = read("mask_function", a.mask_function, Kind::boolean, false);
  if (reasons.size() > before) return {};
  if ((a.score_function && program->score < 0) || (a.mask_function && program->seen < 0)) return {}; // for a tensor that was refused
  for (int32_t c = 0; c < STROBE_MOST_CAPTURED; c++)
    if (given[size_t(c)] && std::ranges::none_of(readers, [&](const Reader &r) { return r.reads(c); }))
      reasons.add(kCaptured[c], strobe::Code::excluded, "given, and read by no function; accepted is none");
  const auto belong = [&](const char *const *arguments, const CapturedTensors &some) { // to captured tensors that the score depends on
    for (int32_t c = 0; c < STROBE_MOST_CAPTURED; c++)
      if (given[size_t(c)] && some[size_t(c)] && (!a.score_function || !readers.front().needs(c)))
        reasons.add(arguments[c], strobe::Code::excluded,
                    a.score_function ? "given, and the result of score_function does not depend on {0}; accepted is none"
                                     : "given without score_function; accepted is none",
                    Argument{kCaptured[c]});
    return std::ranges::any_of(some, [](const strobe_tensor *t) { return t != nullptr; });
  };
  const bool wants = belong(kGradients, wanted);
  if (asked.tangents && belong(kTangents, *asked.tangents)) {
    const auto count = [](const CapturedTensors &all) { return int(STROBE_MOST_CAPTURED) - int(std::ranges::count(all, nullptr)); };
    const auto first = std::ranges::find_if(*asked.tangents, [](const strobe_tensor *t) { return t; }) - asked.tangents->begin();
    if (const int all = count(given) + count(*asked.tangents); all > STROBE_MOST_CAPTURED)
      reasons.add(kTangents[first], strobe::Code::excluded, "{0} captured tensors and tangents of these; accepted are up to {1} together",
                  all, int(STROBE_MOST_CAPTURED));
  }
  if (reasons.size() > before) return {};
  Programs made;
  if (readers.empty()) {
    made.program = built_in(asked_form(a), slopes);
    if (asked.tangents && made.program) made.tangents = tangents_of(*made.program, given, asked);
    return made;
  }
  if (wants) made.gradients = gradients_of(*program, given, wanted, slopes);
  if (a.score_function) {
    const int32_t score = program->score;
    match(*program); // adds nodes
    if (program->curved() && program->form != Form::general)
      program->given = std::make_shared<const Graph>(program->graph), program->given_score = score;
  } else {
    set_form(*program, asked_form(a));
  }
  add_alibi(*program, slopes);
  made.program = finished(program, given);
  if (asked.tangents && made.program && made.program->score >= 0) made.tangents = tangents_of(*made.program, given, asked);
  return made;
}

} // namespace strobe::score
