"""The strobe command, as typed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from rich.console import Console

import strobe
from strobe._prewarm import Kernel
from strobe_tools import progress, requirements, timing
from strobe_tools.bench import cpu as bench
from strobe_tools.bench import ladder, memory, peak
from strobe_tools.cli import app, check, prewarm
from strobe_tools.cli import main as cli_main
from strobe_tools.cli.info import compiled_for
from strobe_tools.train import CONFIGS, data, experiment
from strobe_tools.train.trainer import Trainer


@pytest.fixture
def run():
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("STROBE_CACHE", str(tmp_path_factory.getbasetemp() / "cli-cache"))


def test_python_m_strobe():
    done = subprocess.run([sys.executable, "-m", "strobe", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == strobe.__version__


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["info"], ["train", "--help"]], ids=" ".join)
def test_a_full_disk_behind_the_output(arguments, unbuffered):
    with Path("/dev/full").open("w") as full:
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        command = [sys.executable, "-m", "strobe", *arguments]
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    assert ran.returncode == 1
    assert ran.stderr == "Error: the output cannot be written: No space left on device\n"


def test_without_an_output():
    ran = subprocess.run(f"{sys.executable} -m strobe info >&-", shell=True, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_full_disk_elsewhere_keeps_its_own_words(monkeypatch):
    def fails() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("strobe_tools.cli.app", fails)
    with pytest.raises(OSError, match="No space left on device"):
        cli_main()


def test_help_lists_the_commands(run):
    help_text = run("--help").output
    assert all(name in help_text for name in ("info", "check", "bench", "train"))


def test_info_names_every_engine(run):
    done = run("info")
    assert done.exit_code == 0
    assert strobe.__version__ in done.output
    for name, missing in strobe.engines():
        line = next(line for line in done.output.splitlines() if name in line)
        assert ("yes" if missing is None else "no: ") in line


def test_info_says_where_kernels_are_kept_and_why_not(run, tmp_path, monkeypatch):
    monkeypatch.setenv("STROBE_CACHE_DIR", str(tmp_path))
    assert f"Kernel cache {tmp_path}" in " ".join(run("info").output.split())
    tmp_path.chmod(0o777)
    assert f"Kernel cache none, not {tmp_path}: others can write to it" in " ".join(run("info").output.split())


def test_info_names_the_compiler_or_where_it_was_looked_for(run, tmp_path, monkeypatch):
    assert re.search(r"NVRTC +\d+\.\d+ for sm_\d+, .*libnvrtc\.so\.\d+", run("info").output)
    monkeypatch.setenv("STROBE_NVRTC", str(tmp_path / "none"))
    assert f"NVRTC no NVRTC that compiles for sm_90 (looked in STROBE_NVRTC={tmp_path / 'none'}" in " ".join(run("info").output.split())


def test_a_function_is_told_from_a_command(run):
    for name, call in (("explain", "strobe.explain(q, k, v)"), ("engines", "strobe.engines()")):
        done = run(name)
        assert done.exit_code == 2
        assert f"{name} is a Python function: {call}" in done.output
    assert "No such command 'explian'" in run("explian").output


def test_a_missing_package_has_its_remedy(run, monkeypatch):
    monkeypatch.setattr(requirements.importlib.util, "find_spec", lambda name: None if name == "tokenizers" else name)
    done = run("train")
    assert done.exit_code == 2
    assert done.output.strip() == "strobe train needs tokenizers: pip install 'tokenizers>=0.15'"


# check


@pytest.fixture
def few_cases(monkeypatch):
    every = check.cases
    monkeypatch.setattr(check, "cases", lambda dtypes: random.Random(0).sample(every(dtypes), 24))


def test_check_is_a_product_of_the_options():
    cases = check.cases(list(check.TOLERANCE))
    assert len(set(cases)) == len(cases) == 4 * len(check.SHAPES) * len(check.MASKS) * len(check.EXTRAS)


@pytest.mark.usefixtures("few_cases")
def test_check_passes_and_counts(run):
    done = run("check")
    assert done.exit_code == 0, done.output
    available = [name for name, missing in strobe.engines() if missing is None and name != "reference"]
    lines = [line.split("│")[1:5] for line in done.output.splitlines() if line.startswith(("│ cpu", "│ ladder"))]
    rows = {name.strip(): [int(n) for n in counts] for name, *counts in lines}
    assert sorted(rows) == sorted(available)
    assert all(failed == 0 and passed + not_taken == 24 for passed, failed, not_taken in rows.values())
    # The ladder's engines support too few options.
    assert all(row[0] > 0 for name, row in rows.items() if name.startswith("cpu"))
    assert f"{sum(row[0] for row in rows.values())} cases checked" in done.output


@pytest.mark.usefixtures("few_cases")
@pytest.mark.parametrize("wrong", ["out", "dq", "dv", "nan"])
def test_check_finds_a_wrong_engine(run, monkeypatch, wrong):
    attention, backward = strobe.attention, strobe.attention_backward

    def bent(x):
        x = x + 0
        x[(0,) * x.ndim] += float("nan") if wrong == "nan" else 0.25
        return x

    def bent_attention(*arrays, **options):
        out, lse = attention(*arrays, **options)
        return (bent(out) if wrong in ("out", "nan") else out), lse

    def bent_backward(*arrays, **options):
        gradients = backward(*arrays, **options)
        return gradients._replace(**{wrong: bent(getattr(gradients, wrong))}) if wrong in ("dq", "dv") else gradients

    monkeypatch.setattr(strobe, "attention", bent_attention)
    monkeypatch.setattr(strobe, "attention_backward", bent_backward)
    done = run("check", "--engine", "cpu-baseline")
    assert done.exit_code == 1
    assert "error of " in done.output
    assert "24 failed" in done.output


def test_check_refuses_an_engine_that_is_not_here(run):
    for name, why, hint in (
        ("abacus", "is unknown", ""),
        ("cpu-baselin", "is unknown", "; did you mean cpu-baseline?"),
        ("reference", "is what the others are checked against", ""),
    ):
        done = run("check", "--engine", name)
        assert done.exit_code == 2
        assert done.output.startswith(f"--engine: {name} {why}; accepted: ")
        assert done.output.rstrip().endswith(hint)
        assert ("did you mean" in done.output) == bool(hint)


HOSTILE = {
    "prewarm": [
        ([], "--arch: missing; accepted is the compute capability times ten, e.g. 90 for an H100 or H200"),
        (["--arch", "sm_90"], "--arch: 'sm_90'; accepted is the compute capability times ten, e.g. 90 for an H100 or H200"),
        (["--arch", "9" * 30], "--arch: '999"),
        (["--arch", "0"], "--arch: '0'; accepted"),
        (["--arch", "35"], "--arch: '35'; accepted is the compute capability times ten, e.g. 90 for an H100 or H200, from 61 on"),
        (["--arch", "90", "--dtype", "int8"], "--dtype: 'int8'; accepted are bfloat16, float16, float32, float64"),
        (["--arch", "90", "--feature", "x"], "--feature: 'x'; accepted are plain, causal, "),
        (["--arch", "90", "--head-dim", "0"], "Invalid value for '--head-dim': "),
        (["--arch", "90", "--head-dim", "577"], "Invalid value for '--head-dim': "),
        (["--arch", "90", "--jobs", "0"], "Invalid value for '--jobs': "),
        (["--arch", "90", "--max-spill", "-1"], "Invalid value for '--max-spill': "),
    ],
    "tune": [
        (["--engine", "abacus"], "--engine: 'abacus'; accepted are cuda-sm90, "),
        (["--dtype", "int8"], "--dtype: 'int8'; accepted are float32, "),
        (["--direction", "up"], "--direction: 'up'; accepted are forward, backward"),
        (["--shape", "1,2"], "--shape: '1,2'; accepted is B,H,S,D or B,H,Hkv,Sq,Sk,D,Dv, whole numbers"),
        (["--shape", "1,2,3,513"], "--shape: '1,2,3,513'; accepted"),
        (["--shape", "1,2,3,64,64,64,64"], "--shape: '1,2,3,64,64,64,64'; accepted"),
        (["--shape", f"1,2,{10**40},64"], "--shape: '1,2,1000"),
        (["--repeats", "0"], "Invalid value for '--repeats': "),
    ],
    "check": [(["--seed", "-1"], "Invalid value for '--seed': "), (["--seed", "9" * 30], "Invalid value for '--seed': ")],
    "bench": [
        (["--json", "/proc/none/x.json"], "--json: /proc/none/x.json: "),
        (["--json", "/"], "--json: /: not writable, or no file; accepted"),
    ],
    "figures": [
        (["--budget", "nan"], "Invalid value for "),
        (["--budget", "inf"], "Invalid value for --budget: inf; accepted are seconds from 0"),
        (["--figure", "x"], "--figure: 'x'; accepted are "),
        (["--device", "meta"], "--device: 'meta': accepted are cpu and cuda"),
    ],
}


@pytest.mark.parametrize(("command", "arguments", "message"), [(c, *case) for c, cases in HOSTILE.items() for case in cases])
def test_one_clear_message(run, command, arguments, message):
    done = run(command, *arguments)
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)
    words = " ".join(done.output.replace("│", "").split())
    assert message in words


def test_figures_names_a_folder_that_it_did_not_measure_into(run, tmp_path):
    for machine in ("", "[]", "{}", "[" * 100_000):
        (tmp_path / "machine.json").write_text(machine)
        done = run("figures", "--draw-only", "--out", tmp_path)
        assert done.exit_code == 2, done.exception
        assert "accepted is a folder that `strobe figures` measured into" in " ".join(done.output.replace("│", "").split())


def test_bench_report_names_a_file_that_bench_did_not_write(run, tmp_path):
    for text in ("", "[]", "{}", "\udcff"):
        (tmp_path / "x.json").write_text(text, errors="surrogateescape")
        done = run("bench", "report", tmp_path / "x.json")
        assert done.exit_code == 2, done.exception
        assert "accepted is what `strobe bench gpu --results` wrote" in " ".join(done.output.replace("│", "").split())


def test_prewarm_says_why_a_kernel_does_not_compile(run, monkeypatch):
    def fails(job):
        raise RuntimeError("strobe::mma::Forward for sm_90: nvrtcCompileProgram of NVRTC 13.0: an error")

    monkeypatch.setattr(prewarm, "ProcessPoolExecutor", lambda processes, **_: ThreadPoolExecutor(processes))
    monkeypatch.setattr(prewarm.Job, "run", fails)
    done = run("prewarm", "--arch", "90")
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert done.output.strip().endswith("strobe prewarm: strobe::mma::Forward for sm_90: nvrtcCompileProgram of NVRTC 13.0: an error")


@pytest.fixture
def without_compiler(monkeypatch, tmp_path):
    """strobe prewarm, with a fake compiler that takes 20 s for each call."""
    clock = 0.0

    def run(job):
        nonlocal clock
        clock += 20.0
        return [Kernel(name, 168, 0, False, True) for name in job.names()[0]], ""

    in_turn = SimpleNamespace(map=map)  # a call begins when the previous one has been reported
    monkeypatch.setattr(prewarm, "ProcessPoolExecutor", lambda processes, **_: nullcontext(in_turn))
    monkeypatch.setattr(prewarm.Job, "run", run)
    monkeypatch.setattr(prewarm, "_missing", lambda asked: set())  # as if all kernels were in the cache
    monkeypatch.setattr(progress, "perf_counter", lambda: clock)
    monkeypatch.setenv("STROBE_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("without_compiler")
def test_prewarm_says_first_what_it_will_take(run, tmp_path):
    done = run("prewarm", "--arch", "90", "--jobs", "2")
    assert done.exit_code == 0, done.output
    first, cache, subset, *rest = done.output.splitlines()
    calls, kernels, missing, minutes, megabytes = map(int, re.findall(r"\b\d+(?!\d* idle cores)\b", first)[:5])
    assert first.startswith(f"{calls} calls take {kernels} kernels: {kernels} to compile (about {minutes} min on 2 idle cores, ")
    assert first.endswith(f"{megabytes} MB), 0 in the cache")
    assert calls == len(list(prewarm.jobs([90], None, None, None)))
    assert missing == kernels
    assert 200 < kernels < 1000
    assert minutes == pytest.approx(kernels * 0.7 / 2 / 60, abs=0.5)
    assert megabytes == pytest.approx(kernels * 0.065, abs=1)
    assert cache == f"Kernel cache: {tmp_path}"
    assert rest[-1].startswith(f"{kernels} kernels, {kernels} compiled, 0 found in the cache, ")
    lines = rest[:-1]  # a line at most every 30 s
    assert calls / 3 < len(lines) < calls * 2 / 3 + 1
    said = [
        re.fullmatch(rf"(\d+) of {kernels} kernels compiled in \d+ (?:s|min)(, about \d+ (?:s|min) left)?; last: sm_90 .*", x)
        for x in lines
    ]
    assert all(said), lines
    assert all(bool(x[2]) == (int(x[1]) >= 8) for x in said), lines
    assert any(not x[2] for x in said)
    assert any(x[2] for x in said)
    few = run("prewarm", "--arch", "90", "--common").output
    assert subset.startswith(f"--common compiles {few.split(' kernels')[0].split()[-1]} of them; ")
    assert "--common compiles" not in few


def test_the_common_kernels_are_those_of_many_sizes():
    """Each kernel of other numbers of sequences, tokens and heads is in the table."""
    common = (prewarm._COMMON_DIMS, prewarm._COMMON_DTYPES, prewarm._COMMON_FEATURES)
    table = {name for job in prewarm.jobs([90], *common) for name in job.names()[0]}
    heads = ((8, 8), (16, 16), (32, 32), (32, 8))
    grid = [(128 << i, 1 << j, *h) for i in range(8) for j in range(5) if 128 << i + j <= 1 << 16 for h in heads]
    for sizes in random.Random(0).sample(grid, 12):
        for dim, feature, backward in product(prewarm._COMMON_DIMS, prewarm._COMMON_FEATURES, (False, True)):
            job = prewarm.Job(90, "bfloat16", dim, feature, backward, *sizes)
            assert job.names()[0].keys() <= table, job


FEW = ("--arch", "90", "--head-dim", "64", "--dtype", "bfloat16", "--feature", "sinks")


def test_prewarm_says_that_nothing_was_kept(run, monkeypatch, tmp_path):
    monkeypatch.setenv("STROBE_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("STROBE_CACHE_READONLY", "1")
    done = run("prewarm", *FEW)
    assert done.exit_code == 1
    assert re.search(r"strobe prewarm: (\d+) of \1 compiled kernels were not kept; kernel cache: ", done.output), done.output


def test_prewarm_ends_when_it_is_interrupted(tmp_path):
    """Ctrl-C reaches all processes of a terminal's group. The command used to wait for ever."""
    environment = os.environ | {"STROBE_CACHE_DIR": str(tmp_path)}
    command = [
        sys.executable,
        "-c",
        "from strobe_tools.cli import main; main()",
        "prewarm",
        "--arch",
        "90",
        "--head-dim",
        "64",
        "--jobs",
        "2",
    ]
    process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        while not list(tmp_path.glob("*/*")):  # waits until it compiles
            assert process.poll() is None
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=60)[0].decode()  # waits for the end of the last process
        assert process.returncode != 0
        assert "Aborted!" in said
        assert "resource_tracker" not in said
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("arch", [91, 130])
def test_prewarm_promises_nothing_for_an_architecture_that_the_compiler_does_not_know(run, arch):
    possible = [cc for cc in compiled_for() if cc >= 61]
    assert 90 in possible
    done = run("prewarm", "--arch", "90", "--arch", arch)
    assert done.exit_code == 2
    assert f"{arch}; accepted is what this machine's NVRTC compiles for: {', '.join(map(str, possible))}" in " ".join(
        done.output.replace("│", "").split()
    )
    assert "kernels" not in done.output


