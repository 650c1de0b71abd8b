"""From what the caller wrote to what the library reads; the same for torch tensors and NumPy arrays.

Kinds and spellings are checked here, shapes and values in the library: it sees every caller, C and C++ included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from ._abi import MAX_RANK
from ._blockmask import BlockMask
from ._core import lib
from ._framework import Array, Framework, kind

if TYPE_CHECKING:
    from collections.abc import Mapping


class AttentionOptions(TypedDict, total=False):
    """The options of strobe.attention(), which documents them."""

    causal: bool
    window: int | tuple[int | None, int | None] | None
    alignment: str
    scale: float | None
    softcap: float
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
    **dict.fromkeys(("softcap", "dropout"), 0.0),
    "alignment": "bottom_right",
    "layout": "bhsd",
}

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_ARRAYS = frozenset({"mask", "bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "rng"})
_FLAGS = frozenset({"causal", "deterministic", "exact_max", "allow_tf32", "strict", "check"})
_NUMBERS = frozenset({"scale", "softcap", "dropout"})
_INTEGERS = {
    "max_seqlen_q": (0, _INT64_MAX),
    "max_seqlen_k": (0, _INT64_MAX),
    "tile_q": (1, _INT64_MAX),
    "tile_k": (1, _INT64_MAX),
    "threads": (1, 2**31 - 1),
}
_LAYOUTS = {"bhsd": False, "bshd": True}
_ALIGNMENTS = {"bottom_right": lib.STROBE_BOTTOM_RIGHT, "top_left": lib.STROBE_TOP_LEFT}
_SHAPES = {
    "q": {"bhsd": "(B, H, Sq, D)", "bshd": "(B, Sq, H, D)", "packed": "(Tq, H, D) with cu_seqlens"},
    "k": {"bhsd": "(B, Hkv, Sk, D)", "bshd": "(B, Sk, Hkv, D)", "packed": "(Tk, Hkv, D) with cu_seqlens"},
    "v": {"bhsd": "(B, Hkv, Sk, Dv)", "bshd": "(B, Sk, Hkv, Dv)", "packed": "(Tk, Hkv, Dv) with cu_seqlens"},
}


class Prepared(NamedTuple):
    """A call as the library reads it."""

    arrays: dict[str, Array]  # those of _abi.INPUTS that are given
    options: dict[str, Any]  # those of _abi.OPTIONS that are not at their default


def prepare(function: str, framework: Framework, q: Array, k: Array, v: Array, given: Mapping[str, Any]) -> Prepared:
    """`given`: AttentionOptions; `function` is whose, for messages."""
    arrays = {name: array_of(name, x, framework, q) for name, x in (("q", q), ("k", k), ("v", v))}
    options: dict[str, Any] = {}
    for name, x in given.items():
        if name not in DEFAULTS:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if x is DEFAULTS[name]:
            continue
        if name in _ARRAYS:
            arrays[name] = array_of(name, x, framework, q)
        elif name in _FLAGS:
            if flag(name, x):
                options[name] = True
        elif name in _NUMBERS:
            options[name] = number(name, x, framework)
        elif name in _INTEGERS:
            options[name] = integer(name, x, *_INTEGERS[name], framework)
        elif name == "window":
            _window(x, options, framework)
        elif name == "alignment":
            options[name] = _choice(name, x, _ALIGNMENTS)
        elif name == "engine":
            if not isinstance(x, str) or not x:
                raise TypeError(f"engine: {x!r}; accepted is a name out of strobe.engines(), or None")
            options[name] = x
        elif name == "block_mask":
            if not isinstance(x, BlockMask):
                raise TypeError(f"block_mask: {kind(x)}; accepted is a strobe.BlockMask")
            arrays.update(zip(_BLOCKS, (framework.own(a) for a in x.arrays), strict=True))
            options["block_q"], options["block_k"] = x.block_q, x.block_k

    layout = given.get("layout", "bhsd")
    swapped = _choice("layout", layout, _LAYOUTS)
    packed = "cu_seqlens_q" in arrays or "cu_seqlens_k" in arrays
    for name in ("q", "k", "v"):
        if arrays[name].ndim != (3 if packed else 4):
            raise ValueError(f"{name}: shape {tuple(arrays[name].shape)}; accepted is {_SHAPES[name]['packed' if packed else layout]}")
    if swapped and not packed:
        options["bshd"] = True
    for name in ("mask", "bias"):
        if name in arrays:
            arrays[name] = _scores(arrays[name])
    _dropout(arrays, options, given, framework)
    return Prepared(arrays, options)


_BLOCKS = ("block_rows", "block_cols", "block_rows_t", "block_cols_t")


def dropout_rng(framework: Framework, like: Array | None, seed: Any, offset: Any) -> Array:
    """(seed, offset) as an array where `like` lies."""
    for name, x in (("seed", seed), ("offset", offset)):
        if not isinstance(x, int) or isinstance(x, bool):
            raise TypeError(f"{name}: {kind(x)}; accepted is an integer; an array goes into rng")
        if not _INT64_MIN <= x < 2**64:
            raise ValueError(f"{name}: {x}; accepted are integers of 64 bits")
    return framework.given_rng(seed, offset, like)


def _dropout(arrays: dict[str, Array], options: dict[str, Any], given: Mapping[str, Any], framework: Framework) -> None:
    """Sees to it that rng is there if dropout is, and only then."""
    seed, offset = given.get("seed"), given.get("offset")
    if "rng" in arrays and (seed is not None or offset is not None):
        raise ValueError("rng: given beside seed or offset; accepted is one of the two")
    if offset is not None and seed is None:
        raise ValueError("offset: given without seed; accepted is seed alone, or both")
    from_seed = None if seed is None else dropout_rng(framework, arrays["q"], seed, 0 if offset is None else offset)
    if options.get("dropout", 0.0) == 0.0:
        arrays.pop("rng", None)
    elif "rng" not in arrays:
        arrays["rng"] = framework.drawn_rng(arrays["q"]) if from_seed is None else from_seed


def array_of(name: str, x: Any, framework: Framework, q: Array) -> Array:
    """x, which must be of q's kind and lie where q does."""
    if not framework.is_array(x):
        raise TypeError(f"{name}: {kind(x)}; accepted is a {framework.name}, as q is")
    framework.check_place(name, x, q)
    return x


