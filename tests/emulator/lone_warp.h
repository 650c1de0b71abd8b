// A single warp, for tests of single instructions.
#pragma once
#include <doctest/doctest.h>

#include <bit>
#include <cstring>
#include <deque>
#include <random>
#include <span>
#include <vector>

#include "warp.h"

namespace strobe::emulator::test {

struct LoneWarp {
  Machine machine{};
  Grid grid{.machine = machine, .arguments = {}, .blocks = {1, 1, 1}, .threads = {kLanes, 1, 1}};
  std::vector<std::byte> memory = std::vector<std::byte>(128 * 1024 + 1024), file = std::vector<std::byte>(256 * kLanes * 4);
  Block block{grid, {0, 0, 0}, nullptr, kSharedBegin + 128 * 1024, make_block_async()};
  Warp warp{.block = block, .index = 0, .registers = file.data(), .async = make_warp_async()};

  std::deque<Tile> tiles; // exist as long as the operations in flight

  explicit LoneWarp(bool late = false) {
    machine.late = late;
    block.shared = std::assume_aligned<1024>(memory.data() + (1024 - reinterpret_cast<uintptr_t>(memory.data()) % 1024) % 1024);
  }
  LoneWarp(const LoneWarp &) = delete;

  void run(std::string_view opcode, const std::vector<Operand> &operands, uint32_t lanes = kAllLanes) {
    const Tile &tile = tiles.emplace_back(decode_tile(opcode, operands));
    REQUIRE_MESSAGE(tile, std::string(opcode));
    warp.waits = false;
    tile(warp, lanes);
  }
  uint32_t *words(uint32_t slot) { return warp.lanes<uint32_t>(slot); }
  void set(uint32_t slot, uint32_t value) { std::fill_n(words(slot), kLanes, value); } // in every lane
  void set_wide(uint32_t slot, uint64_t value) { std::fill_n(warp.lanes<uint64_t>(slot), kLanes, value); }
  float number(uint32_t slot, uint32_t lane) { return std::bit_cast<float>(words(slot)[lane]); }
  template <class T> T &shared(uint32_t address) {
    return *reinterpret_cast<T *>(warp.shared(address, sizeof(T), alignof(T), Access::kSynchronize, 0));
  }
};

inline Operand word(uint32_t slot) { return {.kind = Operand::kRegister, .bits = 32, .slot = slot, .value = 0, .parts = {}}; }
inline Operand wide(uint32_t slot) { return {.kind = Operand::kRegister, .bits = 64, .slot = slot, .value = 0, .parts = {}}; }
inline Operand predicate(uint32_t slot) { return {.kind = Operand::kPredicate, .bits = 1, .slot = slot, .value = 0, .parts = {}}; }
inline Operand immediate(uint64_t value) { return {.kind = Operand::kImmediate, .bits = 0, .slot = kNoSlot, .value = value, .parts = {}}; }
inline Operand address(uint32_t slot, std::vector<Operand> coordinates = {}) {
  return {.kind = Operand::kAddress, .bits = 32, .slot = slot, .value = 0, .parts = std::move(coordinates)};
}
inline Operand wide_address(uint32_t slot, std::vector<Operand> coordinates = {}) {
  return {.kind = Operand::kAddress, .bits = 64, .slot = slot, .value = 0, .parts = std::move(coordinates)};
}
inline Operand vector(uint32_t first, uint32_t count) {
  Operand all{.kind = Operand::kVector, .bits = 0, .slot = kNoSlot, .value = 0, .parts = {}};
  for (uint32_t n = 0; n < count; n++) all.parts.push_back(word(first + n));
  return all;
}
inline Operand sink() { return {}; }

// A small integer as bfloat16. It is exact, and so are sums of products of such numbers.
inline uint16_t bfloat(int x) { return static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(x)) >> 16); }

// Rows x columns of small integers.
class Table {
public:
  Table(uint32_t rows, uint32_t columns, uint32_t seed) : columns_(columns), numbers_(rows * columns) {
    std::mt19937 random(seed);
    for (int &x : numbers_) x = static_cast<int>(random() % 15) - 7;
  }
  int operator()(uint32_t row, uint32_t column) const { return numbers_.at(row * columns_ + column); }

private:
  uint32_t columns_;
  std::vector<int> numbers_;
};

} // namespace strobe::emulator::test
