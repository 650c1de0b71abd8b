#!/usr/bin/env python3
"""Measures what the library costs to compile, relative to one fixed file, so that drift shows on any machine.

    .ci/cost.py          # from what .ci/run has compiled; says "not measured" if an object came out of ccache
    .ci/cost.py --whole  # compiles the library by itself, without ccache: two minutes of a core (make cost)

.ci/run sets CCACHE_PREFIX to this program, so ccache calls it with each compiler command whose result is not in the cache. The program runs
the command and notes its processor seconds in the file that $STROBE_COST names, with a digest of the compiled files: an object counts as
measured if these files are the same now. The sum of the library's objects is divided by the seconds of tests/cpp/main.cpp (a header of
another project, which does not change). The exit status is 1 if the quotient is more than MOST.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

# 71.8 beside other work, since each instruction set has JVPs and second derivatives; 56.5 with gradients of captured tensors, 42 before
# (EPYC, GCC 12).
FIGURE = 71.0
MOST = 1.15 * FIGURE
FIXED = "doctest_main.dir/"  # one object
TIMES = 3  # how often --whole compiles it, because it is short
LIBRARY = "strobe_core.dir/"
ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "cpp"
WHOLE = ROOT / "build" / "cost"
# Each folder has the same objects; ccache compiles an object in the folder that comes first.
FOLDERS = (str(BUILD), str(ROOT / "build" / "python"), str(WHOLE))
HOW = ("CMakeLists.txt", "src/*/sources.cmake", "tests/cpp/CMakeLists.txt")  # files that set the options


def compile_and_note(command: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(command[command.index("-MF") + 1]) if "-MF" in command else Path(folder) / "files"
        environment = os.environ | {"DEPENDENCIES_OUTPUT": str(Path(folder) / "files")}  # GCC and Clang list in it the files that they read
        status = subprocess.run(command, check=False, env=environment).returncode
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        if "-o" in command and "-c" in command and status == 0 and listed.exists():
            files = _own(re.findall(r"(?:[^\s\\]|\\.)+", listed.read_text().replace("\\\n", " ")))
            note = {"folder": str(Path.cwd()), "object": command[command.index("-o") + 1], "files": files, "digest": _digest(files)}
            with Path(os.environ["STROBE_COST"]).open("a") as file:
                file.write(json.dumps(note | {"seconds": used.ru_utime + used.ru_stime}) + "\n")
    return status


def _own(words: Iterable[str]) -> list[str]:
    """The files of the working tree, except those that are made in a build folder."""
    paths = {Path(word).resolve() for word in words if not word.endswith(":")}
    names = {path.relative_to(ROOT).as_posix() for path in paths if ROOT in path.parents}
    return sorted(name for name in names if not name.startswith(("build/", ".venv/")))


def _digest(files: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for path in [*(ROOT / name for name in files), *(path for pattern in HOW for path in sorted(ROOT.glob(pattern)))]:
        digest.update(path.read_bytes() if path.exists() else b"-")
    return digest.hexdigest()


def name_of(output: str) -> str:
    return output.rpartition("CMakeFiles/")[2]


def check(build: Path, noted: Path) -> bool | None:
    """Whether the library costs too much; None if that was not measured."""
    seconds = defaultdict(list)
    for note in map(json.loads, noted.read_text().splitlines()):
        if note["folder"] in FOLDERS and _digest(note["files"]) == note["digest"]:
            seconds[name_of(note["object"])].append(note["seconds"])
    noted_seconds = {name: statistics.median(x) for name, x in seconds.items()}
    database = build / "compile_commands.json"
    wanted = [name_of(x["output"]) for x in json.loads(database.read_text())] if database.exists() else []
    library = [name for name in wanted if name.startswith(LIBRARY)]
    fixed = [name for name in wanted if name.startswith(FIXED)]
    lacking = [name for name in (*library, *fixed) if name not in noted_seconds]
    if lacking or not library or not fixed:
        print(f"not measured: {', '.join(lacking) or f'there is no {database}'}")
        return None
    unit = noted_seconds[fixed[0]]
    cost = sum(noted_seconds[name] for name in library) / unit
    for name in sorted(library, key=noted_seconds.__getitem__)[:-6:-1]:
        print(f"{noted_seconds[name]:8.1f} s  {name.removeprefix(LIBRARY)}")
    print(f"the library takes {cost:.1f} times as long to compile as tests/cpp/main.cpp ({unit:.1f} s); accepted is {MOST:.1f}")
    return cost > MOST


def measure() -> Path:
    """Compiles the library and the fixed file. Returns the file in which their seconds are noted."""
    noted = WHOLE / "cost.jsonl"
    noted.parent.mkdir(parents=True, exist_ok=True)
    noted.write_text("")
    launcher = f"-DCMAKE_CXX_COMPILER_LAUNCHER={sys.executable};{Path(__file__).resolve()};--"
    environment = os.environ | {"STROBE_COST": str(noted)}
    make = ["cmake", "-S", str(ROOT), "-B", str(WHOLE), "-G", "Ninja", "-DSTROBE_TEST_NVRTC=OFF", launcher]
    build = ["cmake", "--build", str(WHOLE), "--clean-first", "--parallel", str(len(os.sched_getaffinity(0))), "--target"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    for targets in (["strobe_core", "doctest_main"], *[["doctest_main"]] * (TIMES - 1)):
        subprocess.run([*build, *targets], check=True, env=environment)
    return noted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--whole", action="store_true", help="compile the library by itself, without ccache; not measured is then a failure"
    )
    if parser.parse_args().whole:
        return int(check(WHOLE, measure()) is not False)
    noted = os.environ.get("STROBE_COST")
    if not noted or not Path(noted).exists():
        print("STROBE_COST names no file of measured seconds; run .ci/run tests cost, or .ci/cost.py --whole", file=sys.stderr)
        return 2
    return int(bool(check(BUILD, Path(noted))))


if __name__ == "__main__":
    command = sys.argv[1:]
    if command[:1] == ["--"]:
        sys.exit(compile_and_note(command[1:]))
    sys.exit(compile_and_note(command) if command and not command[0].startswith("-") else main())
