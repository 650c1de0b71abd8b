// The disk cache: hits, misses, and a cache that cannot be used. The fake compiler counts its compilations.
#include "cuda/compile/cache.h"

#include <sys/stat.h>

#include <cstring>
#include <fstream>
#include <thread>

#include "cuda/compile/info.h"

#include "surroundings.h"

using namespace strobe;
using namespace strobe::cuda;
using namespace strobe::cuda::test;

namespace {

void same(const Build &a, const Build &b) {
  CHECK(a.cubin == b.cubin);
  CHECK(a.log == b.log);
  CHECK(a.registers == b.registers);
  CHECK(a.spill_bytes == b.spill_bytes);
  CHECK(a.nvrtc == b.nvrtc);
}

} // namespace

// Must be the first test: the driver is not loaded yet.
TEST_CASE("cache: a folder whose kernels are all too new for the driver is named") {
  const Compiling c;
  const Variable further("STROBE_CACHE_PATH", c.folder / "package");
  auto refused = [](int version) {
    return in_child([version] {
      fake_cuda().version = version;
      return refused_folders().empty() ? "none" : refused_folders()[0];
    });
  };
  fs::create_directories(c.folder / "package/nvrtc-13.7");
  CHECK(refused(13000) == "none");
  CHECK(refused(12080) == c.folder / "package/nvrtc-13.7" + ": an NVRTC that is newer than the driver compiled it");
  fs::create_directories(c.folder / "package/nvrtc-12.9");
  CHECK(refused(12080) == "none");
  // What packages/kernels/pack.py writes: the first line is the version.
  const auto made_of = [&](const std::string &version) { std::ofstream(c.folder / "package/manifest.txt") << version << "\nnvrtc 12.9\n"; };
  const std::string ours = std::string("strobe-attention ") + strobe_version();
  made_of(ours);
  CHECK(refused(12080) == "none");
  made_of("strobe-attention 9.9.9");
  CHECK(refused(12080) == c.folder / "package" + ": its kernels are those of strobe-attention 9.9.9, and this is " + ours);
}

TEST_CASE("cache: compiled once, then read") {
  const Compiling c;
  const Build first = build(plain(1), 90), second = build(plain(1), 90);
  CHECK(first.compiled);
  CHECK_FALSE(second.compiled);
  same(first, second);
  CHECK(first.registers == 42);
  CHECK(first.spill_bytes == 20);
  CHECK(first.nvrtc == "13.7");
  CHECK(c.compiled() == 1);
  REQUIRE(c.files().size() == 1); // no lock and no temporary file is left
  CHECK(has(c.files()[0], "/cache/nvrtc-13.7/"));
}

TEST_CASE("cache: what is compiled") {
  const Compiling c;
  const std::string cubin = build(plain(7), 90).cubin;
  CHECK(cubin.starts_with("--gpu-architecture=sm_90\n-std=c++20\n-default-device\n--ptxas-options=-v\n--no-cache\n"
                          "--modify-stack-limit=false\n"
                          "#include \"test/plain.h\"\n"
                          "using Kernel = test::Plain<test::Config{7,2}>;\n"
                          "template <class K> constexpr bool kWaitsItself = requires { K::kWaitsItself; };\n"
                          "extern \"C\" __global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocksPerSm) "
                          "kernel(const __grid_constant__ Kernel::Arguments a) {\n"
                          "asm volatile(\"griddepcontrol.launch_dependents;\");\n"
                          "if constexpr (!kWaitsItself<Kernel>) asm volatile(\"griddepcontrol.wait;\" ::: \"memory\");\n"
                          "Kernel::run(a);\n}\n"
                          "== test/plain.h\n"));
  CHECK_FALSE(has(build(plain(7), 80).cubin, "griddepcontrol")); // used only from sm_90 on
  CHECK(has(cubin, "== test/circle.h\n"));
  CHECK_FALSE(has(cubin, "unrelated"));
  const KernelSource specific{"test/plain.h", "test::Plain", "test::Config", true};
  CHECK(build(specific, plain(7).integers(), 90).cubin.starts_with("--gpu-architecture=sm_90a\n"));
  const Variable both("STROBE_NVRTC", nvrtc_file(12));
  CHECK_FALSE(has(build(plain(7), 61).cubin, "__grid_constant__")); // a keyword only from sm_70 on
}

