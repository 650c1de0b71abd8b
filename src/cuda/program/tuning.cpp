#include "cuda/program/tuning.h"

#include <bit>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "attention/text.h"
#include "cuda/compile/cache.h"
#include "cuda/compile/headers.h"
#include "cuda/compile/own_file.h"
#include "cuda/driver/environment.h"
#include "cuda/program/arguments.h"

namespace strobe::cuda {
namespace {

constexpr int kFormat = 2;              // format 1 was JSON
constexpr size_t kMostBytes = 16 << 20; // the largest table that is accepted

int64_t rounded(int64_t size) { return size > 0 ? static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(size))) : 0; }

DType dtype_named(const std::string &wanted) {
  for (DType type : {DType::f32, DType::f16, DType::bf16, DType::f64})
    if (wanted == name(type)) return type;
  throw std::runtime_error(text("dtype \"", wanted, "\" is none"));
}

Operation operation_named(const std::string &wanted) {
  std::string all;
  for (int n = 0; n < kOperations; n++) {
    const char *const known = kOperationRecords[n].name;
    if (wanted == known) return static_cast<Operation>(n);
    all += (all.empty() ? "" : ", ") + std::string(known);
  }
  throw std::runtime_error(text("direction \"", wanted, "\" is none of ", all));
}

// A section: lines "name = value".
class Section {
public:
  void add(std::string_view line, size_t number) {
    constexpr std::string_view between = " = ";
    const size_t at = line.find(between);
    if (at == line.npos || at == 0) throw std::runtime_error(text("line ", number, ": expected \"name = value\""));
    values_[std::string(line.substr(0, at))] = line.substr(at + between.size());
  }
  bool has(const char *name) const { return values_.contains(name); }
  const std::string &string(const char *name) const {
    const auto found = values_.find(name);
    if (found == values_.end()) throw std::runtime_error(text("\"", name, "\" is missing"));
    return found->second;
  }
  int64_t whole(const char *name, int64_t least, int64_t most) const {
    const std::string &written = string(name);
    int64_t value = 0;
    const auto [end, error] = std::from_chars(written.data(), written.data() + written.size(), value);
    if (error != std::errc() || end != written.data() + written.size() || value < least || value > most)
      throw std::runtime_error(text("\"", name, "\" is ", written, ", not a whole number from ", least, " to ", most));
    return value;
  }
  bool boolean(const char *name) const {
    const std::string &written = string(name);
    if (written != "true" && written != "false") throw std::runtime_error(text("\"", name, "\" is ", written, ", not true or false"));
    return written == "true";
  }

private:
  std::map<std::string, std::string> values_;
};

// Sections are separated by empty lines.
std::vector<Section> sections(std::string_view table) {
  std::vector<Section> all;
  bool within = false;
  for (size_t number = 1; !table.empty(); number++) {
    const size_t end = std::min(table.find('\n'), table.size());
    const std::string_view line = table.substr(0, end);
    table.remove_prefix(std::min(end + 1, table.size()));
    if (!line.empty()) {
      if (!within) all.emplace_back();
      all.back().add(line, number);
    }
    within = !line.empty();
  }
  return all;
}

bool exists(const std::string &file) {
  std::error_code error;
  return !file.empty() && std::filesystem::exists(std::filesystem::symlink_status(file, error));
}

std::string ignored_because(const std::string &file, const char *why) {
  return text("tuning table ", file, " ignored: ", why, "; `strobe tune` writes a new one");
}

} // namespace

std::optional<TuningKey> tuning_key(const char *engine, Operation operation, const Problem &p) {
  const bool causal = p.window_right == 0 && p.window_left == kUnbounded;
  Features others = features_of(p);
  if (causal) others.band = 0;
  constexpr Features none{};
  if (std::memcmp(&others, &none, sizeof none) || p.sinks || p.exact_max || p.allow_tf32 || p.invariant) return std::nullopt;
  return TuningKey{.engine = engine,
                   .operation = operation,
                   .dtype = p.dtype,
                   .head_dim = p.head_dim,
                   .head_dim_v = p.head_dim_v,
                   .group = p.group(),
                   .queries = rounded(p.seqlen_q),
                   .keys = rounded(p.seqlen_k),
                   .heads = rounded((p.varlen ? 1 : p.batch) * p.heads),
                   .causal = causal,
                   .varlen = p.varlen,
                   .deterministic = p.deterministic};
}

