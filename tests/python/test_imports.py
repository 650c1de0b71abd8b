"""The imports within the package: in one direction, without a cycle, function-level imports and those for type checkers included."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "python" / "strobe"


def name_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in PACKAGE.rglob("*.py")}
MODULES |= {f"strobe.{name}": PACKAGE / f"{name}.pyi" for name in ("_core", "_eager")}  # in C


def imported(module: str, text: str, is_package: bool) -> set[str]:
    """The modules of the package that the text of a module of this name imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            of = ".".join([*above, *([node.module] if node.module else [])])
            names = {f"{of}.{alias.name}" for alias in node.names}
            found |= names & MODULES.keys() or {of}
    found = {name for name in found if name.split(".")[0] == "strobe"}
    assert found <= MODULES.keys(), f"{module} imports what is not there"
    return found - {module}


IMPORTS = {name: imported(name, file.read_text(), file.name == "__init__.py") for name, file in MODULES.items()}


def in_order(imports: dict[str, set[str]]) -> list[str]:
    return list(TopologicalSorter(imports).static_order())


def test_no_circle():
    order = in_order(IMPORTS)
    names = ("strobe._core", "strobe.arrays.torch", "strobe._request", "strobe._autograd", "strobe._fast_path", "strobe")
    places = [order.index(name) for name in names]
    assert places == sorted(places)


def test_a_circle_would_be_found():
    """In a function, and only for type checkers, too."""
    for text in ("def f():\n    from .._run import forward\n", "if TYPE_CHECKING:\n    from .. import _run\n", "import strobe._run\n"):
        with pytest.raises(CycleError):
            in_order(IMPORTS | {"strobe.arrays.base": imported("strobe.arrays.base", text, False)})


def test_arrays_know_nothing_of_calls():
    low = {"strobe._abi", "strobe._core", "strobe._eager", "strobe._extras", "strobe._kinds", "strobe._refusals"}
    for name, imports in IMPORTS.items():
        if name.startswith("strobe.arrays"):
            assert {each for each in imports if not each.startswith("strobe.arrays")} <= low, name


def test_what_the_bottom_imports():
    assert all(IMPORTS[f"strobe.{name}"] == set() for name in ("_core", "_extras", "_graphs", "_kinds"))
    assert IMPORTS["strobe._abi"] == {"strobe._core", "strobe._graphs"}
    assert IMPORTS["strobe._refusals"] == {"strobe._abi", "strobe._core"}
