// A call of the C ABI that owns its memory, for tests to modify.
#pragma once
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "guarded.h"

// doctest needs these to print the values that it compares.
namespace strobe {
inline doctest::String toString(DType type) { return name(type); }
} // namespace strobe

namespace strobe::test {

inline std::string error() { return strobe_last_error(); }

using Slot = const strobe_tensor *strobe_tensors::*;
struct NamedSlot {
  const char *name;
  Slot slot;
  void *strobe_addresses::*address;
};
inline constexpr NamedSlot kSlots[] = {
#define STROBE_TENSOR(name, place) {#name, &strobe_tensors::name, &strobe_addresses::name},
#include "strobe/fields.inc"
};

class Call {
public:
  strobe_attention attention{};
  strobe_tensors tensors{};
  strobe_execution execution{};
  Operation operation = Operation::forward;

  Call() { attention.size = sizeof attention, tensors.size = sizeof tensors, execution.size = sizeof execution, execution.threads = 1; }
  Call(const Call &) = delete; // the member `tensors` points into `held`

  bool has(const std::string &name) const { return held.count(name) > 0; }
  strobe_tensor &operator[](const std::string &name) { return held.at(name).tensor; }
  template <class T> T *data(const std::string &name) { return reinterpret_cast<T *>(held.at(name).memory.data()); }
  size_t memory_bytes(const std::string &name) const { return held.at(name).memory.size(); }

  // Adds a contiguous tensor, whose bytes are kFill.
  strobe_tensor &add(const std::string &name, DType dtype, const std::vector<int64_t> &shape) {
    Held &h = held[name];
    h.tensor = {};
    h.tensor.dtype = static_cast<int32_t>(dtype);
    h.tensor.rank = static_cast<int32_t>(shape.size());
    int64_t stride = 1;
    for (int a = h.tensor.rank - 1; a >= 0; a--) {
      h.tensor.shape[a] = shape[a], h.tensor.strides[a] = stride;
      stride *= shape[a];
    }
    h.memory.assign(static_cast<size_t>(stride * bytes(dtype)), kFill);
    h.tensor.data = h.memory.data();
    point(name, &h.tensor);
    return h.tensor;
  }
  template <class T> strobe_tensor &add_values(const std::string &name, DType dtype, const std::vector<T> &values) {
    strobe_tensor &t = add(name, dtype, {static_cast<int64_t>(values.size())});
    if (!values.empty()) std::memcpy(t.data, values.data(), values.size() * sizeof(T));
    return t;
  }
  // Puts gaps between a tensor's values: the last axis gets this stride. backwards: all strides are negative.
  void spread(const std::string &name, int64_t stride, bool backwards) {
    Held &h = held.at(name);
    strobe_tensor &t = h.tensor;
    const std::vector<unsigned char> values = h.memory;
    const int64_t element = bytes(static_cast<DType>(t.dtype));
    for (int a = t.rank - 1; a >= 0; a--) t.strides[a] = stride, stride *= t.shape[a] + 1;
    h.memory.assign(static_cast<size_t>(stride * element), 0x3F);
    t.data = h.memory.data();
    for (int a = 0; backwards && a < t.rank; a++) {
      t.data = static_cast<unsigned char *>(t.data) + std::max<int64_t>(0, t.shape[a] - 1) * t.strides[a] * element;
      t.strides[a] = -t.strides[a];
    }
    for (size_t n = 0; n < values.size() / element; n++) {
      int64_t at = 0, rest = static_cast<int64_t>(n);
      for (int a = t.rank - 1; a >= 0; a--) at += rest % t.shape[a] * t.strides[a], rest /= t.shape[a];
      std::memcpy(static_cast<unsigned char *>(t.data) + at * element, values.data() + n * element, element);
    }
  }
  // Marks all tensors as memory of the first CUDA device.
  void move_to_gpu() {
    for (auto &[name, h] : held) h.tensor.device_type = STROBE_CUDA;
  }
  void drop(const std::string &name) { point(name, nullptr); }
  template <class T> void fill(const std::string &name, double from, double step) {
    T *x = data<T>(name);
    for (size_t n = 0; n < memory_bytes(name) / sizeof(T); n++) x[n] = static_cast<T>(std::sin(from + step * double(n)));
  }
  void resize_memory(const std::string &name, size_t bytes) {
    Held &h = held.at(name);
    h.memory.assign(bytes, kFill);
    h.tensor.data = h.memory.data();
  }

