"""What no formatter holds: lines of at most 140 columns, and commit subjects of at most 72 characters. Usage: tests/style.py"""

import subprocess
import sys
from pathlib import Path

COLUMNS, SUBJECT = 140, 72
ROOT = Path(__file__).parents[1]
# Written by programs, taken from elsewhere, or prose whose lines nobody compares.
SKIPPED_FOLDERS = ("tests/third_party/", "bench/results/", "docs/", "README.md")
SKIPPED_SUFFIXES = {".ipynb", ".json", ".svg", ".png"}


def git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def long_lines() -> list[str]:
    """Rows of a Markdown table cannot be broken, nor can a line of one word."""
    found = []
    for name in git("ls-files", "--cached", "--others", "--exclude-standard"):
        path = ROOT / name
        if name.startswith(SKIPPED_FOLDERS) or path.suffix in SKIPPED_SUFFIXES or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            breaks = len(line.split()) > 1 and not (path.suffix == ".md" and line.startswith("|"))
            if len(line) > COLUMNS and breaks:
                found.append(f"{name}:{number}: {len(line)} columns; accepted: {COLUMNS}")
    return found


def long_subjects() -> list[str]:
    """Of the commit that brought this check and of all that follow it. In a shallow clone that is the oldest commit there."""
    first = git("log", "--diff-filter=A", "--format=%H", "--", str(Path(__file__).relative_to(ROOT)))
    if not first:  # not yet committed
        return []
    commits = git("log", "--ancestry-path", "--format=%h %s", f"{first[-1]}..HEAD") + git("log", "-1", "--format=%h %s", first[-1])
    subjects = (commit.split(" ", 1) for commit in commits)
    return [
        f"commit {short}: a subject of {len(subject)} characters; accepted: {SUBJECT}"
        for short, subject in subjects
        if len(subject) > SUBJECT
    ]


def main() -> None:
    found = long_lines() + long_subjects()
    print(*found, sep="\n", end="\n" * bool(found))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
