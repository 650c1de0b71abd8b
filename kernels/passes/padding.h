// Clears packed tokens that belong to no sequence (padding at the end, and tokens that cu_seqlens leave out): out 0, LSE -inf, gradients 0.
// Each group of thread blocks takes the tokens before one sequence, clamped as in all other kernels; the last group takes the tokens after
// all sequences. In dense tensors each group takes the keys of one sequence that do not count (seqused_k).
#pragma once
#include "../attention/part.h"
#include "../ptx/math.h"
#include "config.h"

namespace strobe::passes {

template <PaddingConfig C> struct Padding {
  using Arguments = typename Either<C.backward != 0, BackwardArguments, ForwardArguments>::type;
  using T = Result<C.dtype, C.partial != 0>;
  using Lse = typename Element<C.dtype>::real;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 1;

  static __device__ void run(const Arguments &a) {
    const Inputs &in = a.in;
    const i32 blocks = (i32)gridDim.x / (in.batch + (C.packed ? 1 : 0)), group = (i32)blockIdx.x / blocks, first = (i32)blockIdx.x % blocks;
    const i32 b = C.packed ? 0 : group;
    Range q = {0, in.total_q}, k = {0, in.total_k};
    if constexpr (!C.packed) {
      q = {0, 0}, k = {in.sequence<C.keys()>(b).band.seqlen_k, in.seqlen_k};
    } else if (group > 0) {
      const Sequence before = in.sequence<C.keys()>(group - 1);
      q.begin = before.q0 + before.band.seqlen_q, k.begin = before.k0 + before.band.seqlen_k;
    }
    if (C.packed && group < in.batch) {
      const HeldRows behind = in.held<C.keys()>(group);
      q.end = behind.q0, k.end = behind.k0;
    }
    if constexpr (C.adds) return; // gradients of padding are not added to
    const T zero = Convert<T>::from(Lse(0));
    if constexpr (C.backward) {
      fill(a.dq, b, in.heads, in.head_dim, q, first, blocks, zero);
      fill(a.dk, b, in.heads_kv, in.head_dim, k, first, blocks, zero);
      fill(a.dv, b, in.heads_kv, in.head_dim_v, k, first, blocks, zero);
    } else {
      fill(a.out, b, in.heads, in.head_dim_v, q, first, blocks, zero);
      fill(a.lse, b, in.heads, 1, q, first, blocks, minus_infinity<Lse>());
      if constexpr (C.partial) {
        Operand low = a.lse;
        if (low) low.data = a.lse.template at<Lse>(0, 0, 0, 0) + in.part->lse_low;
        fill(low, b, in.heads, 1, q, first, blocks, Lse(0));
      }
    }
  }

private:
  template <class E> static __device__ void fill(const Operand &to, i32 b, i32 heads, i32 width, Range rows, i32 first, i32 step, E x) {
    if (!to) return;
    for (i64 i = rows.begin + first; i < rows.end; i += step)
      for (i32 n = (i32)threadIdx.x; n < heads * width; n += kThreads) *to.at<E>(b, n / width, i, n % width) = x;
  }
};

} // namespace strobe::passes
