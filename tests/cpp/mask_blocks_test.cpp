// Compares strobe_mask_blocks with every pair of the problem: masks of models, random graphs, sizes that blocks do not divide, refusals.
#include <functional>
#include <random>

#include "call.h"
#include "reference/function.h"
#include "refusals.h"
#include "score/build.h"

// Several files are compiled together, so each has its own names.
namespace strobe::mask_blocks_test {

using namespace strobe::test;

namespace {

struct Arguments {
  int32_t b, h, i, j, offset;
};
using Build = std::function<void(Nodes &, const Arguments &)>;

enum class State { hidden, mixed, full };
using States = std::vector<State>; // (batch, heads, blocks of queries, blocks of keys)

// A mask function and the tensors that it reads, in sizes that a test changes.
struct Mask {
  strobe_block_mask mask{};
  Nodes nodes;
  strobe_function function{};
  Call memory;

  explicit Mask(const Build &build) {
    mask.size = sizeof mask, mask.batch = 2, mask.heads = 3, mask.seqlen_q = 100, mask.seqlen_k = 100, mask.block_q = mask.block_k = 16;
    const Arguments at = {nodes.add(STROBE_OP_BATCH), nodes.add(STROBE_OP_HEAD), nodes.add(STROBE_OP_QUERY), nodes.add(STROBE_OP_KEY),
                          nodes.add(STROBE_OP_OFFSET)};
    build(nodes, at);
    function.size = sizeof function, function.nodes = nodes.all.data(), function.n_nodes = int64_t(nodes.all.size());
    mask.mask_function = &function;
  }
  Mask(const Mask &) = delete;

