#include "cuda/families/ladder.h"

#include <iterator>

#include "../../../kernels/ladder/arguments.h"
#include "../../../kernels/ladder/config.h"
#include "attention/text.h"
#include "cuda/families/families.h"
#include "cuda/program/arguments.h"
#include "ladder/subset.h"

namespace strobe::cuda {

template <class V> void each_pointer(const ladder::ProductArguments &a, V &visit) {
  each_pointer(a.in, visit);
  visit(a.scores), visit(a.x.data), visit(a.y.data), visit(a.out.data);
}
template <class V> void each_pointer(const ladder::SoftmaxArguments &a, V &visit) {
  each_pointer(a.in, visit);
  visit(a.P), visit(a.dP), visit(a.lse.data);
}
template <class V> void each_pointer(const ladder::Flash1Arguments &a, V &visit) {
  each_pointer(a.call, visit);
  visit(a.l), visit(a.m);
}

namespace {

using ladder::Config;

constexpr const char *kConfig = "strobe::ladder::Config";
const KernelSource scores{"ladder/naive_forward.h", "strobe::ladder::Scores", kConfig};
const KernelSource softmax{"ladder/naive_forward.h", "strobe::ladder::Softmax", kConfig};
const KernelSource product{"ladder/naive_forward.h", "strobe::ladder::Product", kConfig};
const KernelSource softmax_gradient{"ladder/naive_backward.h", "strobe::ladder::SoftmaxGradient", kConfig};
const KernelSource product_transposed{"ladder/naive_backward.h", "strobe::ladder::ProductTransposed", kConfig};
const KernelSource flash1_forward{"ladder/flash1_forward.h", "strobe::ladder::Flash1Forward", kConfig};
const KernelSource flash1_backward{"ladder/flash1_backward.h", "strobe::ladder::Flash1Backward", kConfig};
const KernelSource flash2_forward{"ladder/flash2_forward.h", "strobe::ladder::Flash2Forward", kConfig};
const KernelSource flash2_backward{"ladder/flash2_backward.h", "strobe::ladder::Flash2Backward", kConfig};
const KernelSource tensor_forward{"ladder/tensor_forward.h", "strobe::ladder::TensorForward", kConfig};
const KernelSource tensor_backward{"ladder/tensor_backward.h", "strobe::ladder::TensorBackward", kConfig};
const KernelSource delta{"ladder/delta.h", "strobe::ladder::Delta", kConfig};
const KernelSource store_dq{"ladder/delta.h", "strobe::ladder::StoreQueryGradient", kConfig};

constexpr int kRowThreads = 256; // for kernels with one warp per row

enum class Kind { naive, flash1, flash2, tensor_cores };

// What a CTA of the rung's largest kernel needs.
struct Needs {
  int64_t threads, shared_bytes, sums;
};

Needs needs(Kind kind, const Config &c, Operation operation) {
  if (kind == Kind::naive) {
    const int64_t shared = max(c.shared_scores(), max(c.shared_product(), c.shared_product_t()));
    return {.threads = 256, .shared_bytes = shared, .sums = c.sums_naive()};
  }
  if (operation == Operation::forward) return {c.threads_forward(), c.shared_forward(), c.sums_forward()};
  return {c.threads_backward(), c.shared_backward(), c.sums_backward()};
}

// The reason why a tile does not fit the device; empty if it does.
std::string too_large(Kind kind, const Config &c, Operation operation, const Device &device) {
  const Needs n = needs(kind, c, operation);
  const std::string tile = text("a tile of (", c.tile_q, ", ", c.tile_k, ") at head dimension ", c.head_dim);
  if (n.shared_bytes > device.shared_per_block)
    return text(tile, " takes ", n.shared_bytes, " bytes of shared memory; a thread block has ", device.shared_per_block);
  const int64_t registers = std::min<int64_t>(255, n.threads > 0 ? 65536 / n.threads : 0) / 8 * 8;
  if (n.threads > 1024 || n.sums + 64 > registers)
    return text(tile, " takes ", n.threads, " threads with ", n.sums, " sums each; the registers do not hold them");
  return {};
}

class Rung final : public CudaEngine {
public:
  Rung(const char *name, const char *words, Kind kind) : name_(name), words_(words), kind_(kind) {}
  const char *name() const override { return name_; }
  bool only_by_name() const override { return true; }

protected:
  Made program(const Problem &p, Operation operation, const Device &device, Scratch &scratch) const override {
    if (std::string reason = against(p, operation, device); !reason.empty()) return reason;
    Program made;
    Config c{};
    c.dtype = i32(p.dtype);
    const int64_t unit = kind_ == Kind::tensor_cores && p.head_dim > 128 ? 32 : 16;
    c.head_dim = i32((p.head_dim + unit - 1) / unit * unit);
    if (kind_ == Kind::tensor_cores)
      c.aligned = aligned(p.q, p.head_dim) && aligned(p.k, p.head_dim) && aligned(p.v, p.head_dim) && aligned(p.dout, p.head_dim);
    if (std::string reason = choose_tile(p, operation, device, c, made.notes); !reason.empty()) return reason;
    made.tile_q = c.tile_q, made.tile_k = c.tile_k;
    made.kernel = words_;
    made.predicted_seconds = predicted(p, operation, device);
    if (operation == Operation::forward)
      forward(p, c, scratch, made.steps);
    else
      backward(p, c, scratch, made.steps);
    return made;
  }

private:
  const char *name_, *words_;
  Kind kind_;

