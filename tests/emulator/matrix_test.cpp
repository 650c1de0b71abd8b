// Matrices that lie in memory row by row: ldmatrix, mma.sync and wgmma must give their plain product.
#include "lone_warp.h"
#include "numbers.h"

using namespace strobe::emulator;
using namespace strobe::emulator::test;

namespace {

constexpr uint32_t kA = kSharedBegin, kB = kSharedBegin + 16 * 1024;

// Rows of 16 numbers, 32 bytes each.
void write(LoneWarp &w, uint32_t at, const Table &x, uint32_t rows, uint32_t columns) {
  for (uint32_t r = 0; r < rows; r++)
    for (uint32_t c = 0; c < columns; c++) w.shared<uint16_t>(at + (r * columns + c) * 2) = bfloat(x(r, c));
}
// Gives each lane the address of a row: lane n that of a row of matrix i = n / 8, one of the four 8 x 8 matrices of a 16 x 16 matrix.
// Matrix i begins at row 8 * (i % 2), column 8 * (i / 2).
void point_at_parts(LoneWarp &w, uint32_t slot, uint32_t at) {
  for (uint32_t lane = 0; lane < kLanes; lane++) w.words(slot)[lane] = at + (lane % 16) * 32 + lane / 16 * 16;
}
int product(const Table &a, const Table &b, uint32_t m, uint32_t n, uint32_t inner) {
  int sum = 0;
  for (uint32_t k = 0; k < inner; k++) sum += a(m, k) * b(k, n);
  return sum;
}
// Row and column of element i of a lane's sums, in the layout of mma.sync and wgmma.
uint32_t row_of(uint32_t lane, uint32_t i) { return lane / 4 + 8 * (i / 2 % 2); }
uint32_t column_of(uint32_t lane, uint32_t i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }

// Writes rows of 64 numbers as the copy engine stores them: swizzled over 128 bytes, in blocks of 64 columns.
void write_swizzled(LoneWarp &w, uint32_t at, const Table &x, uint32_t rows, uint32_t columns) {
  for (uint32_t r = 0; r < rows; r++)
    for (uint32_t c = 0; c < columns; c++) {
      const uint32_t piece = c % 64 / 8 ^ r % 8; // index of the piece of 8 numbers
      w.shared<uint16_t>(at + c / 64 * rows * 128 + r * 128 + piece * 16 + c % 8 * 2) = bfloat(x(r, c));
    }
}
uint64_t descriptor(uint32_t begin, uint32_t leading) {
  return uint64_t{begin / 16} | uint64_t{leading / 16} << 16 | uint64_t{1024 / 16} << 32 | uint64_t{1} << 62;
}

} // namespace

TEST_CASE("emulator: ldmatrix and mma.sync of 16-bit numbers") {
  LoneWarp w;
  const Table a(16, 16, 1), b(16, 16, 2), c(16, 8, 3);
  write(w, kA, a, 16, 16);
  write(w, kB, b, 16, 16);
  point_at_parts(w, 0, kA), point_at_parts(w, 1, kB);
  w.run("ldmatrix.sync.aligned.m8n8.x4.shared.b16", {vector(10, 4), address(0)});
  w.run("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", {vector(20, 4), address(1)});
  w.run("ldmatrix.sync.aligned.m8n8.x2.shared.b16", {vector(40, 2), address(0)});
  for (uint32_t i = 0; i < 2; i++)
    for (uint32_t lane = 0; lane < kLanes; lane++) REQUIRE(w.words(40 + i)[lane] == w.words(10 + i)[lane]);
  for (uint32_t i = 0; i < 4; i++)
    for (uint32_t lane = 0; lane < kLanes; lane++)
      w.words(30 + i)[lane] = std::bit_cast<uint32_t>(static_cast<float>(c(row_of(lane, i), column_of(lane, i))));
  w.run("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", {vector(30, 4), vector(10, 4), vector(20, 2), vector(30, 4)});
  for (uint32_t i = 0; i < 4; i++)
    for (uint32_t lane = 0; lane < kLanes; lane++) {
      const uint32_t m = row_of(lane, i), n = column_of(lane, i);
      REQUIRE(w.number(30 + i, lane) == c(m, n) + product(a, b, m, n, 16));
    }
  CHECK_THROWS_AS(
      w.run("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", {vector(30, 4), vector(10, 4), vector(20, 2), vector(30, 4)}, 0xFFFF),
      Fault);
  w.words(0)[9] += 2; // an address that is no longer a multiple of 16
  CHECK_THROWS_AS(w.run("ldmatrix.sync.aligned.m8n8.x4.shared.b16", {vector(10, 4), address(0)}), Fault);
}

