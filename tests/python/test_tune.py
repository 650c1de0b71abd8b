"""``strobe tune`` without a GPU: its measurements, and the table that it writes."""

from __future__ import annotations

import json

import click
import pytest
from click.testing import CliRunner

from strobe import _tuning
from strobe_tools.cli import app
from strobe_tools.cli.tune import Case, Shape, cases

ABOUT = {"format": 2, "device": "Fake 1", "kernels": "0123"}


def entry(tile: int, **key):
    case = Case("cuda-mma", Shape(1, 8, 2, 128, 512, 64, 32), "bfloat16", False, True, False)
    return case.key() | key | {"tile_q": tile, "tile_k": tile, "seconds": 1.0, "usual_seconds": 2.0}


def read(file):
    return _tuning.parsed(file.read_text())


def texts(*sections):
    return [_tuning.texts(section) for section in sections]


def test_a_table_is_lines_of_name_and_value(tmp_path):
    _tuning.write(_tuning.Header(str(tmp_path / "table.txt"), ABOUT, ""), [], [{"engine": "cuda-mma", "causal": True, "tile_q": 64}])
    assert (tmp_path / "table.txt").read_text() == (
        "format = 2\ndevice = Fake 1\nkernels = 0123\n\nengine = cuda-mma\ncausal = true\ntile_q = 64\n"
    )


def test_shapes():
    assert Shape.parse("2,8,128,64") == (2, 8, 8, 128, 128, 64, 64)
    assert Shape.parse("2,8,4,1,4096,128,64") == (2, 8, 4, 1, 4096, 128, 64)
    for wrong in ("", "2,8,128", "2,8,128,0", "2,8,128,x", "2,8,4,1,4096"):
        with pytest.raises(click.BadParameter, match="accepted is B,H,S,D or B,H,Hkv,Sq,Sk,D,Dv"):
            Shape.parse(wrong)


def test_every_case_is_a_key_of_its_own():
    shapes = [Shape.parse(written) for written in ("2,8,128,64", "2,8,4,1,4096,128,64")]
    all_cases = list(cases(shapes, ("bfloat16", "float16"), ("cuda-mma", "cuda-sm90"), ("forward", "backward"), False))
    assert len(all_cases) == 2 * 2 * 2 * 2 * 2
    assert len({json.dumps(case.key()) for case in all_cases}) == len(all_cases)
    assert len({str(case) for case in all_cases}) == len(all_cases)
    assert set(all_cases[0].key()) == set(_tuning.KEY)


def test_a_table_keeps_what_was_not_measured_again(tmp_path):
    file = tmp_path / "folder" / "table.txt"
    first, second, third = (entry(tile, queries=tile) for tile in (16, 32, 64))
    _tuning.write(_tuning.Header(str(file), ABOUT, ""), [first, second], [first, second])
    assert read(file) == texts(ABOUT, first, second)
    better = {**first, "tile_q": 128}
    _tuning.write(_tuning.Header(str(file), ABOUT, ""), [first, third], [better, third])
    assert read(file) == texts(ABOUT, second, better, third)
    _tuning.write(_tuning.Header(str(file), ABOUT, ""), [second], [])  # now the usual tile is the fastest
    assert read(file) == texts(ABOUT, better, third)
    assert [path.name for path in file.parent.iterdir()] == ["table.txt"]


@pytest.mark.parametrize(
    "old",
    [
        "",
        "no line of a table\n",
        "\n\n\n",
        json.dumps({"format": 1, "entries": []}),  # a file of an earlier version
        "[" * 100_000,
        "\udcff\udcfe",  # bytes that are not UTF-8
        _tuning.written([{**ABOUT, "kernels": "4567"}, entry(16)]),
        _tuning.written([ABOUT, {"engine": "cuda-mma"}]),
        _tuning.written([ABOUT]) + "\nengine cuda-mma\n",
        _tuning.written([entry(16)]),
    ],
    ids=range(10),
)
def test_a_table_that_is_no_use_is_replaced(tmp_path, old):
    file = tmp_path / "table.txt"
    file.write_text(old, errors="surrogateescape")
    _tuning.write(_tuning.Header(str(file), ABOUT, ""), [entry(32)], [entry(32)])
    assert read(file) == texts(ABOUT, entry(32))


def test_without_a_gpu_it_says_so():
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is here: tests/gpu/test_tune.py")
    result = CliRunner().invoke(app, ["tune"])
    assert result.exit_code == 2
    assert "PyTorch sees no CUDA device here" in result.output


def test_of_an_ignored_table_nothing_is_kept(tmp_path):
    file = tmp_path / "table.txt"
    file.write_text(_tuning.written([ABOUT, {**entry(16), "tile_q": 0}]))
    _tuning.write(_tuning.Header(str(file), ABOUT, 'ignored: "tile_q" is 0'), [entry(32, queries=32)], [entry(32, queries=32)])
    assert read(file) == texts(ABOUT, entry(32, queries=32))


def test_lines_end_where_the_library_ends_them():
    assert _tuning.parsed("device = A\u2028B\x0cC\rD\n") == [{"device": "A\u2028B\x0cC\rD"}]


def test_bytes_that_are_no_text_are_shown():
    from strobe._abi import text
    from strobe._core import ffi

    assert text(ffi.new("char[]", b"device = \xff")) == "device = \\xff"
