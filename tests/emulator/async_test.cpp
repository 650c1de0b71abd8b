// Copies, and the barriers on which they complete: at once, and as late as the waits permit.
#include "lone_warp.h"
#include "tensor_map.h"

using namespace strobe::emulator;
using namespace strobe::emulator::test;

namespace {

constexpr uint32_t kBarrier = kSharedBegin, kTarget = kSharedBegin + 1024;
constexpr const char *kInit = "mbarrier.init.shared::cta.b64", *kArrive = "mbarrier.arrive.shared::cta.b64";
constexpr const char *kExpect = "mbarrier.arrive.expect_tx.shared::cta.b64", *kTry = "mbarrier.try_wait.parity.shared::cta.b64";

struct Barrier {
  LoneWarp &w;
  Barrier(LoneWarp &warp, uint32_t arrivals) : w(warp) {
    w.set(0, kBarrier), w.set(1, arrivals);
    w.run(kInit, {address(0), word(1)}, 1);
  }
  void arrive(uint32_t lanes) { w.run(kArrive, {sink(), address(0)}, lanes); }
  void expect(uint32_t bytes) {
    w.set(1, bytes);
    w.run(kExpect, {sink(), address(0), word(1)}, 1);
  }
  bool completed(uint32_t parity) {
    w.set(1, parity);
    w.run(kTry, {predicate(2), address(0), word(1)}, 1);
    CHECK(w.warp.waits == !(w.words(2)[0] & 1));
    return w.words(2)[0] & 1;
  }
};

} // namespace

TEST_CASE("emulator: phases of an mbarrier") {
  LoneWarp w;
  CHECK_THROWS_AS(w.run(kArrive, {sink(), address(9)}), Fault); // a barrier at address 0
  w.set(0, kBarrier);
  CHECK_THROWS_AS(w.run(kArrive, {sink(), address(0)}), Fault); // a barrier that has not been initialised
  Barrier barrier(w, 3);
  CHECK(barrier.completed(1)); // the phase before the first one has completed
  CHECK_FALSE(barrier.completed(0));
  barrier.arrive(0b11);
  CHECK_FALSE(barrier.completed(0));
  barrier.arrive(0b100);
  CHECK(barrier.completed(0));
  CHECK_FALSE(barrier.completed(1));
  barrier.arrive(0b11);
  barrier.expect(32); // three threads arrive, but 32 bytes are still missing
  CHECK_FALSE(barrier.completed(1));
  CHECK_THROWS_AS(barrier.arrive(1), Fault);
}

TEST_CASE("emulator: a block that lets the next launch begin waits for the one before") {
  for (bool lets : {false, true})
    for (bool waits : {false, true}) {
      LoneWarp w;
      w.block.lets_next_begin = lets, w.block.waited = waits;
      if (lets && !waits)
        CHECK_THROWS_AS(finish(w.warp), Fault);
      else
        finish(w.warp);
    }
}

TEST_CASE("emulator: a bulk copy completes on its barrier") {
  alignas(16) static const char kSource[] = "what lies in global memory.....";
  for (bool late : {false, true}) {
    CAPTURE(late);
    LoneWarp w(late);
    Barrier barrier(w, 1);
    w.set(3, kTarget), w.set(4, sizeof kSource);
    w.set_wide(5, reinterpret_cast<uint64_t>(kSource));
    barrier.expect(sizeof kSource);
    w.run("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", {address(3), wide_address(5), word(4), address(0)}, 1);
    CHECK((std::memcmp(&w.shared<char>(kTarget), kSource, sizeof kSource) == 0) == !late);
    CHECK(barrier.completed(0));
    CHECK(std::memcmp(&w.shared<char>(kTarget), kSource, sizeof kSource) == 0);
    finish(w.warp);
  }
  LoneWarp w(true);
  Barrier barrier(w, 1);
  w.set(3, kTarget), w.set(4, sizeof kSource), w.set_wide(5, reinterpret_cast<uint64_t>(kSource));
  w.run("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", {address(3), wide_address(5), word(4), address(0)}, 1);
  CHECK_THROWS_AS(finish(w.warp), Fault); // no wait for the copy
}

