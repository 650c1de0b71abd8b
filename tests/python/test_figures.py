"""strobe figures: the labels name what is measured, and every figure is drawn."""

from __future__ import annotations

import json
import math
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import strobe
from strobe_tools.cli import app
from strobe_tools.figures import clock, lengths, measure, rivals, traffic
from strobe_tools.figures.case import Case, Setting, read_csv, write_csv

CPU = Setting("cpu", True, 0.0)


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(app, ["figures", *map(str, arguments)], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture
def tiny(monkeypatch):
    """Draws every figure within seconds. The results mean nothing."""
    monkeypatch.setattr(clock, "SPREAD", math.inf)
    monkeypatch.setattr(measure, "_gpt2_medium", lambda setting: (1, 2, 64, 16))
    monkeypatch.setattr(measure, "_blocks", lambda setting: ((1, 1, 64, 16), (16, 32)))
    monkeypatch.setattr(measure, "SHARES", (1.0, 0.5))
    monkeypatch.setattr(lengths, "LONGEST", {("cpu", True): 256})
    monkeypatch.setattr(lengths, "_in_a_process", lambda setting, method: [lengths._measured(setting, method, 128)])
    cases = measure.peers
    monkeypatch.setitem(measure.FIGURES, "g", ("g-peers", lambda setting: cases(setting)[:1]))


# the rivals


@pytest.mark.parametrize("method", [rivals.MATH, rivals.MEGATRON, rivals.STROBE])
def test_exact_rivals_compute_the_same(monkeypatch, method):
    monkeypatch.setattr(rivals, "DROPOUT", 0.0)
    given = rivals.inputs(method, (2, 3, 64, 16), "float32", "cpu")
    attend = partial(rivals.sdpa("MATH", dropout=0.0)) if method == rivals.MATH else rivals.methods("cpu")[method]
    q, k, v = given.leaves
    expected = ((q.double() @ k.double().mT) / 4).masked_fill(~given.mask, -math.inf).softmax(-1) @ v.double()
    torch.testing.assert_close(attend(*given.leaves, mask=given.mask).double(), expected, rtol=0, atol=1e-5)


def test_the_fixed_pattern_is_child_et_als(monkeypatch):
    """A query sees its own block, and the last c keys of every block."""
    monkeypatch.setattr(rivals, "DROPOUT", 0.0)
    monkeypatch.setattr(rivals, "FIXED_BLOCK", 16)
    monkeypatch.setattr(rivals, "FIXED_SUMMARY", 4)
    given = rivals.inputs(rivals.FIXED, (2, 2, 64, 16), "float32", "cpu")
    i, j = torch.arange(64)[:, None], torch.arange(64)
    seen = ((i // 16 == j // 16) | (j % 16 >= 12)) & given.mask
    expected = strobe.attention(*given.leaves, mask=seen)
    torch.testing.assert_close(rivals.fixed(*given.leaves, mask=given.mask), expected, rtol=0, atol=1e-5)


def test_linformer_is_wang_et_als(monkeypatch):
    monkeypatch.setattr(rivals, "DROPOUT", 0.0)
    monkeypatch.setattr(rivals, "LINFORMER_RANK", 8)
    given = rivals.inputs(rivals.LINFORMER, (1, 2, 32, 16), "float32", "cpu")
    q, k, v, E, F = given.leaves
    assert E.shape == F.shape == (8, 32)
    keep = given.mask[0, 0, 0][:, None].float()
    expected = (q @ (E @ (k * keep)).mT / 4).softmax(-1) @ (F @ (v * keep))
    torch.testing.assert_close(rivals.linformer(*given.leaves, mask=given.mask), expected)
    rivals.both(rivals.linformer, given)()  # also the gradients of E and F


@pytest.mark.parametrize("method", list(rivals.methods("cpu")))
def test_every_rival_runs_forward_and_backward(method):
    row = lengths._measured(CPU, method, 128)
    assert row["seconds"] > 0, row
    assert row["peak_bytes"] is not None


# time, memory, traffic


def test_refusals_are_kept_apart_from_times():
    def fails():
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    def refuses():
        raise NotImplementedError("no engine takes this problem:\ncpu-x: not today")

    seconds, notes = clock.times({"a": lambda: sum(range(10000)), "b": fails, "c": refuses}, Setting("cpu", True, 0.01))
    assert list(seconds) == ["a"]
    assert {name: note for name, note in notes.items() if name != "a"} == {"b": "out of memory", "c": "cpu-x: not today"}


@pytest.fixture
def processor(monkeypatch):
    """Replaces the CPU clock: each call of a function advances it by the next of the function's listed seconds."""
    now = 0.0

    def call(name, seconds):
        left = iter(seconds)

        def function():
            nonlocal now
            now += next(left)

        return {name: function}

    monkeypatch.setattr(clock.time, "process_time", lambda: now)
    return call


@pytest.mark.parametrize(
    ("budget", "seconds", "found"),
    [
        (0.0, [0.5, 0.75, 0.5], 0.5),  # the first call counts
        (0.01, [0.15, 0.125, 0.125, 0.25], 0.125),
        (2.0, [0.05] * 22, 0.05),
    ],
)
def test_a_point_is_the_median_of_three_calls_at_least(processor, budget, seconds, found):
    """Three calls are made, however long they take."""
    times, notes = clock.times(processor("a", seconds), Setting("cpu", True, budget))
    assert times == {"a": pytest.approx(found)}
    assert not notes


@pytest.mark.parametrize("stalls", [0, 1, 2, 3])
@pytest.mark.parametrize("budget", [0.0, 0.04, 2.0])
def test_a_call_that_stalls_is_no_data(processor, budget, stalls):
    """A call of 4.42 s among others of 0.05 s must not become a point."""
    seconds = [0.05] * 30
    seconds[stalls] = 4.42
    times, notes = clock.times(processor("a", seconds), Setting("cpu", True, budget))
    assert times == {"a": pytest.approx(0.05)}
    counted = {0.0: [0, 1, 2], 0.04: [0, 1, 2] if stalls == 0 else [1, 2, 3], 2.0: [1, 2, 3] if stalls == 1 else [3]}[budget]
    assert notes == ({"a": "its calls took 0.05 to 4.42 s"} if stalls in counted else {})


def test_a_call_that_stalls_is_warned_of(run, tmp_path, monkeypatch):
    apart = {"name": "fused", "seconds": 0.05, "note": f"{clock.DIFFERS}0.05 to 4.42 s"}
    case = Case("x", lambda: [apart, {"name": "softmax", "seconds": 0.05, "note": ""}])
    monkeypatch.setitem(measure.FIGURES, "h", ("h-fused", lambda setting: [case]))
    done = run("--quick", "--device", "cpu", "--figure", "h", "--measure-only", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert done.output.count("warning") == 1
    assert "warning h-fused, fused: its calls took 0.05 to 4.42 s; the machine was busy: measure again" in done.output
    assert done.output.startswith("h-fused (1 of 1): 1 case\n")
    assert read_csv(tmp_path / "h-fused.csv")[0] == apart


def test_gradients_that_are_let_go_late_are_not_taken_for_what_was_there_before(monkeypatch):
    """The peak is 150 bytes, of which 40 were there before; at the first look the previous call still held 60 more."""
    held = iter([100, 40])
    for name, found in (("synchronize", None), ("reset_peak_memory_stats", None), ("max_memory_allocated", 150)):
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(held))
    assert lengths._gpu_peak(lambda: None) == 110


def test_memory_that_a_method_takes_is_limited(monkeypatch):
    """Each method runs out of memory in a process of its own, and so its limit is found."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows = lengths._in_a_process(CPU, rivals.STROBE)
    assert [row["length"] for row in rows] == lengths.lengths(CPU)
    assert all(row["seconds"] > 0 for row in rows)
    assert all(row["note"] == "" or row["note"].startswith(clock.DIFFERS) for row in rows)


def test_the_io_model_is_that_of_the_ladder():
    """docs/ladder.md: with N = 4096, d = 64 and tiles of 64 x 64, the three methods move 151, 52 and 34 million numbers."""
    n, d = 4096, 64
    assert [round(f(n, d, 64, 64) / 1e6) for f in (traffic.naive, traffic.flash1, traffic.flash2)] == [151, 52, 34]
    assert traffic.standard(n, d, False) > 60 * traffic.fused(n, d, False) / 4


def test_counters_are_added_up_call_by_call():
    header = '"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","lts__t_bytes.sum"'
    units = '"","","byte","byte","byte"'
    kernels = ['"0","gemm","1,000","10","7"', '"1","softmax","1","2","3"', '"2","spin_kernel(long)","9","9","9"', '"3","flash","5","6","7"']
    output = "\n".join(["==PROF== Connected", header, units, *kernels, '"4","spin_kernel(long)","9","9","9"'])
    assert traffic.parse(output) == [{"read": 1001, "written": 12, "cache": 10}, {"read": 5, "written": 6, "cache": 7}]


def test_csv_keeps_numbers_and_gaps(tmp_path):
    rows = [{"name": "a", "n": 3, "x": 0.25}, {"name": "b, c", "n": 4, "x": None, "note": "out of memory"}]
    write_csv(tmp_path / "x.csv", rows)
    assert read_csv(tmp_path / "x.csv") == [{**rows[0], "note": None}, rows[1]]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_peers_have_lines_in_quick_figures_too(device):
    """Every panel has at least two lengths."""
    panels: dict[str, int] = {}
    for case in measure.peers(Setting(device, True, 0.0)):
        panel = case.name.partition(",")[0] + ", causal" * case.name.endswith("causal")
        panels[panel] = panels.get(panel, 0) + 1
    assert len(panels) == 6
    assert min(panels.values()) >= 2


# the command


@pytest.mark.usefixtures("tiny")
def test_every_figure_is_measured_and_drawn(run, tmp_path):
    done = run("--quick", "--device", "cpu", "--budget", 0, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "machine.json").read_text())["torch"] == torch.__version__
    for title, _ in measure.FIGURES.values():
        rows = read_csv(tmp_path / f"{title}.csv")
        assert all(row.get("note") in (None, "no GPU") for row in rows), rows
        svg, png = (tmp_path / f"{title}.svg").read_text(), (tmp_path / f"{title}.png").read_bytes()
        assert "one thread; PyTorch" in svg
        assert "quick: smaller shapes, no measurement" in svg
        assert len(svg) < 100_000
        assert png.startswith(b"\x89PNG")
        assert len(png) < 80_000


@pytest.mark.usefixtures("tiny")
def test_measuring_and_drawing_are_separate_steps(run, tmp_path):
    assert run("--quick", "--device", "cpu", "--figure", "h", "--measure-only", "--budget", 0, "--out", tmp_path).exit_code == 0
    assert not list(tmp_path.glob("*.png"))
    before = (tmp_path / "h-fused.csv").read_bytes()
    done = run("--draw-only", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert [path.name for path in tmp_path.glob("*.png")] == ["h-fused.png"]
    assert (tmp_path / "h-fused.csv").read_bytes() == before


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("letters", ["d", "e", "de", "ed"])
def test_either_letter_of_two_asks_for_their_figure(run, tmp_path, monkeypatch, letters):
    monkeypatch.setattr(rivals, "methods", lambda device, methods=rivals.methods: {rivals.STROBE: methods(device)[rivals.STROBE]})
    asked = [x for letter in (["de"] if letters == "de" else letters) for x in ("--figure", letter)]
    done = run("--quick", "--device", "cpu", *asked, "--measure-only", "--budget", 0, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["de-sequence-length.csv", "machine.json"]


def test_a_folder_that_nobody_can_make_is_refused(run):
    done = run("--quick", "--device", "cpu", "--figure", "h", "--measure-only", "--out", "/dev/null/figures")
    assert done.exit_code == 2
    message = " ".join(done.output.replace("│", "").split())
    assert "--out: /dev/null/figures: Not a directory; accepted is a folder to write to" in message


def test_a_method_looks_the_same_everywhere():
    """A method's look depends only on its name, in both figures and on both machines, and differs from all others in the same picture."""
    from strobe_tools.figures.draw import look

    both = [rivals.methods(device) for device in ("cpu", "cuda")]
    for names in (*both, measure.PEERS["cpu"], measure.PEERS["cuda"], ("FlashAttention-1", "FlashAttention-2")):
        looks = [tuple(look(name).get(x) for x in ("color", "marker", "linestyle")) for name in names]
        assert len(set(looks)) == len(looks)
    assert look(rivals.CUDNN) == look("cuDNN")
    assert look(rivals.FLASH2) == look("FlashAttention-2")
    assert look(rivals.FLASH_CPU) == look("PyTorch SDPA, flash")
    assert look(rivals.MATH) == look("PyTorch math")


def test_what_ran_out_of_memory_is_marked_at_its_length():
    from strobe_tools.figures.draw import look, sequence_length

    where = {"batch": 1, "heads": 1, "head_dim": 64, "dtype": "float32"}
    rows = [
        {"method": method, "length": n, "seconds": 0.1 if fits else None, "peak_bytes": 2**20 if fits else None, **where}
        | {"note": None if fits else "out of memory"}
        for method, most in ((rivals.MATH, 128), (rivals.MEGATRON, 256), (rivals.STROBE, 512))
        for n in (128, 256, 512)
        for fits in (n <= most,)
    ]
    for axes in sequence_length(rows).axes:
        crosses = [line for line in axes.lines if line.get_marker() == "x"]
        assert [(line.get_color(), *line.get_xdata()) for line in crosses] == [
            (look(rivals.MATH)["color"], 256),
            (look(rivals.MEGATRON)["color"], 512),
        ]
        assert all(text.get_text() == "out of memory" and text.get_ha() == "right" for text in axes.texts)


def test_what_only_a_gpu_measures_is_drawn(run, tmp_path):
    """Counted bytes stand beside the model, and methods that did not fit are marked."""
    where = {"batch": 2, "heads": 8, "length": 64, "head_dim": 64, "dtype": "bfloat16", "note": None}
    bar = {"gflop": 1.5, "model_bytes": 2e9, "measured_bytes": 3e9, "seconds": 0.01, **where}
    write_csv(tmp_path / "a-standard-against-flash.csv", [{"attention": name, **bar} for name in ("standard", "flash")])
    tile = {"model_bytes": 2e9, "cache_bytes": 3e9, "read_bytes": 1e9, "written_bytes": 1e9, "seconds": 0.01, **where}
    tiles = [{"engine": engine, "block": block, **tile} for engine in measure.LADDER_MODELS for block in (16, 32)]
    write_csv(tmp_path / "b-block-size.csv", tiles)
    fits = {"method": rivals.MATH, "seconds": 0.1, "peak_bytes": 2**30, **where}
    lines = [fits, {**fits, "length": 128, "seconds": None, "peak_bytes": None, "note": "out of memory"}]
    write_csv(tmp_path / "de-sequence-length.csv", [*lines, {**fits, "method": rivals.STROBE}])
    (tmp_path / "machine.json").write_text('{"device": "a GPU", "torch": "2", "strobe": "0", "date": "today"}')
    done = run("--draw-only", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    drawn = {path.name[0]: path.read_text() for path in tmp_path.glob("*.svg")}
    assert all(words in drawn["a"] for words in ("through device memory", ">ncu<", ">IO model<"))
    assert "FlashAttention-2, L2, ncu" in drawn["b"]
    assert drawn["d"].count(">out of memory<") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--figure", "z"), "'z'; accepted are a, b, c, d, e, f, g, h, each after a --figure"),
        (("--figure", "b,c"), "'b,c'; accepted are a, b, c, d, e, f, g, h, each after a --figure"),
        (("--measure-only", "--draw-only"), "accepted is one of the two"),
        (("--device", "tpu"), "accepted are cpu and cuda"),
        (("--draw-only",), "nothing was measured there"),
    ],
)
def test_refusals(run, tmp_path, arguments, message):
    done = run(*arguments, "--out", tmp_path / "none")
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", "").split())


def test_the_readme_shows_the_fused_peers(tmp_path):
    """bench/peers.py draws every causal figure of the results, under its name."""
    root = Path(__file__).parents[2]
    peers = runpy.run_path(str(root / "bench" / "peers.py"))
    files = sorted((root / "bench" / "results").glob("h200-*.json"))
    points = [point for file in files for point in peers["points"](json.loads(file.read_text()))]
    assert len(points) == 2 * 3 * 6 * 4  # directions, head dimensions, lengths, methods
    assert {point["name"] for point in points} == {"Strobe", "cuDNN", "FlashAttention-2", "FlashAttention-4"}
    for point in points:
        assert point["batch"] * point["length"] == 16384
        assert point["heads"] * point["head_dim"] == 2048
    peers["main"](tmp_path / "peers.png", files)
    drawn = (tmp_path / "peers.svg").read_text()
    assert all(name in drawn for name in ("forward, causal, d 64", "backward, causal, d 256", "FlashAttention-4"))
    assert (tmp_path / "peers.png").stat().st_size > 10_000
