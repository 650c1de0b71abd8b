"""A description of this machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith(("model name", "Hardware")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe() -> dict[str, str]:
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "CPU": f"{cpu_name()}, {usable_cores()} of {os.cpu_count()} cores usable",
        "Python": platform.python_version(),
    }
