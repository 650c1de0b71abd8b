"""The computing functions of the package."""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from ._abi import OPERATIONS, graph_break, is_traced_by_dynamo, outside_graphs
from ._call import BEFORE_PARSING, Call, Gradients, GradientsWithCaptured, drawn_mask, imported_late
from ._checks import Wrong, flag, is_array, is_choice, is_integer, number, of_generator, refusal
from ._function import in_options
from ._messages import is_bool, shown
from ._options import AUX, TANGENTS, AttentionOptions, documentation, parameters
from ._parse import is_seed, parse, parse_aux, seed_options
from ._part import Part
from ._refusals import Hint, Name, raised_for, refusals_of, refusing
from .arrays.base import Array, Framework
from .arrays.known import framework_like, known_framework

if TYPE_CHECKING:
    from typing_extensions import Unpack

ArrayT = TypeVar("ArrayT")

OUTSIDE = "{}: functions of the score and the mask are recorded outside of the graph"

# The contexts of strobe.distributed.context_parallel() that the process is in; the innermost is last.
CONTEXTS: list[Any] = []


@overload
def attention(q: ArrayT, k: ArrayT, v: ArrayT, *, return_lse: Literal[False] = ..., **options: Unpack[AttentionOptions]) -> ArrayT: ...
@overload
def attention(
    q: ArrayT, k: ArrayT, v: ArrayT, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> tuple[ArrayT, ArrayT]: ...
@overload
def attention(
    q: ArrayT, k: ArrayT, v: ArrayT, *, return_lse: bool = ..., aux: Sequence[str] = ..., **options: Unpack[AttentionOptions]
) -> Any: ...
def attention(
    q: Any, k: Any, v: Any, *unnamed: Any, return_lse: bool = False, aux: Sequence[str] = (), **options: Unpack[AttentionOptions]
) -> Any:
    """Exact softmax attention, softmax(scale · q·kᵀ) · v with the options below, in memory linear in the sequence length.

    With torch tensors, the result is differentiable in q, k, v, bias, sinks and what a function of the score reads, and so is the
    returned lse: twice, and in forward mode, on CPUs, once on GPUs. torch.compile, autocast and activation checkpointing work. NumPy arrays
    give NumPy arrays; attention_backward() computes their gradients.

    B is the number of batches, H that of query heads and Hkv that of key heads. H is a multiple of Hkv: query head h reads key head
    h // (H / Hkv). Sq and Sk are the lengths. The head dimensions are 1 to 576 for D, 1 to 512 for Dv.

    Args:
        q: (B, H, Sq, D), or (B, Sq, H, D) with layout "bshd"; float32, float16, bfloat16 or float64, or float8_e4m3fn with q_scale. Any
            strides are read in place.
        k: (B, Hkv, Sk, D) or (B, Sk, Hkv, D), in q's dtype, or quantised, with k_scale.
        v: (B, Hkv, Sk, Dv) or (B, Sk, Hkv, Dv), in k's dtype.
        return_lse: True returns (out, lse).
        aux: names of further results: "max_logit", "column_sums" or both. A named tuple is then returned: out, lse if asked for, and
            these in the order of their names. They have no gradient, and take another pass over the scores; explain() says how long.
        {options}

    Returns:
        out: (B, H, Sq, Dv), (B, Sq, H, Dv) or (Tq, H, Dv), in q's dtype, or with q_scale in out_dtype. Its heads and its sequence lie in
            memory in the same order as q's.
        lse, if asked for: (B, H, Sq) in either layout, or (H, Tq); float32, or float64 if q is. It is the natural logarithm of the
        softmax's denominator. A query that sees no key has the output 0, and its lse is -inf or the sink.
        max_logit, if asked for: (B, H), of packed sequences one row each, in lse's dtype. The largest score of a head after bias and
        masks; -inf where no key is visible. Sinks do not count.
        column_sums, if asked for: (B, H, Sk) in either layout, or (H, Tk), in lse's dtype. The sum, over the queries of a head, of the
        weights that they give to a key, before dropout.

    Raises:
        TypeError: an argument has a wrong type. The message names each wrong argument and what is accepted.
        ValueError: an argument has a wrong shape, dtype or value. The message names each wrong argument and what is accepted.
        NotImplementedError: no engine here takes the call; the message has every engine's reason. Or alibi_slopes require a gradient.
        MemoryError: there is no memory for the results or the work.
        RuntimeError: the call is inside strobe.distributed.context_parallel(), where strobe.distributed.attention() is accepted.

    Sources: FlashAttention (Dao et al. 2022, arXiv:2205.14135), FlashAttention-2 (Dao 2023, arXiv:2307.08691), ALiBi (Press et al. 2021,
    arXiv:2108.12409), softcap (Gemma 2, arXiv:2408.00118), sinks (gpt-oss, arXiv:2508.10925), Philox (Salmon et al. 2011).
    docs/semantics.md has the formulas.
    """
    if unnamed:
        raise TypeError(
            f"attention() takes q, k and v by their places, and {len(unnamed)} more were given; options are named, as in causal=True"
        )
    if CONTEXTS:
        raise _of_shards("attention")
    plain = isinstance(aux, tuple) and not aux
    before_parsing = BEFORE_PARSING.get(type(q)) if plain else None
    if plain and before_parsing is None and (late := imported_late(type(q))) is not None:
        before_parsing = late()
    if before_parsing is not None and (found := before_parsing(q, k, v, return_lse, options)) is not None:
        return found
    framework = known_framework(q)
    lifted = is_traced_by_dynamo() and in_options(options)
    if lifted:
        from . import _compiled

        if _compiled.OPERATOR is None or framework is None or not framework.is_traced:
            graph_break(OUTSIDE.format("strobe.attention") + "; PyTorch 2.11 and later keep those of tensors in it")
            return attention_with_functions(q, k, v, return_lse=return_lse, aux=aux, **options)
    if framework is not None and (kinds := framework.overriding((q, k, v, *options.values()))):
        more = {} if plain else {"aux": aux}
        return framework.handed_over(kinds, attention, q, k, v, return_lse=return_lse, **more, **options)
    wrong: Wrong = []
    flag(wrong, "return_lse", return_lse)
    names = parse_aux(wrong, aux)
    call = parse("attention", q, k, v, options, wrong, aux=names)
    if not call.framework.is_traced:
        return _returned(call.forward(), return_lse, names)
    if lifted:
        return _returned(_compiled.forward(call), return_lse, names)
    from . import _autograd, _prepared

    results = _autograd.forward(call)
    if plain:
        _prepared.remember(call, q, k, v, return_lse, options)
    return _returned(results, return_lse, names)


def _of_shards(function: str) -> RuntimeError:
    return RuntimeError(f"{function}() inside context_parallel(): the tensors are shards; accepted is strobe.distributed.attention")


@outside_graphs
def attention_with_functions(*args: Any, **kwargs: Any) -> Any:
    """attention(), which records functions of the score and the mask outside of the graph that is compiled."""
    return attention(*args, **kwargs)


# attention()'s named tuples, by the results after out.
_NAMED: dict[tuple[str, ...], Callable[..., Any]] = {
    (*lse, *aux): namedtuple("Attention", ("out", *lse, *aux))
    for count in range(1, len(AUX) + 1)
    for aux in permutations(AUX, count)
    for lse in ((), ("lse",))
}
for _tuple in _NAMED.values():  # so that pickle finds them
    _tuple.__qualname__ = "_".join(("Attention", *_tuple._fields))  # type: ignore[attr-defined]
    globals()[_tuple.__qualname__] = _tuple


def _returned(found: tuple[Array, ...], return_lse: bool, aux: tuple[str, ...]) -> Any:
    """The return value of attention(), from out, lse and the results named by aux."""
    out, lse, *more = found
    if not aux:
        return (out, lse) if return_lse else out
    names = ("lse", *aux) if return_lse else aux
    return _NAMED[names](out, lse, *more) if return_lse else _NAMED[names](out, *more)


def _with_options(function: Callable[..., Any]) -> None:
    """Lets help() show every option with its type, its default and its meaning."""
    own = [x for x in inspect.signature(function).parameters.values() if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)]
    function.__signature__ = inspect.Signature([*own, *parameters()])  # type: ignore[attr-defined]
    if function.__doc__ is not None:  # python -OO leaves docstrings out
        function.__doc__ = inspect.cleandoc(function.__doc__).replace("    {options}", documentation("    "))


