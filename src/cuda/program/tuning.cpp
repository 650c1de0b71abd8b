#include "cuda/program/tuning.h"

#include <bit>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <vector>

#include "attention/text.h"
#include "cuda/compile/cache.h"
#include "cuda/compile/headers.h"
#include "cuda/compile/own_file.h"
#include "cuda/driver/environment.h"
#include "cuda/program/arguments.h"
#include "cuda/program/json.h"

namespace strobe::cuda {
namespace {

constexpr int kFormat = 1;
constexpr size_t kMostBytes = 16 << 20; // of a table

int64_t rounded(int64_t size) { return size > 0 ? static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(size))) : 0; }

DType dtype_named(const std::string &wanted) {
  for (DType type : {DType::f32, DType::f16, DType::bf16, DType::f64})
    if (wanted == name(type)) return type;
  throw std::runtime_error(text("dtype \"", wanted, "\" is none"));
}

Direction direction_named(const std::string &wanted) {
  if (wanted == "forward") return Direction::forward;
  if (wanted == "backward") return Direction::backward;
  throw std::runtime_error(text("direction \"", wanted, "\" is neither forward nor backward"));
}

int64_t whole(const Json &entry, const char *member, int64_t least, int64_t most) {
  const double value = entry.number(member);
  if (!(value >= double(least) && value <= double(most)) || value != double(int64_t(value)))
    throw std::runtime_error(text("\"", member, "\" is ", value, ", not a whole number from ", least, " to ", most));
  return int64_t(value);
}

std::string quoted(const std::string &value) {
  std::string out = "\"";
  for (char c : value) out += (c == '"' || c == '\\') ? std::string{'\\', c} : std::string(1, c);
  return out + "\"";
}

} // namespace

std::optional<TuningKey> tuning_key(const char *engine, Direction direction, const Problem &p) {
  const bool causal = p.window_right == 0 && p.window_left == kUnbounded;
  Features others = features_of(p);
  if (causal) others.band = 0;
  constexpr Features none{};
  if (std::memcmp(&others, &none, sizeof none) || p.sinks || p.exact_max || p.allow_tf32) return std::nullopt;
  return TuningKey{engine,
                   direction,
                   p.dtype,
                   p.head_dim,
                   p.head_dim_v,
                   p.group(),
                   rounded(p.seqlen_q),
                   rounded(p.seqlen_k),
                   rounded((p.varlen ? 1 : p.batch) * p.heads),
                   causal,
                   p.varlen,
                   p.deterministic};
}

Tuning::Tuning(const std::string &file, const std::string &device_name) {
  std::error_code error;
  if (file.empty() || !std::filesystem::exists(std::filesystem::symlink_status(file, error))) return;
  try {
    for (const std::string &refused : {folder_refused(std::filesystem::path(file).parent_path()), file_refused(file)})
      if (!refused.empty()) throw std::runtime_error(refused);
    const std::optional<std::string> all = read_own_file(file, kMostBytes);
    if (!all) throw std::runtime_error(text("not readable, or larger than ", kMostBytes, " bytes"));
    const Json table = Json::parse(*all);
    if (const int64_t format = whole(table, "format", 0, 1 << 20); format != kFormat)
      throw std::runtime_error(text("format ", format, ", and this library reads ", kFormat));
    if (table.string("device") != device_name)
      throw std::runtime_error(text("measured on ", table.string("device"), ", and this is ", device_name));
    if (table.string("kernels") != kernels_digest()) throw std::runtime_error("stale: measured with other kernels");
    constexpr int64_t most = int64_t{1} << 52;
    for (const Json &e : table.array("entries")) {
      const TuningKey key{e.string("engine"),
                          direction_named(e.string("direction")),
                          dtype_named(e.string("dtype")),
                          whole(e, "head_dim", 1, 256),
                          whole(e, "head_dim_v", 1, 256),
                          whole(e, "group", 1, most),
                          rounded(whole(e, "queries", 0, most)),
                          rounded(whole(e, "keys", 0, most)),
                          rounded(whole(e, "heads", 0, most)),
                          e.boolean("causal"),
                          e.boolean("varlen"),
                          e.boolean("deterministic")};
      tiles_[key] = {whole(e, "tile_q", 1, STROBE_MAX_TILE), whole(e, "tile_k", 1, STROBE_MAX_TILE)};
    }
  } catch (const std::exception &why) {
    tiles_.clear();
    ignored_ = text("tuning table ", file, " ignored: ", why.what(), "; `strobe tune` writes a new one");
  }
}

const TunedTile *Tuning::find(const TuningKey &key) const {
  const auto found = tiles_.find(key);
  return found == tiles_.end() ? nullptr : &found->second;
}

std::string tuning_file(const std::string &device_name) {
  const std::string folder = CacheSettings::from_environment().folder;
  if (folder.empty()) return {};
  std::string plain; // letters and digits, a hyphen for all between
  for (char c : device_name) {
    const char lower = c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c;
    if ((lower >= 'a' && lower <= 'z') || (lower >= '0' && lower <= '9'))
      plain += lower;
    else if (!plain.empty() && plain.back() != '-')
      plain += '-';
  }
  return text(folder, "/tuning-", plain, ".json");
}

const std::string &kernels_digest() {
  static const std::string *const digest = [] {
    Sha256 all;
    for (const Header &header : kernel_headers()) all.add_field(header.name).add_field(header.text);
    return new std::string(hex(all.digest()));
  }();
  return *digest;
}

const Tuning &tuning(const Device &device) {
  struct Table {
    std::once_flag once;
    Tuning tuning;
  };
  static const Tuning none;
  if (device.ordinal < 0) return none; // only described
  static auto *const tables = new std::vector<Table>(static_cast<size_t>(device_count()));
  Table &table = tables->at(static_cast<size_t>(device.ordinal));
  std::call_once(table.once, [&] {
    if (environment("STROBE_TUNING") != "0") table.tuning = Tuning(tuning_file(device.name), device.name);
  });
  return table.tuning;
}

std::string tuning_header(const Device &device) {
  const std::string file = tuning_file(device.name);
  return text("{\"format\": ", kFormat, ", \"file\": ", quoted(file), ", \"device\": ", quoted(device.name),
              ", \"kernels\": ", quoted(kernels_digest()), ", \"ignored\": ", quoted(Tuning(file, device.name).ignored()), "}");
}

} // namespace strobe::cuda
