"""Installs strobe-attention from a package index into environments that have nothing else, and makes a first call. Usage: bare.py INDEX"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
MOST_SECONDS = 60  # of a first call, in a process of its own
OLDEST = 10  # Python 3.10


class Environment(NamedTuple):
    python: str
    requirements: str  # a file of pins beside this one
    torch: str  # the version that first_call.py finds, or none
    kernels: bool = True  # with the wheel of compiled kernels


def interpreter(minor: int) -> str | None:
    """A CPython 3.minor of PATH or of pyenv."""
    name = f"python3.{minor}"
    places = [shutil.which(name), *sorted((Path.home() / ".pyenv" / "versions").glob(f"3.{minor}.*/bin/{name}"))]
    for place in filter(None, places):
        if subprocess.run([place, "-c", "import venv"], check=False, capture_output=True).returncode == 0:
            return str(place)
    return None


def environments() -> list[Environment]:
    there = {minor: found for minor in range(OLDEST, 20) if (found := interpreter(minor))}
    assert OLDEST in there, f"no python3.{OLDEST} on PATH or in ~/.pyenv"
    assert len(there) > 1, f"no Python later than 3.{OLDEST} on PATH or in ~/.pyenv"
    oldest, newest = there[OLDEST], there[max(there)]
    return [
        Environment(oldest, "numpy-oldest.txt", "none"),
        Environment(newest, "numpy.txt", "none", kernels=False),
        Environment(oldest, "torch-oldest.txt", "2.4."),
        Environment(newest, "torch.txt", "2.13."),
    ]


def walk(environment: Environment, index: Path) -> None:
    with tempfile.TemporaryDirectory(dir=os.environ["DOORS"]) as place:
        subprocess.run([environment.python, "-m", "venv", place], check=True)
        python = Path(place) / "bin" / "python"
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        began = time.perf_counter()
        ours = ["strobe-attention", *(["strobe-attention-kernels"] if environment.kernels else [])]
        subprocess.run([*pip, "install", "--no-deps", "--index-url", index.as_uri(), *ours], check=True)
        subprocess.run([*pip, "install", "--requirement", str(HERE / environment.requirements), "strobe-attention"], check=True)
        subprocess.run([*pip, "check"], check=True)
        installed = time.perf_counter()
        bare = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
        call = [str(python), str(HERE / "first_call.py"), environment.torch, "yes" if environment.kernels else "no"]
        subprocess.run(call, check=True, cwd=place, env=bare, timeout=MOST_SECONDS)
        called = time.perf_counter()
        said = subprocess.run([str(python), "--version"], check=True, capture_output=True, text=True).stdout.strip()
        print(
            f"{said}, torch {environment.torch}: installed in {installed - began:.1f} s, first call in {called - installed:.1f} s"
            f" (accepted: {MOST_SECONDS} s)",
            flush=True,
        )


def main(index: Path) -> None:
    for environment in environments():
        walk(environment, index.resolve())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
