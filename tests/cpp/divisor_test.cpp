#include "kernels/attention/divisor.h"
#include <doctest/doctest.h>

#include <random>

using namespace strobe;

TEST_CASE("A divisor divides") {
  std::mt19937 random(1);
  constexpr u32 most = 0x7fffffff;
  int wrong = 0;
  auto check = [&](u32 by) {
    const Divisor divisor = Divisor::make(by);
    for (u32 x : {0u, by - 1, by, most / by * by - 1, most / by * by, most, u32(random() & most), u32(random() & most)})
      if (x <= most && divisor.divide(x) != x / by) ++wrong;
  };
  for (u32 by = 1; by <= 5000; ++by) check(by);
  for (u32 bit = 1; bit < 31; ++bit)
    for (u32 by : {(1u << bit) - 1, 1u << bit, (1u << bit) + 1}) check(by);
  for (int i = 0; i < 200000; ++i) check(random() % most + 1);
  check(most);
  CHECK(wrong == 0);
}
