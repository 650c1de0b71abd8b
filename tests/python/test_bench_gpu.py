"""`strobe bench gpu` and `strobe bench report`, as far as a machine without a GPU can test them."""

from __future__ import annotations

import itertools
import json
import types
from pathlib import Path
from random import Random

import pytest
import torch
from click.testing import CliRunner

import strobe
from strobe._options import AttentionOptions
from strobe_tools import timing
from strobe_tools.bench import gpu as command
from strobe_tools.bench.gpu import contestants, measurement, report
from strobe_tools.bench.gpu import drawn as shapes
from strobe_tools.bench.gpu.problem import BLOCK, FEATURES, SHARES, WINDOW, Problem, tiles
from strobe_tools.bench.gpu.sets import LENGTHS, SETS, TOKENS, WIDTH, Group, Row, Run
from strobe_tools.cli import app


@pytest.fixture
def run():
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": "200", "TERM": "dumb"})


def every_group():
    return [group for make in SETS.values() for group in make()]


# Counted work


@pytest.mark.parametrize(("backward", "causal"), list(itertools.product((False, True), repeat=2)))
def test_work_is_that_of_the_products(backward, causal):
    shape = (2, 3, 64, 16)
    assert Problem(*shape, causal).flops(backward) == timing.flops(shape, backward, causal)
    packed = Problem(0, 3, 0, 16, causal, lengths=(64, 64))
    assert packed.flops(backward) == timing.flops(shape, backward, causal)
    wide = Problem(*shape, causal, dim_v=32).flops(backward) / Problem(*shape, causal).flops(backward)
    assert wide == pytest.approx(7 / 5 if backward else 3 / 2)


@pytest.mark.parametrize("left", [None, 0, 1, 127, 128, 300])
def test_tiles_are_those_with_something_visible(left):
    i, j = torch.arange(5 * BLOCK)[:, None], torch.arange(5 * BLOCK)
    seen = (j <= i) & ((i - j <= left) if left is not None else True)
    assert tiles(5 * BLOCK, left) == seen.unflatten(0, (5, BLOCK)).unflatten(2, (5, BLOCK)).any(3).any(1).sum()


@pytest.mark.parametrize("name", SHARES)
def test_exactly_the_share_of_blocks_is_kept(name):
    mask = FEATURES[name](Problem(1, 1, 8 * BLOCK, 16), "cpu")["block_mask"]
    assert mask.density == SHARES[name]


def test_groups_are_whole():
    named = set()
    for group in every_group():
        for row in group.rows:
            assert {row.strobe, *row.peers} <= set(group.runs)
            assert row.base is None or row.base in group.runs
            assert set(row.peers) <= set(contestants.PEERS)
            assert (group.set, group.direction, str(row.where)) not in named
            named.add((group.set, group.direction, str(row.where)))
        for name, (_, problem, feature, _) in group.runs.items():
            assert group.work(name) > 0
            assert set(problem.options("cpu") | FEATURES[feature](problem._replace(seqlen=BLOCK), "cpu")) <= set(
                AttentionOptions.__annotations__
            )


def test_core36_is_what_it_says():
    for direction in ("forward", "backward"):
        groups = [group for group in SETS["core36"]() if group.direction == direction]
        assert len(groups) == 36
        problems = [group.runs["strobe"].problem for group in groups]
        assert all(p.batch * p.seqlen == TOKENS and p.heads * p.dim == WIDTH for p in problems)
        assert {(p.dim, p.seqlen, p.causal) for p in problems} == set(itertools.product((64, 128, 256), LENGTHS, (False, True)))


def test_uniform_sequences_are_as_much_work_as_the_packed_ones():
    for group in SETS["varlen"]():
        assert group.work("uniform") == pytest.approx(group.work("packed"), rel=0.02)
        packed, uniform = (group.runs[name].problem for name in ("packed", "uniform"))
        assert uniform.batch * uniform.seqlen == pytest.approx(sum(packed.lengths), rel=0.02)


def test_a_window_is_counted_by_its_tiles():
    for group in SETS["window"]():
        ratio = group.work("window") / group.work("causal")
        assert ratio == tiles(16384, WINDOW) / tiles(16384)
        assert group.work("causal") == pytest.approx(group.runs["causal"].problem.flops(group.direction == "backward"), rel=0.01)


# Measuring


def seconds(**known):
    return lambda calls, repeats: {name: known[name] for name in calls}


