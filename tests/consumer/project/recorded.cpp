// functions.hpp records every operation, and the recorded operations are computed.
#include <strobe/functions.hpp>

#include <cmath>
#include <cstdio>
#include <set>

using strobe::captured, strobe::Real, strobe::Integer, strobe::Boolean, strobe::where;

static int failures = 0;

static void check(bool good, const char *otherwise) {
  if (!good) std::printf("%s\n", otherwise), failures++;
}

static void each_operation() {
  const strobe::Function f = strobe::score_function([](auto x, auto b, auto h, auto i, auto j) {
    Real y = x + 1 - 2.0 * x / 3 + floor_divide(x, 2) + remainder(x, 2) + fmod(x, 2) + min(x, 1) + max(x, 1) + pow(x, 2) + atan2(x, 1);
    y = -y + abs(y) + sign(y) + exp(y) + exp2(y) + expm1(y) + log(y) + log2(y) + log1p(y) + sqrt(y) + rsqrt(y) + sin(y) + cos(y) + tan(y);
    y = y + asin(y) + acos(y) + atan(y) + sinh(y) + cosh(y) + tanh(y) + asinh(y) + acosh(y) + atanh(y) + erf(y) + erfc(y) + sigmoid(y);
    y = y + floor(y) + ceil(y) + trunc(y) + round(y) + arccosh_from_1(y) + captured<Real>(0)() * captured<Real>(1)(h, i - j);
    Integer n = i + b * 2 - j + floor_divide(i, 3) + remainder(j, 5) + (i & 7) + (i | 1) + (j ^ 3) + (i << 1) + (j >> 1) + min(i, j);
    n = -n + max(n, 0) + ~n + abs(n) + sign(n) + strobe::offset() + to_integer(y) + Integer(captured<Boolean>(2)(0));
    Boolean c = (i == j) | (i != j) | (i < j) | (i <= j) | (i > j) | (i >= j) | (y == 0) | (y != 0) | (y < 0) | (y <= 0) | (y > 0);
    c = (!c & (y >= 0)) ^ Boolean(true);
    return where(c == Boolean(false), y, 0.5 * i + Real(c)) + where(c != Boolean(true), n, 0) + where(c, 1.0, 2.0) * 1.5;
  });
  std::set<int32_t> all = {STROBE_OP_TO_BOOLEAN}; // C++ itself compares with 0
  for (const strobe_node &n : f.nodes) all.insert(n.operation);
#define STROBE_OPERATION(name, number, inputs, takes, gives) check(all.contains(STROBE_OP_##name), #name " is not recorded");
#include <strobe/operations.inc>
}

static void same_as_the_options() {
  const strobe::Shape shape = {1, 2, 24, 8}, rows = {1, 2, 24}, heads = {2};
  std::vector<double> q(2 * 24 * 8), k(q.size()), v(q.size()), by_option(q.size()), by_function(q.size()), lse(2 * 24), dq(q.size()),
      other(q.size());
  for (size_t n = 0; n < q.size(); n++) q[n] = std::sin(double(n)), k[n] = std::cos(3.0 * double(n)), v[n] = std::sin(5.0 * double(n));
  const std::vector<float> slopes = {0.25f, 0.5f};
  const strobe::Attention plain = {.q = {q, shape}, .k = {k, shape}, .v = {v, shape}, .engine = "reference"};
  strobe::Attention option = plain, function = plain;
  option.alibi_slopes = {slopes, heads}, option.causal = true;
  function.captured_0 = {slopes, heads};
  function.score_function =
      strobe::score_function([](Real x, auto, auto h, auto i, auto j) { return x - captured<Real>(0)(h) * abs(i + strobe::offset() - j); });
  function.mask_function = strobe::mask_function([](auto, auto, auto i, auto j) { return j <= i; });
  strobe::forward(option, {.out = {by_option, shape}}), strobe::forward(function, {.out = {by_function, shape}, .lse = {lse, rows}});
  for (size_t n = 0; n < q.size(); n++) check(std::abs(by_option[n] - by_function[n]) < 1e-13, "out differs");
  strobe::backward(option, {.dout = {v, shape}, .dq = {dq, shape}}), strobe::backward(function, {.dout = {v, shape}, .dq = {other, shape}});
  for (size_t n = 0; n < q.size(); n++) check(std::abs(dq[n] - other[n]) < 1e-13, "dq differs");
}

int main() {
  each_operation(), same_as_the_options();
  const auto one = strobe::score_function([](auto...) { return 1; });
  check(one.nodes.back().operation == STROBE_OP_REAL && one.nodes.back().real == 1, "a number is no function");
  const auto all = strobe::mask_function([](auto...) { return true; });
  check(all.nodes.back().operation == STROBE_OP_BOOLEAN && all.nodes.back().integer == 1, "a bool is no function");
  const auto x = strobe::score_function([](auto y, auto...) { return sin(y), y; });
  check(x.nodes.size() == 1, "the result is not the last node");
  try {
    Real outside(1.0);
    check(false, "a Real outside of a function");
  } catch (const strobe::InvalidArgument &) {}
  return failures ? 1 : 0;
}
