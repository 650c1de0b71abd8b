#include "score/bytecode.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_map>

#include "score/interval.h"

namespace strobe::score {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The least and the largest value of a real, among those that are finite.
struct Extent {
  double low = -kInfinity, high = kInfinity;
  bool within(double limit) const { return low >= -limit && high <= limit; }
};
Extent hull(Extent a, Extent b) { return {std::min(a.low, b.low), std::max(a.high, b.high)}; }
Extent add(Extent a, Extent b) { return {a.low + b.low, a.high + b.high}; }
Extent negated(Extent a) { return {-a.high, -a.low}; }
double product(double x, double y) { return x == 0 || y == 0 ? 0 : x * y; }
Extent multiply(Extent a, Extent b) {
  const double all[] = {product(a.low, b.low), product(a.low, b.high), product(a.high, b.low), product(a.high, b.high)};
  return {*std::min_element(all, all + 4), *std::max_element(all, all + 4)};
}
Extent absolute(Extent a) {
  if (a.low >= 0) return a;
  if (a.high <= 0) return negated(a);
  return {0, std::max(-a.low, a.high)};
}

// Lanes and rows past the last query or key have positions as well.
constexpr int64_t kPastTheEnd = 1024;
// Reals up to this become integers by a narrow instruction, which limits the others to it.
constexpr double kNarrowFromReal = 0x1p30;

class Analysis {
public:
  Analysis(const Problem &p, const Graph &graph) : p_(p), graph_(graph) {
    bounds_ = bounds_of_nodes(graph_, [&](int32_t n, std::span<const Bounds> before) {
      const Node &node = graph_[n];
      stages_.push_back(stage(node));
      finite_.push_back(node.kind == Kind::real ? finite(node, before) : Extent{});
      return known(node, before);
    });
  }
  const Range &whole(int32_t n) const { return bounds_[size_t(n)].whole; } // of an integer or boolean
  const Extent &finite(int32_t n) const { return finite_[size_t(n)]; }     // of a real
  Stage stage(int32_t n) const { return stages_[size_t(n)]; }

private:
  Stage stage(const Node &node) const {
    if (node.op == Op::SCORE) return Stage::pair;
    if (node.op == Op::QUERY) return Stage::query;
    if (node.op == Op::KEY) return Stage::key;
    Stage all = Stage::head;
    for (int32_t n = 0; n < node.count; ++n) {
      const Stage s = stage(node.inputs[size_t(n)]);
      if (s == Stage::head || s == all) continue;
      all = all == Stage::head ? s : Stage::pair;
    }
    return all;
  }

  // What does not follow from the inputs.
  std::optional<Bounds> known(const Node &node, std::span<const Bounds> before) const {
    const int64_t most_q = std::max(p_.size_q(), p_.longest_q()), most_k = std::max(p_.size_k(), p_.longest_k());
    switch (node.op) {
    case Op::BATCH:
      return bounds::integers(0, p_.part.first_batch + p_.batch);
    case Op::HEAD:
      return bounds::integers(0, p_.part.first_head + p_.heads);
    case Op::QUERY:
      return bounds::integers(0, most_q + kPastTheEnd);
    case Op::KEY:
      return bounds::integers(0, most_k + kPastTheEnd);
    case Op::OFFSET:
      return bounds::integers(-most_q, most_k);
    case Op::LOAD:
      if (p_.captured[node.captured].dtype == DType::i32) return bounds::integers(INT32_MIN, INT32_MAX);
      return {};
    case Op::TO_INTEGER: { // of a real that is infinite or NaN: what the narrow instruction makes of it, if finite ones fit
      const size_t from = size_t(node.inputs[0]);
      if (graph_[node.inputs[0]].kind != Kind::real || !finite_[from].within(kNarrowFromReal)) return {};
      const Bounds &real = before[from];
      if (!real.may_be_nan && real.real.least >= -kNarrowFromReal && real.real.most <= kNarrowFromReal) return {};
      return bounds::integers(-int64_t(kNarrowFromReal), int64_t(kNarrowFromReal));
    }
    default:
      return {};
    }
  }

