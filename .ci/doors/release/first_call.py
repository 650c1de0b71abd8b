"""A first call, of torch tensors or NumPy arrays, with its gradients; and that the installed wheel of compiled kernels has those of the
usual calls. Usage: first_call.py TORCH KERNELS. TORCH: the PyTorch that there is, or none; KERNELS: whether that wheel is there: yes, no"""

import os
import sys

os.environ["STROBE_OFFLINE"] = "1"  # nothing is compiled
os.environ["STROBE_CACHE_DIR"] = "/nonexistent/strobe"

import strobe
from strobe._prewarm import Shape, kernels

torch_is, kernels_are = sys.argv[1:]
MOST = 2e-6  # error of numbers near 1 in float32

if torch_is == "none":
    import numpy as np

    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, 2, 65, 16)).astype(np.float32) for _ in range(4))
    out, lse = strobe.attention(q, k, v, causal=True, return_lse=True)
    found = strobe.attention_backward(dout, q, k, v, out, lse, causal=True)
    expected = strobe.reference_backward(dout, q, k, v, causal=True)
    assert abs(out - strobe.reference(q, k, v, causal=True)[0]).max() <= MOST
    for name in ("dq", "dk", "dv"):
        wrong = abs(getattr(found, name) - getattr(expected, name)).max()
        assert wrong <= MOST * abs(getattr(expected, name)).max(), (name, wrong)
    assert "torch" not in sys.modules
else:
    import torch
    import torch.nn.functional as F

    assert torch.__version__.startswith(torch_is), torch.__version__
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 65, 16, requires_grad=True) for _ in range(3))
    dout = torch.randn(1, 2, 65, 16)
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    theirs = F.scaled_dot_product_attention(*doubles, is_causal=True)
    expected = torch.autograd.grad(theirs, doubles, dout.double())

    def check(out):
        assert (out - theirs).abs().max() <= MOST
        for x, y in zip(torch.autograd.grad(out, (q, k, v), dout), expected, strict=True):
            assert (x - y).abs().max() <= MOST * y.abs().max()

    check(strobe.attention(q, k, v, causal=True))
    with strobe.register(strict=True) as door:
        check(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert door.calls["scaled_dot_product_attention"] == {"strobe": 1, "pytorch": 0}, door

# What `strobe prewarm --common` compiles, for GPUs that are not here.
for cc in (80, 86, 89, 90, 120):
    for dim in (64, 128):
        x = Shape((2, 4, 4096, dim), "bfloat16")
        for options in ({}, {"window_right": 0}):
            for backward in (False, True):
                there = kernels({"q": x, "k": x, "v": x}, options, backward, cc)
                assert there, (cc, dim)
                assert set(there.values()) == {kernels_are == "yes"}, (cc, dim, options, backward, there)
print(f"first call, torch {torch_is}: right; kernels of the usual calls installed: {kernels_are}")
