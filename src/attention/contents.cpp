#include "attention/contents.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

namespace strobe {

static bool is_same(const strobe_tensor &x, const strobe_tensor &y) {
  return x.data == y.data && x.dtype == y.dtype && x.rank == y.rank && std::equal(x.shape, x.shape + x.rank, y.shape) &&
         std::equal(x.strides, x.strides + x.rank, y.strides);
}

static int64_t count_of(const strobe_tensor &list) {
  return std::accumulate(list.shape, list.shape + list.rank, int64_t{1}, std::multiplies<>());
}

OwnLists::Copy &OwnLists::copied(const strobe_tensor &list) {
  for (Copy &known : copies_)
    if (is_same(known.of, list)) return known;
  const int64_t element = bytes(static_cast<DType>(list.dtype));
  Copy copy{list, std::unique_ptr<char[]>(new char[static_cast<size_t>(count_of(list) * element)]), nullptr};
  gather(list, element, copy.own.get());
  copies_.push_back(std::move(copy));
  return copies_.back();
}

Ints OwnLists::ints_of(const Copy &copy) {
  if (!copy.narrow) return reinterpret_cast<const int32_t *>(copy.own.get());
  return {copy.narrow.get(), reinterpret_cast<const int64_t *>(copy.own.get())};
}

Ints OwnLists::ints(const strobe_tensor &list) {
  Copy &copy = copied(list);
  if (list.dtype == STROBE_INT64 && !copy.narrow) {
    const int64_t count = count_of(list);
    copy.narrow.reset(new int32_t[static_cast<size_t>(count)]);
    const int64_t *wide = reinterpret_cast<const int64_t *>(copy.own.get());
    std::transform(wide, wide + count, copy.narrow.get(),
                   [](int64_t x) { return x == static_cast<int32_t>(x) ? static_cast<int32_t>(x) : INT32_MIN; });
  }
  return ints_of(copy);
}

Ints OwnLists::at(const int32_t *narrow) const {
  for (const Copy &copy : copies_)
    if (ints_of(copy).narrow() == narrow) return ints_of(copy);
  return narrow;
}

std::shared_ptr<const OwnLists> own_lists(Problem &p) {
  if (p.device_type != STROBE_CPU || !p.forms) return nullptr;
  const auto lists = std::make_shared<OwnLists>();
  each_list(p, [&](auto *&list, int n) {
    if (!list) return;
    strobe_tensor given = p.forms->of[n];
    given.data = const_cast<void *>(static_cast<const void *>(list));
    if constexpr (std::is_same_v<decltype(list), const int32_t *&>)
      list = lists->ints(given).narrow();
    else
      list = lists->copy<int64_t>(given);
  });
  p.set_page_table(p.page_table());
  p.lists = lists;
  return lists;
}

void check_cu_seqlens(const char *argument, Ints cu, int64_t batch, int64_t total, Longest most, Reasons &reasons) {
  auto refuse = [&](Code code, const char *words, const auto &...values) { reasons.add(argument, code, words, values...); };
  if (cu[0] != 0) return refuse(Code::list, "starts at {0}; accepted is 0, and then the sums of the lengths so far", cu[0]);
  for (int64_t b = 0; b < batch; b++) {
    if (cu[b + 1] < cu[b])
      return refuse(Code::list, "falls from {0} at [{1}] to {2}; accepted are values that never fall", cu[b], b, cu[b + 1]);
    const int64_t length = cu[b + 1] - cu[b];
    if (length <= most.tokens) continue;
    constexpr const char *words = "sequence {0} has {1} tokens; accepted is at most {2} = {3}";
    if (most.argument) return refuse(Code::length, words, b, length, Argument{most.argument}, most.tokens);
    return refuse(Code::length, words, b, length, argument == std::string_view("cu_seqlens_q") ? "Tq" : "Tk", most.tokens);
  }
  if (cu[batch] > total) return refuse(Code::list, "ends at {0}; accepted is at most the number of packed tokens, {1}", cu[batch], total);
  if (cu[batch] > INT32_MAX) return refuse(Code::list, "ends at {0}; accepted is at most {1}", cu[batch], INT32_MAX);
}

void check_seqused(Ints used, int64_t batch, const int32_t *cu, int64_t length, bool paged, Reasons &reasons) {
  const char *words = cu      ? "{0} at [{1}]; accepted are 0 to {2}, the length of that sequence's keys"
                      : paged ? "{0} at [{1}]; accepted are 0 to {2}, the positions of a row of {3}"
                              : "{0} at [{1}]; accepted are 0 to {2}, the length of {3}";
  for (int64_t b = 0; b < batch; b++) {
    const int64_t most = cu ? int64_t{cu[b + 1]} - cu[b] : length;
    if (used[b] < 0 || used[b] > most)
      return reasons.add("seqused_k", Code::length, words, used[b], b, most, Argument{paged ? "page_table" : "k"});
    if (used[b] > INT32_MAX) return reasons.add("seqused_k", Code::length, "{0} at [{1}]; accepted are 0 to {2}", used[b], b, INT32_MAX);
  }
}

void check_pages(const PageTable &t, const int32_t *used, Reasons &reasons) {
  for (int64_t b = 0; b < t.batch; b++) {
    const int64_t keys = used ? used[b] : t.pages_each * t.page_size, counted = keys / t.page_size + (keys % t.page_size != 0);
    for (int64_t n = 0; n < counted; n++)
      if (const int64_t page = t.table[b * t.pages_each + n]; page < 0 || page >= t.pages || page > INT32_MAX)
        return reasons.add("page_table", Code::list,
                           t.pages ? "page {0} at [{1}, {2}]; accepted are 0 to {3}, the pages of {4} and {5}, where keys count"
                                   : "page {0} at [{1}, {2}]; accepted is none, for {4} and {5} have no pages, where keys count",
                           page, b, n, std::min<int64_t>(t.pages - 1, INT32_MAX), Argument{"k"}, Argument{"v"});
  }
}

static int64_t longest(const int32_t *cu, int64_t batch) {
  int64_t most = 0;
  for (int64_t b = 0; b < batch; b++) most = std::max(most, int64_t{cu[b + 1]} - cu[b]);
  return most;
}

bool update_longest(Problem &p) {
  bool changed = false;
  auto update = [&](int64_t &most, const int32_t *cu) {
    if (most == kUnbounded) return;
    const int64_t now = longest(cu, p.batch);
    changed |= now != most, most = now;
  };
  update(p.most_q, p.cu_seqlens_q), update(p.most_k, p.cu_seqlens_k);
  return changed;
}

void check_offsets(const char *argument, const Csr &m, Reasons &reasons) {
  int64_t at = 0; // where the next row has to begin
  for (int64_t n = 0; n < m.matrices; n++) {
    const int32_t *row = m.offsets + n * (m.rows + 1);
    if (row[0] != at)
      return reasons.add(argument, Code::list,
                         n ? "row 0 of matrix {0} begins at {1}; accepted is {2}, where the matrix before ends"
                           : "row 0 of matrix {0} begins at {1}; accepted is {2}",
                         n, row[0], at);
    for (int64_t i = 0; i < m.rows; i++)
      if (row[i + 1] < row[i])
        return reasons.add(argument, Code::list, "falls from {0} to {1} after row {2} of matrix {3}; accepted are values that never fall",
                           row[i], row[i + 1], i, n);
    at = row[m.rows];
  }
  if (at != m.kept) reasons.add(argument, Code::list, "ends at {0}; accepted is the number of columns' entries, {1}", at, m.kept);
}

void check_indices(const char *argument, const Csr &m, Reasons &reasons) {
  for (int64_t n = 0; n < m.matrices; n++) {
    const int32_t *row = m.offsets + n * (m.rows + 1);
    for (int64_t i = 0; i < m.rows; i++) {
      int64_t before = -1;
      for (int64_t e = row[i]; e < row[i + 1]; e++) {
        int64_t j = m.indices[e];
        if (j < 0 || j >= m.cols)
          return reasons.add(argument, Code::list,
                             m.cols ? "[{0}] is {1} (row {2} of matrix {3}); accepted is 0 to {4}"
                                    : "[{0}] is {1} (row {2} of matrix {3}); accepted is none, for there are no blocks",
                             e, j, i, n, m.cols - 1);
        if (j <= before)
          return reasons.add(argument, Code::list,
                             "[{0}] is {1} after {2} (row {3} of matrix {4}); accepted are strictly ascending entries per row", e, j,
                             before, i, n);
        before = j;
      }
    }
  }
}

// Rows are walked in ascending order, so the entries of each transposed row must come up in that row's order.
void check_transpose(const char *argument, const Csr &m, const Csr &t, Reasons &reasons) {
  std::vector<int32_t> next(m.cols);
  for (int64_t n = 0; n < m.matrices; n++) {
    const int32_t *row = m.offsets + n * (m.rows + 1), *row_t = t.offsets + n * (t.rows + 1);
    next.assign(row_t, row_t + m.cols);
    for (int64_t i = 0; i < m.rows; i++)
      for (int64_t e = row[i]; e < row[i + 1]; e++) {
        int64_t j = m.indices[e];
        if (next[j] == row_t[j + 1] || t.indices[next[j]++] != i)
          return reasons.add(argument, Code::list,
                             "row {0} of matrix {1} is not what {2} holds: query block {3} comes next; accepted is its transpose", j, n,
                             Argument{"block_cols"}, i);
      }
  }
}

} // namespace strobe
