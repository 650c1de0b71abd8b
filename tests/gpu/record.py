"""Runs the tests that need a GPU and writes tests/gpu-record.json: what ran, where, and on which sources.

python tests/gpu/record.py [--only NAME] [pytest's options]   runs all parts or one (contract, extensions, engines, ...); with -n each
                                                              worker of pytest-xdist has another GPU as its first one
python tests/gpu/record.py --check                            exits with 1 if the sources have changed since the record was made, a part
                                                              is missing, or a test failed

Each part is recorded as soon as it ends, with a digest of the sources that it depends on. So several runs, also on several machines, can
fill one record, and after an edit of a test only the part with that test must run again.

tests/gpu/random_calls.py adds its counts to those of earlier runs on the same sources. The counts stay valid after an edit of a test, of
strobe.distributed, of strobe.compat or of the training, because random calls use none of these.
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
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "gpu-record.json"
# Tests of tests/python that also run on a GPU. CONTRACT: the contract; EXTENSIONS: its extensions and the interfaces of other libraries.
CONTRACT = (
    *("test_contract.py", "test_corners.py", "test_hidden.py", "test_known_bugs.py", "test_hyperbolic.py", "test_ladder.py"),
    *("test_bounds.py", "test_many_keys.py"),
)
EXTENSIONS = (
    *("test_seqused.py", "test_pages.py", "test_kv.py", "test_quantised.py", "test_auxiliary.py", "test_invariant.py", "test_parts.py"),
    *("test_eight_bits.py", "test_compat.py", "test_compat_flash_attn.py", "test_compat_flash_cache.py", "test_compat_flash_padding.py"),
    *("test_compat_flash_passes.py", "test_compat_sdpa.py", "test_lists.py", "test_writes.py", "test_captured_gradients.py"),
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
    "drawn_cases.py",
    "engines.py",
    "flash_formulas.py",
    "invariant_mixes.py",
    "plain.py",
    "random_*.py",
)
LEAST_OPTION_SETS = 3000  # the random calls must have covered at least this many
# The files that determine what runs on a GPU, or what its results are compared with. Each tracked file of ROOTS is in SOURCES or EXCLUDED.
ROOTS = ("include", "kernels", "python", "src", "tests/gpu", "tests/python", "tests/reference")
TESTS = ("tests/gpu/test_*.py", *(f"tests/python/{name}" for name in (*CONTRACT, *EXTENSIONS)))
SOURCES = (
    *("include/**/*.h", "include/**/*.hpp", "include/**/*.inc", "kernels/**/*.h"),
    *("src/*.h", "src/*.cpp", "src/attention/*.h", "src/attention/*.cpp", "src/reference/*.h", "src/reference/*.cpp"),
    *("src/score/*.h", "src/score/*.cpp"),
    *("src/cuda/**/*.h", "src/cuda/**/*.cpp", "src/cuda/compile/embed.cmake", "src/ladder/subset.h", "src/ladder/subset.cpp"),
    *("python/glue/*", "python/strobe/**/*.py", "python/strobe_tools/train/*.py"),
    *(f"tests/gpu/{name}.py" for name in ("conftest", "distributed_*", "random_*", "record", "spread")),
    *TESTS,
    *(f"tests/python/{name}" for name in HELPERS),
    "tests/reference/philox.py",
)
# Files that the random tests do not use, because these tests only call strobe.attention(), in one process.
NOT_OF_RANDOM_CALLS = (
    *TESTS,
    *("python/strobe/distributed/*.py", "python/strobe/compat/**/*.py", "python/strobe_tools/train/*.py"),
    *("tests/python/distributed_*.py", "tests/gpu/distributed_*.py"),
)
EXCLUDED = (
    *("src/**/sources.cmake", "src/**/README.md", "python/CMakeLists.txt"),  # these files only say how the sources are built
    *("src/cpu/*.h", "src/cpu/*.cpp", "src/ladder/*.h", "src/ladder/engine.cpp"),  # the CPU's engines, which judge no GPU result
    "python/glue/third_party/*/**/*",  # what XLA's handlers are compiled with
    *("python/strobe/*.pyi", "python/*/py.typed"),  # files for mypy
    "python/_strobe_autoload/__init__.py",  # used only by programs that import torch without strobe
    *("python/strobe_tools/*.py", "python/strobe_tools/[!t]*/**/*.py", "python/strobe_tools/bench/peak.c"),  # all tools except the training
    *("tests/gpu/*.cu", "tests/gpu/invariant.py", "tests/gpu/quantised.py", "tests/gpu/sanitize.py"),  # their results are not recorded
    "tests/gpu/pack.sh",  # brings files to a GPU machine, and tests nothing
    "tests/python/dear.py",  # nothing is left out on a GPU
    "tests/python/emulated.py",  # used by tests that need no GPU
    "tests/python/nodes.py",  # judges recorded functions on the CPU
    "tests/python/parallel_[cm]*.py",  # used by tests of processes on the CPU
    "tests/python/test_*.py",  # these tests run on the CPU only
    "tests/reference/[!p]*.py",  # judge formulas on the CPU
)
HOW = re.compile(r"-n|\d+|auto|-q+|-v+|--durations=\d+")  # options of pytest that select no tests
ENDED = (0, 1)  # pytest's exit status: all passed, some failed


class Part(NamedTuple):
    """Some of the tests: those in these files and folders with these marks."""

    files: tuple[str, ...]
    marks: str


# Tests that take tens of gigabytes run by themselves, one process per GPU; otherwise other processes would find no memory. Tests whose
# ranks take all GPUs also run by themselves, in one process; otherwise the ranks would wait for cores.
PARTS = {
    "contract": Part(tuple(f"tests/python/{name}" for name in CONTRACT), "not gigabytes and not all_gpus"),
    "extensions": Part(tuple(f"tests/python/{name}" for name in EXTENSIONS), "not gigabytes and not all_gpus"),
    "engines": Part(("tests/gpu",), "not gigabytes and not all_gpus"),
    "ranks": Part(("tests/gpu",), "all_gpus"),
    "gigabytes": Part(("tests/gpu", *(f"tests/python/{name}" for name in (*CONTRACT, *EXTENSIONS))), "gigabytes"),
}


# Tokens of C++: a preprocessor's line, a string, a character, a comment, blanks, a word, an operator, anything else.
TOKEN = re.compile(
    r"""^[ \t]*\#(?:\\\n|[^\n])* | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\\n])' | //[^\n]* | /\*.*?\*/ | \s+ | \w+ | [-+*/%<>=!&|^:.]+ | .""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)


