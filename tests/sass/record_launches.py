"""Run by launches.py in a tree's own Python, the recorder preloaded: makes the calls of the contract's pairs, each with every engine, and
writes what they launch. Usage: record_launches.py LAUNCHES.json"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import re
import struct
import sys
from pathlib import Path
from typing import Any

from code_of import compiled
from tree import Program

import check
from cases import build, contract

Step = dict[str, Any]


class Recorder:
    """The library's launches, and the names of its kernels."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(os.environ["STROBE_NVRTC"])
        self.library.recorder_allocation.restype = ctypes.c_size_t
        self.library.recorder_allocation.argtypes = self.library.recorder_is_static.argtypes = [ctypes.c_size_t]
        launched = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_uint, ctypes.c_int, ctypes.c_void_p)
        cleared = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_int, ctypes.c_size_t)
        self._functions = launched(self._launched), cleared(self._cleared)
        self.library.recorder_listen(*self._functions)
        self.sizes: dict[str, int] = {}  # sizes of the kernels' arguments; empty: not known yet
        self.names: set[str] = set()
        self._steps: list[Step] = []
        self._places: dict[int, int] = {}

    def _launched(self, name: bytes, shape: Any, shared: int, early: int, arguments: int) -> None:
        kernel = name.decode()
        self.names.add(kernel)
        if self.sizes:
            content = ctypes.string_at(arguments, self.sizes[kernel])
            words = [content[at : at + 8] for at in range(0, len(content), 8)]
            step = {"kernel": kernel, "shape": shape[:6], "shared": shared, "early": early}
            self._steps.append(step | {"arguments": [self._word(word) for word in words]})

    def _cleared(self, memory: int, value: int, count: int) -> None:
        self._steps.append({"kernel": "fill", "arguments": [self._place(memory) or "nowhere", value, count]})

    def _word(self, word: bytes) -> str:
        return (len(word) == 8 and self._place(int.from_bytes(word, "little"))) or word.hex()

    def _place(self, address: int) -> str | None:
        """Allocations are numbered in order of appearance; an address may be just past the end of its own."""
        for inside in (address, address - 1):
            if inside > 0 and (begin := self.library.recorder_allocation(inside)):
                return f"memory {self._places.setdefault(begin, len(self._places))} + {address - begin}"
        return "static memory" if self.library.recorder_is_static(address) else None

    def steps(self) -> list[Step]:
        """The steps since the last call of this function."""
        found, self._steps, self._places = self._steps, [], {}
        self.library.recorder_release()
        return found


def calls(recorder: Recorder) -> dict[str, list[Step]]:
    found = {}
    for number, case in enumerate(contract(2)):
        inputs = dataclasses.replace(build(case), numpy=False)
        for engine in (None, *ENGINES):
            with contextlib.suppress(NotImplementedError):
                check.run(inputs, engine)
            found[f"case {number} {engine or 'default'}"] = recorder.steps()
    return found


ENGINES = ("cuda-sm90", "cuda-mma", "cuda-tf32", "cuda-simt")


def sizes(programs: list[Program]) -> dict[str, int]:
    """The sizes of their kernels' arguments, in bytes: from the compiler, one header at a time."""
    by_header: dict[str, list[Program]] = {}
    for program in programs:
        by_header.setdefault(program.source.partition("\n")[0], []).append(program)
    found: dict[str, int] = {}
    for header, of in by_header.items():
        all_ = ", ".join(f"sizeof(typename {program.name}::Arguments)" for program in of)
        asks = Program(of[0].options, f'{header}\nextern "C" __device__ const unsigned bytes[] = {{{all_}}};\n', of[0].headers)
        listed = re.search(r"\.b8 bytes\[\d+\] = \{([^}]*)\}", compiled(asks, "PTX")[0].decode())
        # PTX leaves out zeros at the end
        content = bytes(int(n) for n in listed[1].split(",")).ljust(4 * len(of), b"\0")  # type: ignore[index]
        found |= dict(zip((program.name for program in of), (n for (n,) in struct.iter_unpack("<I", content)), strict=True))
    if not all(found.values()):
        raise SystemExit(f"arguments of no size: {[name for name, size in found.items() if not size]}")
    return found


def main() -> None:
    recorder = Recorder()
    calls(recorder)
    folder = Path(os.environ["STROBE_RECORD"], "programs")
    recorder.sizes = sizes([program for program in map(Program.read, folder.iterdir()) if program.name in recorder.names])
    Path(sys.argv[1]).write_text(json.dumps(calls(recorder)))


main()
