"""A call, packed or not, as one dense problem for formulas: axes (batch, head, query, key), shorter sequences padded with zeros."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "reference"))
import philox


@dataclass
class Packing:
    """The places of the tokens of packed sequences."""

    lengths_q: list[int]
    lengths_k: list[int]
    longest_q: int
    longest_k: int
    total_q: int
    total_k: int

    def spans(self, keys: bool) -> list[tuple[int, int]]:
        """(first token, length) of each sequence."""
        first, found = 0, []
        for n in self.lengths_k if keys else self.lengths_q:
            found.append((first, n))
            first += n
        return found

    def dense(self, t: Tensor, keys: bool, fill: Tensor | float = 0.0) -> Tensor:
        """(tokens, heads, width) as (B, H, longest, width), the rest filled."""
        shape = (len(self.lengths_q), t.shape[1], self.longest_k if keys else self.longest_q, t.shape[2])
        found = fill.to(t.dtype).clone() if isinstance(fill, Tensor) else torch.full(shape, fill, dtype=t.dtype, device=t.device)
        for b, (first, n) in enumerate(self.spans(keys)):
            found[b, :, :n] = t[first : first + n].transpose(0, 1)
        return found

    def pack(self, t: Tensor, keys: bool, fill: Any) -> Tensor:
        """(B, H, longest) as (H, tokens), filled after the last sequence."""
        found = torch.full((t.shape[1], self.total_k if keys else self.total_q), fill, dtype=t.dtype, device=t.device)
        for b, (first, n) in enumerate(self.spans(keys)):
            found[:, first : first + n] = t[b, :, :n]
        return found


@dataclass
class Held:
    """The positions of a part's rows in the whole problem: (B, Sq) and (B, Sk), 0 after a sequence's last row."""

    q: Tensor
    k: Tensor
    first_head: int
    first_batch: int

    @classmethod
    def of(cls, options: dict[str, Any], b: int, sq: int, sk: int, device: Any) -> Held | None:
        part = options.get("part")
        if part is None:
            return None
        sides = []
        for ranges, most in ((part.q_ranges, sq), (part.k_ranges, sk)):
            found = torch.zeros(b, most, dtype=torch.int64, device=device)
            for n in range(b):
                at = [i for start, length in ranges[n if len(ranges) > 1 else 0] for i in range(start, start + length)]
                found[n, : len(at)] = torch.tensor(at, dtype=torch.int64, device=device)
            sides.append(found)
        return cls(*sides, part.first_head, part.first_batch)

    def columns(self, x: Tensor) -> Tensor:
        """x (B|1, H|1, Sq|1, keys of the whole problem) for the part's keys only."""
        if x.shape[3] == 1:
            return x
        b, sk = self.k.shape
        return x.expand(b, *x.shape[1:]).gather(3, self.k[:, None, None, :].expand(b, *x.shape[1:3], sk))

    def rows(self, x: Tensor) -> Tensor:
        """x (B|1, H|1, queries of the whole problem, keys) for the part's queries only."""
        b, sq = self.q.shape
        return x.expand(b, *x.shape[1:]).gather(2, self.q[:, None, :, None].expand(b, x.shape[1], sq, x.shape[3]))

    def own(self, x: Tensor, heads: int) -> Tensor:
        """The part's slice of a tensor that has all axes of the whole problem."""
        x = x[self.first_batch : self.first_batch + len(self.q)] if x.shape[0] > 1 else x
        x = x[:, self.first_head : self.first_head + heads] if x.shape[1] > 1 else x
        return self.columns(self.rows(x))


def _padded(x: Tensor, rows: int) -> Tensor:
    """Pads the rows to those of the longest possible sequence."""
    return torch.nn.functional.pad(x, (0, 0, 0, rows - x.shape[2])) if x.shape[2] != 1 and x.shape[2] < rows else x


