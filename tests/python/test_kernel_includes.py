"""Who may include whom in kernels/: a family knows what all share and nothing of another; passes know no family."""

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


def includes(file: Path) -> list[str]:
    """As files below kernels/."""
    names = re.findall(r"^\s*#\s*include\s+(\S+)", file.read_text(), re.MULTILINE)
    assert all(name.startswith('"') for name in names), f"{file}: NVRTC has no standard headers: {names}"
    return [(file.parent / name.strip('"')).resolve().relative_to(KERNELS).as_posix() for name in names]


def allowed(includer: str, included: str) -> bool:
    folder, target = includer.split("/")[0], included.split("/")[0]
    if folder in SHARED:
        return target in SHARED[folder]
    if target != folder:
        return target in SHARED["device"]
    # forward, backward and decode of a family share what lies in its own folder, and nothing of one another
    inner, other = includer.split("/")[1:-1], included.split("/")[1:-1]
    return not other or inner == other


FILES = sorted(path.relative_to(KERNELS).as_posix() for path in KERNELS.rglob("*.h"))


def test_folders_are_known():
    assert {name.split("/")[0] for name in FILES} == {*SHARED, *FAMILIES}


@pytest.mark.parametrize("name", FILES)
def test_includes_point_one_way(name):
    wrong = [target for target in includes(KERNELS / name) if not allowed(name, target)]
    assert not wrong, f"{name} may not include {wrong}"
