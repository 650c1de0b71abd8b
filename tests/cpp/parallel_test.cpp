// Execution::run runs each item once, on its own threads or on the caller's, and exceptions reach the caller.
#include <doctest/doctest.h>

#include <atomic>
#include <set>
#include <thread>

#include "attention/attention.h"

using namespace strobe;

namespace {

Execution with(int32_t threads, strobe_parallel parallel = nullptr, void *pool = nullptr) {
  Execution e;
  e.threads = threads, e.parallel = parallel, e.pool = pool;
  return e;
}

template <class Body> void run(const Execution &e, int32_t n, Body &body) {
  e.run(n, [&](int32_t i) { body(i); });
}

// A caller's pool that runs the items backwards, on two threads, and counts its calls.
void backwards(void *pool, int32_t n, void (*body)(void *, int32_t), void *arg) {
  ++*static_cast<std::atomic<int> *>(pool);
  std::thread other([&] {
    for (int32_t i = n - 1; i >= n / 2; i--) body(arg, i);
  });
  for (int32_t i = n / 2 - 1; i >= 0; i--) body(arg, i);
  other.join();
}

} // namespace

TEST_CASE("parallel: each item once") {
  for (int32_t threads : {1, 2, 3, 8})
    for (int32_t n : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> count(n);
      auto body = [&](int32_t i) { count[i]++; };
      run(with(threads), n, body);
      std::atomic<int> calls = 0;
      run(with(threads, backwards, &calls), n, body);
      for (auto &c : count) CHECK(c == 2);
      CHECK(calls == (n > 1 && threads > 1 ? 1 : 0));
    }
}

TEST_CASE("parallel: one thread or one item stays in the caller") {
  std::set<std::thread::id> seen;
  auto body = [&](int32_t) { seen.insert(std::this_thread::get_id()); };
  run(with(1), 5, body);
  run(with(8), 1, body);
  CHECK(seen == std::set{std::this_thread::get_id()});
}

TEST_CASE("parallel: several threads do run at once") {
  std::atomic<int> arrived = 0;
  auto body = [&](int32_t) { // returns only when all three have begun
    for (arrived++; arrived < 3;) std::this_thread::yield();
  };
  run(with(3), 3, body);
  CHECK(arrived == 3);
}

TEST_CASE("parallel: nested regions") {
  std::atomic<int> count = 0;
  auto inner = [&](int32_t) { count++; };
  auto outer = [&](int32_t) { run(with(2), 5, inner); };
  run(with(3), 4, outer);
  CHECK(count == 20);
}

TEST_CASE("parallel: an exception reaches the caller and stops the rest") {
  std::atomic<int> pool = 0;
  for (const Execution &e : {with(1), with(4), with(4, backwards, &pool)}) {
    std::atomic<int> after = 0;
    auto body = [&](int32_t i) {
      if (i == 3) throw Error(STROBE_DEVICE_ERROR, "item 3");
      after++;
    };
    CHECK_THROWS_WITH_AS(run(e, 100, body), "item 3", Error);
    CHECK(after < 100);
  }
}

TEST_CASE("parallel: a caller's pool that drops or repeats items is found out") {
  auto drops = [](void *, int32_t n, void (*body)(void *, int32_t), void *arg) {
    for (int32_t i = 0; i < n - 1; i++) body(arg, i);
  };
  auto repeats = [](void *, int32_t n, void (*body)(void *, int32_t), void *arg) {
    for (int32_t i = 0; i < n; i++) body(arg, i);
    body(arg, 0);
  };
  auto nothing = [](int32_t) {};
  CHECK_THROWS_WITH_AS(run(with(2, drops), 5, nothing), doctest::Contains("execution.parallel: ran 4 bodies of 5"), Error);
  CHECK_THROWS_WITH_AS(run(with(2, repeats), 5, nothing), doctest::Contains("execution.parallel: ran 6 bodies of 5"), Error);
}

TEST_CASE("execution: its fields") {
  strobe_execution e{};
  e.size = sizeof e;
  auto refused = [&](const char *message) {
    CHECK_THROWS_WITH_AS(validate(&e), doctest::Contains(message), Error);
    e = {}, e.size = sizeof e;
  };
  CHECK(validate(nullptr).threads >= 1);
  CHECK(validate(&e).threads == validate(nullptr).threads);
  e.threads = 3;
  CHECK(validate(&e).threads == 3);
  e.threads = -1;
  refused("execution.threads: -1; accepted is 1 to 1024, or 0");
  e.threads = 1025;
  refused("execution.threads: 1025");
  e.reserved_sms = -1;
  refused("execution.reserved_sms: -1; accepted is 0 to one fewer than the GPU has");
  alignas(256) static char memory[512];
  e.workspace = memory + 64, e.workspace_bytes = 448;
  refused("execution.workspace: ");
  e.workspace_bytes = 448;
  refused("execution.workspace: null, with workspace_bytes 448");
  e.workspace = memory, e.workspace_bytes = 512;
  CHECK(validate(&e).workspace == memory);
  CHECK(validate(&e).workspace_bytes == 512);
}
