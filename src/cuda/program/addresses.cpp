#include "cuda/program/addresses.h"

#include <algorithm>

namespace strobe::cuda {
namespace {

// Marks look like no address and like no other number: this, and one after the other, farther apart than any tensor is large.
constexpr uintptr_t kFirst = uintptr_t{0x57B0} << 48, kApart = uintptr_t{1} << 40, kWorkspace = kFirst + 30 * kApart;
constexpr uintptr_t kOff = 8; // of a mark for an address that does not lie on 16 bytes

uintptr_t off_16_bytes(const void *address) { return reinterpret_cast<uintptr_t>(address) % 16 ? kOff : 0; }

template <class P, class F> void each_address(P &p, F f) {
  for (auto *view : {&p.q, &p.k, &p.v, &p.mask, &p.bias, &p.alibi_slopes, &p.sinks, &p.out, &p.lse, &p.dout, &p.dlse, &p.dq, &p.dk, &p.dv,
                     &p.dbias, &p.dsinks, &p.max_logit, &p.column_sums, &p.delta})
    f(view->data);
  f(p.k_scale.data), f(p.v_scale.data);
  f(p.cu_seqlens_q), f(p.cu_seqlens_k), f(p.seqused_k), f(p.k.page_table), f(p.rng);
  f(p.blocks.row_ptr), f(p.blocks.col), f(p.blocks.row_ptr_t), f(p.blocks.col_t);
}

} // namespace

Problem marked(const Problem &p) {
  Problem result = p;
  uintptr_t mark = kFirst;
  each_address(result, [&mark](auto *&pointer) {
    if (pointer) pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(mark + off_16_bytes(pointer));
    mark += kApart;
  });
  result.set_page_table(result.page_table());
  return result;
}

std::byte *workspace_mark() { return reinterpret_cast<std::byte *>(kWorkspace); }

static bool is_between(uintptr_t begin, const void *address) {
  const uintptr_t value = reinterpret_cast<uintptr_t>(address);
  return value >= begin && value < kWorkspace + kApart;
}
bool is_mark(const void *address) { return is_between(kFirst, address); }
bool is_workspace_mark(const void *address) { return is_between(kWorkspace, address); }

Addresses::Addresses(const Problem &p, void *workspace) {
  size_t n = 0;
  each_address(p, [&](const auto *address) { bases_[n++] = reinterpret_cast<uintptr_t>(address) - off_16_bytes(address); });
  bases_.back() = reinterpret_cast<uintptr_t>(workspace);
}

void *Addresses::of(const void *marked) const {
  const uintptr_t value = reinterpret_cast<uintptr_t>(marked);
  if (value >= kWorkspace) return reinterpret_cast<void *>(bases_.back() + (value - kWorkspace));
  return reinterpret_cast<void *>(bases_[(value - kFirst) / kApart] + value % kApart);
}

} // namespace strobe::cuda