  Extent finite(const Node &node, std::span<const Bounds> before) const {
    const auto in = [&](size_t n) { return finite_[size_t(node.inputs[n])]; };
    switch (node.op) {
    case Op::REAL:
      return std::isfinite(node.real) ? Extent{node.real, node.real} : Extent{};
    case Op::ADD:
      return add(in(0), in(1));
    case Op::SUBTRACT:
      return add(in(0), negated(in(1)));
    case Op::MULTIPLY:
      return multiply(in(0), in(1));
    case Op::DIVIDE:
      if (in(1).low == in(1).high && in(1).low != 0) return multiply(in(0), {1 / in(1).low, 1 / in(1).low});
      return {};
    case Op::MINIMUM: // if one is infinite, the other one may be the result
    case Op::MAXIMUM:
      return hull(in(0), in(1));
    case Op::NEGATE:
      return negated(in(0));
    case Op::ABSOLUTE:
      return absolute(in(0));
    case Op::WHERE:
      return hull(in(1), in(2));
    case Op::TO_REAL: {
      if (graph_[node.inputs[0]].kind == Kind::real) return in(0);
      const Range whole = before[size_t(node.inputs[0])].whole;
      return {double(whole.low), double(whole.high)};
    }
    case Op::FLOOR:
    case Op::CEIL:
    case Op::TRUNC:
    case Op::ROUND:
      return {in(0).low - 1, in(0).high + 1};
    case Op::LOG: // of any positive number
      return {-746, 710};
    case Op::LOG2:
      return {-1075, 1024};
    case Op::SIGN:
    case Op::TANH:
    case Op::SIN:
    case Op::COS:
    case Op::ERF:
    case Op::SIGMOID:
      return {-1, 1};
    case Op::SQRT:
      return {0, std::max(1.0, in(0).high)};
    default:
      return {};
    }
  }

  const Problem &p_;
  const Graph &graph_;
  std::vector<Bounds> bounds_;
  std::vector<Extent> finite_;
  std::vector<Stage> stages_;
};

// The instructions of one direction by stage, in the order of the graph.
struct Listing {
  std::vector<Instruction> of[4];
  std::vector<Place> used[4];
  int32_t slots[4] = {};
  Place score, slope, seen;
  Code code() const {
    Code c;
    for (int n = 0; n < 4; ++n) c.lists[n] = {of[n].data(), int32_t(of[n].size()), slots[n], used[n].data(), int32_t(used[n].size())};
    c.score = score, c.slope = slope, c.seen = seen;
    return c;
  }
};

// Translates the nodes that the results need. Values have numbers first, then slots.
class Compiler {
public:
  Compiler(const Problem &p, const Analysis &analysis, const Graph &graph)
      : p_(p), analysis_(analysis), graph_(graph), values_(size_t(graph_.size())), fp64_(p.dtype == DType::f64) {}

  Listing run(int32_t score, int32_t slope, int32_t seen) {
    translate_all({score, slope, seen});
    const int32_t results[] = {result(score), result(slope), result(seen)};
    return finished(results);
  }

  // The place of the element that a LOAD reads, in the place of the score.
  Listing run_place(int32_t load) {
    const Node &node = graph_[load];
    translate_all({node.inputs.begin(), node.inputs.begin() + node.count});
    const Captured &c = p_.captured[node.captured];
    int64_t stride[4] = {}, each = 1;
    for (int32_t axis = node.count; axis-- > 0; each *= c.size[axis]) stride[axis] = each;
    const int32_t results[] = {widened(index_of(load, stride).first, false), -1, -1};
    return finished(results);
  }

private:
  struct Value {
    Stage stage = Stage::head;
    bool wide = false;
    int32_t last_use = -1; // the instruction of the same stage; never freed: at most
    bool used_by_pairs = false;
  };
  static constexpr int64_t kSmall = 1 << 20; // of Instruction::small
  static constexpr int32_t kNever = std::numeric_limits<int32_t>::max();

