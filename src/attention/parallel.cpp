// Execution: the number of threads, and a parallel region on the caller's threads or on threads started for it.
#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#include "attention/attention.h"
#include "attention/refusal.h"

namespace strobe {
namespace {

// The items of one region. The first exception of a body stops the region, and is thrown again in the caller's thread.
class Region {
public:
  Region(int32_t n, void (*body)(void *, int32_t), void *arg) : n(n), body(body), arg(arg) {}

  // The work of one thread: takes items until none is left.
  void work() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) item(static_cast<int32_t>(i));
  }

  void item(int32_t i) noexcept {
    handed_out.fetch_add(1, std::memory_order_relaxed);
    if (failed.load(std::memory_order_relaxed)) return;
    try {
      body(arg, i);
    } catch (...) {
      std::lock_guard hold(lock);
      if (!error) error = std::current_exception();
      failed.store(true, std::memory_order_relaxed);
    }
  }

  void finish() const {
    if (error) std::rethrow_exception(error);
    if (handed_out != n)
      refuse("execution.parallel", Code::value,
             "ran {0} bodies of {1}; accepted is a function that runs each of [0, n) once and returns after the last", handed_out.load(),
             n);
  }

private:
  const int32_t n;
  void (*const body)(void *, int32_t);
  void *const arg;
  std::atomic<int64_t> next = 0, handed_out = 0;
  std::atomic<bool> failed = false;
  std::mutex lock;
  std::exception_ptr error;
};

} // namespace

void Execution::run(int32_t n, void (*body)(void *arg, int32_t i), void *arg) const {
  if (n <= 1 || threads <= 1) {
    for (int32_t i = 0; i < n; i++) body(arg, i);
    return;
  }
  Region region(n, body, arg);
  if (parallel) {
    // No exception may cross the caller's frames, which may be C.
    parallel(pool, n, [](void *r, int32_t i) { static_cast<Region *>(r)->item(i); }, &region);
  } else {
    std::vector<std::thread> team;
    try {
      for (int32_t t = 1; t < std::min(threads, n); t++) team.emplace_back(&Region::work, &region);
    } catch (const std::system_error &) {
      // The system has no more threads; the started threads do the work.
    } catch (const std::bad_alloc &) {}
    region.work();
    for (std::thread &thread : team) thread.join();
  }
  region.finish();
}

} // namespace strobe
