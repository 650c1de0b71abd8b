// The tiles that `strobe tune` has measured on a GPU, kept beside the kernel cache; engines request them if the caller requests none.
//
// A table is a text of lines "name = value" in sections separated by empty lines. The first section says what the table is valid for:
// format, device, kernels. Each further section names the calls that it is for, by TuningKey's members, and their tile: tile_q, tile_k. A
// section may have more requests, to try on a GPU what the engine would not choose: bundle, shares, staged_store, persistent. Its other
// lines are not read.
#pragma once
#include <compare>
#include <map>
#include <optional>
#include <string>

#include "attention/attention.h"
#include "cuda/driver/device.h"

namespace strobe::cuda {

// The key of calls that share a tuned tile; sizes are rounded up to powers of two.
struct TuningKey {
  std::string engine;
  Direction direction;
  DType dtype;
  int64_t head_dim, head_dim_v, group, queries, keys, heads; // heads: of all sequences
  bool causal, varlen, deterministic;
  auto operator<=>(const TuningKey &) const = default;
};
// The call's key; null for a call with options that are not measured.
std::optional<TuningKey> tuning_key(const char *engine, Direction, const Problem &);

struct TunedTile {
  int64_t q, k;
  int64_t bundle = 0; // Hopper kernels: how many heads, or (batch, key head) pairs, run their tiles together; 0: their own choice
  int64_t shares = 0; // Hopper backward: into how many shares the query heads of a key head are divided; 0: its own choice
  bool staged_store = false;
  std::optional<bool> persistent; // unset: the Hopper backward's own choice
};

class Tuning {
public:
  Tuning() = default;
  // Never fails: a table that cannot be used counts as absent.
  Tuning(const std::string &file, const std::string &device_name);

  const TunedTile *find(const TuningKey &key) const;
  bool empty() const { return tiles_.empty(); }
  const std::string &ignored() const { return ignored_; } // the reason why an existing table is not used; else empty

private:
  std::map<TuningKey, TunedTile> tiles_;
  std::string ignored_;
};

// The path of such a device's table; empty without a cache folder.
std::string tuning_file(const std::string &device_name);
// A digest of all kernel sources: a table measured with other sources is stale.
const std::string &kernels_digest();
// The device's table, read when first needed; none with STROBE_TUNING=0.
const Tuning &tuning(const Device &);

// Lines "name = value": file, the table's path; format, device and kernels, which a table must repeat to be used; ignored, the reason why
// the table is not used.
std::string tuning_header(const Device &);

} // namespace strobe::cuda