  // Keeps the nodes and a strobe_function of them.
  const strobe_function *function(const std::vector<strobe_node> &nodes) {
    functions.push_back(std::make_unique<Function>(Function{nodes, {}}));
    Function &f = *functions.back();
    f.function.size = sizeof f.function, f.function.nodes = f.nodes.data(), f.function.n_nodes = static_cast<int64_t>(f.nodes.size());
    return &f.function;
  }

  int32_t run() {
    return operation == Operation::forward ? strobe_forward(&attention, &tensors, &execution)
                                           : strobe_backward(&attention, &tensors, &execution);
  }
  // Runs the call with each of its tensors in guarded memory.
  int32_t run_guarded(bool at_end) {
    std::vector<std::unique_ptr<Guarded>> guarded;
    std::vector<void *> before;
    for (auto &[name, h] : held) {
      guarded.push_back(std::make_unique<Guarded>(h.memory.size(), at_end));
      before.push_back(h.tensor.data);
      if (!h.memory.empty()) std::memcpy(guarded.back()->data(), h.memory.data(), h.memory.size());
      h.tensor.data = guarded.back()->data() + (static_cast<unsigned char *>(h.tensor.data) - h.memory.data());
    }
    const int32_t status = run();
    size_t n = 0;
    for (auto &[name, h] : held) {
      if (!h.memory.empty()) std::memcpy(h.memory.data(), guarded[n]->data(), h.memory.size());
      h.tensor.data = before[n++];
    }
    return status;
  }
  Problem validated() { return validate(&attention, &tensors, operation); }

  // Whether the results still hold their fill values.
  bool untouched() const {
    for (const char *name : operation == Operation::forward ? kForwardResults : kBackwardResults)
      if (auto h = held.find(name); h != held.end())
        for (unsigned char byte : h->second.memory)
          if (byte != kFill) return false;
    return true;
  }

private:
  static constexpr unsigned char kFill = 0x3C; // a small finite number in a float of any width
  static inline const std::vector<const char *> kForwardResults = {"out", "lse", "max_logit", "column_sums"};
  static inline const std::vector<const char *> kBackwardResults = {
      "dq", "dk", "dv", "dbias", "dsinks",
#define STROBE_DCAPTURED(name, place) #name,
#include "strobe/fields.inc"
  };

  void point(const std::string &name, const strobe_tensor *tensor) {
    for (const NamedSlot &s : kSlots)
      if (name == s.name) {
        tensors.*s.slot = tensor;
        return;
      }
    FAIL("no such tensor: " << name);
  }