  template <class T> void capture(const std::string &name, DType type, const std::vector<T> &values, std::vector<int64_t> shape = {}) {
    memory.add_values(name, type, values);
    strobe_tensor &t = memory[name];
    if (!shape.empty()) {
      t.rank = int32_t(shape.size());
      int64_t stride = 1;
      for (size_t a = shape.size(); a-- > 0;) t.shape[a] = shape[a], t.strides[a] = stride, stride *= shape[a];
    }
    (name == "captured_0" ? mask.captured_0 : mask.captured_1) = &t;
  }
  void sizes(int64_t seqlen_q, int64_t seqlen_k, int64_t block_q, int64_t block_k) {
    mask.seqlen_q = seqlen_q, mask.seqlen_k = seqlen_k, mask.block_q = block_q, mask.block_k = block_k;
  }
  int64_t rows() const { return (mask.seqlen_q + mask.block_q - 1) / mask.block_q; }
  int64_t columns() const { return (mask.seqlen_k + mask.block_k - 1) / mask.block_k; }
};

struct Kept {
  int64_t batch = 0, heads = 0;
  std::vector<int32_t> rows, cols;
  std::vector<uint8_t> full;
};

Kept kept_blocks(const Mask &m) {
  strobe_kept_blocks to{};
  to.size = sizeof to;
  REQUIRE_MESSAGE(strobe_mask_blocks(&m.mask, &to) == STROBE_OK, error());
  Kept kept{to.batch, to.heads, std::vector<int32_t>(size_t(to.n_rows)), std::vector<int32_t>(size_t(to.kept)),
            std::vector<uint8_t>(size_t(to.kept))};
  CHECK(to.n_rows == to.batch * to.heads * (m.rows() + 1));
  to.rows = kept.rows.data(), to.cols = kept.cols.data(), to.full = kept.full.data();
  to.most_rows = to.n_rows, to.most_kept = to.kept;
  REQUIRE_MESSAGE(strobe_mask_blocks(&m.mask, &to) == STROBE_OK, error());
  return kept;
}

// The states of all blocks, expanded over b and h. Checks the CSR as well.
States states(const Mask &m, const Kept &kept) {
  States all(size_t(m.mask.batch * m.mask.heads * m.rows() * m.columns()), State::hidden);
  int32_t end = 0;
  for (int64_t matrix = 0; matrix < kept.batch * kept.heads; matrix++) {
    const int32_t *rows = kept.rows.data() + matrix * (m.rows() + 1);
    REQUIRE(rows[0] == end);
    for (int64_t q = 0; q < m.rows(); q++)
      for (int32_t n = rows[q]; n < rows[q + 1]; n++) REQUIRE((n == rows[q] || kept.cols[size_t(n)] > kept.cols[size_t(n) - 1]));
    end = rows[m.rows()];
  }
  REQUIRE(size_t(end) == kept.cols.size());
  for (int64_t b = 0; b < m.mask.batch; b++)
    for (int64_t h = 0; h < m.mask.heads; h++) {
      const int64_t matrix = (kept.batch == 1 ? 0 : b) * kept.heads + (kept.heads == 1 ? 0 : h);
      const int32_t *rows = kept.rows.data() + matrix * (m.rows() + 1);
      for (int64_t q = 0; q < m.rows(); q++)
        for (int32_t n = rows[q]; n < rows[q + 1]; n++)
          all[size_t(((b * m.mask.heads + h) * m.rows() + q) * m.columns() + kept.cols[size_t(n)])] =
              kept.full[size_t(n)] ? State::full : State::mixed;
    }
  return all;
}

States by_each_pair(const Mask &m) {
  strobe_attention a{};
  a.mask_function = m.mask.mask_function;
  const score::CapturedTensors given = {m.mask.captured_0, m.mask.captured_1};
  Reasons reasons;
  const auto program = score::make_program(a, given, reasons);
  reasons.raise_if_any();
  Captured captured[STROBE_MOST_CAPTURED];
  for (size_t n = 0; n < given.size(); n++) captured[n] = score::captured_of(given[n]);
  const oracle::Function sees(program->graph.nodes(), program->seen, captured);
  const int64_t offset = m.mask.alignment == STROBE_BOTTOM_RIGHT ? m.mask.seqlen_k - m.mask.seqlen_q : 0;
  States all;
  for (int64_t b = 0; b < m.mask.batch; b++)
    for (int64_t h = 0; h < m.mask.heads; h++)
      for (int64_t q = 0; q < m.rows(); q++)
        for (int64_t k = 0; k < m.columns(); k++) {
          bool visible = false, hidden = false;
          for (int64_t i = q * m.mask.block_q; i < std::min((q + 1) * m.mask.block_q, m.mask.seqlen_q); i++)
            for (int64_t j = k * m.mask.block_k; j < std::min((k + 1) * m.mask.block_k, m.mask.seqlen_k); j++)
              (sees.boolean({0, b, h, i, j, offset}) ? visible : hidden) = true;
          all.push_back(!visible ? State::hidden : hidden ? State::mixed : State::full);
        }
  return all;
}

// No visible block may be dropped, and no block may wrongly be called full.
void check_safe(const States &found, const States &expected) {
  for (size_t n = 0; n < found.size(); n++) {
    CHECK((found[n] != State::hidden || expected[n] == State::hidden));
    CHECK((found[n] != State::full || expected[n] == State::full));
  }
}

// Exactly these states where `exact`, unless reals decide; otherwise safe ones.
void check(Mask &m, bool is_tight, bool has_reals = false) {
  const States expected = by_each_pair(m);
  m.mask.exact = 1;
  const States exact = states(m, kept_blocks(m));
  if (!has_reals) CHECK((exact == expected));
  check_safe(exact, expected);
  m.mask.exact = 0;
  const States found = states(m, kept_blocks(m));
  if (is_tight) CHECK((found == expected));
  check_safe(found, exact);
}

constexpr int64_t kSizes[][4] = {{100, 100, 16, 16}, {128, 128, 32, 16}, {37, 90, 16, 32}, {90, 37, 8, 16},
                                 {1, 70, 16, 16},    {70, 1, 16, 16},    {0, 50, 16, 16},  {50, 0, 16, 16}};
void check_sizes(Mask &m, bool is_tight = true, bool has_reals = false) {
  for (const auto &s : kSizes)
    for (int32_t alignment : {STROBE_BOTTOM_RIGHT, STROBE_TOP_LEFT}) {
      m.sizes(s[0], s[1], s[2], s[3]);
      m.mask.alignment = alignment;
      check(m, is_tight, has_reals);
    }
}

int32_t both(Nodes &g, int32_t x, int32_t y) { return g.add(STROBE_OP_AND, {x, y}); }
int32_t causal(Nodes &g, const Arguments &at) { return g.add(STROBE_OP_LESS_EQUAL, {at.j, g.add(STROBE_OP_ADD, {at.i, at.offset})}); }

std::vector<int32_t> documents(size_t tokens, std::mt19937_64 &random, size_t longest) {
  std::vector<int32_t> ids;
  for (int32_t id = 0; ids.size() < tokens; id++) ids.insert(ids.end(), 1 + random() % longest, id);
  ids.resize(tokens);
  return ids;
}

} // namespace

TEST_CASE("blocks of a mask function: causal") {
  Mask m([](Nodes &g, const Arguments &at) { causal(g, at); });
  check_sizes(m);
  m.sizes(100, 100, 16, 16);
  CHECK(kept_blocks(m).batch == 1);
  CHECK(kept_blocks(m).heads == 1);
}

TEST_CASE("blocks of a mask function: window") {
  Mask m([](Nodes &g, const Arguments &at) {
    const int32_t near = g.add(STROBE_OP_LESS, {g.add(STROBE_OP_SUBTRACT, {at.i, at.j}), g.integer(20)});
    both(g, near, causal(g, at));
  });
  check_sizes(m, false); // a block lies between the two borders
  Mask symmetric([](Nodes &g, const Arguments &at) {
    g.add(STROBE_OP_LESS_EQUAL, {g.add(STROBE_OP_ABSOLUTE, {g.add(STROBE_OP_SUBTRACT, {at.i, at.j})}), g.integer(17)});
  });
  check_sizes(symmetric);
}

TEST_CASE("blocks of a mask function: documents, one list for all and one for each sequence") {
  std::mt19937_64 random(5);
  Mask m([](Nodes &g, const Arguments &at) { g.add(STROBE_OP_EQUAL, {g.load(0, {at.i}), g.load(0, {at.j})}); });
  m.capture("captured_0", DType::i32, documents(128, random, 30));
  check_sizes(m);
  Mask each([](Nodes &g, const Arguments &at) {
    both(g, g.add(STROBE_OP_EQUAL, {g.load(0, {at.b, at.i}), g.load(0, {at.b, at.j})}), causal(g, at));
  });
  std::vector<int32_t> ids = documents(128, random, 30);
  const std::vector<int32_t> more = documents(128, random, 50);
  ids.insert(ids.end(), more.begin(), more.end());
  each.capture("captured_0", DType::i32, ids, {2, 128});
  check_sizes(each, false);
  each.sizes(100, 100, 16, 16);
  CHECK(kept_blocks(each).batch == 2);
  CHECK(kept_blocks(each).heads == 1);
}

TEST_CASE("blocks of a mask function: prefix-LM, its lengths by sequence") {
  Mask m([](Nodes &g, const Arguments &at) {
    const int32_t prefix = g.add(STROBE_OP_LESS, {at.j, g.load(0, {at.b})});
    g.add(STROBE_OP_OR, {prefix, g.add(STROBE_OP_GREATER_EQUAL, {at.i, at.j})});
  });
  m.capture("captured_0", DType::i64, std::vector<int64_t>{20, 48});
  check_sizes(m);
}

TEST_CASE("blocks of a mask function: dilated") {
  Mask m([](Nodes &g, const Arguments &at) {
    const int32_t apart = g.add(STROBE_OP_SUBTRACT, {at.i, at.j});
    const int32_t steps = g.add(STROBE_OP_EQUAL, {g.add(STROBE_OP_REMAINDER, {apart, g.integer(4)}), g.integer(0)});
    both(g, steps, both(g, g.add(STROBE_OP_GREATER_EQUAL, {apart, g.integer(0)}), g.add(STROBE_OP_LESS, {apart, g.integer(48)})));
  });
  check_sizes(m, false);
}

TEST_CASE("blocks of a mask function: neighbourhood of an image, by heads") {
  Mask m([](Nodes &g, const Arguments &at) {
    const int32_t width = g.integer(16), reach = g.add(STROBE_OP_ADD, {at.h, g.integer(1)});
    auto near = [&](strobe_operation op) {
      const int32_t apart = g.add(STROBE_OP_SUBTRACT, {g.add(op, {at.i, width}), g.add(op, {at.j, width})});
      return g.add(STROBE_OP_LESS_EQUAL, {g.add(STROBE_OP_ABSOLUTE, {apart}), reach});
    };
    both(g, near(STROBE_OP_FLOOR_DIVIDE), near(STROBE_OP_REMAINDER));
  });
  check_sizes(m, false);
  m.sizes(100, 100, 16, 16);
  CHECK(kept_blocks(m).batch == 1);
  CHECK(kept_blocks(m).heads == 3);
}

TEST_CASE("blocks of a mask function: blocks, a table of pairs, reals, constants") {
  Mask blocks([](Nodes &g, const Arguments &at) {
    g.add(STROBE_OP_EQUAL, {g.add(STROBE_OP_FLOOR_DIVIDE, {at.i, g.integer(24)}), g.add(STROBE_OP_FLOOR_DIVIDE, {at.j, g.integer(24)})});
  });
  check_sizes(blocks);
  std::mt19937_64 random(9);
  Mask table([](Nodes &g, const Arguments &at) { g.load(0, {at.i, at.j}); });
  std::vector<uint8_t> seen(128 * 128);
  for (size_t n = 0; n < seen.size(); n++) seen[n] = n / 128 / 40 % 2 == n % 128 / 20 % 2 && random() % 50;
  table.capture("captured_0", DType::boolean, seen, {128, 128});
  check_sizes(table);
  Mask real([](Nodes &g, const Arguments &at) { // inside a circle
    const int32_t x = g.add(STROBE_OP_DIVIDE, {g.add(STROBE_OP_TO_REAL, {at.i}), g.real(50)}),
                  y = g.add(STROBE_OP_DIVIDE, {g.add(STROBE_OP_TO_REAL, {at.j}), g.real(50)});
    const int32_t square = g.add(STROBE_OP_ADD, {g.add(STROBE_OP_MULTIPLY, {x, x}), g.add(STROBE_OP_MULTIPLY, {y, y})});
    g.add(STROBE_OP_LESS, {g.add(STROBE_OP_SQRT, {square}), g.real(1.3)});
  });
  check_sizes(real, false, true);
  for (const int64_t value : {0, 1}) {
    Mask constant([value](Nodes &g, const Arguments &) { g.add(STROBE_OP_EQUAL, {g.integer(value), g.integer(1)}); });
    check_sizes(constant);
  }
}

// 0.1f * 3 <= 0.3f holds, and 0.1 * 3 <= 0.3 does not: an engine that computes in float32 sees query 3, one in float64 does not.
TEST_CASE("blocks of a mask function: where the rounding of reals decides, a block is kept in part") {
  Mask m([](Nodes &g, const Arguments &at) {
    g.add(STROBE_OP_LESS_EQUAL, {g.add(STROBE_OP_MULTIPLY, {g.add(STROBE_OP_TO_REAL, {at.i}), g.real(0.1)}), g.real(0.3)});
  });
  REQUIRE(0.1f * 3 <= 0.3f);
  m.sizes(6, 8, 1, 8);
  m.mask.batch = m.mask.heads = 1;
  for (const int32_t exact : {0, 1}) {
    m.mask.exact = exact;
    const States expected = {State::full, State::full, State::full, State::mixed, State::hidden, State::hidden};
    CHECK((states(m, kept_blocks(m)) == expected));
  }
}

// Whole numbers have the same values everywhere, also where they wrap around.
TEST_CASE("blocks of a mask function: integers that wrap around are exact") {
  Mask m([](Nodes &g, const Arguments &at) { // a hash of both positions
    const int32_t hash = g.add(STROBE_OP_MULTIPLY, {g.add(STROBE_OP_ADD, {g.add(STROBE_OP_MULTIPLY, {at.i, g.integer(7919)}), at.j}),
                                                    g.integer(-7046029254386353131)});
    const int32_t by = g.add(STROBE_OP_SUBTRACT, {at.j, g.integer(40)});
    both(g, g.add(STROBE_OP_LESS, {g.add(STROBE_OP_REMAINDER, {hash, by}), g.add(STROBE_OP_TRUNC_REMAINDER, {by, at.i})}), causal(g, at));
  });
  m.sizes(40, 90, 4, 8);
  check(m, false);
}

TEST_CASE("blocks of a mask function: random graphs") {
  std::mt19937_64 random(11);
  const strobe_operation whole[] = {
      STROBE_OP_ADD,       STROBE_OP_SUBTRACT, STROBE_OP_MULTIPLY, STROBE_OP_FLOOR_DIVIDE, STROBE_OP_REMAINDER, STROBE_OP_TRUNC_REMAINDER,
      STROBE_OP_MINIMUM,   STROBE_OP_MAXIMUM,  STROBE_OP_AND,      STROBE_OP_OR,           STROBE_OP_XOR,       STROBE_OP_SHIFT_RIGHT,
      STROBE_OP_SHIFT_LEFT};
  const strobe_operation comparisons[] = {STROBE_OP_EQUAL,      STROBE_OP_NOT_EQUAL, STROBE_OP_LESS,
                                          STROBE_OP_LESS_EQUAL, STROBE_OP_GREATER,   STROBE_OP_GREATER_EQUAL};
  const strobe_operation joins[] = {STROBE_OP_AND, STROBE_OP_OR, STROBE_OP_XOR};
  for (int draw = 0; draw < 120; draw++) {
    Mask m([&](Nodes &g, const Arguments &at) {
      std::vector<int32_t> integers = {at.b, at.h, at.i, at.j, at.offset, at.i, at.j, at.i, at.j}, booleans;
      auto one = [&](const std::vector<int32_t> &of) { return of[random() % of.size()]; };
      for (int n = 0; n < 3; n++) integers.push_back(g.integer(int64_t(random() % 40) - 8));
      for (int n = 0; n < 5; n++) integers.push_back(g.add(whole[random() % std::size(whole)], {one(integers), one(integers)}));
      integers.push_back(g.load(0, {one(integers)}));
      for (int n = 0; n < 3; n++) booleans.push_back(g.add(comparisons[random() % 6], {one(integers), one(integers)}));
      for (int n = 0; n < 2; n++) booleans.push_back(g.add(joins[random() % 3], {one(booleans), one(booleans)}));
      g.add(STROBE_OP_WHERE, {one(booleans), booleans.back(), g.add(comparisons[random() % 6], {at.j, integers.back()})});
    });
    m.capture("captured_0", DType::i32, documents(60, random, 12));
    const auto &s = kSizes[random() % std::size(kSizes)];
    m.sizes(s[0], s[1], s[2], s[3]);
    check(m, false);
  }
}

TEST_CASE("blocks of a mask function: a million tokens") {
  Mask m([](Nodes &g, const Arguments &at) {
    const int32_t apart = g.add(STROBE_OP_SUBTRACT, {at.i, at.j});
    both(g, g.add(STROBE_OP_LESS, {apart, g.integer(1024)}), g.add(STROBE_OP_GREATER_EQUAL, {apart, g.integer(0)}));
  });
  m.sizes(1 << 20, 1 << 20, 128, 128);
  const Kept kept = kept_blocks(m);
  int64_t full = 0;
  for (uint8_t x : kept.full) full += x;
  CHECK(kept.cols.size() == 8192 * 9 - 36); // 8 blocks before the diagonal, fewer at the beginning
  CHECK(full == 8192 * 7 - 28);
}

TEST_CASE("blocks of a mask function: what does not fit is not written") {
  Mask m([](Nodes &g, const Arguments &at) { causal(g, at); });
  std::vector<int32_t> rows(8, -1), cols(28, -1);
  std::vector<uint8_t> full(28, 9);
  strobe_kept_blocks to{};
  to.size = sizeof to, to.rows = rows.data(), to.cols = cols.data(), to.full = full.data(), to.most_rows = 8, to.most_kept = 27;
  REQUIRE(strobe_mask_blocks(&m.mask, &to) == STROBE_OK);
  CHECK(to.kept == 28);
  CHECK(std::ranges::count(rows, -1) + std::ranges::count(cols, -1) + std::ranges::count(full, 9) == 64);
  to.most_kept = 28;
  REQUIRE(strobe_mask_blocks(&m.mask, &to) == STROBE_OK);
  CHECK(std::ranges::count(rows, -1) + std::ranges::count(cols, -1) + std::ranges::count(full, 9) == 0);
}

TEST_CASE("blocks of a mask function: the struct of an older caller keeps its size, and what lies behind it") {
  Mask m([](Nodes &g, const Arguments &at) { causal(g, at); });
  strobe_kept_blocks to{};
  to.size = offsetof(strobe_kept_blocks, rows_t), to.n_rows_t = to.workspace_bytes = 77;
  REQUIRE(strobe_mask_blocks(&m.mask, &to) == STROBE_OK);
  CHECK(to.kept == 28);
  CHECK(to.size == offsetof(strobe_kept_blocks, rows_t));
  CHECK(to.n_rows_t == 77);
  CHECK(to.workspace_bytes == 77);
}

TEST_CASE("blocks of a mask function: refusals") {
  auto refused = [](const std::function<void(Mask &, strobe_kept_blocks &)> &change) {
    Mask m([](Nodes &g, const Arguments &at) { g.add(STROBE_OP_EQUAL, {g.load(0, {at.i}), g.load(0, {at.j})}); });
    m.capture("captured_0", DType::i32, std::vector<int32_t>(100));
    strobe_kept_blocks to{};
    to.size = sizeof to;
    change(m, to);
    REQUIRE(strobe_mask_blocks(&m.mask, &to) == STROBE_INVALID_ARGUMENT);
    CHECK(rendered() == error());
    return error();
  };
  using To = strobe_kept_blocks;
  CHECK(refused([](Mask &m, To &) { m.mask.batch = -1; }) == "batch: -1; accepted is 0 to 9007199254740992");
  CHECK(refused([](Mask &m, To &) { m.mask.block_k = 0; }) == "block_k: 0; accepted is 1 to 9007199254740992");
  CHECK(refused([](Mask &m, To &) { m.mask.seqlen_q = int64_t{1} << 40; }) ==
        "seqlen_q: 1099511627776 in blocks of 16; accepted are up to 2147483647 blocks, what an int32 can count");
  CHECK(refused([](Mask &m, To &) { m.mask.alignment = 2, m.mask.exact = 2; }) ==
        "alignment: 2; accepted is 0 (bottom right) or 1 (top left)\nexact: 2; accepted is 0 or 1");
  CHECK(refused([](Mask &m, To &) { m.mask.mask_function = nullptr, m.mask.captured_0 = nullptr; }) ==
        "mask_function: missing; accepted is a pointer to a strobe_function");
  CHECK(refused([](Mask &m, To &) { m.mask.captured_0 = nullptr; }) ==
        "mask_function: node 5, LOAD, reads captured_0, which is not given; accepted are captured tensors of the call");
  CHECK(refused([](Mask &m, To &) { m.memory["captured_0"].device_type = STROBE_CUDA; }) ==
        "captured_0: lies on CUDA device 0; accepted is the CPU");
  CHECK(refused([](Mask &m, To &) { m.memory["captured_0"].rank = 5; }) == "captured_0: rank 5; accepted is 0 to 4");
  CHECK(refused([](Mask &m, To &) { m.mask.captured_1 = m.mask.captured_0; }) ==
        "captured_1: given, and read by no function; accepted is none");
  CHECK(refused([](Mask &m, To &) { m.function.n_nodes = 3; }) ==
        "mask_function: its result, node 2, is an integer; accepted is a boolean");
  CHECK(refused([](Mask &, To &to) { to.most_rows = -1; }) == "most_rows: -1; accepted is 0 or more");
  CHECK(refused([](Mask &, To &to) { to.most_rows = 8; }) == "rows: null; accepted is memory for 8 entries, or null with room for none");
  CHECK(refused([](Mask &, To &to) { to.size = 4; }).starts_with("kept_blocks: size is 4; accepted is sizeof(strobe_kept_blocks)"));
  CHECK(refused([](Mask &m, To &) { m.mask.device_type = 7; }) == "device_type: 7; accepted is 0 (the CPU) or 1 (CUDA)");
  CHECK(refused([](Mask &m, To &) { m.mask.device_index = 1; }) == "device_index: 1 of the CPU; accepted is 0");
  CHECK(refused([](Mask &m, To &) { m.mask.stream = &m, m.mask.workspace = &m; }) ==
        "stream: given on the CPU; accepted is null\nworkspace: given on the CPU; accepted is null");
  CHECK(refused([](Mask &, To &to) { to.marks = to.rows_t = reinterpret_cast<int32_t *>(&to), to.most_rows_t = 3; }) ==
        "rows_t: given on the CPU; accepted is null\nmarks: given on the CPU; accepted is null\nmost_rows_t: 3 on the CPU; accepted is 0");
  const auto on_gpu = [](Mask &m) { m.mask.device_type = m.memory["captured_0"].device_type = STROBE_CUDA; };
  CHECK(refused([&](Mask &m, To &) { on_gpu(m), m.mask.exact = 1; }) ==
        "exact: 1 on a GPU; accepted is 0: copy what the function reads, and ask for it on the CPU");
  CHECK(refused([&](Mask &m, To &) { on_gpu(m), m.memory["captured_0"].device_type = STROBE_CPU; }) ==
        "captured_0: lies on the CPU; accepted is CUDA device 0");
  CHECK(refused([&](Mask &m, To &to) { on_gpu(m), to.full = reinterpret_cast<uint8_t *>(&to); }) ==
        "full: given on a GPU; accepted is null");
  CHECK(refused([&](Mask &m, To &to) {
          on_gpu(m), to.most_kept = 2;
        }).starts_with("cols: null; accepted is memory for 2 entries, or null with room for none\ncols_t: null"));
  CHECK(refused([&](Mask &m, To &) { on_gpu(m), m.mask.workspace = reinterpret_cast<void *>(uintptr_t{8}), m.mask.workspace_bytes = 1; }) ==
        "workspace: not aligned; accepted is an address that is a multiple of 256");
  CHECK(strobe_mask_blocks(nullptr, nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(error() == "block_mask: missing; accepted is a pointer to a strobe_block_mask\n"
                   "kept_blocks: missing; accepted is a pointer to a strobe_kept_blocks");
}

TEST_CASE("blocks of a mask function: a GPU counts all blocks as int32") {
  Mask m([](Nodes &g, const Arguments &at) { causal(g, at); });
  m.sizes(1 << 20, 1 << 19, 16, 16), m.mask.device_type = STROBE_CUDA; // 2^31 blocks
  strobe_kept_blocks to{};
  to.size = sizeof to;
  CHECK(strobe_mask_blocks(&m.mask, &to) == STROBE_UNSUPPORTED);
  CHECK(error() == "more than 2147483647 blocks in all");
}

} // namespace strobe::mask_blocks_test
