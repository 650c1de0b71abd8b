"""Hyperbolic attention, and its space of curvature -1: the models and the maps between them. docs/hyperbolic.md has the formulas.

Points lie along the last axis of torch tensors or NumPy arrays. They have n + 1 Lorentz coordinates on the upper sheet of the hyperboloid,
with the time-like one first, or n coordinates inside the unit ball, in Poincaré's or in Klein's model. With torch tensors the functions are
differentiable. float16 and bfloat16 are computed in float32 and rounded once; float32 and float64 are taken as they are, and other dtypes
are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

from ._attention import attention
from ._checks import Wrong, check_names, flag, is_choice, is_integer, number, refusal
from ._messages import is_bool, shown
from ._options import DEFAULTS, ELSEWHERE, MAX_HEAD_DIM, MAX_HEAD_DIM_V
from ._parse import parse, without_causal_bias
from ._part import Part
from ._refusals import arguments_of, refusing
from .arrays.base import Array, Framework
from .arrays.known import framework_of, known_framework, unfit

__all__ = [
    "centroid",
    "distance",
    "exp_map",
    "hyperbolic_attention",
    "klein_to_lorentz",
    "klein_to_poincare",
    "lift",
    "lorentz_product",
    "lorentz_to_klein",
    "lorentz_to_poincare",
    "poincare_to_klein",
    "poincare_to_lorentz",
]
_EPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
_FIXED = ("score", "shift", "scale", "softcap")  # options of attention() that the distance determines
_NAMES = ("c", "model", "aggregate", "return_lse", *(name for name in DEFAULTS if name not in _FIXED))
_HINTS = ELSEWHERE | dict.fromkeys(("softmax_scale", "sm_scale"), "did you mean beta?")
_HINTS |= {"score_mod": "a function is refused; there are alibi_slopes and bias"}
_HINTS |= {"aux": "max_logit and column_sums are results of attention() alone"}
_WEIGH = "midpoints weigh v in each call"


def __dir__() -> list[str]:
    return __all__


def hyperbolic_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    beta: float = 1.0,
    c: float = 0.0,
    model: str = "lorentz",
    aggregate: str = "centroid",
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Attention between points of hyperbolic space.

    It is the mean of the points v, weighted by the softmax over keys of -beta · distance(q, k) - c.

    Shapes, options and errors are those of attention(), and the same kernels compute the distance and its derivative. q, k and v are points
    along the last axis. With torch tensors, the result is differentiable in q, k and v; beta and c have no gradient. float16 and bfloat16
    round the coordinates of a point. The farther out two points lie, and the nearer they are to one another, the more their distance
    suffers from that; docs/hyperbolic.md says by how much.

    Args:
        q: (B, H, Sq, n + 1), or (B, H, Sq, n) with model "poincare", where n <= 575. layout and packed sequences work as in attention().
        k: points of the same width as q's.
        v: points of any width up to 512, with model "poincare" up to 511.
        beta: how fast attention falls with distance; > 0.
        c: a constant. The returned lse includes it. In the softmax it cancels, unless there are sinks.
        model: of q, k, v and the output. "lorentz": points of the hyperboloid, with the time-like coordinate first. "poincare": points
            inside the unit ball.
        aggregate: "centroid": the Lorentz centroid Σ P v / |Σ P v|. "midpoint": the Einstein midpoint, whose weights P γ(v) act as a bias
            on the keys, which lse includes. Up to rounding and dropout the two are the same point; the centroid costs less.
        options: those of attention() except score, shift, softcap, scale, the scales of q, k and v, and out_dtype. A part is not
            partial, and with aggregate "midpoint" it has all keys. check=True also checks every point of q, k and v, hidden ones
            included, and refuses vectors that are no points of the model; it reads all three and waits for a GPU. Without it, other
            vectors (points of the other model, or outside the ball) give numbers without a meaning.

    Returns:
        out: points with q's leading axes and v's width. A query that sees no key gets the origin.
        lse, if return_lse: as attention() returns it.

    Sources: Gulcehre et al. 2019, Hyperbolic Attention Networks (arXiv:1805.09786); the centroid: Law et al. 2019, Lorentzian Distance
    Learning for Hyperbolic Representations.
    """
    points = {"q": q, "k": k, "v": v}
    options, wrong = _translated(model, aggregate, return_lse, beta, c, options)
    refused = arguments_of(wrong)  # a refused value may be an array, which must not be compared
    poincare = "model" not in refused and model == "poincare"
    midpoint = "aggregate" not in refused and aggregate == "midpoint"
    framework = known_framework(q)
    if framework is None or not all(_may_be_points(framework, name, x, q) for name, x in points.items()):
        _refuse(q, k, v, options, wrong)
    if midpoint and options.get("page_table") is not None:
        wrong.append(refusing(ValueError, "page_table", "given with aggregate 'midpoint'; accepted is 'centroid', for " + _WEIGH))
    options = dict(without_causal_bias(framework, q, k, options, wrong))
    for name, x in points.items():
        most = (MAX_HEAD_DIM_V if name == "v" else MAX_HEAD_DIM) - 1  # a point has one more on the hyperboloid
        if poincare and x.shape[-1] > most:
            wrong.append(refusing(ValueError, name, f"{x.shape[-1]} coordinates; accepted with model 'poincare' are 1 to {most}"))
    if wrong:
        _refuse(q, k, v, options, wrong)
    if is_bool(check := options.get("check")) and check:
        wrong = [reason for name, x in points.items() if (reason := _no_points(name, x, model))]
        if wrong:
            raise refusal(wrong)
    if poincare:
        q, k, v = poincare_to_lorentz(q), poincare_to_lorentz(k), poincare_to_lorentz(v)
    if midpoint:
        options["bias"] = _with_log_gamma(framework, q, k, v, options)
        v = _mapped(lambda xp, x: x / x[..., :1], v)
    out, lse = attention(_time_reversed(framework, q), k, v, return_lse=True, **options)
    out = centroid(out)
    if poincare:
        out = lorentz_to_poincare(out)
    return (out, lse) if return_lse else out


