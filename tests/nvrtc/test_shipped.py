"""The kernels that ship compile for GPUs that are not here, without spills: each feature alone, and every pair of options.

Kernels come from the cache of earlier runs (STROBE_CACHE_DIR) if none of their sources has changed. With STROBE_TEST_LONG=1 (`make
test-long`) the tests also compile every triple of options, the whole table, and kernels for older and newer GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cases import combinations
from engines import LONG
from strobe._prewarm import Kernel, Shape, prewarm
from strobe_tools.cli.prewarm import _SMALL as SMALL
from strobe_tools.cli.prewarm import FEATURES as ONE_FEATURE
from strobe_tools.cli.prewarm import Job, jobs

FEATURES = len(re.findall(r"^  i32 \w+;", (Path(__file__).parents[2] / "kernels/attention/features.h").read_text(), re.MULTILINE))

ARCHS = (80, 90, 120)
OTHER = 80  # the second architecture, besides 90, that `make test` compiles for
OLD_ARCHS = (61, 70)  # NVRTC 12 compiles for them

# Known spills of kernels with two or more options: bytes of stores and loads in the worst kernel of each template. docs/lab/performance.md
# says where. Kernels that are not listed do not spill.
SPILLS = {
    (61, "strobe::simt::Forward"): 492,
    (70, "strobe::simt::Forward"): 1288,
    (70, "strobe::simt::Backward"): 304,
    (80, "strobe::simt::Forward"): 124,
    (80, "strobe::simt::Backward"): 40,
    (80, "strobe::tf32::Backward"): 428,
    (80, "strobe::mma::Forward"): 48,  # head dimension 256 with softcap, mask and blocks
    (80, "strobe::mma::Backward"): 1440,
    (80, "strobe::passes::BiasGradient"): 108,
    (90, "strobe::simt::Forward"): 144,
    (90, "strobe::simt::Backward"): 244,
    (90, "strobe::tf32::Forward"): 56,
    (90, "strobe::tf32::Backward"): 456,
    (90, "strobe::mma::Backward"): 76,
    (90, "strobe::passes::BiasGradient"): 104,
    (90, "strobe::sm90::Forward"): 88,
    (120, "strobe::simt::Forward"): 40,
    (120, "strobe::simt::Backward"): 52,
    (120, "strobe::simt::BiasGradient"): 20,
    (120, "strobe::mma::Forward"): 64,
    (120, "strobe::mma::Backward"): 308,
}


# Known spills, in bytes as in SPILLS, of kernels with at most one option, by name without the trailing zeros of the Config. Other such
# kernels do not spill. OLD_ARCHS are only in SPILLS, by template.
SPILLS_OF_FEW = {
    (80, "strobe::tf32::Forward<strobe::tf32::Config{64,64,64,32,4,2,3,1,0,0,3}>"): 24,
    (80, "strobe::tf32::Forward<strobe::tf32::Config{64,64,64,32,4,2,3,1,0,0,3,1}>"): 24,
    (80, "strobe::tf32::Forward<strobe::tf32::Config{64,64,64,32,4,2,3,1,0,0,3,1,0,0,0,0,0,0,0,1}>"): 24,
    (80, "strobe::tf32::Forward<strobe::tf32::Config{64,64,64,32,4,2,3,1,0,0,3,0,0,1}>"): 24,
    (80, "strobe::tf32::Forward<strobe::tf32::Config{64,64,64,32,4,2,3,1,0,0,3,0,0,0,1}>"): 24,
    (80, "strobe::tf32::Forward<strobe::tf32::Config{64,64,64,32,4,2,3,1,0,0,3,1,0,0,0,0,1}>"): 24,
    (80, "strobe::tf32::Forward<strobe::tf32::Config{64,64,64,32,4,2,3,1,0,0,3,1,0,0,0,0,0,0,1}>"): 24,
    (80, "strobe::tf32::Forward<strobe::tf32::Config{64,64,64,32,4,2,3,1,0,0,3,0,1}>"): 24,
    (80, "strobe::tf32::Forward<strobe::tf32::Config{64,64,64,32,4,2,3,1,1,0,3,1}>"): 24,
    (80, "strobe::tf32::Backward<strobe::tf32::Config{128,128,32,64,4,1,3,1,0,0,2}>"): 52,
    (80, "strobe::tf32::Backward<strobe::tf32::Config{128,128,32,64,4,1,3,1,0,0,2,0,0,0,1}>"): 64,
    (80, "strobe::tf32::Backward<strobe::tf32::Config{128,128,32,64,4,1,3,1,0,0,2,0,0,1}>"): 64,
    (80, "strobe::tf32::Backward<strobe::tf32::Config{128,128,32,64,4,1,3,1,0,0,2,0,1}>"): 52,
    (80, "strobe::tf32::Backward<strobe::tf32::Config{128,128,32,64,4,1,3,1,0,0,2,1}>"): 52,
    (80, "strobe::tf32::Backward<strobe::tf32::Config{128,128,32,64,4,1,3,1,0,0,2,1,0,0,0,0,0,0,1}>"): 36,
    (80, "strobe::tf32::Backward<strobe::tf32::Config{128,128,32,64,4,1,3,1,0,0,2,1,0,0,0,0,1}>"): 240,
    (80, "strobe::tf32::Backward<strobe::tf32::Config{128,128,32,64,4,1,3,1,0,0,2,1,0,0,0,1}>"): 68,
    (80, "strobe::tf32::Backward<strobe::tf32::Config{128,128,32,64,4,1,3,1,0,1,2,1}>"): 36,
    (80, "strobe::tf32::Backward<strobe::tf32::Config{64,64,32,64,4,1,3,1,0,0,2,1,0,0,0,0,0,0,1}>"): 20,
    (80, "strobe::tf32::Backward<strobe::tf32::Config{64,64,32,64,4,1,3,1,0,0,2,1,0,0,0,0,1}>"): 40,
    (80, "strobe::tf32::Backward<strobe::tf32::Config{64,64,32,64,4,1,3,1,0,0,2,1,0,0,0,1}>"): 20,
    (80, "strobe::tf32::Backward<strobe::tf32::Config{64,64,32,64,4,1,3,1,0,1,2,1}>"): 40,
    (90, "strobe::tf32::Forward<strobe::tf32::Config{64,64,64,32,4,2,3,1,0,0,3,1,0,0,0,0,0,0,1}>"): 24,  # dropout
    (90, "strobe::tf32::Forward<strobe::tf32::Config{64,64,64,32,4,2,3,1,0,0,3,1}>"): 24,
    (90, "strobe::tf32::Forward<strobe::tf32::Config{64,64,64,32,4,2,3,1,0,0,3,1,0,0,0,0,0,0,0,1}>"): 24,
    (90, "strobe::tf32::Forward<strobe::tf32::Config{64,64,64,32,4,2,3,1,0,0,3,1,0,0,0,1}>"): 24,
    (90, "strobe::tf32::Forward<strobe::tf32::Config{64,64,64,32,4,2,3,1,0,0,3,1,0,0,0,0,1}>"): 24,
    (90, "strobe::tf32::Forward<strobe::tf32::Config{64,64,64,32,4,2,3,1,1,0,3,1}>"): 24,
    (90, "strobe::tf32::Backward<strobe::tf32::Config{128,128,32,64,4,1,3,1,0,0,2}>"): 88,
    (90, "strobe::tf32::Backward<strobe::tf32::Config{128,128,32,64,4,1,3,1,0,0,2,0,0,0,1}>"): 64,
    (90, "strobe::tf32::Backward<strobe::tf32::Config{128,128,32,64,4,1,3,1,0,0,2,0,0,1}>"): 64,
    (90, "strobe::tf32::Backward<strobe::tf32::Config{128,128,32,64,4,1,3,1,0,0,2,0,1}>"): 64,
    (90, "strobe::tf32::Backward<strobe::tf32::Config{128,128,32,64,4,1,3,1,0,0,2,1}>"): 88,
    (90, "strobe::tf32::Backward<strobe::tf32::Config{128,128,32,64,4,1,3,1,0,0,2,1,0,0,0,0,0,0,1}>"): 56,
    (90, "strobe::tf32::Backward<strobe::tf32::Config{128,128,32,64,4,1,3,1,0,0,2,1,0,0,0,0,1}>"): 300,
    (90, "strobe::tf32::Backward<strobe::tf32::Config{128,128,32,64,4,1,3,1,0,0,2,1,0,0,0,1}>"): 100,
    (90, "strobe::tf32::Backward<strobe::tf32::Config{128,128,32,64,4,1,3,1,0,1,2,1}>"): 80,
    (90, "strobe::tf32::Backward<strobe::tf32::Config{64,64,32,64,4,1,3,1,0,0,2,1,0,0,0,0,1}>"): 40,
    (90, "strobe::tf32::Backward<strobe::tf32::Config{64,64,32,64,4,1,3,1,0,1,2,1}>"): 40,
}


def options(name: str) -> int:
    """The number of options of a kernel, whose Config ends with its Features. A band does not count, nor does the hash of functions' code,
    the last two numbers."""
    numbers = name.partition("{")[2].partition("}")[0].split(",")
    return sum(number != "0" for number in numbers[-FEATURES + 1 : -2]) if len(numbers) > FEATURES else 0


def accepted(arch: int, name: str) -> int:
    """The bytes that this kernel may spill."""
    if options(name) < 2 and arch not in OLD_ARCHS:
        of_any_function = re.sub(r",-?\d+,-?\d+}", "}", name) if options(name) else name
        return SPILLS_OF_FEW.get((arch, re.sub(r"(,0)+}", "}", of_any_function)), 0)
    return SPILLS.get((arch, name.partition("<")[0]), 0)


def shipped() -> list[Job]:
    """The jobs of `strobe prewarm` that are compiled here: for Hopper all that differ in more than dtype, width or the number of heads, for
    OTHER some. LONG: all jobs."""
    if LONG:
        return list(jobs(ARCHS, None, None, None)) + list(jobs(OLD_ARCHS, None, ("float32", "float64"), None))
    usual = ("plain", "causal")
    some = [
        *(job for job in jobs((90,), None, ("bfloat16",), None) if job.head_dim == 64 or job.sequences in (None, 1)),
        *(job for job in jobs((90,), (64, 128), ("float16",), usual) if job.sequences in (None, 1)),
        *jobs((90,), (576,), ("bfloat16", "float32"), ("plain",)),
        *jobs((90,), (64, 128, 256), ("float32",), usual),
        *jobs((90,), (64,), ("float32",), None),
        *jobs((90,), (64, 256), ("float64",), ("plain",)),
        *jobs((OTHER,), (128,), ("bfloat16",), None),
        *jobs((OTHER,), (64, 256), ("bfloat16",), ("plain",)),
        *jobs((OTHER,), (64,), ("float32",), ("causal", "bias", "dropout", "deterministic")),
    ]
    return [job for job in some if job.heads == Job._field_defaults["heads"]]


def check(arch: int, kernels: Iterable[Kernel]) -> None:
    for kernel in kernels:
        assert kernel.spilled <= accepted(arch, kernel.name), kernel
        assert not kernel.serialized, kernel


COUNTS = dict.fromkeys(("plain", "causal", "window", "deterministic", "exact_max"), 0)
COUNTS |= dict.fromkeys(("mask", "bias", "ALiBi", "softcap", "dropout", "block-sparse"), 1)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("feature", "count"), COUNTS.items())
def test_options_are_counted(feature, count, arch):
    for dtype in ("bfloat16", "float32"):
        for backward in (False, True):
            names, _ = Job(arch, dtype, 64, feature, backward).names()
            main = [name for name in names if "::Forward<" in name or "::Backward<" in name]
            assert [options(name) for name in main] == [count], names


def test_a_spill_of_many_options_excuses_none_of_few():
    few, many = (
        f"strobe::sm90::Forward<strobe::sm90::Config{{3,128,128,2,128,2,40,232,0,1,1,{band_blocks_mask}{',0' * (FEATURES - 3)}}}>"
        for band_blocks_mask in ("1,0,1", "1,1,1")
    )
    assert (options(few), options(many)) == (1, 2)
    assert accepted(90, many) > 48
    spilled = Kernel(few, 168, 48, False, True)
    with pytest.raises(AssertionError):
        check(90, [spilled])
    check(90, [spilled._replace(spilled=0), spilled._replace(name=many)])


@pytest.mark.parametrize("job", dict.fromkeys(shipped()), ids=str)
def test_ships(job):
    kernels, refusal = job.run()
    assert kernels, refusal
    assert set(job.names()[0]) == {kernel.name for kernel in kernels}
    check(job.compute_capability, kernels)


def test_the_cache_is_looked_at_before_anything_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("STROBE_CACHE_DIR", str(tmp_path))
    job = Job(90, "bfloat16", 64, "mask", False)
    names, _ = job.names()
    assert len(names) == 2
    assert not any(names.values())
    assert not list(tmp_path.rglob("*.kernel"))
    kernels, _ = job.run()
    assert all(kernel.compiled for kernel in kernels)
    assert job.names() == (dict.fromkeys(names, True), "")


FACTORS: dict[str, list[Any]] = {
    "arch": [90, 80, 120],
    "dtype": ["bfloat16", "float16", "float32", "float64"],
    "dims": [(64, 64), (128, 128), (32, 32), (80, 80), (96, 40), (192, 128), (256, 256), (7, 5)],
    "band": ["causal", "full", "window"],
    "softcap": [0.0, 30.0],
    "alibi": [False, True],
    "bias": [None, "own", "float32"],
    "mask": [False, True],
    "dropout": [0.0, 0.1],
    "blocks": [None, (128, 128), (64, 64), (48, 16)],
    "heads": [(4, 4), (4, 2), (8, 1)],
    "lengths": [(4096, 4096), (1, 4096), (300, 17)],
    "packed": [False, True],
    "flag": [None, "exact_max", "deterministic", "allow_tf32"],
}


def possible(case: dict[str, Any]) -> bool:
    return not (case.get("bias") == "float32" and case.get("dtype") == "float64")


def call(case: dict[str, Any], batch: int = 2) -> tuple[dict[str, Shape], dict[str, Any]]:
    """The case's tensors and options, as prewarm takes them."""
    (heads, heads_kv), (sq, sk), (d, dv) = case["heads"], case["lengths"], case["dims"]

    def tokens(heads: int, seqlen: int, width: int) -> Shape:
        return Shape((batch * seqlen, heads, width) if case["packed"] else (batch, heads, seqlen, width), case["dtype"])

    arrays = {"q": tokens(heads, sq, d), "k": tokens(heads_kv, sk, d), "v": tokens(heads_kv, sk, dv)}
    options: dict[str, Any] = {}
    if case["packed"]:
        arrays |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), Shape((batch + 1,), "int32"))
        options |= {"max_seqlen_q": sq, "max_seqlen_k": sk}
    if case["band"] != "full":
        options["window_right"] = 0
    if case["band"] == "window":
        options["window_left"] = 512
    if case["softcap"]:
        options["softcap"] = case["softcap"]
    if case["alibi"]:
        arrays["alibi_slopes"] = Shape((heads,), "float32")
    if case["bias"]:
        arrays["bias"] = Shape((1, heads, sq, sk), case["dtype"] if case["bias"] == "own" else "float32")
    if case["mask"]:
        arrays["mask"] = Shape((batch, 1, sq, sk), "bool")
    if case["dropout"]:
        arrays["rng"] = Shape((2,), "int64")
        options["dropout"] = case["dropout"]
    if case["blocks"]:
        block_q, block_k = case["blocks"]
        rows, cols = -(-sq // block_q), -(-sk // block_k)
        arrays |= {"block_rows": Shape((1, 1, rows + 1), "int32"), "block_rows_t": Shape((1, 1, cols + 1), "int32")}
        arrays |= dict.fromkeys(("block_cols", "block_cols_t"), Shape((rows * cols,), "int32"))
        options |= {"block_q": block_q, "block_k": block_k}
    if case["flag"]:
        options[case["flag"]] = True
    return arrays, options


CASES = combinations(3, FACTORS, possible) if LONG else [x for x in combinations(2, FACTORS, possible) if x["arch"] in (90, OTHER)]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case.values())))
def test_pairs(case, backward):
    kernels = prewarm(*call(case), backward, case["arch"])
    check(case["arch"], kernels)


