// A call made ready once, to be run often on other addresses.
#pragma once
#include <array>

#include "call.h"

namespace strobe {

class Prepared {
public:
  Prepared(const strobe_attention *, const strobe_tensors *, const strobe_execution *, Direction);
  Prepared(const Prepared &) = delete; // attention_ points into engine_name_

  const Plan &plan() const { return plan_; }
  void run(const strobe_addresses *, const strobe_execution *) const;

private:
  static constexpr size_t kMostTensors = 23;
  using Tensors = std::array<strobe_tensor, kMostTensors>;

  strobe_attention attention_{};
  std::string engine_name_;
  Tensors tensors_{};
  std::array<bool, kMostTensors> present_{};
  Direction direction_;
  int32_t threads_ = 0;
  const Engine *engine_ = nullptr;
  Plan plan_;
};

} // namespace strobe
