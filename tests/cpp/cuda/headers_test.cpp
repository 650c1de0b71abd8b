// The embedded headers are equal to the files, byte by byte; and the headers that a kernel includes.
#include "cuda/compile/headers.h"

#include "surroundings.h"

using namespace strobe;
using namespace strobe::cuda;
using namespace strobe::cuda::test;

TEST_CASE("headers: each file of kernels/, as it is") {
  size_t files = 0;
  for (const char *root : {SOURCE_FOLDER "/kernels", SOURCE_FOLDER "/tests/cpp/cuda/kernels"})
    for (const auto &file : fs::recursive_directory_iterator(root)) {
      if (file.path().extension() != ".h") continue;
      files++;
      const std::string name = fs::relative(file.path(), root).generic_string();
      CAPTURE(name);
      const auto found = std::ranges::find(kernel_headers(), name, [](const Header &h) { return std::string(h.name); });
      REQUIRE(found != kernel_headers().end());
      CHECK((found->text == contents(file.path().string())));
    }
  CHECK(files == kernel_headers().size());
}

TEST_CASE("headers: what a kernel includes, directly or not, and nothing else") {
  std::vector<std::string> names;
  for (const Included &header : included_by("test/plain.h")) names.push_back(header.name);
  CHECK(names == std::vector<std::string>{"test/plain.h", "attention/base.h", "test/piece.h", "test/circle.h"});
}

TEST_CASE("headers: includes name files below kernels/, all else stays") {
  for (const Included &header : included_by("test/plain.h")) {
    if (header.name == "test/plain.h") {
      CHECK(has(header.text, "\n#include \"attention/base.h\"\n#include \"test/piece.h\"\n\nnamespace test {\n"));
      CHECK(header.text.ends_with("} // namespace test\n"));
    }
    if (header.name == "test/piece.h") CHECK(has(header.text, "#pragma once\n#include \"test/circle.h\"\n"));
  }
  CHECK(included_by("test/awkward.h")[0].text == contents(SOURCE_FOLDER "/tests/cpp/cuda/kernels/test/awkward.h") + "\n");
}

TEST_CASE("headers: an include of nothing is told") {
  CHECK(thrown(STROBE_INTERNAL, [] { included_by("test/lost.h"); }) ==
        "kernels/test/lost.h includes \"nowhere.h\", which is not below kernels/");
  CHECK(thrown(STROBE_INTERNAL, [] { included_by("test/none.h"); }) == "no header kernels/test/none.h");
}