TEST_CASE("cache: another kernel, config, architecture or compiler is another entry") {
  const Compiling c;
  const KernelSource same_text{"test/plain.h", "test::Plain", "::test::Config"},
      specific{"test/plain.h", "test::Plain", "test::Config", true};
  build(plain(1), 90);
  build(plain(2), 90);
  build(plain(1), 80);
  build(same_text, plain(1).integers(), 90);
  build(specific, plain(1).integers(), 90);
  const Variable other("STROBE_NVRTC", nvrtc_file(12));
  CHECK(build(plain(1), 90).nvrtc == "12.9");
  CHECK(c.compiled() == 6);
  CHECK(c.files().size() == 6);
}

TEST_CASE("cache: a broken entry is no entry, and is replaced") {
  const Compiling c;
  const Build good = build(plain(1), 90);
  const std::string file = c.files().at(0), whole = contents(file);
  int compiled = 1;
  auto rebuilt = [&](const std::string &bytes) {
    write(file, bytes);
    const Build again = build(plain(1), 90);
    CHECK(again.compiled);
    same(good, again);
    CHECK(c.compiled() == ++compiled);
    CHECK((contents(file) == whole));
  };
  for (size_t at : {size_t(0), size_t(9), size_t(45), size_t(75), size_t(85), size_t(100), whole.size() / 2, whole.size() - 1}) {
    std::string flipped = whole;
    flipped[at] ^= 1;
    rebuilt(flipped);
  }
  for (size_t length : {size_t(0), size_t(1), size_t(60), size_t(100), whole.size() - 1}) rebuilt(whole.substr(0, length));
  rebuilt(whole + "more");

  build(plain(2), 90); // makes another entry; its contents are then put under this entry's name
  compiled++;
  for (const std::string &other : c.files())
    if (other != file) rebuilt(contents(other));
}

TEST_CASE("cache: lengths that an entry does not have make it no entry") {
  const Compiling c;
  const Build good = build(plain(1), 90);
  const std::string file = c.files().at(0), whole = contents(file);
  constexpr size_t digest_at = 8, key_at = 40, log_at = 80, cubin_at = 88;
  uint64_t log = 0, cubin = 0;
  std::memcpy(&log, whole.data() + log_at, sizeof log);
  std::memcpy(&cubin, whole.data() + cubin_at, sizeof cubin);
  REQUIRE(log == good.log.size());
  REQUIRE(cubin == good.cubin.size());
  for (const auto &[log_bytes, cubin_bytes] : {std::pair{log + cubin + 1, uint64_t(0)}, // past the end
                                               {~uint64_t(0) - 90, cubin},              // the sum with the number before it wraps
                                               {log, cubin - 1},
                                               {log, cubin + 1},
                                               {log + 1, cubin - 2},
                                               {uint64_t(0), ~uint64_t(0)}}) {
    std::string bent = whole;
    std::memcpy(bent.data() + log_at, &log_bytes, sizeof log);
    std::memcpy(bent.data() + cubin_at, &cubin_bytes, sizeof cubin);
    const Sha256::Digest digest = Sha256().add(std::string_view(bent).substr(key_at)).digest();
    std::memcpy(bent.data() + digest_at, digest.data(), digest.size());
    write(file, bent);
    const Build again = build(plain(1), 90);
    CHECK(again.compiled);
    same(good, again);
    CHECK((contents(file) == whole));
  }
}

