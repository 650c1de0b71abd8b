// The caller's functions as CUDA source, for NVRTC, and the arguments of that source. kernels/device/functions.h has the operations.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "../../kernels/attention/arguments.h"
#include "attention/attention.h"
#include "score/ahead.h"
#include "score/interval.h"
#include "score/program.h"

namespace strobe::score {

// Whether the derivative by x of the program's score, or of that without its penalty, is 1 for every pair that the score does not hide by
// -inf.
bool only_adds(const Program &, bool without_penalty);

class CudaFunctions {
public:
  // scored: the program's score and slope are generated; otherwise only `seen`, because a kernel has its own code for the score.
  // penalised: kernels compute the program's penalty by their own code, and the score is the rest.
  CudaFunctions(const Problem &, bool scored, bool penalised);
  // The functions of the passes that make the gradients of captured tensors: those of the problem's gradient_program, and its loads.
  CudaFunctions(const Problem &, bool scored, bool penalised, const std::shared_ptr<const GradientProgram> &);

  // A hash of all that the source depends on: equal sources have equal hashes.
  std::array<int32_t, 2> digest() const { return digest_; }
  // The header "score/program.h", which specialises CallersFunctions for the digest.
  std::string source() const;
  FunctionArguments arguments() const;
  // About how many instructions a pair takes, beside those that its query's other pairs share.
  int32_t instructions() const;

  // What is computed ahead, before the kernels that call the functions (kernels/passes/ahead.h). Their values lie in places of captured
  // tensors that the call leaves free.
  const std::vector<Ahead> &ahead() const { return ahead_; }
  // Whether a lane may hold its values of the first one in registers: 32 bits that keys or differences decide.
  bool fetchable() const;
  // The operands of these values; `data` is their distance in the workspace that all of them share, in bytes.
  std::vector<CapturedOperand> operands_ahead() const;
  int64_t bytes_ahead() const;
  // values: that workspace.
  FunctionArguments arguments(void *values) const;
  std::string formula_ahead(const Ahead &) const;

private:
  CudaFunctions(const Problem &, const std::shared_ptr<const Program> &, const std::vector<LoadGradient> &loads, bool scored,
                bool differentiated, bool penalised);
  void find_ranges();
  void find_exact();
  void find_limited();
  std::optional<Bounds> known_range(int32_t node) const;
  bool narrow(int32_t node) const { return graph_[node].kind != Kind::integer || ranges_[size_t(node)].whole.narrow(); }
  bool negative(int32_t node) const { return ranges_[size_t(node)].whole.low < 0; } // whether the integer may be
  bool short_axes(const Captured &) const;
  bool divides_by_constant(const Node &) const;
  bool small(const Captured &) const;
  std::string expression(int32_t node) const;
  std::string call(int32_t node, const char *name) const;
  std::string within(const Node &) const;
  std::string compared(const Node &, const char *sign) const;
  std::string load(const Node &) const;
  std::string constant(int32_t node) const;
  std::string statements(const std::vector<bool> &wanted, const std::vector<bool> &made, const char *indent, bool reads_ahead = true) const;
  void find_ahead(const Problem &, const std::vector<int32_t> &roots);
  std::vector<bool> evaluated(int32_t root) const;
  const char *stored(const Ahead &) const;
  int32_t slot_ahead(size_t n) const;
  std::string read_ahead(size_t n) const;
  std::string functions_ahead() const;
  std::string gradients() const;
  std::string element_read(const Node &load) const;

  std::array<int32_t, 2> made_digest() const;

  const std::shared_ptr<const Program> program_;
  const Graph &graph_;
  const DType dtype_;
  std::array<Captured, FunctionArguments::kRead> captured_;
  std::vector<LoadGradient> loads_; // whose gradients are generated
  int32_t score_, slope_, seen_, penalty_;
  int64_t most_position_;         // an upper bound of positions, sequences and heads
  std::vector<Bounds> ranges_;    // of each node; code takes 32 bits where both ends of an integer's fit
  std::vector<int32_t> numbers_;  // constants that are arguments, in the order of their places
  std::vector<int32_t> place_;    // of each node: its place among the arguments; -1: none
  std::vector<int32_t> divisors_; // integers by which something is divided, likewise
  std::vector<int32_t> divisor_place_;
  std::vector<bool> divides_; // of each node: whether something is divided by it
  std::vector<bool> limited_; // of each node: whether it is a limited_integer()
  std::vector<bool> used_;    // of each node: whether a result needs it
  std::vector<bool> limits_;  // of each node: whether a size, |x|, is at most it
  std::vector<bool> shifts_;  // of each node: whether an integer is shifted by it
  std::vector<bool> exact_;   // of each real: whether a step, a comparison, an integer or a mask follows from it
  std::vector<Ahead> ahead_;
  std::vector<int32_t> place_ahead_; // of each node: its place in ahead_; -1: none
  int64_t batch_, heads_, seqlen_q_, seqlen_k_;
  std::array<int32_t, 2> digest_;
};

} // namespace strobe::score
