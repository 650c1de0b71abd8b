"""flash_attn.bert_padding: from padded batches (B, S, ...) to packed tokens (T, ...) and back."""

from strobe.compat._padding import *  # noqa: F403
from strobe.compat._padding import __all__ as __all__
