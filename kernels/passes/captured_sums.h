// Gradients of captured tensors (device/captured.h): from sums of lines and tables to the elements.
#pragma once
#include "../device/captured.h"

namespace strobe::passes {

// Adds each line's sum to the element that its pairs read. A thread block takes some lines of a (batch, head) pair.
template <CapturedScatterConfig C> struct CapturedScatter {
  using Arguments = CapturedArguments;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 1;

  static __device__ __forceinline__ void run(const Arguments &a) {
    const Inputs &in = a.in;
    const u32 pairs = (u32)(in.batch * in.heads);
    const i32 b = (i32)(blockIdx.x % pairs / in.heads), h = (i32)(blockIdx.x % pairs % in.heads);
    const i64 first = (i64)(blockIdx.x / pairs) * kThreads, step = (i64)(gridDim.x / pairs) * kThreads;
    const Sequence s = in.sequence<F>(b);
    const i32 seqlen_q = (i32)s.band.seqlen_q, seqlen_k = (i32)s.band.seqlen_k;
    const Scores<F, T, kFunctions> scores(in, s, b);
    const auto along = [&](i64 lines, const auto &take) { // whole warps
      for (i64 n = first + threadIdx.x / 32 * 32; n < lines; n += step) take((i32)n + (i32)threadIdx.x % 32);
    };
    // Inlined however long a function of many reads makes it: a call would pass its captures through local memory.
    if constexpr (C.rows.bits != 0)
      along(seqlen_q, [&](i32 i) __attribute__((always_inline)) {
        add<C.rows>(a, kRows, in.row_index(b, h, s.q0 + i), scores.pair(scores.row(i, h), 0), i < seqlen_q);
      });
    if constexpr (C.columns.bits != 0)
      along(seqlen_k, [&](i32 j) __attribute__((always_inline)) {
        add<C.columns>(a, kColumns, column_index(in, b, h, s.k0 + j), scores.pair(scores.row(0, h), j), j < seqlen_k);
      });
    if constexpr (C.diagonals.bits != 0) {
      const Diagonals diagonals(in, C.tile);
      along((i64)diagonals.count() * 2 * C.tile, [&](i32 n) __attribute__((always_inline)) {
        const i32 of_tiles = n / (2 * C.tile), i_minus_j = diagonals.difference(of_tiles) + n % (2 * C.tile) - C.tile;
        const auto row = scores.row(max(i_minus_j, 0), h);
        add<C.diagonals>(a, kDiagonals, diagonals.line(in, b, h, 0, n), scores.pair(row, max(-i_minus_j, 0)),
                         i_minus_j < seqlen_q && -i_minus_j < seqlen_k);
      });
    }
  }

private:
  static constexpr Features F = C.features;
  static constexpr Functions kFunctions = C.dtype == kF16 || C.dtype == kBF16 ? Functions::half : Functions::full;
  using T = typename Element<C.dtype>::real;
  using Of = CallersFunctions<F.program, F.program_high>;

  // at: one of the line's pairs
  template <LoadSet kLoads>
  static __device__ __forceinline__ void add(const Arguments &a, i32 lines, i64 line, const PlaceOfPair &at, bool has) {
    each_load<kLoads>([&](auto load) {
      constexpr int kLoad = decltype(load)::kNumber, kTensor = Of::captured_of(kLoad);
      const CapturedGradient &g = a.gradients[kTensor];
      T x = has ? ((const T *)a.lines[lines])[kLoads.rank(kLoad) * a.count[lines] + line] : T(0);
      const i64 element = Of::template element<kFunctions, kLoad>(a.in.function, g, at, T(0));
      if (!is_number(size_bits(x))) a.broken[g.first + element] = 1, x = 0;
      Fixed<T> whole(x, fixed_exponent<T>(a.largest[kTensor], g.log2_values), g.log2_values);
      if (__all_sync(0xFFFFFFFFu, element == __shfl_sync(0xFFFFFFFFu, element, 0))) { // many lines often read one element
        whole.add_over_warp();
        if (threadIdx.x % 32 != 0) return;
      }
      add_to(a, g.first + element, whole);
    });
  }
};

// Converts the sums to the gradients' dtypes, and adds those of tables. A thread block has some elements, and several threads for each.
template <CapturedResultConfig C> struct CapturedResult {
  using Arguments = CapturedArguments;
  using T = typename Element<C.dtype>::real;
  static constexpr int kThreads = C.threads(), kBlocksPerSm = 1, kElements = C.elements(), kShares = kThreads / kElements;

  static __device__ void run(const Arguments &a) {
    __shared__ double parts[kShares][kElements];
    const i32 lane = (i32)threadIdx.x % kElements, share = (i32)threadIdx.x / kElements;
    const i64 n = (i64)blockIdx.x * kElements + lane;
    const CapturedGradient *g = nullptr;
    i32 tensor = 0;
#pragma unroll
    for (i32 k = 0; k < FunctionArguments::kCaptured; ++k)
      if (a.gradients[k].count && n >= a.gradients[k].first && n < a.gradients[k].first + a.gradients[k].count)
        g = &a.gradients[k], tensor = k;
    using Real = typename Either<C.dtype == kF32 || C.dtype == kF64, double, float>::type;
    double sum = 0;
    if (g && g->table >= 0) {
      const Real *const table = (const Real *)a.tables + g->table + (n - g->first);
#pragma unroll 4
      for (i32 block = share; block < a.table_blocks; block += kShares) sum += (double)table[(i64)block * a.table_elements];
    }
    parts[share][lane] = sum;
    __syncthreads();
    if (share || !g) return;
    for (i32 k = 1; k < kShares; ++k) sum += parts[k][lane];
    const u64 largest = a.largest[tensor];
    if (a.broken[n])
      sum = __longlong_as_double(0x7FF8ll << 48);
    else if (largest)
      sum += fixed_sum<T>(a, n, fixed_exponent<T>(largest, g->log2_values), g->log2_values);
    i64 rest = n - g->first, distance = 0;
#pragma unroll
    for (int axis = 3; axis >= 0; --axis) distance += rest % g->size[axis] * g->stride[axis], rest /= g->size[axis];
    if (g->dtype == kF64)
      ((double *)g->data)[distance] = sum;
    else if (g->dtype == kF32)
      ((float *)g->data)[distance] = (float)sum;
    else if (g->dtype == kF16)
      ((f16 *)g->data)[distance] = Convert<f16>::from((float)sum);
    else
      ((bf16 *)g->data)[distance] = Convert<bf16>::from((float)sum);
  }
};

} // namespace strobe::passes
