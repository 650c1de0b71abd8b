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

from .._abi import BACKWARD, CPU, CUDA, FORWARD
from .._call import Call
from .._core import lib
from .._options import GRADIENTS
from .._part import is_partial
from .._refusals import refusing
from ..arrays.base import Array
from ._program import TANGENTS, Program, attributes, judge, results_of, shape_of
from ._sharding import Division, Tensor, divided, is_automatic, needs_devices

_PLATFORMS = {"cpu": CPU, "CUDA": CUDA}


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


def _no_second(operands: Any, tangents: Any, *, program: Program) -> Any:
    raise NotImplementedError(
        "strobe.jax.attention: a second derivative is asked for; accepted are first derivatives, by jax.grad or jax.vjp"
    )


ad.primitive_jvps[forward_p] = _jvp
ad.primitive_jvps[backward_p] = _no_second
ad.primitive_jvps[linearised_p] = _no_second
ad.primitive_transposes[linearised_p] = _transpose


def _lowered(direction: int, primitive: Primitive, platform: str, ctx: Any, *operands: Any, program: Program) -> Any:
    names = program.operands
    if platform == "cpu":
        judge(program.call([*map(shape_of, ctx.avals_in)]), direction, planned=True)
    results = results_of(program) if direction == FORWARD else program.wanted
    if is_automatic(ctx.module_context.axis_context):
        division = Division(
            program, *([*map(Tensor, of, (x.shape for x in avals))] for of, avals in ((names, ctx.avals_in), (results, ctx.avals_out)))
        )
        return mlir.lower_fun(divided(primitive, program, bind, division), multiple_results=True)(ctx, *operands)
    return jax.ffi.ffi_lowering(_target(direction))(ctx, *operands, **attributes(program, names, results))


def _target(direction: int) -> str:
    return "strobe_attention_forward" if direction == FORWARD else "strobe_attention_backward"


def _lowered_linearised(ctx: Any, *operands: Any, program: Program) -> Any:
    """The place of strobe_attention_jvp, once the library has it."""
    raise NotImplementedError(
        "strobe.jax.attention: a forward-mode derivative is asked for (jax.jvp, jax.jacfwd, jax.linearize); accepted is reverse mode, by "
        "jax.grad, jax.vjp or jax.jacrev"
    )


for _direction, _primitive_of in ((FORWARD, forward_p), (BACKWARD, backward_p)):
    for _platform, _device in _PLATFORMS.items():
        _handler = jax.ffi.pycapsule(lib.strobe_glue_xla_handler(_direction, _device))
        jax.ffi.register_ffi_target(_target(_direction), _handler, platform=_platform)
        mlir.register_lowering(_primitive_of, partial(_lowered, _direction, _primitive_of, _platform), platform=_platform.lower())
needs_devices(forward_p, backward_p)
mlir.register_lowering(linearised_p, _lowered_linearised)
