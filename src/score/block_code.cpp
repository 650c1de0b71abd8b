#include "score/block_code.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>

#include "../../kernels/attention/bounds.h"
#include "attention/text.h"

namespace strobe::score {
namespace {

static_assert(sizeof(BoundsStep) % sizeof(uint64_t) == 0 && std::is_trivially_copyable_v<BoundsStep>);

// Makes the code of some nodes. Slots of nodes that nothing reads any more are given to later nodes.
class Encoder {
public:
  Encoder(BlockCode &code, const Intervals &all, const Captured *captured)
      : code_(code), all_(all), captured_(captured), slot_(all.nodes().size(), -1), last_(all.nodes().size(), -1) {}

  // nodes: ascending. given: those whose bounds are in slots from the beginning. kept: those that are read afterwards.
  BlockCode::Part part(const std::vector<int32_t> &nodes, const std::vector<int32_t> &given, const std::vector<int32_t> &kept) {
    std::ranges::fill(slot_, -1), std::ranges::fill(last_, -1);
    free_.clear();
    BlockCode::Part made;
    slots_ = &made.slots, *slots_ = 0;
    for (int32_t n : kept) last_[size_t(n)] = INT32_MAX;
    for (auto n = nodes.rbegin(); n != nodes.rend(); ++n) // readers before what they read
      for (int32_t input : last_[size_t(*n)] < 0 ? std::vector<int32_t>{} : all_.reads(*n))
        if (int32_t &last = last_[size_t(input)]; last < 0) last = *n;
    for (int32_t n : given) slot_[size_t(n)] = taken();
    std::vector<BoundsStep> steps;
    for (int32_t n : nodes) {
      if (last_[size_t(n)] < 0) continue; // nothing reads it here
      BoundsStep step = encoded(n);
      for (int32_t input : all_.reads(n))
        if (last_[size_t(input)] == n) free_.push_back(slot_[size_t(input)]);
      step.to = uint16_t(slot_[size_t(n)] = taken());
      steps.push_back(step);
    }
    made.steps = int64_t(code_.words.size()), made.count = int32_t(steps.size());
    code_.words.resize(code_.words.size() + steps.size() * sizeof(BoundsStep) / sizeof(uint64_t));
    if (!steps.empty()) std::memcpy(code_.words.data() + made.steps, steps.data(), steps.size() * sizeof(BoundsStep));
    return made;
  }

  int32_t slot(int32_t n) const { return slot_[size_t(n)]; }
  int64_t slots_of(const std::vector<int32_t> &nodes) {
    const int64_t place = int64_t(code_.words.size());
    for (int32_t n : nodes) code_.words.push_back(uint64_t(slot(n)));
    return place;
  }

private:
  int32_t taken() {
    if (free_.empty()) return (*slots_)++;
    const int32_t slot = free_.back();
    free_.pop_back();
    return slot;
  }

  BoundsStep encoded(int32_t n) {
    const Node &node = all_.nodes()[size_t(n)];
    BoundsStep step{};
    step.op = uint8_t(node.op), step.kind = uint8_t(node.kind), step.count = uint8_t(node.count);
    step.of = uint8_t(node.count ? all_.nodes()[size_t(node.inputs[0])].kind : node.kind);
    for (int32_t k = 0; k < node.count; k++) step.in[k] = uint16_t(slot(node.inputs[size_t(k)]));
    if (node.count > 1) step.flags |= BoundsStep::kBinary;
    if (node.count > 1 && node.inputs[0] == node.inputs[1]) step.flags |= BoundsStep::kSame;
    code_.functions |= bounds::bit_of_function(int32_t(node.op));
    if (node.op == Op::REAL) {
      const Bounds rounded = rounded_bounds(node.real, node.real, std::isnan(node.real));
      const auto bits = [](double x) { return uint64_t(std::bit_cast<uint32_t>(float(x))); };
      step.number = bits(rounded.real.least) | bits(rounded.real.most) << 32;
      if (rounded.may_be_nan) step.flags |= BoundsStep::kNan;
    } else if (node.op == Op::LOAD) {
      step.load = uint8_t(load(node));
    } else if (const std::vector<Intervals::Sum> sums = all_.sums_for(n); !sums.empty()) {
      step.flags |= BoundsStep::kBySums;
      step.number = places_of(sums);
    } else {
      step.number = uint64_t(node.integer);
    }
    return step;
  }

