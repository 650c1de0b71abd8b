// SHA-256 against the examples of FIPS 180-4.
#include <doctest/doctest.h>

#include "cuda/compile/sha256.h"

using namespace strobe::cuda;

static std::string sha256(std::string_view text) { return hex(Sha256().add(text).digest()); }

TEST_CASE("sha256: published digests") {
  CHECK(sha256("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(sha256("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(sha256(std::string(1000000, 'a')) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("sha256: in pieces as in one") {
  const std::string text(300, 'x');
  for (size_t length : {55, 56, 63, 64, 65, 119, 120, 128, 300})
    for (size_t first : {0, 1, 54, 55}) {
      const std::string_view all = std::string_view(text).substr(0, length);
      CHECK(hex(Sha256().add(all.substr(0, first)).add(all.substr(first)).digest()) == sha256(all));
    }
}

TEST_CASE("sha256: fields keep their bounds") {
  CHECK(Sha256().add_field("ab").add_field("c").digest() != Sha256().add_field("a").add_field("bc").digest());
}
