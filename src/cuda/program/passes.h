// The launches that families make beside their own kernels, and their order. The kernels are in kernels/passes, except settle and dbias of
// cuda-simt: those are its own, and share kernels/device/settle_row.h and bias_gradient.h with the kernels of the other families.
#pragma once
#include <optional>

#include "../../../kernels/attention/arguments.h"
#include "../../../kernels/passes/config.h"
#include "attention/attention.h"
#include "cuda/driver/device.h"
#include "cuda/program/arguments.h"
#include "cuda/program/program.h"

namespace strobe::cuda {

// A launch that reads K and V, with scales if they are quantised.
template <class Config, class Arguments>
Launch with_scales(const Problem &p, const KernelSource &source, const Config &config, int64_t grid, int32_t threads, int32_t shared_bytes,
                   const Arguments &arguments) {
  if (!p.quantised()) return Launch(source, config, grid, threads, shared_bytes, arguments);
  QuantisedArguments<Arguments> all{};
  static_cast<Arguments &>(all) = arguments, all.scales = key_scales(p);
  return Launch(source, config, grid, threads, shared_bytes, all);
}

// The number of splits of the keys if query tiles are too few to fill the GPU: as many splits as fill `slots` slots for thread blocks once,
// since fewer leave slots idle and more begin a second wave. At most `most`, since each split has an O of its own.
int32_t splits_to_fill(int64_t slots, int64_t ctas, int64_t most);
// The largest number of splits in which each split has enough keys to be worth an O of its own, on tensor cores by mma.sync.
int64_t most_splits(const Problem &);
// Memory for the splits' results, if a.splits says that there are several.
void take_splits(ForwardArguments &a, const Problem &, Scratch &);
// Memory for the results of shares of the keys, for sequences whose lengths lie in the GPU's memory and may be uneven.
struct UnevenShares {
  int64_t most = 0;   // shares over all sequences; 0: no shares are made, and take_splits() serves the call
  int32_t likely = 0; // shares per sequence, if all sequences have their maximum length
};
UnevenShares take_uneven_shares(ForwardArguments &a, const Problem &, Scratch &, int64_t slots, int64_t blocks_of_share);
// Appends the pass that combines the results of splits or shares, after the launch that computes them.
void combine_splits(Program &, const Problem &, const ForwardArguments &a);

// What memory a backward needs for sums. take_sums() reserves memory for D and LSE's correction; if dQ is asked for, for dQ's sum, to which
// the thread blocks of several key tiles add; with `turns`, for a ticket and that many counters of turns, which begin at 0.
struct BackwardSums {
  int64_t real_bytes = 4;         // bytes of an element of D and of dQ's sum
  int64_t dq = 0;                 // reals of dQ's sum
  std::optional<int64_t> turns{}; // null: the order of additions is free
  bool zero_dq = false;           // the launch that computes D does not set dQ's sum to 0
};
// The number of sums, of `reals` reals each, that dQ has: in FP32 one for each keys_of_dq_sum() keys, but fewer if the sums would be large.
// Invariant: the size of the sums does not matter.
int32_t dq_sums(const Problem &, int64_t reals);
void take_sums(Program &, BackwardArguments &a, const Problem &, Scratch &, const BackwardSums &);

// A backward's launches, in the order in which they run.
struct BackwardLaunches {
  std::optional<Launch> delta{};         // D of each row
  std::optional<Launch> settle{};        // for rows whose LSE is large: D again, and LSE's correction
  std::optional<Launch> rows_by_tiles{}; // LSE and D in the main kernel's order
  std::optional<Launch> main{};          // dK, dV and dQ's sum, if one of dK, dV and dQ is asked for
  std::optional<Launch> shares{};        // dK and dV as sums over the shares of a key head's query heads
  std::optional<Launch> dq{};            // dQ from its sum, if dQ is asked for
  std::optional<Launch> dbias{};
};
void push(Program &, const Problem &, const BackwardArguments &, BackwardLaunches &&); // appends them, and dsinks

// The Config of the following delta() and dq_from_sum(), which go by the main kernel's tiles. form: passes::kFragments or kWarpgroups.
passes::RowsConfig rows_config(const Problem &, int32_t head_dim, int32_t tile_q, int32_t form, bool aligned);
// delta() computes D and sets dQ's sum to 0; dq_from_sum() computes dQ from its sum.
Launch delta(const Problem &, const passes::RowsConfig &, const BackwardArguments &);
Launch dq_from_sum(const Problem &, const passes::RowsConfig &, const BackwardArguments &);
// delta() and dq_from_sum() in FP32 and FP64, where D is summed in the order of dP's products.
Launch delta(const Problem &, const BackwardArguments &);
Launch dq_from_sum(const Problem &, const BackwardArguments &, int32_t head_dim);

// Memory for dK and dV of each of `shares` shares of a key head's query heads, and the launch that adds them up; no launch if neither dK
// nor dV is asked for.
struct Shares {
  Operand dk, dv;
  std::optional<Launch> sum;
};
Shares take_shares(const BackwardArguments &a, const Problem &, Scratch &, int64_t shares);

// settle() and bias_gradient() recompute tiles of scores on tensor cores. tensor_cores_settle(): whether some tile fits the GPU and the
// blocks of a sparse mask, so that both have a launch.
bool tensor_cores_settle(const Problem &, const Device &);
Launch settle(const Problem &, const Device &, const BackwardArguments &);
std::optional<Launch> bias_gradient(const Problem &, const Device &, const BackwardArguments &); // if dbias is asked for

// Appends the launches for max_logit and column_sums, after a forward that writes LSE. Adds their time to the predicted time, and a note
// that says how much.
void auxiliary(Program &, const Problem &, const Device &, Scratch &);

Launch padding(const Problem &, Operation); // packed tokens of no sequence: results 0, LSE -inf

} // namespace strobe::cuda
