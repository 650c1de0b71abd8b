// The functions that engines also have hand-written code for: the options that ask for them, and the graphs that compute them.
#pragma once
#include <utility>

#include "attention/reasons.h"
#include "score/program.h"

namespace strobe::score {

// Checks the options that say what becomes of x.
void check_forms(const strobe_attention &, Reasons &);
// Checks that float32, in which engines compute inputs of this dtype, holds the options' numbers.
void check_range(const strobe_attention &, DType of_q, Reasons &);
// What the options ask for. Options that were refused ask for anything.
BuiltIn asked_form(const strobe_attention &);

// Gives the program this form, with the form's own graph.
void set_form(Program &, const BuiltIn &);
// Gives a program whose score's graph computes one of the forms that form, or finds the penalty in it.
void match(Program &);
// Adds ALiBi to the program's score.
void add_alibi(Program &, const AlibiSlopes &);

// For explain(): what the program computes, as (label, value).
std::vector<std::pair<const char *, std::string>> in_words(const Program &);

} // namespace strobe::score
