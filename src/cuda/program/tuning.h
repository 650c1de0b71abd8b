// The tiles that `strobe tune` has measured on a GPU, kept beside the kernel cache; engines request them if the caller requests none.
//
// A table is a text of lines "name = value", in sections separated by empty lines. The first section says what the table is valid for:
// format, device, kernels. Each further section names the calls that it is for, by members of TuningKey, and their tile: tile_q, tile_k. To
// try what the engine would not choose, a section may have further requests: bundle, shares, staged_store, persistent. Its other lines are
// not read.
#pragma once
#include <compare>
#include <map>
#include <optional>
#include <string>

#include "attention/attention.h"
#include "cuda/driver/device.h"

namespace strobe::cuda {

// The key of calls that share a tuned tile. Sizes are rounded up to powers of two.
struct TuningKey {
  std::string engine;
  Operation operation;
  DType dtype;
  int64_t head_dim, head_dim_v, group, queries, keys, heads; // heads: those of all sequences
  bool causal, varlen, deterministic;
  auto operator<=>(const TuningKey &) const = default;
};
// The call's key; null if the call has options that are not measured.
std::optional<TuningKey> tuning_key(const char *engine, Operation, const Problem &);

struct TunedTile {
  int64_t q, k;
  int64_t bundle = 0; // Hopper: how many heads, or (batch, key head) pairs, run their tiles together; 0: the engine chooses
  int64_t shares = 0; // Hopper backward: into how many shares a key head's query heads are divided; 0: the engine chooses
  bool staged_store = false;
  std::optional<bool> persistent; // Hopper backward; unset: the engine chooses
};

class Tuning {
public:
  Tuning() = default;
  // Never throws: a table that cannot be used counts as absent.
  Tuning(const std::string &file, const std::string &device_name);

  const TunedTile *find(const TuningKey &key) const;
  bool empty() const { return tiles_.empty(); }
  const std::string &ignored() const { return ignored_; } // the reason why an existing table is not used; empty: none

private:
  std::map<TuningKey, TunedTile> tiles_;
  std::string ignored_;
};

// The path of the table for devices of this name; empty if there is no cache folder.
std::string tuning_file(const std::string &device_name);
// A digest of all kernel sources. A table that was measured with other sources is stale.
const std::string &kernels_digest();
// The device's table, read when first needed. With STROBE_TUNING=0 there is none.
const Tuning &tuning(const Device &);

// Lines "name = value" about the device's table: `file` is its path; `format`, `device` and `kernels` are the values that a table must have
// to be used; `ignored` is the reason why the table is not used.
std::string tuning_header(const Device &);

} // namespace strobe::cuda
