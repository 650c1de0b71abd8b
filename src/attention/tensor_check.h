// Checks of one tensor against what its argument may be.
#pragma once
#include <vector>

#include "attention/memory.h"
#include "attention/reasons.h"

namespace strobe {

inline constexpr int64_t kAny = -1;

// An axis by its name in the documentation, and the size that it must have; or_one: 1, to be broadcast, as well.
struct Axis {
  const char *symbol;
  int64_t size = kAny;
  bool or_one = false;
};

using Axes = std::vector<Axis>;
using Types = std::vector<DType>;
enum class Access { read, write };

// A tensor of a call: what bytes are its own.
struct Placed {
  const char *argument;
  Footprint bytes;
  bool written;
};

// What is written shares no byte with any other tensor.
void check_overlaps(const std::vector<Placed> &, Reasons &);

class TensorChecks {
public:
  explicit TensorChecks(Reasons &reasons) : reasons(reasons) {}

  // Every tensor from here on has to lie on the device of this one, if that is a valid device; `why` ends the message.
  void on_device_of(const strobe_tensor &, const char *why);

  // False, with reasons, if anything is wrong. A tensor that is accepted is one of placed().
  bool accept(const char *argument, const strobe_tensor &, const Axes &, const Types &, Access);
  // The same of a list. If it has gaps, a copy will be made of it: with strides of 0 a few bytes could stand for more than memory holds.
  bool accept_list(const char *argument, const strobe_tensor &, const Axes &, const Types &);
  // Rank and sizes alone; without a reason.
  static bool has_rank(const strobe_tensor *, int32_t rank);

  const std::vector<Placed> &placed() const { return seen; }

private:
  bool shape(const char *, const strobe_tensor &, const Axes &);
  bool dtype(const char *, const strobe_tensor &, const Types &);
  bool place(const char *, const strobe_tensor &);
  bool memory(const char *, const strobe_tensor &, Access);

  Reasons &reasons;
  const char *why_there = nullptr;
  const strobe_tensor *device = nullptr;
  std::vector<Placed> seen;
};

} // namespace strobe
