// Strobe for C++20: the C ABI (strobe.h, which documents every field) with spans, designated initialisers and exceptions. Header-only.
//
//   std::vector<float> q(2 * 8 * 128 * 64), k = q, v = q, out = q;
//   const strobe::Shape shape = {2, 8, 128, 64}; // batch, heads, sequence, head dimension
//   strobe::forward({.q = {q, shape}, .k = {k, shape}, .v = {v, shape}, .causal = true}, {.out = {out, shape}});
//
// Everything here is a view: nothing owns or copies an element, and nothing is kept after a call.
#pragma once

#if __cplusplus < 202002L
#error "strobe.hpp needs C++20: compile with -std=c++20 (CMake: target_compile_features(... cxx_std_20)), or include strobe.h"
#else // C++20: the rest of the file

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "strobe/strobe.h"

namespace strobe {
inline namespace api {

// ---- errors ----------------------------------------------------------------------------------------------------------------------------

// Why one argument was refused: the parts of strobe_refusal (strobe.h).
struct Refusal {
  struct Value {
    strobe_value_kind kind;
    int64_t integer;
    double number;
    std::string text;
    std::vector<int64_t> sizes;
    std::vector<std::string> roles; // with STROBE_VALUE_AXES: the roles of the axes
    int32_t or_one;
  };
  std::string argument;
  strobe_code code;
  std::string words;
  std::vector<Value> values;
};

struct Error : std::runtime_error {
  strobe_status status;
  std::vector<Refusal> refusals; // InvalidArgument: the refusals, of which each is a line of what()
  Error(strobe_status code, const std::string &text, std::vector<Refusal> why = {})
      : std::runtime_error(text), status(code), refusals(std::move(why)) {}
};
template <strobe_status S> struct ErrorOf : Error {
  explicit ErrorOf(const std::string &text, std::vector<Refusal> why = {}) : Error(S, text, std::move(why)) {}
};
using InvalidArgument = ErrorOf<STROBE_INVALID_ARGUMENT>;
using Unsupported = ErrorOf<STROBE_UNSUPPORTED>;
using OutOfMemory = ErrorOf<STROBE_OUT_OF_MEMORY>;
using DeviceError = ErrorOf<STROBE_DEVICE_ERROR>;
using InternalError = ErrorOf<STROBE_INTERNAL>;

namespace detail {
inline InvalidArgument refused(const char *argument, strobe_code code, const std::string &words) {
  return InvalidArgument(std::string(argument) + ": " + words, {{argument, code, words, {}}});
}
inline std::vector<Refusal> last_refusals() {
  std::vector<Refusal> all;
  while (const strobe_refusal *r = strobe_last_refusal(all.size())) {
    Refusal &found = all.emplace_back(Refusal{r->argument, static_cast<strobe_code>(r->code), r->words, {}});
    for (int32_t n = 0; n < r->n_values; n++) {
      const strobe_value &v = *r->values[n];
      found.values.push_back({static_cast<strobe_value_kind>(v.kind),
                              v.integer,
                              v.number,
                              v.text,
                              {v.sizes, v.sizes + v.count},
                              {v.roles, v.roles + (v.roles ? v.count : 0)},
                              v.or_one});
    }
  }
  return all;
}
inline void check(int32_t status) {
  switch (status) {
  case STROBE_OK:
    return;
  case STROBE_INVALID_ARGUMENT:
    throw InvalidArgument(strobe_last_error(), last_refusals());
  case STROBE_UNSUPPORTED:
    throw Unsupported(strobe_last_error());
  case STROBE_OUT_OF_MEMORY:
    throw OutOfMemory(strobe_last_error());
  case STROBE_DEVICE_ERROR:
    throw DeviceError(strobe_last_error());
  default:
    throw InternalError(strobe_last_error());
  }
}
} // namespace detail

// ---- tensors ---------------------------------------------------------------------------------------------------------------------------

// Element types for which C++20 has no name.
struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};
struct float8_e4m3 {
  uint8_t bits;
};
struct float8_e5m2 {
  uint8_t bits;
};
struct int4x2 { // column 2n is the low nibble of element n
  uint8_t bits;
};

template <class T> struct dtype_of;
template <> struct dtype_of<float> : std::integral_constant<strobe_dtype, STROBE_FLOAT32> {};
template <> struct dtype_of<double> : std::integral_constant<strobe_dtype, STROBE_FLOAT64> {};
template <> struct dtype_of<float16> : std::integral_constant<strobe_dtype, STROBE_FLOAT16> {};
template <> struct dtype_of<bfloat16> : std::integral_constant<strobe_dtype, STROBE_BFLOAT16> {};
template <> struct dtype_of<bool> : std::integral_constant<strobe_dtype, STROBE_BOOL> {};
template <> struct dtype_of<uint8_t> : std::integral_constant<strobe_dtype, STROBE_BOOL> {};
template <> struct dtype_of<int8_t> : std::integral_constant<strobe_dtype, STROBE_INT8> {};
template <> struct dtype_of<float8_e4m3> : std::integral_constant<strobe_dtype, STROBE_FLOAT8_E4M3> {};
template <> struct dtype_of<float8_e5m2> : std::integral_constant<strobe_dtype, STROBE_FLOAT8_E5M2> {};
template <> struct dtype_of<int4x2> : std::integral_constant<strobe_dtype, STROBE_UINT8> {};
template <> struct dtype_of<int32_t> : std::integral_constant<strobe_dtype, STROBE_INT32> {};
template <> struct dtype_of<int64_t> : std::integral_constant<strobe_dtype, STROBE_INT64> {};

// Up to four sizes, or up to four strides in elements.
struct Shape {
  std::array<int64_t, 4> size{};
  int32_t rank = 0;

