"""The primitives: attention, its backward, and its linear part, whose transpose the backward is.

JAX differentiates by jvp and transposition. The tangents of attention are a primitive of their own, linear in them, whose residuals are the
inputs, out and LSE. jax.grad transposes it, and never computes it; jax.jvp computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from .._abi import BACKWARD, CPU, CUDA, FORWARD, OPERATIONS
from .._call import Call
from .._core import lib
from .._options import GRADIENTS
from .._part import is_partial
from .._refusals import refusing
from ..arrays.base import Array
from ._program import TANGENTS, Program, attributes, judge, results_of, shape_of, swapped
from ._sharding import Division, Tensor, divided, is_automatic, needs_devices

_PLATFORMS = {"cpu": CPU, "CUDA": CUDA}
JVP, BACKWARD_JVP = OPERATIONS["jvp"], OPERATIONS["backward_jvp"]


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True

    @lru_cache(maxsize=1024)
    def compiled(program: Program) -> Callable[..., Any]:
        return jax.jit(lambda *operands: primitive.bind(*operands, program=program))

    primitive.def_impl(lambda *operands, program: compiled(program)(*operands))
    return primitive


forward_p = _primitive("strobe_attention_fwd")
backward_p = _primitive("strobe_attention_bwd")
linearised_p = _primitive("strobe_attention_linearised")
backward_jvp_p = _primitive("strobe_attention_bwd_jvp")
backward_linearised_p = _primitive("strobe_attention_bwd_linearised")


def _varying(x: Array) -> frozenset[str]:
    """The axes of shard_map's mesh along which x differs."""
    kind = jax.typeof(x)
    return frozenset(getattr(kind, "vma", ()) or getattr(getattr(kind, "manual_axis_type", None), "varying", ()))


def bind(primitive: Primitive, operands: Sequence[Array], program: Program) -> list[Array]:
    """The primitive's results. Inside shard_map all operands vary along the same axes of the mesh."""
    axes = frozenset().union(*map(_varying, operands))
    if axes:
        operands = [jax.lax.pcast(x, tuple(axes - _varying(x)), to="varying") if axes - _varying(x) else x for x in operands]
    return list(primitive.bind(*operands, program=program))


def attend(call: Call) -> list[Array]:
    """out, lse and the results named by aux."""
    program = Program(tuple(call.arrays), tuple(call.options.items()), call.aux)
    return bind(forward_p, list(call.arrays.values()), program)


def _avals(like: Any, shapes: Sequence[Any]) -> list[Any]:
    """The types of results, in the place and with the manual axes of `like`."""

    def made(x: Any) -> Any:
        sharding = like.sharding.update(spec=jax.sharding.PartitionSpec(*[None] * len(x.shape)))
        return like.update(shape=x.shape, dtype=x.dtype, weak_type=False, sharding=sharding)

    return [made(x) for x in shapes]


@forward_p.def_abstract_eval
def _types_of_forward(*operands: Any, program: Program) -> list[Any]:
    return _avals(operands[0], list(program.call([*map(shape_of, operands)]).results().values()))


@backward_p.def_abstract_eval
def _types_of_backward(*operands: Any, program: Program) -> list[Any]:
    return _avals(operands[0], list(program.call([*map(shape_of, operands)]).gradients(program.wanted).values()))


@linearised_p.def_abstract_eval
def _types_of_linearised(*operands: Any, program: Program) -> list[Any]:
    return _types_of_forward(*operands[: len(program.names)], program=program._replace(aux=()))


@backward_jvp_p.def_abstract_eval
def _types_of_backward_jvp(*operands: Any, program: Program) -> list[Any]:
    return _types_of_backward(*operands, program=program)


@backward_linearised_p.def_abstract_eval
def _types_of_backward_linearised(*operands: Any, program: Program) -> list[Any]:
    return _types_of_backward(*operands, program=program)


