"""python/glue/eager.c"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

class RefusedError(Exception):
    """The call has to be made in full."""

class PreparedCall:
    """A call in one direction, without its addresses: see _prepared.py."""

    def __new__(
        cls,
        owner: object,
        address: int,
        fields: bytes,
        made: tuple[tuple[Any, ...], ...],
        device: object,
        workspace_bytes: int,
        threads: int,
        form: bytes | None,
        function: Callable[..., Any] | None,
        more: object,
        attention: int,
        forms: bytes,
        likes: bytes,
        direction: int,
        reserved_sms: int,
    ) -> PreparedCall: ...
    def run(self, *arrays: Tensor) -> Any: ...
    @property
    def more(self) -> Any: ...

# The bytes that determine what runs; None if the call cannot be remembered. prefix: says what the tensors are.
def key(prefix: bytes, tensors: tuple[Tensor, ...], arrays: Mapping[str, Any], options: Mapping[str, Any]) -> bytes | None: ...
def attention_key(q: Tensor, k: Tensor, v: Tensor, return_lse: object, options: Mapping[str, Any]) -> bytes | None: ...

# The same without shapes, strides and alignment, for calls whose options have no tensors.
def attention_kind(q: Tensor, k: Tensor, v: Tensor, return_lse: object, options: Mapping[str, Any]) -> bytes | None: ...
def gradients_key(
    prefix: bytes, needed: tuple[bool, ...], dout: Tensor, dlse: Tensor | None, saved: tuple[Tensor, ...]
) -> bytes | None: ...

# The same without sizes.
def gradients_kind(
    prefix: bytes, needed: tuple[bool, ...], dout: Tensor, dlse: Tensor | None, saved: tuple[Tensor, ...]
) -> bytes | None: ...

# Runs the PreparedCall that the memory has for this call's key; attention() and gradients() also prepare one, if the memory has one of its
# kind. None if there is none, or if the library refuses the call.
def run(memory: Any, prefix: bytes, tensors: tuple[Tensor, ...], arrays: Mapping[str, Any], options: Mapping[str, Any]) -> Any: ...
def attention(memory: Any, q: Tensor, k: Tensor, v: Tensor, return_lse: object, options: Mapping[str, Any]) -> Any: ...
def gradients(
    memory: Any,
    prefix: bytes,
    needed: tuple[bool, ...],
    dout: Tensor,
    dlse: Tensor | None,
    saved: tuple[Tensor, ...],
) -> Any: ...

HAS_SHIM: bool  # PyTorch's C shim was found, and agrees with PyTorch

# Whether the storage of a plain tensor reaches to its last number. False also if that cannot be determined.
def is_whole(x: Tensor) -> bool: ...
def connect(*addresses: int) -> None: ...
def by_attributes(wanted: bool) -> bool: ...
