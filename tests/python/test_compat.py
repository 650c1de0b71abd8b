"""The predecessors' signatures: each example of their READMEs, compared with the formulas in float64."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention

import plain
import strobe
from device import DEVICE
from strobe.compat import block_sizes, functional, ladder, learned_scale


@pytest.fixture(autouse=True)
def _device():
    with torch.device(DEVICE):
        yield


def qkv(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    return [torch.randn(*shape, dtype=dtype, requires_grad=grad) for _ in "qkv"]


def _plain(
    Q: Tensor, K: Tensor, V: Tensor, scale: float | None, visible: Tensor | None, with_scores: bool = False
) -> tuple[Tensor, Tensor]:
    score = plain.Score(Q.shape[-1] ** -0.5 if scale is None else scale, visible=visible)
    return plain.attention(Q.double(), K.double(), V.double(), score, with_scores=with_scores)


def scores(Q: Tensor, K: Tensor, scale: float | None = None, visible: Tensor | None = None) -> Tensor:
    return _plain(Q, K, K, scale, visible, with_scores=True)[1]


def formulas(Q: Tensor, K: Tensor, V: Tensor, scale: float | None = None, visible: Tensor | None = None) -> Tensor:
    return _plain(Q, K, V, scale, visible)[0]


def close(got: Tensor, expected: Tensor, tolerance: float = 3e-6) -> None:
    expected = expected.detach()
    assert got.shape == expected.shape
    size = max(1.0, float(expected[expected.isfinite()].abs().max()))
    torch.testing.assert_close(got.detach().double(), expected.double(), rtol=0, atol=tolerance * size)


def causal_mask(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


# learned_scale: FlashAttention(head_dim=64), flash_attention(Q, K, V)


def test_learned_scale_readme_module():
    attn = learned_scale.FlashAttention(head_dim=64)
    Q, K, V = qkv(2, 8, 512, 64)
    output = attn(Q, K, V)
    close(output, formulas(Q, K, V))
    assert torch.equal(learned_scale.flash_attention(Q, K, V), output)


def test_learned_scale_readme_training():
    attn = learned_scale.FlashAttention(head_dim=64)
    optimizer = torch.optim.Adam(attn.parameters())
    Q, K, V = qkv(2, 8, 512, 64, grad=True)
    optimizer.zero_grad()
    output = attn(Q, K, V)
    loss = output.sum()
    loss.backward()
    before = attn.scale.item()
    optimizer.step()
    assert output.shape == (2, 8, 512, 64)
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (Q, K, V))
    assert attn.scale.item() != before


def test_learned_scale_usage_training_loop_with_a_scheduler():
    class SimpleModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = learned_scale.FlashAttention(head_dim=64)

        def forward(self, q, k, v):
            return self.attention(q, k, v)

    model = SimpleModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    Q, K, V = qkv(2, 8, 128, 64)
    target = formulas(Q, K, V, scale=0.3).float()
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = mse_loss(model(Q, K, V), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert model.attention.scale > 0.125  # training moves the scale towards 0.3, which made the target


def test_learned_scale_usage_multi_head_attention():
    class MultiHeadAttention(nn.Module):
        def __init__(self, d_model=512, num_heads=8):
            super().__init__()
            self.num_heads, self.head_dim = num_heads, d_model // num_heads
            self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d_model, d_model) for _ in range(4))
            self.attention = learned_scale.FlashAttention(head_dim=self.head_dim)

        def forward(self, x):
            batch_size, seq_len, d_model = x.shape
            projections = (self.q_proj, self.k_proj, self.v_proj)
            Q, K, V = (p(x).view(batch_size, seq_len, self.num_heads, self.head_dim).transpose(1, 2) for p in projections)
            attn_output = self.attention(Q, K, V)
            return self.out_proj(attn_output.transpose(1, 2).contiguous().view(batch_size, seq_len, d_model))

    model = MultiHeadAttention(d_model=512, num_heads=8)
    output = model(torch.randn(4, 128, 512))
    assert output.shape == (4, 128, 512)
    output.mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_learned_scale_usage_validation():
    Q, K, V = qkv(2, 4, 128, 64)
    diff = (learned_scale.flash_attention(Q, K, V) - scaled_dot_product_attention(Q, K, V)).abs().max()
    assert diff < 1e-5


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize("head_dim", [64, 40])
def test_the_gradient_of_the_scale(dtype, tolerance, head_dim):
    """dscale = sum dQ o Q / scale, after the scale has left its first value."""
    attn = learned_scale.FlashAttention(head_dim).to(torch.float64 if dtype == torch.float64 else torch.float32)
    with torch.no_grad():
        attn.scale.fill_(0.2)
    Q, K, V = qkv(2, 3, 70, head_dim, dtype=dtype, grad=True)
    dO = torch.randn(2, 3, 70, head_dim, dtype=dtype)
    output = attn(Q, K, V)
    dQ, dscale = torch.autograd.grad(output, (Q, attn.scale), dO)
    wide = [x.detach().double().requires_grad_() for x in (Q, K, V)]
    scale = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    expected = (wide[0] @ wide[1].mT * scale).softmax(-1) @ wide[2]
    expected_dQ, expected_dscale = torch.autograd.grad(expected, (wide[0], scale), dO.double())
    close(output, expected, tolerance)
    close(dQ, expected_dQ, tolerance)
    by_rows = (expected_dQ * wide[0]).detach()
    terms = float(by_rows.abs().sum()) / 0.2  # the size of the terms, which may cancel
    assert abs(dscale.item() - expected_dscale.item()) < tolerance * terms
    assert math.isclose(expected_dscale.item(), float(by_rows.sum()) / 0.2, rel_tol=1e-9)


def test_learned_scale_masks_and_dropout():
    attn = learned_scale.FlashAttention(16, dropout=0.5)
    Q, K, V = qkv(1, 2, 30, 16)
    mask, bias = causal_mask(30), torch.randn(30, 30)
    assert not torch.equal(attn(Q, K, V), attn(Q, K, V))
    attn.eval()
    close(attn(Q, K, V, attn_mask=mask), formulas(Q, K, V, visible=mask))
    close(attn(Q, K, V, attn_mask=bias), (scores(Q, K) + bias.double()).softmax(-1) @ V.double())
    with pytest.raises(ValueError, match="^Q: head dimension 8; accepted is the module's, 16"):
        attn(*qkv(1, 2, 30, 8))
    with pytest.raises(ValueError, match=r"^attn_mask: shape \(30, 31\)"):
        attn(Q, K, V, attn_mask=torch.ones(30, 31, dtype=torch.bool))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"head_dim": 0}, ValueError, "head_dim: 0; accepted are integers from 1 to 576"),
        ({"head_dim": -4}, ValueError, "head_dim: -4; accepted are integers from 1 to 576"),
        ({"head_dim": 577}, ValueError, "head_dim: 577; accepted are integers from 1 to 576"),
        ({"head_dim": "a"}, TypeError, "head_dim: str; accepted is an integer"),
        ({"head_dim": 64.0}, TypeError, "head_dim: float; accepted is an integer"),
        ({"dropout": 1.5}, ValueError, "dropout: 1.5; accepted is 0 to below 1, the probability of dropping"),
        (
            {"head_dim": 0, "dropout": "a"},
            ValueError,
            "head_dim: 0; accepted are integers from 1 to 576\ndropout: str; accepted is a number",
        ),
    ],
)
def test_learned_scale_refuses_what_no_call_could_have(given, error, message):
    with pytest.raises(error) as raised:
        learned_scale.FlashAttention(**given)
    assert str(raised.value) == message


def test_learned_scale_refusals_name_every_argument():
    attn = learned_scale.FlashAttention(16)
    Q, K, V = qkv(1, 2, 30, 16)
    with pytest.raises(TypeError, match=r"^Q: list; accepted is a torch.Tensor\nV: int; accepted is a torch.Tensor or a numpy.ndarray$"):
        attn([1], K, 3)
    with pytest.raises(TypeError, match="^attn_mask: list; accepted is a torch.Tensor, as Q is$"):
        attn(Q, K, V, [1])
    with pytest.raises(ValueError, match=r"^attn_mask: dtype int64; accepted is bool \(True = attend\), or a float dtype"):
        attn(Q, K, V, torch.ones(30, 30, dtype=torch.int64))
    with pytest.raises(ValueError, match="^Q: dtype int64; accepted is"):
        attn(Q.long(), K, V)


# block_sizes: flash_attention_forward(Q, K, V, Bc, Br, use_half)


def test_block_sizes_readme_forward():
    Q, K, V = qkv(2, 4, 300, 64)
    output = block_sizes.flash_attention_forward(Q, K, V)
    close(output, formulas(Q, K, V))
    close(block_sizes.flash_attention_forward(Q, K, V, Bc=64, Br=32, use_half=False), formulas(Q, K, V))
    half = block_sizes.flash_attention_forward(Q, K, V, Bc=64, Br=32, use_half=True)
    assert half.dtype == torch.float32
    close(half, formulas(Q, K, V), 4e-3)


def test_block_sizes_readme_training():
    Q, K, V = qkv(2, 4, 128, 64, grad=True)
    for use_half, tolerance in ((False, 3e-6), (True, 4e-3)):
        output = block_sizes.flash_attention_forward(Q, K, V, use_half=use_half)
        found = torch.autograd.grad(output.sum(), (Q, K, V))
        expected = torch.autograd.grad(formulas(Q, K, V).sum(), (Q, K, V))
        for got, wanted in zip(found, expected, strict=True):
            assert got.dtype == torch.float32
            close(got, wanted, tolerance)


@pytest.mark.parametrize(("use_half", "tolerance"), [(False, 3e-6), (True, 5e-3)])
def test_block_sizes_backward_from_l_and_m(use_half, tolerance):
    """l and m are the paper's: m the maximum of a row of scores, l the sum of exp(score - m)."""
    Q, K, V = qkv(2, 3, 90, 32, grad=True)
    O, l, m = block_sizes.flash_attention_forward_lm(Q, K, V, Bc=32, Br=32, use_half=use_half)
    S = scores(Q, K)
    close(m, S.amax(-1), tolerance)
    close(l, torch.exp(S - S.amax(-1, keepdim=True)).sum(-1), tolerance)
    dO = torch.randn_like(O)
    found = block_sizes.flash_attention_backward(Q, K, V, O, dO, l, m, Bc=32, Br=32, use_half=use_half)
    for got, wanted in zip(found, torch.autograd.grad(formulas(Q, K, V), (Q, K, V), dO.double()), strict=True):
        assert got.dtype == torch.float32
        close(got, wanted, tolerance)


