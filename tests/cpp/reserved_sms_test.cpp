// Multiprocessors that are left for other work: which grids shrink by them, and which do not.
#include "call.h"
#include "cuda/driver/device.h"
#include "cuda/program/engine.h"
#include "engines.h"

using namespace strobe;
using namespace strobe::cuda;

namespace {

// A bf16 call that claims to lie on a GPU.
struct OnGpu : strobe::test::Call {
  OnGpu(int64_t queries, int64_t keys) {
    for (const char *name : {"q", "out"}) add(name, DType::bf16, {4, 8, queries, 64});
    for (const char *name : {"k", "v"}) add(name, DType::bf16, {4, 8, keys, 64});
    add("lse", DType::f32, {4, 8, queries});
    move_to_gpu();
    for (const char *name : {"q", "out", "k", "v", "lse"}) // these addresses are not read
      (*this)[name].data = reinterpret_cast<void *>((reinterpret_cast<uintptr_t>((*this)[name].data) + 255) / 256 * 256);
  }
};

Program made(const char *engine, OnGpu &call, int reserved) {
  Device device = described(90);
  device.sms -= reserved;
  for (const Engine *e : engines())
    if (e->name() == std::string(engine)) {
      const Answer answer = static_cast<const CudaEngine *>(e)->plan_on(device, call.validated(), call.operation);
      REQUIRE_MESSAGE(std::holds_alternative<Plan>(answer), std::get<std::string>(answer));
      return program_of(std::get<Plan>(answer));
    }
  FAIL("no such engine");
  return {};
}

int64_t grid(const Program &program) { return std::get<Launch>(program.steps.front()).grid; }

} // namespace

TEST_CASE("reserved_sms: a persistent grid is smaller by what the reserved ones would hold") {
  OnGpu call(4096, 4096);
  const Program whole = made("cuda-sm90", call, 0), rest = made("cuda-sm90", call, 20);
  CHECK(whole.persistent);
  CHECK(grid(whole) % 132 == 0);
  CHECK(grid(rest) == grid(whole) / 132 * 112);
}

TEST_CASE("reserved_sms: a block for each tile has no fewer blocks, and is not called persistent") {
  OnGpu call(4096, 4096);
  const Program whole = made("cuda-mma", call, 0), rest = made("cuda-mma", call, 20);
  CHECK(!whole.persistent);
  CHECK(grid(rest) == grid(whole));
}

TEST_CASE("reserved_sms: keys are shared out for the multiprocessors that are left") {
  OnGpu call(1, 1 << 15);
  CHECK(grid(made("cuda-mma", call, 100)) < grid(made("cuda-mma", call, 0)));
}
