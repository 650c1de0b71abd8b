"""The imports within the two packages have one direction and no cycle, including imports in functions and those for type checkers."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "python"
PACKAGES = ("strobe", "strobe_tools")


def name_of(file: Path) -> str:
    parts = file.relative_to(FOLDER).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for package in PACKAGES for file in (FOLDER / package).rglob("*.py")}
MODULES |= {f"strobe.{name}": FOLDER / "strobe" / f"{name}.pyi" for name in ("_core", "_eager")}  # modules in C


def imported(module: str, text: str, is_package: bool) -> set[str]:
    """The modules of the two packages that a module with this name and text imports, anywhere in the text."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
            of = ".".join([*above, *([node.module] if node.module else [])])
            names = {f"{of}.{alias.name}" for alias in node.names}
            found |= names & MODULES.keys() or {of}
    found = {name for name in found if name.split(".")[0] in PACKAGES}
    assert found <= MODULES.keys(), f"{module} imports what is not there"
    return found - {module}


IMPORTS = {name: imported(name, file.read_text(), file.name == "__init__.py") for name, file in MODULES.items()}


def in_order(imports: dict[str, set[str]]) -> list[str]:
    return list(TopologicalSorter(imports).static_order())


def test_no_circle():
    order = in_order(IMPORTS)
    names = ("strobe._core", "strobe.arrays.torch", "strobe._call", "strobe._parse", "strobe._prepared", "strobe._autograd", "strobe")
    places = [order.index(name) for name in names]
    assert places == sorted(places)
    assert sum(name.startswith("strobe_tools.") for name in order) > 30


def test_a_circle_would_be_found():
    """The test would also find a circle by imports in a function, or by imports for type checkers only."""
    for text in ("from strobe_tools.train.launch import launch\n", "def f():\n    from strobe_tools.train import experiment\n"):
        with pytest.raises(CycleError):
            in_order(IMPORTS | {"strobe_tools.train.trainer": imported("strobe_tools.train.trainer", text, False)})
    for text in ("def f():\n    from .._call import Call\n", "if TYPE_CHECKING:\n    from .. import _call\n", "import strobe._call\n"):
        with pytest.raises(CycleError):
            in_order(IMPORTS | {"strobe.arrays.base": imported("strobe.arrays.base", text, False)})


def test_the_library_knows_nothing_of_its_tools():
    assert [name for name, imports in IMPORTS.items() if name.split(".")[0] == "strobe" and any("_tools" in each for each in imports)] == [
        "strobe.__main__"
    ]


def test_arrays_know_nothing_of_calls():
    low = {"strobe._abi", "strobe._core", "strobe._eager", "strobe._graph", "strobe._messages", "strobe._refusals"}
    for name, imports in IMPORTS.items():
        if name.startswith("strobe.arrays"):
            assert {each for each in imports if not each.startswith("strobe.arrays")} <= low, name


def test_what_the_bottom_imports():
    assert all(IMPORTS[f"strobe.{name}"] == set() for name in ("_core", "_messages"))
    assert IMPORTS["strobe._abi"] == {"strobe._core"}
    assert IMPORTS["strobe._refusals"] == {"strobe._abi", "strobe._core"}
