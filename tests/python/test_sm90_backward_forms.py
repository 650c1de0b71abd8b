"""The choice of the Hopper backward's form, at shapes that were measured, and at the limits of each form."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from strobe._prewarm import Shape, kernels

ROOT = Path(__file__).parents[2]
FIELDS = re.findall(
    r"\b(\w+)(?=[,;])",
    "".join(
        re.findall(r"^  i32 ([\w, ]+;)", (ROOT / "kernels/sm90/backward/config.h").read_text().partition("Features features;")[0], re.M)
    ),
)


class Form(NamedTuple):
    queries: int  # queries of a tile
    what: str
    in_line: bool = False  # set for more than 64 columns; up to 64 columns, `what` says it


OWNED, STAGED, IN_LINE = "dQ in shared memory", "two stages of keys", "two stages of keys in line"
KEYS, VALUES, USUAL = "K and V in registers", "V in registers", "the usual one"


def form(
    batch: int,
    heads: int | tuple[int, int],
    seqlen: int | tuple[int, int],
    dim: int,
    causal: bool = False,
    dim_v: int = 0,
    more: tuple[tuple[str, Shape], ...] = (),
    **options: Any,
) -> Form:
    """heads, seqlen: a number, or one for queries and one for keys."""
    (heads_q, heads_k), (queries, keys) = ((x, x) if isinstance(x, int) else x for x in (heads, seqlen))
    arrays = {"q": (heads_q, queries, dim), "k": (heads_k, keys, dim), "v": (heads_k, keys, dim_v or dim)}
    shapes = {name: Shape((batch, *shape), "bfloat16") for name, shape in arrays.items()} | dict(more)
    options |= {"engine": "cuda-sm90"} | ({"window_right": 0} if causal else {})
    (name,) = (name for name in kernels(shapes, options, True, 90) if "sm90::Backward<" in name)
    c = dict(zip(FIELDS, map(int, re.search(r"Config\{(.*?)\}", name)[1].split(",")), strict=False))  # type: ignore[index]
    narrow = max(dim, dim_v) <= 64
    forms = (
        (OWNED, c["owns_dq"] and dim <= 64),
        (IN_LINE, narrow and c["in_line"]),
        (STAGED, narrow and c["key_stages"] == 2),
        (KEYS, c["keys_in_registers"] and not narrow),
        (VALUES, c["values_in_registers"]),
    )
    what = next((name for name, there in forms if there), USUAL)
    assert c["key_stages"] == 1 or not c["deterministic"]
    if not narrow:
        assert (c["key_stages"] == 2) == bool(c["in_line"])
    return Form(c["tile_q"], what, bool(c["in_line"]) and not narrow)


# These forms were measured to be the fastest on an H100 (docs/lab/hopper-backward.md, steps 46 to 52).
@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((128, 12, 384, 32), (128, IN_LINE)),
        ((128, 12, 128, 32), (128, STAGED)),
        ((64, 12, 512, 32, True), (128, STAGED)),
        ((32, 12, 512, 48), (128, IN_LINE)),
        ((64, 16, 1024, 64, True), (128, IN_LINE)),
        ((12, 12, 1024, 64, True), (128, IN_LINE)),
        ((32, 16, 577, 64), (128, IN_LINE)),
        ((32, 16, 2048, 64, True), (128, USUAL)),
        ((64, 16, 512, 64), (64, OWNED)),
        ((64, 16, 512, 64, True), (64, OWNED)),
        ((64, 12, 256, 64), (64, OWNED)),
        ((256, 12, 197, 64), (64, OWNED)),
        ((8, 32, 2048, 80, True), (64, KEYS, True)),
        ((4, 16, 4096, 80, True), (64, KEYS)),
        ((4, 32, 4096, 80), (80, KEYS)),
        ((4, 32, 3333, 96, True), (64, KEYS)),
        ((32, 16, 1024, 96, True), (64, VALUES, True)),
        ((16, 20, 2048, 112, True), (64, VALUES, True)),
        ((64, 16, 256, 128, True), (64, USUAL)),
        ((64, 16, 256, 128), (64, USUAL, True)),
        ((16, 16, 1024, 128, True), (64, USUAL, True)),
        ((16, 16, 1024, 128), (64, USUAL, True)),
        ((8, 16, 2048, 128), (80, USUAL)),
        ((4, 16, 4096, 128, True), (64, USUAL, True)),
        ((1, 16, 8192, 128, True), (80, USUAL)),
        ((3, 12, 777, 128, True), (64, USUAL)),
        ((16, (32, 8), 1024, 128, True), (64, USUAL)),
    ],
)
def test_forms_that_were_measured(shape, expected):
    assert form(*shape) == Form(*expected)


@pytest.mark.parametrize(
    ("heads", "dim", "most"),
    [(4, 64, 512), (4, 56, 512), ((8, 4), 64, 256), ((12, 4), 64, 128)],  # query heads of a group have tiles of their own
)
def test_dq_is_in_shared_memory_as_long_as_it_fits(heads, dim, most):
    assert form(132, heads, (most, 128), dim).what == OWNED
    assert form(132, heads, (most + 1, 128), dim).what == (IN_LINE if isinstance(heads, int) else STAGED)


def test_a_bias_takes_room_in_shared_memory_as_well():
    def with_bias(queries: int) -> str:
        return form(132, 4, (queries, 128), 64, more=(("bias", Shape((1, 1, queries, 128), "bfloat16")),)).what

    assert with_bias(384) == OWNED
    assert with_bias(385) != OWNED


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({"invariant": True}, {}),
        ({"window_left": 40, "window_right": 40}, {}),
        ({}, {"seqused_k": Shape((132,), "int32")}),
        ({"block_q": 128, "block_k": 128}, {"blocks": True}),
    ],
    ids=["invariant", "window", "seqused_k", "blocks"],
)
def test_what_leaves_dq_to_all_blocks(fields, more):
    if "blocks" in more:
        more = {name: Shape((1, 1, 4), "int32") for name in ("block_rows", "block_rows_t")}
        more |= {name: Shape((9,), "int32") for name in ("block_cols", "block_cols_t")}
    assert form(132, 4, 300, 64).what == OWNED
    assert form(132, 4, 300, 64, more=tuple(more.items()), **fields).what != OWNED


def test_every_key_must_be_seen_where_a_block_owns_dq():
    assert form(132, 4, (300, 400), 64, True).what == OWNED  # the last query sees all keys
    assert form(132, 4, (400, 300), 64, True).what != OWNED  # the first queries see no key


# Each block owns one (batch, key head) pair, with one or two tiles of keys: a launch for dQ alone would take more time than stages of keys
# save.
@pytest.mark.parametrize(
    "shape",
    [
        *((66, 2, 128, 32), (48, 2, 128, 32, True), (72, 2, 128, 64, True), (132, 2, 128, 32, True), (66, 2, 256, 32, True)),
        *((99, 2, 128, 32), (72, 2, 128, 32, True), (48, 2, 256, 64)),
    ],
)
def test_tiny_calls_own_dq(shape):
    assert form(*shape).what == OWNED


def test_the_first_tile_of_a_block_is_not_staged():
    assert form(132, 1, 256, 32, True).what == OWNED  # a pair for each SM
    assert form(133, 1, 256, 32, True).what == STAGED  # one SM gets two pairs


def test_few_pairs_leave_sms_idle():
    assert form(33, 4, 512, 64).what == OWNED  # a pair for each of 132 SMs
    assert form(34, 4, 512, 64).what == IN_LINE


@pytest.mark.parametrize("dim", [16, 24, 40, 64])
def test_long_walks_gain_nothing_of_two_stages(dim):
    assert form(16, 16, (1023 - 128, 600), dim).what == (IN_LINE if dim > 16 else STAGED)
    assert form(16, 16, (1024, 600), dim).what == USUAL
    assert form(16, (16, 8), (512, 600), dim).what == USUAL  # groups of two query heads
    assert form(16, 16, (1024, 600), dim, window_left=100, window_right=0).what == STAGED  # no query sees more than two tiles


def test_one_tile_of_keys_an_sm_is_not_staged():
    assert form(1, 12, (200, 11 * 128), 64).what == USUAL
    assert form(1, 12, (200, 12 * 128), 64).what == STAGED


def test_tiles_of_keys_come_in_line_from_three_tiles_of_queries_on():
    assert form(17, 8, (257, 600), 64).what == IN_LINE
    assert form(17, 8, (256, 600), 64).what == STAGED
    assert form(17, 8, 577, 32, True).what == IN_LINE  # a mean walk of three tiles
    assert form(17, 8, 512, 32, True).what == STAGED  # a mean walk of 2.5 tiles
    assert form(17, 8, (577, 640), 16).what == STAGED
    assert form(17, (8, 4), (300, 600), 64).what == STAGED


@pytest.mark.parametrize("more", [{"mask": Shape((1, 1, 600, 600), "bool")}, {"seqused_k": Shape((16,), "int32")}], ids=str)
def test_what_does_not_come_in_line(more):
    assert form(16, 16, 600, 64, more=tuple(more.items())).what == STAGED


@pytest.mark.parametrize(
    ("option", "takes"),
    [
        ({"softcap": 3.0}, True),
        ({"invariant": True}, False),
        ({"deterministic": True}, False),
        ({"softcap": 3.0, "bias": True}, False),
        ({"bias": True}, True),
    ],
    ids=str,
)
def test_options_of_two_stages(option, takes):
    fields = {name: x for name, x in option.items() if name != "bias"}
    more = (("bias", Shape((1, 1, 600, 600), "bfloat16")),) if "bias" in option else ()
    assert (form(16, 16, 600, 64, more=more, **fields).what == STAGED) == takes


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ((72, 0), (64, KEYS)),
        ((88, 0), (64, KEYS)),
        ((96, 40), (64, KEYS)),
        ((104, 0), (64, VALUES)),
        ((112, 80), (64, KEYS)),
        ((80, 128), (64, USUAL)),
        ((64, 96), (64, USUAL)),
        ((120, 0), (64, USUAL)),
    ],
    ids=str,
)
def test_registers_hold_keys_up_to_112_columns(dims, expected):
    dim, dim_v = dims
    assert form(4, 16, 4096, dim, True, dim_v)[:2] == expected


def test_in_line_registers_hold_less():
    assert [form(4, 16, 2048, dim, True) for dim in (72, 88, 112)] == [(64, KEYS, True), (64, VALUES, True), (64, VALUES, True)]


def test_wide_keys_come_in_line_from_four_to_some_tiles_of_queries():
    """In a causal call of 128 n tokens, a key tile walks over n + 1 tiles of 64 queries on average."""
    assert [form(16, 16, 128 * n, 128, True).in_line for n in (2, 3, 32)] == [False, True, True]
    assert [form(16, 16, 128 * n, 96, True).in_line for n in (2, 3, 22, 23)] == [False, True, True, False]
    assert [form(1, 32, 16384, 128, True, window_left=left).in_line for left in (256, 1024, 3900)] == [False, True, False]


def test_wide_keys_come_in_line_from_three_tiles_an_sm_on():
    assert form(3, 44, 384, 128, True).in_line  # 3 * 132 tiles of keys
    assert not form(131, 1, 384, 128, True).in_line


@pytest.mark.parametrize(
    "option",
    [
        *({"softcap": 3.0}, {"dropout": 0.1}, {"deterministic": True}, {"invariant": True}),
        *({"mask": Shape((1, 1, 600, 600), "bool")}, {"bias": Shape((1, 1, 600, 600), "bfloat16")}, {"seqused_k": Shape((16,), "int32")}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [80, 128])
def test_options_with_which_no_wide_keys_come_in_line(option, dim):
    tensors = {name: x for name, x in option.items() if isinstance(x, Shape)}
    assert form(16, 16, 600, dim, True).in_line
    assert not form(
        16, 16, 600, dim, True, more=tuple(tensors.items()), **{name: x for name, x in option.items() if name not in tensors}
    ).in_line


@pytest.mark.parametrize("option", [{"softcap": 3.0}, {"deterministic": True}, {"invariant": True}], ids=str)
def test_what_needs_the_registers_of_keys(option):
    assert form(4, 16, 2048, 96, True, **option).what == USUAL


def test_lengths_do_not_choose_an_invariant_form():
    assert len({form(8, 8, seqlen, 96, True, invariant=True) for seqlen in (200, 600, 2000)}) == 1
