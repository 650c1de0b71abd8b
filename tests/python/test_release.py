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


def whole_release() -> dict[str, int]:
    version = strobe.__version__
    wheel = f"strobe_attention-{version}-cp310-abi3-manylinux_2_17_{{0}}.manylinux2014_{{0}}.manylinux_2_28_{{0}}.whl"
    names = (f"strobe_attention-{version}.tar.gz", wheel.format("x86_64"), wheel.format("aarch64"))
    return dict.fromkeys((*names, f"strobe_attention_kernels-{version}-py3-none-any.whl"), 5_000_000)


def test_a_whole_release_is_accepted():
    assert len(whole_release()) == len(RELEASE["FILES"]) == 4
    assert RELEASE["faults"](whole_release(), RELEASE["FILES"]) == []


@pytest.mark.parametrize("kind", RELEASE["FILES"])
def test_a_file_that_is_missing_is_named(kind):
    files = {name: size for name, size in whole_release().items() if not re.fullmatch(RELEASE["FILES"][kind].replace("{}", "[^-]+"), name)}
    (found,) = RELEASE["faults"](files, RELEASE["FILES"])
    assert found.startswith(f"{kind}: 0 files; accepted is one")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (strobe.__version__, "9.9.9"),
        ("-cp310-abi3-", "-cp312-cp312-"),
        ("manylinux_2_17_x86_64.manylinux2014_x86_64.manylinux_2_28_x86_64", "linux_x86_64"),
        ("py3-none-any", "py3-none-manylinux_2_28_x86_64"),
        (".tar.gz", ".zip"),
    ],
)
def test_a_file_of_another_name_is_refused(old, new):
    """It is refused itself, and missing under its right name."""
    files = {name.replace(old, new): size for name, size in whole_release().items()}
    found = RELEASE["faults"](files, RELEASE["FILES"])
    for name in files.keys() - whole_release().keys():
        assert f"{name}: none of sdist, x86_64, aarch64, kernels in version {strobe.__version__}" in found
    assert len(found) == 2 * len(files.keys() - whole_release().keys()) > 0


def test_files_too_many_or_of_no_size_are_refused():
    files = whole_release()
    wheel = next(name for name in files if name.endswith("x86_64.whl"))
    again = wheel.replace("manylinux_2_17_x86_64.manylinux2014_x86_64.", "")
    assert RELEASE["faults"](files | {again: 1}, RELEASE["FILES"])[0].startswith("x86_64: 2 files")
    for size in (0, 5_000_001):
        assert RELEASE["faults"](files | {wheel: size}, RELEASE["FILES"]) == [f"{wheel}: {size} bytes; accepted are 1 to 5000000"]
    (found,) = RELEASE["faults"](files | {"notes.txt": 1}, RELEASE["FILES"])
    assert found.startswith("notes.txt: none of")


def test_a_part_of_a_release_is_checked_alone():
    files = whole_release()
    kernels = next(name for name in files if "kernels" in name)
    assert RELEASE["faults"]({kernels: 1}, ["kernels"]) == []
    assert len(RELEASE["faults"](files, ["kernels"])) == 3


def test_the_digest_of_kernels_follows_compiler_and_calls():
    digest = RELEASE["digest_of_kernels"]
    assert digest("--arch", "80", "13.0") == digest("--arch", "80", "13.0")
    assert len({digest("--arch", "80", "13.0"), digest("--arch", "90", "13.0"), digest("--arch", "80", "13.1")}) == 3


def test_a_release_is_made_of_pinned_actions_with_the_rights_of_one_step():
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    uses = re.findall(r"uses: (.*)", workflow)
    assert uses
    assert all(re.match(r"[\w./-]+@[0-9a-f]{40} # v\d", each) for each in uses), uses
    jobs = re.split(r"^  (?=\w+:)", workflow.partition("\njobs:\n")[2], flags=re.MULTILINE)[1:]
    rights = {job.partition(":")[0]: set(re.findall(r"^      ([\w-]+): write", job, re.MULTILINE)) for job in jobs}
    assert {job: granted for job, granted in rights.items() if granted} == {
        "publish": {"id-token"},
        "attest": {"id-token", "attestations"},
        "page": {"contents"},
    }


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
