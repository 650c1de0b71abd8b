// Functions of the score and of the mask, some that models use and some that are difficult, to test engines against the reference.
#pragma once
#include "call.h"

namespace strobe::test {

// The sizes that determine the shapes of captured tensors. most: positions of queries or keys.
struct FunctionSizes {
  int64_t batch, heads, most;
};

// The arguments of a function, as nodes.
struct ArgumentsOfFunctions {
  Nodes &f;
  int32_t x, b, h, i, j, behind; // behind: i + offset - j
  int32_t plus(int32_t a, int32_t c) const { return f.add(STROBE_OP_ADD, {a, c}); }
  int32_t times(int32_t a, int32_t c) const { return f.add(STROBE_OP_MULTIPLY, {a, c}); }
  int32_t real(int32_t integer) const { return f.add(STROBE_OP_TO_REAL, {integer}); }
  int32_t absolute(int32_t a) const { return f.add(STROBE_OP_ABSOLUTE, {a}); }
  int32_t remainder(int32_t a, int64_t by) const { return f.add(STROBE_OP_REMAINDER, {a, f.integer(by)}); }
  int32_t quotient(int32_t a, int64_t by) const { return f.add(STROBE_OP_FLOOR_DIVIDE, {a, f.integer(by)}); }
  int32_t apart(int32_t a, int32_t c) const { return absolute(f.add(STROBE_OP_SUBTRACT, {a, c})); }
  int32_t at_most(int32_t a, int64_t most) const { return f.add(STROBE_OP_LESS_EQUAL, {a, f.integer(most)}); }
  int32_t clamp(int32_t a, int64_t low, int64_t high) const {
    return f.add(STROBE_OP_MINIMUM, {f.add(STROBE_OP_MAXIMUM, {a, f.integer(low)}), f.integer(high)});
  }
};

struct NamedFunction {
  const char *name;
  std::vector<int32_t> captured;                         // which tensors of give_captured() the function reads
  void (*score)(const ArgumentsOfFunctions &) = nullptr; // the last node is the result
  void (*mask)(const ArgumentsOfFunctions &) = nullptr;
};

inline const NamedFunction kFunctions[] = {
    {"ALiBi",
     {0},
     [](const ArgumentsOfFunctions &a) {
       a.f.add(STROBE_OP_SUBTRACT, {a.x, a.times(a.f.load(0, {a.h, a.f.integer(3)}), a.real(a.absolute(a.behind)))});
     }},
    {"softcap",
     {},
     [](const ArgumentsOfFunctions &a) { a.times(a.f.add(STROBE_OP_TANH, {a.f.add(STROBE_OP_DIVIDE, {a.x, a.f.real(5)})}), a.f.real(5)); }},
    {"tanh", {}, [](const ArgumentsOfFunctions &a) { a.times(a.f.add(STROBE_OP_TANH, {a.times(a.x, a.f.real(0.3))}), a.f.real(2)); }},
    {"T5 buckets",
     {0},
     [](const ArgumentsOfFunctions &a) {
       const int32_t distance = a.absolute(a.behind); // a number is added so that no logarithm is an integer
       const int32_t log = a.f.add(STROBE_OP_LOG, {a.f.add(STROBE_OP_DIVIDE, {a.real(distance), a.f.real(8)})});
       const int32_t far = a.f.add(STROBE_OP_TO_INTEGER, {a.plus(a.times(log, a.f.real(2.8853900817779268)), a.f.real(8.003))});
       const int32_t near = a.f.add(STROBE_OP_LESS, {distance, a.f.integer(8)});
       const int32_t bucket = a.f.add(STROBE_OP_WHERE, {near, distance, a.f.add(STROBE_OP_MINIMUM, {far, a.f.integer(15)})});
       a.plus(a.x, a.f.load(0, {a.h, bucket}));
     }},
    {"a learned relative bias",
     {0},
     [](const ArgumentsOfFunctions &a) { a.plus(a.x, a.f.load(0, {a.h, a.plus(a.clamp(a.behind, -8, 8), a.f.integer(8))})); }},
    {"documents", {1}, nullptr, [](const ArgumentsOfFunctions &a) { a.f.add(STROBE_OP_EQUAL, {a.f.load(1, {a.i}), a.f.load(1, {a.j})}); }},
    {"prefix-LM",
     {2},
     nullptr,
     [](const ArgumentsOfFunctions &a) {
       const int32_t prefix = a.f.add(STROBE_OP_LESS, {a.j, a.f.load(2, {a.b})});
       a.f.add(STROBE_OP_OR, {prefix, a.f.add(STROBE_OP_GREATER_EQUAL, {a.behind, a.f.integer(0)})});
     }},
    {"a window", {}, nullptr, [](const ArgumentsOfFunctions &a) { a.at_most(a.absolute(a.behind), 20); }},
    {"dilated", {}, nullptr, [](const ArgumentsOfFunctions &a) { a.f.add(STROBE_OP_EQUAL, {a.remainder(a.behind, 3), a.f.integer(0)}); }},
    {"a neighbourhood of two axes",
     {},
     nullptr,
     [](const ArgumentsOfFunctions &a) {
       const int32_t rows = a.at_most(a.apart(a.quotient(a.i, 8), a.quotient(a.j, 8)), 3);
       a.f.add(STROBE_OP_AND, {rows, a.at_most(a.apart(a.remainder(a.i, 8), a.remainder(a.j, 8)), 4)});
     }},
    {"nested gathers",
     {0, 1, 3},
     [](const ArgumentsOfFunctions &a) { a.plus(a.times(a.x, a.f.real(0.75)), a.f.load(0, {a.h, a.f.load(3, {a.f.load(1, {a.j})})})); }},
    {"negative indices and beyond the axis",
     {0},
     [](const ArgumentsOfFunctions &a) { a.plus(a.x, a.f.load(0, {a.plus(a.h, a.i), a.times(a.behind, a.f.integer(3))})); }},
    {"-inf",
     {},
     [](const ArgumentsOfFunctions &a) {
       const int32_t hides = a.f.add(STROBE_OP_EQUAL, {a.remainder(a.times(a.i, a.j), 5), a.f.integer(4)});
       const int32_t value = a.plus(a.x, a.times(a.times(a.x, a.x), a.f.real(0.02)));
       a.f.add(STROBE_OP_WHERE, {hides, a.f.real(-std::numeric_limits<double>::infinity()), value});
     }},
    {"NaN where a mask hides",
     {},
     [](const ArgumentsOfFunctions &a) {
       const int32_t hides = a.f.add(STROBE_OP_EQUAL, {a.remainder(a.plus(a.i, a.j), 4), a.f.integer(3)});
       const int32_t nan = a.f.add(STROBE_OP_LOG, {a.f.add(STROBE_OP_SUBTRACT, {a.f.real(-1), a.times(a.x, a.x)})});
       a.f.add(STROBE_OP_WHERE, {hides, nan, a.times(a.x, a.f.real(0.5))});
     },
     [](const ArgumentsOfFunctions &a) { a.f.add(STROBE_OP_NOT_EQUAL, {a.remainder(a.plus(a.i, a.j), 4), a.f.integer(3)}); }},
    {"smooth functions",
     {0},
     [](const ArgumentsOfFunctions &a) {
       const int32_t swish = a.times(a.x, a.f.add(STROBE_OP_SIGMOID, {a.x}));
       const int32_t exp = a.f.add(STROBE_OP_EXP, {a.f.add(STROBE_OP_MINIMUM, {a.x, a.f.real(0.5)})});
       a.plus(a.plus(swish, exp), a.times(a.f.add(STROBE_OP_SIN, {a.x}), a.f.load(0, {a.h, a.j})));
     }},
    {"a shift of b and a mask of bits",
     {2},
     [](const ArgumentsOfFunctions &a) { a.plus(a.x, a.times(a.real(a.plus(a.b, a.h)), a.f.real(0.25))); },
     [](const ArgumentsOfFunctions &a) {
       const int32_t bits = a.f.add(STROBE_OP_SHIFT_RIGHT, {a.f.integer(0x6DB5), a.remainder(a.behind, 16)});
       a.f.add(STROBE_OP_TO_BOOLEAN, {a.f.add(STROBE_OP_AND, {a.f.add(STROBE_OP_OR, {bits, a.f.load(2, {a.b})}), a.f.integer(1)})});
     }},
    {"a constant", {}, [](const ArgumentsOfFunctions &a) { a.f.real(0.5); }},
};

// Gives the call captured_n, with numbers that follow from its size. 0: reals, (heads, 17). 1: 64-bit integers, one for each position. 2:
// 32-bit integers, (batch). 3: a permutation of 0 to 15.
inline void give_captured(Call &c, int32_t n, const FunctionSizes &sizes) {
  const std::string name = "captured_" + std::to_string(n);
  if (n == 0) {
    c.add(name, DType::f32, {sizes.heads, 17}), c.fill<float>(name, 0.5, 0.9);
  } else if (n == 1) {
    c.add(name, DType::i64, {sizes.most});
    for (int64_t at = 0; at < sizes.most; at++) c.data<int64_t>(name)[at] = at / 37 % 5;
  } else {
    const int64_t size = n == 2 ? sizes.batch : 16;
    c.add(name, DType::i32, {size});
    for (int64_t at = 0; at < size; at++) c.data<int32_t>(name)[at] = int32_t(n == 2 ? 4 + 9 * at : at * 5 % 16);
  }
}

// Gives the call a function and the tensors that the function reads.
inline void give(Call &c, const NamedFunction &function, const FunctionSizes &sizes) {
  const auto built = [&](void (*build)(const ArgumentsOfFunctions &), bool scored) -> const strobe_function * {
    if (!build) return nullptr;
    Nodes f;
    const int32_t x = scored ? f.add(STROBE_OP_SCORE) : -1, b = f.add(STROBE_OP_BATCH), h = f.add(STROBE_OP_HEAD),
                  i = f.add(STROBE_OP_QUERY), j = f.add(STROBE_OP_KEY);
    const int32_t behind = f.add(STROBE_OP_SUBTRACT, {f.add(STROBE_OP_ADD, {i, f.add(STROBE_OP_OFFSET)}), j});
    build({f, x, b, h, i, j, behind});
    return c.function(f.all);
  };
  for (const int32_t n : function.captured) give_captured(c, n, sizes);
  c.attention.score_function = built(function.score, true);
  c.attention.mask_function = built(function.mask, false);
}

} // namespace strobe::test
