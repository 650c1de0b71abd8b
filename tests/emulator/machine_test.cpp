// Whole kernels: single instructions, lanes that diverge and converge, barriers, blocks that wait for blocks, and illegal programs.
#include <bit>
#include <cstdint>

#include "whole_kernel.h"

using namespace strobe::emulator;
using namespace strobe::emulator::test;

namespace {

uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }

} // namespace

TEST_CASE("emulator: integers at their edges") {
  const struct {
    const char *body;
    uint32_t want;
  } cases[] = {
      {"mov.u32 %r2, -1; shl.b32 %r9, %r2, 32;", 0},
      {"mov.u32 %r2, -5; shr.s32 %r9, %r2, 99;", ~0u},
      {"mov.u32 %r2, -5; shr.u32 %r9, %r2, 30;", 3},
      {"mov.u32 %r2, -7; div.s32 %r9, %r2, 2;", uint32_t(-3)},
      {"mov.u32 %r2, -7; rem.s32 %r9, %r2, 2;", uint32_t(-1)},
      {"mov.u32 %r2, 2147483648; mul.lo.s32 %r9, %r2, 3;", 0x80000000},
      {"mov.u32 %r2, -2; mul.wide.s32 %rd1, %r2, 3; shr.u64 %rd1, %rd1, 32; cvt.u32.u64 %r9, %rd1;", ~0u},
      {"mov.u32 %r2, -2; mul.wide.u32 %rd1, %r2, 3; shr.u64 %rd1, %rd1, 32; cvt.u32.u64 %r9, %rd1;", 2},
      {"mov.u64 %rd1, -1; mul.hi.u64 %rd2, %rd1, 8; cvt.u32.u64 %r9, %rd2;", 7},
      {"mov.u64 %rd1, -1; mul.hi.s64 %rd2, %rd1, 8; cvt.u32.u64 %r9, %rd2;", ~0u},
      {"mov.u32 %r2, 0xABCD; mov.u32 %r3, -1; bfi.b32 %r9, %r2, %r3, 8, 12;", 0xFFFBCDFF},
      {"mov.u32 %r2, 0xF0; mov.u32 %r3, 0xCC; mov.u32 %r4, 0xAA; lop3.b32 %r9, %r2, %r3, %r4, 0x6A;", 0x6A}, // a & b ^ c
      {"mov.u32 %r2, 0x33221100; mov.u32 %r3, 0x77665584; prmt.b32 %r9, %r2, %r3, 0xC074;", 0xFF007784},
      {"mov.u32 %r2, 0x10000; clz.b32 %r9, %r2;", 15},
      {"mov.u64 %rd1, 4294967168; cvt.s64.s32 %rd2, %rd1; shr.s64 %rd2, %rd2, 40; cvt.u32.u64 %r9, %rd2;", ~0u},
      {"mov.u32 %r2, 0x1F0; cvt.s32.s8 %r9, %r2;", uint32_t(-16)},
      {"mov.u16 %rs1, -2; shr.u16 %rs2, %rs1, 4; cvt.u32.u16 %r9, %rs2;", 0xFFF},
      {"mov.b64 %rd1, {7, 8}; mov.b64 {_, %r9}, %rd1;", 8},
      {"setp.lt.s32 %p1, -1, 0; setp.lt.u32 %p2, -1, 0; not.pred %p2, %p2; and.pred %p1, %p1, %p2; selp.b32 %r9, 5, 6, %p1;", 5},
  };
  for (const auto &c : cases) {
    CAPTURE(c.body);
    CHECK(result(c.body)[31] == c.want);
  }
}