  void translate_all(const std::vector<int32_t> &roots) {
    const std::vector<bool> needed = graph_.needed_by(roots);
    for (int32_t n = 0; n < graph_.size(); ++n)
      if (needed[size_t(n)]) translate(n);
  }
  Listing finished(const int32_t *results) {
    assign(results);
    Place *const places[] = {&out_.score, &out_.slope, &out_.seen};
    for (int n = 0; n < 3; ++n)
      if (results[n] >= 0) *places[n] = places_[size_t(results[n])];
    return std::move(out_);
  }

  bool is_narrow(int32_t n) const { return fp64_ || analysis_.whole(n).narrow(); }
  int32_t result(int32_t node) const { return node < 0 ? -1 : values_[size_t(node)]; }

  static Instruction instruction(int32_t op, Type type, Type gives) {
    Instruction x;
    x.op = op, x.type = type, x.gives = gives;
    return x;
  }
  // Appends an instruction; in.slot of its places are values. Returns its value.
  int32_t emit(Instruction x, std::initializer_list<int32_t> in) {
    Stage stage = x.op == int32_t(Op::SCORE)   ? Stage::pair
                  : x.op == int32_t(Op::QUERY) ? Stage::query
                  : x.op == int32_t(Op::KEY)   ? Stage::key
                                               : Stage::head;
    for (const int32_t value : in) {
      const Stage s = all_[size_t(value)].stage;
      if (s != Stage::head && s != stage) stage = stage == Stage::head ? s : Stage::pair;
    }
    auto &list = out_.of[int(stage)];
    int n = 0;
    for (const int32_t value : in) {
      Value &v = all_[size_t(value)];
      v.last_use = std::max(v.last_use, v.stage == stage ? int32_t(list.size()) : kNever);
      if (stage == Stage::pair && v.stage != Stage::pair) v.used_by_pairs = true;
      x.in[n++] = {v.stage, v.wide, value};
    }
    const bool wide = x.gives == Type::wide;
    x.out = {stage, wide, int32_t(all_.size())};
    all_.push_back({stage, wide, int32_t(list.size()), false});
    list.push_back(x);
    return int32_t(all_.size()) - 1;
  }

  int32_t widened(int32_t value, bool wide) {
    if (wide == all_[size_t(value)].wide) return value;
    const auto known = wider_.find(value);
    if (known != wider_.end()) return known->second;
    const Instruction x = wide ? instruction(kWiden, Type::narrow, Type::wide) : instruction(kNarrow, Type::wide, Type::narrow);
    return wider_[value] = emit(x, {value});
  }

  static Type type_of(Kind kind, bool wide) {
    return kind == Kind::boolean ? Type::mask : kind == Kind::real ? Type::real : wide ? Type::wide : Type::narrow;
  }

