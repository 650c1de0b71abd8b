// Tuning tables: read, refused with a reason, used as requests.
#include "cuda/program/tuning.h"
#include "score/build.h"

#include <sys/stat.h>

#include "../call.h"
#include "surroundings.h"

using namespace strobe;
using namespace strobe::cuda;
using namespace strobe::cuda::test;

namespace {

const std::string kDeviceName = "Fake 1";

std::string entry(int tile_q, int tile_k, const std::string &engine = "cuda-mma") {
  return "\nengine = " + engine +
         "\ndirection = forward\ndtype = bfloat16\nhead_dim = 64\nhead_dim_v = 64\ngroup = 1\nqueries = 1024\nkeys = 1024\nheads = 8\n"
         "causal = false\nvarlen = false\ndeterministic = false\ntile_q = " +
         std::to_string(tile_q) + "\ntile_k = " + std::to_string(tile_k) + "\nseconds = 1e-05\n";
}
std::string table(const std::string &entries, const std::string &kernels = kernels_digest(), const std::string &device = kDeviceName) {
  return "format = 2\ndevice = " + device + "\nkernels = " + kernels + "\n" + entries;
}
std::string replaced(std::string text, const std::string &what, const std::string &by) {
  const size_t at = text.find(what);
  REQUIRE(at != text.npos);
  return text.replace(at, what.size(), by);
}
std::string ignored(const Folder &folder, const std::string &text) {
  const std::string file = folder / "table.txt";
  write(file, text);
  const Tuning tuning(file, kDeviceName);
  CHECK(tuning.empty() == !tuning.ignored().empty());
  return tuning.ignored();
}

std::string explained_call(int64_t wish) {
  strobe::test::Call call;
  for (const char *name : {"q", "k", "v", "out"}) call.add(name, DType::bf16, {2, 4, 1000, 64});
  call.add("lse", DType::f32, {2, 4, 1000});
  for (const char *name : {"q", "k", "v", "out", "lse"}) call[name].device_type = STROBE_CUDA, call[name].device_index = 1;
  call.attention.engine = "cuda-mma", call.attention.tile_q = wish;
  char words[8192];
  const int32_t status = strobe_explain(&call.attention, &call.tensors, nullptr, STROBE_FORWARD, words, sizeof words, nullptr);
  return std::string(status ? strobe_last_error() : words);
}

Problem problem() {
  Problem p;
  p.batch = 2, p.heads = p.heads_kv = 4, p.seqlen_q = p.seqlen_k = 1000, p.head_dim = p.head_dim_v = 64;
  p.total_q = p.total_k = 2000, p.dtype = DType::bf16, p.scale = 0.125;
  return p;
}

} // namespace

TEST_CASE("tuning: a table answers for sizes up to the same powers of two") {
  const Folder folder;
  write(folder / "table.txt", table(entry(64, 32)));
  const Tuning tuning(folder / "table.txt", kDeviceName);
  CHECK(tuning.ignored() == "");
  auto found = [&](auto &&change) {
    Problem p = problem();
    change(p);
    const auto key = tuning_key("cuda-mma", Operation::forward, p);
    return key && tuning.find(*key);
  };
  CHECK(found([](Problem &) {}));
  CHECK(found([](Problem &p) { p.seqlen_q = 513, p.seqlen_k = 1024; }));
  CHECK(found([](Problem &p) { p.batch = 1, p.heads = p.heads_kv = 5; }));
  CHECK_FALSE(found([](Problem &p) { p.seqlen_k = 1025; }));
  CHECK_FALSE(found([](Problem &p) { p.batch = 3; }));
  CHECK_FALSE(found([](Problem &p) { p.heads_kv = 2; }));
  CHECK_FALSE(found([](Problem &p) { p.head_dim = 63; }));
  CHECK_FALSE(found([](Problem &p) { p.dtype = DType::f16; }));
  CHECK_FALSE(found([](Problem &p) { p.window_right = 0; }));
  CHECK_FALSE(found([](Problem &p) { p.window_left = 100; }));
  CHECK_FALSE(found([](Problem &p) { p.program = score::built_in({.form = score::Form::softcap, .cap = 10}); }));
  CHECK_FALSE(found([](Problem &p) { p.dropout = 0.1; }));
  CHECK_FALSE(found([](Problem &p) { p.deterministic = true; }));
  CHECK(tuning.find(*tuning_key("cuda-simt", Operation::forward, problem())) == nullptr);
  CHECK(tuning.find(*tuning_key("cuda-mma", Operation::backward, problem())) == nullptr);
  const TunedTile *tile = tuning.find(*tuning_key("cuda-mma", Operation::forward, problem()));
  REQUIRE(tile);
  CHECK(tile->q == 64);
  CHECK(tile->k == 32);
  CHECK(tile->bundle == 0);
  CHECK(tile->shares == 0);
  CHECK_FALSE(tile->staged_store);
  CHECK_FALSE(tile->persistent.has_value());
}