def _translated(
    model: object, aggregate: object, return_lse: object, beta: object, c: object, options: dict[str, Any]
) -> tuple[dict[str, Any], Wrong]:
    """The options of attention(), and the errors of those that can be judged without the points."""
    wrong: Wrong = []
    for name, choice, choices in (("model", model, ("lorentz", "poincare")), ("aggregate", aggregate, ("centroid", "midpoint"))):
        is_choice(wrong, name, choice, choices)
    flag(wrong, "return_lse", return_lse)
    refused: Wrong = []
    shift = number(refused, "c", c)
    if refused or not math.isfinite(shift):
        wrong.append(refusing(ValueError, "c", f"{shown(c)}; accepted is a finite number"))
        shift = 0.0
    for name in _FIXED:
        if (x := options.pop(name, None)) is not None:
            wrong.append(refusing(ValueError, name, f"{shown(x)}; accepted is none: the score is the distance's"))
    check_names("hyperbolic_attention", options, wrong, _NAMES, _HINTS)
    options = {**{name: x for name, x in options.items() if name in _NAMES}, "score": "hyperbolic", "beta": beta, "shift": shift}
    scaled = [name for name in ("q_scale", "k_scale", "v_scale") if options.get(name) is not None]
    wrong += [refusing(ValueError, name, "given; accepted is None, for quantised points lie beside the hyperboloid") for name in scaled]
    if scaled:
        raise refusal(wrong)  # k and v are no points, so that nothing else can be checked on them
    if isinstance(part := options.get("part"), Part):
        if part.partial:
            wrong.append(refusing(ValueError, "part", "partial=True; accepted is partial=False, for strobe.merge() does not add up points"))
        elif isinstance(aggregate, str) and aggregate == "midpoint" and not _has_all_keys(part):
            wrong.append(
                refusing(
                    ValueError, "part", "of fewer keys than there are, with aggregate 'midpoint'; accepted is 'centroid', for " + _WEIGH
                )
            )
    return options, wrong