def test_prewarm_names_the_compiler_that_older_gpus_need(run, monkeypatch):
    monkeypatch.setattr("strobe_tools.cli.prewarm.compiled_for", lambda: [75, 90])
    said = " ".join(run("prewarm", "--arch", "61").output.replace("│", "").split())
    assert '75, 90; this one needs NVRTC 12: pip install "nvidia-cuda-nvrtc-cu12' in said
    assert "NVRTC 12" not in run("prewarm", "--arch", "91").output


def test_prewarm_knows_every_architecture_of_the_compiler():
    assert {cc for cc in compiled_for() if cc >= 61} <= {*prewarm._KNOWN}


def test_prewarm_knows_architectures_without_a_compiler(run, monkeypatch):
    monkeypatch.setattr(prewarm, "compiled_for", list)
    for arch in (91, 999):
        done = run("prewarm", "--arch", arch)
        assert done.exit_code == 2
        said = " ".join(done.output.replace("│", "").split())
        assert f"--arch: {arch}; accepted is an architecture that some NVRTC compiles for: 61, 62, " in said
        assert "kernels" not in done.output


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """A machine without NVRTC, with an empty cache."""
    monkeypatch.setenv("STROBE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("STROBE_NVRTC", str(tmp_path / "none"))
    monkeypatch.setattr(prewarm, "_announce", lambda *_: pytest.fail("a plan that cannot be kept"))


@pytest.mark.usefixtures("no_compiler")
def test_prewarm_without_a_compiler_says_at_once_what_to_install(run, tmp_path):
    done = run("prewarm", "--arch", "90")
    assert done.exit_code == 1
    assert done.output.startswith("strobe prewarm: sm_90 bfloat16 d32 plain forward: a kernel is not in a cache (")
    assert "no NVRTC that compiles for sm_90 (looked in STROBE_NVRTC=" in done.output
    assert 'accepted is NVRTC 12 or 13: pip install "nvidia-cuda-nvrtc", or name the library in STROBE_NVRTC' in done.output


@pytest.mark.usefixtures("no_compiler")
def test_prewarm_offline_says_at_once_that_it_may_not_compile(run, monkeypatch):
    monkeypatch.setenv("STROBE_OFFLINE", "1")
    done = run("prewarm", "--arch", "90")
    assert done.exit_code == 1
    assert done.output.startswith("strobe prewarm: sm_90 bfloat16 d32 plain forward: a kernel is not in a cache (")
    assert "STROBE_OFFLINE forbids to compile it" in done.output


def test_prewarm_gives_each_reason_once(run, monkeypatch, tmp_path):
    def refuses(job):
        name = next(iter(job.names()[0]))
        return [], f"{name} for sm_{job.compute_capability}a: not in a cache (/none), and there is no NVRTC"

    monkeypatch.setattr(prewarm, "ProcessPoolExecutor", lambda processes, **_: ThreadPoolExecutor(processes))
    monkeypatch.setattr(prewarm.Job, "run", refuses)
    monkeypatch.setenv("STROBE_CACHE_DIR", str(tmp_path))
    done = run("prewarm", "--arch", "90", "--common")
    assert done.exit_code == 1
    assert done.output.count("there is no NVRTC") == 1
    assert "and 189 more: a kernel is not in a cache (/none), and there is no NVRTC" in done.output


def test_prewarms_two_counts_agree(run, monkeypatch, tmp_path):
    """Some kernels are in the cache, and one of the others does not compile."""
    name = "strobe::mma::Forward<{}>"
    kept = {"plain": [0, 1], "causal": [1, 2], "varlen": [3]}  # by feature; 0 and 1 are in the cache

    def names(job):
        return {name.format(n): n < 2 for n in kept[job.feature]}, ""

    def made(job):
        refused = job.feature == "varlen"
        return ([] if refused else [Kernel(name.format(n), 168, 0, False, n > 1) for n in kept[job.feature]]), "not today" * refused

    monkeypatch.setattr(prewarm, "ProcessPoolExecutor", lambda processes, **_: ThreadPoolExecutor(processes))
    monkeypatch.setattr(prewarm, "compiled_for", lambda: [90])
    monkeypatch.setattr(prewarm.Job, "names", names)
    monkeypatch.setattr(prewarm.Job, "run", made)
    monkeypatch.setenv("STROBE_CACHE_DIR", str(tmp_path))
    done = run("prewarm", "--arch", "90", "--common")
    assert done.exit_code == 1
    assert "192 calls take 4 kernels: 2 to compile (" in done.output
    assert "MB), 2 in the cache" in done.output
    assert "4 kernels, 1 compiled, 2 found in the cache, 1 not compiled, " in done.output


# bench


def test_flops():
    assert bench.flops((1, 8, 2048, 64), backward=False, causal=False) == 4 * 8 * 2048 * 2048 * 64
    assert bench.flops((1, 8, 2048, 64), backward=True, causal=True) == 2.5 * 0.5 * 4 * 8 * 2048 * 2048 * 64


def test_medians_interleave_in_shuffled_order(monkeypatch):
    clock = 0.0
    order = []

    def call(name, seconds):
        def function():
            nonlocal clock
            order.append(name)
            clock += seconds[order.count(name) - 1]

        return function

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock)
    first = [9.0, 1.0, 5.0, 2.0, 4.0, 3.0]  # the first call of each function is not counted
    found = timing.medians({"a": call("a", first), "b": call("b", [x * 10 for x in first])}, repeats=5)
    assert found == {"a": 3.0, "b": 30.0}
    assert Counter(order) == {"a": 6, "b": 6}
    assert order[2:] not in (["a", "b"] * 5, ["a"] * 5 + ["b"] * 5)


