"""Writes the table of options in docs/reference.md from the one in python/strobe/_options.py. `make api` runs it.

Usage: docs/make_options.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import strobe
from strobe._options import ROWS

REFERENCE = Path(__file__).parent / "reference.md"
BEGIN, END = "<!-- This table is written by `make api` from python/strobe/_options.py. -->\n\n", "\n\n<!-- The table ends here. -->"

# Where the rules of an option stand.
RULES = {
    "causal": "semantics.md#alignment-causal-window",
    "softcap": "semantics.md#mask-bias-alibi-softcap-hyperbolic-scores",
    "score": "hyperbolic.md",
    "mask": "#padding-masks",
    "sinks": "semantics.md#lse-sinks-empty-rows",
    "dropout": "semantics.md#dropout",
    "cu_seqlens_q": "semantics.md#packed-sequences-varlen",
    "seqused_k": "semantics.md#keys-that-count",
    "page_table": "semantics.md#keys-in-pages",
    "k_scale": "semantics.md#quantised-keys-and-values",
    "q_scale": "semantics.md#fp8-queries",
    "block_mask": "semantics.md#block-sparsity",
    "part": "semantics.md#parts-of-a-problem",
    "invariant": "semantics.md#invariant-results",
    "reserved_sms": "#multiprocessors-for-others",
    "aux": "semantics.md#auxiliary-results",
}


def documented() -> Iterator[tuple[list[str], Any, str]]:
    """Names that share one description, their default, and the description. Without words of its own an option has those before it."""
    rows: list[tuple[list[str], Any, str]] = []
    for name, row in ROWS.items():
        if row.doc:
            rows.append(([name], row.default, row.doc))
        else:
            assert row.default == rows[-1][1], name
            rows[-1][0].append(name)
    yield from rows
    parameters = inspect.signature(strobe.attention).parameters
    for name in ("return_lse", "aux"):  # what is returned beside out
        (words,) = re.findall(rf"^ +{name}: (.*?)\n {{4}}\w", inspect.getdoc(strobe.attention) or "", re.MULTILINE | re.DOTALL)
        yield [name], parameters[name].default, " ".join(words.split())


def table() -> str:
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for names, default, words in documented():
        rules = f" ([rules]({RULES[names[0]]}))" if names[0] in RULES else ""
        written = f'"{default}"' if isinstance(default, str) else repr(default)
        escaped = re.sub(r"([*|\\])", r"\\\1", words)
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | `{written}` | {escaped}{rules} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with the table of today."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    assert found, "the page has no place for the table"
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    REFERENCE.write_text(page(REFERENCE.read_text()))
