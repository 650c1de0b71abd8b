"""Compiles the kernels of tests/gpu/random_calls.py beforehand, on a machine without a GPU: the calls are made on an emulated H200 that
runs no kernels.

STROBE_EMULATOR_IDLE=1 STROBE_CACHE_DIR=... tests/emulator/run build/cpp python tests/gpu/random_ahead.py --seed N [--sets N] [...]

The cache then holds what the sets of that seed need, if this machine's NVRTC has the same version as that of the GPU's machine. The CMake
variable STROBE_TEST_NVRTC of build/cpp names the NVRTC."""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "python")]


def compile_set(number: int) -> list[str]:
    """The calls that could not be compiled, with the reason. Calls that the engine refuses are not listed."""
    from random_calls import CALLS_A_SET

    import random_call
    from random_draw import CALLS

    random_call.EMULATED = False  # draws lengths as for a real GPU
    missing = []
    for n in range(number * CALLS, number * CALLS + CALLS_A_SET):
        try:
            call = random_call.drawn(n, gpu=True)
            names = random_call.engines(call)
            random_call.run(call, names[number % len(names)])
        except NotImplementedError:
            continue
        except Exception as error:
            missing.append(f"{random_call.replay(n, None, True)}: {type(error).__name__}: {error}")
    return missing


def main() -> int:
    from random_calls import SETS_A_SEED, cores

    from random_call import FUNCTIONS_ON_GPU
    from random_draw import CALLS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="of random_calls.py")
    parser.add_argument("--sets", type=int, default=600, help="the first ones of the seed")
    parser.add_argument("--functions", action="store_true", help="the sets of random_calls.py --functions")
    parser.add_argument("--workers", type=int, default=cores())
    asked = parser.parse_args()
    if os.environ.get("STROBE_EMULATOR_IDLE") != "1" or "STROBE_CACHE_DIR" not in os.environ:
        parser.exit(2, "STROBE_EMULATOR_IDLE=1 and STROBE_CACHE_DIR are needed, and tests/emulator/run: see --help\n")
    first = asked.seed * SETS_A_SEED + (FUNCTIONS_ON_GPU // CALLS if asked.functions else 0)
    with ProcessPoolExecutor(asked.workers) as pool:
        jobs = [pool.submit(compile_set, number) for number in range(first, first + asked.sets)]
        missing = [line for job in as_completed(jobs) for line in job.result()]
    print(*missing, f"{asked.sets} sets, {len(missing)} calls without kernels", sep="\n")
    return 1 if missing else 0


if __name__ == "__main__":
    os.environ["STROBE_TEST_DEVICE"] = "emulated"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