  struct Held {
    strobe_tensor tensor;
    std::vector<unsigned char> memory;
  };
  struct Function {
    std::vector<strobe_node> nodes;
    strobe_function function;
  };
  std::map<std::string, Held> held; // elements of a map keep their addresses
  std::vector<std::unique_ptr<Function>> functions;
};

// The addresses of the call's tensors.
inline strobe_addresses addresses(const Call &call) {
  strobe_addresses at{};
  at.size = sizeof at;
  for (const NamedSlot &s : kSlots)
    if (const strobe_tensor *tensor = call.tensors.*s.slot) at.*s.address = tensor->data;
  return at;
}

// All sizes differ, so that no check passes by accident.
inline constexpr int64_t B = 2, H = 4, Hkv = 2, Sq = 21, Sk = 38, D = 8, Dv = 6;

inline void add_results(Call &c, Operation operation, const std::vector<int64_t> &q, const std::vector<int64_t> &k,
                        const std::vector<int64_t> &v, const std::vector<int64_t> &out, const std::vector<int64_t> &rows) {
  c.operation = operation;
  c.add("out", DType::f32, out);
  c.add("lse", DType::f32, rows);
  if (operation == Operation::forward) {
    const bool packed = c.has("cu_seqlens_q");
    c.add("max_logit", DType::f32, {B, H}); // there are also B packed sequences
    c.add("column_sums", DType::f32, packed ? std::vector{H, Sk} : std::vector{B, H, Sk});
    return;
  }
  c.add("dout", DType::f32, out);
  c.add("dlse", DType::f32, rows);
  c.add("dq", DType::f32, q);
  c.add("dk", DType::f32, k);
  c.add("dv", DType::f32, v);
  if (c.has("bias")) c.add("dbias", DType::f32, {1, H, 1, Sk});
  if (c.has("sinks")) c.add("dsinks", DType::f32, {H});
}

// A call with every option that a dense problem can have.
inline void make_dense(Call &c, Operation operation) {
  c.add("q", DType::f32, {B, H, Sq, D});
  c.add("k", DType::f32, {B, Hkv, Sk, D});
  c.add("v", DType::f32, {B, Hkv, Sk, Dv});
  c.add("mask", DType::boolean, {B, 1, Sq, Sk});
  c.add("bias", DType::f32, {1, H, 1, Sk});
  c.add("alibi_slopes", DType::f32, {B, H});
  c.add("sinks", DType::f32, {H});
  c.add_values<int64_t>("rng", DType::i64, {1, 2});
  c.add_values<int32_t>("seqused_k", DType::i32, {30, Sk});
  c.attention.dropout = 0.25;
  add_results(c, operation, {B, H, Sq, D}, {B, Hkv, Sk, D}, {B, Hkv, Sk, Dv}, {B, H, Sq, Dv}, {B, H, Sq});
}

// A call with two sequences: 13 and 8 queries, 0 and 38 keys.
inline void make_varlen(Call &c, Operation operation) {
  c.add("q", DType::f32, {Sq, H, D});
  c.add("k", DType::f32, {Sk, Hkv, D});
  c.add("v", DType::f32, {Sk, Hkv, Dv});
  c.add_values<int32_t>("cu_seqlens_q", DType::i32, {0, 13, Sq});
  c.add_values<int32_t>("cu_seqlens_k", DType::i32, {0, 0, Sk});
  c.attention.max_seqlen_q = 13, c.attention.max_seqlen_k = Sk;
  add_results(c, operation, {Sq, H, D}, {Sk, Hkv, D}, {Sk, Hkv, Dv}, {Sq, H, Dv}, {H, Sq});
}

// The keys of two sequences in pages of 5: 30 and 38 keys of at most 40. If packed: 13 and 8 queries.
inline constexpr int64_t kPage = 5, kPages = 16, kPagesEach = 8;
inline void make_paged(Call &c, bool packed) {
  c.operation = Operation::forward;
  c.add("q", DType::f32, packed ? std::vector{Sq, H, D} : std::vector{B, H, Sq, D});
  c.add("k", DType::f32, {kPages, Hkv, kPage, D});
  c.add("v", DType::f32, {kPages, Hkv, kPage, Dv});
  c.add("mask", DType::boolean, {B, 1, packed ? 13 : Sq, kPagesEach * kPage});
  if (packed) {
    c.add_values<int32_t>("cu_seqlens_q", DType::i32, {0, 13, Sq});
    c.attention.max_seqlen_q = 13;
  }
  c.add_values<int32_t>("seqused_k", DType::i32, {30, Sk});
  c.add_values<int32_t>("page_table", DType::i32, {15, 3, 4, 1, 9, 0, -7, 1000, 2, 14, 10, 5, 11, 6, 8, 7});
  c["page_table"].rank = 2, c["page_table"].shape[0] = B, c["page_table"].shape[1] = kPagesEach;
  c["page_table"].strides[0] = kPagesEach, c["page_table"].strides[1] = 1;
  c.add("out", DType::f32, packed ? std::vector{Sq, H, Dv} : std::vector{B, H, Sq, Dv});
  c.add("lse", DType::f32, packed ? std::vector{H, Sq} : std::vector{B, H, Sq});
  c.add("max_logit", DType::f32, {B, H});
  c.add("column_sums", DType::f32, {B, H, kPagesEach * kPage});
}

// Quantised keys, which only the reference supports, in dense, packed or paged calls. k has scales by key, or by column and 32 rows.
inline void make_quantised(Call &c, DType stored, bool by_column, void (*make)(Call &, Operation)) {
  make(c, Operation::forward);
  const int64_t each = stored == DType::i4x2 ? 2 : 1;
  for (const char *name : {"k", "v"}) {
    std::vector<int64_t> size(c[name].shape, c[name].shape + c[name].rank);
    const size_t row = size.size() == 3 ? 0 : 2;
    const int64_t columns = size.back();
    size.back() /= each;
    c.add(name, stored, size);
    size.pop_back();
    const bool k = name[0] == 'k', columns_too = k && by_column;
    if (columns_too) size[row] = (size[row] + 31) / 32, size.push_back(columns);
    c.add(k ? "k_scale" : "v_scale", k ? DType::f16 : DType::f32, size);
  }
  c.attention.k_scale_group = by_column ? 32 : 0;
}
// Gives the results of a call the dtypes of the reference.
inline void make_for_reference(Call &c) {
  c.attention.engine = "reference";
  std::vector<const char *> results = {"out", "lse", "max_logit", "column_sums", "dq", "dk", "dv", "dbias", "dsinks"};
#define STROBE_DCAPTURED(name, place) results.push_back(#name);
#include "strobe/fields.inc"
  for (const char *name : results)
    if (c.has(name)) c.add(name, DType::f64, std::vector<int64_t>(c[name].shape, c[name].shape + c[name].rank));
}

// Blocks of 16 x 16: 2 x 3 for each batch, one pattern for all heads. Kept are {0}, {0, 2} in the first batch and {}, {1, 2} in the second.
inline void make_sparse(Call &c, Operation operation) {
  c.add("q", DType::f32, {B, H, Sq, D});
  c.add("k", DType::f32, {B, Hkv, Sk, D});
  c.add("v", DType::f32, {B, Hkv, Sk, Dv});
  c.attention.block_q = c.attention.block_k = 16;
  auto ints = [&](const char *name, const std::vector<int32_t> &values, int64_t row) {
    c.add_values(name, DType::i32, values);
    if (row)
      c[name].rank = 3, c[name].shape[0] = B, c[name].shape[1] = 1, c[name].shape[2] = row, c[name].strides[0] = c[name].strides[1] = row,
      c[name].strides[2] = 1;
  };
  ints("block_rows", {0, 1, 3, 3, 3, 5}, 3);
  ints("block_cols", {0, 0, 2, 1, 2}, 0);
  ints("block_rows_t", {0, 2, 2, 3, 3, 3, 4, 5}, 4);
  ints("block_cols_t", {0, 1, 1, 1, 1}, 0);
  c["block_rows_t"].shape[2] = 4;
  add_results(c, operation, {B, H, Sq, D}, {B, Hkv, Sk, D}, {B, Hkv, Sk, Dv}, {B, H, Sq, Dv}, {B, H, Sq});
}

// The same with a function of the mask, and the blocks that it sees as a whole.
inline void make_full_blocks(Call &c, Operation operation) {
  static const strobe_node always = {STROBE_OP_BOOLEAN, 0, {0, 0, 0, 0}, 0, 1};
  static const strobe_function everything = {sizeof everything, &always, 1};
  make_sparse(c, operation);
  c.attention.mask_function = &everything;
  c.add_values("block_full", DType::i32, std::vector<int32_t>{0, 1, 0, 1, 0});
  c.add_values("block_full_t", DType::i32, std::vector<int32_t>{0, 0, 1, 1, 0});
}

// The nodes of a function, one after another.
class Nodes {
public:
  std::vector<strobe_node> all;

