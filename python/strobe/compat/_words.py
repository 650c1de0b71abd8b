"""Refusals in the words of the signature that was called."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Each line of a refusal begins with the name of an argument of strobe.attention(); `names` says what the caller calls it."""
    try:
        yield
    except (TypeError, ValueError) as refusal:
        renamed = re.sub(r"^(\w+)(?=:)", lambda found: names.get(found[1], found[1]), str(refusal), flags=re.MULTILINE)
        raise type(refusal)(renamed) from None
