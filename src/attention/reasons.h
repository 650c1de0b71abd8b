// Collects the reasons against a call, so that a caller sees all of them at once.
#pragma once
#include <iterator>
#include <utility>
#include <vector>

#include "attention/refusal.h"

namespace strobe {

class Reasons {
public:
  // words: for example "{0} heads; accepted is 1 or more". {0} stands for the first value.
  template <class... Values> void add(const char *argument, Code code, const char *words, const Values &...values) {
    all.emplace_back(argument, code, words, values...);
  }
  void add(const std::vector<Refusal> &more) { all.insert(all.end(), more.begin(), more.end()); }
  size_t size() const { return all.size(); }

  void raise_if_any() {
    if (!all.empty()) throw Refused(std::move(all));
  }

private:
  std::vector<Refusal> all;
};

} // namespace strobe