  int32_t add(strobe_operation operation, const std::vector<int32_t> &inputs = {}) {
    strobe_node node{};
    node.operation = operation;
    std::ranges::copy(inputs, node.inputs);
    return put(node);
  }
  int32_t load(int32_t captured, const std::vector<int32_t> &inputs) {
    const int32_t n = add(STROBE_OP_LOAD, inputs);
    all.back().captured = captured;
    return n;
  }
  int32_t real(double value) {
    const int32_t n = add(STROBE_OP_REAL);
    all.back().real = value;
    return n;
  }
  int32_t integer(int64_t value) {
    const int32_t n = add(STROBE_OP_INTEGER);
    all.back().integer = value;
    return n;
  }

private:
  int32_t put(const strobe_node &node) {
    all.push_back(node);
    return static_cast<int32_t>(all.size()) - 1;
  }
};

// A call of q, k, v, and a score_function that adds eight captured tensors, of each dtype and rank, to x.
inline void make_captured(Call &c, Operation operation) {
  c.add("q", DType::f32, {B, H, Sq, D});
  c.add("k", DType::f32, {B, Hkv, Sk, D});
  c.add("v", DType::f32, {B, Hkv, Sk, Dv});
  add_results(c, operation, {B, H, Sq, D}, {B, Hkv, Sk, D}, {B, Hkv, Sk, Dv}, {B, H, Sq, Dv}, {B, H, Sq});
  Nodes f;
  int32_t sum = f.add(STROBE_OP_SCORE), captured = 0;
  const int32_t b = f.add(STROBE_OP_BATCH), h = f.add(STROBE_OP_HEAD), i = f.add(STROBE_OP_QUERY), j = f.add(STROBE_OP_KEY);
  auto add = [&](DType type, const std::vector<int64_t> &shape, const std::vector<int32_t> &at) {
    c.add("captured_" + std::to_string(captured), type, shape);
    int32_t read = f.load(captured++, at);
    if (type == DType::i32 || type == DType::i64 || type == DType::boolean) read = f.add(STROBE_OP_TO_REAL, {read});
    sum = f.add(STROBE_OP_ADD, {sum, read});
  };
  add(DType::f32, {}, {}), add(DType::f32, {H}, {h}), add(DType::f64, {H, Sk}, {h, j}), add(DType::f16, {B, H, Sq}, {b, h, i});
  add(DType::bf16, {Sk}, {j}), add(DType::i32, {Sq}, {i}), add(DType::i64, {B, H, Sq, 1}, {b, h, i, f.integer(0)});
  add(DType::boolean, {Sq, Sk}, {i, j});
  c.attention.score_function = c.function(f.all);
}

// As many captured tensors of floats as a call may have, and the gradient of each: of a scalar, of heads, queries, keys, differences and
// pairs.
inline void make_captured_gradients(Call &c) {
  c.add("q", DType::f32, {B, H, Sq, D});
  c.add("k", DType::f32, {B, Hkv, Sk, D});
  c.add("v", DType::f32, {B, Hkv, Sk, Dv});
  add_results(c, Operation::backward, {B, H, Sq, D}, {B, Hkv, Sk, D}, {B, Hkv, Sk, Dv}, {B, H, Sq, Dv}, {B, H, Sq});
  Nodes f;
  int32_t sum = f.add(STROBE_OP_SCORE), captured = 0;
  const int32_t b = f.add(STROBE_OP_BATCH), h = f.add(STROBE_OP_HEAD), i = f.add(STROBE_OP_QUERY), j = f.add(STROBE_OP_KEY),
                behind = f.add(STROBE_OP_SUBTRACT, {i, j});
  auto add = [&](DType type, const std::vector<int64_t> &shape, const std::vector<int32_t> &at) {
    c.add("captured_" + std::to_string(captured), type, shape), c.add("dcaptured_" + std::to_string(captured), type, shape);
    sum = f.add(STROBE_OP_ADD, {sum, f.add(STROBE_OP_MULTIPLY, {sum, f.load(captured++, at)})});
  };
  add(DType::f32, {}, {}), add(DType::f32, {H}, {h}), add(DType::f64, {H, Sk}, {h, j}), add(DType::f16, {B, H, Sq}, {b, h, i});
  add(DType::bf16, {Sk}, {j}), add(DType::f32, {Sq + Sk}, {behind}), add(DType::f64, {Sq, Sk}, {i, j}), add(DType::f32, {2, 3}, {i, j});
  c.attention.score_function = c.function(f.all);
}

// A strobe_part and its lists.
struct PartOf {
  struct List {
    std::vector<int64_t> values;
    strobe_tensor tensor{};
    void shape(const std::vector<int64_t> &sizes) {
      tensor = {}, tensor.data = values.data(), tensor.dtype = STROBE_INT64, tensor.rank = static_cast<int32_t>(sizes.size());
      int64_t stride = 1;
      for (int a = tensor.rank - 1; a >= 0; a--) tensor.shape[a] = sizes[a], tensor.strides[a] = stride, stride *= sizes[a];
    }
  };
  List q_ranges, k_ranges, seqlens_q, seqlens_k;
  strobe_part part{};