TEST_CASE("emulator: a box of a tensor, swizzled, with zeros where there is none") {
  constexpr uint32_t kColumns = 72, kRows = 5, kHeads = 3; // the box: 64 x 4 of one head
  std::vector<uint16_t> tensor(kColumns * kRows * kHeads);
  for (size_t n = 0; n < tensor.size(); n++) tensor[n] = static_cast<uint16_t>(n + 1);
  TensorMap map{.magic = TensorMap::kMagic,
                .element_bytes = 2,
                .rank = 4,
                .swizzled = true,
                .address = reinterpret_cast<uint64_t>(tensor.data()),
                .sizes = {kColumns, kRows, kHeads, 1},
                .strides = {0, kColumns * 2, kColumns * kRows * 2, kColumns * kRows * kHeads * 2},
                .box = {64, 4, 1, 1}};
  LoneWarp w;
  for (auto [column, row] : {std::pair{0, 0}, {64, 2}, {-8, -1}}) {
    CAPTURE(column);
    Barrier barrier(w, 1);
    barrier.expect(64 * 4 * 2);
    w.set(3, kTarget), w.set_wide(4, reinterpret_cast<uint64_t>(&map));
    w.set(6, static_cast<uint32_t>(column)), w.set(7, static_cast<uint32_t>(row)), w.set(8, 2), w.set(9, 0);
    w.run("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes",
          {address(3), wide_address(4, {word(6), word(7), word(8), word(9)}), address(0)}, 1);
    CHECK(barrier.completed(0));
    for (int r = 0; r < 4; r++)
      for (int c = 0; c < 64; c++) {
        const int at = row + r, from = column + c;
        const bool inside = at >= 0 && at < int(kRows) && from >= 0 && from < int(kColumns);
        const int expected = inside ? tensor[size_t((2 * int(kRows) + at) * int(kColumns) + from)] : 0;
        REQUIRE(w.shared<uint16_t>(kTarget + uint32_t(r * 128 + (c / 8 ^ r) * 16 + c % 8 * 2)) == expected);
      }
  }
  map.magic = 0;
  CHECK_THROWS_AS(w.run("prefetch.tensormap", {wide_address(4)}, 1), Fault);
}

TEST_CASE("emulator: cp.async by groups") {
  alignas(16) static const uint32_t kSource[] = {1, 2, 3, 4};
  constexpr const char *kCopy = "cp.async.cg.shared.global.L2::128B";
  for (bool late : {false, true}) {
    CAPTURE(late);
    LoneWarp w(late);
    w.set_wide(5, reinterpret_cast<uint64_t>(kSource));
    for (uint32_t group = 0; group < 2; group++) {
      for (uint32_t lane = 0; lane < kLanes; lane++) w.words(3)[lane] = kTarget + group * 512 + lane * 16;
      for (uint32_t lane = 0; lane < kLanes; lane++) w.words(4)[lane] = lane % 2 ? 16 : 0; // odd lanes read 16 bytes, the others none
      w.run(kCopy, {address(3), wide_address(5), immediate(16), word(4)});
      w.run("cp.async.commit_group", {});
    }
    const uint32_t &first = w.shared<uint32_t>(kTarget + 16 + 12), &second = w.shared<uint32_t>(kTarget + 512 + 16 + 12);
    w.run("cp.async.wait_group", {immediate(1)});
    CHECK(first == 4);
    CHECK((second == 4) == !late);
    w.run("cp.async.wait_group", {immediate(0)});
    CHECK(second == 4);
    CHECK(w.shared<uint32_t>(kTarget + 12) == 0);
  }
}

TEST_CASE("emulator: bulk copies to global memory read shared memory, then store or add") {
  for (int n = 0; n < 4; n++) {
    const bool late = n % 2, adds = n / 2;
    CAPTURE(late);
    CAPTURE(adds);
    LoneWarp w(late);
    alignas(16) float sums[4] = {1, 2, 3, 4};
    for (uint32_t i = 0; i < 4; i++) w.shared<float>(kTarget + 4 * i) = 10;
    w.set(3, kTarget), w.set(4, 16), w.set_wide(5, reinterpret_cast<uint64_t>(sums));
    w.run(adds ? "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32" : "cp.async.bulk.global.shared::cta.bulk_group",
          {wide_address(5), address(3), word(4)}, 1);
    w.run("cp.async.bulk.commit_group", {}, 1);
    if (late) CHECK_THROWS_AS(finish(w.warp), Fault); // when the copy happens, its shared memory may belong to another block
    w.run("cp.async.bulk.wait_group.read", {immediate(0)}, 1);
    w.shared<float>(kTarget) = 100; // the copy has already read the source
    CHECK((sums[3] == 4) == late);
    w.run("cp.async.bulk.wait_group", {immediate(0)}, 1);
    CHECK(sums[0] == (adds ? 11 : 10));
    CHECK(sums[3] == (adds ? 14 : 10));
  }
}
