"""Tests, without a GPU, the record of the tests that ran on one, and the program that makes random calls on one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from queue import Empty

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
import random_calls
import record

FOUND = {"calls": 4, "option_sets": 1, "wrong": 0, "seeds": [7], "device": "a GPU", "seconds": 3}
PART = {"device": "a GPU", "date": "today", "status": 0, "passed": 5, "failed": 0, "skipped": 1, "options": ["-n", "36", "-q"]}


def test_random_calls_of_the_same_sources_add_up(tmp_path):
    file = tmp_path / "record.json"
    file.write_text('{"passed": 1}')
    record.add_random(FOUND, "these", file)
    record.add_random(FOUND | {"seeds": [8], "wrong": 1}, "these", file)
    both = FOUND | {"calls": 8, "option_sets": 2, "wrong": 1, "seeds": [7, 8], "seconds": 6, "digest": "these"}
    assert json.loads(file.read_text()) == {"passed": 1, "random": both}
    record.add_random(FOUND, "others", file)
    assert json.loads(file.read_text())["random"] == FOUND | {"digest": "others"}


@pytest.mark.parametrize(
    ("drawn", "says"),
    [
        (None, "no random calls"),
        (FOUND | {"option_sets": 3000, "digest": "of other sources"}, "no random calls"),
        (FOUND | {"option_sets": 2999}, "2999 option sets of random calls, of 3000"),
        (FOUND | {"option_sets": 3000, "wrong": 1}, "1 wrong"),
        (FOUND | {"option_sets": 3000}, "none wrong"),
    ],
)
def test_check(drawn, says, tmp_path, monkeypatch, capsys):
    digest = "of today's sources"
    monkeypatch.setattr(record, "digest", lambda part=None: f"{digest} and {part}" if part else digest)
    found = {"parts": {name: PART | {"digest": f"{digest} and {name}"} for name in record.PARTS}}
    file = tmp_path / "record.json"
    file.write_text(json.dumps(found | ({} if drawn is None else {"random": {"digest": digest} | drawn})))
    monkeypatch.setattr(record, "RECORD", file)
    assert record.check() == (0 if says == "none wrong" else 1)
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"contract": {"digest": "of others"}}, "is of other sources than today's"),
        ({"contract": None}, 'the part "contract" did not run'),
        ({"gigabytes": None}, 'the part "gigabytes" did not run; run make test-gpu ARGS="--only gigabytes"'),
        ({"contract": {"status": 2}}, 'pytest ended with status 2 after 6 tests of "contract" on a GPU'),
        ({"gigabytes": {"failed": 1}}, '1 tests of "gigabytes" failed on a GPU'),
        ({"contract": {"options": ["-n", "4", "-k", "bias"]}}, '"contract" ran with -k bias, so perhaps not whole'),
        ({"gigabytes": {"passed": 0}}, '0 tests of "gigabytes" failed on a GPU'),
    ],
)
def test_what_a_record_lacks(changed, says, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record, "digest", lambda part: "these")
    monkeypatch.setattr(record, "RECORD", tmp_path / "record.json")
    for name in record.PARTS:
        if (how := changed.get(name, {})) is not None:
            record.add_part(name, PART | how, how.get("digest", "these"), record.RECORD)
    assert record.check() == 1
    assert says in capsys.readouterr().out


def test_parts_join_each_with_its_digest(tmp_path):
    file = tmp_path / "record.json"
    record.add_part("contract", PART, "these", file)
    record.add_random(FOUND, "those", file)
    record.add_part("gigabytes", PART, "others", file)
    parts = {"contract": PART | {"digest": "these"}, "gigabytes": PART | {"digest": "others"}}
    assert json.loads(file.read_text()) == {"parts": parts, "random": FOUND | {"digest": "those"}}
    record.add_part("gigabytes", PART | {"passed": 6}, "newer", file)
    parts["gigabytes"] = PART | {"passed": 6, "digest": "newer"}
    assert json.loads(file.read_text())["parts"] == parts


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_recorded(capsys):
    assert record.main(["--only", "gigabytes"]) == record.main(["-q"]) == 2
    assert record.main(["--only", "all"]) == record.main(["--only"]) == 2
    assert "--only: all; accepted are contract, extensions, engines, ranks, gigabytes" in capsys.readouterr().err


def test_every_file_that_may_decide_a_result_is_a_source_or_left_out_by_name():
    listed = subprocess.run(["git", "ls-files", "-z", *record.ROOTS], cwd=record.ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git checkout")
    tracked = {record.ROOT / name for name in filter(None, listed.stdout.split("\0"))}
    assert len(tracked) > 300
    sources = record.matched(record.SOURCES)
    assert not sorted(tracked - sources - record.matched(record.EXCLUDED))
    for pattern in (*record.SOURCES, *record.EXCLUDED):
        assert record.matched([pattern]) & tracked, f"{pattern} matches nothing"


@pytest.mark.parametrize(
    "name",
    [
        *("include/strobe/strobe.h", "kernels/attention/score.h", "kernels/sm90/forward/config.h", "python/glue/eager.c"),
        *("python/glue/declarations.py", "python/strobe/_call.py", "python/strobe/compat/_kvcache.py", "src/abi.cpp"),
        *("python/strobe/compat/flash_attn/layers/rotary.py", "src/cuda/program/tiles.h", "src/ladder/subset.cpp"),
        *("src/reference/reference.cpp", "tests/python/check.py", "tests/python/test_contract.py"),
    ],
)
def test_sources(name):
    file = record.ROOT / name
    assert file in record.matched(record.SOURCES)
    left_out = {"tests/python/test_contract.py": "tests/python/test_*.py"}  # test_contract.py matches EXCLUDED, but is a source
    assert (file in record.matched(record.EXCLUDED)) == (name in left_out)


def test_an_edited_test_leaves_random_calls_of_today(tmp_path, monkeypatch):
    others = ("python/strobe/distributed/_gather.py", "python/strobe/compat/flash_attn/__init__.py", "python/strobe_tools/train/data.py")
    for name in ("tests/gpu/test_runtime.py", "tests/python/test_parts.py", "tests/python/check.py", "tests/gpu/record.py", *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "__file__", str(tmp_path / "tests/gpu/record.py"))

    of = [None, *record.PARTS]  # random calls, and each part

    def changed_by(name):
        before = [record.digest(part) for part in of]
        (tmp_path / name).write_text("after")
        return {part for part, then in zip(of, before, strict=True) if record.digest(part) != then}

    assert changed_by("tests/gpu/test_runtime.py") == {"engines", "ranks", "gigabytes"}
    assert changed_by("tests/python/test_parts.py") == {"extensions", "gigabytes"}
    assert changed_by("tests/gpu/record.py") == set()
    assert changed_by("tests/python/check.py") == set(of)
    assert [changed_by(name) for name in others] == [{*record.PARTS}] * 3


def test_no_test_of_the_record_imports_another():
    """A part's digest has only the part's own tests, so code that several tests share is in helpers."""
    for file in record.matched(record.TESTS):
        imported = {line.split()[1] for line in file.read_text().splitlines() if line.startswith(("import ", "from "))}
        assert not {name for name in imported if name.startswith("test_")}, file


def test_a_random_call_runs_nothing_of_what_its_count_does_not_speak_of():
    words = "import sys, random_call; random_call.faults(random_call.drawn(5), [None]); print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", words], cwd=record.ROOT / "tests" / "python", capture_output=True, text=True, check=True)
    assert not {name for name in ran.stdout.split() if name.startswith(("strobe.distributed", "strobe.compat", "strobe_tools"))}


class Told:
    """A worker that has sent these messages. If the last one is None, the worker has ended; otherwise it hangs."""

    def __init__(self, *events):
        self._events = list(events)

    def next_event(self, seconds):
        if not self._events:
            raise Empty
        return self._events.pop(0)

    def status(self):
        return -11


JUDGED = {"number": 16, "runs": ["default"], "faults": [], "replay": "", "call": ""}


@pytest.mark.parametrize(
    ("worker", "goes_on", "counts", "says"),
    [
        (Told({"begins": 16}, JUDGED, {"begins": 17}, JUDGED, {"end": 1}), True, (2, 1, 0), ""),
        (Told({"begins": 16}, JUDGED | {"faults": ["out is wrong"]}, {"end": 1}), True, (1, 1, 1), "out is wrong"),
        (Told({"begins": 16}, JUDGED, {"begins": 17}, None), False, (2, 0, 1), "random_call.py 17 --gpu"),  # the worker crashed
        (Told({"begins": 16}), False, (1, 0, 1), "no answer for 5 s"),
        (Told({"begins": 16}, JUDGED, None), False, (1, 0, 0), ""),  # the worker ended between two calls
        (Told({"begins": 16}, {"left_out": 16}, {"end": 1}), True, (0, 1, 0), ""),
    ],
)
def test_a_call_that_ends_its_process_is_wrong(worker, goes_on, counts, says, capsys):
    tally = random_calls.Tally()
    assert random_calls.follow(worker, 1, tally, 5, time.monotonic() + 60) == goes_on
    assert (tally.calls, tally.option_sets, tally.wrong) == counts
    assert says in capsys.readouterr().out


def test_what_is_under_way_at_the_end_counts_as_nothing():
    tally = random_calls.Tally()
    assert not random_calls.follow(Told({"begins": 16}), 1, tally, 5, time.monotonic())
    assert tally.calls == 0
