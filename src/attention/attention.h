// The validated problem. It is the same for every engine, except for Wishes and Part::table, which only some engines read.
#pragma once
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "attention/operation.h"
#include "strobe/strobe.h"

namespace strobe {

// A status and its text. The C ABI turns them into a code and strobe_last_error().
struct Error : std::runtime_error {
  strobe_status status;
  Error(strobe_status s, const std::string &text) : std::runtime_error(text), status(s) {}
};

enum class DType : int32_t {
  none = 0,
  f32 = STROBE_FLOAT32,
  f16 = STROBE_FLOAT16,
  bf16 = STROBE_BFLOAT16,
  f64 = STROBE_FLOAT64,
  boolean = STROBE_BOOL,
  i32 = STROBE_INT32,
  i64 = STROBE_INT64,
  i8 = STROBE_INT8,
  e4m3 = STROBE_FLOAT8_E4M3,
  i4x2 = STROBE_UINT8, // two numbers per byte
  e5m2 = STROBE_FLOAT8_E5M2
};

const char *name(DType);
// The bytes of a stored element. Two INT4 numbers are one element.
int64_t bytes(DType);

// A tensor seen through the axes (batch, head, row, column). Strides count elements. An axis that the tensor lacks or broadcasts has stride
// 0. Varlen tensors have batch stride 0, and their rows are packed tokens. In a pool of pages, stride[0] is the distance between pages.
struct View {
  char *data = nullptr;
  DType dtype = DType::none;
  int64_t stride[4] = {0, 0, 0, 0};
  const int32_t *page_table = nullptr;   // (batch, pages_each): the pages that hold a sequence's rows, page_size rows each
  int64_t page_size = 0, pages_each = 0; // page_size 0: not paged

  __attribute__((always_inline)) explicit operator bool() const { return dtype != DType::none; }
  __attribute__((always_inline)) int64_t index(int64_t b, int64_t h, int64_t i, int64_t c) const {
    if (page_size) b = page_table[b * pages_each + i / page_size], i %= page_size;
    return b * stride[0] + h * stride[1] + i * stride[2] + c * stride[3];
  }
  template <class T> __attribute__((always_inline)) T *at(int64_t b, int64_t h, int64_t i, int64_t c) const {
    return reinterpret_cast<T *>(data) + index(b, h, i, c);
  }
};

// The scales of quantised K or V: one for each row, or one for each column of `rows` consecutive rows. A scale is indexed by the row of K
// or V that it scales.
struct Scales : View {
  int64_t rows = 1;

  __attribute__((always_inline)) int64_t index(int64_t b, int64_t h, int64_t i, int64_t c) const {
    if (page_size) b = page_table[b * pages_each + i / page_size], i %= page_size;
    return b * stride[0] + h * stride[1] + i / rows * stride[2] + c * stride[3];
  }
};

// The rows [local, local + length) that the tensors hold of a sequence are the positions from `start` on.
struct RowRange {
  int64_t start, length, local;
  __attribute__((always_inline)) int64_t end() const { return start + length; }
};

// The shapes and strides of a call's lists in the caller's memory, in the order of each_list (contents.h); Problem has their addresses.
struct ListForms {
  enum {
#define STROBE_LIST(name, place) name,
#include "strobe/fields.inc"
    kCount
  };
  strobe_tensor of[kCount] = {};
};

inline constexpr int64_t kUnbounded = std::numeric_limits<int64_t>::max();

namespace score {
struct Program;
struct GradientProgram;
struct TangentProgram;
struct Bytecode;
class CudaFunctions;
} // namespace score

// A tensor that a function of the caller reads, or its gradient, with axes of its own.
struct Captured {
  char *data = nullptr;
  DType dtype = DType::none;
  int32_t rank = 0;
  int64_t size[4] = {1, 1, 1, 1}, stride[4] = {0, 0, 0, 0};

