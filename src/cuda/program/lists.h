// Lists in device memory that have gaps between their integers: kernels read copies of them in the workspace (kernels/passes/lists.h).
#pragma once
#include <optional>

#include "attention/attention.h"
#include "cuda/program/addresses.h"
#include "cuda/program/program.h"

namespace strobe::cuda {

// Takes room for the copies, points p's lists at them, and answers with the launch that makes them; nothing if no list has to be copied. A
// page table whose rows alone are apart is read where it lies.
std::optional<Launch> copy_lists(Problem &p, Scratch &);
// The names of those lists of a program's call that are copies; empty: none.
std::string copied_lists(const Problem &);
// A run's call with the copies, which have been made, in place of the lists. marked: the program's.
Problem with_copies(const Problem &, const Problem &marked, const Addresses &);

} // namespace strobe::cuda
