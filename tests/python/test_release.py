"""Every copy of the version is the one of strobe.h, and the release builds what it says."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import strobe

ROOT = Path(__file__).parents[2]
RELEASE = runpy.run_path(str(ROOT / ".ci" / "release.py"))


def test_one_version():
    assert RELEASE["version"]() == strobe.__version__
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == strobe.__version__
    minor = strobe.__version__.rpartition(".")[0]
    for page in ("docs/reference.md", "tests/consumer/project/CMakeLists.txt"):
        assert re.findall(r"find_package\(strobe ([\d.]+)", (ROOT / page).read_text()) == [minor], page


def test_a_tag_of_another_version_is_refused():
    with pytest.raises(AssertionError, match=r"the tag is v9\.9\.9; strobe\.h says "):
        RELEASE["tag"]("v9.9.9")


def test_the_files_of_an_index(tmp_path):
    dist, version = tmp_path / "dist", strobe.__version__
    dist.mkdir()
    for name in (
        f"strobe_attention-{version}.tar.gz",
        f"strobe_attention-{version}-cp310-abi3-x.whl",
        f"strobe_attention_kernels-{version}-x.whl",
    ):
        (dist / name).write_text(name)
    RELEASE["index"](dist, tmp_path / "index")
    page = (tmp_path / "index/strobe-attention/index.html").read_text()
    assert re.findall(r">(strobe.*?)</a>", page) == [f"strobe_attention-{version}-cp310-abi3-x.whl", f"strobe_attention-{version}.tar.gz"]
    assert f"strobe_attention_kernels-{version}-x.whl#sha256=" in (tmp_path / "index/strobe-attention-kernels/index.html").read_text()


def test_every_door_has_what_open_wants():
    doors = sorted(path.parent for path in (ROOT / ".ci" / "doors").glob("*/run"))
    assert {"cpp", "docs", "release", "transformers"} <= {door.name for door in doors}
    for door in doors:
        pins = [line for line in (door / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
        assert pins, f"{door.name}: no pins"
        assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins), f"{door.name}: a package is not pinned"


def test_nothing_is_skipped_behind_a_door(tmp_path):
    skips = (
        'import pytest\npytest.importorskip("not_installed")\n',
        'import pytest\n\ndef test_x(): pytest.importorskip("not_installed")\n',
        'import pytest\n\n@pytest.mark.skipif(True, reason="so")\ndef test_x(): pass\n',
        'import pytest\n\n@pytest.fixture\ndef f(): pytest.skip("so")\n\ndef test_x(f): pass\n',
    )
    for number, code in enumerate(skips):
        (tmp_path / f"test_{number}.py").write_text(code)
    (tmp_path / "test_passes.py").write_text("def test_x(): pass\n")
    options = ("-q", "-p", "no:cacheprovider", "-p", "no_skips", "--continue-on-collection-errors")
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".ci" / "doors"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 1, done.stdout
    assert "nothing is skipped behind a door" in done.stdout
    assert re.search(r"^1 failed, 1 passed, 3 errors in", done.stdout, re.MULTILINE), done.stdout
