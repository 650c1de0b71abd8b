// Programs are made with marks. Each run replaces the marks by addresses.
#include "cuda/program/addresses.h"

#include <cstring>

#include "../../../kernels/sm90/arguments.h"
#include "cuda/driver/device.h"
#include "cuda/families/families.h"
#include "cuda/program/engine.h"
#include "surroundings.h"

using namespace strobe;
using namespace strobe::cuda;
using namespace strobe::cuda::test;

namespace {

constexpr uintptr_t kTensors = uintptr_t{1} << 40, kWorkspace = uintptr_t{1} << 46;

// Tensors without memory. They are not read.
struct OnGpu : Problem {
  Operation operation;
  uintptr_t placed = 0;

  OnGpu(Operation operation, DType type, int64_t length, int64_t dim) : operation(operation) {
    batch = 2, heads = 4, heads_kv = 2, seqlen_q = seqlen_k = length, head_dim = head_dim_v = dim, dtype = type, scale = 0.125;
    total_q = total_k = batch * length, device_type = STROBE_CUDA;
    for (View *x : {&q, &out}) *x = dense(type, heads, length, dim);
    for (View *x : {&k, &v}) *x = dense(type, heads_kv, length, dim);
    lse = dense(DType::f32, heads, length, 1);
    if (operation == Operation::forward) return;
    for (View *x : {&dout, &dq}) *x = dense(type, heads, length, dim);
    for (View *x : {&dk, &dv}) *x = dense(type, heads_kv, length, dim);
    dlse = dense(DType::f32, heads, length, 1);
  }
  View dense(DType type, int64_t heads, int64_t rows, int64_t columns) {
    View view;
    view.data = reinterpret_cast<char *>(kTensors + (++placed << 38)), view.dtype = type;
    view.stride[0] = heads * rows * columns, view.stride[1] = rows * columns, view.stride[2] = columns, view.stride[3] = 1;
    return view;
  }
  template <class T> void place(const T *&list) { list = reinterpret_cast<const T *>(kTensors + (++placed << 38)); }

  void every_option() {
    mask = dense(DType::boolean, heads, seqlen_q, seqlen_k), bias = dense(dtype, heads, seqlen_q, seqlen_k);
    alibi_slopes = dense(DType::f32, heads, 1, 1), sinks = dense(DType::f32, heads, 1, 1);
    dropout = 0.1, place(rng), place(seqused_k);
    if (operation == Operation::forward) max_logit = dense(DType::f32, heads, 1, 1), column_sums = dense(DType::f32, heads, seqlen_k, 1);
    if (operation == Operation::backward) dbias = dense(dtype, heads, seqlen_q, seqlen_k), dsinks = dense(DType::f32, heads, 1, 1);
  }
  void pack() {
    varlen = true, place(cu_seqlens_q), place(cu_seqlens_k);
    for (View *x : {&q, &k, &v, &out, &lse, &dout, &dlse, &dq, &dk, &dv}) x->stride[0] = 0;
  }
  void make_sparse() {
    blocks = {.present = true, .transposed = true, .block_q = 128, .block_k = 128};
    blocks.rows = blocks.cols = seqlen_q / 128, blocks.kept = blocks.rows;
    place(blocks.row_ptr), place(blocks.col), place(blocks.row_ptr_t), place(blocks.col_t);
  }
};

// The offsets of marks in a launch's arguments.
std::vector<size_t> marks_in(const std::byte *arguments, size_t bytes) {
  std::vector<size_t> marks;
  for (size_t at = 0; at + 8 <= bytes; at += 8) {
    uint64_t word;
    std::memcpy(&word, arguments + at, 8);
    if (word >> 48 == reinterpret_cast<uintptr_t>(workspace_mark()) >> 48) marks.push_back(at);
  }
  return marks;
}

// The engines that support the call on such a GPU. Checks that a run leaves no mark in the arguments of its kernels, nor in memory that it
// clears.
std::vector<std::string> bound(const OnGpu &call, int cc) {
  const Addresses addresses(call, reinterpret_cast<void *>(kWorkspace));
  std::vector<std::string> taken;
  for (const Engine *engine : cuda_engines()) {
    const Answer answer = static_cast<const CudaEngine *>(engine)->plan_on(described(cc), call, call.operation);
    const Plan *plan = std::get_if<Plan>(&answer);
    if (!plan) continue;
    taken.push_back(engine->name());
    CAPTURE(std::string(engine->name()));
    for (const Step &step : program_of(*plan).steps) {
      if (const Zero *zero = std::get_if<Zero>(&step)) {
        const uintptr_t begin = reinterpret_cast<uintptr_t>(addresses.of(zero->begin));
        CHECK(begin >= kWorkspace);
        CHECK(begin + zero->bytes <= kWorkspace + plan->workspace_bytes);
        continue;
      }
      const Launch &launch = std::get<Launch>(step);
      CAPTURE(std::string(launch.source->entry));
      CHECK(!marks_in(launch.arguments.data(), launch.arguments.size()).empty());
      alignas(64) std::byte arguments[Launch::kMostArguments];
      launch.bind(addresses, arguments);
      for (size_t at : marks_in(arguments, launch.arguments.size())) FAIL_CHECK("a mark at byte " << at);
    }
  }
  return taken;
}

using Names = std::vector<std::string>;

} // namespace

