// The quantities of predictions, compared with the tiles that kernels walk over, and with brute force.
#include "cuda/program/prediction.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "attention/work.h"
#include "cuda/families/sm90_steps.h"
#include "cuda/program/part.h"
#include "kernels/attention/schedule.h"

using namespace strobe;
using namespace strobe::cuda;

namespace {

Problem banded(int64_t queries, int64_t keys, int64_t left, int64_t right) {
  Problem p;
  p.batch = 2, p.heads = 6, p.heads_kv = 2, p.seqlen_q = queries, p.seqlen_k = keys, p.head_dim = p.head_dim_v = 64;
  p.total_q = 2 * queries, p.total_k = 2 * keys, p.window_left = left, p.window_right = right;
  return p;
}

Band band(const Problem &p) { return Band::make(p.seqlen_q, p.seqlen_k, p.bottom_right, p.window_left, p.window_right); }

// How many keys each query tile walks over, in whole tiles, as in the kernels of the forward.
std::vector<double> walked_keys(const Problem &p, int64_t tile_q, int64_t tile_k) {
  std::vector<double> found;
  for (i64 q0 = 0; q0 < p.seqlen_q; q0 += tile_q) {
    Schedule schedule(band(p), q0, std::min<i64>(q0 + tile_q, p.seqlen_q), tile_k, 16);
    KeyTile tile;
    double keys = 0;
    while (schedule.next(tile)) keys += double(tile_k);
    found.push_back(keys);
  }
  return found;
}
// How many queries each key tile walks over: on a fixed grid, all tiles from the first to the last one that sees a key.
std::vector<double> walked_queries(const Problem &p, int64_t tile_q, int64_t tile_k) {
  std::vector<double> found;
  const Band sees = band(p);
  for (i64 k0 = 0; k0 < p.seqlen_k; k0 += tile_k) {
    i64 first = p.seqlen_q, last = -1;
    for (i64 i = 0; i < p.seqlen_q; i++)
      for (i64 j = k0; j < std::min<i64>(k0 + tile_k, p.seqlen_k); j++)
        if (sees.visible(i, j)) first = std::min<i64>(first, i), last = std::max<i64>(last, i);
    found.push_back(last < 0 ? 0 : double((last / tile_q - first / tile_q + 1) * tile_q));
  }
  return found;
}

} // namespace

TEST_CASE("predict: whole tiles of what a tile's rows see") {
  for (auto [queries, keys] : {std::pair{1, 1}, {16, 16}, {100, 100}, {512, 512}, {1, 700}, {300, 70}, {70, 300}})
    for (int64_t left : {kUnbounded, int64_t{0}, int64_t{40}, int64_t{1000}})
      for (int64_t right : {kUnbounded, int64_t{0}, int64_t{25}})
        for (bool bottom_right : {true, false})
          for (auto [tile_q, tile_k] : {std::pair{64, 64}, {128, 96}, {80, 128}, {16, 32}}) {
            Problem p = banded(queries, keys, left, right);
            p.bottom_right = bottom_right;
            for (Operation operation : {Operation::forward, Operation::backward}) {
              const bool forward = operation == Operation::forward;
              const std::vector<double> others = forward ? walked_keys(p, tile_q, tile_k) : walked_queries(p, tile_q, tile_k);
              const double own = forward ? double(tile_q) : 3.0 * double(tile_k); // three query heads share a key head
              double sum = 0;
              for (double x : others) sum += x;
              CAPTURE(queries);
              CAPTURE(keys);
              CAPTURE(left);
              CAPTURE(right);
              CAPTURE(forward);
              const Walks w = walks(p, operation, tile_q, tile_k);
              CHECK(w.blocks == double(others.size() * size_t(forward ? 12 : 4)));
              CHECK(w.mean == doctest::Approx(own * sum / double(others.size())));
              CHECK(w.longest == doctest::Approx(own * *std::max_element(others.begin(), others.end())));
            }
          }
}