def _refuse(q: Array, k: Array, v: Array, options: Any, wrong: Wrong) -> NoReturn:
    """Raises the errors found and those that attention() adds."""
    if wrong:
        parse("hyperbolic_attention", q, k, v, options, wrong)
    attention(q, k, v, **options)
    raise ValueError(f"q, k, v: {', '.join(_dtype(x) for x in (q, k, v))}; accepted are points, of {', '.join(_EPS)}")


def _has_all_keys(part: Part) -> bool:
    """Whether the part has every key of the whole sequences."""
    held = [sum(length for _, length in ranges) for ranges in part.k_ranges]
    lengths = part.seqlens_k
    return all(n >= length for n, length in zip(held * len(lengths), lengths * len(held), strict=True))  # one entry may stand for all


def _may_be_points(framework: Framework, name: str, x: Array, q: Array) -> bool:
    return unfit(name, x, framework, "q", q) is None and _dtype(x) in _EPS and x.ndim > 0 and x.shape[-1] > 0


def _no_points(name: str, x: Array, model: str) -> Exception | None:
    """The reason why x's vectors are no points of the model. Rounding is tolerated: 8 ulps of the largest square for the rounding of a
    coordinate to x's dtype, and one ulp for each term of a sum."""
    framework = framework_of(name, x)
    if (refused := framework.without_values(name, x)) is not None:
        return refused
    exact = _at_least_float32(framework, framework.constant(x))
    if model == "poincare":
        square = _square(exact)[..., 0]
        good = square < 1
    else:
        square = lorentz_product(exact, exact)
        within = (8 * _eps(x) + x.shape[-1] * _eps(exact)) * exact[..., 0] ** 2
        good = (exact[..., 0] > 0) & (abs(square + 1) <= within)
    if bool(good.all()):
        return None
    place = tuple(int(axis[0]) for axis in framework.xp.where(~good))
    found = float(square[place])
    if model == "poincare":
        return refusing(
            ValueError, name, f"|p|² = {found:g} at {[*place]}; accepted with model 'poincare' are points of the unit ball, |p| < 1"
        )
    time = float(exact[..., 0][place])
    hint = "; points of the ball are model='poincare'" if bool((_square(exact) < 1).all()) else ""
    return refusing(
        ValueError,
        name,
        f"<x, x> = {found:g} and x0 = {time:g} at {[*place]}; accepted with model 'lorentz' are <x, x> = -1 and x0 > 0{hint}",
    )


def _time_reversed(framework: Framework, x: Array) -> Array:
    """x with the time-like coordinate negated, so that its dot product with a point is the Lorentz product."""
    signs = framework.empty(x, x.shape[-1:], x.dtype)
    signs[:] = 1
    signs[:1] = -1
    return x * signs


