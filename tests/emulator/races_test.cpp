// Races in shared memory: each kernel runs once with ordered accesses, and once without the order.
#include "whole_kernel.h"

using namespace strobe::emulator;
using namespace strobe::emulator::test;

namespace {

// `ordered` must run with any order of the warps. Without the line named `without`, it must have a race with some order.
void check_race(const std::string &ordered, const std::string &without, const char *words) {
  CAPTURE(without);
  std::string racing = kernel(ordered, kShared);
  const size_t at = racing.find(without);
  REQUIRE(at != racing.npos);
  racing.erase(at, without.size());
  bool found = false;
  for (uint32_t seed = 0; seed < 8; seed++) {
    const Shape shape = {.threads = 64, .shared = 1024, .machine = {.late = true, .races = true, .seed = seed}};
    CHECK_NOTHROW(run(kernel(ordered, kShared), shape));
    try {
      run(racing, shape);
    } catch (const Fault &fault) {
      const std::string what = fault.what();
      CAPTURE(what);
      CHECK(what.find(words) != what.npos);
      found = true;
    }
  }
  CHECK(found);
}

const std::string kParts =
    "setp.lt.u32 %p1, %r0, 32; setp.eq.u32 %p2, %r0, 0; mov.u32 %r2, memory; add.s32 %r3, %r2, 512; mul.lo.s32 %r4, %r0, 4;\n"
    "add.s32 %r5, %r2, %r4; @%p2 mbarrier.init.shared::cta.b64 [%r3], 1; bar.sync 0; @!%p1 bra SECOND;\n";
const std::string kWait = "\nWAIT: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r3], 0; @!%p3 bra WAIT;\n";

} // namespace

TEST_CASE("emulator: a write and a read race unless a barrier is between") {
  check_race(kParts + "SECOND: @%p1 st.shared.u32 [%r5], %r0;\nbar.sync 1, 64;\n@!%p1 ld.shared.u32 %r9, [%r5+-128];", "bar.sync 1, 64;",
             "nothing orders them");
}
TEST_CASE("emulator: a write and a read race unless the reader waits for the writer") {
  check_race(kParts + "st.shared.u32 [%r5], %r0; bar.warp.sync -1; @%p2 mbarrier.arrive.shared::cta.b64 _, [%r3]; ret;\nSECOND:" + kWait +
                 "ld.shared.u32 %r9, [%r5+-128];",
             "@!%p3 bra WAIT;", "nothing orders them");
}
TEST_CASE("emulator: the lane that arrives for its warp answers for the others after they have met alone") {
  check_race(kParts + "st.shared.u32 [%r5], %r0; bar.warp.sync -1; @%p2 mbarrier.arrive.shared::cta.b64 _, [%r3]; ret;\nSECOND:" + kWait +
                 "ld.shared.u32 %r9, [%r5+-128];",
             "bar.warp.sync -1;", "nothing orders them");
}
TEST_CASE("emulator: a copy and a read race unless the reader waits for its bytes") {
  check_race(kParts +
                 "@!%p2 bra END; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 128;\n"
                 "and.b64 %rd1, %rd0, -16; add.s64 %rd1, %rd1, 16;\n"
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 128, [%r3];" +
                 kWait +
                 "END: ret;\nSECOND: bar.warp.sync -1;\nLATER: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r3], 0; @!%p3 bra LATER;\n"
                 "ld.shared.u32 %r9, [%r5+-128];",
             "@!%p3 bra LATER;", "nothing orders them");
}
TEST_CASE("emulator: a copy overwrites what another warp may still read") {
  check_race(kParts +
                 "bar.sync 1, 64; @!%p2 bra END; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 128;\n"
                 "and.b64 %rd1, %rd0, -16; add.s64 %rd1, %rd1, 16;\n"
                 "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 128, [%r3];" +
                 kWait + "END: ret;\nSECOND: ld.shared.u32 %r9, [%r5+-128];\nbar.arrive 1, 64;",
             "bar.sync 1, 64;", "nothing orders them");
}
TEST_CASE("emulator: the copy engine reads what a thread wrote after a proxy fence alone") {
  check_race("mov.u32 %r2, memory; mul.lo.s32 %r4, %r0, 4; add.s32 %r5, %r2, %r4; st.shared.u32 [%r5], %r0;\n"
             "fence.proxy.async.shared::cta;\nbar.sync 0; setp.eq.u32 %p2, %r0, 0; @!%p2 bra END;\n"
             "and.b64 %rd1, %rd0, -16; add.s64 %rd1, %rd1, 16;\n"
             "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r2], 128;\n"
             "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;\nEND:",
             "fence.proxy.async.shared::cta;", "no fence.proxy.async is between");
}
