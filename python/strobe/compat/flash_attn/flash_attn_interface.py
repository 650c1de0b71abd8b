"""flash_attn.flash_attn_interface: the functions that strobe.compat.flash_attn exports, and forward and backward without autograd."""

from strobe.compat._flash_forms import *  # noqa: F403
from strobe.compat._flash_forms import __all__ as __all__
from strobe.compat._flash_passes import _flash_attn_backward as _flash_attn_backward
from strobe.compat._flash_passes import _flash_attn_forward as _flash_attn_forward
from strobe.compat._flash_passes import _flash_attn_varlen_backward as _flash_attn_varlen_backward
from strobe.compat._flash_passes import _flash_attn_varlen_forward as _flash_attn_varlen_forward
from strobe.compat.flash_attn._alias import stands_for

stands_for(__name__, "strobe.compat.flash_attn.flash_attn_interface")
