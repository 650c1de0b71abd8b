"""Cases of the contract whose lengths, head dimensions and heads hypothesis draws."""

from __future__ import annotations

from hypothesis import strategies as st

from cases import FACTORS
from device import ON_GPU

LENGTH = st.one_of(
    st.integers(0, 20), st.integers(0, 300), st.sampled_from([15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257])
)
WIDTH = st.one_of(st.integers(1, 256), st.sampled_from([8, 16, 32, 64, 80, 96, 128]))


def one_of(name: str):
    return st.sampled_from(FACTORS[name])


@st.composite
def cases(draw):
    """Draws a case like a row of the all-pairs table, with lengths, head dimensions and heads from far wider ranges."""
    group, kv = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    case = {name: draw(one_of(name)) for name in FACTORS}
    case |= {
        "lengths": (draw(LENGTH), draw(LENGTH)),
        "dims": (draw(WIDTH), draw(WIDTH)),
        "heads": (group * kv, kv),
        "batch": draw(st.integers(0, 3)),
    }
    case["values"] = draw(st.sampled_from(["normal", "mean 1"]))
    if case["varlen"]:
        case["lengths"] = tuple(max(1, n) for n in case["lengths"])
    if case["varlen"] and case["storage"] in ("bshd", "expanded batch"):
        case["storage"] = "bhsd"
    if case["storage"] == "reversed" and (case["dtype"] == "bfloat16" or case["dout"] == "expanded"):
        case["storage"] = "sliced"
    if case["bias"] is None or case["bias kind"] is None:
        case["bias"] = case["bias kind"] = None
    if ON_GPU:
        case["part"] = None
    if case["part"]:
        case |= {"used": None, "aux": (), "page": None, "flag": None if case["flag"] == "invariant" else case["flag"]}
    # A quarter of the calls have quantised keys, which have no gradients.
    if case["part"] or case["dtype"] == "float64" or draw(st.integers(0, 3)):
        case["quant"] = None
    if case["quant"] and case["quant"].stored == "int4":
        case["dims"] = tuple(d + d % 2 for d in case["dims"])
    if case["quant"] and case["quant"].stored in ("float8", "e5m2") and case["storage"] == "reversed":
        case["storage"] = "sliced"
    if case["quant"] and case["quant"].queries and case["dtype"] == "float32":
        case["dtype"] = "bfloat16"
    if case["score"] != "dot":
        case["softcap"] = FACTORS["softcap"][0]  # no softcap, because the two exclude each other
    if case["bias kind"] == "float32" and case["dtype"] == "float64":
        case["bias kind"] = "gradient"
    return case
