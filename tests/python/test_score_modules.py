"""strobe.nn's functions of the score and the mask: against plain formulas, with gradients, in 16 bits, saved and compiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import strobe
from device import DEVICE

B, H, S, D = 2, 6, 35, 16


def drawn(sq: int, sk: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sq + sk)
    shapes = ((B, H, sq, D), (B, H, sk, D), (B, H, sk, D))
    return [torch.randn(x, generator=generator, dtype=torch.float64).to(DEVICE, dtype).requires_grad_() for x in shapes]


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    q, k, v, bias = (x.double() for x in (q, k, v, bias))
    return torch.softmax(scale * q @ k.mT + bias, -1) @ v


def distances(sq: int, sk: int, offset: int) -> Tensor:
    """The position of each key less that of each query."""
    return torch.arange(sk)[None] - torch.arange(sq)[:, None] - offset


def t5_bucket(distance: int, bidirectional: bool, buckets: int, most: int) -> int:
    """The bucket as arXiv:1910.10683 describes it, with the rounding of its code."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    near = buckets // 2
    if distance < near:
        return first + distance
    ratio = float(torch.log(torch.tensor(distance / near, dtype=torch.float32))) / math.log(most / near)
    return first + min(near + int(ratio * (buckets - near) + 1e-6), buckets - 1)


def alibi_slopes(heads: int) -> list[float]:
    """The function of ALiBi's code."""
    if math.log2(heads).is_integer():
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start ** (n + 1) for n in range(heads)]
    lower = 2 ** math.floor(math.log2(heads))
    return alibi_slopes(lower) + alibi_slopes(2 * lower)[0::2][: heads - lower]


def bias_of(module: strobe.nn.RelativeBias, sq: int, sk: int, offset: int) -> Tensor:
    numbers = [module.bidirectional, module.num_buckets, module.max_distance]
    rows = [[t5_bucket(int(n), *numbers) for n in row] for row in distances(sq, sk, offset)]
    return module.weight[torch.tensor(rows, device=DEVICE)].permute(2, 0, 1)


def alibi_of(module: strobe.nn.AlibiSlopes, sq: int, sk: int, offset: int) -> Tensor:
    return -module.slopes[:, None, None] * distances(sq, sk, offset).abs().to(DEVICE)


MODULES: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "T5, both sides": (lambda **more: strobe.nn.RelativeBias(H, 16, 20, **more), bias_of),
    "T5, behind the query": (lambda **more: strobe.nn.RelativeBias(H, 9, 24, bidirectional=False, **more), bias_of),
    "T5, few buckets": (lambda **more: strobe.nn.RelativeBias(H, 4, 2, **more), bias_of),
    "ALiBi": (lambda **more: strobe.nn.AlibiSlopes(H, **more), alibi_of),
}


@pytest.mark.parametrize("offset", [0, 12])
@pytest.mark.parametrize("case", MODULES)
def test_scores_and_gradients(case, offset):
    make, formula = MODULES[case]
    module = make(device=DEVICE)
    sq, sk = S - offset, S
    q, k, v = drawn(sq, sk, torch.float32)
    inputs = [q, k, v, *module.parameters()]
    out = strobe.attention(q, k, v, score=module(offset), scale=0.5)
    expected = plain(q, k, v, formula(module, sq, sk, offset), 0.5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    dout = torch.cos(torch.arange(out.numel(), device=DEVICE, dtype=torch.float32)).view(out.shape)
    found = torch.autograd.grad(out, inputs, dout)
    for got, of in zip(found, torch.autograd.grad(expected, inputs, dout.double()), strict=True):
        torch.testing.assert_close(got, of, rtol=1e-4, atol=1e-4)
    assert found[-1].abs().max() > 1e-3


@pytest.mark.parametrize("case", ["T5, both sides", "ALiBi"])
def test_half_precision(case):
    make, formula = MODULES[case]
    module = make(device=DEVICE, dtype=torch.bfloat16)
    q, k, v = drawn(S, S, torch.bfloat16)
    out = strobe.attention(q, k, v, score=module())
    expected = plain(q, k, v, formula(module, S, S, 0), D**-0.5)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    (parameter,) = module.parameters()
    (found,) = torch.autograd.grad(out.sum() + out.square().sum(), [parameter])
    (of,) = torch.autograd.grad(expected.sum() + expected.square().sum(), [parameter])
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, of, rtol=5e-2, atol=5e-2 * float(of.abs().max()))


def test_the_slopes_at_first_are_alibis():
    for heads in (1, 2, 6, 8, 12, 16, 20):
        expected = torch.tensor(alibi_slopes(heads))
        torch.testing.assert_close(strobe.nn.AlibiSlopes(heads).slopes.detach(), expected)


def test_state_dicts_have_the_parameters_alone():
    bias, alibi = strobe.nn.RelativeBias(H), strobe.nn.AlibiSlopes(H)
    assert {name: x.shape for name, x in bias.state_dict().items()} == {"weight": (32, H)}
    assert {name: x.shape for name, x in alibi.state_dict().items()} == {"slopes": (H,)}
    other = strobe.nn.RelativeBias(H)
    other.load_state_dict(bias.state_dict())
    q, k, v = drawn(S, S, torch.float32)
    scores = [x.to(DEVICE)() for x in (bias, other)]
    assert torch.equal(*(strobe.attention(q, k, v, score=score) for score in scores))


