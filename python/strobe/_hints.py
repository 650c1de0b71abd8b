"""The library's refusals in terms of the Python call, with hints at what the caller may have meant. Both are chosen by the
refusal's code and values."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from ._abi import DTYPES, MAX_RANK, NO_DTYPE, engines
from ._function import CAPTURED
from ._function import FIELDS as FUNCTIONS
from ._options import AUX, SCALES, SCORES, TOKENS
from ._refusals import Absent, Axes, AxisOf, Either, Hint, Name, OtherLayout, Refusal, Sizes, Types
from .arrays.base import Array
from .arrays.known import known_framework

# Tensors whose shapes depend on H, Sq or Sk.
_OF_SIZES = frozenset({"mask", "bias", "alibi_slopes", "sinks", "lse", "dlse", "delta", "block_mask"})
# The dtype that messages suggest for lists and for tensors that can be cast without a loss, unless q is float64.
_CASTS = {"rng": "int64", "bias": "float32", "alibi_slopes": "float32", "sinks": "float32"}
_CASTS |= dict.fromkeys(SCALES, "float32")
_CASTS |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table"), "int32")
_QUANTISED = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")
_OPTIONS = {field: option for option, field in FUNCTIONS.items()}
_NONE = f"{NO_DTYPE} (none)"


def is_of_sizes(refusal: Refusal) -> bool:
    """Whether the refusal depends on H, Sq or Sk. If q, k and v have another layout, it may refuse a correct argument."""
    if refusal.argument == "seqused_k":
        return refusal.code == "length"
    return refusal.argument in _OF_SIZES and refusal.code == "shape"


def guesses_layout(refusal: Refusal) -> bool:
    return any(isinstance(hint, OtherLayout) for hint in refusal.hints)


class OfCall:
    """Turns the library's refusals of one call into refusals in the terms of its Python caller.

    arrays: the caller's; made: arrays that the package has allocated for the call; bshd: whether the layout is "bshd"; attention: the
    call's strobe_attention."""

    def __init__(self, arrays: dict[str, Any], made: dict[str, Any], bshd: bool, attention: Any):
        self._arrays, self._made, self._bshd, self._attention = arrays, made, bshd, attention

    def __call__(self, refusal: Refusal) -> Refusal | None:
        """The refusal in the caller's terms; None if the argument is not the caller's, or is refused only because others
        have a wrong layout."""
        name = refusal.argument or ""
        if name in AUX and refusal.code == "excluded":  # the caller asked for it by its name in aux
            values = tuple("()" if isinstance(x, Absent) else x for x in refusal.values)
            return refusal._replace(argument="aux", words=f"{name!r} {refusal.words}", values=values)
        if name in self._made:
            return None
        if name.startswith("block_"):
            words = refusal.words.removesuffix(" beside {2}") if refusal.code == "value" else refusal.words  # block_rows exists in C only
            refusal = refusal._replace(argument="block_mask", words=f"{name}: {words}")
            return None if is_of_sizes(refusal) and self._is_other_layout() else refusal
        if (option := self._option_of(name)) is not None:
            return refusal._replace(argument=option, words=refusal.words if name in _OPTIONS else f"{name}: {refusal.words}")
        if self._bshd:
            refusal = _in_bshd(refusal)
        refusal = refusal._replace(values=tuple(Name(_OPTIONS.get(x.of, x.of)) if isinstance(x, Name) else x for x in refusal.values))
        array = self._arrays.get(name)
        if array is not None:
            if is_of_sizes(refusal) and self._is_other_layout():
                return None
            refusal = self._of_array(refusal, name, array)
        if name == "engine" and refusal.code == "unknown":
            (wanted, _, *others), here = refusal.values, self._engines_of_device()
            refusal = refusal._replace(values=(wanted, ", ".join(here), *others))
            close = get_close_matches(wanted, here, 1)
            if close and wanted != close[0].partition("-")[0]:  # "cpu" and "cuda" are devices: any engine there may be meant
                refusal = refusal.beside(Hint(f"; did you mean {close[0]}?"))
        return refusal._replace(argument=name.removeprefix("execution."))

    def _option_of(self, name: str) -> str | None:
        """The option whose function fills this member of the C structs, or reads this tensor."""
        if name in CAPTURED:
            return "score" if self._attention.score_function else "mask"
        return _OPTIONS.get(name)

    def _of_array(self, refusal: Refusal, name: str, array: Array) -> Refusal:
        if refusal.code == "dtype":
            values = [Types((str(array.dtype),)) if x == Types((_NONE,)) else x for x in refusal.values]
            return refusal._replace(values=tuple(values)).beside(*self._ways_out(name, values, array))
        if name in SCORES and refusal.code == "shape":
            given = tuple(array.shape)
            if array.ndim < MAX_RANK:
                refusal = refusal._replace(values=(given, *refusal.values[1:])).beside(*self._missing_axes(name, given))
            return refusal.beside(*self._unsaid_lengths())
        if name in SCALES and refusal.code in ("rank", "shape"):
            return refusal.beside(*self._other_scales(name))
        is_meant_otherwise = (name == "k" and refusal.code == "heads" and self._is_other_layout()) or (
            name == "seqused_k" and refusal.code == "length" and self._has_longer_pages(refusal.values[0])
        )
        if is_meant_otherwise:
            return refusal.beside(OtherLayout("bhsd" if self._bshd else "bshd"))
        if name.startswith("cu_seqlens") and refusal.code == "length" and self._heads_come_first(name, refusal.values[1]):
            words = "; packed {0} is (tokens, heads, D), and this one looks like (heads, tokens, D)"
            return refusal.beside(Hint(words, (Name(name[-1]),), axes_of=name[-1]))
        return refusal

    def _engines_of_device(self) -> list[str]:
        """The names of the engines, except those for another device than q's. A q without elements may be for any device."""
        q = self._arrays.get("q")
        others: tuple[str, ...] = ("cpu-",) if getattr(q, "is_cuda", False) else ("cuda-", "ladder-tensor-cores")
        if q is None or 0 in q.shape:
            others = ()
        return [engine for engine, _ in engines() if not engine.startswith(others)]

    def _ways_out(self, name: str, values: list[Any], array: Array) -> list[Hint]:
        """Hints for a wrong dtype: what the caller may do."""
        framework = known_framework(array)
        given, accepted = (values[0].names[0].removeprefix("torch."), values[1].names)
        has_scales = not SCALES.keys().isdisjoint(self._arrays)
        is_float = "float" in given
        if name == "mask":
            if is_float:
                return [Hint("; what is added to the scores is {0}", (Name("bias"),), needs=("bias",))]
            return [] if framework is None else [Hint(f"; of zeros and ones, {framework.cast_in_words('{0}', 'bool')}", (Name(name),))]
        if name == "bias" and given == "bool":
            return [Hint("; what hides is {0}", (Name("mask"),), needs=("mask",))]
        if framework is not None and name in _CASTS:
            dtype = "float64" if accepted == ("float64",) else _CASTS[name]
            is_number = given.rstrip("0123456789") in (("int", "uint") if dtype.startswith("int") else ("int", "uint", "float", "bfloat"))
            return [Hint(f"; {framework.cast_in_words('{0}', dtype)}", (Name(name),))] if is_number else []
        if name == "q" and given == "float8_e4m3fn" and "q_scale" not in self._arrays:
            return [Hint(", or float8_e4m3fn with {0}", (Name("q_scale"),), needs=("q_scale",))]
        if name not in ("k", "v"):
            return []
        scales = Name("k_scale"), Name("v_scale")
        if has_scales and is_float and "float8" not in given and len(accepted) > 1:
            return [Hint(", or none of {0} and {1}", scales, needs=("k_scale",))]
        if has_scales and name == "v" and len(accepted) == 1:  # the one accepted dtype is that of k
            return [Hint(", as {0}", (Name("k"),))]
        if not has_scales and given in _QUANTISED:
            return [Hint(", or with {0} and {1} int8, float8_e4m3fn, float8_e5m2, uint8", scales, needs=("k_scale",))]
        return []

    def _is_other_layout(self) -> bool:
        """Whether the heads of q, k and v do not fit, but would fit if axes 1 and 2 changed places."""
        shapes = [tuple(self._arrays[name].shape) for name in ("q", "k", "v") if name in self._arrays]
        paged, bshd = "page_table" in self._arrays, self._bshd
        if len(shapes) < 3 or any(len(shape) != MAX_RANK for shape in shapes[1:]) or len(shapes[0]) not in ((3, 4) if paged else (4,)):
            return False
        of_q, of_k, of_v = shapes
        fit = [
            heads_kv > 0 and of_q[axis if len(of_q) == MAX_RANK else 1] % heads_kv == 0
            for axis, heads_kv in ((2 if bshd else 1, of_k[2 if bshd else 1]), (1 if bshd else 2, of_k[1 if bshd else 2]))
        ]
        return fit == [False, True] and of_k[:3] == of_v[:3] and of_q[-1] == of_k[3] and (paged or of_q[0] == of_k[0])

    def _heads_come_first(self, name: str, length: int) -> bool:
        """Whether a sequence that is too long for the packed tokens would fit if the axis of heads were that of tokens."""
        x = self._arrays.get(name[-1])
        return x is not None and x.ndim == MAX_RANK - 1 and x.shape[0] < length <= x.shape[1]

    def _has_longer_pages(self, length: int) -> bool:
        """Whether a length that exceeds a row of the page table would fit if the pools' axes 1 and 2 changed places."""
        q, k, table = (self._arrays.get(name) for name in ("q", "k", "page_table"))
        if q is None or k is None or table is None:
            return False
        page, heads = k.shape[1:3] if not self._bshd else k.shape[2:0:-1]
        q_heads = q.shape[1] if q.ndim < MAX_RANK or not self._bshd else q.shape[2]
        return 0 <= length <= table.shape[1] * page and heads > 0 and q_heads % heads == 0

    def _unsaid_lengths(self) -> list[Hint]:
        """Hints for a mask or bias over packed sequences: the missing options that would give its sizes."""
        if "cu_seqlens_q" not in self._arrays:
            return []
        q, k = Name("max_seqlen_q"), Name("max_seqlen_k")
        if "page_table" in self._arrays:  # the page table gives the number of keys
            return [] if self._attention.max_seqlen_q else [Hint("; {0} gives the length of its axis -2", (q,), needs=(q.of,))]
        if self._attention.max_seqlen_q and self._attention.max_seqlen_k:
            return []
        return [Hint("; {0} and {1} give the lengths of its last two axes", (q, k), needs=(q.of, k.of))]

    def _other_scales(self, name: str) -> list[Hint | Either]:
        """Hints for scales in a wrong shape: how the caller writes them in the right one."""
        scale, of = self._arrays[name], self._arrays.get(SCALES[name])
        if of is None or (name == "k_scale" and self._attention.k_scale_group):
            return []
        shape, rows = tuple(scale.shape), tuple(of.shape[:-1])
        if len(shape) == of.ndim and shape[-1] == 1:
            return [Either((Hint("{0}[..., 0]", (Name(name),)),))]
        if len(shape) == of.ndim and name == "k_scale":
            return [Either((Hint("a scale for each column, with {0}", (Name("k_scale_group"),), needs=("k_scale_group",)),))]
        framework = known_framework(scale)
        if framework is None or len(shape) < 2 or len(shape) > len(rows):
            return []
        if any(n not in (1, m) for n, m in zip(shape[::-1], rows[::-1], strict=False)):
            return []
        rows_of = "queries" if name == "q_scale" else "keys"
        return [Hint(f"; one for many {rows_of} is a view of it, {framework.expanded_in_words('{0}', rows)}", (Name(name),))]

    def _missing_axes(self, name: str, shape: tuple[int, ...]) -> list[Hint]:
        """Hints for a mask or bias that does not broadcast: how to make it broadcast, if its axes are those of a batch and of keys."""
        q, k, cu_seqlens_q = map(self._arrays.get, ("q", "k", "cu_seqlens_q"))
        if q is None or k is None or q.ndim != k.ndim or "page_table" in self._arrays:
            return []  # another line says what is wrong with these arguments
        if q.ndim == MAX_RANK:
            tokens = 1 if self._bshd else 2
            batch, queries, keys = q.shape[0], q.shape[tokens], k.shape[tokens]
        elif cu_seqlens_q is None or not cu_seqlens_q.ndim:
            return []
        else:
            batch = cu_seqlens_q.shape[0] - 1
            queries, keys = self._attention.max_seqlen_q or q.shape[0], self._attention.max_seqlen_k or k.shape[0]
        if shape == (batch, keys):
            return [Hint("; of (B, Sk), {0}[:, None, None, :]", (Name(name),))]
        if shape in ((batch, 1, keys), (batch, queries, keys)):
            return [Hint(f"; of (B, {'1' if shape[1] == 1 else 'Sq'}, Sk), {{0}}[:, None]", (Name(name),))]
        return []


def _in_bshd(refusal: Refusal) -> Refusal:
    """The refusal in terms of the caller's axes: the library sees tensors of layout "bshd" with axes 1 and 2 exchanged."""
    least = MAX_RANK if refusal.argument in TOKENS else MAX_RANK - 1 if refusal.argument in SCALES else MAX_RANK + 1
    return refusal._replace(values=tuple(_exchanged(x, least) for x in refusal.values))


def _exchanged(x: Any, least: int) -> Any:
    """x with axes 1 and 2 exchanged, if it has at least `least` axes."""
    if isinstance(x, AxisOf) and least <= MAX_RANK:
        return AxisOf({1: 2, 2: 1}.get(x.axis, x.axis))
    if not isinstance(x, (Sizes, Axes)) or len(x.sizes) < least:
        return x
    return type(x)(*((each[0], each[2], each[1], *each[3:]) for each in x))


assert set(_CASTS.values()) | set(_QUANTISED) <= DTYPES.keys()
