// The tiles that `strobe tune` has measured on a GPU, kept beside the kernel cache; engines take them as wishes where the caller has none.
//
// A table is a text of lines "name = value" in sections that empty lines part. The first section says what the table is good for: format,
// device, kernels. Each of the others names the calls that it is for, by TuningKey's members, and their tile: tile_q, tile_k. It may have
// more wishes, to try on a GPU what the engine would not choose: bundle, shares, staged_store, persistent. What else a section has is not
// read.
#pragma once
#include <compare>
#include <map>
#include <optional>
#include <string>

#include "attention/attention.h"
#include "cuda/driver/device.h"

namespace strobe::cuda {

// Calls for which one tile is the fastest: sizes rounded up to powers of two.
struct TuningKey {
  std::string engine;
  Direction direction;
  DType dtype;
  int64_t head_dim, head_dim_v, group, queries, keys, heads; // heads: of all sequences
  bool causal, varlen, deterministic;
  auto operator<=>(const TuningKey &) const = default;
};
// None for a call with options that nobody measures.
std::optional<TuningKey> tuning_key(const char *engine, Direction, const Problem &);

struct TunedTile {
  int64_t q, k;
  int64_t bundle = 0; // of the Hopper kernels: heads, or pairs of batch and key head, whose tiles run together; 0: as they choose
  int64_t shares = 0; // of the Hopper backward: in how many the query heads of a key head are shared out; 0: as it chooses
  bool staged_store = false;
  std::optional<bool> persistent; // unset: as the Hopper backward chooses
};

class Tuning {
public:
  Tuning() = default;
  // Never fails: a table that cannot be used is as good as none.
  Tuning(const std::string &file, const std::string &device_name);

  const TunedTile *find(const TuningKey &key) const;
  bool empty() const { return tiles_.empty(); }
  const std::string &ignored() const { return ignored_; } // why the table that is there is not used; else empty

private:
  std::map<TuningKey, TunedTile> tiles_;
  std::string ignored_;
};

// Where the table of such a device lies; empty without a cache folder.
std::string tuning_file(const std::string &device_name);
// Of all that kernels are compiled from: a table measured with others is stale.
const std::string &kernels_digest();
// The device's, read when first asked for; none with STROBE_TUNING=0.
const Tuning &tuning(const Device &);

// Lines "name = value": file; format, device and kernels, what a table has to say of itself to be used; ignored.
std::string tuning_header(const Device &);

} // namespace strobe::cuda