TEST_CASE("emulator: mma.sync of TF32 takes no notice of the lowest 13 bits") {
  LoneWarp w;
  const Table a(16, 8, 4), b(8, 8, 5);
  auto bits = [](int x) { return std::bit_cast<uint32_t>(static_cast<float>(x)) | 0x1FFF; };
  for (uint32_t lane = 0; lane < kLanes; lane++) {
    const uint32_t g = lane / 4, t = lane % 4;
    for (uint32_t i = 0; i < 4; i++) w.words(i)[lane] = bits(a(g + i % 2 * 8, t + i / 2 * 4));
    for (uint32_t i = 0; i < 2; i++) w.words(4 + i)[lane] = bits(b(t + i * 4, g));
  }
  w.run("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", {vector(10, 4), vector(0, 4), vector(4, 2), vector(20, 4)});
  for (uint32_t i = 0; i < 4; i++)
    for (uint32_t lane = 0; lane < kLanes; lane++) REQUIRE(w.number(10 + i, lane) == product(a, b, row_of(lane, i), column_of(lane, i), 8));
}

TEST_CASE("emulator: transposed on the way to registers, in them, and back") {
  LoneWarp w;
  const Table x(16, 16, 6);
  write(w, kA, x, 16, 16);
  point_at_parts(w, 0, kA), point_at_parts(w, 1, kB);
  w.run("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", {vector(10, 4), address(0)});
  w.run("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16", {address(1), vector(10, 4)});
  CHECK(std::memcmp(&w.shared<char>(kA), &w.shared<char>(kB), 16 * 32) == 0);
  w.run("ldmatrix.sync.aligned.m8n8.x4.shared.b16", {vector(20, 4), address(0)});
  for (uint32_t i = 0; i < 4; i++) {
    w.run("movmatrix.sync.aligned.m8n8.trans.b16", {word(30), word(20 + i)});
    CHECK(std::memcmp(w.words(30), w.words(10 + i), kLanes * 4) == 0);
  }
}

TEST_CASE("emulator: wgmma, each operand in each of its places") {
  constexpr uint32_t kColumns = 96;
  const Table a(64, 16, 7), b(16, 128, 8);
  for (bool late : {false, true})
    for (bool transposed_b : {false, true})
      for (const char *place_a : {"registers", "rows", "columns"}) {
        CAPTURE(late);
        CAPTURE(transposed_b);
        CAPTURE(std::string(place_a));
        LoneWarp w(late);
        w.warp.index = 6; // the third of its warpgroup: rows 32 to 47
        Table wide_b(128, 64, 9), wide_a(64, 64, 10), tall_a(16, 64, 11);
        auto b_at = [&](uint32_t k, uint32_t n) { return transposed_b ? b(k, n) : wide_b(n, 16 + k); };
        if (transposed_b)
          write_swizzled(w, kB, b, 16, 128);
        else
          write_swizzled(w, kB, wide_b, 128, 64);
        const bool registers = place_a == std::string("registers"), columns = place_a == std::string("columns");
        auto a_at = [&](uint32_t m, uint32_t k) { return registers ? a(m, k) : columns ? tall_a(k, m) : wide_a(m, 32 + k); };
        if (columns)
          write_swizzled(w, kA, tall_a, 16, 64);
        else
          write_swizzled(w, kA, wide_a, 64, 64);
        for (uint32_t lane = 0; lane < kLanes; lane++)
          for (uint32_t i = 0; i < 4; i++) {
            const uint32_t m = 32 + lane / 4 + i % 2 * 8, k = lane % 4 * 2 + i / 2 * 8;
            w.words(100 + i)[lane] = bfloat(a(m, k)) | uint32_t{bfloat(a(m, k + 1))} << 16;
          }
        w.set_wide(110, columns ? descriptor(kA, 0) : descriptor(kA + 64, 16));
        w.set_wide(112, transposed_b ? descriptor(kB, 16 * 128) : descriptor(kB + 32, 16));
        for (uint32_t i = 0; i < kColumns / 2; i++) w.set(i, std::bit_cast<uint32_t>(1.0f));
        w.words(120)[0] = kAllLanes;
        std::vector<Operand> operands{
            vector(0, kColumns / 2), registers ? vector(100, 4) : wide(110), wide(112), predicate(120), immediate(1), immediate(1)};
        if (!registers) operands.push_back(immediate(columns));
        operands.push_back(immediate(transposed_b));
        w.run("wgmma.fence.sync.aligned", {});
        w.run("wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16", operands);
        w.set(100, 0); // overwritten only after A has been read
        w.run("wgmma.commit_group.sync.aligned", {});
        CHECK((w.number(0, 0) == 1.0f) == late);
        w.run("wgmma.wait_group.sync.aligned", {immediate(1)});
        CHECK((w.number(0, 0) == 1.0f) == late);
        w.run("wgmma.wait_group.sync.aligned", {immediate(0)});
        for (uint32_t i = 0; i < kColumns / 2; i++)
          for (uint32_t lane = 0; lane < kLanes; lane++) {
            int expected = 1;
            for (uint32_t k = 0; k < 16; k++) expected += a_at(32 + row_of(lane, i), k) * b_at(k, column_of(lane, i));
            REQUIRE(w.number(i, lane) == expected);
          }
        finish(w.warp);
      }
}

