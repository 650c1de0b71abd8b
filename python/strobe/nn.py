"""Modules for PyTorch: attention, and functions of the score and the mask. docs/functions.md shows how they are used."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ._messages import TORCH_EXTRA, needed_by

with needed_by(__name__, TORCH_EXTRA):
    import torch

from torch import Tensor

from ._attention import attention, explain
from ._blockmask import BlockMask
from ._checks import Wrong, check_names, flag, is_integer, refusal
from ._messages import kind, shown
from ._options import DEFAULTS, ELSEWHERE, MAX_HEAD_DIM, MAX_HEAD_DIM_V
from ._part import Part
from .arrays.known import known_framework, unfit
from .arrays.torch import TORCH

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from ._options import AttentionOptions


class FlashAttention(torch.nn.Module):
    """strobe.attention() as a module whose options are set once. It has no parameters.

    Args:
        head_dim: D, the last axis of q and k. Every call must have it.
        options: the options of strobe.attention() that are not tensors, such as causal, window, softcap, layout and block_mask. Tensors
            (mask, bias and so on) are passed to the call. dropout applies in training mode only.

    Shape:
        q (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), output (B, H, Sq, Dv); layout "bshd" and packed sequences as in
        strobe.attention().

    Raises:
        TypeError, ValueError: an option has a value that no call could have. A call raises the errors of strobe.attention().

    Example:
        >>> attend = strobe.nn.FlashAttention(64, dropout=0.1, causal=True)
        >>> out = attend(q, k, v)
        >>> out = attend(q, k, v, mask=not_padding)
    """

    def __init__(self, head_dim: int, **options: Unpack[AttentionOptions]):
        super().__init__()
        wrong: Wrong = []
        check_names("FlashAttention", options, wrong, DEFAULTS, ELSEWHERE | dict.fromkeys(("aux", "return_lse"), "it goes to the call"))
        for name, value in options.items():
            if known_framework(value) is not None:
                wrong.append(TypeError(f"{name}: {kind(value)}; accepted here are options that are no arrays; those go to the call"))
        named = not wrong
        whole = is_integer(wrong, "head_dim", head_dim, 1, MAX_HEAD_DIM)
        if named:
            try:
                _check_values(head_dim if whole else 1, options)
            except (TypeError, ValueError) as refused:
                wrong.append(refused)
        if wrong:
            raise refusal(wrong)
        self.head_dim = head_dim
        self.options: AttentionOptions = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **overrides: Unpack[AttentionOptions]) -> Any:
        """Computes attention. `overrides` replace options of the module for this call; a dropout among them holds in evaluation too."""
        if isinstance(q, Tensor) and unfit("q", q) is None and q.dim() and q.shape[-1] != self.head_dim:  # else attention() raises
            raise ValueError(f"q: head dimension {q.shape[-1]}; accepted is the module's, {self.head_dim}")
        options: AttentionOptions = {**self.options, **overrides}
        if not self.training and "dropout" not in overrides:
            options["dropout"] = 0.0
        return attention(q, k, v, return_lse=return_lse, **options)

    def extra_repr(self) -> str:
        return ", ".join([str(self.head_dim), *(f"{name}={value!r}" for name, value in self.options.items())])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        block_mask = self.options.get("block_mask")
        if block_mask is not None:
            device = fn(torch.empty_like(TORCH.own(block_mask.rows))).device
            if device.type != "meta":  # numbers could not be brought back from the meta device
                self.options["block_mask"] = block_mask.to(device)
        return super()._apply(fn, recurse)


def _check_values(head_dim: int, options: AttentionOptions) -> None:
    """Raises the errors of attention() that do not depend on the tensors, by a call on sequences without tokens."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return  # the library cannot serve a tracer or fake tensors; the later call can
    nothing = torch.zeros(0, 1, head_dim, device="cpu")
    starts = torch.zeros(2, dtype=torch.int32, device="cpu")
    given: AttentionOptions = {**options, "cu_seqlens_q": starts, "cu_seqlens_k": starts}
    if given.get("seed") is None:
        given["seed"] = 0  # nothing is drawn
    if isinstance(given.get("block_mask"), BlockMask):
        del given["block_mask"]  # its lengths must fit tensors that come with the call
    if isinstance(given.get("part"), Part):
        del given["part"]  # its rows must fit tensors that come with the call
    explain(nothing, nothing, nothing[..., :MAX_HEAD_DIM_V], **given)


Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_MOST = 2**31 - 1


