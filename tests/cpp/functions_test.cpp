// Calls with functions of the caller: on the reference, against the built-in options; gradients, against finite differences; and every
// refusal.
#include <functional>

#include "call.h"
#include "refusals.h"

// Several files are compiled together, so each has its own names.
namespace strobe::functions_test {

using namespace strobe::test;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

using Make = void (*)(Call &, Operation);

// q, k, v and results in float64, on the reference. seed: determines the numbers.
void make_plain(Call &c, Make make, Operation operation, int seed = 1) {
  make(c, operation);
  for (const char *name : {"mask", "bias", "dbias", "alibi_slopes", "sinks", "dsinks", "rng", "seqused_k", "max_logit", "column_sums"})
    c.drop(name);
  c.attention.dropout = 0, c.attention.engine = "reference";
  for (const char *name : {"q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv"}) {
    if (!c.has(name)) continue;
    c.add(name, DType::f64, std::vector<int64_t>(c[name].shape, c[name].shape + c[name].rank));
    c.fill<double>(name, seed++, 0.7);
  }
  if (operation == Operation::backward) c.drop("out"), c.drop("lse");
}

std::vector<double> results(Call &c) {
  REQUIRE_MESSAGE(c.run() == STROBE_OK, error());
  std::vector<double> all;
  for (const char *name : c.operation == Operation::forward ? std::vector{"out", "lse"} : std::vector{"dq", "dk", "dv"})
    all.insert(all.end(), c.data<double>(name), c.data<double>(name) + c.memory_bytes(name) / sizeof(double));
  return all;
}
double apart(const std::vector<double> &a, const std::vector<double> &b) {
  REQUIRE(a.size() == b.size());
  double most = 0;
  for (size_t n = 0; n < a.size(); n++)
    if (a[n] != b[n]) most = std::max(most, std::abs(a[n] - b[n]));
  return most;
}

struct Arguments {
  int32_t x, b, h, i, j, offset;
};
using Build = std::function<void(Nodes &, const Arguments &)>;
const strobe_function *scored(Call &c, const Build &build) {
  Nodes f;
  const int32_t x = f.add(STROBE_OP_SCORE), b = f.add(STROBE_OP_BATCH), h = f.add(STROBE_OP_HEAD), i = f.add(STROBE_OP_QUERY),
                j = f.add(STROBE_OP_KEY), offset = f.add(STROBE_OP_OFFSET);
  build(f, {x, b, h, i, j, offset});
  return c.function(f.all);
}
const strobe_function *masked(Call &c, const Build &build) {
  Nodes g;
  const int32_t b = g.add(STROBE_OP_BATCH), h = g.add(STROBE_OP_HEAD), i = g.add(STROBE_OP_QUERY), j = g.add(STROBE_OP_KEY),
                offset = g.add(STROBE_OP_OFFSET);
  build(g, {-1, b, h, i, j, offset});
  return c.function(g.all);
}

// i + offset - j
int32_t behind(Nodes &f, const Arguments &a) { return f.add(STROBE_OP_SUBTRACT, {f.add(STROBE_OP_ADD, {a.i, a.offset}), a.j}); }

// An option, and functions that do the same.
struct Same {
  const char *what;
  std::function<void(Call &)> option, function;
};
void add_slopes(Call &c, const char *name) { c.add(name, DType::f32, {H}), c.fill<float>(name, 0.3, 0.4); }
const Build kAlibi = [](Nodes &f, const Arguments &a) {
  const int32_t distance = f.add(STROBE_OP_TO_REAL, {f.add(STROBE_OP_ABSOLUTE, {behind(f, a)})});
  f.add(STROBE_OP_SUBTRACT, {a.x, f.add(STROBE_OP_MULTIPLY, {f.load(0, {a.h}), distance})});
};
const Same kSame[] = {
    {"softcap", [](Call &c) { c.attention.softcap = 0.4; },
     [](Call &c) {
       c.attention.score_function = scored(c, [](Nodes &f, const Arguments &a) {
         f.add(STROBE_OP_MULTIPLY, {f.add(STROBE_OP_TANH, {f.add(STROBE_OP_DIVIDE, {a.x, f.real(0.4)})}), f.real(0.4)});
       });
     }},
    {"softcap, in a graph that is not recognised", [](Call &c) { c.attention.softcap = 0.4; },
     [](Call &c) {
       c.attention.score_function = scored(c, [](Nodes &f, const Arguments &a) { // c (1 - 2 / (exp(2 x / c) + 1))
         const int32_t exp = f.add(STROBE_OP_EXP, {f.add(STROBE_OP_MULTIPLY, {a.x, f.real(5)})}), one = f.real(1);
         const int32_t part = f.add(STROBE_OP_DIVIDE, {f.real(2), f.add(STROBE_OP_ADD, {exp, one})});
         f.add(STROBE_OP_MULTIPLY, {f.real(0.4), f.add(STROBE_OP_SUBTRACT, {one, part})});
       });
     }},
    {"hyperbolic",
     [](Call &c) {
       c.attention.score = STROBE_HYPERBOLIC, c.attention.beta = 1.5, c.attention.shift = 0.25;
       c.attention.has_scale = 1, c.attention.scale = 3;
     },
     [](Call &c) {
       c.attention.has_scale = 1, c.attention.scale = 3;
       c.attention.score_function = scored(c, [](Nodes &f, const Arguments &a) {
         const int32_t distance = f.add(STROBE_OP_ARCCOSH_FROM_1, {f.add(STROBE_OP_NEGATE, {a.x})});
         f.add(STROBE_OP_SUBTRACT, {f.add(STROBE_OP_MULTIPLY, {distance, f.real(-1.5)}), f.real(0.25)});
       });
     }},
    {"alibi_slopes", [](Call &c) { add_slopes(c, "alibi_slopes"); },
     [](Call &c) { add_slopes(c, "captured_0"), c.attention.score_function = scored(c, kAlibi); }},
    {"alibi_slopes, top left", [](Call &c) { add_slopes(c, "alibi_slopes"), c.attention.alignment = STROBE_TOP_LEFT; },
     [](Call &c) { add_slopes(c, "captured_0"), c.attention.alignment = STROBE_TOP_LEFT, c.attention.score_function = scored(c, kAlibi); }},
    {"causal", [](Call &c) { c.attention.causal = 1; },
     [](Call &c) {
       c.attention.mask_function =
           masked(c, [](Nodes &g, const Arguments &a) { g.add(STROBE_OP_GREATER_EQUAL, {behind(g, a), g.integer(0)}); });
     }},
    {"window",
     [](Call &c) {
       c.attention.has_window_left = c.attention.has_window_right = 1, c.attention.window_left = 5, c.attention.window_right = 2;
     },
     [](Call &c) {
       c.attention.mask_function = masked(c, [](Nodes &g, const Arguments &a) {
         const int32_t apart = behind(g, a), left = g.add(STROBE_OP_LESS_EQUAL, {apart, g.integer(5)});
         g.add(STROBE_OP_AND, {left, g.add(STROBE_OP_LESS_EQUAL, {g.integer(-2), apart})});
       });
     }},
    {"causal, by -inf from the score", [](Call &c) { c.attention.causal = 1; },
     [](Call &c) {
       c.attention.score_function = scored(c, [](Nodes &f, const Arguments &a) {
         f.add(STROBE_OP_WHERE, {f.add(STROBE_OP_GREATER_EQUAL, {behind(f, a), f.integer(0)}), a.x, f.real(-kInf)});
       });
     }},
    {"softcap before ALiBi, causal", [](Call &c) { c.attention.softcap = 0.4, c.attention.causal = 1, add_slopes(c, "alibi_slopes"); },
     [](Call &c) {
       c.attention.causal = 1, add_slopes(c, "alibi_slopes");
       c.attention.score_function = scored(c, [](Nodes &f, const Arguments &a) {
         f.add(STROBE_OP_MULTIPLY, {f.real(0.4), f.add(STROBE_OP_TANH, {f.add(STROBE_OP_MULTIPLY, {a.x, f.real(2.5)})})});
       });
     }},
    {"softcap beside a mask function", [](Call &c) { c.attention.softcap = 0.4, c.attention.causal = 1; },
     [](Call &c) {
       c.attention.softcap = 0.4;
       const Build seen = [](Nodes &g, const Arguments &a) { g.add(STROBE_OP_LESS_EQUAL, {g.integer(0), behind(g, a)}); };
       c.attention.mask_function = masked(c, seen);
     }},
    {"nothing, where what hides is infinite", [](Call &c) { c.attention.causal = 1; },
     [](Call &c) { // f is inf or NaN exactly where causal hides
       c.attention.causal = 1;
       c.attention.score_function = scored(c, [](Nodes &f, const Arguments &a) {
         const int32_t seen = f.add(STROBE_OP_GREATER_EQUAL, {behind(f, a), f.integer(0)});
         f.add(STROBE_OP_WHERE, {seen, a.x, f.add(STROBE_OP_MULTIPLY, {a.x, f.real(kInf)})});
       });
     }},
};

void make_whole_part(Call &c, Operation operation) {
  static PartOf part;
  make_part(c, part, operation);
}

// The loss, sum(out * dout) + sum(lse * dlse), of a call with the inputs of the backward.
double loss(Call &backward) {
  Call c;
  c.attention = backward.attention, c.attention.accumulate = 0, c.operation = Operation::forward;
  c.tensors = backward.tensors;
  for (auto slot : {&strobe_tensors::dout, &strobe_tensors::dlse, &strobe_tensors::dq, &strobe_tensors::dk, &strobe_tensors::dv})
    c.tensors.*slot = nullptr;
  for (const char *name : {"out", "lse"}) {
    const strobe_tensor &like = backward[name == std::string("out") ? "dout" : "dlse"];
    c.add(name, DType::f64, std::vector<int64_t>(like.shape, like.shape + like.rank));
  }
  REQUIRE_MESSAGE(c.run() == STROBE_OK, error());
  double sum = 0;
  for (const char *name : {"out", "lse"}) {
    const double *x = c.data<double>(name), *d = backward.data<double>(std::string("d") + name);
    for (size_t n = 0; n < c.memory_bytes(name) / sizeof(double); n++)
      if (std::isfinite(x[n])) sum += x[n] * d[n];
  }
  return sum;
}

} // namespace

