"""From what the caller wrote to what the library reads; the same for torch tensors and NumPy arrays.

Kinds and spellings are checked here, shapes and values in the library: it sees every caller, C and C++ included. What is wrong is gathered
in a list, an exception an argument, so that a caller sees all of it at once.
"""

from __future__ import annotations

import sys
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from ._abi import MAX_RANK
from ._blockmask import BlockMask
from ._core import lib
from ._framework import Array, Framework, is_bool, is_whole, kind, known_framework, shown, unfit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping


class AttentionOptions(TypedDict, total=False):
    """The options of strobe.attention(), which documents them."""

    causal: bool
    window: int | tuple[int | None, int | None] | None
    alignment: str
    scale: float | None
    softcap: float
    score: str
    beta: float | None
    shift: float
    mask: Array | None
    bias: Array | None
    alibi_slopes: Array | None
    sinks: Array | None
    dropout: float
    seed: int | None
    offset: int | None
    rng: Array | None
    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    block_mask: BlockMask | None
    layout: str
    deterministic: bool
    exact_max: bool
    allow_tf32: bool
    tile_q: int | None
    tile_k: int | None
    engine: str | None
    strict: bool
    check: bool
    threads: int | None


DEFAULTS: dict[str, Any] = dict.fromkeys(AttentionOptions.__annotations__) | {
    **dict.fromkeys(("causal", "deterministic", "exact_max", "allow_tf32", "strict", "check"), False),
    **dict.fromkeys(("softcap", "shift", "dropout"), 0.0),
    "score": "dot",
    "alignment": "bottom_right",
    "layout": "bhsd",
}