def _jvp(operands: Sequence[Array], tangents: Sequence[Any], *, program: Program) -> tuple[list[Array], list[Any]]:
    call = program.call(operands)
    given = {name: x for name, x in zip(program.names, tangents, strict=True) if type(x) is not ad.Zero}
    differentiable = {GRADIENTS[name] for name in call.gradient_names(call.learnable())}
    if refused := [name for name in given if name not in differentiable]:
        raise refusing(NotImplementedError, refused[0], "a tangent or a gradient is asked for; accepted is its jax.lax.stop_gradient()")
    if is_partial(call.options):
        raise refusing(NotImplementedError, "part", "partial, and a gradient is asked for; accepted is a part that is not partial")
    judge(call, BACKWARD)
    out, lse, *more = results = bind(forward_p, operands, program)
    if given:
        found = bind(linearised_p, [*operands, out, lse, *given.values()], program._replace(aux=(), more=_linearised(given)))
    else:
        found = [_zero(x) for x in (out, lse)]
    return results, [*found, *map(_zero, more)]


def _linearised(given: Iterable[str]) -> tuple[str, ...]:
    """The operands of linearised_p after the call's own: the residuals, and the tangents of these inputs."""
    return ("out", "lse", *(f"t{name}" for name in given))


def _zero(x: Array) -> Any:
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def _transpose(cotangents: Sequence[Any], *operands: Any, program: Program) -> list[Any]:
    count = len(program.names) + 2
    inputs, tangents = operands[:count], dict(zip(program.operands[count:], operands[count:], strict=True))
    out, (dout, dlse) = inputs[-2], cotangents
    if type(dout) is ad.Zero and type(dlse) is ad.Zero:
        return [None] * len(operands)
    known = {"out": inputs[-2], "lse": inputs[-1], "dout": jnp.zeros(out.shape, out.dtype) if type(dout) is ad.Zero else dout}
    known |= {} if type(dlse) is ad.Zero else {"dlse": dlse}
    asked = {TANGENTS[name] for name, x in tangents.items() if ad.is_undefined_primal(x)}
    wanted = tuple(name for name, of in GRADIENTS.items() if of in asked)
    gradients = bind(backward_p, [*inputs[:-2], *known.values()], program._replace(more=tuple(known), wanted=wanted))
    found = dict(zip((GRADIENTS[name] for name in wanted), gradients, strict=True))
    return [None] * count + [found.get(TANGENTS[name]) for name in tangents]


def _jvp_of_backward(operands: Sequence[Array], tangents: Sequence[Any], *, program: Program) -> tuple[list[Array], list[Any]]:
    """out and lse follow from the inputs, so that their tangents say nothing new."""
    results = bind(backward_p, operands, program)
    named = zip(program.operands, tangents, strict=True)
    given = {f"t{name}": x for name, x in named if name not in ("out", "lse") and type(x) is not ad.Zero}
    if not given:
        return results, [*map(_zero, results)]
    judge(program.call(operands), BACKWARD_JVP)
    own = program._replace(more=(*program.more, *given))
    return results, bind(backward_linearised_p, [*operands, *given.values()], own)