def test_block_sizes_module():
    Q, K, V = qkv(1, 2, 64, 64)
    flash_attn = block_sizes.FlashAttention(bc=64, br=32, use_half=False)
    output = flash_attn(Q, K, V)
    close(output, formulas(Q, K, V))
    O, l, m = block_sizes.flash_attention_forward_lm(Q, K, V, 64, 32)
    dQ, dK, dV = flash_attn.backward(Q, K, V, O, torch.ones_like(O), l, m)
    close(dV, formulas(V, K, V) * 0 + scores(Q, K).softmax(-1).sum(-2, keepdim=True).mT)
    assert dQ.shape == dK.shape == Q.shape
    block = nn.Sequential()
    block.attention, block.norm = block_sizes.FlashAttention(use_half=True), nn.LayerNorm(64)
    x = torch.randn(1, 2, 64, 64)
    assert block.norm(x + block.attention(x, x, x)).shape == x.shape


@pytest.mark.parametrize(("bc", "br"), [(32, 16), (32, 32), (64, 32), (64, 128)])
def test_bc_and_br_change_the_tile(monkeypatch, bc, br):
    Q, K, V = qkv(1, 2, 256, 64)
    asked = {}

    def attention(**given):
        asked.update(given)
        return strobe.attention(**given)

    monkeypatch.setattr(block_sizes, "attention", attention)
    close(block_sizes.flash_attention_forward(Q, K, V, Bc=bc, Br=br), formulas(Q, K, V))
    here = (x.cpu() for x in (Q, K, V))
    assert f"; tile {br} x {bc};" in strobe.explain(*here, tile_q=asked["tile_q"], tile_k=asked["tile_k"], engine="cpu-baseline")
    assert torch.equal(block_sizes.flash_attention_forward(Q, K, V, bc=bc, br=br), block_sizes.flash_attention_forward(Q, K, V, bc, br))


