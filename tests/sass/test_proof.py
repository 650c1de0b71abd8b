"""The proofs can fail: changed code or launches are found, and other changes are not."""

from __future__ import annotations

import copy

import code_of
import launches
import pytest
from code_of import Sass
from compare import Difference, Pair, broken, chosen, difference, pairs
from tree import Program, Tree

SOURCE = """#include "family/scale.h"
using Kernel = strobe::family::Scale<strobe::family::Config{2}>;
extern "C" __global__ void kernel(const __grid_constant__ Kernel::Arguments a) {
Kernel::run(a);
}
"""
HEADER = """#pragma once
namespace strobe::family { // doubles
struct Config { int factor; };
__device__ float table[2];
template <Config C> struct Scale {
  struct Arguments { float *x; };
  static __device__ void run(const Arguments &a) { a.x[threadIdx.x] *= C.factor + table[0]; }
};
}
"""


def program(source: str = SOURCE, name: str = "family/scale.h", header: str = HEADER) -> Program:
    return Program(("--gpu-architecture=sm_90", "-std=c++20", "-default-device", "--ptxas-options=-v"), source, {name: header})


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(code_of, "CACHE", tmp_path / "cache")
    return tmp_path


def kept(folder, p: Program):
    text = " ".join(p.options) + "\n" + p.source + "".join(f"\n== header {name}\n{header}" for name, header in p.headers.items())
    (folder / p.key).write_text(text)
    assert Program.read(folder / p.key) == p
    return folder / p.key


def test_comments_and_files_are_no_code():
    moved = program(SOURCE.replace("family/scale.h", "other.h"), "other.h", HEADER.replace("// doubles", "/* twice */\n\n"))
    assert moved.key == program().key
    assert program(header=HEADER.replace("*=", "+=")).key != program().key
    assert program(SOURCE.replace("{2}", "{3}")).key != program().key


def test_names_are_no_code(elsewhere):
    renamed = program(
        SOURCE.replace("family::", "device::"), header=HEADER.replace("strobe::family", "strobe::device").replace("table", "list")
    )
    base, new = kept(elsewhere, program()), kept(elsewhere, renamed)
    assert base != new
    assert difference(Pair("a call", base, new)) is None


def test_code_is_found(elsewhere):
    base, new = kept(elsewhere, program()), kept(elsewhere, program(header=HEADER.replace("*=", "+=")))
    found = difference(Pair("a call", base, new))
    assert found
    assert found.base.instructions > 0
    assert found.base.registers > 0
    longer = HEADER.replace("a.x[threadIdx.x] *=", "for (int i = 0; i < 64; i++) a.x[i * i] *=")
    found = difference(Pair("a call", base, kept(elsewhere, program(header=longer))))
    assert found
    assert any("more instructions" in fault for fault in broken([found]))


def test_rules_of_a_rewrite():
    base = Sass("a", 1000, 128, 8, False)

    def faults(new: Sass, named: tuple[str, ...] = ()) -> list[str]:
        return broken([Difference("sm_90 a call", "K<C{1}>", "K<C{1}>", base, new)], named)

    assert not faults(Sass("b", 1009, 130, 8, False))
    assert faults(Sass("b", 1000, 128, 16, False))
    assert faults(Sass("b", 1000, 128, 8, True))
    assert faults(Sass("b", 1020, 128, 8, False))
    assert faults(Sass("b", 1031, 128, 8, False))
    assert not faults(Sass("b", 1031, 128, 8, False), ("K<C{1}>",))
    assert faults(Sass("b", 1000, 128, 16, False), ("K<C{1}>",))  # the exception is for length, not for a spill
    assert faults(Sass("b", 1000, 128, 8, False), ("K<C{2}>",))  # this kernel is not among the ones that differ


def grown(arch: int, name: str, instructions: int) -> Difference:
    return Difference(f"sm_{arch} a call", name, name, Sass("a", 1000, 128, 0, False), Sass("b", instructions, 128, 0, False))


def test_what_shrinks_or_stays_hides_nothing_that_grows():
    assert not broken([grown(90, "K<C{1}>", 1018), grown(90, "K<C{2}>", 998)])  # a template counts by its own mean
    for elsewhere in (grown(90, "L<C{1}>", 500), grown(80, "K<C{1}>", 500)):
        assert len(broken([grown(90, "K<C{1}>", 1018), elsewhere])) == 1
    one_of_many = [grown(90, "K<C{1}>", 1040), *(grown(90, f"K<C{{{i}}}>", 999) for i in range(2, 100))]
    assert [fault.split(" (")[0] for fault in broken(one_of_many)] == ["4.00% more instructions: K<C{1}>"]
    assert not broken(one_of_many, ("K<C{1}>",))
    named = grown(90, "K<C{1}>", 500)  # a named kernel does not count either
    assert broken([named, grown(90, "K<C{2}>", 1018)], ("K<C{1}>",))


def test_calls_without_a_counterpart_are_faults(tmp_path):
    (tmp_path / "programs").mkdir()
    key = kept(tmp_path / "programs", program()).name
    tree = Tree(tmp_path, {"sm_90 bfloat16 d64 plain forward": [key], "sm_90 bfloat16 d64 causal forward": [key]})
    assert [len(found) for found in pairs(tree, tree)] == [1, 0]
    assert pairs(tree, Tree(tmp_path, {"sm_90 bfloat16 d64 plain forward": [key]}))[1]
    assert pairs(tree, Tree(tmp_path, tree.calls | {"sm_90 bfloat16 d64 plain forward": [key, key]}))[1]
    all_ = pairs(tree, tree)[0]
    assert chosen(all_, "family", 5, 0) == all_
    assert not chosen(all_, "sm90", None, 0)


def test_launches():
    step = {"kernel": "strobe::simt::Delta<strobe::simt::Config{1,2}>", "shape": [3, 1, 1, 128, 1, 1], "shared": 0, "early": 1}
    base = {"case 0 default": [step | {"arguments": ["memory 0 + 0", "0100000000000000"]}]}
    assert not launches.faults(base, copy.deepcopy(base))

    def changed(**what: object) -> dict[str, list[dict[str, object]]]:
        return {"case 0 default": [base["case 0 default"][0] | what]}

    assert launches.faults(base, changed(shape=[4, 1, 1, 128, 1, 1]))
    assert launches.faults(base, changed(early=0))
    assert launches.faults(base, changed(arguments=["memory 0 + 256", "0100000000000000"]))
    assert launches.faults(base, changed(kernel="strobe::simt::Delta<strobe::simt::Config{1,3}>"))
    assert launches.faults(base, {"case 0 default": []})
    assert launches.faults(base, {})
    other = changed(kernel="strobe::passes::Delta<strobe::passes::Config{1,2}>")
    assert not launches.faults(base, other)
    assert launches.renamed(base, other) == {("strobe::simt::Delta", "strobe::passes::Delta"): 1}
