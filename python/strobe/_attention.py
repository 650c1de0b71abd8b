"""The functions of the package that compute."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from . import _run
from ._checks import Wrong, flag, is_array, is_integer, name_of, number, refusal
from ._graphs import outside_graphs
from ._kinds import shown
from ._options import BLOCKS, GRADIENTS, INPUTS, AttentionOptions, documentation, parameters
from ._request import Request, is_seed, parse, seed_options
from ._run import Gradients
from .arrays.base import Array, Framework
from .arrays.known import framework_like, known_framework

if TYPE_CHECKING:
    from typing_extensions import Unpack

ArrayT = TypeVar("ArrayT")


@overload
def attention(q: ArrayT, k: ArrayT, v: ArrayT, *, return_lse: Literal[False] = ..., **options: Unpack[AttentionOptions]) -> ArrayT: ...
@overload
def attention(
    q: ArrayT, k: ArrayT, v: ArrayT, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> tuple[ArrayT, ArrayT]: ...
@overload
def attention(q: ArrayT, k: ArrayT, v: ArrayT, *, return_lse: bool, **options: Unpack[AttentionOptions]) -> Any: ...
def attention(q: Any, k: Any, v: Any, *unnamed: Any, return_lse: bool = False, **options: Unpack[AttentionOptions]) -> Any:
    """Exact softmax attention: softmax(scale · q·kᵀ, as the options have it) · v, in memory linear in the sequence length.

    For torch tensors it is differentiable once, in q, k, v, bias and sinks, and through the returned lse; it works under torch.compile,
    autocast and activation checkpointing. NumPy arrays give NumPy arrays (see attention_backward for their gradients).

    With B batches, H query heads, Hkv key heads (H a multiple of Hkv: query head h reads key head h // (H / Hkv)), lengths Sq and Sk,
    head dimensions D and Dv (1 to 256):

    Args:
        q: (B, H, Sq, D); layout "bshd": (B, Sq, H, D). float32, float16, bfloat16 or float64, any strides; never copied.
        k: (B, Hkv, Sk, D) or (B, Sk, Hkv, D), q's dtype.
        v: (B, Hkv, Sk, Dv) or (B, Sk, Hkv, Dv), q's dtype.
        return_lse: return (out, lse).
        {options}

    Returns:
        out (B, H, Sq, Dv), (B, Sq, H, Dv) or (Tq, H, Dv), q's dtype; heads and sequence lie in memory in the order that q's do.
        lse, if asked for: (B, H, Sq) in either layout, or (H, Tq), float32 (float64 with float64): the natural log of the softmax's
        denominator. A query that sees no key has output 0 and lse -inf, or the sink.

    Raises:
        TypeError: an argument is of a wrong kind.
        ValueError: an argument has a wrong shape, dtype or value. Of either, the message names each wrong argument and what is accepted.
        NotImplementedError: no engine here takes the call; the message has every engine's reason. Or alibi_slopes require grad.
        MemoryError: no memory for the results or the work.

    Sources: FlashAttention (Dao et al. 2022, arXiv:2205.14135), FlashAttention-2 (Dao 2023, arXiv:2307.08691), ALiBi (Press et al. 2021,
    arXiv:2108.12409), softcap (Gemma 2, arXiv:2408.00118), sinks (gpt-oss, arXiv:2508.10925), Philox (Salmon et al. 2011).
    docs/semantics.md has the formulas.
    """
    if unnamed:
        raise TypeError(
            f"attention() takes q, k and v by their places, and {len(unnamed)} more were given; options are named, as in causal=True"
        )
    again = _run.AGAIN.get(type(q))
    if again is not None and (found := again(q, k, v, return_lse, options)) is not None:
        return found
    framework = known_framework(q)
    if framework is not None and (kinds := framework.overriding((q, k, v, *options.values()))):
        return framework.handed_over(kinds, attention, q, k, v, return_lse=return_lse, **options)
    wrong: Wrong = []
    flag(wrong, "return_lse", return_lse)
    framework, p = _prepared("attention", q, k, v, options, wrong)
    calls = _calls(framework)
    out, lse = calls.forward(p)
    calls.remember(q, k, v, return_lse, options, p)
    return (out, lse) if return_lse else out


def _calls(framework: Framework) -> _run.Calls:
    if framework.is_traced:
        from ._again import TORCH_CALLS

        return TORCH_CALLS
    return _run.Calls(framework)


def _with_options(function: Callable[..., Any]) -> None:
    """Lets help() show every option with its type, its default and what it means."""
    own = [x for x in inspect.signature(function).parameters.values() if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    function.__signature__ = inspect.Signature([*own, *parameters()])  # type: ignore[attr-defined]
    if function.__doc__ is not None:  # which python -OO leaves out
        function.__doc__ = inspect.cleandoc(function.__doc__).replace("    {options}", documentation("    "))


_with_options(attention)


def _prepared(
    function: str, q: Array, k: Array, v: Array, options: AttentionOptions, wrong: Wrong, known: dict[str, Array] | None = None
) -> tuple[Framework, Request]:
    """parse(), or the exception that tells all that is wrong. known: beside q, k and v."""
    framework, p = parse(function, q, k, v, options, wrong)
    known = known or {}
    for name, x in known.items():
        is_array(wrong, name, x, framework, q)
    if wrong or framework is None:
        raise _refusal(function, framework, p, wrong, known)
    return framework, p


def _refusal(function: str, framework: Framework | None, p: Request, wrong: Wrong, known: dict[str, Array]) -> Exception:
    """One exception of all that is wrong, the library's reasons too."""
    lines = {name_of(error): str(error) for error in wrong}
    if function.startswith("reference"):
        p.options["engine"] = _run.ORACLE
    more = {name: x for name, x in known.items() if name not in lines}
    reasons = _run.reasons_against(framework, *_judgeable(p, more, lines.keys()), "backward" in function)
    for line in reasons:
        lines.setdefault(line.partition(":")[0], line)
    if len(lines) == 1:
        return wrong[0]
    kinds_alone = len(lines) == len(wrong) and all(isinstance(error, TypeError) for error in wrong)
    return (TypeError if kinds_alone else ValueError)("\n".join(lines.values()))


def _judgeable(p: Request, known: dict[str, Array], wrong: Set[str]) -> tuple[Request, dict[str, Array]]:
    """The call without what is wrong already, and without what only that could be held against."""
    arrays = {name: x for name, x in p.arrays.items() if name not in wrong}
    options = {name: x for name, x in p.options.items() if name not in wrong}
    of_scores = {"mask", "bias", *BLOCKS, "block_q", "block_k"}
    withheld: set[str] = set()
    if "layout" in wrong:
        withheld = {"q", "k", "v"}
    if wrong & {"cu_seqlens_q", "cu_seqlens_k"}:
        withheld = {*INPUTS, "max_seqlen_q", "max_seqlen_k", "block_q", "block_k"}
        known = {}
    elif wrong & {"max_seqlen_q", "max_seqlen_k"}:
        withheld |= of_scores
    if "block_mask" in wrong:
        withheld |= {*BLOCKS, "block_q", "block_k"}
    if "score" in wrong:
        withheld |= {"beta", "shift"}
    left = Request(*({name: x for name, x in given.items() if name not in withheld} for given in (arrays, options)))
    return left, known


def _repeat(
    function: str, q: Array, k: Array, v: Array, options: AttentionOptions, wrong: Wrong, known: dict[str, Array]
) -> tuple[Framework, Request]:
    """A call that has to apply the dropout mask of another."""
    if options.get("dropout") and options.get("rng") is None and options.get("seed") is None:
        wrong.append(ValueError("rng: missing beside dropout; accepted is the rng, or the seed and offset, of the forward"))
    return _prepared(function, q, k, v, options, wrong, known)


def attention_backward(
    dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, *, dlse: Array | None = None, **options: Unpack[AttentionOptions]
) -> Gradients:
    """The gradients of attention, for who does without autograd.

    Args:
        dout: the gradient of out, out's shape, q's dtype; any strides, 0 included.
        q, k, v, options: those of attention(); with dropout also its seed and offset, or rng. Autocast casts nothing here: what attention()
            was given under it is to be cast as it was there, to out's dtype.
        out, lse: what it returned.
        dlse: the gradient of lse, lse's shape and dtype; None: lse was not used.

    Returns:
        Gradients(dq, dk, dv, dbias, dsinks) of the shapes and dtypes of q, k, v, bias and sinks; None for what was not given.

    Raises:
        As attention().
    """
    known = {"dout": dout, "out": out, "lse": lse} | ({} if dlse is None else {"dlse": dlse})
    framework, p = _repeat("attention_backward", q, k, v, options, [], known)
    needed = [name for name, of in GRADIENTS.items() if of in p.arrays]
    return Gradients(**_calls(framework).backward(p, dout, dlse, out, lse, needed))


@outside_graphs
def reference(
    q: Array, k: Array, v: Array, *, rows: Iterable[int] | None = None, **options: Unpack[AttentionOptions]
) -> tuple[Array, Array]:
    """attention() by the formulas in float64, on the CPU, row by row: what every engine is tested against. Slow; not differentiable.

    Args:
        q, k, v, options: as attention().
        rows: only these queries, counted flat over (B, H, Sq), or (H, Tq) of packed sequences, ascending. The rest is NaN.

    Returns:
        out, lse: shapes of attention()'s, float64.

    Raises:
        As attention().
    """
    wrong: Wrong = []
    chosen = _chosen(wrong, "rows", rows)
    framework, p = _prepared("reference", q, k, v, options, wrong)
    return _run.reference(framework, p, chosen)


def _chosen(wrong: Wrong, name: str, given: Any) -> list[int] | None:
    """Of rows or columns, counted flat."""
    indices = given
    if indices is None:
        return None
    framework = known_framework(indices)
    if framework is not None:
        if (refused := framework.unfit(name, indices) or framework.without_values(name, indices)) is not None:
            wrong.append(refused)
            return None
        indices = framework.on_host(indices).tolist() if indices.ndim == 1 else None
    if isinstance(indices, Iterable) and not isinstance(indices, (str, bytes)):
        return [int(i) for i in indices if is_integer(wrong, name, i, 0, 2**63 - 1)]
    wrong.append(TypeError(f"{name}: {shown(given)}; accepted are several integers, along one axis"))
    return None


@outside_graphs
def reference_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None = None,
    lse: Array | None = None,
    *,
    dlse: Array | None = None,
    rows: Iterable[int] | None = None,
    cols: Iterable[int] | None = None,
    **options: Unpack[AttentionOptions],
) -> Gradients:
    """The gradients of reference(), in float64 likewise.

    Args:
        dout, dlse: gradients of out and lse; any float dtype.
        q, k, v, options: as attention_backward().
        out, lse: what reference() returned; only to save time where few `cols` are asked for.
        rows: only these rows of dq, counted as in reference(). The rest is NaN, and dbias and dsinks, sums over all rows, are None.
        cols: only these rows of dk and dv, counted flat over (B, Hkv, Sk), or (Hkv, Tk), ascending. The rest is NaN.

    Returns:
        Gradients(dq, dk, dv, dbias, dsinks), float64.

    Raises:
        As attention().
    """
    given = {"dout": dout, "out": out, "lse": lse, "dlse": dlse}
    known = {name: x for name, x in given.items() if x is not None or name == "dout"}
    wrong: Wrong = []
    chosen = _chosen(wrong, "rows", rows), _chosen(wrong, "cols", cols)
    framework, p = _repeat("reference_backward", q, k, v, options, wrong, known)
    return _run.reference_backward(framework, p, known, *chosen)