class RelativeBias(torch.nn.Module):
    """A learned bias for each head and bucket of distances between a query and a key, as in T5: the score is x + weight[bucket, head].

    Near distances have buckets of their own, and farther ones share them, logarithmically, up to max_distance. From there on there is one
    bucket. T5 also takes scale=1.0, which is an option of strobe.attention().

    Args:
        heads: H, the number of query heads.
        num_buckets: with bidirectional half of them are for keys behind the query and half for keys in front of it.
        max_distance: the distance from which on all keys share the last bucket.
        bidirectional: False is for causal attention: all keys behind the query share the bucket of distance 0.
        device, dtype: of the parameter; None: PyTorch's defaults.

    Attributes:
        weight: the parameter, (num_buckets, heads), as the relative_attention_bias of T5 in transformers. It is drawn with a standard
            deviation of 0.02.

    Raises:
        TypeError, ValueError: an argument is not as described above, or has too few buckets for a logarithm.

    Sources: T5 (Raffel et al. 2019, arXiv:1910.10683, section 2.1). The buckets are those of its published code.

    Example:
        >>> bias = strobe.nn.RelativeBias(8, bidirectional=False)
        >>> out = strobe.attention(q, k, v, score=bias(), causal=True, scale=1.0)
    """

    weight: torch.nn.Parameter
    buckets: Tensor

    def __init__(
        self,
        heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        wrong: Wrong = []
        is_integer(wrong, "heads", heads, 1, _MOST)
        both = flag(wrong, "bidirectional", bidirectional)
        if is_integer(wrong, "num_buckets", num_buckets, 4 if both else 2, _MOST) and both and num_buckets % 2:
            wrong.append(ValueError(f"num_buckets: {num_buckets}; accepted with bidirectional is an even number"))
        if not wrong:
            is_integer(wrong, "max_distance", max_distance, num_buckets // (4 if both else 2) + 1, _MOST)
        if wrong:
            raise refusal(wrong)
        self.heads, self.num_buckets, self.max_distance, self.bidirectional = heads, num_buckets, max_distance, both
        self.weight = torch.nn.Parameter(torch.empty(num_buckets, heads, device=device, dtype=dtype))
        # The buckets of distances from -max_distance to max_distance: what is beyond has the bucket of the nearest.
        self.register_buffer("buckets", self._bucket(torch.arange(-max_distance, max_distance + 1, device=device)), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.weight, std=0.02)

    def forward(self, offset: int = 0) -> Score:
        """The function of the score, for strobe.attention(score=...). Make it anew for each call: it holds the parameter's values of now.

        Args:
            offset: the position of the first query among the keys, Sk - Sq if the queries are the last ones.
        """
        table = torch.nn.functional.embedding(self.buckets, self.weight)  # (2 max_distance + 1, heads)
        most = self.max_distance

        def score(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return x + table[_distance(i, j, offset).clamp(-most, most) + most, h]

        return score

    def extra_repr(self) -> str:
        return f"{self.heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}, bidirectional={self.bidirectional}"

    def _bucket(self, distance: Tensor) -> Tensor:
        """The bucket of a key's position less the query's."""
        count, first = self.num_buckets, torch.zeros_like(distance)
        if self.bidirectional:
            count //= 2
            first, distance = torch.where(distance > 0, count, 0), distance.abs()
        else:
            distance = (-distance).clamp_min(0)
        near = count // 2
        steps = torch.log(distance.clamp_min(1).float() / near) / math.log(self.max_distance / near) * (count - near)
        return first + torch.where(distance < near, distance, (near + steps.long()).clamp_max(count - 1))


class AlibiSlopes(torch.nn.Module):
    """ALiBi with slopes that are learned: the score is x - slopes[head] * |distance| of the query and the key.

    The option alibi_slopes of strobe.attention() computes the same with slopes that are not learned, faster.

    Args:
        heads: H, the number of query heads.
        device, dtype: of the parameter; None: PyTorch's defaults.

    Attributes:
        slopes: the parameter, (heads,). At first they are ALiBi's: 2^(-8 n / heads) for n from 1 to heads if heads is a power of 2, and
            otherwise those of the next lower power of 2, then every other one of the next higher.

    Raises:
        TypeError, ValueError: an argument is not as described above.

    Sources: ALiBi (Press et al. 2021, arXiv:2108.12409, section 3). The slopes for other numbers of heads are those of its published code.

    Example:
        >>> alibi = strobe.nn.AlibiSlopes(8)
        >>> out = strobe.attention(q, k, v, score=alibi(), causal=True)
    """

    slopes: torch.nn.Parameter

    def __init__(self, heads: int, *, device: Any = None, dtype: torch.dtype | None = None):
        super().__init__()
        wrong: Wrong = []
        if not is_integer(wrong, "heads", heads, 1, _MOST):
            raise refusal(wrong)
        self.heads = heads
        self.slopes = torch.nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        power = 1 << (self.heads.bit_length() - 1)
        slopes = [2 ** (-8 * n / power) for n in range(1, power + 1)]
        slopes += [2 ** (-4 * n / power) for n in range(1, 2 * (self.heads - power), 2)]
        with torch.no_grad():
            self.slopes.copy_(torch.tensor(slopes, dtype=torch.float64))

    def forward(self, offset: int = 0) -> Score:
        """The function of the score, for strobe.attention(score=...).

        Args:
            offset: the position of the first query among the keys, Sk - Sq if the queries are the last ones.
        """
        slopes = self.slopes

        def score(x: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return x - slopes[h] * _distance(i, j, offset).abs()

        return score

    def extra_repr(self) -> str:
        return str(self.heads)


class Neighborhood2d(torch.nn.Module):
    """The mask of neighborhood attention in an image: a query sees the kernel's pixels around its own. It has no parameters.

    The tokens are the pixels, row after row: token y * width + x. Near the border the neighborhood is moved into the image, so that each
    query sees as many keys as any other.

    Args:
        height, width: of the image; Sq = Sk = height * width.
        kernel: the odd number of rows and columns of a neighborhood, or a pair of both; at most height and width.

    Raises:
        TypeError, ValueError: an argument is not as described above.

    Sources: Neighborhood Attention Transformer (Hassani et al. 2022, arXiv:2204.07143).

    Example:
        >>> neighborhood = strobe.nn.Neighborhood2d(64, 64, kernel=7)
        >>> out = strobe.attention(q, k, v, mask=neighborhood())  # evaluates the mask for every pair
        >>> out = strobe.attention(q, k, v, block_mask=neighborhood.block_mask())  # leaves out blocks in which nothing is visible
    """

    def __init__(self, height: int, width: int, kernel: int | tuple[int, int]):
        super().__init__()
        wrong: Wrong = []
        sizes = tuple(kernel) if isinstance(kernel, (tuple, list)) else (kernel, kernel)
        if len(sizes) != 2:
            wrong.append(ValueError(f"kernel: {shown(kernel)}; accepted is an odd integer, or two of them"))
        for name, size, own in zip(("height", "width"), (height, width), sizes, strict=False):
            if is_integer(wrong, name, size, 1, _MOST) and is_integer(wrong, "kernel", own, 1, size) and own % 2 == 0:
                wrong.append(ValueError(f"kernel: {own}; accepted are odd integers"))
        if wrong:
            raise refusal(wrong)
        self.height, self.width, self.kernel = height, width, sizes

    def forward(self) -> Mask:
        """The function of the mask, for strobe.attention(mask=...)."""
        height, width, (rows, columns) = self.height, self.width, (size // 2 for size in self.kernel)

        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            y, x = (i // width).clamp(rows, height - 1 - rows), (i % width).clamp(columns, width - 1 - columns)
            return ((j // width - y).abs() <= rows) & ((j % width - x).abs() <= columns)

        return mask

    def block_mask(self, block: int = 128, device: Any = None) -> BlockMask:
        """The mask by blocks, for strobe.attention(block_mask=...): a BlockMask.from_function() of the function."""
        tokens = self.height * self.width
        return BlockMask.from_function(self.forward(), 1, 1, tokens, tokens, block=block, device=device)

    def extra_repr(self) -> str:
        return f"{self.height}, {self.width}, kernel={self.kernel}"


def _distance(i: Tensor, j: Tensor, offset: int) -> Tensor:
    """The key's position less the query's."""
    return j - i - offset if offset else j - i
