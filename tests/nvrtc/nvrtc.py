"""Just enough of NVRTC, through ctypes, from the wheel nvidia-cuda-nvrtc. Needs no GPU and no driver."""

from __future__ import annotations

import ctypes
from importlib import metadata
from pathlib import Path


def load() -> ctypes.CDLL:
    files = {file.name.split(".so")[0]: file.locate() for file in metadata.files("nvidia-cuda-nvrtc") or [] if ".so." in file.name}
    ctypes.CDLL(str(files["libnvrtc-builtins"]))  # NVRTC looks for it by name
    return ctypes.CDLL(str(files["libnvrtc"]))


def compile_source(source: Path, include: Path, arch: str) -> tuple[int, str, int]:
    """Status (0: good), log and size of the cubin."""
    nvrtc = load()
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
    options = [f"--gpu-architecture={arch}", "--std=c++20", f"--include-path={include}", "--ptxas-options=-v", "--no-cache"]
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options)))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    cubin = ctypes.c_size_t()
    if status == 0:
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(cubin))
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return status, log.value.decode(), cubin.value


def ptx_of(source: Path, include: Path, arch: str) -> str:
    nvrtc = load()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
    options = [f"--gpu-architecture={arch}", "--std=c++20", f"--include-path={include}"]
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options)))
    assert status == 0, source
    nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return ptx.value.decode()
