#!/usr/bin/env python3
"""Checks that `make test` finds the faults in planted/. README.md says what a fault is, and how to add one.

A copy of the working tree (build/faults/tree) is built, and all tests that a fault names have to pass there. Then each fault is planted in
turn: its edit is made, the affected targets are built again, its tests have to fail, and the edit is undone.

    tests/faults/plant.py                    # all; the exit status is 1 if one is not found
    tests/faults/plant.py --only masked_by_one --only ring_neighbour
    tests/faults/plant.py --list             # their kinds, and whether each still fits the code
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLANTED = Path(__file__).resolve().parent / "planted"
WORK = ROOT / "build" / "faults"
PRODUCT = ("src/", "kernels/", "include/", "python/", "docs/", "README.md")  # folders and files that may have a fault
COPIED = ("src/cpu", "kernels/attention")  # for a fault of one instruction set: its file is compiled from a copy of these
LINKED = ("src/attention",)  # files that these include by relative paths
# The flag of /proc/cpuinfo without which an instruction set does not run.
NEEDED = {"avx2": "avx2", "avx512": "avx512f", "avx512bf16": "avx512_bf16", "amx": "amx_bf16"}
LIMIT = 900  # seconds that a run of tests may take
SEEDS = ("1", "2", "3")  # seeds of the draws of `make test`; a fault has to be found with each
# The message of a failing test where something was not as it expected. A test that could not run has another message.
ASSERTED = {
    "pytest": re.compile(r"\b(AssertionError|Failed: (DID NOT RAISE|Regex))|^assert ", re.MULTILINE),
    "ctest": re.compile(r"is NOT correct|didn't throw"),
}
# The target to build for a ctest, by the beginning of its name. All other ctests are files of strobe_tests.
TARGETS = {
    "cuda_": ("strobe_cuda_tests",),
    "emulated_": ("strobe_tests", "emulated_cuda", "emulated_nvrtc"),
    "emulator": ("emulator_tests",),
    "program_of_0_1": ("program_of_0_1",),
}


class FaultError(Exception):
    """A file of planted/ or the tree is wrong, so that nothing was tested."""


@dataclass(frozen=True)
class Run:
    """Tests that are to find a fault: a selection of pytest, or the name of a ctest."""

    program: str
    selection: str

    def __str__(self) -> str:
        return f"{self.program} {self.selection}"

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets that have to be built in build/cpp."""
        if self.program == "pytest":
            return TARGETS["emulated_"][1:] if "emulated" in self.selection else ()
        return next((targets for name, targets in TARGETS.items() if self.selection.startswith(name)), ("strobe_tests",))


