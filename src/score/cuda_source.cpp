#include "score/cuda_source.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "attention/text.h"
#include "score/hash.h"

namespace strobe::score {
namespace {

constexpr int64_t kLimit = 1 << 30; // of limited_integer()
constexpr int64_t kRoomAhead = 512; // values of positions past both ends of a sequence, which tiles reach and nothing uses
constexpr int64_t kSmallConstant = 1 << 29, kShortPosition = 1 << 24; // classes: numbers and lengths below make the same code

const char *element(DType dtype) {
  switch (dtype) {
  case DType::f32:
    return "float";
  case DType::f16:
    return "f16";
  case DType::bf16:
    return "bf16";
  case DType::f64:
    return "double";
  case DType::i32:
    return "i32";
  case DType::i64:
    return "i64";
  default:
    return "u8";
  }
}

const char *type(Kind kind, bool narrow) { return kind == Kind::boolean ? "bool" : kind == Kind::real ? "T" : narrow ? "i32" : "i64"; }

const char *along(const Ahead &x) { return x.by == kOfQuery ? "Along::query" : x.by == kOfKey ? "Along::key" : "Along::difference"; }

std::string name(int32_t node) { return text("n", node); }

bool is_power_of_two(const Node &x) { return x.integer > 0 && std::has_single_bit(uint64_t(x.integer)); }
bool is_real(const Node &x, double value) { return x.op == Op::REAL && x.real == value; }
bool only_adds(const Graph &g, int32_t score, int32_t slope, int depth = 0) {
  if (slope < 0 || is_real(g[slope], 1) || is_real(g[score], -std::numeric_limits<double>::infinity())) return true;
  const Node &f = g[score], &d = g[slope];
  if (depth > 8) return false;
  return f.op == Op::WHERE && d.op == Op::WHERE && f.inputs[0] == d.inputs[0] && only_adds(g, f.inputs[1], d.inputs[1], depth + 1) &&
         only_adds(g, f.inputs[2], d.inputs[2], depth + 1);
}

// Whether a small change of an input may change the result by a whole.
bool steps(Op op) {
  switch (op) {
  case Op::FLOOR:
  case Op::CEIL:
  case Op::TRUNC:
  case Op::ROUND:
  case Op::SIGN:
  case Op::FLOOR_DIVIDE:
  case Op::REMAINDER:
  case Op::TRUNC_REMAINDER:
    return true;
  default:
    return false;
  }
}

// What an operation takes, in instructions, about.
int32_t instructions_of(const Node &x) {
  switch (x.op) {
  case Op::LOAD:
    return 4 + 2 * x.count;
  case Op::FLOOR_DIVIDE:
  case Op::REMAINDER:
  case Op::TRUNC_REMAINDER:
    return x.kind == Kind::integer ? 8 : 20;
  case Op::DIVIDE:
  case Op::POWER:
    return x.op == Op::POWER ? 40 : 6;
  default:
    return int32_t(x.op) >= int32_t(Op::EXP) && int32_t(x.op) < int32_t(Op::FLOOR) ? 10 : 1;
  }
}

} // namespace

bool only_adds(const Program &p, bool without_penalty) {
  const int32_t score = without_penalty ? p.rest_score() : p.score;
  return score >= 0 && only_adds(p.graph, score, p.slope);
}

CudaFunctions::CudaFunctions(const Problem &p, bool scored, bool penalised) : CudaFunctions(p, p.program, {}, scored, scored, penalised) {}
CudaFunctions::CudaFunctions(const Problem &p, bool scored, bool penalised, const std::shared_ptr<const GradientProgram> &gradients)
    : CudaFunctions(p, gradients, gradients->loads, scored, false, penalised) {}

CudaFunctions::CudaFunctions(const Problem &p, const std::shared_ptr<const Program> &program, const std::vector<LoadGradient> &loads,
                             bool scored, bool differentiated, bool penalised)
    : program_(program), graph_(program_->graph), dtype_(p.dtype), captured_(std::to_array(p.captured)), loads_(loads),
      score_(!scored     ? -1
             : penalised ? program->rest_score()
                         : program->score),
      slope_(differentiated ? program->slope : -1), seen_(program_->seen), penalty_(penalised ? program->penalty.slope : -1),
      batch_(p.batch), heads_(p.heads), seqlen_q_(p.seqlen_q), seqlen_k_(p.seqlen_k) {
  const int64_t most = std::max({p.part ? p.part.first_batch + p.batch : p.batch, p.part ? p.part.heads : p.heads, p.size_q(), p.size_k(),
                                 p.part ? p.part.first_head + p.heads : 0});
  most_position_ = most < kShortPosition ? kShortPosition : INT32_MAX;
  const size_t count = size_t(graph_.size());
  std::vector<int32_t> roots{score_, slope_, seen_, penalty_};
  for (const LoadGradient &g : loads_) roots.insert(roots.end(), {g.load, g.slope});
  used_ = graph_.needed_by(roots);
  place_.assign(count, -1), divisor_place_.assign(count, -1);
  divides_.assign(count, false), shifts_.assign(count, false), limits_.assign(count, false);
  for (const Node &x : graph_.nodes()) {
    if (x.op == Op::FLOOR_DIVIDE || x.op == Op::REMAINDER) divides_[size_t(x.inputs[1])] = true;
    if (x.op == Op::LESS_EQUAL && graph_[x.inputs[0]].op == Op::ABSOLUTE) limits_[size_t(x.inputs[1])] = true;
    if (x.op == Op::SHIFT_LEFT || x.op == Op::SHIFT_RIGHT) shifts_[size_t(x.inputs[1])] = true;
  }
  find_exact();
  limited_.assign(count, false);
  find_ranges();
  find_limited();
  find_ranges();
  find_ahead(p, {score_, slope_, seen_});
  for (int32_t n = 0; n < graph_.size(); n++) {
    if (!used_[size_t(n)]) continue;
    const bool in_source = graph_[n].op == Op::INTEGER && shifts_[size_t(n)];
    if (is_constant(graph_[n].op) && !in_source && numbers_.size() < FunctionArguments::kNumbers)
      place_[size_t(n)] = int32_t(numbers_.size()), numbers_.push_back(n);
    if (!divides_by_constant(graph_[n])) continue;
    int32_t &place = divisor_place_[size_t(graph_[n].inputs[1])];
    if (place < 0 && divisors_.size() < FunctionArguments::kDivisors)
      place = int32_t(divisors_.size()), divisors_.push_back(graph_[n].inputs[1]);
  }
  digest_ = made_digest();
}

// Chooses what is computed ahead. A launch more, 3 us, has to pay: on an H200 T5's buckets, of which about 28 instructions are counted here
// as saved, take 4.5 ps for each pair, and a relative bias, of which 3 are, takes 0.85 ps.
void CudaFunctions::find_ahead(const Problem &p, const std::vector<int32_t> &roots) {
  constexpr double kPays = 1 << 24;
  constexpr double kPairsOfValue = 4; // at least; with a query or few for each sequence the values are as many as the pairs, or more
  place_ahead_.assign(size_t(graph_.size()), -1);
  // A row's bits may not depend on the lengths, by which this chooses; positions of a part are those of the whole problem.
  if (p.invariant || p.part || !loads_.empty() || p.seqlen_q > kShortPosition || p.seqlen_k > kShortPosition) return;
  const Problem::Blocks &blocks = p.blocks;
  const double heads = double(p.batch * p.heads);
  const double pairs = blocks.present
                           ? heads / double(blocks.batch * blocks.heads) * double(blocks.kept) * double(blocks.block_q * blocks.block_k)
                           : heads * double(p.seqlen_q) * double(p.seqlen_k);
  std::vector<Ahead> found = found_ahead(graph_, roots, [this](int32_t n) { return instructions_of(graph_[n]) * (narrow(n) ? 1 : 3); });
  std::erase_if(found, [&](const Ahead &x) {
    const int64_t length = 2 * kRoomAhead + (x.by == kOfKey ? 0 : p.seqlen_q) + (x.by == kOfQuery ? 0 : p.seqlen_k);
    return double(x.of_batch ? p.batch : 1) * double(x.of_head ? p.heads : 1) * double(length) * kPairsOfValue > pairs;
  });
  const size_t places = size_t(std::count_if(captured_.begin(), captured_.begin() + STROBE_MOST_CAPTURED, [](auto &x) { return !x; }));
  if (found.size() > places) found.resize(places);
  double saved = 0;
  for (const Ahead &x : found) saved += x.saved;
  if (saved * pairs < kPays) return;
  ahead_ = std::move(found);
  for (size_t n = 0; n < ahead_.size(); n++) place_ahead_[size_t(ahead_[n].node)] = int32_t(n);
}

// An approximation's last bits change a score little, but a step, a comparison or an index that follows from them by a whole.
void CudaFunctions::find_exact() {
  exact_.assign(size_t(graph_.size()), false);
  for (int32_t n = graph_.size() - 1; n >= 0; n--) { // inputs stand before
    const Node &x = graph_[n];
    if (!used_[size_t(n)] || (x.kind == Kind::real && !exact_[size_t(n)] && !steps(x.op))) continue;
    for (int32_t i = 0; i < x.count; i++) exact_[size_t(x.inputs[size_t(i)])] = true;
  }
}

void CudaFunctions::find_ranges() {
  ranges_ = bounds_of_nodes(graph_, [&](int32_t n, std::span<const Bounds>) { return known_range(n); });
}

// What does not follow from the inputs. The value of a number makes no other code, but for its class: large or not, and of a divisor also
// positive or not.
std::optional<Bounds> CudaFunctions::known_range(int32_t n) const {
  const Node &x = graph_[n];
  switch (x.op) {
  case Op::BATCH:
  case Op::HEAD:
  case Op::QUERY:
  case Op::KEY:
    return bounds::integers(0, most_position_);
  case Op::OFFSET:
    return bounds::integers(-most_position_, most_position_);
  case Op::REAL:
  case Op::BOOLEAN:
    return any_bounds(x.kind);
  case Op::INTEGER:
    if (shifts_[size_t(n)]) return {}; // its value stands in the source
    if (x.integer <= -kSmallConstant || x.integer >= kSmallConstant) return any_bounds(x.kind);
    if (divides_[size_t(n)] && x.integer > 0) return bounds::integers(1, kSmallConstant);
    return bounds::integers(limits_[size_t(n)] && x.integer >= 0 ? 0 : -kSmallConstant, kSmallConstant);
  case Op::LOAD:
    if (captured_[size_t(x.captured)].dtype == DType::i32) return bounds::integers(INT32_MIN, INT32_MAX);
    return {};
  case Op::TO_INTEGER:
    if (limited_[size_t(n)]) return bounds::integers(-kLimit, kLimit);
    return {};
  default:
    return {};
  }
}

// Finds the integers made of reals that change no result if they are limited to +-kLimit, because whatever takes them compares or clamps
// them. room: how much may be added to a node's value until then; negative: it may not be limited.
void CudaFunctions::find_limited() {
  constexpr int64_t kCompared = 1 << 28; // below kLimit - kSmallConstant
  std::vector<int64_t> room(size_t(graph_.size()), kSmallConstant);
  for (int32_t n = graph_.size() - 1; n >= 0; n--) { // what takes a node stands behind it
    const Node &x = graph_[n];
    if (!used_[size_t(n)]) continue;
    const int64_t own = room[size_t(n)];
    limited_[size_t(n)] = own >= 0 && x.op == Op::TO_INTEGER && graph_[x.inputs[0]].kind == Kind::real;
    for (int32_t i = 0; i < x.count; i++) {
      const int32_t input = x.inputs[size_t(i)];
      if (graph_[input].kind != Kind::integer) continue;
      // The size of the other input of two.
      const auto within = [&](int64_t most) { return ranges_[size_t(x.inputs[size_t(1 - i)])].whole.within(most); };
      int64_t left = -1;
      switch (x.op) {
      case Op::LOAD:
        if (short_axes(captured_[size_t(x.captured)])) left = kSmallConstant;
        break;
      case Op::EQUAL:
      case Op::NOT_EQUAL:
      case Op::LESS:
      case Op::LESS_EQUAL:
      case Op::GREATER:
      case Op::GREATER_EQUAL:
        if (within(kCompared)) left = kSmallConstant;
        break;
      case Op::MINIMUM:
      case Op::MAXIMUM:
        if (within(kSmallConstant)) left = own;
        break;
      case Op::ADD:
      case Op::SUBTRACT:
        if (within(kSmallConstant)) {
          const Range by = ranges_[size_t(x.inputs[size_t(1 - i)])].whole;
          left = own - std::max(std::abs(by.low), std::abs(by.high));
        }
        break;
      case Op::WHERE:
      case Op::NEGATE:
      case Op::ABSOLUTE:
        left = own;
        break;
      default:
        break;
      }
      room[size_t(input)] = std::min(room[size_t(input)], left);
    }
  }
}

bool CudaFunctions::short_axes(const Captured &x) const {
  return std::all_of(x.size, x.size + x.rank, [](int64_t size) { return size <= 1 << 28; });
}

// Whether the code divides by a constant that is positive and small.
bool CudaFunctions::divides_by_constant(const Node &x) const {
  if ((x.op != Op::FLOOR_DIVIDE && x.op != Op::REMAINDER) || x.kind != Kind::integer) return false;
  const int32_t by = x.inputs[1];
  return graph_[by].op == Op::INTEGER && ranges_[size_t(by)].whole.low > 0 && narrow(by) && narrow(x.inputs[0]);
}

// Whether all distances within the tensor fit 32 bits.
bool CudaFunctions::small(const Captured &x) const {
  double extent = 0;
  for (int32_t axis = 0; axis < x.rank; axis++) extent += std::abs(double(x.stride[axis])) * double(x.size[axis]) + double(x.size[axis]);
  return extent < 2147483647.0;
}

std::array<int32_t, 2> CudaFunctions::made_digest() const {
  Hash hash;
  hash.add(uint64_t(program_->digest[1]) << 32 | program_->digest[0]);
  hash.add(uint64_t(score_ >= 0) | uint64_t(seen_ >= 0) << 1 | uint64_t(most_position_ == kShortPosition) << 2 |
           uint64_t(penalty_ >= 0) << 3 | loads_.size() << 4);
  for (const LoadGradient &g : loads_) hash.add(uint64_t(is_real(graph_[g.slope], 1)));
  for (const Ahead &x : ahead_) hash.add(uint64_t(x.node) | uint64_t(1) << 32); // what else there is to know follows from the graph
  for (int32_t n = 0; n < graph_.size(); n++) {
    const Node &x = graph_[n];
    if (!used_[size_t(n)]) continue;
    if (x.op == Op::LOAD) {
      const Captured &tensor = captured_[size_t(x.captured)];
      hash.add(uint64_t(tensor.dtype) | uint64_t(small(tensor)) << 32 | uint64_t(short_axes(tensor)) << 33);
    }
    if (x.op == Op::INTEGER) hash.add(uint64_t(ranges_[size_t(n)].whole.low) ^ uint64_t(divides_[size_t(n)] && is_power_of_two(x)));
    if (is_constant(x.op) && place_[size_t(n)] < 0) hash.add(x.op == Op::REAL ? std::bit_cast<uint64_t>(x.real) : uint64_t(x.integer));
  }
  const auto [low, high] = hash.words();
  return {int32_t(low ? low : 1), int32_t(high)}; // 0: there are no functions
}

// The type of a value in memory. A boolean is a real there: 0 if it is true, else -inf.
const char *CudaFunctions::stored(const Ahead &x) const {
  const Kind kind = graph_[x.node].kind;
  return kind == Kind::boolean ? "T" : type(kind, narrow(x.node));
}

std::vector<CapturedOperand> CudaFunctions::operands_ahead() const {
  std::vector<CapturedOperand> all;
  int64_t bytes = 0;
  for (const Ahead &x : ahead_) {
    const int64_t before = kRoomAhead + (x.by == kOfDifference ? std::max<int64_t>(seqlen_k_ - 1, 0) : 0);
    const int64_t length = before + kRoomAhead + (x.by == kOfKey ? seqlen_k_ : seqlen_q_);
    const int64_t batch = x.of_batch ? batch_ : 1, heads = x.of_head ? heads_ : 1;
    const int64_t element = graph_[x.node].kind == Kind::integer ? (narrow(x.node) ? 4 : 8) : dtype_ == DType::f64 ? 8 : 4;
    all.push_back({.data = reinterpret_cast<const void *>(bytes + before * element),
                   .stride = {heads * length, length, 1, 0},
                   .size = {batch, heads, length, -before}});
    bytes += (batch * heads * length * element + 255) / 256 * 256;
  }
  return all;
}

bool CudaFunctions::fetchable() const { return !ahead_.empty() && ahead_[0].by != kOfQuery && narrow(ahead_[0].node); }

int64_t CudaFunctions::bytes_ahead() const {
  if (ahead_.empty()) return 0;
  const CapturedOperand last = operands_ahead().back();
  return reinterpret_cast<intptr_t>(last.data) + last.size[0] * last.stride[0] * 8;
}

FunctionArguments CudaFunctions::arguments(void *values) const {
  FunctionArguments a = arguments();
  const std::vector<CapturedOperand> operands = operands_ahead();
  for (size_t n = 0; n < operands.size(); n++) {
    CapturedOperand &x = a.captured[slot_ahead(n)];
    x = operands[n], x.data = static_cast<std::byte *>(values) + reinterpret_cast<intptr_t>(operands[n].data);
  }
  return a;
}

std::string CudaFunctions::formula_ahead(const Ahead &x) const { return formula(graph_, x.node); }

// The place of a value's operand among the captured tensors: the last ones that are free.
int32_t CudaFunctions::slot_ahead(size_t n) const {
  int32_t slot = STROBE_MOST_CAPTURED - 1;
  for (size_t free = 0;; slot--)
    if (!captured_[size_t(slot)] && free++ == n) return slot;
}

FunctionArguments CudaFunctions::arguments() const {
  FunctionArguments a{};
  for (size_t i = 0; i < numbers_.size(); i++) {
    const Node &x = graph_[numbers_[i]];
    if (x.op != Op::REAL)
      a.numbers[i] = uint64_t(x.integer);
    else if (dtype_ == DType::f64)
      a.numbers[i] = std::bit_cast<uint64_t>(x.real);
    else
      a.numbers[i] = std::bit_cast<uint32_t>(float(x.real));
  }
  for (size_t i = 0; i < divisors_.size(); i++) a.divisors[i] = Divisor::make(uint32_t(graph_[divisors_[i]].integer));
  for (int i = 0; i < FunctionArguments::kRead; i++) {
    const Captured &x = captured_[size_t(i)];
    if (!x) continue;
    a.captured[i].data = x.data;
    for (int axis = 0; axis < 4; axis++) a.captured[i].size[axis] = x.size[axis], a.captured[i].stride[axis] = x.stride[axis];
  }
  return a;
}

int32_t CudaFunctions::instructions() const {
  std::vector<bool> by_pair(size_t(graph_.size()), false); // whether it depends on the key
  std::vector<bool> needed = used_;
  if (!ahead_.empty()) {
    needed.assign(used_.size(), false);
    for (const int32_t root : {score_, slope_, seen_}) {
      const std::vector<bool> more = evaluated(root);
      for (size_t n = 0; n < more.size(); n++) needed[n] = needed[n] || more[n];
    }
  }
  int32_t sum = 0;
  for (int32_t n = 0; n < graph_.size(); n++) {
    const Node &x = graph_[n];
    bool varies = x.op == Op::SCORE || x.op == Op::KEY;
    for (int32_t i = 0; i < x.count; i++) varies = varies || by_pair[size_t(x.inputs[size_t(i)])];
    by_pair[size_t(n)] = varies;
    if (place_ahead_[size_t(n)] >= 0) {
      sum += x.kind == Kind::boolean ? 8 : narrow(n) ? 2 : 6; // a boolean in the backward is compared and chosen by
      continue;
    }
    if (needed[size_t(n)] && varies && x.count) sum += instructions_of(x) * (narrow(n) ? 1 : 3);
  }
  return sum;
}

std::string CudaFunctions::constant(int32_t n) const {
  const Node &x = graph_[n];
  const char *own = type(x.kind, narrow(n));
  if (const int32_t place = place_[size_t(n)]; place >= 0)
    return x.op == Op::REAL ? text("number<T>(a, ", place, ")") : text("(", own, ")number<i64>(a, ", place, ")");
  if (x.op == Op::REAL) return text("T(__longlong_as_double((i64)", std::bit_cast<uint64_t>(x.real), "ull))");
  return text("(", own, ")(i64)", uint64_t(x.integer), "ull");
}

std::string CudaFunctions::load(const Node &x) const {
  const Captured &tensor = captured_[size_t(x.captured)];
  const char *at = small(tensor) ? "i32" : "i64";
  const std::string operand = text("a.captured[", x.captured, "]");
  std::string distance;
  for (int32_t axis = 0; axis < x.count; axis++) {
    const int32_t index = x.inputs[size_t(axis)];
    distance +=
        text(axis ? " + " : "", "step<", at, ", ", negative(index) ? "false" : "true", ">(", name(index), ", ", operand, ", ", axis, ")");
  }
  return text("load<", type(x.kind, tensor.dtype == DType::i32), ", ", element(tensor.dtype), ">(", operand, ", ",
              distance.empty() ? "0" : distance, ")");
}

// A function of functions.h; integers are computed in 32 bits if inputs and result fit.
std::string CudaFunctions::call(int32_t n, const char *name_of_op) const {
  const Node &x = graph_[n];
  std::string arguments;
  bool fit = true; // the inputs
  for (int32_t i = 0; i < x.count; i++) {
    const int32_t input = x.inputs[size_t(i)];
    arguments += text(i ? ", " : "", name(input));
    fit = fit && narrow(input);
  }
  if (x.kind == Kind::real) return text(exact_[size_t(n)] ? "Exact::" : "R::", name_of_op, "(", arguments, ")");
  const bool fits = narrow(n);
  return text(fits ? "(i32)" : "", "Integers<", fit && fits ? "i32" : "i64", ">::", name_of_op, "(", arguments, ")");
}

// |a - b| <= c, as one comparison without a sign.
std::string CudaFunctions::within(const Node &x) const {
  const Node &size = graph_[x.inputs[0]];
  if (x.op != Op::LESS_EQUAL || size.op != Op::ABSOLUTE || size.kind != Kind::integer) return {};
  const Node &difference = graph_[size.inputs[0]];
  if (difference.op != Op::SUBTRACT) return {};
  const int32_t a = difference.inputs[0], b = difference.inputs[1], most = x.inputs[1];
  const auto small = [this](int32_t n) { return ranges_[size_t(n)].whole.within(kSmallConstant); };
  return small(a) && small(b) && small(most) && !negative(most) ? text("within(", name(a), ", ", name(b), ", ", name(most), ")") : "";
}

std::string CudaFunctions::compared(const Node &x, const char *sign) const {
  if (const std::string near = within(x); !near.empty()) return near;
  return text(name(x.inputs[0]), " ", sign, " ", name(x.inputs[1]));
}

std::string CudaFunctions::expression(int32_t n) const {
  const Node &x = graph_[n];
  const std::string first = x.count > 0 ? name(x.inputs[0]) : "", second = x.count > 1 ? name(x.inputs[1]) : "";
  const bool boolean = x.kind == Kind::boolean;
  switch (x.op) {
  case Op::SCORE:
    return "x";
  case Op::BATCH:
    return "at.b";
  case Op::HEAD:
    return "at.h";
  case Op::QUERY:
    return "at.i";
  case Op::KEY:
    return "at.j";
  case Op::OFFSET:
    return "at.offset";
  case Op::SUBTRACT:
    if (graph_[x.inputs[0]].op == Op::QUERY && graph_[x.inputs[1]].op == Op::KEY && most_position_ == kShortPosition)
      return "at.difference()";
    return call(n, "subtract");
  case Op::REAL:
  case Op::INTEGER:
  case Op::BOOLEAN:
    return constant(n);
  case Op::LOAD:
    return load(x);
  case Op::FLOOR_DIVIDE:
  case Op::REMAINDER: {
    const char *op = x.op == Op::REMAINDER ? "remainder" : "floor_divide";
    if (const int32_t place = divisor_place_[size_t(x.inputs[1])]; place >= 0 && divides_by_constant(x))
      return text(op,
                  is_power_of_two(graph_[x.inputs[1]]) ? "_by_power_of_two("
                  : negative(x.inputs[0])              ? "<false>("
                                                       : "<true>(",
                  first, ", a.divisors[", place, "])");
    return call(n, op);
  }
  case Op::AND:
    return boolean ? text("bool(", first, " & ", second, ")") : call(n, "both");
  case Op::OR:
    return boolean ? text("bool(", first, " | ", second, ")") : call(n, "either");
  case Op::XOR:
    return boolean ? text("bool(", first, " ^ ", second, ")") : call(n, "one_of");
  case Op::NOT:
    return boolean ? "!" + first : call(n, "invert");
  case Op::EQUAL:
    return compared(x, "==");
  case Op::NOT_EQUAL:
    return compared(x, "!=");
  case Op::LESS:
    return compared(x, "<");
  case Op::LESS_EQUAL:
    return compared(x, "<=");
  case Op::GREATER:
    return compared(x, ">");
  case Op::GREATER_EQUAL:
    return compared(x, ">=");
  case Op::WHERE: {
    const char *own = type(x.kind, narrow(n));
    return text(first, " ? (", own, ")", second, " : (", own, ")", name(x.inputs[2]));
  }
  case Op::TO_REAL:
    return text("T(", first, ")");
  case Op::TO_INTEGER:
    if (limited_[size_t(n)]) return text("limited_integer(", first, ")");
    return text("(", type(Kind::integer, narrow(n)), ")", first);
  case Op::TO_BOOLEAN:
    return first + " != 0";
  case Op::TO_INT32:
    return "(i32)" + first;
#define STROBE_CALLED(op, name_of_op)                                                                                                      \
  case Op::op:                                                                                                                             \
    return call(n, name_of_op);
    STROBE_CALLED(ADD, "add")
    STROBE_CALLED(MULTIPLY, "multiply")
    STROBE_CALLED(DIVIDE, "divide")
    STROBE_CALLED(TRUNC_REMAINDER, "trunc_remainder")
    STROBE_CALLED(MINIMUM, "minimum")
    STROBE_CALLED(MAXIMUM, "maximum")
    STROBE_CALLED(NEGATE, "negate")
    STROBE_CALLED(ABSOLUTE, "absolute")
    STROBE_CALLED(SIGN, "sign")
    STROBE_CALLED(POWER, "power")
    STROBE_CALLED(SHIFT_LEFT, "shift_left")
    STROBE_CALLED(SHIFT_RIGHT, "shift_right")
    STROBE_CALLED(EXP, "exp")
    STROBE_CALLED(EXP2, "exp2")
    STROBE_CALLED(EXPM1, "expm1")
    STROBE_CALLED(LOG, "log")
    STROBE_CALLED(LOG2, "log2")
    STROBE_CALLED(LOG1P, "log1p")
    STROBE_CALLED(SQRT, "sqrt")
    STROBE_CALLED(RSQRT, "rsqrt")
    STROBE_CALLED(SIN, "sin")
    STROBE_CALLED(COS, "cos")
    STROBE_CALLED(TAN, "tan")
    STROBE_CALLED(ASIN, "asin")
    STROBE_CALLED(ACOS, "acos")
    STROBE_CALLED(ATAN, "atan")
    STROBE_CALLED(ATAN2, "atan2")
    STROBE_CALLED(SINH, "sinh")
    STROBE_CALLED(COSH, "cosh")
    STROBE_CALLED(TANH, "tanh")
    STROBE_CALLED(ASINH, "asinh")
    STROBE_CALLED(ACOSH, "acosh")
    STROBE_CALLED(ATANH, "atanh")
    STROBE_CALLED(ERF, "erf")
    STROBE_CALLED(ERFC, "erfc")
    STROBE_CALLED(SIGMOID, "sigmoid")
    STROBE_CALLED(FLOOR, "floor")
    STROBE_CALLED(CEIL, "ceil")
    STROBE_CALLED(TRUNC, "trunc")
    STROBE_CALLED(ROUND, "round")
    STROBE_CALLED(ARCCOSH_FROM_1, "arccosh_from_1")
#undef STROBE_CALLED
  }
  throw Error(STROBE_INTERNAL, text("operation ", int(x.op), " has no CUDA source"));
}

// The nodes that kernels evaluate for a result: those that it needs, but none behind values that are computed ahead.
std::vector<bool> CudaFunctions::evaluated(int32_t root) const {
  std::vector<bool> needed(size_t(graph_.size()), false);
  if (root >= 0) needed[size_t(root)] = true;
  for (int32_t n = root; n >= 0; n--) // inputs stand before
    for (int32_t i = 0; needed[size_t(n)] && place_ahead_[size_t(n)] < 0 && i < graph_[n].count; i++)
      needed[size_t(graph_[n].inputs[size_t(i)])] = true;
  return needed;
}

std::string CudaFunctions::read_ahead(size_t n) const {
  const Ahead &x = ahead_[n];
  return text("ahead<", stored(x), ", ", along(x), ", ", x.of_batch ? "true" : "false", ", ", x.of_head ? "true" : "false",
              n == 0 && fetchable() ? ", true" : "", ">(a.captured[", slot_ahead(n), "], at)");
}

// The nodes that are wanted and not made already.
std::string CudaFunctions::statements(const std::vector<bool> &wanted, const std::vector<bool> &made, const char *indent,
                                      bool reads_ahead) const {
  std::string all;
  for (int32_t n = 0; n < graph_.size(); n++) {
    if (!wanted[size_t(n)] || made[size_t(n)]) continue;
    const int32_t ahead = reads_ahead ? place_ahead_[size_t(n)] : -1;
    all +=
        text(indent, "const ", type(graph_[n].kind, narrow(n)), " ", name(n), " = ", ahead < 0 ? expression(n) : read_ahead(size_t(ahead)),
             ahead >= 0 && graph_[n].kind == Kind::boolean ? " == T(0);\n" : ";\n");
  }
  return all;
}

// What kernels/passes/ahead.h calls.
std::string CudaFunctions::functions_ahead() const {
  const std::vector<bool> none(size_t(graph_.size()), false);
  std::string slots, by, values;
  for (size_t n = 0; n < ahead_.size(); n++) {
    const Ahead &x = ahead_[n];
    slots += text(n ? ", " : "", slot_ahead(n));
    by += text(n ? ", " : "", along(x));
    const std::string result = graph_[x.node].kind == Kind::boolean ? name(x.node) + " ? T(0) : minus_infinity<T>()" : name(x.node);
    values += text("    ", n ? "else if" : "if", " constexpr (kValue == ", n, ") {\n",
                   statements(graph_.needed_by({x.node}), none, "      ", false), "      return (", stored(x), ")(", result, ");\n    }\n");
  }
  return text("  static constexpr int kAhead = ", ahead_.size(), ";\n", "  static __device__ constexpr i32 slot_ahead(int value) {\n",
              "    constexpr i32 all[] = {", slots, "};\n    return all[value];\n  }\n",
              "  static __device__ constexpr Along along(int value) {\n    constexpr Along all[] = {", by,
              "};\n    return all[value];\n  }\n",
              "  template <int kValue, class T> static __device__ __forceinline__ auto value_ahead(const FunctionArguments &a, const "
              "PlaceOfPair &at) {\n    using R = Reals<Functions::full, T>;\n    using Exact = R;\n",
              values, "  }\n");
}

// The number of the element that a load reads, if elements are numbered row by row. It fits 32 bits: larger tensors have no gradient.
std::string CudaFunctions::element_read(const Node &x) const {
  std::string number = "0";
  for (int32_t axis = 0; axis < x.count; axis++) {
    const int32_t index = x.inputs[size_t(axis)];
    const std::string place = text("place_on_axis<i32, ", negative(index) ? "false" : "true", ">(", name(index), ", g.size[", axis, "])");
    number = axis ? text("(", number, ") * (i32)g.size[", axis, "] + ", place) : place;
  }
  return number;
}

// What device/captured.h calls.
std::string CudaFunctions::gradients() const {
  const std::vector<bool> none(size_t(graph_.size()), false);
  std::string captured, units, values, elements;
  std::vector<bool> made = none;
  for (size_t n = 0; n < loads_.size(); n++) {
    const LoadGradient &g = loads_[n];
    const Node &load = graph_[g.load];
    captured += text(n ? ", " : "", load.captured), units += text(n ? ", " : "", is_real(graph_[g.slope], 1) ? "true" : "false");
    const std::vector<bool> slope = graph_.needed_by({g.slope});
    values += statements(slope, made, "    ") + text("    if constexpr (kSome.has(", n, ")) out[", n, "] = ", name(g.slope), ";\n");
    for (size_t node = 0; node < made.size(); node++) made[node] = made[node] || slope[node];
    std::vector<int32_t> indices(load.inputs.begin(), load.inputs.begin() + load.count);
    elements += text(n ? "    else if constexpr (kLoad == " : "    if constexpr (kLoad == ", n, ") {\n",
                     statements(graph_.needed_by(indices), none, "      "), "      return ", element_read(load), ";\n    }\n");
  }
  return text(
      "  static constexpr int kLoads = ", loads_.size(), ";\n", "  static __device__ constexpr i32 captured_of(int load) {\n",
      "    constexpr i32 all[] = {", captured, "};\n    return all[load];\n  }\n",
      "  static __device__ constexpr bool is_unit(int load) {\n    constexpr bool all[] = {", units, "};\n    return all[load];\n  }\n",
      "  template <Functions kFunctions, LoadSet kSome, class T>\n"
      "  static __device__ __forceinline__ void gradients(const FunctionArguments &a, const PlaceOfPair &at, T x, T (&out)[kLoads]) {\n"
      "    using R = Reals<kFunctions, T>;\n    using Exact = Reals<Functions::full, T>;\n",
      values,
      "  }\n  template <Functions kFunctions, int kLoad, class T>\n"
      "  static __device__ __forceinline__ i64 element(const FunctionArguments &a, const CapturedGradient &g, const PlaceOfPair &at, T "
      "x) {\n    using R = Reals<kFunctions, T>;\n    using Exact = Reals<Functions::full, T>;\n",
      elements, "  }\n");
}

std::string CudaFunctions::source() const {
  const std::array<int32_t, 2> key = digest();
  const std::vector<bool> none(size_t(graph_.size()), false);
  std::string out = text("#pragma once\n#include \"device/", loads_.empty() ? "functions" : "captured",
                         ".h\"\nnamespace strobe {\ntemplate <> struct CallersFunctions<", key[0], ", ", key[1], "> {\n");
  if (score_ >= 0) {
    const std::vector<bool> value = evaluated(score_), all = evaluated(slope_);
    out += text("  template <Functions kFunctions, bool kSlope, class T>\n"
                "  static __device__ __forceinline__ T score(const FunctionArguments &a, const PlaceOfPair &at, T x, T &slope) {\n"
                "    using R = Reals<kFunctions, T>;\n"
                "    using Exact = Reals<Functions::full, T>;\n",
                statements(value, none, "    "), slope_ >= 0 ? "    if constexpr (kSlope) {\n" + statements(all, value, "      ") : "",
                slope_ >= 0 ? text("      slope = ", name(slope_), ";\n    }\n") : "    if constexpr (kSlope) slope = T(1);\n",
                "    return ", name(score_), ";\n  }\n");
  }
  if (seen_ >= 0) {
    const std::vector<bool> wanted = evaluated(seen_);
    out += text("  template <Functions kFunctions, class T>\n"
                "  static __device__ __forceinline__ bool seen(const FunctionArguments &a, const PlaceOfPair &at) {\n"
                "    using Exact = Reals<Functions::full, T>;\n",
                statements(wanted, none, "    "), "    return ", name(seen_), ";\n  }\n");
  }
  if (const int32_t place = seen_ >= 0 ? place_ahead_[size_t(seen_)] : -1; place >= 0)
    out += text("  template <class T> static __device__ __forceinline__ T hidden(const FunctionArguments &a, const PlaceOfPair &at) {\n"
                "    return ",
                read_ahead(size_t(place)), ";\n  }\n");
  if (fetchable())
    out += text(
        "  static constexpr Along kFetched = ", along(ahead_[0]), ";\n",
        "  template <class T> static __device__ __forceinline__ const T *fetchable(const FunctionArguments &a, const PlaceOfPair &at) {\n"
        "    return (const T *)values_ahead<",
        stored(ahead_[0]), ", ", ahead_[0].of_batch ? "true" : "false", ", ", ahead_[0].of_head ? "true" : "false", ">(a.captured[",
        slot_ahead(0), "], at);\n  }\n");
  if (!loads_.empty()) out += gradients();
  if (!ahead_.empty()) out += functions_ahead();
  if (penalty_ >= 0) {
    const std::vector<bool> wanted = graph_.needed_by({penalty_});
    out += text("  template <Functions kFunctions, class T>\n"
                "  static __device__ __forceinline__ T penalty(const FunctionArguments &a, const PlaceOfPair &at) {\n"
                "    using R = Reals<kFunctions, T>;\n"
                "    using Exact = Reals<Functions::full, T>;\n",
                statements(wanted, none, "    "), "    return ", name(penalty_), ";\n  }\n");
  }
  return out + "};\n} // namespace strobe\n";
}

} // namespace strobe::score
