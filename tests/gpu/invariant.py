"""Tests `invariant` on a GPU with random mixes: a row must have the same bits alone, in batches, packed, with other strides or more
queries.

python tests/gpu/invariant.py [--problems N] [--seed N] [--engine NAME ...] [--dtype NAME ...]

Each problem is computed in four mixes. The exit status is 1 if a bit differs."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("STROBE_TEST_DEVICE", "cuda")
sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

VARIANTS = 4
LENGTHS = (90, 700, 5000)  # of the longest sequences; 5000 keys are several chunks


def main() -> int:
    import torch

    from device import DEVICE, running_on
    from invariant_mixes import mixes

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=90, help="of each engine and dtype")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", nargs="+", default=["", "cuda-sm90", "cuda-mma", "cuda-simt"], help='"": the one that is chosen')
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--longest", type=int, nargs="+", default=LENGTHS)
    asked = parser.parse_args()
    wrong = total = 0
    for engine in asked.engine:
        for dtype in asked.dtype:
            began, count, differ = time.perf_counter(), 0, Counter[str]()
            how = {"engine": engine} if engine else {}
            for longest in asked.longest:
                with running_on(engine or "default"):
                    found = mixes(asked.seed, getattr(torch, dtype), DEVICE, asked.problems // len(asked.longest), VARIANTS, longest, **how)
                    for _, bits, words in found:
                        count += 1
                        if any(bits.values()):
                            wrong += 1
                            differ.update(name for name, n in bits.items() if n)
                            print(f"  {bits}: {words}")
            total += count
            print(
                f"{engine or 'chosen'}, {dtype}: {count} mixes, {dict(differ) or 'no bit differs'}, {time.perf_counter() - began:.0f} s",
                flush=True,
            )
    print(f"{total} mixes, {wrong} with other bits")
    return 1 if wrong or not total else 0


if __name__ == "__main__":
    sys.exit(main())
