"""``strobe info``: the version, the machine, and which engines run here."""

from __future__ import annotations

import importlib.util

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import strobe
from strobe._abi import told
from strobe._core import lib
from strobe_tools import machine


def _torch() -> str:
    if importlib.util.find_spec("torch") is None:
        return "not installed"
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{torch.__version__}, {torch.get_num_threads()} threads, {', '.join(gpus) or 'no GPU'}"


def _numpy() -> str:
    if importlib.util.find_spec("numpy") is None:
        return "not installed"
    import numpy

    return numpy.__version__


def kernel_cache() -> str:
    """The folders of the kernel cache, and those that are not used, with the reason."""
    return _known_of_cuda("cache: ")


def compiled_for() -> list[int]:
    """The compute capabilities, times ten, that an NVRTC of this machine compiles for; empty where there is none."""
    return [int(cc) for cc in _known_of_cuda("compiles for: ").split(", ") if cc.isdecimal()]


def _compilers() -> str:
    """The NVRTC that is found for each kind of GPU here, or where it was looked for."""
    about = told(lib.strobe_cuda_info)
    return about[about.index("NVRTC: ") : about.index("compiles for: ")].replace("NVRTC: ", "").rstrip()


def _known_of_cuda(begin: str) -> str:
    return next(line.removeprefix(begin) for line in told(lib.strobe_cuda_info).splitlines() if line.startswith(begin))


@click.command(short_help="Version, machine, engines.")
def command() -> None:
    """Version, machine, and the engines: which run here, and why not the others."""
    console = Console()
    facts = Table(show_header=False, box=None)
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")  # long paths are folded, not cut off
    found = {"Strobe": strobe.__version__, **machine.describe(), "PyTorch": _torch(), "NumPy": _numpy()}
    found |= {"NVRTC": _compilers(), "Kernel cache": kernel_cache()}
    for name, fact in found.items():
        facts.add_row(name, escape(fact))
    console.print(facts)
    engines = Table(title="Engines", title_justify="left")
    engines.add_column("engine")
    engines.add_column("runs here")
    for name, missing in strobe.engines():
        engines.add_row(name, "[green]yes[/green]" if missing is None else f"no: {missing}")
    console.print(engines)