_with_options(attention)


def _parse_again(function: str, q: Array, k: Array, v: Array, options: AttentionOptions, wrong: Wrong, known: dict[str, Array]) -> Call:
    """parse(), for a call that must apply the dropout mask of an earlier call."""
    if options.get("dropout") and options.get("rng") is None and options.get("seed") is None:
        wrong.append(refusing(ValueError, "rng", "missing beside dropout; accepted is the rng, or the seed and offset, of the forward"))
    return parse(function, q, k, v, options, wrong, known=known)


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array | None,
    lse: Array,
    *,
    dlse: Array | None = None,
    delta: Array | None = None,
    dq: Array | None = None,
    dk: Array | None = None,
    dv: Array | None = None,
    accumulate: bool = False,
    captured: Sequence[Array] = (),
    **options: Unpack[AttentionOptions],
) -> Any:
    """The gradients of attention(), for callers without autograd.

    With a partial part, lse and delta are those of the whole rows: the lse that merge() made of all parts, and the sum of dout · out of the
    whole rows' out. The gradients of several such calls are to be added up.

    Args:
        dout: the gradient of out, in out's shape and q's dtype. Strides are arbitrary and may be 0.
        q, k, v, options: those of attention() except return_lse and aux, and with dropout also its seed and offset, or its rng. Autocast
            casts nothing here: tensors that attention() got under autocast must first be cast to out's dtype.
        out, lse: the results of attention(). With a partial part, out is None, and lse is that of the whole rows, as two
            numbers.
        dlse: the gradient of lse, (B, H, Sq) or (H, Tq), in lse's dtype. None means that lse was not used.
        delta: with a partial part (dout · out).sum(-1) of the whole rows, in the shape of dlse and lse's dtype; otherwise None.
        dq, dk, dv: with accumulate, the float32 arrays (float64 if q is) to which the gradients are added, in the shapes of q, k and v.
            One that is None is not computed.
        accumulate: adds the gradients to dq, dk and dv. Autograd does not differentiate this: a leaf that requires a gradient, or a view of
            one, is refused, except under torch.no_grad(). dbias, dsinks and dcaptured are new arrays.
        captured: arrays whose gradients are wanted as well: float arrays that the function of the score reads, the same objects.

    Returns:
        Gradients(dq, dk, dv, dbias, dsinks), in the shapes and dtypes of q, k, v, bias and sinks; dq, dk and dv of a partial part in
        float32. dbias and dsinks are None without bias and sinks. With accumulate, dq, dk and dv are the given arrays. With captured,
        GradientsWithCaptured, which also has dcaptured: a tuple with the gradient of each, in its shape and dtype.

    Raises:
        The errors of attention().
    """
    if CONTEXTS:
        raise _of_shards("attention_backward")
    if is_traced_by_dynamo() and in_options(options):
        graph_break(OUTSIDE.format("strobe.attention_backward"))
        more: Any = {"dlse": dlse, "delta": delta, "dq": dq, "dk": dk, "dv": dv, "accumulate": accumulate, "captured": captured}
        found_outside: Gradients = outside_graphs(attention_backward)(dout, q, k, v, out, lse, **more, **options)
        return found_outside
    wrong: Wrong = []
    known = _of_rows(wrong, dout, out, lse, dlse, delta, options)
    into = {name: x for name, x in (("dq", dq), ("dk", dk), ("dv", dv)) if x is not None}
    if flag(wrong, "accumulate", accumulate) and not into:
        wrong.append(refusing(ValueError, "accumulate", "True without dq, dk or dv; accepted is one or more of them, to be added to"))
    elif is_bool(accumulate) and not accumulate:
        wrong += [refusing(ValueError, name, "given without accumulate; accepted is None, or accumulate=True") for name in into]
    call = _parse_again("attention_backward", q, k, v, options, wrong, known | into)
    framework = call.framework
    if unwritable := [refused for name, x in into.items() if (refused := framework.unwritable(name, x)) is not None]:
        raise refusal(unwritable)
    captures = _captures(call, captured)
    needed = call.gradient_names(captures)
    if into:
        needed = [name for name in needed if name in into or name not in ("dq", "dk", "dv")]
    if into or "delta" in known or not framework.is_traced:
        found = call.backward(known, needed, into)
    else:
        from . import _autograd

        found = dict(zip(needed, _autograd.backward(call, known, needed), strict=True))
    for x in into.values():
        framework.written(x)
    gradients = _as_given(framework, Gradients(*(found.get(name) for name in Gradients._fields)), options)
    return _with_captured(gradients, found, captures)


