// Whole kernels, whose PTX a test writes.
#pragma once
#include <doctest/doctest.h>

#include "emulator.h"

namespace strobe::emulator::test {

// A kernel in which %rd0 is the address of `out`, %r0 the thread, %r1 the block. `more` comes before the kernel.
inline std::string kernel(const std::string &body, const std::string &more = "") {
  return ".version 8.0\n.target sm_90\n.address_size 64\n" + more +
         ".visible .entry kernel(.param .u64 kernel_param_0)\n{\n"
         ".reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<40>; .reg .f32 %f<9>; .reg .b64 %rd<20>; .reg .f64 %fd<9>;\n"
         "ld.param.u64 %rd0, [kernel_param_0];\nmov.u32 %r0, %tid.x;\nmov.u32 %r1, %ctaid.x;\n" +
         body + "\nret;\n}\n";
}

struct Shape {
  uint32_t threads = 32, blocks = 1;
  size_t shared = 0;
  Machine machine{};
};
inline std::vector<uint32_t> run(const std::string &ptx, const Shape &shape = {}) {
  std::vector<uint32_t> out(size_t(shape.threads) * shape.blocks + 16);
  const void *address = out.data();
  Launch launch{.block = {shape.threads, 1, 1}, .dynamic_shared = shape.shared, .arguments = &address};
  launch.grid[0] = shape.blocks;
  run(*parse(ptx), "kernel", launch, shape.machine);
  return out;
}
// Stores the value of %r9 after `body`, for every thread.
inline const std::string kStore =
    "\nmov.u32 %r30, %ntid.x; mad.lo.s32 %r30, %r30, %r1, %r0; mul.wide.u32 %rd19, %r30, 4; add.s64 %rd19, %rd0, %rd19;\n"
    "st.global.u32 [%rd19], %r9;";
inline std::vector<uint32_t> result(const std::string &body, const Shape &shape = {}, const std::string &more = "") {
  return run(kernel(body + kStore, more), shape);
}

inline void check_fault(const std::string &ptx, const char *words, const Shape &shape = {}) {
  std::string what;
  try {
    run(ptx, shape);
  } catch (const Fault &fault) {
    what = fault.what();
  }
  CAPTURE(what);
  CHECK(what.find(words) != what.npos);
  CHECK(what.find("PTX line ") != what.npos);
}

inline const std::string kShared = ".extern .shared .align 128 .b8 memory[];\n";

} // namespace strobe::emulator::test