TEST_CASE("functions: the same as the built-in options, on the reference") {
  for (Make make : {Make(make_dense), Make(make_varlen), Make(make_whole_part)})
    for (Operation operation : {Operation::forward, Operation::backward})
      for (const Same &same : kSame) {
        CAPTURE(std::string(same.what));
        Call plain, by_option, by_function;
        for (Call *c : {&plain, &by_option, &by_function}) make_plain(*c, make, operation);
        same.option(by_option), same.function(by_function);
        const std::vector<double> expected = results(by_option), found = results(by_function);
        CHECK(apart(found, expected) < 1e-12);
        CHECK(apart(results(plain), expected) > 1e-3);
      }
}

TEST_CASE("functions: loads count from the end where the index is negative, and end at the tensor's ends") {
  for (const bool backwards : {false, true}) {
    Call by_bias, by_function;
    make_plain(by_bias, make_dense, Operation::forward), make_plain(by_function, make_dense, Operation::forward);
    by_bias.add("bias", DType::f64, {1, 1, Sq, Sk}), by_function.add("captured_5", DType::f64, {7, 3});
    by_function.fill<double>("captured_5", 0, 0.9);
    const std::vector<double> table(by_function.data<double>("captured_5"), by_function.data<double>("captured_5") + 21);
    auto place = [](int64_t index, int64_t size) { return std::clamp<int64_t>(index < 0 ? index + size : index, 0, size - 1); };
    for (int64_t i = 0; i < Sq; i++)
      for (int64_t j = 0; j < Sk; j++) by_bias.data<double>("bias")[i * Sk + j] = table[size_t(place(i - j, 7) * 3 + place(j % 5 - 3, 3))];
    by_function.spread("captured_5", 2, backwards);
    by_function.attention.score_function = scored(by_function, [](Nodes &f, const Arguments &a) {
      const int32_t apart = f.add(STROBE_OP_SUBTRACT, {a.i, a.j});
      const int32_t column = f.add(STROBE_OP_SUBTRACT, {f.add(STROBE_OP_REMAINDER, {a.j, f.integer(5)}), f.integer(3)});
      f.add(STROBE_OP_ADD, {a.x, f.load(5, {apart, column})});
    });
    CHECK(apart(results(by_bias), results(by_function)) < 1e-13);
  }
}