Tuning::Tuning(const std::string &file, const std::string &device_name) {
  if (!exists(file)) {
    const std::string json = file.substr(0, file.rfind('.')) + ".json";
    if (!file.empty() && exists(json)) ignored_ = ignored_because(json, "written by an earlier version, as JSON");
    return;
  }
  try {
    for (const std::string &refused : {folder_refused(std::filesystem::path(file).parent_path()), file_refused(file)})
      if (!refused.empty()) throw std::runtime_error(refused);
    const std::optional<std::string> all = read_own_file(file, kMostBytes);
    if (!all) throw std::runtime_error(text("not readable, or larger than ", kMostBytes, " bytes"));
    const std::vector<Section> table = sections(*all);
    if (table.empty()) throw std::runtime_error("empty");
    const Section &about = table.front();
    if (const int64_t format = about.whole("format", 0, 1 << 20); format != kFormat)
      throw std::runtime_error(text("format ", format, ", and this library reads ", kFormat));
    if (about.string("device") != device_name)
      throw std::runtime_error(text("measured on ", about.string("device"), ", and this is ", device_name));
    if (about.string("kernels") != kernels_digest()) throw std::runtime_error("stale: measured with other kernels");
    constexpr int64_t most = int64_t{1} << 52;
    for (const Section &e : std::span(table).subspan(1)) {
      const TuningKey key{.engine = e.string("engine"),
                          .operation = operation_named(e.string("direction")),
                          .dtype = dtype_named(e.string("dtype")),
                          .head_dim = e.whole("head_dim", 1, 256),
                          .head_dim_v = e.whole("head_dim_v", 1, 256),
                          .group = e.whole("group", 1, most),
                          .queries = rounded(e.whole("queries", 0, most)),
                          .keys = rounded(e.whole("keys", 0, most)),
                          .heads = rounded(e.whole("heads", 0, most)),
                          .causal = e.boolean("causal"),
                          .varlen = e.boolean("varlen"),
                          .deterministic = e.boolean("deterministic")};
      tiles_[key] = {.q = e.whole("tile_q", 1, STROBE_MAX_TILE),
                     .k = e.whole("tile_k", 1, STROBE_MAX_TILE),
                     .bundle = e.has("bundle") ? e.whole("bundle", 1, most) : 0,
                     .shares = e.has("shares") ? e.whole("shares", 1, most) : 0,
                     .staged_store = e.has("staged_store") && e.boolean("staged_store"),
                     .persistent = e.has("persistent") ? std::optional(e.boolean("persistent")) : std::nullopt};
    }
  } catch (const std::exception &why) {
    tiles_.clear();
    ignored_ = ignored_because(file, why.what());
  }
}

const TunedTile *Tuning::find(const TuningKey &key) const {
  const auto found = tiles_.find(key);
  return found == tiles_.end() ? nullptr : &found->second;
}

std::string tuning_file(const std::string &device_name) {
  const std::string folder = CacheSettings::from_environment().folder;
  if (folder.empty()) return {};
  std::string plain; // letters and digits, with a hyphen for each run of other characters
  for (char c : device_name) {
    const char lower = c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c;
    if ((lower >= 'a' && lower <= 'z') || (lower >= '0' && lower <= '9'))
      plain += lower;
    else if (!plain.empty() && plain.back() != '-')
      plain += '-';
  }
  return text(folder, "/tuning-", plain, ".txt");
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
  if (device.ordinal < 0) return none; // the device is only described
  static auto *const tables = new std::vector<Table>(static_cast<size_t>(device_count()));
  Table &table = tables->at(static_cast<size_t>(device.ordinal));
  std::call_once(table.once, [&] {
    if (environment("STROBE_TUNING") != "0") table.tuning = Tuning(tuning_file(device.name), device.name);
  });
  return table.tuning;
}

std::string tuning_header(const Device &device) {
  const std::string file = tuning_file(device.name);
  return text("file = ", file, "\nformat = ", kFormat, "\ndevice = ", device.name, "\nkernels = ", kernels_digest(),
              "\nignored = ", Tuning(file, device.name).ignored(), "\n");
}

} // namespace strobe::cuda
