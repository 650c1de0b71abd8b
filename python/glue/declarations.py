"""Writes the C source of the extension strobe._core: cffi's glue over the declarations of the given headers, and no others."""

import argparse
import re
from pathlib import Path

import cffi


def declarations(header: str) -> str:
    """The declarations of a C header, without comments, preprocessor lines and parts for C++ only."""
    header = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    header = re.sub(r"^#ifdef __cplusplus$.*?^#endif$", "", header, flags=re.DOTALL | re.MULTILINE)
    header = re.sub(r"^ *#.*$", "", header, flags=re.MULTILINE)
    return header.replace("STROBE_API ", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("headers", type=Path, nargs="+")
    arguments = parser.parse_args()
    ffi = cffi.FFI()
    for header in arguments.headers:
        ffi.cdef(declarations(header.read_text(encoding="utf-8")))
    ffi.cdef('extern "Python" void *strobe_python_allocate(void *allocator, uint64_t bytes);')
    ffi.set_source("strobe._core", "".join(f'#include "{header.as_posix()}"\n' for header in arguments.headers))
    ffi.emit_c_code(str(arguments.output))


if __name__ == "__main__":
    main()
