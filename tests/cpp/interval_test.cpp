// Bounds of functions. They hold: tested with random graphs at each point of a box. And they are as narrow as block masks need.
#include <cmath>
#include <random>

#include "call.h"
#include "reference/function.h"
#include "score/interval.h"

// Several files are compiled together, so each has its own names.
namespace strobe::interval_test {

using namespace strobe::test;
using score::Bounds;
using score::Box;
using score::Graph;
using score::Intervals;
using score::Kind;
using score::Op;
using score::Range;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
constexpr int64_t kLeast = std::numeric_limits<int64_t>::min(), kMost = std::numeric_limits<int64_t>::max();

struct Row {
  Op op;
  int32_t inputs;
  std::string takes, gives;
};
const Row kRows[] = {
#define STROBE_OPERATION(name, number, inputs, takes, gives) {Op::name, inputs, takes, gives},
#include "strobe/operations.inc"
};

// Captured tensors of each kind, in several shapes.
struct Tables {
  std::vector<int64_t> whole;
  std::vector<int32_t> sorted;
  std::vector<double> real;
  std::vector<uint8_t> flags;
  Captured all[STROBE_MOST_CAPTURED];

  explicit Tables(std::mt19937_64 &random) : whole(6 * 5), sorted(40), real(7 * 3 * 2), flags(3 * 50) {
    for (int64_t &x : whole) x = int64_t(random() % 21) - 10;
    for (size_t n = 0; n < sorted.size(); n++) sorted[n] = int32_t(n / 7);
    for (double &x : real) x = (double(random() % 4001) - 2000) / 300;
    real[5] = kInf, real[9] = kNan, real[20] = 1e-310;
    for (uint8_t &x : flags) x = random() % 3 == 0;
    set(0, DType::i64, whole.data(), {6, 5}), set(1, DType::i32, sorted.data(), {40});
    set(2, DType::f64, real.data(), {7, 3, 2}), set(3, DType::boolean, flags.data(), {3, 50});
  }
  void set(int32_t n, DType type, void *data, const std::vector<int64_t> &shape) {
    Captured &c = all[n];
    c.data = static_cast<char *>(data), c.dtype = type, c.rank = int32_t(shape.size());
    int64_t stride = 1;
    for (size_t axis = shape.size(); axis-- > 0;) c.size[axis] = shape[axis], c.stride[axis] = stride, stride *= shape[axis];
  }
  static Kind kind(int32_t n) { return n == 2 ? Kind::real : n == 3 ? Kind::boolean : Kind::integer; }
};

class Drawn {
public:
  Graph graph;
  std::map<Op, int> used;