def _captures(call: Call, captured: Any) -> list[str]:
    """The names of the call's captured arrays that a caller of a backward names by the arrays themselves."""
    if isinstance(captured, (str, bytes)) or not isinstance(captured, Sequence):
        raise refusing(TypeError, "captured", f"{shown(captured)}; accepted is a list of arrays that the function of the score reads")
    read = call.learnable()
    names = []
    for n, x in enumerate(captured):
        found = next((name for name in read if call.arrays[name] is x), None)
        if found is None:
            shape = f"of shape {tuple(x.shape)} and dtype {x.dtype}" if hasattr(x, "shape") and hasattr(x, "dtype") else shown(x)
            words = f"[{n}], {shape}, is no array that the function of the score reads; accepted are its float arrays, the same objects"
            raise refusing(ValueError, "captured", words)
        names.append(found)
    return names


def _with_captured(found: Gradients, all_of_them: dict[str, Array], captures: list[str]) -> Any:
    return GradientsWithCaptured(*found, tuple(all_of_them[f"d{name}"] for name in captures)) if captures else found


def _as_given(framework: Framework, found: Gradients, options: AttentionOptions) -> Gradients:
    """The gradients in the shapes and dtypes of the caller's bias and sinks, which may have been changed for the library."""
    sinks = options.get("sinks")
    if found.dsinks is not None and sinks is not None and found.dsinks.dtype != sinks.dtype:
        found = found._replace(dsinks=framework.cast(found.dsinks, sinks.dtype))
    return _shaped(framework, found, options)


