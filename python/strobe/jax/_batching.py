"""The primitives under jax.vmap: a batching rule for each.

A rule puts the mapped axis before the batch, B calls of N samples in one of N · B, where nothing in the call depends on the number of a
sequence. Otherwise, as with dropout and packed sequences, jax.lax.map makes a call for each sample."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching

from .._function import FIELDS as FUNCTIONS
from .._graph import decoded
from .._options import GRADIENTS, SCALES, SCORES
from ..arrays.base import Array
from ._primitives import _evaluated, backward_jvp_p, backward_linearised_p, backward_p, bind, forward_p, linearised_p
from ._program import OF_BACKWARD, TANGENTS, Program

_BATCH_FIRST = frozenset({"q", "k", "v", "seqused_k", *OF_BACKWARD})
_SCORES = frozenset(name for name in SCORES if name not in GRADIENTS)
_WITHOUT = frozenset({"page_table", "rng", "cu_seqlens_q"})  # tensors beside which each sample is a call of its own
_OF_SEQUENCE = frozenset({"BATCH"})  # operations of a function that tell sequences apart


def _tells_apart(program: Program) -> bool:
    """Whether an option depends on the number of a sequence."""
    options = dict(program.options)
    texts = [options[field] for field in FUNCTIONS.values() if field in options]
    return bool(options.get("dropout")) or "part" in options or any(node[0] in _OF_SEQUENCE for text in texts for node in decoded(text))


def _folds(program: Program, names: Sequence[str], own: Sequence[tuple[int, ...]], dims: Sequence[int | None]) -> bool:
    """Whether one call computes all samples. own: the shapes of a sample's operands."""
    if _tells_apart(program) or not _WITHOUT.isdisjoint(names):
        return False
    batch = own[0][0]
    wanted = _wanted(program)
    for name, shape, dim in zip(names, own, dims, strict=True):
        if name in _BATCH_FIRST:
            continue
        shared = dim is None and name not in wanted  # one for all samples, as it is
        if name in _SCORES or name == "alibi_slopes":
            fits = True
        elif name in SCALES:
            fits = shared if len(shape) < 3 else shape[0] == batch
        elif name.startswith("block_"):
            fits = shared and own[names.index("block_rows")][0] == 1
        else:  # sinks and captured tensors, which sequences share
            fits = shared
        if not fits:
            return False
    return True


def _wanted(program: Program) -> set[str]:
    """The inputs whose gradients or tangents each sample has."""
    return {GRADIENTS[name] for name in program.wanted} | {TANGENTS[name] for name in program.more if name in TANGENTS}


def _folded(name: str, x: Array, dim: int | None, samples: int, batch: int, wanted: Collection[str]) -> Array:
    """A call's operand for all samples, with sample and sequence in its first axis."""
    if dim is None and (name in wanted or not _serves_all(name, x)):
        x, dim = jnp.broadcast_to(x, (samples, *x.shape)), 0
    if dim is None:
        return x
    x = jnp.moveaxis(x, dim, 0)
    if name == "alibi_slopes" and x.ndim == 2:
        x = x[:, None]
    if name in _SCORES or name == "alibi_slopes":
        x = jnp.broadcast_to(x, (samples, batch, *x.shape[2:]))
    return x.reshape(-1, *x.shape[2:])


def _serves_all(name: str, x: Array) -> bool:
    """Whether a sample's operand is the same for all sequences."""
    if name in _BATCH_FIRST:
        return False
    if name in _SCORES:
        return bool(x.shape[0] == 1)
    return x.ndim == 1 if name == "alibi_slopes" else not (name in SCALES and x.ndim >= 3)


def _unfolded(name: str, x: Array, samples: int, batch: int, bias: tuple[int, ...]) -> Array:
    """A result, sample by sample. bias: the shape of a sample's bias."""
    x = x.reshape(samples, batch, *x.shape[1:])
    return x.sum(1, keepdims=True).astype(x.dtype) if name == "dbias" and bias[0] == 1 else x


def _rule(primitive: Primitive, operands: Sequence[Array], dims: Sequence[int | None], *, program: Program) -> tuple[Any, Any]:
    names = program.operands
    samples = next(x.shape[dim] for x, dim in zip(operands, dims, strict=True) if dim is not None)
    own = [tuple(n for axis, n in enumerate(x.shape) if axis != dim) for x, dim in zip(operands, dims, strict=True)]
    plain = [TANGENTS.get(name, name) for name in names]
    if samples and len(own[0]) == 4 and _folds(program, plain, own, dims):
        batch = own[0][0]
        wanted = _wanted(program)
        folded = [_folded(name, x, dim, samples, batch, wanted) for name, x, dim in zip(plain, operands, dims, strict=True)]
        bias = own[names.index("bias")] if "bias" in names else ()
        results = bind(primitive, folded, program)
        of = program.wanted or ("",) * len(results)
        found = [_unfolded(name, x, samples, batch, bias) for name, x in zip(of, results, strict=True)]
    else:
        mapped = [jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims, strict=True) if dim is not None]

        def sample(given: list[Array]) -> list[Array]:
            rest = iter(given)
            return bind(primitive, [x if dim is None else next(rest) for x, dim in zip(operands, dims, strict=True)], program)

        found = jax.lax.map(sample, mapped)
    return found, [0] * len(found)


for _primitive in (forward_p, backward_p, linearised_p, backward_jvp_p):
    batching.primitive_batchers[_primitive] = partial(_rule, _primitive)


def _rule_of_backward_linearised(operands: Sequence[Array], dims: Sequence[int | None], *, program: Program) -> tuple[Any, Any]:
    found = jax.vmap(partial(_evaluated, program), in_axes=tuple(dims))(*operands)
    return found, [0] * len(found)


batching.primitive_batchers[backward_linearised_p] = _rule_of_backward_linearised
