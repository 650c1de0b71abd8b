// The least and the largest elements of ranges of a captured tensor.
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "score/interval.h"
#include "score/small_floats.h"

namespace strobe::score {
namespace {

struct Half {
  uint16_t bits;
  operator float() const { return from_half<float>(bits); }
};
struct Brain {
  uint16_t bits;
  operator float() const { return from_bfloat<float>(bits); }
};
struct Boolean {
  uint8_t byte;
  operator uint8_t() const { return byte != 0; }
};

// V holds every element: spans are kept for each few of them. NaN is apart from the others.
template <class V> struct WholeSpan {
  V low = std::numeric_limits<V>::has_infinity ? std::numeric_limits<V>::infinity() : std::numeric_limits<V>::max();
  V high = std::numeric_limits<V>::has_infinity ? -std::numeric_limits<V>::infinity() : std::numeric_limits<V>::min();

  void add(V x) { low = x < low ? x : low, high = x > high ? x : high; }
  void add(const WholeSpan &x) { low = std::min(low, x.low), high = std::max(high, x.high); }
};
template <class V> struct RealSpan : WholeSpan<V> {
  bool has_nan = false;

  void add(V x) { WholeSpan<V>::add(x), has_nan |= x != x; }
  void add(const RealSpan &x) { WholeSpan<V>::add(x), has_nan |= x.has_nan; }
};

} // namespace

struct Extrema::Pyramids {
  virtual ~Pyramids() = default;
  virtual Bounds over(const Range *indices, int32_t count) = 0;
};

namespace {

template <class T, class V> class Of final : public Extrema::Pyramids {
  static constexpr bool kReal = std::is_floating_point_v<V>;
  using Span = std::conditional_t<kReal, RealSpan<V>, WholeSpan<V>>;

public:
  explicit Of(const Captured &c) : data_(reinterpret_cast<const T *>(c.data)), c_(c) {}

  Bounds over(const Range *indices, int32_t count) override {
    Range at[4];
    int32_t varies[4], n = 0;
    int64_t start = 0;
    for (int32_t axis = 0; axis < count; axis++) {
      at[axis] = inside(indices[axis], c_.size[axis]);
      if (at[axis].low == at[axis].high || c_.stride[axis] == 0)
        start += at[axis].low * c_.stride[axis];
      else
        varies[n++] = axis;
    }
    if (n == 0) {
      const V x = V(data_[start]);
      Span one;
      one.add(x);
      return bounds(one);
    }
    if (n == 1) return of_line(start, varies[0], at[varies[0]]);
    if (n == 2) return of_plane(start, varies[0], varies[1], at[varies[0]], at[varies[1]]);
    return of_all();
  }

private:
  static constexpr int64_t kFew = 16; // the elements, or spans, that one span of the next level covers; along each axis of a plane

  static Range inside(Range r, int64_t size) {
    if (r.low < 0 && r.high >= 0) return {0, size - 1};
    if (r.high < 0) r.low = r.low < -size ? 0 : r.low + size, r.high = r.high < -size ? 0 : r.high + size;
    return {std::min(r.low, size - 1), std::min(r.high, size - 1)};
  }

  static Bounds bounds(const Span &x) {
    if constexpr (kReal)
      return Bounds::rounded(x.low, x.high, x.has_nan);
    else
      return {x.low, x.high};
  }

  // Along one axis: spans of kFew elements, of kFew such spans, and so on.
  struct Line {
    std::vector<std::vector<Span>> levels;
  };

  Bounds of_line(int64_t start, int32_t axis, Range at) {
    const int64_t stride = c_.stride[axis];
    if (at.high - at.low < kFew) {
      Span found;
      for (int64_t n = at.low; n <= at.high; n++) found.add(V(data_[start + n * stride]));
      return bounds(found);
    }
    auto [place, is_new] = lines_.try_emplace({start, axis});
    Line &line = place->second;
    if (is_new) build(line, start, stride, c_.size[axis]);
    Span found;
    int64_t low = at.low, high = at.high + 1; // of elements, then of spans of each level
    for (; low < high && low % kFew; low++) found.add(V(data_[start + low * stride]));
    for (; low < high && high % kFew && high < c_.size[axis]; high--) found.add(V(data_[start + (high - 1) * stride]));
    for (size_t level = 0; low < high; level++) {
      low /= kFew, high = (high + kFew - 1) / kFew;
      const auto &spans = line.levels[level];
      const bool is_last = level + 1 == line.levels.size();
      for (; low < high && (low % kFew || is_last); low++) found.add(spans[size_t(low)]);
      for (; low < high && high % kFew && high < int64_t(spans.size()); high--) found.add(spans[size_t(high) - 1]);
    }
    return bounds(found);
  }

  void build(Line &line, int64_t start, int64_t stride, int64_t size) {
    std::vector<Span> spans(size_t((size + kFew - 1) / kFew));
    for (int64_t n = 0; n < size; n += kFew) {
      Span span;
      const T *from = data_ + start + n * stride;
      const int64_t count = std::min(kFew, size - n);
      if (count == kFew && stride == 1)
        for (int64_t k = 0; k < kFew; k++) span.add(V(from[k]));
      else
        for (int64_t k = 0; k < count; k++) span.add(V(from[k * stride]));
      spans[size_t(n / kFew)] = span;
    }
    line.levels.push_back(std::move(spans));
    while (line.levels.back().size() > size_t(kFew)) {
      const auto &below = line.levels.back();
      std::vector<Span> above((below.size() + kFew - 1) / kFew);
      for (size_t n = 0; n < below.size(); n++) above[n / kFew].add(below[n]);
      line.levels.push_back(std::move(above));
    }
  }

  // Along two axes: squares of kFew by kFew elements, of 2 by 2 such squares, and so on.
  struct Plane {
    struct Level {
      int64_t rows, columns;
      std::vector<Span> spans;
    };
    std::vector<Level> levels;
  };

  Bounds of_plane(int64_t start, int32_t x, int32_t y, Range at_x, Range at_y) {
    auto [place, is_new] = planes_.try_emplace({start, x, y});
    Plane &plane = place->second;
    if (is_new) build(plane, start, x, y);
    Span found;
    collect(found, plane, start, x, y, plane.levels.size() - 1, 0, 0, at_x, at_y);
    return bounds(found);
  }

  void build(Plane &plane, int64_t start, int32_t x, int32_t y) {
    typename Plane::Level level{(c_.size[x] + kFew - 1) / kFew, (c_.size[y] + kFew - 1) / kFew, {}};
    level.spans.resize(size_t(level.rows * level.columns));
    for (int64_t r = 0; r < c_.size[x]; r++)
      for (int64_t c = 0; c < c_.size[y]; c++)
        level.spans[size_t(r / kFew * level.columns + c / kFew)].add(V(data_[start + r * c_.stride[x] + c * c_.stride[y]]));
    plane.levels.push_back(std::move(level));
    while (plane.levels.back().spans.size() > 1) {
      const auto &below = plane.levels.back();
      typename Plane::Level above{(below.rows + 1) / 2, (below.columns + 1) / 2, {}};
      above.spans.resize(size_t(above.rows * above.columns));
      for (int64_t r = 0; r < below.rows; r++)
        for (int64_t c = 0; c < below.columns; c++)
          above.spans[size_t(r / 2 * above.columns + c / 2)].add(below.spans[size_t(r * below.columns + c)]);
      plane.levels.push_back(std::move(above));
    }
  }

  // Adds what lies in square (r, c) of a level and in the ranges of indices.
  void collect(Span &found, const Plane &plane, int64_t start, int32_t x, int32_t y, size_t level, int64_t r, int64_t c, Range at_x,
               Range at_y) const {
    const auto &squares = plane.levels[level];
    if (r >= squares.rows || c >= squares.columns) return;
    const int64_t width = kFew << level, top = r * width, left = c * width;
    const int64_t bottom = std::min(top + width, c_.size[x]) - 1, right = std::min(left + width, c_.size[y]) - 1;
    if (at_x.high < top || at_x.low > bottom || at_y.high < left || at_y.low > right) return;
    if (at_x.low <= top && at_x.high >= bottom && at_y.low <= left && at_y.high >= right)
      return found.add(squares.spans[size_t(r * squares.columns + c)]);
    if (level > 0) {
      for (int64_t k = 0; k < 4; k++) collect(found, plane, start, x, y, level - 1, 2 * r + k / 2, 2 * c + k % 2, at_x, at_y);
      return;
    }
    for (int64_t i = std::max(top, at_x.low); i <= std::min(bottom, at_x.high); i++)
      for (int64_t j = std::max(left, at_y.low); j <= std::min(right, at_y.high); j++)
        found.add(V(data_[start + i * c_.stride[x] + j * c_.stride[y]]));
  }

  Bounds of_all() {
    if (!has_all_) {
      int64_t n[4] = {};
      for (n[0] = 0; n[0] < c_.size[0]; n[0]++)
        for (n[1] = 0; n[1] < c_.size[1]; n[1]++)
          for (n[2] = 0; n[2] < c_.size[2]; n[2]++)
            for (n[3] = 0; n[3] < c_.size[3]; n[3]++)
              all_.add(V(data_[n[0] * c_.stride[0] + n[1] * c_.stride[1] + n[2] * c_.stride[2] + n[3] * c_.stride[3]]));
      has_all_ = true;
    }
    return bounds(all_);
  }

  const T *const data_;
  const Captured c_;
  std::map<std::pair<int64_t, int32_t>, Line> lines_;             // by the first element and the axis
  std::map<std::tuple<int64_t, int32_t, int32_t>, Plane> planes_; // by the first element and the axes
  Span all_;
  bool has_all_ = false;
};

} // namespace

Extrema::Extrema(const Captured &c) {
  switch (c.dtype) {
  case DType::boolean:
    pyramids_ = std::make_unique<Of<Boolean, uint8_t>>(c);
    break;
  case DType::i32:
    pyramids_ = std::make_unique<Of<int32_t, int32_t>>(c);
    break;
  case DType::i64:
    pyramids_ = std::make_unique<Of<int64_t, int64_t>>(c);
    break;
  case DType::f16:
    pyramids_ = std::make_unique<Of<Half, float>>(c);
    break;
  case DType::bf16:
    pyramids_ = std::make_unique<Of<Brain, float>>(c);
    break;
  case DType::f32:
    pyramids_ = std::make_unique<Of<float, float>>(c);
    break;
  case DType::f64:
    pyramids_ = std::make_unique<Of<double, double>>(c);
    break;
  default: // it is not read
    break;
  }
}
Extrema::~Extrema() = default;
Extrema::Extrema(Extrema &&) noexcept = default;

Bounds Extrema::over(const Range *indices, int32_t count) { return pyramids_->over(indices, count); }

} // namespace strobe::score
