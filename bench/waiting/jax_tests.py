# ruff: noqa: E402 — the arguments are taken away before the tests are imported
"""JAX's own attention tests on Strobe: python jax_tests.py FILE [MODE] [pytest options], beside FILE fetched from jax-ml/jax.

FILE: tests/nn_test.py, fused_attention_stablehlo_test.py or fused_attention_stablehlo_multigpu_test.py. MODE: "named" (implementation "xla"
and "cudnn" are Strobe, None is JAX's own, the tests' reference) or "all" (Strobe everywhere). On a CPU four devices stand for GPUs, and
what only asks for a GPU is not skipped."""

import os
import sys

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
file, mode, *rest = sys.argv[1:]
sys.argv = sys.argv[:1]
import jax
import jax.numpy as jnp
import pytest
from jax._src import test_util as jtu
from jax._src.cudnn import fused_attention_stablehlo as cudnn

import strobe.jax
from strobe.jax.nn import dot_product_attention

theirs = jax.nn.dot_product_attention
cuda_tests = "fused" in file


def own(*args, implementation=None, **kwargs):
    strobes = mode == "all" or implementation == "cudnn" or (implementation == "xla" and not cuda_tests)
    return (dot_product_attention if strobes else theirs)(*args, **kwargs)


jax.nn.dot_product_attention = own
jtu.run_on_devices = lambda *_: lambda test: test
if cuda_tests:
    jtu.is_cuda_compute_capability_at_least = jtu.is_cuda_compute_capability_equal = lambda *_: True
    jtu.is_cuda_version_at_least = lambda *_: False
    cudnn.check_cudnn_version = lambda: 91900


def fused(
    query,
    key,
    value,
    bias=None,
    mask=None,
    q_seqlen=None,
    kv_seqlen=None,
    q_offsets=None,
    kv_offsets=None,
    *,
    scale=1.0,
    mask_type=cudnn.MaskType.NO_MASK,
    seed=42,
    dropout_rate=0.0,
    qkv_layout="BTNH",
    sliding_window_length=None,
    use_fp8=False,
    return_residual=False,
    **_,
):
    """cuDNN's function, in Strobe's terms."""
    if use_fp8 or q_offsets is not None:
        raise NotImplementedError("FP8 products and segments by offsets")
    bnth, causal = qkv_layout == "BNTH", mask_type in (cudnn.MaskType.CAUSAL, cudnn.MaskType.PADDING_CAUSAL)
    rows = query.shape[2 if bnth else 1]
    if mask is not None and mask.dtype != jnp.bool_:
        bias, mask = mask if bias is None else bias + mask, None
    options = {"dropout": dropout_rate, "seed": seed} if dropout_rate else {}
    if kv_seqlen is not None and mask_type in (cudnn.MaskType.PADDING, cudnn.MaskType.PADDING_CAUSAL):
        options["seqused_k"] = kv_seqlen
    window = (sliding_window_length - 1, 0 if causal else None) if sliding_window_length else None
    if bias is not None and bias.ndim < 4:
        bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    found = strobe.jax.attention(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        scale=scale,
        causal=causal,
        alignment="top_left",
        window=window,
        layout="bhsd" if bnth else "bshd",
        return_lse=True,
        **options,
    )
    out, lse = found
    if "seqused_k" in options:
        counts = jnp.arange(rows)[None] < q_seqlen[:, None]
        out = jnp.where(counts[:, None, :, None] if bnth else counts[:, :, None, None], out, 0)
    return (out, lse) if return_residual else out


cudnn.dot_product_attention = fused


sys.exit(pytest.main([file, "-q", "-p", "no:cacheprovider", "--tb=line", *rest]))
