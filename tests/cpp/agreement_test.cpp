// Every engine that runs here against the oracle: forward and all gradients, with options and shapes drawn at random. tests/python judges
// accuracy and covers all pairs of options. This test serves where there is no Python: other machines, emulated or not, and the sanitizers.
// STROBE_AGREEMENT_ROUNDS sets the number of rounds, STROBE_AGREEMENT_FIRST the number of the first one, where machines are slow.
// STROBE_AGREEMENT_CALLS ends the test of an engine after this many backwards.
// STROBE_AGREEMENT_ENGINES names the engines to test, separated by commas. Under an emulated GPU (tests/emulator) only the CUDA engines are
// tested.
#include "call.h"

#include <cstdlib>
#include <cstring>
#include <tuple>

#include "attention/text.h"
#include "functions.h"

using namespace strobe;
using namespace strobe::test;

namespace {

constexpr const char *kOracle = "reference";

bool on_gpu(const char *engine) { return std::strncmp(engine, "cuda-", 5) == 0; }

// Far above rounding errors, and far below the effect of a missing lane, row or tile.
double tolerance(DType type) { return type == DType::f64 ? 1e-11 : type == DType::f32 ? 2e-5 : type == DType::f16 ? 1e-2 : 6e-2; }

double half(uint16_t bits, int mantissa, int bias) {
  const int exponent = bits >> mantissa & ((1 << (15 - mantissa)) - 1), fraction = bits & ((1 << mantissa) - 1);
  const double size =
      exponent ? std::ldexp((1 << mantissa) + fraction, exponent - bias - mantissa) : std::ldexp(fraction, 1 - bias - mantissa);
  return bits >> 15 ? -size : size;
}

// Kinds of drawn calls. packed_softcap: 16 bits; queries past a sequence's end might spoil its gradients by their derivative. lengthy: more
// keys or queries than one running sum takes. grouped: 16 bits, many query heads per key head, which a large GPU divides among thread
// blocks. functions: functions of the score and of the mask, which read tensors.
enum class Calls { any, packed_softcap, lengthy, wide, grouped, functions };

// The calls of one seed. All directions and engines get the same inputs.
class Drawn {
public:
  Drawn(uint32_t seed, Calls calls, Call &call, Operation operation, bool oracle)
      : random(seed), counts(~seed), c(call), calls(calls), oracle(oracle) {
    c.operation = operation;
    dtype = calls == Calls::packed_softcap || calls == Calls::grouped ? pick({DType::f16, DType::bf16})
                                                                      : pick({DType::f32, DType::f32, DType::f64, DType::f16, DType::bf16});
    wide = dtype == DType::f64 ? DType::f64 : DType::f32;
    group = 1 + draw(3), hkv = 1 + draw(2), h = group * hkv, b = 1 + draw(2);
    d = size(), dv = size();
    if (calls == Calls::grouped)
      group = pick<int64_t>({6, 8}), hkv = 1 + draw(2), b = 1 + draw(2), h = group * hkv, d = pick<int64_t>({40, 64, 80, 128}),
      dv = pick<int64_t>({64, 72, 128});
    if (calls == Calls::wide) d = pick<int64_t>({40, 257, 320, 576}), dv = d == 40 ? 320 : pick<int64_t>({7, 289, 512});
    varlen = calls == Calls::packed_softcap || (draw(3) == 0 && calls != Calls::lengthy);
    varlen ? packed() : dense();
    options();
    results(operation);
    for (const char *name : {"cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_rows", "block_cols", "block_rows_t", "block_cols_t"})
      if (const uint32_t layout = counts() % 6; c.has(name) && layout < 2) c.spread(name, 2, layout);
  }

  DType dtype;

private:
  std::mt19937 random, counts; // counts: draws how many keys count
  Call &c;
  const Calls calls;
  const bool oracle;
  DType wide;
  int64_t group, hkv, h, b, d, dv, sq, sk, total_q, total_k, used_q, used_k; // packed tokens: total_ with padding, used_ without
  bool varlen;