def _split(program: Program, operands: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The operands of backward_linearised_p: those of the backward, and the tangents."""
    known = dict(zip(program.operands, operands, strict=True))
    tangents = {name: x for name, x in known.items() if name in TANGENTS}
    return {name: x for name, x in known.items() if name not in tangents}, tangents


def _along(program: Program, known: dict[str, Any], tangents: dict[str, Any]) -> list[Array]:
    """tout and tlse: the derivatives of out and lse in the direction of the tangents of inputs."""
    inputs = {name: known[name] for name in program.names} | {"out": known["out"], "lse": known["lse"]} | tangents
    return bind(linearised_p, [*inputs.values()], program._replace(more=("out", "lse", *tangents), wanted=()))


def _evaluated(program: Program, *operands: Any) -> list[Array]:
    """The derivatives of the gradients in the direction of the tangents."""
    known, tangents = _split(program, operands)
    of_inputs = {name: x for name, x in tangents.items() if TANGENTS[name] in program.names}
    if not of_inputs:  # a gradient is linear in dout and dlse
        known["dout"] = tangents.get("tdout", jnp.zeros_like(known["dout"]))
        known.pop("dlse", None)
        known |= {"dlse": tangents["tdlse"]} if "tdlse" in tangents else {}
        return bind(backward_p, [*known.values()], program._replace(more=tuple(known)[len(program.names) :]))
    tout, tlse = _along(program, known, of_inputs)
    everything = known | {"tout": tout, "tlse": tlse} | tangents
    return bind(backward_jvp_p, [*everything.values()], program._replace(more=tuple(everything)[len(program.names) :]))


def _transpose_of_backward(cotangents: Sequence[Any], *operands: Any, program: Program) -> list[Any]:
    """The second derivatives of a scalar are symmetric: the cotangents of gradients are tangents of the inputs."""
    known, tangents = _split(program, operands)
    given = {f"t{GRADIENTS[name]}": x for name, x in zip(program.wanted, cotangents, strict=True) if type(x) is not ad.Zero}
    if not given:
        return [None] * len(operands)
    asked = {TANGENTS[name] for name, x in tangents.items() if ad.is_undefined_primal(x)}
    tout, tlse = _along(program, known, given)
    found = {"dout": tout, "dlse": tlse}
    if wanted := tuple(name for name, of in GRADIENTS.items() if of in asked):
        everything = known | {"tout": tout, "tlse": tlse} | given
        own = program._replace(more=tuple(everything)[len(program.names) :], wanted=wanted)
        found |= dict(zip((GRADIENTS[name] for name in wanted), bind(backward_jvp_p, [*everything.values()], own), strict=True))
    return [None] * len(known) + [found[TANGENTS[name]] if TANGENTS[name] in asked else None for name in tangents]


def _no_more(operands: Any, tangents: Any, *, program: Program) -> Any:
    raise NotImplementedError(
        "strobe.jax.attention: the derivative of a forward-mode derivative, or a third one, is asked for; accepted are first derivatives, "
        "and jax.grad, jax.jvp or jax.jacfwd of a jax.grad"
    )


ad.primitive_jvps[forward_p] = _jvp
ad.primitive_jvps[backward_p] = _jvp_of_backward
for _primitive_of in (linearised_p, backward_jvp_p, backward_linearised_p):
    ad.primitive_jvps[_primitive_of] = _no_more
ad.primitive_transposes[linearised_p] = _transpose
ad.primitive_transposes[backward_linearised_p] = _transpose_of_backward


def _lowered(direction: int, primitive: Primitive, platform: str, ctx: Any, *operands: Any, program: Program) -> Any:
    names, avals = program.operands, ctx.avals_in
    if platform == "cpu":
        judge(program.call([*map(shape_of, avals)]), direction, planned=True)
    elif direction in (JVP, BACKWARD_JVP):
        raise NotImplementedError(
            "strobe.jax.attention: a forward-mode or second derivative is asked for on a GPU; accepted are CPUs, or first derivatives by "
            "jax.grad, jax.vjp or jax.jacrev"
        )
    results = results_of(program) if direction == FORWARD else ("tout", "tlse") if direction == JVP else program.wanted
    if is_automatic(ctx.module_context.axis_context):
        both = ((names, avals), (results, ctx.avals_out))
        division = Division(program, *([*map(Tensor, of, (x.shape for x in kinds))] for of, kinds in both))
        return mlir.lower_fun(divided(primitive, program, bind, division), multiple_results=True)(ctx, *operands)
    if direction == JVP:  # which does not read out and lse
        read = [n for n, name in enumerate(names) if name not in ("out", "lse")]
        names, operands = tuple(names[n] for n in read), tuple(operands[n] for n in read)
        ctx = ctx.replace(avals_in=[avals[n] for n in read])
    of_layout = swapped(program, dict(zip(names, ctx.avals_in, strict=True)), dict(zip(results, ctx.avals_out, strict=True)))
    return jax.ffi.ffi_lowering(_target(direction))(ctx, *operands, **attributes(program, names, results, of_layout))


def _target(direction: int) -> str:
    return "strobe_attention_" + next(name for name, number in OPERATIONS.items() if number == direction)


def _lowered_linearised(ctx: Any, *operands: Any, program: Program) -> Any:
    return mlir.lower_fun(partial(_evaluated, program), multiple_results=True)(ctx, *operands)


_LOWERED = ((FORWARD, forward_p), (BACKWARD, backward_p), (JVP, linearised_p), (BACKWARD_JVP, backward_jvp_p))
for _direction, _primitive_of in _LOWERED:
    for _platform, _device in _PLATFORMS.items():
        _handler = jax.ffi.pycapsule(lib.strobe_glue_xla_handler(_direction, _device))
        jax.ffi.register_ffi_target(_target(_direction), _handler, platform=_platform)
        mlir.register_lowering(_primitive_of, partial(_lowered, _direction, _primitive_of, _platform), platform=_platform.lower())
needs_devices(forward_p, backward_p, linearised_p, backward_jvp_p, backward_linearised_p)
mlir.register_lowering(backward_linearised_p, _lowered_linearised)