MAX_HEAD_DIM = 256  # src/attention/validate.cpp
_INT32_MAX, _INT64_MIN, _INT64_MAX = 2**31 - 1, -(2**63), 2**63 - 1
_ARRAYS = frozenset({"mask", "bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "rng"})
_FLAGS = frozenset({"causal", "deterministic", "exact_max", "allow_tf32", "strict", "check"})
_NUMBERS = frozenset({"scale", "softcap", "beta", "shift", "dropout"})
_INTEGERS = {
    "max_seqlen_q": (0, _INT32_MAX),
    "max_seqlen_k": (0, _INT32_MAX),
    "tile_q": (1, lib.STROBE_MAX_TILE),
    "tile_k": (1, lib.STROBE_MAX_TILE),
    "threads": (1, lib.STROBE_MAX_THREADS),
}
_LAYOUTS = {"bhsd": False, "bshd": True}
_HYPERBOLIC: int = lib.STROBE_HYPERBOLIC
_SCORES = {"dot": lib.STROBE_DOT, "hyperbolic": _HYPERBOLIC}
_ALIGNMENTS = {"bottom_right": lib.STROBE_BOTTOM_RIGHT, "top_left": lib.STROBE_TOP_LEFT}
# What other attention functions have.
ELSEWHERE = {
    "is_causal": "did you mean causal?",
    "p": "did you mean dropout?",
    "return_attn_probs": "did you mean return_lse? The probabilities are never made",
    "attn_mask": "did you mean mask (bool, True = attend) or bias (added to the scores)?",
    "dropout_p": "did you mean dropout?",
    "enable_gqa": "k and v may have fewer heads than q without it",
    "softmax_scale": "did you mean scale?",
    "window_size": "did you mean window?",
}
_SHAPES = {
    "q": {"bhsd": "(B, H, Sq, D)", "bshd": "(B, Sq, H, D)", "packed": "(Tq, H, D) with cu_seqlens"},
    "k": {"bhsd": "(B, Hkv, Sk, D)", "bshd": "(B, Sk, Hkv, D)", "packed": "(Tk, Hkv, D) with cu_seqlens"},
    "v": {"bhsd": "(B, Hkv, Sk, Dv)", "bshd": "(B, Sk, Hkv, Dv)", "packed": "(Tk, Hkv, Dv) with cu_seqlens"},
}


class Prepared(NamedTuple):
    """A call as the library reads it."""

    arrays: dict[str, Array]  # those of _abi.INPUTS that are given
    options: dict[str, Any]  # those of _abi.OPTIONS that are not at their default


Wrong = list[Exception]
# Where one of these is wrong, nobody can tell what the others should be.
SIZES = frozenset({"q", "k", "v", "layout", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"})


def name_of(refused: Exception) -> str:
    """Whose argument's refusal it is."""
    return str(refused).partition(":")[0]


def refusal(wrong: Wrong) -> Exception:
    """One exception of all that is wrong: a TypeError if kinds are all that is."""
    if len(wrong) == 1:
        return wrong[0]
    kinds_alone = all(isinstance(each, TypeError) for each in wrong)
    return (TypeError if kinds_alone else ValueError)("\n".join(map(str, wrong)))


def check_names(
    function: str, given: Iterable[str], wrong: Wrong, known: Collection[str] = DEFAULTS, hints: Mapping[str, str] = ELSEWHERE
) -> None:
    """`function` is whose options they are, for messages; hints: for names of other functions."""
    for name in given:
        if name not in known:
            hint = hints.get(name) or "".join(f"did you mean {close}?" for close in get_close_matches(name, known, 1))
            wrong.append(TypeError(f"{function}() got an unexpected keyword argument {name!r}" + (hint and f"; {hint}")))


def prepare(function: str, q: Array, k: Array, v: Array, given: Mapping[str, Any], wrong: Wrong) -> tuple[Framework | None, Prepared]:
    """The framework is q's. `given`: AttentionOptions. What is wrong is added to `wrong`, and missing in the result."""
    framework = known_framework(q)
    arrays: dict[str, Array] = {}
    options: dict[str, Any] = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        if is_array(wrong, name, x, framework, q):
            arrays[name] = x
    given = without_causal_bias(framework, q, k, given, wrong)
    for name, x in given.items():
        if name not in DEFAULTS:
            check_names(function, [name], wrong)
        elif x is DEFAULTS[name]:
            continue
        elif name in _ARRAYS:
            if is_array(wrong, name, x, framework, q):
                arrays[name] = x
        elif name in _FLAGS:
            if flag(wrong, name, x):
                options[name] = True
        elif name in _NUMBERS:
            n = len(wrong)
            value = number(wrong, name, x)
            if len(wrong) == n:
                options[name] = value
        elif name in _INTEGERS:
            if is_integer(wrong, name, x, *_INTEGERS[name]):
                options[name] = _plain(x)
        elif name == "window":
            _window(wrong, x, options)
        elif name == "alignment":
            if is_choice(wrong, name, x, _ALIGNMENTS):
                options[name] = _ALIGNMENTS[x]
        elif name == "score":
            if is_choice(wrong, name, x, _SCORES):
                options[name] = _SCORES[x]
        elif name == "engine":
            if isinstance(x, str) and x.isprintable() and 0 < len(x) < 80:
                options[name] = x
            else:
                error = ValueError if isinstance(x, str) else TypeError
                wrong.append(error(f"engine: {shown(x)}; accepted is a name out of strobe.engines(), or None"))
        elif name == "block_mask":
            if not isinstance(x, BlockMask):
                wrong.append(TypeError(f"block_mask: {kind(x)}; accepted is a strobe.BlockMask"))
            elif framework is not None:
                arrays.update(zip(_BLOCKS, (framework.own(a) for a in x.arrays), strict=True))
                options["block_q"], options["block_k"] = x.block_q, x.block_k

    if options.get("score") == _HYPERBOLIC:
        options.setdefault("beta", 1.0)
    elif (beta := options.pop("beta", None)) is not None and given.get("score", "dot") == "dot":
        wrong.append(ValueError(f"beta: {beta} with score 'dot'; accepted is None, or a hyperbolic score"))
    layout = given.get("layout", "bhsd")
    packed = _is_packed(given)
    if is_choice(wrong, "layout", layout, _LAYOUTS):
        shapes, rank = ("packed", 3) if packed else (layout, 4)
        for name in ("q", "k", "v"):
            if name in arrays and arrays[name].ndim != rank:
                wrong.append(ValueError(f"{name}: shape {tuple(arrays[name].shape)}; accepted is {_SHAPES[name][shapes]}"))
        if _LAYOUTS[layout] and not packed:
            options["bshd"] = True
    if isinstance(block_mask := given.get("block_mask"), BlockMask) and not SIZES & set(map(name_of, wrong)):
        _fits(wrong, block_mask, _lengths(arrays.get("q"), arrays.get("k"), given), given)
    if not packed:
        for name in ("max_seqlen_q", "max_seqlen_k"):
            if options.get(name):
                wrong.append(ValueError(f"{name}: {options[name]} without cu_seqlens; accepted is None"))
    _dropout(wrong, arrays, options, given, framework)
    return framework, Prepared(arrays, options)


def _lengths(q: Array | None, k: Array | None, given: Mapping[str, Any]) -> list[int | None]:
    """Sq and Sk, of packed sequences what max_seqlen_q and max_seqlen_k say; None where that cannot be told."""
    packed = _is_packed(given)
    axis = 0 if packed else 1 if given.get("layout") == "bshd" else 2
    found: list[int | None] = []
    for x, most in ((q, given.get("max_seqlen_q")), (k, given.get("max_seqlen_k"))):
        length = x.shape[axis] if x is not None and x.ndim == (3 if packed else 4) else None
        found.append(most if packed and is_whole(most) and most else length)
    return found


def _is_packed(given: Mapping[str, Any]) -> bool:
    return given.get("cu_seqlens_q") is not None or given.get("cu_seqlens_k") is not None


def _has_band(given: Mapping[str, Any]) -> bool:
    """Whether the alignment means something."""
    return given.get("causal") is True or any(given.get(name) is not None for name in ("window", "alibi_slopes"))


def without_causal_bias(framework: Framework | None, q: Array, k: Array, given: Mapping[str, Any], wrong: Wrong) -> Mapping[str, Any]:
    """The options, with causal and an alignment in place of a mask or bias that is but a name for them."""
    for name in ("mask", "bias"):
        found = framework.causal_bias(given.get(name)) if framework is not None else None
        if found is None:
            continue
        alignment, *lengths = found
        given = {option: x for option, x in given.items() if option != name}
        arrays = [x if unfit("", x, framework) is None else None for x in (q, k)]
        own, aligned = _lengths(arrays[0], arrays[1], given), given.get("alignment", "bottom_right")
        said = f"{name}: a causal bias of {lengths[0]} x {lengths[1]}, {alignment}"
        if _is_packed(given):
            wrong.append(ValueError(f'{said}, with cu_seqlens; accepted is causal=True, alignment="{alignment}"'))
        elif any(there is not None and here != there for here, there in zip(lengths, own, strict=True)):
            wrong.append(ValueError(f"{said}; accepted is one of {own[0]} x {own[1]}, as q and k have"))
        elif lengths[0] != lengths[1] and aligned != alignment and _has_band(given):
            wrong.append(ValueError(f"{said}, beside causal, window or alibi_slopes, {aligned}; accepted is one alignment"))
        else:
            given = {**given, "causal": True, "alignment": alignment}
    return given


def _fits(wrong: Wrong, mask: BlockMask, lengths: list[int | None], given: Mapping[str, Any]) -> None:
    """Whether the call has the mask's lengths, and its alignment where that has an effect."""
    if None in lengths:
        return
    aligned = given.get("alignment", "bottom_right")
    if [mask.seqlen_q, mask.seqlen_k] != lengths:
        whose = "the maxima of the sequences" if _is_packed(given) else "q and k"
        accepted = f"accepted is one of {lengths[0]} queries and {lengths[1]} keys, as {whose} have"
        if _is_packed(given) and any(given.get(name) is None for name in ("max_seqlen_q", "max_seqlen_k")):
            accepted += "; without max_seqlen_q and max_seqlen_k these are the numbers of tokens"
        wrong.append(ValueError(f"block_mask: of {mask.seqlen_q} queries and {mask.seqlen_k} keys; {accepted}"))
    elif mask.alignment not in (None, aligned) and aligned in _ALIGNMENTS and _has_band(given):
        accepted = f"accepted beside causal, window or alibi_slopes is the alignment of these, {aligned}"
        wrong.append(ValueError(f'block_mask: {mask.alignment}; {accepted}: make it with alignment="{aligned}"'))


_BLOCKS = ("block_rows", "block_cols", "block_rows_t", "block_cols_t")


def is_seed(wrong: Wrong, name: str, x: Any) -> bool:
    if not is_whole(x):
        wrong.append(TypeError(f"{name}: {kind(x)}; accepted is an integer; an array goes into rng"))
    elif not _INT64_MIN <= x < 2**64:
        wrong.append(ValueError(f"{name}: {shown(x)}; accepted are integers of 64 bits"))
    else:
        return True
    return False


def _dropout(
    wrong: Wrong, arrays: dict[str, Array], options: dict[str, Any], given: Mapping[str, Any], framework: Framework | None
) -> None:
    """Sees to it that rng, or seed and offset, are there if dropout is, and only then."""
    seed, offset = given.get("seed"), given.get("offset")
    seeded = [is_seed(wrong, name, x) for name, x in (("seed", seed), ("offset", offset)) if x is not None]
    if given.get("rng") is not None and seeded:
        wrong.append(ValueError("rng: given beside seed or offset; accepted is one of the two"))
    elif offset is not None and seed is None and all(seeded):
        wrong.append(ValueError("offset: given without seed; accepted is seed alone, or both"))
    if options.get("dropout", 0.0) == 0.0:
        arrays.pop("rng", None)
    elif seed is not None and all(seeded):
        options.update(seed_options(seed, offset))
    elif "rng" not in arrays and framework is not None and not wrong:
        arrays["rng"] = framework.drawn_rng(arrays["q"])


def seed_options(seed: int | None, offset: int | None) -> dict[str, int]:
    """The two as _abi.OPTIONS has them."""
    given = {name: int(x) for name, x in (("seed", seed), ("offset", offset)) if x is not None}
    return {name: x - 2**64 if x > _INT64_MAX else x for name, x in given.items() if x}


def is_array(wrong: Wrong, name: str, x: Any, framework: Framework | None, q: Array) -> bool:
    """Whether x is an array: of q's kind, where q lies, unless q itself is none; then framework is None."""
    if (refused := unfit(name, x, framework, "q", None if framework is None else q)) is not None:
        wrong.append(refused)
    elif x.ndim > MAX_RANK and name not in ("q", "k", "v"):  # those are held to a rank of their own
        wrong.append(ValueError(f"{name}: shape {tuple(x.shape)}; accepted are up to {MAX_RANK} axes"))
    else:
        return True
    return False


def flag(wrong: Wrong, name: str, x: Any) -> bool:
    if is_bool(x):
        return bool(x)
    wrong.append(TypeError(f"{name}: {kind(x)} {shown(x)}; accepted is True or False"))
    return False


def number(wrong: Wrong, name: str, x: Any) -> float:
    """x as a float; without a meaning where something is wrong with it."""
    numpy = sys.modules.get("numpy")
    scalar = isinstance(x, (int, float)) or (hasattr(x, "__float__") and known_framework(x) is None)
    if not scalar or is_bool(x) or (numpy is not None and isinstance(x, _no_numbers(numpy))):
        wrong.append(TypeError(f"{name}: {kind(x)}; accepted is a number"))
        return 0.0
    try:
        return float(x)
    except (OverflowError, TypeError, ValueError):
        wrong.append(ValueError(f"{name}: {shown(x)}; accepted is a number that float64 has"))
        return 0.0


def _no_numbers(numpy: Any) -> tuple[type, ...]:
    """Of NumPy's scalars, which all have __float__."""
    return numpy.complexfloating, numpy.flexible, numpy.datetime64, numpy.timedelta64


def is_integer(wrong: Wrong, name: str, x: Any, least: int, most: int) -> bool:
    if not is_whole(x):
        wrong.append(TypeError(f"{name}: {kind(x)}; accepted is an integer"))
    elif not least <= x <= most:
        wrong.append(ValueError(f"{name}: {shown(x)}; accepted are integers from {least} to {most}"))
    else:
        return True
    return False


def is_choice(wrong: Wrong, name: str, x: Any, choices: Collection[str]) -> bool:
    if not isinstance(x, str) or x not in choices:
        wrong.append(ValueError(f"{name}: {shown(x)}; accepted is {' or '.join(map(repr, choices))}"))
        return False
    return True


def _window(wrong: Wrong, window: Any, options: dict[str, Any]) -> None:
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    whole = all(side is None or is_whole(side) for side in sides)
    if len(sides) != 2 or not whole or not all(side is None or 0 <= side <= _INT64_MAX for side in sides):
        error = ValueError if whole else TypeError
        accepted = "(left, right), each None (no bound) or an integer from 0 on, in 64 bits, or one integer for both"
        wrong.append(error(f"window: {shown(window)}; accepted is {accepted}"))
        return
    for name, side in zip(("window_left", "window_right"), sides, strict=True):
        if side is not None:
            options[name] = _plain(side)


def _plain(x: Any) -> Any:
    """An integer, as one of Python's; one of a compiler's stays its."""
    numpy = sys.modules.get("numpy")
    return int(x) if numpy is not None and isinstance(x, numpy.integer) else x
