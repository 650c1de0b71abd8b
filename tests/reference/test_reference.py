"""The oracle (strobe.reference, strobe.reference_backward) against autograd in float64 on formulas.py, over the options of the contract."""

import itertools
import math
import random
from collections import Counter

import pytest
import torch

import strobe

from . import formulas, philox

TOLERANCE = 1e-12  # relative to max |expected|

# (batch, head, query, key) of mask, bias and blocks: the letter if the axis exists, 1 if it is broadcast
SPREADS = ["bhij", "b11j", "11ij", "1hi1", "bh1j", "1111"]
OPTIONS = {
    "dtype": [torch.float64, torch.float32, torch.float16, torch.bfloat16],
    "heads": [(2, 2), (4, 2), (3, 1)],
    "lengths": [(17, 33), (33, 17), (1, 40), (20, 20), (0, 5), (5, 0)],
    "varlen": [False, True],
    "dims": [(8, 8), (5, 3), (1, 16)],
    "strides": ["contiguous", "permuted", "broadcast"],
    "causal": [False, True],
    "window": [(None, None), (3, None), (None, 2), (4, 1), (0, 0)],
    "alignment": ["bottom_right", "top_left"],
    "scale": [None, 0.3, 0.0, -0.5],
    "function": ["of q.k: none", "softcap", "hyperbolic"],
    "alibi": [None, "h", "bh"],
    "mask": [None, *SPREADS],
    "bias": [None, *SPREADS],
    "sinks": [False, True],
    "dropout": [0.0, 0.3],
    "blocks": [None, (16, 16, "11"), (32, 16, "b1"), (16, 32, "bh")],
    "dlse": [False, True],
}
FUNCTIONS = {"of q.k: none": {}, "softcap": {"softcap": 1.5}, "hyperbolic": {"score": "hyperbolic", "beta": 1.5, "shift": -0.5}}
CASES = 400


def draw(number):
    chance = random.Random(number)
    return {name: chance.choice(values) for name, values in OPTIONS.items()}


def test_the_cases_hold_every_pair_of_options():
    held = Counter(pair for n in range(CASES) for pair in itertools.combinations(draw(n).items(), 2))
    for (first, values), (second, others) in itertools.combinations(OPTIONS.items(), 2):
        for pair in itertools.product(values, others):
            assert held[(first, pair[0]), (second, pair[1])] > 0


def largest(*tensors):
    return max((x[x.isfinite()].abs().max().item() for x in tensors if x.isfinite().any()), default=0.0)


def relative_error(found, expected, size=None):
    """The largest difference, relative to size: the largest finite entry of expected unless given. Equal infinities do not differ."""
    assert found.dtype == torch.float64
    assert found.shape == expected.shape
    difference = (found - expected).masked_fill(found == expected, 0).abs()
    worst = difference.max().item() if difference.numel() else 0.0
    size = largest(expected) if size is None else size
    return worst / size if size else math.inf if worst else 0.0