  __attribute__((always_inline)) explicit operator bool() const { return dtype != DType::none; }
  __attribute__((always_inline)) int64_t elements() const { return size[0] * size[1] * size[2] * size[3]; }
};

// What the caller, or else a tuning table, requests. An engine ignores requests that it does not know.
struct Wishes {
  std::string engine;             // the engine's name; empty: any
  int64_t tile_q = 0, tile_k = 0; // 0: any; an engine takes the nearest tile that it has
  // Wishes of a tuning table for Hopper's kernels:
  int64_t bundle = 0;             // how many heads run their tiles together; 0: any
  int64_t shares = 0;             // into how many shares a key head's query heads are divided (sm90::BackwardConfig::split_group); 0: any
  bool staged_store = false;      // sm90::BackwardConfig::staged_store
  std::optional<bool> persistent; // sm90::BackwardConfig::persistent
};

// The validated call. Sizes are those of the longest sequence. The lengths of packed sequences come from cu_seqlens.
struct Problem {
  // sizes
  int64_t batch = 0, heads = 0, heads_kv = 0;
  int64_t seqlen_q = 0, seqlen_k = 0;         // varlen: max_seqlen_q, max_seqlen_k
  int64_t max_seqlen_q = 0, max_seqlen_k = 0; // as the caller has given them; 0: not given
  int64_t head_dim = 0, head_dim_v = 0;
  bool varlen = false;                              // keys are packed too, unless they are paged
  int64_t page_size = 0, pages = 0, pages_each = 0; // keys per page, 0: not paged; pages in the pool; pages per sequence
  int64_t page_table_row = 0;                       // the distance between the rows of two sequences in the page table
  int64_t total_q = 0, total_k = 0;                 // varlen: packed tokens; dense: batch * seqlen
  int64_t most_q = kUnbounded, most_k = kUnbounded; // the longest lengths, if these are in host memory and the call gives no maximum
  DType dtype = DType::none;                        // dtype of q and out, and of k and v unless they are quantised
  DType quantised_as = DType::none;                 // how quantised k and v are stored; none: in dtype
  int32_t device_type = STROBE_CPU, device_index = 0;

  double scale = 1; // the score is `program` applied to scale q.k
  // Visibility: query i sees keys from i + offset - left to i + offset + right, where offset = bottom_right ? Sk - Sq : 0, with the lengths
  // of the sequence. Causal is stored as right = min(right, 0).
  bool bottom_right = true;
  int64_t window_left = kUnbounded, window_right = kUnbounded;
  // dropout
  double dropout = 0;
  uint64_t seed = 0, offset = 0; // used unless rng is given
  // requests
  bool deterministic = false, exact_max = false, allow_tf32 = false, strict = false, check = false, invariant = false;
  Wishes wishes;

  // tensors
  View q, k, v;                                  // INT4: strides count bytes, and each byte holds two columns
  Scales k_scale, v_scale;                       // the scales of quantised k and v
  View mask, bias;                               // (batch, head, query, key), stride 0 where broadcast
  View alibi_slopes;                             // (batch, head, -, -)
  View sinks;                                    // (-, head, -, -)
  std::shared_ptr<const score::Program> program; // the function of scale q.k, and what functions hide; null: neither exists
  Captured captured[STROBE_MOST_CAPTURED];       // the tensors that the program reads
  const score::Bytecode *bytecode = nullptr;     // a CPU engine's code of the program
  // A GPU engine's code of the program, and of its gradients; null: not made yet.
  std::shared_ptr<const score::CudaFunctions> cuda_functions, cuda_gradient_functions;
  void *ahead = nullptr; // a GPU engine's values that are computed ahead, in its workspace
  // The following members are lists. In host memory they are the call's own copies (contents.h), without gaps. In device memory they are
  // the caller's, with any strides, and GPU engines copy them (cuda/program/lists.h).
  std::shared_ptr<const void> lists;      // owns the copies
  std::shared_ptr<const ListForms> forms; // null: there are no lists
  const int32_t *cu_seqlens_q = nullptr, *cu_seqlens_k = nullptr;
  const int32_t *seqused_k = nullptr; // (batch): how many keys of each sequence count; null: all of them
  const int64_t *rng = nullptr;
  // Block sparsity: a CSR over query blocks, and its transpose over key blocks.
  struct Blocks {
    bool present = false, transposed = false;
    int64_t block_q = 0, block_k = 0;                     // tokens per block
    int64_t rows = 0, cols = 0, kept = 0;                 // ceil(seqlen_q / block_q), ceil(seqlen_k / block_k), entries
    int64_t batch = 1, heads = 1;                         // 1 or the problem's; the CSR is broadcast over an axis of 1
    const int32_t *row_ptr = nullptr, *col = nullptr;     // row_ptr: (batch, heads, rows + 1) absolute offsets into col
    const int32_t *row_ptr_t = nullptr, *col_t = nullptr; // (batch, heads, cols + 1)
    const int32_t *full = nullptr, *full_t = nullptr; // for each entry: whether the program's mask sees the whole block; null: not known
  } blocks;

