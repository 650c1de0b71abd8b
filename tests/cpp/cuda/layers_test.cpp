// The folders of src/cuda depend on one another one way: driver <- compile <- program <- families.
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

namespace fs = std::filesystem;

namespace {

const fs::path kSource = fs::path(SOURCE_FOLDER) / "src";

// The headers of the project that a file includes, from the folder of the project: "src/cuda/driver/device.h".
std::vector<std::string> included(const fs::path &file) {
  std::vector<std::string> all;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    const size_t begin = line.find("#include \"");
    if (begin != 0) continue;
    const std::string name = line.substr(10, line.rfind('"') - 10);
    for (const fs::path &root : {file.parent_path(), kSource, fs::path(SOURCE_FOLDER), fs::path(SOURCE_FOLDER) / "include"})
      if (fs::exists(root / name)) {
        all.push_back(fs::relative(root / name, SOURCE_FOLDER).generic_string());
        break;
      }
  }
  return all;
}

// What a folder may include, by the beginnings of the paths.
const std::map<std::string, std::vector<std::string>> kAllowed = [] {
  std::map<std::string, std::vector<std::string>> all;
  std::vector<std::string> below{"src/attention/", "include/strobe/"};
  for (const char *folder : {"driver", "compile", "program", "families"}) {
    below.push_back(std::string("src/cuda/") + folder + "/");
    if (folder == std::string("program")) below.insert(below.end(), {"src/engine.h", "kernels/"});
    if (folder == std::string("families")) below.push_back("src/ladder/subset.h"); // what a rung takes on every device
    all[folder] = below;
  }
  return all;
}();

} // namespace

TEST_CASE("each folder of src/cuda includes itself and those below it alone") {
  int files = 0, headers = 0;
  for (const fs::directory_entry &entry : fs::recursive_directory_iterator(kSource / "cuda")) {
    const std::string extension = entry.path().extension();
    if (extension != ".h" && extension != ".cpp") continue;
    const auto rule = kAllowed.find(entry.path().parent_path().filename());
    REQUIRE_MESSAGE(rule != kAllowed.end(), entry.path() << " lies in none of the four folders");
    files++;
    for (const std::string &header : included(entry.path())) {
      headers++;
      bool allowed = false;
      for (const std::string &beginning : rule->second) allowed = allowed || header.starts_with(beginning);
      CHECK_MESSAGE(allowed, entry.path() << " includes " << header);
    }
  }
  CHECK(files > 40);
  CHECK(headers > 2 * files);
}

TEST_CASE("no family of src/cuda includes another") {
  for (const fs::directory_entry &entry : fs::directory_iterator(kSource / "cuda" / "families")) {
    const std::string own = entry.path().stem();
    for (const std::string &header : included(entry.path())) {
      if (!header.starts_with("src/cuda/families/") || own == "engines") continue;
      const std::string other = fs::path(header).stem();
      CHECK_MESSAGE((other == "families" || own.starts_with(other) || other.starts_with(own)), entry.path() << " includes " << header);
    }
  }
}
