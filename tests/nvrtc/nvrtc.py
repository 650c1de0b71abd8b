"""The functions of NVRTC that tests need, through ctypes, from the wheel nvidia-cuda-nvrtc. Needs no GPU and no driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path


@cache
def load() -> ctypes.CDLL:
    files = {file.name.split(".so")[0]: file.locate() for file in metadata.files("nvidia-cuda-nvrtc") or [] if ".so." in file.name}
    ctypes.CDLL(str(files["libnvrtc-builtins"]))  # NVRTC looks for it by name
    return ctypes.CDLL(str(files["libnvrtc"]))


def compiled(
    source: bytes, name: str, options: Iterable[str], form: str, headers: Mapping[str, str] | None = None
) -> tuple[int, str, bytes]:
    """Returns the status (0: success), the log, and on success the code in this form (CUBIN or PTX). headers: texts by the names in
    #include."""
    nvrtc, program, size = load(), ctypes.c_void_p(), ctypes.c_size_t()
    names, texts = _strings(headers or {}), _strings((headers or {}).values())
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), len(names), texts, names)
    given = _strings(options)
    status = nvrtc.nvrtcCompileProgram(program, len(given), given)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log, code = ctypes.create_string_buffer(size.value), ctypes.create_string_buffer(0)
    nvrtc.nvrtcGetProgramLog(program, log)
    if status == 0:
        getattr(nvrtc, f"nvrtcGet{form}Size")(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{form}")(program, code)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return status, log.value.decode(), code.raw


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def compile_source(source: Path, include: Path, arch: str) -> tuple[int, str, int]:
    """Returns the status (0: success), the log and the size of the cubin."""
    options = [f"--gpu-architecture={arch}", "--std=c++20", f"--include-path={include}", "--ptxas-options=-v", "--no-cache"]
    status, log, cubin = compiled(source.read_bytes(), source.name, options, "CUBIN")
    return status, log, len(cubin)


def ptx_of(source: Path, include: Path, arch: str) -> str:
    options = [f"--gpu-architecture={arch}", "--std=c++20", f"--include-path={include}"]
    status, log, ptx = compiled(source.read_bytes(), source.name, options, "PTX")
    assert status == 0, f"{source}: {log}"
    return ptx.rstrip(b"\0").decode()
