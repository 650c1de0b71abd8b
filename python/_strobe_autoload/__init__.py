"""PyTorch calls this module at the end of its import, in every process: it stays outside of strobe, so as not to import it."""

import sys


def register() -> None:
    """Registers the operators torch.ops.strobe.* where strobe was imported before torch."""
    if "strobe._core" in sys.modules:  # a file of that name does not count
        import strobe._autograd  # noqa: F401
