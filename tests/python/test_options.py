"""The consumers of the table of options, and its copies: each is compared with python/strobe/_options.py."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

import cases
import strobe
from strobe import _abi, _call, _function, _options
from strobe._core import ffi
from strobe._options import AUX, BLOCKS, COTANGENTS, DEFAULTS, DERIVATIVES, FIELDS, GRADIENTS, INPUTS, ROWS, TANGENTS

FUNCTIONS = _function.FIELDS.values()
ROOT = Path(__file__).parents[2]
RESERVED = set(re.findall(r"^STROBE_\w*RESERVED\((\w+)\)$", (ROOT / "include/strobe/fields.inc").read_text(), re.MULTILINE))
IN_STRUCT = {name: field for name, field in FIELDS.items() if field.in_struct}


def members(struct: str) -> dict[str, str]:
    """Names and types of a C struct's members, without its size, reserved members, and those that only the backward has."""
    fields = ffi.typeof(struct).fields
    return {name: x.type.cname for name, x in fields if name not in ("size", _call.ACCUMULATE, *RESERVED)}


def test_the_signature():
    shown = inspect.signature(strobe.attention).parameters
    assert [*shown] == ["q", "k", "v", "return_lse", "aux", *ROWS]
    for name, default in DEFAULTS.items():
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert shown[name].default == default


def test_the_types_are_types():
    """The annotations are strings, which are not evaluated when the package runs."""
    names = {"Array": object, "Function": Callable, "BlockMask": strobe.BlockMask, "Part": strobe.Part}
    for name, hint in get_type_hints(_options.AttentionOptions, localns=names).items():
        default = DEFAULTS[name]
        assert default is None or isinstance(default, hint), name


def test_the_docstring():
    arguments = inspect.getdoc(strobe.attention).split("Args:\n")[1].split("\n\nReturns:")[0]
    documented = [name for names in re.findall(r"^    ((?:\w+, )*\w+): ", arguments, re.MULTILINE) for name in names.split(", ")]
    assert documented == ["q", "k", "v", "return_lse", "aux", *ROWS]
    assert all(len(line) <= 136 for line in arguments.splitlines())
    words = " ".join(arguments.split())
    assert all(row.doc in words for row in ROWS.values())


def test_the_operators():
    """An operator has a named argument for every value of a call, and a graph does not hold absent ones."""
    known = {
        "bool": bool,
        "int": int,
        "Optional[int]": int | None,
        "float": float,
        "Optional[float]": float | None,
        "Optional[str]": str | None,
        "Optional[List[int]]": tuple[int, ...] | None,
    }
    for operator in ("attention_forward", "attention_forward_aux", "attention_backward"):
        schema = getattr(torch.ops.strobe, operator).default._schema
        named = [x for x in schema.arguments if x.kwarg_only and x.name not in ("needed", "aux")]
        of_functions = {*_function.CAPTURED, *FUNCTIONS}
        whole = [name for name in (*INPUTS[3:], *FIELDS) if name not in of_functions]
        assert [x.name for x in named] == [*whole, *FUNCTIONS, "captured", _function.SYMBOLS]
        for x in named:
            if x.name == "captured":
                assert (str(x.type), x.default_value) == ("Optional[List[Tensor]]", None)
            elif x.name == _function.SYMBOLS:
                assert (str(x.type), x.default_value) == ("Optional[List[int]]", None)
            elif x.name in INPUTS:
                assert (str(x.type), x.default_value) == ("Optional[Tensor]", None)
            else:
                assert (known[str(x.type).replace("SymInt", "int")], x.default_value) == FIELDS[x.name][:2]


def test_the_struct_of_options():
    c = members("strobe_attention")
    flags = {name for name in c if name.startswith("has_")}
    assert flags == {f"has_{name}" for name, field in FIELDS.items() if field.may_be_absent}
    assert c.keys() - flags == IN_STRUCT.keys()
    types = {bool: {"int32_t"}, int: {"int32_t", "int64_t", "uint64_t"}, float: {"double"}, str: {"char *", "char const *"}}
    types[tuple[int, ...]] = {"struct strobe_part *", "struct strobe_part const *"}
    for name, field in IN_STRUCT.items():
        if name in FUNCTIONS:
            assert c[name].replace("const ", "") == "struct strobe_function *"
            continue
        (kind,) = (x for x in types if x in (field.type, *getattr(field.type, "__args__", ())))
        assert c[name] in types[kind], name


def test_a_row_without_its_field_is_told_where_it_goes():
    for struct in ("strobe_attention", "strobe_tensors", "strobe_addresses"):
        message = rf"_options\.py give new, has_new, which struct {struct} in include/strobe/strobe\.h does not have: add that at its end"
        with pytest.raises(ImportError, match=message):
            _call._check_structs({struct: ["new", "has_new"]})


def test_zero_is_absent_in_the_struct():
    assert all(not field.default for field in IN_STRUCT.values())