class Case:
    """A random case: its arguments for strobe.reference and for formulas.py."""

    def __init__(self, number):
        o = draw(number)
        self.random = torch.Generator().manual_seed(number)
        (H, Hkv), (D, Dv), (Sq, Sk), dtype = o["heads"], o["dims"], o["lengths"], o["dtype"]
        statistics = torch.float64 if dtype == torch.float64 else torch.float32
        self.options = {name: o[name] for name in ("causal", "window", "alignment", "scale")} | FUNCTIONS[o["function"]]
        self.varlen = o["varlen"]
        B = 2
        if self.varlen:
            lengths_q, lengths_k = [Sq, 0, 3, Sq], [Sk, 7, 0, Sk]
            B = len(lengths_q)
            self.cu = {name: torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32)
                       for name, x in (("cu_seqlens_q", lengths_q), ("cu_seqlens_k", lengths_k))}  # fmt: skip
            Sq, Sk = max(lengths_q) + 2, max(lengths_k)
            self.cu |= {"max_seqlen_q": Sq, "max_seqlen_k": Sk}
            shapes = [(sum(lengths_q), H, D), (sum(lengths_k), Hkv, D), (sum(lengths_k), Hkv, Dv), (sum(lengths_q), H, Dv)]
            rows = (H, sum(lengths_q))
        else:
            shapes = [(B, H, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv), (B, H, Sq, Dv)]
            rows = (B, H, Sq)
        self.q, self.k, self.v, self.dout = (self.strided(o["strides"], self.normal(*shape).to(dtype)) for shape in shapes)
        self.dlse = self.normal(*rows).to(statistics) if o["dlse"] else None

        def spread(letters):
            return [{"b": B, "h": H, "i": Sq, "j": Sk, "1": 1}[letter] for letter in letters]

        tensors = {}
        if o["mask"]:
            tensors["mask"] = torch.rand(spread(o["mask"]), generator=self.random) < 0.8
            tensors["mask"][..., 2:3, :] = False
        if o["bias"]:
            tensors["bias"] = self.normal(*spread(o["bias"])).to(dtype)
            tensors["bias"][..., :, 1:2] = -math.inf
        if o["alibi"]:
            tensors["alibi_slopes"] = self.normal(*spread(o["alibi"])).float()
        if o["sinks"]:
            tensors["sinks"] = self.normal(H).to(statistics)
        self.tensors = tensors

        self.dropout, self.blocks = {}, {}
        self.dense = {}  # the arguments that formulas.py takes instead of those two
        if o["dropout"]:
            self.dropout = {"dropout": o["dropout"], "seed": number, "offset": 3}
            self.dense["kept"] = torch.from_numpy(philox.keep((B, H, Sq, Sk), o["dropout"], number, 3))
            self.dense["keep_rate"] = philox.threshold(o["dropout"]) / 256
        if o["blocks"]:
            block_q, block_k, letters = o["blocks"]
            kept = torch.rand(*spread(letters), -(-Sq // block_q), -(-Sk // block_k), generator=self.random) < 0.6
            self.dense["blocks"] = kept.repeat_interleave(block_q, -2)[..., :Sq, :].repeat_interleave(block_k, -1)[..., :Sk]
            self.blocks = {"block_mask": strobe.BlockMask.from_dense(self.dense["blocks"], block_q, block_k)}

    def normal(self, *shape):
        return torch.randn(shape, generator=self.random, dtype=torch.float64)

    @staticmethod
    def strided(how, x):
        if how == "permuted":
            return x.transpose(-1, -3).contiguous().transpose(-1, -3)
        if how == "broadcast" and x.numel():
            return x[..., :1].expand(x.shape)
        return x

    def arguments(self):
        return self.options | self.tensors | self.dropout | self.blocks | (self.cu if self.varlen else {})

    def forward(self, **more):
        return strobe.reference(self.q, self.k, self.v, **self.arguments(), **more)

    def backward(self, **more):
        return strobe.reference_backward(self.dout, self.q, self.k, self.v, dlse=self.dlse, **self.arguments(), **more)

    def expected_statistics(self):
        """max_logit and column_sums."""
        tensors = {"q": self.q, "k": self.k, "v": self.v} | self.tensors
        inputs = {name: x if name == "mask" else x.double() for name, x in tensors.items()} | self.options | self.dense
        if not self.varlen:
            return formulas.statistics(**inputs)
        return formulas.varlen_statistics(**inputs, **{name: self.cu[name] for name in ("cu_seqlens_q", "cu_seqlens_k")})

    def expected(self):
        """out, lse and the gradients of q, k, v, bias, sinks (None for an absent input), by autograd."""
        leaves = {name: x.double().requires_grad_() for name, x in (("q", self.q), ("k", self.k), ("v", self.v))}
        more = {name: x if name == "mask" else x.double() for name, x in self.tensors.items()}
        leaves |= {name: more[name].requires_grad_() for name in ("bias", "sinks") if name in more}
        inputs = leaves | more | self.options | self.dense
        if self.varlen:
            cu = {name: self.cu[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
            out, lse = formulas.varlen(**inputs, **cu)
        else:
            out, lse = formulas.attention(**inputs)
        outputs, incoming = [out], [self.dout.double()]
        if self.dlse is not None:
            outputs, incoming = [out, lse], [self.dout.double(), self.dlse.double()]
        found = torch.autograd.grad(outputs, list(leaves.values()), incoming, allow_unused=True)
        gradients = {name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(leaves.items(), found, strict=True)}
        return out.detach(), lse.detach(), [gradients.get(name) for name in ("q", "k", "v", "bias", "sinks")]


@pytest.mark.parametrize("number", range(CASES))
def test_against_autograd(number):
    case = Case(number)
    out, lse, gradients = case.expected()
    found_out, found_lse = case.forward()
    assert relative_error(found_out, out) < TOLERANCE
    assert relative_error(found_lse, lse) < TOLERANCE
    # Some gradients vanish except for rounding, such as dbias summed over all keys: the terms that cancel are of the size of the others.
    size = largest(*(x for x in gradients if x is not None))
    for name, found, expected in zip(strobe.Gradients._fields, case.backward(), gradients, strict=True):
        assert (found is None) == (expected is None), name
        if expected is not None:
            assert relative_error(found, expected, size) < TOLERANCE, name


@pytest.mark.parametrize("number", range(CASES))
def test_largest_scores_and_column_sums(number):
    case = Case(number)
    found = case.forward(aux=("max_logit", "column_sums"))
    assert all(torch.equal(x, y) for x, y in zip(found, case.forward(), strict=False))
    for name, expected in zip(("max_logit", "column_sums"), case.expected_statistics(), strict=True):
        assert relative_error(getattr(found, name), expected) < TOLERANCE, name


def flat_rows(x, packed):
    """(B, H, S, D) or (T, H, D) -> (flat indices, D), in the order of strobe_selection."""
    return (x.transpose(0, 1) if packed else x).reshape(-1, x.shape[-1])


@pytest.mark.parametrize("number", range(0, CASES, 10))
def test_selected_rows_and_columns_are_those_of_the_full_result(number):
    case = Case(number)
    out, lse = case.forward()
    full = case.backward()
    chance = random.Random(number)
    rows, cols = (
        sorted(chance.sample(range(n), min(n, 5)))
        for n in (math.prod(case.q.shape[:-1]), math.prod(case.k.shape[:-1]))
    )  # fmt: skip
    some_out, some_lse = case.forward(rows=rows)
    assert torch.equal(flat_rows(some_out, case.varlen)[rows], flat_rows(out, case.varlen)[rows])
    assert torch.equal(some_lse.reshape(-1)[rows], lse.reshape(-1)[rows])
    some = case.backward(rows=rows, cols=cols)
    for found, expected, chosen in ((some.dq, full.dq, rows), (some.dk, full.dk, cols), (some.dv, full.dv, cols)):
        assert torch.equal(flat_rows(found, case.varlen)[chosen], flat_rows(expected, case.varlen)[chosen])
    assert some.dbias is None
    assert some.dsinks is None
    given = case.backward(out=out, lse=lse, cols=cols)
    for found, expected in ((given.dk, full.dk), (given.dv, full.dv)):
        assert relative_error(flat_rows(found, case.varlen)[cols], flat_rows(expected, case.varlen)[cols]) < TOLERANCE


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_rows_of_a_long_problem():
    S, D = 65536, 32
    q, k, v, dout = (normal(1, 1, S, D, seed=n) for n in range(4))
    rows = [0, 1000, S - 1]
    out, lse = strobe.reference(q, k, v, causal=True, rows=rows)
    gradients = strobe.reference_backward(dout, q, k, v, causal=True, rows=rows, cols=[])
    for i in rows:
        one = q[:, :, i : i + 1].clone().requires_grad_()
        expected, expected_lse = formulas.attention(one, k[:, :, : i + 1], v[:, :, : i + 1])
        expected.backward(dout[:, :, i : i + 1])
        assert relative_error(out[:, :, i : i + 1], expected) < TOLERANCE
        assert relative_error(lse[:, :, i : i + 1], expected_lse) < TOLERANCE
        assert relative_error(gradients.dq[:, :, i : i + 1], one.grad) < TOLERANCE


def test_columns_of_a_long_problem_from_given_statistics():
    # All keys 0, so P = 1 / S everywhere, LSE = log S and O is V's mean.
    S, D = 65536, 8
    q, v, dout = (normal(1, 1, S, D, seed=n) for n in range(3))
    k = torch.zeros_like(q)
    mean = v.mean(2, keepdim=True)
    cols = [0, 12345, S - 1]
    lse = torch.full((1, 1, S), math.log(S), dtype=torch.float64)
    found = strobe.reference_backward(dout, q, k, v, out=mean.expand(v.shape), lse=lse, scale=0.5, rows=[], cols=cols)
    for j in cols:
        dS = (dout * (v[:, :, j : j + 1] - mean)).sum(-1, keepdim=True) / S
        assert relative_error(found.dk[:, :, j], 0.5 * (dS * q).sum(2)) < TOLERANCE
        assert relative_error(found.dv[:, :, j], dout.mean(2)) < TOLERANCE


def test_columns_of_a_long_windowed_problem_from_scratch():
    S, D, left = 65536, 8, 40
    q, k, v, dout = (normal(1, 1, S, D, seed=n) for n in range(4))
    cols = [0, 30000, S - 1]
    found = strobe.reference_backward(dout, q, k, v, window=(left, 0), rows=[], cols=cols)
    for j in cols:
        # The queries j to j + left see key j; with them, every key that they see.
        first, last = max(0, j - left), min(S, j + left + 1)
        part = [x[:, :, first:last].clone().requires_grad_() for x in (q, k, v)]
        out, _ = formulas.attention(*part, window=(left, 0))
        incoming = dout[:, :, first:last].clone()
        incoming[:, :, : j - first] = 0
        out.backward(incoming)
        assert relative_error(found.dk[:, :, j], part[1].grad[:, :, j - first]) < TOLERANCE
        assert relative_error(found.dv[:, :, j], part[2].grad[:, :, j - first]) < TOLERANCE


@pytest.mark.parametrize("logits", [[-8e4, -8e4, -8e4], [1e5, 1e5, 1e5 - 1], [-8e4, 1e5, 0.0], [-8e4, -8e4 + 2, -8e4 - 1]])
def test_huge_logits(logits):
    # Whole numbers, so that scores are exact and only the softmax is under test.
    q = torch.ones(1, 1, 2, 1, dtype=torch.float64, requires_grad=True)
    k = torch.tensor(logits, dtype=torch.float64).reshape(1, 1, -1, 1).requires_grad_()
    v, dout, dlse = normal(1, 1, len(logits), 3).requires_grad_(), normal(1, 1, 2, 3, seed=1), normal(1, 1, 2, seed=2)
    expected = formulas.attention(q, k, v)
    expected_gradients = torch.autograd.grad(expected, [q, k, v], [dout, dlse])
    inputs = [x.detach() for x in (q, k, v)]
    found, gradients = strobe.reference(*inputs), strobe.reference_backward(dout, *inputs, dlse=dlse)
    for x, y in zip((*found, *gradients[:3]), (*expected, *expected_gradients), strict=True):
        assert relative_error(x, y) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_row_of_minus_infinity_is_empty_and_a_row_of_the_least_number_is_not(dtype):
    q, k, v = (normal(1, 1, 3, 4, seed=n).to(dtype) for n in range(3))
    bias = torch.zeros(1, 1, 3, 3, dtype=dtype)
    bias[..., 0, :] = -math.inf
    bias[..., 1, :] = torch.finfo(dtype).min
    out, lse = strobe.reference(q, k, v, bias=bias)
    gradients = strobe.reference_backward(torch.ones_like(out), q, k, v, dlse=torch.ones_like(lse), bias=bias)
    assert torch.equal(out[0, 0, 0], torch.zeros(4, dtype=torch.float64))
    assert lse[0, 0, 0] == -math.inf
    assert torch.equal(gradients.dq[0, 0, 0], torch.zeros(4, dtype=torch.float64))
    assert torch.equal(gradients.dbias[0, 0, 0], torch.zeros(3, dtype=torch.float64))
    shifted, shifted_lse = formulas.attention(*(x.double() for x in (q, k, v)), bias=bias.double())
    assert relative_error(out[..., 1:, :], shifted[..., 1:, :]) < TOLERANCE
    assert relative_error(lse[..., 1:], shifted_lse[..., 1:]) < TOLERANCE
    assert lse[0, 0, 1] <= torch.finfo(dtype).min / 2


@pytest.mark.parametrize("sinks", [None, [0.5, -math.inf]])
def test_without_keys(sinks):
    q, k, v = normal(2, 2, 3, 4), normal(2, 2, 0, 4), normal(2, 2, 0, 5)
    sinks = None if sinks is None else torch.tensor(sinks, dtype=torch.float64)
    out, lse = strobe.reference(q, k, v, sinks=sinks)
    dlse = normal(2, 2, 3)
    gradients = strobe.reference_backward(torch.ones_like(out), q, k, v, dlse=dlse, sinks=sinks)
    assert torch.equal(out, torch.zeros(2, 2, 3, 5, dtype=torch.float64))
    logit = torch.full((2,), -math.inf, dtype=torch.float64) if sinks is None else sinks
    assert torch.equal(lse, logit[None, :, None].expand(2, 2, 3))
    assert torch.equal(gradients.dq, torch.zeros_like(q))
    if sinks is not None:
        assert relative_error(gradients.dsinks, dlse.sum((0, 2)) * torch.tensor([1.0, 0.0])) < TOLERANCE


def test_empty_batch():
    q, k, v, bias, sinks = normal(0, 2, 3, 4), normal(0, 1, 5, 4), normal(0, 1, 5, 4), normal(1, 2, 3, 5), normal(2)
    out, lse = strobe.reference(q, k, v, bias=bias, sinks=sinks)
    assert out.shape == (0, 2, 3, 4)
    assert lse.shape == (0, 2, 3)
    gradients = strobe.reference_backward(out, q, k, v, bias=bias, sinks=sinks)
    assert torch.equal(gradients.dbias, torch.zeros_like(bias))
    assert torch.equal(gradients.dsinks, torch.zeros_like(sinks))


def test_nan_and_infinity_reach_who_sees_them_and_nobody_else():
    q, k, v = (normal(1, 1, 6, 4, seed=n) for n in range(3))
    clean, clean_lse = strobe.reference(q, k, v, causal=True)
    for tensor, value in itertools.product((k, v), (math.nan, math.inf)):
        saved = tensor[0, 0, 3].clone()
        tensor[0, 0, 3, 1] = value
        q[0, 0, :, 1] = 1  # so that the score is +inf
        out, lse = strobe.reference(q, k, v, causal=True)
        tensor[0, 0, 3] = saved
        clean, clean_lse = strobe.reference(q, k, v, causal=True)
        assert torch.equal(out[0, 0, :3], clean[0, 0, :3])
        if tensor is k:
            assert out[0, 0, 3:].isnan().all()
            assert lse[0, 0, 3:].isnan().all()
        else:
            assert torch.equal(lse, clean_lse)
            assert not out[0, 0, 3:, 1].isfinite().any()
            assert torch.equal(out[0, 0, 3:, 2], clean[0, 0, 3:, 2])


def test_any_number_of_threads():
    case = Case(1)
    one = (*case.forward(threads=1), *case.backward(threads=1))
    many = (*case.forward(threads=5), *case.backward(threads=5))
    assert all(x is y or torch.equal(x, y) for x, y in zip(one, many, strict=True))


def test_a_bad_selection_is_refused():
    q = normal(1, 2, 3, 4)
    with pytest.raises(ValueError, match=r"rows: \[1\] is 6 after 2; accepted are flat indices from 0 to 5, strictly ascending"):
        strobe.reference(q, q, q, rows=[2, 6])
    with pytest.raises(ValueError, match=r"cols: \[1\] is 1 after 1; accepted are flat indices from 0 to 5, strictly ascending"):
        strobe.reference_backward(q, q, q, q, cols=[1, 1])
