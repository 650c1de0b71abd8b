#include "cuda/driver/fork.h"

#include <pthread.h>

#include <condition_variable>
#include <mutex>

namespace strobe::cuda {
namespace {

struct Gate {
  std::mutex door; // locked by a thread while it enters, and by a waiting fork, so that no more threads enter
  std::mutex mutex;
  std::condition_variable empty;
  int within = 0;
  int forks = 0;

  Gate();
};

Gate &gate() {
  static Gate *const only = new Gate; // never destroyed: other threads may still run at exit
  return *only;
}

thread_local int depth = 0; // how many gates this thread has entered

// A driver call within the gate may itself fork (cuInit does, to run nvidia-modprobe). Such a fork must not wait, because it would wait for
// itself. Its child runs another program.
void before_fork() {
  if (depth) return;
  Gate &g = gate();
  g.door.lock();
  std::unique_lock lock(g.mutex);
  g.empty.wait(lock, [&] { return g.within == 0; });
  lock.release(); // held until the fork is done
}
void after_fork() {
  if (!depth) gate().mutex.unlock(), gate().door.unlock();
}
void in_child() { gate().forks++, after_fork(); }

Gate::Gate() { pthread_atfork(before_fork, after_fork, in_child); }

// Creates the gate before main() or in dlopen(). Otherwise a process could fork while another thread creates it.
[[maybe_unused]] const Gate &early = gate();

} // namespace

ForkGate::ForkGate() {
  const std::lock_guard pass(gate().door);
  const std::lock_guard lock(gate().mutex);
  gate().within++;
  depth++;
}
ForkGate::~ForkGate() {
  depth--;
  const std::lock_guard lock(gate().mutex);
  if (--gate().within == 0) gate().empty.notify_all();
}
int forks() { return gate().forks; }

} // namespace strobe::cuda
