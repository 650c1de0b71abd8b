"""Checks the results of a random call by the accuracy clause of docs/semantics.md."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from random_dense import Dense
from random_draw import DTYPES, Call
from random_formulas import HALF, Results, evaluate, scores_of

FLOOR = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 0.0, torch.bfloat16: 0.0}
ORDERS = 12  # in how many more orders the formulas are summed: the error of one order may be small by chance
# The formulas' error is also measured for DRAWS calls of the same kind, or for DRAWS_OF_FEW if fewer than FEW rows are visible: the largest
# error is that of a row whose terms happen to cancel, and twelve calls of six queries have few rows. (Over 60 calls of 112 rows each, the
# error of cuda-tf32 was 1.8 times that of the formulas, over 300 calls of 24 rows 1.7 times.) With more draws of larger calls, an engine
# that sums all 256 columns of q.k in one run would go unnoticed.
DRAWS, FEW, DRAWS_OF_FEW = 12, 300, 100
STATISTICS = ("lse", "max_logit", "column_sums")


def magnitude(t: Tensor) -> float:
    """The magnitude of the largest number."""
    t = t.double()
    return float(torch.where(t.isfinite(), t.abs(), 0.0).max()) if t.numel() else 0.0


def error(t: Tensor, ref: Tensor) -> float:
    """The largest difference; infinite if one is NaN or infinite, and the other is not the same."""
    if not t.numel():
        return 0.0
    t, ref = t.double(), ref.double()
    same = (t == ref) | (t.isnan() & ref.isnan())
    return float(torch.where(same, 0.0, (t - ref).abs()).nan_to_num(nan=math.inf).max())


def ulp(dtype: torch.dtype, size: float) -> float:
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(size)) if size else 0.0


def _ordered(ref: Results, keys: Tensor, dims: Tensor) -> Results:
    found = {name: ref[name] for name in ("out", "lse", "max_logit")} | {"column_sums": ref["column_sums"][..., keys]}
    found |= {name: t for name, t in ref.items() if name.startswith("dtable")}
    found |= {"dq": ref["dq"][..., dims], "dk": ref["dk"][:, :, keys][..., dims], "dv": ref["dv"][:, :, keys]}
    if "dbias" in ref:
        found["dbias"] = ref["dbias"][..., keys] if ref["dbias"].shape[-1] > 1 else ref["dbias"]
    return found | {name: ref[name] for name in ("dsinks",) if name in ref}


class Judge:
    """Judges the results of a call. float32: they must be within the larger of 1e-6 of max|ref| and twice the formulas' error in that
    precision; float64: the same with 1e-12; float16 and bfloat16: within twice the formulas' error plus one ulp of the output. lse,
    max_logit and column_sums, which are float32 there, must also be within the larger of 1e-4 of max|ref| and twice the formulas' error in
    float32; and a captured tensor's gradient may be off by what D is off by (_rows). The formulas' error is the largest over orders of
    summation and calls of the same kind. These are tried one after another, only until the results are within the bound, since more of
    them can only raise it."""

    def __init__(self, call: Call, flushed: float = 0.0):
        """flushed: gradients smaller than this may be 0."""
        self.call, self.flushed = call, flushed
        self.dtype = DTYPES[call.words["dtype"]]
        self.ref = evaluate(call.dense, torch.float64)
        gross = self._gross()
        # A gradient that vanishes identically (every row sees one key: P = 1, dP = D) is measured by the terms that cancel.
        self.vanishing = {name for name, size in gross.items() if magnitude(self.ref[name]) < 1e-9 * size}
        self.size = {name: gross[name] if name in self.vanishing else magnitude(t) for name, t in self.ref.items()}
        # float64 also rounds: terms before they cancel, and scores as large as LSE.
        lse = min(max(self.size["lse"], 1.0), 1e5)
        self.rounding = {name: 4 * torch.finfo(torch.float64).eps * lse * gross.get(name, size) for name, size in self.size.items()}
        self.plain = dict.fromkeys(self.ref, 0.0)  # the formulas' error, so far
        self.plain_statistics = dict.fromkeys(STATISTICS, 0.0)  # the same in float32
        self.steps = self._steps() if self.dtype == torch.float16 else {}
        self.rows: dict[str, float] = {}  # by which D's error may exceed these; only of results that are not within the bound without it
        self._more = self._measure()

    def _gross(self) -> dict[str, float]:
        """The size of the terms dP and D whose difference makes these gradients."""
        x = self.call.dense
        d = magnitude((x.dout.double() * self.ref["out"]).sum(-1))
        d_tables = {} if x.function is None else self._of_tables(d)
        gross = {"dq": abs(x.scale) * d * magnitude(x.k), "dk": abs(x.scale) * d * magnitude(x.q), "dbias": d} | d_tables
        return {name: size for name, size in gross.items() if name in self.ref}

    def _of_tables(self, d: float) -> dict[str, float]:
        x = self.call.dense
        keys = x.k.double().repeat_interleave(x.q.shape[1] // x.k.shape[1], 1)
        scaled = x.scale * (x.q.double() @ keys.transpose(2, 3))
        found: dict[str, float] = {}
        for n, of_load in x.function.score(scaled)[2].items():
            name = f"dtable {int(x.function.function.steps[n].number)}"
            found[name] = found.get(name, 0.0) + d * magnitude(torch.where(x.seen, of_load, 0.0))
        return found

    def _steps(self) -> dict[str, float]:
        """The largest error of each gradient from P and dS below 2^-14, where float16 has steps of 2^-24 (docs/semantics.md, "Rows"): four
        standard deviations. Each element is off by up to half a step in either direction, so the errors of n terms grow with sqrt(n)."""
        x = self.call.dense
        seen, k, v, dout = (t.double() for t in (x.seen, x.k, x.v, x.dout))
        (b, h, sq), (hkv, sk), d = dout.shape[:3], k.shape[1:3], x.q.shape[3]
        group = h // hkv
        seen = seen.expand(b, h, sq, sk)
        heads_k, heads_v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        dp = magnitude((dout @ heads_v.transpose(2, 3)).where(seen > 0, 0.0)) / x.keep_rate + magnitude((dout * self.ref["out"]).sum(3))
        step = 4 * 2.0**-25 / math.sqrt(3)
        each = step * (1 + dp + magnitude(x.dlse))
        of_keys = seen.transpose(2, 3) @ torch.cat([x.q.double(), dout], dim=3).square()  # summed over queries
        of_keys = of_keys.reshape(b, hkv, group, sk, of_keys.shape[3]).sum(2).sqrt()
        found = {"dq": abs(x.scale) * each * magnitude((seen @ heads_k.square()).sqrt())}
        found |= {"dk": abs(x.scale) * each * magnitude(of_keys[..., :d]), "dv": step / x.keep_rate * magnitude(of_keys[..., d:])}
        if x.bias is not None:
            axes = [i for i in range(4) if x.bias.shape[i] == 1]
            found["dbias"] = each * magnitude((seen.sum(dim=axes) if axes else seen).sqrt())
        return found

    def _rows(self) -> dict[str, float]:
        """The largest error of each table's gradient from D (docs/semantics.md, "Rows"), in 16 bits.

        With u half a unit in the last place of 1, the forward rounds P and O: sum_j P_ij (1 + a_ij) kept_ij V_jc times 1 + e_ic, where |a|
        and |e| are at most u. D_i = sum_c dO_ic O_ic is then off by

            delta_i = sum_j a_ij P_ij dP_ij + sum_c e_ic dO_ic O_ic

        and dS_ij = P_ij (dP_ij - D_i) by -P_ij delta_i: one error for all pairs of a row, which does not cancel as their own roundings do.
        An element that pairs read with the derivative g_ij is off by sum_i delta_i G_i, where G_i is the sum of P_ij g_ij over the pairs of
        row i that read it. Roundings are independent and between -u and u: delta_i has at most the variance of numbers drawn from there,
        and the element is off by at most four standard deviations, and by no more than the sum of all roundings' largest.

        Other calls of the same kind do not show this error, which grows with this call's D and G: a scalar where the mask leaves one row,
        or an element that few rows read, is a single number, as is a row of dQ."""
        x, dtype = self.call.dense, torch.float64
        scaled, s, _, of_loads = scores_of(x, dtype)
        if not of_loads:
            return {}
        out, lse = self.ref["out"], torch.where(self.ref["lse"] == -torch.inf, torch.inf, self.ref["lse"])
        p = torch.exp(s - lse[..., None])
        v = x.v.to(dtype).repeat_interleave(s.shape[1] // x.v.shape[1], 1)
        dout = x.dout.to(dtype)
        dp = torch.where(x.seen, dout @ v.transpose(2, 3), 0.0)
        terms = torch.cat([p * (dp if x.keep is None else dp * x.keep / x.keep_rate), dout * out], 3).flatten(0, 2)
        u = torch.finfo(self.dtype).eps / 2
        largest, variance = u * terms.abs().sum(1), u**2 / 3 * terms.square().sum(1)
        found: dict[str, float] = {}
        elements = x.function.elements(scaled, of_loads)
        rows = torch.arange(len(terms), device=terms.device).view(s.shape[:3])[..., None]
        for table in {int(x.function.function.steps[n].number) for n in of_loads}:
            own = [n for n in of_loads if x.function.function.steps[n].number == table]
            count = x.function.function.tables[table].values.numel()
            read = torch.cat([(rows * count + elements[n]).flatten() for n in own])  # a row and an element
            of, back = read.unique(return_inverse=True)
            g = torch.cat([torch.where(x.seen, p * of_loads[n], 0.0).flatten() for n in own])
            of_row = torch.zeros(len(of), dtype=dtype, device=g.device).index_add(0, back, g).abs()
            row, sums = of // count, torch.zeros(2, count, dtype=dtype, device=g.device)
            sums.index_add_(1, of % count, torch.stack([largest[row] * of_row, variance[row] * of_row.square()]))
            found[f"dtable {table}"] = magnitude(torch.minimum(sums[0], 4 * sums[1].sqrt()))
        return found

    def _variants(self) -> Iterator[tuple[Dense, Results, bool]]:
        """Yields problems, their results, and whether q.k is summed in runs."""
        dense = self.call.dense
        yield dense, self.ref, False
        yield dense, self.ref, True
        for seed in range(ORDERS):
            x, keys, dims = dense.ordered(seed)
            yield x, _ordered(self.ref, keys, dims), bool(seed % 2)
        for seed in range(DRAWS_OF_FEW if self.ref["lse"].isfinite().sum() < FEW else DRAWS):
            other = dense.shuffled(seed)
            yield other, evaluate(other, torch.float64), bool(seed % 2)

    def _measure(self) -> Iterator[None]:
        dtype = self.dtype
        for x, ref, in_runs in self._variants():
            if dtype in HALF:
                single = evaluate(x, torch.float32, in_runs=in_runs)
                self.plain_statistics = {name: max(off, error(single[name], ref[name])) for name, off in self.plain_statistics.items()}
            # float32 rounds an LSE above 16 too much. Engines compensate for that; these formulas do not, so P does not come from such an
            # LSE.
            from_lse = [(False, True)] if dtype == torch.float32 and self.size["lse"] <= 16 else []
            for d_from_p, p_from_lse in [(True, False), (False, False), *from_lse]:
                errors = {name: error(t, ref[name]) for name, t in evaluate(x, dtype, d_from_p, in_runs, p_from_lse).items()}
                if dtype in HALF and not all(map(math.isfinite, errors.values())):  # the formulas overflow and give no measure
                    dtype = torch.float32
                    errors = {name: error(t, ref[name]) for name, t in evaluate(x, dtype, d_from_p, in_runs).items()}
                self.plain = {name: max(self.plain[name], error) for name, error in errors.items()}
                yield

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a result, by the contract."""
        if name in ("dbias", "dsinks"):
            return self.call.options[name[1:]].dtype
        if name.startswith("dtable"):
            return self.call.table(name[1:]).dtype
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        return wide if name in STATISTICS else self.dtype

    def allowed(self, name: str) -> float:
        size = self.size[name]
        bound = max(FLOOR[self.dtype] * size, 2 * self.plain[name])
        if self.dtype == torch.float64:
            bound = max(bound, self.rounding[name])
        if self.dtype in HALF:
            bound = max(bound, self.rows.get(name, 0.0))
            bound += ulp(self.dtype if name in self.vanishing else self.dtype_of(name), size)  # a gradient that vanishes has O's rounding
            if name == "column_sums":
                bound += size * 2.0**-21 * (1 + 2 * self.size["lse"])  # P in float32: docs/semantics.md, "Rows"
            if name in STATISTICS:
                bound = min(bound, max(1e-4 * size, 2 * self.plain_statistics[name]))
        return bound if name in ("out", *STATISTICS) else max(bound + self.steps.get(name, 0.0), self.flushed)

    def _dense(self, name: str, t: Tensor) -> Tensor:
        """A result with the axes of the formulas. Where packed sequences have no token, it gets the formulas' values."""
        packing = self.call.packing
        if name in ("dbias", "dsinks", "max_logit") or name.startswith("dtable"):
            return t
        if packing is None:
            return t.transpose(1, 2) if name not in STATISTICS and self.call.options.get("layout") == "bshd" else t
        keys, ref = name in ("dk", "dv", "column_sums"), self.ref[name]
        if name in STATISTICS:
            return packing.dense(t.T[..., None], keys, ref[..., None])[..., 0]
        return packing.dense(t, keys, ref)

    def _behind(self, name: str, t: Tensor) -> Tensor:
        """The part of a result that belongs to tokens of no sequence."""
        packing = self.call.packing
        if packing is None or name in ("dbias", "dsinks", "max_logit") or name.startswith("dtable"):
            return t.flatten()[:0]
        first = sum(packing.lengths_k if name in ("dk", "dv", "column_sums") else packing.lengths_q)
        return t[:, first:] if name in STATISTICS else t[first:]

    def shape_of(self, name: str) -> tuple[int, ...]:
        call, options = self.call, self.call.options
        like = {"dq": call.q, "dk": call.k, "dv": call.v, "out": call.dout} | {
            "d" + x: options[x] for x in ("bias", "sinks") if x in options
        }
        if name.startswith("dtable"):
            return tuple(call.table(name[1:]).shape)
        if name not in STATISTICS:
            return tuple(like[name].shape)
        if call.packing and name != "max_logit":
            return call.q.shape[1], (call.k if name == "column_sums" else call.q).shape[0]
        return tuple(self.ref[name].shape)

    def faults(self, results: Results) -> list[str]:
        found, errors = [], {}
        empty = self.ref["lse"] == -torch.inf if self.call.dense.sinks is None else None
        for name, t in results.items():
            if t.dtype != self.dtype_of(name):
                found.append(f"{name} is {t.dtype}, not {self.dtype_of(name)}")
            if tuple(t.shape) != self.shape_of(name):
                found.append(f"{name} has shape {tuple(t.shape)}, not {self.shape_of(name)}")
                continue
            dense = self._dense(name, t)
            errors[name] = error(dense, self.ref[name])
            if (self._behind(name, t) != (-torch.inf if name == "lse" else 0)).any():
                found.append(f"{name} is not empty behind the last sequence")
            if empty is not None and name in ("out", "dq") and (dense[empty] != 0).any():
                found.append(f"{name} is not 0 in a row that sees no key")
        while any(not off <= self.allowed(name) for name, off in errors.items()):
            try:
                next(self._more)
            except StopIteration:
                self.rows = self._rows() if self.dtype in HALF else {}
                break
        for name, off in errors.items():
            if not off <= self.allowed(name):
                found.append(f"{name}: error {off:.3g}, allowed {self.allowed(name):.3g}, max|ref| {self.size[name]:.3g}")
        return found