TEST_CASE("functions: captured tensors of each dtype and rank, and of broadcast strides") {
  Call call;
  make_captured(call, Operation::forward), make_for_reference(call);
  call.fill<float>("q", 0, 0.1), call.fill<float>("k", 1, 0.1), call.fill<float>("v", 2, 0.1);
  call.data<float>("captured_0")[0] = 0.75f;
  call.fill<float>("captured_1", 3, 0.5), call.fill<double>("captured_2", 4, 0.5);
  for (const char *name : {"captured_3", "captured_4"})
    for (size_t n = 0; n < call.memory_bytes(name) / 2; n++) call.data<uint16_t>(name)[n] = uint16_t(0x3800 + 37 * n % 0x400);
  for (size_t n = 0; n < call.memory_bytes("captured_5") / 4; n++) call.data<int32_t>("captured_5")[n] = int32_t(n % 3) - 1;
  for (size_t n = 0; n < call.memory_bytes("captured_6") / 8; n++) call.data<int64_t>("captured_6")[n] = int64_t(n % 4) - 2;
  for (size_t n = 0; n < call.memory_bytes("captured_7"); n++) call.data<uint8_t>("captured_7")[n] = n % 5 == 0 ? 3 : 0;
  call["captured_2"].strides[0] = 0; // all heads share a row
  REQUIRE_MESSAGE(call.run() == STROBE_OK, error());
  auto sixteen = [](uint16_t bits, int fraction) {
    return std::ldexp(1 + (bits & ((1 << fraction) - 1)) / double(1 << fraction), fraction == 10 ? (bits >> 10) - 15 : (bits >> 7) - 127);
  };
  for (int64_t b = 0; b < B; b++)
    for (int64_t h = 0; h < H; h++)
      for (int64_t i = 0; i < Sq; i++) {
        double most = -kInf, sum = 0;
        std::vector<double> scores;
        for (int64_t j = 0; j < Sk; j++) {
          double x = 0;
          for (int64_t d = 0; d < D; d++)
            x +=
                double(call.data<float>("q")[((b * H + h) * Sq + i) * D + d]) * call.data<float>("k")[((b * Hkv + h / 2) * Sk + j) * D + d];
          x = x / std::sqrt(double(D)) + 0.75 + call.data<float>("captured_1")[h] + call.data<double>("captured_2")[j];
          x += sixteen(call.data<uint16_t>("captured_3")[(b * H + h) * Sq + i], 10) + sixteen(call.data<uint16_t>("captured_4")[j], 7);
          x += call.data<int32_t>("captured_5")[i] + double(call.data<int64_t>("captured_6")[(b * H + h) * Sq + i]);
          x += call.data<uint8_t>("captured_7")[i * Sk + j] != 0;
          scores.push_back(x), most = std::max(most, x);
        }
        for (double x : scores) sum += std::exp(x - most);
        CHECK(call.data<double>("lse")[(b * H + h) * Sq + i] == doctest::Approx(most + std::log(sum)).epsilon(1e-13));
      }
}

