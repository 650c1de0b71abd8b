#include "cuda/compile/info.h"

#include <algorithm>

#include "attention/text.h"
#include "cuda/compile/cache.h"
#include "cuda/compile/nvrtc.h"

namespace strobe::cuda {

static std::string driver_line() {
  if (!driver()) return driver_missing();
  const int version = driver()->version;
  return text("CUDA ", version / 1000, ".", version % 1000 / 10, ", ", driver()->path);
}

static std::string nvrtc_line(int cc) {
  const Nvrtc *found = nvrtc(cc);
  return found ? text(found->version(), " for sm_", cc, ", ", found->path) : nvrtc_missing(cc);
}

static std::string archs_line() {
  std::string line;
  for (int cc : nvrtc_archs()) line += text(line.empty() ? "" : ", ", cc);
  return line.empty() ? "none" : line;
}

static std::string cache_line() {
  const CacheSettings s = CacheSettings::from_environment();
  std::string line = !s.folder.empty() ? s.folder : s.refused.empty() ? "none (no HOME)" : "none";
  for (const std::string &why : s.refused) line += text(", not ", why);
  if (s.readonly) line += ", read-only";
  if (s.offline) line += ", offline: nothing is compiled";
  for (const std::string &folder : s.further) line += ", further " + folder;
  return line;
}

std::string info() {
  std::string out = text("driver: ", driver_line(), "\n");
  std::vector<int> ccs;
  for (int i = 0; i < device_count(); i++) {
    const Device &d = device(i);
    out += text("device ", i, ": ", d.name, ", sm_", d.cc, ", ", d.sms, " SMs at ", d.clock_hz / 1e6, " MHz, ", d.shared_per_block / 1024,
                " KiB shared memory per block, ", d.l2 >> 20, " MiB L2\n");
    if (std::ranges::find(ccs, d.cc) == ccs.end()) ccs.push_back(d.cc);
  }
  if (const std::string missing = devices_missing(); driver() && !missing.empty()) out += text("device: ", missing, "\n");
  if (ccs.empty()) ccs = {90}; // without a GPU: the compute capability for which a cache could be prepared
  for (int cc : ccs) out += text("NVRTC: ", nvrtc_line(cc), "\n");
  return out + text("compiles for: ", archs_line(), "\n", "cache: ", cache_line(), "\n");
}

} // namespace strobe::cuda