TEST_CASE("emulator: wgmma of FP8, A in registers and in rows, and sums that keep few bits") {
  constexpr uint32_t kColumns = 64, kInner = 32;
  const Table a(64, kInner, 12), b(kColumns, kInner, 13);
  auto write_bytes = [](LoneWarp &w, uint32_t at, const Table &x, uint32_t rows) {
    for (uint32_t r = 0; r < rows; r++)
      for (uint32_t c = 0; c < kInner; c++) // from column 64 on of rows of 128
        w.shared<uint8_t>(at + r * 128 + ((c / 16 + 4) ^ r % 8) * 16 + c % 16) = to_e4m3(static_cast<float>(x(r, c)));
  };
  for (bool registers : {false, true}) {
    CAPTURE(registers);
    LoneWarp w;
    w.warp.index = 5; // rows 16 to 31
    write_bytes(w, kA, a, 64), write_bytes(w, kB, b, kColumns);
    for (uint32_t lane = 0; lane < kLanes; lane++)
      for (uint32_t i = 0; i < 4; i++) {
        uint32_t word = 0;
        for (uint32_t n = 0; n < 4; n++)
          word |= uint32_t{to_e4m3(static_cast<float>(a(16 + lane / 4 + i % 2 * 8, lane % 4 * 4 + i / 2 * 16 + n)))} << 8 * n;
        w.words(100 + i)[lane] = word;
      }
    w.set_wide(110, descriptor(kA + 64, 16)), w.set_wide(112, descriptor(kB + 64, 16));
    for (uint32_t i = 0; i < kColumns / 2; i++) w.set(i, std::bit_cast<uint32_t>(1.0f));
    w.words(120)[0] = kAllLanes;
    const std::vector<Operand> operands{
        vector(0, kColumns / 2), registers ? vector(100, 4) : wide(110), wide(112), predicate(120), immediate(1), immediate(1)};
    const auto multiply = [&] { w.run("wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3", operands); };
    multiply();
    for (uint32_t i = 0; i < kColumns / 2; i++)
      for (uint32_t lane = 0; lane < kLanes; lane++) {
        int expected = 1;
        for (uint32_t k = 0; k < kInner; k++) expected += a(16 + row_of(lane, i), k) * b(column_of(lane, i), k);
        REQUIRE(w.number(i, lane) == expected);
      }
    w.machine.few_bits = true;
    w.set(0, std::bit_cast<uint32_t>(0x1p20f)), w.set(1, std::bit_cast<uint32_t>(0x1p-30f));
    multiply();
    for (uint32_t lane = 0; lane < kLanes; lane++) {
      const auto of = [&](uint32_t i) {
        int sum = 0;
        for (uint32_t k = 0; k < kInner; k++) sum += a(16 + row_of(lane, i), k) * b(column_of(lane, i), k);
        return sum;
      };
      REQUIRE(w.number(0, lane) == 0x1p20f);                   // products below 2^7 are cut off
      REQUIRE(w.number(1, lane) == static_cast<float>(of(1))); // they are whole beside small sums
    }
  }
}

TEST_CASE("emulator: what wgmma must not do") {
  LoneWarp w(true);
  w.set_wide(110, descriptor(kA + 32 * 4, 16)), w.set_wide(112, descriptor(kB, 16));
  const std::vector<Operand> operands{vector(0, 4), wide(110),    wide(112),    predicate(120),
                                      immediate(1), immediate(1), immediate(0), immediate(0)};
  constexpr std::string_view kProduct = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16";
  w.run(kProduct, operands);
  w.run("wgmma.commit_group.sync.aligned", {});
  CHECK_THROWS_AS(finish(w.warp), Fault);                                                       // no wait for the product
  CHECK_THROWS_AS(w.run("wgmma.wait_group.sync.aligned", {immediate(0)}), Fault);               // A must begin with its rows
  CHECK_THROWS_AS(w.run("wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16", operands), Fault); // this emulator lacks such sums
  w.words(120)[0] = 1;
  CHECK_THROWS_AS(w.run(kProduct, operands), Fault); // operands must not differ between lanes
}
