// The caller's functions as CUDA source, for NVRTC, and the arguments of that source. kernels/device/functions.h has the operations.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "../../kernels/attention/arguments.h"
#include "attention/attention.h"
#include "score/program.h"

namespace strobe::score {

// Whether the derivative of the program's score by x is 1 for every pair that the score does not hide by -inf.
bool only_adds(const Program &);

class CudaFunctions {
public:
  // scored: the program's score and slope are generated; otherwise only `seen`, because a kernel has its own code for the score.
  // penalty: the node of ALiBi's slope, where it is the program's; -1: it is not.
  CudaFunctions(const Problem &, bool scored, int32_t penalty = -1);

  // A hash of all that the source depends on: equal hashes, equal sources.
  std::array<int32_t, 2> digest() const;
  // The header "score/program.h", which specialises CallersFunctions for the digest.
  std::string source() const;
  FunctionArguments arguments() const;
  // About how many instructions a pair takes, beside those that its query's other pairs share.
  int32_t instructions() const;

private:
  // What is known of an integer. Code takes 32 bits where both ends fit.
  struct Range {
    double low, high;
    bool narrow() const { return low >= -2147483648.0 && high <= 2147483647.0; }
  };

  Range range(int32_t node) const;
  void find_ranges();
  bool may_be_limited(int32_t node, double added, int depth = 0) const;
  bool short_axes(const Captured &) const;
  bool divides_by_constant(const Node &) const;
  bool small(const Captured &) const;
  std::string expression(int32_t node) const;
  std::string call(int32_t node, const char *name) const;
  std::string compared(const Node &, const char *sign) const;
  std::string load(const Node &) const;
  std::string constant(int32_t node) const;
  std::string statements(const std::vector<bool> &wanted, const std::vector<bool> &made, const char *indent) const;

  const Problem &problem_;
  const Program &program_;
  const Graph &graph_;
  int32_t score_, slope_, seen_, penalty_;
  double most_position_;          // an upper bound of positions, sequences and heads
  std::vector<Range> ranges_;     // of each node
  std::vector<int32_t> numbers_;  // constants that are arguments, in the order of their places
  std::vector<int32_t> place_;    // of each node: its place among the arguments; -1: none
  std::vector<int32_t> divisors_; // integers by which something is divided, likewise
  std::vector<int32_t> divisor_place_;
  std::vector<bool> divides_; // of each node: whether something is divided by it
  std::vector<bool> limited_; // of each node: whether it is a limited_integer()
  std::vector<bool> used_;    // of each node: whether a result needs it
};

} // namespace strobe::score
