// Turns the structs of the C ABI into a Problem, or into all reasons against one.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "attention/contents.h"
#include "attention/options.h"
#include "attention/part.h"
#include "attention/tensor_check.h"
#include "attention/versioned.h"
#include "score/build.h"
#include "score/forms.h"

namespace strobe {
namespace {

constexpr int64_t kMaxHeadDim = 576, kMaxHeadDimV = 512, kScaleGroup = 32;
constexpr const char *kOracle = "reference"; // the engine whose results are float64
constexpr const char *kOneOfTwo = "given beside {0}; accepted is one of the two";

const Types kFloats = {DType::f32, DType::f16, DType::bf16, DType::f64}, kQuantised = {DType::i8, DType::e4m3, DType::e5m2, DType::i4x2};
const Types kEightBits = {DType::e4m3}, kOfEightBits = {DType::f16, DType::bf16}; // q with q_scale, and its out

int64_t div_up(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// Which axes of a tensor are its batch, head, row and column; -1: none.
using AxisMap = std::array<int, 4>;
constexpr AxisMap kDense = {0, 1, 2, 3}, kPacked = {-1, 1, 0, 2};             // q, and tensors with its axes
constexpr AxisMap kDenseRows = {0, 1, 2, -1}, kPackedRows = {-1, 0, 1, -1};   // lse
constexpr AxisMap kDensePairs = {1, 2, 3, -1}, kPackedPairs = {-1, 1, 2, -1}; // lse of a partial part
constexpr AxisMap kPackedScales = {-1, 1, 0, -1};                             // one scale for each row and head
constexpr AxisMap kHead = {-1, 0, -1, -1}, kBatchHead = {0, 1, -1, -1};       // sinks, max_logit
constexpr AxisMap kOne = {-1, -1, -1, -1};                                    // one number

View view(const strobe_tensor *t, const AxisMap &map) {
  View v;
  if (!t || std::count(t->shape, t->shape + t->rank, 0)) return v; // a tensor without elements counts as absent
  v.data = static_cast<char *>(t->data);
  v.dtype = static_cast<DType>(t->dtype);
  for (int a = 0; a < 4; a++)
    if (map[a] >= 0 && t->shape[map[a]] > 1) v.stride[a] = t->strides[map[a]];
  return v;
}

class Validator {
public:
  Validator(const strobe_attention *attention, const strobe_tensors *tensors, Operation operation)
      : a(read_versioned("attention", attention, reasons)), t(read_versioned("tensors", tensors, reasons)), operation(operation),
        backward(writes(operation, kGradients)), forward_mode(reads(operation, kTangents)),
        oracle(a.engine && std::strcmp(a.engine, kOracle) == 0), varlen(t.cu_seqlens_q || t.cu_seqlens_k), paged(t.page_table),
        quantised_q(t.q_scale), quantised(t.k_scale || t.v_scale || t.q_scale) {}

  Problem problem() {
    reasons.raise_if_any(); // without the structs, later reasons would mean nothing
    check_options(a, reasons);
    inputs();
    sequences();
    floats();
    scales();
    pages_in_pool();
    parts();
    extras();
    blocks();
    functions();
    if (forward_mode) tangents();
    results();
    check_overlaps(checks.placed(), reasons);
    reasons.raise_if_any();
    const Problem p = assembled();
    total_size(p);
    reasons.raise_if_any();
    return p;
  }

  const std::vector<Placed> &placed() const { return checks.placed(); }

private:
  // The sizes, each taken from the tensor that defines it. A size that cannot be determined is kAny, which no check refuses.
  struct Sizes {
    int64_t batch = kAny, heads = kAny, heads_kv = kAny, dim = kAny, dim_v = kAny;
    int64_t rows_q = kAny, rows_k = kAny;     // Sq, Sk; varlen: Tq, Tk
    int64_t seqlen_q = kAny, seqlen_k = kAny; // Sq, Sk; varlen: max_seqlen_q, max_seqlen_k
    int64_t max_q = 0, max_k = 0;             // the given max_seqlen_q, max_seqlen_k; 0: not given; kAny: refused
    int64_t size_q = kAny, size_k = kAny;     // seqlen_q, seqlen_k; in a part those of the whole problem's longest sequence
    int64_t blocks_q = kAny, blocks_k = kAny;
    int64_t pages = kAny, page_size = kAny, pages_each = kAny; // pages in the pool, keys per page, pages per sequence
  };

  Axes queries(Axis width) const {
    if (varlen) return {{"Tq", n.rows_q}, {"H", n.heads}, width};
    return {{"B", n.batch}, {"H", n.heads}, {"Sq", n.rows_q}, width};
  }
  Axes keys(Axis width) const {
    if (paged) return {{"pages", n.pages}, {"Hkv", n.heads_kv}, {"page", n.page_size}, width};
    if (varlen) return {{"Tk", n.rows_k}, {"Hkv", n.heads_kv}, width};
    return {{"B", n.batch}, {"Hkv", n.heads_kv}, {"Sk", n.rows_k}, width};
  }
  Axes query_rows() const {
    if (varlen) return {{"H", n.heads}, {"Tq", n.rows_q}};
    return {{"B", n.batch}, {"H", n.heads}, {"Sq", n.rows_q}};
  }
  Axes key_columns() const {
    if (packed_k()) return {{"H", n.heads}, {"Tk", n.rows_k}};
    return {{"B", n.batch}, {"H", n.heads}, {"Sk", n.rows_k}};
  }
  Axes scores() const {
    return {{"B", n.batch, true},
            {"H", n.heads, true},
            {varlen && part ? "the most queries of a sequence"
             : varlen       ? "max_seqlen_q"
                            : "Sq",
             n.seqlen_q, true},
            {part         ? "Sk of the whole problem"
             : packed_k() ? "max_seqlen_k"
             : paged      ? "Sk, the keys of all pages of a sequence"
                          : "Sk",
             n.size_k, true}};
  }
  // The axes of LSE. With a partial part, LSE is two numbers per row.
  Axes lse_rows() const {
    Axes rows = query_rows();
    if (part && part->partial) rows.insert(rows.begin(), {"two numbers", 2});
    return rows;
  }

  bool accept(const char *argument, const strobe_tensor *tensor, const Axes &axes, const Types &types, Access access = Access::read) {
    return tensor && checks.accept(argument, *tensor, axes, types, access);
  }
  bool accept_list(const char *argument, const strobe_tensor *tensor, const Axes &axes, const Types &types) {
    return tensor && checks.accept_list(argument, *tensor, axes, types);
  }
  bool require(const char *argument, const strobe_tensor *tensor, const Axes &axes, const Types &types, Access access = Access::read) {
    if (!tensor) reasons.add(argument, Code::missing, "missing; accepted is a tensor");
    return accept(argument, tensor, axes, types, access);
  }
  // Refuses a tensor that is given without the tensor that it needs. Returns whether both are given.
  bool beside(const char *argument, const strobe_tensor *tensor, const char *other, const strobe_tensor *needed) {
    if (tensor && !needed) reasons.add(argument, Code::excluded, "given without {0}; accepted is both, or {0} alone", Argument{other});
    return tensor && needed;
  }

  // The dtypes that k and v may have. Two INT4 are one element.
  Types key_types() const { return quantised_q ? kEightBits : quantised ? kQuantised : input_types(); }
  static int64_t columns_each(const strobe_tensor *x) { return x && x->dtype == STROBE_UINT8 ? 2 : 1; }
  // Whether the keys are tokens in consecutive rows.
  bool packed_k() const { return varlen && !paged; }
  Types input_types() const { return dtype == DType::none ? kFloats : Types{dtype}; }
  Types result_types() const { return oracle ? Types{DType::f64} : quantised_q ? kOfEightBits : input_types(); }
  bool partial() const { return part && part->partial; }
  Types statistics_types() const { // of numbers per row or per head, and of sums over several calls
    if (dtype == DType::none && !oracle) return {DType::f32, DType::f64};
    return {oracle || dtype == DType::f64 ? DType::f64 : DType::f32};
  }

  // Checks q, k and v, which define the sizes.
  void inputs() {
    const int32_t rank = varlen ? 3 : 4, row = varlen ? 0 : 2, rank_k = packed_k() ? 3 : 4, row_k = packed_k() ? 0 : 2;
    auto width = [&](const char *argument, int64_t size, int64_t most = kMaxHeadDim) {
      if (size >= 1 && size <= most) return size;
      reasons.add(argument, Code::head_dim, "head dimension {0}; accepted is 1 to {1}", size, most);
      return kAny;
    };
    if (t.q) checks.on_device_of(*t.q, "q");
    require("q", t.q, queries({"D"}), quantised_q ? kEightBits : kFloats);
    if (TensorChecks::has_rank(t.q, rank)) {
      if (!varlen) n.batch = t.q->shape[0];
      n.heads = t.q->shape[1], n.rows_q = t.q->shape[row], n.dim = width("q", t.q->shape[rank - 1]);
      if (n.heads < 1) reasons.add("q", Code::heads, "{0} heads; accepted is 1 or more", n.heads);
    }
    const Types &of_results = quantised_q ? kOfEightBits : kFloats;
    if (const strobe_tensor *x = quantised_q ? t.out : t.q;
        x && std::count(of_results.begin(), of_results.end(), static_cast<DType>(x->dtype)))
      dtype = static_cast<DType>(x->dtype);

    const int64_t each_k = columns_each(t.k), each_v = columns_each(t.v);
    if (each_k > 1 && n.dim > 0 && n.dim % each_k)
      reasons.add("k", Code::head_dim, "dtype uint8, which holds two columns, and {0} has {1}; accepted is an even D", Argument{"q"},
                  n.dim);
    else
      require("k", t.k, keys({each_k > 1 ? "D/2" : "D", n.dim > 0 ? n.dim / each_k : n.dim}), key_types());
    if (TensorChecks::has_rank(t.k, rank_k)) {
      if (n.dim == kAny) width("k", t.k->shape[rank_k - 1] * each_k);
      n.heads_kv = t.k->shape[1];
      (paged ? n.page_size : n.rows_k) = t.k->shape[row_k];
      if (paged) n.pages = t.k->shape[0];
      if (n.page_size == 0) reasons.add("k", Code::shape, "pages of 0 keys; accepted is 1 or more"), n.page_size = kAny;
      if (n.heads > 0 && (n.heads_kv < 1 || n.heads % n.heads_kv)) wrong_heads();
    }
    Types types = key_types();
    if (quantised && t.k && std::count(types.begin(), types.end(), static_cast<DType>(t.k->dtype)))
      types = {static_cast<DType>(t.k->dtype)};
    require("v", t.v, keys({each_v > 1 ? "Dv/2" : "Dv"}), types);
    if (TensorChecks::has_rank(t.v, rank_k)) n.dim_v = width("v", t.v->shape[rank_k - 1] * each_v, kMaxHeadDimV);
  }

  void wrong_heads() {
    const Argument q = {"q"};
    if (!paged)
      return reasons.add("k", Code::heads, "{0} heads for the {1} of {2}; accepted are the divisors of {1}", n.heads_kv, n.heads, q);
    reasons.add("k", Code::heads, "{0} heads for the {1} of {2}; accepted are the divisors of {1}, on the {3} axis of {4}", n.heads_kv,
                n.heads, q, AxisOf{1}, Axes{{"pages"}, {"Hkv"}, {"page size"}, {"D"}});
  }

  void sequences() {
    if (t.cu_seqlens_q && t.cu_seqlens_q->rank == 1 && t.cu_seqlens_q->shape[0] > 0) n.batch = t.cu_seqlens_q->shape[0] - 1;
    if (paged) pages();
    n.max_q = maximum("max_seqlen_q", a.max_seqlen_q, varlen), n.max_k = maximum("max_seqlen_k", a.max_seqlen_k, packed_k());
    const Longest q("max_seqlen_q", n.max_q, n.rows_q), k("max_seqlen_k", n.max_k, n.rows_k);
    n.seqlen_q = q.tokens, n.seqlen_k = k.tokens;
    if (varlen) good_cu_q = cu_seqlens("cu_seqlens_q", t.cu_seqlens_q, n.rows_q, q);
    if (!packed_k()) return seqused(nullptr, true);
    const bool good_k = good_cu_k = cu_seqlens("cu_seqlens_k", t.cu_seqlens_k, n.rows_k, k);
    seqused(good_k ? ints(t.cu_seqlens_k) : nullptr, good_k);
  }
  // Checks the scales of quantised k and v. The scale of a row has the row's index, in the tensor or in the page.
  void scales() {
    const int64_t group = a.k_scale_group;
    if (!quantised) {
      if (group) reasons.add("k_scale_group", Code::excluded, "{0} without {1}; accepted is {2}", group, Argument{"k_scale"}, Absent{"0"});
      return;
    }
    constexpr const char *both = "missing beside {0}; accepted is both, or neither";
    if (!t.k_scale) reasons.add("k_scale", Code::missing, both, Argument{t.v_scale ? "v_scale" : "q_scale"});
    if (!t.v_scale) reasons.add("v_scale", Code::missing, both, Argument{t.k_scale ? "k_scale" : "q_scale"});
    const char *const given = t.k_scale ? "k_scale" : t.v_scale ? "v_scale" : "q_scale";
    if (backward) reasons.add(given, Code::excluded, "given in a backward; accepted is none: quantised keys have no gradients");
    if (a.part) reasons.add(given, Code::excluded, kOneOfTwo, Argument{"part"});
    if (dtype == DType::f64)
      reasons.add("q", Code::dtype, "dtype {0} beside {2}; accepted is {1}", dtype, Types{DType::f32, DType::f16, DType::bf16},
                  Argument{"k_scale"});
    const bool good = group >= 0 && group % kScaleGroup == 0 && group <= INT32_MAX;
    if (!good)
      reasons.add("k_scale_group", Code::value, "{0}; accepted are the multiples of {1} below 2^31, and {2} for a scale for each key",
                  group, kScaleGroup, Absent{"0"});
    const Types types = {DType::f16, DType::f32};
    const Axes rows = scale_rows();
    accept("v_scale", t.v_scale, scale_axes(t.v_scale), types);
    accept("q_scale", t.q_scale, query_scale_axes(), types);
    if (!good) return;
    Axes of_k = group ? rows : scale_axes(t.k_scale);
    if (group) {
      Axis &axis = of_k[packed_k() ? 0 : 2];
      axis = {"rows of k / k_scale_group", axis.size == kAny ? kAny : div_up(axis.size, group)};
      of_k.push_back({"D", n.dim});
    }
    accept("k_scale", t.k_scale, of_k, types);
  }
  // The accepted axes of scales that are not by column: one number, one for each head, or one for each key and head.
  Axes scale_axes(const strobe_tensor *scale) const {
    if (scale && scale->rank == 0) return {};
    if (scale && scale->rank == 1) return {{"Hkv", n.heads_kv, true}};
    return scale_rows();
  }
  Axes query_scale_axes() const {
    if (t.q_scale && t.q_scale->rank == 0) return {};
    if (t.q_scale && t.q_scale->rank == 1) return {{"H", n.heads, true}};
    Axes axes = queries({"D"});
    axes.pop_back();
    return axes;
  }
  // The axes of a view of scales.
  static const AxisMap &scale_map(const strobe_tensor *scale, bool packed) {
    return scale->rank == 0 ? kOne : scale->rank == 1 ? kHead : packed ? kPackedScales : kDenseRows;
  }
  Axes scale_rows() const {
    Axes axes = keys({"D"});
    axes.pop_back();
    return axes;
  }
  // The length of the longest sequence, if the caller gives it. 0: not given; kAny: refused.
  int64_t maximum(const char *field, int64_t given, bool packed) {
    if (!packed && given != 0)
      reasons.add(field, Code::excluded, paged && varlen ? "{0} beside {2}; accepted is {1}" : "{0} without cu_seqlens; accepted is {1}",
                  given, Absent{"0"}, Argument{"page_table"});
    if (packed && (given < 0 || given > INT32_MAX)) {
      reasons.add(field, Code::value, "{0}; accepted is 0 (the number of tokens) to {1}", given, INT32_MAX);
      return kAny;
    }
    return packed ? given : 0;
  }
  // Checks the page table. Sk is the number of keys for which a row of the table has entries.
  void pages() {
    if (backward) reasons.add("page_table", Code::excluded, "given in a backward; accepted is none: keys in pages have no gradients");
    if (t.cu_seqlens_k)
      reasons.add("cu_seqlens_k", Code::excluded, "given beside {0}; accepted is {1} alone, for {2} and {3} are not packed",
                  Argument{"page_table"}, Argument{"cu_seqlens_q"}, Argument{"k"}, Argument{"v"});
    if (a.part) reasons.add("page_table", Code::excluded, kOneOfTwo, Argument{"part"});
    if (!accept_list("page_table", t.page_table, {{"B", n.batch}, {"pages of a sequence"}}, list_types(t.page_table)) ||
        n.page_size == kAny)
      return;
    n.pages_each = t.page_table->shape[1];
    if (__builtin_mul_overflow(n.pages_each, n.page_size, &n.rows_k) || n.rows_k > INT32_MAX) {
      reasons.add("page_table", Code::size, "room for {0} pages of {1} keys; accepted are up to {2} keys", n.pages_each, n.page_size,
                  INT32_MAX);
      n.rows_k = kAny;
    }
  }
  // Checks cu_seqlens. Returns whether its integers are in host memory and right.
  bool cu_seqlens(const char *argument, const strobe_tensor *cu, int64_t rows, Longest most) {
    if (!cu) {
      reasons.add(argument, Code::missing, "missing; accepted is {0} and {1}, or neither", Argument{"cu_seqlens_q"},
                  Argument{"cu_seqlens_k"});
    } else if (cu->rank == 1 && cu->shape[0] == 0) {
      reasons.add(argument, Code::shape, "shape {0}; accepted is {1}, which is 1 or more", Numbers{cu->shape, 1}, Axes{{"B+1"}});
    } else if (accept_list(argument, cu, {{"B+1", n.batch == kAny ? kAny : n.batch + 1}}, list_types(cu))) {
      return on_cpu(*cu) && rows != kAny && most.tokens != kAny &&
             adds_none([&] { check_cu_seqlens(argument, lists->ints(*cu), cu->shape[0] - 1, rows, most, reasons); });
    }
    return false;
  }
  // Checks seqused_k. cu: the cu_seqlens of the keys, if they are packed. comparable: whether the lengths are known.
  void seqused(const int32_t *cu, bool comparable) {
    const strobe_tensor *used = t.seqused_k;
    if (!accept_list("seqused_k", used, {{"B", n.batch}}, list_types(used))) return;
    if (on_cpu(*used) && comparable && n.batch != kAny && n.rows_k != kAny)
      good_used = adds_none([&] { check_seqused(lists->ints(*used), n.batch, cu, n.rows_k, paged, reasons); });
  }
  // Checks the entries of a page table in host memory, for keys that count.
  void pages_in_pool() {
    if (!paged || n.rows_k == kAny || n.pages == kAny || n.batch == kAny || !on_cpu(*t.page_table) || (t.seqused_k && !good_used)) return;
    const PageTable table{n.batch, n.pages_each, n.page_size, n.pages, lists->ints(*t.page_table)};
    check_pages(table, t.seqused_k ? ints(t.seqused_k) : nullptr, reasons);
  }

  // Refuses large factors. Engines compute 16 and 32 bits in float32, where such a factor, or its product with log2(e), would be infinite.
  void floats() {
    if (!oracle && dtype != DType::f64 && dtype != DType::none) score::check_range(a, dtype, reasons);
  }

  // Checks the part: which rows, heads and sequences of a larger problem the call has.
  void parts() {
    n.size_q = n.seqlen_q, n.size_k = n.seqlen_k;
    if (!a.part) return;
    part = check_part(*a.part, n.batch, n.heads, reasons);
    if (!part) return reasons.raise_if_any(); // without the part, later reasons would mean nothing
    if (t.seqused_k)
      reasons.add("seqused_k", Code::excluded, "given beside part; accepted is part alone, whose ranges and seqlens_k say it");
    if (part->partial && t.sinks)
      reasons.add("sinks", Code::excluded, "given with a partial part; accepted are none: they join the whole row once, in the last merge");
    if (a.invariant)
      reasons.add("invariant", Code::excluded, "given beside part; accepted is one of the two: tiles of keys begin where its ranges do");
    for (auto [name, result] : {std::pair{"max_logit", t.max_logit}, {"column_sums", t.column_sums}})
      if (result && operation == Operation::forward)
        reasons.add(name, Code::excluded, "given beside part; accepted is one of the two: it belongs to whole rows and columns");
    whole("max_seqlen_q", a.max_seqlen_q, part->most_q), whole("max_seqlen_k", a.max_seqlen_k, part->most_k);
    n.size_q = part->most_q, n.size_k = part->most_k;
    if (n.batch == kAny || n.rows_q == kAny || n.rows_k == kAny) return;
    if (!varlen || good_cu_q)
      check_held("part.q_ranges", part->q, part->batch_q, part->count_q, n.batch, varlen ? ints(t.cu_seqlens_q) : nullptr, n.rows_q,
                 reasons);
    if (!varlen || good_cu_k)
      check_held("part.k_ranges", part->k, part->batch_k, part->count_k, n.batch, varlen ? ints(t.cu_seqlens_k) : nullptr, n.rows_k,
                 reasons);
    if (!varlen) return;
    n.seqlen_q = most_held(part->q, part->batch_q, part->count_q);
    n.seqlen_k = most_held(part->k, part->batch_k, part->count_k);
  }
  // For packed sequences, max_seqlen also bounds the whole sequences.
  void whole(const char *field, int64_t given, int64_t &most) {
    if (!varlen || given <= 0) return;
    if (given < most)
      reasons.add(field, Code::value, "{0}; accepted beside part is {1} or more, the longest of the whole sequences", given, most);
    most = given;
  }

  void extras() {
    if (t.mask) accept("mask", t.mask, scores(), {DType::boolean});
    if (t.bias) {
      Types bias = input_types();
      if (dtype == DType::f16 || dtype == DType::bf16) bias.push_back(DType::f32);
      good_bias = accept("bias", t.bias, scores(), bias);
    }
    if (t.alibi_slopes)
      accept("alibi_slopes", t.alibi_slopes, t.alibi_slopes->rank == 2 ? Axes{{"B", n.batch}, {"H", n.heads}} : Axes{{"H", n.heads}},
             {DType::f32});
    if (t.sinks)
      good_sinks = accept("sinks", t.sinks, {{"H", n.heads}}, dtype == DType::none ? Types{DType::f32, DType::f64} : Types{sink_type()});
    if (t.rng) accept("rng", t.rng, {{"seed and offset", 2}}, {DType::i64});
  }
  DType sink_type() const { return dtype == DType::f64 ? DType::f64 : DType::f32; }

  // Checks the caller's functions and the tensors that they read.
  void functions() {
    score::CapturedTensors all{}, tangents{};
    score::Wanted wanted;
    size_t count = 0;
#define STROBE_CAPTURED(name, place) all[count++] = t.name;
#include "strobe/fields.inc"
    for (size_t n = 0; n < count; n++)
      if (all[n]) score::check_captured_tensor(int32_t(n), *all[n], checks, reasons);
    if (backward) {
      count = 0;
#define STROBE_DCAPTURED(name, place) wanted.gradients[count++] = t.name;
#include "strobe/fields.inc"
      for (size_t n = 0; n < count; n++) score::check_gradient(int32_t(n), wanted.gradients[n], all[n], oracle, checks, reasons);
    }
    if (forward_mode) {
      count = 0;
#define STROBE_TCAPTURED(name, place) tangents[count++] = t.name;
#include "strobe/fields.inc"
      for (size_t n = 0; n < count; n++) score::check_tangent(int32_t(n), tangents[n], all[n], checks, reasons);
      wanted.tangents = &tangents;
    }
    score::AlibiSlopes slopes;
    if (t.alibi_slopes) slopes.rank = t.alibi_slopes->rank == 2 ? 2 : 1;
    if (slopes.rank && part) slopes.in_part = true, slopes.first_batch = part->first_batch, slopes.first_head = part->first_head;
    programs = score::make_programs(a, all, wanted, reasons, slopes);
  }

  void blocks() {
    if (!t.block_rows) {
      for (auto [field, size] : {std::pair{"block_q", a.block_q}, std::pair{"block_k", a.block_k}})
        if (size) reasons.add(field, Code::excluded, "{0} without {1}; accepted is {2}", size, Argument{"block_rows"}, Absent{"0"});
      beside("block_cols", t.block_cols, "block_rows", t.block_rows);
      beside("block_rows_t", t.block_rows_t, "block_rows", t.block_rows);
      beside("block_cols_t", t.block_cols_t, "block_rows", t.block_rows);
      beside("block_full", t.block_full, "block_rows", t.block_rows);
      beside("block_full_t", t.block_full_t, "block_rows", t.block_rows);
      return;
    }
    full_blocks();
    n.blocks_q = block_count("block_q", a.block_q, n.size_q);
    n.blocks_k = block_count("block_k", a.block_k, n.size_k);
    Csr m{}, mt{};
    const Axis batch_axis = part ? Axis{"B of the whole problem", sequences_of_blocks(), true} : Axis{"B", n.batch, true};
    const Axis head_axis = part ? Axis{"H of the whole problem", part->heads, true} : Axis{"H", n.heads, true};
    const bool good = csr("block_rows", t.block_rows, {batch_axis, head_axis, {"nq+1", plus_one(n.blocks_q)}}, "block_cols", t.block_cols,
                          kAny, n.blocks_k, m);
    if (!t.block_rows_t) {
      beside("block_cols_t", t.block_cols_t, "block_rows_t", t.block_rows_t);
      return;
    }
    const Axis batch = good ? Axis{"B of block_rows", t.block_rows->shape[0]} : batch_axis;
    const Axis heads = good ? Axis{"H of block_rows", t.block_rows->shape[1]} : head_axis;
    const bool good_t = csr("block_rows_t", t.block_rows_t, {batch, heads, {"nk+1", plus_one(n.blocks_k)}}, "block_cols_t", t.block_cols_t,
                            good ? m.kept : kAny, n.blocks_q, mt);
    if (good && good_t && on_cpu(*t.block_rows)) check_transpose("block_rows_t", m, mt, reasons);
  }
  // Which blocks the mask's function sees as a whole.
  void full_blocks() {
    const int64_t kept = t.block_cols && t.block_cols->rank == 1 ? t.block_cols->shape[0] : kAny;
    if (t.block_full && !a.mask_function)
      reasons.add("block_full", Code::excluded, "given without {0}; accepted is both, or neither", Argument{"mask_function"});
    if (t.block_full && t.block_rows_t && !t.block_full_t)
      reasons.add("block_full_t", Code::missing, "missing; accepted is a tensor beside {0} and {1}", Argument{"block_full"},
                  Argument{"block_rows_t"});
    accept_list("block_full", t.block_full, {{"kept", kept}}, {DType::i32});
    if (beside("block_full_t", t.block_full_t, "block_full", t.block_full) &&
        beside("block_full_t", t.block_full_t, "block_rows_t", t.block_rows_t))
      accept_list("block_full_t", t.block_full_t, {{"kept", kept}}, {DType::i32});
  }
  // The batch size of a block mask that differs between sequences. It is the whole problem's, which is not known here. The part's last
  // sequence gives a lower bound.
  int64_t sequences_of_blocks() const {
    if (n.batch == kAny || !t.block_rows || t.block_rows->rank < 1) return kAny;
    return std::max(part->first_batch + n.batch, t.block_rows->shape[0]);
  }
  static int64_t plus_one(int64_t size) { return size == kAny ? kAny : size + 1; }
  int64_t block_count(const char *field, int64_t block, int64_t seqlen) {
    constexpr int64_t most = 1 << 30;
    if (block < 16 || block > most || block % 16) {
      reasons.add(field, Code::value, "{0}; accepted are the multiples of 16 up to {1} beside {2}", block, most, Argument{"block_rows"});
      return kAny;
    }
    return seqlen == kAny ? kAny : div_up(seqlen, block);
  }
  // Whether the CSR may be walked: its shapes and, in host memory, its contents are right.
  bool csr(const char *rows_argument, const strobe_tensor *rows, const Axes &axes, const char *cols_argument, const strobe_tensor *cols,
           int64_t kept, int64_t bound, Csr &m) {
    const bool good_rows = accept_list(rows_argument, rows, axes, {DType::i32});
    if (!cols) reasons.add(cols_argument, Code::missing, "missing; accepted is a tensor");
    const bool good_cols = accept_list(cols_argument, cols, {{"kept", kept}}, {DType::i32});
    if (!good_rows || !good_cols || bound == kAny || axes[2].size == kAny) return false;
    m = {rows->shape[0] * rows->shape[1], rows->shape[2] - 1, bound, cols->shape[0], ints(rows), ints(cols)};
    if (!on_cpu(*rows)) return true;
    return adds_none([&] { check_offsets(rows_argument, m, reasons); }) && adds_none([&] { check_indices(cols_argument, m, reasons); });
  }

  // Checks the tangents of the inputs.
  void tangents() {
    constexpr const char *none = "given for a {0}; accepted is none: {1} have no derivatives";
    if (paged) reasons.add("page_table", Code::excluded, none, name(operation), "keys in pages");
    if (quantised) reasons.add("k_scale", Code::excluded, none, name(operation), "quantised keys");
    if (partial())
      reasons.add("part", Code::excluded, "partial for a {0}; accepted is a part that holds all keys of its queries", name(operation));
    if (a.accumulate) reasons.add("accumulate", Code::excluded, "1 for a {0}; accepted is 0", name(operation));
    accept("tq", t.tq, queries({"D", n.dim}), input_types());
    accept("tk", t.tk, keys({"D", n.dim}), input_types());
    accept("tv", t.tv, keys({"Dv", n.dim_v}), input_types());
    if (beside("tbias", t.tbias, "bias", t.bias) && good_bias) like("tbias", *t.tbias, *t.bias, {"B", "H", "Sq", "Sk"}, Access::read);
    if (beside("tsinks", t.tsinks, "sinks", t.sinks) && good_sinks) like("tsinks", *t.tsinks, *t.sinks, {"H"}, Access::read);
  }

  void results() {
    const Types either = {DType::f32, DType::f64};
    if (operation == Operation::jvp) {
      require("tout", t.tout, queries({"Dv", n.dim_v}), result_types(), Access::write);
      accept("tlse", t.tlse, lse_rows(), statistics_types(), Access::write);
      accept("out", t.out, queries({"Dv", n.dim_v}), result_types(), Access::write);
      accept("lse", t.lse, lse_rows(), statistics_types(), Access::write);
      return;
    }
    if (!backward) {
      require("out", t.out, queries({"Dv", n.dim_v}), partial() ? statistics_types() : result_types(), Access::write);
      accept("lse", t.lse, lse_rows(), statistics_types(), Access::write);
      accept("max_logit", t.max_logit, {{"B", n.batch}, {"H", n.heads}}, statistics_types(), Access::write);
      if (beside("column_sums", t.column_sums, "lse", t.lse))
        accept("column_sums", t.column_sums, key_columns(), statistics_types(), Access::write);
      return;
    }
    if (partial()) {
      require("lse", t.lse, lse_rows(), oracle ? either : statistics_types());
      require("delta", t.delta, query_rows(), oracle ? either : statistics_types());
    } else { // the oracle needs neither out nor lse: it can compute both itself
      if (!oracle || t.out) require("out", t.out, queries({"Dv", n.dim_v}), result_types());
      if (!oracle || t.lse) require("lse", t.lse, query_rows(), statistics_types());
      if (t.delta) reasons.add("delta", Code::excluded, "given without a partial part; accepted is {0} alone", Argument{"out"});
    }
    Types dout = input_types();
    if (oracle && !std::count(dout.begin(), dout.end(), DType::f64)) dout.push_back(DType::f64);
    require("dout", t.dout, queries({"Dv", n.dim_v}), dout);
    accept("dlse", t.dlse, query_rows(), oracle ? either : statistics_types());
    if (forward_mode) { // the oracle computes tout and tlse itself, as it does out and lse
      if (!oracle || t.tout) require("tout", t.tout, queries({"Dv", n.dim_v}), result_types());
      if (!oracle || t.tlse) require("tlse", t.tlse, query_rows(), statistics_types());
      accept("tdout", t.tdout, queries({"Dv", n.dim_v}), dout);
      accept("tdlse", t.tdlse, query_rows(), oracle ? either : statistics_types());
    }

    Types gradients = partial() || a.accumulate ? statistics_types() : result_types();
    if (oracle && a.accumulate && dtype != DType::f64) gradients = either; // types that other engines add to, and the oracle's own
    accept("dq", t.dq, queries({"D", n.dim}), gradients, Access::write);
    accept("dk", t.dk, keys({"D", n.dim}), gradients, Access::write);
    accept("dv", t.dv, keys({"Dv", n.dim_v}), gradients, Access::write);
    if (beside("dbias", t.dbias, "bias", t.bias) && good_bias) like("dbias", *t.dbias, *t.bias, {"B", "H", "Sq", "Sk"}, Access::write);
    if (beside("dsinks", t.dsinks, "sinks", t.sinks) && good_sinks) like("dsinks", *t.dsinks, *t.sinks, {"H"}, Access::write);
  }
  // Checks a gradient or a tangent of an input.
  void like(const char *argument, const strobe_tensor &gradient, const strobe_tensor &of, std::initializer_list<const char *> symbols,
            Access access) {
    Axes axes;
    for (const char *symbol : symbols) axes.push_back({symbol, of.shape[axes.size()]});
    accept(argument, &gradient, axes, {oracle && access == Access::write ? DType::f64 : static_cast<DType>(of.dtype)}, access);
  }

  // Bounds the sizes. Strides of 0 allow any size, but engines count a workspace's bytes, up to 2^20 per row, in 64 bits. For packed
  // sequences, engines keep rows only for the tokens, but count as many tiles for each sequence as the longest one has.
  void total_size(const Problem &p) {
    if (!packed_k()) {
      if (product_below(40, {n.batch, n.heads}, {n.seqlen_q, n.seqlen_k})) return;
      reasons.add("q", Code::size,
                  "batch {0}, heads {1}, lengths {2} and {3} are more than engines count; accepted is B * H * (Sq + Sk) below 2^40",
                  n.batch, n.heads, n.seqlen_q, n.seqlen_k);
    } else if (!product_below(40, {n.heads}, {n.rows_q, n.rows_k, n.batch})) {
      reasons.add("q", Code::size,
                  "heads {0}, tokens {1} and {2}, sequences {3} are more than engines count; accepted is H * (Tq + Tk + B) below 2^40",
                  n.heads, n.rows_q, n.rows_k, n.batch);
    } else if (!product_below(58, {n.batch, n.heads}, {p.longest_q(), p.longest_k()})) {
      reasons.add(
          "q", Code::size,
          "sequences {0}, heads {1}, lengths of up to {2} and {3} are more than engines count; accepted is B * H * ({4} + {5}) below "
          "2^58",
          n.batch, n.heads, p.longest_q(), p.longest_k(), Argument{"max_seqlen_q"}, Argument{"max_seqlen_k"});
    }
  }
  // Whether the product of the sum of the addends and of all factors that are at least 1 is below 2^bits.
  static bool product_below(int bits, std::initializer_list<int64_t> factors, std::initializer_list<int64_t> addends) {
    int64_t count = 0;
    for (int64_t x : addends)
      if (__builtin_add_overflow(count, x, &count)) return false;
    for (int64_t x : factors)
      if (__builtin_mul_overflow(count, std::max<int64_t>(x, 1), &count)) return false;
    return count < int64_t{1} << bits;
  }

  // The integers of an accepted tensor. Those in host memory are the call's own copy, without gaps.
  const int32_t *ints(const strobe_tensor *tensor) const {
    if (!tensor) return nullptr;
    if (!tensor->data || !on_cpu(*tensor)) return static_cast<const int32_t *>(tensor->data);
    return lists->ints(*tensor).narrow();
  }
  // The types that lists of lengths and pages may have. 64 bits are accepted only in host memory, where the checked list is copied to 32
  // bits.
  static Types list_types(const strobe_tensor *list) { return list && on_cpu(*list) ? Types{DType::i32, DType::i64} : Types{DType::i32}; }
  static bool on_cpu(const strobe_tensor &tensor) { return tensor.device_type == STROBE_CPU; }
  // Whether the check adds no reason.
  template <class Check> bool adds_none(Check &&check) {
    const size_t before = reasons.size();
    check();
    return reasons.size() == before;
  }

  Problem assembled() const {
    Problem p;
    p.lists = lists;
    p.batch = n.batch, p.heads = n.heads, p.heads_kv = n.heads_kv, p.head_dim = n.dim, p.head_dim_v = n.dim_v;
    p.seqlen_q = n.seqlen_q, p.seqlen_k = n.seqlen_k, p.max_seqlen_q = n.max_q, p.max_seqlen_k = n.max_k, p.varlen = varlen;
    p.total_q = varlen ? n.rows_q : n.batch * n.rows_q, p.total_k = packed_k() ? n.rows_k : n.batch * n.rows_k;
    p.dtype = quantised_q && oracle ? DType::f64 : dtype, p.quantised_as = quantised ? static_cast<DType>(t.k->dtype) : DType::none,
    p.device_type = t.q->device_type, p.device_index = t.q->device_index;

    p.scale = a.has_scale ? a.scale : a.score == STROBE_HYPERBOLIC ? 1 : 1 / std::sqrt(static_cast<double>(n.dim));
    p.bottom_right = a.alignment == STROBE_BOTTOM_RIGHT;
    const int64_t all = n.size_q + n.size_k; // a window this wide hides nothing
    if (a.has_window_left && a.window_left < all) p.window_left = a.window_left;
    if (a.has_window_right && a.window_right < all) p.window_right = a.window_right;
    if (a.causal) p.window_right = 0;
    p.dropout = a.dropout, p.seed = a.seed, p.offset = a.offset;
    p.wishes.tile_q = a.tile_q, p.wishes.tile_k = a.tile_k;
    p.wishes.engine = a.engine ? a.engine : "";
#define STROBE_MODE(name) p.name = a.name;
#define STROBE_BACKWARD_MODE(name) p.name = backward && a.name;
#include "strobe/fields.inc"

    const AxisMap &tokens = varlen ? kPacked : kDense, &rows = varlen ? kPackedRows : kDenseRows;
    p.q = view(t.q, tokens), p.k = view(t.k, packed_k() ? kPacked : kDense), p.v = view(t.v, packed_k() ? kPacked : kDense);
    if (quantised) {
      static_cast<View &>(p.v_scale) = view(t.v_scale, scale_map(t.v_scale, packed_k()));
      static_cast<View &>(p.k_scale) = view(t.k_scale, !a.k_scale_group ? scale_map(t.k_scale, packed_k()) : packed_k() ? kPacked : kDense);
      if (a.k_scale_group) p.k_scale.rows = a.k_scale_group;
    }
    if (quantised_q) static_cast<View &>(p.q_scale) = view(t.q_scale, scale_map(t.q_scale, varlen));
    if (paged) {
      p.page_size = n.page_size, p.pages = n.pages, p.pages_each = p.page_table_row = n.pages_each;
      for (View *x : {&p.k, &p.v, static_cast<View *>(&p.k_scale), static_cast<View *>(&p.v_scale)})
        x->page_size = n.page_size, x->pages_each = n.pages_each;
      p.set_page_table(ints(t.page_table));
    }
    p.mask = view(t.mask, kDense), p.bias = view(t.bias, kDense);
    p.sinks = view(t.sinks, kHead);
    p.cu_seqlens_q = ints(t.cu_seqlens_q), p.cu_seqlens_k = ints(t.cu_seqlens_k), p.seqused_k = ints(t.seqused_k);
    if (varlen && !part && on_cpu(*t.q)) { // if the caller gives a maximum, plans do not depend on the lengths
      if (!a.max_seqlen_q) p.most_q = 0;
      if (!a.max_seqlen_k && !paged) p.most_k = 0;
      update_longest(p);
    }
    if (t.rng) p.rng = on_cpu(*t.rng) ? lists->copy<int64_t>(*t.rng) : static_cast<const int64_t *>(t.rng->data);
    if (t.block_rows) p.blocks = kept_blocks();
    p.forms = forms();
    p.program = programs.program, p.captured[score::kSlopesRead] = score::captured_of(t.alibi_slopes);
#define STROBE_CAPTURED(name, place) p.place = score::captured_of(t.name);
#include "strobe/fields.inc"
    if (part) p.part = *part;
    p.out = view(t.out, tokens);
    p.lse = view(t.lse, !partial() ? rows : varlen ? kPackedPairs : kDensePairs);
    if (partial() && p.lse) p.lse_low = t.lse->strides[0];
    if (operation == Operation::forward)
      p.max_logit = view(t.max_logit, kBatchHead), p.column_sums = view(t.column_sums, packed_k() ? kPackedRows : kDenseRows);
    if (backward) {
      p.dout = view(t.dout, tokens), p.dlse = view(t.dlse, rows), p.delta = view(t.delta, rows);
      p.dq = view(t.dq, tokens), p.dk = view(t.dk, tokens), p.dv = view(t.dv, tokens);
      p.dbias = view(t.dbias, kDense), p.dsinks = view(t.dsinks, kHead);
#define STROBE_DCAPTURED(name, place) p.place = score::captured_of(t.name);
#include "strobe/fields.inc"
      p.gradient_program = programs.gradients;
    }
    if (forward_mode) {
      p.tq = view(t.tq, tokens), p.tk = view(t.tk, packed_k() ? kPacked : kDense), p.tv = view(t.tv, packed_k() ? kPacked : kDense);
      p.tbias = view(t.tbias, kDense), p.tsinks = view(t.tsinks, kHead);
      p.tout = view(t.tout, tokens), p.tlse = view(t.tlse, rows);
      if (backward) p.tdout = view(t.tdout, tokens), p.tdlse = view(t.tdlse, rows);
#define STROBE_TCAPTURED(name, place) p.place = score::captured_of(t.name);
#include "strobe/fields.inc"
      p.tangent_program = programs.tangents;
    }
    return p;
  }

  std::shared_ptr<const ListForms> forms() const {
    const strobe_tensor *const given[] = {
#define STROBE_LIST(name, place) t.name,
#include "strobe/fields.inc"
    };
    if (std::count(std::begin(given), std::end(given), nullptr) == ListForms::kCount) return nullptr;
    const auto forms = std::make_shared<ListForms>();
    for (int n = 0; n < ListForms::kCount; n++)
      if (given[n]) forms->of[n] = *given[n];
    return forms;
  }
  Problem::Blocks kept_blocks() const {
    static const int32_t nothing = 0; // replaces the null pointers of a CSR that keeps no block
    auto columns = [this](const strobe_tensor *cols) { return cols && !cols->data ? &nothing : ints(cols); };
    Problem::Blocks blocks;
    blocks.present = true, blocks.transposed = t.block_rows_t != nullptr;
    blocks.block_q = a.block_q, blocks.block_k = a.block_k;
    blocks.rows = n.blocks_q, blocks.cols = n.blocks_k, blocks.kept = t.block_cols->shape[0];
    blocks.batch = t.block_rows->shape[0], blocks.heads = t.block_rows->shape[1];
    blocks.row_ptr = ints(t.block_rows), blocks.col = columns(t.block_cols);
    blocks.row_ptr_t = ints(t.block_rows_t), blocks.col_t = columns(t.block_cols_t);
    blocks.full = columns(t.block_full), blocks.full_t = columns(t.block_full_t);
    return blocks;
  }

  Reasons reasons;
  const strobe_attention a;
  const strobe_tensors t;
  const Operation operation;
  const bool backward, forward_mode, oracle, varlen, paged, quantised_q, quantised; // forward_mode: in the direction of tangents
  TensorChecks checks{reasons};
  const std::shared_ptr<OwnLists> lists = std::make_shared<OwnLists>();
  Sizes n;
  DType dtype = DType::none;
  bool good_used = false, good_cu_q = false, good_cu_k = false, good_bias = false, good_sinks = false;
  std::optional<Problem::Part> part;
  score::Programs programs;
};

} // namespace

Problem validate(const strobe_attention *attention, const strobe_tensors *tensors, Operation operation, std::vector<Placed> *placed) {
  Validator validator(attention, tensors, operation);
  const Problem problem = validator.problem();
  if (placed) *placed = validator.placed();
  return problem;
}

} // namespace strobe
