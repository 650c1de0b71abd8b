"""Forms of the Hopper backward on the emulated GPU: blocks that own dQ and sum it in shared memory, persistent blocks with two stages of
keys (with options in line or not), and K and V in registers. With each option of a form, and with products that end as late as the waits
permit, nothing races and the gradients are right. `make test` runs a few of these calls, `make test-long` all (mark: long)."""

from __future__ import annotations

import pytest

from emulated import ROOT, output

# Each argument is a call, `FORM: OPTION; SIZE N; …`, e.g. `line: causal; sq 640; d 48`; sizes not named keep their defaults.
PROGRAM = """
import hashlib, sys
import torch, strobe
from cases import call
from check import Yardstick, run
from device import running_on

FORMS = {"dQ": "with dQ in shared memory", "line": "with two stages of keys in line", "stages": "with two stages of keys"}
FORMS |= {"keys": "K and V in registers", "values": ", V in registers"}

def lengths(*each):
    return torch.tensor((0, *each), dtype=torch.int32).cumsum(0, dtype=torch.int32)

def options(name, b, h, sq, sk):
    random = {"dropout": 0.2, "seed": 5, "offset": 7}
    slopes = {"alibi_slopes": torch.tensor([0.5, 0.1, 0.02, 0.3])}
    mask, bias = {"mask": torch.rand(b, 1, sq, sk) < 0.7}, {"bias": torch.randn(1, h, sq, sk).bfloat16()}
    kept = torch.rand(b, h, -(-sq // 128), -(-sk // 128)) < 0.6
    kept[:, :, :, 0] = True
    packed = {"cu_seqlens_q": lengths(130, 0, 70, 1, 40), "cu_seqlens_k": lengths(200, 33, 0, 140, 60)}
    return {
        "plain": {}, "causal": {"causal": True}, "top left": {"causal": True, "alignment": "top_left"}, "window": {"window": (50, 20)},
        "wide window": {"window": (300, 60)},
        "negative scale": {"scale": -0.3}, "softcap": {"softcap": 3.0, "causal": True}, "ALiBi": slopes | {"causal": True},
        "dropout": random, "mask": mask, "bias": bias, "float32 bias": {"bias": bias["bias"].float()},
        "softcap, bias": {"softcap": 3.0, "causal": True} | bias, "sinks": {"sinks": torch.tensor([0.0, 1.0, -2.0, 3.0]), "causal": True},
        "mask, dropout": mask | random, "softcap, ALiBi, dropout": {"softcap": 3.0} | slopes | random,
        "seqused": {"seqused_k": torch.tensor([sk, 0, 131], dtype=torch.int32), "causal": True},
        "packed": packed | {"max_seqlen_q": 130, "max_seqlen_k": 200},
        "causal, blocks": {"block_mask": strobe.BlockMask.from_kept(kept, 128, 128, sq, sk), "causal": True},
        "deterministic": {}, "invariant": {},
    }[name]

def make(name):
    option, *words = name.split(": ")[1].split("; ")
    sizes = {"b": 3, "h": 4, "hkv": 2, "sq": 130, "sk": 200, "d": 64, "shares": 1, "hidden": 0}
    for word in words:
        key, value = word.split()
        sizes[key] = int(value)
    shares, hidden = sizes.pop("shares"), sizes.pop("hidden")
    given = options(option, *(sizes[x] for x in ("b", "h", "sq", "sk")))
    if option == "packed":
        sizes |= {"sq": 241, "sk": 433}
    gradients = tuple(x for x in ("bias", "sinks") if x in given)
    how = {flag: True for flag in ("deterministic", "invariant") if option == flag}
    return call(dtype=torch.bfloat16, gradients=gradients, **sizes, **given), how | {"tile_k": 128}, shares, hidden

for name in sys.argv[1:]:
    torch.manual_seed(0)
    inputs, how, shares, hidden = make(name)
    with running_on("cuda-sm90"):
        text = strobe.explain(inputs.q, inputs.k, inputs.v, backward=True, engine="cuda-sm90", **inputs.options, **how)
    kernel = [line for line in text.splitlines() if " wgmma, " in line][-1]
    form = next((form for form, words in FORMS.items() if words in kernel), "")
    assert form == name.split(":")[0], (name, kernel)
    assert f"in {shares} shares" in kernel or (shares == 1 and "shares" not in kernel), (name, kernel)
    results = run(inputs, "cuda-sm90", **how)
    faults = Yardstick(inputs).faults(results)
    assert not faults, (name, faults)
    if hidden:  # keys that no query sees, which may be NaN
        sq = inputs.q.shape[2]
        for x in (inputs.k, inputs.v):
            x[:, :, sq:] = float("nan")
        again = run(inputs, "cuda-sm90", **how)
        assert not again["dq"].isnan().any(), name
        assert all(torch.equal(again[x][:, :, :sq], results[x][:, :, :sq]) for x in ("dk", "dv")), name
    print(name, *(hashlib.sha256(results[x].view(torch.int16).numpy().tobytes()).hexdigest() for x in ("dq", "dk", "dv")), sep="|")
"""
SMS = "2"  # so that a block takes several tiles of keys, and several pairs of batch and key head


