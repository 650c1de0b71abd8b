// A program is made once, and runs each time on other addresses. While it is made, marks stand for the addresses of tensors and workspace.
// A run replaces marks by addresses.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "../../../kernels/attention/quantised.h"
#include "attention/attention.h"

namespace strobe::cuda {

// How many tensors and lists a call may have.
inline constexpr size_t kTensors = sizeof(strobe_addresses) / sizeof(void *) - 1;

// The call with marks in place of addresses. A mark is a multiple of 16 if its address is one, because the choice of kernels depends on
// that.
Problem marked(const Problem &);
std::byte *workspace_mark();
bool is_mark(const void *address);
bool is_workspace_mark(const void *address);

// The addresses that the marks stand for in one run.
class Addresses {
public:
  Addresses(const Problem &, void *workspace);
  // The address that lies as far from a mark's address as `marked` lies from the mark.
  void *of(const void *marked) const;

private:
  std::array<uintptr_t, kTensors + 1> bases_{}; // the addresses of the tensors and lists of a Problem, and of the workspace
};

// Pieces of a workspace, 256-byte aligned. While a program is made, their addresses count from the workspace's mark. A workspace may be
// null, if only its size is asked for.
class Scratch {
public:
  explicit Scratch(void *workspace = workspace_mark()) : begin_(reinterpret_cast<uintptr_t>(workspace)) {}
  template <class T> T *take(int64_t count) {
    T *piece = reinterpret_cast<T *>(begin_ + bytes_);
    bytes_ += (uint64_t(count) * sizeof(T) + 255) / 256 * 256;
    return piece;
  }
  uint64_t bytes() const { return bytes_; }

private:
  uintptr_t begin_;
  uint64_t bytes_ = 0;
};

// Calls visit(pointer) for each pointer in a kernel's arguments. A launch replaces the marks in these pointers. Arguments of only one
// family have an overload in that family.
template <class V> void each_pointer(const BlockList &list, V &visit) { visit(list.offsets), visit(list.indices); }
template <class V> void each_pointer(const FunctionArguments &a, V &visit) {
  for (const CapturedOperand &x : a.captured) visit(x.data);
  visit(a.full), visit(a.full_t);
}
template <class V> void each_pointer(const Inputs &in, V &visit) {
  for (const Operand *x : {&in.q, &in.k, &in.v, &in.mask, &in.bias, &in.sinks}) visit(x->data);
  visit(in.cu_seqlens_q), visit(in.cu_seqlens_k), visit(in.seqused_k), visit(in.pages.table), visit(in.part), visit(in.rng);
  each_pointer(in.blocks, visit), each_pointer(in.blocks_t, visit), each_pointer(in.function, visit);
}
template <class V> void each_pointer(const ForwardArguments &a, V &visit) {
  each_pointer(a.in, visit);
  visit(a.out.data), visit(a.lse.data), visit(a.partial_out), visit(a.partial_lse), visit(a.share_places);
}
template <class V> void each_pointer(const AuxiliaryArguments &a, V &visit) {
  each_pointer(a.in, visit);
  visit(a.lse.data), visit(a.max_logit.data), visit(a.column_sums.data), visit(a.largest), visit(a.inverse);
}
template <class V> void each_pointer(const DequantiseArguments &a, V &visit) {
  each_pointer(a.in, visit);
  visit(a.to_k.data), visit(a.to_v.data), visit(a.table);
}
template <class Arguments, class V> void each_pointer(const QuantisedArguments<Arguments> &a, V &visit) {
  each_pointer(static_cast<const Arguments &>(a), visit);
  visit(a.scales.k.data), visit(a.scales.v.data), visit(a.scales.q.data);
}
template <class V> void each_pointer(const EightBitQueries &a, V &visit) { visit(a.from.data), visit(a.scale.data), visit(a.to.data); }
template <class V> void each_pointer(const SharesArguments &a, V &visit) {
  each_pointer(a.in, visit);
  for (const Operand *x : {&a.dk, &a.dv, &a.dk_shares, &a.dv_shares}) visit(x->data);
}
template <class V> void each_pointer(const BackwardArguments &a, V &visit) {
  each_pointer(a.in, visit);
  for (const Operand *x : {&a.out, &a.lse, &a.dout, &a.dlse, &a.dq, &a.dk, &a.dv, &a.dbias, &a.dsinks, &a.given_delta}) visit(x->data);
  visit(a.delta), visit(a.dq_sum), visit(a.ticket), visit(a.turns), visit(a.rows);
}
template <class V> void each_pointer(const CapturedArguments &a, V &visit) {
  each_pointer(static_cast<const BackwardArguments &>(a), visit);
  for (const CapturedGradient &g : a.gradients) visit(g.data);
  for (void *const &lines : a.lines) visit(lines);
  visit(a.sums), visit(a.broken), visit(a.largest), visit(a.tables);
}

} // namespace strobe::cuda
