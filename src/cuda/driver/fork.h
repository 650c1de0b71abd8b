// A process may fork at any time, from any thread. The child has only that thread, and the state that the other threads had reached.
#pragma once

namespace strobe::cuda {

// Surrounds work that a child could not finish (loading a library, compiling): a fork waits until no thread is within. A thread that is
// within must not enter again; a fork of its own does not wait, and its child must run another program.
class ForkGate {
public:
  ForkGate();
  ~ForkGate();
  ForkGate(const ForkGate &) = delete;
  ForkGate &operator=(const ForkGate &) = delete;
};

// The number of forks between the process that first called this function and the present one.
int forks();

} // namespace strobe::cuda
