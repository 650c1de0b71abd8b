#include "cuda/program/addresses.h"

#include <algorithm>

#include "attention/latent.h"

namespace strobe::cuda {
namespace {

// Marks are numbers that resemble no address: kFirst, and others at distances (kApart) that exceed the size of any tensor.
constexpr uintptr_t kFirst = uintptr_t{0x57B0} << 48, kApart = uintptr_t{1} << 40, kWorkspace = kFirst + kTensors * kApart;
constexpr uintptr_t kOff = 8; // added to a mark whose address is not a multiple of 16

uintptr_t off_16_bytes(const void *address) { return reinterpret_cast<uintptr_t>(address) % 16 ? kOff : 0; }

template <class P, class F> void each_address(P &p, F f) {
#define STROBE_TENSOR(name, place) f(p.place.data);
#define STROBE_LIST(name, place) f(p.place);
#include "strobe/fields.inc"
}

} // namespace

Problem marked(const Problem &p) {
  Problem result = p;
  uintptr_t mark = kFirst;
  each_address(result, [&mark](auto *&pointer) {
    if (pointer) pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(mark + off_16_bytes(pointer));
    mark += kApart;
  });
  if (is_latent(p)) result.v.data = result.k.data; // so that it is latent with marks too
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