TEST_CASE("emulator: floats, rounded and not a number") {
  const struct {
    const char *body;
    uint32_t want;
  } cases[] = {
      {"max.f32 %f1, 0f7FFFFFFF, 0fBF800000; mov.b32 %r9, %f1;", bits(-1)},
      {"max.NaN.f32 %f1, 0f7FFFFFFF, 0fBF800000; mov.b32 %r9, %f1;", 0x7FFFFFFF},
      {"min.f32 %f1, 0f80000000, 0f00000000; mov.b32 %r9, %f1;", 0x80000000},
      {"setp.geu.f32 %p1, 0f7FFFFFFF, 0f00000000; selp.u32 %r9, 1, 0, %p1;", 1},
      {"setp.ne.f32 %p1, 0f7FFFFFFF, 0f00000000; selp.u32 %r9, 1, 0, %p1;", 0},
      {"ex2.approx.ftz.f32 %f1, 0fC2FE0000; mov.b32 %r9, %f1;", 0}, // 2^-127
      {"mov.b32 %r2, 0f3F800001; mov.b32 %f1, %r2; fma.rn.f32 %f2, %f1, %f1, 0fBF800002; mov.b32 %r9, %f2;", bits(0x1p-46f)},
      {"copysign.f32 %f1, 0f80000000, 0f40000000; mov.b32 %r9, %f1;", bits(-2)},
      {"cvt.rn.bf16x2.f32 %r9, 0f3F808000, 0f3F818000;", 0x3F803F82}, // ties to even: down, up
      {"cvt.rn.f16x2.f32 %r9, 0f477FF000, 0f33000001;", 0x7C000001},  // 65520; and a number just above half of the least subnormal
      {"cvt.rna.tf32.f32 %r9, 0f3F801000;", 0x3F802000},
      {"cvt.rn.f16.f32 %rs1, 0fC0000000; cvt.f32.f16 %f1, %rs1; mov.b32 %r9, %f1;", bits(-2)},
      // 1 + 2^-8 + 2^-30: if it were rounded to fp32 first, it would become a tie
      {"mov.f32 %f1, 0f3F800000; add.rz.f32 %f2, %f1, 0f33C00000; mov.b32 %r9, %f2;", bits(1.0f)}, // rounded to nearest: 1 + 2^-23
      {"mov.f32 %f1, 0f3F800000; add.rz.f32 %f2, %f1, 0fB3000000; mov.b32 %r9, %f2;", bits(1.0f - 0x1p-24f)},
      {"mov.u32 %r2, 0x3F803F80; mov.u32 %r3, 0x3F813F81; fma.rn.bf16x2 %r9, %r2, %r3, 0x30803080;", 0x3F813F81},
      {"set.neu.u32.f16x2 %r9, 0x80007E00, 0;", 0x0000FFFF},         // -0 is 0; NaN is not
      {"set.lt.u32.f16x2 %r9, 0x3C007E00, 0x40004000;", 0xFFFF0000}, // 1 < 2; NaN is not
      {"cvt.rn.f32.s32 %f1, -16777217; mov.b32 %r9, %f1;", bits(-16777216)},
      {"div.rn.f64 %fd1, 0d3FF0000000000000, 0d4008000000000000; cvt.rn.f32.f64 %f1, %fd1; mov.b32 %r9, %f1;", bits(1.0f / 3)},
  };
  for (const auto &c : cases) {
    CAPTURE(c.body);
    CHECK(result(c.body)[31] == c.want);
  }
}

TEST_CASE("emulator: lanes part and meet") {
  // Lane n loops n times, odd lanes in another branch. Then all lanes add up their counts.
  const std::vector<uint32_t> out = result("mov.u32 %r9, 0; mov.u32 %r2, 0; and.b32 %r3, %r0, 1; setp.eq.s32 %p1, %r3, 1;\n"
                                           "LOOP: setp.ge.s32 %p2, %r2, %r0; @%p2 bra DONE; add.s32 %r2, %r2, 1; @%p1 bra ODD;\n"
                                           "add.s32 %r9, %r9, 1; bra.uni LOOP;\nODD: add.s32 %r9, %r9, 100; bra.uni LOOP;\n"
                                           "DONE: shfl.sync.bfly.b32 %r4|%p3, %r9, 1, 31, -1; add.s32 %r9, %r9, %r4;");
  for (uint32_t lane = 0; lane < 32; lane += 2) {
    CHECK(out[lane] == lane + 100 * (lane + 1));
    CHECK(out[lane + 1] == out[lane]);
  }
}

