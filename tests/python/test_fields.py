"""The table of fields (include/strobe/fields.inc) and what is made from it: a change of the C ABI that forgets a place does not compile."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE, C, CPP = (f"include/strobe/{name}" for name in ("fields.inc", "strobe.h", "strobe.hpp"))
OPERATIONS = "include/strobe/operations.inc"  # strobe.h includes it
CHECK = "src/fields.cpp"
PROGRAM = "tests/consumer/project/options.cpp"  # each option of strobe.hpp reaches its member of strobe.h
COMPILER = [*shlex.split(os.environ.get("CXX", "c++")), "-std=c++20", "-w"]


@pytest.fixture
def tree(tmp_path):
    for name in (TABLE, C, CPP, OPERATIONS, CHECK, PROGRAM):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def compiled(tree: Path, source: str, *options: str) -> str:
    """The compiler's messages; empty if it accepts the source."""
    command = [*COMPILER, f"-I{tree / 'include'}", *options, str(tree / source)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"})
    assert bool(done.stderr) == bool(done.returncode), done.stderr
    return done.stderr


def change(tree: Path, file: str, old: str, new: str) -> None:
    text = (tree / file).read_text()
    assert text.count(old) == 1, f"{file} has {text.count(old)} times, not once: {old}"
    (tree / file).write_text(text.replace(old, new))


def lacks(struct: str) -> str:
    return f"strobe/fields.inc lacks a member of {struct}, or has one twice"


def test_as_it_is(tree):
    assert compiled(tree, CHECK, "-fsyntax-only") == ""
    assert compiled(tree, PROGRAM, "-o", str(tree / "program")) == ""
    assert subprocess.run([tree / "program"], check=False, capture_output=True, text=True).stdout == ""


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        # a row forgotten, given twice, or of another name
        (TABLE, "STROBE_OPTION(softcap)\n", "", lacks("strobe_attention")),
        (TABLE, "STROBE_RESERVED(reserved_2)\n", "", lacks("strobe_attention")),
        (TABLE, "STROBE_INPUT(sinks, sinks)\n", "", lacks("strobe_tensors")),
        (TABLE, "STROBE_PART(heads)\n", "", lacks("strobe_part")),
        (TABLE, "STROBE_EXECUTION(pool)\n", "", lacks("strobe_execution")),
        (TABLE, "STROBE_PLAN(tile_q)\n", "", lacks("strobe_plan")),
        (TABLE, "STROBE_OPTION(softcap)\n", "STROBE_OPTION(softcap)\n" * 2, lacks("strobe_attention")),
        (TABLE, "STROBE_OPTION(softcap)\n", "STROBE_OPTION(soft_cap)\n", "soft_cap"),
        # a row twice, and another one of the same size forgotten
        (TABLE, "STROBE_OPTION(softcap)\n", "STROBE_OPTION(dropout)\n", "'dropout'"),
        (TABLE, "STROBE_INPUT(sinks, sinks)\n", "STROBE_INPUT(mask, mask)\n", "'mask'"),
        (TABLE, "STROBE_PART(heads)\n", "STROBE_PART(first_head)\n", "'first_head'"),
        (TABLE, "STROBE_EXECUTION(pool)\n", "STROBE_EXECUTION(stream)\n", "'stream'"),
        (TABLE, "STROBE_PLAN(tile_q)\n", "STROBE_PLAN(tile_k)\n", "'tile_k'"),
        # a has_ flag that the table does not know of, or that the struct does not have
        (TABLE, "STROBE_OPTIONAL(scale)\n", "STROBE_OPTION(scale)\n", lacks("strobe_attention")),
        (TABLE, "STROBE_OPTION(softcap)\n", "STROBE_OPTIONAL(softcap)\n", "has_softcap"),
        # a new member without a row
        (C, "} strobe_attention;", "  int64_t added;\n} strobe_attention;", lacks("strobe_attention")),
        (C, "} strobe_tensors;", "  const strobe_tensor *added;\n} strobe_tensors;", lacks("strobe_tensors")),
        (C, "} strobe_addresses;", "  void *added;\n} strobe_addresses;", lacks("strobe_addresses")),
        (C, "} strobe_part;", "  int64_t added;\n} strobe_part;", lacks("strobe_part")),
        (C, "} strobe_execution;", "  void *added;\n} strobe_execution;", lacks("strobe_execution")),
        (C, "} strobe_plan;", "  int64_t added;\n} strobe_plan;", lacks("strobe_plan")),
        # a tensor without its address, or with another one's
        (C, "  void *delta;\n", "", "delta"),
        (C, "*dlse, *dq, *dk, *dv, *dbias, *dsinks;\n  void", "*dlse, *dk, *dq, *dv, *dbias, *dsinks;\n  void", "dq is elsewhere"),
    ],
)
def test_a_table_that_differs_from_the_structs(tree, file, old, new, says):
    change(tree, file, old, new)
    assert says in compiled(tree, CHECK, "-fsyntax-only")


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        # an option or tensor that strobe.hpp does not have, or has by another type
        (CPP, "  double softcap = 0;\n", "", "softcap"),
        (CPP, "  double softcap = 0;\n", "  float softcap = 0;\n", "put"),
        (CPP, "  std::optional<double> scale = {};", "  double scale = {};", "has_value"),
        (CPP, "  ConstTensor rng = {};", "", "rng"),
        (CPP, "  Tensor max_logit = {}, column_sums = {};", "  Tensor max_logit = {};", "column_sums"),
        (CPP, "  bool partial = false;", "", "partial"),
        (CPP, "  void *stream = nullptr;", "", "stream"),
        # a row of a kind that strobe.hpp does not expect
        (TABLE, "STROBE_MODE(strict)\n", "STROBE_BACKWARD_MODE(strict)\n", "strict"),
    ],
)
def test_an_option_that_strobe_hpp_lacks(tree, file, old, new, says):
    change(tree, file, old, new)
    assert says in compiled(tree, PROGRAM, "-fsyntax-only")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("has_##name = a.name.has_value()", "has_##name = true", "a default is not zero"),
        ("has_##name = a.name.has_value()", "has_##name = false", "scale is not handed on"),
        ("#define STROBE_OPTION(name) put(name, a.name);", "#define STROBE_OPTION(name)", "softcap of Attention is not handed on"),
        ("#define STROBE_BACKWARD_MODE(name) put(name, b.name);", "", "accumulate of Backward is not handed on"),
        ("    to = &own_part;\n", "", "part of Attention is not handed on"),
        ("Alignment alignment = Alignment::bottom_right;", "Alignment alignment = Alignment::top_left;", "a default is not zero"),
    ],
)
def test_a_copy_that_strobe_hpp_does_not_make(tree, old, new, says):
    change(tree, CPP, old, new)
    assert compiled(tree, PROGRAM, "-o", str(tree / "program")) == ""
    done = subprocess.run([tree / "program"], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert says in done.stdout.splitlines()
