#!/usr/bin/env python3
"""Whether two trees have the same kernels: the code of every kernel that `strobe prewarm` lists, compared without line numbers.

A kernel of one tree corresponds to the one in the other tree that the same call launches in the same place, whatever its file, type or
Config are called. Programs that differ only in comments and files are equal; else their PTX is compared, whose names are replaced; if it
differs their SASS. Compiled code is kept in ~/.cache/strobe-sass (STROBE_SASS_CACHE), so a base is compiled once.

    tests/sass/compare.py ../base . --arch 90 --family sm90
    tests/sass/compare.py 0b4b415 . --sample 50     # a revision whose checkout was compared before
    tests/sass/compare.py ../base . --rewrite       # other code may come, if it spills and waits no more, each template is at most
                                                    # 1% longer, and each kernel 3%, unless --longer names it
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import code_of
from code_of import Sass
from tree import Program, Tree, read

ARCHS = (75, 80, 90, 120)
LONGER = 1.01  # the limit of a rewrite: the geometric mean over a template's kernels, those with the same code not counted
LONGEST = 1.03  # the limit of any one kernel


@dataclass(frozen=True)
class Pair:
    call: str  # the first call that launches it
    base: Path  # the folder of the programs
    new: Path


@dataclass(frozen=True)
class Difference:
    call: str
    base_name: str
    new_name: str
    base: Sass
    new: Sass


def pairs(base: Tree, new: Tree) -> tuple[list[Pair], list[str]]:
    """The kernels of both, each pair once, and the kernels that only one tree launches."""
    found: dict[tuple[str, str], Pair] = {}
    faults = [f"{call}: no call of the new tree" for call in base.calls.keys() - new.calls.keys()]
    faults += [f"{call}: no call of the base" for call in new.calls.keys() - base.calls.keys()]
    for call in base.calls.keys() & new.calls.keys():
        launches, others = base.calls[call], new.calls[call]
        if len(launches) != len(others):
            names = [[base.program(key).name for key in launches], [new.program(key).name for key in others]]
            faults.append(f"{call}: {len(launches)} launches became {len(others)}:\n  " + "\n  ".join(" ".join(each) for each in names))
            continue
        for key, other in zip(launches, others, strict=True):
            found.setdefault((key, other), Pair(call, base.folder / "programs" / key, new.folder / "programs" / other))
    return sorted(found.values(), key=lambda pair: pair.call), sorted(faults)


def template(name: str) -> str:
    return name.partition("<")[0]


def chosen(all_: Iterable[Pair], family: str | None, sample: int | None, seed: int) -> list[Pair]:
    """The pairs to compare. In a sample each template of each dtype and architecture has its share."""
    of: dict[tuple[str, ...], list[Pair]] = defaultdict(list)
    for pair in all_:
        name = Program.read(pair.base).name
        if family is None or f"::{family}::" in name:
            of[pair.call.split()[0], template(name), pair.call.split()[1]].append(pair)
    if sample is None:
        return [pair for group in of.values() for pair in group]
    draw = random.Random(seed)
    groups = [draw.sample(group, len(group)) for _, group in sorted(of.items())]
    turns = (group[i] for i in range(max(map(len, groups), default=0)) for group in groups if i < len(group))
    return [pair for pair, _ in zip(turns, range(sample), strict=False)]


def difference(pair: Pair) -> Difference | None:
    if pair.base.name == pair.new.name:  # the name is part of the key
        return None
    base, new = Program.read(pair.base), Program.read(pair.new)
    if code_of.ptx(base) == code_of.ptx(new):
        return None
    before, after = code_of.sass(base), code_of.sass(new)
    return None if before == after else Difference(pair.call, base.name, new.name, before, after)


def compiled_ahead(pair: Pair) -> None:
    code_of.ptx(Program.read(pair.base))


def report(differences: list[Difference]) -> str:
    lines = []
    for d in differences:
        renamed = "" if d.base_name == d.new_name else f" -> {d.new_name}"
        lines += [f"differs: {d.base_name}{renamed}", f"  {d.call}", f"  base {d.base}", f"  new  {d.new}"]
    return "\n".join(lines)


def ratio(d: Difference) -> float:
    """The ratio of the numbers of instructions, new to base."""
    return d.new.instructions / d.base.instructions


def longer(differences: list[Difference]) -> dict[tuple[str, str], float]:
    """The geometric mean of the ratios, by architecture and template. Kernels with unchanged code do not count, because they would hide
    growth."""
    of: dict[tuple[str, str], list[float]] = defaultdict(list)
    for d in differences:
        of[d.call.split()[0], template(d.new_name)].append(math.log(ratio(d)))
    return {where: math.exp(sum(logs) / len(logs)) for where, logs in sorted(of.items())}


def broken(differences: list[Difference], named: Sequence[str] = ()) -> list[str]:
    """Applies the rules of a rewrite. named: kernels that may be longer than others may."""
    faults = [f"spills more: {d.new_name} ({d.base.spilled} -> {d.new.spilled} B)" for d in differences if d.new.spilled > d.base.spilled]
    faults += [f"serialized wgmma: {d.new_name}" for d in differences if d.new.serialized and not d.base.serialized]

    def more(new: float, accepted: float, what: str) -> str:
        return f"{100 * (new - 1):.2f}% more instructions: {what}; accepted is up to {100 * (accepted - 1):.0f}%"

    faults += [more(ratio(d), LONGEST, f"{d.new_name} ({d.call})") for d in differences if ratio(d) > LONGEST and d.new_name not in named]
    faults += [
        more(mean, LONGER, f"{name} of {arch}, on average")
        for (arch, name), mean in longer([d for d in differences if d.new_name not in named]).items()
        if mean > LONGER
    ]
    unknown = set(named) - {d.new_name for d in differences}
    faults += [f"--longer {name}: its code is the same, or there is no such kernel" for name in sorted(unknown)]
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a checkout whose package is built (make setup), or the revision of one that was compared before")
    parser.add_argument("new", help="the same of the tree that is judged")
    parser.add_argument("--arch", type=int, action="append", choices=ARCHS, help="compute capability times ten; by default all")
    parser.add_argument("--family", help="of kernels: sm90, mma, tf32, simt, ...; as the base calls it")
    parser.add_argument("--sample", type=int, help="this many kernels, some of each template and dtype")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--rewrite", action="store_true", help="fail for spills, serialized wgmma and longer kernels alone")
    parser.add_argument("--longer", action="append", default=[], metavar="NAME", help="a kernel, as it is reported, that may be longer")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    given = parser.parse_args()
    archs = given.arch or list(ARCHS)
    base, new = read(given.base, archs), read(given.new, archs)
    all_, faults = pairs(base, new)
    if given.sample is not None or given.family is not None:
        all_ = chosen(all_, given.family, given.sample, given.seed)
    if not all_:
        faults.append("nothing to compare")
    work = difference if given.base != given.new else compiled_ahead
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        differences = [found for found in pool.map(work, all_, chunksize=4) if found]
    if differences:
        print(report(differences))
        for (arch, name), mean in longer(differences).items():
            print(f"instructions, geometric mean of new over base: {arch} {name} {mean:.4f}")
    if given.rewrite:
        faults += broken(differences, given.longer)
    elif differences:
        faults.append(f"{len(differences)} kernels have other code")
    print(f"{len(all_)} kernels compared, {len(all_) - len(differences)} with the same code")
    for fault in faults:
        print(f"FAILED: {fault}")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