TEST_CASE("functions: gradients are finite differences") {
  const Build builds[] = {
      [](Nodes &f, const Arguments &a) { // sin(x) w[h, j] + x^2 / 4
        const int32_t weighted = f.add(STROBE_OP_MULTIPLY, {f.add(STROBE_OP_SIN, {a.x}), f.load(0, {a.h, a.j})});
        f.add(STROBE_OP_ADD, {weighted, f.add(STROBE_OP_MULTIPLY, {f.add(STROBE_OP_MULTIPLY, {a.x, a.x}), f.real(0.25)})});
      },
      [](Nodes &f, const Arguments &a) { // where(i < j, exp(x / 2), -inf or x)
        const int32_t far = f.add(STROBE_OP_GREATER, {f.add(STROBE_OP_SUBTRACT, {a.i, a.j}), f.integer(9)});
        const int32_t other = f.add(STROBE_OP_WHERE, {far, f.real(-kInf), f.add(STROBE_OP_MULTIPLY, {a.x, f.load(0, {a.h, a.j})})});
        const int32_t exp = f.add(STROBE_OP_EXP, {f.add(STROBE_OP_MULTIPLY, {a.x, f.real(0.5)})});
        f.add(STROBE_OP_WHERE, {f.add(STROBE_OP_LESS, {a.i, a.j}), exp, other});
      },
  };
  for (Make make : {Make(make_dense), Make(make_varlen)})
    for (const Build &build : builds) {
      Call call;
      make_plain(call, make, Operation::backward);
      call.add("captured_0", DType::f64, {H, Sk}), call.fill<double>("captured_0", 0, 0.8);
      call.attention.score_function = scored(call, build);
      REQUIRE_MESSAGE(call.run() == STROBE_OK, error());
      for (const char *name : {"q", "k", "v"})
        for (size_t n = 3; n < call.memory_bytes(name) / sizeof(double); n += 97) {
          CAPTURE(std::string(name));
          CAPTURE(n);
          double &x = call.data<double>(name)[n];
          const double at = x, h = 1e-4;
          auto moved = [&](double by) { return x = at + by * h, loss(call); };
          const double expected = (8 * (moved(1) - moved(-1)) - (moved(2) - moved(-2))) / (12 * h);
          x = at;
          CHECK(call.data<double>(std::string("d") + name)[n] == doctest::Approx(expected).epsilon(1e-7).scale(1));
        }
    }
}

