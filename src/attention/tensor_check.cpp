#include "attention/tensor_check.h"

#include <algorithm>

#include "attention/text.h"

namespace strobe {
namespace {

Numbers shape_of(const strobe_tensor &t) { return {t.shape, t.rank}; }
Numbers strides_of(const strobe_tensor &t) { return {t.strides, t.rank}; }
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

void TensorChecks::on_device_of(const strobe_tensor &t, const char *argument) {
  if (is_device_type(t) && is_device_index(t)) device = &t, first = argument;
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
  for (int32_t a = 0; a < t.rank; a++) entries *= t.shape[a]; // cannot overflow: memory() has checked that
  const Footprint &f = seen.back().bytes;
  const bool apart = entries <= (f.end - f.begin) / f.element;
  const int64_t most = apart ? INT32_MAX : 1 << 24;
  if (entries <= most) return true;
  reasons.add(argument, Code::memory,
              apart ? "shape {0} with strides {1}; accepted are up to {2} entries of a list with gaps"
                    : "shape {0} with strides {1}; accepted are up to {2} entries where some share an address",
              shape_of(t), strides_of(t), most);
  return false;
}

bool TensorChecks::shape(const char *argument, const strobe_tensor &t, const Axes &axes) {
  if (t.rank != static_cast<int32_t>(axes.size())) {
    reasons.add(argument, Code::rank, "rank {0}; accepted is rank {1}, {2}", t.rank, axes.size(), axes);
    return false;
  }
  const int64_t *size = t.shape;
  for (const Axis &axis : axes) {
    bool fits = *size >= 0 && (axis.size == kAny || *size == axis.size || (axis.or_one && *size == 1));
    if (!fits) {
      reasons.add(argument, Code::shape, "shape {0}; accepted is {1}", shape_of(t), axes);
      return false;
    }
    size++;
  }
  return true;
}

bool TensorChecks::dtype(const char *argument, const strobe_tensor &t, const Types &types) {
  const DType given = static_cast<DType>(t.dtype);
  if (std::count(types.begin(), types.end(), given)) return true;
  reasons.add(argument, Code::dtype, "dtype {0}; accepted is {1}", given, types);
  return false;
}

bool TensorChecks::place(const char *argument, const strobe_tensor &t) {
  if (!is_device_type(t)) {
    reasons.add(argument, Code::device, "device_type {0}; accepted is {1} (CPU) or {2} (CUDA)", t.device_type, int(STROBE_CPU),
                int(STROBE_CUDA));
  } else if (!is_device_index(t)) {
    reasons.add(argument, Code::device, "device_index {0}; accepted is 0 on the CPU and 0 or more on CUDA", t.device_index);
  } else if (device && !on_same_device(t, *device)) {
    if (first)
      reasons.add(argument, Code::device, "lies on {0}; accepted is {1}, where {2} lies", device_name(t), device_name(*device),
                  Argument{first});
    else
      reasons.add(argument, Code::device, "lies on {0}; accepted is {1}", device_name(t), device_name(*device));
  } else {
    return true;
  }
  return false;
}

bool TensorChecks::memory(const char *argument, const strobe_tensor &t, Access access) {
  const int64_t element = bytes(static_cast<DType>(t.dtype));
  std::optional<Footprint> f = footprint(t, element);
  if (!f) {
    reasons.add(argument, Code::memory,
                "shape {0} with strides {1} passes the end of memory; accepted are sizes and offsets within 63 bits, in bytes", shape_of(t),
                strides_of(t));
    return false;
  }
  const bool empty = f->begin == f->end;
  if (!empty && !t.data) {
    reasons.add(argument, Code::memory, "data is null, shape {0}; accepted is null only for a tensor without elements", shape_of(t));
    return false;
  }
  if (!empty && reinterpret_cast<uintptr_t>(t.data) % element) {
    reasons.add(argument, Code::memory, "data is not aligned to its element; accepted are addresses that are multiples of {0}", element);
    return false;
  }
  if (access == Access::write && !empty) {
    for (int32_t a = 0; a < t.rank; a++)
      if (t.shape[a] > 1 && t.strides[a] <= 0) {
        reasons.add(argument, Code::memory, "strides {0}; accepted are positive strides where the tensor is written", strides_of(t));
        return false;
      }
    if (!each_element_apart(*f)) {
      reasons.add(argument, Code::memory,
                  "strides {0} let elements of shape {1} overlap; accepted are strides that each clear the reach of the smaller ones where "
                  "the tensor is written",
                  strides_of(t), shape_of(t));
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
        reasons.add(all[x].argument, Code::overlap, "shares memory with {0}; accepted is memory of its own where the tensor is written",
                    Argument{all[y].argument});
    }
}

} // namespace strobe
