#include "cuda/program/lists.h"

#include <algorithm>

#include "../../../kernels/attention/lists.h"
#include "../../../kernels/passes/config.h"
#include "attention/contents.h"

namespace strobe::cuda {

template <class V> void each_pointer(const ListArguments &a, V &visit) {
  for (const ListCopy &list : a.lists) visit(list.from), visit(list.to);
}

namespace {

constexpr KernelSource kCopyLists{"passes/lists.h", "strobe::passes::CopyLists", "strobe::passes::ListsConfig"};
constexpr const char *kNames[] = {
#define STROBE_LIST(name, place) #name,
#include "strobe/fields.inc"
};
static_assert(int(kMostLists) == ListForms::kCount);

// Whether a page table has dense rows at a distance that fits 32 bits. Kernels find a sequence's row by a 32-bit product.
bool has_whole_rows(const strobe_tensor &table) {
  const int64_t row = table.strides[0];
  return (table.shape[1] == 1 || table.strides[1] == 1) && row >= 0 && row <= INT32_MAX;
}

ListCopy copy_of(const strobe_tensor &list) {
  ListCopy made{};
  for (int a = 0; a < 3; a++) {
    const int of = a + list.rank - 3; // the list's axis
    made.size[a] = of < 0 ? 1 : u32(list.shape[of]);
    made.stride[a] = of < 0 ? 0 : list.strides[of];
  }
  made.wide = list.dtype == STROBE_INT64;
  return made;
}

} // namespace

std::optional<Launch> copy_lists(Problem &p, Scratch &scratch) {
  if (!p.forms) return {};
  constexpr int64_t kMostBlocks = 512, kOfThread = 4;
  ListArguments a{};
  int64_t most = 0;
  each_list(p, [&](auto *&list, int n) {
    const strobe_tensor &form = p.forms->of[n];
    if (!list || is_dense(form)) return;
    if (n == ListForms::page_table && !p.check && has_whole_rows(form)) {
      p.page_table_row = form.shape[0] > 1 ? form.strides[0] : p.pages_each;
      return;
    }
    ListCopy &copy = a.lists[a.count++] = copy_of(form);
    const int64_t count = int64_t(copy.size[0]) * copy.size[1] * copy.size[2];
    auto *to = scratch.take<std::remove_const_t<std::remove_pointer_t<std::remove_reference_t<decltype(list)>>>>(count);
    copy.from = list, copy.to = to, list = to;
    most = std::max(most, count);
  });
  p.set_page_table(p.page_table());
  if (!a.count) return {};
  const passes::ListsConfig c{};
  return Launch(kCopyLists, c, std::clamp<int64_t>(most / (kOfThread * c.threads()), 1, kMostBlocks), c.threads(), 0, a);
}

std::string copied_lists(const Problem &p) {
  std::string names;
  each_list(p, [&](const auto *list, int n) {
    if (is_workspace_mark(list)) names += text(names.empty() ? "" : ", ", kNames[n]);
  });
  return names;
}

Problem with_copies(const Problem &p, const Problem &marked, const Addresses &addresses) {
  Problem copied = p;
  const void *marks[ListForms::kCount] = {};
  each_list(marked, [&](const auto *list, int n) { marks[n] = list; });
  each_list(copied, [&](auto *&list, int n) {
    if (is_workspace_mark(marks[n])) list = static_cast<std::remove_reference_t<decltype(list)>>(addresses.of(marks[n]));
  });
  copied.set_page_table(copied.page_table());
  return copied;
}

} // namespace strobe::cuda
