// Nodes that no recorder makes: extreme numbers, strides and sizes in graphs of any operations, and graphs that are no graphs. Each has one
// clear message, or the reference's numbers on every engine; sanitizers see that nothing else happens.
#include <cmath>
#include <functional>
#include <random>

#include "call.h"
#include "refusals.h"

// The files of a group have names of their own.
namespace strobe::hostile_functions_test {

using namespace strobe::test;

namespace {

constexpr int64_t kSq = 5, kSk = 6;

struct Row {
  int32_t op, inputs;
  std::string takes, gives;
};
const Row kRows[] = {
#define STROBE_OPERATION(name, number, inputs, takes, gives) {number, inputs, takes, gives},
#include "strobe/operations.inc"
};

void give_captured(Call &c) {
  std::vector<int64_t> whole = {INT64_MIN, -1, 0, 63, INT64_MAX};
  c.add_values("captured_0", DType::i64, whole);
  strobe_tensor &backwards = c["captured_0"];
  backwards.data = static_cast<char *>(backwards.data) + 4 * sizeof(int64_t), backwards.strides[0] = -1;
  c.add_values("captured_1", DType::i32, std::vector<int32_t>{INT32_MIN}), c["captured_1"].rank = 0;
  c.add_values("captured_2", DType::i64, std::vector<int64_t>{7}); // one element under many indices
  c["captured_2"].rank = 2, c["captured_2"].shape[0] = int64_t(1) << 40, c["captured_2"].shape[1] = 3;
  c["captured_2"].strides[0] = c["captured_2"].strides[1] = 0;
}
int32_t rank(int32_t captured) { return captured == 0 ? 1 : captured == 1 ? 0 : 2; }

class Drawn {
public:
  Nodes f;
  explicit Drawn(std::mt19937_64 &random, bool scored, bool with_reals) : random_(random), with_reals_(with_reals) {
    if (scored) put('R', f.add(STROBE_OP_SCORE));
    for (const strobe_operation op : {STROBE_OP_BATCH, STROBE_OP_HEAD, STROBE_OP_QUERY, STROBE_OP_KEY, STROBE_OP_OFFSET})
      put('I', f.add(op));
    for (const int64_t x : {INT64_MIN, int64_t(-1), int64_t(0), int64_t(64), int64_t(-64), INT64_MAX}) put('I', f.integer(x));
    for (const double x : {0.0, -1.0, 1e300, double(NAN), double(INFINITY), 0x1p63}) put('R', f.real(x));
    put('B', f.add(STROBE_OP_BOOLEAN));
    for (int32_t n = 0; n < 3; n++) { // what is captured has to be read
      std::vector<int32_t> at;
      for (int32_t axis = 0; axis < rank(n); axis++) at.push_back(any('I'));
      put('I', f.load(n, at));
    }
    for (int n = 0; n < 20; n++) grow();
  }
  int32_t any(char kind) const {
    const auto &all = of_.at(kind);
    return all[random_() % all.size()];
  }

private:
  void put(char kind, int32_t n) { of_[kind].push_back(n); }
  void grow() {
    const Row &row = kRows[random_() % std::size(kRows)];
    if (row.inputs < 1) return;
    if (row.op == STROBE_OP_WHERE) {
      const char kind = "BIR"[random_() % (with_reals_ ? 3 : 2)];
      return put(kind, f.add(STROBE_OP_WHERE, {any('B'), any(kind), any(kind)}));
    }
    const char kind = row.takes[random_() % row.takes.size()];
    if (!with_reals_ && (kind == 'R' || row.gives == "R")) return;
    std::vector<int32_t> in;
    for (int32_t n = 0; n < row.inputs; n++) in.push_back(any(kind));
    put(row.gives == "S" ? kind : row.gives[0], f.add(strobe_operation(row.op), in));
  }