// tanh(x * (1 / 30)) * 30 is a softcap, but for rounding. LSE is the score of the only key.
TEST_CASE("functions: the reference evaluates the caller's own graph, not a built-in form in its place") {
  for (int n = 1; n <= 50; n++) {
    Call c;
    for (const char *name : {"q", "k", "v"}) c.add(name, DType::f64, {1, 1, 1, 1});
    *c.data<double>("q") = 0.7 * n, *c.data<double>("k") = 1, *c.data<double>("v") = 1;
    c.add("out", DType::f64, {1, 1, 1, 1}), c.add("lse", DType::f64, {1, 1, 1});
    Nodes f;
    const int32_t part = f.add(STROBE_OP_MULTIPLY, {f.add(STROBE_OP_SCORE), f.real(1 / 30.0)});
    f.add(STROBE_OP_MULTIPLY, {f.add(STROBE_OP_TANH, {part}), f.real(30)});
    c.attention.score_function = c.function(f.all), c.attention.engine = "reference";
    REQUIRE_MESSAGE(c.run() == STROBE_OK, error());
    CHECK(*c.data<double>("lse") == std::tanh(0.7 * n * (1 / 30.0)) * 30);
  }
}

// Nodes that lead to each other in many ways are looked at once; otherwise this would not end.
TEST_CASE("functions: a chain in which each node takes the one before twice") {
  for (const strobe_operation op : {STROBE_OP_MULTIPLY, STROBE_OP_DIVIDE, STROBE_OP_SUBTRACT}) {
    Call c;
    for (const char *name : {"q", "k", "v", "out"}) c.add(name, DType::f64, {1, 1, 1, 1});
    Nodes f;
    int32_t last = f.add(STROBE_OP_SCORE);
    for (int n = 0; n < 500; n++) last = f.add(op, {last, last});
    int32_t numbers = f.real(1);
    for (int n = 0; n < 500; n++) numbers = f.add(op, {numbers, numbers});
    f.add(STROBE_OP_MULTIPLY, {last, numbers});
    c.attention.score_function = c.function(f.all);
    CHECK_MESSAGE(c.run() == STROBE_OK, error());
  }
}