  int draw(int n) { return std::uniform_int_distribution<int>(0, n - 1)(random); }
  template <class T> T pick(std::initializer_list<T> from) { return from.begin()[draw(static_cast<int>(from.size()))]; }
  int64_t size() { return pick<int64_t>({1, 3, 8, 16, 17, 31, 32, 40, 64, 65, 80, 128}); }

  // Numbers of magnitude [1/4, 2), of any float type.
  void numbers(const char *name, DType type, const std::vector<int64_t> &shape) {
    const strobe_tensor &t = c.add(name, type, shape);
    const size_t count = c.memory_bytes(name) / static_cast<size_t>(bytes(type));
    for (size_t n = 0; n < count; n++) {
      const uint32_t bits = random();
      const double x = (1 + (bits & 1023) / 1024.0) * (1 << (bits >> 10 & 1023) % 3) / (bits >> 31 ? -4 : 4);
      const uint16_t sign = static_cast<uint16_t>(bits >> 31 << 15), exponent = static_cast<uint16_t>((bits >> 10 & 1023) % 3);
      switch (type) {
      case DType::f64:
        static_cast<double *>(t.data)[n] = x;
        break;
      case DType::f32:
        static_cast<float *>(t.data)[n] = static_cast<float>(x);
        break;
      case DType::f16:
        static_cast<uint16_t *>(t.data)[n] = static_cast<uint16_t>(sign | (13 + exponent) << 10 | (bits & 1023));
        break;
      default:
        static_cast<uint16_t *>(t.data)[n] = static_cast<uint16_t>(sign | (125 + exponent) << 7 | (bits & 127));
      }
    }
  }

  void dense() {
    sq = total_q = pick<int64_t>({1, 5, 16, 33, 64, 100, 130}), sk = total_k = pick<int64_t>({1, 7, 16, 33, 64, 100, 130});
    if (calls == Calls::grouped) sq = total_q = pick<int64_t>({130, 170}), sk = total_k = pick<int64_t>({100, 170});
    if (calls == Calls::lengthy) sq = total_q = pick<int64_t>({3, 300}), sk = total_k = sq == 3 ? 2500 : 40;
    numbers("q", dtype, {b, h, sq, d});
    numbers("k", dtype, {b, hkv, sk, d});
    numbers("v", dtype, {b, hkv, sk, dv});
  }
  void packed() {
    std::vector<int32_t> cu_q{0}, cu_k{0};
    sq = sk = 1;
    for (int64_t n = 0; n < b + 2; n++) {
      const int most = calls == Calls::grouped ? 140 : 70;
      const int32_t q = draw(4) ? draw(most) : 0, k = draw(4) ? draw(most) : 0;
      cu_q.push_back(cu_q.back() + q), cu_k.push_back(cu_k.back() + k);
      sq = std::max<int64_t>(sq, q), sk = std::max<int64_t>(sk, k);
    }
    b += 2, total_q = cu_q.back() + draw(3) * 20, total_k = cu_k.back() + draw(3) * 20; // adds padding after the last sequence
    c.add_values("cu_seqlens_q", DType::i32, cu_q);
    c.add_values("cu_seqlens_k", DType::i32, cu_k);
    c.attention.max_seqlen_q = sq, c.attention.max_seqlen_k = sk;
    used_q = cu_q.back(), used_k = cu_k.back();
    numbers("q", dtype, {total_q, h, d});
    numbers("k", dtype, {total_k, hkv, d});
    numbers("v", dtype, {total_k, hkv, dv});
    spoil_padding("q", used_q), spoil_padding("k", used_k), spoil_padding("v", used_k);
  }
  // Sets the tokens from `used` on to NaN: they must not be read.
  void spoil_padding(const char *name, int64_t used) { spoil(name, used, c[name].shape[0] - used); }

