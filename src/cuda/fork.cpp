#include "cuda/fork.h"

#include <pthread.h>

#include <mutex>
#include <new>
#include <shared_mutex>

namespace strobe::cuda {
namespace {

struct Gate {
  std::shared_mutex mutex; // shared by those within
  std::mutex door;         // each passes it; a fork that waits holds it, so that nobody new keeps it waiting
  int forks = 0;

  Gate();
};

Gate &gate() {
  static Gate *const only = new Gate; // never destroyed: other threads may still run at exit
  return *only;
}

void before_fork() { gate().door.lock(), gate().mutex.lock(); }
void in_parent() { gate().mutex.unlock(), gate().door.unlock(); }
void in_child() {
  new (&gate().mutex) std::shared_mutex; // its owner has another thread id here, so it cannot be unlocked
  gate().door.unlock();
  gate().forks++;
}

Gate::Gate() { pthread_atfork(before_fork, in_parent, in_child); }

// Before main or in dlopen: no other thread can be halfway through the first call when a process forks.
[[maybe_unused]] const Gate &early = gate();

} // namespace

ForkGate::ForkGate() {
  const std::lock_guard pass(gate().door);
  gate().mutex.lock_shared();
}
ForkGate::~ForkGate() { gate().mutex.unlock_shared(); }
int forks() { return gate().forks; }

} // namespace strobe::cuda