def essence(file: Path) -> str:
    """The file's text; for C++ its tokens, without comments and blanks, which have no effect."""
    text = file.read_text()
    if file.suffix not in (".c", ".h", ".hpp", ".inc", ".cpp"):
        return text
    return "\0".join(token for token in TOKEN.findall(text) if not (token.isspace() or token.startswith(("//", "/*"))))


def matched(patterns: Iterable[str]) -> set[Path]:
    return {file for pattern in patterns for file in ROOT.glob(pattern) if file.is_file()}


def digest(part: str | None = None) -> str:
    """A digest of the sources that a part of the tests depends on, or with part=None those that random calls depend on. Of this file only
    PARTS counts, because it determines what runs."""
    files = matched(SOURCES) - {Path(__file__).resolve()} - matched(TESTS if part else NOT_OF_RANDOM_CALLS)
    if part:
        files |= {file for each in PARTS[part].files for file in matched([each if each.endswith(".py") else f"{each}/test_*.py"])}
    sha = hashlib.sha256(json.dumps(PARTS[part] if part else {}).encode())
    for file in sorted(files):
        sha.update(f"{file.relative_to(ROOT).as_posix()}\0{essence(file)}\0".encode())
    return sha.hexdigest()


def check() -> int:
    if not RECORD.exists():
        print(f"{RECORD.name}: missing; make test-gpu writes it on a machine with a GPU")
        return 1
    record = json.loads(RECORD.read_text())
    for name in PARTS:
        part = record["parts"].get(name)
        if not part or part.get("digest") != digest(name):
            what = "is of other sources than today's" if part else "did not run"
            print(f'{RECORD.name}: the part "{name}" {what}; run make test-gpu ARGS="--only {name}"')
            return 1
        if part["status"] not in ENDED:
            ran = part["passed"] + part["failed"] + part["skipped"]
            print(f'{RECORD.name}: pytest ended with status {part["status"]} after {ran} tests of "{name}" on {part["device"]}')
            return 1
        if chosen := [option for option in part["options"] if not HOW.fullmatch(option)]:
            print(f'{RECORD.name}: "{name}" ran with {" ".join(chosen)}, so perhaps not whole; run make test-gpu')
            return 1
        if part["failed"] or not part["passed"]:
            print(f'{RECORD.name}: {part["failed"]} tests of "{name}" failed on {part["device"]}')
            return 1
    drawn = record.get("random")
    if not drawn or drawn["digest"] != digest():
        print(f"{RECORD.name} has no random calls of today's sources; run make test-gpu-random")
        return 1
    if drawn["wrong"] or drawn["option_sets"] < LEAST_OPTION_SETS:
        print(f"{RECORD.name}: {drawn['option_sets']} option sets of random calls, of {LEAST_OPTION_SETS}; {drawn['wrong']} wrong")
        return 1
    for name, part in record["parts"].items():
        print(f"{name}: {part['passed']} passed, {part['skipped']} skipped on {part['device']}, {part['date']}")
    print(f"{drawn['calls']} random calls with {drawn['option_sets']} option sets on {drawn['device']}, none wrong")
    return 0


