// A process may fork at any time, from any thread; its child then has one thread and whatever state the others were in.
#pragma once

namespace strobe::cuda {

// A fork waits until nobody is within: around work that a child could not finish (loading a library, compiling). Not within itself;
// a fork by the same thread within does not wait, and its child has to run another program.
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