TEST_CASE("emulator: shuffles and votes") {
  for (uint32_t lane = 0; lane < 32; lane++) {
    CAPTURE(lane);
    CHECK(result("shfl.sync.idx.b32 %r9|%p1, %r0, 5, 6175, -1;")[lane] == (lane & 24) + 5); // lanes exchange within groups of 8
    CHECK(result("shfl.sync.up.b32 %r9|%p1, %r0, 1, 0, -1;")[lane] == (lane ? lane - 1 : 0));
    CHECK(result("shfl.sync.down.b32 %r2|%p1, %r0, 1, 31, -1; selp.b32 %r9, %r2, 99, %p1;")[lane] == (lane < 31 ? lane + 1 : 99));
    CHECK(result("redux.sync.max.u32 %r9, %r0, 0xFFFFFFFF;")[lane] == 31);
    CHECK(result("setp.gt.u32 %p1, %r0, 29; vote.sync.ballot.b32 %r9, %p1, -1;")[lane] == 0xC0000000);
    CHECK(result("elect.sync _|%p1, -1; selp.b32 %r9, 1, 0, %p1;")[lane] == (lane == 0));
  }
  check_fault(kernel("setp.lt.u32 %p1, %r0, 16; @%p1 bra LOW; ret;\nLOW: shfl.sync.bfly.b32 %r9|%p2, %r0, 16, 31, 65535;"),
              "does not take part");
  check_fault(kernel("setp.lt.u32 %p1, %r0, 16; @%p1 bra LOW; bar.warp.sync -1; ret;\nLOW: shfl.sync.bfly.b32 %r9|%p2, %r0, 1, 31, -1;"),
              "wait for one another at different instructions");
}

TEST_CASE("emulator: barriers of a block") {
  // Warp 0 writes, and the other warps read its values: 20 times, with two barriers.
  const std::string body =
      "mov.u32 %r9, 0; mov.u32 %r2, 0; setp.lt.u32 %p1, %r0, 32; mov.u32 %r5, memory;\n"
      "LOOP: @!%p1 bra READ; add.s32 %r3, %r2, 1; bar.sync 2, 128; st.shared.u32 [%r5], %r3; bar.arrive 1, 128; bra.uni NEXT;\n"
      "READ: bar.arrive 2, 128; bar.sync 1, 128; ld.shared.u32 %r4, [memory]; add.s32 %r9, %r9, %r4;\n"
      "NEXT: add.s32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 20; @%p2 bra LOOP;";
  for (uint32_t seed : {0, 1, 2, 3}) {
    const std::vector<uint32_t> out = result(body, {.threads = 128, .shared = 4, .machine = {.seed = seed}}, kShared);
    CHECK(out[0] == 0);
    for (uint32_t thread = 32; thread < 128; thread++) CHECK(out[thread] == 210);
  }
  const Shape two = {.threads = 64};
  CHECK(result("setp.eq.s32 %p1, %r0, 40; bar.red.or.pred %p2, 0, %p1; selp.u32 %r9, 1, 0, %p2;", two)[3] == 1);
  CHECK(result("setp.ne.s32 %p1, %r0, 40; bar.red.and.pred %p2, 0, 64, %p1; selp.u32 %r9, 1, 0, %p2;", two)[3] == 0);
  CHECK(result("setp.ge.s32 %p1, %r0, 40; bar.red.popc.u32 %r9, 0, %p1;", two)[3] == 24);
}

TEST_CASE("emulator: wrong barriers") {
  const Shape two = {.threads = 64};
  check_fault(kernel("bar.sync 1, 48;"), "whole warps", two);
  check_fault(kernel("bar.sync 16;"), "sixteen", two);
  check_fault(kernel("setp.lt.u32 %p1, %r0, 32; @%p1 bra OTHER; bar.sync 1, 64; ret;\nOTHER: bar.sync 1, 96;"), "another count",
              {.threads = 96});
  check_fault(kernel("setp.lt.u32 %p1, %r0, 32; @%p1 bra OTHER; bar.sync 1, 64; ret;\nOTHER: bar.sync 2, 64;"), "deadlock", two);
  check_fault(kernel("setp.lt.u32 %p1, %r0, 16; @%p1 bar.sync 0;"), "leaves out lanes");
  check_fault(kernel("setp.lt.u32 %p1, %r0, 16; @%p1 bra OTHER; bar.sync 0; ret;\nOTHER: bar.sync 1;"), "at different instructions");
}

