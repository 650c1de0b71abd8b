"""Programs on the emulated GPU, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "cpp"  # make test-cpp
needs_emulator = pytest.mark.skipif(
    not (BUILD / "tests" / "emulator" / "libnvrtc.so").exists(), reason="make test-cpp builds the emulated GPU"
)


def output(program: str, *arguments: str, **emulator: str) -> str:
    """What a Python program prints. emulator: values of STROBE_EMULATOR_<name> (tests/emulator/driver.cpp)."""
    environment = {
        **os.environ,
        "STROBE_TEST_DEVICE": "emulated",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        **{f"STROBE_EMULATOR_{name}": value for name, value in emulator.items()},
    }
    command = [str(ROOT / "tests" / "emulator" / "run"), str(BUILD), sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