TEST_CASE("tuning: wishes beside the tile") {
  const Folder folder;
  const std::string file = folder / "table.txt";
  write(file, table(entry(64, 32) + "bundle = 12\nshares = 4\nstaged_store = true\npersistent = false\n"));
  const Tuning tuning(file, kDeviceName);
  CHECK(tuning.ignored() == "");
  const TunedTile *tile = tuning.find(*tuning_key("cuda-mma", Operation::forward, problem()));
  REQUIRE(tile);
  CHECK(tile->bundle == 12);
  CHECK(tile->shares == 4);
  CHECK(tile->staged_store);
  CHECK(tile->persistent == false);
  CHECK(has(ignored(folder, table(entry(64, 32) + "bundle = 0\n")), "\"bundle\" is 0, not a whole number from 1 to "));
  CHECK(has(ignored(folder, table(entry(64, 32) + "staged_store = yes\n")), "\"staged_store\" is yes, not true or false"));
}

TEST_CASE("tuning: a table that is no use is ignored, with the reason") {
  const Folder folder;
  const Tuning absent(folder / "nothing.txt", kDeviceName);
  CHECK(absent.empty());
  CHECK(absent.ignored() == "");
  const std::string good = table(entry(64, 32));
  for (auto [text, part] :
       {std::pair{std::string(""), "ignored: empty; `strobe tune` writes a new one"},
        {std::string("{\"format\": 1, \"entries\": []}"), "line 1: expected \"name = value\""},
        {good.substr(0, good.find(" = false") + 2), "line 14: expected \"name = value\""},
        {good + " = 3\n", "line 20: expected \"name = value\""},
        {entry(64, 32), "\"format\" is missing"},
        {table(entry(64, 32), "0123"), "stale: measured with other kernels; `strobe tune` writes a new one"},
        {table(entry(64, 32), kernels_digest(), "Fake 0"), "measured on Fake 0, and this is Fake 1"},
        {replaced(good, "format = 2", "format = 1"), "format 1, and this library reads 2"},
        {replaced(good, "format = 2", "format = two"), "\"format\" is two, not a whole number from 0 to"},
        {replaced(good, "forward", "sideways"), "direction \"sideways\" is none of forward, backward, jvp, backward_jvp"},
        {replaced(good, "bfloat16", "bfloat"), "dtype \"bfloat\" is none"},
        {replaced(good, "causal = false", "causal = no"), "\"causal\" is no, not true or false"},
        {table(entry(0, 32)), "\"tile_q\" is 0, not a whole number from 1 to 65536"},
        {good + "\nengine = cuda-mma\n", "\"direction\" is missing"}}) {
    CAPTURE(text);
    const std::string reason = ignored(folder, text);
    CHECK(reason.starts_with("tuning table " + (folder / "table.txt") + " ignored: "));
    CHECK(has(reason, part));
  }
}