TEST_CASE("addresses: a mark tells tensors apart, keeps what lies behind it and whether it lies on 16 bytes") {
  int elements[64];
  Problem p;
  p.q.data = p.k.data = reinterpret_cast<char *>(elements), p.v.data = reinterpret_cast<char *>(elements + 1);
  p.q.dtype = p.k.dtype = p.v.dtype = DType::f32;
  const Problem made = marked(p);
  CHECK(made.q.data != made.k.data);
  CHECK(reinterpret_cast<uintptr_t>(made.q.data) % 16 == 0);
  CHECK((reinterpret_cast<uintptr_t>(made.v.data) % 16 == 0) == (reinterpret_cast<uintptr_t>(p.v.data) % 16 == 0));
  CHECK(made.out.data == nullptr);

  int others[64];
  Problem again = p;
  again.k.data = reinterpret_cast<char *>(others);
  const Addresses addresses(again, elements);
  CHECK(addresses.of(made.q.data) == p.q.data);
  CHECK(addresses.of(made.k.data) == others);
  CHECK(addresses.of(made.k.data + 12) == others + 3);
  CHECK(addresses.of(made.v.data) == p.v.data);
  Scratch scratch;
  CHECK(addresses.of(scratch.take<char>(1)) == elements);
  CHECK(addresses.of(scratch.take<char>(1)) == elements + 64);
  CHECK(scratch.bytes() == 512);
}

TEST_CASE("addresses: a run leaves no mark in the arguments of any kernel") {
  fake_cuda();
  for (Operation operation : {Operation::forward, Operation::backward}) {
    CAPTURE(int(operation));
    const Names half{"cuda-sm90", "cuda-mma", "cuda-simt"}, with_rung{"cuda-sm90", "cuda-mma", "cuda-simt", "ladder-tensor-cores"};
    for (int64_t length : {128, 4096}) { // few queries, so the keys are split
      OnGpu plain(operation, DType::bf16, length, 64);
      plain.dlse = {};
      CHECK(bound(plain, 90) == with_rung);
      plain.deterministic = true, plain.window_right = 0;
      CHECK(bound(plain, 90) == (operation == Operation::forward ? with_rung : half));
      OnGpu single(operation, DType::f32, length, 64);
      single.dlse = {};
      CHECK(bound(single, 90) == Names{"cuda-tf32", "cuda-simt", "ladder-naive", "ladder-flash1", "ladder-flash2"});
    }
    for (DType type : {DType::bf16, DType::f32})
      for (auto change : {&OnGpu::every_option, &OnGpu::pack, &OnGpu::make_sparse}) {
        OnGpu call(operation, type, 512, 64);
        (call.*change)();
        CHECK(bound(call, 90) == (type == DType::bf16 ? half : Names{"cuda-tf32", "cuda-simt"}));
      }
    OnGpu large(operation, DType::f16, 512, 256);
    CHECK(bound(large, 90) == (operation == Operation::forward ? with_rung : half));
    OnGpu precise(operation, DType::f64, 512, 64);
    CHECK(bound(precise, 70) == Names{"cuda-simt"});
  }
}

TEST_CASE("addresses: the copy engine's maps are those of the run's tensors") {
  fake_cuda();
  OnGpu call(Operation::forward, DType::bf16, 512, 64);
  const Answer answer = sm90_engine().plan_on(described(90), call, Operation::forward);
  const Launch &launch = std::get<Launch>(program_of(std::get<Plan>(answer)).steps.front());
  call.k.data += 4096;
  alignas(64) std::byte bytes[Launch::kMostArguments];
  launch.bind(Addresses(call, nullptr), bytes);
  HopperForwardArguments arguments;
  REQUIRE(launch.arguments.size() == sizeof arguments);
  std::memcpy(&arguments, bytes, sizeof arguments);
  for (const auto &[map, view] : {std::pair{arguments.tma_q.map, call.q}, {arguments.tma_k.map, call.k}, {arguments.tma_v.map, call.v}}) {
    CHECK(map.opaque[0] == reinterpret_cast<uint64_t>(view.data));
    CHECK(map.opaque[1] == 64);
    CHECK(map.opaque[2] == 512);
  }
  CHECK(arguments.tma_bias.map.opaque[0] == 0); // the call has no bias
}

TEST_CASE("a wish: blocks that are not to be persistent may have 64 keys, persistent ones have 128") {
  fake_cuda();
  OnGpu call(Operation::backward, DType::bf16, 512, 64);
  call.wishes.tile_k = 64;
  for (const auto &[wish, keys] : {std::pair{std::optional<bool>(), 64}, {std::optional(false), 64}, {std::optional(true), 128}}) {
    call.wishes.persistent = wish;
    const Answer answer = sm90_engine().plan_on(described(90), call, Operation::backward);
    CHECK(std::get<Plan>(answer).tile_k == keys);
  }
}
