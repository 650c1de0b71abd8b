"""The formulas of docs/semantics.md, forward and every gradient, with whole matrices S and P, in float64 or in the precision of a call.
Each formula is one line. Nothing is shared with Strobe, its reference, or the formulas of the other tests; autograd is not used."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from random_dense import Dense

Results = dict[str, Tensor]  # by name: "out", "lse", "max_logit", "column_sums", "dq", "dk", "dv", "dbias", "dsinks"
HALF = (torch.float16, torch.bfloat16)


def _in_runs(q: Tensor, k: Tensor) -> Tensor:
    """q k^T, as blocked products compute it: runs of 32 columns are summed one by one, and then the sums of the runs."""
    s = torch.zeros(*q.shape[:-1], k.shape[2], dtype=q.dtype, device=q.device)
    for part_q, part_k in zip(q.split(32, 3), k.split(32, 3), strict=True):
        run = torch.zeros_like(s)
        for c in range(part_q.shape[3]):
            run.addcmul_(part_q[..., c, None], part_k[..., None, :, c])
        s += run
    return s


def _rounding(dtype: torch.dtype) -> tuple[torch.dtype, Callable[[Tensor], Tensor]]:
    """The dtype that sums have, and the rounding of a step's result."""
    work = torch.float32 if dtype in HALF else dtype
    return work, (lambda t: t.to(dtype).to(work)) if dtype in HALF else (lambda t: t)


def scores_of(x: Dense, dtype: torch.dtype, in_runs: bool = False) -> tuple[Tensor, Tensor, Tensor | None, dict[int, Tensor]]:
    """scale q.k; the scores, -inf where nothing is seen; their derivative by scale q.k (None: 1), and by each load of the function."""
    work, r = _rounding(dtype)
    (b, h, sq, d), hkv = x.q.shape, x.k.shape[1]
    q, k = x.q.to(work).reshape(b, hkv, h // hkv * sq, d), x.k.to(work)
    product = r((_in_runs(q, k) if in_runs else q @ k.transpose(2, 3)).view(b, h, sq, k.shape[2]))
    s = scaled = r(product * x.scale)
    slope = None
    if x.softcap:
        ratio = r(torch.tanh(r(scaled / x.softcap)))
        s = r(x.softcap * ratio)
        slope = 1 - ratio * ratio
    if x.hyperbolic:
        beta, shift = x.hyperbolic
        far = scaled < -1
        y = torch.where(far, -scaled, 2.0)
        s = r(r(-beta * torch.where(far, r(torch.acosh(y)), 0.0)) - shift)
        s = torch.where(scaled.isnan(), scaled, s)
        slope = torch.where(far, beta / torch.sqrt((y - 1) * (y + 1)), 0.0)
    of_loads = {}
    if x.function:
        s, slope, of_loads = x.function.score(scaled)
        s, slope = r(s), torch.where(x.seen, slope, 0.0)  # where something hides, nothing counts
    if x.slopes is not None:
        s = r(s - x.slopes.to(work) * x.distance.to(work))
    if x.bias is not None:
        s = r(s + x.bias.to(work))
    return scaled, torch.where(x.seen, s, -torch.inf), slope, of_loads


def evaluate(x: Dense, dtype: torch.dtype, d_from_p: bool = False, in_runs: bool = False, p_from_lse: bool = False) -> Results:
    """Evaluates the formulas. Each step's result is rounded to dtype. Products of 16-bit matrices and sums of 16-bit numbers are
    accumulated in float32, as by tensor cores and BLAS. d_from_p: D is the sum of P dP instead of dO O; the two differ only by rounding.
    in_runs: q.k is summed in runs of 32 columns. p_from_lse: the gradients' P is exp(S - LSE), as in docs/semantics.md, with the LSE that
    the caller gets; otherwise it is the forward's P."""
    work, r = _rounding(dtype)
    q, k, v, dout, dlse = (t.to(work) for t in (x.q, x.k, x.v, x.dout, x.dlse))
    (b, h, sq, d), (hkv, sk), dv = q.shape, k.shape[1:3], v.shape[3]
    grouped, scores = (b, hkv, h // hkv * sq), (b, h, sq, sk)  # the query heads of a key head are rows of one product

    # Scores
    rows = q.reshape(*grouped, d)
    scaled, s, slope, of_loads = scores_of(x, dtype, in_runs)

    # Softmax, relative to the largest score of a row; relative to 0 in a row without scores
    sink = None if x.sinks is None else x.sinks.to(work).view(1, h, 1, 1)
    m = s.amax(3, keepdim=True) if sk else s.new_full((b, h, sq, 1), -torch.inf)
    if sink is not None:
        m = torch.maximum(m, sink)
    m = torch.where(m == -torch.inf, 0.0, m)
    e = torch.exp(s - m)
    total = e.sum(3, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - m)
    lse = m + torch.log(total)
    p = r(torch.where(total == 0, 0.0, e / total))
    columns = p.sum(2)
    kept = p if x.keep is None else r(p * x.keep / x.keep_rate)
    out = r((kept.reshape(*grouped, sk) @ v).view(b, h, sq, dv))

    # Gradients
    if p_from_lse:
        p = r(torch.where(total == 0, 0.0, torch.exp(s - lse)))
        columns = p.sum(2)
        kept = p if x.keep is None else r(p * x.keep / x.keep_rate)
    dp = (dout.reshape(*grouped, dv) @ v.transpose(2, 3)).view(scores)
    dp = r(dp) if x.keep is None else r(r(dp) * x.keep / x.keep_rate)
    delta = (p * dp if d_from_p else dout * out).sum(3, keepdim=True)
    ds = r(p * (dp - delta + dlse[..., None]))
    dx = ds if slope is None else r(ds * slope)
    dx = r(dx * x.scale).reshape(*grouped, sk)
    largest = s.reshape(b, h, sq * sk).amax(2) if sq * sk else s.new_full((b, h), -torch.inf)
    results = {"out": out, "lse": r(lse[..., 0]), "max_logit": largest, "column_sums": columns, "dq": r((dx @ k).view(b, h, sq, d))}
    results["dk"] = r(dx.transpose(2, 3) @ rows)
    results["dv"] = r(kept.reshape(*grouped, sk).transpose(2, 3) @ dout.reshape(*grouped, dv))
    if x.bias is not None:
        axes = [i for i in range(4) if x.bias.shape[i] == 1]
        total_ds = ds.sum(dim=axes, keepdim=True) if axes else ds
        results["dbias"] = total_ds.to(x.bias.dtype).to(work) if x.bias.dtype in HALF and dtype in HALF else total_ds
    if x.function:
        terms = {n: torch.where(x.seen, ds * of_load, 0.0) for n, of_load in of_loads.items()}
        for n, total in x.function.scatter(scaled, terms).items():
            wanted = x.function.function.tables[n].values.dtype
            results[f"dtable {n}"] = total.to(wanted).to(work) if wanted in HALF else total
    if sink is not None:
        share = torch.exp(sink - lse)
        ds = share * (dlse[..., None] - delta)  # the sink counts as one more key: with d_from_p its dS is rounded, otherwise not
        results["dsinks"] = (r(ds) if d_from_p else ds).sum(dim=(0, 2, 3))
    return results
