// The overlap of strided tensors, against the set of bytes that they touch.
#include "attention/memory.h"

#include <set>

#include "call.h"

using namespace strobe;

namespace {

strobe_tensor make(int64_t address, std::vector<int64_t> shape, std::vector<int64_t> strides) {
  strobe_tensor t{};
  t.data = reinterpret_cast<void *>(address);
  t.rank = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape), std::copy(strides.begin(), strides.end(), t.strides);
  return t;
}

// Every byte, as many times as it is touched.
std::multiset<int64_t> touched(const strobe_tensor &t, int64_t element) {
  std::multiset<int64_t> all = {reinterpret_cast<int64_t>(t.data)};
  for (int a = 0; a < t.rank; a++) {
    std::multiset<int64_t> next;
    for (int64_t at : all)
      for (int64_t i = 0; i < t.shape[a]; i++) next.insert(at + i * t.strides[a] * element);
    all = next;
  }
  std::multiset<int64_t> bytes;
  for (int64_t at : all)
    for (int64_t b = 0; b < element; b++) bytes.insert(at + b);
  return bytes;
}

} // namespace

TEST_CASE("memory: what is apart is said to be, and nothing else, for random tensors") {
  std::mt19937 random(7);
  auto draw = [&](int lo, int hi) { return std::uniform_int_distribution<int>(lo, hi)(random); };
  int apart = 0, separate = 0;
  for (int n = 0; n < 4000; n++) {
    const int64_t element = 1 << draw(0, 2), other = 1 << draw(0, 3);
    auto any = [&] {
      std::vector<int64_t> shape, strides;
      for (int a = draw(0, 4); a > 0; a--) shape.push_back(draw(0, 4)), strides.push_back(draw(0, 2) ? draw(-4, 16) : 12 * draw(1, 3));
      return make(100000 + draw(0, 40), shape, strides);
    };
    const strobe_tensor x = any(), y = any();
    const Footprint fx = footprint(x, element).value(), fy = footprint(y, other).value();
    const auto bx = touched(x, element), by = touched(y, other);
    if (!bx.empty()) {
      CHECK(fx.begin == *bx.begin());
      CHECK(fx.end == *bx.rbegin() + 1);
    } else {
      CHECK(fx.begin == fx.end);
    }
    if (each_element_apart(fx)) {
      apart++;
      CHECK(std::set<int64_t>(bx.begin(), bx.end()).size() == bx.size());
    }
    const bool found = std::none_of(bx.begin(), bx.end(), [&](int64_t b) { return by.count(b) > 0; });
    CHECK(disjoint(fx, fy) == found);
    CHECK(disjoint(fy, fx) == found);
    separate += found;
  }
  CHECK(apart > 1000); // both answers are frequent among the drawn cases
  CHECK(separate > 1000);
  CHECK(separate < 3500);
}

TEST_CASE("memory: interleaved tensors are told apart") {
  auto f = [](int64_t address, std::vector<int64_t> shape, std::vector<int64_t> strides) {
    return footprint(make(address, shape, strides), 4).value();
  };
  const int64_t B = 2, H = 3, S = 5, D = 8;
  SUBCASE("q, k, v in (B, S, 3, H, D)") {
    const std::vector<int64_t> shape = {B, H, S, D}, strides = {S * 3 * H * D, D, 3 * H * D, 1};
    const Footprint q = f(4096, shape, strides), k = f(4096 + 4 * H * D, shape, strides);
    CHECK(disjoint(q, k));
    CHECK_FALSE(disjoint(q, f(4096 + 4 * H * D - 4, shape, strides)));
  }
  SUBCASE("q, k, v in (B, S, H, 3, D)") {
    const std::vector<int64_t> shape = {B, H, S, D}, strides = {S * 3 * H * D, 3 * D, 3 * H * D, 1};
    CHECK(disjoint(f(4096, shape, strides), f(4096 + 4 * D, shape, strides)));
    CHECK(disjoint(f(4096, shape, strides), f(4096 + 8 * D, shape, strides)));
  }
  SUBCASE("halves of one sequence") {
    const std::vector<int64_t> shape = {B, H, S, D}, strides = {H * 2 * S * D, 2 * S * D, D, 1};
    CHECK(disjoint(f(4096, shape, strides), f(4096 + 4 * S * D, shape, strides)));
  }
}

TEST_CASE("memory: numbers and scales of one buffer are told apart, whatever lies between pages") {
  for (int64_t gap : {0, 4, 12, 60}) {
    const int64_t pages = 100000, rows = 16, heads = 8, D = 128, row = 2 * (D + 4), page = heads * rows * row + gap;
    auto numbers = [&](int64_t at) { return footprint(make(4096 + at, {pages, heads, rows, D}, {page, row, heads * row, 1}), 1).value(); };
    auto scales = [&](int64_t at) { // strides count elements, which are bytes here; the page size may be no multiple
      Footprint f = footprint(make(4096 + at, {pages, heads, rows}, {page, row, heads * row}), 1).value();
      f.element = 4, f.end += 3;
      return f;
    };
    const Footprint all[] = {numbers(0), scales(D), numbers(D + 4), scales(2 * D + 4)};
    for (const Footprint &x : all)
      for (const Footprint &y : all) CHECK(disjoint(x, y) == (&x != &y));
    CHECK_FALSE(disjoint(all[0], scales(D - 4)));
    CHECK_FALSE(disjoint(all[2], scales(2 * D + 1)));
  }
}

TEST_CASE("memory: what would take long to find out counts as shared") {
  const Footprint x = footprint(make(4096, {99, 97, 89, 83}, {100003, 99991, 99989, 2}), 1).value(),
                  y = footprint(make(4097, {99, 97, 89, 83}, {100019, 99971, 99961, 4}), 1).value();
  CHECK_FALSE(disjoint(x, y));
}

TEST_CASE("memory: sizes and offsets past 64 bits") {
  const int64_t big = int64_t{1} << 40;
  CHECK_FALSE(footprint(make(4096, {big, big}, {0, 0}), 4));
  CHECK_FALSE(footprint(make(4096, {big, 0, big}, {0, 0, 0}), 4));
  CHECK_FALSE(footprint(make(4096, {3}, {INT64_MAX / 4}), 4));
  CHECK_FALSE(footprint(make(4096, {3}, {INT64_MIN / 4}), 4));
  CHECK_FALSE(footprint(make(4096, {2}, {INT64_MIN}), 1));
  CHECK_FALSE(footprint(make(4096, {2, 2}, {INT64_MAX / 2, INT64_MAX / 2 + 2}), 1));
  CHECK_FALSE(footprint(make(4096, {2}, {-2000}), 4)); // the tensor would begin below address 0
  CHECK(footprint(make(4096, {1, 0}, {INT64_MIN, INT64_MAX}), 8));
}