def groups_on_the_cpu(direction):
    problem = Problem(1, 2, 128, 32, True)
    runs = {who: Run(who, problem) for who in ("strobe", "fa2", "cudnn")} | {"dropout": Run("strobe", problem, "dropout")}
    rows = [Row({"d": 32}, "strobe", ("fa2", "cudnn")), Row({"d": 32, "option": "dropout"}, "dropout", base="strobe")]
    return Group("core36", direction, runs, rows)


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_figures(direction):
    group = groups_on_the_cpu(direction)
    found = measurement.measure(group, 1, "cpu", seconds(strobe=2e-9, fa2=4e-9, dropout=8e-9))
    assert list(found.absent) == ["cudnn"]  # cuDNN does not run on a CPU
    rate = group.work("strobe") / 2e-9 / 1e12
    plain, dropped = found.rows
    assert plain == {
        "set": "core36",
        "d": 32,
        "unit": "TFLOP/s",
        "strobe": pytest.approx(rate, 1e-3),
        "peers": {"fa2": pytest.approx(rate / 2, 1e-3)},
    }
    assert report.ratio(plain) == pytest.approx(2, rel=1e-3)
    assert dropped["beside"] == {"strobe": plain["strobe"]}
    assert "peers" not in dropped
    in_time = measurement.measure(group._replace(unit="µs"), 1, "cpu", seconds(strobe=2e-6, fa2=4e-6, dropout=8e-6)).rows[0]
    assert (in_time["strobe"], in_time["peers"], report.ratio(in_time)) == (2.0, {"fa2": 4.0}, 2.0)


class PeersOwnError(Exception):
    """An exception like that of a compiler that a peer brings along."""


def test_a_peer_may_fail_in_any_way_strobe_may_not(monkeypatch):
    results = measurement.contestants.results

    def failing(who, call):
        if who == fails:
            raise PeersOwnError("no layout\nmore")
        return results(who, call)

    monkeypatch.setattr(measurement.contestants, "results", failing)
    fails = "fa2"
    found = measurement.measure(groups_on_the_cpu("backward"), 1, "cpu", seconds(strobe=2e-9, dropout=8e-9))
    assert found.absent["fa2"] == "PeersOwnError: no layout"
    fails = "strobe"
    with pytest.raises(PeersOwnError):
        measurement.measure(groups_on_the_cpu("backward"), 1, "cpu", seconds(fa2=4e-9, dropout=8e-9))


def test_who_computes_something_else_is_not_timed(monkeypatch):
    attention = strobe.attention
    monkeypatch.setattr(strobe, "attention", lambda *tensors, **options: attention(*tensors, **options) * 1.1)
    for direction in ("forward", "backward"):
        found = measurement.measure(groups_on_the_cpu(direction), 1, "cpu", seconds(fa2=4e-9, dropout=8e-9))
        assert found.absent["strobe"].startswith("differs from fa2 by 0.1 ")
        assert [row["option"] for row in found.rows] == ["dropout"]


def test_nan_is_a_difference():
    x = torch.ones(3)
    assert measurement._difference(x * torch.nan, x) == torch.inf


class FakeGpu:
    """Simulates a stream's time: the host launches, and the GPU runs each launch when it gets there."""

    def __init__(self, monkeypatch, host):
        self.host_time = self.gpu_time = self.slept = 0.0
        self.launch = host
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                gpu.kernel(0)
                self.time = gpu.gpu_time

            def elapsed_time(self, end):
                return (end.time - self.time) * 1e3

        def sleep(clocks):
            self.slept += clocks
            self.kernel(clocks / 2e9)

        def synchronize():
            self.host_time = max(self.host_time, self.gpu_time)

        other = types.SimpleNamespace(sum=lambda: self.kernel(1e-5))
        monkeypatch.setattr(torch, "zeros", lambda *shape, **of: other)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(L2_cache_size=1 << 20))
        for name, function in (("Event", Event), ("_sleep", sleep), ("synchronize", synchronize)):
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.host_time)

    def kernel(self, of_gpu):
        self.host_time += self.launch
        self.gpu_time = max(self.gpu_time, self.host_time) + of_gpu


@pytest.mark.parametrize("host", [1e-6, 5e-5], ids=["fast host", "slow host"])
def test_the_gpus_time_is_measured_whatever_the_host_takes(monkeypatch, host):
    gpu = FakeGpu(monkeypatch, host)
    found = timing.medians_on_gpu({"a": lambda: gpu.kernel(1e-5), "b": lambda: gpu.kernel(2e-4)}, 9)
    assert found == {"a": pytest.approx(1e-5), "b": pytest.approx(2e-4)}
    assert (gpu.slept > 0) == (host > 1e-5)


