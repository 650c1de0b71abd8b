"""flash_attn.layers.rotary: of its functions, apply_rotary_emb."""

from strobe.compat._rotary import apply_rotary_emb as apply_rotary_emb

__all__ = ["apply_rotary_emb"]
