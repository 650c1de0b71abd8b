#include "ladder/engine.h"

#include <algorithm>

#include "attention/work.h"
#include "ladder/flash1.h"
#include "ladder/flash2.h"
#include "ladder/naive.h"
#include "ladder/subset.h"

namespace strobe {
namespace ladder::cpu {
namespace {

constexpr int64_t kTile = 64; // Br and Bc if none is requested

template <class Algorithm> class Rung final : public Engine {
public:
  Rung(const char *name, const char *words) : name_(name), words_(words) {}
  const char *name() const override { return name_; }
  std::string missing() const override { return {}; }
  bool only_by_name() const override { return true; }

  Answer plan(const Problem &p, const Execution &execution, Operation operation) const override {
    if (p.dtype != DType::f32) return "float32 only";
    if (std::string reason = against(p); !reason.empty()) return reason;
    const TileSize size{p.wishes.tile_q ? p.wishes.tile_q : kTile, p.wishes.tile_k ? p.wishes.tile_k : kTile};
    Plan plan;
    plan.engine = name_;
    plan.kernel = words_;
    plan.tile_q = size.q, plan.tile_k = size.k;
    const int64_t threads = shares(p, size, execution, operation);
    plan.workspace_bytes =
        sizeof(float) * uint64_t(Algorithm::memory(p, operation) + threads * Algorithm::sram(size, p.head_dim, operation));
    plan.predicted_seconds = flops(p, operation) / (4e9 * double(execution.threads)); // no choice depends on this time
    return plan;
  }

  void run(const Problem &p, const Execution &execution, Operation operation, const Plan &plan, void *workspace) const override {
    const TileSize size{plan.tile_q, plan.tile_k};
    const int64_t items = Algorithm::items(p, size, operation), per_thread = Algorithm::sram(size, p.head_dim, operation);
    float *const memory = static_cast<float *>(workspace), *const srams = memory + Algorithm::memory(p, operation);
    const int32_t threads = shares(p, size, execution, operation);
    execution.run(threads, [&](int32_t thread) {
      for (int64_t item = thread; item < items; item += threads)
        (operation == Operation::forward ? Algorithm::forward : Algorithm::backward)(p, size, item, memory,
                                                                                     Sram(srams + thread * per_thread));
    });
  }

private:
  const char *name_, *words_;

  static int32_t shares(const Problem &p, const TileSize &size, const Execution &execution, Operation operation) {
    return int32_t(std::min<int64_t>(Algorithm::items(p, size, operation), execution.threads));
  }
};

} // namespace
} // namespace ladder::cpu

std::vector<const Engine *> cpu_ladder_engines() {
  using namespace ladder::cpu;
  static const Rung<Naive> naive("ladder-naive", "S and P in memory, FP32");
  static const Rung<Flash1> flash1("ladder-flash1", "FlashAttention-1, FP32");
  static const Rung<Flash2> flash2("ladder-flash2", "FlashAttention-2, FP32");
  return {&naive, &flash1, &flash2};
}

} // namespace strobe
