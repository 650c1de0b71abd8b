#!/usr/bin/env python3
"""Whether two trees launch the same: kernel, Config, grid and every word of the arguments of all calls of the contract's pairs, with every
engine that supports them. The pairs are the base's: tests/python/cases.py may have changed since. Only the sizes of arguments are compiled,
and nothing is computed.

An address is written as its allocation, numbered in order of appearance, and the offset there. A kernel may be renamed; renamed ones are
printed.

    tests/sass/launches.py ../base . --arch 90
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tree import CACHE, HERE, digest, recorder, run

ARCHS = (75, 80, 90, 120)
CASES = "tests/python/cases.py"
Calls = dict[str, list[dict[str, Any]]]


def read(tree: str, arch: int, base: str) -> Calls:
    """The launches of the tree for the base's calls."""
    cases = text_of(base, CASES)
    file = CACHE / "launches" / f"{digest(tree)}-{hashlib.sha256(cases.encode()).hexdigest()[:16]}-{arch}.json"
    if not file.exists():
        if not (Path(tree) / "kernels").is_dir():
            raise SystemExit(f"{tree} was not recorded yet: name a folder with a checkout of it whose package is built")
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as new:
            Path(new, "programs").mkdir()
            environment = {"STROBE_RECORD": new, "STROBE_RECORD_CC": str(arch), "STROBE_TEST_DEVICE": "emulated", "PYTHONMALLOC": "malloc"}
            Path(new, "cases").mkdir()
            Path(new, "cases", "cases.py").write_text(cases)
            environment["PYTHONOPTIMIZE"] = "1"  # the cases assert properties of results, which are not computed
            environment["PYTHONPATH"] = f"{new}/cases:{Path(tree, CASES).resolve().parent}"
            run(Path(tree).resolve(), "record_launches.py", f"{new}/calls.json", LD_PRELOAD=str(recorder()), **environment)
            Path(new, "calls.json").replace(file)
    return json.loads(file.read_text())


def text_of(tree: str, name: str) -> str:
    """A file of a folder or a revision."""
    if (Path(tree) / "kernels").is_dir():
        return Path(tree, name).read_text()
    return subprocess.run(["git", "show", f"{tree}:{name}"], capture_output=True, check=True, text=True, cwd=HERE.parents[1]).stdout


def template(kernel: str) -> str:
    return kernel.partition("<")[0]


def config(kernel: str) -> str:
    return kernel.partition("{")[2]


def faults(base: Calls, new: Calls) -> list[str]:
    found = [f"{call}: in one tree alone" for call in sorted(base.keys() ^ new.keys())]
    for call in base.keys() & new.keys():
        steps, others = base[call], new[call]
        if len(steps) != len(others):
            names = [" ".join(step["kernel"] for step in each) for each in (steps, others)]
            found.append(f"{call}: {len(steps)} steps became {len(others)}:\n  {names[0]}\n  {names[1]}")
            continue
        for step, other in zip(steps, others, strict=True):
            found += [f"{call}: {step['kernel']}: {what}" for what in _differences(step, other)]
    return found


def _differences(step: dict[str, Any], other: dict[str, Any]) -> list[str]:
    found = []
    if config(step["kernel"]) != config(other["kernel"]):
        found.append(f"became {other['kernel']}")
    for what in ("shape", "shared", "early"):
        if step.get(what) != other.get(what):
            found.append(f"{what} {step.get(what)} became {other.get(what)}")
    before, after = step["arguments"], other["arguments"]
    if len(before) != len(after):
        return [*found, f"{8 * len(before)} bytes of arguments became {8 * len(after)}"]
    return found + [f"byte {8 * i} of the arguments: {a} became {b}" for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]


def renamed(base: Calls, new: Calls) -> Counter[tuple[str, str]]:
    names: Counter[tuple[str, str]] = Counter()
    for call in base.keys() & new.keys():
        for step, other in zip(base[call], new[call], strict=False):
            if template(step["kernel"]) != template(other["kernel"]):
                names[template(step["kernel"]), template(other["kernel"])] += 1
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a checkout whose package is built (make setup), or the revision of one that was recorded before")
    parser.add_argument("new", help="the same of the tree that is judged")
    parser.add_argument("--arch", type=int, action="append", choices=ARCHS, help="compute capability times ten; by default all")
    given = parser.parse_args()
    failed = False
    for arch in given.arch or ARCHS:
        base, new = read(given.base, arch, given.base), read(given.new, arch, given.base)
        found = faults(base, new)
        for (before, after), times in renamed(base, new).items():
            print(f"sm_{arch}: {before} is called {after} ({times} launches)")
        print(f"sm_{arch}: {sum(map(bool, base.values()))} calls, {sum(map(len, base.values()))} steps, {len(found)} differences")
        for fault in found[:40]:
            print(f"FAILED: {fault}")
        failed |= bool(found) or not any(base.values())
    return failed


if __name__ == "__main__":
    sys.exit(main())
