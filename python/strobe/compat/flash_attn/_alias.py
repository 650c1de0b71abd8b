"""One module under two names, if sys.modules has strobe.compat.flash_attn as flash_attn."""

import sys
from importlib import import_module


def stands_for(name: str, own: str) -> None:
    """Called by the module `own`, which has just been created again as `name`: an import of `name` then gives the existing module."""
    if name != own:
        sys.modules[name] = import_module(own)
