// Collects the reasons against a call, so that a caller sees all of them at once.
#pragma once
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention/text.h"

namespace strobe {

class Reasons {
public:
  // "argument: what is wrong; accepted is what"
  template <class... Parts> void add(const char *argument, const Parts &...parts) { lines.push_back(text(argument, ": ", parts...)); }
  bool empty() const { return lines.empty(); }

  void raise_if_any() const {
    if (lines.empty()) return;
    std::string all = lines[0];
    for (size_t i = 1; i < lines.size(); i++) all += "\n" + lines[i];
    throw Error(STROBE_INVALID_ARGUMENT, all);
  }

private:
  std::vector<std::string> lines;
};

} // namespace strobe