  explicit Drawn(std::mt19937_64 &random) : random_(random) {
    for (Op op : {Op::BATCH, Op::HEAD, Op::QUERY, Op::KEY, Op::OFFSET}) graph.add(op);
    for (int n = 0; n < 3; n++) graph.integer(whole_number()), graph.real(real_number());
    graph.boolean(random() % 2);
  }
  void grow(const Tables &tables) {
    const Row &row = kRows[random_() % std::size(kRows)];
    if (row.op == Op::LOAD) {
      const int32_t captured = int32_t(random_() % 4);
      std::vector<int32_t> at;
      for (int32_t axis = 0; axis < tables.all[captured].rank; axis++) at.push_back(drawn(Kind::integer));
      graph.load(captured, Tables::kind(captured), at);
    } else if (row.op == Op::WHERE) {
      const Kind kind = Kind(random_() % 3);
      graph.add(row.op, {drawn(Kind::boolean), drawn(kind), drawn(kind)});
    } else if (row.inputs > 0) {
      const char letter = row.takes[random_() % row.takes.size()];
      const Kind kind = letter == 'B' ? Kind::boolean : letter == 'I' ? Kind::integer : Kind::real;
      if (row.inputs == 1)
        graph.add(row.op, {drawn(kind)});
      else
        graph.add(row.op, {drawn(kind), drawn(kind)});
    }
    used[row.op]++;
  }
  int32_t drawn(Kind kind) { // draws a node, preferably a late one
    for (;;) {
      const uint64_t size = uint64_t(graph.size()),
                     n = random_() % 2 ? random_() % size : size - 1 - random_() % std::min<uint64_t>(size, 6);
      if (graph[int32_t(n)].kind == kind) return int32_t(n);
    }
  }

private:
  int64_t whole_number() {
    const int64_t few[] = {0, 1, -1, 2, 3, 7, 63, 64, kMost, kLeast, int64_t{1} << 40, -5};
    return random_() % 3 ? few[random_() % std::size(few)] : int64_t(random_() % 200) - 100;
  }
  double real_number() {
    const double few[] = {0, -0.0, 1, -1, 0.5, 1e-3, 1e30, -1e300, 1e-40, kInf, -kInf, kNan, 2.5, -7};
    return random_() % 3 ? few[random_() % std::size(few)] : (double(random_() % 2000) - 1000) / 64;
  }
  std::mt19937_64 &random_;
};

// Whether the value of the node at a point lies within its bounds.
bool holds(const Graph &graph, int32_t n, const oracle::Pair &at, const Bounds &bounds, const Captured *captured) {
  const Kind kind = graph[n].kind;
  if (kind == Kind::real) {
    const double x = oracle::Function(graph.nodes(), n, captured).real(at).value.value;
    return std::isnan(x) ? bounds.may_be_nan : bounds.real.least <= x && x <= bounds.real.most;
  }
  Graph more = graph;
  if (kind == Kind::boolean) {
    const bool x = oracle::Function(graph.nodes(), n, captured).boolean(at);
    return bounds.whole.low <= x && x <= bounds.whole.high;
  }
  const int32_t low = more.add(Op::GREATER_EQUAL, {n, more.integer(bounds.whole.low)});
  const int32_t high = more.add(Op::LESS_EQUAL, {n, more.integer(bounds.whole.high)});
  return oracle::Function(more.nodes(), more.add(Op::AND, {low, high}), captured).boolean(at);
}

Range range_of(std::mt19937_64 &random, int64_t most_width) {
  const int64_t low = int64_t(random() % 60) - (random() % 4 ? 0 : 30);
  return {low, low + int64_t(random() % uint64_t(most_width))};
}

Bounds bounds_of(const Graph &graph, int32_t n, const Box &box, const Captured *captured = nullptr) {
  static const Captured none[STROBE_MOST_CAPTURED];
  return Intervals(graph, n, captured ? captured : none).evaluate(box);
}

} // namespace

TEST_CASE("bounds hold at every point, for random graphs of all operations") {
  std::mt19937_64 random(4711);
  const Tables tables(random);
  std::map<Op, int> used;
  for (int draw = 0; draw < 1500; draw++) {
    Drawn drawn(random);
    for (int n = 0; n < 14; n++) drawn.grow(tables);
    for (const auto &[op, times] : drawn.used) used[op] += times;
    const Box box = {range_of(random, 2), range_of(random, 2), range_of(random, 12), range_of(random, 12), range_of(random, 1)};
    for (int32_t n = drawn.graph.size() - 14; n < drawn.graph.size(); n++) {
      const Bounds bounds = bounds_of(drawn.graph, n, box, tables.all);
      for (int point = 0; point < 6; point++) {
        auto inside = [&](Range r) { return r.low + int64_t(random() % uint64_t(r.high - r.low + 1)); };
        const oracle::Pair at = {0.5, inside(box.b), inside(box.h), inside(box.i), inside(box.j), box.offset.low};
        CHECK_MESSAGE(holds(drawn.graph, n, at, bounds, tables.all), "draw ", draw, ", node ", n, ": ", score::formula(drawn.graph, n),
                      " at i ", at.i, ", j ", at.j);
      }
    }
  }
  for (const Row &row : kRows) CHECK_MESSAGE(used[row.op] > 50, "operation ", int32_t(row.op));
}

