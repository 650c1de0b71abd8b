#include "attention/memory.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace strobe {

std::optional<Footprint> footprint(const strobe_tensor &tensor, int64_t element_bytes) {
  Footprint f;
  f.element = element_bytes;
  f.begin = static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.data));
  int64_t size = element_bytes, last = 0; // in bytes
  bool empty = false;
  for (int32_t a = 0; a < tensor.rank; a++) {
    empty |= tensor.shape[a] == 0;
    if (__builtin_mul_overflow(size, std::max<int64_t>(tensor.shape[a], 1), &size)) return {};
  }
  f.end = f.begin;
  if (empty) return f;
  for (int32_t a = 0; a < tensor.rank; a++) {
    int64_t count = tensor.shape[a], stride, reach;
    if (count == 1) continue;
    if (__builtin_mul_overflow(tensor.strides[a], element_bytes, &stride)) return {};
    if (__builtin_mul_overflow(stride, count - 1, &reach)) return {};
    if (stride < 0) {
      if (__builtin_add_overflow(f.begin, reach, &f.begin) || f.begin < 0) return {};
      stride = -stride, reach = -reach;
    }
    if (__builtin_add_overflow(last, reach, &last)) return {};
    int32_t at = f.axes++;
    for (; at > 0 && f.axis[at - 1].stride > stride; at--) f.axis[at] = f.axis[at - 1];
    f.axis[at] = {stride, count};
  }
  if (__builtin_add_overflow(f.begin, last, &f.end) || __builtin_add_overflow(f.end, element_bytes, &f.end)) return {};
  return f;
}

bool each_element_apart(const Footprint &f) {
  if (f.begin == f.end) return true;
  int64_t reach = f.element;
  for (int32_t a = 0; a < f.axes; a++) {
    if (f.axis[a].stride < reach) return false;
    reach += f.axis[a].stride * (f.axis[a].count - 1);
  }
  return true;
}

bool is_dense(const strobe_tensor &t) {
  if (std::find(t.shape, t.shape + t.rank, 0) != t.shape + t.rank) return true; // in NumPy, tensors without elements have strides of 0
  int64_t stride = 1;
  for (int32_t a = t.rank - 1; a >= 0; a--) {
    if (t.shape[a] > 1 && t.strides[a] != stride) return false;
    stride *= t.shape[a];
  }
  return true;
}

void gather(const strobe_tensor &t, int64_t element_bytes, void *to) {
  char *next = static_cast<char *>(to);
  auto copy = [&](int64_t first, int64_t count) { // first, count: in elements of the tensor's memory
    std::memcpy(next, static_cast<const char *>(t.data) + first * element_bytes, static_cast<size_t>(count * element_bytes));
    next += count * element_bytes;
  };
  int64_t size[4] = {1, 1, 1, 1}, stride[4] = {0, 0, 0, 0};
  for (int32_t a = 0; a < t.rank; a++) size[4 - t.rank + a] = t.shape[a], stride[4 - t.rank + a] = t.strides[a];
  if (std::count(size, size + 4, 0)) return;
  if (is_dense(t)) return copy(0, size[0] * size[1] * size[2] * size[3]);
  for (int64_t i = 0; i < size[0]; i++)
    for (int64_t j = 0; j < size[1]; j++)
      for (int64_t k = 0; k < size[2]; k++) {
        const int64_t row = i * stride[0] + j * stride[1] + k * stride[2];
        if (stride[3] == 1)
          copy(row, size[3]);
        else
          for (int64_t n = 0; n < size[3]; n++) copy(row + n * stride[3], 1);
      }
}

