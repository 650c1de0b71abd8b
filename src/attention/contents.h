// Checks of the integers in host memory: cu_seqlens, seqused_k, page_table and the block-sparse CSR. Each check adds at most one reason.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "attention/memory.h"
#include "attention/part.h"
#include "attention/reasons.h"

namespace strobe {

// A list of 32-bit integers, or in host memory of 64-bit integers, which are checked before they are narrowed.
class Ints {
public:
  Ints(const int32_t *narrow = nullptr, const int64_t *wide = nullptr) : narrow_(narrow), wide_(wide) {}
  Ints(const std::vector<int32_t> &all) : Ints(all.data()) {}
  int64_t operator[](int64_t n) const { return wide_ ? wide_[n] : narrow_[n]; }
  explicit operator bool() const { return narrow_; }
  // The integers in 32 bits. A number that does not fit becomes negative. The checks refuse such a number, unless it is not read.
  const int32_t *narrow() const { return narrow_; }

private:
  const int32_t *narrow_;
  const int64_t *wide_;
};

// Copies of a call's lists in host memory. Checks and engines read the same copies, whatever another thread meanwhile writes to the
// caller's lists.
class OwnLists {
public:
  // A copy without gaps, whatever the list's strides. The same list gives the same copy. T: the type of the list's elements.
  template <class T> const T *copy(const strobe_tensor &list) { return reinterpret_cast<const T *>(copied(list).own.get()); }
  // copy() for a list of 32-bit or 64-bit integers.
  Ints ints(const strobe_tensor &list);
  // The list whose 32-bit copy lies at this address.
  Ints at(const int32_t *narrow) const;

private:
  struct Copy {
    strobe_tensor of;
    std::unique_ptr<char[]> own;
    std::unique_ptr<int32_t[]> narrow; // the 32-bit copy of a list of 64-bit integers
  };
  Copy &copied(const strobe_tensor &list);
  static Ints ints_of(const Copy &);
  std::vector<Copy> copies_;
};
// Copies the problem's lists in host memory, and points the problem at the copies. The result owns them; it is null if there are no lists.
std::shared_ptr<const OwnLists> own_lists(Problem &);

// Calls f(list, n) for each list that a problem may have: list is the pointer to the integers, n the list's index in ListForms.
template <class P, class F> void each_list(P &p, F &&f) {
#define STROBE_LIST(name, place) f(p.place, int(ListForms::name));
#include "strobe/fields.inc"
}

// The longest length that a check accepts: the caller's maximum, or the number of all packed tokens.
struct Longest {
  int64_t tokens;
  const char *argument; // the name of the maximum; null: the caller has given none
  // given: the maximum; 0 if there is none
  Longest(const char *argument, int64_t given, int64_t total) : tokens(given ? given : total), argument(given ? argument : nullptr) {}
};
// The following checks also refuse numbers that do not fit 32 bits.
void check_cu_seqlens(const char *argument, Ints cu, int64_t batch, int64_t total, Longest most, Reasons &);
// cu: the cu_seqlens of packed keys, already checked. If it is null, each sequence has `length` keys.
void check_seqused(Ints used, int64_t batch, const int32_t *cu, int64_t length, bool paged, Reasons &);

// Checks only pages of keys that count. used: how many keys of each sequence count, already checked; null: all.
struct PageTable {
  int64_t batch, pages_each, page_size, pages; // pages: pages in the pool
  Ints table;
};
void check_pages(const PageTable &, const int32_t *used, Reasons &);

// A stack of `matrices` CSR matrices: offsets (matrices, rows + 1), absolute, into indices[kept] in [0, cols), ascending within a row.
struct Csr {
  int64_t matrices, rows, cols, kept;
  const int32_t *offsets, *indices;
};
void check_offsets(const char *argument, const Csr &, Reasons &);
void check_indices(const char *argument, const Csr &, Reasons &); // call it only if check_offsets has found no error
// Checks that `t`, whose offsets are the argument, holds the transposes of `m`. Both must have been checked before. O(kept + cols).
void check_transpose(const char *argument, const Csr &m, const Csr &t, Reasons &);

// Sets most_q and most_k, if the problem has them, from the checked cu_seqlens. Returns whether one of them has changed.
bool update_longest(Problem &);

// Runs all checks for a problem, and throws the first error. read(ints, count) returns the integers in host memory, as a type that converts
// to Ints.
template <class Read> void check_contents(const Problem &p, Read &&read) {
  Reasons reasons;
  auto done = [&] { reasons.raise_if_any(); };
  if (p.varlen) {
    check_cu_seqlens("cu_seqlens_q", read(p.cu_seqlens_q, p.batch + 1), p.batch, p.total_q,
                     Longest("max_seqlen_q", p.max_seqlen_q, p.total_q), reasons);
    done();
    if (p.packed_k())
      check_cu_seqlens("cu_seqlens_k", read(p.cu_seqlens_k, p.batch + 1), p.batch, p.total_k,
                       Longest("max_seqlen_k", p.max_seqlen_k, p.total_k), reasons);
    done();
  }
  if (p.varlen && p.part) {
    const auto q = read(p.cu_seqlens_q, p.batch + 1), k = read(p.cu_seqlens_k, p.batch + 1);
    check_held("part.q_ranges", p.part.q, p.part.batch_q, p.part.count_q, p.batch, Ints(q).narrow(), 0, reasons);
    check_held("part.k_ranges", p.part.k, p.part.batch_k, p.part.count_k, p.batch, Ints(k).narrow(), 0, reasons);
    done();
  }
  if (p.seqused_k) {
    const auto used = read(p.seqused_k, p.batch);
    if (p.packed_k())
      check_seqused(used, p.batch, Ints(read(p.cu_seqlens_k, p.batch + 1)).narrow(), 0, false, reasons);
    else
      check_seqused(used, p.batch, nullptr, p.seqlen_k, p.page_size > 0, reasons);
    done();
  }
  if (p.page_size) {
    const auto table = read(p.page_table(), p.batch * p.pages_each);
    const PageTable pages{p.batch, p.pages_each, p.page_size, p.pages, table};
    if (p.seqused_k)
      check_pages(pages, Ints(read(p.seqused_k, p.batch)).narrow(), reasons);
    else
      check_pages(pages, nullptr, reasons);
    done();
  }
  const Problem::Blocks &m = p.blocks;
  if (!m.present) return;
  const int64_t matrices = m.batch * m.heads;
  const auto offsets = read(m.row_ptr, matrices * (m.rows + 1)), indices = read(m.col, m.kept);
  const Csr csr{matrices, m.rows, m.cols, m.kept, Ints(offsets).narrow(), Ints(indices).narrow()};
  check_offsets("block_rows", csr, reasons), done();
  check_indices("block_cols", csr, reasons), done();
  if (!m.transposed) return;
  const auto offsets_t = read(m.row_ptr_t, matrices * (m.cols + 1)), indices_t = read(m.col_t, m.kept);
  const Csr transpose{matrices, m.cols, m.rows, m.kept, Ints(offsets_t).narrow(), Ints(indices_t).narrow()};
  check_offsets("block_rows_t", transpose, reasons), done();
  check_indices("block_cols_t", transpose, reasons), done();
  check_transpose("block_rows_t", csr, transpose, reasons), done();
}

} // namespace strobe
