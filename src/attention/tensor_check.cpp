#include "attention/tensor_check.h"

#include <algorithm>

namespace strobe {
namespace {

std::string describe(const Axes &axes) {
  std::string names, sizes;
  bool known = false;
  for (const Axis &axis : axes) {
    std::string comma = names.empty() ? "" : ", ", one = axis.or_one ? "|1" : "";
    names += comma + axis.symbol + one;
    sizes += comma + (axis.size == kAny ? "any" : std::to_string(axis.size) + one);
    known |= axis.size != kAny;
  }
  return "(" + names + ")" + (known ? " = (" + sizes + ")" : "");
}

std::string device_name(const strobe_tensor &t) { return t.device_type == STROBE_CPU ? "the CPU" : text("CUDA device ", t.device_index); }

bool is_device_type(const strobe_tensor &t) { return t.device_type == STROBE_CPU || t.device_type == STROBE_CUDA; }
bool is_device_index(const strobe_tensor &t) { return t.device_type == STROBE_CPU ? t.device_index == 0 : t.device_index >= 0; }
bool on_same_device(const strobe_tensor &x, const strobe_tensor &y) {
  return x.device_type == y.device_type && x.device_index == y.device_index;
}

} // namespace

bool TensorChecks::has_rank(const strobe_tensor *t, int32_t rank) {
  return t && t->rank == rank && std::all_of(t->shape, t->shape + rank, [](int64_t size) { return size >= 0; });
}

void TensorChecks::on_device_of(const strobe_tensor &t, const char *why) {
  if (is_device_type(t) && is_device_index(t)) device = &t, why_there = why;
}

bool TensorChecks::accept(const char *argument, const strobe_tensor &t, const Axes &axes, const Types &types, Access access) {
  bool good = shape(argument, t, axes);
  good &= dtype(argument, t, types);
  good &= place(argument, t);
  return good && memory(argument, t, access);
}

bool TensorChecks::accept_list(const char *argument, const strobe_tensor &t, const Axes &axes, const Types &types) {
  if (!accept(argument, t, axes, types, Access::read)) return false;
  if (is_dense(t)) return true;
  int64_t entries = 1;
  for (int32_t a = 0; a < t.rank; a++) entries *= t.shape[a]; // memory() has seen that they can be counted
  const Footprint &f = seen.back().bytes;
  const bool apart = entries <= (f.end - f.begin) / f.element;
  const int64_t most = apart ? INT32_MAX : 1 << 24;
  if (entries <= most) return true;
  reasons.add(argument, "shape ", tuple(t.shape, t.rank), " with strides ", tuple(t.strides, t.rank), "; accepted are up to ", most,
              " entries", apart ? " of a list with gaps" : " where some share an address");
  return false;
}

bool TensorChecks::shape(const char *argument, const strobe_tensor &t, const Axes &axes) {
  if (t.rank != static_cast<int32_t>(axes.size())) {
    reasons.add(argument, "rank ", t.rank, "; accepted is rank ", axes.size(), ", ", describe(axes));
    return false;
  }
  const int64_t *size = t.shape;
  for (const Axis &axis : axes) {
    bool fits = *size >= 0 && (axis.size == kAny || *size == axis.size || (axis.or_one && *size == 1));
    if (!fits) {
      reasons.add(argument, "shape ", tuple(t.shape, t.rank), "; accepted is ", describe(axes));
      return false;
    }
    size++;
  }
  return true;
}

bool TensorChecks::dtype(const char *argument, const strobe_tensor &t, const Types &types) {
  std::string accepted;
  for (DType type : types) {
    if (t.dtype == static_cast<int32_t>(type)) return true;
    accepted += (accepted.empty() ? "" : ", ") + std::string(name(type));
  }
  const DType given = static_cast<DType>(t.dtype);
  reasons.add(argument, "dtype ", bytes(given) ? name(given) : text(t.dtype, " (", name(given), ")"), "; accepted is ", accepted);
  return false;
}

bool TensorChecks::place(const char *argument, const strobe_tensor &t) {
  if (!is_device_type(t)) {
    reasons.add(argument, "device_type ", t.device_type, "; accepted is ", int(STROBE_CPU), " (CPU) or ", int(STROBE_CUDA), " (CUDA)");
  } else if (!is_device_index(t)) {
    reasons.add(argument, "device_index ", t.device_index, "; accepted is 0 on the CPU and 0 or more on CUDA");
  } else if (device && !on_same_device(t, *device)) {
    reasons.add(argument, "lies on ", device_name(t), "; accepted is ", device_name(*device), why_there);
  } else {
    return true;
  }
  return false;
}

bool TensorChecks::memory(const char *argument, const strobe_tensor &t, Access access) {
  const int64_t element = bytes(static_cast<DType>(t.dtype));
  std::optional<Footprint> f = footprint(t, element);
  if (!f) {
    reasons.add(argument, "shape ", tuple(t.shape, t.rank), " with strides ", tuple(t.strides, t.rank),
                " passes the end of memory; accepted are sizes and offsets within 63 bits, in bytes");
    return false;
  }
  const bool empty = f->begin == f->end;
  if (!empty && !t.data) {
    reasons.add(argument, "data is null, shape ", tuple(t.shape, t.rank), "; accepted is null only for a tensor without elements");
    return false;
  }
  if (!empty && reinterpret_cast<uintptr_t>(t.data) % element) {
    reasons.add(argument, "data is not aligned to its element; accepted are addresses that are multiples of ", element);
    return false;
  }
  if (access == Access::write && !empty) {
    for (int32_t a = 0; a < t.rank; a++)
      if (t.shape[a] > 1 && t.strides[a] <= 0) {
        reasons.add(argument, "strides ", tuple(t.strides, t.rank), "; accepted are positive strides where the tensor is written");
        return false;
      }
    if (!each_element_apart(*f)) {
      reasons.add(argument, "strides ", tuple(t.strides, t.rank), " let elements of shape ", tuple(t.shape, t.rank),
                  " overlap; accepted are strides that each clear the reach of the smaller ones where the tensor is written");
      return false;
    }
  }
  seen.push_back({argument, *f, access == Access::write});
  return true;
}

void check_overlaps(const std::vector<Placed> &all, Reasons &reasons) {
  for (size_t x = 0; x < all.size(); x++)
    for (size_t y = 0; y < all.size(); y++) {
      const bool once = !all[y].written || y < x;
      if (x != y && all[x].written && once && !disjoint(all[x].bytes, all[y].bytes))
        reasons.add(all[x].argument, "shares memory with ", all[y].argument, "; accepted is memory of its own where the tensor is written");
    }
}

} // namespace strobe
