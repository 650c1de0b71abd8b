// A process may fork at any time, from any thread; its child then has one thread and whatever state the others were in.
#pragma once

namespace strobe::cuda {

// Stands around work that a child could not finish (loading a library, compiling): a fork waits until no thread is within. A thread that is
// within must not enter again; a fork of its own does not wait, and that child has to run another program.
class ForkGate {
public:
  ForkGate();
  ~ForkGate();
  ForkGate(const ForkGate &) = delete;
  ForkGate &operator=(const ForkGate &) = delete;
};

// How many forks lie between this process and the one that first asked.
int forks();

} // namespace strobe::cuda