def _positions(options: dict[str, Any], b: int, sq: int, sk: int, packing: Packing | None, device: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns i + offset - j, and for each sequence which queries and keys exist."""
    i, j = torch.arange(sq, device=device)[:, None], torch.arange(sk, device=device)[None, :]
    if (held := Held.of(options, b, sq, sk, device)) is not None:
        part = options["part"]
        here = [torch.tensor(x, device=device).view(b, 1, 1, 1) for x in (packing.lengths_q, packing.lengths_k)] if packing else (sq, sk)
        whole = [torch.tensor(x, device=device).view(-1, 1, 1, 1) for x in (part.seqlens_q, part.seqlens_k)]
        difference = whole[1] - whole[0] if options["alignment"] == "bottom_right" else 0
        there = [(n < of) & torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device) for n, of in zip((i, j), here, strict=True)]
        return held.q[:, None, :, None] - held.k[:, None, None, :] + difference, there[0], there[1]
    if packing:
        lengths = [torch.tensor(x, device=device, dtype=torch.int64).view(b, 1, 1, 1) for x in (packing.lengths_q, packing.lengths_k)]
        there_q, there_k = i < lengths[0], j < lengths[1]
    else:
        there_q = there_k = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        lengths = [torch.full((1, 1, 1, 1), n, device=device) for n in (sq, sk)]
    if "seqused_k" in options:
        lengths[1] = options["seqused_k"].long().view(b, 1, 1, 1)
        there_k = j < lengths[1]
    difference = lengths[1] - lengths[0]
    return i - j + (difference if options["alignment"] == "bottom_right" else 0), there_q, there_k


def visible(options: dict[str, Any], b: int, heads: int, sq: int, sk: int, packing: Packing | None, device: Any) -> Tensor:
    """Which scores count, (B|1, H|1, Sq, Sk). A bias of -inf hides, too."""
    distance, there_q, there_k = _positions(options, b, sq, sk, packing, device)
    seen = there_q & there_k & torch.ones_like(distance, dtype=torch.bool)
    if options.get("causal"):
        seen = seen & (distance >= 0)
    window = options.get("window")
    left, right = (window, window) if isinstance(window, int) else window or (None, None)
    if left is not None:
        seen = seen & (distance <= left)
    if right is not None:
        seen = seen & (distance >= -right)
    held = Held.of(options, b, sq, sk, device)
    if "mask" in options:
        seen = seen & (options["mask"] if held is None else _padded(held.columns(options["mask"]), sq))
    if "block_mask" in options:
        m = options["block_mask"]
        kept = m.to_kept().to(device).repeat_interleave(m.block_q, 2).repeat_interleave(m.block_k, 3)
        seen = seen & (kept[:, :, :sq, :sk] if held is None else held.own(kept, heads))
    if "bias" in options:
        seen = seen & ((options["bias"] if held is None else _padded(held.columns(options["bias"]), sq)) != -torch.inf)
    return seen


def dropout_keeps(options: dict[str, Any], b: int, h: int, sq: int, sk: int, device: Any) -> tuple[Tensor | None, float]:
    """The elements that dropout keeps, and their fraction. One Philox call serves 4 x 4 elements of a block of 16 x 16, as the contract
    says."""
    if not options.get("dropout"):
        return None, 1.0
    seed, offset = options["rng"].tolist() if "rng" in options else (options["seed"], options["offset"])
    seed, offset = seed % 2**64, offset % 2**64
    x = philox.mix64((seed + 0x9E3779B97F4A7C15 * (philox.mix64(offset) | 1)) & philox.MASK64)
    heads = np.arange(h)[None, :, None, None], np.arange(b)[:, None, None, None]
    groups = [4 * (-(-n // 16)) for n in (sq, sk)]
    counter = np.broadcast_arrays(np.arange(groups[1])[None, None, None], np.arange(groups[0])[None, None, :, None], *heads)
    words = torch.from_numpy(np.stack(philox.philox4x32_7(counter, (x % 2**32, x >> 32)), -1).astype(np.int64)).to(device)
    i, j = torch.arange(sq, device=device), torch.arange(sk, device=device)
    (group_i, slot_i), (group_j, slot_j) = (((n // 16) * 4 + n % 8 // 2, n % 2 + 2 * (n % 16 // 8)) for n in (i, j))
    if not sq or not sk or not b or not h:
        return torch.ones(b, h, sq, sk, dtype=torch.bool, device=device), 1.0
    word = words[:, :, group_i[:, None], group_j[None, :], slot_i[:, None]]
    threshold = philox.threshold(options["dropout"])
    return (word >> (8 * slot_j) & 255) < threshold, threshold / 256


@dataclass
class Dense:
    """The problem: copies of the call's tensors, in their dtypes."""

    q: Tensor  # (B, H, Sq, D)
    k: Tensor  # (B, Hkv, Sk, D)
    v: Tensor  # (B, Hkv, Sk, Dv)
    dout: Tensor  # (B, H, Sq, Dv)
    dlse: Tensor  # (B, H, Sq), 0 where there is none
    seen: Tensor  # (B|1, H|1, Sq, Sk)
    distance: Tensor  # |i + offset - j|, (B|1, 1, Sq, Sk)
    scale: float
    softcap: float
    hyperbolic: tuple[float, float] | None  # beta, shift
    slopes: Tensor | None  # (B|1, H, 1, 1)
    bias: Tensor | None  # (B|1, H|1, Sq|1, Sk|1)
    sinks: Tensor | None  # (H,)
    keep: Tensor | None
    keep_rate: float
    lengths: tuple[list[int], list[int]] | None

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, options: dict[str, Any], seen: Tensor,
        packing: Packing | None,
    ) -> Dense:  # fmt: skip
        """Makes the problem from the call's tensors, (B, H, S, D) or packed."""
        if packing:
            q, k, v, dout = (packing.dense(t, keys) for t, keys in ((q, False), (k, True), (v, True), (dout, False)))
            dlse = None if dlse is None else packing.dense(dlse.T[..., None], False)[..., 0]
        (b, h, sq, d), sk = q.shape, k.shape[2]
        slopes, bias, sinks = options.get("alibi_slopes"), options.get("bias"), options.get("sinks")
        if slopes is not None:
            slopes = slopes.view(-1, h, 1, 1)
        if dlse is None:
            dlse = torch.zeros(b, h, sq, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32, device=q.device)
        elif sinks is None:  # a row that sees no key ignores the sink
            dlse = torch.where(seen.expand(b, h, sq, sk).any(3), dlse, 0)
        held = Held.of(options, b, sq, sk, q.device)
        if held is None:
            keep, rate = dropout_keeps(options, b, h, sq, sk, q.device)
        else:
            sizes = [int(x.max()) + 1 if x.numel() else 0 for x in (held.q, held.k)]
            keep, rate = dropout_keeps(options, held.first_batch + b, held.first_head + h, *sizes, q.device)
            keep = None if keep is None else held.columns(held.rows(keep[held.first_batch :, held.first_head :]))
            bias = None if bias is None else _padded(held.columns(bias), sq)
        hyperbolic = (options["beta"], options["shift"]) if options.get("score") == "hyperbolic" else None
        scale = options.get("scale")
        return cls(
            q.clone(), k.clone(), v.clone(), dout.clone(), dlse.clone(),
            seen, _positions(options, b, sq, sk, packing, q.device)[0].abs(),
            (1.0 if hyperbolic else d**-0.5) if scale is None else scale, options.get("softcap", 0.0), hyperbolic,
            slopes, None if bias is None else bias.clone(), sinks, keep, rate, (packing.lengths_q, packing.lengths_k) if packing else None,
        )  # fmt: skip

    def ordered(self, seed: int) -> tuple[Dense, Tensor, Tensor]:
        """The problem with keys and head dimensions permuted, which changes the order of sums; and the two permutations. If seed is odd,
        head dimensions stay near their places: a large first coordinate, as in points of a hyperboloid, stays early."""
        g = torch.Generator().manual_seed(seed)
        keys, dims = (torch.randperm(n, generator=g) for n in (self.k.shape[2], self.q.shape[3]))
        if seed % 2:
            dims = (torch.arange(self.q.shape[3]) + 4 * torch.rand(self.q.shape[3], generator=g)).argsort()
        keys, dims = keys.to(self.q.device), dims.to(self.q.device)

        def by_key(t: Tensor | None) -> Tensor | None:
            return t if t is None or t.shape[-1] == 1 else t[..., keys]

        more = {name: by_key(getattr(self, name)) for name in ("seen", "distance", "bias", "keep")}
        return dataclasses.replace(self, q=self.q[..., dims], k=self.k[:, :, keys][..., dims], v=self.v[:, :, keys], **more), keys, dims

    def shuffled(self, seed: int) -> Dense:
        """A call of the same kind with other rounding errors. The tokens of q, of k, of v and of dout are shuffled across sequences and
        heads, because a sequence of few tokens has few orders. Each number, also of the bias, moves by an ulp or two, because a row with
        nearly all of P on one key rounds in the same way in any order."""
        g = torch.Generator().manual_seed(seed)

        def mixed(t: Tensor, keys: bool) -> Tensor:
            lengths = torch.tensor(self.lengths[keys] if self.lengths else [t.shape[2]] * t.shape[0], dtype=torch.int64)
            there = (torch.arange(t.shape[2]) < lengths[:, None, None]).expand(t.shape[:3]).to(t.device)
            found, tokens = t.clone(), t[there]
            found[there] = tokens[torch.randperm(len(tokens), generator=g).to(t.device)]
            return found

        def moved(t: Tensor) -> Tensor:
            up = torch.randint(2, t.shape, generator=g).to(t.device)
            of = self.q.dtype if t.dtype == torch.float64 else t.dtype  # quantised keys are float64 in `self`
            return (t.double() * (1 + torch.finfo(of).eps * (2 * up - 1))).to(t.dtype)

        q, k, v, dout = (moved(mixed(t, keys)) for t, keys in ((self.q, False), (self.k, True), (self.v, True), (self.dout, False)))
        return dataclasses.replace(self, q=q, k=k, v=v, dout=dout, bias=None if self.bias is None else moved(self.bias))