  Shape(std::initializer_list<int64_t> sizes) : Shape(std::span(sizes.begin(), sizes.size())) {}
  explicit Shape(std::span<const int64_t> sizes) : rank(static_cast<int32_t>(sizes.size())) {
    if (sizes.size() > 4)
      throw detail::refused("shape", STROBE_CODE_RANK, "rank " + std::to_string(sizes.size()) + "; accepted is at most 4");
    for (size_t a = 0; a < sizes.size(); a++) size[a] = sizes[a];
  }
};

// A tensor that a call may read: memory that the caller owns, seen through a shape. By default it is absent.
class ConstTensor {
public:
  ConstTensor() = default;
  explicit ConstTensor(const strobe_tensor &given) : tensor(given), present(true) {} // device memory, or any other tensor of strobe.h
  // A contiguous tensor, or one with strides. The range must hold every element of the tensor.
  template <std::ranges::contiguous_range Range>
  ConstTensor(Range &&elements, const Shape &shape) : ConstTensor(elements, shape, contiguous(shape)) {}
  template <std::ranges::contiguous_range Range> ConstTensor(Range &&elements, const Shape &shape, const Shape &strides) : present(true) {
    const std::span view(elements);
    using Element = typename decltype(view)::element_type;
    tensor.data = const_cast<std::remove_const_t<Element> *>(view.data());
    tensor.dtype = dtype_of<std::remove_const_t<Element>>::value;
    tensor.rank = shape.rank;
    bool empty = false;
    int64_t last = 0;
    for (size_t a = 0; a < static_cast<size_t>(shape.rank); a++) {
      tensor.shape[a] = shape.size[a];
      tensor.strides[a] = strides.size[a];
      empty |= shape.size[a] <= 0;
      if (shape.size[a] > 1) last += (shape.size[a] - 1) * strides.size[a];
      if (shape.size[a] > 1 && strides.size[a] < 0) wrong = "a negative stride; accepted through a strobe_tensor alone";
    }
    if (strides.rank != shape.rank)
      wrong = std::to_string(strides.rank) + " strides; accepted are as many as the shape has sizes, " + std::to_string(shape.rank);
    else if (wrong.empty() && !empty && static_cast<uint64_t>(last) >= view.size())
      wrong = "a range of " + std::to_string(view.size()) + " elements; accepted are " + std::to_string(last + 1) +
              " or more, as its shape and strides reach";
  }

  explicit operator bool() const { return present; }
  // The strobe_tensor; null if the tensor is absent. If the range is too short for the shape, throws InvalidArgument under the argument's
  // name.
  const strobe_tensor *get(const char *name) const {
    if (!wrong.empty()) throw detail::refused(name, STROBE_CODE_MEMORY, wrong);
    return present ? &tensor : nullptr;
  }

