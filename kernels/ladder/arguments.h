// What the rungs take beside the arguments of the call.
#pragma once
#include "../attention/arguments.h"

namespace strobe::ladder {

// naive: a product of whole matrices, one head after another. scores: (batch, heads, seqlen_q, seqlen_k), one of S, P, dP, dS.
struct ProductArguments {
  Inputs in;
  float *scores;
  Operand x, y, out;
  double factor;
};

// naive: a pass over the rows of (batch, heads, seqlen_q, seqlen_k).
struct SoftmaxArguments {
  Inputs in;
  float *P;  // forward: S, replaced by P
  float *dP; // backward: dP, replaced by dS
  Operand lse;
};

// FlashAttention-1 keeps l and m of each query in global memory.
struct Flash1Arguments {
  ForwardArguments call;
  float *l, *m; // (rows)
};

} // namespace strobe::ladder
