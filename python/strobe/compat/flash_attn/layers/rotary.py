"""flash_attn.layers.rotary: only its function apply_rotary_emb."""

from strobe.compat._rotary import apply_rotary_emb as apply_rotary_emb
from strobe.compat.flash_attn._alias import stands_for

__all__ = ["apply_rotary_emb"]

stands_for(__name__, "strobe.compat.flash_attn.layers.rotary")