def test_a_step_of_an_optimiser_is_seen():
    module = strobe.nn.AlibiSlopes(H, device=DEVICE)
    q, k, v = drawn(S, S, torch.float32)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.002)
    for _ in range(3):
        out = strobe.attention(q, k, v, score=module())
        torch.testing.assert_close(out.double(), plain(q, k, v, alibi_of(module, S, S, 0), D**-0.5), rtol=1e-5, atol=1e-5)
        optimiser.zero_grad()
        out.square().sum().backward()
        optimiser.step()


@pytest.mark.parametrize(("height", "width", "kernel"), [(5, 7, 3), (7, 5, (5, 3)), (4, 3, (1, 3)), (3, 3, 3)])
def test_each_pixel_sees_its_neighborhood(height, width, kernel):
    module = strobe.nn.Neighborhood2d(height, width, kernel)
    rows, columns = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    visible = torch.zeros(height * width, height * width, dtype=torch.bool)
    for i in range(height * width):
        top = min(max(i // width - rows // 2, 0), height - rows)
        left = min(max(i % width - columns // 2, 0), width - columns)
        for y in range(top, top + rows):
            for x in range(left, left + columns):
                visible[i, y * width + x] = True
    q, k, v = drawn(height * width, height * width, torch.float32)
    expected = strobe.attention(q, k, v, mask=visible.to(DEVICE))
    torch.testing.assert_close(strobe.attention(q, k, v, mask=module()), expected)
    torch.testing.assert_close(strobe.attention(q, k, v, block_mask=module.block_mask(16, device=DEVICE)), expected)


def test_blocks_far_from_the_neighborhood_are_left_out():
    blocks = strobe.nn.Neighborhood2d(32, 16, 3).block_mask(block=32)
    assert blocks.cols.shape[0] < 16 * 4  # of 16 * 16


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias, self.alibi, self.seen = strobe.nn.RelativeBias(H), strobe.nn.AlibiSlopes(H), strobe.nn.Neighborhood2d(5, 7, 3)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        first = strobe.attention(q, k, v, score=self.bias())
        return strobe.attention(first, k, v, score=self.alibi(), mask=self.seen())


def test_compiled():
    torch._dynamo.reset()
    layer = Layer().to(DEVICE)
    inputs = [*drawn(S, S, torch.float32), *layer.parameters()]
    found, expected = (f(*inputs[:3]) for f in (torch.compile(layer, backend="aot_eager", fullgraph=True), layer))
    torch.testing.assert_close(found, expected)
    both = (torch.autograd.grad(out.square().sum(), inputs) for out in (found, expected))
    for got, of in zip(*both, strict=True):
        torch.testing.assert_close(got, of)


def test_what_they_print():
    assert repr(strobe.nn.RelativeBias(8)) == "RelativeBias(8, num_buckets=32, max_distance=128, bidirectional=True)"
    assert repr(strobe.nn.AlibiSlopes(8)) == "AlibiSlopes(8)"
    assert repr(strobe.nn.Neighborhood2d(8, 9, 3)) == "Neighborhood2d(8, 9, kernel=(3, 3))"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: strobe.nn.RelativeBias(0), ValueError, "heads: 0; accepted are integers from 1"),
        (lambda: strobe.nn.RelativeBias(8.0), TypeError, "heads: float; accepted is an integer"),
        (lambda: strobe.nn.RelativeBias(8, 2), ValueError, "num_buckets: 2; accepted are integers from 4"),
        (lambda: strobe.nn.RelativeBias(8, 7), ValueError, "num_buckets: 7; accepted with bidirectional is an even number"),
        (lambda: strobe.nn.RelativeBias(8, 32, 8), ValueError, "max_distance: 8; accepted are integers from 9"),
        (lambda: strobe.nn.RelativeBias(8, bidirectional=1), TypeError, "bidirectional: int 1; accepted is True or False"),
        (lambda: strobe.nn.AlibiSlopes(0), ValueError, "heads: 0; accepted are integers from 1"),
        (lambda: strobe.nn.Neighborhood2d(0, 4, 3), ValueError, "height: 0; accepted are integers from 1"),
        (lambda: strobe.nn.Neighborhood2d(4, 4, 2), ValueError, "kernel: 2; accepted are odd integers"),
        (lambda: strobe.nn.Neighborhood2d(4, 4, 5), ValueError, "kernel: 5; accepted are integers from 1 to 4"),
        (lambda: strobe.nn.Neighborhood2d(4, 4, (3, 3, 3)), ValueError, "kernel: .*; accepted is an odd integer, or two of them"),
        (lambda: strobe.nn.Neighborhood2d(4, 4, "3"), TypeError, "kernel: str; accepted is an integer"),
    ],
)
def test_what_is_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()