def _shaped(framework: Framework, found: Gradients, options: AttentionOptions) -> Gradients:
    """The gradients, with dbias in the shape of the caller's bias if that has no elements: the library then got another bias."""
    bias = options.get("bias")
    if found.dbias is None or bias is None or found.dbias.shape == bias.shape:
        return found
    return found._replace(dbias=framework.empty(bias, bias.shape, found.dbias.dtype))


def _of_rows(
    wrong: Wrong, dout: Array, out: Array | None, lse: Array | None, dlse: Array | None, delta: Array | None, options: AttentionOptions
) -> dict[str, Array]:
    """The tensors that a backward reads beside the inputs; delta replaces out with a partial part."""
    part = options.get("part")
    partial = isinstance(part, Part) and part.partial
    given = {"dout": dout} | ({} if partial else {"out": out}) | {"lse": lse}
    if not partial:
        pass
    elif delta is not None:
        given["delta"] = delta
    else:
        wrong.append(
            refusing(
                ValueError,
                "delta",
                "missing; accepted with a partial part is (dout * out).sum(-1) of the whole rows, (B, H, Sq) or (H, Tq)",
            )
        )
    if partial and out is not None:
        wrong.append(
            refusing(ValueError, "out", "given with a partial part; accepted is None, for delta and lse are those of the whole rows")
        )
    if not partial and delta is not None:
        wrong.append(refusing(ValueError, "delta", "given without a partial part; accepted is None, for out says it"))
    return given if dlse is None else {**given, "dlse": dlse}


