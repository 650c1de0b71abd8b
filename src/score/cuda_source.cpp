#include "score/cuda_source.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "attention/text.h"
#include "score/hash.h"

namespace strobe::score {
namespace {

constexpr double kMostOf64Bits = 9223372036854775807.0;
constexpr double kLimit = 1 << 30;                                   // of limited_integer()
constexpr double kSmallConstant = 1 << 29, kShortPosition = 1 << 24; // classes: numbers and lengths below make the same code

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

std::string name(int32_t node) { return text("n", node); }

bool is_real(const Node &x, double value) { return x.op == Op::REAL && x.real == value; }
bool only_adds(const Graph &g, int32_t score, int32_t slope, int depth = 0) {
  if (slope < 0 || is_real(g[slope], 1) || is_real(g[score], -std::numeric_limits<double>::infinity())) return true;
  const Node &f = g[score], &d = g[slope];
  if (depth > 8) return false;
  return f.op == Op::WHERE && d.op == Op::WHERE && f.inputs[0] == d.inputs[0] && only_adds(g, f.inputs[1], d.inputs[1], depth + 1) &&
         only_adds(g, f.inputs[2], d.inputs[2], depth + 1);
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

// Whether the numbers of the tensor's elements fit 32 bits.
bool few_elements(const Captured &x) {
  double count = 1;
  for (int32_t axis = 0; axis < x.rank; axis++) count *= double(x.size[axis]);
  return count < 2147483647.0;
}

} // namespace

bool only_adds(const Program &p) { return p.score >= 0 && only_adds(p.graph, p.score, p.slope); }

CudaFunctions::CudaFunctions(const Problem &p, bool scored)
    : CudaFunctions(p, *p.program, {}, scored ? p.program->score : -1, scored ? p.program->slope : -1) {}
CudaFunctions::CudaFunctions(const Problem &p, bool scored, const GradientProgram &gradients)
    : CudaFunctions(p, gradients, gradients.loads, scored ? gradients.score : -1, -1) {}

CudaFunctions::CudaFunctions(const Problem &p, const Program &program, const std::vector<LoadGradient> &loads, int32_t score, int32_t slope)
    : problem_(p), program_(program), graph_(program_.graph), loads_(loads), score_(score), slope_(slope), seen_(program_.seen) {
  const int64_t most = std::max({p.part ? p.part.first_batch + p.batch : p.batch, p.part ? p.part.heads : p.heads, p.size_q(), p.size_k(),
                                 p.part ? p.part.first_head + p.heads : 0});
  most_position_ = double(most) < kShortPosition ? kShortPosition : 2147483647.0;
  const size_t count = size_t(graph_.size());
  std::vector<int32_t> roots{score_, slope_, seen_};
  for (const LoadGradient &g : loads_) roots.insert(roots.end(), {g.load, g.slope});
  used_ = graph_.needed_by(roots);
  place_.assign(count, -1), divisor_place_.assign(count, -1);
  limited_.assign(count, false), divides_.assign(count, false);
  for (const Node &x : graph_.nodes())
    if (x.op == Op::FLOOR_DIVIDE || x.op == Op::REMAINDER) divides_[size_t(x.inputs[1])] = true;
  find_ranges();
  for (int32_t n = 0; n < graph_.size(); n++)
    limited_[size_t(n)] =
        used_[size_t(n)] && graph_[n].op == Op::TO_INTEGER && graph_[graph_[n].inputs[0]].kind == Kind::real && may_be_limited(n, 0);
  find_ranges();
  for (int32_t n = 0; n < graph_.size(); n++) {
    if (!used_[size_t(n)]) continue;
    if (is_constant(graph_[n].op) && numbers_.size() < FunctionArguments::kNumbers)
      place_[size_t(n)] = int32_t(numbers_.size()), numbers_.push_back(n);
    if (!divides_by_constant(graph_[n])) continue;
    int32_t &place = divisor_place_[size_t(graph_[n].inputs[1])];
    if (place < 0 && divisors_.size() < FunctionArguments::kDivisors)
      place = int32_t(divisors_.size()), divisors_.push_back(graph_[n].inputs[1]);
  }
}

void CudaFunctions::find_ranges() {
  ranges_.clear();
  for (int32_t n = 0; n < graph_.size(); n++) ranges_.push_back(range(n)); // inputs stand before
}

// Whether no result changes if the integer `node` is limited to +-kLimit: whatever takes it compares or clamps it. added: how much may have
// been added to the limited number before. depth: how far the search went.
bool CudaFunctions::may_be_limited(int32_t node, double added, int depth) const {
  if (depth > 8) return false;
  constexpr double kCompared = 1 << 28; // below kLimit - kSmallConstant
  for (int32_t n = node + 1; n < graph_.size(); n++) {
    const Node &x = graph_[n];
    if (!used_[size_t(n)]) continue;
    for (int32_t i = 0; i < x.count; i++) {
      if (x.inputs[size_t(i)] != node) continue;
      const Range other = x.count == 2 ? ranges_[size_t(x.inputs[size_t(1 - i)])] : Range{-kMostOf64Bits, kMostOf64Bits};
      const double most = std::max(std::abs(other.low), std::abs(other.high));
      switch (x.op) {
      case Op::LOAD:
        if (!short_axes(problem_.captured[x.captured])) return false;
        break;
      case Op::EQUAL:
      case Op::NOT_EQUAL:
      case Op::LESS:
      case Op::LESS_EQUAL:
      case Op::GREATER:
      case Op::GREATER_EQUAL:
        if (most > kCompared) return false;
        break;
      case Op::MINIMUM:
      case Op::MAXIMUM:
        if (most > kSmallConstant || !may_be_limited(n, added, depth + 1)) return false;
        break;
      case Op::ADD:
      case Op::SUBTRACT:
        if (added + most > kSmallConstant || !may_be_limited(n, added + most, depth + 1)) return false;
        break;
      case Op::WHERE:
      case Op::NEGATE:
      case Op::ABSOLUTE:
        if (!may_be_limited(n, added, depth + 1)) return false;
        break;
      default:
        return false;
      }
    }
  }
  return true;
}
bool CudaFunctions::short_axes(const Captured &x) const {
  return std::all_of(x.size, x.size + x.rank, [](int64_t size) { return size <= 1 << 28; });
}

// Whether the code divides by a constant that is positive and small.
bool CudaFunctions::divides_by_constant(const Node &x) const {
  if ((x.op != Op::FLOOR_DIVIDE && x.op != Op::REMAINDER) || x.kind != Kind::integer) return false;
  const Node &by = graph_[x.inputs[1]];
  return by.op == Op::INTEGER && ranges_[size_t(x.inputs[1])].low > 0 && ranges_[size_t(x.inputs[0])].narrow();
}

CudaFunctions::Range CudaFunctions::range(int32_t n) const {
  const Node &x = graph_[n];
  const Range all{-kMostOf64Bits, kMostOf64Bits};
  if (x.kind != Kind::integer) return all;
  const auto input = [&](int n) { return ranges_[size_t(x.inputs[size_t(n)])]; };
  const auto within = [&](double low, double high) {
    return low > -kMostOf64Bits / 2 && high < kMostOf64Bits / 2 ? Range{low, high} : all;
  }; // else it may wrap
  const auto size = [](const Range &r) { return std::max(std::abs(r.low), std::abs(r.high)); };
  switch (x.op) {
  case Op::BATCH:
  case Op::HEAD:
  case Op::QUERY:
  case Op::KEY:
    return {0, most_position_};
  case Op::OFFSET:
    return {-most_position_, most_position_};
  case Op::INTEGER: // its value makes no other code, but for its class: large or not, and of a divisor also positive or not
    if (std::abs(double(x.integer)) >= kSmallConstant) return all;
    return {divides_[size_t(n)] && x.integer > 0 ? 1 : -kSmallConstant, kSmallConstant};
  case Op::LOAD:
    return problem_.captured[x.captured].dtype == DType::i32 ? Range{-2147483648.0, 2147483647.0} : all;
  case Op::TO_INTEGER:
    if (graph_[x.inputs[0]].kind == Kind::real) return limited_[size_t(n)] ? Range{-kLimit, kLimit} : all;
    return graph_[x.inputs[0]].kind == Kind::boolean ? Range{0, 1} : input(0);
  case Op::ADD:
    return within(input(0).low + input(1).low, input(0).high + input(1).high);
  case Op::SUBTRACT:
    return within(input(0).low - input(1).high, input(0).high - input(1).low);
  case Op::MULTIPLY: {
    const Range a = input(0), b = input(1);
    const auto [low, high] = std::minmax({a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high});
    return within(low, high);
  }
  case Op::FLOOR_DIVIDE: {
    const double most = size(input(0));
    return within(input(0).low >= 0 && input(1).low >= 0 ? 0 : -most, most);
  }
  case Op::REMAINDER: {
    const double most = size(input(1));
    if (input(1).low >= 0) return within(0, input(0).low >= 0 ? std::min(most, input(0).high) : most);
    return within(-most, most);
  }
  case Op::TRUNC_REMAINDER: {
    const double most = std::min(size(input(0)), size(input(1)));
    return within(input(0).low >= 0 ? 0 : -most, most);
  }
  case Op::MINIMUM:
    return {std::min(input(0).low, input(1).low), std::min(input(0).high, input(1).high)};
  case Op::MAXIMUM:
    return {std::max(input(0).low, input(1).low), std::max(input(0).high, input(1).high)};
  case Op::NEGATE:
    return within(-input(0).high, -input(0).low);
  case Op::ABSOLUTE:
    return within(0, size(input(0)));
  case Op::SIGN:
    return {-1, 1};
  case Op::AND:
    if (input(0).low >= 0 || input(1).low >= 0)
      return {0, std::min(input(0).low >= 0 ? input(0).high : kMostOf64Bits, input(1).low >= 0 ? input(1).high : kMostOf64Bits)};
    [[fallthrough]];
  case Op::OR:
  case Op::XOR:
    return input(0).narrow() && input(1).narrow() ? Range{-2147483648.0, 2147483647.0} : all;
  case Op::NOT:
    return within(-input(0).high - 1, -input(0).low - 1);
  case Op::SHIFT_RIGHT:
    return {std::min(input(0).low, -1.0), std::max(input(0).high, 0.0)};
  case Op::WHERE:
    return {std::min(input(1).low, input(2).low), std::max(input(1).high, input(2).high)};
  default:
    return all;
  }
}

// Whether all distances within the tensor fit 32 bits.
bool CudaFunctions::small(const Captured &x) const {
  double extent = 0;
  for (int32_t axis = 0; axis < x.rank; axis++) extent += std::abs(double(x.stride[axis])) * double(x.size[axis]) + double(x.size[axis]);
  return extent < 2147483647.0;
}

std::array<int32_t, 2> CudaFunctions::digest() const {
  Hash hash;
  hash.add(uint64_t(program_.digest[1]) << 32 | program_.digest[0]);
  hash.add(uint64_t(score_ >= 0) | uint64_t(seen_ >= 0) << 1 | uint64_t(most_position_ == kShortPosition) << 2 | loads_.size() << 3);
  for (const LoadGradient &g : loads_)
    hash.add(uint64_t(few_elements(problem_.captured[graph_[g.load].captured])) | uint64_t(is_real(graph_[g.slope], 1)) << 1);
  for (int32_t n = 0; n < graph_.size(); n++) {
    const Node &x = graph_[n];
    if (!used_[size_t(n)]) continue;
    if (x.op == Op::LOAD) {
      const Captured &tensor = problem_.captured[x.captured];
      hash.add(uint64_t(tensor.dtype) | uint64_t(small(tensor)) << 32 | uint64_t(short_axes(tensor)) << 33);
    }
    if (x.op == Op::INTEGER) hash.add(uint64_t(int64_t(ranges_[size_t(n)].low)));
    if (is_constant(x.op) && place_[size_t(n)] < 0) hash.add(x.op == Op::REAL ? std::bit_cast<uint64_t>(x.real) : uint64_t(x.integer));
  }
  const auto [low, high] = hash.words();
  return {int32_t(low ? low : 1), int32_t(high)}; // 0: there are no functions
}

FunctionArguments CudaFunctions::arguments() const {
  FunctionArguments a{};
  for (size_t i = 0; i < numbers_.size(); i++) {
    const Node &x = graph_[numbers_[i]];
    if (x.op != Op::REAL)
      a.numbers[i] = uint64_t(x.integer);
    else if (problem_.dtype == DType::f64)
      a.numbers[i] = std::bit_cast<uint64_t>(x.real);
    else
      a.numbers[i] = std::bit_cast<uint32_t>(float(x.real));
  }
  for (size_t i = 0; i < divisors_.size(); i++) a.divisors[i] = Divisor::make(uint32_t(graph_[divisors_[i]].integer));
  for (int i = 0; i < STROBE_MOST_CAPTURED; i++) {
    const Captured &x = problem_.captured[i];
    if (!x) continue;
    a.captured[i].data = x.data;
    for (int axis = 0; axis < 4; axis++) a.captured[i].size[axis] = x.size[axis], a.captured[i].stride[axis] = x.stride[axis];
  }
  return a;
}

int32_t CudaFunctions::instructions() const {
  std::vector<bool> by_pair(size_t(graph_.size()), false); // whether it depends on the key
  int32_t sum = 0;
  for (int32_t n = 0; n < graph_.size(); n++) {
    const Node &x = graph_[n];
    bool varies = x.op == Op::SCORE || x.op == Op::KEY;
    for (int32_t i = 0; i < x.count; i++) varies = varies || by_pair[size_t(x.inputs[size_t(i)])];
    by_pair[size_t(n)] = varies;
    if (used_[size_t(n)] && varies && x.count)
      sum += instructions_of(x) * (x.kind == Kind::integer && !ranges_[size_t(n)].narrow() ? 3 : 1);
  }
  return sum;
}

std::string CudaFunctions::constant(int32_t n) const {
  const Node &x = graph_[n];
  const char *own = type(x.kind, ranges_[size_t(n)].narrow());
  if (const int32_t place = place_[size_t(n)]; place >= 0)
    return x.op == Op::REAL ? text("number<T>(a, ", place, ")") : text("(", own, ")number<i64>(a, ", place, ")");
  if (x.op == Op::REAL) return text("T(__longlong_as_double((i64)", std::bit_cast<uint64_t>(x.real), "ull))");
  return text("(", own, ")(i64)", uint64_t(x.integer), "ull");
}

std::string CudaFunctions::load(const Node &x) const {
  const Captured &tensor = problem_.captured[x.captured];
  const char *at = small(tensor) ? "i32" : "i64";
  const std::string operand = text("a.captured[", x.captured, "]");
  std::string distance;
  for (int32_t axis = 0; axis < x.count; axis++) {
    const int32_t index = x.inputs[size_t(axis)];
    distance += text(axis ? " + " : "", "step<", at, ", ", ranges_[size_t(index)].low >= 0 ? "true" : "false", ">(", name(index), ", ",
                     operand, ", ", axis, ")");
  }
  const bool narrow = tensor.dtype == DType::i32;
  return text("load<", type(x.kind, narrow), ", ", element(tensor.dtype), ">(", operand, ", ", distance.empty() ? "0" : distance, ")");
}

// A function of functions.h; integers are computed in 32 bits if inputs and result fit.
std::string CudaFunctions::call(int32_t n, const char *name_of_op) const {
  const Node &x = graph_[n];
  std::string arguments;
  bool narrow = true;
  for (int32_t i = 0; i < x.count; i++) {
    const int32_t input = x.inputs[size_t(i)];
    arguments += text(i ? ", " : "", name(input));
    narrow = narrow && ranges_[size_t(input)].narrow();
  }
  if (x.kind == Kind::real) return text("R::", name_of_op, "(", arguments, ")");
  const bool fits = ranges_[size_t(n)].narrow();
  return text(fits ? "(i32)" : "", "Integers<", narrow && fits ? "i32" : "i64", ">::", name_of_op, "(", arguments, ")");
}

std::string CudaFunctions::compared(const Node &x, const char *sign) const {
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
      return text(op, ranges_[size_t(x.inputs[0])].low >= 0 ? "<true>(" : "<false>(", first, ", a.divisors[", place, "])");
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
    const char *own = type(x.kind, ranges_[size_t(n)].narrow());
    return text(first, " ? (", own, ")", second, " : (", own, ")", name(x.inputs[2]));
  }
  case Op::TO_REAL:
    return text("T(", first, ")");
  case Op::TO_INTEGER:
    if (limited_[size_t(n)]) return text("limited_integer(", first, ")");
    return text("(", type(Kind::integer, ranges_[size_t(n)].narrow()), ")", first);
  case Op::TO_BOOLEAN:
    return first + " != 0";
#define STROBE_CALLED(op, name_of_op)                                                                                                      \
  case Op::op:                                                                                                                             \
    return call(n, name_of_op);
    STROBE_CALLED(ADD, "add")
    STROBE_CALLED(SUBTRACT, "subtract")
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

// The nodes that are wanted and not made already.
std::string CudaFunctions::statements(const std::vector<bool> &wanted, const std::vector<bool> &made, const char *indent) const {
  std::string all;
  for (int32_t n = 0; n < graph_.size(); n++)
    if (wanted[size_t(n)] && !made[size_t(n)])
      all += text(indent, "const ", type(graph_[n].kind, ranges_[size_t(n)].narrow()), " ", name(n), " = ", expression(n), ";\n");
  return all;
}

// The number of the element that a load reads, if elements are numbered row by row.
std::string CudaFunctions::element_read(const Node &x) const {
  const Captured &tensor = problem_.captured[x.captured];
  const char *at = few_elements(tensor) ? "i32" : "i64";
  std::string number = "0";
  for (int32_t axis = 0; axis < x.count; axis++) {
    const int32_t index = x.inputs[size_t(axis)];
    const std::string place =
        text("place_on_axis<", at, ", ", ranges_[size_t(index)].low >= 0 ? "true" : "false", ">(", name(index), ", g.size[", axis, "])");
    number = axis ? text("(", number, ") * (", at, ")g.size[", axis, "] + ", place) : place;
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
    values +=
        statements(slope, made, "    ") + text("    if constexpr ((kLoads_ >> ", n, " & 1) != 0) out[", n, "] = ", name(g.slope), ";\n");
    for (size_t node = 0; node < made.size(); node++) made[node] = made[node] || slope[node];
    std::vector<int32_t> indices(load.inputs.begin(), load.inputs.begin() + load.count);
    elements += text(n ? "    else if constexpr (kLoad == " : "    if constexpr (kLoad == ", n, ") {\n",
                     statements(graph_.needed_by(indices), none, "      "), "      return ", element_read(load), ";\n    }\n");
  }
  return text(
      "  static constexpr int kLoads = ", loads_.size(), ";\n", "  static __device__ constexpr i32 captured_of(int load) {\n",
      "    constexpr i32 all[] = {", captured, "};\n    return all[load];\n  }\n",
      "  static __device__ constexpr bool is_unit(int load) {\n    constexpr bool all[] = {", units, "};\n    return all[load];\n  }\n",
      "  template <Functions kFunctions, i32 kLoads_, class T>\n"
      "  static __device__ __forceinline__ void gradients(const FunctionArguments &a, const PlaceOfPair &at, T x, T (&out)[kLoads]) {\n"
      "    using R = Reals<kFunctions, T>;\n",
      values,
      "  }\n  template <Functions kFunctions, int kLoad, class T>\n"
      "  static __device__ __forceinline__ i64 element(const FunctionArguments &a, const CapturedGradient &g, const PlaceOfPair &at, T "
      "x) {\n    using R = Reals<kFunctions, T>;\n",
      elements, "  }\n");
}

std::string CudaFunctions::source() const {
  const std::array<int32_t, 2> key = digest();
  const std::vector<bool> none(size_t(graph_.size()), false);
  std::string out = text("#pragma once\n#include \"device/", loads_.empty() ? "functions" : "captured",
                         ".h\"\nnamespace strobe {\ntemplate <> struct CallersFunctions<", key[0], ", ", key[1], "> {\n");
  if (score_ >= 0) {
    const std::vector<bool> value = graph_.needed_by({score_}), all = graph_.needed_by({slope_});
    out += text("  template <Functions kFunctions, bool kSlope, class T>\n"
                "  static __device__ __forceinline__ T score(const FunctionArguments &a, const PlaceOfPair &at, T x, T &slope) {\n"
                "    using R = Reals<kFunctions, T>;\n",
                statements(value, none, "    "), slope_ >= 0 ? "    if constexpr (kSlope) {\n" + statements(all, value, "      ") : "",
                slope_ >= 0 ? text("      slope = ", name(slope_), ";\n    }\n") : "    if constexpr (kSlope) slope = T(1);\n",
                "    return ", name(score_), ";\n  }\n");
  }
  if (seen_ >= 0) {
    const std::vector<bool> wanted = graph_.needed_by({seen_});
    out += text("  template <Functions kFunctions, class T>\n"
                "  static __device__ __forceinline__ bool seen(const FunctionArguments &a, const PlaceOfPair &at) {\n"
                "    using R = Reals<kFunctions, T>;\n",
                statements(wanted, none, "    "), "    return ", name(seen_), ";\n  }\n");
  }
  if (!loads_.empty()) out += gradients();
  return out + "};\n} // namespace strobe\n";
}

} // namespace strobe::score