  static Shape contiguous(const Shape &shape) {
    Shape strides = shape;
    int64_t stride = 1;
    for (size_t a = static_cast<size_t>(shape.rank); a-- > 0;) {
      strides.size[a] = stride;
      stride *= shape.size[a] > 1 ? shape.size[a] : 1;
    }
    return strides;
  }

private:
  strobe_tensor tensor{};
  bool present = false;
  std::string wrong; // the reason why no call can accept the tensor; empty: none
};

// A tensor that a call may write.
class Tensor : public ConstTensor {
public:
  Tensor() = default;
  explicit Tensor(const strobe_tensor &given) : ConstTensor(given) {}
  template <std::ranges::contiguous_range Range>
    requires(!std::is_const_v<std::remove_reference_t<std::ranges::range_reference_t<Range>>>)
  Tensor(Range &&elements, const Shape &shape) : ConstTensor(elements, shape) {}
  template <std::ranges::contiguous_range Range>
    requires(!std::is_const_v<std::remove_reference_t<std::ranges::range_reference_t<Range>>>)
  Tensor(Range &&elements, const Shape &shape, const Shape &strides) : ConstTensor(elements, shape, strides) {}
};

// ---- calls -----------------------------------------------------------------------------------------------------------------------------

enum class Alignment : int32_t { bottom_right = STROBE_BOTTOM_RIGHT, top_left = STROBE_TOP_LEFT };
enum class Score : int32_t { dot = STROBE_DOT, hyperbolic = STROBE_HYPERBOLIC };

// Which rows, heads and sequences of a larger problem the tensors hold (strobe_part).
struct Part {
  ConstTensor q_ranges = {}, k_ranges = {};   // int64 (B|1, n, 2)
  ConstTensor seqlens_q = {}, seqlens_k = {}; // int64 (B|1)
  int64_t first_head = 0, heads = 0, first_batch = 0;
  bool partial = false;
};

// A function of the caller, like strobe_function.
struct Function {
  std::vector<strobe_node> nodes = {}; // the last node is the result
};

// What is computed, and from which tensors. A tensor that is not given is absent.
struct Attention {
  ConstTensor q = {}, k = {}, v = {};

  bool causal = false;
  std::optional<int64_t> window_left = {}, window_right = {}; // absent: no bound
  Alignment alignment = Alignment::bottom_right;
  std::optional<double> scale = {}; // absent: 1 / sqrt(D), or 1 for hyperbolic scores
  double softcap = 0;
  Score score = Score::dot;
  double beta = 0, shift = 0; // for hyperbolic scores
  ConstTensor mask = {}, bias = {}, alibi_slopes = {}, sinks = {};

  double dropout = 0;
  uint64_t seed = 0, offset = 0;
  ConstTensor rng = {}; // replaces seed and offset

  ConstTensor cu_seqlens_q = {}, cu_seqlens_k = {}; // if given, sequences are packed
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;
  ConstTensor seqused_k = {};  // how many keys of each sequence count; absent: all
  ConstTensor page_table = {}; // if given, k and v are pools of pages; forward only

  ConstTensor k_scale = {}, v_scale = {}; // if given, k and v are quantised; forward only
  ConstTensor q_scale = {};               // if given, q is FP8 E4M3, and so are k and v, with scales
  int64_t k_scale_group = 0;              // 0: one scale for each key and head; else one for each column of this many rows of k

  int64_t block_q = 0, block_k = 0; // for block sparsity
  ConstTensor block_rows = {}, block_cols = {}, block_rows_t = {}, block_cols_t = {};
  ConstTensor block_full = {}, block_full_t = {}; // blocks that the mask's function sees as a whole

  std::optional<Part> part = {}; // absent: the whole problem

  std::optional<Function> score_function = {}, mask_function = {};
  ConstTensor captured_0 = {}, captured_1 = {}, captured_2 = {}, captured_3 = {}; // what the functions read
  ConstTensor captured_4 = {}, captured_5 = {}, captured_6 = {}, captured_7 = {};