@pytest.mark.parametrize(("batch", "keys"), [(1, 65536), (64, 4096)])
def test_one_query_runs_on_packed_heads(batch, keys):
    """Tiles with all query heads of a key head are predicted fastest, because they read K and V once; a tile of one head would use one
    row."""
    q, k = Shape((batch, 32, 1, 128), "bfloat16"), Shape((batch, 8, keys, 128), "bfloat16")
    names = [kernel.name for kernel in prewarm({"q": q, "k": k, "v": k}, {}, False, 90)]
    assert names[0].startswith("strobe::mma::Decode")


def test_small_calls_ship_the_hopper_backward_of_64_keys():
    every = jobs([90], None, ["bfloat16"], ["plain", "causal"])
    small = [job for job in every if (job.seqlen, job.sequences, job.heads, job.heads_kv) == (SMALL, 1, 4, 4)]
    assert len(small) == 10  # head dimensions 32 to 160
    for job in small:
        names, refused = job.names()
        assert not refused, job
        assert any("sm90::BackwardRoles" in name for name in names), job


def test_short_calls_ship_the_hopper_backwards_for_them():
    def config(job: Job) -> str:
        (name,) = (name for name in job.names()[0] if "sm90::Backward<" in name)
        return name

    for dim in (32, 64):
        for feature in ("plain", "causal"):
            lengths = ((4096,), (512, 16), (512, 33), (1024, 16))
            long, few, many, longer = (Job(90, "bfloat16", dim, feature, True, *length) for length in lengths)
            assert {few, many, longer} <= {*jobs([90], [dim], ["bfloat16"], [feature])}
            assert len({config(long), config(few)}) == 2
            assert (config(few) == config(many)) == (dim == 32)  # dQ in shared memory pays only up to d 64
            assert (config(longer) == config(long)) == (feature == "plain")  # both have long walks over query tiles
            assert config(longer) != config(few)