  void translate(int32_t n) {
    const Node &node = graph_[n];
    const auto input = [&](int i) { return node.inputs[size_t(i)]; };
    const auto value = [&](int i) { return values_[size_t(input(i))]; };
    if (node.op == Op::LOAD) {
      values_[size_t(n)] = load(n);
      return;
    }
    // Conversions to the kind that a value has.
    const Kind first = node.count > 0 ? graph_[input(0)].kind : node.kind;
    if ((node.op == Op::TO_REAL || node.op == Op::TO_INTEGER || node.op == Op::TO_BOOLEAN) && first == node.kind) {
      values_[size_t(n)] = value(0);
      return;
    }
    if (node.op == Op::TO_INT32 && analysis_.whole(input(0)).narrow()) {
      values_[size_t(n)] = value(0);
      return;
    }
    Instruction x;
    x.op = int32_t(node.op), x.real = node.real, x.integer = node.integer;
    const Kind kind = node.op == Op::WHERE ? node.kind : first; // of the inputs in question
    bool wide = false;
    for (int i = node.op == Op::WHERE ? 1 : 0; i < node.count; ++i)
      if (graph_[input(i)].kind == Kind::integer) wide |= !is_narrow(input(i));
    const bool narrow_result = node.kind != Kind::integer || is_narrow(n);
    if (kind == Kind::integer && node.kind == Kind::integer) wide |= !narrow_result;
    if (fp64_ && (node.op == Op::FLOOR_DIVIDE || node.op == Op::REMAINDER) && kind == Kind::integer)
      wide = !(analysis_.whole(input(0)).narrow() && analysis_.whole(input(1)).narrow());
    if (fp64_ && node.op == Op::TO_INTEGER && kind == Kind::real) wide = !analysis_.finite(input(0)).within(kNarrowFromReal);
    if ((node.op == Op::SHIFT_LEFT || node.op == Op::SHIFT_RIGHT) && !shifts_narrow(input(1))) wide = true;
    x.type = type_of(kind, wide);
    x.gives = node.kind != Kind::integer ? type_of(node.kind, false)
              : kind == Kind::integer    ? type_of(node.kind, wide)
              : kind == Kind::boolean    ? Type::narrow
                                         : type_of(node.kind, !(narrow_result && analysis_.finite(input(0)).within(kNarrowFromReal)));
    if (node.op == Op::POWER && graph_[input(1)].op == Op::REAL && graph_[input(1)].real == 2) {
      x.op = int32_t(Op::MULTIPLY);
      values_[size_t(n)] = emit(x, {value(0), value(0)});
      return;
    }
    const auto operand = [&](int i) { return graph_[input(i)].kind == Kind::integer ? widened(value(i), wide) : value(i); };
    x.small = x.type == Type::narrow && node.count == 2 && analysis_.stage(input(1)) == Stage::head &&
              analysis_.whole(input(0)).within(kSmall) && analysis_.whole(input(1)).within(kSmall);
    int32_t made = node.count == 0   ? emit(x, {})
                   : node.count == 1 ? emit(x, {operand(0)})
                   : node.count == 2 ? emit(x, {operand(0), operand(1)})
                                     : emit(x, {value(0), operand(1), operand(2)});
    if (node.kind == Kind::integer && is_narrow(n)) made = widened(made, false);
    values_[size_t(n)] = made;
  }

  bool shifts_narrow(int32_t by) const {
    const Range b = analysis_.whole(by);
    return b.low >= 0 && b.high <= (fp64_ ? 63 : 31);
  }

  int32_t constant(int64_t integer, bool wide) {
    const Type type = wide ? Type::wide : Type::narrow;
    Instruction x = instruction(int32_t(Op::INTEGER), type, type);
    x.integer = integer;
    return emit(x, {});
  }

  int32_t load(int32_t n) {
    const Node &node = graph_[n];
    const Captured &c = p_.captured[node.captured];
    const auto [at, type] = index_of(n, c.stride);
    Instruction x = instruction(kElement, type, type_of(node.kind, !fp64_ && c.dtype == DType::i64));
    x.dtype = c.dtype, x.data = c.data, x.integer = node.captured;
    return emit(x, {at});
  }

  // The sum over the axes of a LOAD's indices times these strides, and its type.
  std::pair<int32_t, Type> index_of(int32_t n, const int64_t *strides) {
    const Node &node = graph_[n];
    const Captured &c = p_.captured[node.captured];
    bool wide = false;
    double reach = 0;
    for (int32_t axis = 0; axis < node.count; ++axis) {
      reach += double(c.size[axis]) * std::fabs(double(strides[axis]));
      wide |= !is_narrow(node.inputs[size_t(axis)]) || c.size[axis] >= int64_t(1) << 30;
    }
    wide = !fp64_ && (wide || reach >= 0x1p30);
    const Type type = wide ? Type::wide : Type::narrow;
    // Axes of one stage come after each other, so that each stage adds up what it knows.
    int32_t at = constant(0, wide);
    for (const Stage stage : {Stage::head, Stage::query, Stage::key, Stage::pair})
      for (int32_t axis = 0; axis < node.count; ++axis) {
        const int32_t index = values_[size_t(node.inputs[size_t(axis)])];
        if (all_[size_t(index)].stage != stage) continue;
        Instruction x = instruction(kIndex, type, type);
        x.integer = c.size[axis], x.stride = strides[axis];
        at = emit(x, {widened(index, wide), at});
      }
    return {at, type};
  }

