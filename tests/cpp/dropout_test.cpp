// Compares kernels/attention/dropout.h with Random123's vectors, and with the definition, which is spelled out here byte by byte.
#include "kernels/attention/dropout.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "call.h"

using namespace strobe;

namespace {

// docs/semantics.md, word for word, deliberately without dropout.h.
uint64_t finalise(uint64_t x) {
  x ^= x >> 30, x *= 0xBF58476D1CE4E5B9;
  x ^= x >> 27, x *= 0x94D049BB133111EB;
  return x ^ x >> 31;
}

std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 7; round++) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0], b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {uint32_t(b >> 32) ^ counter[1] ^ key[0], uint32_t(b), uint32_t(a >> 32) ^ counter[3] ^ key[1], uint32_t(a)};
    key = {key[0] + 0x9E3779B9, key[1] + 0xBB67AE85};
  }
  return counter;
}

bool keeps(double p, uint64_t seed, uint64_t offset, int64_t b, int64_t h, int64_t i, int64_t j) {
  const uint64_t x = finalise(seed + 0x9E3779B97F4A7C15 * (finalise(offset) | 1));
  auto group = [](int64_t n) { return static_cast<uint32_t>((n / 16) * 4 + (n % 8) / 2); };
  auto slot = [](int64_t n) { return static_cast<int>((n & 1) + 2 * ((n >> 3) & 1)); };
  const auto words = philox({group(j), group(i), uint32_t(h), uint32_t(b)}, {uint32_t(x), uint32_t(x >> 32)});
  const int byte = words[slot(i)] >> (8 * slot(j)) & 255;
  return p == 0 || byte < std::clamp(int(std::lround((1 - p) * 256)), 1, 255);
}

} // namespace