@dataclass
class Fault:
    name: str
    kind: str = ""
    says: str = ""  # what is wrong
    only: str = ""  # the one instruction set of src/cpu that has the fault
    message: str = ""  # a pattern for the failing test's message, if it is no assertion
    needs: str = ""  # a flag that /proc/cpuinfo has to have
    runs: list[Run] = field(default_factory=list)
    edits: list[tuple[str, str, str]] = field(default_factory=list)  # file, old text, new text

    @staticmethod
    def read(path: Path) -> Fault:
        """A head of lines `name: value`, then, for each file, lines of a diff without numbers: kept ( ), taken out (-) and put in (+). An
        empty line stands between two changes of a file."""
        fault, file, old, new = Fault(path.stem), "", "", ""

        def end() -> None:
            nonlocal old, new
            if file and old != new:
                fault.edits.append((file, old, new))
            old = new = ""

        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line[:1] in (" ", "-", "+") and file:
                old += line[1:] + "\n" if line[0] != "+" else ""
                new += line[1:] + "\n" if line[0] != "-" else ""
                continue
            end()
            name, _, value = line.partition(": ")
            if name == "file" and value:
                file = value
            elif name in ("pytest", "ctest") and value:
                fault.runs.append(Run(name, value))
            elif name in ("kind", "says", "only", "message", "needs") and value:
                setattr(fault, name, value)
            elif line:
                raise FaultError(f"{path.name}:{number}: {line!r}; accepted are kind, says, only, message, needs, pytest, ctest, file")
        end()
        lacking = [name for name in ("kind", "says", "runs", "edits") if not getattr(fault, name)]
        if lacking:
            raise FaultError(f"{path.name} has no {', '.join(lacking)}")
        return fault

    def units(self) -> list[str]:
        """The files of the one instruction set that has the fault. STROBE_UNITY does not group them."""
        names = sorted(path.name for path in (ROOT / "src" / "cpu").glob("isa_*.cpp"))
        return [f"src/cpu/{name}" for name in names if re.fullmatch(rf"isa_{self.only}(_\w+)?\.cpp", name)]

    def misfits(self) -> list[str]:
        """Why the edit cannot be made in the working tree."""
        found = [f"only: {self.only} is no instruction set of src/cpu"] if self.only and not self.units() else []
        if self.only in NEEDED and self.needs != NEEDED[self.only]:
            found.append(f"only: {self.only} wants needs: {NEEDED[self.only]}, without which a CPU does not run it")
        for file, old, _ in self.edits:
            if not file.startswith(PRODUCT):
                found.append(f"{file} is no product code")
            elif not (ROOT / file).is_file():
                found.append(f"{file} does not exist")
            elif (times := _occurrences((ROOT / file).read_text(), old)) != 1:
                found.append(f"{file} has {times} times, not once:\n{old.rstrip()}")
            elif self.only and not file.startswith(COPIED):
                found.append(f"{file} is in none of {', '.join(COPIED)}, of which alone one instruction set may have its own")
        return found

    def lacks(self) -> str:
        """Why this machine cannot run the faulty code; empty if it can."""
        cpuinfo = Path("/proc/cpuinfo")
        flags = re.findall(r"^flags\s*:.*", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
        return "" if not self.needs or self.needs in " ".join(flags).split() else f"this CPU lacks {self.needs}"


def _occurrences(text: str, lines: str) -> int:
    """Counts where whole lines occur."""
    return ("\n" + text).count("\n" + lines)


class Tree:
    """The copy of the working tree. Files that did not change keep their time, so that they are not built again."""

    def __init__(self, jobs: int):
        self.root, self.jobs = WORK / "tree", jobs
        self.python = self.root / ".venv" / "bin" / "python"
        own = {name: value for name, value in os.environ.items() if not name.startswith("STROBE_") and name != "PYTHONPATH"}
        path = os.pathsep.join([str(self.python.parent), str(ROOT / ".venv" / "bin"), os.environ["PATH"]])
        ccache = shutil.which("ccache", path=path)
        self.environment = own | {
            "PATH": path,
            "CXX": os.environ.get("CXX", "c++"),
            "CCACHE_BASEDIR": str(self.root),
            "CCACHE_NOHASHDIR": "1",
            "CMAKE_CXX_COMPILER_LAUNCHER": ccache or "",
            "STROBE_CACHE_DIR": str(WORK / "kernels"),
        }

    def make(self) -> None:
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        files = {name for name in names if name and (ROOT / name).is_file()}
        for name in files:
            _copy(ROOT / name, self.root / name)
        for path in (x for x in self.root.rglob("*") if x.is_file()):
            name = path.relative_to(self.root).as_posix()
            if name not in files and not name.startswith(("build/", ".venv/", "planted/")) and path.suffix not in (".so", ".pyc"):
                path.unlink()
        self._make_venv()
        self._command("cmake", "-S", ".", "-B", "build/cpp", "-G", "Ninja", f"-DSTROBE_TEST_NVRTC={_nvrtc()}")
        self._command(
            *("cmake", "-S", ".", "-B", "build/core", "-G", "Ninja", "-DSKBUILD=ON", "-DCMAKE_BUILD_TYPE=Release"),
            *(f"-DPython_EXECUTABLE={self.python}", f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={self.root / 'python' / 'strobe'}"),
        )

    def _make_venv(self) -> None:
        """Makes an environment with the packages of ROOT's .venv and the copy's own strobe. ROOT's editable install does not count: it is
        a .pth file, which Python does not read in a folder that another .pth file names."""
        if not self.python.exists():
            subprocess.run([str(ROOT / ".venv" / "bin" / "python"), "-m", "venv", "--without-pip", str(self.root / ".venv")], check=True)
        (site,) = (ROOT / ".venv" / "lib").glob("python3.*/site-packages")
        further = site / "installed.pth"
        lines = [str(self.root / "python"), str(site), *(further.read_text().split() if further.exists() else [])]
        (own,) = (self.root / ".venv" / "lib").glob("python3.*/site-packages")
        (own / "tree.pth").write_text("\n".join(lines) + "\n")

    def _command(self, *words: str) -> None:
        done = subprocess.run(words, cwd=self.root, env=self.environment, capture_output=True, text=True)
        if done.returncode:
            raise FaultError(f"{' '.join(words[:4])} fails:\n" + "\n".join((done.stdout + done.stderr).splitlines()[-30:]))

    def build(self, runs: Sequence[Run]) -> None:
        if any(run.program == "pytest" for run in runs):
            self._command("cmake", "--build", "build/core", "--parallel", str(self.jobs), "--target", "_core", "_eager")
        targets = sorted({target for run in runs for target in run.targets})
        if targets:
            self._command("cmake", "--build", "build/cpp", "--parallel", str(self.jobs), "--target", *targets)

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        changed: dict[Path, str] = {}
        beside = self.root / "planted"
        shutil.rmtree(beside, ignore_errors=True)
        if fault.only:  # the instruction set's files include copies, so that no other one is compiled again
            for name in COPIED:
                shutil.copytree(ROOT / name, beside / name)
            for name in LINKED:
                (beside / name).symlink_to(self.root / name)
            for unit in fault.units():
                changed[self.root / unit] = f'#include "../../planted/{unit}"\n'
        for file, old, new in fault.edits:
            path = (beside if fault.only else self.root) / file
            text = changed.get(path) or path.read_text()
            changed[path] = ("\n" + text).replace("\n" + old, "\n" + new)[1:]
        before = {path: path.read_text() for path in changed}
        for path, text in changed.items():
            path.write_text(text)
        try:
            yield
        finally:
            for path, text in before.items():
                path.write_text(text)
            shutil.rmtree(beside, ignore_errors=True)

    def test(self, run: Run, seed: str, first: bool) -> Outcome:
        """Runs what `make test` draws of these tests by the seed. first: ends with the first failure."""
        if run.program == "ctest":
            words = ["ctest", "--test-dir", "build/cpp", "--output-on-failure", "--no-tests=error", "-R", f"^{run.selection}$"]
            done = self._run(words)
            return Outcome.of_ctest(run, done)
        report = self.root / "build" / "report.xml"
        report.unlink(missing_ok=True)
        words = [
            str(self.python),
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--drawn",
            f"--junitxml={report}",
            *_split(run.selection),
        ]
        if "::" not in run.selection:
            words += ["-n", str(self.jobs), "--dist", "worksteal"]
        done = self._run([*words, "-x"] if first else words, STROBE_TEST_SEED=seed)
        return Outcome.of_pytest(done, report)

    def _run(self, words: list[str], **variables: str) -> tuple[int | None, str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(words, cwd=self.root, env=self.environment | variables, start_new_session=True, **pipes) as process:
            try:
                output, _ = process.communicate(timeout=LIMIT)
                return process.returncode, output
            except subprocess.TimeoutExpired:
                return None, f"no end within {LIMIT} s"
            finally:  # kill the whole group, so that the processes that a test started end, too
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Outcome:
    passed: bool
    by: str = ""  # the first test that failed
    text: str = ""  # the message of that test

    @staticmethod
    def of_ctest(run: Run, done: tuple[int | None, str]) -> Outcome:
        status, output = done
        if status == 0:
            return Outcome(True)
        case = re.search(r"TEST CASE: +(.*)", output)
        return Outcome(False, f"{run.selection}: {case[1].strip()}" if case else run.selection, output)

    @staticmethod
    def of_pytest(done: tuple[int | None, str], report: Path) -> Outcome:
        status, output = done
        if status == 0:
            return Outcome(True)
        cases = ElementTree.parse(report).getroot().iter("testcase") if report.exists() else iter(())
        for case in cases:
            failure, error = case.find("failure"), case.find("error")  # an error: the test itself did not run
            if error is not None and "crashed while running" in (error.get("message") or ""):  # but a crash of its process is a failure
                failure = error
            if failure is not None:
                file = (case.get("classname") or "").rpartition(".")[2]
                return Outcome(False, f"{file}::{case.get('name')}", f"{failure.get('message')}\n{failure.text}")
        return Outcome(False, "", output)

    def found(self, fault: Fault, run: Run) -> str:
        """Why the failure does not show the fault; empty if it does."""
        if self.passed:
            return f"NOT FOUND by {run}"
        wanted = re.compile(fault.message) if fault.message else ASSERTED[run.program]
        if self.by and wanted.search(self.text):
            return ""
        tail = "\n".join(self.text.splitlines()[-30:])
        return f"{run} fails, but {self.by or 'no test of it'} says nothing like {wanted.pattern!r}:\n{tail}"


def _split(selection: str) -> list[str]:
    """Splits into words; a quoted text is one word."""
    return [quoted or word for quoted, word in re.findall(r'"([^"]*)"|(\S+)', selection)]


def _copy(source: Path, target: Path) -> None:
    if target.is_file() and target.read_bytes() == source.read_bytes():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def _nvrtc() -> str:
    """The NVRTC that the working tree's own tests take, or would take."""
    cache = ROOT / "build" / "cpp" / "CMakeCache.txt"
    found = re.search(r"^STROBE_TEST_NVRTC:FILEPATH=(.+)$", cache.read_text(), re.MULTILINE) if cache.exists() else None
    if found and not found[1].endswith("NOTFOUND"):
        return found[1]
    words = [str(ROOT / ".venv" / "bin" / "python"), "-c", _FIND_NVRTC]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


_FIND_NVRTC = """
from importlib import metadata
print(next((f.locate() for f in metadata.files("nvidia-cuda-nvrtc") or [] if f.name.startswith("libnvrtc.so")), ""))
"""


def drawn(runs: Sequence[Run]) -> list[tuple[Run, str]]:
    """Tests and seeds to run them with; nothing is drawn for a ctest."""
    return [(run, seed) for run in runs for seed in (SEEDS if run.program == "pytest" else SEEDS[:1])]


def clean(tree: Tree, faults: Sequence[Fault]) -> list[str]:
    """Runs everything once without a fault; returns what does not pass."""
    runs = list(dict.fromkeys(run for fault in faults for run in fault.runs))
    tree.build(runs)
    wrong = []
    for run, seed in drawn(runs):
        began = time.monotonic()
        outcome = tree.test(run, seed, first=False)
        _say(f"without a fault: {run}, seed {seed}: {'passes' if outcome.passed else 'FAILS'}, {time.monotonic() - began:.0f} s")
        if not outcome.passed:
            wrong.append(f"{run}, seed {seed}, fails without a fault:\n{outcome.by}\n" + "\n".join(outcome.text.splitlines()[-30:]))
    return wrong


@dataclass
class Row:
    fault: Fault
    by: str
    seconds: float
    wrong: str = ""


def search(tree: Tree, fault: Fault) -> Row:
    if reason := fault.lacks():
        return Row(fault, f"skipped: {reason}", 0)
    began, by, wrong = time.monotonic(), "", []
    with tree.planted(fault):
        try:
            tree.build(fault.runs)
            for run, seed in drawn(fault.runs):
                outcome = tree.test(run, seed, first=True)
                by = by or outcome.by
                wrong += [f"seed {seed}: {why}"] if (why := outcome.found(fault, run)) else []
        except FaultError as error:
            wrong.append(str(error))
    return Row(fault, by, time.monotonic() - began, "\n".join(wrong))


def table(rows: Sequence[Row]) -> str:
    lines = [("fault", "kind", "found by", "seconds")]
    lines += [(row.fault.name, row.fault.kind, row.by if not row.wrong else "NOT FOUND", f"{row.seconds:.0f}") for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    return "\n".join("  ".join([*(x.ljust(w) for x, w in zip(line, widths, strict=False)), line[3].rjust(7)]) for line in lines)


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="a file of planted/ without .fault; may be given several times")
    parser.add_argument("--list", action="store_true", help="list the faults and run nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers and tests that run at a time")
    given = parser.parse_args()
    try:
        faults = [Fault.read(path) for path in sorted(PLANTED.glob("*.fault"))]
        unknown = set(given.only or ()) - {fault.name for fault in faults}
        if unknown:
            raise FaultError(f"--only: no fault {', '.join(sorted(unknown))}; accepted are the names that --list prints")
        faults = [fault for fault in faults if not given.only or fault.name in given.only]
        misfits = {fault.name: fault.misfits() for fault in faults}
        if given.list:
            for fault in faults:
                _say(f"{fault.name} ({fault.kind}): {fault.says}" + "".join(f"\n  NO LONGER FITS: {x}" for x in misfits[fault.name]))
            return any(misfits.values())
        if any(misfits.values()):
            raise FaultError("\n".join(f"{name}: {x}" for name, found in misfits.items() for x in found))
        return plant(faults, given.jobs)
    except FaultError as error:
        print(error, file=sys.stderr)
        return 2


def plant(faults: Sequence[Fault], jobs: int) -> int:
    began = time.monotonic()
    tree = Tree(jobs)
    tree.make()
    if wrong := clean(tree, [fault for fault in faults if not fault.lacks()]):
        raise FaultError("\n".join(wrong))
    rows = []
    for fault in faults:
        rows.append(row := search(tree, fault))
        _say(f"{fault.name}: {row.wrong or row.by}, {row.seconds:.0f} s")
    _say("\n" + table(rows))
    missed = [row for row in rows if row.wrong]
    skipped = sum(row.by.startswith("skipped") for row in rows)
    _say(f"{len(rows) - len(missed) - skipped} of {len(rows)} faults found, {skipped} skipped; {time.monotonic() - began:.0f} s")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