# Calls of the Hopper backward, one for each form of its blocks: they own dQ in shared memory, have two stages of keys, or hold K and V
# ("keys") or V alone ("values") in registers. Each is (sequences, their length, d, Dv).
HOPPER_FORMS = {
    "dQ": (132, 300, 64, 64),
    "stages": (16, 600, 64, 64),
    "keys": (4, 2048, 96, 96),
    "keys, 80 queries": (4, 2560, 80, 80),
    "values": (4, 2048, 112, 112),
}
HOPPER_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"band": "causal"},
    "window": {"band": "window"},
    "mask": {"mask": True},
    "bias": {"bias": "own"},
    "float32 bias, causal": {"bias": "float32", "band": "causal"},
    "softcap": {"softcap": 30.0},
    "ALiBi, causal": {"alibi": True, "band": "causal"},
    "dropout": {"dropout": 0.1},
    "packed, causal": {"packed": True, "band": "causal"},
    "grouped": {"heads": (4, 2)},
    "mask, dropout, causal": {"mask": True, "dropout": 0.1, "band": "causal"},
    "softcap, ALiBi, dropout": {"softcap": 30.0, "alibi": True, "dropout": 0.1},
    "softcap, mask": {"softcap": 30.0, "mask": True},
    "softcap, float32 bias": {"softcap": 30.0, "bias": "float32"},
    "all but a bias": {"softcap": 30.0, "alibi": True, "mask": True, "dropout": 0.1},
    "mask, bias, dropout": {"mask": True, "bias": "own", "dropout": 0.1},
}
# `make test` compiles only the calls that the table above and the pairs leave out.
HOPPER_CALLS = list(product(HOPPER_FORMS, HOPPER_OPTIONS)) if LONG else [("dQ", "bias"), ("stages", "softcap"), ("values", "causal")]