  int64_t or_one(int64_t n) { return draw(2) ? n : 1; }
  void options() {
    strobe_attention &a = c.attention;
    a.causal = draw(2);
    a.alignment = draw(2) ? STROBE_TOP_LEFT : STROBE_BOTTOM_RIGHT;
    if (draw(3) == 0) a.has_window_left = 1, a.window_left = draw(60);
    if (draw(3) == 0) a.has_window_right = 1, a.window_right = draw(60);
    if (draw(3) == 0) a.has_scale = 1, a.scale = pick({0.05, -0.2, 0.0});
    if (calls == Calls::functions && draw(2))
      functions();
    else if (calls == Calls::packed_softcap)
      a.softcap = 30;
    else if (calls == Calls::functions)
      give(c, kFunctions[size_t(draw(int(std::size(kFunctions))))], {b, h, std::max(sq, sk)});
    else if (draw(4) == 0)
      a.softcap = pick({2.0, 20.0});
    else if (draw(4) == 0)
      hyperbolic();
    if (draw(3) == 0) a.dropout = pick({0.1, 0.6}), a.seed = 7, a.offset = 1ull << 40;
    if (draw(4) == 0) a.tile_q = pick({1, 32, 256}), a.tile_k = pick({1, 32, 256});
    if (calls == Calls::lengthy)
      a.tile_q = 16, a.causal = 0, a.has_window_left = a.has_window_right = 0, a.window_left = a.window_right = 0;
    c.execution.threads = 1 + draw(3);
    if (draw(3) == 0) numbers("bias", draw(2) ? dtype : wide, {or_one(b), or_one(h), or_one(sq), or_one(sk)});
    if (draw(3) == 0) {
      c.add("mask", DType::boolean, {or_one(b), or_one(h), or_one(sq), or_one(sk)});
      bool *mask = c.data<bool>("mask");
      for (size_t n = c.memory_bytes("mask"); n > 0; n--) *mask++ = draw(4) > 0;
    }
    if (draw(4) == 0) numbers("alibi_slopes", DType::f32, {h});
    if (draw(3) == 0) numbers("sinks", wide, {h});
    if (draw(4) == 0) blocks();
    if (counts() % 4 == 0) use_some();
  }
  // The names of captured tensors, in the order in which functions read them.
  int32_t captured = 0;
  std::string next_captured() { return "captured_" + std::to_string(captured++); }
  int32_t reals(Nodes &f, const std::vector<int64_t> &shape, const std::vector<int32_t> &at) {
    numbers(next_captured().c_str(), pick({DType::f32, DType::f16, DType::bf16, DType::f64}), shape);
    return f.load(captured - 1, at);
  }
  template <class T> int32_t integers(Nodes &f, DType type, int most, const std::vector<int64_t> &shape, const std::vector<int32_t> &at) {
    const std::string name = next_captured();
    c.add(name, type, shape);
    T *values = c.data<T>(name);
    for (size_t n = c.memory_bytes(name) / sizeof(T); n > 0; n--) *values++ = static_cast<T>(draw(most));
    return f.load(captured - 1, at);
  }
  void functions() {
    const int wanted = draw(4);
    if (wanted != 0) score_function();
    if (wanted < 2) mask_function();
  }
  void score_function() {
    Nodes f;
    const int32_t x = f.add(STROBE_OP_SCORE), hd = f.add(STROBE_OP_HEAD), i = f.add(STROBE_OP_QUERY), j = f.add(STROBE_OP_KEY),
                  behind = f.add(STROBE_OP_SUBTRACT, {i, j});
    const auto op = [&](strobe_operation o, const std::vector<int32_t> &in) { return f.add(o, in); };
    const auto with_alibi = [&](int32_t to) {
      const int32_t slope = reals(f, {h}, {hd});
      return op(STROBE_OP_SUBTRACT, {to, op(STROBE_OP_MULTIPLY, {slope, op(STROBE_OP_TO_REAL, {op(STROBE_OP_ABSOLUTE, {behind})})})});
    };
    const auto softcap = [&](double cap) {
      const int32_t by = f.real(cap);
      return op(STROBE_OP_MULTIPLY, {by, op(STROBE_OP_TANH, {op(STROBE_OP_DIVIDE, {x, by})})});
    };
    switch (draw(8)) {
    case 0:
      with_alibi(x);
      break;
    case 1: { // some indices are below 0, which count from the end, and some are beyond it
      const int32_t shifted = op(STROBE_OP_ADD, {behind, f.integer(7)}), table = reals(f, {h, 50}, {hd, shifted});
      op(STROBE_OP_ADD, {table, x});
      break;
    }
    case 2: {
      const int32_t distance = op(STROBE_OP_MAXIMUM, {behind, f.integer(0)}), eight = f.integer(8);
      const int32_t log = op(STROBE_OP_LOG, {op(STROBE_OP_TO_REAL, {op(STROBE_OP_MAXIMUM, {distance, f.integer(1)})})});
      const int32_t far = op(STROBE_OP_TO_INTEGER, {op(STROBE_OP_MULTIPLY, {log, f.real(3.3)})});
      const int32_t bucket = op(STROBE_OP_WHERE, {op(STROBE_OP_LESS, {distance, eight}), distance, op(STROBE_OP_ADD, {far, eight})});
      op(STROBE_OP_ADD, {x, reals(f, {32, h}, {bucket, hd})});
      break;
    }
    case 3:
      softcap(20);
      break;
    case 4:
      with_alibi(softcap(3));
      break;
    case 5: { // hides keys by itself, and has a negative derivative
      const int32_t one = integers<int32_t>(f, DType::i32, 3, {200}, {i}), other = f.load(captured - 1, {j});
      op(STROBE_OP_WHERE, {op(STROBE_OP_GREATER_EQUAL, {one, other}), op(STROBE_OP_MULTIPLY, {x, f.real(-0.75)}), f.real(-HUGE_VAL)});
      break;
    }
    case 6: { // x sigmoid(x) + log(1 + exp(x))
      const int32_t a = op(STROBE_OP_MULTIPLY, {x, op(STROBE_OP_SIGMOID, {x})}), b = op(STROBE_OP_LOG1P, {op(STROBE_OP_EXP, {x})});
      op(STROBE_OP_ADD, {a, b});
      break;
    }
    default: { // adds b's number to x min(x, 2) / 4
      const int32_t least = op(STROBE_OP_MINIMUM, {x, f.real(2)}),
                    product = op(STROBE_OP_MULTIPLY, {least, op(STROBE_OP_MULTIPLY, {x, f.real(0.25)})});
      op(STROBE_OP_ADD, {product, reals(f, {b}, {f.add(STROBE_OP_BATCH)})});
    }
    }
    c.attention.score_function = c.function(f.all);
  }
  void mask_function() {
    Nodes f;
    const int32_t hd = f.add(STROBE_OP_HEAD), i = f.add(STROBE_OP_QUERY), j = f.add(STROBE_OP_KEY),
                  behind = f.add(STROBE_OP_SUBTRACT, {i, j});
    const auto op = [&](strobe_operation o, const std::vector<int32_t> &in) { return f.add(o, in); };
    const auto near = [&](int32_t distance, int64_t most) {
      return op(STROBE_OP_LESS_EQUAL, {op(STROBE_OP_ABSOLUTE, {distance}), f.integer(most)});
    };
    switch (draw(6)) {
    case 0: {
      const int32_t one = integers<int32_t>(f, DType::i32, 3, {200}, {i}), other = f.load(captured - 1, {j});
      op(STROBE_OP_EQUAL, {one, other});
      break;
    }
    case 1: {
      const int32_t one = integers<int64_t>(f, DType::i64, 2, {b, 200}, {f.add(STROBE_OP_BATCH), i}),
                    other = f.load(captured - 1, {f.add(STROBE_OP_BATCH), j});
      op(STROBE_OP_EQUAL, {one, other});
      break;
    }
    case 2:
      near(behind, 20);
      break;
    case 3:
      op(STROBE_OP_EQUAL, {op(STROBE_OP_REMAINDER, {op(STROBE_OP_ADD, {behind, hd}), f.integer(3)}), f.integer(0)});
      break;
    case 4: {
      const int32_t width = f.integer(9);
      const auto apart = [&](strobe_operation o) { return op(STROBE_OP_SUBTRACT, {op(o, {i, width}), op(o, {j, width})}); };
      const int32_t rows = near(apart(STROBE_OP_FLOOR_DIVIDE), 2), columns = near(apart(STROBE_OP_REMAINDER), 3);
      op(STROBE_OP_AND, {rows, columns});
      break;
    }
    default: {
      const int32_t four = f.integer(4);
      const int32_t kept =
          integers<bool>(f, DType::boolean, 2, {40, 40}, {op(STROBE_OP_FLOOR_DIVIDE, {i, four}), op(STROBE_OP_FLOOR_DIVIDE, {j, four})});
      op(STROBE_OP_OR, {kept, op(STROBE_OP_LESS, {j, f.integer(5)})});
    }
    }
    c.attention.mask_function = c.function(f.all);
  }
  // Keys that do not count become NaN.
  void use_some() {
    std::vector<int32_t> used;
    for (int64_t n = 0; n < b; n++) {
      const int32_t *cu = varlen ? c.data<int32_t>("cu_seqlens_k") + n : nullptr;
      const int32_t length = varlen ? cu[1] - cu[0] : static_cast<int32_t>(sk),
                    some = static_cast<int32_t>(counts() % (static_cast<uint32_t>(length) + 1));
      used.push_back(some);
      for (const char *name : {"k", "v"})
        for (int64_t head = 0; head < (varlen ? 1 : hkv); head++)
          spoil(name, some + (varlen ? cu[0] : (n * hkv + head) * sk), length - some);
    }
    c.add_values("seqused_k", DType::i32, used);
  }
  void spoil(const char *name, int64_t row, int64_t rows) {
    if (rows == 0) return;
    const strobe_tensor &t = c[name];
    const size_t all = static_cast<size_t>(varlen ? t.shape[0] : t.shape[0] * t.shape[1] * t.shape[2]), bytes = c.memory_bytes(name) / all;
    std::memset(static_cast<char *>(t.data) + bytes * static_cast<size_t>(row), 0xFF, bytes * static_cast<size_t>(rows));
  }
  // Products of q and k near -64. At -1 a distance has a cusp, where rounding has a larger effect than tolerances allow.
  void hyperbolic() {
    c.attention.score = STROBE_HYPERBOLIC, c.attention.beta = pick({0.5, 2.0}), c.attention.shift = draw(2);
    c.attention.has_scale = 0, c.attention.scale = 0;
    for (auto [name, x, f16, bf16] : {std::tuple{"q", -8, 0xC800, 0xC100}, {"k", 8, 0x4800, 0x4100}}) {
      const int64_t tokens = *name == 'q' ? used_q : used_k; // padding stays unchanged
      const size_t rows =
          varlen ? static_cast<size_t>(tokens * c[name].shape[1]) : c.memory_bytes(name) / static_cast<size_t>(bytes(dtype) * d);
      for (size_t n = 0; n < rows * d; n += d) {
        if (dtype == DType::f64)
          c.data<double>(name)[n] = x;
        else if (dtype == DType::f32)
          c.data<float>(name)[n] = static_cast<float>(x);
        else
          c.data<uint16_t>(name)[n] = static_cast<uint16_t>(dtype == DType::f16 ? f16 : bf16);
      }
    }
  }
  void blocks() {
    c.attention.block_q = pick({16, 32, 48}), c.attention.block_k = pick({16, 64});
    const int64_t rows = (sq + c.attention.block_q - 1) / c.attention.block_q, cols = (sk + c.attention.block_k - 1) / c.attention.block_k;
    std::vector<int32_t> row{0}, col, row_t{0}, col_t;
    std::vector<bool> kept;
    for (int64_t n = 0; n < rows * cols; n++) kept.push_back(draw(3) > 0);
    for (int64_t i = 0; i < rows; i++, row.push_back(static_cast<int32_t>(col.size())))
      for (int64_t j = 0; j < cols; j++)
        if (kept[static_cast<size_t>(i * cols + j)]) col.push_back(static_cast<int32_t>(j));
    for (int64_t j = 0; j < cols; j++, row_t.push_back(static_cast<int32_t>(col_t.size())))
      for (int64_t i = 0; i < rows; i++)
        if (kept[static_cast<size_t>(i * cols + j)]) col_t.push_back(static_cast<int32_t>(i));
    for (auto [name, values] : {std::pair{"block_rows", &row}, std::pair{"block_rows_t", &row_t}}) {
      strobe_tensor &t = c.add_values(name, DType::i32, *values);
      t.rank = 3, t.shape[2] = t.shape[0], t.shape[0] = t.shape[1] = 1, t.strides[2] = 1;
    }
    c.add_values("block_cols", DType::i32, col);
    c.add_values("block_cols_t", DType::i32, col_t);
  }

