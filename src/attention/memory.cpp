#include "attention/memory.h"

#include <algorithm>
#include <cstring>

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
  if (std::find(t.shape, t.shape + t.rank, 0) != t.shape + t.rank) return true; // no elements: NumPy's strides are 0 there
  int64_t stride = 1;
  for (int32_t a = t.rank - 1; a >= 0; a--) {
    if (t.shape[a] > 1 && t.strides[a] != stride) return false;
    stride *= t.shape[a];
  }
  return true;
}

void gather(const strobe_tensor &t, int64_t element_bytes, void *to) {
  char *next = static_cast<char *>(to);
  auto copy = [&](int64_t first, int64_t count) { // elements of the tensor's memory
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

// Within a period, the tensor stays in [begin, begin + this) modulo the period.
static int64_t reach_within(const Footprint &f, int64_t period) {
  int64_t reach = f.element;
  for (int32_t a = 0; a < f.axes; a++)
    if (f.axis[a].stride % period) reach += f.axis[a].stride * (f.axis[a].count - 1);
  return reach;
}

static bool apart_modulo(const Footprint &x, const Footprint &y, int64_t period) {
  int64_t shift = (y.begin - x.begin) % period;
  if (shift < 0) shift += period;
  return reach_within(x, period) <= shift && reach_within(y, period) <= period - shift;
}

bool disjoint(const Footprint &x, const Footprint &y) {
  if (x.begin == x.end || y.begin == y.end || x.end <= y.begin || y.end <= x.begin) return true;
  for (const Footprint *f : {&x, &y})
    for (int32_t a = 0; a < f->axes; a++)
      if (f->axis[a].stride > 0 && apart_modulo(x, y, f->axis[a].stride)) return true;
  return false;
}

} // namespace strobe
