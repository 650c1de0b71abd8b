"""The CPU's results have the same bits for any number of threads, over runs, after fork, and with concurrent callers."""

from __future__ import annotations

import multiprocessing
import os
import threading

import pytest
import torch

from cases import Inputs, call
from check import dtype_of, run, run_or_skip
from engines import available_engines

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
IDS = [*(str(d)[6:] for d in DTYPES), "packed", "few queries"]
engines = pytest.mark.parametrize("engine", available_engines())


def everything(dtype: torch.dtype) -> Inputs:
    """Grouped heads, ragged tiles, every score option and every gradient: everything that is reduced over tiles or threads."""
    g = torch.Generator().manual_seed(7)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return call(
        b=2,
        h=6,
        hkv=2,
        sq=150,
        sk=170,
        d=40,
        dv=24,
        dtype=dtype,
        gradients=("bias", "sinks"),
        causal=True,
        softcap=20.0,
        alibi_slopes=torch.rand(6, generator=g) / 8,
        bias=torch.randn(1, 1, 150, 170, generator=g).to(dtype),
        mask=torch.rand(2, 1, 1, 170, generator=g) < 0.9,
        sinks=torch.randn(6, generator=g).to(wide),
        dropout=0.1,
        seed=5,
        offset=6,
    )


def packed() -> Inputs:
    lengths = torch.tensor([0, 1, 90, 0, 33, 47, 129])
    cu = lengths.cumsum(0).to(torch.int32)
    return call(h=4, hkv=1, sq=300, sk=300, d=32, causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)


def few_queries() -> Inputs:
    """Decoding with more items than threads, so that a thread uses its scratch again."""
    return call(b=3, h=8, hkv=4, sq=2, sk=3000, d=32, causal=True)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(t, b[name]) for name, t in a.items())


@engines
@pytest.mark.parametrize("make", [*(lambda d=d: everything(d) for d in DTYPES), packed, few_queries], ids=IDS)
def test_any_number_of_threads(make, engine):
    """pytorch/pytorch#176091: results changed with the number of threads. 61 threads are more than there are tiles."""
    inputs = make()
    one = run_or_skip(inputs, engine, threads=1)
    for threads in (*range(2, 9), 61):
        assert same(run(inputs, engine, threads=threads), one), f"{threads} threads"


@engines
def test_one_row_and_many_threads(engine):
    dtype = dtype_of(engine)
    for inputs in (call(h=1, sq=1, sk=2000, d=64, dtype=dtype), call(h=1, sq=2000, sk=1, d=64, dtype=dtype)):
        assert same(run(inputs, engine, threads=8), run(inputs, engine, threads=1))


@engines
def test_run_to_run(engine):
    """Dao-AILab/flash-attention#414, #359: the same call gave other gradients."""
    inputs = everything(dtype_of(engine))
    first = run(inputs, engine, threads=4)
    for _ in range(20):
        assert same(run(inputs, engine, threads=4), first)


def in_child(inputs: Inputs, engine: str, connection) -> None:
    results = run(inputs, engine, threads=4)
    torch.set_num_threads(1)  # PyTorch's own operators would wait for ever for the parent's threads
    connection.send({name: t.float().numpy() for name, t in results.items()})
    connection.close()


@engines
def test_after_fork(engine):
    """A child of a process that has used threads computes the same, and the parent goes on; a data loader's worker does that."""
    inputs = everything(dtype_of(engine))
    torch.set_num_threads(2)
    expected = run(inputs, engine, threads=4)
    context = multiprocessing.get_context("fork")
    for _ in range(2):
        here, there = context.Pipe()
        child = context.Process(target=in_child, args=(inputs, engine, there))
        child.start()
        there.close()
        assert here.poll(60), "the child hangs"
        assert same({name: torch.from_numpy(x) for name, x in here.recv().items()}, {name: t.float() for name, t in expected.items()})
        child.join(60)
        assert child.exitcode == 0
        assert same(run(inputs, engine, threads=4), expected)


@engines
def test_after_fork_with_the_default_threads(engine):
    """With threads=None, strobe runs on PyTorch's own threads, which a child does not inherit."""
    inputs = everything(dtype_of(engine))
    torch.set_num_threads(2)
    expected = run(inputs, engine)
    pid = os.fork()
    if pid == 0:
        try:
            results = run(inputs, engine)
            torch.set_num_threads(1)  # for torch.equal, as above
            good = same(results, expected)
        except BaseException:
            good = False
        os._exit(0 if good else 1)
    watchdog = threading.Timer(60, os.kill, (pid, 9))
    watchdog.start()
    _, status = os.waitpid(pid, 0)
    watchdog.cancel()
    assert status == 0


@engines
def test_many_callers_at_once(engine):
    """Threads of Python that call at the same time share nothing; the library keeps no state between calls."""
    calls = [everything(torch.float32), everything(torch.bfloat16), packed(), call(sq=70, d=16)]
    expected = []
    for inputs in calls:
        try:
            expected.append(run(inputs, engine))
        except NotImplementedError:
            expected.append(None)
    wrong = []

    def work(offset: int) -> None:
        for round_ in range(6):
            which = (offset + round_) % len(calls)
            if expected[which] is None:
                continue
            try:
                if not same(run(calls[which], engine, threads=1 + offset % 3), expected[which]):
                    wrong.append(f"call {which} differs")
            except Exception as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
