"""First use: causal attention, its gradients, and the same forward as a module and in NumPy."""

import torch

import strobe

q, k, v = (torch.randn(2, 8, 1024, 64, requires_grad=True) for _ in range(3))  # (batch, heads, sequence, head dimension)
out = strobe.attention(q, k, v, causal=True)
out.sum().backward()
print(out.shape, q.grad.shape)

attend = strobe.nn.FlashAttention(64, causal=True)  # the same as a module, its options set once
print("the module differs by", (attend(q, k, v) - out).abs().max().item())

as_numpy = strobe.attention(*(x.detach().numpy() for x in (q, k, v)), causal=True)
print("PyTorch and NumPy differ by", abs(out.detach().numpy() - as_numpy).max())