  std::vector<int64_t> shape(const char *name) { return {c[name].shape, c[name].shape + c[name].rank}; }
  void results(Operation operation) {
    const DType narrow_result = oracle ? DType::f64 : dtype, wide_result = oracle ? DType::f64 : wide;
    std::vector<int64_t> out = shape("q"), lse = varlen ? std::vector{h, total_q} : std::vector{b, h, sq};
    out.back() = dv;
    if (operation == Operation::forward) {
      c.add("out", narrow_result, out);
      c.add("lse", wide_result, lse);
      const uint32_t wanted = counts() % 4;
      if (wanted & 1) c.add("max_logit", wide_result, {b, h});
      if (wanted & 2) c.add("column_sums", wide_result, varlen ? std::vector{h, total_k} : std::vector{b, h, sk});
      return;
    }
    numbers("dout", dtype, out);
    if (varlen) spoil_padding("dout", used_q);
    numbers("dlse", wide, lse);
    for (auto [gradient, of] : {std::pair{"dq", "q"}, std::pair{"dk", "k"}, std::pair{"dv", "v"}})
      c.add(gradient, narrow_result, shape(of));
    for (auto [gradient, of] : {std::pair{"dbias", "bias"}, std::pair{"dsinks", "sinks"}})
      if (c.has(of)) c.add(gradient, oracle ? DType::f64 : static_cast<DType>(c[of].dtype), shape(of));
    if (counts() % 2) gradients_of_captured();
  }
  void gradients_of_captured() {
    for (int n = 0; n < captured; n++) {
      const std::string name = text("captured_", n);
      const DType type = static_cast<DType>(c[name].dtype);
      if (type == DType::i32 || type == DType::i64 || type == DType::boolean) continue; // the mask alone reads no floats
      c.add("d" + name, oracle ? DType::f64 : type, shape(name.c_str()));
    }
  }
};

template <class T> std::vector<double> numbers(Call &c, const char *name, double (*convert)(T)) {
  std::vector<double> out(c.memory_bytes(name) / sizeof(T));
  std::transform(c.data<T>(name), c.data<T>(name) + out.size(), out.begin(), convert);
  return out;
}
std::vector<double> values(Call &c, const char *name) {
  switch (static_cast<DType>(c[name].dtype)) {
  case DType::f64:
    return numbers<double>(c, name, [](double x) { return x; });
  case DType::f32:
    return numbers<float>(c, name, [](float x) -> double { return x; });
  case DType::f16:
    return numbers<uint16_t>(c, name, [](uint16_t x) { return half(x, 10, 15); });
  default:
    return numbers<uint16_t>(c, name, [](uint16_t x) { return half(x, 7, 127); });
  }
}

// cancelled: the size of the terms that cancel in the result. Their rounding errors do not cancel.
void compare(Call &found, Call &expected, const char *name, DType dtype, double cancelled = 0) {
  CAPTURE(std::string(name));
  const std::vector<double> x = values(found, name), ref = values(expected, name);
  REQUIRE(x.size() == ref.size());
  double most = std::max(1e-3, cancelled); // inputs have size 1, so smaller results come from cancellation
  for (double r : ref)
    if (std::isfinite(r)) most = std::max(most, std::fabs(r));
  for (size_t n = 0; n < x.size(); n++) {
    const bool good = x[n] == ref[n] || std::fabs(x[n] - ref[n]) <= tolerance(dtype) * most;
    if (!good) {
      CAPTURE(n);
      CAPTURE(most);
      REQUIRE(x[n] == ref[n]);
    }
  }
}

// A bias of one column sums whole rows of dS, where sum_j P dP and D cancel. What remains is the rounding error of D: D comes from an O
// rounded to dtype, and its error differs from row to row.
double cancelled_in_dbias(Call &backward, Call &forward_oracle) {
  if (!backward.has("dbias") || backward["dbias"].shape[3] != 1) return 0;
  const std::vector<double> out = values(forward_oracle, "out"), dout = values(backward, "dout");
  const size_t dv = static_cast<size_t>(backward["dout"].shape[backward["dout"].rank - 1]);
  double squares = 0;
  for (size_t row = 0; row < out.size(); row += dv) {
    double d = 0;
    for (size_t c = row; c < row + dv; c++)
      if (std::isfinite(dout[c])) d += out[c] * dout[c]; // padding is NaN
    squares += d * d;
  }
  return std::sqrt(squares);
}

// Terms of a gradient of captured tensors are rows of dS times a distance at most, in which D does not cancel either.
double cancelled_in_dcaptured(Call &backward, Call &forward_oracle) {
  const std::vector<double> out = values(forward_oracle, "out"), dout = values(backward, "dout");
  double squares = 0;
  for (size_t n = 0; n < out.size(); n++)
    if (std::isfinite(dout[n]) && std::isfinite(out[n])) squares += out[n] * out[n] * dout[n] * dout[n];
  return 50 * std::sqrt(squares);
}

// Returns false if the engine does not support the call. On a CPU each tensor ends, or begins, next to memory that must not be read,
// because AddressSanitizer is not built for every instruction set.
bool runs(Call &call, const char *engine, bool at_end) {
  call.attention.engine = engine;
  if (on_gpu(engine)) call.move_to_gpu();
  const int32_t status = on_gpu(engine) ? call.run() : call.run_guarded(at_end);
  if (status == STROBE_UNSUPPORTED) return false;
  REQUIRE_MESSAGE(status == STROBE_OK, std::string(strobe_last_error()));
  return true;
}
// What an engine has computed so far. shared: how many backwards divide the query heads of a key head.
struct Tested {
  const char *name;
  int forward = 0, backward = 0, shared = 0;
};
bool shares(const Call &call) {
  std::string said(1 << 16, '\0');
  REQUIRE(strobe_explain(&call.attention, &call.tensors, &call.execution, STROBE_BACKWARD, said.data(), said.size(), nullptr) == STROBE_OK);
  return said.find(" shares") != std::string::npos;
}

// The oracle's results of one seed, for all engines; computed when the first engine needs them.
class Expected {
public:
  Expected(uint32_t seed, Calls calls) : seed(seed), calls(calls) {}
  Call &of(Operation operation) {
    std::unique_ptr<Call> &call = operation == Operation::forward ? forward : backward;
    if (call) return *call;
    call = std::make_unique<Call>();
    Drawn(seed, calls, *call, operation, true);
    call->attention.engine = kOracle;
    REQUIRE_MESSAGE(call->run() == STROBE_OK, std::string(strobe_last_error()));
    return *call;
  }

private:
  const uint32_t seed;
  const Calls calls;
  std::unique_ptr<Call> forward, backward;
};

void agrees(uint32_t seed, Calls calls, Tested &engine, Expected &expected) {
  Call forward, backward;
  const Drawn drawn(seed, calls, forward, Operation::forward, false);
  if (!runs(forward, engine.name, seed % 2 == 0)) return;
  engine.forward++;
  Call &forward_oracle = expected.of(Operation::forward);
  for (const char *name : {"out", "lse", "max_logit", "column_sums"})
    if (forward.has(name)) compare(forward, forward_oracle, name, drawn.dtype);

  Drawn(seed, calls, backward, Operation::backward, false);
  backward.tensors.out = forward.tensors.out, backward.tensors.lse = forward.tensors.lse;
  if (!runs(backward, engine.name, seed % 2 == 0)) return;
  engine.backward++;
  if (calls == Calls::grouped) engine.shared += shares(backward);
  Call &backward_oracle = expected.of(Operation::backward);
  for (const char *name : {"dq", "dk", "dv", "dbias", "dsinks"})
    if (backward.has(name))
      compare(backward, backward_oracle, name, drawn.dtype, std::strcmp(name, "dbias") ? 0 : cancelled_in_dbias(backward, forward_oracle));
  for (int n = 0; n < STROBE_MOST_CAPTURED; n++)
    if (const std::string name = text("dcaptured_", n); backward.has(name)) {
      const DType own = static_cast<DType>(backward[name].dtype), rounded = tolerance(own) > tolerance(drawn.dtype) ? own : drawn.dtype;
      compare(backward, backward_oracle, name.c_str(), rounded, cancelled_in_dcaptured(backward, forward_oracle));
    }
}

int number(const char *name, int otherwise) { return std::getenv(name) ? std::atoi(std::getenv(name)) : otherwise; }
// The engines to test, without those that refuse all these calls.
std::vector<Tested> engines_of(Calls calls) {
  const char *listed = std::getenv("STROBE_AGREEMENT_ENGINES");
  const bool emulated = std::getenv("STROBE_EMULATOR_NVRTC");
  std::vector<Tested> engines;
  for (int32_t e = 0; const char *engine = strobe_engine_name(e); e++) {
    if (strobe_engine_missing(e) || std::strcmp(engine, kOracle) == 0) continue;
    if (std::strncmp(engine, "ladder-", 7) == 0) continue; // supports no options: tests/python/test_ladder.py
    if (calls == Calls::wide && (std::strcmp(engine, "cuda-sm90") == 0 || std::strcmp(engine, "cuda-tf32") == 0)) continue;
    if (calls == Calls::packed_softcap && std::strcmp(engine, "cuda-tf32") == 0) continue; // only fp32, and these calls have 16 bits
    if (on_gpu(engine) != emulated) continue;                                              // a real GPU cannot read this memory
    if (listed && text(",", listed, ",").find(text(",", engine, ",")) == std::string::npos) continue;
    engines.push_back({engine});
  }
  return engines;
}

void every_engine_agrees(Calls calls, int rounds, int first = 0) {
  const int most = calls == Calls::wide ? 1 : number("STROBE_AGREEMENT_CALLS", rounds);
  std::vector<Tested> engines = engines_of(calls);
  for (int n = first; n < first + rounds; n++) {
    Expected expected(static_cast<uint32_t>(n), calls);
    for (Tested &engine : engines) {
      if (engine.backward >= most) continue;
      CAPTURE(std::string(engine.name));
      CAPTURE(n);
      agrees(static_cast<uint32_t>(n), calls, engine, expected);
    }
  }
  for (const Tested &engine : engines) {
    CAPTURE(std::string(engine.name));
    MESSAGE(std::string(engine.name) << ": " << engine.forward << " forwards and " << engine.backward << " backwards");
    CHECK(engine.forward > 0);
    CHECK(engine.backward > 0);
    if (calls != Calls::grouped) continue;
    MESSAGE(engine.shared << " backwards share out the query heads of a key head");
    CHECK(engine.shared > 0);
  }
  CHECK(!engines.empty());
}

void some_rounds_agree(Calls calls, int rounds) {
  every_engine_agrees(calls, number("STROBE_AGREEMENT_ROUNDS", rounds), number("STROBE_AGREEMENT_FIRST", 0));
}

} // namespace

TEST_CASE("agreement: every engine with the oracle") { some_rounds_agree(Calls::any, 150); }
TEST_CASE("agreement: softcap over packed sequences with padding behind them") { some_rounds_agree(Calls::packed_softcap, 150); }
TEST_CASE("agreement: functions of the caller's") { some_rounds_agree(Calls::functions, 300); }
TEST_CASE("agreement: head dimensions beyond 256") { every_engine_agrees(Calls::wide, 100); }
TEST_CASE("agreement: sums that start anew") {
  if (!std::getenv("STROBE_EMULATOR_NVRTC")) every_engine_agrees(Calls::lengthy, 12);
}
TEST_CASE("agreement: query heads of a key head shared out") {
  if (number("STROBE_EMULATOR_SMS", 0) >= 100) every_engine_agrees(Calls::grouped, 60);
}