  int64_t tile_q = 0, tile_k = 0;
  bool deterministic = false, exact_max = false, allow_tf32 = false, strict = false, check = false, invariant = false;
  std::string engine = {}; // empty: the engine with the least predicted time
};

struct Forward {
  Tensor out = {}, lse = {};
  Tensor max_logit = {}, column_sums = {}; // if given, the call takes another pass over the scores
};
// A gradient that is not given is not computed.
struct Backward {
  ConstTensor out = {}, lse = {}, dout = {}, dlse = {};
  ConstTensor delta = {};  // replaces out in a partial part
  bool accumulate = false; // adds to dq, dk and dv, which are then float32 (float64 if q is)
  Tensor dq = {}, dk = {}, dv = {}, dbias = {}, dsinks = {};
  Tensor dcaptured_0 = {}, dcaptured_1 = {}, dcaptured_2 = {}, dcaptured_3 = {}; // of what score_function reads
  Tensor dcaptured_4 = {}, dcaptured_5 = {}, dcaptured_6 = {}, dcaptured_7 = {};
};
// The direction of a derivative. A tangent that is not given is 0.
struct Tangents {
  ConstTensor tq = {}, tk = {}, tv = {}, tbias = {}, tsinks = {};
  ConstTensor tcaptured_0 = {}, tcaptured_1 = {}, tcaptured_2 = {}, tcaptured_3 = {};
  ConstTensor tcaptured_4 = {}, tcaptured_5 = {}, tcaptured_6 = {}, tcaptured_7 = {};
};
// out and lse are computed as well where given.
struct Jvp {
  Tangents in = {};
  Tensor tout = {}, tlse = {}, out = {}, lse = {};
};
// The gradients receive their derivatives.
struct BackwardJvp {
  Tangents in = {};
  ConstTensor tdout = {}, tdlse = {}, tout = {}, tlse = {};
  Backward of = {};
};

// How a call runs. By default the call starts as many threads as the process may run on, and allocates its workspace.
struct Execution {
  int32_t threads = 0;
  strobe_parallel parallel = nullptr;
  void *pool = nullptr;
  void *stream = nullptr;
  std::span<std::byte> workspace = {};
  int32_t reserved_sms = 0;                                     // multiprocessors of the GPU that are left for other work
  void *(*allocate)(void *allocator, uint64_t bytes) = nullptr; // provides the workspace if one is needed and `workspace` is empty
  void *allocator = nullptr;                                    // passed to allocate
};

namespace detail {

// Sets a member of a struct of strobe.h, for each row of fields.inc. Both types are the same, or they are one of these pairs.
template <class T> void put(T &to, const T &from, const char *) { to = from; }
template <std::same_as<bool> Flag> void put(int32_t &to, Flag from, const char *) { to = from; }
template <class Choice>
  requires std::is_enum_v<Choice>
void put(int32_t &to, Choice from, const char *) {
  to = static_cast<int32_t>(from);
}
inline void put(const char *&to, const std::string &from, const char *) { to = from.empty() ? nullptr : from.c_str(); }
inline void put(const strobe_tensor *&to, const ConstTensor &from, const char *name) { to = from.get(name); }

// The C struct. It may point into itself, so it is neither copied nor moved.
struct RawAttention : strobe_attention {
  explicit RawAttention(const Attention &a) : strobe_attention{} {
    size = sizeof(strobe_attention);
#define STROBE_OPTION(name) put(name, a.name);
#define STROBE_OPTIONAL(name) has_##name = a.name.has_value(), put(name, a.name.value_or(0));
#define STROBE_BACKWARD_MODE(name) // used further below
#define STROBE_RESERVED(name)
#include "strobe/fields.inc"
  }
  RawAttention(const Attention &a, const Forward &) : RawAttention(a) {}
  RawAttention(const Attention &a, const Jvp &) : RawAttention(a) {}
  RawAttention(const Attention &a, const BackwardJvp &b) : RawAttention(a, b.of) {}
  RawAttention(const Attention &a, const Backward &b) : RawAttention(a) {
#define STROBE_BACKWARD_MODE(name) put(name, b.name);
#include "strobe/fields.inc"
  }
  RawAttention(const RawAttention &) = delete;
  RawAttention &operator=(const RawAttention &) = delete;

private:
  template <class To, class From> static void put(To &to, const From &from) { detail::put(to, from, ""); }
  void put(const strobe_part *&to, const std::optional<Part> &from) {
    if (!from) return;
    own_part.size = sizeof own_part;
#define STROBE_PART(name) detail::put(own_part.name, from->name, "part." #name);
#define STROBE_PART_RESERVED(name)
#include "strobe/fields.inc"
    to = &own_part;
  }
  void put(const strobe_function *&to, const std::optional<Function> &from) {
    if (!from) return;
    strobe_function &own = &to == &score_function ? own_score : own_mask;
    own.size = sizeof own, own.nodes = from->nodes.data(), own.n_nodes = static_cast<int64_t>(from->nodes.size());
    to = &own;
  }