TEST_CASE("emulator: blocks take turns") {
  // Each block waits until as many blocks have ended as its number says, and then counts itself. The last block begins first, if it may.
  const std::string wait = "setp.ne.s32 %p1, %r0, 0; @%p1 bra END;\n"
                           "TURN: ld.acquire.gpu.global.u32 %r2, [%rd0]; setp.ne.s32 %p2, %r2, %r3; @%p2 bra TURN;\n"
                           "add.s64 %rd1, %rd0, 4; atom.relaxed.gpu.global.add.u32 %r4, [%rd1], %r1; add.s32 %r2, %r2, 1;\n"
                           "st.release.gpu.global.u32 [%rd0], %r2;\nEND:";
  const std::vector<uint32_t> out = run(kernel("mov.u32 %r3, %r1;" + wait), {.blocks = 20});
  CHECK(out[0] == 20);
  CHECK(out[1] == 190);
  check_fault(kernel("mov.u32 %r5, %nctaid.x; sub.s32 %r3, %r5, %r1; sub.s32 %r3, %r3, 1;" + wait), "deadlock", {.blocks = 20});
}

TEST_CASE("emulator: sums by atomics") {
  const std::vector<uint32_t> out = run(kernel("red.relaxed.gpu.global.add.f32 [%rd0], 0f3F800000; atom.global.add.u32 %r2, [%rd0+4], 1;\n"
                                               "red.relaxed.gpu.global.add.v2.f32 [%rd0+8], {0f3F800000, 0f40000000};\n"
                                               "atom.global.or.b32 %r3, [%rd0+16], %r0;\n"
                                               "red.relaxed.gpu.global.add.u64 [%rd0+24], -1; mul.wide.u32 %rd1, %r0, 2;\n"
                                               "red.relaxed.gpu.global.max.u64 [%rd0+32], %rd1;"),
                                        {.threads = 64, .blocks = 3});
  CHECK(out[0] == bits(192));
  CHECK(out[1] == 192);
  CHECK(out[2] == bits(192));
  CHECK(out[3] == bits(384));
  CHECK(out[4] == 63);
  CHECK(out[6] == uint32_t(-192));
  CHECK(out[7] == ~0u);
  CHECK(out[8] == 126);
}

TEST_CASE("emulator: memory of every width") {
  const std::string body =
      ".local .align 8 .b8 stack[8]; .reg .b64 %SP, %SPL; mov.u64 %SPL, stack; cvta.local.u64 %SP, %SPL;\n"
      "mov.u32 %r2, 0x80F7F6F5; add.s32 %r2, %r2, %r0; st.local.u32 [%SPL], %r2; st.local.u32 [%SPL+4], 3;\n"
      "ld.local.u8 %rs1, [%SPL]; cvt.u32.u16 %r3, %rs1; ld.u32 %r4, [%SP+4]; ld.local.s32 %rd1, [%SPL]; shr.s64 %rd1, %rd1, 60;\n"
      "cvt.u32.u64 %r5, %rd1; mad.lo.s32 %r9, %r3, %r4, %r5;";
  const std::vector<uint32_t> out = result(body);
  for (uint32_t lane = 0; lane < 10; lane++) CHECK(out[lane] == (0xF5 + lane) * 3 - 1);
}

TEST_CASE("emulator: what is refused") {
  check_fault(kernel("frobnicate.u32 %r9, %r0;"), "does not know this instruction");
  check_fault(kernel("add.s32 %r9, %rd0, 1;"), "64 bits");
  check_fault(kernel("mov.u32 %r9, %smid;"), "%smid");
  check_fault(kernel("bra NOWHERE;"), "NOWHERE");
  check_fault(kernel("mov.u32 %r2, memory; ld.shared.u32 %r9, [%r2+64];", kShared), "64", {.shared = 64});
  check_fault(kernel("mov.u32 %r2, memory; ld.shared.u32 %r9, [%r2+2];", kShared), "aligned to 4", {.shared = 64});
  check_fault(kernel("mov.u32 %r2, 0; ld.shared.u32 %r9, [%r2];", kShared), "shared memory is", {.shared = 64});
  check_fault(kernel("mov.u64 %rd1, 16; ld.global.u32 %r9, [%rd1];"), "global memory");
  check_fault(kernel("mov.u64 %rd1, 140737488351232; st.global.u32 [%rd1], %r0;"), "global memory"); // an address in an unmapped page
  check_fault(kernel("ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd0+4];"), "aligned to 16");
  check_fault(kernel("ld.param.u32 %r9, [kernel_param_0+8];"), "of arguments");
  check_fault(kernel("LOOP: bra LOOP;"), "deadlock");
}