@outside_graphs
def explain(q: Array, k: Array, v: Array, *, backward: bool = False, **options: Unpack[AttentionOptions]) -> str:
    """What attention(), or its backward, would run for this call: each engine's plan or reason against, the choice, what was rounded.

    Nothing is computed. Arguments and errors as attention()'s, but that no engine takes the call is an answer here.
    """
    framework, p = _prepared("explain", q, k, v, options, [])
    return _run.explain(framework, p, backward)


@outside_graphs
def dropout_mask(
    shape: tuple[int, int, int, int],
    dropout: float,
    seed: int | None = None,
    offset: int | None = None,
    *,
    rng: Array | None = None,
    like: Array | None = None,
) -> Array:
    """The dropout mask that attention() applies, the same for every engine, tile and device.

    Args:
        shape: (B, H, Sq, Sk); for packed sequences B counts them, and Sq and Sk are at least the longest.
        dropout, seed, offset, rng: those of attention(); rng on the CPU, and in place of seed and offset.
        like: an array of the kind to return, unless rng is one.

    Returns:
        bool, True = kept, on the CPU. Without rng and like a torch.Tensor if the program has imported torch, else a numpy.ndarray.

    Raises:
        TypeError, ValueError: an argument is not what is said above.
    """
    wrong: Wrong = []
    several = isinstance(shape, Sequence) and not isinstance(shape, (str, bytes))
    sizes = [size for size in shape if is_integer(wrong, "shape", size, 0, 2**63 - 1)] if several else []
    if not wrong and len(sizes) != 4:
        wrong.append((ValueError if several else TypeError)(f"shape: {shown(shape)}; accepted is (B, H, Sq, Sk)"))
    share = number(wrong, "dropout", dropout)
    for name, x in (("seed", seed), ("offset", offset)):
        if x is not None:
            is_seed(wrong, name, x)
    if seed is None and rng is None:
        wrong.append(ValueError("seed: missing; accepted is seed (and offset), or rng"))
    elif rng is not None and (seed is not None or offset is not None):
        wrong.append(ValueError("rng: given beside seed or offset; accepted is one of the two"))
    if rng is not None and like is not None:
        wrong.append(ValueError("like: given beside rng; accepted is one of the two: an array of rng's kind is returned"))
    for name, x in (("rng", rng), ("like", like)):
        if x is not None:
            is_array(wrong, name, x, None, None)
    if wrong:
        raise refusal(wrong)
    framework = framework_like(like if rng is None else rng)
    return _run.dropout_mask(framework, tuple(sizes), {"dropout": share, **seed_options(seed, offset)}, rng)