TEST_CASE("tuning: a table of an earlier version, which was JSON, is named until there is a new one") {
  const Folder folder;
  write(folder / "table.json", "{\"format\": 1}");
  const Tuning old(folder / "table.txt", kDeviceName);
  CHECK(old.empty());
  CHECK(old.ignored() ==
        "tuning table " + folder / "table.json" + " ignored: written by an earlier version, as JSON; `strobe tune` writes a new one");
  write(folder / "table.txt", table(entry(64, 32)));
  CHECK(Tuning(folder / "table.txt", kDeviceName).ignored() == "");
}

TEST_CASE("tuning: a table that others can write to, or that is no file of our own, is ignored") {
  const Folder folder;
  const std::string file = folder / "table.txt", good = table(entry(64, 32));
  auto reason = [&] { return in_child([&] { return Tuning(file, kDeviceName).ignored(); }); };
  write(file, good);
  CHECK(reason() == "");
  fs::permissions(file, fs::perms::others_write, fs::perm_options::add);
  CHECK(has(reason(), "table.txt: others can write to it"));
  fs::rename(file, folder / "other.txt");
  fs::create_symlink(folder / "other.txt", file);
  CHECK(has(reason(), "table.txt: no regular file"));
  fs::remove(file);
  REQUIRE(mkfifo(file.c_str(), 0644) == 0);
  CHECK(has(reason(), "table.txt: no regular file")); // the FIFO does not block its reader
  fs::remove(file);
  write(file, good);
  fs::resize_file(file, uint64_t(1) << 40);
  CHECK(has(reason(), "larger than 16777216 bytes"));
  fs::resize_file(file, good.size());
  CHECK(reason() == "");
  fs::permissions(folder.path(), fs::perms::group_write, fs::perm_options::add);
  CHECK(has(reason(), folder.path() + ": others can write to it"));
}

TEST_CASE("tuning: explain says which cache folder is not used") {
  const Compiling c;
  fake_cuda();
  fs::create_directories(c.folder / "cache");
  fs::permissions(c.folder / "cache", fs::perms::others_write, fs::perm_options::add);
  CHECK(has(in_child([] { return explained_call(0); }), "kernel cache not used: " + c.folder / "cache" + ": others can write to it"));
}

TEST_CASE("tuning: an engine takes the table's tile where the caller has no wish, and says so") {
  const Compiling c;
  fake_cuda();
  // A process reads its table once, so each child reads its own.
  auto explained = [&](const std::string &text, int64_t wish) {
    return in_child([&] {
      fs::create_directories(c.folder / "cache");
      write(tuning_file(kDeviceName), text);
      return explained_call(wish);
    });
  };
  const std::string tuned = explained(table(entry(64, 32)), 0);
  CHECK(has(tuned, "tile 64 x 32;"));
  CHECK(has(tuned, "the tile that `strobe tune` measured to be the fastest"));
  {
    const Variable off("STROBE_TUNING", "0");
    CHECK_FALSE(has(explained(table(entry(64, 32)), 0), "strobe tune"));
  }
  const std::string wished = explained(table(entry(64, 32)), 128);
  CHECK(has(wished, "tile 128 x "));
  CHECK_FALSE(has(wished, "strobe tune"));
  const std::string stale = explained(table(entry(64, 32), "0123"), 0);
  CHECK_FALSE(has(stale, "tile 64 x 32;"));
  CHECK(has(stale, "tuning-fake-1.txt ignored: stale"));
}

TEST_CASE("tuning: what a table has to say of itself") {
  const Compiling c;
  fake_cuda();
  char words[1024];
  REQUIRE(strobe_tuning(1, words, sizeof words, nullptr) == STROBE_OK);
  CHECK(std::string(words) == "file = " + c.folder / "cache/tuning-fake-1.txt" + "\nformat = 2\ndevice = " + kDeviceName +
                                  "\nkernels = " + kernels_digest() + "\nignored = \n");
  CHECK(strobe_tuning(7, words, sizeof words, nullptr) == STROBE_INVALID_ARGUMENT);
}
