"""flash_attn.layers: of its modules, rotary."""
