"""The includes in kernels/: a family includes the common files and nothing of another family; passes include no family."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"
SHARED = {
    "attention": {"attention"},
    "ptx": {"attention", "ptx"},
    "tile": {"attention", "ptx", "tile"},
    "device": {"attention", "ptx", "tile", "device"},
    "passes": {"attention", "ptx", "tile", "device", "passes"},
}
FAMILIES = ("sm90", "mma", "tf32", "simt", "ladder")


def named(text: str) -> list[str]:
    """The files in its #include lines, with quotes or angle brackets; or the word there, for a macro."""
    return re.findall(r'^\s*#\s*include\s*("[^"\n]*"|<[^>\n]*>|\w+)', text, re.MULTILINE)


def includes(file: Path) -> list[str]:
    """The includes as files below kernels/."""
    names = named(file.read_text())
    assert all(name.startswith('"') for name in names), f"{file}: NVRTC has no standard headers: {names}"
    targets = [(file.parent / name.strip('"')).resolve() for name in names]
    assert all(target.is_file() for target in targets), f"{file} includes what is no file: {targets}"
    return [target.relative_to(KERNELS).as_posix() for target in targets]


def test_an_include_is_read_however_it_is_written():
    text = '#include "a.h"\n  #  include\t"b/c.h" // why\n#include"d.h"\n#include<e.h>\n#include FILE\n// #include "f.h"\n'
    assert named(text) == ['"a.h"', '"b/c.h"', '"d.h"', "<e.h>", "FILE"]


@pytest.mark.parametrize(
    ("includer", "included", "may"),
    [
        ("mma/forward/forward.h", "mma/config.h", True),
        ("mma/forward/forward.h", "mma/backward/config.h", False),
        ("mma/config.h", "sm90/arguments.h", False),
        ("mma/config.h", "device/scores.h", True),
        ("passes/delta.h", "mma/config.h", False),
        ("ptx/math.h", "device/scores.h", False),
    ],
)
def test_the_rule(includer, included, may):
    assert allowed(includer, included) == may


def allowed(includer: str, included: str) -> bool:
    folder, target = includer.split("/")[0], included.split("/")[0]
    if folder in SHARED:
        return target in SHARED[folder]
    if target != folder:
        return target in SHARED["device"]
    # a family's forward, backward and decode include the files of the family's folder, but nothing of one another
    inner, other = includer.split("/")[1:-1], included.split("/")[1:-1]
    return not other or inner == other


FILES = sorted(path.relative_to(KERNELS).as_posix() for path in KERNELS.rglob("*.h"))


def test_folders_are_known():
    assert {name.split("/")[0] for name in FILES} == {*SHARED, *FAMILIES}


@pytest.mark.parametrize("name", FILES)
def test_includes_point_one_way(name):
    wrong = [target for target in includes(KERNELS / name) if not allowed(name, target)]
    assert not wrong, f"{name} may not include {wrong}"
