#include "score/ahead.h"

#include <algorithm>

namespace strobe::score {
namespace {

// Two pairs of a lane share what a key or a difference decides, whether it is read or computed.
int32_t saved_of(int32_t cost) {
  constexpr int32_t kRead = 2;
  return cost / 2 - kRead;
}

} // namespace

std::vector<Ahead> found_ahead(const Graph &graph, const std::vector<int32_t> &roots, const std::function<int32_t(int32_t)> &cost) {
  constexpr int32_t kLeast = 2; // instructions to save
  // The same for a mask by differences, which takes as long to read as (i - j) % 4 == 0 takes to compute (H200).
  constexpr int32_t kLeastOfMask = 8;
  const std::vector<unsigned> positions = positions_of(graph);
  std::vector<bool> reached(size_t(graph.size()), false); // not behind a value that was found
  for (const int32_t root : roots)
    if (root >= 0) reached[size_t(root)] = true;
  std::vector<Ahead> all;
  for (int32_t n = graph.size() - 1; n >= 0; n--) { // inputs stand before
    if (!reached[size_t(n)]) continue;
    const unsigned own = positions[size_t(n)];
    if (graph[n].count && (own == kOfQuery || own == kOfKey || own == kOfDifference)) {
      Ahead found{n, Positions(own), false, false, 0};
      int32_t all_costs = 0;
      bool loads = false;
      const std::vector<bool> needed = graph.needed_by({n});
      for (int32_t m = 0; m <= n; m++) {
        if (!needed[size_t(m)]) continue;
        found.of_batch = found.of_batch || graph[m].op == Op::BATCH || graph[m].op == Op::OFFSET;
        found.of_head = found.of_head || graph[m].op == Op::HEAD;
        loads = loads || graph[m].op == Op::LOAD;
        if (positions[size_t(m)] != kOfNone && graph[m].count) all_costs += cost(m);
      }
      found.saved = saved_of(all_costs);
      if (own == kOfDifference && graph[n].kind == Kind::boolean && !loads && found.saved < kLeastOfMask) continue;
      if (found.saved >= kLeast) {
        all.push_back(found);
        continue;
      }
    }
    for (int32_t i = 0; i < graph[n].count; i++) reached[size_t(graph[n].inputs[size_t(i)])] = true;
  }
  std::ranges::stable_sort(all, std::ranges::greater{}, &Ahead::saved);
  return all;
}

} // namespace strobe::score