  // Gives each value a slot; a slot is free again after the last use of its value.
  void assign(const int32_t *results) {
    for (int n = 0; n < 3; ++n)
      if (results[n] >= 0) {
        Value &v = all_[size_t(results[n])];
        v.last_use = kNever;
        v.used_by_pairs |= v.stage != Stage::pair;
      }
    places_.resize(all_.size());
    for (int stage = 0; stage < 4; ++stage) {
      std::vector<int32_t> free;
      auto &list = out_.of[stage];
      for (int32_t n = 0; n < int32_t(list.size()); ++n) {
        Instruction &x = list[size_t(n)];
        const int32_t value = x.out.slot;
        const Value &v = all_[size_t(value)];
        if (free.empty()) free.push_back(out_.slots[stage]++);
        places_[size_t(value)] = {v.stage, v.wide, free.back()};
        free.pop_back();
        if (v.last_use == n) free.push_back(places_[size_t(value)].slot); // nothing uses it
        for (int i = 0; i < 3; ++i) {
          const int32_t in = x.in[i].slot;
          const bool again = (i > 0 && in == x.in[0].slot) || (i > 1 && in == x.in[1].slot);
          if (in >= 0 && !again && all_[size_t(in)].stage == v.stage && all_[size_t(in)].last_use == n)
            free.push_back(places_[size_t(in)].slot);
        }
      }
    }
    for (auto &list : out_.of)
      for (Instruction &x : list) {
        x.out = places_[size_t(x.out.slot)];
        for (Place &in : x.in)
          if (in.slot >= 0) in = places_[size_t(in.slot)];
      }
    for (size_t value = 0; value < all_.size(); ++value)
      if (all_[value].used_by_pairs) out_.used[int(all_[value].stage)].push_back(places_[value]);
  }

  const Problem &p_;
  const Analysis &analysis_;
  const Graph &graph_;
  std::vector<int32_t> values_; // of nodes
  const bool fp64_;             // narrow integers have 64 bits
  std::vector<Value> all_;
  std::vector<Place> places_;
  std::unordered_map<int32_t, int32_t> wider_;
  Listing out_;
};

struct Compiled : Bytecode {
  Listing forward_list, backward_list;
  Listing tangent_lists[3];        // those of TangentCode
  std::vector<Listing> load_lists; // of each LOAD: its slope and its place; of a TangentLoad also its curvature and rest
  std::vector<LoadCode> load_codes;
  std::vector<Instruction *> elements; // those that read captured tensors

