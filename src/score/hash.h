// A hash of 64 bits, of numbers in order.
#pragma once
#include <array>
#include <cstdint>

namespace strobe::score {

class Hash {
public:
  void add(uint64_t x) {
    state_ = mixed((state_ ^ x) + 0x9E3779B97F4A7C15);
    state_ ^= state_ >> 32;
  }
  std::array<uint32_t, 2> words() const { return {uint32_t(mixed(state_)), uint32_t(mixed(state_) >> 32)}; }

private:
  static uint64_t mixed(uint64_t x) { // the finaliser of splitmix64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
  }
  uint64_t state_ = 0x5354524F4245; // any number
};

} // namespace strobe::score
