"""Runs the tests that need a GPU and writes tests/gpu-record.json: what ran, where, and of which sources.

python tests/gpu/record.py [pytest's options]      runs; with -n each worker of pytest-xdist begins at another GPU
python tests/gpu/record.py --check                 exits with 1 if the record is of other sources than today's, or of a failure

tests/gpu/random_calls.py adds what random calls gave: of the same sources, counts of several runs add up. An edit of a test, of
strobe.distributed, of strobe.compat or of the training leaves them as they are, since no random call runs one.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "gpu-record.json"
# The contract on the GPU's engines, beside what tests/gpu holds.
CONTRACT = (
    *("test_contract.py", "test_corners.py", "test_hidden.py", "test_known_bugs.py", "test_hyperbolic.py", "test_ladder.py"),
    *("test_compat.py", "test_compat_flash_attn.py", "test_compat_flash_cache.py", "test_compat_flash_padding.py"),
    *("test_compat_flash_passes.py", "test_compat_sdpa.py", "test_bounds.py", "test_many_keys.py", "test_seqused.py"),
    *("test_pages.py", "test_kv.py", "test_quantised.py"),
    *("test_auxiliary.py", "test_invariant.py", "test_parts.py"),
)
HELPERS = (
    "cases.py",
    "check.py",
    "conftest.py",
    "cuts.py",
    "device.py",
    "paging.py",
    "quantising.py",
    "distributed_*.py",
    "flash_formulas.py",
    "invariant_mixes.py",
    "plain.py",
    "random_*.py",
)
LEAST_OPTION_SETS = 3000  # of random calls
# What decides what runs on a GPU, and what its results are compared with. Each tracked file of these folders is one of SOURCES or EXCLUDED.
ROOTS = ("include", "kernels", "python", "src", "tests/gpu", "tests/python", "tests/reference")
TESTS = ("tests/gpu/test_*.py", *(f"tests/python/{name}" for name in CONTRACT))
SOURCES = (
    *("include/**/*.h", "include/**/*.hpp", "kernels/**/*.h"),
    *("src/*.h", "src/*.cpp", "src/attention/*.h", "src/attention/*.cpp", "src/reference/*.h", "src/reference/*.cpp"),
    *("src/cuda/**/*.h", "src/cuda/**/*.cpp", "src/cuda/compile/embed.cmake", "src/ladder/subset.h", "src/ladder/subset.cpp"),
    *("python/glue/*", "python/strobe/**/*.py", "python/strobe_tools/train/*.py"),
    "tests/gpu/*.py",
    *TESTS,
    *(f"tests/python/{name}" for name in HELPERS),
    "tests/reference/philox.py",
)
# What no random call runs: it makes calls of strobe.attention() in one process.
NOT_OF_RANDOM_CALLS = (
    *TESTS,
    *("python/strobe/distributed/*.py", "python/strobe/compat/**/*.py", "python/strobe_tools/train/*.py"),
    *("tests/python/distributed_*.py", "tests/gpu/distributed_*.py"),
)
EXCLUDED = (
    *("src/**/sources.cmake", "python/CMakeLists.txt"),  # how files are built that are sources themselves
    *("src/cpu/*.h", "src/cpu/*.cpp", "src/ladder/*.h", "src/ladder/engine.cpp"),  # the CPU's engines, which no GPU result is judged by
    *("python/strobe/*.pyi", "python/*/py.typed"),  # for mypy
    "python/_strobe_autoload/__init__.py",  # for other programs
    *("python/strobe_tools/*.py", "python/strobe_tools/[!t]*/**/*.py", "python/strobe_tools/bench/peak.c"),  # the tools but training
    "tests/python/test_*.py",  # the rest of the contract is the CPU's
    "tests/reference/[!p]*.py",  # judge formulas on the CPU
)
ENDED = (0, 1)  # pytest's exit status: all passed, some failed


# Of C++: a preprocessor's line, a string, a character, a comment, blanks, a word, an operator, anything else.
TOKEN = re.compile(
    r"""^[ \t]*\#(?:\\\n|[^\n])* | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\\n])' | //[^\n]* | /\*.*?\*/ | \s+ | \w+ | [-+*/%<>=!&|^:.]+ | .""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)


def essence(file: Path) -> str:
    """The file's text; of C++ its tokens, without comments and blanks, which decide nothing."""
    text = file.read_text()
    if file.suffix not in (".c", ".h", ".hpp", ".cpp"):
        return text
    return "\0".join(token for token in TOKEN.findall(text) if not (token.isspace() or token.startswith(("//", "/*"))))


def matched(patterns: Iterable[str]) -> set[Path]:
    return {file for pattern in patterns for file in ROOT.glob(pattern) if file.is_file()}


