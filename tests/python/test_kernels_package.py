"""The wheel strobe-attention-kernels is found where it is installed, and its kernels serve without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PREWARM = """
from strobe._prewarm import Shape, prewarm
x = Shape((1, 1, 64, 32), "float32")
print(*(kernel.compiled for kernel in prewarm({"q": x, "k": x, "v": x}, {"engine": "cuda-simt"}, False, 80)))
"""


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "STROBE_CACHE_PATH": "", **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder in which the wheel of one kernel is installed."""
    folder = tmp_path_factory.mktemp("kernels")
    made = python(PREWARM, STROBE_CACHE_DIR=str(folder / "cache"))
    assert made.stdout == "True\n", made.stderr
    subprocess.run([sys.executable, ROOT / "packages/kernels/pack.py", folder / "cache", folder, "1.2.3"], check=True)
    with zipfile.ZipFile(folder / "strobe_attention_kernels-1.2.3-py3-none-any.whl") as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def test_its_kernels_serve_without_a_compiler(site, tmp_path):
    alone = {"STROBE_CACHE_DIR": str(tmp_path / "cache"), "STROBE_NVRTC": str(tmp_path / "none")}
    assert "not in a cache" in python(PREWARM, **alone).stderr
    found = python(PREWARM, PYTHONPATH=str(site), **alone)
    assert found.stdout == "False\n", found.stderr
    assert not (tmp_path / "cache").exists()


def test_info_names_its_folder(site, tmp_path):
    code = "from strobe_tools.cli.info import kernel_cache; print(kernel_cache())"
    said = python(code, PYTHONPATH=str(site), STROBE_CACHE_DIR=str(tmp_path)).stdout
    assert said == f"{tmp_path}, further {site / 'strobe_attention_kernels'}\n"


def test_an_empty_cache_makes_no_wheel(tmp_path):
    made = subprocess.run([sys.executable, ROOT / "packages/kernels/pack.py", tmp_path, tmp_path, "1"], capture_output=True, text=True)
    assert made.returncode == 1
    assert made.stderr == f"{tmp_path}: no kernels\n"
