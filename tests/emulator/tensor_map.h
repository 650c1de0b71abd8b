// What a CUtensorMap contains: cuTensorMapEncodeTiled (driver.cpp) writes it, and the copy engine (copy.cpp) reads it.
#pragma once
#include <cstdint>

namespace strobe::emulator {

struct alignas(64) TensorMap {
  static constexpr uint32_t kMagic = 0x70614D54, kMostRank = 5;
  uint32_t magic;
  uint8_t element_bytes, rank;
  bool swizzled; // swizzled over 128 bytes
  uint64_t address;
  uint64_t sizes[kMostRank], strides[kMostRank]; // strides[0]: from one element to the next
  uint32_t box[kMostRank];
};
static_assert(sizeof(TensorMap) == 128);

} // namespace strobe::emulator
