// Checks one tensor against the requirements of its argument.
#pragma once
#include <vector>

#include "attention/memory.h"
#include "attention/reasons.h"

namespace strobe {

enum class Access { read, write };

// A tensor of a call, and which bytes belong to it.
struct Placed {
  const char *argument;
  Footprint bytes;
  bool written;
};

// Refuses a tensor that is written and shares a byte with any other tensor.
void check_overlaps(const std::vector<Placed> &, Reasons &);

class TensorChecks {
public:
  explicit TensorChecks(Reasons &reasons) : reasons(reasons) {}

  // All later tensors must lie on the device of this tensor, if that device is valid. argument: the tensor's name; null: it has none.
  void on_device_of(const strobe_tensor &, const char *argument);
  void on_device_of(const strobe_tensor &&, const char *) = delete; // it has to live as long as the checks

  // Returns false, with reasons, if the tensor is refused. An accepted tensor becomes one of placed().
  bool accept(const char *argument, const strobe_tensor &, const Axes &, const Types &, Access);
  // accept() for a list. A list with gaps will be copied, so its size is bounded: with strides of 0 it could exceed any memory.
  bool accept_list(const char *argument, const strobe_tensor &, const Axes &, const Types &);
  // Checks only rank and sizes. Adds no reason.
  static bool has_rank(const strobe_tensor *, int32_t rank);

  const std::vector<Placed> &placed() const { return seen; }

private:
  bool shape(const char *, const strobe_tensor &, const Axes &);
  bool dtype(const char *, const strobe_tensor &, const Types &);
  bool place(const char *, const strobe_tensor &);
  bool memory(const char *, const strobe_tensor &, Access);

  Reasons &reasons;
  const char *first = nullptr; // the argument that has determined the device
  const strobe_tensor *device = nullptr;
  std::vector<Placed> seen;
};

} // namespace strobe
