"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Replaces ``path`` by the bytes written to the yielded file when the block ends; they are on the disk by then.

    If that fails, as on a full disk, the old file stays and nothing else is left.
    """
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    file = open(part, "xb", opener=lambda name, flags: os.open(name, flags, 0o644))  # noqa: SIM115 - closed before it is renamed
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
