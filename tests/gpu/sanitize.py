"""compute-sanitizer (memcheck, racecheck) over calls that cover the kernels' options: python tests/gpu/sanitize.py [--calls]."""

from __future__ import annotations

import os
import subprocess
import sys

TOOLS = ("memcheck", "racecheck")


def calls() -> None:
    """Small calls of every engine of the GPU, forward and backward."""
    import torch

    import strobe

    torch.manual_seed(0)
    options = [
        {},
        {"causal": True},
        {"window": (40, 8), "softcap": 20.0},
        {"causal": True, "dropout": 0.2, "seed": 1},
        {"mask": torch.rand(1, 1, 130, 150, device="cuda") < 0.7, "deterministic": True},
        {"bias": torch.randn(1, 3, 130, 150, device="cuda", requires_grad=True), "causal": True},
        {"block_mask": strobe.BlockMask.from_kept(torch.rand(1, 1, 3, 3) < 0.6, 64, 64, 130, 150).to("cuda")},
    ]
    for engine, missing in strobe.engines():
        if missing is not None or not engine.startswith("cuda-"):
            continue
        for dtype in (torch.float32, torch.bfloat16):
            for dim in (64, 80, 128):
                for more in options:
                    q = torch.randn(2, 3, 130, dim, device="cuda", dtype=dtype, requires_grad=True)
                    k, v = (torch.randn(2, 3, 150, dim, device="cuda", dtype=dtype, requires_grad=True) for _ in "kv")
                    try:
                        strobe.attention(q, k, v, engine=engine, **more).float().square().sum().backward()
                    except NotImplementedError:
                        continue
    torch.cuda.synchronize()


def main() -> int:
    calls()  # compiles the kernels, outside the sanitizer
    status = 0
    for tool in TOOLS:
        command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1", "--kernel-name", "kns=kernel"]
        print(f"{tool}:", flush=True)
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        status |= subprocess.run([*command, sys.executable, __file__, "--calls"], env=environment, check=False).returncode
    return status


if __name__ == "__main__":
    if sys.argv[1:] == ["--calls"]:
        calls()
    else:
        sys.exit(main())