TEST_CASE("cache: what is no regular file is no entry, and nobody waits for it") {
  const Compiling c;
  build(plain(1), 90);
  const std::string file = c.files().at(0), elsewhere = c.folder / "elsewhere";
  auto compiles = [&](const char *what) {
    CAPTURE(what);
    CHECK(in_child([] { return std::string(build(plain(1), 90).compiled ? "compiled" : "read"); }) == "compiled");
    CHECK(fs::is_regular_file(fs::symlink_status(file)));
    CHECK(in_child([] { return std::string(build(plain(1), 90).compiled ? "compiled" : "read"); }) == "read");
  };
  fs::rename(file, elsewhere);
  fs::create_symlink(elsewhere, file);
  compiles("a link, to a good entry");
  fs::remove(file);
  REQUIRE(mkfifo(file.c_str(), 0644) == 0);
  compiles("a FIFO that nobody writes to");
  fs::remove(file);
  fs::create_symlink("/dev/zero", file);
  compiles("a link to endless zeros");
  fs::resize_file(file, uint64_t(1) << 40); // takes no space on the disk
  compiles("a terabyte");
}

TEST_CASE("cache: no planted link is followed") {
  const Compiling c;
  build(plain(1), 90);
  const std::string file = c.files().at(0), victim = c.folder / "victim", missing = c.folder / "missing";
  fs::remove(file);
  write(victim, "precious");
  fs::create_symlink(missing, file + ".lock");
  in_child([&] {
    for (int n = 0; n < 300; n++) fs::create_symlink(victim, file + "." + std::to_string(getpid()) + "." + std::to_string(n));
    return build(plain(1), 90).log;
  });
  CHECK(contents(victim) == "precious");
  CHECK_FALSE(fs::exists(missing));
}

TEST_CASE("cache: what others can write to is not used, and info says so") {
  const Compiling c;
  build(plain(1), 90);
  const std::string file = c.files().at(0), versions = fs::path(file).parent_path(), folder = c.folder / "cache";
  const fs::perms all = fs::perms::others_write, group = fs::perms::group_write;
  auto open_to = [](const std::string &path, fs::perms whom) { fs::permissions(path, whom, fs::perm_options::add); };
  auto shut = [](const std::string &path) {
    fs::permissions(path, fs::perms::others_write | fs::perms::group_write, fs::perm_options::remove);
  };
  CHECK_FALSE(build(plain(1), 90).compiled);
  CHECK(has(info(), "cache: " + folder + "\n"));
  for (const fs::perms whom : {all, group}) {
    open_to(folder, whom);
    const Variable further("STROBE_CACHE_PATH", folder);
    CHECK(build(plain(1), 90).compiled);
    CHECK(build(plain(2), 90).compiled);
    CHECK(c.files().size() == 1);
    CHECK(has(info(), "cache: none, not " + folder + ": others can write to it"));
    const Variable offline("STROBE_OFFLINE", "1");
    CHECK(has(thrown(STROBE_UNSUPPORTED, [] { build(plain(1), 90); }), "(" + folder + ": others can write to it, so not used"));
    shut(folder);
  }
  CHECK_FALSE(build(plain(1), 90).compiled);
  open_to(versions, all);
  CHECK(build(plain(1), 90).compiled);
  shut(versions);
  CHECK_FALSE(build(plain(1), 90).compiled);
  open_to(file, group);
  CHECK(build(plain(1), 90).compiled); // the entry is replaced
  CHECK_FALSE(build(plain(1), 90).compiled);
  if (geteuid() == 0) { // only root may give a file to another user
    REQUIRE(chown(file.c_str(), 12345, 12345) == 0);
    CHECK(build(plain(1), 90).compiled);
    CHECK_FALSE(build(plain(1), 90).compiled);
    REQUIRE(chown(folder.c_str(), 12345, 12345) == 0);
    CHECK(build(plain(1), 90).compiled);
    CHECK(has(info(), "cache: none, not " + folder + ": another user's"));
  }
}

TEST_CASE("cache: folders and entries that are made are not open to others, whatever the umask") {
  const mode_t before = umask(0);
  const Compiling c;
  const Variable deep("STROBE_CACHE_DIR", c.folder / "cache/a/b");
  CHECK(build(plain(1), 90).compiled);
  umask(before);
  CHECK_FALSE(build(plain(1), 90).compiled);
  for (const auto &made : fs::recursive_directory_iterator(c.folder / "cache"))
    CHECK((made.status().permissions() & (fs::perms::others_write | fs::perms::group_write)) == fs::perms::none);
}

