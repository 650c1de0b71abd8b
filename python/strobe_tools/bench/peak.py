"""The peak rate of the machine's cores, measured: multiply-adds in registers on every core at once."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_UNITS = {"fma": "fp32 multiply-adds", "dot": "bf16 dot products", "tile": "bf16 tile products"}
_SECONDS, _REPEATS = 0.05, 5


def measure(threads: int) -> dict[str, float]:
    """FLOP/s, over all threads, of each kind of instruction that the machine has ("fma", "dot", "tile"). Empty without a C compiler."""
    library = _compile()
    if library is None:
        return {}
    peaks = {}
    with ThreadPoolExecutor(threads) as pool:
        for unit in _UNITS:
            function = getattr(library, f"peak_{unit}")
            function.argtypes, function.restype = [ctypes.c_double], ctypes.c_double
            peaks[unit] = max(sum(pool.map(function, [_SECONDS] * threads)) for _ in range(_REPEATS))
    return {unit: peak for unit, peak in peaks.items() if peak > 0}


def describe(peaks: dict[str, float]) -> str:
    return ", ".join(f"{peak / 1e9:,.0f} GFLOP/s in {_UNITS[unit]}" for unit, peak in peaks.items())


def of_dtype(peaks: dict[str, float], dtype: str) -> float | None:
    """The highest rate at which the machine multiplies and adds in this dtype."""
    return max((peak for unit, peak in peaks.items() if unit == "fma" or dtype != "float32"), default=None)


def _compile() -> ctypes.CDLL | None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "peak.so"
        options = ["-O3", "-march=native", "-ffp-contract=fast", "-shared", "-fPIC"]
        built = subprocess.run([compiler, *options, "-o", library, Path(__file__).with_name("peak.c")], capture_output=True, check=False)
        return ctypes.CDLL(str(library)) if built.returncode == 0 else None