TEST_CASE("predict: keys that a query sees in the mean") {
  for (auto [queries, keys] : {std::pair{1, 1}, {16, 16}, {1, 700}, {300, 70}, {70, 300}})
    for (int64_t left : {kUnbounded, int64_t{0}, int64_t{40}, int64_t{1000}})
      for (int64_t right : {kUnbounded, int64_t{0}, int64_t{25}, int64_t{250}})
        for (bool bottom_right : {true, false}) {
          Problem p = banded(queries, keys, left, right);
          p.bottom_right = bottom_right;
          const Band sees = band(p);
          int64_t scores = 0;
          for (i64 i = 0; i < queries; i++)
            for (i64 j = 0; j < keys; j++) scores += sees.visible(i, j);
          CAPTURE(queries);
          CAPTURE(keys);
          CAPTURE(left);
          CAPTURE(right);
          CAPTURE(bottom_right);
          CHECK(mean_keys(p, queries, keys) == doctest::Approx(double(scores) / double(queries)));
          CHECK(visible_scores(p) == doctest::Approx(12.0 * double(scores)));
        }
}

TEST_CASE("predict: blocks of threads in rounds") {
  const Walks equal{10, 5, 5}, longest_first{10, 5, 9};
  CHECK(equal.last(100) == 5);
  CHECK(equal.last(10) == 5);
  CHECK(equal.last(9) == 10); // one block needs another round
  CHECK(equal.last(1) == 50);
  CHECK(longest_first.last(100) == 9); // the longest block determines the end
  CHECK(longest_first.last(9) == 9);
  CHECK(longest_first.last(2) == 25); // short blocks fill the gaps
}

TEST_CASE("a workload takes its launches, its rows, its walks and what combines their parts") {
  Problem p = banded(256, 512, kUnbounded, kUnbounded);
  Device device{};
  device.sms = 4, device.clock_hz = 1e9;
  const Measured measured{.share_of_peak = {0.5, 0.25}, .launch_seconds = 1e-6, .block_seconds = {2e-6, 4e-6}};
  for (const Operation operation : {Operation::forward, Operation::backward})
    for (const int64_t parts : {1, 2})
      for (const bool dbias : {false, true}) {
        p.dbias = View{};
        if (dbias) p.dbias.dtype = DType::f32;
        const bool forward = operation == Operation::forward;
        const double products = forward ? 2 : dbias ? 7 : 5, rate = (forward ? 0.5 : 0.25) * 64 * 1e9 / (products * (96 + 32) * 3);
        const double expected = 3 * 1e-6 + (forward ? 0 : rows_seconds(p, 96, 32)) + (parts > 1 ? combining_seconds(p) : 0) +
                                seconds(walks(p, operation, 64, 32), device, 2, rate, forward ? 2e-6 : 4e-6, parts);
        const Workload work{.problem = p,
                            .operation = operation,
                            .device = device,
                            .rate = 64,
                            .operations = 3,
                            .resident = 2,
                            .launches = 3,
                            .parts = parts};
        CHECK(seconds(work, measured, 64, 32, 96, 32) == doctest::Approx(expected));
      }
}

TEST_CASE("prediction: bundles of heads are few, and nearly equal") {
  for (int64_t heads : {0, 1, 2, 7, 11, 16, 17, 34, 126}) {
    for (int64_t most : {0, 1, 3, 4, 16, 200}) {
      const int64_t size = even_bundle(heads, most), bundles = (heads + size - 1) / size;
      CHECK(size >= 1);
      CHECK(size <= std::max<int64_t>(1, std::min(heads, std::max<int64_t>(1, most))));
      CHECK(bundles * std::max<int64_t>(1, most) < heads + std::max<int64_t>(1, most)); // there are as few bundles as possible
      CHECK(bundles * size - heads < std::max<int64_t>(1, bundles));
    }
  }
}

TEST_CASE("prediction: blocks search for their tiles where that halves them") {
  Problem p = banded(1000, 1000, kUnbounded, kUnbounded);
  CHECK_FALSE(worth_numbering(p, 2000, 1000, 128)); // the sequences are not packed
  p.varlen = true;
  p.batch = 20;
  CHECK(worth_numbering(p, 1000 + 19 * 10, 1000, 128));  // 30 tiles instead of 160
  CHECK_FALSE(worth_numbering(p, 20 * 1000, 1000, 128)); // 177 tiles instead of 160
  p.batch = 0;
  CHECK_FALSE(worth_numbering(p, 500, 100, 128));
}