  View out, lse; // lse: (batch, head, query, -)
  // The distance, in elements, from an LSE to its low number. Used only if part.partial, where LSE is two numbers.
  int64_t lse_low = 0;
  View max_logit, column_sums;                       // forward, if asked for: (batch, head, -, -) and (batch, query head, key, -)
  View dout, dlse, delta, dq, dk, dv, dbias, dsinks; // delta: an input, only for a partial part
  bool accumulate = false;                           // adds to dq, dk and dv
  Captured dcaptured[STROBE_MOST_CAPTURED];          // gradients of captured tensors, where wanted
  std::shared_ptr<const score::GradientProgram> gradient_program; // their program; null: none is wanted

  // jvp and backward_jvp. The latter writes the derivatives of dq, dk, ... where a backward writes these.
  View tq, tk, tv, tbias, tsinks, tdout, tdlse; // tangents; absent: 0
  Captured tcaptured[STROBE_MOST_CAPTURED];
  View tout, tlse;
  std::shared_ptr<const score::TangentProgram> tangent_program; // of a score that is not linear in x, or that reads tangents; else null

  // The rows, heads and sequences of a larger problem that the tensors hold (docs/semantics.md, "Parts of a problem").
  struct Part {
    std::shared_ptr<const void> lists;                                  // owns the following lists
    const RowRange *q = nullptr, *k = nullptr;                          // (batch or 1, count); null: whole sequences
    int64_t count_q = 1, count_k = 1, batch_q = 1, batch_k = 1;         // ranges per sequence, and sequences in the lists
    const int64_t *seqlens_q = nullptr, *seqlens_k = nullptr;           // (batch or 1): lengths of the whole sequences
    int64_t batch_lens_q = 1, batch_lens_k = 1, most_q = 0, most_k = 0; // sequences in these lists, and the longest length
    int64_t first_head = 0, heads = 0, first_batch = 0;
    bool partial = false;
    const void *table = nullptr; // the same lists in a GPU engine's workspace
    __attribute__((always_inline)) explicit operator bool() const { return q != nullptr; }
  } part;

  // Whether the keys are tokens in consecutive rows, one sequence after another.
  __attribute__((always_inline)) bool packed_k() const { return varlen && !page_size; }
  const int32_t *page_table() const { return k.page_table; }
  void set_page_table(const int32_t *table) { k.page_table = v.page_table = k_scale.page_table = v_scale.page_table = table; }
  __attribute__((always_inline)) bool quantised() const { return quantised_as != DType::none; }
  // Elements per row of K or V.
  __attribute__((always_inline)) int64_t stored(int64_t columns) const { return quantised_as == DType::i4x2 ? columns / 2 : columns; }
  bool scaled_by_channel() const { return k_scale.rows > 1; } // K has a scale per column, not per row
  // Whether a forward is followed by the pass that makes max_logit and column_sums.
  bool auxiliary() const { return max_logit || column_sums; }
  __attribute__((always_inline)) int64_t group() const { return heads_kv > 0 ? heads / heads_kv : 1; } // query heads per key head

  // An upper bound of the queries (keys) of the longest sequence, which bounds the work. seqlen_q and seqlen_k are instead the sizes of
  // mask, bias and mask blocks.
  __attribute__((always_inline)) int64_t longest_q() const { return least(seqlen_q, total_q, most_q); }
  __attribute__((always_inline)) int64_t longest_k() const { return least(seqlen_k, total_k, most_k); }

