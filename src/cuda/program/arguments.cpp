#include "cuda/program/arguments.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "../../../kernels/attention/dropout.h"
#include "attention/text.h"
#include "cuda/program/part.h"
#include "score/cuda_source.h"

namespace strobe::cuda {
namespace {

i64 side(int64_t window) { return window == kUnbounded ? Band::kFar : window; }

BlockList list(const int32_t *offsets, const int32_t *indices, const Problem &p, int64_t rows, int64_t row_tokens, int64_t column_tokens) {
  const Problem::Blocks &m = p.blocks;
  const Problem::Part &part = p.part;
  const i64 head = m.heads > 1 ? rows + 1 : 0, batch = m.batch > 1 ? m.heads * (rows + 1) : 0;
  if (offsets) offsets += part.first_batch * batch + part.first_head * head; // an empty list may have no address
  return {offsets, indices, m.kept, rows, batch, head, row_tokens, column_tokens};
}

Pages pages(const Problem &p) {
  if (!p.page_size) return {};
  const uint32_t size = uint32_t(std::min<int64_t>(p.page_size, INT32_MAX));
  return {.table = p.page_table(),
          .row = uint32_t(p.page_table_row),
          .count = uint32_t(std::min<int64_t>(p.pages, int64_t{1} << 31)),
          .size = Divisor::make(size),
          .shift = std::has_single_bit(size) ? std::countr_zero(size) : -1};
}

// What kernels compute by their own code beside the rest of the score: all of ALiBi's option, and a function of the caller that is ALiBi
// and one of their forms; null: nothing. With invariant a function's penalty would depend on where a tile begins; gradients of captured
// tensors need the LSE of the general form.
const score::Penalty *penalty_of(const Problem &p) {
  if (!p.program || p.program->penalty.slope < 0) return nullptr;
  if (p.program->penalty.is_option) return &p.program->penalty;
  if (p.invariant || p.gradient_program) return nullptr;
  if (p.dtype != DType::f16 && p.dtype != DType::bf16) return nullptr; // nothing corrects a large LSE's rounding beside a penalty
  return &p.program->penalty;
}
i32 penalty_bits(const Problem &p) {
  const score::Penalty *own = penalty_of(p);
  return !own ? 0 : kDistance | (own->has_sign ? kSigned : 0) | (own->counts_offset ? 0 : kFromZero);
}
// The form of the score that kernels have code for.
const score::BuiltIn &form_of(const Problem &p) {
  static constexpr score::BuiltIn none{};
  const score::Penalty *own = penalty_of(p);
  return own ? own->rest : p.program ? *p.program : none;
}
std::shared_ptr<const score::CudaFunctions> gradient_functions(const Problem &p) {
  if (p.cuda_gradient_functions) return p.cuda_gradient_functions;
  return std::make_shared<const score::CudaFunctions>(p, function_of(p) >= kProgram, penalty_of(p), p.gradient_program);
}
// Whether kernels call functions of the caller.
bool calls_functions(const Problem &p) { return p.program && p.program->is_given(); }
std::shared_ptr<const score::CudaFunctions> functions(const Problem &p) {
  if (p.cuda_functions) return p.cuda_functions;
  return std::make_shared<const score::CudaFunctions>(p, function_of(p) >= kProgram, penalty_of(p));
}

Inputs inputs(const Problem &p) {
  Inputs in{};
  in.q = operand(p.q), in.k = operand(p.k), in.v = operand(p.v);
  in.mask = operand(p.mask), in.bias = operand(p.bias), in.sinks = operand(p.sinks);
  in.cu_seqlens_q = p.cu_seqlens_q, in.cu_seqlens_k = p.cu_seqlens_k;
  in.seqused_k = p.seqused_k, in.pages = pages(p), in.part = static_cast<const PartTable *>(p.part.table);
  in.seqlen_q = p.seqlen_q, in.seqlen_k = p.seqlen_k, in.total_q = p.total_q, in.total_k = p.total_k;
  in.left = side(p.window_left), in.right = side(p.window_right);
  in.batch = i32(p.batch), in.heads = i32(p.heads), in.heads_kv = i32(p.heads_kv), in.group = i32(p.group());
  in.head_dim = i32(p.head_dim), in.head_dim_v = i32(p.head_dim_v);
  in.bottom_right = p.bottom_right;
  in.threshold = dropout_threshold(p.dropout);
  in.scale = p.scale;
  const score::BuiltIn &form = form_of(p);
  in.cap = form.cap, in.beta = form.beta, in.shift = form.shift;
  if (calls_functions(p))
    in.function = functions(p)->arguments(p.ahead), in.function.full = p.blocks.full, in.function.full_t = p.blocks.full_t;
  in.seed = p.seed, in.offset = p.offset, in.rng = reinterpret_cast<const i64 *>(p.rng);
  const Problem::Blocks &m = p.blocks; // in a part: those of the whole problem, from the part's first sequence and head on
  if (m.present) in.blocks = list(m.row_ptr, m.col, p, m.rows, m.block_q, m.block_k);
  if (m.transposed) in.blocks_t = list(m.row_ptr_t, m.col_t, p, m.cols, m.block_k, m.block_q);
  return in;
}

} // namespace

Operand operand(const View &view) {
  Operand o{};
  if (!view) return o;
  o.data = view.data;
  for (int a = 0; a < 4; a++) o.stride[a] = view.stride[a];
  return o;
}

i32 function_of(const Problem &p) {
  switch (form_of(p).form) {
  case score::Form::softcap:
    return kCapped;
  case score::Form::hyperbolic:
    return kHyperbolic;
  case score::Form::general:
    return score::only_adds(*p.program, penalty_of(p)) ? kAdded : kProgram;
  default:
    return kLinear;
  }
}

const char *score_in_words(const Problem &p) {
  switch (function_of(p)) {
  case kLinear:
    return "no function of the score";
  case kCapped:
    return "a softcap";
  case kHyperbolic:
    return "a hyperbolic score";
  default:
    return "a function of the score";
  }
}

void make_functions(Problem &p) {
  if (calls_functions(p)) p.cuda_functions = functions(p);
  if (p.gradient_program) p.cuda_gradient_functions = gradient_functions(p);
}

Inputs all_inputs(const Problem &p) { return inputs(p); }

std::string functions_source(const Problem &p) { return functions(p)->source(); }

bool fetches_ahead(const Problem &p) { return calls_functions(p) && functions(p)->fetchable(); }
int32_t function_instructions(const Problem &p) { return calls_functions(p) ? functions(p)->instructions() : 0; }

Features features_of(const Problem &p) {
  Features f{};
  f.band = p.window_left != kUnbounded || p.window_right != kUnbounded;
  f.blocks = p.blocks.present;
  f.mask = bool(p.mask);
  f.bias = p.bias ? i32(p.bias.dtype) : 0;
  f.penalty = penalty_bits(p);
  f.function = function_of(p);
  f.scaled = f.function == kHyperbolic ? p.scale != 1 : !(p.scale > 1e-30 && p.scale <= kMostScale);
  f.dropout = p.dropout > 0;
  f.pages = p.page_size > 0, f.seqused = p.seqused_k && !f.pages;
  f.part = !p.part ? 0 : begins_aligned(p) ? kAligned : kAnywhere;
  f.partial = p.part.partial;
  f.adds = p.accumulate;
  f.quant = i32(p.quantised_as), f.by_column = p.scaled_by_channel();
  if (!calls_functions(p)) return f;
  f.seen = p.program->seen >= 0;
  if (f.blocks && f.seen && p.blocks.full && !f.part && !f.pages) f.blocks = kFullKnown;
  const std::array<int32_t, 2> digest = functions(p)->digest();
  f.program = digest[0], f.program_high = digest[1];
  return f;
}

Features gradient_features(const Problem &p) {
  Features f = features_of(p);
  const std::array<int32_t, 2> digest = gradient_functions(p)->digest();
  f.program = digest[0], f.program_high = digest[1];
  return f;
}
std::string gradient_functions_source(const Problem &p) { return gradient_functions(p)->source(); }
int32_t gradient_instructions(const Problem &p) { return gradient_functions(p)->instructions(); }
FunctionArguments gradient_function_arguments(const Problem &p) { return gradient_functions(p)->arguments(); }

std::string outsized_scale(const Problem &p) {
  if (function_of(p) == kHyperbolic || std::abs(p.scale) <= kMostScale) return {};
  return text("takes a scale of up to ", kMostScale, " in size, not ", p.scale);
}

ForwardArguments forward_arguments(const Problem &p) {
  ForwardArguments a{};
  a.in = inputs(p);
  a.out = operand(p.out), a.lse = operand(p.lse);
  a.splits = 1;
  return a;
}

BackwardArguments backward_arguments(const Problem &p) {
  BackwardArguments a{};
  a.in = inputs(p);
  a.out = operand(p.out), a.given_delta = operand(p.delta), a.lse = operand(p.lse), a.dout = operand(p.dout), a.dlse = operand(p.dlse);
  a.dq = operand(p.dq), a.dk = operand(p.dk), a.dv = operand(p.dv);
  a.dbias = operand(p.dbias), a.dsinks = operand(p.dsinks);
  a.deterministic = p.deterministic;
  a.natural_lse = features_of(p).unbounded();
  return a;
}

AuxiliaryArguments auxiliary_arguments(const Problem &p) {
  AuxiliaryArguments a{};
  a.in = inputs(p);
  a.lse = operand(p.lse), a.max_logit = operand(p.max_logit), a.column_sums = operand(p.column_sums);
  return a;
}

KeyScales key_scales(const Problem &p) {
  KeyScales s{};
  s.k = operand(p.k_scale), s.v = operand(p.v_scale), s.q = operand(p.q_scale);
  s.group = i32(std::min<int64_t>(p.k_scale.rows, INT32_MAX));
  s.half_k = p.k_scale.dtype == DType::f16, s.half_v = p.v_scale.dtype == DType::f16, s.half_q = p.q_scale.dtype == DType::f16;
  return s;
}

bool aligned_keys(const Problem &p) { return aligned(p.k, p.stored(p.head_dim)) && aligned(p.v, p.stored(p.head_dim_v)); }

bool aligned(const View &view, int64_t row_elements) {
  if (!view) return true;
  const int64_t unit = 16 / bytes(view.dtype);
  if (reinterpret_cast<uintptr_t>(view.data) % 16 || row_elements % unit) return false;
  for (int a = 0; a < 3; a++)
    if (view.stride[a] % unit) return false;
  return view.stride[3] == 1 || row_elements == 1;
}

bool aligned(std::initializer_list<const View *> views, int64_t row_elements) {
  return std::ranges::all_of(views, [row_elements](const View *view) { return aligned(*view, row_elements); });
}

bool aligned_backward(const Problem &p) {
  return aligned({&p.q, &p.k, &p.dq, &p.dk}, p.head_dim) && aligned({&p.v, &p.out, &p.dout, &p.dv}, p.head_dim_v);
}

} // namespace strobe::cuda
