#include "attention/contents.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <vector>

#include "attention/text.h"

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

std::string check_cu_seqlens(Ints cu, int64_t batch, int64_t total, int64_t max_seqlen) {
  if (cu[0] != 0) return text("starts at ", cu[0], "; accepted is 0, and then the sums of the lengths so far");
  for (int64_t b = 0; b < batch; b++) {
    if (cu[b + 1] < cu[b]) return text("falls from ", cu[b], " at [", b, "] to ", cu[b + 1], "; accepted are values that never fall");
    const int64_t length = cu[b + 1] - cu[b];
    if (length > max_seqlen) return text("sequence ", b, " has ", length, " tokens; accepted is at most max_seqlen = ", max_seqlen);
  }
  if (cu[batch] > total) return text("ends at ", cu[batch], "; accepted is at most the number of packed tokens, ", total);
  if (cu[batch] > INT32_MAX) return text("ends at ", cu[batch], "; accepted is at most ", INT32_MAX);
  return {};
}

std::string check_seqused(Ints used, int64_t batch, const int32_t *cu, int64_t length, bool paged) {
  const char *what = cu ? ", the length of that sequence's keys" : paged ? ", the positions of a row of page_table" : ", the length of k";
  for (int64_t b = 0; b < batch; b++) {
    const int64_t most = cu ? int64_t{cu[b + 1]} - cu[b] : length;
    if (used[b] < 0 || used[b] > most) return text(used[b], " at [", b, "]; accepted are 0 to ", most, what);
    if (used[b] > INT32_MAX) return text(used[b], " at [", b, "]; accepted are 0 to ", INT32_MAX);
  }
  return {};
}

std::string check_pages(const PageTable &t, const int32_t *used) {
  for (int64_t b = 0; b < t.batch; b++) {
    const int64_t keys = used ? used[b] : t.pages_each * t.page_size, counted = keys / t.page_size + (keys % t.page_size != 0);
    for (int64_t n = 0; n < counted; n++)
      if (const int64_t page = t.table[b * t.pages_each + n]; page < 0 || page >= t.pages || page > INT32_MAX)
        return text("page ", page, " at [", b, ", ", n, "]; accepted ",
                    t.pages ? text("are 0 to ", std::min<int64_t>(t.pages - 1, INT32_MAX), ", the pages of k and v,")
                            : "is none, for k and v have no pages,",
                    " where keys count");
  }
  return {};
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

std::string check_offsets(const Csr &m) {
  int64_t at = 0; // where the next row must begin
  for (int64_t n = 0; n < m.matrices; n++) {
    const int32_t *row = m.offsets + n * (m.rows + 1);
    if (row[0] != at)
      return text("row 0 of matrix ", n, " begins at ", row[0], "; accepted is ", at, n ? ", where the matrix before ends" : "");
    for (int64_t i = 0; i < m.rows; i++)
      if (row[i + 1] < row[i])
        return text("falls from ", row[i], " to ", row[i + 1], " after row ", i, " of matrix ", n, "; accepted are values that never fall");
    at = row[m.rows];
  }
  if (at != m.kept) return text("ends at ", at, "; accepted is the number of columns' entries, ", m.kept);
  return {};
}

std::string check_indices(const Csr &m) {
  for (int64_t n = 0; n < m.matrices; n++) {
    const int32_t *row = m.offsets + n * (m.rows + 1);
    for (int64_t i = 0; i < m.rows; i++) {
      int64_t before = -1;
      for (int64_t e = row[i]; e < row[i + 1]; e++) {
        int64_t j = m.indices[e];
        if (j < 0 || j >= m.cols)
          return text("[", e, "] is ", j, " (row ", i, " of matrix ", n, "); accepted is ",
                      m.cols ? text("0 to ", m.cols - 1) : "none, for there are no blocks");
        if (j <= before)
          return text("[", e, "] is ", j, " after ", before, " (row ", i, " of matrix ", n,
                      "); accepted are strictly ascending entries per row");
        before = j;
      }
    }
  }
  return {};
}

// Rows are walked in ascending order, so the entries of each transposed row must appear in their own order.
std::string check_transpose(const Csr &m, const Csr &t) {
  std::vector<int32_t> next(m.cols);
  for (int64_t n = 0; n < m.matrices; n++) {
    const int32_t *row = m.offsets + n * (m.rows + 1), *row_t = t.offsets + n * (t.rows + 1);
    next.assign(row_t, row_t + m.cols);
    for (int64_t i = 0; i < m.rows; i++)
      for (int64_t e = row[i]; e < row[i + 1]; e++) {
        int64_t j = m.indices[e];
        if (next[j] == row_t[j + 1] || t.indices[next[j]++] != i)
          return text("row ", j, " of matrix ", n, " is not what block_cols holds: query block ", i,
                      " comes next; accepted is its transpose");
      }
  }
  return {};
}

} // namespace strobe