def test_bench_prints_and_keeps_its_figures(run, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "SHAPES", ((1, 2, 128, 32),))
    monkeypatch.setattr(peak, "measure", lambda threads: {"fma": 1e12, "dot": 2e12})
    done = run("bench", "--repeats", 1, "--json", tmp_path / "new" / "bench.json")
    assert done.exit_code == 0, done.output
    assert "1,000 GFLOP/s in fp32 multiply-adds, 2,000 GFLOP/s in bf16 dot products" in done.output
    report = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert len(report["speed"]) == 2 * 2 * 2  # dtypes, masks, directions
    for row in report["speed"]:
        assert row["ratio"] == pytest.approx(row["strobe_flops"] / row["torch_flops"])
        assert row["share_of_peak"] == pytest.approx(row["strobe_flops"] / (1e12 if row["dtype"] == "float32" else 2e12))
        assert f"{row['ratio']:.2f}×" in done.output
    assert not {"masks", "memory"} & set(report)


@pytest.mark.parametrize(("longest", "brief"), [(1.9, True), (7.0, True), (7.0, False)])
def test_bench_says_that_the_machine_was_busy(run, monkeypatch, longest, brief):
    """One timed call stalls. If calls are brief, twice as many more are timed."""
    asked = []

    def samples(functions, repeats):
        asked.append(repeats)
        return {name: [x * (1e-3 if brief else 1.0) for x in [1.0] * (repeats - 1) + [longest]] for name in functions}

    monkeypatch.setattr(bench, "SHAPES", ((1, 1, 16, 16),))
    monkeypatch.setattr(bench, "DTYPES", ("float32",))
    monkeypatch.setattr(bench, "samples", samples)
    monkeypatch.setattr(peak, "measure", lambda threads: {})
    done = run("bench", "--repeats", 5)
    assert done.exit_code == 0, done.output
    stalls = longest > timing.SPREAD
    assert asked == ([5, 10] if stalls and brief else [5]) * 4  # asked once for each mask and direction
    said = "warning in 4 of 4 figures the longest call took more than 2 times as long as the shortest one (at most 7.0 times); the machine "
    assert (said + "was busy: measure again" in done.output) == stalls
    assert ("warning" in done.output) == stalls


