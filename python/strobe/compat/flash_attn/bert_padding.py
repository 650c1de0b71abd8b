"""flash_attn.bert_padding turns padded batches (B, S, ...) into packed tokens (T, ...), and back."""

from strobe.compat._padding import *  # noqa: F403
from strobe.compat._padding import __all__ as __all__
from strobe.compat.flash_attn._alias import stands_for

stands_for(__name__, "strobe.compat.flash_attn.bert_padding")