def flag(name: str, x: Any) -> bool:
    if not isinstance(x, bool):
        raise TypeError(f"{name}: {kind(x)} {x!r}; accepted is True or False")
    return x


def number(name: str, x: Any, framework: Framework) -> float:
    if not (isinstance(x, (int, float)) or hasattr(x, "__float__")) or isinstance(x, bool) or framework.is_array(x):
        raise TypeError(f"{name}: {kind(x)}; accepted is a number")
    return float(x)


def integer(name: str, x: Any, least: int, most: int, framework: Framework) -> int:
    if not (isinstance(x, int) or hasattr(x, "__index__")) or isinstance(x, bool) or framework.is_array(x):
        raise TypeError(f"{name}: {kind(x)}; accepted is an integer")
    if not least <= x <= most:
        raise ValueError(f"{name}: {x}; accepted are integers from {least} to {most}")
    return x


def _choice(name: str, x: Any, choices: Mapping[str, Any]) -> Any:
    if not isinstance(x, str) or x not in choices:
        raise ValueError(f"{name}: {x!r}; accepted is {' or '.join(map(repr, choices))}")
    return choices[x]


def _window(window: Any, options: dict[str, Any], framework: Framework) -> None:
    sides = window if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2:
        raise ValueError(f"window: {window!r}; accepted is (left, right), each an integer or None (no bound), or one integer for both")
    for name, side in zip(("left", "right"), sides, strict=True):
        if side is not None:
            options["window_" + name] = integer("window", side, 0, _INT64_MAX, framework)


def _scores(x: Array) -> Array:
    """A mask or bias of fewer axes than (B, H, Sq, Sk) lacks the first ones, as in NumPy's broadcasting."""
    return x if x.ndim >= MAX_RANK else x[(None,) * (MAX_RANK - x.ndim)]