  // By default, the rows of make_dense: queries at positions 5 to 16 and 20 to 28 of 30, and keys at positions 0 to 37 of 40.
  PartOf() {
    part.size = sizeof part;
    set(q_ranges, {5, 12, 20, 9}, {1, 2, 2}), set(k_ranges, {0, 38}, {1, 1, 2});
    set(seqlens_q, {30}, {1}), set(seqlens_k, {40}, {1});
    part.q_ranges = &q_ranges.tensor, part.k_ranges = &k_ranges.tensor;
    part.seqlens_q = &seqlens_q.tensor, part.seqlens_k = &seqlens_k.tensor;
  }
  PartOf(const PartOf &) = delete;
  static void set(List &list, const std::vector<int64_t> &values, const std::vector<int64_t> &sizes) {
    list.values = values, list.shape(sizes);
  }
};

// make_dense, without the tensors that a part excludes.
inline void make_part(Call &call, PartOf &of, Operation operation, bool partial = false) {
  make_dense(call, operation);
  for (const char *name : {"seqused_k", "mask", "bias", "dbias", "max_logit", "column_sums"}) call.drop(name);
  if (partial) {
    call.drop("sinks"), call.drop("dsinks"), call.drop("out");
    call.add("lse", DType::f32, {2, B, H, Sq});
    if (operation == Operation::backward)
      call.add("delta", DType::f32, {B, H, Sq});
    else
      call.add("out", DType::f32, {B, H, Sq, Dv});
    of.part.partial = 1;
  }
  call.attention.part = &of.part;
}

inline std::vector<std::string> lines(const std::string &text) {
  std::vector<std::string> out(1);
  for (char c : text)
    if (c == '\n')
      out.emplace_back();
    else
      out.back() += c;
  return out;
}

} // namespace strobe::test