def _with_log_gamma(framework: Framework, q: Array, k: Array, v: Array, options: dict[str, Any]) -> Array | None:
    """The sum of the bias and the logarithm of v's Lorentz factors, which are v's time-like coordinates. Only the bias if v has no
    elements, or if v, the bias or the sequences do not fit, which attention() reports."""
    xp: Any = framework.xp
    bias, cu_seqlens = options.get("bias"), options.get("cu_seqlens_k")
    heads_axis = 2 if cu_seqlens is None and options.get("layout") == "bshd" else 1
    if v.ndim != (4 if cu_seqlens is None else 3) or not v.shape[0] or q.ndim != v.ndim or k.shape[:-1] != v.shape[:-1]:
        return bias
    if not v.shape[heads_axis] or q.shape[heads_axis] % v.shape[heads_axis]:
        return bias
    if cu_seqlens is None:
        if q.shape[0] != v.shape[0]:
            return bias
    else:
        array = unfit("cu_seqlens_k", cu_seqlens, framework, "q", q) is None
        sequences = array and cu_seqlens.ndim == 1 and cu_seqlens.dtype in (xp.int32, xp.int64)
        if not (sequences and is_integer([], "max_seqlen_k", options.get("max_seqlen_k") or 0, 0, 2**31 - 1)):
            return bias
        tied = any(options.get(name) is not None for name in ("max_seqlen_k", "mask", "bias", "block_mask"))  # these fix Sk
        if not tied and framework.is_readable(cu_seqlens) and cu_seqlens.shape[0] > 1:
            options["max_seqlen_k"] = min(max(int((cu_seqlens[1:] - cu_seqlens[:-1]).max()), 1), 2**31 - 1)
    gamma = xp.log(_at_least_float32(framework, v)[..., 0])
    if heads_axis == 2:
        gamma = gamma.swapaxes(1, 2)
    if cu_seqlens is not None:  # (Tk, Hkv) -> (B, Hkv, max_seqlen_k)
        longest = options.get("max_seqlen_k")
        token = cu_seqlens[:-1, None] + framework.arange(v.shape[0] if longest is None else longest, cu_seqlens)
        gamma = gamma[xp.where(token < v.shape[0], token, 0)].swapaxes(1, 2)
    if gamma.shape[1] > 1:
        gamma = framework.repeat(gamma, q.shape[heads_axis] // gamma.shape[1], 1)
    gamma = gamma[:, :, None, :]
    if bias is None:
        return gamma
    fits = unfit("bias", bias, framework, "q", q) is None and _dtype(bias) in _EPS and bias.ndim <= gamma.ndim
    fits = fits and all(1 in pair or pair[0] == pair[1] for pair in zip(reversed(bias.shape), reversed(gamma.shape), strict=False))
    return bias + gamma if fits else bias


def lift(x: Array) -> Array:
    """The point of the hyperboloid above x: (sqrt(1 + |x|²), x)."""
    return _mapped(_lift, x)


def exp_map(x: Array) -> Array:
    """The point at distance |x| from the origin, in direction x (..., n): the exponential map there, (cosh |x|, sinh |x| x / |x|)."""

    def formula(xp: Any, x: Array) -> Array:
        square = _square(x)
        near = square == 0
        r = xp.sqrt(xp.where(near, 1.0, square))
        return _lift(xp, x * xp.where(near, 1.0, xp.sinh(r) / r))

    return _mapped(formula, x)


def poincare_to_lorentz(x: Array) -> Array:
    """(1 + |x|², 2x) / (1 - |x|²)"""
    return _mapped(lambda xp, x: _joined(xp, 1 + _square(x), 2 * x) / (1 - _square(x)), x)


def lorentz_to_poincare(x: Array) -> Array:
    """(x1 ... xn) / (1 + x0)"""
    return _mapped(lambda xp, x: x[..., 1:] / (1 + x[..., :1]), x, least=1)


def klein_to_lorentz(x: Array) -> Array:
    """gamma (1, x), where gamma = 1 / sqrt(1 - |x|²) is the Lorentz factor"""
    return _mapped(lambda xp, x: _joined(xp, xp.ones_like(x[..., :1]), x) / xp.sqrt(1 - _square(x)), x)


def lorentz_to_klein(x: Array) -> Array:
    """(x1 ... xn) / x0"""
    return _mapped(lambda xp, x: x[..., 1:] / x[..., :1], x, least=1)


def poincare_to_klein(x: Array) -> Array:
    """2x / (1 + |x|²)"""
    return _mapped(lambda xp, x: 2 * x / (1 + _square(x)), x)


def klein_to_poincare(x: Array) -> Array:
    """x / (1 + sqrt(1 - |x|²))"""
    return _mapped(lambda xp, x: x / (1 + xp.sqrt(1 - _square(x))), x)


def lorentz_product(x: Array, y: Array) -> Array:
    """-x0 y0 + x1 y1 + ... + xn yn over the last axis. The other axes broadcast. The result has the wider of the two dtypes."""
    return _mapped(_product, x, y, least=1)


def distance(x: Array, y: Array) -> Array:
    """arccosh(max(-<x, y>_L, 1)) of points in Lorentz coordinates, shaped as in lorentz_product(). Where it is 0, its gradient is 0 too."""

    def formula(xp: Any, x: Array, y: Array) -> Array:
        t = -_product(xp, x, y) - 1
        together = t <= 0
        t = xp.where(together, 1.0, t)
        return xp.where(together, 0.0, xp.log1p(t + xp.sqrt(t * (t + 2))))

    return _mapped(formula, x, y, least=1)


def centroid(x: Array) -> Array:
    """x / sqrt(-<x, x>_L), where x is a weighted sum of points in Lorentz coordinates, or any multiple of such a sum.

    This is the point of least mean squared Lorentz distance (Law et al. 2019), and Einstein's midpoint. An empty sum gives the origin,
    (1, 0, ..., 0), with gradient 0. If -<x, x>_L lies below eps x0², which is farther out than rounding can tell, the result is drawn in to
    that distance.
    """

    def formula(xp: Any, exact: Array) -> Array:
        nothing = exact[..., :1] == 0
        space = exact[..., 1:] / xp.where(nothing, 1.0, exact[..., :1])
        left, eps = 1 - _square(space), _eps(x)
        return _lift(xp, space / xp.sqrt(xp.where(left < eps, eps, left)))

    return _mapped(formula, x, least=1)


def _dtype(x: Array) -> str:
    return str(x.dtype).removeprefix("torch.")


def _eps(x: Array) -> float:
    return _EPS[_dtype(x)]


def _square(x: Array) -> Array:
    return (x * x).sum(-1)[..., None]


def _product(xp: Any, x: Array, y: Array) -> Array:
    return (x[..., 1:] * y[..., 1:]).sum(-1) - x[..., 0] * y[..., 0]


def _joined(xp: Any, time: Array, space: Array) -> Array:
    return xp.concatenate((time, space), axis=-1)


def _lift(xp: Any, x: Array) -> Array:
    return _joined(xp, xp.sqrt(1 + _square(x)), x)


def _mapped(formula: Callable[..., Array], x: Array, *second: Array, least: int = 0) -> Array:
    """formula(torch or numpy, x), or formula(…, x, y), rounded to the dtype of x, or to the one to which the dtypes of x and y promote.
    least: the least number of coordinates, the time-like one included."""
    framework = _framework_of_points("x", x)
    xp: Any = framework.xp
    if x.shape[-1] < least:
        raise refusing(ValueError, "x", f"{x.shape[-1]} coordinates; accepted is {least} or more")
    if not second:
        return framework.cast(formula(xp, _at_least_float32(framework, x)), x.dtype)
    (y,) = second
    if (refused := unfit("y", y, framework, "x", x)) is not None:
        raise refused
    _framework_of_points("y", y)
    if y.shape[-1] != x.shape[-1]:
        raise refusing(ValueError, "y", f"{y.shape[-1]} coordinates; accepted are {x.shape[-1]}, as x has")
    if any(1 not in pair and pair[0] != pair[1] for pair in zip(reversed(x.shape), reversed(y.shape), strict=False)):
        raise refusing(ValueError, "y", f"shape {tuple(y.shape)}; accepted is one that broadcasts with x's, {tuple(x.shape)}")
    return framework.cast(formula(xp, _at_least_float32(framework, x), _at_least_float32(framework, y)), xp.promote_types(x.dtype, y.dtype))


def _framework_of_points(name: str, x: Array) -> Framework:
    """x's framework; x's last axis must hold points."""
    framework = framework_of(name, x)
    if _dtype(x) not in _EPS:
        raise refusing(ValueError, name, f"dtype {_dtype(x)}; accepted is {', '.join(_EPS)}")
    if x.ndim == 0:
        raise refusing(ValueError, name, "a number; accepted are points, along the last axis")
    return framework


def _at_least_float32(framework: Framework, x: Array) -> Array:
    return framework.cast(x, framework.xp.float32) if x.dtype.itemsize < 4 else x
