// The folders of src/cuda depend on one another in one direction: driver <- compile <- program <- families. In kernels/, a family includes
// only the common files and its own folder.
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

namespace fs = std::filesystem;

namespace {

const fs::path kProject = fs::path(SOURCE_FOLDER), kSource = kProject / "src";

// The names in a text's #include "..." lines.
std::vector<std::string> quoted(const std::string &text) {
  static const std::regex include(R"re((^|\n)[ \t]*#[ \t]*include[ \t]*"([^"\n]*)")re");
  std::vector<std::string> all;
  for (std::sregex_iterator i(text.begin(), text.end(), include), end; i != end; ++i) all.push_back((*i)[2]);
  return all;
}

std::string text_of(const fs::path &file) {
  std::stringstream text;
  text << std::ifstream(file).rdbuf();
  return text.str();
}

// The path of an included file from the project's folder, e.g. "src/cuda/driver/device.h". Empty if there is no such file.
std::string found(const fs::path &includer, const std::string &name) {
  for (const fs::path &root : {includer.parent_path(), kSource, kProject, kProject / "include"})
    if (fs::exists(root / name)) return fs::relative(root / name, kProject).generic_string();
  return "";
}

// The headers of the project that a file includes.
std::vector<std::string> included(const fs::path &file) {
  std::vector<std::string> all;
  for (const std::string &name : quoted(text_of(file))) {
    const std::string header = found(file, name);
    CHECK_MESSAGE(!header.empty(), file << " includes " << name << ", which is no file of the project");
    if (!header.empty()) all.push_back(header);
  }
  return all;
}

// A family's file names begin with its name: mma_backward.cpp belongs to "mma". engines.cpp and families.h belong to no family.
const std::string kFamilies[] = {"ladder", "mma", "simt", "sm90", "tf32"};
std::string family_of(const std::string &file) {
  const std::string stem = fs::path(file).stem();
  for (const std::string &family : kFamilies)
    if (stem == family || stem.starts_with(family + "_")) return family;
  return "";
}

bool begins_with_one(const std::string &name, const std::vector<std::string> &beginnings) {
  for (const std::string &beginning : beginnings)
    if (name.starts_with(beginning)) return true;
  return false;
}

// Whether this file of src/cuda may include that header.
bool allowed(const std::string &includer, const std::string &header) {
  static const std::map<std::string, std::vector<std::string>> below = [] {
    std::map<std::string, std::vector<std::string>> all;
    std::vector<std::string> beginnings{"src/attention/", "include/strobe/"};
    for (const char *folder : {"driver", "compile", "program", "families"}) {
      beginnings.push_back(std::string("src/cuda/") + folder + "/");
      if (folder == std::string("program"))
        beginnings.insert(beginnings.end(),
                          {"src/engine.h", "src/score/", "kernels/attention/", "kernels/device/", "kernels/passes/", "kernels/ptx/"});
      all[folder] = beginnings;
    }
    return all;
  }();
  const auto rule = below.find(fs::path(includer).parent_path().filename());
  if (rule == below.end()) return false;
  if (rule->first == "families") {
    const std::string own = family_of(includer);
    if (!own.empty() && header.starts_with("kernels/" + own + "/")) return true;
    // The limits of the ladder are stated once, for CPU and GPU, so that refusals agree.
    if (own == "ladder" && header == "src/ladder/subset.h") return true;
    const std::string other = header.starts_with("src/cuda/families/") ? family_of(header) : "";
    if (!other.empty() && other != own && fs::path(includer).stem() != "engines") return false;
  }
  return begins_with_one(header, rule->second);
}

} // namespace

TEST_CASE("each file of src/cuda includes its own folder, those below it and the kernels that it knows") {
  int files = 0, headers = 0;
  for (const fs::directory_entry &entry : fs::recursive_directory_iterator(kSource / "cuda")) {
    const std::string extension = entry.path().extension();
    if (extension != ".h" && extension != ".cpp") continue;
    files++;
    const std::string file = fs::relative(entry.path(), kProject).generic_string();
    for (const std::string &header : included(entry.path())) {
      headers++;
      CHECK_MESSAGE(allowed(file, header), file << " includes " << header);
    }
  }
  CHECK(files > 40);
  CHECK(headers > 2 * files);
}

TEST_CASE("the rule tells what may be included from what may not") {
  const struct {
    const char *includer, *header;
    bool allowed;
  } cases[] = {
      {"src/cuda/families/mma.cpp", "kernels/mma/config.h", true},
      {"src/cuda/families/mma_backward.cpp", "kernels/mma/backward/config.h", true},
      {"src/cuda/families/mma.cpp", "kernels/attention/dq_sum.h", true},
      {"src/cuda/families/mma.cpp", "src/cuda/families/mma_backward.h", true},
      {"src/cuda/families/mma.cpp", "src/cuda/families/families.h", true},
      {"src/cuda/families/mma.cpp", "kernels/sm90/forward/config.h", false},
      {"src/cuda/families/mma.cpp", "kernels/tile/config.h", false},
      {"src/cuda/families/mma.cpp", "src/cuda/families/sm90_backward.h", false},
      {"src/cuda/families/mma.cpp", "src/ladder/subset.h", false},
      {"src/cuda/families/mma.cpp", "src/cpu/engine.h", false},
      {"src/cuda/families/ladder.cpp", "src/ladder/subset.h", true},
      {"src/cuda/families/ladder.cpp", "src/ladder/engine.h", false},
      {"src/cuda/families/engines.cpp", "src/cuda/families/ladder.h", true},
      {"src/cuda/families/engines.cpp", "kernels/mma/config.h", false},
      {"src/cuda/program/passes.cpp", "kernels/passes/config.h", true},
      {"src/cuda/program/passes.cpp", "kernels/mma/config.h", false},
      {"src/cuda/program/tensor_maps.h", "kernels/sm90/arguments.h", false},
      {"src/cuda/program/tensor_maps.h", "kernels/ptx/tensor_map.h", true},
      {"src/cuda/program/tiles.h", "src/cuda/families/families.h", false},
      {"src/cuda/compile/jit.cpp", "kernels/attention/arguments.h", false},
      {"src/cuda/elsewhere/file.cpp", "src/cuda/driver/device.h", false},
  };
  for (const auto &[includer, header, is_allowed] : cases)
    CHECK_MESSAGE(allowed(includer, header) == is_allowed, includer << " " << header);
}

TEST_CASE("an include is read however it is written, and found or told") {
  const std::string text = "#include \"a.h\"\n  #  include \"b/c.h\" // why\n#include\"d.h\"\n#include <e.h>\n// #include \"f.h\"\n";
  CHECK(quoted(text) == std::vector<std::string>{"a.h", "b/c.h", "d.h"});
  const fs::path file = kSource / "cuda" / "program" / "tiles.h";
  CHECK(found(file, "program.h") == "src/cuda/program/program.h");
  CHECK(found(file, "../../engine.h") == "src/engine.h");
  CHECK(found(file, "no/such.h") == "");
}
