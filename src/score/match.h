// Recognises the functions that engines have hand-written code for.
#pragma once
#include "score/program.h"

namespace strobe::score {

// Gives the program this form, with the form's own graph.
void set_form(Program &, const BuiltIn &);

// Sets the form of the program's score, and its parameters. A score of a built-in form is replaced by the form's own graph.
void match(Program &);

} // namespace strobe::score