def add_random(found: dict[str, Any], of: str, file: Path | None = None) -> None:
    """Adds the results of a run of random calls to those of the same sources and device. of: the digest of the sources."""
    file = file or RECORD
    record = json.loads(file.read_text()) if file.exists() else {}
    before = record.get("random")
    if before and before["digest"] == of and before["device"] == found["device"]:
        if again := set(before["seeds"]) & set(found["seeds"]):
            raise ValueError(f"seed {again.pop()} is in {file.name} already")
        found = found | {name: before[name] + found[name] for name in ("calls", "option_sets", "wrong", "seeds", "seconds")}
    file.write_text(json.dumps(record | {"random": found | {"digest": of}}, indent=2) + "\n")


def add_part(name: str, found: dict[str, Any], of: str, file: Path | None = None) -> None:
    """Replaces the recorded results of one of PARTS. of: the digest of the sources."""
    file = file or RECORD
    record = json.loads(file.read_text()) if file.exists() else {}
    parts = {each: part for each, part in record.get("parts", {}).items() if each in PARTS}
    file.write_text(json.dumps(record | {"parts": parts | {name: found | {"digest": of}}}, indent=2) + "\n")


def suite_of(options: list[str], environment: dict[str, str]) -> tuple[ElementTree.Element | None, int]:
    """Runs pytest. Returns its report (None if there is none) and its exit status."""
    report = ROOT / "build" / "gpu-tests.xml"
    report.parent.mkdir(exist_ok=True)
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "spread", f"--junitxml={report}", *options]
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if not report.exists():
        return None, status
    suite = ElementTree.parse(report).getroot()
    return suite if suite.tag == "testsuite" else suite[0], status


def run(names: Iterable[str], options: list[str]) -> int:
    import torch

    if not torch.cuda.is_available():
        print("PyTorch sees no CUDA device here", file=sys.stderr)
        return 2
    found = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # where pytest finds the plugin `spread`
    environment = {**os.environ, "STROBE_TEST_DEVICE": "cuda", "PYTHONPATH": os.pathsep.join(found)}
    environment.setdefault("OMP_NUM_THREADS", "1")  # the references run on the CPU, and -n starts many processes
    signal.signal(signal.SIGINT, lambda *_: None)  # pytest gets the Ctrl-C, too: it ends and writes its report
    worst = 0
    before = {name: digest(name) for name in names}  # taken before the run, which does not test later edits
    for name in before:
        files, marks = PARTS[name]
        processes = {"gigabytes": ["-n", str(torch.cuda.device_count())], "ranks": ["-n", "0"]}.get(name, [])
        suite, status = suite_of([*(str(ROOT / file) for file in files), *options, "-m", marks, *processes], environment)
        if suite is None:
            print(f"pytest ended with status {status} and left no report", file=sys.stderr)
            return status or 1
        counts = {name: int(suite.get(name, 0)) for name in ("tests", "skipped", "failures", "errors")}
        skipped, failed = counts["skipped"], counts["failures"] + counts["errors"]
        part = {
            "device": torch.cuda.get_device_name(),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "passed": counts["tests"] - skipped - failed,
            "failed": failed,
            "status": status,
            "skipped": skipped,
            "seconds": round(float(suite.get("time", 0))),
            "torch": torch.__version__,
            "options": options,
        }
        add_part(name, part, before[name])
        print(json.dumps({name: part}), flush=True)
        worst = max(worst, status)
        if status not in ENDED:
            break
    return worst


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        return check()
    if arguments[:1] != ["--only"]:
        return run(PARTS, arguments)
    if arguments[1:2] and arguments[1] in PARTS:
        return run(arguments[1:2], arguments[2:])
    print(f"--only: {' '.join(arguments[1:2]) or 'missing'}; accepted are {', '.join(PARTS)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
