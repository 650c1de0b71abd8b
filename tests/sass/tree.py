"""Records the whole source of every kernel that each call of `strobe prewarm` would compile in a tree. Nothing is compiled.

A tree is a folder with a checkout whose package is built (make setup), or the git revision of one that was recorded before.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("STROBE_SASS_CACHE") or Path.home() / ".cache" / "strobe-sass")
PARTS = ("kernels", "src", "include", "python")  # parts of a checkout that determine which kernels there are, and their contents
SUFFIXES = (".h", ".hpp", ".inc", ".cpp", ".c", ".cmake", ".txt", ".py")


def recorder() -> Path:
    """recorder.cpp, compiled."""
    source = HERE / "recorder.cpp"
    library = CACHE / "recorder" / hashlib.sha256(source.read_bytes()).hexdigest()[:16] / "libcuda.so.1"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        new = library.with_name(f"new.{os.getpid()}")
        compiler = os.environ.get("CXX", "c++")
        subprocess.run([compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-o", str(new), str(source)], check=True)
        new.replace(library)
    return library


def run(tree: Path, script: str, *arguments: str, **environment: str) -> None:
    """Runs a script of this folder in the tree's Python: the recorder is its driver and its compiler, and no cache of kernels counts."""
    python = tree / ".venv" / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{tree} has no .venv: run `make setup` there first")
    library = recorder()
    own = {name: value for name, value in os.environ.items() if not name.startswith("STROBE_")}
    own |= {"LD_LIBRARY_PATH": f"{library.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}", "STROBE_NVRTC": str(library)}
    own |= {"STROBE_CACHE_DIR": "/nonexistent/strobe", "STROBE_CACHE_READONLY": "1", "STROBE_TUNING": "0"}
    subprocess.run([str(python), str(HERE / script), *arguments], check=True, cwd=tree, env=own | environment)


def digest(tree: str, parts: tuple[str, ...] = PARTS) -> str:
    """The digest of the sources of a folder or a revision."""
    root = Path(tree)
    if (root / "kernels").is_dir():
        paths = (path for part in parts for path in (root / part).rglob("*") if path.is_file() and path.suffix in SUFFIXES)
        return _digest((path.relative_to(root).as_posix(), path.read_bytes()) for path in paths)
    archive = subprocess.run(["git", "archive", tree, *parts], capture_output=True, cwd=HERE.parents[1])
    if archive.returncode:
        raise SystemExit(f"{tree} is neither a checkout nor a revision: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        members = [member for member in tar if member.isfile() and Path(member.name).suffix in SUFFIXES]
        return _digest((member.name, tar.extractfile(member).read()) for member in members)  # type: ignore[union-attr]


def _digest(files: Iterable[tuple[str, bytes]]) -> str:
    all_ = hashlib.sha256()
    for name, content in sorted(files):
        all_.update(f"{name} {len(content)}\n".encode() + content)
    return all_.hexdigest()[:16]


@dataclass(frozen=True)
class Program:
    """One kernel's whole source, and the options of its compilation."""

    options: tuple[str, ...]
    source: str
    headers: dict[str, str]

    @staticmethod
    def read(path: Path) -> Program:
        first, *headers = path.read_text().split("\n== header ")
        options, source = first.split("\n", 1)
        return Program(tuple(options.split(" ")), source, dict(header.split("\n", 1) for header in headers))  # type: ignore[misc]

    @property
    def name(self) -> str:
        """strobe::simt::Forward<strobe::simt::Config{1,2,3}>"""
        return re.search(r"using Kernel = (.*);\n", self.source)[1]  # type: ignore[index]

    @cached_property
    def key(self) -> str:
        """The digest of the text that the compiler sees, without comments and the names of files: two programs with one key have the same
        code."""
        seen: set[str] = set()

        def once(include: re.Match[str]) -> str:
            name = include[1]
            if name in seen:
                return ""
            seen.add(name)
            return _INCLUDE.sub(once, self.headers[name])

        text = _COMMENT.sub(lambda found: found[0] if found[0][0] == '"' else " ", _INCLUDE.sub(once, self.source))
        lines = [" ".join(line.split()) for line in text.splitlines()]
        kept = [line for line in lines if line and line != "#pragma once"]
        return hashlib.sha256("\n".join([*self.options, *kept]).encode()).hexdigest()[:32]


GENERATED = "score/program.h"  # the functions of the call, as ALiBi's slope: no file of the tree
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"\n]*)"[^\n]*$', re.MULTILINE)
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


@dataclass(frozen=True)
class Tree:
    """A tree's programs. calls: for each call of `strobe prewarm`, as text, the keys of its programs, in the order of their launches."""

    folder: Path
    calls: dict[str, list[str]]

    def program(self, key: str) -> Program:
        return Program.read(self.folder / "programs" / key)


def read(tree: str, archs: Iterable[int]) -> Tree:
    """Reads a tree, which is recorded on first use."""
    folder = CACHE / "trees" / digest(tree)
    calls: dict[str, list[str]] = {}
    for arch in archs:
        listing = folder / f"{arch}.json"
        if not listing.exists():
            if not (Path(tree) / "kernels").is_dir():
                raise SystemExit(f"{tree} was not recorded yet: name a folder with a checkout of it whose package is built")
            _record(Path(tree).resolve(), arch, folder)
        calls |= json.loads(listing.read_text())
    return Tree(folder, calls)


def _record(tree: Path, arch: int, folder: Path) -> None:
    (folder / "programs").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as new:
        (Path(new) / "programs").mkdir()
        run(tree, "record.py", str(arch), f"{new}/calls.json", STROBE_RECORD=new)
        programs = {path: Program.read(path) for path in (Path(new) / "programs").iterdir()}
        _check_that_it_is_built(tree, {name: text for program in programs.values() for name, text in program.headers.items()})
        for path, program in programs.items():
            path.replace(folder / "programs" / program.key)
        key = {path.name: program.key for path, program in programs.items()}
        calls = {call: [key[hash_] for hash_ in hashes] for call, hashes in json.loads(Path(new, "calls.json").read_text()).items()}
        Path(new, "keyed.json").write_text(json.dumps(calls, indent=0))
        Path(new, "keyed.json").replace(folder / f"{arch}.json")


def _check_that_it_is_built(tree: Path, headers: dict[str, str]) -> None:
    """Checks that the built library embeds the tree's kernels. (Their includes are renamed there.)"""
    for name, text in headers.items():
        if name == GENERATED:
            continue
        file = tree / "kernels" / name
        if not file.exists() or _without_includes(file.read_text()) != _without_includes(text):
            raise SystemExit(f"{tree} was built before kernels/{name} changed: run `make setup` there first")


def _without_includes(text: str) -> list[str]:
    return [line for line in _INCLUDE.sub("", text).splitlines() if line]
