"""NVRTC's results for a kernel: its PTX, and its SASS. Kept on disk by the key of the program."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import struct
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache

from tree import CACHE, HERE, Program

sys.path.insert(0, str(HERE.parent / "nvrtc"))
import nvrtc


@dataclass(frozen=True)
class Sass:
    digest: str  # digest of everything that the GPU sees: instructions, constants, information for the loader
    instructions: int
    registers: int
    spilled: int  # bytes stored and loaded
    serialized: bool  # ptxas serializes its wgmma

    def __str__(self) -> str:
        serialized = ", wgmma serialized" if self.serialized else ""
        return f"{self.instructions} instructions, {self.registers} registers, {self.spilled} B spilled{serialized}"


def ptx(program: Program) -> str:
    """The digest of the program's PTX, with canonical names in place of the source's."""
    return _kept("ptx", program, lambda: {"digest": _digest_of_ptx(compiled(program, "PTX")[0])})["digest"]


def sass(program: Program) -> Sass:
    def from_cubin() -> dict[str, object]:
        cubin, log = compiled(program, "CUBIN")
        digest, instructions = _read_cubin(cubin)
        registers = max(map(int, re.findall(r"Used (\d+) registers", log)), default=0)
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log)))
        return asdict(Sass(digest, instructions, registers, spilled, "instructions are serialized" in log))

    return Sass(**_kept("code", program, from_cubin))


def _kept(what: str, program: Program, make) -> dict:
    file = CACHE / what / _version() / program.key[:2] / program.key
    if file.exists():
        return json.loads(file.read_text())
    made = make()
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.{os.getpid()}")
    new.write_text(json.dumps(made))
    new.replace(file)
    return made


@cache
def _version() -> str:
    """NVRTC's version."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.load().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compiled(program: Program, form: str) -> tuple[bytes, str]:
    """form: PTX or CUBIN. The code and the log."""
    options: Iterable[str] = program.options
    if form == "PTX":
        options = [option.replace("=sm_", "=compute_") for option in options if not option.startswith("--ptxas-options")]
    status, log, code = nvrtc.compiled(program.source.encode(), "kernel.cu", options, form, program.headers)
    if status:
        raise SystemExit(f"{program.name} does not compile:\n{log}")
    return code, log


_NAME = re.compile(r"\b(?:_Z|__cuda_local_var_|_\$_|anon)[\w$]*")


def _digest_of_ptx(code: bytes) -> str:
    text = re.sub(r"//[^\n]*", "", code.rstrip(b"\0").decode())
    numbers: dict[str, str] = {}
    text = _NAME.sub(lambda found: numbers.setdefault(found[0], f"name{len(numbers)}"), text)
    lines = (" ".join(line.split()) for line in text.splitlines())
    kept = [line for line in lines if line and not line.startswith((".file", ".loc"))]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:32]


def _read_cubin(cubin: bytes) -> tuple[str, int]:
    """The digest of the sections that the GPU and its loader see, under their names except mangled ones, and the number of instructions,
    padding included. Constants of classes are variables too: they count only if the code has their addresses."""
    (offset,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + i * size) for i in range(count)]
    names = cubin[headers[names_at][4] :][: headers[names_at][5]]
    sections: dict[str, bytes] = {}
    for name_at, kind, _, _, at, length, *_ in headers:
        name = names[name_at : names.index(b"\0", name_at)].decode()
        sections[name] = b"\0" * length if kind == 8 else cubin[at : at + length]  # SHT_NOBITS
    addresses = any(name.startswith((".rel.text", ".rela.text", ".nv.constant4")) for name in sections)
    seen = (".text", ".nv.constant", ".rodata", *((".nv.global",) if addresses else ()))
    digest = hashlib.sha256()
    for name, content in sorted((_NAME.sub("name", name), content) for name, content in sections.items() if name.startswith(seen)):
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32], sum(len(content) // 16 for name, content in sections.items() if name.startswith(".text"))
