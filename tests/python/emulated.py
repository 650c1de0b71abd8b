"""Programs on the emulated GPU, each in a process of its own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "cpp"  # where `make emulator` builds
# tests/emulator/run sets these for all programs alike; with an EDIT it sets another cache.
OF_RUN = ("LD_LIBRARY_PATH", "STROBE_NVRTC", "STROBE_EMULATOR_NVRTC", "STROBE_CACHE_DIR")
# Imports torch once, which takes seconds, and forks for each program. It computes nothing itself, so the copies begin without threads and
# without a GPU, as a new process does.
FORKS = """
import json, os, sys
import strobe, torch
for line in sys.stdin:
    given = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, file in enumerate((os.devnull, given["stdout"], given["stderr"])):
    os.dup2(os.open(file, os.O_RDWR), number)
os.environ.update(given["environment"])
sys.argv[1:] = given["arguments"]
exec(given["program"], {"__name__": "__main__"})
"""


def output(program: str, *arguments: str, **emulator: str) -> str:
    """The output of a Python program on the emulated GPU, which `make emulator` builds. emulator: values of STROBE_EMULATOR_<name>
    (tests/emulator/driver.cpp)."""
    environment = {**_environment(), **{f"STROBE_EMULATOR_{name}": value for name, value in emulator.items()}}
    if "EDIT" in emulator:
        command = [*_command(program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        status, stdout, stderr = done.returncode, done.stdout, done.stderr
    else:
        status, stdout, stderr = _forked(program, arguments, environment)
    assert status == 0, stdout + stderr
    return stdout


def _environment() -> dict[str, str]:
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "STROBE_TEST_DEVICE": "emulated", "PYTHONPATH": os.pathsep.join(path)}


def _command(program: str) -> list[str]:
    return [str(ROOT / "tests" / "emulator" / "run"), str(BUILD), sys.executable, "-c", program]


@functools.cache
def _forks() -> subprocess.Popen[str]:
    """One for all tests of this process. It ends when its input does."""
    return subprocess.Popen(_command(FORKS), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment())


def _forked(program: str, arguments: tuple[str, ...], environment: dict[str, str]) -> tuple[int, str, str]:
    forks = _forks()
    assert forks.stdin is not None
    assert forks.stdout is not None
    with tempfile.NamedTemporaryFile("r") as stdout, tempfile.NamedTemporaryFile("r") as stderr:
        given = {"program": program, "arguments": arguments, "stdout": stdout.name, "stderr": stderr.name}
        given["environment"] = {name: value for name, value in environment.items() if name not in OF_RUN}
        print(json.dumps(given), file=forks.stdin, flush=True)
        status = forks.stdout.readline()
        assert status, f"the process that forks for {program} has ended"
        return int(status), stdout.read(), stderr.read()
