"""Repeats the random call with a given number: python tests/python/random_call.py NUMBER [--engine NAME] [--gpu].

With --gpu, NUMBER is a number of tests/gpu/random_calls.py, otherwise one of test_random.py. STROBE_TEST_DEVICE sets the device."""

from __future__ import annotations

import argparse
import os
import random
import sys
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import strobe
from device import DEVICE, EMULATED, ON_GPU, here, running_on
from random_draw import CALLS, Call, Handed, build, draw_options, draw_shape
from random_formulas import Results
from random_judge import Judge


def scores_on_cpu(rng: random.Random) -> float:
    return rng.choices([10**4, 10**5, 10**6], [0.86, 0.13, 0.01])[0] * rng.uniform(0.3, 1)


def scores_on_gpu(rng: random.Random) -> float:
    if EMULATED:
        return rng.uniform(500, 5000)
    return rng.choices([10**5, 10**6, 10**7], [0.4, 0.4, 0.2])[0] * rng.uniform(0.3, 1)


# Numbers from here on are calls with a function of the score or the mask: small ones on a CPU, and those of the GPUs' numbers.
FUNCTIONS, FUNCTIONS_ON_GPU = 1 << 30, 1 << 60


def drawn(number: int, gpu: bool = False) -> Call:
    if number >= FUNCTIONS and not gpu:
        o = draw_options(number, functions=1.0)
        shape = draw_shape(number, o, lambda rng: rng.uniform(300, 6000), most=400, most_keys=2048)
        return build(number, o, shape, DEVICE)
    if not gpu:
        o = draw_options(number)
        return build(number, o, draw_shape(number, o, scores_on_cpu), DEVICE)
    dtypes = {"bfloat16": 0.42, "float16": 0.25, "float32": 0.25, "float64": 0.08}
    o = draw_options(number, dtypes, functions=1.0) if number >= FUNCTIONS_ON_GPU else draw_options(number, dtypes)
    return build(number, o, draw_shape(number, o, scores_on_gpu, most_keys=2**11 if EMULATED else 2**17), DEVICE)


def engines(call: Call) -> list[str | None]:
    """None, the library's own choice; and one drawn engine that runs here. Ladder engines let hidden numbers through, so NaN excludes
    them."""
    names = [name for name, missing in strobe.engines() if missing is None and name != "reference"]
    usable = [name for name in names if here(name) or (name.startswith("ladder-") and not call.spoiled)]
    rng = random.Random(f"engine {call.number // CALLS}")
    for name in rng.sample(usable, len(usable)):
        if taken_by(name, call):
            return [None, name]
    return [None]


def _leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().requires_grad_()


def taken_by(engine: str, call: Call) -> bool:
    try:
        with running_on(engine):
            for backward in (False,) if call.handed else (False, True):
                k, v, options = (call.handed.k, call.handed.v, call.handed.options) if call.handed else (call.k, call.v, call.options)
                q = call.handed.q if call.handed and call.handed.q is not None else call.q
                text = strobe.explain(q, k, v, backward=backward, engine=engine, aux=call.aux, **options)
                if "no engine takes" in text or "cannot take this problem" in text:
                    return False
    except NotImplementedError:
        return False
    return True


def run(call: Call, engine: str | None) -> Results:
    """Forward and the gradients that are asked for, through autograd. NotImplementedError: the engine does not support the call."""
    if call.handed:
        return _run_forward(call, call.handed, engine)
    tensors: dict[str, Any] = {"q": call.q, "k": call.k, "v": call.v}
    options = dict(call.options)
    tables = {name: _leaf(call.table(name)) for name in call.leaves if name.startswith("table")}
    if tables:
        options["score"] = call.score.callable({int(name.split()[1]): t for name, t in tables.items()})
    for name in call.leaves:
        if name in tensors:
            tensors[name] = _leaf(tensors[name])
        elif name not in tables:
            options[name] = _leaf(options[name])
    every = options | tensors | tables
    leaves = [every[name] for name in call.leaves]
    with running_on(engine):
        found = strobe.attention(**tensors, **options, engine=engine, return_lse=call.returns_lse, aux=call.aux)
        aux = {name: getattr(found, name) for name in call.aux}
        out, lse = (found[0], found[1] if call.returns_lse else None) if call.returns_lse or aux else (found, None)
        outputs = [out] if call.dlse is None else [out, lse]
        gradients = torch.autograd.grad(outputs, leaves, [call.dout, call.dlse][: len(outputs)])
    results = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()}) | aux
    return results | {"d" + name: t for name, t in zip(call.leaves, gradients, strict=True)}


def _run_forward(call: Call, handed: Handed, engine: str | None) -> Results:
    with running_on(engine):
        q = call.q if handed.q is None else handed.q
        found = strobe.attention(q, handed.k, handed.v, **handed.options, engine=engine, return_lse=True, aux=call.aux)
    results = {"out": found[0], "lse": found[1]} | {name: getattr(found, name) for name in call.aux}
    if call.packing and call.words["page"] and "column_sums" in results:  # (B, H, Sk)
        results["column_sums"] = call.packing.pack(results["column_sums"], True, 0.0)
    return results


def faults(call: Call, names: list[str | None]) -> list[str]:
    """The errors of these engines."""
    judge = Judge(call, torch.finfo(torch.float32).tiny if ON_GPU and call.q.dtype == torch.float32 else 0.0)
    found = []
    for engine in names:
        try:
            results = run(call, engine)
        except NotImplementedError as refusal:
            if engine is None and not (ON_GPU and call.options.get("invariant") and "invariant" in str(refusal)):
                raise  # the library's own choice may refuse `invariant` on a GPU, e.g. if block masks cut key tiles
            continue  # an engine requested by name may refuse, also because of the strides of dO
        found += [f"{engine or 'default'}: {fault}" for fault in judge.faults(results)]
        if call.options.get("deterministic"):
            again = run(call, engine)
            found += [f"{engine or 'default'}: {x} differs in a second run" for x, t in results.items() if _bits_differ(t, again[x])]
    return found


def _bits_differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a != b) & ~(a.isnan() & b.isnan())).any())


def replay(number: int, engine: str | None, gpu: bool) -> str:
    where = f"STROBE_TEST_DEVICE={os.environ['STROBE_TEST_DEVICE']} " if "STROBE_TEST_DEVICE" in os.environ else ""
    return f"{where}python tests/python/random_call.py {number}{' --gpu' * gpu}{f' --engine {engine}' if engine else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int)
    parser.add_argument("--engine", help="by default those of the test")
    parser.add_argument("--gpu", action="store_true", help="of tests/gpu/random_calls.py")
    asked = parser.parse_args()
    call = drawn(asked.number, asked.gpu)
    names = [asked.engine] if asked.engine else engines(call)
    print(call)
    print("on", *(name or "default" for name in names))
    found = faults(call, names)
    print(*found or ["no fault"], sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
