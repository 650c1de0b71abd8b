"""PyTorch calls this module at the end of its import, in every process. It is no part of strobe, because
importing torch must not import strobe."""

import sys


def register() -> None:
    """Registers the operators torch.ops.strobe.* if strobe was imported before torch."""
    if "strobe._core" in sys.modules:  # another module named strobe does not count
        import strobe._autograd  # noqa: F401
