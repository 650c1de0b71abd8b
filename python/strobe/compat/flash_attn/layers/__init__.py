"""flash_attn.layers: only its module rotary."""

from strobe.compat._words import stands_for

stands_for(__name__, "strobe.compat.flash_attn.layers")
