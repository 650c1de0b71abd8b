// Lists in device memory whose integers are not adjacent. Kernels read copies in the workspace (kernels/passes/lists.h).
#pragma once
#include <optional>

#include "attention/attention.h"
#include "cuda/program/addresses.h"
#include "cuda/program/program.h"

namespace strobe::cuda {

// Reserves memory for the copies, points p's lists at them, and returns the launch that makes them; null if no list has to be copied. A
// page table with dense rows, even if the rows lie apart, is read in place.
std::optional<Launch> copy_lists(Problem &p, Scratch &);
// The names of the lists that are copied for this call; empty: none.
std::string copied_lists(const Problem &);
// The call of a run, with the finished copies in place of the lists. marked: the program's call, with marks in place of addresses.
Problem with_copies(const Problem &, const Problem &marked, const Addresses &);

} // namespace strobe::cuda