TEST_CASE("differences are bounded as sums, not term by term") {
  Graph g;
  const int32_t i = g.add(Op::QUERY), j = g.add(Op::KEY);
  const int32_t apart = g.add(Op::SUBTRACT, {i, j});
  const int32_t back = g.add(Op::ADD, {g.add(Op::MULTIPLY, {g.integer(3), apart}), g.add(Op::MULTIPLY, {j, g.integer(3)})});
  const Box box = {{}, {}, {10, 20}, {0, 1000}, {}};
  CHECK(bounds_of(g, back, box).whole.low == 30); // 3 (i - j) + 3 j
  CHECK(bounds_of(g, back, box).whole.high == 60);
  const int32_t later = g.add(Op::LESS, {j, g.add(Op::ADD, {j, g.add(Op::ABSOLUTE, {g.add(Op::SUBTRACT, {i, g.integer(5)})})})});
  CHECK(bounds_of(g, later, box).whole.low == 1); // j < j + |i - 5|
  const int32_t once = g.add(Op::FLOOR_DIVIDE, {i, g.integer(7)}), again = g.add(Op::FLOOR_DIVIDE, {i, g.integer(7)});
  CHECK(bounds_of(g, g.add(Op::EQUAL, {once, again}), box).whole.low == 1);
}

TEST_CASE("sums that wrap around have no bounds") {
  Graph g;
  const int32_t i = g.add(Op::QUERY), most = g.integer(kMost);
  const Box box = {{}, {}, {0, 3}, {0, 3}, {}};
  const Bounds sum = bounds_of(g, g.add(Op::ADD, {i, most}), box);
  CHECK(sum.whole.low == kLeast);
  CHECK(sum.whole.high == kMost);
  const int32_t less = g.add(Op::LESS, {i, g.add(Op::ADD, {i, most})}); // false where the sum wraps
  CHECK(bounds_of(g, less, box).whole.low == 0);
  CHECK(bounds_of(g, less, box).whole.high == 1);
}

TEST_CASE("integers: remainders, quotients and bits of ranges are narrow") {
  Graph g;
  const int32_t i = g.add(Op::QUERY), j = g.add(Op::KEY);
  auto check = [&](int32_t n, int64_t low, int64_t high) {
    const Bounds b = bounds_of(g, n, {{}, {}, {64, 79}, {16, 31}, {}});
    CHECK(b.whole.low == low);
    CHECK(b.whole.high == high);
  };
  check(g.add(Op::REMAINDER, {i, g.integer(64)}), 0, 15);
  check(g.add(Op::REMAINDER, {i, g.integer(10)}), 0, 9);
  check(g.add(Op::REMAINDER, {g.add(Op::NEGATE, {i}), g.integer(100)}), 21, 36);
  check(g.add(Op::TRUNC_REMAINDER, {g.add(Op::NEGATE, {i}), g.integer(100)}), -79, 0);
  check(g.add(Op::FLOOR_DIVIDE, {g.add(Op::NEGATE, {i}), g.integer(16)}), -5, -4);
  check(g.add(Op::XOR, {i, j}), 80, 95);
  check(g.add(Op::AND, {i, j}), 0, 15);
  check(g.add(Op::OR, {i, j}), 80, 95);
  check(g.add(Op::SHIFT_RIGHT, {i, g.integer(4)}), 4, 4);
  check(g.add(Op::MULTIPLY, {g.add(Op::SUBTRACT, {i, g.integer(70)}), g.add(Op::SUBTRACT, {i, g.integer(70)})}), 0, 81);
}

