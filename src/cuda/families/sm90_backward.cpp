// The backward of kernels/sm90. Its launches: LSE, D and zeros in dQ's sum; dQ, dK and dV; rounding of dQ to 16 bits; dsinks.
#include "cuda/families/sm90_backward.h"

#include <cmath>

#include "../../../kernels/sm90/backward/config.h"
#include "attention/text.h"
#include "cuda/families/sm90_backward_forms.h"
#include "cuda/families/sm90_backward_work.h"
#include "cuda/families/sm90_mask.h"
#include "cuda/families/sm90_steps.h"
#include "cuda/program/arguments.h"
#include "cuda/program/captured.h"
#include "cuda/program/part.h"
#include "cuda/program/passes.h"
#include "cuda/program/tiles.h"

namespace strobe::cuda {

template <class V> void each_pointer(const HopperBackwardArguments &a, V &visit) {
  each_pointer(static_cast<const BackwardArguments &>(a), visit);
  for (const MappedOperand *x : {&a.tma_q, &a.tma_k, &a.tma_v, &a.tma_dout, &a.tma_bias}) visit(x->map);
  visit(a.mask_bits.data), visit(a.dk_shares.data), visit(a.dv_shares.data);
}

namespace {

using sm90::BackwardConfig;

constexpr KernelSource kBackward{"sm90/backward/backward.h", "strobe::sm90::Backward", "strobe::sm90::BackwardConfig", true};
constexpr KernelSource kByRoles{"sm90/backward/roles.h", "strobe::sm90::BackwardRoles", "strobe::sm90::BackwardConfig", true};

// The reason why this backward does not support the call; empty if it does.
std::string refusal(const Problem &p, const Features &f) {
  if (p.accumulate && p.dbias) return "its backward adds to no gradients beside that of a bias";
  if (p.invariant && p.bias) return kNoInvariantBias;
  if (f.function == kProgram && f.dropout) // the kernel marks dropped elements by a negative P times the derivative
    return text("its backward takes no dropout beside ", score_in_words(p));
  if (p.invariant && f.function == kCapped)
    return text("has no invariant backward with ", score_in_words(p), ": whether it is approximated is said of many scores at once");
  if (beyond_128_keys(p)) {
    if (f.bias && (f.mask || f.penalty || f.dropout))
      return text("its backward takes a bias with no mask, alibi_slopes or dropout where head dimensions exceed ", kMostDimOf128Keys);
    if (f.curved() && f.penalty && f.dropout)
      return text("its backward takes ", score_in_words(p), " with at most one of alibi_slopes and dropout where head dimensions exceed ",
                  kMostDimOf128Keys);
    if (f.part && f.curved())
      return text("its backward takes ", score_in_words(p), " not in parts where head dimensions exceed ", kMostDimOf128Keys);
    if (f.function == kHyperbolic || f.function == kProgram)
      return text("its backward does not take ", score_in_words(p), " where head dimensions exceed ", kMostDimOf128Keys);
  }
  if (!p.q || !p.k || !p.v || !p.dout || !p.seqlen_q || !p.seqlen_k) return "there are no queries or no keys to fetch";
  if (std::string reason = unmapped_inputs(p); !reason.empty()) return reason;
  if (std::string reason = unmapped("dout", p.dout, p.head_dim_v); !reason.empty()) return reason;
  for (const auto &[name, view, columns] : {std::tuple{"out", &p.out, p.head_dim_v}, std::tuple{"dq", &p.dq, p.head_dim},
                                            std::tuple{"dk", &p.dk, p.head_dim}, std::tuple{"dv", &p.dv, p.head_dim_v}})
    if (!aligned(*view, columns)) return text(name, "'s rows do not lie on 16-byte addresses");
  return broadcast_row({&p.q, &p.dout}, {&p.k, &p.v}, p);
}

Features backward_features(const Problem &p) {
  Features f = hopper_features(p);
  const double scale = std::abs(p.scale); // a backward has LSE, so the sign does not matter
  if (f.function != kHyperbolic) f.scaled = scale != 0 && !(scale > 1e-30);
  return f;
}

void take_workspace(HopperBackwardArguments &a, const Problem &p, const BackwardConfig &c, const Work &work, Scratch &scratch) {
  a.rows = scratch.take<float>(work.tiles_q * (c.lse_bytes() + c.row_bytes()) / 4);
  a.query_tiles = i32(p.heads ? work.tiles_q / (p.varlen ? p.heads : p.batch * p.heads) : 0);
  const int64_t dq_tiles = c.owns_dq ? work.blocks * p.group() * a.query_tiles : work.tiles_q;
  if (p.dq && !c.dq_sum_in_shared()) a.dq_sum = scratch.take<float>(dq_tiles * c.tile_q * c.columns());
  if (c.deterministic || c.draws_keys()) a.ticket = scratch.take<uint32_t>(1 + 2 * work.tiles_q), a.turns = a.ticket + 1;
  a.first_stores = c.owns_dq || (c.deterministic && !c.roles);
  if (a.natural_lse || p.dsinks) a.delta = scratch.take<float>(2 * a.in.rows());
}

void order_pairs(HopperBackwardArguments &a, const Problem &p, const Work &work) {
  a.pairs = i32(work.pairs);
  order_tiles(a, work.tiles_k, work.bundle);
  a.heads_kv_divisor = Divisor::make(uint32_t(p.heads_kv * work.shares)), a.shares = Divisor::make(uint32_t(work.shares));
  a.heads_of_keys = i32(p.group() / work.shares);
}

void map_operands(HopperBackwardArguments &a, const Problem &p, const BackwardConfig &c) {
  a.tma_q = mapped_queries(p, p.q, p.head_dim, c.tile_q), a.tma_dout = mapped_queries(p, p.dout, p.head_dim_v, c.tile_q);
  a.tma_k = mapped_keys(p, p.k, p.head_dim, c.tile_k()), a.tma_v = mapped_keys(p, p.v, p.head_dim_v, c.tile_k());
  if (c.bias_by_tma) map_bias(a, p, c.tile_q, c.bias_bytes(), c.tile_k());
}

void push_launches(Program &program, const Problem &p, const BackwardConfig &c, const Work &work, const HopperBackwardArguments &a,
                   const Device &device, Scratch &scratch) {
  HopperBackwardArguments main = a;
  if (p.mask) {
    program.steps.push_back(pack_mask(p, a.in, MaskOrder::by_keys, main.mask_bits, scratch));
    main.mask_step = p.mask.stride[2] ? MaskBits::block_bytes() : 0;
  }
  Shares shares{};
  if (work.shares > 1) shares = take_shares(a, p, scratch, work.shares);
  main.dk_shares = shares.dk, main.dv_shares = shares.dv;
  const passes::RowsConfig rows = rows_config(p, c.columns(), c.tile_q, passes::kWarpgroups, true);
  BackwardLaunches launches{.rows_by_tiles = delta(p, rows, a),
                            .main = Launch(c.roles ? kByRoles : kBackward, c, work.blocks, c.kThreads, int32_t(shared_bytes(p, c)), main),
                            .shares = std::move(shares.sum),
                            .dbias = bias_gradient(p, device, a)};
  if (a.natural_lse) { // the settle kernel reads D, so D is computed first
    BackwardArguments before_settle = a;
    before_settle.dq_sum = nullptr;
    passes::RowsConfig only_d = rows;
    only_d.form = passes::kFragments;
    launches.delta = delta(p, only_d, before_settle);
    if (settles(p)) launches.settle = settle(p, device, a);
  }
  if (!c.owns_dq) launches.dq = dq_from_sum(p, rows, a);
  push(program, p, a, std::move(launches));
}

void describe(Program &program, const Problem &p, const BackwardConfig &c, int64_t shares) {
  program.kernel =
      text(strobe::name(p.dtype), " wgmma, ", c.kWarpgroups, " warpgroups, head dimensions ", c.head_dim, " and ", c.head_dim_v);
  if (c.owns_dq) program.kernel += ", a block all keys of a head";
  if (c.dq_sum_in_shared()) program.kernel += " with dQ in shared memory";
  if (c.draws_keys()) program.kernel += ", persistent blocks";
  if (c.key_stages == 2) program.kernel += " with two stages of keys";
  if (c.in_line) program.kernel += " in line";
  if (c.v_in_registers()) program.kernel += c.keys_in_registers ? ", K and V in registers" : ", V in registers";
  if (shares > 1) program.kernel += text(", query heads of a key head in ", shares, " shares");
  if (p.mask) program.kernel += ", mask packed into bits";
  describe_tile(program, p, c.tile_q, c.tile_k(), true);
}

} // namespace

CudaEngine::Made sm90_backward(const Problem &p, const Device &device, Scratch &scratch) {
  const Features features = backward_features(p);
  if (std::string reason = refusal(p, features); !reason.empty()) return reason;
  if (std::string reason = captured_refusal(p, device); !reason.empty()) return reason;
  BackwardConfig c = choose_form(p, features, device);
  if (!divides_blocks(p, c.tile_q, c.tile_k()))
    return text("blocks of ", p.blocks.block_q, " x ", p.blocks.block_k, "; the backward's tile is ", c.tile_q, " x ", c.tile_k());
  HopperBackwardArguments a{};
  static_cast<BackwardArguments &>(a) = backward_arguments(p);
  const Work work = share_out(c, p, a.in, device);
  for (const auto &[count, what] : {std::pair{work.tiles_k * work.pairs, "keys"}, std::pair{work.tiles_q, "queries"}})
    if (count > int64_t{1} << 30) return text(count, " tiles of ", what, "; its backward takes 2^30");

  take_workspace(a, p, c, work, scratch);
  order_pairs(a, p, work);
  map_operands(a, p, c);
  a.unit = float((features.additive() ? 1.0 : a.in.scale) * kLog2e<double>);
  Program program;
  program.overlap = true, program.persistent = c.persistent;
  push_launches(program, p, c, work, a, device, scratch);
  describe(program, p, c, work.shares);
  program.predicted_seconds = predicted_seconds(p, c, work.shares, device);
  captured_gradients(program, p, device, a, scratch);
  return program;
}

} // namespace strobe::cuda
