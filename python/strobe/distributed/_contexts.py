"""The contexts of context_parallel() that the process is in."""

from __future__ import annotations

from typing import NamedTuple

from torch.distributed import ProcessGroup

from .. import _run
from ._layout import Layout


class Context(NamedTuple):
    """The arguments that attention() uses if no layout is given."""

    layout: Layout
    group: ProcessGroup
    method: str | None


# The innermost is last. The whole process sees them, its backward threads included, like PyTorch's replaced functions.
CONTEXTS: list[Context] = _run.CONTEXTS
