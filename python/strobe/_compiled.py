"""Calls with functions of the score and the mask under torch.compile and strict torch.export.

TorchDynamo traces such a function as it traces FlexAttention's: the function becomes a graph of its own, and whatever it captures
(parameters, inputs, tensors that the model has computed, lengths) becomes an operand of one higher-order operator. Later tracers do not see
that operator: called on their tensors, it records the function's graph as the recorder does a function, and calls the operator of
_operators.py with the function as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo import exc
from torch._dynamo.variables import higher_order_ops
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._sympy.symbol import SymT, symbol_is_type

from . import _operators
from ._call import Call
from ._checks import Wrong, refusal
from ._function import CAPTURED, FIELDS, Unwatched, recorded
from ._graph import UnrecordableError
from ._recorder_torch import indexed
from .arrays.torch import TORCH

_OF_WHOLE_TENSORS = ("detach", "dim", "numel", "size", "stride")  # methods that are called before a function is recorded
_NUMBERS = (int, float, tuple, torch.SymInt, torch.SymFloat)
_FRAME = re.compile(r'File "(.*?)", line (\d+), in (\S+)')


class Lifted(Unwatched):
    """A function's graph, as Dynamo makes it, with what it captures as operands."""

    def __init__(self, graph: fx.GraphModule, operands: Sequence[Any], device: torch.device):
        self._graph, self.__qualname__ = graph, _name(graph)
        placeholders = graph.graph.find_nodes(op="placeholder")
        self._known = dict(zip(placeholders[len(placeholders) - len(operands) :], operands, strict=True))
        for node in graph.graph.nodes:
            self._compute(node)
        # Real numbers become one tensor: those of closures, which Dynamo keeps in tensors on the CPU, and those computed from lengths.
        places = [node for node in self._known if _is_real(node) and any(user not in self._known for user in node.users)]
        self._places = {node: place for place, node in enumerate(places)}
        self._numbers = torch.stack([_on(device, self._known[node]) for node in places]) if places else None

    def _compute(self, node: fx.Node) -> None:
        """Computes the value of a node that no argument of the function has a part in, and that is no tensor."""
        if node in self._known or not all(x in self._known for x in node.all_input_nodes):
            return
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._known.__getitem__)
        if _is_item(node):
            self._known[node] = args[0]
        elif node.op == "call_method" and node.target in _OF_WHOLE_TENSORS:
            self._known[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
        elif node.op == "call_function" and isinstance(node.meta.get("example_value"), _NUMBERS):
            self._known[node] = node.target(*args, **kwargs)  # type: ignore[operator]

    def __call__(self, *scalars: Tensor) -> Any:
        known = {**self._known}
        if self._numbers is not None:
            known |= {node: self._numbers.select(0, place) for node, place in self._places.items()}
        interpreter = _Interpreter(self._graph)
        interpreter.extra_traceback = False
        return interpreter.run(*scalars, initial_env=known)


def _is_item(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item"


def _is_real(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.SymFloat)


def _on(device: torch.device, x: Any) -> Tensor:
    """A tensor of a number, be it symbolic or a tensor on the CPU."""
    if isinstance(x, torch.SymFloat) and not any(symbol_is_type(symbol, SymT.FLOAT) for symbol in x.node.expr.free_symbols):
        return torch.scalar_tensor(x, dtype=torch.float64, device=device)  # type: ignore[arg-type]
    # A sum, because a copy would wait for the GPU, and because a compiler that sees scalar_tensor() of a float compiles for each number.
    return torch.zeros((), dtype=torch.float64, device=device) + x


# The words of refusals of the call that Dynamo traces, for its error.
_REFUSED: ContextVar[list[str] | None] = ContextVar("refused", default=None)


class _Interpreter(fx.Interpreter):
    def run_node(self, node: fx.Node) -> Any:
        try:
            return super().run_node(node)
        except UnrecordableError as refused:
            refused.place = _place(node)
            raise


def _place(node: fx.Node) -> str:
    """(line 12 of file): the caller's code, in words."""
    frames = _frames(node)
    return f" (line {frames[-1][1]} of {Path(frames[-1][0]).name})" if frames else ""


def _name(graph: fx.GraphModule) -> str:
    """The caller's function."""
    return next((frames[0][2] for node in graph.graph.nodes if (frames := _frames(node))), "the function")


def _frames(node: fx.Node) -> list[tuple[str, str, str]]:
    """The file, line and function of the frames of the caller's function, the outermost first."""
    frames = _FRAME.findall(node.stack_trace or "")
    own = max((n for n, (file, *_) in enumerate(frames) if file == __file__), default=len(frames))
    return frames[own + 1 :]


class _Indexing(TorchFunctionMode):
    """While Dynamo traces a function: table[i] does not ask for the number of i."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return indexed(*args) if func is Tensor.__getitem__ else func(*args, **(kwargs or {}))


class _Attention(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("strobe_attention")

    @torch.compiler.disable  # for calls that no graph holds
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score: Any,
        more: tuple[Any, ...],
        names: tuple[tuple[str, ...], ...],
        options: dict[str, Any],
        of_score: Sequence[Any] = (),
        of_mask: Sequence[Any] = (),
    ) -> tuple[Tensor, ...]:
        """out, lse and the results named by aux. more: the arrays beside q, k and v, and the mask; names: of these arrays, of aux, and of
        the functions that are given. Where no graph holds the call, score and mask are those of forward(), and not graphs."""
        *others, mask = more
        names_of_arrays, aux, given = names
        functions: dict[str, Callable[..., Any]] = {}
        for name, function, operands in (("score", score, of_score), ("mask", mask, of_mask)):
            if name in given:
                functions[name] = Lifted(function, operands, q.device) if isinstance(function, fx.GraphModule) else function.args[0]
        arrays, fields = {"q": q, "k": k, "v": v, **dict(zip(names_of_arrays, others, strict=True))}, {**options}
        wrong: Wrong = []
        for name, x in recorded(wrong, functions, TORCH, q).items():
            (arrays if name in CAPTURED else fields)[name] = x
        if wrong:
            refused = refusal(wrong)
            if (said := _REFUSED.get()) is not None:
                said.append(str(refused))
            raise refused
        return _operators.forward(Call(TORCH, arrays, fields, aux))


def _operator() -> _Attention | None:
    """The operator, whose functions Dynamo traces as those of FlexAttention; None if this PyTorch has no place to say so."""
    traced_as_flex = getattr(higher_order_ops, "FlexAttentionHigherOrderVariable", None)
    variables = getattr(higher_order_ops, "_hop_name_to_variable_class", None)  # PyTorch 2.11
    if traced_as_flex is None or variables is None:
        return None
    operator = _Attention()

    class AttentionVariable(traced_as_flex):  # type: ignore[misc, valid-type]
        _HOP_NAME = "strobe.attention"

        def create_wrapped_node(self, *args: Any) -> Any:
            with _Indexing():  # FlexAttention's own mode takes tensors and integers alone as indices
                return super().create_wrapped_node(*args)

        def _call_function(self, *args: Any) -> Any:
            refused: list[str] = []
            token = _REFUSED.set(refused)
            try:
                return super()._call_function(*args)
            except (exc.TorchRuntimeError, exc.Unsupported) as failed:
                if not refused and not isinstance(failed, exc.TorchRuntimeError):
                    raise
                # Without fullgraph the call runs outside of the graph, and says itself what it refuses.
                exc.unimplemented(gb_type="strobe.attention", context="", explanation="".join(refused[-1:]) or str(failed), hints=[])
            finally:
                _REFUSED.reset(token)

    variables[operator.__name__] = AttentionVariable
    return operator


OPERATOR = _operator()


def forward(call: Call) -> tuple[Tensor, ...]:
    """out, lse and the results named by aux. The call has the caller's functions in place of their texts, and Dynamo traces this."""
    functions = {name: call.options[field] for name, field in FIELDS.items() if field in call.options}
    options = {name: x for name, x in call.options.items() if name not in FIELDS.values()}
    arrays = TORCH.autocast(call.arrays)
    q, k, v, *others = arrays.values()
    score = partial(_score, functions.get("score"), torch.float64 if q.dtype == torch.float64 else torch.float32)
    mask = partial(_mask, functions.get("mask"))
    names = tuple(arrays)[3:], call.aux, tuple(functions)
    assert OPERATOR is not None
    found: tuple[Tensor, ...] = OPERATOR(q, k, v, score, (*others, mask), names, options)
    return found


# The scalars that Dynamo makes have q's dtype and 32 bits.


def _score(function: Any, real: torch.dtype, x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Any:
    return x if function is None else _result(function(x.to(real), b.long(), h.long(), i.long(), j.long()))


def _mask(function: Any, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Any:
    return b if function is None else _result(function(b.long(), h.long(), i.long(), j.long()))


def _result(found: Any) -> Any:
    """What a function returns; a number becomes a tensor, which a graph can return."""
    is_number = isinstance(found, (bool, int, float, torch.SymInt))
    return torch.full((), found) if is_number else found