@pytest.mark.parametrize(("form", "options"), HOPPER_CALLS)
def test_forms_of_the_hopper_backward(form, options):
    batch, seqlen, dim, dim_v = HOPPER_FORMS[form]
    plain = {name: values[0] for name, values in FACTORS.items()} | {"band": "full", "dims": (dim, dim_v), "lengths": (seqlen, seqlen)}
    arrays, fields = call(plain | HOPPER_OPTIONS[options], batch)
    if "window_left" in fields:
        fields["window_left"] = 100
    check(90, prewarm(arrays, fields | {"engine": "cuda-sm90"}, True, 90))


def test_hopper_takes_powers_of_two():
    """The product batch² · seqlen⁴ of this shape is a multiple of 2⁶⁴, so it must not be computed in 64 bits."""
    shape = Shape((16, 2, 16384, 64), "bfloat16")
    kernels = prewarm({"q": shape, "k": shape, "v": shape}, {"engine": "cuda-sm90"}, True, 90)
    assert any("sm90::Backward<" in kernel.name for kernel in kernels)


# The known spills of kernels with `invariant`, by architecture, template and head dimension. These kernels spill outside of their loops,
# once for each tile of queries. (Up to 64 columns four warpgroups share the registers; beyond 128 O fills them.)
INVARIANT_SPILLS = {
    (90, "strobe::sm90::Forward", 64): 108,
    (90, "strobe::sm90::Forward", 256): 110,
    (90, "strobe::mma::Backward", 128): 16,
}
INVARIANT = [
    *product((90,), (64, 128, 256), ("plain", "causal", "mask", "dropout", "sinks"), (1, 4096), (False, True), ("",)),
    *product((90,), (64, 128, 256), ("block-sparse",), (4096,), (False, True), ("",)),
    *product((80, 90, 120), (128, 192, 256), ("causal",), (1, 4096), (False, True), ("cuda-mma",)),
]
if not LONG:  # a single query matters only in the forward, and cuda-mma's kernels are compiled for one GPU only
    INVARIANT = [x for x in INVARIANT if (x[3] > 1 or (x[2] == "causal" and not x[4])) and (not x[5] or (x[0], x[1]) == (90, 256))]


