#!/usr/bin/env python3
"""Builds what is released, and judges it.

    .ci/release.py build DIST [PART...]  # parts: sdist, wheel, aarch64, kernels; by default all
    .ci/release.py check DIST [PART...]  # that DIST has these parts, by default all, and nothing else; names, sizes, pages of an index
    .ci/release.py index DIST FOLDER     # FOLDER: a package index for pip install --index-url file://FOLDER
    .ci/release.py tag NAME              # whether this checkout may be released as the tag v1.2.3

It runs in an environment with .ci/doors/release/requirements.txt, and compiles with ccache if CMAKE_CXX_COMPILER_LAUNCHER says so.
`aarch64` is a cross build with Debian's compiler. `kernels` is the companion wheel of what `wheel` has made before; it needs that
environment's NVRTC, but no GPU.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 5_000_000
# The compute capabilities of the companion wheel: A100, A10 and RTX 30, L40 and RTX 40, H100 and H200, RTX 50.
ARCHS = (80, 86, 89, 90, 120)


def version() -> str:
    """The version, which is defined only in strobe.h."""
    header = (ROOT / "include" / "strobe" / "strobe.h").read_text()
    return ".".join(re.findall(r"^#define STROBE_VERSION_\w+ (\d+)", header, re.MULTILINE))


def run(*command: str | Path, **variables: str) -> None:
    subprocess.run([str(word) for word in command], check=True, cwd=ROOT, env={**os.environ, **variables})


def pip_wheel(dist: Path, build: str, *settings: str, **variables: str) -> None:
    """Compiles a wheel and gives it the name of the oldest manylinux on which it runs."""
    with tempfile.TemporaryDirectory() as made:
        options = [f"--config-settings={x}" for x in (f"build-dir=build/{build}", *settings)]
        run(
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            *options,
            "--wheel-dir",
            made,
            ROOT,
            **variables,
        )
        (wheel,) = Path(made).glob("*.whl")
        run("auditwheel", "repair", "--wheel-dir", dist, wheel)


def build_wheel(dist: Path) -> None:
    pip_wheel(dist, "wheel")


def build_aarch64(dist: Path) -> None:
    toolchain = f"cmake.define.CMAKE_TOOLCHAIN_FILE={ROOT / 'tests' / 'cross' / 'aarch64.cmake'}"
    pip_wheel(dist, "wheel-aarch64", toolchain, CXX="", _PYTHON_HOST_PLATFORM="linux-aarch64")


def build_sdist(dist: Path) -> None:
    code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, dist)


def digest_of_kernels(*more: str) -> str:
    """A digest of all that determines which kernels a wheel has and what is in them: the code of the kernels, the choice among them, the
    list of calls, and `more`."""
    found = hashlib.sha256()
    places = [path for folder in ("kernels", "src") for path in (ROOT / folder).rglob("*.*")]
    places += [ROOT / "python" / "strobe" / "_prewarm.py", ROOT / "python" / "strobe_tools" / "cli" / "prewarm.py"]
    for path in sorted(places):
        content = path.read_bytes()
        found.update(f"{path.relative_to(ROOT).as_posix()} {len(content)}\n".encode() + content)
    for word in more:
        found.update(f"{word}\n".encode())
    return found.hexdigest()[:16]


def build_kernels(dist: Path) -> None:
    """The companion wheel: the cache that `strobe prewarm --common` of the built wheel fills, as a package."""
    calls = ["prewarm", "--common", *(word for arch in ARCHS for word in ("--arch", str(arch)))]
    sources = digest_of_kernels(*calls, metadata.version("nvidia-cuda-nvrtc"))
    cache = ROOT / "build" / "kernels" / sources  # kernels of other sources, lists and compilers stay out of the wheel
    (wheel,) = (path for path in dist.glob(f"strobe_attention-{version()}-*.whl") if path.stem.endswith(os.uname().machine))
    with tempfile.TemporaryDirectory() as place:
        zipfile.ZipFile(wheel).extractall(place)
        here = {"PYTHONPATH": place, "STROBE_CACHE_DIR": str(cache), "STROBE_CACHE_PATH": ""}
        run(sys.executable, "-m", "strobe", *calls, **here)
    run(sys.executable, ROOT / "packages" / "kernels" / "pack.py", cache, dist, version(), sources, " ".join(["strobe", *calls]))


PARTS = {"sdist": build_sdist, "wheel": build_wheel, "aarch64": build_aarch64, "kernels": build_kernels}
_WHEEL = r"strobe_attention-{}-cp310-abi3-(?:manylinux\w+\.)*manylinux_\w+"  # one for every CPython from 3.10 on
FILES = {  # of a release: patterns of their names, {} being the version
    "sdist": r"strobe_attention-{}\.tar\.gz",
    "x86_64": rf"{_WHEEL}_x86_64\.whl",
    "aarch64": rf"{_WHEEL}_aarch64\.whl",
    "kernels": r"strobe_attention_kernels-{}-py3-none-any\.whl",
}


def faults(sizes: dict[str, int], wanted: Iterable[str]) -> list[str]:
    """What is wrong with a folder that has files of these names and sizes, in bytes, if these of FILES are wanted."""
    patterns = {kind: FILES[kind].replace("{}", re.escape(version())) for kind in wanted}
    found = []
    for kind, pattern in patterns.items():
        count = sum(re.fullmatch(pattern, name) is not None for name in sizes)
        if count != 1:
            found.append(f"{kind}: {count} files; accepted is one, {pattern}")
    for name, size in sizes.items():
        if not any(re.fullmatch(pattern, name) for pattern in patterns.values()):
            found.append(f"{name}: none of {', '.join(patterns)} in version {version()}")
        if not 0 < size <= MOST_BYTES:
            found.append(f"{name}: {size} bytes; accepted are 1 to {MOST_BYTES}")
    return found


def check(dist: Path, parts: Iterable[str]) -> None:
    """parts: those that were built on this machine; none: DIST has to be a whole release."""
    files = sorted(dist.iterdir())
    wanted = {os.uname().machine if part == "wheel" else part for part in parts} or set(FILES)
    if found := faults({file.name: file.stat().st_size for file in files}, sorted(wanted)):
        raise SystemExit("\n".join(found))
    for file in files:
        print(f"{file.stat().st_size:9} bytes  {file.name}")
    run(sys.executable, "-m", "twine", "check", "--strict", *files)


def index(dist: Path, folder: Path) -> None:
    """A package index of files, as PEP 503 has it."""
    projects: dict[str, list[Path]] = {}
    for file in sorted(dist.iterdir()):
        projects.setdefault(re.sub(r"[-_.]+", "-", file.name.rpartition(f"-{version()}")[0]), []).append(file)
    for project, files in projects.items():
        place = folder / project
        place.mkdir(parents=True, exist_ok=True)
        links = []
        for file in files:
            shutil.copy(file, place)
            links.append(f'<a href="{file.name}#sha256={hashlib.sha256(file.read_bytes()).hexdigest()}">{file.name}</a><br>')
        (place / "index.html").write_text("<!DOCTYPE html>\n" + "\n".join(links) + "\n")
    print(f"{folder}: {', '.join(projects)}")


def tag(name: str) -> None:
    heading = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading
    assert name == f"v{version()}", f"the tag is {name}; strobe.h says {version()}"
    assert re.fullmatch(rf"{re.escape(version())} — \d{{4}}-\d\d-\d\d", heading[1]), f"CHANGELOG.md begins with {heading[1]!r}"


def main(arguments: list[str]) -> int:
    match arguments:
        case ["build", dist, *parts] if set(parts) <= set(PARTS):
            Path(dist).mkdir(parents=True, exist_ok=True)
            for part in parts or PARTS:
                PARTS[part](Path(dist).resolve())
        case ["check", dist, *parts] if set(parts) <= set(PARTS):
            check(Path(dist).resolve(), parts)
        case ["index", dist, folder]:
            index(Path(dist).resolve(), Path(folder).resolve())
        case ["tag", name]:
            tag(name)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