  // The first packed token of sequence b, and the sequence's length. Without packing the first token is row 0 of batch b. cu_seqlens and
  // seqused_k are clamped, never trusted. held_k also counts the keys that seqused_k leaves out.
  struct Rows {
    int64_t begin, length;
  };
  __attribute__((always_inline)) Rows rows_q(int64_t b) const {
    return rows(varlen, cu_seqlens_q, b, total_q, varlen ? longest_q() : seqlen_q);
  }
  __attribute__((always_inline)) Rows rows_k(int64_t b) const {
    Rows keys = held_k(b);
    if (seqused_k) keys.length = least(keys.length, seqused_k[b] > 0 ? seqused_k[b] : 0, kUnbounded);
    return keys;
  }
  __attribute__((always_inline)) Rows held_k(int64_t b) const {
    return rows(packed_k(), cu_seqlens_k, b, total_k, packed_k() ? longest_k() : seqlen_k);
  }

  // The positions of a sequence's rows, range by range. Only a part has several ranges; otherwise one range has all rows.
  __attribute__((always_inline)) RowRange range_q(int64_t b, int64_t n) const {
    if (part) return part.q[(part.batch_q > 1 ? b : 0) * part.count_q + n];
    return {0, rows_q(b).length, 0};
  }
  __attribute__((always_inline)) RowRange range_k(int64_t b, int64_t n) const {
    if (part) return part.k[(part.batch_k > 1 ? b : 0) * part.count_k + n];
    return {0, rows_k(b).length, 0};
  }
  // The lengths of the whole sequence; and the sizes of tensors whose axes are positions of the whole problem: mask blocks, and the columns
  // of mask and bias.
  __attribute__((always_inline)) int64_t whole_q(int64_t b) const {
    return part ? part.seqlens_q[part.batch_lens_q > 1 ? b : 0] : rows_q(b).length;
  }
  __attribute__((always_inline)) int64_t whole_k(int64_t b) const {
    return part ? part.seqlens_k[part.batch_lens_k > 1 ? b : 0] : rows_k(b).length;
  }
  __attribute__((always_inline)) int64_t size_q() const { return part ? part.most_q : seqlen_q; }
  __attribute__((always_inline)) int64_t size_k() const { return part ? part.most_k : seqlen_k; }

private:
  __attribute__((always_inline)) static int64_t least(int64_t a, int64_t b, int64_t c) {
    const int64_t d = a < b ? a : b;
    return c < d ? c : d;
  }
  __attribute__((always_inline)) static Rows rows(bool packed, const int32_t *cu, int64_t b, int64_t total, int64_t most) {
    if (!packed) return {0, most};
    auto clamp = [](int64_t x, int64_t lo, int64_t hi) { return x < lo ? lo : x > hi ? hi : x; };
    int64_t begin = clamp(cu[b], 0, total), end = clamp(cu[b + 1], begin, total);
    return {begin, end - begin < most ? end - begin : most};
  }
};

// How the call runs.
struct Execution {
  int32_t threads = 1;      // at least 1; 0 and defaults are resolved
  int32_t reserved_sms = 0; // multiprocessors of a GPU that are left for other work
  strobe_parallel parallel = nullptr;
  void *pool = nullptr;
  void *stream = nullptr;
  void *workspace = nullptr;
  uint64_t workspace_bytes = 0;
  void *(*allocate)(void *allocator, uint64_t bytes) = nullptr;
  void *allocator = nullptr;

  // Calls body(i) for each i in [0, n), on the caller's threads or on threads started for this call. Defined in src/attention/parallel.cpp.
  void run(int32_t n, void (*body)(void *arg, int32_t i), void *arg) const;
  template <class F> void run(int32_t n, F &&f) const {
    run(n, [](void *arg, int32_t i) { (*static_cast<std::remove_reference_t<F> *>(arg))(i); }, &f);
  }
};

// Checks everything. Throws Refused with all reasons. A null execution means the default. placed (optional): receives which bytes belong to
// which tensor (tensor_check.h).
struct Placed;
Problem validate(const strobe_attention *, const strobe_tensors *, Operation, std::vector<Placed> *placed = nullptr);
Execution validate(const strobe_execution *);

} // namespace strobe
