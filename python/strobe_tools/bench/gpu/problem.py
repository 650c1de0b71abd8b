"""A problem to be timed: a call of attention, written down so that another process can make it, too."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 128  # size of mask blocks, and of the tiles in which a window's work is counted


class Problem(NamedTuple):
    """The shapes of a call. A size of 0 means the same size as the query's."""

    batch: int
    heads: int
    seqlen: int
    dim: int
    causal: bool = False
    dtype: str = "bfloat16"
    heads_kv: int = 0
    seqlen_k: int = 0
    dim_v: int = 0
    dropout: float = 0.0
    lengths: tuple[int, ...] = ()  # packed sequences, instead of batch and seqlen
    window: int = 0  # with causal: a query sees this many keys before its own position; 0: all
    page: int = 0  # keys per page, seqlen_k of them for each sequence, also beside packed queries; 0: no pages
    latent: bool = False  # v is the first dim_v columns of k

    def flops(self, backward: bool) -> float:
        """FLOP of two products forward, or of five backward (three with the keys' dimension, two with the values'). A causal call counts
        half of them, a call with a window only the visible scores."""
        dim_v = self.dim_v or self.dim
        width = 3 * self.dim + 2 * dim_v if backward else self.dim + dim_v
        return 2.0 * self.heads * self._scores() * width

    def _scores(self) -> float:
        """The scores of one head."""
        if self.window:
            seen = (min(n, self.window + 1) for n in self.lengths or (self.seqlen,))  # keys that the last query sees
            lengths = self.lengths or (self.seqlen,)
            return (1 if self.lengths else self.batch) * sum(n * w - w * (w - 1) / 2 for n, w in zip(lengths, seen, strict=True))
        scores = sum(n * n for n in self.lengths) or self.batch * self.seqlen * (self.seqlen_k or self.seqlen)
        return scores * (0.5 if self.causal else 1)

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, normally distributed."""
        import torch

        heads_kv, seqlen_k, dim_v = self.heads_kv or self.heads, self.seqlen_k or self.seqlen, self.dim_v or self.dim

        def normal(heads: int, seqlen: int, dim: int) -> Tensor:
            shape = (sum(self.lengths), heads, dim) if self.lengths else (self.batch, heads, seqlen, dim)
            return torch.randn(*shape, device=device, dtype=getattr(torch, self.dtype))

        q = normal(self.heads, self.seqlen, self.dim)
        if self.page:
            pages = (len(self.lengths) or self.batch) * seqlen_k // self.page
            keys = self._replace(lengths=(), batch=pages, heads=heads_kv, seqlen=self.page, seqlen_k=0, page=0)
            return q, *keys.tensors(device)[1:]
        k = normal(heads_kv, seqlen_k, self.dim)
        return q, k, k[..., :dim_v] if self.latent else normal(heads_kv, seqlen_k, dim_v)

    def options(self, device: str) -> dict[str, Any]:
        """The options of strobe.attention."""
        found: dict[str, Any] = {"causal": self.causal} | ({"window": (self.window, 0)} if self.window else {})
        if self.dropout:
            found |= {"dropout": self.dropout, "seed": 1}
        if self.lengths:
            starts, longest = self.starts(device), max(self.lengths)
            found |= {"cu_seqlens_q": starts, "max_seqlen_q": longest}
            found |= {} if self.page else {"cu_seqlens_k": starts, "max_seqlen_k": longest}
        if self.page:
            import torch

            each = self.seqlen_k // self.page
            table = torch.arange((len(self.lengths) or self.batch) * each, dtype=torch.int32, device=device)
            found["page_table"] = table.view(-1, each)
        return found

    def starts(self, device: str) -> Tensor:
        """The starts of packed sequences, and their end."""
        import torch

        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=device)


def _alibi(p: Problem, device: str) -> dict[str, Any]:
    import torch

    return {"alibi_slopes": torch.tensor([2.0 ** (-8 * (h + 1) / p.heads) for h in range(p.heads)], device=device)}


def _sinks(p: Problem, device: str) -> dict[str, Any]:
    import torch

    return {"sinks": torch.randn(p.heads, device=device)}


def _mask(p: Problem, device: str) -> dict[str, Any]:
    import torch

    return {"mask": torch.rand(1, 1, p.seqlen, p.seqlen, device=device) < 0.9}


def _bias(p: Problem, device: str) -> dict[str, Any]:
    import torch

    return {"bias": torch.randn(1, 1, p.seqlen, p.seqlen, device=device, dtype=getattr(torch, p.dtype))}


def _all_keys(p: Problem, device: str) -> dict[str, Any]:
    import torch

    return {"seqused_k": torch.full((p.batch,), p.seqlen_k or p.seqlen, device=device, dtype=torch.int32)}


def uneven_lengths(batch: int, longest: int) -> list[int]:
    """`batch` lengths from 100 to the longest, evenly on a logarithmic scale, in some order."""
    order = Random(0).sample(range(batch), batch)
    return [round(100 * (longest / 100) ** ((n + 0.5) / batch)) for n in order]


def _uneven_keys(p: Problem, device: str) -> dict[str, Any]:
    import torch

    return {"seqused_k": torch.tensor(uneven_lengths(p.batch, p.seqlen_k), device=device, dtype=torch.int32)}


def _blocks(share: float) -> Callable[[Problem, str], dict[str, Any]]:
    """A block mask that keeps exactly this fraction of all blocks, drawn at random."""

    def options(p: Problem, device: str) -> dict[str, Any]:
        import torch

        import strobe

        side = p.seqlen // BLOCK
        rank = torch.randperm(side * side, generator=torch.Generator().manual_seed(0))
        kept = (rank < share * side * side).reshape(1, 1, side, side)
        return {"block_mask": strobe.BlockMask.from_kept(kept, BLOCK, BLOCK).to(device)}

    return options


def _constant(**options: Any) -> Callable[[Problem, str], dict[str, Any]]:
    return lambda p, device: options


WINDOW = 1024
SHARES = {"1/2 kept": 1 / 2, "1/4 kept": 1 / 4, "1/8 kept": 1 / 8}
# The features of a call beside its shapes.
FEATURES: dict[str, Callable[[Problem, str], dict[str, Any]]] = {
    "plain": _constant(),
    "window": _constant(window=(WINDOW, 0)),
    "ALiBi": _alibi,
    "softcap": _constant(softcap=30.0),
    "hyperbolic": _constant(score="hyperbolic"),
    "sinks": _sinks,
    "dropout": _constant(dropout=0.1, seed=1),
    "mask": _mask,
    "bias": _bias,
    "exact_max": _constant(exact_max=True),
    "deterministic": _constant(deterministic=True),
    "invariant": _constant(invariant=True),
    "seqused_k": _all_keys,
    "uneven": _uneven_keys,
    **{name: _blocks(share) for name, share in SHARES.items()},
    **dict.fromkeys(("INT8", "FP8", "INT4", "FP8 products"), _constant()),  # contestants.py quantises
}


# By feature: the dtype in which K and V are stored, with a scale for each key and head.
STORED = {"INT8": "int8", "FP8": "float8_e4m3fn", "INT4": "uint8"}


PRODUCTS = "FP8 products"  # the feature of q, k and v in FP8, with a scale for each sequence and head


def quantised(feature: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """q, k and v as a call with this feature gets them, and its options for them."""
    if feature == PRODUCTS:
        found = [in_fp8(x) for x in (q, k, v)]
        scales = {f"{name}_scale": scale.expand(x.shape[:-1]) for name, (x, scale) in zip("qkv", found, strict=True)}
        return found[0][0], found[1][0], found[2][0], scales
    if feature not in STORED:
        return q, k, v, {}
    import torch

    import strobe

    dtype = getattr(torch, STORED[feature])

    def stored(x: Tensor) -> tuple[Tensor, Tensor]:
        if not x.is_meta:
            return strobe.kv.quantise(x, dtype)
        width = x.shape[-1] // (2 if feature == "INT4" else 1)
        return x.new_empty((*x.shape[:-1], width), dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)

    (k, k_scale), (v, v_scale) = stored(k), stored(v)
    return q, k, v, {"k_scale": k_scale, "v_scale": v_scale}


def in_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (B, H, S, D) in E4M3, and its scales (B, H, 1)."""
    import torch

    dtype = torch.float8_e4m3fn
    scale = x.abs().amax((2, 3))[..., None].float() / torch.finfo(dtype).max
    return (x.float() / scale[..., None]).to(dtype), scale


def tiles(seqlen: int, left: int | None = None) -> int:
    """The number of BLOCK x BLOCK tiles of scores that a causal mask, with a window to the left if there is one, leaves partly visible."""
    rows = range(0, seqlen, BLOCK)
    first = (0 if left is None else max(0, row - left) // BLOCK for row in rows)
    return sum(row // BLOCK - begin + 1 for row, begin in zip(rows, first, strict=True))