def test_optimal_block_sizes_are_what_strobe_runs():
    bc, br = block_sizes.get_optimal_block_sizes(1024, 128)
    explained = strobe.explain(*qkv(1, 1, 1024, 128))
    chosen = re.search(r"choice\n  (\S+)", explained)[1]
    assert re.search(rf"  {chosen} .*; tile {br} x {bc};", explained)
    Q, K, V = qkv(1, 2, 1024, 128)
    close(block_sizes.flash_attention_forward(Q, K, V, Bc=bc, Br=br), formulas(Q, K, V))


def test_estimated_memory():
    info = block_sizes.estimate_memory_usage(8, 16, 1024, 64, use_half=True)
    rows = 8 * 16 * 1024
    assert info == {
        "input_memory": 3 * rows * 64 * 2,
        "internal_memory": rows * 4,
        "output_memory": rows * 64 * 2,
        "total_memory": rows * (4 * 64 * 2 + 4),
        "total_memory_mb": rows * (4 * 64 * 2 + 4) / 2**20,
    }


def test_block_sizes_refusals():
    Q, K, V = qkv(1, 2, 64, 64)
    with pytest.raises(ValueError, match="^Bc: 0; accepted"):
        block_sizes.flash_attention_forward(Q, K, V, Bc=0)
    with pytest.raises(ValueError, match="^K: shape"):
        block_sizes.flash_attention_forward(Q, K[..., :32], V)
    for wrong in (None, 1):
        with pytest.raises(TypeError, match=f"^use_half: .*{wrong}; accepted is True or False$"):
            block_sizes.flash_attention_forward(Q, K, V, use_half=wrong)
    with pytest.raises(ValueError, match=r"^br: 64 beside Br = 32; accepted is one of the two spellings$"):
        block_sizes.flash_attention_forward(Q, K, V, Br=32, br=64)
    with pytest.raises(TypeError, match="^Q: NoneType; accepted"):
        block_sizes.flash_attention_forward(None, K, V, use_half=True)
    l = torch.ones(1, 2, 64)
    with pytest.raises(TypeError, match=r"^l: NoneType; accepted is a torch.Tensor\nm: int; accepted is a torch.Tensor$"):
        block_sizes.flash_attention_backward(Q, K, V, Q, Q, None, 3)
    with pytest.raises(ValueError, match=r"^l, m: shape \(1, 1, 64\)"):
        block_sizes.flash_attention_backward(Q, K, V, Q, Q, l[:, :1], l[:, :1])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((-1, 64), ValueError, "sequence_length: -1; accepted are integers from 1 to 2147483647"),
        ((10.0, 64), TypeError, "sequence_length: float; accepted is an integer"),
        ((10, 513), ValueError, "head_dim: 513; accepted are integers from 1 to 512"),
    ],
)
def test_sizes_that_are_none(given, error, message):
    with pytest.raises(error) as raised:
        block_sizes.get_optimal_block_sizes(*given)
    assert str(raised.value) == message
    with pytest.raises(ValueError, match=r"^batch_size: 0; .*\nhead_dim: str; .*\nuse_half: int 1; accepted is True or False$"):
        block_sizes.estimate_memory_usage(0, 1, 1, "a", 1)