def run(form: str, calls: list[str], **emulator: str) -> str:
    return run_all([f"{form}: {call}" for call in calls], **emulator)


def run_all(calls: list[str], **emulator: str) -> str:
    found = output(PROGRAM, *calls, **{"SMS": SMS} | emulator)
    assert [line.split("|")[0] for line in found.splitlines()] == calls
    return found


LAST_HIDDEN = "top left; sq 520; sk 600; b 1; h 1; hkv 1; hidden 1"


def test_each_form():
    calls = ["dQ: causal", "stages: top left; hidden 1", "line: " + LAST_HIDDEN, "keys: causal; d 96"]
    calls.append("line: plain; sq 256; sk 260; b 1; h 2; hkv 2; d 128")
    run_all(calls, LATE="1", SEED="1", RACES="1")


OWNED = {
    "shapes": [
        *("plain", "plain; sq 512; sk 130; b 1; hkv 4", "causal; sq 300; sk 333; d 24; b 1", "plain; d 40; hkv 4"),
        *("deterministic", "negative scale; sq 1; sk 129", "causal; sq 140; sk 140; dv 88"),
    ],
    "options": ["softcap", "ALiBi", "dropout", "mask", "bias", "float32 bias", "sinks", "mask, dropout", "softcap, ALiBi, dropout"],
}


@pytest.mark.long
@pytest.mark.parametrize("calls", OWNED.values(), ids=OWNED)
def test_a_block_sums_dq_in_shared_memory(calls):
    """dQ is summed in one order: the bits are the same whenever products end."""
    assert run("dQ", calls, LATE="1", SEED="1", RACES="1") == run("dQ", calls, LATE="0")


SHORTEST = "seqused; sq 100; sk 384; hkv 4"  # one tile of queries for each tile of keys: producers are two tiles of keys ahead
LONGER = "sq 260; sk 140; b 1"  # dQ does not fit shared memory
STAGED = {
    "shapes": [
        *("top left; d 24; sk 333", "causal; sq 333; sk 333; d 32; b 1", "seqused", SHORTEST, "packed", "packed; d 40", "window"),
        *("window; d 40; sq 333", "plain; " + LONGER),
    ],
    "options": [
        f"{option}; {LONGER}"
        for option in (
            *("causal", "negative scale", "softcap", "ALiBi", "dropout", "mask", "bias", "float32 bias", "sinks", "mask, dropout"),
            *("softcap, ALiBi, dropout", "causal, blocks"),
        )
    ],
}


@pytest.mark.long
@pytest.mark.parametrize("calls", STAGED.values(), ids=STAGED)
def test_persistent_blocks_with_two_stages_of_keys(calls):
    run("stages", calls, LATE="1", SEED="1", RACES="1")