TEST_CASE("functions: the call keeps neither the nodes nor the captured addresses of a prepared call") {
  const Build build = [](Nodes &f, const Arguments &a) { f.add(STROBE_OP_ADD, {f.add(STROBE_OP_SIN, {a.x}), f.load(2, {a.j})}); };
  auto make = [&](Call &c, int seed) {
    make_plain(c, make_dense, Operation::forward, seed);
    c.add("captured_2", DType::f64, {Sk}), c.fill<double>("captured_2", seed, 0.8);
    c.attention.score_function = scored(c, build);
  };
  strobe_prepared *prepared = nullptr;
  {
    Call first;
    make(first, 1);
    REQUIRE_MESSAGE(strobe_prepare(&first.attention, &first.tensors, &first.execution, STROBE_FORWARD, &prepared) == STROBE_OK, error());
  }
  Call again, whole;
  make(again, 5), make(whole, 5);
  const strobe_addresses at = addresses(again);
  CHECK_MESSAGE(strobe_run(prepared, &at, nullptr) == STROBE_OK, error());
  results(whole);
  CHECK(std::memcmp(again.data<double>("out"), whole.data<double>("out"), whole.memory_bytes("out")) == 0);
  strobe_release(prepared);
}

TEST_CASE("functions: explain tells the formula, its derivative and what it reads") {
  Call call;
  make_plain(call, make_dense, Operation::forward);
  call.add("captured_1", DType::f32, {H});
  call.attention.score_function =
      scored(call, [](Nodes &f, const Arguments &a) { f.add(STROBE_OP_ADD, {f.add(STROBE_OP_SIN, {a.x}), f.load(1, {a.h})}); });
  call.attention.mask_function = masked(call, [](Nodes &g, const Arguments &a) { g.add(STROBE_OP_LESS_EQUAL, {a.j, a.i}); });
  std::string page(1 << 14, '\0');
  REQUIRE(strobe_explain(&call.attention, &call.tensors, &call.execution, STROBE_FORWARD, page.data(), page.size(), nullptr) == STROBE_OK);
  const auto has = [&](const std::string &label, const std::string &value) {
    for (const std::string &line : lines(page.c_str()))
      if (line.starts_with("  " + label + " ") && line.ends_with("  " + value)) return true;
    return false;
  };
  CHECK_MESSAGE(has("score", "f(x, b, h, i, j) = sin(x) + captured_1[h]"), page);
  CHECK_MESSAGE(has("df/dx", "cos(x)"), page);
  CHECK_MESSAGE(has("mask", "g(b, h, i, j) = j <= i"), page);
  CHECK_MESSAGE(has("captured_1", "float32 (4)"), page);
}

