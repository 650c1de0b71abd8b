""".ci/style.py in a repository of its own: what it finds, and what it lets pass; whether the faults of tests/faults fit the code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STYLE = Path(__file__).parents[2] / ".ci" / "style.py"
NOBODY = {f"GIT_{who}_{what}": "x@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def git(folder: Path, *arguments: str) -> None:
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, env=surroundings | NOBODY)


def commit(folder: Path, subject: str) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--allow-empty", "--message", subject)


def found(folder: Path, *options: str) -> list[str]:
    done = subprocess.run([sys.executable, folder / ".ci" / "style.py", *options], check=False, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.stderr == ""
    assert done.returncode == bool(lines)
    return lines


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    (folder / ".ci").mkdir(parents=True)
    git(folder, "init", "--initial-branch=main")
    commit(folder, "before the check " + "x" * 80)
    shutil.copy(STYLE, folder / ".ci")
    commit(folder, "the check")
    return folder


def test_lines(repository):
    words = "word " * 28  # 140 columns with the last blank
    (repository / "good.py").write_text(f"{words.strip()}!\n{'é' * 140}\n{'x' * 200}\n")
    (repository / "table.md").write_text(f"| {words} | {words} |\n")
    (repository / "figures.json").write_text(f'["{words * 2}"]\n')
    assert found(repository) == []
    (repository / "bad.py").write_text(f"fine\n{words}x\n")  # this file is not even added to git
    (repository / "bad.md").write_text(f"{words * 2}\n")
    assert sorted(found(repository)) == ["bad.md:1: 280 columns; accepted: 140", "bad.py:2: 141 columns; accepted: 140"]


def test_wrapped_lines_keep_their_words(repository):
    first, second = ([f"{word}{i}" for i in range(40)] for word in ("first", "second"))
    code = f'call("{" ".join(first)}"); // {" ".join(first)}'
    before = {
        "a.h": f"// {' '.join(first)}\n// and on.\n//\n//   a drawing\n  // {' '.join(second)}\n  code();\n  {code}\n",
        "a.md": f"{' '.join(first)}\nand on\n\n- {' '.join(second)}\n- another\n```\n{' '.join(first)}\n```\n| {' '.join(first)} |\n",
    }
    for name, text in before.items():
        (repository / name).write_text(text)
    left = found(repository, "--wrap")
    assert [line.split(":")[0] for line in left] == ["a.h", "a.md"]  # what is left is code, and a fenced block
    comments, prose = ((repository / name).read_text().splitlines() for name in before)
    empty, code_begins = comments.index("//"), comments.index("  code();")
    assert "".join(line[2:] for line in comments[:empty]).split() == [*first, "and", "on."]
    assert comments[empty + 1] == "//   a drawing"
    block = comments[empty + 2 : code_begins]
    assert len(block) == 3
    assert all(line.startswith("  // second") for line in block)
    assert " ".join(line[5:] for line in block) == " ".join(second)
    assert comments[code_begins + 1 :] == [f"  {code}"]
    blank, another = prose.index(""), prose.index("- another")
    assert " ".join(prose[:blank]) == " ".join([*first, "and on"])
    assert [line[:3] for line in prose[blank + 1 : another]] == ["- s", "  s", "  s"]
    assert " ".join(line[2:] for line in prose[blank + 1 : another]) == " ".join(second)
    assert prose[another + 1 :] == ["```", " ".join(first), "```", f"| {' '.join(first)} |"]


def test_subjects_since_the_check(repository, tmp_path):
    commit(repository, "x" * 72)
    assert found(repository) == []
    commit(repository, "x" * 73)
    commit(repository, "later")
    (line,) = found(repository)
    assert line.endswith(": a subject of 73 characters; accepted: 72")
    for depth, wrong in ((1, 0), (2, 1), (3, 1)):
        shallow = tmp_path / f"depth-{depth}"
        git(tmp_path, "clone", f"--depth={depth}", f"file://{repository}", str(shallow))
        assert len(found(shallow)) == wrong


def test_subjects_of_a_branch_older_than_the_check(repository):
    git(repository, "checkout", "-b", "older", "HEAD~1")
    commit(repository, "y" * 90)
    git(repository, "checkout", "main")
    git(repository, "merge", "--no-ff", "--message", "a merge", "older")
    assert found(repository) == []


def test_each_planted_fault_fits_the_code():
    plant = STYLE.parents[1] / "tests" / "faults" / "plant.py"
    listed = subprocess.run([sys.executable, plant, "--list"], check=False, capture_output=True, text=True)
    assert listed.returncode == 0, [line for line in listed.stdout.splitlines() if "NO LONGER FITS" in line]