IN_LINE = [
    *("plain; sq 520; sk 140; b 1; hkv 4", "plain; sq 400; sk 260; b 1; h 3; hkv 3; d 32"),
    "causal; sq 640; sk 520; b 1; h 2; hkv 2",
    "wide window; sq 520; sk 520; b 1; h 2; hkv 2; d 40; dv 64",
    "top left; sq 900; sk 1100; b 1; h 1; hkv 1; d 48",  # no query sees the last keys
]
WIDE_IN_LINE = [
    *(
        "plain; sq 256; sk 260; b 1; hkv 4; d 128",
        "causal; sq 400; sk 400; b 1; h 2; hkv 2; d 128",
        "causal; sq 384; sk 384; b 1; h 2; hkv 2; d 120; dv 72",
    ),
    *("top left; sq 700; sk 800; b 1; h 1; hkv 1; d 112; hidden 1", "wide window; sq 400; sk 400; b 1; h 2; hkv 2; d 96"),
    "causal; sq 390; sk 390; b 1; h 2; hkv 2; d 72; dv 104",
]


@pytest.mark.long
def test_tiles_of_keys_come_in_line():
    run("line", IN_LINE, LATE="1", SEED="1", RACES="1")


@pytest.mark.long
def test_wide_tiles_of_keys_come_in_line():
    """The same with K and V, or V alone, in registers; dQ is computed by columns."""
    run("line", WIDE_IN_LINE, LATE="1", SEED="1", RACES="1")


@pytest.mark.long
def test_two_stages_of_keys_of_shares():
    """Blocks take shares of a key head's query heads, so that there are enough blocks for five SMs."""
    calls = ["causal; b 1; hkv 1; sq 207; sk 260; shares 2", "causal; b 1; hkv 1; sq 270; sk 263; shares 2"]
    run("stages", calls, SMS="5", LATE="1", SEED="1", RACES="1")


IN_REGISTERS = {
    "keys": [
        *("plain; b 1; hkv 1; sq 300; sk 100; d 72; shares 2", "plain; d 72", "causal; d 88", "top left; d 96; dv 40; sq 70"),
        *("seqused; d 80", "window; d 96", "sinks; d 72"),
    ],
    "values": [
        *("causal; b 1; h 8; hkv 1; sq 300; sk 100; d 112; shares 2", "causal; d 104", "packed; d 96"),
        "top left; d 112; dv 96; sq 64; sk 333",
    ],
}


@pytest.mark.long
@pytest.mark.parametrize("form", IN_REGISTERS)
def test_keys_in_registers(form):
    run(form, IN_REGISTERS[form], LATE="1", SEED="1", RACES="1")


OTHERS = [
    *("deterministic; d 96", "invariant; d 80", "mask; d 96", "dropout; d 112", "ALiBi; d 72", "softcap; d 96", "bias; d 96"),
    *("plain; d 112", "plain; d 128", "softcap, bias; " + LONGER),
]


@pytest.mark.long
def test_what_takes_none_of_these_forms():
    run("", OTHERS, LATE="1", SEED="1", RACES="1")


@pytest.mark.parametrize(("form", "call"), [("stages", SHORTEST), pytest.param("line", LAST_HIDDEN, marks=pytest.mark.long)])
def test_keys_that_come_before_the_last_ones_are_read_are_a_race(form, call, tmp_path):
    """Shows that the tests above can fail: without the wait for the stage that is being read, two stages of keys are a race."""
    line = "        mbarrier_wait(next.keys_empty(), parity_before_next_keys<C>(n));"
    assert line in (ROOT / "kernels" / "sm90" / "backward" / "load.h").read_text()
    edit = tmp_path / "early_keys.edit"
    edit.write_text(f"sm90/backward/load.h\nThe next keys come at once.\n-{line}\n+        __syncwarp();\n")
    with pytest.raises(AssertionError, match="nothing orders them"):
        output(PROGRAM, f"{form}: {call}", SMS=SMS, LATE="1", RACES="1", EDIT=str(edit))
