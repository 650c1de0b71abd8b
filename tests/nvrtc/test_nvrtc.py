"""The files of kernels/attention that the CPU engine includes compile unchanged as CUDA code, by NVRTC, without a header of std or CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
from nvrtc import compile_source, ptx_of

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("pieces.cu")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_shared_pieces_compile(arch):
    status, log, cubin = compile_source(SOURCE, ROOT / "kernels", arch)
    assert status == 0, log
    assert "warning" not in log, log
    assert cubin > 0


def test_serialized_wgmma_is_told_in_the_words_that_are_looked_for():
    status, log, _ = compile_source(Path(__file__).with_name("serialized.cu"), ROOT / "kernels", "sm_90a")
    assert status == 0, log
    words = "instructions are serialized"
    assert words in log
    assert any(words in source.read_text() for source in (ROOT / "src" / "cuda").rglob("*.cpp"))


def test_what_roundings_of_a_rows_lse_took_is_not_contracted():
    """ptxas fuses mul.f32 and add.f32 into an fma, but never mul.rn.f32 and add.rn.f32."""
    ptx = ptx_of(Path(__file__).with_name("row_lse.cu"), ROOT / "kernels", "compute_90")
    found = {operation: ptx.count(f"{operation}.rn.f32") for operation in ("mul", "add", "sub")}
    assert found == {"mul": 2, "add": 2, "sub": 4}


def test_every_shared_piece_is_compiled():
    included = SOURCE.read_text()
    of_kernels = {"bounds.h", "mask_blocks.h"}  # test_mask_block_kernels.py compiles what uses them
    for header in (ROOT / "kernels" / "attention").glob("*.h"):
        if header.name in of_kernels:
            continue
        assert f'#include "attention/{header.name}"' in included, header.name


def test_no_header_from_outside():
    for header in (ROOT / "kernels" / "attention").glob("*.h"):
        assert "#include <" not in header.read_text(), header.name