namespace {

// A tensor's bytes, as runs of `run` bytes. A run lies at begin + i_1 stride_1 + i_2 stride_2 + ..., for all i_n < count_n. Every stride is
// larger than `run`.
struct Runs {
  int64_t begin, run;
  int32_t axes = 0;
  Footprint::Axis axis[4];
};

Runs runs(const Footprint &f) {
  Runs r{.begin = f.begin, .run = f.element, .axis = {}};
  for (int32_t a = 0; a < f.axes; a++) {
    if (!r.axes && f.axis[a].stride <= r.run)
      r.run += f.axis[a].stride * (f.axis[a].count - 1);
    else
      r.axis[r.axes++] = f.axis[a];
  }
  return r;
}

// The reach of a tensor that repeats with this period. Modulo the period, the tensor's bytes lie in [begin, begin + reach).
int64_t reach_within(const Runs &r, int64_t period) {
  int64_t reach = r.run;
  for (int32_t a = 0; a < r.axes; a++)
    if (r.axis[a].stride % period) reach += r.axis[a].stride * (r.axis[a].count - 1);
  return reach;
}

bool apart_modulo(const Runs &x, const Runs &y, int64_t period) {
  int64_t shift = (y.begin - x.begin) % period;
  if (shift < 0) shift += period;
  return reach_within(x, period) <= shift && reach_within(y, period) <= period - shift;
}

bool apart_in_a_period(const Runs &x, const Runs &y) {
  for (const Runs *r : {&x, &y})
    for (int32_t a = 0; a < r->axes; a++)
      if (apart_modulo(x, y, r->axis[a].stride)) return true;
  for (int32_t a = 0; a < x.axes; a++)
    for (int32_t b = 0; b < y.axes; b++)
      if (apart_modulo(x, y, std::gcd(x.axis[a].stride, y.axis[b].stride))) return true;
  return false;
}

// Searches for multiples of the strides at which a run of y overlaps a run of x: their starts are then low_ to high_ apart.
class Meeting {
public:
  Meeting(const Runs &x, const Runs &y) : low_(1 - __int128{y.run}), high_(__int128{x.run} - 1) {
    for (int32_t a = 0; a < x.axes; a++) add(x.axis[a].stride, 1 - x.axis[a].count, 0);
    for (int32_t a = 0; a < y.axes; a++) add(y.axis[a].stride, 0, y.axis[a].count - 1);
    std::sort(steps_, steps_ + count_, [](const Step &x, const Step &y) { return x.stride > y.stride; });
    for (int n = count_ - 1; n >= 0; n--)
      least_[n] = least_[n + 1] + steps_[n].stride * steps_[n].least, most_[n] = most_[n + 1] + steps_[n].stride * steps_[n].most;
    found_ = search(__int128{y.begin} - x.begin, 0);
  }
  // Whether no run of y overlaps a run of x. Also false if the search would take long.
  bool excluded() const { return !found_ && left_ >= 0; }

private:
  struct Step {
    __int128 stride, least, most; // multiples of the stride from `least` to `most`
  };
  void add(int64_t stride, int64_t least, int64_t most) {
    for (int n = 0; n < count_; n++)
      if (steps_[n].stride == stride) {
        steps_[n].least += least, steps_[n].most += most;
        return;
      }
    steps_[count_++] = {stride, least, most};
  }
  static __int128 floor_div(__int128 a, __int128 b) { return a / b - (a % b < 0); } // b > 0
  bool search(__int128 at, int n) {
    if (n == count_) return low_ <= at && at <= high_;
    const Step &step = steps_[n];
    const __int128 first = std::max(step.least, -floor_div(at + most_[n + 1] - low_, step.stride));
    const __int128 last = std::min(step.most, floor_div(high_ - at - least_[n + 1], step.stride));
    for (__int128 times = first; times <= last; times++) {
      if (--left_ < 0) return false;
      if (search(at + times * step.stride, n + 1)) return true;
    }
    return false;
  }

  __int128 low_, high_;
  Step steps_[8];
  int count_ = 0;
  __int128 least_[9] = {}, most_[9] = {}; // bounds of the sum that the n-th and later steps can add
  int left_ = 4096;
  bool found_;
};

} // namespace

bool disjoint(const Footprint &x, const Footprint &y) {
  if (x.begin == x.end || y.begin == y.end || x.end <= y.begin || y.end <= x.begin) return true;
  const Runs rx = runs(x), ry = runs(y);
  return apart_in_a_period(rx, ry) || Meeting(rx, ry).excluded();
}

} // namespace strobe
