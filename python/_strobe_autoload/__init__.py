"""What PyTorch calls as the last thing of its import, in every process: this stays outside of strobe, so as not to import it."""

import sys


def register() -> None:
    """Registers the operators torch.ops.strobe.* where strobe was imported before torch."""
    if "strobe._core" in sys.modules:  # and not a file of that name
        import strobe._fast_path  # noqa: F401
