#include "cuda/compile/headers.h"

#include <algorithm>
#include <filesystem>

#include "attention/attention.h"
#include "attention/text.h"

namespace strobe::cuda {
namespace {

const Header *find(std::string_view name) {
  const auto all = kernel_headers();
  const auto found = std::ranges::find(all, name, [](const Header &h) { return std::string_view(h.name); });
  return found == all.end() ? nullptr : &*found;
}

// The file that an include names: a file beside the including file, or else below kernels/.
const Header *resolve(std::string_view includer, std::string_view name) {
  const auto beside = (std::filesystem::path(includer).parent_path() / name).lexically_normal().generic_string();
  const Header *header = find(beside);
  return header ? header : find(name);
}

// The name within an #include "name" line; empty for any other line.
std::string_view included_name(std::string_view line) {
  auto skip = [&](std::string_view what) {
    line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
    if (!line.starts_with(what)) return false;
    line.remove_prefix(what.size());
    return true;
  };
  if (!skip("#") || !skip("include") || !skip("\"")) return {};
  return line.substr(0, line.find('"'));
}

void add(const Header &header, std::vector<Included> &all) {
  const auto known = [&](const Included &i) { return i.name == header.name; };
  if (std::ranges::any_of(all, known)) return;
  const size_t own = all.size();
  all.push_back({header.name, {}});
  std::string out;
  for (std::string_view rest = header.text; !rest.empty();) {
    const std::string_view line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    if (const std::string_view name = included_name(line); !name.empty()) {
      const Header *target = resolve(header.name, name);
      if (!target) throw Error(STROBE_INTERNAL, text("kernels/", header.name, " includes \"", name, "\", which is not below kernels/"));
      add(*target, all);
      out += text("#include \"", target->name, "\"\n");
    } else {
      out.append(line).append("\n");
    }
  }
  all[own].text = std::move(out);
}

} // namespace

std::vector<Included> included_by(std::string_view name) {
  const Header *header = find(name);
  if (!header) throw Error(STROBE_INTERNAL, text("no header kernels/", name));
  std::vector<Included> all;
  add(*header, all);
  return all;
}

} // namespace strobe::cuda