TEST_CASE("dropout: Random123's published vectors of philox4x32-7") {
  struct Known {
    u32 counter[4], key[2], result[4];
  };
  const u32 ff = 0xFFFFFFFF;
  const Known known[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
      {{ff, ff, ff, ff}, {ff, ff}, {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}, {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
  };
  for (const Known &k : known) {
    const Philox got = philox4x32_7(k.counter[0], k.counter[1], k.counter[2], k.counter[3], k.key[0], k.key[1]);
    for (int w = 0; w < 4; w++) CHECK(got.x[w] == k.result[w]);
  }
}

TEST_CASE("dropout: each element's byte is the one defined") {
  for (double p : {0.1, 0.5, 0.9})
    for (auto [seed, offset] : {std::pair<uint64_t, uint64_t>{0, 0}, {1, 2}, {~uint64_t{0}, uint64_t{1} << 63}})
      for (int64_t far : {int64_t{0}, int64_t{1} << 33}) { // positions past 32 bits
        const DropoutKey key = dropout_key(seed, offset);
        int wrong = 0;
        for (int64_t i = far; i < far + 40; i++)
          for (int64_t j = far + 3; j < far + 53; j++)
            wrong += dropout_keep(key, dropout_threshold(p), 3, 5, i, j) != keeps(p, seed, offset, 3, 5, i, j);
        CHECK(wrong == 0);
      }
}

TEST_CASE("dropout: the rate is quantised to 1/256, never to nothing and never to all") {
  CHECK(dropout_threshold(0) == 256);
  CHECK(dropout_threshold(1e-9) == 255);
  CHECK(dropout_threshold(0.1) == 230);
  CHECK(dropout_threshold(0.5) == 128);
  CHECK(dropout_threshold(0.999999) == 1);
  CHECK(dropout_keep_rate(dropout_threshold(0)) == 1.0f);
  CHECK(dropout_keep_rate(dropout_threshold(0.5)) == 0.5f);
}

TEST_CASE("dropout: strobe_dropout_mask writes the same, through strides") {
  test::Call call;
  const int64_t B = 2, H = 3, Sq = 21, Sk = 35;
  strobe_tensor &keep = call.add("mask", DType::boolean, {B, H, Sq, Sk});
  std::swap(keep.shape[2], keep.shape[3]), std::swap(keep.strides[2], keep.strides[3]); // 35 queries of 21 keys, transposed in memory
  call.attention.dropout = 0.3, call.attention.seed = 11, call.attention.offset = 13;
  strobe_tensor &rng = call.add_values<int64_t>("rng", DType::i64, {-5, 7});

  for (auto [drawn, threads] :
       {std::pair{static_cast<const strobe_tensor *>(nullptr), 1}, {&rng, 1}, {nullptr, 0}, {&rng, 2}, {nullptr, 3}, {&rng, 100}}) {
    std::memset(keep.data, 2, call.memory_bytes("mask"));
    call.execution.threads = threads;
    REQUIRE(strobe_dropout_mask(&call.attention, drawn, &keep, &call.execution) == STROBE_OK);
    int wrong = 0, kept = 0;
    for (int64_t b = 0; b < B; b++)
      for (int64_t h = 0; h < H; h++)
        for (int64_t i = 0; i < Sk; i++)
          for (int64_t j = 0; j < Sq; j++) {
            const int got = call.data<uint8_t>("mask")[((b * H + h) * Sq + j) * Sk + i];
            wrong += got != (drawn ? keeps(0.3, uint64_t(-5), 7, b, h, i, j) : keeps(0.3, 11, 13, b, h, i, j));
            kept += got;
          }
    CHECK(wrong == 0);
    const double n = double(B * H * Sq * Sk), rate = 179.0 / 256;
    CHECK(std::abs(kept - n * rate) < 5 * std::sqrt(n * rate * (1 - rate))); // five standard deviations; the seed is fixed
  }
}

TEST_CASE("dropout: strobe_dropout_mask runs on the caller's threads") {
  test::Call call;
  strobe_tensor &keep = call.add("mask", DType::boolean, {2, 3, 21, 35});
  int32_t items = 0;
  call.execution.threads = 4, call.execution.pool = &items;
  call.execution.parallel = [](void *pool, int32_t n, void (*body)(void *, int32_t), void *arg) {
    *static_cast<int32_t *>(pool) += n;
    for (int32_t i = 0; i < n; i++) body(arg, i);
  };
  REQUIRE(strobe_dropout_mask(&call.attention, nullptr, &keep, &call.execution) == STROBE_OK);
  CHECK(items == 2 * 3 * 2); // one item per block of 16 queries
  keep.shape[2] = 0;
  REQUIRE(strobe_dropout_mask(&call.attention, nullptr, &keep, &call.execution) == STROBE_OK);
  CHECK(items == 2 * 3 * 2);
  call.execution.threads = -1;
  CHECK(strobe_dropout_mask(&call.attention, nullptr, &keep, &call.execution) == STROBE_INVALID_ARGUMENT);
  CHECK(std::string(strobe_last_error()).starts_with("execution.threads: -1;"));
}

TEST_CASE("dropout: strobe_dropout_mask refuses what it cannot write") {
  test::Call call;
  strobe_tensor &keep = call.add("mask", DType::boolean, {1, 1, 4, 4}), whole = keep;
  auto refused = [&](const char *message) {
    CHECK(strobe_dropout_mask(&call.attention, nullptr, &keep, nullptr) == STROBE_INVALID_ARGUMENT);
    CHECK(std::string(strobe_last_error()).starts_with(message));
    CHECK(test::lines(strobe_last_error()).size() == 1);
    keep = whole, call.attention.dropout = 0;
  };
  call.attention.dropout = 1;
  refused("dropout: 1;");
  keep.dtype = STROBE_FLOAT32;
  refused("keep: dtype float32; accepted is bool");
  keep.rank = 3;
  refused("keep: rank 3");
  keep.strides[3] = 0;
  refused("keep: strides (16, 16, 4, 0)");
  keep.device_type = STROBE_CUDA;
  refused("keep: lies on CUDA device 0; accepted is the CPU");
  CHECK(strobe_dropout_mask(&call.attention, nullptr, nullptr, nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(strobe_last_error() == std::string("keep: missing; accepted is a tensor"));
}