# Tables


def row(set_, strobe, unit="TFLOP/s", **more):
    return {"set": set_, "d": 64, "s": 512, "causal": False, "unit": unit, "strobe": strobe, **more}


ROWS = [
    row("core36", 500.0, peers={"cudnn": 400.0, "fa2": 300.0}),
    row("core36", 400.0, peers={"cudnn": 500.0, "fa2": 300.0}) | {"s": 1024},
    row("small", 5.0, "µs", peers={"cudnn": 10.0}),
    row("options", 400.0, option="mask", beside={"plain": 500.0}),
    row("window", 400.0, beside={"causal": 500.0}),
]
RECORD = {
    "device": "NVIDIA H200",
    "date": "2026-11-21",
    "commit": "1234567",
    "versions": {"Strobe": "0.1.0"},
    "repeats": 15,
    "direction": "forward",
    "rows": ROWS,
}


def test_ratios_costs_and_shares():
    assert [report.ratio(x) for x in ROWS] == [1.25, 0.8, 2.0, None, None]
    assert [report.beside(x) for x in ROWS] == ["", "", "", "+25%", "80%"]
    assert report.mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)


def test_rows_beside_peers_and_rows_beside_strobe_share_a_table():
    with_peers = row("decode", 3.6, peers={"cudnn": 4.5})
    with_option = row("decode", 1.8, beside={"strobe": 3.6}) | {"option": "seqused_k"}
    heads, lines = report.columns([with_peers, with_option])
    assert heads == ["decode", "Strobe, TFLOP/s", "cuDNN", "over the best", "strobe", "of that"]
    assert lines == [["d 64 s 512", "3.6", "4.5", "0.80", "", ""], ["d 64 s 512 seqused_k", "1.8", "", "", "3.6", "50%"]]


def test_summary_names_the_lowest():
    core, small, options, window = report.summary(ROWS, "forward")
    assert (
        core == "core36 forward: 1.00 times the best peer's speed (geometric mean of 2; lowest 0.80, at d 64 s 1024); at least 1 in 1 of 2"
    )
    assert small.startswith("small forward: 2.00 times the best peer's speed")
    assert options == "options forward: at worst +25% beside plain, at d 64 s 512 mask"
    assert window == "window forward: at worst 80% beside causal, at d 64 s 512"


def test_markdown(run, tmp_path):
    file = tmp_path / "h200-forward.json"
    file.write_text(json.dumps(RECORD))
    done = run("report", file)
    assert done.exit_code == 0, done.output
    tables = [[line for line in part.splitlines() if line.startswith("|")] for part in done.output.split("\n\n")]
    for table in filter(None, tables):
        assert len({line.count("|") for line in table}) == 1, table
    assert "| d64 | Strobe | 500 | 400 |" in done.output
    assert "|  | **over the best** | **1.25** | **0.80** |" in done.output
    assert "| d 64 s 512 mask | 400 | 500 | +25% |" in done.output
    assert "NVIDIA H200, 2026-11-21, commit 1234567; Strobe 0.1.0; 15 calls a figure, median." in done.output


def test_every_set_has_a_title():
    assert set(report.TITLES) == set(SETS)


def test_files_are_named_after_gpu_and_direction(tmp_path):
    record = {name: x for name, x in RECORD.items() if name not in ("rows", "direction")}
    command._write(tmp_path / "new", record, {"forward": ROWS, "backward": []})
    written = {file.name: json.loads(file.read_text()) for file in (tmp_path / "new").iterdir()}
    assert written == {
        "h200-forward.json": {**RECORD, "rows": sorted(ROWS, key=lambda x: list(SETS).index(x["set"]))},
        "h200-backward.json": {**RECORD, "direction": "backward", "rows": []},
    }