def test_tables_fit_80_columns():
    speed = {"dtype": "bfloat16", "direction": "backward", "causal": True, "strobe_flops": 1.2e12, "torch_flops": 1.1e12}
    speeds = [{**speed, "shape": shape, "ratio": 12.69, "share_of_peak": 1.19} for shape in bench.SHAPES]
    mask = {"dtype": "bfloat16", "masked": 0.0931, "without": 0.0911, "cost": 0.13}
    masks = [{**mask, "mask": "half the blocks, over half the keys"}]
    memories = [{"dtype": "bfloat16", "bytes": dict.fromkeys(bench.LENGTHS, 5e8), "bytes_per_token": 19871.0}]
    rung = {"engine": "ladder-tensor-cores", "tile": (128, 128), "dtype": "float16", "flops": 3e14, "before": 12.3, "best": True}
    rungs = [{**rung, ladder.SDPA: 0.123, ladder.STROBE: 0.456}]
    console = Console(width=200)
    for table in (bench._speed_table(speeds), bench._mask_table(masks), bench._memory_table(memories), ladder._table("rungs", rungs)):
        assert console.measure(table).maximum <= 80


def test_mask_rows_compare_equal_work(monkeypatch):
    results = []

    def medians(functions, repeats):
        results.append({name: function() for name, function in functions.items()})
        return {"masked": 1.2, "without": 1.0}, 1.1

    monkeypatch.setattr(bench, "MASK_SHAPE", (2, 256, 16))
    monkeypatch.setattr(bench, "DTYPES", ("float32",))
    monkeypatch.setattr(bench, "_medians", medians)
    rows = bench.masks(1)
    assert [row["cost"] for row in rows] == [pytest.approx(0.2)] * 3
    padding, *halves = results
    packed = padding["without"][0].unflatten(0, (4, 256)).transpose(1, 2)
    assert (padding["masked"][0] - packed).abs().max() < 1e-5  # dq of the same problem
    for half in halves:
        assert (half["masked"][0] - half["without"][0]).abs().max() < 1e-5