# ladder: flash_attention_1_forward, flash_attention_2_forward


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("br", "bc"), [(None, None), (16, 32), (7, 50)])
def test_ladder_forwards_and_backwards(causal, br, bc):
    Q, K, V = qkv(2, 3, 100, 40, grad=True)
    how = {"causal": causal, "Br": br, "Bc": bc}
    visible = causal_mask(100) if causal else None
    expected, S = formulas(Q, K, V, visible=visible), scores(Q, K, visible=visible)
    dO = torch.randn(2, 3, 100, 40)
    wanted = torch.autograd.grad(expected, (Q, K, V), dO.double())

    O, l, m = ladder.flash_attention_1_forward(Q, K, V, **how)
    close(m, S.amax(-1))
    close(l, torch.exp(S - S.amax(-1, keepdim=True)).sum(-1))
    of_1 = ladder.flash_attention_1_backward(Q, K, V, O, dO, l, m, **how)
    O2, L = ladder.flash_attention_2_forward(Q, K, V, **how)
    close(L, S.logsumexp(-1))
    of_2 = ladder.flash_attention_2_backward(Q, K, V, O2, dO, L, **how)
    close(O, expected)
    close(O2, expected)
    for first, second, gradient in zip(of_1, of_2, wanted, strict=True):
        close(first, gradient)
        close(second, gradient)