TEST_CASE("cache: a folder in the file's place") {
  const Compiling c;
  build(plain(1), 90);
  const std::string file = c.files().at(0);
  fs::remove(file);
  fs::create_directory(file);
  CHECK(build(plain(1), 90).compiled);
}

TEST_CASE("cache: read-only writes nothing") {
  const Compiling c;
  const Variable readonly("STROBE_CACHE_READONLY", "1");
  CHECK(build(plain(1), 90).compiled);
  CHECK(build(plain(1), 90).compiled);
  CHECK_FALSE(fs::exists(c.folder / "cache"));
  {
    const Variable writing("STROBE_CACHE_READONLY", "0");
    CHECK(build(plain(1), 90).compiled);
  }
  CHECK_FALSE(build(plain(1), 90).compiled);
}

TEST_CASE("cache: where nothing can be written, kernels compile all the same") {
  const Compiling c;
  write(c.folder / "file", "");
  for (const std::string &folder : {c.folder / "file/cache", std::string("/proc/strobe"), c.folder / std::string(300, 'x')}) {
    const Variable unwritable("STROBE_CACHE_DIR", folder);
    CHECK(build(plain(1), 90).compiled);
    CHECK(build(plain(1), 90).compiled);
  }
  const Variable none("STROBE_CACHE_DIR", nullptr), no_xdg("XDG_CACHE_HOME", nullptr), no_home("HOME", nullptr);
  CHECK(build(plain(1), 90).compiled);
}

TEST_CASE("cache: the folder") {
  const Variable dir("STROBE_CACHE_DIR", "/a"), xdg("XDG_CACHE_HOME", "/b"), home("HOME", "/c"), path("STROBE_CACHE_PATH", "/d::/e:");
  CHECK(CacheSettings::from_environment().folder == "/a");
  CHECK(CacheSettings::from_environment().further == std::vector<std::string>{"/d", "/e"});
  const Variable no_dir("STROBE_CACHE_DIR", nullptr);
  CHECK(CacheSettings::from_environment().folder == "/b/strobe");
  const Variable no_xdg("XDG_CACHE_HOME", nullptr);
  CHECK(CacheSettings::from_environment().folder == "/c/.cache/strobe");
}

TEST_CASE("cache: offline compiles nothing, and takes what any compiler left") {
  const Compiling c;
  build(plain(1), 90);
  const Variable offline("STROBE_OFFLINE", "1"), other("STROBE_NVRTC", nvrtc_file(12));
  CHECK(build(plain(1), 90).nvrtc == "13.7");
  const std::string message = thrown(STROBE_UNSUPPORTED, [] { build(plain(2), 90); });
  CHECK(has(message, "test::Plain<test::Config{2,2}> for sm_90: not in a cache (" + c.folder / "cache" + ")"));
  CHECK(has(message, "STROBE_OFFLINE"));
  CHECK(has(message, "strobe prewarm"));
  CHECK(c.compiled() == 1);
}

TEST_CASE("cache: without a compiler, what any compiler left") {
  const Compiling c;
  build(plain(1), 90);
  const Variable none("STROBE_NVRTC", c.folder / "nothing.so");
  CHECK_FALSE(build(plain(1), 90).compiled);
  CHECK(has(thrown(STROBE_UNSUPPORTED, [] { build(plain(2), 90); }), "no NVRTC that compiles for sm_90"));
}

TEST_CASE("cache: made elsewhere") {
  const Compiling c;
  build(plain(1), 90);
  fs::rename(c.folder / "cache", c.folder / "elsewhere");
  {
    const Variable further("STROBE_CACHE_PATH", c.folder / "none" + ":" + c.folder / "elsewhere"), other("STROBE_NVRTC", nvrtc_file(12));
    CHECK(build(plain(1), 90).nvrtc == "13.7"); // an entry of any compiler serves
    CHECK_FALSE(fs::exists(c.folder / "cache"));
    CHECK(build(plain(2), 90).nvrtc == "12.9");
    CHECK(c.files().size() == 1); // compiled kernels go to the process's own folder
  }
  CHECK(build(plain(1), 90).compiled);
}

