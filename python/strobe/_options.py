"""The options of strobe.attention()."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from ._core import lib

if TYPE_CHECKING:
    from ._blockmask import BlockMask
    from .arrays.base import Array


class AttentionOptions(TypedDict, total=False):
    """The options of strobe.attention(), which documents them."""

    causal: bool
    window: int | tuple[int | None, int | None] | None
    alignment: str
    scale: float | None
    softcap: float
    score: str
    beta: float | None
    shift: float
    mask: Array | None
    bias: Array | None
    alibi_slopes: Array | None
    sinks: Array | None
    dropout: float
    seed: int | None
    offset: int | None
    rng: Array | None
    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    block_mask: BlockMask | None
    layout: str
    deterministic: bool
    exact_max: bool
    allow_tf32: bool
    tile_q: int | None
    tile_k: int | None
    engine: str | None
    strict: bool
    check: bool
    threads: int | None


DEFAULTS: dict[str, Any] = dict.fromkeys(AttentionOptions.__annotations__) | {
    **dict.fromkeys(("causal", "deterministic", "exact_max", "allow_tf32", "strict", "check"), False),
    **dict.fromkeys(("softcap", "shift", "dropout"), 0.0),
    "score": "dot",
    "alignment": "bottom_right",
    "layout": "bhsd",
}

MAX_HEAD_DIM = 256  # src/attention/validate.cpp
INT32_MAX, INT64_MIN, INT64_MAX = 2**31 - 1, -(2**63), 2**63 - 1
ARRAYS = frozenset({"mask", "bias", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k", "rng"})
FLAGS = frozenset({"causal", "deterministic", "exact_max", "allow_tf32", "strict", "check"})
NUMBERS = frozenset({"scale", "softcap", "beta", "shift", "dropout"})
INTEGERS = {
    "max_seqlen_q": (0, INT32_MAX),
    "max_seqlen_k": (0, INT32_MAX),
    "tile_q": (1, lib.STROBE_MAX_TILE),
    "tile_k": (1, lib.STROBE_MAX_TILE),
    "threads": (1, lib.STROBE_MAX_THREADS),
}
LAYOUTS = {"bhsd": False, "bshd": True}
HYPERBOLIC: int = lib.STROBE_HYPERBOLIC
SCORES = {"dot": lib.STROBE_DOT, "hyperbolic": HYPERBOLIC}
ALIGNMENTS = {"bottom_right": lib.STROBE_BOTTOM_RIGHT, "top_left": lib.STROBE_TOP_LEFT}
# What other attention functions have.
ELSEWHERE = {
    "is_causal": "did you mean causal?",
    "p": "did you mean dropout?",
    "return_attn_probs": "did you mean return_lse? The probabilities are never made",
    "attn_mask": "did you mean mask (bool, True = attend) or bias (added to the scores)?",
    "dropout_p": "did you mean dropout?",
    "enable_gqa": "k and v may have fewer heads than q without it",
    "softmax_scale": "did you mean scale?",
    "window_size": "did you mean window?",
}

# Where one of these is wrong, nobody can tell what the others should be.
SIZES = frozenset({"q", "k", "v", "layout", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"})