def digest(*, tests: bool = False) -> str:
    """Of the sources that random calls depend on; with `tests` of all that a record speaks of."""
    sha = hashlib.sha256()
    for file in sorted(matched(SOURCES) - (set() if tests else matched(NOT_OF_RANDOM_CALLS) | {Path(__file__).resolve()})):
        sha.update(f"{file.relative_to(ROOT).as_posix()}\0{essence(file)}\0".encode())
    return sha.hexdigest()


def check() -> int:
    if not RECORD.exists():
        print(f"{RECORD.name}: missing; make test-gpu writes it on a machine with a GPU")
        return 1
    record = json.loads(RECORD.read_text())
    if record["digest"] != digest(tests=True):
        print(f"{RECORD.name} is stale: sources have changed since {record['date']}; run make test-gpu")
        return 1
    if record["status"] not in ENDED:
        ran = record["passed"] + record["failed"] + record["skipped"]
        print(f"{RECORD.name}: pytest ended with status {record['status']} after {ran} tests on {record['device']}")
        return 1
    if record["failed"] or not record["passed"]:
        print(f"{RECORD.name}: {record['failed']} tests failed on {record['device']}")
        return 1
    drawn = record.get("random")
    if not drawn or drawn["digest"] != digest():
        print(f"{RECORD.name} has no random calls of today's sources; run make test-gpu-random")
        return 1
    if drawn["wrong"] or drawn["option_sets"] < LEAST_OPTION_SETS:
        print(f"{RECORD.name}: {drawn['option_sets']} option sets of random calls, of {LEAST_OPTION_SETS}; {drawn['wrong']} wrong")
        return 1
    print(f"{record['passed']} passed, {record['skipped']} skipped on {record['device']}, {record['date']}")
    print(f"{drawn['calls']} random calls with {drawn['option_sets']} option sets on {drawn['device']}, none wrong")
    return 0


def add_random(found: dict[str, Any], of: str, file: Path = RECORD) -> None:
    """What a run of random calls gave, of sources of that digest: its counts join those of the same sources and device."""
    record = json.loads(file.read_text()) if file.exists() else {}
    before = record.get("random")
    if before and before["digest"] == of and before["device"] == found["device"]:
        if again := set(before["seeds"]) & set(found["seeds"]):
            raise ValueError(f"seed {again.pop()} is in {file.name} already")
        found = found | {name: before[name] + found[name] for name in ("calls", "option_sets", "wrong", "seeds", "seconds")}
    file.write_text(json.dumps(record | {"random": found | {"digest": of}}, indent=2) + "\n")


def suite_of(options: list[str], environment: dict[str, str]) -> tuple[ElementTree.Element | None, int]:
    """What pytest reports of a run, None if it left no report; and its exit status."""
    report = ROOT / "build" / "gpu-tests.xml"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "spread", "--dist", "loadgroup", f"--junitxml={report}", *options]
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if not report.exists():
        return None, status
    suite = ElementTree.parse(report).getroot()
    return suite if suite.tag == "testsuite" else suite[0], status


def run(options: list[str]) -> int:
    import torch

    if not torch.cuda.is_available():
        print("PyTorch sees no CUDA device here", file=sys.stderr)
        return 2
    before = digest(tests=True)
    tests = [str(ROOT / "tests" / "gpu"), *(str(ROOT / "tests" / "python" / name) for name in CONTRACT)]
    found = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # spread
    environment = {**os.environ, "STROBE_TEST_DEVICE": "cuda", "PYTHONPATH": os.pathsep.join(found)}
    environment.setdefault("OMP_NUM_THREADS", "1")  # the references are the CPU's, and the processes of -n many
    signal.signal(signal.SIGINT, lambda *_: None)  # pytest ends at one, too, with its report written
    # What takes tens of gigabytes comes by itself, one process for each GPU, or the processes beside it find no memory.
    suites, status = [], 0
    for only in (["-m", "not gigabytes"], ["-m", "gigabytes", "-n", str(torch.cuda.device_count())]):
        suite, ended = suite_of([*tests, *options, *only], environment)
        if suite is None:
            print(f"pytest ended with status {ended} and left no report", file=sys.stderr)
            return ended or 1
        suites.append(suite)
        status = max(status, ended)
        if ended not in ENDED:
            break
    counts = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "skipped", "failures", "errors")}
    skipped, failed = counts["skipped"], counts["failures"] + counts["errors"]
    record = {
        "device": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "passed": counts["tests"] - skipped - failed,
        "failed": failed,
        "status": status,
        "skipped": skipped,
        "seconds": round(sum(float(suite.get("time", 0)) for suite in suites)),
        "torch": torch.__version__,
        "digest": before,
    }
    if RECORD.exists() and (drawn := json.loads(RECORD.read_text()).get("random")):
        record["random"] = drawn
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))
    return status


if __name__ == "__main__":
    sys.exit(check() if sys.argv[1:] == ["--check"] else run(sys.argv[1:]))
