// From a kernel's name to its cubin: source, options, disk cache, NVRTC.
#include <algorithm>
#include <charconv>

#include "attention/text.h"
#include "cuda/compile/cache.h"
#include "cuda/compile/jit.h"
#include "cuda/compile/nvrtc.h"

namespace strobe::cuda {
namespace {

std::string source_text(const KernelSource &source, const std::string &name, int cc, const Functions &functions) {
  const char *constant = cc >= 70 ? "__grid_constant__ " : ""; // arguments are read in place; older architectures lack the keyword
  // Blocks of the next launch may begin as soon as there is room. This launch's blocks may have begun early in the same way, so each waits
  // for the end of the previous launch: here, or later if the kernel waits itself. Every block must wait; otherwise the end of this launch
  // would not mean the end of all earlier launches.
  const char *overlap = cc >= 90 ? "asm volatile(\"griddepcontrol.launch_dependents;\");\n"
                                   "if constexpr (!kWaitsItself<Kernel>) asm volatile(\"griddepcontrol.wait;\" ::: \"memory\");\n"
                                 : "";
  return text("#include \"", source.header, functions ? "\"\n#include \"score/program.h" : "", "\"\nusing Kernel = ", name,
              ";\ntemplate <class K> constexpr bool kWaitsItself = requires { K::kWaitsItself; };\n", "extern \"C\" __global__ void ",
              "__launch_bounds__(Kernel::kThreads, Kernel::kBlocksPerSm) kernel(const ", constant, "Kernel::Arguments a) {\n", overlap,
              "Kernel::run(a);\n}\n");
}

Translation translation(const KernelSource &source, std::span<const int32_t> config, int cc, const Functions &functions) {
  const std::string name = kernel_name(source, config), arch = text("sm_", cc, source.specific ? "a" : "");
  std::vector<Included> headers = included_by(source.header);
  if (functions) headers.push_back({"score/program.h", *functions});
  return {.name = text(name, " for ", arch),
          .text = source_text(source, name, cc, functions),
          .headers = std::move(headers),
          .options = {"--gpu-architecture=" + arch, "-std=c++20", "-default-device", "--ptxas-options=-v"}};
}

Sha256::Digest digest(const Translation &p) {
  Sha256 all;
  all.add_field(p.text);
  for (const std::string &option : p.options) all.add_field(option);
  for (const Included &header : p.headers) all.add_field(header.name).add_field(header.text);
  return all.digest();
}

// Calls `use` with each number that precedes `what` in ptxas's log, e.g. "8 bytes spill stores", "Used 10 registers".
template <class F> void numbers_before(std::string_view log, std::string_view what, F use) {
  for (size_t at = log.find(what); at != log.npos; at = log.find(what, at + 1)) {
    size_t begin = at;
    while (begin > 0 && log[begin - 1] >= '0' && log[begin - 1] <= '9') begin--;
    int32_t value = 0;
    std::from_chars(log.data() + begin, log.data() + at, value);
    use(value);
  }
}

Build compile_now(const Nvrtc &compiler, const Translation &p) {
  Compiled result = compile(compiler, p);
  Build b{.cubin = std::move(result.cubin), .log = std::move(result.log), .nvrtc = compiler.version(), .compiled = true, .file = {}};
  numbers_before(b.log, " registers", [&](int32_t n) { b.registers = std::max(b.registers, n); });
  for (const char *what : {" bytes spill stores", " bytes spill loads"})
    numbers_before(b.log, what, [&](int32_t n) { b.spill_bytes += n; });
  return b;
}

[[noreturn]] void not_found(const Translation &p, const CacheSettings &settings, const std::string &why) {
  std::string folders = settings.folder;
  for (const auto *more : {&settings.further, &settings.refused})
    for (const std::string &folder : *more)
      folders += text(folders.empty() ? "" : ", ", folder, more == &settings.refused ? ", so not used" : "");
  throw Error(STROBE_UNSUPPORTED, text(p.name, ": not in a cache (", folders.empty() ? "there is none" : folders, "), and ", why));
}

const Nvrtc *compiler_for(int cc, const CacheSettings &settings) { return settings.offline ? nullptr : nvrtc(cc); }

} // namespace

bool can_build(int cc) { return compiler_for(cc, CacheSettings::from_environment()); }

std::string kernel_name(const KernelSource &source, std::span<const int32_t> config) {
  std::string values;
  for (int32_t value : config) values += text(values.empty() ? "" : ",", value);
  return text(source.entry, "<", source.config, "{", values, "}>");
}

bool is_kept(const KernelSource &source, std::span<const int32_t> config, int cc, const Functions &functions) {
  const Sha256::Digest key = digest(translation(source, config, cc, functions));
  const CacheSettings settings = CacheSettings::from_environment();
  for (const std::string &folder : settings.further)
    if (cache_read_any(folder, key)) return true;
  if (settings.folder.empty()) return false;
  const Nvrtc *compiler = compiler_for(cc, settings);
  return (compiler ? cache_read(cache_file(settings.folder, compiler->version(), key), key) : cache_read_any(settings.folder, key))
      .has_value();
}

Build build(const KernelSource &source, std::span<const int32_t> config, int cc, From from, const Functions &functions) {
  const Translation p = translation(source, config, cc, functions);
  const Sha256::Digest key = digest(p);
  const CacheSettings settings = CacheSettings::from_environment();
  const bool look = from != From::source;
  for (const std::string &folder : settings.further)
    if (auto found = from == From::anywhere ? cache_read_any(folder, key) : std::nullopt) return *found;

  const Nvrtc *compiler = compiler_for(cc, settings);
  if (!compiler) {
    if (look && !settings.folder.empty())
      if (auto found = cache_read_any(settings.folder, key)) return *found;
    not_found(p, settings,
              settings.offline ? "STROBE_OFFLINE forbids to compile it: fill a cache with `strobe prewarm` and name its folder in "
                                 "STROBE_CACHE_PATH"
                               : nvrtc_missing(cc));
  }
  if (settings.folder.empty()) return compile_now(*compiler, p);

  const std::string file = cache_file(settings.folder, compiler->version(), key);
  auto kept = [&] { return look ? cache_read(file, key) : std::nullopt; };
  if (auto found = kept()) return *found;
  if (settings.readonly) return compile_now(*compiler, p);
  const CacheLock lock(file);
  if (auto found = kept()) return *found;
  Build built = compile_now(*compiler, p);
  cache_write(file, key, built);
  return built;
}

} // namespace strobe::cuda
