"""Checks what no formatter checks: lines of at most 140 columns, and commit subjects of at most 72 characters.

Usage: .ci/style.py; with --wrap it breaks long lines of // comments and of Markdown, and says what is left.
"""

import re
import subprocess
import sys
from pathlib import Path

COLUMNS, SUBJECT = 140, 72
ROOT = Path(__file__).parents[1]
# Files that programs wrote, or that come from other projects.
SKIPPED_FOLDERS = ("tests/third_party/", "python/glue/third_party/", "bench/results/", "docs/figures/", "docs/h200.md")
EXCUSED = {"34d5902e8d", "5754cbbc63"}  # commits that were merged with too long a subject: history is not rewritten for a character
SKIPPED_SUFFIXES = {".ipynb", ".json", ".svg", ".png"}


def git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def files() -> list[Path]:
    names = git("ls-files", "--cached", "--others", "--exclude-standard")
    paths = (ROOT / name for name in names if not name.startswith(SKIPPED_FOLDERS))
    return [path for path in paths if path.suffix not in SKIPPED_SUFFIXES and path.is_file()]


def is_long(line: str, markdown: bool) -> bool:
    """Whether a line is too long and can be broken. Rows of a Markdown table and single words cannot."""
    return len(line) > COLUMNS and len(line.split()) > 1 and not (markdown and line.startswith("|"))


def long_lines() -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {len(line)} columns; accepted: {COLUMNS}"
        for path in files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if is_long(line, path.suffix == ".md")
    ]


def wrapped(lines: list[str], markdown: bool) -> list[str]:
    """Moves the last words of a long line to the next line of its paragraph, and so on. Code is not moved."""
    item = re.compile(r"([-*]|\d+\.) ")
    done: list[str] = []
    rest = list(reversed(lines))
    fenced = False
    while rest:
        line = rest.pop()
        fenced ^= markdown and line.lstrip().startswith("```")
        indent = re.match(r" *" if markdown else r" *// ", line)
        if not indent or fenced or not is_long(line, markdown):
            done.append(line)
            continue
        begin = indent[0]
        if markdown and (bullet := item.match(line, len(begin))):
            begin += " " * len(bullet[0])
        cut = line.rfind(" ", len(begin), COLUMNS + 1)
        if cut < 0:
            done.append(line)
            continue
        done.append(line[:cut])
        overflow = begin + line[cut + 1 :]
        follows = rest[-1][len(begin) :] if rest and rest[-1].startswith(begin) else ""
        if follows and not follows.startswith((" ", "#", ">", "|", "`" * 3)) and not item.match(follows):
            overflow += f" {follows}"
            rest.pop()
        rest.append(overflow)
    return done


def wrap() -> None:
    for path in files():
        if path.suffix in {".md", ".h", ".hpp", ".c", ".cpp", ".cu"}:
            text = path.read_text(encoding="utf-8")
            better = "\n".join(wrapped(text.split("\n"), path.suffix == ".md"))
            if better != text:
                path.write_text(better, encoding="utf-8")


def long_subjects() -> list[str]:
    """The too long subjects of the commit that added this check and of all later ones except merges. A shallow clone starts at its oldest
    commit."""
    first = git("log", "--diff-filter=A", "--format=%H", "--", str(Path(__file__).relative_to(ROOT)))
    if not first:  # not yet committed
        return []
    commits = git("log", "--no-merges", "--ancestry-path", "--abbrev=10", "--format=%h %s", f"{first[-1]}..HEAD") + git(
        "log", "-1", "--abbrev=10", "--format=%h %s", first[-1]
    )
    subjects = (commit.split(" ", 1) for commit in commits)
    return [
        f"commit {short}: a subject of {len(subject)} characters; accepted: {SUBJECT}"
        for short, subject in subjects
        if len(subject) > SUBJECT and short not in EXCUSED
    ]


def main() -> None:
    if "--wrap" in sys.argv[1:]:
        wrap()
    found = long_lines() + long_subjects()
    print(*found, sep="\n", end="\n" * bool(found))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
