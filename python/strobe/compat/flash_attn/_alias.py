"""One module under two names, where sys.modules has strobe.compat.flash_attn as flash_attn."""

import sys
from importlib import import_module


def stands_for(name: str, own: str) -> None:
    """Called by the module `own`, which has just been made once more, as `name`: whoever imports that gets the one that is there."""
    if name != own:
        sys.modules[name] = import_module(own)
