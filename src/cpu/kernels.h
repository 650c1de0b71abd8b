// What an instruction set's translation unit contains, except for its table.
#pragma once
#include "auxiliary.h"
#include "backward_jvp.h"
#include "decode.h"
#include "fma.h"
#include "isa.h"
#include "jvp.h"
#include "queries.h"

namespace strobe::inline STROBE_ISA {

template <class Math>
constexpr CpuKernels kernels_of(const char *arithmetic, TileSizes forward_tile, TileSizes backward_tile,
                                decltype(score::Bytecode::run) run_program = nullptr) {
  return {.arithmetic = arithmetic,
          .quantised = Math::kQuantised,
          .decodes_quantised_from = Math::kDecodesQuantised ? Math::kFewRows + 1 : 0,
          .rows_in_place = Math::kManyInPlace ? kMostDecodedRows : Math::kFewRows,
          .planes = Math::kPlanes,
          .tiles = {forward_tile, backward_tile, backward_tile, backward_tile},
          .workspace = {forward_workspace<ForwardPass<Math>>, backward_workspace<GradientPass<Math>>, forward_workspace<JvpPass<Math>>,
                        backward_workspace<BackwardJvpPass<Math>>},
          .run = {forward<ForwardPass<Math>>, backward<GradientPass<Math>>, forward<JvpPass<Math>>, backward<BackwardJvpPass<Math>>},
          .decode_keys = DecodeTile::kSpan,
          .decode_workspace = decode_workspace<Math>,
          .decode = decode<Math>,
          .auxiliary_workspace = auxiliary_workspace<Math>,
          .auxiliary = auxiliary<Math>,
          .dequantise_query = dequantise_query,
          .run_program = run_program};
}

} // namespace strobe::inline STROBE_ISA