TEST_CASE("functions: each refusal") {
  struct Wrong {
    const char *message;
    std::function<void(Call &, Nodes &)> how; // makes the call wrong; the nodes begin with the score, node 0
    bool as_mask = false;
  };
  const Wrong all[] = {
      {"score_function: 0 nodes; accepted are 1 to 1024", [](Call &, Nodes &f) { f.all.clear(); }},
      {"score_function: 1025 nodes; accepted are 1 to 1024", [](Call &, Nodes &f) { f.all.resize(1025); }},
      {"score_function: node 1 has operation 0; accepted are the numbers in strobe/operations.inc",
       [](Call &, Nodes &f) { f.add(strobe_operation(0)); }},
      {"score_function: node 1 has operation -7; accepted are the numbers in strobe/operations.inc",
       [](Call &, Nodes &f) { f.add(strobe_operation(-7)); }},
      {"score_function: node 1, SIN, has inputs[0] = 1; accepted are earlier nodes, 0 to 0",
       [](Call &, Nodes &f) { f.add(STROBE_OP_SIN, {1}); }},
      {"score_function: node 1, ADD, has inputs[1] = -1; accepted are earlier nodes, 0 to 0",
       [](Call &, Nodes &f) { f.add(STROBE_OP_ADD, {0, -1}); }},
      {"score_function: node 0, SIN, has inputs[0] = 0; accepted are earlier nodes, and the first has none",
       [](Call &, Nodes &f) { f.all.clear(), f.add(STROBE_OP_SIN, {0}); }},
      {"score_function: node 2, SIN, has inputs[1] = 1; accepted is 0, for it takes 1",
       [](Call &, Nodes &f) { f.add(STROBE_OP_SIN, {0}), f.add(STROBE_OP_SIN, {0, 1}); }},
      {"score_function: node 1, SIN, has captured = 1; accepted is 0 for all but LOAD",
       [](Call &, Nodes &f) { f.add(STROBE_OP_SIN, {0}), f.all.back().captured = 1; }},
      {"score_function: node 1, SIN, has real = 0.5; accepted is 0 for all but REAL",
       [](Call &, Nodes &f) { f.add(STROBE_OP_SIN, {0}), f.all.back().real = 0.5; }},
      {"score_function: node 1, SIN, has real = nan; accepted is 0 for all but REAL",
       [](Call &, Nodes &f) { f.add(STROBE_OP_SIN, {0}), f.all.back().real = NAN; }},
      {"score_function: node 1, SIN, has integer = 2; accepted is 0 for all but INTEGER and BOOLEAN",
       [](Call &, Nodes &f) { f.add(STROBE_OP_SIN, {0}), f.all.back().integer = 2; }},
      {"score_function: node 1, BOOLEAN, has integer = 2; accepted is 0 or 1",
       [](Call &, Nodes &f) { f.add(STROBE_OP_BOOLEAN), f.all.back().integer = 2; }},
      {"score_function: node 2, SIN, has an integer as inputs[0]; accepted are reals",
       [](Call &, Nodes &f) { f.add(STROBE_OP_SIN, {f.add(STROBE_OP_KEY)}); }},
      {"score_function: node 2, ADD, has an integer as inputs[1]; accepted are integers or reals, all of one kind",
       [](Call &, Nodes &f) { f.add(STROBE_OP_ADD, {0, f.add(STROBE_OP_KEY)}); }},
      {"score_function: node 1, AND, has a real as inputs[0]; accepted are booleans or integers, all of one kind",
       [](Call &, Nodes &f) { f.add(STROBE_OP_AND, {0, 0}); }},
      {"score_function: node 2, SHIFT_LEFT, has a boolean as inputs[0]; accepted are integers",
       [](Call &, Nodes &f) {
         const int32_t n = f.add(STROBE_OP_BOOLEAN);
         f.add(STROBE_OP_SHIFT_LEFT, {n, n});
       }},
      {"score_function: node 2, WHERE, takes an integer, a real and a real; accepted are a boolean and two values of one kind",
       [](Call &, Nodes &f) { f.add(STROBE_OP_WHERE, {f.add(STROBE_OP_KEY), 0, 0}); }},
      {"score_function: node 3, WHERE, takes a boolean, a real and an integer; accepted are a boolean and two values of one kind",
       [](Call &, Nodes &f) {
         const int32_t condition = f.add(STROBE_OP_BOOLEAN);
         f.add(STROBE_OP_WHERE, {condition, 0, f.add(STROBE_OP_KEY)});
       }},
      {"score_function: node 1, LOAD, has captured = 8; accepted are 0 to 7", [](Call &, Nodes &f) { f.load(8, {}); }},
      {"score_function: node 1, LOAD, has captured = -1; accepted are 0 to 7", [](Call &, Nodes &f) { f.load(-1, {}); }},
      {"score_function: node 1, LOAD, reads captured_3, which is not given; accepted are captured tensors of the call",
       [](Call &, Nodes &f) { f.load(3, {}); }},
      {"score_function: node 2, LOAD, has inputs[1] = 1; accepted is 0, for it takes 1",
       [](Call &c, Nodes &f) {
         const int32_t j = f.add(STROBE_OP_KEY);
         c.add("captured_0", DType::f32, {4}), f.load(0, {j, j});
       }},
      {"score_function: node 1, LOAD, has a real as inputs[0]; accepted are integers",
       [](Call &c, Nodes &f) { c.add("captured_0", DType::f32, {4}), f.load(0, {0}); }},
      {"score_function: its result, node 1, is an integer; accepted is a real", [](Call &, Nodes &f) { f.add(STROBE_OP_KEY); }},
      {"score_function: its result, node 1, is a boolean; accepted is a real",
       [](Call &c, Nodes &f) { c.add("captured_0", DType::boolean, {}), f.load(0, {}); }},
      {"score_function: given beside softcap; accepted is one of the two", [](Call &c, Nodes &) { c.attention.softcap = 3; }},
      {"score_function: given with a hyperbolic score; accepted is one of the two",
       [](Call &c, Nodes &) { c.attention.score = STROBE_HYPERBOLIC, c.attention.beta = 1; }},
      {"captured_6: given, and read by no function; accepted is none", [](Call &c, Nodes &) { c.add("captured_6", DType::f32, {3}); }},
      {"captured_0: dtype int8; accepted is bool, int32, int64, float32, float16, bfloat16, float64",
       [](Call &c, Nodes &f) { c.add("captured_0", DType::i8, {}), f.add(STROBE_OP_ADD, {0, f.load(0, {})}); }},
      {"captured_0: shape (3, 0); accepted is 1 or more on each axis",
       [](Call &c, Nodes &f) { c.add("captured_0", DType::f32, {3, 0}), f.load(0, {f.integer(0), f.integer(0)}); }},
      {"captured_0: rank 5; accepted is 0 to 4",
       [](Call &c, Nodes &f) { c.add("captured_0", DType::f32, {}), c["captured_0"].rank = 5, f.load(0, {}); }},
      {"captured_0: data is null, shape (3); accepted is null only for a tensor without elements",
       [](Call &c, Nodes &f) { c.add("captured_0", DType::f32, {3}), c["captured_0"].data = nullptr, f.load(0, {f.integer(0)}); }},
      {"captured_0: lies on CUDA device 0; accepted is the CPU, where q lies",
       [](Call &c, Nodes &f) {
         c.add("captured_0", DType::f32, {3}), c["captured_0"].device_type = STROBE_CUDA, f.load(0, {f.integer(0)});
       }},
      {"out: shares memory with captured_0; accepted is memory of its own where the tensor is written",
       [](Call &c, Nodes &f) { c.add("captured_0", DType::f64, {3}), c["captured_0"].data = c["out"].data, f.load(0, {f.integer(0)}); }},
      {"mask_function: node 0 is SCORE; accepted is a function of b, h, i and j alone", [](Call &, Nodes &) {}, true},
      {"mask_function: its result, node 1, is an integer; accepted is a boolean",
       [](Call &, Nodes &f) { f.all.clear(), f.add(STROBE_OP_KEY), f.add(STROBE_OP_QUERY); }, true},
      {"mask_function: 0 nodes; accepted are 1 to 1024", [](Call &, Nodes &f) { f.all.clear(); }, true},
  };
  for (const Wrong &wrong : all)
    for (const Operation operation : {Operation::forward, Operation::backward}) {
      const std::string expected = wrong.message;
      CAPTURE(expected);
      if (operation == Operation::backward && expected.starts_with("out: ")) continue;
      Call call;
      make_plain(call, make_dense, operation);
      Nodes f;
      f.add(STROBE_OP_SCORE);
      wrong.how(call, f);
      (wrong.as_mask ? call.attention.mask_function : call.attention.score_function) = call.function(f.all);
      CHECK(call.run() == STROBE_INVALID_ARGUMENT);
      CHECK(error() == expected);
      CHECK(rendered() == error());
    }
  strobe_function broken{};
  auto refused = [&] {
    Call call;
    make_plain(call, make_dense, Operation::forward);
    call.attention.mask_function = &broken;
    CHECK(call.run() == STROBE_INVALID_ARGUMENT);
    CHECK(rendered() == error());
    return error();
  };
  CHECK(refused() == "mask_function: size is 0; accepted is sizeof(strobe_function), here 24");
  broken.size = sizeof broken, broken.n_nodes = 1;
  CHECK(refused() == "mask_function: nodes is null; accepted is a pointer to 1 nodes");
  broken.n_nodes = -1;
  CHECK(refused() == "mask_function: -1 nodes; accepted are 1 to 1024");
}

} // namespace strobe::functions_test