@pytest.mark.parametrize("number", [1, 2])
def test_ladder_refuses_a_v_of_another_width_in_its_own_names(number):
    Q, K, V = *qkv(1, 2, 20, 8)[:2], torch.randn(1, 2, 20, 4)
    l = torch.ones(1, 2, 20)
    message = "^V: head dimension 4; accepted is that of Q, 8$"
    with pytest.raises(ValueError, match=message):
        getattr(ladder, f"flash_attention_{number}_forward")(Q, K, V)
    with pytest.raises(ValueError, match=message):
        getattr(ladder, f"flash_attention_{number}_backward")(Q, K, V, V, V, *[l] * (3 - number))


def test_ladder_refuses_with_its_reason():
    Q, K, V = qkv(1, 1, 20, 16, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="ladder-flash1: float32 only"):
        ladder.flash_attention_1_forward(Q, K, V)
    with pytest.raises(ValueError, match="^Br: 0; accepted"):
        ladder.flash_attention_2_forward(Q, K, V, Br=0)
    Q, K, V = qkv(1, 2, 20, 16)
    l = torch.ones(1, 2, 20)
    for wrong, error, message in (
        ((None, l), TypeError, "l: NoneType; accepted is a torch.Tensor"),
        ((l[..., :5], l), ValueError, "l, m: shapes (1, 2, 5), (1, 2, 20); accepted is (B, H, N) twice"),
        ((l[..., :5], l[..., :5]), ValueError, "l, m: shape (1, 2, 5); accepted is (B, H, Sq) = (1, 2, 20)"),
    ):
        with pytest.raises(error) as raised:
            ladder.flash_attention_1_backward(Q, K, V, Q, Q, *wrong)
        assert str(raised.value) == message
    with pytest.raises(TypeError, match="^L: NoneType; accepted"):
        ladder.flash_attention_2_backward(Q, K, V, Q, Q, None)


# functional: mask, dropout and its RNG state in and out, block-sparse


@pytest.mark.parametrize("mask", ["none", "square", "keys"])
@pytest.mark.parametrize("causal", [False, True])
def test_functional_forms_with_a_mask(mask, causal):
    Q, K, V = qkv(2, 3, 60, 24, grad=True)
    given = {"none": None, "square": torch.rand(60, 60) < 0.7, "keys": torch.rand(2, 1, 1, 60) < 0.7}[mask]
    visible = torch.ones(60, 60, dtype=torch.bool) if given is None else given
    visible = visible & causal_mask(60) if causal else visible
    options = {"mask": given, "causal": causal}
    O, l, m, R = functional.flash_attention_forward(Q, K, V, **options)
    S, expected = scores(Q, K, visible=visible), formulas(Q, K, V, visible=visible)
    close(O, expected)
    close(m, S.amax(-1))
    seen = S.amax(-1) > -math.inf
    close(l[seen], torch.exp(S - S.amax(-1, keepdim=True)).sum(-1)[seen])
    assert (l[~seen] == 0).all()
    dO = torch.randn_like(O)
    wanted = torch.autograd.grad(expected, (Q, K, V), dO.double())
    for got, gradient in zip(functional.flash_attention_backward(Q, K, V, O, dO, l, m, R, **options), wanted, strict=True):
        close(got, gradient)
    close(functional.flash_attention(Q, K, V, **options), expected)