  std::string against(const Problem &p, Operation operation, const Device &device) const {
    if (kind_ == Kind::tensor_cores) {
      if (p.dtype != DType::f16 && p.dtype != DType::bf16) return "float16 and bfloat16 only";
      if (device.cc < 80) return "mma.sync m16n8k16 wants compute capability 8.0 or later";
    } else if (p.dtype != DType::f32) {
      return "float32 only";
    }
    if (std::string reason = ladder::against(p); !reason.empty()) return reason;
    if (p.deterministic && operation == Operation::backward && (kind_ == Kind::flash2 || kind_ == Kind::tensor_cores))
      return "not deterministic: dQ is summed by atomic additions, in whatever order the thread blocks come";
    return {};
  }

  // The requested tile, rounded up to multiples of 16, or else the first tile that fits. Returns the reason against the requested tile, or
  // an empty text.
  std::string choose_tile(const Problem &p, Operation operation, const Device &device, Config &c, std::vector<std::string> &notes) const {
    auto wished = [&notes](const char *what, int64_t wish) -> i32 {
      const int64_t rounded = (std::min<int64_t>(wish, 1 << 16) + 15) / 16 * 16;
      if (wish > 0 && rounded != wish) notes.push_back(text(what, " ", wish, " rounded to ", rounded, ": tiles are multiples of 16"));
      return i32(rounded);
    };
    const i32 wish_q = wished("tile_q", p.wishes.tile_q), wish_k = wished("tile_k", p.wishes.tile_k);
    static constexpr std::pair<i32, i32> kTiles[] = {{64, 64}, {64, 32}, {32, 32}, {32, 16}, {16, 16}};
    std::string reason;
    // Measured on an H200: the fastest tile of FlashAttention-2's forward is (64, 32), with which two CTAs share an SM.
    for (size_t i = kind_ == Kind::flash2 && operation == Operation::forward; i < std::size(kTiles); i++) {
      c.tile_q = wish_q ? wish_q : kTiles[i].first, c.tile_k = wish_k ? wish_k : kTiles[i].second;
      reason = too_large(kind_, c, operation, device);
      if (reason.empty()) break;
    }
    return reason;
  }

  double predicted(const Problem &p, Operation operation, const Device &device) const {
    const double products = operation == Operation::forward ? 4 : 10;
    const double flops = products * double(p.batch) * double(p.heads) * double(p.seqlen_q) * double(p.seqlen_k) * double(p.head_dim);
    return flops / (64 * device.sms * device.clock_hz); // a quarter of the FP32 peak; no choice depends on this time
  }

  void forward(const Problem &p, const Config &c, Scratch &scratch, std::vector<Step> &steps) const {
    ForwardArguments a = forward_arguments(p);
    const int64_t heads = p.batch * p.heads, rows = heads * p.seqlen_q, query_tiles = heads * tiles(p.seqlen_q, c.tile_q);
    switch (kind_) {
    case Kind::naive: {
      float *S = scratch.take<float>(rows * p.seqlen_k);
      softmax_of(a.in, a.lse, S, p, c, steps);
      steps.push_back(Launch(product, c, query_tiles, 256, c.shared_product(), ladder::ProductArguments{a.in, S, {}, a.in.v, a.out, 1}));
      break;
    }
    case Kind::flash1: {
      float *l = scratch.take<float>(rows), *m = scratch.take<float>(rows);
      steps.push_back(Launch(flash1_forward, c, heads, c.threads_forward(), c.shared_forward(), ladder::Flash1Arguments{a, l, m}));
      break;
    }
    case Kind::flash2:
    case Kind::tensor_cores:
      steps.push_back(
          Launch(kind_ == Kind::flash2 ? flash2_forward : tensor_forward, c, query_tiles, c.threads_forward(), c.shared_forward(), a));
    }
  }