@pytest.mark.parametrize(("arch", "dim", "feature", "queries", "backward", "engine"), INVARIANT)
def test_invariant(arch, dim, feature, queries, backward, engine):
    more, options = ONE_FEATURE[feature]
    if queries == 1:
        more = {name: x._replace(shape=(*x.shape[:2], 1, x.shape[3])) if name == "mask" else x for name, x in more.items()}
    q, k = Shape((2, 4, queries, dim), "bfloat16"), Shape((2, 1, 65536 // 16, dim), "bfloat16")
    options = options | {"invariant": True} | ({"engine": engine} if engine else {})
    kernels = prewarm({"q": q, "k": k, "v": k, **more}, options, backward, arch)
    for kernel in kernels:
        assert kernel.spilled <= INVARIANT_SPILLS.get((arch, kernel.name.partition("<")[0], dim), 0), kernel
        assert not kernel.serialized, kernel


@pytest.mark.parametrize("lengths", [(64, 64), (4000, 16), (4096, 4096)], ids=str)
@pytest.mark.parametrize("heads", [(24, 6), (8, 8)], ids=str)
def test_fp32_goes_back_where_it_came_from(heads, lengths):
    """The backward takes the forward's engine, because P = exp(S - LSE): with products of another engine S would be too far from LSE."""
    q, k = (Shape((5, h, s, 16), "float32") for h, s in zip(heads, lengths, strict=True))
    families = []
    for backward in (False, True):
        kernels = prewarm({"q": q, "k": k, "v": k}, {"window_right": 0}, backward, 90)
        main = "Backward<" if backward else "Forward<"
        families += [kernel.name.split("::")[1] for kernel in kernels if main in kernel.name]
    assert len(families) == 2, families
    assert families[0] == families[1]
