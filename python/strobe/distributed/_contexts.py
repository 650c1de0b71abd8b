"""The contexts of context_parallel() that the process is in."""

from __future__ import annotations

from typing import NamedTuple

from torch.distributed import ProcessGroup

from .. import _run
from ._layout import Layout


class Context(NamedTuple):
    """What attention() takes where no layout is given."""

    layout: Layout
    group: ProcessGroup
    method: str | None


# The innermost is last. All of the process sees them, its backward threads too, as PyTorch's replaced functions are seen.
CONTEXTS: list[Context] = _run.CONTEXTS