  strobe_part own_part{};
  strobe_function own_score{}, own_mask{};
};

inline strobe_tensors raw_inputs(const Attention &a) {
  strobe_tensors raw{};
  raw.size = sizeof raw;
#define STROBE_INPUT(name, place) put(raw.name, a.name, #name);
#include "strobe/fields.inc"
  return raw;
}

inline strobe_tensors raw(const Attention &a, const Forward &f) {
  strobe_tensors raw = raw_inputs(a);
#define STROBE_RESULT(name, place) put(raw.name, f.name, #name);
#define STROBE_FORWARD(name, place) put(raw.name, f.name, #name);
#include "strobe/fields.inc"
  return raw;
}

inline strobe_tensors raw(const Attention &a, const Backward &b) {
  strobe_tensors raw = raw_inputs(a);
#define STROBE_RESULT(name, place) put(raw.name, b.name, #name);
#define STROBE_BACKWARD(name, place) put(raw.name, b.name, #name);
#include "strobe/fields.inc"
  return raw;
}

inline void put_tangents(strobe_tensors &raw, const Tangents &t) {
#define STROBE_TANGENT(name, place) put(raw.name, t.name, #name);
#include "strobe/fields.inc"
}

inline strobe_tensors raw(const Attention &a, const Jvp &j) {
  strobe_tensors raw = raw_inputs(a);
  put_tangents(raw, j.in);
#define STROBE_RESULT(name, place) put(raw.name, j.name, #name);
#define STROBE_TRESULT(name, place) put(raw.name, j.name, #name);
#include "strobe/fields.inc"
  return raw;
}

inline strobe_tensors raw(const Attention &a, const BackwardJvp &b) {
  strobe_tensors raw = detail::raw(a, b.of);
  put_tangents(raw, b.in);
#define STROBE_TBACKWARD(name, place) put(raw.name, b.name, #name);
#define STROBE_TRESULT(name, place) put(raw.name, b.name, #name);
#include "strobe/fields.inc"
  return raw;
}

inline strobe_execution raw(const Execution &e) {
  strobe_execution raw{};
  raw.size = sizeof raw;
  raw.workspace = e.workspace.data(), raw.workspace_bytes = e.workspace.size();
#define STROBE_EXECUTION(name) put(raw.name, e.name, #name);
#define STROBE_WORKSPACE(name)
#include "strobe/fields.inc"
  return raw;
}

template <class T> inline constexpr int32_t direction_of = -1;
template <> inline constexpr int32_t direction_of<Forward> = STROBE_FORWARD;
template <> inline constexpr int32_t direction_of<Backward> = STROBE_BACKWARD;
template <> inline constexpr int32_t direction_of<Jvp> = STROBE_JVP;
template <> inline constexpr int32_t direction_of<BackwardJvp> = STROBE_BACKWARD_JVP;

template <class T>
concept Direction = direction_of<T> >= 0;

} // namespace detail

inline void forward(const Attention &attention, const Forward &results, const Execution &execution = {}) {
  const detail::RawAttention a(attention, results);
  const auto t = detail::raw(attention, results);
  const auto e = detail::raw(execution);
  detail::check(strobe_forward(&a, &t, &e));
}

inline void backward(const Attention &attention, const Backward &gradients, const Execution &execution = {}) {
  const detail::RawAttention a(attention, gradients);
  const auto t = detail::raw(attention, gradients);
  const auto e = detail::raw(execution);
  detail::check(strobe_backward(&a, &t, &e));
}

inline void jvp(const Attention &attention, const Jvp &derivatives, const Execution &execution = {}) {
  const detail::RawAttention a(attention, derivatives);
  const auto t = detail::raw(attention, derivatives);
  const auto e = detail::raw(execution);
  detail::check(strobe_jvp(&a, &t, &e));
}

inline void backward_jvp(const Attention &attention, const BackwardJvp &derivatives, const Execution &execution = {}) {
  const detail::RawAttention a(attention, derivatives);
  const auto t = detail::raw(attention, derivatives);
  const auto e = detail::raw(execution);
  detail::check(strobe_backward_jvp(&a, &t, &e));
}

// Reports what a call with these arguments would run.
template <detail::Direction D> strobe_plan plan(const Attention &attention, const D &direction, const Execution &execution = {}) {
  const detail::RawAttention a(attention, direction);
  const auto t = detail::raw(attention, direction);
  const auto e = detail::raw(execution);
  strobe_plan plan{};
  plan.size = sizeof plan;
  detail::check(strobe_make_plan(&a, &t, &e, detail::direction_of<D>, &plan));
  return plan;
}

template <detail::Direction D> uint64_t workspace_size(const Attention &attention, const D &direction, const Execution &execution = {}) {
  return plan(attention, direction, execution).workspace_bytes;
}

template <detail::Direction D> std::string explain(const Attention &attention, const D &direction, const Execution &execution = {}) {
  const detail::RawAttention a(attention, direction);
  const auto t = detail::raw(attention, direction);
  const auto e = detail::raw(execution);
  size_t needed = 0;
  detail::check(strobe_explain(&a, &t, &e, detail::direction_of<D>, nullptr, 0, &needed));
  std::string text(needed, '\0');
  detail::check(strobe_explain(&a, &t, &e, detail::direction_of<D>, text.data(), text.size(), nullptr));
  text.resize(needed - 1);
  return text;
}

// A call that is validated once and can run many times on other addresses (strobe_prepare). Several threads may run it at the same time.
class Prepared {
public:
  template <detail::Direction D> Prepared(const Attention &attention, const D &direction, const Execution &execution = {}) {
    const detail::RawAttention a(attention, direction);
    const auto t = detail::raw(attention, direction);
    const auto e = detail::raw(execution);
    strobe_prepared *made = nullptr;
    detail::check(strobe_prepare(&a, &t, &e, detail::direction_of<D>, &made));
    prepared.reset(made);
  }
  strobe_plan plan() const {
    strobe_plan plan{};
    plan.size = sizeof plan;
    detail::check(strobe_prepared_plan(prepared.get(), &plan));
    return plan;
  }
  // Runs the call on these addresses. Their `size` need not be set.
  void run(strobe_addresses addresses, const Execution &execution = {}) const {
    addresses.size = sizeof addresses;
    const auto e = detail::raw(execution);
    detail::check(strobe_run(prepared.get(), &addresses, &e));
  }

private:
  struct Release {
    void operator()(strobe_prepared *made) const { strobe_release(made); }
  };
  std::unique_ptr<strobe_prepared, Release> prepared;
};

// Writes keep, a bool (B,H,Sq,Sk): true where dropout keeps the element. Uses dropout, seed, offset and rng of the attention.
inline void dropout_mask(const Attention &attention, const Tensor &keep, const Execution &execution = {}) {
  const detail::RawAttention a(attention);
  const auto e = detail::raw(execution);
  detail::check(strobe_dropout_mask(&a, attention.rng.get("rng"), keep.get("keep"), &e));
}

struct EngineInfo {
  std::string name;
  std::optional<std::string> missing; // the reason why the engine cannot run on this machine
};
// The engines, each name once. An engine that has a form for each device can run if either form can.
inline std::vector<EngineInfo> engines() {
  std::vector<EngineInfo> list;
  for (int32_t i = 0; const char *name = strobe_engine_name(i); i++) {
    const char *missing = strobe_engine_missing(i);
    const EngineInfo form = {name, missing ? std::optional<std::string>(missing) : std::nullopt};
    const auto known = std::ranges::find(list, form.name, &EngineInfo::name);
    if (known == list.end())
      list.push_back(form);
    else if (known->missing)
      *known = form;
  }
  return list;
}

} // namespace api
} // namespace strobe

#endif
