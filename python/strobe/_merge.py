"""Two partial attentions over disjoint sets of keys, made one."""

from __future__ import annotations

from typing import Any

from ._checks import Wrong, is_choice, refusal
from .arrays.base import Array
from .arrays.known import framework_of, unfit

_WIDE = ("float32", "float64")
_FLOATS = (*_WIDE, "float16", "bfloat16")


def merge(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, *, layout: str = "bhsd") -> tuple[Array, Array]:
    """Merges the attentions over two disjoint parts of the keys into the attention over all keys.

    With torch tensors, the result is differentiable in all four arguments. Give a sink to only one of the parts. An lse may be -inf, in
    both parts too: that part then has no key for this query.

    Args:
        out_a, out_b: (B, H, Sq, Dv), (B, Sq, H, Dv) with layout "bshd", or (Tq, H, Dv) packed; any float dtype.
        lse_a, lse_b: (B, H, Sq), or (H, Tq) packed; float32 or float64, as attention() returns it. The sums have its precision.
        layout: "bhsd" or "bshd".

    Returns:
        out, lse: in the shapes and dtypes of out_a and lse_a.

    Raises:
        TypeError, ValueError: an argument is not as described above.

    Sources: the online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867), as FlashAttention splits keys with it.
    """
    framework = framework_of("out_a", out_a)
    xp: Any = framework.xp
    others = {"lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    wrong: Wrong = [x for name, given in others.items() if (x := unfit(name, given, framework, "out_a", out_a)) is not None]
    is_choice(wrong, "layout", layout, ("bhsd", "bshd"))
    if not wrong:
        wrong = _unlike(out_a, lse_a, out_b, lse_b, layout)
    if wrong:
        raise refusal(wrong)
    rows_first = out_a.ndim == 3 or layout == "bshd"  # in out; in lse the heads are

    m = xp.maximum(lse_a, lse_b)
    m = framework.constant(xp.where(m == -xp.inf, 0.0, m))  # any value gives the same result
    weight_a, weight_b = xp.exp(lse_a - m), xp.exp(lse_b - m)
    total = weight_a + weight_b
    none = total == 0
    total = xp.where(none, 1.0, total)
    lse = xp.where(none, -xp.inf, m + xp.log(total))

    def scaled(out: Array, weight: Array) -> Array:
        weight = weight / total
        return (weight.swapaxes(-1, -2) if rows_first else weight)[..., None] * out

    return framework.cast(scaled(out_a, weight_a) + scaled(out_b, weight_b), out_a.dtype), lse


def _unlike(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, layout: str) -> Wrong:
    """Dtypes and shapes that do not fit one another."""
    wrong: Wrong = []
    for name, x, accepted in (("out_a", out_a, _FLOATS), ("out_b", out_b, _FLOATS), ("lse_a", lse_a, _WIDE), ("lse_b", lse_b, _WIDE)):
        if (dtype := str(x.dtype).removeprefix("torch.")) not in accepted:
            wrong.append(ValueError(f"{name}: dtype {dtype}; accepted is {', '.join(accepted)}"))
    if out_a.ndim not in (3, 4):
        return [*wrong, ValueError(f"out_a: shape {tuple(out_a.shape)}; accepted is rank 4, or rank 3 for packed sequences")]
    whole, rows = tuple(out_a.shape), tuple(out_a.shape[:-1])
    if out_a.ndim == 3 or layout == "bshd":
        rows = (*rows[:-2], rows[-1], rows[-2])
    for name, x, shape in (("out_b", out_b, whole), ("lse_a", lse_a, rows), ("lse_b", lse_b, rows)):
        if tuple(x.shape) != shape:
            wrong.append(ValueError(f"{name}: shape {tuple(x.shape)}; accepted is {shape}, as out_a has shape {whole}"))
    return wrong
