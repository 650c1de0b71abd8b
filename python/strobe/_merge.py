"""Merges two partial attentions over disjoint sets of keys."""

from __future__ import annotations

from typing import Any

from ._checks import Wrong, is_choice, refusal
from ._refusals import refusing
from .arrays.base import Array, Framework
from .arrays.known import framework_of, unfit

_OF_SUMS = ("float32", "float64")
_FLOATS = (*_OF_SUMS, "float16", "bfloat16")


def merge(
    out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, *, sinks: Array | None = None, layout: str = "bhsd"
) -> tuple[Array, Array]:
    """Merges the attentions over two disjoint parts of the keys into the attention over all keys.

    With torch tensors, the result is differentiable in all arguments. Give a sink only once: to one of the parts, or to the last merge.
    An lse may be -inf, also in both parts: such a part has no key for this query, and its out is not read in that row.
    An lse of +inf or NaN makes the row's out and lse NaN. flash-attn writes +inf where a query sees no key: replace it by -inf first,
    lse.masked_fill(lse == torch.inf, -torch.inf). attention() and strobe.compat write -inf.

    Args:
        out_a, out_b: (B, H, Sq, Dv), (B, Sq, H, Dv) with layout "bshd", or (Tq, H, Dv) packed; any float dtype.
        lse_a, lse_b: (B, H, Sq), or (H, Tq) packed; float32 or float64, as attention() returns it. The sums have its precision. Or two
            numbers a row, (2, B, H, Sq) or (2, H, Tq), whose sum is the lse, as partial parts have it: the sums are then float64's.
        sinks: (H,), any float dtype: a logit of each head that joins the denominator, where no part had it.
        layout: "bhsd" or "bshd".

    Returns:
        out, lse: in the shapes and dtypes of out_a and lse_a.

    Raises:
        TypeError, ValueError: an argument is not as described above.

    Sources: the online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867), as FlashAttention splits keys with it.
    """
    framework = framework_of("out_a", out_a)
    xp: Any = framework.xp
    others = {"lse_a": lse_a, "out_b": out_b, "lse_b": lse_b, **({} if sinks is None else {"sinks": sinks})}
    wrong: Wrong = [x for name, given in others.items() if (x := unfit(name, given, framework, "out_a", out_a)) is not None]
    is_choice(wrong, "layout", layout, ("bhsd", "bshd"))
    if not wrong:
        wrong = _unlike(out_a, lse_a, out_b, lse_b, sinks, layout)
    if wrong:
        raise refusal(wrong)
    rows_first = out_a.ndim == 3 or layout == "bshd"  # out has rows before heads; lse has heads first
    in_pairs = [lse.ndim == out_a.ndim for lse in (lse_a, lse_b)]
    rows_a, rows_b = (_sum(framework, lse, pair) if any(in_pairs) else lse for lse, pair in zip((lse_a, lse_b), in_pairs, strict=True))

    m = xp.maximum(rows_a, rows_b)
    if sinks is not None:
        if str(sinks.dtype).removeprefix("torch.") not in _OF_SUMS:
            sinks = framework.cast(sinks, m.dtype)
        logits = sinks[:, None] if out_a.ndim == 3 else sinks[None, :, None]
        m = xp.maximum(m, framework.cast(logits, m.dtype))
    m = framework.constant(xp.where(m == -xp.inf, 0.0, m))  # any value gives the same result
    weight_a, weight_b = xp.exp(rows_a - m), xp.exp(rows_b - m)
    total = weight_a + weight_b
    if sinks is not None:
        total = total + xp.exp(logits - m)
    none = total == 0
    total = xp.where(none, 1.0, total)
    lse = xp.where(none, -xp.inf, m + xp.log(total))

    def share(out: Array, rows: Array, weight: Array) -> Array:
        weight = weight / total
        if any(in_pairs):
            weight = framework.cast(weight, lse_a.dtype)
        without_keys, weight = ((x.swapaxes(-1, -2) if rows_first else x)[..., None] for x in (rows == -xp.inf, weight))
        # The weight alone is not enough: 0 times a NaN is NaN, and so is the gradient of such a weight.
        return weight * xp.where(without_keys, xp.zeros_like(out[..., :1]), out)

    out = framework.cast(share(out_a, rows_a, weight_a) + share(out_b, rows_b, weight_b), out_a.dtype)
    return out, _pair(framework, lse, lse_a.dtype) if in_pairs[0] else framework.cast(lse, lse_a.dtype)


def _sum(framework: Framework, lse: Array, pair: bool) -> Array:
    """The lse of a row from one number, or from two, in float64. The second number of a row without keys is 0."""
    exact = framework.cast(lse, framework.xp.float64)
    return exact[0] + exact[1] if pair else exact


def _pair(framework: Framework, lse: Array, dtype: Any) -> Array:
    """lse as two numbers per row: lse rounded to dtype, and the rounding error."""
    xp: Any = framework.xp
    value = framework.cast(lse, dtype)
    lost = lse - framework.cast(value, xp.float64)
    return xp.stack([value, framework.cast(xp.where(xp.isfinite(lse), lost, 0.0), dtype)])


def _unlike(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, sinks: Array | None, layout: str) -> Wrong:
    """Refuses dtypes and shapes that do not fit one another."""
    wrong: Wrong = []
    arrays = [("out_a", out_a, _FLOATS), ("out_b", out_b, _FLOATS), ("lse_a", lse_a, _OF_SUMS), ("lse_b", lse_b, _OF_SUMS)]
    if sinks is not None:
        arrays.append(("sinks", sinks, _FLOATS))
    for name, x, accepted in arrays:
        if (dtype := str(x.dtype).removeprefix("torch.")) not in accepted:
            wrong.append(refusing(ValueError, name, f"dtype {dtype}; accepted is {', '.join(accepted)}"))
    if out_a.ndim not in (3, 4):
        return [*wrong, refusing(ValueError, "out_a", f"shape {tuple(out_a.shape)}; accepted is rank 4, or rank 3 for packed sequences")]
    whole, rows = tuple(out_a.shape), tuple(out_a.shape[:-1])
    if out_a.ndim == 3 or layout == "bshd":
        rows = (*rows[:-2], rows[-1], rows[-2])
    for name, x, shapes in (("out_b", out_b, [whole]), ("lse_a", lse_a, [rows, (2, *rows)]), ("lse_b", lse_b, [rows, (2, *rows)])):
        if tuple(x.shape) not in shapes:
            either = " or ".join(map(str, shapes))
            wrong.append(refusing(ValueError, name, f"shape {tuple(x.shape)}; accepted is {either}, as out_a has shape {whole}"))
    if sinks is not None and tuple(sinks.shape) != rows[-2:-1]:
        wrong.append(
            refusing(ValueError, "sinks", f"shape {tuple(sinks.shape)}; accepted is {rows[-2:-1]}, a number for each head of out_a")
        )
    return wrong
