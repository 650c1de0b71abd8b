"""The functions of the flash-attn package (Dao-AILab, 2.8). They can be imported in its place:

>>> from strobe.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
>>> from strobe.compat.flash_attn.bert_padding import pad_input, unpad_input

They can also take its name, for code that imports flash-attn itself:

>>> import sys
>>> import strobe.compat.flash_attn
>>> sys.modules["flash_attn"] = strobe.compat.flash_attn
>>> from flash_attn.flash_attn_interface import flash_attn_func

Arguments, their order and their layouts are those of that package: (B, S, H, D), packed tokens (T, H, D), window_size with -1 for no bound,
causal and windows aligned at the bottom right, alibi_slopes (H,) or (B, H), heads of K and V that divide those of Q. These things differ:

- float32 and float64, the CPU, and any head dimension from 1 to 576 (that of v: 512) work as well.
- dropout_p is rounded to steps of 1/256. Its mask is Strobe's own (strobe.dropout_mask), seeded from torch's default generator.
- return_attn_probs=True returns (out, softmax_lse, S_dmask); S_dmask is None without dropout, for the S x S probabilities are made on
  demand alone. softmax_lse is differentiable. That of a query that sees no key is -inf, not +inf.
- block_table (a paged cache) may have pages of any size. There are no gradients.
- num_splits has no effect, because the engine itself decides whether to split the keys of a short query.
- autograd stacks the gradients of the packed forms from those of q, k and v, which is one copy.
"""

# Under another name the modules of this folder are created a second time, and the first ones replace these. So they use absolute imports.
from strobe.compat.flash_attn import bert_padding as bert_padding
from strobe.compat.flash_attn import flash_attn_interface as flash_attn_interface
from strobe.compat.flash_attn.flash_attn_interface import *  # noqa: F403
from strobe.compat.flash_attn.flash_attn_interface import __all__ as __all__

__version__ = "2.8.3"  # of the flash-attn with these signatures: callers read it to know which arguments exist


def __dir__() -> list[str]:
    return [*__all__, "__version__", "bert_padding", "flash_attn_interface"]
