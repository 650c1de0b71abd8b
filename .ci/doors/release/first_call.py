"""A first call, of torch tensors or NumPy arrays. Usage: first_call.py TORCH, where TORCH is the PyTorch that there is, or none"""

import sys

import strobe

torch_is = sys.argv[1]
if torch_is == "none":
    import numpy as np

    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, 2, 65, 16)).astype(np.float32) for _ in range(4))
    out, lse = strobe.attention(q, k, v, causal=True, return_lse=True)
    assert strobe.attention_backward(dout, q, k, v, out, lse, causal=True).dq.shape == q.shape
    assert abs(out - strobe.reference(q, k, v, causal=True)[0]).max() <= 1e-6
    assert "torch" not in sys.modules
else:
    import torch
    import torch.nn.functional as F

    assert torch.__version__.startswith(torch_is), torch.__version__
    q, k, v = (torch.randn(1, 2, 65, 16, requires_grad=True) for _ in range(3))
    out = strobe.attention(q, k, v, causal=True)
    out.sum().backward()
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (out - theirs).abs().max() <= 1e-6
    with strobe.register() as door:
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), out), door
