// A process may fork at any time, from any thread; its child then has one thread, and the state that the others had reached.
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

// How many forks lie between this process and the one that first called this.
int forks();

} // namespace strobe::cuda
