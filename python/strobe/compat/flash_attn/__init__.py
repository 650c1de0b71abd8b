"""The functions of the flash-attn package (Dao-AILab, 2.8). They can be imported in its place:

>>> from strobe.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
>>> from strobe.compat.flash_attn.bert_padding import pad_input, unpad_input

They can also take its name, for code that imports flash-attn itself:

>>> import sys
>>> import strobe.compat.flash_attn
>>> sys.modules["flash_attn"] = strobe.compat.flash_attn
>>> from flash_attn.flash_attn_interface import flash_attn_func

Arguments, their order and their layouts are those of that package: (B, S, H, D), packed tokens (T, H, D), window_size with -1 for no bound,
causal and windows aligned at the bottom right, alibi_slopes (H,) or (B, H), heads of K and V that divide those of Q. docs/compat.md lists
what differs: softmax_lse of a query that sees no key is -inf, the probabilities are never made, any head dimension from 1 to 576 works.
"""

# Under another name the modules of this folder are created a second time, and the first ones stand for these: so they use absolute imports.
from strobe.compat.flash_attn import bert_padding as bert_padding
from strobe.compat.flash_attn import flash_attn_interface as flash_attn_interface
from strobe.compat.flash_attn.flash_attn_interface import *  # noqa: F403
from strobe.compat.flash_attn.flash_attn_interface import __all__ as __all__

__version__ = "2.8.3"  # of the flash-attn with these signatures: callers read it to know which arguments exist