TEST_CASE("cache: made elsewhere, in a folder that the program adds") {
  const Compiling c;
  build(plain(1), 90);
  fs::rename(c.folder / "cache", c.folder / "package");
  CHECK(in_child([&] { // folders are added for the rest of a process
          if (strobe_add_kernel_folder((c.folder / "package").c_str()) != STROBE_OK) return std::string(strobe_last_error());
          if (build(plain(1), 90).compiled) return std::string("compiled");
          return is_kept(kPlain, plain(1).integers(), 90) ? info() : "not kept";
        })
            .ends_with(", further " + c.folder / "package" + "\n"));
  CHECK_FALSE(fs::exists(c.folder / "cache"));
  CHECK(strobe_add_kernel_folder(nullptr) == STROBE_INVALID_ARGUMENT);
  CHECK(strobe_last_error() == std::string("folder: null; accepted is a path"));
  CHECK(strobe_add_kernel_folder("") == STROBE_INVALID_ARGUMENT);
  CHECK(strobe_last_error() == std::string("folder: empty; accepted is a path"));
}

TEST_CASE("cache: of two compilers' entries made elsewhere, the newer") {
  const Compiling c;
  build(plain(1), 90);
  {
    const Variable other("STROBE_NVRTC", nvrtc_file(12));
    build(plain(1), 90);
  }
  const Variable further("STROBE_CACHE_PATH", c.folder / "cache");
  CHECK(build(plain(1), 90).nvrtc == "13.7");
  fs::remove_all(c.folder / "cache/nvrtc-13.7");
  CHECK(build(plain(1), 90).nvrtc == "12.9");
}

TEST_CASE("cache: 8 cold processes of 4 threads compile each kernel once") {
  const Compiling c;
  constexpr int processes = 8, threads = 4, keys = 3;
  int start[2]; // is closed when all have started
  REQUIRE(pipe(start) == 0);
  std::vector<pid_t> children;
  for (int p = 0; p < processes; p++) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      close(start[1]);
      char byte;
      if (::read(start[0], &byte, 1) != 0) _exit(2);
      std::atomic<int> wrong = 0;
      std::vector<std::thread> all;
      for (int t = 0; t < threads; t++)
        all.emplace_back([&, t] {
          for (int k = 0; k < keys; k++)
            if (!has(build(plain((k + t) % keys), 90).cubin, "Config{" + std::to_string((k + t) % keys) + ",2}")) wrong++;
        });
      for (std::thread &thread : all) thread.join();
      _exit(wrong ? 1 : 0);
    }
    children.push_back(child);
  }
  close(start[0]);
  close(start[1]);
  for (const pid_t child : children) {
    int status = 1;
    waitpid(child, &status, 0);
    CHECK(status == 0);
  }
  CHECK(c.compiled() == keys);
  CHECK(c.files().size() == keys);
}

TEST_CASE("cache: a lock that a dead process left holds nobody up") {
  const Compiling c;
  build(plain(1), 90);
  const std::string file = c.files().at(0);
  fs::remove(file);
  in_child([&] { // ends without releasing the lock
    new CacheLock(file);
    return std::string();
  });
  CHECK(fs::exists(file + ".lock"));
  CHECK(build(plain(1), 90).compiled);
  CHECK(c.files() == std::vector{file});
}

TEST_CASE("cache: one holder at a time") {
  const Folder folder;
  std::atomic<int> inside = 0, most = 0, turns = 0;
  std::vector<std::thread> all;
  for (int t = 0; t < 8; t++)
    all.emplace_back([&] {
      for (int i = 0; i < 20; i++) {
        const CacheLock lock(folder / "deep/entry");
        const int now = ++inside;
        if (now > most) most = now;
        turns++;
        std::this_thread::yield();
        inside--;
      }
    });
  for (std::thread &thread : all) thread.join();
  CHECK(most == 1);
  CHECK(turns == 160);
  CHECK_FALSE(fs::exists(folder / "deep/entry.lock"));
}