  void add_elements(Listing &from) {
    for (auto &list : from.of)
      for (Instruction &x : list)
        if (x.op == kElement) elements.push_back(&x);
  }
};

int64_t scratch_bytes(const Code &c) {
  const int64_t line = kRowsAtOnce * int64_t(sizeof(int64_t)) + kRowsAtOnce * kVectorRoom;
  const int64_t values = kValuesAtOnce * int64_t(sizeof(int64_t));
  return c.lists[0].slots * kVectorRoom + (c.lists[1].slots + c.lists[2].slots) * std::max(line, values) + c.lists[3].slots * values;
}

// Adds the codes of the LOADs whose captured tensors want gradients.
template <class Loads> void compile_loads(const Problem &p, const Graph &graph, const Loads &loads, Compiled &made) {
  const Analysis analysis(p, graph);
  for (const auto &g : loads) {
    const Node &load = graph[g.load], &slope = graph[g.slope];
    made.load_lists.push_back(Compiler(p, analysis, graph).run(g.slope, -1, -1));
    made.load_lists.push_back(Compiler(p, analysis, graph).run_place(g.load));
    if constexpr (requires { g.curvature; }) {
      made.load_lists.push_back(Compiler(p, analysis, graph).run(g.curvature, -1, -1));
      made.load_lists.push_back(Compiler(p, analysis, graph).run(g.rest, -1, -1));
    }
    LoadCode &code = made.load_codes.emplace_back();
    code.captured = load.captured, code.lines = g.lines;
    code.slope_is_one = slope.op == Op::REAL && slope.real == 1;
    code.slope_reads_score = graph.reads_score({g.slope});
    code.place_reads_score = graph.reads_score({load.inputs.begin(), load.inputs.begin() + load.count});
  }
  const size_t each = made.load_codes.empty() ? 0 : made.load_lists.size() / made.load_codes.size();
  for (size_t n = 0; n < made.load_codes.size(); ++n) {
    LoadCode &code = made.load_codes[n];
    Code *const codes[] = {&code.slope, &code.place, &code.curvature, &code.rest};
    for (size_t m = 0; m < each; ++m) {
      *codes[m] = made.load_lists[each * n + m].code();
      made.scratch_bytes = std::max(made.scratch_bytes, scratch_bytes(*codes[m]));
    }
  }
  made.loads = made.load_codes.data(), made.load_count = int32_t(made.load_codes.size());
}

// Adds the codes of the derivatives in a direction.
void compile_tangents(const Problem &p, Compiled &made) {
  const TangentProgram &program = *p.tangent_program;
  const Analysis analysis(p, program.graph);
  const std::pair<int32_t, Code *> all[] = {{program.rest, &made.tangents.rest},
                                            {program.curvature, &made.tangents.curvature},
                                            {program.rest_of_slope, &made.tangents.rest_of_slope}};
  for (size_t n = 0; n < std::size(all); ++n) {
    made.tangent_lists[n] = Compiler(p, analysis, program.graph).run(all[n].first, -1, -1);
    *all[n].second = made.tangent_lists[n].code();
    made.scratch_bytes = std::max(made.scratch_bytes, scratch_bytes(*all[n].second));
  }
  compile_loads(p, program.graph, program.loads, made);
}

// All numbers that bytecode depends on, beside those of the programs.
struct Shape {
  int64_t dtype, batches, heads, most_q, longest_q, most_k, longest_k;
  struct {
    int64_t dtype, rank, size[4], stride[4];
  } captured[kSlopesRead + 1];

