#include "score/ahead.h"

#include <algorithm>

namespace strobe::score {

std::vector<Ahead> found_ahead(const Graph &graph, const std::vector<int32_t> &roots, const std::function<int32_t(int32_t)> &cost) {
  const std::vector<unsigned> positions = positions_of(graph);
  const std::vector<bool> used = graph.needed_by(roots);
  const auto is_one = [](unsigned p) { return p == kOfQuery || p == kOfKey || p == kOfDifference; };
  std::vector<bool> taken(size_t(graph.size()), false); // by a node of other positions, or as a result
  for (const int32_t root : roots)
    if (root >= 0) taken[size_t(root)] = true;
  for (int32_t n = 0; n < graph.size(); n++)
    for (int32_t i = 0; used[size_t(n)] && i < graph[n].count; i++) {
      const size_t input = size_t(graph[n].inputs[size_t(i)]);
      if (positions[input] != positions[size_t(n)]) taken[input] = true;
    }
  std::vector<Ahead> all;
  for (int32_t n = 0; n < graph.size(); n++) {
    if (!used[size_t(n)] || !taken[size_t(n)] || !is_one(positions[size_t(n)])) continue;
    Ahead found{n, Positions(positions[size_t(n)]), false, false, 0};
    const std::vector<bool> needed = graph.needed_by({n});
    for (int32_t m = 0; m <= n; m++) {
      if (!needed[size_t(m)]) continue;
      found.of_batch = found.of_batch || graph[m].op == Op::BATCH || graph[m].op == Op::OFFSET;
      found.of_head = found.of_head || graph[m].op == Op::HEAD;
      if (positions[size_t(m)] != kOfNone && graph[m].count) found.cost += cost(m);
    }
    all.push_back(found);
  }
  std::ranges::stable_sort(all, std::ranges::greater{}, saved_by);
  return all;
}

// Two pairs of a lane share what a key or a difference decides, whether it is read or computed. A boolean is read as what is added to the
// score, which spares a comparison.
int32_t saved_by(const Ahead &x) {
  constexpr int32_t kRead = 2;
  return x.cost / 2 - kRead;
}

} // namespace strobe::score
