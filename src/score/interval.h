// Bounds of the values that a function takes while b, h, i and j run over ranges. They hold for every engine: reals are rounded outwards to
// float32.
#pragma once
#include <bit>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "../../kernels/attention/bounds.h"
#include "attention/attention.h"
#include "score/program.h"

namespace strobe::score {

using bounds::Bounds, bounds::Range;

inline Bounds any_bounds(Kind kind) { return bounds::any(int32_t(kind)); }
// The bounds of reals that engines round to float32 or float64, with or without subnormals.
Bounds rounded_bounds(double least, double most, bool may_be_nan);

// The bounds of a node, from those of its inputs, which are of kind `of`. same: its first two inputs are one node. Of a SCORE, LOAD or
// argument nothing is known.
Bounds result_bounds(const Node &, Kind of, const Bounds *in, bool same);

// The bounds of each node of a graph. known(n, bounds of the nodes before n): those of node n, if more is known than its inputs tell.
using KnownBounds = std::function<std::optional<Bounds>(int32_t n, std::span<const Bounds> before)>;
std::vector<Bounds> bounds_of_nodes(const Graph &, const KnownBounds &known);

struct Box {
  Range b, h, i, j, offset;
};

// The least and the largest element of a captured tensor in a range of indices. What this needs is built where it is first asked for, in
// time and memory that are linear in the elements.
class Extrema {
public:
  explicit Extrema(const Captured &);
  ~Extrema();
  Extrema(Extrema &&) noexcept;
  Bounds over(const Range *indices, int32_t count); // indices as in LOAD: from the end if negative, then clamped

  struct Pyramids;

private:
  std::unique_ptr<Pyramids> pyramids_;
};

// The nodes that a result needs, with the bounds of each over a box. Subgraphs with equal values are one node, constants included.
class Intervals {
public:
  enum : uint8_t { kBatch = 1, kHead = 2, kQuery = 4, kKey = 8 };

  // captured: captured_0 to captured_7 in host memory, which has to live as long.
  Intervals(const Graph &, int32_t result, const Captured *captured);

  const std::vector<Node> &nodes() const { return nodes_; }        // the last one is the result
  uint8_t depends(int32_t n) const { return depends_[size_t(n)]; } // the arguments that node n depends on
  // The nodes that evaluating n reads: its inputs, and those in terms of which its inputs are sums.
  const std::vector<int32_t> &reads(int32_t n) const { return reads_[size_t(n)]; }

  // Computes these nodes, ascending, from those before.
  void evaluate(std::span<const int32_t> which, const Box &);
  Bounds evaluate(const Box &); // all; returns that of the result
  Bounds &operator[](int32_t n) { return values_[size_t(n)]; }

  // An integer as a sum of multiples of other nodes, up to multiples of 2^64.
  struct Sum {
    int64_t constant = 0;
    std::vector<std::pair<int32_t, int64_t>> terms; // node, factor; nodes ascend
  };
  // The sums that tell more of node n than the bounds of its inputs: n itself, or the two that it compares and their difference. Empty:
  // there are none.
  std::vector<Sum> sums_for(int32_t n) const;

private:
  Sum sum_of(int32_t n) const;
  static bool share_terms(const Sum &, const Sum &);
  static bool add(Sum &to, const Sum &, int64_t factor); // false: too large
  bool bounds_of(const Sum &, Range &) const;            // false: 64 bits may not hold it

  Bounds value(int32_t n, const Box &);
  Bounds element(const Node &);
  bool by_sums(int32_t n, Bounds &) const; // false: they tell nothing

  std::vector<Node> nodes_;
  std::vector<Sum> sums_;        // of integers
  std::vector<char> correlated_; // whether two inputs are sums that share terms
  std::vector<uint8_t> depends_;
  std::vector<std::vector<int32_t>> reads_;
  std::vector<Extrema> extrema_; // by captured tensor
  std::vector<Bounds> values_;
};

} // namespace strobe::score
