"""`threads=` beyond the system's limit: fewer threads, the same result, and never the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Address space is the one resource that every user, root included, can be denied: each thread takes its stack from it.
PROGRAM = """
import ctypes, resource
import torch
import strobe

options = {"causal": True}
q, k, v = (torch.randn(2, 4, 512, 32) for _ in range(3))
expected = strobe.attention(q, k, v, threads=1, **options)
with open("/proc/self/statm") as statm:
    now = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30), resource.RLIM_INFINITY))
CALL
print("alive")
"""
CALLS = {
    "more than PyTorch has": """
for _ in range(3):
    assert torch.equal(strobe.attention(q, k, v, threads=512, **options), expected)
assert (strobe.attention(q.numpy(), k.numpy(), v.numpy(), threads=512, **options) == expected.numpy()).all()
out, lse = strobe.reference(q, k, v, rows=[5, 1000], threads=512, **options)
assert (out[0, 0, 5] - expected[0, 0, 5]).abs().max() < 1e-5
""",
    "as many as PyTorch has": """
ctypes.CDLL(None).omp_set_num_threads(512)  # torch.set_num_threads alone would start threads of another pool, too
assert torch.get_num_threads() == 512
for _ in range(3):
    assert (strobe.attention(q, k, v, **options).numpy() == expected.numpy()).all()  # torch.equal would start the 512 threads
""",
}


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
@pytest.mark.parametrize("call", CALLS)
def test_threads_that_the_system_does_not_give(call):
    program = PROGRAM.replace("CALL", CALLS[call])
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.stdout.strip() == "alive", done.stderr
