// A process may fork at any time, from any thread. The child has only the forking thread, and the state that other threads have reached.
#pragma once

namespace strobe::cuda {

// Surrounds work that a child could not finish (loading a library, compiling). A fork waits until no thread is within the gate. A thread
// within the gate must not enter again; if it forks itself, the fork does not wait, and the child must run another program.
class ForkGate {
public:
  ForkGate();
  ~ForkGate();
  ForkGate(const ForkGate &) = delete;
  ForkGate &operator=(const ForkGate &) = delete;
};

// How often the process has forked, counted from the process that first called this function to this descendant of it.
int forks();

} // namespace strobe::cuda