  explicit Shape(const Problem &p)
      : dtype(int64_t(p.dtype)), batches(p.part.first_batch + p.batch), heads(p.part.first_head + p.heads), most_q(p.size_q()),
        longest_q(p.longest_q()), most_k(p.size_k()), longest_k(p.longest_k()), captured{} {
    for (size_t n = 0; n < std::size(captured); ++n) {
      const Captured &c = p.captured[n];
      captured[n].dtype = int64_t(c.dtype), captured[n].rank = c.rank;
      for (int32_t axis = 0; axis < c.rank; ++axis) captured[n].size[axis] = c.size[axis], captured[n].stride[axis] = c.stride[axis];
    }
  }
  bool operator==(const Shape &other) const { return std::memcmp(this, &other, sizeof *this) == 0; }
};
static_assert(sizeof(Shape) == (7 + 10 * (kSlopesRead + 1)) * sizeof(int64_t)); // no padding

// The number that a node is; none if it is not one element of a tensor.
HeadNumber head_number(const Problem &p, const Graph &graph, int32_t n) {
  HeadNumber made;
  for (; graph[n].op == Op::NEGATE; n = graph[n].inputs[0]) made.negative = !made.negative;
  const Node &load = graph[n];
  if (load.op != Op::LOAD || load.count > 2) return {};
  const Captured &from = p.captured[load.captured];
  for (int32_t axis = 0; axis < load.count; ++axis) {
    const Node *index = &graph[load.inputs[size_t(axis)]];
    auto &to = made.axes[axis];
    to.size = from.size[axis], to.stride = from.stride[axis];
    if (index->op == Op::SUBTRACT && graph[index->inputs[1]].op == Op::INTEGER)
      to.first = graph[index->inputs[1]].integer, index = &graph[index->inputs[0]];
    if (index->op != Op::BATCH && index->op != Op::HEAD) return {};
    to.of_head = index->op == Op::HEAD;
  }
  made.captured = load.captured, made.rank = load.count, made.dtype = from.dtype, made.data = from.data;
  return made;
}

std::shared_ptr<Compiled> compiled(const Problem &p) {
  const Program &program = *p.program;
  auto made = std::make_shared<Compiled>();
  if (program.penalty.slope >= 0) made->slope = head_number(p, program.graph, program.penalty.slope);
  made->penalised = made->slope.captured >= 0;
  made->has_sign = program.penalty.has_sign, made->counts_offset = program.penalty.counts_offset;
  const BuiltIn &form = made->penalised ? program.penalty.rest : program;
  const bool computed = form.form == Form::general;
  const int32_t score = !computed ? -1 : made->penalised ? program.penalty.rest_score : program.score;
  const int32_t slope = computed ? program.slope : -1;
  if (score >= 0 || program.seen >= 0) {
    const Analysis analysis(p, program.graph);
    made->forward_list = Compiler(p, analysis, program.graph).run(score, -1, program.seen);
    made->forward = made->forward_list.code();
    made->backward_list = Compiler(p, analysis, program.graph).run(score, slope, program.seen);
    made->backward = made->backward_list.code();
  }
  static_cast<BuiltIn &>(*made) = form;
  made->curved = form.form != Form::identity;
  made->scratch_bytes = std::max(scratch_bytes(made->forward), scratch_bytes(made->backward));
  if (p.tangent_program)
    compile_tangents(p, *made);
  else if (p.gradient_program)
    compile_loads(p, p.gradient_program->graph, p.gradient_program->loads, *made);
  made->add_elements(made->forward_list), made->add_elements(made->backward_list);
  for (Listing &list : made->tangent_lists) made->add_elements(list);
  for (Listing &list : made->load_lists) made->add_elements(list);
  return made;
}

} // namespace

// All instruction sets plan a call with the same bytecode, and a prepared call runs it again and again: a thread keeps the last ones.
std::shared_ptr<Bytecode> compile(const Problem &p) {
  struct Kept {
    std::shared_ptr<const Program> program;
    std::shared_ptr<const GradientProgram> gradients;
    std::shared_ptr<const TangentProgram> tangents;
    Shape shape;
    std::shared_ptr<Compiled> code;
  };
  // Each call has tangents of its own. They follow from the program, so equal digests are enough.
  const auto is_same = [](const auto &a, const auto &b) { return a == b || (a && b && a->digest == b->digest); };
  constexpr size_t kMost = 8;
  thread_local std::vector<Kept> kept; // the last used one comes first
  const Shape shape(p);
  const auto found = std::ranges::find_if(kept, [&](const Kept &k) {
    return k.program == p.program && k.gradients == p.gradient_program && is_same(k.tangents, p.tangent_program) &&
           k.code.use_count() == 1 && k.shape == shape;
  });
  if (found == kept.end()) {
    if (kept.size() == kMost) kept.pop_back();
    kept.insert(kept.begin(), {p.program, p.gradient_program, p.tangent_program, shape, compiled(p)});
  } else {
    for (Instruction *x : found->code->elements) x->data = p.captured[x->integer].data;
    if (HeadNumber &slope = found->code->slope; slope.captured >= 0) slope.data = p.captured[slope.captured].data;
    std::rotate(kept.begin(), found, found + 1);
  }
  return kept.front().code;
}

} // namespace strobe::score
