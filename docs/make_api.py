"""Prints docs/api.md: the public functions and classes with their signatures and docstrings. `make api` writes the page.

Usage: docs/make_api.py
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

# In the order of the page. A module's docstring opens its section, but for strobe's own, which the README says.
MODULES = (
    "strobe",
    "strobe.nn",
    "strobe.distributed",
    "strobe.kv",
    "strobe.hyperbolic",
    "strobe.compat.flash_attn",
    "strobe.compat.flash_attn.bert_padding",
    "strobe.compat.flash_attn_3",
    "strobe.compat.flash_mla",
    "strobe.compat.sdpa",
    "strobe.compat.varlen",
    "strobe.compat.flex_attention",
    "strobe.compat.transformers",
    "strobe.compat.learned_scale",
    "strobe.compat.block_sizes",
    "strobe.compat.ladder",
    "strobe.compat.functional",
)
INTRODUCTION = """\
# API

Every public function and class of the Python package, but those for JAX: [jax.md](jax.md) and `help(strobe.jax)` describe
`strobe.jax.attention` and `strobe.jax.nn.dot_product_attention`. `make api` writes this page from the docstrings, so do not edit it by
hand.
[reference.md](reference.md) explains the options of `strobe.attention`, the engines and the limits; [semantics.md](semantics.md) has the
formulas. [strobe.h](../include/strobe/strobe.h) and [strobe.hpp](../include/strobe/strobe.hpp) document the C and C++ interfaces."""
WIDTH = 140


def public(module: ModuleType) -> list[tuple[str, Any]]:
    """What a module offers: its __all__ and names that it loads late, else the functions and classes that it defines."""
    names = [*getattr(module, "__all__", ()), *getattr(module, "_LATE_NAMES", ())]
    if not hasattr(module, "__all__"):
        names = [name for name, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__]
    found = [(name, getattr(module, name)) for name in sorted(names, key=str.lower) if not name.startswith("_")]
    return [(name, x) for name, x in found if inspect.isroutine(x) or inspect.isclass(x)]


def signature(name: str, x: Any) -> str:
    """A call with its arguments and their defaults, broken at the page's width."""
    parameters = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in inspect.signature(x).parameters.values()]
    if parameters and parameters[0].name in ("self", "cls"):
        del parameters[0]
    call = re.sub(r"<function (\w+) at 0x\w+>", r"\1", f"{name}{inspect.Signature(parameters)}")
    return "\n".join(textwrap.wrap(call, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False))


def escaped(text: str) -> str:
    """Plain text, of which Markdown makes nothing else."""
    return re.sub(r"([*|\\])", r"\\\1", text)


def paragraphs(text: str) -> Iterator[str]:
    """Markdown of a docstring: its sections (Args, Returns, ...) have their entries as lists, and examples are code."""
    for block in re.split(r"\n\s*\n", text):
        title = re.match(r"(Args|Shape|Returns|Raises|Example):\n", block)
        if title:
            yield f"**{title[1]}**"
            block = textwrap.dedent(block[title.end() :])
        if re.match(r"\s*>>> ", block):
            code = re.sub(r"^(>>> |\.\.\. )", "", textwrap.dedent(block), flags=re.MULTILINE)
            yield f"```text\n{code.rstrip()}\n```"
        elif title and title[1] in ("Args", "Raises"):
            entries = re.split(r"\n(?=\S)", block)
            yield "\n".join(entry(x) for x in entries)
        else:
            yield "\n".join(filled(x) for x in re.split(r"\n(?=- )", block))


def entry(text: str) -> str:
    """`name: meaning` as an item of a list."""
    found = re.fullmatch(r"(\w+(?:, \w+)*): (.*)", " ".join(text.split()))
    if not found:
        return filled(text, "- ")
    names = ", ".join(f"`{name}`" for name in found[1].split(", "))
    return filled(f"{names}: {escaped(found[2])}", "- ", raw=True)


def filled(text: str, bullet: str = "", raw: bool = False) -> str:
    text = " ".join(text.split())
    if text.startswith("- "):
        bullet, text = "- ", text[2:]
    wrapped = textwrap.wrap(text if raw else escaped(text), WIDTH - len(bullet), break_long_words=False, break_on_hyphens=False)
    return textwrap.indent("\n".join(wrapped), " " * len(bullet)).replace(" " * len(bullet), bullet, 1) if bullet else "\n".join(wrapped)


def described(title: str, name: str, x: Any) -> Iterator[str]:
    yield title
    yield f"```text\n{signature(name, x)}\n```"
    yield from paragraphs(inspect.getdoc(x) or "")


def members(name: str, x: type) -> Iterator[str]:
    """The documented methods and properties of a class, in the order in which it defines them."""
    for member, value in vars(x).items():
        function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if member.startswith("_") or not function.__doc__ or not (callable(function) or isinstance(value, property)):
            continue
        if isinstance(value, property):
            yield f"#### {name}.{member}"
            yield from paragraphs(inspect.getdoc(value) or "")
        else:
            yield from described(f"#### {name}.{member}", f"{name}.{member}", function)


def page() -> str:
    parts = [INTRODUCTION]
    shown: set[int] = set()
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        parts.append(f"## {module_name}")
        if module_name != "strobe":
            parts += paragraphs(inspect.getdoc(module) or "")
        for name, x in public(module):
            if id(x) in shown:
                continue
            shown.add(id(x))
            full = f"{module_name}.{name}"
            parts += described(f"### {full}", full, x)
            if inspect.isclass(x):
                parts += members(name, x)
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(page())