  uint64_t places_of(const std::vector<Intervals::Sum> &sums) {
    std::vector<uint64_t> places;
    for (const Intervals::Sum &sum : sums) {
      places.push_back(code_.words.size());
      code_.words.insert(code_.words.end(), {uint64_t(sum.constant), uint64_t(sum.terms.size())});
      for (const auto &[term, factor] : sum.terms) code_.words.insert(code_.words.end(), {uint64_t(slot(term)), uint64_t(factor)});
    }
    if (places.size() == 1) return places[0];
    code_.words.insert(code_.words.end(), places.begin(), places.end());
    return code_.words.size() - places.size();
  }

  // The load's number. Of more than two axes, those with the most elements get cells.
  int32_t load(const Node &node) {
    const Captured &tensor = captured_[node.captured];
    std::vector<int32_t> axes;
    for (int32_t axis = 0; axis < node.count; axis++)
      if (tensor.stride[axis] != 0 && tensor.size[axis] > 1 &&
          all_.depends(node.inputs[size_t(axis)]) & (Intervals::kQuery | Intervals::kKey))
        axes.push_back(axis);
    if (axes.size() > 2) {
      std::ranges::stable_sort(axes, std::greater(), [&](int32_t axis) { return tensor.size[axis]; });
      axes.resize(2);
      std::ranges::sort(axes);
    }
    const BlockCode::Load made = {node.captured, axes.size() > 1 ? axes[0] : -1, axes.empty() ? -1 : axes.back()};
    const auto found = std::ranges::find(code_.loads, made);
    const int32_t number = int32_t(found - code_.loads.begin());
    if (found == code_.loads.end()) code_.loads.push_back(made);
    return number;
  }

  BlockCode &code_;
  const Intervals &all_;
  const Captured *captured_;
  std::vector<int32_t> slot_, last_; // of each node: its slot, and the last node that reads it
  std::vector<int32_t> free_;
  int32_t *slots_ = nullptr;
};

} // namespace

BlockCode::BlockCode(const Intervals &all, const Captured *captured) {
  const int32_t count = int32_t(all.nodes().size()), last = count - 1;
  const auto side_of = [&](int32_t n) { return all.depends(n) & (Intervals::kQuery | Intervals::kKey); };
  std::vector<int32_t> of_side[2], of_pairs, reads[2];
  std::vector<bool> read(size_t(count), false);
  for (int32_t n = 0; n < count; n++) {
    const int depends = side_of(n);
    if (depends == (Intervals::kQuery | Intervals::kKey)) {
      of_pairs.push_back(n);
      for (int32_t input : all.reads(n)) read[size_t(input)] = true;
    }
    if (!(depends & Intervals::kKey)) of_side[0].push_back(n); // with what depends on neither
    if (!(depends & Intervals::kQuery)) of_side[1].push_back(n);
  }
  read[size_t(last)] = true;
  for (int32_t n = 0; n < count; n++)
    if (const int depends = side_of(n); read[size_t(n)] && depends != (Intervals::kQuery | Intervals::kKey))
      reads[depends == Intervals::kKey].push_back(n);
  Encoder encoder(*this, all, captured);
  for (int s = 0; s < 2; s++) {
    side[s] = encoder.part(of_side[s], {}, reads[s]);
    side[s].out = encoder.slots_of(reads[s]), side[s].reads = int32_t(reads[s].size());
  }
  std::vector<int32_t> given = reads[0];
  given.insert(given.end(), reads[1].begin(), reads[1].end());
  pairs = encoder.part(of_pairs, given, {last});
  for (int s = 0; s < 2; s++) side[s].in = encoder.slots_of(reads[s]);
  result = encoder.slot(last);
  if (loads.size() > size_t(kMostBoundsLoads))
    refusal = text("the function reads tensors in ", loads.size(), " ways; accepted are ", int(kMostBoundsLoads));
}

} // namespace strobe::score
