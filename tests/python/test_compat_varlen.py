"""strobe.compat.varlen against the formulas in float64."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from device import DEVICE
from flash_formulas import assert_close, formulas
from strobe.compat.varlen import AuxRequest, varlen_attn, varlen_attn_out

LENGTHS_Q, LENGTHS_K, H, HKV, D, DV, PAGE = [3, 0, 5], [6, 2, 5], 4, 2, 16, 24, 4


@pytest.fixture(autouse=True)
def _device():
    with torch.device(DEVICE):
        torch.manual_seed(0)
        yield


def ends(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


CALL = [*(torch.zeros(n, h, d, device=DEVICE) for n, h, d in ((8, H, D), (13, HKV, D), (13, HKV, DV)))]
CALL += [torch.tensor([0, 3, 3, 8], dtype=torch.int32, device=DEVICE), torch.tensor([0, 6, 8, 13], dtype=torch.int32, device=DEVICE), 5, 6]


def random_call() -> tuple[list[Any], list[Tensor]]:
    tensors = [torch.randn_like(x).requires_grad_() for x in CALL[:3]]
    return [*tensors, *CALL[3:]], tensors


def by_sequence(q: Tensor, k: Tensor, v: Tensor, used: list[int], **options: Any) -> tuple[Tensor, Tensor]:
    found = [
        formulas(a[None], b[None, :n], c[None, :n], **options)
        for a, b, c, n in zip(*(x.split(lengths) for x, lengths in ((q, LENGTHS_Q), (k, LENGTHS_K), (v, LENGTHS_K))), used, strict=True)
    ]
    return torch.cat([out[0] for out, _ in found]), torch.cat([lse[0] for _, lse in found], 1)


@pytest.mark.parametrize(("name", "ours"), [("varlen_attn", varlen_attn), ("varlen_attn_out", varlen_attn_out)])
def test_the_signature_is_pytorchs(name, ours):
    if torch.__version__ < "2.13":
        pytest.skip("an earlier PyTorch, with fewer arguments")
    from torch.nn.attention import varlen

    theirs = inspect.signature(getattr(varlen, name)).parameters
    own = inspect.signature(ours).parameters
    assert [(p.name, p.kind, p.default) for p in own.values()] == [(p.name, p.kind, p.default) for p in theirs.values()]


@pytest.mark.parametrize("used", [None, [4, 0, 5]])
@pytest.mark.parametrize("options", [{}, {"window_size": (-1, 0)}, {"window_size": (2, 1), "scale": 0.3}], ids=str)
def test_packed(options, used):
    call, tensors = random_call()
    named = {"softmax_scale" if name == "scale" else name: x for name, x in options.items()}
    expected = by_sequence(*tensors, used or LENGTHS_K, **named)
    given = {**options, "seqused_k": None if used is None else torch.tensor(used).int(), "enable_gqa": True}
    out, lse = varlen_attn(*call, **given, return_aux=AuxRequest(lse=True))
    assert_close(out, expected[0])
    assert_close(lse, expected[1])
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, dout)
    for found, grad in zip(grads, torch.autograd.grad(expected[0], tensors, dout.double()), strict=True):
        assert_close(found, grad.double())
    assert torch.equal(varlen_attn(*call, **given), out)

    into = torch.empty(8, DV, H).transpose(1, 2)
    assert varlen_attn_out(into, *call, **given) is into
    assert torch.equal(into, out)
    assert not into.requires_grad
    found, its_lse = varlen_attn_out(into, *call, **given, return_aux=AuxRequest(lse=True))
    assert found is into
    assert torch.equal(its_lse, lse)


def test_the_aux_request_of_pytorch():
    if torch.__version__ < "2.13":
        pytest.skip("an earlier PyTorch")
    from torch.nn.attention.varlen import AuxRequest

    assert len(varlen_attn(*CALL, return_aux=AuxRequest(lse=True))) == 2
    assert isinstance(varlen_attn(*CALL, return_aux=AuxRequest()), Tensor)


def test_pages():
    call, tensors = random_call()
    expected, _ = by_sequence(*tensors, LENGTHS_K, causal=True)
    table = torch.tensor([[5, 0], [3, 99], [1, 2]], dtype=torch.int32)
    pools = [torch.randn(6, PAGE, HKV, d) for d in (D, DV)]
    for x, pool in zip(tensors[1:], pools, strict=True):
        for row, keys in zip(table.long(), x.detach().split(LENGTHS_K), strict=True):
            for j, key in enumerate(keys):
                pool[row[j // PAGE], j % PAGE] = key
    more = {"window_size": (-1, 0), "seqused_k": torch.tensor(LENGTHS_K).int(), "block_table": table}
    for cu_k in (None, call[4]):
        out = varlen_attn(call[0].detach(), *pools, call[3], cu_k, 5, 6, **more)
        assert_close(out, expected)
    tracked = varlen_attn(call[0], *pools, call[3], None, 5, 6, **more)
    with pytest.raises(NotImplementedError, match="^block_table: keys in pages have no gradients, and query requires grad"):
        tracked.sum().backward()
    into = torch.empty(8, H, DV)
    assert torch.equal(varlen_attn_out(into, call[0], *pools, call[3], None, 5, 6, **more), out)


def test_one_split_is_invariance():
    """A sequence has the same bits alone, beside other sequences, and among more of its own queries."""
    q, k, v = (torch.randn(300, h, D) for h in (H, HKV, HKV))
    together = varlen_attn(q, k, v, ends([100, 200]), ends([100, 200]), 200, 200, window_size=(-1, 0), num_splits=1)
    alone = varlen_attn(q[-1:], k[100:], v[100:], ends([1]), ends([200]), 1, 200, window_size=(-1, 0), num_splits=1)
    assert torch.equal(together[-1:], alone)


WRONG = [
    ({"query": CALL[0][None]}, r"^query: shape \(1, 8, 4, 16\); accepted is \(Tq, H, D\) with cu_seq_q$"),
    ({"key": CALL[1][None]}, r"^key: shape \(1, \d+, 2, 16\); accepted is \(Tk, Hkv, D\) with cu_seq_k$"),
    (
        {"value": torch.zeros(2, PAGE, HKV, DV), "block_table": torch.zeros(3, 2).int(), "seqused_k": torch.ones(3).int()},
        r"^key: shape \(\d+, 2, 16\); accepted is \(pages, page, Hkv, D\) with block_table$",
    ),
    ({"key": None}, "^key: NoneType; accepted is a torch.Tensor, as query is$"),
    ({"cu_seq_q": [0, 8]}, r"^cu_seq_q: list; accepted is a torch.Tensor, int32 \(B \+ 1,\)$"),
    ({"cu_seq_k": None}, r"^cu_seq_k: None; accepted is a torch.Tensor, int32 \(B \+ 1,\), or None beside block_table$"),
    ({"max_q": 0.5}, "^max_q: float; accepted is an integer"),
    ({"return_aux": True}, "^return_aux: bool True; accepted is an AuxRequest, or None$"),
    ({"enable_gqa": 3}, "^enable_gqa: int 3; accepted is True or False$"),
    ({"window_size": None}, "^window_size: None; accepted is"),
    ({"scale": "1"}, "^scale: str; accepted is a number"),
    ({"num_splits": -1}, "^num_splits: -1; accepted are integers from 0"),
    ({"block_table": torch.zeros(3, 2).int()}, r"^seqused_k: None beside block_table; accepted is int32 \(B,\)"),
    ({"seqused_k": torch.zeros(2).int()}, r"^seqused_k: shape \(2\); accepted is \(B\) = \(3\)$"),
    ({"is_causal": True}, "unexpected keyword argument 'is_causal'"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[next(iter(wrong)) for wrong, _ in WRONG])
def test_what_is_refused_is_named(wrong, message):
    names = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    given = dict(zip(names, CALL, strict=True)) | {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in wrong.items()}
    with pytest.raises((TypeError, ValueError), match=message) as raised:
        varlen_attn(**given)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(8, H, D), r"^out: torch.float32 of shape \(8, 4, 16\) on .*; accepted is torch.float32 of shape \(8, 4, 24\) on"),
        (torch.zeros(8, H, DV).double(), "^out: torch.float64 of shape"),
        (torch.zeros(8, 1, DV).expand(8, H, DV), "^out: strides"),
        (None, "^out: NoneType; accepted is a torch.Tensor"),
    ],
)
def test_what_is_no_place_for_the_output(out, message):
    with pytest.raises((TypeError, ValueError), match=message):
        varlen_attn_out(out if out is None else out.to(DEVICE), *CALL)


def test_compiled():
    call, _ = random_call()
    compiled = torch.compile(varlen_attn, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*call, window_size=(-1, 0)), varlen_attn(*call, window_size=(-1, 0)))