def attention_jvp(
    q: Array,
    k: Array,
    v: Array,
    tq: Array | None = None,
    tk: Array | None = None,
    tv: Array | None = None,
    *,
    tbias: Array | None = None,
    tsinks: Array | None = None,
    captured: Sequence[Array] = (),
    tcaptured: Sequence[Array] = (),
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """attention(), and its derivative in the direction of tangents, in one pass and in memory linear in the sequence length.

    With torch tensors, all results are differentiable once in reverse mode, by the inputs and by the tangents. torch.func.jvp and
    torch.autograd.forward_ad of attention() compute the same. docs/derivatives.md has the formulas.

    Args:
        q, k, v, options: those of attention() except aux. With dropout, its mask is that of the call and does not depend on the tangents.
        tq, tk, tv: the tangents of q, k and v, in their shapes and dtypes. None means 0.
        tbias, tsinks: those of bias and sinks.
        captured: float arrays that the function of the score reads, the same objects.
        tcaptured: the tangent of each, in its shape; with these a function may read up to 8 arrays, tangents included.
        return_lse: True returns (out, lse, tout, tlse).

    Returns:
        (out, tout), or (out, lse, tout, tlse): the results of attention(), and their derivatives in the same shapes and dtypes. A query
        that sees no key has the derivative 0; with a sink, that of its lse is the sink's tangent.

    Raises:
        The errors of attention().
    """
    if CONTEXTS:
        raise _of_shards("attention_jvp")
    if is_traced_by_dynamo() and in_options(options):
        graph_break(OUTSIDE.format("strobe.attention_jvp"))
        more: Any = {"tbias": tbias, "tsinks": tsinks, "captured": captured, "tcaptured": tcaptured, "return_lse": return_lse}
        return outside_graphs(attention_jvp)(q, k, v, tq, tk, tv, **more, **options)
    wrong: Wrong = []
    flag(wrong, "return_lse", return_lse)
    given = {"tq": tq, "tk": tk, "tv": tv, "tbias": tbias, "tsinks": tsinks}
    tangents = {name: x for name, x in given.items() if x is not None}
    call = parse("attention_jvp", q, k, v, options, wrong, known=tangents)
    for name in ("bias", "sinks"):
        if f"t{name}" in tangents and name not in call.arrays:
            raise refusing(ValueError, f"t{name}", "given without {0}; accepted is both, or {0} alone", Name(name))
    tangents = {name: _like_input(call, name, x) for name, x in tangents.items()} | _tangents_of_captured(call, captured, tcaptured)
    if not call.framework.is_traced:
        found = call.jvp(tangents)
    else:
        from . import _autograd

        call = call.on(call.framework.autocast(call.arrays))
        found = _autograd.jvp(call, {name: call.framework.cast(x, call.arrays[TANGENTS[name]].dtype) for name, x in tangents.items()})
    out, lse, tout, tlse = found
    return (out, lse, tout, tlse) if return_lse else (out, tout)


def _like_input(call: Call, name: str, tangent: Array) -> Array:
    """A tangent as the library takes it: that of sinks in 16 bits is cast as they are."""
    of = call.arrays[TANGENTS[name]]
    return call.framework.cast(tangent, of.dtype) if name == "tsinks" and tangent.dtype != of.dtype else tangent


def _tangents_of_captured(call: Call, captured: Any, tangents: Any) -> dict[str, Array]:
    names = _captures(call, captured)
    if not isinstance(tangents, Sequence) or len(tangents) != len(names):
        words = f"{shown(tangents)}; accepted is a list of one array for each of {{0}}, which are {len(names)}"
        raise refusing(ValueError, "tcaptured", words, Name("captured"))
    wrong: Wrong = []
    for n, x in enumerate(tangents):
        is_array(wrong, f"tcaptured[{n}]", x, call.framework, call.arrays["q"])
    if wrong:
        raise refusal(wrong)
    return {f"t{name}": x for name, x in zip(names, tangents, strict=True)}


@outside_graphs
def reference(
    q: Array, k: Array, v: Array, *, rows: Iterable[int] | None = None, aux: Sequence[str] = (), **options: Unpack[AttentionOptions]
) -> Any:
    """attention() in float64 on the CPU, row by row by the formulas. Every engine is tested against it. It is slow and not differentiable.

    Args:
        q, k, v, options: as for attention().
        rows: the only queries to compute, as ascending flat indices into (B, H, Sq), or (H, Tq) of packed sequences. The rest is NaN.
        aux: as for attention(); refused with rows, because it needs all rows of a head.

    Returns:
        (out, lse), or with aux a named tuple of these and the named results: in the shapes of attention()'s, float64.

    Raises:
        The errors of attention().
    """
    wrong: Wrong = []
    chosen = _chosen(wrong, "rows", rows)
    names = parse_aux(wrong, aux)
    return _returned(parse("reference", q, k, v, options, wrong, aux=names).reference(chosen), True, names)


def _chosen(wrong: Wrong, name: str, given: Any) -> list[int] | None:
    """Rows or columns as flat indices."""
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
    wrong.append(refusing(TypeError, name, f"{shown(given)}; accepted are several integers, along one axis"))
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
    delta: Array | None = None,
    rows: Iterable[int] | None = None,
    cols: Iterable[int] | None = None,
    captured: Sequence[Array] = (),
    **options: Unpack[AttentionOptions],
) -> Any:
    """The gradients of reference(), in float64 as well.

    Args:
        dout, dlse: the gradients of out and lse, in any float dtype.
        q, k, v, options: as for attention_backward().
        out, lse: the results of reference(). They only save time if `cols` names few rows.
        delta: with a partial part, as for attention_backward(), and so is lse; in float32 or float64.
        rows: the only rows of dq to compute, as flat indices as in reference(). The rest is NaN. dbias and dsinks, which are sums over
            all rows, are then None.
        cols: the only rows of dk and dv to compute, as ascending flat indices into (B, Hkv, Sk), or (Hkv, Tk). The rest is NaN.
        captured: as for attention_backward(); refused with rows.

    Returns:
        Gradients(dq, dk, dv, dbias, dsinks), float64, or GradientsWithCaptured.

    Raises:
        The errors of attention().
    """
    wrong: Wrong = []
    given = _of_rows(wrong, dout, out, lse, dlse, delta, options)
    known = {name: x for name, x in given.items() if x is not None or name == "dout" or "delta" in given}
    chosen = _chosen(wrong, "rows", rows), _chosen(wrong, "cols", cols)
    call = _parse_again("reference_backward", q, k, v, options, wrong, known)
    captures = _captures(call, captured)
    if captures and rows is not None:
        words = "given beside rows; accepted is one of the two, for each gradient of a captured array is a sum over all rows"
        raise refusing(ValueError, "captured", words)
    found = call.reference_backward(known, *chosen, captures)
    gradients = _shaped(call.framework, Gradients(*(found.get(name) for name in Gradients._fields)), options)
    return _with_captured(gradients, found, captures)