  std::mt19937_64 &random_;
  const bool with_reals_;
  std::map<char, std::vector<int32_t>> of_;
};

void make(Call &c, DType dtype, bool reference = true) {
  c.add("q", dtype, {1, 2, kSq, 2}), c.add("k", dtype, {1, 2, kSk, 2}), c.add("v", dtype, {1, 2, kSk, 2});
  for (const char *name : {"q", "k", "v"}) dtype == DType::f64 ? c.fill<double>(name, 1, 0.9) : c.fill<float>(name, 1, 0.9);
  const DType results = reference ? DType::f64 : dtype; // the reference writes float64
  c.add("out", results, {1, 2, kSq, 2}), c.add("lse", results, {1, 2, kSq});
  give_captured(c);
}

} // namespace

TEST_CASE("hostile functions: integers have the reference's values on the CPU engines and in the bounds of blocks") {
  std::mt19937_64 random(29);
  for (int draw = 0; draw < 150; draw++) {
    Drawn g(random, false, false);
    const int32_t whole = g.any('I'), condition = g.any('B');
    g.f.add(STROBE_OP_AND, {condition, g.f.add(STROBE_OP_LESS, {g.any('I'), whole})});
    std::vector<bool> seen[2];
    for (const bool reference : {true, false}) {
      Call c;
      make(c, DType::f64);
      c.attention.engine = reference ? "reference" : "cpu-baseline";
      c.attention.mask_function = c.function(g.f.all);
      REQUIRE_MESSAGE(c.run() == STROBE_OK, error());
      for (int64_t n = 0; n < 2 * kSq; n++) seen[reference].push_back(std::isfinite(c.data<double>("lse")[n]));
    }
    CHECK((seen[0] == seen[1]));
    Call c;
    make(c, DType::f64);
    strobe_block_mask mask{};
    mask.size = sizeof mask, mask.mask_function = c.function(g.f.all), mask.batch = 1, mask.heads = 2;
    mask.seqlen_q = kSq, mask.seqlen_k = kSk, mask.block_q = 1, mask.block_k = 2, mask.exact = draw % 2;
    mask.captured_0 = &c["captured_0"], mask.captured_1 = &c["captured_1"], mask.captured_2 = &c["captured_2"];
    std::vector<int32_t> rows(2 * (kSq + 1)), cols(2 * kSq * 3);
    std::vector<uint8_t> full(cols.size());
    strobe_kept_blocks to{};
    to.size = sizeof to, to.rows = rows.data(), to.most_rows = int64_t(rows.size());
    to.cols = cols.data(), to.full = full.data(), to.most_kept = int64_t(cols.size());
    REQUIRE_MESSAGE(strobe_mask_blocks(&mask, &to) == STROBE_OK, error());
    for (int64_t n = 0; n < 2 * kSq; n++) {
      const int64_t row = to.heads == 1 ? n % kSq : n / kSq * (kSq + 1) + n % kSq;
      if (seen[1][size_t(n)] || mask.exact) CHECK((rows[size_t(row)] < rows[size_t(row) + 1]) == seen[1][size_t(n)]);
    }
  }
}

TEST_CASE("hostile functions: any operations of any numbers run on each dtype") {
  std::mt19937_64 random(31);
  for (int draw = 0; draw < 150; draw++) {
    Drawn s(random, true, true);
    s.f.add(STROBE_OP_ADD, {s.any('R'), s.any('R')});
    for (const DType dtype : {DType::f64, DType::f32})
      for (const bool reference : {true, false}) {
        Call c;
        make(c, dtype, reference);
        c.attention.engine = reference ? "reference" : "cpu-baseline", c.attention.score_function = c.function(s.f.all);
        CHECK_MESSAGE(c.run() == STROBE_OK, error());
      }
  }
}

TEST_CASE("hostile functions: what is no graph has one message") {
  std::mt19937_64 random(37);
  const int32_t few[] = {0, -1, 1, 7, 8, 1000, INT32_MAX, INT32_MIN};
  int refused = 0;
  for (int draw = 0; draw < 2000; draw++) {
    Drawn s(random, true, true);
    s.f.add(STROBE_OP_ADD, {s.any('R'), s.any('R')});
    strobe_node &node = s.f.all[random() % s.f.all.size()];
    const int32_t value = few[random() % std::size(few)];
    switch (random() % 5) {
    case 0:
      node.operation = value;
      break;
    case 1:
      node.inputs[random() % 4] = value;
      break;
    case 2:
      node.captured = value;
      break;
    case 3:
      node.real = random() % 2 ? double(NAN) : double(value);
      break;
    default:
      node.integer = value;
    }
    Call c;
    make(c, DType::f64);
    c.attention.engine = "reference", c.attention.score_function = c.function(s.f.all);
    const int32_t status = c.run();
    if (status == STROBE_OK) continue;
    refused++;
    CHECK(status == STROBE_INVALID_ARGUMENT);
    CHECK(error().starts_with("score_function: "));
    CHECK(error().find('\n') == std::string::npos);
    CHECK(rendered() == error());
  }
  CHECK(refused > 1000);
}

TEST_CASE("hostile functions: tensors without elements, nodes without an address, a thousand nodes") {
  const auto message = [](const std::function<void(Call &, strobe_function &)> &change) {
    Call c;
    make(c, DType::f64);
    Nodes f;
    const int32_t zero = f.integer(0), x = f.add(STROBE_OP_SCORE);
    for (int32_t n = 0; n < 3; n++) f.load(n, std::vector<int32_t>(size_t(rank(n)), zero));
    f.add(STROBE_OP_ADD, {x, x});
    strobe_function function = *c.function(f.all);
    c.attention.score_function = &function, c.attention.engine = "reference";
    change(c, function);
    return c.run() == STROBE_OK ? std::string("computed") : error();
  };
  CHECK(message([](Call &, strobe_function &) {}) == "computed");
  CHECK(message([](Call &c, strobe_function &) { c["captured_0"].shape[0] = 0; }) ==
        "captured_0: shape (0); accepted is 1 or more on each axis");
  CHECK(message([](Call &, strobe_function &f) { f.nodes = nullptr; }) ==
        "score_function: nodes is null; accepted is a pointer to 6 nodes");
  CHECK(message([](Call &, strobe_function &f) { f.n_nodes = INT64_MIN; }) ==
        "score_function: -9223372036854775808 nodes; accepted are 1 to 1024");
  CHECK(message([](Call &, strobe_function &f) { f.n_nodes = INT64_MAX; }) ==
        "score_function: 9223372036854775807 nodes; accepted are 1 to 1024");
  Call c;
  make(c, DType::f64);
  Nodes f;
  int32_t sum = f.add(STROBE_OP_SCORE);
  for (int32_t n = 0; n < 3; n++) f.load(n, std::vector<int32_t>(size_t(rank(n)), f.add(STROBE_OP_KEY)));
  while (f.all.size() < 1024) sum = f.add(STROBE_OP_ADD, {sum, sum});
  c.attention.score_function = c.function(f.all);
  CHECK_MESSAGE(c.run() == STROBE_OK, error());
}

} // namespace strobe::hostile_functions_test