  // scores is overwritten with S, and then with P.
  void softmax_of(const Inputs &in, const Operand &lse, float *S, const Problem &p, const Config &c, std::vector<Step> &steps) const {
    const int64_t heads = p.batch * p.heads;
    steps.push_back(Launch(scores, c, heads * tiles(p.seqlen_q, c.tile_q) * tiles(p.seqlen_k, c.tile_k), 256, c.shared_scores(),
                           ladder::ProductArguments{in, S, in.q, in.k, {}, 1}));
    steps.push_back(
        Launch(softmax, c, tiles(heads * p.seqlen_q, kRowThreads / 32), kRowThreads, 0, ladder::SoftmaxArguments{in, S, nullptr, lse}));
  }

  void backward(const Problem &p, const Config &c, Scratch &scratch, std::vector<Step> &steps) const {
    BackwardArguments a = backward_arguments(p);
    const int64_t heads = p.batch * p.heads, rows = heads * p.seqlen_q, row_ctas = tiles(rows, kRowThreads / 32);
    const int64_t query_tiles = heads * tiles(p.seqlen_q, c.tile_q), key_tiles = p.batch * p.heads_kv * tiles(p.seqlen_k, c.tile_k);
    // A gradient that was not asked for is written to the workspace.
    auto wanted = [&](Operand &gradient, int64_t heads, int64_t length) {
      if (gradient) return;
      const int64_t d = p.head_dim;
      gradient = {scratch.take<std::byte>(p.batch * heads * length * d * bytes(p.dtype)), {heads * length * d, length * d, d, 1}};
    };
    wanted(a.dq, p.heads, p.seqlen_q), wanted(a.dk, p.heads_kv, p.seqlen_k), wanted(a.dv, p.heads_kv, p.seqlen_k);
    switch (kind_) {
    case Kind::naive: {
      float *P = scratch.take<float>(rows * p.seqlen_k), *dP = scratch.take<float>(rows * p.seqlen_k);
      softmax_of(a.in, {}, P, p, c, steps);
      auto transposed = [&](float *matrix, const Operand &x, const Operand &out, double factor) {
        steps.push_back(Launch(product_transposed, c, key_tiles, 256, c.shared_product_t(),
                               ladder::ProductArguments{a.in, matrix, x, {}, out, factor}));
      };
      transposed(P, a.dout, a.dv, 1);
      steps.push_back(Launch(scores, c, query_tiles * tiles(p.seqlen_k, c.tile_k), 256, c.shared_scores(),
                             ladder::ProductArguments{a.in, dP, a.dout, a.in.v, {}, 1}));
      steps.push_back(Launch(softmax_gradient, c, row_ctas, kRowThreads, 0, ladder::SoftmaxArguments{a.in, P, dP, {}}));
      steps.push_back(
          Launch(product, c, query_tiles, 256, c.shared_product(), ladder::ProductArguments{a.in, dP, {}, a.in.k, a.dq, p.scale}));
      transposed(dP, a.in.q, a.dk, p.scale);
      break;
    }
    case Kind::flash1:
      steps.push_back(Launch(flash1_backward, c, p.batch * p.heads_kv, c.threads_backward(), c.shared_backward(), a));
      break;
    case Kind::flash2:
    case Kind::tensor_cores:
      a.delta = scratch.take<float>(rows);
      a.dq_sum = scratch.take<float>(rows * p.head_dim);
      steps.push_back(Zero{a.dq_sum, uint64_t(rows * p.head_dim) * sizeof(float)});
      steps.push_back(Launch(delta, c, row_ctas, kRowThreads, 0, a));
      steps.push_back(
          Launch(kind_ == Kind::flash2 ? flash2_backward : tensor_backward, c, key_tiles, c.threads_backward(), c.shared_backward(), a));
      steps.push_back(Launch(store_dq, c, row_ctas, kRowThreads, 0, a));
    }
  }
};

} // namespace
} // namespace strobe::cuda

namespace strobe {

std::vector<const Engine *> ladder_engines() {
  using cuda::Kind, cuda::Rung;
  static const Rung rungs[] = {{"ladder-naive", "S and P in memory, FP32", Kind::naive},
                               {"ladder-flash1", "FlashAttention-1, FP32", Kind::flash1},
                               {"ladder-flash2", "FlashAttention-2, FP32", Kind::flash2},
                               {"ladder-tensor-cores", "FlashAttention-2, mma.sync m16n8k16", Kind::tensor_cores}};
  std::vector<const Engine *> all;
  for (const Rung &rung : rungs) all.push_back(&rung);
  return all;
}

} // namespace strobe