@pytest.mark.parametrize("shape", [(), (48,), (1, 48), (48, 48), (4, 1, 48), (4, 48, 1), (2, 1, 48, 48)], ids=str)
def test_functional_masks_broadcast_and_heads_are_grouped(shape):
    Q, (K, V) = torch.randn(2, 4, 48, 16), (torch.randn(2, 2, 48, 16) for _ in "kv")
    mask = torch.rand(shape) > 0.3
    O, l, m, R = functional.flash_attention_forward(Q, K, V, mask=mask)
    expected = [x.requires_grad_() for x in (Q, K, V)]
    keys, values = (x.repeat_interleave(2, 1) for x in (K, V))
    visible = mask.broadcast_to(2, 4, 48, 48)
    of_formulas = formulas(Q, keys, values, visible=visible)
    close(O, of_formulas)
    S = scores(Q, keys, visible=visible)
    assert torch.equal(m == -math.inf, S.amax(-1) == -math.inf)
    close(m.clamp_min(-99), S.amax(-1).clamp_min(-99))
    close(l, torch.where(m == -math.inf, 0.0, torch.exp(S - S.amax(-1, keepdim=True)).sum(-1)))
    dO = torch.randn_like(O)
    found = functional.flash_attention_backward(Q, K, V, O, dO, l, m, R, mask=mask)
    for got, gradient in zip(found, torch.autograd.grad(of_formulas, expected, dO.double()), strict=True):
        close(got, gradient, 1e-5)


def test_the_state_of_the_random_numbers_goes_in_and_comes_out():
    Q, K, V = qkv(2, 2, 50, 16, grad=True)
    O, l, m, R = functional.flash_attention_forward(Q, K, V, dropout_p=0.25)
    again = functional.flash_attention_forward(Q, K, V, dropout_p=0.25, rng_state=R)
    assert all(map(torch.equal, (O, l, m, R), again))
    other = functional.flash_attention_forward(Q, K, V, dropout_p=0.25)
    assert not torch.equal(other[3], R)
    assert not torch.equal(other[0], O)

    kept = strobe.dropout_mask((2, 2, 50, 50), 0.25, rng=R.cpu()).to(DEVICE)
    dropped = scores(Q, K).softmax(-1) * kept / 0.75
    close(O, dropped @ V.double())
    dO = torch.randn_like(O)
    wanted = torch.autograd.grad(dropped @ V.double(), (Q, K, V), dO.double())
    for got, gradient in zip(functional.flash_attention_backward(Q, K, V, O, dO, l, m, R, dropout_p=0.25), wanted, strict=True):
        close(got, gradient)
    found = torch.autograd.grad(functional.flash_attention(Q, K, V, dropout_p=0.25, rng_state=R), (Q, K, V), dO)
    assert all(torch.allclose(got.double(), gradient.double(), atol=1e-5) for got, gradient in zip(found, wanted, strict=True))


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_block_sparse_forms(dropout_p):
    Q, K, V = qkv(2, 2, 90, 16, grad=True)
    kept = torch.rand(2, 1, 3, 6) < 0.5
    kept[:, :, 0] = False  # queries of these blocks see nothing
    visible = kept.repeat_interleave(32, 2).repeat_interleave(16, 3)[..., :90, :90]
    blocks = {"block_mask": kept, "block_q": 32, "block_k": 16}
    state = torch.tensor([3, 4])
    O, l, m, R = functional.block_sparse_flash_attention_forward(Q, K, V, **blocks, dropout_p=dropout_p, rng_state=state)
    assert R is state
    factors = strobe.dropout_mask((2, 2, 90, 90), dropout_p, rng=R.cpu()).to(DEVICE) / (1 - dropout_p) if dropout_p else 1.0
    S = scores(Q, K, visible=visible)
    P = torch.where(visible, torch.exp(S - S.logsumexp(-1, keepdim=True)), 0.0).nan_to_num() * factors
    close(O, P @ V.double())
    assert (m[:, :, :32] == -math.inf).all()
    assert (l[:, :, :32] == 0).all()
    close(m[:, :, 32:], S.amax(-1)[:, :, 32:])
    dO = torch.randn_like(O)
    found = functional.block_sparse_flash_attention_backward(Q, K, V, O, dO, l, m, **blocks, rng_state=R, dropout_p=dropout_p)
    out = functional.block_sparse_flash_attention(Q, K, V, **blocks, dropout_p=dropout_p, rng_state=R)
    by_autograd = torch.autograd.grad(out, (Q, K, V), dO)
    dense = torch.autograd.grad(strobe.attention(Q, K, V, mask=visible, dropout=dropout_p, rng=R if dropout_p else None), (Q, K, V), dO)
    for got, same, wanted in zip(found, by_autograd, dense, strict=True):
        close(got, wanted)
        close(same, wanted)


