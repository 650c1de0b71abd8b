// A call that is prepared once and then runs often, each time on other addresses.
#pragma once
#include <vector>

#include "attention/tensor_check.h"
#include "call.h"

namespace strobe {

class Prepared {
public:
  Prepared(const strobe_attention *, const strobe_tensors *, const strobe_execution *, Operation);

  const Plan &plan() const { return plan_; }
  void run(const strobe_addresses *, const strobe_execution *) const;

private:
  // A tensor at the time when the call was prepared.
  struct Was {
    bool present = false;
    const char *address = nullptr;
    int32_t placed = -1; // index into placed_; -1: this operation does not use the tensor
  };

  Problem problem_; // with the addresses at the time when the call was prepared
  Operation operation_;
  int32_t threads_, reserved_sms_;
  const Engine *engine_;
  Plan plan_;
  std::vector<Placed> placed_;
  std::vector<Was> was_; // indexed by field
};

} // namespace strobe