def test_memory_is_linear_in_the_length():
    short, long = (memory.peak(length, "float32") for length in (1024, 4096))
    assert 0 < short < long < 5 * short


def test_peak_is_measured():
    peaks = peak.measure(1)
    assert peaks["fma"] > 1e9
    assert peak.of_dtype(peaks, "float32") == peaks["fma"]
    assert peak.of_dtype(peaks, "bfloat16") == max(peaks.values())


def test_without_a_compiler_there_is_no_peak(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(peak.shutil, "which", lambda name: None)
    assert peak.measure(1) == {}
    assert peak.of_dtype({}, "float32") is None


# train


def train(run, out, *more):
    return run("train", "--config", "smoke", "--device", "cpu", "--out", out, *more)


def test_train_leaves_everything(run, tmp_path):
    done = train(run, tmp_path)
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    for figure in ("validation_loss", "bigram_entropy", "validation_loss_without_attention"):
        assert f"{summary[figure]:.3f}" in done.output
    assert summary["attention_learned"] is False
    assert "Attention did not learn, which this configuration does not ask for: " in done.output
    prompt, continuation = (tmp_path / "sample.txt").read_text().split(f"\n{experiment.CUT}\n")
    smoke = CONFIGS["smoke"]
    _, held_out = data.split(data.gather(None, smoke.text_bytes))
    assert len(prompt) >= smoke.sequence // 2
    assert held_out[0].startswith(prompt)
    assert prompt in done.output
    assert continuation.strip() in done.output
    numbers = r"[1-9]\d*\.\d K"
    said = rf"A model of {numbers} parameters that has read {numbers} tokens is as unsure of the next one as among "
    assert re.search(said, done.output)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_train_fails_if_attention_had_to_learn(run, tmp_path):
    done = train(run, tmp_path, "--set", "must_learn=True")
    assert done.exit_code == 1
    assert "Attention did NOT learn: " in done.output
    assert train(run, tmp_path, "--set", "must_learn=True", "--no-ablation").exit_code == 0


def test_interrupt_and_resume_is_the_whole_run(run, tmp_path, monkeypatch):
    assert train(run, tmp_path / "whole").exit_code == 0
    step = Trainer.train_step

    def interrupted(trainer):
        if trainer.step == 3:
            signal.raise_signal(signal.SIGINT)
        return step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", interrupted)
        done = train(run, tmp_path / "parts")
    assert done.exit_code == 130
    assert "the same command with --resume goes on" in done.output
    done = train(run, tmp_path / "parts", "--resume")
    assert "continues at step 4 of 6" in done.output
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "parts")]
    assert all(summary.pop("tokens_per_second") > 0 for summary in summaries)
    assert summaries[0] == summaries[1]
    assert f"no attention: {tmp_path / 'parts' / 'no-attention.pt'} does not exist; starts at step 0" in done.output
    assert "warning" not in done.output
    done = train(run, tmp_path / "parts")  # starts from the beginning; existing files are kept
    assert done.exit_code == 0
    assert f"warning {tmp_path / 'parts'} has an earlier run: its checkpoints are renamed to *.previous.pt" in done.output
    assert done.output.startswith("warning")
    assert (tmp_path / "parts" / "attention.previous.pt").exists()