@outside_graphs
def explain(
    q: Array,
    k: Array,
    v: Array,
    *,
    backward: bool = False,
    operation: str | None = None,
    aux: Sequence[str] = (),
    **options: Unpack[AttentionOptions],
) -> str:
    """Says what attention() or one of its derivatives would run for this call: each engine's plan or its reason against, the choice, what
    was rounded.

    operation is "forward" (the default), "backward", "jvp" or "backward_jvp"; backward=True is another way to write "backward".

    Nothing is computed. Arguments and errors are those of attention(), except that if no engine takes the call, the text says so and
    nothing is raised.
    """
    wrong: Wrong = []
    asked = "backward" if flag(wrong, "backward", backward) else "forward"
    if operation is not None and is_choice(wrong, "operation", operation, OPERATIONS):
        if backward is True and operation != "backward":
            wrong.append(refusing(ValueError, "operation", f"{operation!r} beside backward=True; accepted is one of the two"))
        asked = operation
    names = parse_aux(wrong, aux)
    return parse("explain", q, k, v, options, wrong, aux=names).explain(OPERATIONS[asked])


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
    """The dropout mask that attention() applies. It is the same for every engine, tile and device.

    Args:
        shape: (B, H, Sq, Sk). With packed sequences, B is their number, and Sq and Sk are at least the longest lengths.
        dropout, seed, offset, rng: those of attention(). rng lies on the CPU and replaces seed and offset.
        like: an array of the kind to return, if rng is not given.

    Returns:
        A bool array on the CPU, True = kept. Without rng and like it is a torch.Tensor if the program has imported torch, and a
        numpy.ndarray otherwise.

    Raises:
        TypeError, ValueError: an argument is not as described above.
    """
    wrong: Wrong = []
    several = isinstance(shape, Sequence) and not isinstance(shape, (str, bytes))
    sizes = [size for size in shape if is_integer(wrong, "shape", size, 0, 2**63 - 1)] if several else []
    if not wrong and len(sizes) != 4:
        wrong.append(refusing(ValueError if several else TypeError, "shape", f"{shown(shape)}; accepted is (B, H, Sq, Sk)"))
    share = number(wrong, "dropout", dropout)
    for name, x in (("seed", seed), ("offset", offset)):
        if x is not None:
            is_seed(wrong, name, x)
    if seed is None and rng is None:
        wrong.append(refusing(ValueError, "seed", "missing; accepted is seed (and offset), or rng"))
    elif rng is not None and (seed is not None or offset is not None):
        wrong.append(refusing(ValueError, "rng", "given beside seed or offset; accepted is one of the two"))
    if rng is not None and like is not None:
        wrong.append(refusing(ValueError, "like", "given beside rng; accepted is one of the two: an array of rng's kind is returned"))
    for name, x in (("rng", rng), ("like", like)):
        if x is not None and not is_array(wrong, name, x, None, None):
            error, hint = wrong[-1], Hint(of_generator(x))
            wrong[-1] = raised_for(type(error), [each.beside(hint) for each in refusals_of(error)])
    if wrong:
        raise refusal(wrong)
    framework = framework_like(like if rng is None else rng, "strobe.dropout_mask")
    return drawn_mask(framework, tuple(sizes), {"dropout": share, **seed_options(seed, offset)}, rng)
