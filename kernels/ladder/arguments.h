// The arguments of the rungs beyond those of the call.
#pragma once
#include "../attention/arguments.h"

namespace strobe::ladder {

// naive: a product of the whole matrices, head by head. scores: (batch, heads, seqlen_q, seqlen_k), one of S, P, dP, dS.
struct ProductArguments {
  Inputs in;
  float *scores;
  Operand x, y, out;
  double factor;
};

// naive: row by row of (batch, heads, seqlen_q, seqlen_k).
struct SoftmaxArguments {
  Inputs in;
  float *P;  // forward: S in, P out
  float *dP; // backward: dP in, dS out
  Operand lse;
};

// FlashAttention-1 keeps l and m of each query in global memory.
struct Flash1Arguments {
  ForwardArguments call;
  float *l, *m; // (rows)
};

} // namespace strobe::ladder