def test_resuming_nothing_is_warned_of(run, tmp_path):
    done = train(run, tmp_path, "--resume", "--no-ablation")
    assert done.exit_code == 0, done.output
    assert f"warning --resume: {tmp_path} has no checkpoint; the run starts at step 0" in done.output


def test_train_takes_a_text(run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} bottles of beer on the wall, {i} bottles of beer.\n" for i in range(1000)))
    done = train(run, tmp_path / "out", "--text", text, "--set", "vocab_size=270", "--steps", "2", "--attention", "math", "--no-ablation")
    assert done.exit_code == 0, done.output
    assert f"Text: {text}" in done.output
    config = json.loads((tmp_path / "out" / "summary.json").read_text())["config"]
    assert (config["vocab_size"], config["steps"], config["attention"]) == (270, 2, "math")
    assert f", {text.stat().st_size / 1e3:.1f} kB, vocabulary 270," in done.output
    assert " 0 tokens/s" not in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "/nowhere"], "text: /nowhere does not exist; accepted: a text file or a folder of text files"),
        (["--config", "gpt9"], "--config gpt9; accepted: default, gpt3-small, smoke"),
        (["--attention", "flash"], "attention is 'flash'; accepted: strobe, sdpa, math, block-sparse, none"),
        (["--set", "colour=red"], "--set colour=red: no such field; accepted is NAME=VALUE with NAME one of vocab_size, "),
        (["--set", "layers=many"], "--set layers=many: 'many' is no int, as layers is (2 by default)"),
        (["--device", "abacus"], "device is 'abacus', which PyTorch does not have here"),
        (["--device", "meta"], "device is 'meta'; accepted: auto, cpu, cuda, cuda:1, ..."),
        (["--device", ""], "device is ''"),
        (["--set", "layers"], "--set layers: '' is no int"),
        (["--set", "layers=None"], "layers is None; accepted: a whole number of 64 bits"),
        (["--set", f"layers={10**400}"], "layers is 1000"),
        (["--set", f"layers={'(' * 100_000}"], "--set layers=((("),
        (["--set", "layers=True"], "--set layers=True: 'True' is no int"),
        (["--set", "lr=None"], "lr is None; accepted: a finite number"),
        (["--set", "lr=1e400"], "lr is inf; accepted: a finite number"),
        (["--set", "epochs=many", "--set", "steps=None"], "epochs is 'many'; accepted: a finite number or None"),
        (["--set", "betas=(0.9,)"], "betas is (0.9,); accepted: two finite numbers"),
        (["--set", "betas=(0.9, 1.5)"], "betas is (0.9, 1.5); accepted: 0 up to, not including, 1"),
        (["--set", "init_std=-1"], "init_std is -1.0; accepted: 0 or more"),
        (["--set", "text_bytes=0"], "text_bytes is 0; accepted: 1 or more"),
        (["--set", "text_bytes='a'"], "--set text_bytes='a': "),
        (["--seed", "9" * 30], "seed is 999"),
        (["--epochs", "nan"], "epochs is nan; accepted: a finite number or None"),
        (["--device", "abacus", "--text", "/nowhere"], "device is 'abacus'"),  # refused before the text is read
        (["--steps", "5", "--epochs", "1"], "--steps and --epochs: both given; accepted is one of the two"),
    ],
)
def test_train_names_what_is_wrong(run, tmp_path, arguments, message):
    done = train(run, tmp_path, *arguments)
    assert done.exit_code == 2
    assert done.output.replace("\n", " ").split("strobe train: ")[1].startswith(message)