def test_functional_refusals():
    Q, K, V = qkv(1, 1, 64, 16)
    with pytest.raises(ValueError, match="^dropout_p: 1.5; accepted"):
        functional.flash_attention_forward(Q, K, V, dropout_p=1.5)
    with pytest.raises(ValueError, match="^rng_state: missing"):
        functional.flash_attention_backward(Q, K, V, Q, Q, *torch.zeros(2, 1, 1, 64), dropout_p=0.5)
    kept = torch.ones(4, 4, dtype=torch.bool)
    for wrong, error, message in (
        (
            {"block_mask": torch.ones(3, 4, dtype=torch.bool)},
            ValueError,
            r"^block_mask: shape \(3, 4\); accepted is \(\.\.\., 4, 4\), blocks",
        ),
        ({"block_mask": None}, TypeError, "^block_mask: NoneType; accepted is a torch.Tensor of bool$"),
        ({"block_mask": [[True]], "causal": 2}, TypeError, r"(?s)^(?=.*block_mask: list;)(?=.*causal: int 2;)"),
        ({"block_q": None, "block_k": 0}, ValueError, r"^block_q: NoneType; accepted is an integer\nblock_k: 0; accepted are"),
        ({"Q": [1]}, TypeError, "^Q: list; accepted"),
        ({"block_mask": kept.to("meta")}, ValueError, "^block_mask: on device meta"),
    ):
        given = {"Q": Q, "K": K, "V": V, "block_mask": kept, "block_q": 16, "block_k": 16} | wrong
        with pytest.raises(error, match=message):
            functional.block_sparse_flash_attention(**given)
        with pytest.raises(error, match=message):
            functional.block_sparse_flash_attention_forward(**given)
    with pytest.raises(TypeError, match="^l: NoneType; accepted is a torch.Tensor$"):
        functional.flash_attention_backward(Q, K, V, Q, Q, None, torch.zeros(1, 1, 64))
    with pytest.raises(TypeError, match="^Q: NoneType; accepted"):
        functional.flash_attention_forward(None, K, V)


def test_the_output_beside_l_and_m_is_differentiable():
    Q, K, V = qkv(1, 2, 48, 16, grad=True)
    blocks = (torch.ones(3, 3, dtype=torch.bool), 16, 16)
    expected = torch.autograd.grad(formulas(Q, K, V).sum(), (Q, K, V))
    for O, l, m, *_ in (
        functional.flash_attention_forward(Q, K, V),
        functional.block_sparse_flash_attention_forward(Q, K, V, *blocks),
        block_sizes.flash_attention_forward_lm(Q, K, V),
        ladder.flash_attention_1_forward(Q, K, V),
    ):
        assert not any(x.requires_grad for x in (l, m))
        for got, wanted in zip(torch.autograd.grad(O.sum(), (Q, K, V)), expected, strict=True):
            close(got, wanted)