def test_sets_of_other_calls_are_kept_if_they_are_of_the_same_commit_and_gpu(tmp_path):
    record = {name: x for name, x in RECORD.items() if name not in ("rows", "direction")}
    command._write(tmp_path, record, {"forward": ROWS})
    now = {**record, "versions": {"FlashAttention-4": "4"}}
    assert command._kept(tmp_path, now, {"forward": [], "backward": []}, ["core36"]) == {
        "forward": sorted(ROWS[2:], key=lambda x: list(SETS).index(x["set"])),
        "backward": [],
    }
    assert now["versions"] == {"Strobe": "0.1.0", "FlashAttention-4": "4"}
    for other in ({"commit": "7654321"}, {"device": "NVIDIA H100"}):
        assert command._kept(tmp_path, record | other, {"forward": []}, ["core36"]) == {"forward": []}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_measured(run):
    done = run("gpu")
    assert done.exit_code == 2
    assert "PyTorch sees no CUDA device here" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--set", "all"), "accepted are core36, gqa, varlen, "), (("--direction", "up"), "accepted are forward and backward")],
)
def test_what_is_accepted_is_said(run, arguments, message):
    done = run("gpu", *arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", "").split())


def test_the_documentation_has_the_figures_that_were_measured():
    root = Path(__file__).parents[2]
    records = [json.loads((root / "bench" / "results" / f"h200-{direction}.json").read_text()) for direction in ("forward", "backward")]
    assert (root / "docs" / "h200.md").read_text() == report.page(records) + "\n"


# Shapes drawn at random


def drawn(seed, count=400):
    draw = Random(seed)
    return [shapes.shape(draw) for _ in range(count)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_shapes_are_drawn_from_what_is_named(seed):
    for p, where in drawn(seed):
        assert {p.dim, p.dim_v} <= set(range(16, 257, 8))
        assert p.heads % p.heads_kv == 0
        assert p.heads // p.heads_kv in range(1, 9)
        lengths = p.lengths or (p.seqlen,) * p.batch
        assert all(64 <= n <= 32768 for n in lengths[: -1 if p.lengths else None])  # the last packed sequence has the remaining tokens
        assert 4096 <= sum(lengths) <= 65536
        assert max(lengths) == where["s"]
        assert 0 <= p.window < 32768
        assert p.causal or not p.window
        assert where == {**where, "d": p.dim, "heads": f"{p.heads}/{p.heads_kv}", "causal": p.causal}
        assert where.get("dv", p.dim) == p.dim_v
        assert (where.get("packed", 0), where.get("window", 0)) == (len(p.lengths), p.window)


def test_everything_that_is_named_is_drawn():
    problems = [p for p, _ in drawn(3, 2000)]
    assert {p.dim for p in problems} == set(range(16, 257, 8))
    assert {p.heads // p.heads_kv for p in problems} == set(range(1, 9))
    lengths = [p.seqlen for p in problems if not p.lengths]
    assert {n % 2 for n in lengths} == {0, 1}
    below = [sum(n < bound for n in lengths) / len(lengths) for bound in (512, 4096)]  # the bounds cut the logarithmic range into thirds
    assert below == [pytest.approx(1 / 3, abs=0.05), pytest.approx(2 / 3, abs=0.05)]
    tokens = [p.batch * p.seqlen for p in problems if not p.lengths]
    assert min(tokens) < 5000
    assert max(tokens) > 60000
    for share, of in ((1 / 4, "lengths"), (1 / 4, "window"), (5 / 8, "causal")):  # calls with a window are causal, too
        assert sum(bool(getattr(p, of)) for p in problems) / len(problems) == pytest.approx(share, abs=0.04), of
    assert sum(p.dim_v != p.dim for p in problems) / len(problems) == pytest.approx(1 / 4, abs=0.04)


def test_a_seed_is_repeated_and_another_one_is_not():
    assert drawn(5, 20) == drawn(5, 40)[:20]
    assert drawn(5, 20) != drawn(6, 20)
    two = [list(command.chosen((), 7, 5, None)["random"]) for _ in range(2)]
    assert two[0] == two[1]
    assert [group.direction for group in two[0]] == ["forward", "backward"] * 7
    assert two[0] != command.chosen((), 7, 6, None)["random"]


def test_random_alone_unless_sets_are_named():
    assert list(command.chosen((), 3, 0, None)) == ["random"]
    assert list(command.chosen(("small",), 3, 0, None)) == ["small", "random"]
    assert list(command.chosen((), None, 0, None)) == list(SETS)
    groups = command.chosen(("random",), None, 0, "backward")["random"]
    assert len(groups) == 60
    assert {group.direction for group in groups} == {"backward"}


@pytest.mark.parametrize("left", [1, 5, 200])
@pytest.mark.parametrize("lengths", [(), (40, 3)])
def test_a_windows_work_is_what_it_leaves(left, lengths):
    p = Problem(0 if lengths else 2, 3, 0 if lengths else 50, 16, True, lengths=lengths, window=left)
    seen = sum(min(i, left) + 1 for n in lengths or (50, 50) for i in range(n))
    assert p.flops(False) == 4 * 3 * seen * 16
    assert p.flops(True) == 10 * 3 * seen * 16


def test_a_drawn_window_is_the_calls():
    q = torch.randn(1, 2, 50, 16)
    p = Problem(1, 2, 50, 16, True, window=5)
    i, j = torch.arange(50)[:, None], torch.arange(50)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=(j <= i) & (i - j <= 5))
    found = contestants.call("strobe", p, "plain", "forward", (q, q, q, q), "cpu")()[0]
    torch.testing.assert_close(found, expected)


def drawn_rows():
    rows = [row("random", 100.0 + i, peers={"fa2": 50.0, "fa4": 110.0}, seed=9) | {"s": 100 + i} for i in range(20)]
    return [*rows, row("random", 90.0, peers={}, seed=9)]  # a row without peers is left out of all figures


def test_summary_of_shapes_drawn_at_random():
    mean, lowest = report.summary(drawn_rows(), "forward")
    assert mean.startswith("random forward: 0.99 times the best peer's speed (geometric mean of 20; lowest 0.91, at d 64 s 100)")
    assert lowest.startswith(
        "random forward, seed 9: at least 1 at 50% of the shapes; the lowest 10: 0.91 at d 64 s 100; 0.92 at d 64 s 101;"
    )
    assert lowest.endswith("; 0.99 at d 64 s 109")
    assert lowest.count(" at d ") == 10


def test_a_seed_is_no_part_of_a_shapes_name():
    heads, lines = report.columns(drawn_rows()[:1])
    assert heads == ["random", "Strobe, TFLOP/s", "FlashAttention-2", "FlashAttention-4", "over the best"]
    assert lines == [["d 64 s 100", "100", "50", "110", "0.91"]]


@pytest.fixture
def pretended_gpu(monkeypatch):
    """A GPU whose clock advances by ten seconds per measured group."""
    now = [0.0]

    def measure(group, repeats):
        now[0] += 10
        return measurement.Found([{"set": group.set, **group.rows[0].where, "unit": group.unit, "strobe": 1.0, "peers": {"fa2": 2.0}}], {})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(command, "host", dict)
    monkeypatch.setattr(command, "_versions", dict)
    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(command, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    return now


@pytest.mark.usefixtures("pretended_gpu")
def test_a_fault_of_the_gpu_ends_a_run_and_what_was_measured_is_kept(monkeypatch, run, tmp_path):
    measure = command.measure

    def faulty(group, repeats):
        if group.rows[0].where["causal"]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with ...")
        return measure(group, repeats)

    monkeypatch.setattr(command, "measure", faulty)
    done = run("gpu", "--set", "gqa", "--set", "window", "--jobs", 0, "--results", tmp_path, "--commit", "abc")
    assert done.exit_code == 1, done.output
    assert "stopped gqa, forward, at 32/8 d 128 s 4096 causal: CUDA error: an illegal memory access was encountered\n" in done.output
    assert "window" not in done.output
    assert "Compile with" not in done.output
    assert len(json.loads((tmp_path / "h200-forward.json").read_text())["rows"]) == 1

    def mistaken(group, repeats):
        raise RuntimeError("a mistake of the benchmark's own")

    monkeypatch.setattr(command, "measure", mistaken)
    assert isinstance(run("gpu", "--set", "gqa", "--jobs", 0).exception, RuntimeError)


def test_the_clock_ends_a_run_and_what_was_measured_is_kept(pretended_gpu, run, tmp_path):
    done = run("gpu", "--random", 60, "--seconds", 35, "--jobs", 0, "--results", tmp_path, "--commit", "abc")
    assert done.exit_code == 0, done.output
    assert "random: 116 of 120 not measured" in done.output
    seed = int(done.output.partition("shapes drawn at random: --seed ")[2].split()[0])
    rows = [json.loads((tmp_path / f"h200-{direction}.json").read_text())["rows"] for direction in ("forward", "backward")]
    expected = [where for _, where in drawn(seed, 2)]
    for of_direction in rows:
        assert of_direction == [
            {"set": "random", **where, "seed": seed, "unit": "TFLOP/s", "strobe": 1.0, "peers": {"fa2": 2.0}} for where in expected
        ]
    assert "at least 1 at 0% of the shapes" in done.output
    again = run("gpu", "--random", 60, "--seconds", 35, "--jobs", 0)
    assert f"--seed {seed}\n" not in again.output
