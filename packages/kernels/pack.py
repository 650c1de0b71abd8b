#!/usr/bin/env python3
"""Makes the wheel strobe-attention-kernels of a kernel cache. Usage: packages/kernels/pack.py CACHE DIST VERSION SOURCES CALLS

The wheel holds the cache's files as they are, and no code: strobe finds its folder and reads it like those of STROBE_CACHE_PATH. Kernels
are found by a digest of their source, so a wheel of another version does no harm and is of no use: pip refuses it, and explain() says so.
A GPU's code is the same on every host.

The file manifest.txt says what the kernels were made of: the version, the NVRTC, SOURCES (a digest) and CALLS (the command that chose
them).
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

PACKAGE = "strobe_attention_kernels"
METADATA = """\
Metadata-Version: 2.1
Name: strobe-attention-kernels
Version: {version}
Summary: Compiled GPU kernels of strobe-attention's most frequent calls
License: MIT
Requires-Python: >=3.10
Requires-Dist: strobe-attention=={version}
Description-Content-Type: text/markdown

{description}"""
WHEEL = """\
Wheel-Version: 1.0
Generator: strobe
Root-Is-Purelib: true
Tag: py3-none-any
"""


def pack(cache: Path, dist: Path, version: str, sources: str, calls: str) -> Path:
    kernels = sorted(cache.glob("nvrtc-*/*.kernel"))
    if not kernels:
        raise SystemExit(f"{cache}: no kernels")
    compilers = sorted({kernel.parent.name for kernel in kernels})
    if len(compilers) > 1:
        raise SystemExit(f"{cache}: kernels of {', '.join(compilers)}; accepted are those of one NVRTC")
    info = f"{PACKAGE}-{version}.dist-info"
    description = (Path(__file__).parent / "README.md").read_text()
    files = {f"{PACKAGE}/__init__.py": b'"""Compiled kernels of strobe-attention, which finds them by itself."""\n'}
    compiler = compilers[0].removeprefix("nvrtc-")
    manifest = (f"strobe-attention {version}", f"nvrtc {compiler}", f"sources {sources}", f"calls {calls}", f"kernels {len(kernels)}", "")
    files[f"{PACKAGE}/manifest.txt"] = "\n".join(manifest).encode()
    files |= {f"{PACKAGE}/{kernel.relative_to(cache).as_posix()}": kernel.read_bytes() for kernel in kernels}
    files[f"{info}/METADATA"] = METADATA.format(version=version, description=description).encode()
    files[f"{info}/WHEEL"] = WHEEL.encode()
    record = [f"{name},sha256={digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    wheel = dist / f"{PACKAGE}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name)  # of 1980: the same cache gives the same wheel
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return wheel


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    if len(sys.argv) != 6:
        raise SystemExit(__doc__)
    made = pack(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
    print(f"{made.name}: {made.stat().st_size} bytes")
