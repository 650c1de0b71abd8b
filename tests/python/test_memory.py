"""Extra memory is linear in the sequence length: peaks of forward + backward at two lengths, in a process of their own."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref

import pytest
import torch

from check import takes
from engines import available_engines
from strobe._call import Allocator, Structs

# The peak of resident memory, minus that before the call with every page of the inputs touched. glibc's arenas would keep freed memory.
SCRIPT = """
import json, resource, sys
import torch, strobe
engine, dtype, length = sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[3])
h, hkv, d = 2, 1, 64
torch.set_num_threads(2)

def step(n):
    q, k, v = (torch.randn(1, heads, n, d).to(dtype).requires_grad_() for heads in (h, hkv, hkv))
    dout = torch.randn(1, h, n, d).to(dtype)
    before = int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0])
    out = strobe.attention(q, k, v, causal=True, engine=engine)
    out.backward(dout)
    return before

step(64)  # pays the costs that occur once: threads, code, tables
open("/proc/self/clear_refs", "w").write("5")  # resets the peak
before = step(length)
peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
print(json.dumps((peak - before) * 1024))
"""

SHORT, LONG = 1024, 4096


def extra(engine: str, dtype: str, length: int) -> int:
    words = [sys.executable, "-c", SCRIPT, engine, dtype, str(length)]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize("engine", available_engines())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extra_memory_per_token(engine, dtype, record_property):
    """With two threads, memory per token is that of the results, plus scratch of at most twice what q, k, v, out and their gradients take
    in float32. One row of S alone, at the longer length, is far more than that."""
    if not takes(engine, getattr(torch, dtype), 64):
        pytest.skip(f"{engine} does not take {dtype}")
    heads, heads_kv, d = 2, 1, 64
    element = 4 if dtype == "float32" else 2
    results = 2 * (heads + heads_kv) * d * element + heads * 4
    bound = results + 2 * 4 * (heads + heads_kv) * d * 4
    assert bound < heads * LONG * 4
    slope = (extra(engine, dtype, LONG) - extra(engine, dtype, SHORT)) / (LONG - SHORT)
    record_property("bytes per token", slope)
    record_property("bound", bound)
    assert slope <= bound


def test_a_workspace_does_not_wait_for_the_garbage_collector():
    """A workspace refers to q and to the call's memory on a GPU. In a reference cycle both would stay until the collector runs."""
    gc.disable()
    try:
        memory = torch.empty(8)
        gone = weakref.ref(memory)
        structs = Structs({}, {}, {}, lambda *_: None, lambda _, memory=memory: Allocator(lambda count: (memory, memory.data_ptr())))
        del memory, structs
        assert gone() is None
    finally:
        gc.enable()
