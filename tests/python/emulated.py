"""Programs on the emulated GPU, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "cpp"  # where `make emulator` builds


def output(program: str, *arguments: str, **emulator: str) -> str:
    """The output of a Python program on the emulated GPU, which `make emulator` builds. emulator: values of STROBE_EMULATOR_<name>
    (tests/emulator/driver.cpp)."""
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
