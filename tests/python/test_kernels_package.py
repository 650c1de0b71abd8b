"""The wheel strobe-attention-kernels is found where it is installed, and its kernels serve without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import strobe

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
    made = packed(folder / "cache", folder)
    assert made.returncode == 0, made.stderr
    with zipfile.ZipFile(folder / f"strobe_attention_kernels-{strobe.__version__}-py3-none-any.whl") as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def packed(cache: Path, dist: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "packages/kernels/pack.py", cache, dist, strobe.__version__, "0123abcd", "strobe prewarm --common"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_says_what_it_was_made_of(site):
    said = (site / "strobe_attention_kernels" / "manifest.txt").read_text().splitlines()
    (folder,) = (site / "strobe_attention_kernels").glob("nvrtc-*")
    assert said == [
        f"strobe-attention {strobe.__version__}",
        f"nvrtc {folder.name.removeprefix('nvrtc-')}",
        "sources 0123abcd",
        "calls strobe prewarm --common",
        "kernels 1",
    ]
    metadata = (site / f"strobe_attention_kernels-{strobe.__version__}.dist-info" / "METADATA").read_text()
    assert f"\nRequires-Dist: strobe-attention=={strobe.__version__}\n" in metadata


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
    made = packed(tmp_path, tmp_path)
    assert made.returncode == 1
    assert made.stderr == f"{tmp_path}: no kernels\n"


def test_kernels_of_several_compilers_make_no_wheel(tmp_path):
    for version in ("13.0", "12.9"):
        (tmp_path / f"nvrtc-{version}").mkdir()
        (tmp_path / f"nvrtc-{version}" / "x.kernel").write_text("x")
    made = packed(tmp_path, tmp_path)
    assert made.returncode == 1
    assert made.stderr == f"{tmp_path}: kernels of nvrtc-12.9, nvrtc-13.0; accepted are those of one NVRTC\n"