def test_the_structs_of_tensors():
    assert tuple(name for name in members("strobe_tensors") if name in INPUTS) == INPUTS
    assert [*members("strobe_addresses")] == [*members("strobe_tensors")]
    beside = {"out", "lse", "dout", "dlse", "delta", *GRADIENTS, *AUX, *TANGENTS, *COTANGENTS, *DERIVATIVES}
    assert members("strobe_tensors").keys() - {*INPUTS} == beside


def test_the_enumerations():
    enumerators = {name: ffi.typeof(name).relements for name in ("strobe_alignment", "strobe_score", "strobe_dtype")}
    assert {*enumerators["strobe_alignment"].values()} == {*ROWS["alignment"].choices.values()}
    assert {*enumerators["strobe_score"].values()} == {*ROWS["score"].choices.values()}
    assert {*enumerators["strobe_dtype"].values()} == {*_abi.DTYPES.values()}
    header = (ROOT / "include/strobe/strobe.hpp").read_text()
    for name in (name for names in enumerators.values() for name in names):
        assert re.search(rf"\b{name}\b", header), name


def test_the_struct_of_a_part():
    assert members("strobe_part").keys() == {field.name for field in dataclasses.fields(strobe.Part)}


def test_the_structs_of_cpp():
    """Each member of the C++ structs has its member of strobe.h. The compiler finds one that is missing (test_fields.py)."""
    header = (ROOT / "include/strobe/strobe.hpp").read_text()

    def declared(struct: str) -> set[str]:
        text = header.split(f"struct {struct} {{")[1].split("\n};")[0]
        return {name for found in re.findall(r"(\w+) = |\(\*(\w+)\)\(.*\) = ", re.sub("//.*", "", text)) for name in found if name}

    results = {"out", "lse"}
    backward = {"dout", "dlse", "delta", *GRADIENTS}
    assert declared("Attention") == {*IN_STRUCT, *INPUTS}
    assert declared("Forward") == {*results, *AUX}
    assert declared("Backward") == {*results, *backward, _call.ACCUMULATE}
    assert declared("Tangents") == {*TANGENTS}
    assert declared("Jvp") == {"in", *results, *DERIVATIVES}
    assert declared("BackwardJvp") == {"in", "of", *COTANGENTS, *DERIVATIVES}
    assert declared("Part") == members("strobe_part").keys()
    assert declared("Execution") == members("strobe_execution").keys() - {"workspace_bytes"}  # the workspace is a span


def test_the_module_and_hyperbolic_attention():
    """The module takes every option that is no tensor; hyperbolic_attention() takes every option that the distance does not determine."""
    tensors = {name for name, row in ROWS.items() if set(row.tensors(name)) - set(BLOCKS)}
    for name, default in DEFAULTS.items():
        if name in tensors:
            with pytest.raises(TypeError, match=f"^{name}: "):
                strobe.nn.FlashAttention(16, **{name: torch.zeros(1)})
        else:
            strobe.nn.FlashAttention(16, **{name: default})
        point = strobe.hyperbolic.lift(torch.zeros(1, 1, 4, 3))
        if name in ("score", "shift", "softcap", "scale"):
            with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
                strobe.hyperbolic_attention(point, point, point, **{name: 1.0})
        else:
            strobe.hyperbolic_attention(point, point, point, **{name: 1.0 if name == "beta" else default})


def test_every_option_is_in_the_contract():
    """All options except engine, which each test varies, and strict, which test_errors.py tests."""
    used = {name for case in cases.combinations(1) for name in cases.build(case).options}
    used |= {"tile_q", "tile_k", "threads", *cases.FACTORS["flag"]} if {"tile", "threads"} <= cases.FACTORS.keys() else set()
    used |= {"page_table"} if "page" in cases.FACTORS else set()
    used |= {"q_scale", "out_dtype", "k_scale", "v_scale", "k_scale_group"} if "quant" in cases.FACTORS else set()
    assert ROWS.keys() - used == {"engine", "strict"}


def test_what_each_row_reads():
    """A row reads all its fields and no others for a good value, and gives exactly one refusal for a bad one."""
    examples = {bool: True, float: 0.5, int: 32, str: "cpu-baseline", tuple[int, ...]: strobe.Part([], [], 1, 1)}
    for name, row in ROWS.items():
        if isinstance(row, (_options.Tensor, _options.Blocks, _options.Seed)):
            continue
        x = [*row.choices][1] if isinstance(row, _options.Choice) else (3, 4) if isinstance(row, _options.Window) else None
        if isinstance(row, _options.ResultType):
            x = "float16"
        if x is None:
            (field,) = row.fields(name).values()
            (kind,) = (k for k in examples if k in (field.type, *getattr(field.type, "__args__", ())))
            x = examples[kind]
        wrong: list[Exception] = []
        assert row.read(wrong, name, x).keys() == row.fields(name).keys()
        assert not wrong
        assert row.read(wrong, name, object()) == {}
        assert len(wrong) == 1