TEST_CASE("reals: the bounds include what is computed in float32") {
  std::mt19937_64 random(7);
  for (int draw = 0; draw < 3000; draw++) {
    const double x = (double(random() % 20000) - 10000) / 77, y = (double(random() % 20000) + 1) / 313;
    Graph g;
    const int32_t a = g.real(x), b = g.real(y);
    const float fa = float(x), fb = float(y), rest = std::fmod(fa, fb), above = rest < 0 ? rest + fb : rest;
    const std::pair<Op, float> all[] = {{Op::ADD, fa + fb},
                                        {Op::SUBTRACT, fa - fb},
                                        {Op::MULTIPLY, fa * fb},
                                        {Op::DIVIDE, fa / fb},
                                        {Op::FLOOR_DIVIDE, std::round((fa - rest) / fb) - float(rest < 0)},
                                        {Op::REMAINDER, above}};
    for (const auto &[op, value] : all) {
      const Bounds bounds = bounds_of(g, g.add(op, {a, b}), {});
      CHECK(bounds.real.least <= value);
      CHECK(bounds.real.most >= value);
    }
    const int32_t root = g.add(Op::SQRT, {b}), sine = g.add(Op::SIN, {a}), e = g.add(Op::EXP, {g.add(Op::SIN, {a})});
    CHECK(bounds_of(g, root, {}).real.least <= std::sqrt(fb));
    CHECK(bounds_of(g, root, {}).real.most >= std::sqrt(fb));
    CHECK(bounds_of(g, sine, {}).real.most >= std::sin(fa));
    CHECK(bounds_of(g, e, {}).real.most >= std::exp(std::sin(fa)));
  }
}

TEST_CASE("elements of tables: the least and the largest of every range") {
  std::mt19937_64 random(3);
  std::vector<int32_t> line(1000);
  for (int32_t &x : line) x = int32_t(random() % 100000);
  std::vector<float> plane(70 * 90);
  for (float &x : plane) x = float(random() % 100000);
  Captured c;
  c.data = reinterpret_cast<char *>(line.data()), c.dtype = DType::i32, c.rank = 1, c.size[0] = 500, c.stride[0] = 2;
  score::Extrema of_line(c);
  c.data = reinterpret_cast<char *>(line.data() + 999), c.size[0] = 1000, c.stride[0] = -1;
  score::Extrema backwards(c);
  c.data = reinterpret_cast<char *>(plane.data()), c.dtype = DType::f32, c.rank = 2;
  c.size[0] = 70, c.stride[0] = 90, c.size[1] = 90, c.stride[1] = 1;
  score::Extrema of_plane(c);
  auto drawn = [&](int64_t size) {
    const int64_t a = int64_t(random() % uint64_t(size)), b = int64_t(random() % uint64_t(size));
    return Range{std::min(a, b), std::max(a, b)};
  };
  for (int draw = 0; draw < 3000; draw++) {
    const Range n = drawn(500), m = drawn(1000), r = drawn(70), s = drawn(90);
    int32_t least = INT32_MAX, most = 0;
    for (int64_t k = n.low; k <= n.high; k++) least = std::min(least, line[size_t(2 * k)]), most = std::max(most, line[size_t(2 * k)]);
    const Bounds a = of_line.over(&n, 1);
    CHECK(a.whole.low == least);
    CHECK(a.whole.high == most);
    const auto [low, high] = std::minmax_element(line.end() - m.high - 1, line.end() - m.low);
    const Bounds b = backwards.over(&m, 1);
    CHECK(b.whole.low == *low);
    CHECK(b.whole.high == *high);
    if (draw % 8) continue;
    float lowest = 1e9f, highest = 0;
    for (int64_t x = r.low; x <= r.high; x++)
      for (int64_t y = s.low; y <= s.high; y++)
        lowest = std::min(lowest, plane[size_t(90 * x + y)]), highest = std::max(highest, plane[size_t(90 * x + y)]);
    const Range at[] = {r, s};
    CHECK(of_plane.over(at, 2).real.least == lowest);
    CHECK(of_plane.over(at, 2).real.most == highest);
  }
  const Range negative = {-3, -2}, beyond = {2000, 3000}, before = {-5000, -4000};
  c.data = reinterpret_cast<char *>(line.data()), c.dtype = DType::i32, c.rank = 1, c.size[0] = 1000, c.stride[0] = 1;
  score::Extrema all(c);
  CHECK(all.over(&negative, 1).whole.high == std::max(line[997], line[998]));
  CHECK(all.over(&beyond, 1).whole.low == line[999]);
  CHECK(all.over(&before, 1).whole.high == line[0]);
}

} // namespace strobe::interval_test
