#include "cuda/fork.h"

#include <pthread.h>

#include <new>
#include <shared_mutex>

namespace strobe::cuda {
namespace {

struct Gate {
  std::shared_mutex mutex;
  int forks = 0;

  Gate();
};

Gate &gate() {
  static Gate *const only = new Gate; // never destroyed: other threads may still run at exit
  return *only;
}

Gate::Gate() {
  pthread_atfork([] { gate().mutex.lock(); }, [] { gate().mutex.unlock(); },
                 [] {
                   new (&gate().mutex) std::shared_mutex; // its owner has another thread id here, so it cannot be unlocked
                   gate().forks++;
                 });
}

// Before main or in dlopen: no other thread can be halfway through the first call when a process forks.
[[maybe_unused]] const Gate &early = gate();

} // namespace

ForkGate::ForkGate() { gate().mutex.lock_shared(); }
ForkGate::~ForkGate() { gate().mutex.unlock_shared(); }
int forks() { return gate().forks; }

} // namespace strobe::cuda
